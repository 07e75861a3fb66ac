"""Several proposers as one: the first that has something to say, or all of them in one tree."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from spec_plugins.config import ProposerConfig
from spec_plugins.errors import UnsupportedError
from spec_plugins.proposer import Draft, IntArray, Need, Proposer, Step, Target
from spec_plugins.trees import merge

__all__ = ["CombineProposer"]


class CombineProposer(Proposer):
    """Asks several proposers and uses the first draft, or merges them into one tree.

    ``ordered``: a request that one proposer drafts nothing for goes to the next, which sees the others
    too, with a budget of 0, so that its state stays fresh. ``merged``: the proposers share the budget in
    their order of preference, and one whose trees have a size of their own gets no more than that; on a host
    without trees this is ``ordered``. Statistics are kept for each proposer. Costs what its parts
    cost, plus a merge of small trees for each request where drafts are merged.
    """

    def __init__(
        self,
        proposers: Annotated[
            list[ProposerConfig | str],
            Field(min_length=2, max_length=8, description="Names, or names with options, best first."),
        ],
        mode: Annotated[
            Literal["ordered", "merged"], Field(description="One proposer a request, or all in one tree.")
        ] = "ordered",
        min_tokens: Annotated[
            int,
            Field(ge=1, le=64, description="In ordered mode, a draft shorter than this goes to the next."),
        ] = 1,
    ) -> None:
        self.parts = [(ProposerConfig(name=p) if isinstance(p, str) else p).create() for p in proposers]
        self.mode, self.min_tokens = mode, min_tokens
        self._merges = False

    # A combination needs, and uses, what its parts do.
    @property
    def needs(self) -> frozenset[Need]:  # type: ignore[override]
        return frozenset[Need]().union(*(p.needs for p in self.parts))

    @property
    def uses(self) -> frozenset[Need]:  # type: ignore[override]
        return frozenset[Need]().union(*(p.uses for p in self.parts))

    @property
    def bounded(self) -> bool:  # type: ignore[override]
        return all(p.bounded for p in self.parts)

    @property
    def depends_on(self) -> Literal["text", "finished", "steps"]:  # type: ignore[override]
        return max((p.depends_on for p in self.parts), key=("text", "finished", "steps").index)

    @property
    def nested(self) -> bool:  # type: ignore[override]
        return self.mode == "ordered" and self.min_tokens == 1 and all(p.nested for p in self.parts)

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(source for p in self.parts for source in p.sources)

    @property
    def draft_nodes(self) -> int:
        together = sum if self.mode == "merged" else max
        return together(p.draft_nodes for p in self.parts)

    def aux_layers(self, num_layers: int) -> tuple[int, ...]:
        wanted = {layers for p in self.parts if (layers := p.aux_layers(num_layers))}
        if len(wanted) > 1:
            raise UnsupportedError(
                f"combine: {', '.join(p.name for p in self.parts)} want different target layers "
                f"({sorted(wanted)}); use one of them"
            )
        return wanted.pop() if wanted else ()

    def load(self, target: Target) -> None:
        """Load every part."""
        self._merges = self.mode == "merged" and Need.TREES in target.provides
        first = 0
        self._firsts = []
        self._most = [part.draft_nodes or target.max_draft_nodes for part in self.parts]
        for part, most in zip(self.parts, self._most, strict=True):
            own = min(most, target.max_draft_nodes) if self._merges else target.max_draft_nodes
            part.load(dataclasses.replace(target, max_draft_nodes=own))
            self._firsts.append(first)
            first += len(part.sources)
        if self._merges:  # compiled now, and not in the first step
            none = np.empty(0, np.int32)
            merge(none, none, none, 1)

    def propose(self, step: Step) -> Sequence[Draft]:
        if self._merges:
            answers = [
                part.propose(dataclasses.replace(step, budgets=np.minimum(step.budgets, most)))
                for part, most in zip(self.parts, self._most, strict=True)
            ]
            return self._merged(answers, step)
        chosen: list[Draft] = [Draft(np.empty(0, np.int32))] * len(step)
        budgets = step.budgets.copy()
        for part, first in zip(self.parts, self._firsts, strict=True):
            for i, draft in enumerate(part.propose(dataclasses.replace(step, budgets=budgets.copy()))):
                if len(draft) >= self.min_tokens or len(draft) > len(chosen[i]):
                    # Were a drawn draft kept for its length, which its own tokens may decide, probabilities
                    # would no longer be those of what is kept; a draft without any is exact however chosen.
                    probs = draft.probs if self.min_tokens == 1 else None
                    chosen[i] = dataclasses.replace(draft, sources=_sources(draft, first), probs=probs)
                    if len(draft) >= self.min_tokens:
                        budgets[i] = 0
        return chosen

    def _merged(self, answers: list[Sequence[Draft]], step: Step) -> list[Draft]:
        merged = []
        for i in range(len(step)):
            tokens, parents, labels, offset = [], [], [], 0
            for answer, first in zip(answers, self._firsts, strict=True):
                draft = answer[i]
                own = draft.parents
                if own is None:
                    own = np.arange(-1, len(draft) - 1, dtype=np.int32)
                tokens.append(draft.tokens)
                parents.append(np.where(own < 0, -1, own + offset).astype(np.int32))
                labels.append(_sources(draft, first))
                offset += len(draft)
            tree = merge(
                np.concatenate(tokens), np.concatenate(parents), np.concatenate(labels), int(step.budgets[i])
            )
            merged.append(Draft(tree[0], tree[1], sources=tree[2]))
        return merged

    def finish(self, request_id: str) -> None:
        for part in self.parts:
            part.finish(request_id)

    def gauges(self) -> Mapping[str, float]:
        return {f"{p.name}_{name}": value for p in self.parts for name, value in p.gauges().items()}


def _sources(draft: Draft, first: int) -> IntArray:
    """Who guessed each token, in the combination's numbering."""
    if draft.sources is None:
        return np.full(len(draft), first, np.int32)
    return np.asarray(draft.sources + first, np.int32)
