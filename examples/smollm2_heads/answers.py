"""``python answers.py MODEL PROMPTS.jsonl OUT.jsonl``: lets a model answer prompts, in vLLM.

Every other answer is greedy, the others are drawn at temperature 0.7 and top-p 0.95. What is there already is
not asked again, so it may be interrupted. On two CPU cores SmolLM2 says some 200 tokens a second.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

AT_ONCE = 256


def main() -> None:
    """Answer what has no answer yet."""
    # On a CPU vLLM would take most of the memory.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    from vllm import LLM, SamplingParams

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--dtype", default="bfloat16")
    wanted = parser.parse_args()
    rows = [json.loads(line) for line in wanted.prompts.read_text(encoding="utf-8").splitlines()]
    written = wanted.out.read_text(encoding="utf-8") if wanted.out.exists() else ""
    whole = written[: written.rfind("\n") + 1]
    if whole != written:  # it was interrupted within a line
        wanted.out.write_text(whole, encoding="utf-8")
    done = whole.count("\n")
    llm: Any = LLM(wanted.model, dtype=wanted.dtype, max_model_len=2048, enforce_eager=True)
    for start in range(done, len(rows), AT_ONCE):
        some = rows[start : start + AT_ONCE]
        params = [
            SamplingParams(
                temperature=0.7 * (i % 2), top_p=0.95 if i % 2 else 1.0, max_tokens=wanted.max_tokens
            )
            for i in range(start, start + len(some))
        ]
        answers = llm.chat([[{"role": "user", "content": row["prompt"]}] for row in some], params)
        lines = [
            json.dumps(
                {
                    **row,
                    "prompt_token_ids": list(answer.prompt_token_ids),
                    "token_ids": list(answer.outputs[0].token_ids),
                }
            )
            for row, answer in zip(some, answers, strict=True)
        ]
        with wanted.out.open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
