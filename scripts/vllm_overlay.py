"""Make a second version of vLLM for the CPU: its Python files, over the compiled files of the first.

    python scripts/vllm_overlay.py 0.33.0

vLLM's own wheels are compiled for GPUs; on a CPU, the Python files of one run over the compiled files
of the release that the `vllm` environment holds. Whoever puts ``overlays/vllm-0.33.0`` of the cache
first on PYTHONPATH imports that version. It is there for tests of what differs between versions.

What is there already is not made again; what was interrupted starts afresh.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

from environment import DEFAULT_CACHE, SetupError, locked, provide, site_packages
from fetch import FetchError, Package, download

# Raise this when what is made below changes, so that caches are made again.
RECIPE = 1

WHEELS = {
    "0.33.0": Package(
        "vllm",
        "0.33.0",
        "vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl",
        "4b6bdec4ab269990bf70d45a3c1e94c3760a27064513760193b26d6f0da883aa",
        "Apache-2.0",
        "vLLM, compiled for CUDA",
    ),
}

# What the wheel compiled for GPUs, and the sources that it compiles for them when it runs.
FOR_GPUS = {".so", ".cu", ".cuh", ".h", ".hpp", ".inl", ".cpp"}
# With triton_kernels there but no triton, each process would log that it fails to import it.
FOR_GPUS_BY_NAME = {"vllm-rs", "triton_kernels"}

CHECK = """
import sys
from importlib.metadata import version
import vllm
from vllm.platforms import current_platform
found = (vllm.__version__, version("vllm"), current_platform.is_cpu())
sys.exit(0 if found == (sys.argv[1], sys.argv[1] + "+cpu", True) else f"found {found}")
"""


def extract(wheel: Path, folder: Path) -> int:
    """Take from the wheel what is not compiled, and return how many files that is."""
    count = 0
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            path = Path(member.filename)
            if path.parts[0] != "vllm" or path.suffix in FOR_GPUS or FOR_GPUS_BY_NAME & {*path.parts}:
                continue
            target = Path(archive.extract(member, folder))
            if member.external_attr >> 16 & 0o100:  # an executable, which zipfile does not keep so
                target.chmod(0o755)
            count += not member.is_dir()
    return count


def check(python: Path, folder: Path, version: str) -> None:
    """Import it as the tests will, and refuse it if it is not the version or the platform meant."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "VLLM_NO_USAGE_STATS": "1"}
    command = [str(python), "-c", CHECK, version]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder, check=False)
    if done.returncode:
        raise SetupError(f"the overlay in {folder} does not work:\n{done.stdout}{done.stderr}")


def make(package: Package, cache: Path, python: Path) -> Path:
    if not python.exists():
        raise SetupError(f"there is no {python}: run make environment-vllm first")
    folder = cache / "overlays" / f"vllm-{package.version}"
    stamp = folder / ".complete"
    first = site_packages(python) / "vllm"
    compiled = sorted(str(path.relative_to(first)) for path in first.rglob("*.so"))
    if not compiled:
        raise SetupError(f"no compiled vLLM in {first}: run make environment-vllm first")
    wanted = json.dumps([RECIPE, package.sha256, str(first), compiled])
    with locked(folder.with_name(folder.name + ".lock"), folder.name):
        if stamp.exists() and stamp.read_text() == wanted:
            return folder
        print(f"overlay: vLLM {package.version} over {first} (336 MB to download, 60 MB on disk)", flush=True)
        new = folder.with_name(f".{folder.name}.new")
        if new.exists():  # of an interrupted run; we hold the lock
            shutil.rmtree(new)
        wheel = download(package, cache)
        count = extract(wheel, new)
        for name in compiled:
            link = new / "vllm" / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(first / name)
        provide(new, [f"{package.name}=={package.version}+cpu"])
        print(f"  {count} files of the wheel, {len(compiled)} links; importing it", flush=True)
        check(python, new, package.version)
        if folder.exists():  # made by another recipe, or over other files
            shutil.rmtree(folder)
        (new / ".complete").write_text(wanted)
        new.rename(folder)
        wheel.unlink()
    return folder


def main() -> int:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("version", choices=sorted(WHEELS))
    parser.add_argument("--cache", type=Path, default=Path(DEFAULT_CACHE), help="default: %(default)s")
    arguments = parser.parse_args()
    cache = arguments.cache.expanduser().resolve()
    start = time.monotonic()
    try:
        folder = make(WHEELS[arguments.version], cache, cache / "venvs" / "vllm" / "bin" / "python")
    except (FetchError, SetupError) as error:
        print(f"vllm_overlay.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nvllm_overlay.py: interrupted; run it again", file=sys.stderr)
        return 130
    took = time.monotonic() - start
    print(f"{folder}" + (f" made in {took:.0f} s" if took > 3 else " is there"), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
