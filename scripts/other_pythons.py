"""Run the tests that need no torch from the built wheel, on the oldest and the newest supported Python here.

    python scripts/other_pythons.py

The versions are those of the classifiers in setup.cfg, but for the one that runs this script. Which are
left out, since the machine lacks them or they are between two that are run, is said.
"""

from __future__ import annotations

import argparse
import configparser
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from build_wheel import build_wheel
from environment import CHECKOUT, DEFAULT_CACHE, SetupError, ensure, version_of

TEST_REQUIREMENTS = ["hypothesis>=6.100", "pytest>=8", "pytest-timeout>=2.3", "pyyaml>=6"]


def supported_versions() -> Iterator[str]:
    setup = configparser.ConfigParser()
    setup.read(CHECKOUT / "setup.cfg")
    for classifier in setup["metadata"]["classifiers"].split("\n"):
        version = classifier.rpartition(" :: ")[2]
        if classifier.startswith("Programming Language :: Python ::") and "." in version:
            yield version


def interpreter(version: str) -> str | None:
    """A Python of this version: on the path, or one that pyenv installed."""
    candidates = [shutil.which(f"python{version}")]
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    candidates += [str(path) for path in sorted(pyenv.glob(f"versions/{version}.*/bin/python"))]
    # A shim of pyenv may stand on the path and yet run nothing.
    return next((c for c in candidates if c and version_of(c).startswith(f"{version}.")), None)


def needs_torch(path: Path) -> bool:
    imports = r"^(?:import|from) (?:torch|transformers|safetensors)\b"
    return path.suffix == ".py" and bool(re.search(imports, path.read_text(), re.MULTILINE))


def leave_out(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name == "__pycache__" or needs_torch(Path(folder) / name)]


def test(python: Path) -> bool:
    """Run the tests away from the checkout, so that they import what is installed."""
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copytree(CHECKOUT / "tests", Path(scratch) / "tests", ignore=leave_out)
        shutil.copy(CHECKOUT / "pyproject.toml", scratch)
        command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += ["-m", "not slow and not model", "tests"]
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines() or [f"pytest said nothing, exit status {done.returncode}"]
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n")
    print(f"  {lines[-1].strip('= ')}", flush=True)
    return done.returncode == 0


def main() -> int:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, default=Path(DEFAULT_CACHE), help="default: %(default)s")
    arguments = parser.parse_args()
    venvs = arguments.cache.expanduser().resolve() / "venvs"
    this = "{}.{}".format(*sys.version_info)
    failed = []
    with tempfile.TemporaryDirectory() as scratch:
        print("building the wheel", flush=True)
        wheel = build_wheel(CHECKOUT, Path(scratch))
        identity = hashlib.sha256(wheel.read_bytes()).hexdigest()[:16]
        found = {version: interpreter(version) for version in supported_versions() if version != this}
        here = [version for version, python in found.items() if python is not None]
        print(f"Python {this}: runs the whole of the tests")
        for version, python in found.items():
            if python is None:
                print(f"Python {version}: skipped, not on this machine")
                continue
            if version not in (here[0], here[-1]):
                print(f"Python {version}: skipped, between two that are run")
                continue
            print(f"Python {version}: {python}", flush=True)
            try:
                inside = ensure(venvs / f"py{version}", python, TEST_REQUIREMENTS, [str(wheel)], identity)
            except SetupError as error:
                print(f"  {error}", file=sys.stderr)
                failed.append(version)
                continue
            if not test(inside):
                failed.append(version)
    if failed:
        print(f"failed on Python {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
