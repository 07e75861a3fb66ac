"""`scripts/environment.py`: what it removes from an environment, and what it adds to it.

pip is not run: it would take most of a minute on a busy machine.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"

pytestmark = pytest.mark.skipif(not SCRIPTS.exists(), reason="needs the checkout, for its scripts")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("environment")


@pytest.fixture
def calls(environment: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What pip was asked for; nothing is installed."""
    asked: list[tuple[str, ...]] = []

    def create(folder: Path, python: str) -> None:
        subprocess.run([python, "-m", "venv", "--clear", "--without-pip", folder], check=True)

    monkeypatch.setattr(environment, "create", create)
    monkeypatch.setattr(environment, "pip", lambda python, *arguments: asked.append(arguments))
    return asked


def found(site: Path) -> dict[str, str]:
    return {d.name: d.version for d in distributions(path=[str(site)])}


def test_environment_without_a_package_and_with_a_name(
    environment: ModuleType, calls: list[tuple[str, ...]], tmp_path: Path
) -> None:
    def ensure(*provides: str, without: tuple[str, ...] = ("a", "b"), identity: str = "") -> dict[str, str]:
        calls.clear()
        folder = tmp_path / "environment"
        python = environment.ensure(folder, sys.executable, ["x"], ["."], identity, without, provides)
        return found(environment.site_packages(python))

    remove = ("uninstall", "--yes", "a", "b")
    assert ensure("engine==1.0+cpu") == {"engine": "1.0+cpu"}
    assert [call[0] for call in calls] == ["install", "uninstall"]
    assert calls[-1] == remove

    assert ensure("engine==1.0+cpu") == {"engine": "1.0+cpu"}
    assert not calls

    # pip installs again what it finds missing, so it is removed each time.
    assert ensure("engine==1.1+cpu", "other.name==2") == {"engine": "1.1+cpu", "other.name": "2"}
    assert calls[-1] == remove
    assert ensure("engine==1.1+cpu", "other.name==2", identity="moved").keys() == {"engine", "other.name"}
    assert calls[-1] == remove

    assert ensure(without=(), identity="moved") == {}
    assert [call[0] for call in calls] == ["install"]


