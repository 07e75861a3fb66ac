"""What a check found, in words, as plain data, as a table and as JUnit XML."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from spec_plugins.errors import ConfigError
from spec_plugins.evaluation.baseline_runs import Checked

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["EXIT_CODES", "as_json", "junit", "notes", "reason", "table", "write_text"]

EXIT_CODES = {"pass": 0, "regressed": 1, "cannot tell": 2}
_VERSIONS = ("torch", "transformers", "processor", "cores", "torch_threads")


def reason(checked: Checked, name: str) -> str:
    """The verdict on one proposer, in a sentence."""
    c, (verdict, p) = checked.comparisons[name], checked.verdicts[name]
    if c.unchanged:
        return f"all {c.requests} requests have the counts that they had: {c.after:.2f} tokens a step"
    low, high = c.interval(1 - 2 * checked.alpha)
    said = (
        f"{c.after:.2f} tokens a step, where it was {c.before:.2f}: a {'loss' if c.loss >= 0 else 'gain'} of "
        f"{abs(c.loss):.1%} (loss from {low:.1%} to {high:.1%})"
    )
    if verdict == "pass":
        return f"{said}, which is within the tolerance of {c.tolerance:.1%}"
    if verdict == "regressed":
        return f"{said}, which is more than the tolerance of {c.tolerance:.1%} (p = {p:.2g})"
    said += (
        f"; {c.requests} requests are too few to tell whether that is more than the {c.tolerance:.1%} "
        "tolerated"
    )
    needed = c.requests_needed(checked.alpha / len(checked.comparisons))
    if needed is None:
        return f"{said}, and as near to that as it seems to be, no number that can be afforded would do"
    return f"{said}; if it is what it seems, {needed - c.requests:,} more would do, {needed:,} in all"


def notes(checked: Checked) -> list[str]:
    """What else is to be known, a sentence each."""
    was, now, n = checked.baseline.provenance, checked.provenance, len(checked.requests.lines)
    changed = checked.changed_responses
    found = [
        f"{changed} of {n} responses are others than the baseline's"
        if changed
        else f"all {n} responses are the baseline's"
    ]
    if checked.same_files:
        found.append("the target's files are the baseline's, byte for byte")
        if changed:
            found.append("that the same target answers otherwise is rounding, on another machine or version")
    if checked.changed_prompts:
        found.append(
            f"{checked.changed_prompts} of {n} prompts are other tokens than before: the tokenizer, the chat "
            "template or the redaction changed"
        )
    pairs = {
        "spec_plugins": (was.spec_plugins, now.spec_plugins),
        checked.baseline.settings.engine: (was.engine_version, now.engine_version),
        **{key: (was.machine.get(key), now.machine.get(key)) for key in _VERSIONS},
    }
    others = [f"{key} {before} → {after}" for key, (before, after) in pairs.items() if before != after]
    if others:
        found.append(f"measured elsewhere than the baseline, which may matter too: {', '.join(others)}")
    return found


def as_json(checked: Checked) -> dict[str, Any]:
    """Everything, as plain data."""
    level = 1 - 2 * checked.alpha
    return {
        "verdict": checked.verdict,
        "exit_code": EXIT_CODES[checked.verdict],
        "alpha": checked.alpha,
        "tolerance": checked.tolerance,
        "proposers": {
            name: {
                "verdict": checked.verdicts[name][0],
                "reason": reason(checked, name),
                "requests": c.requests,
                "tokens_a_step_before": c.before,
                "tokens_a_step": c.after,
                "loss": c.loss,
                "loss_interval": list(c.interval(level)),
                "interval_level": level,
                "p_regressed": c.p_regressed,
                "p_regressed_corrected": checked.verdicts[name][1],
                "p_passed": c.p_passed,
                "requests_needed": c.requests_needed(checked.alpha / len(checked.comparisons))
                if checked.verdicts[name][0] == "cannot tell"
                else None,
                "steps": checked.proposers[name].steps,
                "accepted": checked.proposers[name].accepted,
            }
            for name, c in checked.comparisons.items()
        },
        "responses": len(checked.requests.lines),
        "changed_responses": checked.changed_responses,
        "changed_prompts": checked.changed_prompts,
        "notes": notes(checked),
        "baseline_sha256": checked.baseline.sha256,
        "baseline": checked.baseline.provenance.model_dump(mode="json"),
        "checked": checked.provenance.model_dump(mode="json"),
        "settings": checked.baseline.settings.model_dump(mode="json"),
    }


def table(checked: Checked) -> Table:
    """For a terminal of 80 columns."""
    from rich import box
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD, title="Acceptance after the update, against the baseline")
    shown.add_column("proposer", no_wrap=True)
    for column in (
        "tokens a step\nbefore",
        "now",
        f"loss\n({1 - 2 * checked.alpha:.0%} interval)",
        "requests",
    ):
        shown.add_column(column, justify="right", no_wrap=True)
    shown.add_column("verdict", no_wrap=True)
    colours = {"pass": "green", "regressed": "red", "cannot tell": "yellow"}
    for name, c in checked.comparisons.items():
        verdict, (low, high) = checked.verdicts[name][0], c.interval(1 - 2 * checked.alpha)
        shown.add_row(
            name, f"{c.before:.3f}", f"{c.after:.3f}", f"{c.loss:.1%} ({low:.1%} to {high:.1%})",
            str(c.requests), f"[{colours[verdict]}]{verdict}[/]",
        )  # fmt: skip
    return shown


def junit(checked: Checked) -> str:
    """JUnit XML, a test case a proposer: a regression is a failure, and not being able to tell an error."""
    verdicts: Sequence[str] = [verdict for verdict, _ in checked.verdicts.values()]
    about = {
        "tests": str(len(verdicts)),
        "failures": str(verdicts.count("regressed")),
        "errors": str(verdicts.count("cannot tell")),
    }
    suites = ElementTree.Element("testsuites", about)
    suite = ElementTree.SubElement(suites, "testsuite", {"name": "spec-plugins baseline", **about})
    properties = ElementTree.SubElement(suite, "properties")
    told = {
        "model": checked.provenance.model,
        "model_sha256": checked.provenance.model_sha256,
        "baseline_sha256": checked.baseline.sha256,
        "traffic_sha256": checked.provenance.traffic_sha256,
        "changed_responses": f"{checked.changed_responses} of {len(checked.requests.lines)}",
        "alpha": f"{checked.alpha:g}",
        "tolerance": f"{checked.tolerance:g}",
    }
    for key, value in told.items():
        ElementTree.SubElement(properties, "property", {"name": key, "value": value})
    for name, (verdict, _) in checked.verdicts.items():
        case = ElementTree.SubElement(
            suite, "testcase", {"classname": f"acceptance.{checked.provenance.model}", "name": name}
        )
        said = reason(checked, name)
        if verdict != "pass":
            kind = "failure" if verdict == "regressed" else "error"
            ElementTree.SubElement(case, kind, {"type": verdict, "message": said}).text = said
        ElementTree.SubElement(case, "system-out").text = "\n".join([said, *notes(checked)])
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def write_text(option: str, path: Path, text: str) -> None:
    """Write a file whole; raises :class:`ConfigError`, which names the option."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)
    except OSError as error:
        raise ConfigError(f"{option}: {str(path)!r} cannot be written: {error}") from error
