"""Suffix automata over token ids, in flat int32 buffers, compiled.

The automaton of a text has one state for every set of substrings that end at the same positions, at
most two a token, and grows by one token in amortised O(1). The suffix link of the state of the whole
text is the longest suffix that also occurs earlier: the match that a draft continues, never searched
for. The same automaton over many documents (:func:`insert` starts each at the root) serves as a cache
that other texts are matched against (:func:`step`).

A *table* ``[automata, COLUMNS]`` int64 has a row for each automaton, which holds the address of its
buffer, so that one call works through a batch. For a text of ``T`` tokens the buffer is

======= ============== =============================================================================
states  ``[2T + 2, 6]`` length of the longest string, suffix link, occurrences, its first edge (token
                       and target, 0 if there is none), the head of its list of further edges
edges   ``[T + 1, 5]`` further edges: source, token, target, next of the source, next in the bucket
buckets ``[B]``        hash of (source, token) to edge
text    ``[T]``        only of a request's own automaton
======= ============== =============================================================================

The first edge is the state's most frequent one, latest first among equals, so the likeliest
continuation is one load a token. No more room can be needed: an automaton has at most ``2T`` states,
and at most ``T - 1`` edges beyond a first one each (``T`` counts one more for every further document).
About 60 bytes a token are in use; what is never touched costs address space only.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = []
