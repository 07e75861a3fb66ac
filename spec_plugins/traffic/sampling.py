"""A sample of a log of any size that keeps its mix of lengths and tags."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable

from spec_plugins.traffic.record import Record

__all__ = ["sample"]


def sample(records: Iterable[Record], most: int, seed: int = 0) -> list[Record]:
    """Up to ``most`` records in their order, each kind in its share of the whole.

    A kind is a first tag and a length, in powers of two of :attr:`Record.size`. Within a kind every record
    is as likely as any other (a reservoir, Vitter's algorithm R); the same seed gives the same sample. One
    pass; holds up to ``most`` records of each kind.
    """
    chance = random.Random(seed)
    seen: dict[tuple[str, int], int] = defaultdict(int)
    kept: dict[tuple[str, int], list[Record]] = defaultdict(list)
    for record in records:
        kind = record.tags[0] if record.tags else "", record.size.bit_length()
        seen[kind] += 1
        if len(kept[kind]) < most:
            kept[kind].append(record)
        elif (at := chance.randrange(seen[kind])) < most:
            kept[kind][at] = record
    shares = _shares(seen, most)
    chosen = [r for kind, n in shares.items() for r in chance.sample(kept[kind], n)]
    return sorted(chosen, key=lambda r: r.line)


def _shares(seen: dict[tuple[str, int], int], most: int) -> dict[tuple[str, int], int]:
    """How many of each kind: its share, rounded so that the sum is right (largest remainders)."""
    total = sum(seen.values())
    if total <= most:
        return dict(seen)
    shares = {kind: n * most // total for kind, n in seen.items()}
    left = most - sum(shares.values())
    for kind in sorted(seen, key=lambda k: (-(seen[k] * most % total), k))[:left]:
        shares[kind] += 1
    return shares
