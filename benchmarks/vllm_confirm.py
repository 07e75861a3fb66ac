"""The evaluation's predictions for vLLM, beside what `vllm bench serve` measures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.case import Context, Result, case
from benchmarks.vllm_heads import heads
from spec_plugins.config import load_config
from spec_plugins.evaluation import confirmation_report, replay_report
from spec_plugins.evaluation.prompts import humaneval, mtbench
from spec_plugins.traffic.conversations import Conversation

ANSWER, REPLAYED, ROUNDS = 80, 100, 4
BATCHES, ASKED = (1, 3, 6, 12, 20), (2, 4, 8, 16)
"""What is calibrated, and what is served: no batch size is both."""
ARGUMENTS = ("--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "32")


@case("vllm-confirm", needs="vllm")
def vllm_confirm(context: Context) -> Result:
    """Speed-ups in `vllm serve`, predicted from a replay and step times, beside those measured under load."""
    from transformers import AutoTokenizer

    from spec_plugins.evaluation.calibration import Plan, calibrate
    from spec_plugins.evaluation.calibration_cache import model_digest
    from spec_plugins.evaluation.candidates import gather
    from spec_plugins.evaluation.confirmation import Asked, confirm
    from spec_plugins.evaluation.recorded import bring_together
    from spec_plugins.evaluation.replay import replay
    from spec_plugins.evaluation.replay_target import ReplayTarget
    from spec_plugins.support import ENGINES

    tokenizer = AutoTokenizer.from_pretrained(context.model)
    context.say("answering")
    said = _answered(context, tokenizer)
    target = ReplayTarget.open(context.model, "float32", "cpu")
    recorded = bring_together(said[:: max(1, len(said) // REPLAYED)][:REPLAYED])
    results = {}
    for name, length, folder in (
        ("ngram", 6, ""),
        ("suffix", 6, ""),
        ("medusa", 3, "medusa"),
        ("eagle3", 3, "eagle3"),
    ):
        context.say(f"replaying {name}")
        options = {"model": str(heads() / folder)} if folder else {}
        config = load_config({"proposer": name, "num_speculative_tokens": length, "options": options})
        results[name] = replay(
            recorded, config, target, concurrency=8, provides=ENGINES["vllm"].provides or frozenset()
        )
    about = {"model": context.model.name, "model_sha256": model_digest(context.model), "engine": "vllm"}
    replays = gather([replay_report.as_json(results, about)])
    around = tuple(int(share * replays.mean_context) for share in (0.75, 1.25))
    batches, steps = (BATCHES[:2], 4) if context.quick else (BATCHES, 24)
    plan = Plan(str(context.model), "vllm", batches, (0, 1, 2, 3, 6), around, "float32", ARGUMENTS, steps)
    times = calibrate(
        plan, progress=lambda done, left, words: context.say(f"calibrating, {done:.0%}: {words}")
    )
    asked = Asked(
        str(context.model),
        ASKED[:1] if context.quick else ASKED,
        tuple(results),
        rounds=ROUNDS,
        open_loop=False,
    )
    found = confirm(
        replays,
        times,
        said,
        tokenizer,
        asked,
        lambda done, words: context.say(f"serving, {done:.0%}: {words}"),
    )
    rows: list[Sequence[Any]] = [
        (confirmation_report.load_title(of), *confirmation_report.row(point))
        for of in found.at
        for point in of.points
    ]
    notes = [confirmation_report.WHAT, *confirmation_report.sentences(found)]
    return Result(["load", *confirmation_report.COLUMNS], rows, notes, {"vllm": times.setting.engine_version})


def _answered(context: Context, tokenizer: Any) -> list[Conversation]:
    """HumanEval and MT-bench, answered greedily by the server itself."""
    from spec_plugins.adapters.vllm.server import complete, server

    prompts = [*humaneval(context.data), *mtbench(context.data)][:: 10 if context.quick else 1]
    template = {"add_generation_prompt": True, "return_dict": True}
    asked = [list(tokenizer.apply_chat_template([*p.messages], **template)["input_ids"]) for p in prompts]
    asked = [tokens for tokens in asked if len(tokens) < 600]
    with server(str(Path(context.model)), None, "float32", ARGUMENTS) as running:
        answers = complete(running, asked, ANSWER, ignore_eos=False)
    made = []
    for prompt, (answer, ended) in zip(asked, answers, strict=True):
        tokens = np.array([*prompt, *answer], np.int32)
        made.append(Conversation(tokens, np.arange(len(tokens)) >= len(prompt), stopped=ended == "stop"))
    mixed = np.random.default_rng(0).permutation(len(made))
    return [made[i] for i in mixed]
