"""The wheel: what is in it, and that it works in an environment that holds nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent
EXAMPLE = CHECKOUT / "examples" / "acme_drafters"

pytestmark = pytest.mark.slow


def output_of(*command: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, cwd=cwd, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout.strip()


def build(source: Path, out: Path) -> Path:
    script = CHECKOUT / "scripts" / "build_wheel.py"
    return Path(output_of(sys.executable, script, "--source", source, "--out", out))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(CHECKOUT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def fresh(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``bin`` of a new environment with the wheel in it and what the wheel asks for."""
    folder = tmp_path_factory.mktemp("fresh")
    output_of(sys.executable, "-m", "venv", folder)
    pip = (folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    output_of(*pip, wheel)
    return folder / "bin"


def test_wheel_holds_the_whole_package(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "spec_plugins/py.typed" in names
    assert "spec_plugins/evaluation/recommendation_page.html.jinja" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    for folder, inside in (
        ("spec_plugins", "spec_plugins"),
        ("proposers", "spec_plugins/proposers"),
        ("adapters", "spec_plugins/adapters"),
    ):
        modules = (path.relative_to(CHECKOUT / folder) for path in (CHECKOUT / folder).rglob("*.py"))
        assert {f"{inside}/{module.as_posix()}" for module in modules} <= names


def test_wheel_holds_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"spec_plugins"}
    assert not [name for name in names if "__pycache__" in name]


def test_fresh_environment_imports_it_without_torch(fresh: Path, tmp_path: Path) -> None:
    code = "import spec_plugins, spec_plugins.proposers; print(spec_plugins.__file__)"
    where = output_of(fresh / "python", "-c", code, cwd=tmp_path)
    assert Path(where).is_relative_to(fresh.parent)
    torch = output_of(fresh / "python", "-c", "import importlib.util as u; print(u.find_spec('torch'))")
    assert torch == "None"


def test_fresh_environment_has_a_command_line_without_torch(fresh: Path, tmp_path: Path) -> None:
    assert "list" in output_of(fresh / "spec-plugins", "--help", cwd=tmp_path)
    assert "ngram" in output_of(fresh / "spec-plugins", "list", cwd=tmp_path)


def test_third_party_package_installs_beside_it_and_is_listed(fresh: Path, tmp_path: Path) -> None:
    example = build(EXAMPLE, tmp_path)
    output_of(fresh / "python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet", example)
    listed = json.loads(output_of(fresh / "spec-plugins", "list", "--json", cwd=tmp_path))
    entries = {entry["name"]: entry for entry in listed["proposers"]}
    assert entries["acme-bigram"]["usable"] is True
