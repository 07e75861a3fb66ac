"""What is installed here, and whether it fits together: the facts that `spec-plugins doctor` prints."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import platform
import re
import sys
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Literal

import spec_plugins
from spec_plugins.errors import UnavailableError
from spec_plugins.hooks import HookStatus, check, hooks_of
from spec_plugins.proposer import Need
from spec_plugins.registry import BUILTIN, Registration, registry
from spec_plugins.support import ENGINES, EngineSupport, Part, declared

__all__ = ["Cache", "Engine", "Package", "ProposerStatus", "Report", "examine", "proposers"]

_REQUIREMENT = re.compile(r"([\w.-]+)[^;]*?(?:>=\s*([\d.]+))?[^;]*(?:;(.*))?")


@dataclass(frozen=True, slots=True)
class Package:
    """A distribution that this one requires."""

    name: str
    version: str | None
    """``None``: not installed."""
    minimum: str | None
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine, as far as this Python can see it."""

    name: str
    state: Literal["ready", "absent", "no adapter", "broken"]
    """``no adapter``: installed, but this version of the project cannot run inside it."""
    versions: dict[str, str]
    """Of its distributions that are installed."""
    notes: tuple[str, ...] = ()
    """Why it is not ready, one sentence each."""
    hooks: tuple[HookStatus, ...] = ()


@dataclass(frozen=True, slots=True)
class ProposerStatus:
    """A registered proposer, imported."""

    name: str
    provider: str
    path: str
    usable: bool
    reason: str
    """Why it is not usable."""
    broken: bool
    """Not usable for another reason than that something optional is not installed."""
    summary: str = ""
    needs: tuple[str, ...] | None = ()
    """``None``: depends on its options. So for ``uses``."""
    uses: tuple[str, ...] | None = ()


@dataclass(frozen=True, slots=True)
class Cache:
    """Where numba keeps what it compiled, so that only the first run on a machine compiles."""

    folder: str | None
    """``None``: nowhere."""
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """Everything found."""

    python: str
    executable: str
    system: str
    cpu: str
    cpus: int
    """How many this process may use."""
    threads: dict[str, str]
    """Environment variables that set how many threads libraries start."""
    version: str
    location: str
    packages: tuple[Package, ...]
    engines: tuple[Engine, ...]
    proposers: tuple[ProposerStatus, ...]
    set_aside: tuple[str, ...]
    """Packages and names that the registry set aside, one sentence each."""
    cache: Cache
    broken: tuple[str, ...] = field(default=())
    """What is installed and does not work, one sentence each."""


def examine() -> Report:
    """Look at everything. Imports the engines that have an adapter, to compare what it relies on."""
    packages = tuple(requirements())
    engines = tuple(_engine(name) for name in ENGINES)
    found = tuple(proposers())
    cache = _cache()
    set_aside = tuple(registry().faults)
    broken = [
        *(p.fault for p in packages if p.fault),
        *(f"{e.name}: {fault}" for e in engines if e.state == "broken" for fault in e.notes),
        *(p.reason for p in found if p.broken),
        *set_aside,
        *([cache.fault] if cache.fault else []),
    ]
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
    return Report(
        python=f"{platform.python_implementation()} {platform.python_version()}",
        executable=sys.executable,
        system=platform.platform(),
        cpu=_cpu(),
        cpus=_cpus(),
        threads={name: os.environ[name] for name in names if name in os.environ},
        version=spec_plugins.__version__,
        location=str(Path(spec_plugins.__file__).parent),
        packages=packages,
        engines=engines,
        proposers=found,
        set_aside=set_aside,
        cache=cache,
        broken=tuple(broken),
    )


def proposers() -> list[ProposerStatus]:
    """Every registered proposer by name; imports each."""
    return [_proposer(r) for _, r in sorted(registry().proposers.items())]


def requirements(extra: str | None = None) -> list[Package]:
    """What this distribution requires, always or with an extra, and what is installed of it."""
    found = []
    for text in metadata.requires(BUILTIN) or ():
        match = _REQUIREMENT.fullmatch(text)
        if match is None:
            continue
        name, minimum, marker = match[1], match[2], (match[3] or "").replace("'", '"')
        wanted = f'extra == "{extra}"' if extra else ""
        if (wanted in marker) if wanted else ("extra" not in marker):
            found.append(_package(name, minimum))
    return found


