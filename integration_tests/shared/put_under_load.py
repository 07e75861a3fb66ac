"""What the engine's own benchmark client must give, with the engine's real server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from spec_plugins.config import load_config
from spec_plugins.evaluation.load import Load, Request, load_runner

ANSWER = 12


def check_load(engine: str, model: Path, arguments: Sequence[str]) -> None:
    """A server with suffix drafts, under a closed loop and an open one."""
    runner = load_runner(engine)
    words = ["a", "b", "a", "c", "a", "d"]
    prompts = [f"{words[i % 6]} {words[(i + 1) % 6]} {i}" for i in range(8)]
    requests = [Request(prompt, " ".join(words[:5]) * 3, ANSWER) for prompt in prompts]
    with runner.server(str(model), load_config("suffix"), "float32", arguments) as server:
        closed = runner.run(server, str(model), Load(requests, concurrency=2))
        opened = runner.run(server, str(model), Load(requests[:4], rate=20.0, burstiness=1.0))
    for served, n in ((closed, 8), (opened, 4)):
        assert not served.failures
        assert len(served.tokens) == len(served.texts) == n
        assert (served.tokens >= 1).all()
        assert (served.first_token > 0).all()
        assert np.isfinite(served.per_token).all()
        assert served.seconds > 0
        # Two at once, one after the other: a request's own time cannot be longer than the run.
        assert (served.first_token + served.decoding <= served.seconds + 1e-3).all()
    own = closed.first_token + closed.decoding
    assert own.sum() <= 2.1 * closed.seconds
