"""Two ranks on the CPU: tensor parallel, where the first one drafts, and data parallel, where both do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from served import MODEL, eventually, plug_in, serve

from spec_plugins.evaluation.server_process import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

Prompts = Sequence[Sequence[int]]
# Left to itself, vLLM keeps a core a rank free for its schedulers, and finds none for the ranks of a small
# machine.
UNBOUND = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}

TENSOR_PARALLEL = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    model, prompts, speculative = json.loads(sys.argv[1])
    llm = LLM(
        model, dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=8,
        tensor_parallel_size=2, disable_log_stats=False, speculative_config=speculative,
    )
    answers = llm.generate(
        [{"prompt_token_ids": p} for p in prompts],
        SamplingParams(temperature=0, max_tokens=48, ignore_eos=True), use_tqdm=False,
    )
    print("FOUND", json.dumps({
        "answers": [list(a.outputs[0].token_ids) for a in answers],
        "ranks": llm.collective_rpc("spec_plugins_statistics") if speculative else None,
        "counters": {
            m.name: m.value for m in llm.get_metrics()
            if m.name.startswith("vllm:spec_decode") and hasattr(m, "value")
        },
    }))
"""


def two_ranks(model: Path, prompts: Prompts, speculative: dict[str, Any] | None, folder: Path) -> Any:
    """What an offline engine of two ranks says, in processes of its own."""
    script = folder / "script.py"
    script.write_text(TENSOR_PARALLEL, encoding="utf-8")
    asked = json.dumps([str(model), prompts, speculative])
    ours = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_PORT": str(free_port()), "PYTHONSAFEPATH": "1"}
    env = {**os.environ, **UNBOUND, **ours}
    run = subprocess.run(
        [sys.executable, str(script), asked],
        capture_output=True, text=True, check=False, timeout=900, env=env, cwd=folder,
    )  # fmt: skip
    found = [line for line in run.stdout.splitlines() if line.startswith("FOUND ")]
    assert found, f"{run.returncode}: {run.stdout[-2000:]}\n{run.stderr[-4000:]}"
    return json.loads(found[-1].removeprefix("FOUND "))


@pytest.fixture(scope="module")
def plain(tiny_model: Path, prompts: Prompts, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The answers of two ranks without speculation."""
    answers: list[list[int]] = two_ranks(tiny_model, prompts, None, tmp_path_factory.mktemp("plain"))[
        "answers"
    ]
    return answers


def test_tensor_parallel(tiny_model: Path, prompts: Prompts, plain: list[list[int]], tmp_path: Path) -> None:
    found = two_ranks(tiny_model, prompts, json.loads(plug_in("suffix")[1]), tmp_path)
    assert found["answers"] == plain
    first, second = found["ranks"]
    assert second is None
    assert first["faults"].keys() <= {"late"}  # on a busy machine
    assert first["draft_tokens"] == found["counters"]["vllm:spec_decode_num_draft_tokens"]
    assert first["accepted_tokens"] == found["counters"]["vllm:spec_decode_num_accepted_tokens"] > 0


def test_data_parallel(tiny_model: Path, prompts: Prompts, plain: list[list[int]], tmp_path: Path) -> None:
    drafted = "vllm:spec_decode_num_draft_tokens_total", "spec_plugins:draft_tokens_total"

    def ask(prompt: Sequence[int]) -> list[int]:
        answer = server.client().completions.create(
            model=MODEL, prompt=list(prompt), max_tokens=48, temperature=0,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )  # fmt: skip
        ids: list[int] = answer.choices[0].model_extra["token_ids"]
        return ids

    def settled() -> bool:
        theirs, ours = (server.by(name, "engine") for name in drafted)
        return theirs == ours and theirs.keys() == {"0", "1"} and min(theirs.values()) > 0

    flags = [*plug_in("suffix"), "--data-parallel-size", "2"]
    env = {**UNBOUND, "SPEC_PLUGINS_RUN_DIR": str(tmp_path / "run")}
    with serve(tiny_model, *flags, log=tmp_path / "log", env=env) as server:
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(ask, [*prompts, *prompts])) == [*plain, *plain]
        assert eventually(settled), [server.by(name, "engine") for name in drafted]
        held = "spec_plugins:requests_held"
        assert eventually(lambda: server.by(held, "engine") == {"0": 0, "1": 0}), server.by(held, "engine")
