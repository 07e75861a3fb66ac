"""The engine's side of `vllm-step-cost`: a script for vLLM's environment.

It imports nothing of this project: vLLM 0.32 on the CPU does not start in a process that has imported numba.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Steps", "serve"]


@dataclass
class Steps:
    """The steps of one repeat in which the whole batch decoded."""

    propose: list[float] = field(default_factory=list)
    """µs in ``propose_draft_token_ids``, by step."""
    update: list[float] = field(default_factory=list)
    """µs in ``_update_states``, by step."""
    drafted: int = 0
    """Draft tokens handed to vLLM, over all requests and steps."""
    generated: int = 0
    """Tokens that came of these steps."""

    def both(self) -> float:
        """Median µs a step in the two together."""
        return statistics.median(p + u for p, u in zip(self.propose, self.update, strict=True))


def serve(settings: Mapping[str, Any]) -> None:
    """An engine that answers lines of JSON until there are no more.

    A line has ``prompts``, ``batch`` and ``tokens``; the answer has the fields of :class:`Steps`.
    """
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # vLLM prints as well
        from vllm import LLM, SamplingParams
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        llm = LLM(**settings)
        steps, batch = Steps(), 0
        updated = 0.0
        # Around whatever the plug-in put there when it was made.
        update: Any = GPUModelRunner._update_states
        propose: Any = GPUModelRunner.propose_draft_token_ids

        def timed_update(self: Any, *args: Any) -> Any:
            nonlocal updated
            started = time.perf_counter()
            answer = update(self, *args)
            updated = time.perf_counter() - started
            return answer

        def timed_propose(self: Any, scheduled: Any, sampled: Any, *args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            drafts = propose(self, scheduled, sampled, *args, **kwargs)
            seconds = time.perf_counter() - started
            rows = self.input_batch
            decodes = rows.num_computed_tokens_cpu[:batch] >= rows.num_prompt_tokens[:batch]
            if len(sampled) == batch and decodes.all():
                steps.propose.append(seconds * 1e6)
                steps.update.append(updated * 1e6)
                steps.drafted += sum(map(len, drafts))
                steps.generated += sum(map(len, sampled))
            return drafts

        GPUModelRunner._update_states = timed_update
        GPUModelRunner.propose_draft_token_ids = timed_propose
        print("{}", file=answers, flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            steps, batch, prompts = Steps(), asked["batch"], asked["prompts"]
            how = SamplingParams(
                temperature=0.0, max_tokens=asked["tokens"], ignore_eos=True, detokenize=False
            )
            for i in range(0, len(prompts), batch):
                some = [{"prompt_token_ids": p} for p in prompts[i : i + batch]]
                llm.generate(some, how, use_tqdm=False)
            print(json.dumps(vars(steps)), file=answers, flush=True)


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
