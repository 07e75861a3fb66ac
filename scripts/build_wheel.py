"""Build a wheel from a copy of a source tree, and print its path.

    python scripts/build_wheel.py --out dist

From a copy, because setuptools keeps what it built in ``build/``, where a module that was deleted
since would find its way into the next wheel.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
NOT_SOURCE = shutil.ignore_patterns(
    ".*", "__pycache__", "*.egg-info", "build", "dist", "demo-out", "bench-out"
)


def build_wheel(source: Path, out: Path) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / source.name
        shutil.copytree(source, copy, ignore=NOT_SOURCE)
        command = [sys.executable, "-m", "build", "--wheel", "--outdir", scratch, str(copy)]
        # One date for all files: the same sources give the same wheel, byte for byte.
        environment = {**os.environ, "SOURCE_DATE_EPOCH": "315619200"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{source} does not build:\n{done.stdout}{done.stderr}")
        (wheel,) = Path(scratch).glob("*.whl")
        return Path(shutil.copy(wheel, out))


def main() -> None:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, default=CHECKOUT, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("dist"), help="default: %(default)s")
    arguments = parser.parse_args()
    print(build_wheel(arguments.source.resolve(), arguments.out))


if __name__ == "__main__":
    main()
