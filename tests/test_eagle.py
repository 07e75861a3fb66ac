"""EAGLE heads draft what their weights say, whatever happens to the requests."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'spec-plugins[transformers]'")
pytest.importorskip("transformers", reason="needs transformers: pip install 'spec-plugins[transformers]'")

from safetensors.torch import load_file, save_file  # noqa: E402
from tiny_heads import eagle_head, greedy_chain, likeliest_paths, medusa_heads  # noqa: E402

from spec_plugins.adapters.transformers import Engine, SamplingParams  # noqa: E402
from spec_plugins.adapters.transformers.target_model import load_model  # noqa: E402
from spec_plugins.errors import ConfigError, UnsupportedError  # noqa: E402
from spec_plugins.heads.key_value_rows import KeyValueRows  # noqa: E402
from spec_plugins.proposer import Drafts, Packed, Proposer, Step  # noqa: E402
from spec_plugins.registry import registry  # noqa: E402

PROMPTS = [list(np.random.default_rng(i).integers(4, 128, 5 + 9 * i)) for i in range(6)]
PARAMS = [SamplingParams(max_new_tokens=10 + 3 * i, ignore_eos=True) for i in range(6)]
PATIENT = {"time_allowance_ms": 60_000.0}
"""So that no loaded machine makes a proposer late."""


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path) -> Any:
    return load_model(str(tiny_model_dir), dtype=torch.float32)


class Watched:
    """Keeps what a proposer drafted, with the tokens that it had."""

    def __init__(self, proposer: Proposer) -> None:
        self.seen: list[tuple[list[int], Any, int]] = []
        original = proposer.propose

        def propose(step: Step) -> Drafts:
            drafts = original(step)
            for i in range(len(step) if step.request_ids != ("rehearsal",) else 0):
                budget = int(min(step.budgets[i], step.depths[i]))
                self.seen.append((step.tokens(i).tolist(), drafts[i], budget))
            return drafts

        proposer.propose = propose  # type: ignore[method-assign]


def run(
    model: Any, name: str, options: dict[str, Any], **config: Any
) -> tuple[Watched, list[list[int]], Proposer]:
    proposer = registry().create(name, options)
    watched = Watched(proposer)
    spec = {"proposer": name, "options": options, "containment": PATIENT, **config}
    engine = Engine(*model, spec, proposer=proposer, max_num_seqs=3)
    answers = [c.token_ids for c in engine.generate(PROMPTS, PARAMS)]
    assert engine.driver is not None
    assert not engine.driver.statistics.faults
    return watched, answers, proposer


@pytest.fixture(scope="module")
def plain(model: Any) -> list[list[int]]:
    return [c.token_ids for c in Engine(*model, max_num_seqs=3).generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize(
    ("method", "fields"),
    [
        ("eagle3", {}),
        ("eagle3", {"draft_vocab": 128, "norm_before_residual": True, "norm_output": True, "num_layers": 2}),
        ("eagle3", {"own_embeddings": True, "attention_bias": True, "fc_bias": True}),
        ("eagle", {}),
        ("eagle", {"num_layers": 2, "fc_bias": True}),
    ],
)
def test_chains_are_what_the_head_says_from_scratch(
    model: Any, plain: list[list[int]], tmp_path: Path, method: str, fields: dict[str, Any]
) -> None:
    folder = eagle_head(tmp_path / "head", method, **fields)
    watched, answers, proposer = run(model, method, {"model": str(folder)}, num_speculative_tokens=4)
    assert answers == plain
    head = proposer._runner.head
    if fields.get("own_embeddings"):
        model = (_WithEmbeddings(model[0], head), model[1])
    drafted = 0
    for tokens, draft, budget in watched.seen:
        assert draft.tokens.tolist() == greedy_chain(model[0], head, tokens, budget)
        drafted += len(draft)
    assert drafted > 100
    assert proposer.gauges()["requests"] == 0
    assert proposer.gauges()["positions_without_states"] == 0


class _WithEmbeddings:
    """A model that embeds with the head's own matrix."""

    def __init__(self, model: Any, head: Any) -> None:
        self.model, self.head = model, head

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def get_input_embeddings(self) -> Any:
        return self.head.embed_tokens