def _package(name: str, minimum: str | None) -> Package:
    version = _version(name)
    if version is None:
        return Package(name, None, minimum, f"{name} is not installed: pip install '{name}>={minimum or 0}'")
    if minimum and _numbers(version) < _numbers(minimum):
        return Package(
            name, version, minimum, f"{name} {version} is too old: pip install '{name}>={minimum}'"
        )
    return Package(name, version, minimum)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """The release of a version, without trailing zeros, to compare."""
    numbers = [int(n) for n in re.findall(r"\d+", re.split(r"[^\d.]", version, maxsplit=1)[0])]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def _proposer(registration: Registration) -> ProposerStatus:
    name, provider, path = registration.name, registration.provider, registration.path
    try:
        cls = registration.load()
    except UnavailableError as error:
        return ProposerStatus(name, provider, path, False, str(error), not _optional(error, path))
    lines = (cls.__doc__ or "").strip().splitlines()
    return ProposerStatus(
        name, provider, path, True, "", False, lines[0] if lines else "",
        _names(declared(cls, "needs")), _names(declared(cls, "uses")),
    )  # fmt: skip


def _optional(error: UnavailableError, path: str) -> bool:
    """Whether something beside the proposer's own package is not installed."""
    cause = error.__cause__
    if not isinstance(cause, ModuleNotFoundError):
        return False
    return not path.startswith((f"{cause.name}:", f"{cause.name}."))


def _names(needs: frozenset[Need] | None) -> tuple[str, ...] | None:
    return None if needs is None else tuple(sorted(n.value for n in needs))


def _engine(name: str) -> Engine:
    about = ENGINES[name]
    versions = {d: v for part in about.parts for d in part.distributions if (v := _version(d)) is not None}
    missing = [part for part in about.parts if not _importable(part.module)]
    if missing:
        faults = tuple(_half_installed(part, versions) for part in missing)
        half = any(d in versions for part in missing for d in part.distributions)
        return Engine(name, "broken" if half else "absent", versions, faults)
    if about.provides is None:
        return Engine(name, "no adapter", versions, ("this version has no adapter for it",))
    hooks, faults = _adapter(name, about)
    return Engine(name, "broken" if faults else "ready", versions, faults, hooks)


def _importable(module: str) -> bool:
    """Whether a module is there, without importing it; a mere folder of that name is not one."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None


def _half_installed(part: Part, versions: dict[str, str]) -> str:
    names = [f"{d} {versions[d]}" for d in part.distributions if d in versions]
    if names:
        return f"{' and '.join(names)} is installed, but holds no module {part.module!r}: install it anew"
    return f"{part.module} is not installed"


def _adapter(name: str, about: EngineSupport) -> tuple[tuple[HookStatus, ...], tuple[str, ...]]:
    """An adapter's hooks, compared, and what is wrong with it."""
    faults = [package.fault for package in requirements(name) if package.version and package.fault]
    with contextlib.redirect_stdout(sys.stderr):  # engines print when they are imported
        statuses = tuple(check(hook) for hook in hooks_of(about.package))
        faults += [f"{s.hook.path}: {s.detail}; it {s.hook.purpose}" for s in statuses if s.status != "ok"]
        try:
            importlib.import_module(f"spec_plugins.adapters.{about.package}")
        except (Exception, SystemExit) as error:  # an engine's import may raise anything
            faults.append(f"the adapter cannot be imported: {type(error).__name__}: {error}")
    return statuses, tuple(faults)


def _cache() -> Cache:
    """The first folder that numba, which looks at the same ones, can write to."""
    from spec_plugins import proposers as package

    here = Path(package.__file__).parent / "__pycache__"
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "numba"
    own = os.environ.get("NUMBA_CACHE_DIR")
    for folder in ([Path(own)] if own else []) + [here, home]:
        parent = next((p for p in (folder, *folder.parents) if p.exists()), folder)
        if parent.is_dir() and os.access(parent, os.W_OK | os.X_OK):
            return Cache(str(folder))
    return Cache(
        None,
        f"numba can write neither to {here} nor to {home}, so proposers cannot start: set NUMBA_CACHE_DIR to "
        "a folder that can be written to",
    )


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    named = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return named[1] if named else platform.processor() or "unknown"


def _cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