def test_interrupted_environment_is_made_afresh(
    environment: ModuleType, calls: list[tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "environment"
    wanted = (folder, sys.executable, [], ["."], "", ["a"], ["engine==1"])

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(environment, "provide", interrupted)
        with pytest.raises(KeyboardInterrupt):
            environment.ensure(*wanted)
    calls.clear()
    python = environment.ensure(*wanted)
    assert [call[0] for call in calls] == ["install", "uninstall"]
    assert found(environment.site_packages(python)) == {"engine": "1"}


def test_pip_takes_a_provided_name_for_installed(environment: ModuleType, tmp_path: Path) -> None:
    environment.provide(tmp_path, ["engine==1.0+cpu"])
    command = [sys.executable, "-m", "pip", "list", "--path", tmp_path, "--format", "freeze"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["engine==1.0+cpu"]


def test_name_that_is_installed_is_not_provided(environment: ModuleType, tmp_path: Path) -> None:
    metadata = tmp_path / "engine-1.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: engine\nVersion: 1.0\n")
    with pytest.raises(environment.SetupError, match=r"engine 1\.0 is installed"):
        environment.provide(tmp_path, ["engine==1.0+cpu"])


@pytest.mark.parametrize("text", ["engine", "engine==", "engine>=1", "a==1,b"])
def test_name_to_provide_needs_a_version(environment: ModuleType, text: str) -> None:
    with pytest.raises(environment.argparse.ArgumentTypeError, match="NAME==VERSION"):
        environment.pinned(text)


def test_package_that_is_installed_alone(
    environment: ModuleType, calls: list[tuple[str, ...]], tmp_path: Path
) -> None:
    def ensure(*alone: str) -> list[tuple[str, ...]]:
        calls.clear()
        environment.ensure(tmp_path / "environment", sys.executable, ["x"], ["."], "", alone=alone)
        return list(calls)

    together, apart = ensure("engine==1.0", "other==2")
    assert "--no-deps" not in together
    assert "x" in together
    assert not {"engine==1.0", "other==2"} & set(together)
    assert "--no-deps" in apart
    assert apart[-2:] == ("engine==1.0", "other==2")

    assert not ensure("engine==1.0", "other==2")
    assert ensure("engine==1.1")[-1][-1] == "engine==1.1"
    assert len(ensure()) == 1


def test_folder_on_the_path(environment: ModuleType, calls: list[tuple[str, ...]], tmp_path: Path) -> None:
    """What is in it is imported, distributions there give their entry points, and ``.pth`` files are read."""
    folder = tmp_path / "stand ins"
    (folder / "stand_in-0.dist-info").mkdir(parents=True)
    (folder / "stand_in-0.dist-info" / "entry_points.txt").write_text("[group]\nname = stand_in:register\n")
    (folder / "stand_in.py").touch()
    (folder / "stand_in.pth").write_text("import stand_in\n")
    code = (
        "import sys; from importlib.metadata import entry_points;"
        "print(sys.modules['stand_in'].__file__, *(each.value for each in entry_points(group='group')))"
    )

    def ensure(*paths: str, identity: str = "") -> str:
        calls.clear()
        inside = environment.ensure(
            tmp_path / "environment", sys.executable, [], ["."], identity, paths=paths
        )
        done = subprocess.run([inside, "-c", code], capture_output=True, text=True, check=False, cwd="/")
        return done.stdout.strip()

    expected = f"{folder / 'stand_in.py'} stand_in:register"
    assert ensure(str(folder)) == expected
    assert ensure(str(folder)) == expected
    assert not calls
    assert ensure(str(folder), identity="moved") == expected
    assert ensure(identity="moved") == ""


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("ERROR: No matching distribution found for rare==1", 0),
        # What pip says where the index does not answer, and where the disk is full.
        ("WARNING: Retrying (Retry(total=0))\nERROR: No matching distribution found for rare==1", 1),
        ("ERROR: Could not install packages due to an OSError: No space left on device", 1),
    ],
)
@pytest.mark.parametrize("rare", [True, False])
def test_packages_that_not_every_machine_has(
    environment: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, code: int, rare: bool
) -> None:
    """Where the index has none the environment is left out; all else is a failure."""

    def create(folder: Path, python: str) -> None:
        (folder / "bin").mkdir(parents=True)
        pip = folder / "bin" / "python"
        pip.write_text(f"#!/bin/sh\necho '{said}'\nexit 1\n")
        pip.chmod(0o755)

    monkeypatch.setattr(environment, "create", create)
    words = ["--where-there-are", "rare==1", "x"] if rare else ["rare==1"]
    monkeypatch.setattr(sys, "argv", ["environment.py", "some", "--cache", str(tmp_path), *words])
    assert environment.main() == (code if rare else 1)
    assert not (tmp_path / "venvs" / "some" / ".complete").exists()


def test_what_an_environment_holds_has_the_digest_that_it_had(
    environment: ModuleType, calls: list[tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options that an environment does not use must not have it made again."""
    seen: list[tuple[object, ...]] = []
    monkeypatch.setattr(environment, "digest", lambda *parts: seen.append(parts) or str(len(parts)))
    folder = tmp_path / "environment"
    environment.ensure(folder, sys.executable, ["x"], ["."], "", ["a"], ["engine==1"])
    environment.ensure(folder, sys.executable, ["x"], ["."], "", ["a"], ["engine==1"], ["b==1"], ["scripts"])
    assert seen[0][1:] == (["x"], [""], ["a"], ["engine==1"])
    assert seen[1] == (*seen[0], ["b==1"], ["scripts"])


def test_folder_for_the_path_must_be_there(environment: ModuleType) -> None:
    assert environment.folders_of_checkout("scripts,tests") == ["scripts", "tests"]
    with pytest.raises(environment.argparse.ArgumentTypeError, match="there is no folder 'nowhere'"):
        environment.folders_of_checkout("scripts,nowhere")
