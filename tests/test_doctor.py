"""What `spec-plugins doctor` finds, and the hooks it compares."""

from __future__ import annotations

import json
import os
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from spec_plugins import adapters, doctor, hooks, support
from spec_plugins.cli import app
from spec_plugins.doctor import Package, Report, examine
from spec_plugins.hooks import Hook, check, hooks_of
from spec_plugins.registry import Registration, Registry
from spec_plugins.support import Part


class Engine:
    """Stands in for a class of an engine."""

    value = 3

    def propose(self, tokens: Any, limit: int, *, extra: int = 0, **more: Any) -> None: ...

    @classmethod
    def make(cls, name: str) -> None: ...


@pytest.fixture(autouse=True)
def toy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("toy_engine")
    module.Engine = Engine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "toy_engine", module)


@pytest.mark.parametrize(
    ("path", "parameters", "status", "detail"),
    [
        ("Engine.propose", ("tokens", "limit"), "ok", ""),
        ("Engine.propose", ("tokens", "limit", "extra"), "ok", ""),
        ("Engine.propose", ("ids|tokens", "limit"), "ok", ""),
        ("Engine.speculate|Engine.propose", ("tokens", "limit"), "ok", ""),
        ("Engine.make", ("name",), "ok", ""),
        ("Engine.value", None, "ok", ""),
        ("Engine", (), "ok", ""),
        ("Engine.propose", ("limit", "tokens"), "changed", "another order: tokens, limit, extra"),
        ("Engine.propose", ("tokens", "limit", "gone"), "changed", "no longer takes gone"),
        ("Engine.propose", ("tokens",), "changed", "now requires limit"),
        ("Engine.value", (), "changed", "no signature"),
        ("Engine.absent", None, "missing", "has no Engine.absent"),
        ("Gone.propose|Engine.gone", None, "missing", "has no Gone.propose or Engine.gone"),
    ],
)
def test_check(path: str, parameters: tuple[str, ...] | None, status: str, detail: str) -> None:
    found = check(Hook(f"toy_engine:{path}", parameters, "1", "is tested"))
    assert found.status == status
    assert detail in found.detail


def test_a_method_that_is_passed_on_to_may_take_more() -> None:
    hook = Hook("toy_engine:Engine.propose", ("tokens",), "1", "is wrapped", passes_on=True)
    assert check(hook).status == "ok"
    changed = Hook("toy_engine:Engine.propose", ("gone",), "1", "is wrapped", passes_on=True)
    assert check(changed).status == "changed"


def test_check_survives_an_import_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "quitting_engine.py").write_text("raise SystemExit('no GPU')")
    monkeypatch.syspath_prepend(tmp_path)
    found = check(Hook("quitting_engine:run", None, "1", "is tested"))
    assert found.status == "missing"
    assert "no GPU" in found.detail
    assert check(Hook("absent_engine:run", None, "1", "is tested")).status == "missing"


def test_hooks_are_read_without_importing_the_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "toy"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError")
    (folder / "hooks.py").write_text(
        "from spec_plugins.hooks import Hook\nHOOKS = (Hook('toy_engine:Engine', None, '1', 'is tested'),)"
    )
    monkeypatch.setattr(adapters, "__path__", [str(tmp_path)])
    assert [hook.path for hook in hooks_of("toy")] == ["toy_engine:Engine"]
    assert hooks_of("another") == ()


def test_what_the_embedded_engine_relies_on_is_there() -> None:
    pytest.importorskip("transformers")
    assert hooks_of("transformers")
    assert [s for s in map(check, hooks_of("transformers")) if s.status != "ok"] == []


# ------------------------------------------------------------------------------------------- the report


@pytest.fixture(scope="module")
def report() -> Report:
    return examine()


def test_report_is_plain_data_about_this_machine(report: Report) -> None:
    assert report.executable == sys.executable
    assert report.cpus >= 1
    assert report.cpu
    assert Path(report.location, "doctor.py").is_file()
    assert {p.name for p in report.packages} >= {"numpy", "pluggy", "pydantic", "numba", "typer", "rich"}
    assert "yaml" not in {p.name for p in report.packages}
    assert [e.name for e in report.engines] == list(support.ENGINES)
    assert {p.name for p in report.proposers} >= {"ngram", "suffix"}


