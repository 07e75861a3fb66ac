"""Checking drafts: never raises, never lets a bad draft through, never changes a good one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from misbehaving_proposers import VOCAB, each, ints, make_step, obeys, rows

from spec_plugins import validation
from spec_plugins.proposer import Draft, Drafts, Step
from spec_plugins.validation import Fault, check_drafts

Tree = list[tuple[int, int]]


def check(answer: Any, step: Step, **more: Any) -> tuple[Drafts, list[tuple[int, Fault]]]:
    return check_drafts(answer, step, VOCAB, **{"trees": True, "probabilities": False, **more})


# ---------------------------------------------------------------------------------------------------
# Anything at all

NUMBERS = [*range(-1, 8), *range(7), -2, VOCAB - 1, VOCAB, 2**31 - 1, 2**31, 2**32, -(2**31), 2**63]
dtypes = st.sampled_from(
    ["int8", "uint8", "int32", ">i4", "int64", "uint64", "float32", "complex64", "bool", "O", "U2"]
)


@st.composite
def arrays(draw: st.DrawFn, shape: tuple[int, ...] | None = None) -> Any:
    """Arrays of all kinds; mostly of small integers of the right shape, so that some are sound."""
    if shape is None or draw(st.integers(0, 9)) == 0:
        shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    dtype = draw(st.just("int32") | dtypes)
    n = int(np.prod(shape))
    values = draw(st.lists(st.sampled_from(NUMBERS), min_size=n, max_size=n))
    array = np.array(values, object).reshape(shape)
    try:
        return array.astype(dtype)
    except OverflowError:
        return array


@st.composite
def parent_lists(draw: st.DrawFn, n: int) -> Any:
    """Parents of which many are right."""
    if draw(st.integers(0, 4)) == 0:
        return draw(arrays((n,)))
    wild = st.sampled_from([-(2**31), -2, 0, 3, 5, 2**31 - 1])
    sound = [st.integers(-1, j - 1) for j in range(n)]
    return ints(*(draw(wild if draw(st.integers(0, 19)) == 0 else s) for s in sound))


junk = (
    st.none()
    | st.integers()
    | st.text(max_size=3)
    | st.floats()
    | arrays()
    | st.lists(st.integers(), max_size=3)
)


@st.composite
def drafts(draw: st.DrawFn) -> Any:
    if draw(st.integers(0, 9)) == 0:
        return draw(junk)
    n = draw(st.integers(0, 6))
    tokens = draw(arrays((n,)) | st.lists(st.integers(0, VOCAB), min_size=n, max_size=n))
    parents = draw(st.none() | parent_lists(n))
    probs = draw(st.none() | junk | st.just(np.full((n, VOCAB), 1 / VOCAB)))
    fields: Any = (tokens, parents, probs, draw(st.none() | arrays((n,)) | junk))
    return Draft(*fields)


@st.composite
def packed_drafts(draw: st.DrawFn, n: int) -> Any:
    width = draw(st.integers(0, 6))
    tokens, counts = draw(arrays((n, width))), draw(arrays((n,)))
    parents = None
    if draw(st.booleans()):
        columns = [draw(parent_lists(width)) for _ in range(n)]
        usable = n and all(np.shape(c) == (width,) and c.dtype == np.int32 for c in columns)
        parents = np.array(columns) if usable else draw(arrays())
    probs = draw(st.none() | st.lists(junk, min_size=n, max_size=n) | junk)
    fields: Any = (tokens, counts, parents, probs, draw(st.none() | arrays((n, width)) | junk))
    return Drafts(*fields)


@st.composite
def questions(draw: st.DrawFn) -> tuple[Step, Any]:
    """A step, and an answer of whatever kind."""
    n = draw(st.sampled_from([2, 1, 3, 0]))
    numbers = st.lists(st.integers(0, 6), min_size=n, max_size=n)
    step = make_step(n, draw(numbers), draw(numbers))
    kind = draw(st.sampled_from(["drafts", "drafts", "packed", "packed", "junk"]))
    if kind == "drafts":
        return step, [draw(drafts()) for _ in range(n)]
    return step, draw(packed_drafts(n) if kind == "packed" else junk | st.lists(drafts(), max_size=3))


@settings(max_examples=150)
@given(questions(), st.booleans(), st.booleans())
def test_whatever_the_answer_the_result_is_safe(
    question: tuple[Step, Any], trees: bool, probabilities: bool
) -> None:
    if probabilities:
        pytest.importorskip("torch")
    step, answer = question
    result, faults = check(answer, step, trees=trees, probabilities=probabilities)
    assert obeys(result, step)
    assert trees or result.parents is None
    assert result.sources is None or result.sources.shape == result.tokens.shape
    assert all(-1 <= i < len(step) and isinstance(fault, Fault) for i, fault in faults)
    # Whoever got nothing of a draft asked for nothing, gave nothing, or is at fault.
    at_fault = {i for i, _ in faults}
    if -1 not in at_fault and isinstance(answer, list):
        for i, draft in enumerate(answer):
            assert len(result[i]) or i in at_fault or not len(draft)
    for i, p in enumerate(result.probs or ()):
        assert probabilities
        assert p is None or p.shape == (len(result[i]), VOCAB)


# ---------------------------------------------------------------------------------------------------
# Sound drafts


@st.composite
def sound_trees(draw: st.DrawFn) -> Tree:
    """``(token, parent)``; siblings differ."""
    tree: Tree = []
    for j in range(draw(st.integers(0, 10))):
        node = draw(st.tuples(st.integers(0, VOCAB - 1) | st.integers(0, 2), st.integers(-1, j - 1)))
        if node in tree:
            node = (next(t for t in range(VOCAB) if (t, node[1]) not in tree), node[1])
        tree.append(node)
    return tree


def as_draft(tree: Tree) -> Draft:
    n = len(tree)
    return Draft(ints(*(t for t, _ in tree)), ints(*(p for _, p in tree)), None, np.arange(n, dtype=np.int32))


def depth_of(tree: Tree, j: int) -> int:
    return 1 if tree[j][1] < 0 else 1 + depth_of(tree, tree[j][1])


def cut(tree: Tree, budget: int, deepest: int) -> list[int]:
    """The nodes that fit, first come first served, with their parents."""
    kept: list[int] = []
    for j, (_, parent) in enumerate(tree):
        if len(kept) < budget and depth_of(tree, j) <= deepest and (parent < 0 or parent in kept):
            kept.append(j)
    return kept


forests = st.lists(sound_trees(), min_size=1, max_size=2)


@given(forests)
def test_sound_trees_within_budget_come_through_unchanged(forest: list[Tree]) -> None:
    n, answer = len(forest), [as_draft(tree) for tree in forest]
    step = make_step(
        n, [len(t) for t in forest], [max((depth_of(t, j) for j in range(len(t))), default=0) for t in forest]
    )
    result, faults = check(answer, step)
    assert faults == []
    for before, after in zip(answer, result, strict=True):
        for field in ("tokens", "parents", "sources"):
            assert getattr(after, field).tolist() == getattr(before, field).tolist()
    # And packed, they are told no different.
    assert check(result, step)[0].tokens.tolist() == result.tokens.tolist()


@given(forests, st.integers(0, 8), st.integers(0, 6))
def test_a_tree_over_budget_keeps_what_comes_first_and_fits(
    forest: list[Tree], budget: int, deepest: int
) -> None:
    step = make_step(len(forest), [budget] * len(forest), [deepest] * len(forest))
    result, faults = check([as_draft(tree) for tree in forest], step)
    expected = []
    for i, tree in enumerate(forest):
        kept = cut(tree, budget, deepest)
        assert result[i].tokens.tolist() == [tree[j][0] for j in kept]
        places = {-1: -1} | {j: k for k, j in enumerate(kept)}
        assert result[i].parents is not None
        assert result[i].parents.tolist() == [places[tree[j][1]] for j in kept]  # type: ignore[union-attr]
        assert result[i].sources is not None
        assert result[i].sources.tolist() == kept  # type: ignore[union-attr]
        if len(kept) < len(tree):
            expected.append((i, Fault.OVER_BUDGET))
    assert faults == expected


@given(
    st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=8), min_size=1, max_size=4),
    st.integers(0, 8),
    st.integers(0, 8),
)
def test_chains_are_cut_to_the_lesser_of_budget_and_depth(
    chains: list[list[int]], budget: int, deepest: int
) -> None:
    n, most = len(chains), min(budget, deepest)
    result, faults = check([Draft(ints(*c)) for c in chains], make_step(n, [budget] * n, [deepest] * n))
    assert [d.tokens.tolist() for d in result] == [c[:most] for c in chains]
    assert faults == [(i, Fault.OVER_BUDGET) for i, c in enumerate(chains) if len(c) > most]
    assert result.parents is None


def test_what_lies_past_the_budget_is_not_looked_at() -> None:
    step = make_step(1, [1])
    for draft in (Draft(ints(1, 999)), Draft(ints(1, 999), ints(-1, 70))):
        result, faults = check([draft], step)
        assert result[0].tokens.tolist() == [1]
        assert faults == [(0, Fault.OVER_BUDGET)]


def test_nodes_without_end_are_cut_before_they_cost_anything() -> None:
    """Ten million siblings, alike in pairs: comparing each with all before it would take hours."""
    many = np.arange(10_000_000, dtype=np.int32) % 5_000_000 % VOCAB
    star, step = np.full(len(many), -1, np.int32), make_step(1, [4])
    width = validation._MOST_NODES
    for trees in (True, False):
        for answer in ([Draft(many, star)], Drafts(many[None], ints(len(many)), star[None])):
            result, faults = check(answer, step, trees=trees)
            assert result.tokens.shape[1] <= width
            assert obeys(result, step)
            assert faults[0][1] in (Fault.OVER_BUDGET, Fault.DUPLICATE_SIBLINGS)
    result, faults = check([Draft(many)], step)
    assert result[0].tokens.tolist() == [0, 1, 2, 3]
    result, faults = check(Drafts(many[None], ints(len(many))), step)
    assert result[0].tokens.tolist() == [0, 1, 2, 3]
    assert check(Drafts(many[None], ints(len(many) + 1)), step)[1] == [(0, Fault.NOT_A_DRAFT)]


def test_the_result_shares_no_memory_with_the_answer() -> None:
    answer = Drafts(rows([1, 2]), ints(2), rows([-1, 0]), None, rows([0, 0]))
    result, _ = check(answer, make_step(1))
    for field in ("tokens", "counts", "parents", "sources"):
        assert not np.shares_memory(getattr(result, field), getattr(answer, field))


def test_a_packed_answer_keeps_its_good_rows() -> None:
    answer = Drafts(rows([1, 2], [1, 200], [3, 4], [5, 6]), ints(2, 2, -1, 1))
    result, faults = check(answer, make_step(4))
    assert [d.tokens.tolist() for d in result] == [[1, 2], [], [], [5]]
    assert faults == [(1, Fault.TOKEN_OUT_OF_RANGE), (2, Fault.NOT_A_DRAFT)]


def test_a_tree_is_checked_whole_where_it_is_reduced_to_a_chain() -> None:
    """So that a proposer's author hears of a bad tree on any host."""
    for bad, fault in (
        (Draft(ints(1, 2, 2), ints(-1, 0, 0)), Fault.DUPLICATE_SIBLINGS),
        (Draft(ints(1, 2, 3), ints(-1, 0, 7)), Fault.WRONG_PARENTS),
        (Draft(ints(1, 2, 300), ints(-1, 0, 0)), Fault.TOKEN_OUT_OF_RANGE),
    ):
        result, faults = check([bad], make_step(1), trees=False)
        assert faults == [(0, fault)]
        assert len(result[0]) == 0


