"""Make or update a virtual environment in the cache, with this project in it.

    python3 scripts/environment.py core --extras dev,transformers torch==2.13.0

Nothing is done where the environment already holds what is asked for. One whose making was
interrupted is made afresh, because pip takes a half-copied package for an installed one; pip's own
cache keeps that quick. All that is remembered stands in one stamp, written last.

Options mend what an engine's packages declare: ``--without`` removes what they ask for and do not work
with, ``--alone`` installs one of them without what it asks for, ``--provides`` adds the name of a
distribution that they look up and do not bring. ``--path`` adds a folder of the checkout, with all that
stands in for what an engine asks for. ``--where-there-are`` names packages that not every platform has: where
one cannot be had, no environment is made, the reason is told, and that is no failure.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
DEFAULT_CACHE = os.environ.get("SPEC_PLUGINS_CACHE", "~/.cache/spec-plugins")
# Marks the distributions that this script wrote; pip leaves its own name there.
INSTALLER = "spec-plugins environment.py"
# Holds the folders that ``--path`` names.
PATH_FILE = "spec-plugins-paths.pth"


class SetupError(Exception):
    """A message for the user."""


class NothingFoundError(SetupError):
    """The index has no file of a package for this machine."""


class NotHereError(Exception):
    """An environment of packages that not every machine can have is not made."""


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Let one process at a time do this. The lock dies with its process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that makes {what}", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def pip(python: Path, *arguments: str) -> None:
    """Run pip, showing downloads as they start and everything where it fails."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    shown = re.compile(r"\s*(Downloading|Using cached) (?!.*\.metadata)(.* [MG]B\))")
    lines = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout
        for line in process.stdout:
            lines.append(line)
            if match := shown.match(line):
                print(f"  {match[1].lower()} {match[2]}", flush=True)
            elif line.startswith("Installing collected packages:"):
                print(f"  installing {line.count(',') + 1} package(s)", flush=True)
    if process.returncode:
        said = "".join(lines[-40:])
        print(said, file=sys.stderr)
        # Where the index does not answer, pip says that there is no such package too, after trying again.
        nothing = "No matching distribution found" in said and "Retrying (" not in "".join(lines)
        kind = NothingFoundError if nothing else SetupError
        raise kind(f"failed, pip's last lines are above: {' '.join(command)}")


