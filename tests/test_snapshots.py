"""Figures on their way from vLLM's worker to its metrics."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from misbehaving_proposers import Host, Toy, chains

from spec_plugins.adapters.vllm import snapshots

CONFIG: Any = SimpleNamespace(instance_id="abc", parallel_config=SimpleNamespace(data_parallel_index=1))


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


def test_files_of_processes_that_were_killed_are_swept(run_dir: Path) -> None:
    run_dir.mkdir()
    (run_dir / "dead.0.json").write_text(json.dumps({"pid": 2**22 + 1}))
    (run_dir / "alive.0.json").write_text(json.dumps({"pid": os.getpid()}))
    (run_dir / "strange.0.json").write_text("no json")
    (run_dir / f"half.0.{2**22 + 1}").write_text("{")
    snapshots.SnapshotWriter(CONFIG, "toy")
    assert sorted(path.name for path in run_dir.iterdir()) == ["alive.0.json", "strange.0.json"]


def test_without_a_folder_nothing_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPEC_PLUGINS_RUN_DIR", str(tmp_path / "file" / "run"))
    writer = snapshots.SnapshotWriter(CONFIG, "toy")
    writer.write(Host(Toy()).driver, now=True)
    assert read(1) is None


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
