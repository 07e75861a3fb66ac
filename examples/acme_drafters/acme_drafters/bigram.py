"""The smallest proposer that learns: what followed a token last time follows it again."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from spec_plugins import Draft, Proposer, Step


class BigramProposer(Proposer):
    """Guesses, token after token, the last successor seen in the same request."""

    def __init__(self) -> None:
        self._successors: dict[str, dict[int, int]] = {}

    def propose(self, step: Step) -> list[Draft]:
        return [self._guess(step, i) for i in range(len(step))]

    def _guess(self, step: Step, i: int) -> Draft:
        tokens = step.tokens(i)
        # What is new since the last call, and the token before it; all of it on the first call.
        new = tokens[-int(step.fresh[i]) - 1 :].tolist()
        successors = self._successors.setdefault(step.request_ids[i], {})
        successors.update(pairwise(new))
        guess: list[int] = []
        last = int(tokens[-1])
        while len(guess) < min(step.budgets[i], step.depths[i]) and last in successors:
            last = successors[last]
            guess.append(last)
        return Draft(np.array(guess, np.int32))

    def finish(self, request_id: str) -> None:
        self._successors.pop(request_id, None)