def test_trees_hold_the_likeliest_paths(model: Any, plain: list[list[int]], tmp_path: Path) -> None:
    folder = eagle_head(tmp_path / "head")
    options = {"model": str(folder), "topk": 3}
    watched, answers, proposer = run(model, "eagle3", options, num_speculative_tokens=4, max_draft_nodes=10)
    assert answers == plain
    full = 0
    for tokens, draft, budget in watched.seen:
        if draft.parents is None:
            assert budget == 0
            continue
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        assert len(set(paths)) == len(paths)
        if budget == 4:
            full += 1
            assert set(paths) == likeliest_paths(model[0], proposer._runner.head, tokens, 4, 3, 10)
        else:
            assert all(len(path) <= max(budget, 0) for path in paths)
    assert full > 20


def test_an_unlikely_draft_ends_early(model: Any, plain: list[list[int]], tmp_path: Path) -> None:
    folder = eagle_head(tmp_path / "head")
    everything, _, _ = run(model, "eagle3", {"model": str(folder)}, num_speculative_tokens=4)
    likely, answers, _ = run(
        model, "eagle3", {"model": str(folder), "min_probability": 0.05}, num_speculative_tokens=4
    )
    assert answers == plain
    longer = {tuple(tokens): draft.tokens.tolist() for tokens, draft, _ in everything.seen}
    lengths = []
    for tokens, draft, _ in likely.seen:
        if tuple(tokens) in longer:
            whole = longer[tuple(tokens)]
            assert draft.tokens.tolist() == whole[: len(draft)]
            lengths.append((len(draft), len(whole)))
    assert 0 < sum(a for a, _ in lengths) < sum(b for _, b in lengths)


def test_positions_without_states_are_left_out_and_counted(model: Any, tmp_path: Path) -> None:
    """As after a hit of an engine's prefix cache: the head starts late, and drafts from what it has."""
    head = registry().create("eagle3", {"model": str(eagle_head(tmp_path / "head"))})
    full = Engine(
        *model, {"proposer": "eagle3"} | {"options": {"model": str(tmp_path / "head")}}, proposer=head
    )
    assert full.driver is not None
    late = registry().create("eagle3", {"model": str(tmp_path / "head")})
    late.load(full.driver.target)
    tokens = np.random.default_rng(0).integers(4, 128, 30).astype(np.int32)[None]
    aux = torch.randn(29, 2 * 32, generator=torch.Generator().manual_seed(0))

    def step(length: int, fresh: int, shown: int) -> Step:
        one = [np.array([x], np.int32) for x in (0, length, fresh, 3, 3, 4)]
        states = Packed(aux[length - 1 - shown : length - 1], np.array([0, shown], np.int32))
        return Step(("a",), tokens, *one, aux_hidden_states=states)

    whole = head.propose(step(20, 20, 19)).tokens.tolist()
    assert late.propose(step(20, 20, 7)).counts.tolist() == [3]
    assert late.gauges()["positions_without_states"] == 12
    assert late.propose(step(24, 4, 2)).counts.tolist() == [3]
    assert late.gauges()["positions_without_states"] == 14
    # Forgotten, and seen anew from its beginning, it is as one that was never late.
    late.finish("a")
    assert late.propose(step(20, 20, 19)).tokens.tolist() == whole
    # A step without states drafts nothing, and does no harm.
    assert late.propose(step(20, 0, 0)).counts.tolist() == [0]


def test_the_cache_is_bounded_and_freed(model: Any, plain: list[list[int]], tmp_path: Path) -> None:
    """Four rows of 16 entries: requests that outgrow theirs get no drafts from then on, others all."""
    folder = eagle_head(tmp_path / "head")
    options = {"model": str(folder), "cache_tokens": 64}
    watched, answers, proposer = run(model, "eagle3", options, num_speculative_tokens=3)
    assert answers == plain
    for tokens, draft, budget in watched.seen:
        assert len(draft) == (budget if len(tokens) - 1 <= 16 - 3 else 0)
    lengths = [len(draft) for _, draft, _ in watched.seen]
    assert 0 < sum(n > 0 for n in lengths) < len(lengths)
    assert proposer.gauges()["cache_bytes"] == 0


