"""Proposers in order, and merged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spec_plugins import (
    ConfigError,
    Draft,
    Need,
    Proposer,
    Step,
    Target,
    UnknownProposerError,
    UnsupportedError,
)
from spec_plugins.proposers.combine import CombineProposer
from spec_plugins.registry import Registration, registry


class Fixed(Proposer):
    """Drafts the same tokens for every request, and remembers what it was asked."""

    bounded = True

    def __init__(self, tokens: list[int], parents: list[int] | None = None) -> None:
        self.tokens, self.parents = tokens, parents
        self.budgets: list[list[int]] = []
        self.finished: list[str] = []

    def propose(self, step: Step) -> list[Draft]:
        self.budgets.append(step.budgets.tolist())
        return [self._draft(b) for b in step.budgets]

    def _draft(self, budget: int) -> Draft:
        parents = None if self.parents is None else np.array(self.parents[:budget], np.int32)
        return Draft(np.array(self.tokens[:budget], np.int32), parents)

    def finish(self, request_id: str) -> None:
        self.finished.append(request_id)


class Asking(Fixed):
    """Needs something, and runs on its own thread."""

    bounded = False
    needs = frozenset({Need.HIDDEN_STATES})
    uses = frozenset({Need.TREES})

    def aux_layers(self, num_layers: int) -> tuple[int, ...]:
        return (self.tokens[0],)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    proposers = registry().proposers
    for name, cls in {"fixed": "Fixed", "asking": "Asking"}.items():
        monkeypatch.setitem(proposers, name, Registration(name, f"{__name__}:{cls}", "tests"))


def fixed(*tokens: int, name: str = "fixed", **options: Any) -> dict[str, Any]:
    return {"name": name, "options": {"tokens": list(tokens), **options}}


def make(*parts: Any, trees: bool = True, **options: Any) -> CombineProposer:
    proposer = registry().create("combine", {"proposers": list(parts), **options})
    assert isinstance(proposer, CombineProposer)
    proposer.load(Target(100, 512, 4, frozenset({Need.TREES} if trees else set()), 8, 8))
    return proposer


def step(n: int = 1, budget: int = 8) -> Step:
    full = np.ones(n, np.int32)
    ids = [f"r{i}" for i in range(n)]
    return Step(ids, np.ones((n, 4), np.int32), np.arange(n, dtype=np.int32), 4 * full, full, budget * full,
                8 * full, full)  # fmt: skip


def test_the_first_that_has_something_is_used() -> None:
    proposer = make(fixed(), fixed(5, 6), fixed(7))
    (draft,) = proposer.propose(step())
    assert draft.tokens.tolist() == [5, 6]
    assert draft.sources is not None
    assert [proposer.sources[k] for k in draft.sources] == ["fixed", "fixed"]
    assert draft.sources.tolist() == [1, 1]
    # The last was shown the step all the same, with nothing to draft.
    assert [part.budgets for part in proposer.parts] == [[[8]], [[8]], [[0]]]  # type: ignore[attr-defined]


def test_short_drafts_go_on_to_the_next_but_are_kept() -> None:
    (draft,) = make(fixed(5), fixed(6, 7), min_tokens=2).propose(step())
    assert draft.tokens.tolist() == [6, 7]
    (draft,) = make(fixed(5), fixed(), min_tokens=2).propose(step())
    assert draft.tokens.tolist() == [5]


def test_merged_into_one_tree() -> None:
    proposer = make(fixed(5, 6), fixed(5, 7, parents=[-1, 0]), fixed(8), mode="merged")
    (draft,) = proposer.propose(step())
    assert draft.tokens.tolist() == [5, 6, 7, 8]
    assert draft.parents is not None
    assert draft.parents.tolist() == [-1, 0, 0, -1]
    assert draft.sources is not None
    assert draft.sources.tolist() == [0, 0, 1, 2]  # the shared token is the first's
    (draft,) = proposer.propose(step(budget=2))
    assert draft.tokens.tolist() == [5, 6]


class Sized(Fixed):
    """Has trees of a size of its own, and fills whatever it is given."""

    draft_nodes = 2

    def load(self, target: Target) -> None:
        self.most = target.max_draft_nodes


def test_a_tree_with_a_size_of_its_own_leaves_room_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry().proposers, "sized", Registration("sized", f"{__name__}:Sized", "tests"))
    parts = {"name": "sized", "options": {"tokens": list(range(1, 9))}}, fixed(20, 21)
    proposer = make(*parts, mode="merged")
    (draft,) = proposer.propose(step(budget=4))
    assert draft.tokens.tolist() == [1, 2, 20, 21]
    assert proposer.parts[0].most == 2  # type: ignore[attr-defined]
    (draft,) = proposer.propose(step(budget=1))
    assert draft.tokens.tolist() == [1]
    (draft,) = make(*parts).propose(step(budget=4))
    assert draft.tokens.tolist() == [1, 2, 3, 4], "alone it has the whole budget"


def test_merged_on_a_host_of_chains_is_ordered() -> None:
    (draft,) = make(fixed(5, 6), fixed(8), mode="merged", trees=False).propose(step())
    assert draft.tokens.tolist() == [5, 6]
    assert draft.parents is None


def test_each_request_by_itself() -> None:
    assert [len(d) for d in make(fixed(1, 2), fixed(3)).propose(step(3))] == [2, 2, 2]


def test_finish_reaches_all_parts() -> None:
    proposer = make(fixed(1), fixed(2))
    proposer.finish("r0")
    assert [part.finished for part in proposer.parts] == [["r0"], ["r0"]]  # type: ignore[attr-defined]


@pytest.mark.parametrize("min_tokens", [1, 2])
def test_drawn_drafts_chosen_by_their_length_say_no_probabilities(
    monkeypatch: pytest.MonkeyPatch, min_tokens: int
) -> None:
    """A part may end its draft by what it drew; were such drafts dropped with their probabilities known, what
    makes them short would be missing from the output."""
    drawn: Any = "what it was drawn from"
    monkeypatch.setattr(Fixed, "_draft", lambda self, budget: Draft(np.ones(2, np.int32), probs=drawn))
    (draft,) = make(fixed(1), fixed(2), min_tokens=min_tokens).propose(step())
    assert draft.probs == (drawn if min_tokens == 1 else None)


def test_needs_are_the_parts() -> None:
    proposer = registry().create("combine", {"proposers": [fixed(1), fixed(2, name="asking")]})
    assert proposer.needs == {Need.HIDDEN_STATES}
    assert proposer.uses == {Need.TREES}
    assert not proposer.bounded
    assert proposer.aux_layers(9) == (2,)
    both = registry().create("combine", {"proposers": [fixed(1, name="asking"), fixed(2, name="asking")]})
    with pytest.raises(UnsupportedError, match="different target layers"):
        both.aux_layers(9)


def test_bad_options() -> None:
    with pytest.raises(UnknownProposerError, match="did you mean 'suffix'"):
        make("sufix", "ngram")
    with pytest.raises(ConfigError, match=r"max_ngram: 99"):
        make("suffix", {"name": "ngram", "options": {"max_ngram": 99}})
    with pytest.raises(ConfigError, match="proposers"):
        make("suffix")