# ---------------------------------------------------------------------------------------------------
# Probabilities


def uniform(n: int = 2) -> Any:
    torch = pytest.importorskip("torch")
    return torch.full((n, VOCAB), 1 / VOCAB)


def spoilt(i: int, j: int, value: float) -> Any:
    probs = uniform()
    probs[i, j] = value
    return probs


def wrong_probabilities() -> dict[str, Any]:
    torch = pytest.importorskip("torch")
    return {
        "not a number": spoilt(1, 5, float("nan")),
        "all not numbers": uniform() * float("nan"),
        "infinite": spoilt(0, 5, float("inf")),
        "negative": spoilt(0, 5, -1 / VOCAB),
        "not normalised": uniform() * 1.01,
        "zero": uniform() * 0,
        "logits": torch.arange(2.0 * VOCAB).reshape(2, VOCAB),
        "a drawn token that could not be": torch.eye(VOCAB)[[1, 3]],
        "a row too few": uniform(1),
        "a row too many": uniform(3),
        "one row": uniform(1)[0],
        "a narrow vocabulary": uniform()[:, :-1],
        "a wide vocabulary": torch.full((2, VOCAB + 1), 1 / (VOCAB + 1)),
        "integers": torch.eye(VOCAB, dtype=torch.int64)[[1, 2]],
        "complex": uniform().to(torch.complex64),
        "a kind that cannot be added": uniform().to(torch.float8_e4m3fn),
        "sparse": uniform().to_sparse(),
        "a string": "certain",
        "a number": 0.5,
        "a list of strings": ["a", "b"],
    }


