"""Names to proposers, with distributions made for the purpose on ``sys.path``."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spec_plugins.errors import ConfigError, UnavailableError, UnknownProposerError
from spec_plugins.proposer import Proposer
from spec_plugins.registry import Registration, Registry, registry, suggest

BUILTINS = {"ngram", "suffix", "lookahead", "combine", "draft_model"}
ALREADY = set(Registry.discover().proposers)
"""Those, and what else this environment has."""
PLUGIN = """
from spec_plugins import hookimpl

@hookimpl
def spec_plugins_proposers():
    return {names}
"""
PROPOSER = """
from spec_plugins import Proposer

class Acme(Proposer):
    def __init__(self, width: int = 2) -> None:
        self.width = width

    def propose(self, step):
        return []
"""


class Site:
    """A folder on ``sys.path`` in which distributions can be put."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, name: str, code: str) -> None:
        (self.path / f"{name}.py").write_text(code)

    def distribution(
        self, name: str, entry_points: str | dict[str, str], metadata: str | None = None, **modules: str
    ) -> None:
        """Put in a distribution; ``{module}`` in an entry point's name makes it unique to the test."""
        folder = self.path / f"{name.replace('-', '_')}-1.0.dist-info"
        folder.mkdir()
        if isinstance(entry_points, dict):
            entry_points = "\n".join(f"{k} = {v}" for k, v in entry_points.items())
        (folder / "entry_points.txt").write_text(f"[spec_plugins]\n{entry_points}\n")
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n" if metadata is None else metadata
        if text:
            (folder / "METADATA").write_text(text)
        for module, code in modules.items():
            self.write(module, code)

    def plugin(self, name: str, names: Any) -> None:
        """A distribution with one plugin module that returns ``names``."""
        module = name.replace("-", "_")
        self.distribution(
            name, {"plugin": f"{module}_plugin"}, **{f"{module}_plugin": PLUGIN.format(names=names)}
        )


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    importlib.invalidate_caches()
    yield Site(tmp_path)
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def only_fault(found: Registry) -> str:
    assert set(found.proposers) == ALREADY
    (fault,) = found.faults
    return fault


# ---------------------------------------------------------------------------------------------------
# Discovery


def test_the_built_ins_are_there() -> None:
    found = Registry.discover()
    assert set(found.proposers) >= BUILTINS
    assert {found.proposers[name].provider for name in BUILTINS} == {"spec-plugins"}
    assert registry() is registry()


def test_an_installed_package_brings_its_proposers(site: Site) -> None:
    site.plugin("acme-drafters", {"acme": "acme_proposer:Acme", "acme-2": "acme_proposer:Acme"})
    site.write("acme_proposer", PROPOSER)
    found = Registry.discover()
    assert set(found.proposers) == ALREADY | {"acme", "acme-2"}
    assert found.faults == []
    assert found.find("acme").provider == "acme-drafters"
    proposer = found.create("acme", {"width": 5})
    assert (proposer.name, type(proposer).__name__) == ("acme", "Acme")
    assert proposer.width == 5  # type: ignore[attr-defined]


def test_listing_imports_no_proposer(site: Site) -> None:
    site.plugin("acme", {"acme": "acme_lazy:Acme"})
    site.write("acme_lazy", PROPOSER)
    found = Registry.discover()
    assert "acme_lazy" not in sys.modules
    found.find("acme").load()
    assert "acme_lazy" in sys.modules


def test_listing_the_built_ins_imports_none_of_them_nor_anything_heavy() -> None:
    code = """
import sys
from spec_plugins.registry import registry
names = sorted(registry().proposers)
print(*names)
print(*sorted({m.partition(".")[0] for m in sys.modules} & {"numba", "torch", "pydantic", "transformers"}))
print(*sorted(m for m in sys.modules if m.startswith("spec_plugins.proposers.")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names, heavy, imported = done.stdout.split("\n")[:3]
    assert set(names.split()) >= BUILTINS
    assert (heavy, imported) == ("", "")


def test_two_packages_may_name_their_entry_points_alike(site: Site) -> None:
    for name in ("one", "two"):
        site.plugin(name, {name: "acme_proposer:Acme"})
    found = Registry.discover()
    assert set(found.proposers) == ALREADY | {"one", "two"}
    assert found.faults == []


def test_the_same_package_twice_on_the_path_counts_once(site: Site, tmp_path: Path, monkeypatch: Any) -> None:
    again = tmp_path / "again"
    again.mkdir()
    for where in (site, Site(again)):
        where.plugin("acme", {"acme": "acme_proposer:Acme"})
    monkeypatch.syspath_prepend(again)
    found = Registry.discover()
    assert set(found.proposers) == ALREADY | {"acme"}
    assert found.faults == []


def test_an_object_may_be_the_plugin(site: Site) -> None:
    code = """
