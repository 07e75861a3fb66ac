"""Trained proposers inside `vllm serve`, beside those that need no model."""

from __future__ import annotations

import json
import os
from pathlib import Path

from benchmarks.case import Context, Result, case
from benchmarks.server import environment
from benchmarks.vllm_server import model_dtype, plug_in
from benchmarks.vllm_serving import NONE, Plan, Variant, cut, encoder, serve
from spec_plugins.errors import UnavailableError
from spec_plugins.evaluation.prompts import agent_replays, humaneval, mtbench

TOKENS, ROUNDS, MINUTES = 64, 12, 12.0
REQUESTS = {1: 2}
PROMPT_TOKENS = 768
MIN_PROBABILITY = 0.1
"""Draft tokens that are less likely are taken not to be worth their verification; not tuned."""


def heads() -> Path:
    """Where the trained heads of the model are: `$SPEC_PLUGINS_HEADS`, or the example's."""
    example = Path(__file__).resolve().parents[1] / "examples" / "smollm2_heads"
    return Path(os.environ.get("SPEC_PLUGINS_HEADS", example))


def variants(folder: Path) -> list[Variant]:
    """No speculation, each method, and combinations of a trained one with one that repeats text."""
    kinds = ("eagle3", "medusa", "draft")
    found = {name: str(folder / name) for name in kinds if (folder / name).is_dir()}
    if not found:
        raise UnavailableError(
            f"there are no heads in {str(folder)!r}; train some (examples/smollm2_heads), or set "
            "SPEC_PLUGINS_HEADS"
        )
    chosen = [
        Variant(NONE, []),
        Variant("ngram", plug_in("ngram", 5, min_ngram=2, max_ngram=4)),
        Variant("suffix", plug_in("suffix", 8)),
    ]
    if "draft" in found:
        native = {"method": "draft_model", "model": found["draft"], "num_speculative_tokens": 3}
        chosen += [
            Variant("vLLM draft_model", ["--speculative-config", json.dumps(native)]),
            Variant("draft_model", plug_in("draft_model", 3, model=found["draft"]), "vLLM draft_model"),
        ]
    if "medusa" in found:
        options = {"model": found["medusa"], "min_probability": MIN_PROBABILITY}
        chosen.append(Variant("medusa", plug_in("medusa", 4, **options)))
    if "eagle3" in found:
        options = {"model": found["eagle3"], "min_probability": MIN_PROBABILITY}
        native = {"method": "eagle3", "model": found["eagle3"], "num_speculative_tokens": 3}
        both = [{"name": "suffix"}, {"name": "eagle3", "options": options}]
        chosen += [
            Variant("vLLM eagle3", ["--speculative-config", json.dumps(native)]),
            Variant("eagle3", plug_in("eagle3", 3, model=found["eagle3"]), "vLLM eagle3"),
            Variant("eagle3 when sure", plug_in("eagle3", 5, **options)),
            Variant("suffix then eagle3", plug_in("combine", 8, proposers=both, min_tokens=5)),
        ]
    return chosen


@case("vllm-heads", needs="vllm")
def vllm_heads(context: Context) -> Result:
    """Output tokens/s of `vllm serve`, one request at a time: trained proposers, model-free ones and none."""
    env = environment("vllm", "spec_plugins.adapters.vllm")
    folder = heads()
    chosen = variants(folder)
    if only := os.environ.get("SPEC_PLUGINS_VARIANTS"):
        chosen = [v for v in chosen if v.name == NONE or v.name in only.split(",")]
    rounds, requests = (1, {1: 1}) if context.quick else (ROUNDS, REQUESTS)
    context.say("preparing the prompts")
    encode = encoder(context.model)
    need = rounds * sum(requests.values())
    prompts = {
        name: [cut(p.messages, encode, PROMPT_TOKENS) for p in source[:need]]
        for name, source in (
            ("HumanEval", humaneval(context.data)),
            ("MT-bench", mtbench(context.data)),
            ("agent", agent_replays(context.data)),
        )
    }
    # Others than are measured, whose answers would stand in suffix's cache.
    warm = [cut(p.messages, encode, PROMPT_TOKENS) for p in mtbench(context.data)[-2:]]
    plan = Plan(prompts, warm, requests, rounds, 16 if context.quick else TOKENS, MINUTES)
    result = serve(context, env, chosen, model_dtype(), plan)
    result.notes.append(
        "ngram K=5, suffix K=8, draft_model K=3, medusa K=4 and eagle3 K=3 or, when sure, K=5, of which a "
        f"position is drafted where its estimated probability is at least {MIN_PROBABILITY}, as in medusa."
    )
    return result
