"""Servers as groups of processes: started, asked, ended whatever happens."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from spec_plugins.errors import SpecPluginsError
from spec_plugins.evaluation import server_process
from spec_plugins.evaluation.server_process import ServerProcess
from spec_plugins.evaluation.server_process import free_port as a_port

SERVER = """
import http.server, json, os, subprocess, sys

class Answers(http.server.BaseHTTPRequestHandler):
    def answer(self, status, found):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(found).encode())

    def do_GET(self):
        self.answer(200, [self.path, os.environ.get("SAID"), sorted(os.sched_getaffinity(0))])

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer(400 if "bad" in body else 200, body)

    def log_message(self, *_): pass

subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Answers).serve_forever()
"""


def eventually(found: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not found():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def toy(code: str = SERVER, **variables: str) -> ServerProcess:
    return ServerProcess(
        "a toy", [sys.executable, "-c", code], variables, sorted(os.sched_getaffinity(0))[:1]
    )


def test_a_server_answers_and_its_whole_group_ends() -> None:
    allowed = os.sched_getaffinity(0)
    with toy(SAID="hello") as server:
        status, text = server.get("/where")
        assert (status, json.loads(text)) == (200, ["/where", "hello", sorted(allowed)[:1]])
        with server.post("/ask", {"tokens": [1]}) as response:
            assert json.load(response) == {"tokens": [1]}
        with pytest.raises(OSError, match=r"400: .*bad"), server.post("/ask", {"bad": 1}):
            pass
        assert eventually(lambda: len(server.processes()) == 2)
        assert server.resident() > 1
        assert server.log.read_text().startswith(sys.executable)
    assert server.processes() == []
    assert not server.log.exists()
    assert os.sched_getaffinity(0) == allowed


def test_a_server_that_ends_says_why() -> None:
    server = toy("raise SystemExit('no such model')")
    with pytest.raises(
        SpecPluginsError, match=r"'a toy' ended with 1 before it answered(.|\n)*no such model"
    ):
        server.__enter__()
    assert server.processes() == []
    server.log.unlink()


def test_a_server_whose_port_was_taken_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = [taken.getsockname()[1]] * 3
        monkeypatch.setattr(server_process, "free_port", ports.pop)
        with pytest.raises(SpecPluginsError, match=r"ended with 1(.|\n)*Address already in use"):
            (server := toy()).__enter__()
        assert not ports
        server.log.unlink()
        ports = [a_port(), taken.getsockname()[1]]
        monkeypatch.setattr(server_process, "free_port", ports.pop)
        with toy() as server:
            assert server.get("/")[0] == 200


def test_ports_are_none_that_the_system_hands_out() -> None:
    ports = {a_port() for _ in range(8)}
    assert len(ports) > 1
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        assert max(ports) < other.getsockname()[1]


def test_an_error_ends_the_server_and_leaves_its_log() -> None:
    with pytest.raises(RuntimeError), toy() as server:
        raise RuntimeError
    assert server.processes() == []
    server.log.unlink()


def test_servers_end_with_the_process_that_is_told_to(tmp_path: Path) -> None:
    script = tmp_path / "asks.py"
    script.write_text(
        "import sys, time\nfrom spec_plugins.evaluation.server_process import ServerProcess\n"
        f"with ServerProcess('toy', [sys.executable, '-c', {SERVER!r}], {{}}) as server:\n"
        "    print(server.process.pid, flush=True)\n    time.sleep(600)\n"
    )
    asking = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    assert asking.stdout is not None
    group = int(asking.stdout.readline())
    asking.send_signal(signal.SIGTERM)
    assert asking.wait(20) == 128 + signal.SIGTERM

    def gone() -> bool:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        return False

    assert eventually(gone)
