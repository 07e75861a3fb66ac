"""Measures a target's acceptance for a baseline, and an updated target's against it."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spec_plugins import __version__
from spec_plugins.config import Config
from spec_plugins.errors import ConfigError
from spec_plugins.evaluation.answered import Answer, answer_records
from spec_plugins.evaluation.baseline import (
    Acceptance,
    Baseline,
    Provenance,
    Requests,
    Settings,
    files_digest,
    heads_of,
    placed,
)
from spec_plugins.evaluation.comparison import machine
from spec_plugins.evaluation.gate import REQUESTS_AT_LEAST, Comparison, Verdict, compare, judge, overall
from spec_plugins.evaluation.recorded import bring_together
from spec_plugins.evaluation.replay import EVERYTHING, replay
from spec_plugins.evaluation.replay_target import ReplayTarget
from spec_plugins.launch import installed_version
from spec_plugins.proposer import Need
from spec_plugins.traffic.reading import TrafficFile
from spec_plugins.traffic.record import Record
from spec_plugins.traffic.sampling import sample

__all__ = ["Asker", "Checked", "check", "take"]

Asker = Callable[[Settings], Answer]
"""Makes what answers prompts, with the settings' temperature, length and seed."""
Progress = Callable[[str, int, int], None]
"""Told what is being done, and how much of how much."""

_SHOWN = 16
"""Hexadecimal digits of a digest that only tells things apart."""


@dataclass(frozen=True, slots=True)
class Checked:
    """What a check found; :mod:`spec_plugins.evaluation.gate_report` puts it into words."""

    baseline: Baseline
    provenance: Provenance
    """Of the updated target."""
    requests: Requests
    proposers: Mapping[str, Acceptance]
    comparisons: Mapping[str, Comparison]
    verdicts: Mapping[str, tuple[Verdict, float]]
    """By proposer, with the corrected p-value of a regression."""
    alpha: float
    tolerance: float

    @property
    def verdict(self) -> Verdict:
        """Of all proposers."""
        return overall([verdict for verdict, _ in self.verdicts.values()])

    @property
    def changed_responses(self) -> int:
        """How many responses are others than the baseline's."""
        return _differ(self.baseline.requests.responses, self.requests.responses)

    @property
    def changed_prompts(self) -> int:
        """How many prompts are other tokens: of another tokenizer, chat template or redaction."""
        return _differ(self.baseline.requests.prompts, self.requests.prompts)

    @property
    def same_files(self) -> bool:
        """Whether the target's files are those of the baseline, byte for byte."""
        return self.baseline.provenance.model_sha256 == self.provenance.model_sha256


def _differ(one: Sequence[str], other: Sequence[str]) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))


def take(
    folder: Path,
    target: ReplayTarget,
    file: TrafficFile,
    configs: Mapping[str, Config],
    settings: Settings,
    ask: Asker,
    *,
    requests: int = 200,
    provides: frozenset[Need] = EVERYTHING,
    progress: Progress = lambda doing, done, total: None,
) -> Baseline:
    """Measure a baseline.

    Args:
        folder: of the target's files.
        target: the same, opened.
        file: the traffic; recorded responses in it are not used.
        configs: proposers by name.
        settings: how to measure.
        ask: what answers.
        requests: how many to take, a sample that keeps the mix.
        provides: what the engine gives a proposer.
        progress: told how it goes.

    Raises:
        ConfigError: there are too few requests, or a head is no folder.
        UnsupportedError: a proposer cannot be replayed.
    """
    heads = {name: heads_of(config) for name, config in configs.items()}
    records = sample(file, requests, settings.seed)
    if not records:
        raise file.refuse()
    _check_enough(len(records), "can be used")
    said, found = _measure(records, file, target, configs, settings, ask, provides, progress)
    for acceptance in found.values():
        _check_enough(int(np.count_nonzero(acceptance.steps)), "got a response of 2 tokens or more")
    return Baseline(
        provenance=_provenance(folder, file, settings.engine),
        settings=settings,
        requests=said,
        proposers={n: a.model_copy(update={"heads": heads[n]}) for n, a in found.items()},
    )


