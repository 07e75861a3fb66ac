"""How much of what trained proposers draft is accepted, replayed over answers to prompts new to them."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.case import Context, Result, case
from benchmarks.vllm_heads import MIN_PROBABILITY, heads
from benchmarks.vllm_serving import cut, encoder
from spec_plugins.adapters.transformers import Engine, SamplingParams, load_model
from spec_plugins.config import load_config
from spec_plugins.evaluation.prompts import agent_replays, humaneval, mtbench
from spec_plugins.evaluation.recorded import Recorded, bring_together
from spec_plugins.evaluation.replay import replay
from spec_plugins.evaluation.replay_target import ReplayTarget
from spec_plugins.evaluation.trace import Counts
from spec_plugins.proposer import Need
from spec_plugins.traffic.conversations import Conversation

__all__ = ["PROMPT_TOKENS", "recorded_answers", "replayed"]

TOKENS, PROMPTS, PROMPT_TOKENS = 96, 24, 768
CHAINS = frozenset(Need) - {Need.TREES}


def ways() -> dict[str, tuple[dict[str, Any], frozenset[Need]]]:
    """Each configuration, and what the engine provides: vLLM's chains, or trees too."""
    folder, made = heads(), dict[str, tuple[dict[str, Any], frozenset[Need]]]()

    def add(name: str, fields: dict[str, Any], provides: frozenset[Need] = CHAINS) -> None:
        made[name] = (fields, provides)

    add("suffix, 8", {"proposer": "suffix", "num_speculative_tokens": 8})
    for name, method, k in (("draft", "draft_model", 3), ("medusa", "medusa", 4), ("eagle3", "eagle3", 3)):
        if (folder / name).is_dir():
            options = {"model": str(folder / name)}
            add(f"{method}, {k}", {"proposer": method, "num_speculative_tokens": k, "options": options})
    eagle3 = {"model": str(folder / "eagle3")}
    tree = {
        "proposer": "eagle3", "num_speculative_tokens": 4, "max_draft_nodes": 16,
        "options": {**eagle3, "topk": 4},
    }  # fmt: skip
    add("eagle3, tree of 16, 4 deep", tree, frozenset(Need))
    parts = [
        {"name": "suffix"},
        {"name": "eagle3", "options": {**eagle3, "min_probability": MIN_PROBABILITY}},
    ]
    both = {"proposers": parts, "min_tokens": 5}
    add("suffix then eagle3, 8", {"proposer": "combine", "num_speculative_tokens": 8, "options": both})
    return made


def recorded_answers(context: Context, target: ReplayTarget, count: int, tokens: int) -> dict[str, Recorded]:
    """The model's own greedy answers to the first prompts of each set, in the embedded engine."""
    model, tokenizer = load_model(context.model, dtype="float32")
    target.loaded = model
    engine, encode = Engine(model, tokenizer, max_num_seqs=12), encoder(context.model)
    found = {}
    for name, read in (("HumanEval", humaneval), ("MT-bench", mtbench), ("agent", agent_replays)):
        context.say(f"answering {count} prompts of {name}")
        asked = [cut(p.messages, encode, PROMPT_TOKENS) for p in read(context.data)[:count]]
        answers = engine.generate(asked, SamplingParams(max_new_tokens=tokens, ignore_eos=True))
        spoken = [
            (np.array([*p, *a.token_ids], np.int32), len(p)) for p, a in zip(asked, answers, strict=True)
        ]
        found[name] = bring_together([Conversation(t, np.arange(len(t)) >= n) for t, n in spoken])
    return found


def replayed(
    texts: Recorded, fields: dict[str, Any], target: ReplayTarget, provides: frozenset[Need] = CHAINS
) -> Counts:
    """What an engine counts in which four requests run at once."""
    return replay(texts, load_config(fields), target, mode="steps", concurrency=4, provides=provides).counts()


@case("heads-acceptance")
def heads_acceptance(context: Context) -> Result:
    """Tokens a forward, and drafts accepted up to each position, over the model's own greedy answers."""
    count = 3 if context.quick else PROMPTS
    target = ReplayTarget.open(context.model, dtype="float32")
    recorded = recorded_answers(context, target, count, TOKENS)
    result = Result(
        ["proposer", *(f"{n}: {what}" for n in recorded for what in ("tokens/forward", "at 1–4"))]
    )
    for way, (fields, provides) in ways().items():
        cells = []
        for name, texts in recorded.items():
            context.say(f"{way}, {name}")
            counts = replayed(texts, fields, target, provides)
            drafts = max(1, int(counts.drafted[:, 0].sum()))
            shares = counts.accepted.sum(0)[:4] / drafts
            cells += [
                f"{1 + counts.accepted_tokens.sum() / counts.steps.sum():.2f}",
                " ".join(f"{share:.2f}".removeprefix("0") for share in shares),
            ]
        result.rows.append([way, *cells])
    result.notes.append(
        f"{context.model.name}, float32, {count} prompts each of at most {PROMPT_TOKENS} tokens, {TOKENS} "
        "new ones, 4 side by side. At 1–4: of the steps with a draft, the share accepted up to "
        "that position. In suffix then eagle3 the head drafts where suffix finds less than 5 tokens."
    )
    return result