def test_nothing_is_broken_here(report: Report) -> None:
    assert report.broken == ()
    assert {e.name: e.state for e in report.engines}["transformers"] in ("ready", "absent")


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An examination that imports no engine."""
    monkeypatch.setattr(doctor, "_importable", lambda module: False)
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    monkeypatch.setattr(doctor, "requirements", lambda extra=None: [Package("numpy", "2.0", "1.26")])
    return monkeypatch


def run(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["doctor", *arguments])
    return done.exit_code, " ".join(done.stdout.split()), " ".join(done.stderr.split())


def test_exit_code_is_0_where_nothing_is_broken(cheap: pytest.MonkeyPatch) -> None:
    cheap.setenv("COLUMNS", "200")
    cheap.setenv("OMP_NUM_THREADS", "7")
    code, out, _ = run()
    assert code == 0
    assert "OMP_NUM_THREADS=7" in out
    assert "vllm absent - vllm is not installed" in out
    assert "Nothing that is installed is broken." in out


def test_exit_code_is_1_where_something_is_broken(cheap: pytest.MonkeyPatch) -> None:
    cheap.setattr(doctor, "requirements", lambda extra=None: [doctor._package("rich", "13")])
    code, _, err = run()
    assert code == 1
    assert "Error: rich is not installed: pip install 'rich>=13'" in err
    code, out, _ = run("--json")
    assert code == 1
    assert json.loads(out)["broken"] == ["rich is not installed: pip install 'rich>=13'"]


def test_a_registry_fault_and_a_broken_proposer_count(cheap: pytest.MonkeyPatch) -> None:
    own = Registry(faults=["acme: set aside"])
    for name, path in (("absent", "acme_absent:X"), ("bad", "math:sqrt"), ("own", "acme.gone:X")):
        own.proposers[name] = Registration(name, path, "acme")
    cheap.setattr(doctor, "registry", lambda: own)
    found = examine()
    assert {p.name for p in found.proposers if p.broken} == {"bad", "own", "absent"}
    assert "acme: set aside" in found.broken


def test_a_proposer_that_lacks_something_optional_is_not_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "acme_with_extra.py").write_text("import absent_extra")
    monkeypatch.syspath_prepend(tmp_path)
    own = Registry({"x": Registration("x", "acme_with_extra:X", "acme")})
    monkeypatch.setattr(doctor, "registry", lambda: own)
    (found,) = doctor.proposers()
    assert not found.usable
    assert not found.broken
    assert "pip install absent_extra" in found.reason


@pytest.mark.parametrize(
    ("version", "minimum", "old"),
    [("2.0", "1.26", False), ("1.9", "1.26", True), ("2", "2.0.0", False), ("5.0.0rc1", "5.0", False),
     ("2.13.0+cpu", "2.5", False), ("1", None, False)],
)  # fmt: skip
def test_versions_are_compared(
    monkeypatch: pytest.MonkeyPatch, version: str, minimum: str | None, old: bool
) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: version)
    assert bool(doctor._package("x", minimum).fault) is old


def test_requirements_of_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [
        "numpy>=1.26",
        "torch>=2.5; extra == 'a'",
        'tomli; python_version < "3" and extra == "b"',
        "???",
    ]
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: listed)
    assert [(p.name, p.minimum) for p in doctor.requirements()] == [("numpy", "1.26")]
    assert [(p.name, p.minimum) for p in doctor.requirements("a")] == [("torch", "2.5")]
    assert [(p.name, p.minimum) for p in doctor.requirements("b")] == [("tomli", None)]


# ---------------------------------------------------------------------------------------------- engines


def pretend(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], modules: set[str]) -> None:
    monkeypatch.setattr(doctor, "_version", versions.get)
    monkeypatch.setattr(doctor, "_importable", modules.__contains__)


def test_an_engine_without_an_adapter_is_found_but_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {"tensorrt-llm": "1.2.1"}, {"tensorrt_llm"})
    without = replace(support.ENGINES["tensorrt-llm"], provides=None)
    monkeypatch.setitem(support.ENGINES, "tensorrt-llm", without)
    found = doctor._engine("tensorrt-llm")
    assert found.state == "no adapter"
    assert found.versions == {"tensorrt-llm": "1.2.1"}
    assert "tensorrt_llm" not in sys.modules


def test_a_distribution_without_its_module_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {"tensorrt-llm": "1.2.1"}, set())
    found = doctor._engine("tensorrt-llm")
    assert found.state == "broken"
    assert "holds no module 'tensorrt_llm'" in found.notes[0]


def test_transformers_without_torch_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {"transformers": "5.24.0"}, {"transformers"})
    found = doctor._engine("transformers")
    assert found.state == "absent"
    assert found.notes == ("torch is not installed",)


@pytest.fixture
def toy_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An engine `toy` with an adapter, in place of vLLM."""
    folder = tmp_path / "toy"
    folder.mkdir()
    (folder / "__init__.py").write_text("print('loading')")
    (folder / "hooks.py").write_text(
        "from spec_plugins.hooks import Hook\n"
        "HOOKS = (Hook('toy_engine:Engine.propose', ('tokens', 'limit'), '1', 'is tested'),)"
    )
    monkeypatch.setattr(adapters, "__path__", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "spec_plugins.adapters.toy", raising=False)
    toy = replace(
        support.ENGINES["vllm"], package="toy", parts=(Part("toy_engine", ("toy",)),), provides=frozenset()
    )
    monkeypatch.setitem(support.ENGINES, "vllm", toy)
    pretend(monkeypatch, {"toy": "1.0"}, {"toy_engine"})
    return folder


