"""Figures on their way from vLLM's worker to its metrics."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from misbehaving_proposers import Host, Toy, chains

from spec_plugins.adapters.vllm import snapshots

CONFIG: Any = SimpleNamespace(instance_id="abc", parallel_config=SimpleNamespace(data_parallel_index=1))

WORKER = """
import multiprocessing, os, signal, sys, time
from types import SimpleNamespace as Some
from spec_plugins.adapters.vllm import snapshots

def work():
    global writer  # the last reference does not go before the process
    if "handled" in sys.argv:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # as vLLM's workers do
    writer = snapshots.SnapshotWriter(Some(instance_id="abc", parallel_config=Some()), "toy")
    driver = Some(requests_held=0, gauges=dict, statistics=Some(snapshot=dict))
    writer.write(driver, now=True)
    print(os.getpid(), flush=True)
    time.sleep(60)

if "forked" in sys.argv:
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join()
else:
    work()
"""


@contextlib.contextmanager
def worker(*how: str) -> Iterator[int]:
    """The process id of one that has written its snapshot; it is over at the end."""
    with subprocess.Popen([sys.executable, "-c", WORKER, *how], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())


@pytest.fixture(autouse=True)
def run_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.delenv(snapshots.SERVER, raising=False)
    monkeypatch.setenv("SPEC_PLUGINS_RUN_DIR", str(tmp_path / "run"))
    return tmp_path / "run"


def read(rank: int) -> Any:
    return snapshots.read_snapshot(snapshots.find_snapshot("abc", rank))


def test_what_is_written_is_read() -> None:
    host = Host(Toy(chains(1)))
    host.propose({"a": [1]})
    writer = snapshots.SnapshotWriter(CONFIG, "toy")
    writer.write(host.driver)
    found = read(1)
    assert found is not None
    assert (found["proposer"], found["pid"], found["requests_held"]) == ("toy", os.getpid(), 1)
    assert found["steps"] == 1
    assert read(0) is None


def test_it_is_written_at_most_once_a_second_unless_now() -> None:
    host = Host(Toy(chains(1)))
    writer = snapshots.SnapshotWriter(CONFIG, "toy")
    writer.write(host.driver)
    host.propose({"a": [1]})
    writer.write(host.driver)
    assert read(1)["steps"] == 0
    writer.write(host.driver, now=True)
    assert read(1)["steps"] == 1


def test_the_folder_is_closed_to_others(run_dir: Path) -> None:
    assert snapshots.folder() == run_dir
    assert run_dir.stat().st_mode & 0o777 == 0o700


def refused(caplog: pytest.LogCaptureFixture) -> str:
    """The one warning of two writers; neither writes, and the reader finds nothing."""
    with caplog.at_level(logging.WARNING, "spec_plugins"):
        for _ in range(2):
            writer = snapshots.SnapshotWriter(CONFIG, "toy")
            writer.write(Host(Toy()).driver, now=True)
    assert read(1) is None
    (record,) = caplog.records
    return record.getMessage()


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_a_folder_that_others_can_write_to_is_refused(
    run_dir: Path, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    run_dir.mkdir()
    run_dir.chmod(mode)
    (run_dir / ".abc.1.json").write_text("{}")
    said = refused(caplog)
    assert f"`chmod go-w {run_dir}`" in said
    assert "SPEC_PLUGINS_RUN_DIR" in said
    assert (run_dir / ".abc.1.json").read_text() == "{}"


def test_a_folder_that_others_can_read_is_taken(run_dir: Path) -> None:
    run_dir.mkdir()
    run_dir.chmod(0o755)
    assert snapshots.folder() == run_dir


def test_a_folder_of_another_user_is_refused(
    run_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir.mkdir()
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    assert f"{run_dir} belongs to another user; set SPEC_PLUGINS_RUN_DIR" in refused(caplog)


def test_a_link_is_refused(run_dir: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    run_dir.symlink_to(tmp_path / "elsewhere")
    assert f"{run_dir} is a link; set SPEC_PLUGINS_RUN_DIR" in refused(caplog)
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("how", ["by itself", "forked"])
def test_a_worker_that_is_told_to_end_leaves_no_file(run_dir: Path, how: str) -> None:
    with worker("handled", how) as pid:
        assert len(list(run_dir.iterdir())) == 1
        os.kill(pid, signal.SIGTERM)
    assert list(run_dir.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_a_killed_worker_leaves_is_nobodys_and_goes_with_the_next(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setenv(snapshots.SERVER, "killed")
    with worker() as pid:
        os.kill(pid, number)
    (left,) = run_dir.iterdir()
    monkeypatch.setenv(snapshots.SERVER, "next")
    assert snapshots.find_snapshot("abc", 0) is None
    writer = snapshots.SnapshotWriter(CONFIG, "toy")
    assert not left.exists()
    writer.write(Host(Toy()).driver, now=True)
    assert len(list(run_dir.iterdir())) == 1


def test_files_of_processes_that_were_killed_are_swept(run_dir: Path) -> None:
    run_dir.mkdir()
    (run_dir / "dead.0.json").write_text(json.dumps({"pid": 2**22 + 1}))
    (run_dir / "alive.0.json").write_text(json.dumps({"pid": os.getpid()}))
    (run_dir / "strange.0.json").write_text("no json")
    (run_dir / f"half.0.{2**22 + 1}").write_text("{")
    snapshots.SnapshotWriter(CONFIG, "toy")
    assert sorted(path.name for path in run_dir.iterdir()) == ["alive.0.json", "strange.0.json"]


def test_without_a_folder_nothing_is_written(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPEC_PLUGINS_RUN_DIR", str(tmp_path / "file" / "run"))
    assert str(tmp_path / "file" / "run") in refused(caplog)


def test_a_broken_file_is_no_snapshot(run_dir: Path) -> None:
    run_dir.mkdir()
    for text in ("", "[1]", "{"):
        (run_dir / ".abc.1.json").write_text(text)
        assert read(1) is None


def test_the_file_goes_with_its_writer(run_dir: Path) -> None:
    writer = snapshots.SnapshotWriter(CONFIG, "toy")
    writer.write(Host(Toy()).driver, now=True)
    del writer
    assert list(run_dir.iterdir()) == []


def test_an_api_process_of_the_same_server_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(snapshots.SERVER, "one")
    writer = snapshots.SnapshotWriter(CONFIG, "toy")
    writer.write(Host(Toy()).driver, now=True)
    assert snapshots.find_snapshot("another instance", 1) is not None
    assert snapshots.find_snapshot("another instance", 0) is None
    monkeypatch.setenv(snapshots.SERVER, "two")
    assert snapshots.find_snapshot("another instance", 1) is None