def check(
    baseline: Baseline,
    folder: Path,
    target: ReplayTarget,
    file: TrafficFile,
    ask: Asker,
    *,
    alpha: float = 0.01,
    tolerance: float = 0.02,
    heads: Sequence[Path] = (),
    provides: frozenset[Need] = EVERYTHING,
    progress: Progress = lambda doing, done, total: None,
) -> Checked:
    """Measure a target on a baseline's requests as that was measured, and compare.

    An updated target says something else, and that is what its traffic will be like: so it answers anew, with
    the same settings and seeds, and proposers draft for what it says itself.

    Args:
        baseline: what to compare with.
        folder: of the updated target's files.
        target: the same, opened.
        file: the baseline's traffic.
        ask: what answers.
        alpha: see :func:`spec_plugins.evaluation.gate.judge`.
        tolerance: see :func:`spec_plugins.evaluation.gate.compare`.
        heads: folders where heads of the baseline lie now.
        provides: what the engine gives a proposer.
        progress: told how it goes.

    Raises:
        ConfigError: other traffic; a head that is missing or was changed; a request that cannot be asked.
    """
    configs = {name: placed(name, was, heads) for name, was in baseline.proposers.items()}
    said, found = _measure(
        _asked_again(file, baseline), file, target, configs, baseline.settings, ask, provides, progress
    )
    if said.lines != baseline.requests.lines:
        lost = len(set(baseline.requests.lines) - set(said.lines))
        raise ConfigError(
            f"traffic: {lost} of the baseline's {len(baseline.requests.lines)} requests cannot be asked of "
            f"this target ({'; '.join(file.faults[:1])}); save a new baseline of the old target, "
            "over others"
        )
    comparisons = {
        name: compare(was.counts, found[name].counts, tolerance) for name, was in baseline.proposers.items()
    }
    now = _provenance(folder, file, baseline.settings.engine)
    return Checked(baseline, now, said, found, comparisons, judge(comparisons, alpha), alpha, tolerance)


def _asked_again(file: TrafficFile, baseline: Baseline) -> list[Record]:
    lines, expected = set(baseline.requests.lines), baseline.provenance.traffic_sha256
    records = [record for record in file if record.line in lines]
    if file.sha256 != expected:
        raise ConfigError(
            f"traffic: {str(file.path)!r} is not the file of the baseline (sha256 {file.sha256[:_SHOWN]}…, "
            f"not {expected[:_SHOWN]}…); give that with --traffic, or save a new baseline"
        )
    return records


def _measure(
    records: Sequence[Record],
    file: TrafficFile,
    target: ReplayTarget,
    configs: Mapping[str, Config],
    settings: Settings,
    ask: Asker,
    provides: frozenset[Need],
    progress: Progress,
) -> tuple[Requests, dict[str, Acceptance]]:
    """Have the target answer, and replay each proposer over what it said."""
    longest = min(settings.max_model_len, target.max_model_len)
    progress("answering", 0, len(records))
    answered = answer_records(
        records, file, target.tokenizer(), ask(settings), longest, settings.max_new_tokens,
        settings.temperature,
    )  # fmt: skip
    recorded, found = bring_together(answered, longest), {}
    for name, config in configs.items():
        result = replay(
            recorded, config, target, mode=settings.mode, concurrency=settings.concurrency, provides=provides,
            progress=functools.partial(progress, f"replaying {name}"),
        )  # fmt: skip
        counts = result.counts()
        found[name] = Acceptance(
            config=config.model_dump(mode="json"),
            exact=result.exact,
            steps=counts.steps.tolist(),
            accepted=counts.accepted_tokens.tolist(),
        )
    parts = [np.split(c.tokens, [c.prompt_length]) for c in answered]
    said = Requests(
        lines=[c.record.line for c in answered],
        prompts=[_short(prompt) for prompt, _ in parts],
        responses=[_short(response) for _, response in parts],
        response_tokens=[len(response) for _, response in parts],
    )
    return said, found


def _short(tokens: Any) -> str:
    return hashlib.sha256(np.asarray(tokens, "<i4").tobytes()).hexdigest()[:_SHOWN]


def _check_enough(requests: int, which: str) -> None:
    if requests < REQUESTS_AT_LEAST:
        raise ConfigError(
            f"requests: {requests} {which}, and a baseline needs at least {REQUESTS_AT_LEAST}; give more "
            "traffic, or raise --requests"
        )


def _provenance(folder: Path, file: TrafficFile, engine: str) -> Provenance:
    """Reads all of the target's files."""
    return Provenance(
        model=folder.resolve().name,
        model_sha256=files_digest(folder),
        traffic=str(file.path),
        traffic_sha256=file.sha256,
        spec_plugins=__version__,
        engine_version=installed_version(engine),
        machine=machine(),
    )