def test_an_adapter_that_fits_is_ready(toy_adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = doctor._engine("vllm")
    assert found.state == "ready"
    assert [s.status for s in found.hooks] == ["ok"]
    assert capsys.readouterr().out == ""  # what an import prints must not spoil the JSON


def test_an_adapter_whose_hooks_changed_is_broken(toy_adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Engine, "propose")
    found = doctor._engine("vllm")
    assert found.state == "broken"
    assert found.notes == ("toy_engine:Engine.propose: toy_engine has no Engine.propose; it is tested",)


def test_an_adapter_that_cannot_be_imported_is_broken(toy_adapter: Path) -> None:
    (toy_adapter / "__init__.py").write_text("raise RuntimeError('no driver')")
    found = doctor._engine("vllm")
    assert found.state == "broken"
    assert "RuntimeError: no driver" in found.notes[0]


def test_an_engine_older_than_its_adapter_asks_for_is_broken(
    toy_adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: ["toy>=2.0; extra == 'vllm'"])
    assert doctor._engine("vllm").notes == ("toy 1.0 is too old: pip install 'toy>=2.0'",)


def test_a_mere_folder_is_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_engine_folder").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not doctor._importable("some_engine_folder")
    assert not doctor._importable("absent_engine")
    assert doctor._importable("json")
    monkeypatch.setitem(sys.modules, "half_engine", types.SimpleNamespace(__spec__=None))
    assert not doctor._importable("half_engine")


# ------------------------------------------------------------------------------------------ numba's cache


def test_the_cache_is_where_numba_puts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "new" / "folder"))
    assert doctor._cache().folder == str(tmp_path / "new" / "folder")
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    assert doctor._cache().folder is not None
    assert Path(doctor._cache().folder or "").name == "__pycache__"


def test_no_cache_at_all_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    found = doctor._cache()
    assert found.folder is None
    assert "NUMBA_CACHE_DIR" in found.fault


def test_the_home_folder_is_the_second_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) == tmp_path)
    assert doctor._cache().folder == str(tmp_path / "numba")


def test_the_cpu_is_named_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(self: Path, **options: Any) -> str:
        raise OSError

    monkeypatch.setattr(Path, "read_text", unreadable)
    assert doctor._cpu()
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert doctor._cpus() >= 1


def test_hooks_name_what_they_are_for() -> None:
    for hook in hooks_of("transformers"):
        assert hook.purpose
        assert hook.versions
        assert hook.path.count(":") == 1
    assert hooks.__all__