from spec_plugins import hookimpl
class Plugin:
    @hookimpl
    def spec_plugins_proposers(self):
        return {"acme": "acme_proposer:Acme"}
plugin = Plugin()
"""
    site.distribution("acme", {"plugin": "acme_objects:plugin"}, acme_objects=code)
    assert "acme" in Registry.discover().proposers


def test_a_package_without_metadata_is_called_by_its_module(site: Site) -> None:
    code = PLUGIN.format(names={"acme": "acme_proposer:Acme"})
    site.distribution("acme", {"plugin": "acme_bare"}, metadata="", acme_bare=code)
    found = Registry.discover()
    assert found.find("acme").provider == "acme_bare"


# ---------------------------------------------------------------------------------------------------
# Faults disturb nothing else


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (None, "ModuleNotFoundError: No module named 'acme_broken'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("import nonesuch", "ModuleNotFoundError: No module named 'nonesuch'"),
        (
            "from spec_plugins import hookimpl\n@hookimpl\ndef spec_plugins_proposers(nonesuch): return {}",
            "PluginValidationError",
        ),
    ],
)
def test_an_entry_point_that_does_not_load_is_set_aside(site: Site, code: str | None, says: str) -> None:
    modules = {} if code is None else {"acme_broken": code}
    site.distribution("acme-drafters", {"plugin": "acme_broken"}, **modules)
    fault = only_fault(Registry.discover())
    assert fault.startswith("acme-drafters: entry point 'plugin' failed: ")
    assert says in fault


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("raise ValueError('no')", "hook spec_plugins_proposers failed: ValueError: no"),
        ("raise SystemExit(3)", "hook spec_plugins_proposers failed: SystemExit: 3"),
        ("return 7", "hook spec_plugins_proposers failed: TypeError"),
        ("return ['acme']", "hook spec_plugins_proposers failed: ValueError"),
        ("return None", "names no proposers"),
        ("return {'Acme': 'm:C'}", "'Acme' is no proposer name (a-z, 0-9, _ and -)"),
        ("return {'-acme': 'm:C'}", "'-acme' is no proposer name"),
        ("return {'': 'm:C'}", "'' is no proposer name"),
        ("return {'acme.x': 'm:C'}", "'acme.x' is no proposer name"),
        ("return {7: 'm:C'}", "7 is no proposer name"),
        ("return {'acme': 'm.C'}", "'acme' must name 'package.module:Class'"),
        ("return {'acme': 'm:C:D'}", "'acme' must name 'package.module:Class'"),
        ("return {'acme': dict}", "'acme' must name 'package.module:Class'"),
    ],
)
def test_a_hook_that_fails_or_answers_nonsense_is_set_aside(site: Site, body: str, says: str) -> None:
    code = f"from spec_plugins import hookimpl\n@hookimpl\ndef spec_plugins_proposers():\n    {body}\n"
    site.distribution("acme-drafters", {"plugin": "acme_hook"}, acme_hook=code)
    fault = only_fault(Registry.discover())
    assert fault.startswith("acme-drafters: ")
    assert says in fault


def test_a_plugin_whose_hook_is_misspelt_or_unmarked_is_named(site: Site) -> None:
    site.distribution("acme", {"plugin": "acme_mute"}, acme_mute="def spec_plugins_proposers(): return {}")
    assert "marked @spec_plugins.hookimpl" in only_fault(Registry.discover())


def test_a_package_may_register_nothing(site: Site) -> None:
    site.plugin("acme", {})
    assert Registry.discover().faults == []


def test_a_bad_name_does_not_take_its_neighbours_along(site: Site) -> None:
    site.plugin("acme", {"BAD": "m:C", "good": "m:C"})
    found = Registry.discover()
    assert set(found.proposers) == ALREADY | {"good"}
    assert len(found.faults) == 1


@pytest.mark.parametrize("name", ["aaa", "zzz"])
def test_nobody_takes_a_name_that_is_taken(site: Site, name: str) -> None:
    site.plugin(name, {"suffix": "m:C"})
    found = Registry.discover()
    assert only_fault(found) == f"{name}: the name 'suffix' is already spec-plugins's"
    assert found.find("suffix").provider == "spec-plugins"


# ---------------------------------------------------------------------------------------------------
# Loading


def load(path: str, provider: str = "acme-drafters") -> type[Proposer]:
    return Registration("acme", path, provider).load()


def test_a_missing_module_is_named_with_the_way_to_install_it(site: Site) -> None:
    site.write("acme_needs", "import nonesuch.inner")
    with pytest.raises(
        UnavailableError,
        match=r"'acme' \(from acme-drafters\) needs the module 'nonesuch'.*"
        r"not installed: pip install nonesuch$",
    ):
        load("acme_needs:Acme")


@pytest.mark.parametrize("module", ["torch", "transformers", "safetensors"])
def test_a_built_in_names_the_extra_that_brings_its_module(site: Site, module: str, monkeypatch: Any) -> None:
    site.write("acme_torch", f"import {module}")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UnavailableError, match=r"pip install 'spec-plugins\[transformers\]'$"):
        load("acme_torch:Acme", "spec-plugins")
    with pytest.raises(UnavailableError, match=rf"pip install {module}$"):
        load("acme_torch:Acme")


@pytest.mark.parametrize("path", ["acme_gone:Acme", "acme_gone.inner:Acme"])
def test_a_package_that_misses_its_own_module_is_broken(path: str) -> None:
    with pytest.raises(UnavailableError, match=r"pip install --force-reinstall acme-drafters$"):
        load(path)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("1 / 0", "cannot be imported from 'acme_bad:Acme': ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("class Other: pass", "AttributeError"),
        ("from sys import nonesuch", "ImportError"),
        ("class Acme: pass", "'acme_bad:Acme' is not a subclass of spec_plugins.Proposer"),
        ("Acme = 7", "is not a subclass of spec_plugins.Proposer"),
        ("from spec_plugins import Proposer\nclass Acme(Proposer): pass", "does not define propose"),
    ],
)
def test_what_is_no_proposer_is_unavailable_with_the_reason(site: Site, code: str, says: str) -> None:
    site.write("acme_bad", code)
    with pytest.raises(UnavailableError) as caught:
        load("acme_bad:Acme")
    assert says in str(caught.value)
    assert "proposer 'acme' (from acme-drafters)" in str(caught.value)
    assert isinstance(caught.value, ImportError)


def test_an_unknown_name_lists_the_known_and_the_nearest() -> None:
    found = Registry({name: Registration(name, "m:C", "acme") for name in ("suffix", "ngram")})
    with pytest.raises(UnknownProposerError) as caught:
        found.find("sufix")
    assert str(caught.value) == (
        "no proposer is registered as 'sufix'; did you mean 'suffix'? Registered: ngram, suffix"
    )
    with pytest.raises(UnknownProposerError, match=r"'zebra'\. Registered"):
        found.create("zebra")


def test_creating_checks_options(site: Site) -> None:
    site.write("acme_made", PROPOSER)
    found = Registry()
    found.add(Registration("acme", "acme_made:Acme", "acme"))
    assert found.create("acme").width == 2  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"options\.widht: unknown field; did you mean 'width'\?"):
        found.create("acme", {"widht": 3})


@pytest.mark.parametrize(("word", "says"), [("sufix", "; did you mean 'suffix'?"), ("zebra", "."), ("", ".")])
def test_suggestions(word: str, says: str) -> None:
    assert suggest(word, ["ngram", "suffix"]) == says
    assert suggest(word, {"ngram": 1, "suffix": 2}) == says
