"""The contract as its documentation states it."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import textwrap
from typing import Any

import numba
import numpy as np
import pytest
from misbehaving_proposers import Host, Toy, each, ints, make_step, no_drafts, rows

import spec_plugins.proposer
from spec_plugins import Draft, Drafts, Need, Packed, Proposer, Sampling, Step, Target

A, B = [1, 2, 3], [4, 5, 6, 7]


def documented_proposer() -> Proposer:
    """The one in the module's own documentation, as a reader would type it in."""
    _, _, code = (spec_plugins.proposer.__doc__ or "").partition("::\n\n")
    lines = [line for line in code.splitlines() if not line or line.startswith("    ")]
    assert len(lines) <= 14, "the example is meant to be short"
    scope: dict[str, Any] = {}
    exec("import numpy as np\nfrom spec_plugins import *\n" + textwrap.dedent("\n".join(lines)), scope)
    made: Proposer = scope["Echo"]()
    return made


def test_the_documented_proposer_runs() -> None:
    host = Host(documented_proposer(), depth=3)
    assert host.tokens({"a": A, "b": B}, limits=ints(3, 2)) == [[3, 3, 3], [7, 7]]
    host.observe({"a": 0, "b": 2})
    assert host.tokens({"b": [*B, 7, 7, 8]}) == [[8, 8, 8]]
    assert host.tokens({}) == []
    assert host.faults() == {}


def test_importing_is_free_of_warnings() -> None:
    modules = "config containment driver errors hookspecs policy proposer registry statistics token_store"
    code = f"import spec_plugins, {', '.join(f'spec_plugins.{m}' for m in modules.split())}"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_all_that_is_promised_is_there() -> None:
    for name in spec_plugins.__all__:
        assert hasattr(spec_plugins, name)


# ---------------------------------------------------------------------------------------------------
# Drafts


def tree_batch() -> Drafts:
    probs: Any = ["first", None]
    return Drafts(
        rows([1, 2, 9], [3, 9, 9]),
        ints(2, 1),
        rows([-1, -1, 9], [-1, 9, 9]),
        probs,
        rows([0, 1, 9], [1, 9, 9]),
    )


def test_packed_drafts_are_a_sequence_of_drafts() -> None:
    drafts = tree_batch()
    assert len(drafts) == 2
    first, second = drafts
    assert (first.tokens.tolist(), second.tokens.tolist()) == ([1, 2], [3])
    assert (len(first), len(second)) == (2, 1)
    assert first.parents is not None
    assert first.parents.tolist() == [-1, -1]
    assert first.sources is not None
    assert first.sources.tolist() == [0, 1]
    assert drafts.probs == [first.probs, second.probs]
    assert drafts[-1].tokens.tolist() == drafts[1].tokens.tolist()
    assert [d.tokens.tolist() for d in drafts[::-1]] == [[3], [1, 2]]
    for beyond in (2, -3):
        with pytest.raises(IndexError):
            drafts[beyond]


def test_drafts_are_views() -> None:
    drafts = tree_batch()
    assert np.shares_memory(drafts[0].tokens, drafts.tokens)


def test_chains_carry_tokens_only() -> None:
    draft = Drafts(rows([1, 2]), ints(2))[0]
    assert (draft.parents, draft.probs, draft.sources) == (None, None, None)


def test_empty_drafts() -> None:
    assert [len(d) for d in Drafts.empty(3)] == [0, 0, 0]
    assert list(Drafts.empty(0)) == []


# ---------------------------------------------------------------------------------------------------
# Steps and the rest


def test_a_ragged_batch_is_read_without_copies() -> None:
    packed = Packed(ints(1, 2, 3, 4), ints(0, 3, 3, 4))
    assert len(packed) == 3
    assert [packed[i].tolist() for i in range(3)] == [[1, 2, 3], [], [4]]
    assert np.shares_memory(packed[0], packed.values)


def test_greedy_sampling_switches_everything_off() -> None:
    s = Sampling.greedy(2)
    settings = [a.tolist() for a in (s.temperature, s.top_k, s.top_p, s.min_p)]
    assert settings == [[0, 0], [0, 0], [1, 1], [0, 0]]


def test_a_steps_tokens_are_views_of_its_rows() -> None:
    step = make_step(2)
    assert len(step) == 2
    assert step.tokens(1).tolist() == [1, 2, 3]
    assert np.shares_memory(step.tokens(1), step.token_ids)


@pytest.mark.parametrize(
    "thing", [make_step(), Draft(ints(1)), Target(1, 1, 1), Sampling.greedy(1), Packed(ints(), ints(0))]
)
def test_what_is_handed_around_is_frozen(thing: Any) -> None:
    field = dataclasses.fields(thing)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(thing, field, None)


def numba_types(step: Step) -> dict[str, Any]:
    arrays = {f.name: getattr(step, f.name) for f in dataclasses.fields(step)}
    arrays |= (
        {"values": step.predictions.values, "offsets": step.predictions.offsets} if step.predictions else {}
    )
    draft = step.verified[0] if step.verified else None
    arrays |= {"drafted": draft.tokens, "hanging on": draft.parents} if draft else {}
    arrays["one request's tokens"] = step.tokens(0)
    typeof: Any = numba.typeof
    return {name: typeof(a) for name, a in arrays.items() if isinstance(a, np.ndarray)}


@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
def test_what_is_compiled_with_a_rehearsal_serves_real_steps(trees: bool) -> None:
    """numba compiles anew for arrays of another layout, or that are read-only where others were not."""
    steps: list[Step] = []

    def answer(step: Step) -> Any:
        steps.append(step)
        return each(ints(1, 2), ints(-1, 0) if trees else None)(step)

    host = Host(Toy(answer), provides=(Need.PREDICTIONS, *[Need.TREES] * trees))
    for _ in range(2):
        predictions = Packed(ints(1, 2, 3), ints(0, 3, 3))
        host.propose({"a": A, "b": B}, predictions=predictions, limits=np.array([3, 3]))
        host.observe({"a": 1, "b": 0}, [[0, -1], [-1, -1]])
    rehearsal = Step.rehearsal(trees=trees)
    assert rehearsal.request_ids == ("rehearsal",)
    assert numba_types(rehearsal) == numba_types(steps[1])
    assert len(numba_types(rehearsal)) == 11 + trees
    assert Step.rehearsal(budget=7).budgets.tolist() == [7]


def test_a_proposer_must_propose() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Proposer()  # type: ignore[abstract]


def test_a_proposer_needs_nothing_else() -> None:
    class Least(Proposer):
        name = "least"

        def propose(self, step: Step) -> Any:
            return no_drafts(step)

    least = Least()
    assert least.sources == ("least",)
    assert least.aux_layers(9) == ()
    assert least.gauges() == {}
    assert (least.needs, least.uses, least.bounded) == (frozenset(), frozenset(), False)
    host = Host(least)
    assert host.tokens({"a": A}) == [[]]
    assert host.tokens({}) == []
    assert host.faults() == {}


def test_sampling_of_requests() -> None:
    made = Sampling.of([(0.5, 3, 0.9, 0.1), (0.0, 0, 1.0, 0.0)])
    assert [a.tolist() for a in (made.temperature, made.top_k)] == [[0.5, 0.0], [3, 0]]
    assert [a.dtype for a in (made.temperature, made.top_k, made.top_p, made.min_p)] == [
        np.float32, np.int32, np.float32, np.float32,
    ]  # fmt: skip
    assert len(Sampling.of([]).temperature) == 0