@pytest.mark.filterwarnings("ignore:.*complex.*", "ignore:.*[Ss]parse.*")
@pytest.mark.parametrize("trees", [True, False], ids=["trees", "chains"])
@pytest.mark.parametrize("parents", [None, ints(-1, 0)], ids=["chain", "tree"])
def test_wrong_probabilities_empty_their_draft_only(parents: Any, trees: bool) -> None:
    step = make_step(2, [4, 4])
    for name, probs in wrong_probabilities().items():
        answer = [Draft(ints(1, 2), parents, probs), Draft(ints(1, 2), parents, uniform())]
        result, faults = check(answer, step, trees=trees, probabilities=True)
        assert faults == [(0, Fault.WRONG_PROBABILITIES)], name
        assert result.counts.tolist() == [0, 2], name
        assert result.probs is not None
        assert result.probs[0] is None
        # The same packed.
        matrix = None if parents is None else np.array([parents] * 2)
        packed = Drafts(rows([1, 2], [1, 2]), ints(2, 2), matrix, [probs, uniform()])
        assert check(packed, step, trees=trees, probabilities=True)[1] == faults, name


def test_probabilities_follow_the_cut() -> None:
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand((5, VOCAB), generator=generator).softmax(-1)
    tree = Draft(ints(1, 2, 3, 4, 5), ints(-1, 0, 1, -1, 3), probs)
    result, _ = check([tree], make_step(1, [4], [2]), probabilities=True)
    assert result[0].tokens.tolist() == [1, 2, 4, 5]
    assert torch.equal(result[0].probs, probs[[0, 1, 3, 4]])
    result, _ = check([tree], make_step(1, [2], [2]), trees=False, probabilities=True)
    assert result[0].tokens.tolist() == [1, 2]
    assert torch.equal(result[0].probs, probs[:2])
    result, _ = check([Draft(ints(1, 2, 3, 4, 5), None, probs)], make_step(1, [2]), probabilities=True)
    assert torch.equal(result[0].probs, probs[:2])
    result, faults = check([tree], make_step(1, [0]), probabilities=True)
    assert result.probs is None
    assert faults == [(0, Fault.OVER_BUDGET)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_rounding_is_forgiven(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((2, VOCAB), generator=generator).to(getattr(torch, dtype))
    _, faults = check([Draft(ints(1, 2), None, logits.softmax(-1))], make_step(1), probabilities=True)
    assert faults == []


def test_probabilities_may_be_an_array_and_some_drafts_have_none() -> None:
    pytest.importorskip("torch")
    answer = [Draft(ints(1, 2), None, np.full((2, VOCAB), 1 / VOCAB)), Draft(ints(3))]  # type: ignore[arg-type]
    result, faults = check(answer, make_step(2), probabilities=True)
    assert faults == []
    assert result.probs is not None
    assert result.probs[0] is not None
    assert result.probs[1] is None


def test_probabilities_of_an_empty_draft_do_not_matter() -> None:
    pytest.importorskip("torch")
    result, faults = check(each(ints(), None, "certain")(make_step(2)), make_step(2), probabilities=True)
    assert (faults, result.probs) == ([], None)


@pytest.mark.parametrize("probs", [[], [None], "ab"], ids=repr)
def test_packed_probabilities_of_another_length_spoil_the_answer(probs: Any) -> None:
    pytest.importorskip("torch")
    answer = Drafts(rows([1], [2], [3]), ints(1, 1, 1), None, probs)
    result, faults = check(answer, make_step(3), probabilities=True)
    assert faults == [(-1, Fault.WRONG_PROBABILITIES)]
    assert not result.counts.any()
