"""What drafting costs a step of vLLM's model runner: the plug-ins beside vLLM's own methods."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.case import Context, Result, case, spread
from benchmarks.proposal_cost import source_tokens
from benchmarks.server import Environment, environment
from benchmarks.vllm_serving import NGRAM_K, SUFFIX_K, Variant, variants
from benchmarks.vllm_step_engine import Steps
from spec_plugins.errors import SpecPluginsError, UnavailableError
from spec_plugins.proposer import IntArray

LAYERS = 2
"""Of the model. So few write no sense, but loops and the prompt's own words, which are drafted."""
CONTEXTS = (500, 1500)
TURNS = {1: 4, 16: 1}
"""How many batches a repeat answers one after the other, by batch size."""
TOKENS = 128
REPEATS = 6
SCRIPT = Path(__file__).with_name("vllm_step_engine.py")
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}  # fmt: skip
ENVIRONMENT_DEFAULTS = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING", "OMP_NUM_THREADS": "1",
}  # fmt: skip


@dataclass
class Engine:
    """An engine in a process of its own, up from ``with`` to its end; it waits idle between questions."""

    name: str
    env: Environment
    settings: Mapping[str, Any]
    folder: Path
    """Where it runs, and leaves its log."""
    process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Engine:
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [self.env.bin / "python", str(SCRIPT), json.dumps(self.settings)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=self.folder,
                env={
                    **ENVIRONMENT_DEFAULTS, **os.environ, **ENVIRONMENT,
                    "PATH": f"{self.env.bin}{os.pathsep}{os.environ.get('PATH', '')}",
                },
            )  # fmt: skip
        try:
            self._answer()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop()

    @property
    def log(self) -> Path:
        """All that vLLM says."""
        return self.folder / f"{self.name.replace(' ', '-')}.log"

    def run(self, prompts: Sequence[Sequence[int]], batch: int, tokens: int) -> Steps:
        """Answer the prompts, ``batch`` at a time."""
        assert self.process is not None
        assert self.process.stdin is not None
        asked = {"prompts": prompts, "batch": batch, "tokens": tokens}
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(asked), file=self.process.stdin, flush=True)
        return Steps(**self._answer())

    def _answer(self) -> dict[str, Any]:
        assert self.process is not None
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.endswith("\n"):
            code = self.process.wait()
            end = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-30:]
            raise SpecPluginsError("\n".join([f"vLLM ({self.name}) ended with {code}; it said:", *end]))
        found: dict[str, Any] = json.loads(line)
        return found

    def _stop(self) -> None:
        if self.process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired, BrokenPipeError):
            self.process.communicate(timeout=30.0)
        self.process.kill()
        self.process.wait()


def pairs(env: Environment) -> tuple[list[tuple[Variant, Variant]], list[str]]:
    """vLLM's own method and the plug-in that does the same, and what had to be left out."""
    chosen, left_out = variants(env)
    by_name = {v.name: v for v in chosen}
    return [(by_name[v.against], v) for v in chosen if v.against in by_name], left_out


def engine_settings(variant: Variant, model: Path, batches: Sequence[int]) -> dict[str, Any]:
    """The arguments of ``vllm.LLM``."""
    flags = zip(variant.settings[::2], variant.settings[1::2], strict=True)
    return {
        "model": str(model), "skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True,
        "seed": 0, "max_model_len": max(CONTEXTS) + TOKENS + 16, "max_num_seqs": max(batches),
        "max_num_batched_tokens": 8192, "enable_prefix_caching": False,
        "distributed_executor_backend": "uni",
        **{flag.removeprefix("--").replace("-", "_"): json.loads(value) for flag, value in flags},
    }  # fmt: skip


def few_layers(model: Path, folder: Path) -> Path:
    """The model's first layers as a model, without its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()  # the other layers are not missed
    logging.disable_progress_bar()
    found = AutoModelForCausalLM.from_pretrained(model, num_hidden_layers=LAYERS, dtype=torch.float32)
    found.save_pretrained(folder)
    return folder


def measured(ran: Mapping[str, Sequence[Steps]]) -> list[list[str]]:
    """Rows of the table: vLLM's own method first, then the plug-in, over repeats."""
    own = next(iter(ran.values()))
    rows = []
    for name, repeats in ran.items():
        steps = sum(len(s.propose) for s in repeats)
        ratios = [s.both() / o.both() for s, o in zip(repeats, own, strict=True)]
        rows.append([
            name,
            spread([statistics.median(s.propose) for s in repeats], 0),
            spread([statistics.median(s.update) for s in repeats], 0),
            spread(ratios) if repeats is not own else "",
            spread([statistics.fmean(s.propose) + statistics.fmean(s.update) for s in repeats], 0),
            f"{sum(s.drafted for s in repeats) / steps:.1f}",
            f"{sum(s.generated for s in repeats) / steps:.1f}",
            str(steps),
        ])  # fmt: skip
    return rows


