"""A third-party package brings its own proposer, and every adapter runs it.

The package is installed into a folder that only a child process has on its path: its entry point is
found as after ``pip install``, and this environment stays as it was. ``test_wheel.py`` installs it into
an environment of its own, beside the wheel.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent
EXAMPLE = CHECKOUT / "examples" / "acme_drafters"

pytestmark = pytest.mark.slow

TWO_STEPS = """
import json
import numpy as np
from spec_plugins import Step
from acme_drafters.bigram import BigramProposer

def step(tokens, fresh, budget=8, depth=8):
    one = lambda x: np.array([x], np.int32)
    return Step(["a"], np.array([tokens], np.int32), one(0), one(len(tokens)), one(fresh), one(budget),
                one(depth), one(4))

proposer = BigramProposer()
drafts = [
    proposer.propose(step([5, 6, 7, 5], 4, budget=5))[0],
    proposer.propose(step([5, 6, 7, 5, 9, 6], 2, depth=3))[0],
    proposer.propose(step([5, 6, 7, 5, 9, 6], 0, budget=0))[0],
]
proposer.finish("a")
drafts.append(proposer.propose(step([1, 2, 3], 3))[0])
print(json.dumps([d.tokens.tolist() for d in drafts]))
"""

IN_TRANSFORMERS = """
import json
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from spec_plugins.adapters.transformers import generate

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, bos_token_id=None, eos_token_id=None,
)).eval()
prompts = [[1, 2, 3, 1, 2, 3, 1, 2], [7, 8, 9], [40]]
results = generate(model, prompts, proposer="acme-bigram", max_new_tokens=48)
plain = [
    model.generate(torch.tensor([p]), do_sample=False, max_new_tokens=48)[0, len(p):].tolist()
    for p in prompts
]
print(json.dumps({"with": [list(map(int, r.token_ids)) for r in results], "without": plain}))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example package in it, as pip installs it."""
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, str(CHECKOUT / "scripts" / "build_wheel.py"), "--source", str(EXAMPLE)]
    wheel = subprocess.run(
        [*build, "--out", str(folder / "wheel")], check=True, capture_output=True, text=True
    ).stdout.strip()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--target", str(folder), wheel], check=True)
    return folder


def run(installed: Path, program: str, *arguments: str) -> str:
    """Run a program of this environment with the example on its path."""
    done = subprocess.run(
        [Path(sys.executable).with_name(program), *arguments],
        env={**os.environ, "PYTHONPATH": str(installed)},
        cwd=installed,  # not the checkout
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_bigram_guesses_what_followed_last_time(installed: Path) -> None:
    drafts = json.loads(run(installed, "python", "-c", TWO_STEPS))
    assert drafts == [
        [6, 7, 5, 6, 7],  # over and over, as far as the budget goes
        [7, 5, 9],  # 9 follows 5 now, and the depth is 3
        [],  # nothing is wanted
        [],  # the request was forgotten, and nothing has followed 3
    ]


def test_command_line_lists_it_as_usable(installed: Path) -> None:
    listed = json.loads(run(installed, "spec-plugins", "list", "--json"))
    entries = {entry["name"]: entry for entry in listed["proposers"]}
    assert "ngram" in entries
    assert entries["acme-bigram"]["usable"] is True


def test_transformers_runs_it_and_the_output_stays_the_same(installed: Path) -> None:
    pytest.importorskip("transformers")
    outputs = json.loads(run(installed, "python", "-c", IN_TRANSFORMERS).splitlines()[-1])
    assert outputs["with"] == outputs["without"]
    assert all(len(tokens) == 48 for tokens in outputs["with"])