def create(folder: Path, python: str) -> None:
    """Make an empty environment, in place of whatever is there."""
    command = [python, "-m", "venv", "--clear", str(folder)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        # Some distributions ship Python's venv without the pip that goes into it.
        subprocess.run([*command, "--without-pip"], check=True)
        subprocess.run(
            [python, "-m", "pip", "--python", str(folder / "bin/python"), "install", "--quiet", "pip"],
            check=True,
        )


def site_packages(python: Path) -> Path:
    """Where an environment keeps what is installed in it."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    done = subprocess.run([python, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    return Path(done.stdout.strip())


def provide(site: Path, provided: Sequence[str]) -> None:
    """Add distributions that are a name and a version alone, in place of any that were added before.

    Args:
        site: a folder on ``sys.path``.
        provided: each as ``NAME==VERSION``.
    """
    for mark in list(site.glob("*.dist-info/INSTALLER")):
        if mark.read_text().strip() == INSTALLER:
            shutil.rmtree(mark.parent)
    for each in provided:
        name, _, version = each.partition("==")
        for installed in metadata.distributions(name=name, path=[str(site)]):
            raise SetupError(f"cannot provide {each}: {name} {installed.version} is installed in {site}")
        folder = site / f"{re.sub('[-_.]+', '_', name).lower()}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (folder / "INSTALLER").write_text(INSTALLER + "\n")
        files = ("METADATA", "INSTALLER", "RECORD")
        (folder / "RECORD").write_text("".join(f"{folder.name}/{file},,\n" for file in files))


def add_paths(site: Path, folders: Sequence[Path]) -> None:
    """Put folders on the environment's ``sys.path``, in place of any that were added before.

    They come after what is installed. Like an environment's own folder, each is searched for ``.pth`` files
    and for distributions, whose entry points are found.

    Args:
        site: where the environment keeps what is installed in it.
        folders: absolute.
    """
    file = site / PATH_FILE
    if folders:
        lines = (f"import site; site.addsitedir({str(folder)!r})\n" for folder in folders)
        file.write_text("".join(lines), encoding="utf-8")
    else:
        file.unlink(missing_ok=True)


def digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def version_of(python: str) -> str:
    """Full version of an interpreter, or an empty string where it does not run."""
    code = "import sys; print('.'.join(map(str, sys.version_info[:3])))"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def ensure(  # the one function behind every environment of the project
    folder: Path,
    python: str,
    requirements: Sequence[str],
    project: Sequence[str],
    identity: str,
    without: Sequence[str] = (),
    provides: Sequence[str] = (),
    alone: Sequence[str] = (),
    paths: Sequence[str] = (),
    where_there_are: Sequence[str] = (),
) -> Path:
    """Bring an environment up to date and return its interpreter.

    Args:
        folder: where it is or will be.
        python: the interpreter to make it from.
        requirements: what pip installs beside the project.
        project: how pip installs the project itself, ``["-e", path]`` or ``[wheel]``.
        identity: changes when the project has to be installed again, though it needs nothing new.
        without: what is removed again after pip has installed the rest.
        provides: names and versions to find in it, with no files behind them (see ``provide``).
        alone: what pip installs without what it asks for.
        paths: folders of the checkout to put on its ``sys.path`` (see ``add_paths``).
        where_there_are: what pip installs too, and not every platform has.

    Raises:
        NotHereError: it has not; the environment is left without its stamp.
        SetupError: it could not be made.
    """
    requirements = [*requirements, *where_there_are]
    inside = folder / "bin" / "python"
    stamp = folder / ".complete"
    version = version_of(python)
    if not version:
        raise SetupError(f"{python} does not run")
    if tuple(map(int, version.split("."))) < (3, 10):
        raise SetupError(f"{python} is Python {version}; 3.10 or newer is needed: make PYTHON=…")
    # What the project needs can change with these two files only.
    pyproject = (CHECKOUT / "pyproject.toml").read_text()
    sources = [(CHECKOUT / "setup.cfg").read_text(), pyproject.partition("\n[tool.")[0]]
    extras = [p.partition("[")[2] for p in project]
    parts = [sources, list(requirements), extras, list(without), list(provides)]
    if alone or paths:  # else the digest stays what it was before there were these
        parts += [list(alone), list(paths)]
    wanted = {"python": version, "packages": digest(*parts), "project": identity}
    with locked(folder.with_name(folder.name + ".lock"), folder.name):
        try:
            found = json.loads(stamp.read_text())
        except (FileNotFoundError, ValueError):
            found = {}
        if found == wanted:
            return inside
        start = time.monotonic()
        stamp.unlink(missing_ok=True)  # an interrupted update leaves no stamp either
        if found.get("python") != version:
            print(f"making environment {folder} (Python {version})", flush=True)
            create(folder, python)
            found = {}
        else:
            print(f"updating environment {folder}", flush=True)
        if found.get("packages") != wanted["packages"]:
            try:
                if where_there_are:
                    pip(inside, "install", "--progress-bar", "off", "--no-compile", *where_there_are)
            except NothingFoundError as error:
                raise NotHereError(f"{' or '.join(where_there_are)} has no file for this machine") from error
            # What is imported is compiled then; compiling all of torch here takes as long as the rest.
            pip(inside, "install", "--progress-bar", "off", "--no-compile", *requirements, *project)
            if alone:
                pip(inside, "install", "--progress-bar", "off", "--no-compile", "--no-deps", *alone)
        if found and found["project"] != identity:
            pip(inside, "install", "--no-deps", "--force-reinstall", *project)
        if without:  # each time: pip installs again what it finds missing
            print(f"  removing {', '.join(without)}", flush=True)
            pip(inside, "uninstall", "--yes", *without)
        site = site_packages(inside)
        provide(site, provides)
        add_paths(site, [CHECKOUT / path for path in paths])
        stamp.write_text(json.dumps(wanted))
        print(f"  ready after {time.monotonic() - start:.0f} s", flush=True)
    return inside


def listed(text: str) -> list[str]:
    return [item for item in text.split(",") if item]


def pinned(text: str) -> list[str]:
    for item in listed(text):
        if not re.fullmatch(r"[\w.-]+==[\w.+!]+", item):
            raise argparse.ArgumentTypeError(f"{item!r} is not NAME==VERSION")
    return listed(text)


def folders_of_checkout(text: str) -> list[str]:
    for item in listed(text):
        if not (CHECKOUT / item).is_dir():
            raise argparse.ArgumentTypeError(f"there is no folder {item!r} in {CHECKOUT}")
    return listed(text)


def main() -> int:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("--python", default=sys.executable, help="made from it; default: %(default)s")
    parser.add_argument("--cache", type=Path, default=Path(DEFAULT_CACHE), help="default: %(default)s")
    parser.add_argument("--extras", default="", help="the project's extras, comma-separated")
    parser.add_argument(
        "--without", type=listed, default=[], metavar="NAME,NAME", help="remove these after installing"
    )
    parser.add_argument(
        "--provides",
        type=pinned,
        default=[],
        metavar="NAME==VERSION,…",
        help="let these be found as installed; nothing is fetched for them",
    )
    parser.add_argument(
        "--alone",
        type=pinned,
        default=[],
        metavar="NAME==VERSION,…",
        help="install these without what they ask for",
    )
    parser.add_argument(
        "--path",
        type=folders_of_checkout,
        default=[],
        metavar="FOLDER,FOLDER",
        help="put these folders of the checkout on sys.path, after what is installed",
    )
    parser.add_argument(
        "--where-there-are",
        type=pinned,
        default=[],
        metavar="NAME==VERSION,…",
        help="install these too; where the index has none for this machine, make no environment and say so",
    )
    parser.add_argument("requirements", nargs="*", help="what else to install, as pip takes it")
    arguments = parser.parse_intermixed_args()  # plain parse_args takes no list after an option
    folder = arguments.cache.expanduser().resolve() / "venvs" / arguments.name
    project = ["-e", f"{CHECKOUT}[{arguments.extras}]" if arguments.extras else str(CHECKOUT)]
    try:
        ensure(
            folder,
            arguments.python,
            arguments.requirements,
            project,
            str(CHECKOUT),
            arguments.without,
            arguments.provides,
            arguments.alone,
            arguments.path,
            arguments.where_there_are,
        )
    except NotHereError as reason:
        print(f"environment.py: no environment {arguments.name}: {reason}; pip's words are above", flush=True)
        return 0
    except SetupError as error:
        print(f"environment.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nenvironment.py: interrupted; run it again", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