@case("vllm-step-cost", needs="vllm")
def vllm_step_cost(context: Context) -> Result:
    """µs of a decoding step that vLLM's model runner spends on drafting: plug-ins and its own methods."""
    env = environment("vllm", "spec_plugins.adapters.vllm", "arctic_inference")
    compared, left_out = pairs(env)
    if not compared:
        raise UnavailableError(f"vllm: nothing to compare: {'; '.join(left_out)}")
    contexts = CONTEXTS[:1] if context.quick else CONTEXTS
    repeats, new_tokens = (2, 48) if context.quick else (REPEATS, TOKENS)
    turns = dict.fromkeys(TURNS, 1) if context.quick else TURNS

    context.say("preparing the model and the prompts")
    grid = [(batch, length) for batch in TURNS for length in contexts]
    # No prompt comes twice, since suffix drafts out of earlier answers.
    need = sum(batch * turns[batch] * length for batch, length in grid) * (repeats + 1)
    stream = source_tokens(context, need)
    result = Result(
        [
            "batch", "context", "variant", "propose, µs", "_update_states, µs", "both, over vLLM's own",
            "both, mean µs", "drafted", "tokens", "steps",
        ],
        about=dict(env.about),
    )  # fmt: skip
    rows: dict[tuple[int, int], list[list[str]]] = {key: [] for key in grid}
    with tempfile.TemporaryDirectory(prefix="vllm-step-cost-") as made:
        folder = Path(made)
        model = few_layers(context.model, folder / "model")
        for pair in compared:
            with contextlib.ExitStack() as stack:
                engines: list[Engine] = []
                for variant in pair:
                    context.say(f"starting vLLM, {variant.name}")
                    settings = engine_settings(variant, model, list(TURNS))
                    engines.append(stack.enter_context(Engine(variant.name, env, settings, folder)))
                ran = alternated(context, engines, stream, grid, turns, repeats, new_tokens)
            for key, by_name in ran.items():
                rows[key] += measured(by_name)
    result.rows = [[*key, *row] for key, found in rows.items() for row in found]
    result.notes += [
        f"{context.model.name}'s first {LAYERS} layers in float32, eager, greedy, {new_tokens} new tokens a "
        "request; prompts: the Python standard library. An engine a variant, inside its process; both of a "
        f"pair are up at once and take turns. Repeats: {repeats}, each with other prompts, one before them "
        "not counted. ngram: "
        f"K={NGRAM_K}, n-grams of 2 to 4; suffix: K={SUFFIX_K}, as long as the match.",
        "Counted are steps in which the whole batch decodes: not those that take in prompts, in which suffix "
        "builds its trees, and not the thinner batches at the end. µs are of a step, not of a request: the "
        "median over a repeat's steps, then median and quartiles over repeats. Ratios are of the two methods "
        "together, within a repeat. The mean has in it what is not in every step: a file for /metrics once a "
        "second, the collector, and other processes' turns.",
        "drafted and tokens: draft tokens handed out, and tokens that came, a step, over all requests. Where "
        "those of a pair differ, the two did not do the same work.",
        "The forward pass is left out: with so few layers it says nothing of a real one. torch has 1 thread.",
    ]
    if left_out:
        result.notes.append(f"Left out: {'; '.join(left_out)}.")
    return result


def alternated(
    context: Context,
    engines: list[Engine],
    stream: IntArray,
    grid: Sequence[tuple[int, int]],
    turns: Mapping[int, int],
    repeats: int,
    new_tokens: int,
) -> dict[tuple[int, int], dict[str, list[Steps]]]:
    """Each engine's steps by batch and context; one generates while the others wait."""
    ran: dict[tuple[int, int], dict[str, list[Steps]]] = {key: {e.name: [] for e in engines} for key in grid}
    taken = 0
    for r in range(-1, repeats):  # the first warms up
        for batch, length in grid:
            count = batch * turns[batch]
            prompts = stream[taken : taken + count * length].reshape(count, length).tolist()
            taken += count * length
            for engine in engines[r % len(engines) :] + engines[: r % len(engines)]:
                context.say(f"{engine.name}: repeat {r + 1} of {repeats}, batch {batch}, {length} tokens")
                steps = engine.run(prompts, batch, new_tokens)
                if not steps.propose:
                    raise SpecPluginsError(f"vLLM ({engine.name}) took no step in which all requests decode")
                if r >= 0:
                    ran[batch, length][engine.name].append(steps)
    return ran