def test_a_row_that_another_request_had_holds_nothing_of_it() -> None:
    """Not even what is no number, which attention would count though it is masked."""
    rows = KeyValueRows(1, 1, 2, torch.float32, torch.device("cpu"), 1 << 12)
    rows.row("a"), rows.row("b")
    rows.reserve(4)
    everything = torch.full((1, 1, 4, 2), float("nan"))
    slots, mask = torch.arange(4)[None], torch.ones(1, 4, 4, dtype=torch.bool)
    rows.attends([rows.row("a")], slots, mask)[0](everything, everything, everything)
    rows.discard("a")
    one, first = torch.ones(1, 1, 1, 2), torch.tensor([[[True, False, False, False]]])
    seen = rows.attends([rows.row("c")], torch.zeros(1, 1, dtype=torch.int64), first)[0](one, one, one)
    assert seen.tolist() == [[[[1.0, 1.0]]]]


def test_a_cache_that_cannot_grow_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = KeyValueRows(1, 1, 2, torch.float32, torch.device("cpu"), 1 << 12)
    taken = [rows.row(name) for name in "abcd"]
    before = rows.nbytes

    def no_memory(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(rows, "_empty", no_memory)
        with pytest.raises(RuntimeError):
            rows.row("e")
        with pytest.raises(RuntimeError):
            rows.reserve(600)
    assert (rows.nbytes, [rows.row(name) for name in "abcd"]) == (before, taken)
    rows.reserve(600)
    assert rows.row("e") == 4
    assert rows.nbytes > before


def test_a_head_of_another_method_or_size_is_refused(model: Any, tmp_path: Path) -> None:
    folder = eagle_head(tmp_path / "head")
    with pytest.raises(UnsupportedError, match="set proposer to 'eagle3'"):
        run(model, "eagle", {"model": str(folder)})
    wide = eagle_head(tmp_path / "wide", hidden_size=64, target_hidden_size=64)
    with pytest.raises(UnsupportedError, match="hidden size 64, and this one has 32"):
        run(model, "eagle3", {"model": str(wide)})


def _truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _break_weight(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    next(t for t in tensors.values() if t.is_floating_point()).view(-1)[0] = float("nan")
    save_file(tensors, folder / "model.safetensors")


def _lose_weight(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(dict(sorted(tensors.items())[1:]), folder / "model.safetensors")


def _other_count(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    fields = config["spec_plugins_head"]
    fields["num_layers"] = fields["num_layers"] + 1
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("method", ["eagle3", "medusa"])
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (shutil.rmtree, "there is no folder|cannot be read|no such"),
        (_truncate, "model.safetensors"),
        (_break_weight, "NaN"),
        (_lose_weight, "not those that the configuration calls for|missing"),
        (_other_count, "not those that the configuration calls for|missing"),
    ],
)
def test_broken_files_end_the_start_with_one_clear_error(
    model: Any, tmp_path: Path, method: str, spoil: Any, words: str
) -> None:
    folder = (medusa_heads if method == "medusa" else eagle_head)(tmp_path / "head")
    spoil(folder)
    with pytest.raises(ConfigError, match=f"(?i){words}") as caught:
        Engine(*model, {"proposer": method, "options": {"model": str(folder)}})
    assert str(folder) in str(caught.value)


def test_heads_with_code_in_them_are_refused_and_nothing_runs(model: Any, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "it ran",)

    folder = tmp_path / "heads"
    folder.mkdir()
    (folder / "config.json").write_text('{"medusa_num_heads": 1, "medusa_num_layers": 1}')
    with (folder / "medusa_lm_head.pt").open("wb") as file:
        pickle.dump({"0.0.linear.weight": Evil()}, file)
    with pytest.raises(ConfigError, match=r"medusa_lm_head\.pt"):
        Engine(*model, {"proposer": "medusa", "options": {"model": str(folder)}})
    assert not (tmp_path / "it ran").exists()
