"""The ranks of an engine, which all have to verify the same drafts: those of the first one.

Under tensor parallelism each rank has its own copy of the drafter, is asked in the same step about the same
requests, and lays out the forward pass by what its own copy says. Proposers are timed, and put to rest where
they are late, so two ranks that draft for themselves differ sooner or later, and what they compute together
is nobody's text. So the first rank drafts alone, and the others take over what it says, through the engine's
MPI.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from spec_plugins.adapters.tensorrt_llm.hooks import BROADCAST, RANK, WORLD_SIZE
from spec_plugins.errors import UnsupportedError
from spec_plugins.hooks import Hook

__all__ = ["Ranks"]


class Ranks:
    """Where this process stands among the ranks, and the drafts that they share."""

    def __init__(self, tensor_parallel_size: int, part: Callable[[Hook], Any]) -> None:
        """
        Args:
            tensor_parallel_size: as the engine was configured.
            part: gives what a hook names in the engine.

        Raises:
            UnsupportedError: the engine has other ranks than these, or they share no MPI.
            UnavailableError: the engine does not say.
        """
        connected = int(part(WORLD_SIZE)())
        size = max(connected, _torch_ranks())
        if size != tensor_parallel_size:
            raise UnsupportedError(
                f"this engine has {size} ranks, and tensor_parallel_size {tensor_parallel_size} was said "
                "where the drafter was made. Drafts must be the same on all ranks: give speculative_config "
                "the engine's tensor_parallel_size, and use no pipeline or context parallelism"
            )
        if size != connected:
            raise UnsupportedError(
                f"this engine's {size} ranks are not connected by MPI (Ray starts them so), and drafts are "
                "shared by it; use TensorRT-LLM's usual workers, or one GPU an engine"
            )
        self._broadcast = part(BROADCAST) if size > 1 else None
        self.drafts = size == 1 or int(part(RANK)()) == 0
        """Whether this is the rank that drafts."""

    def share(self, ids: Sequence[Any], drafts: list[list[int]] | None) -> list[list[int]]:
        """The first rank's drafts, for these requests; called by all ranks in each step, or they wait.

        Costs a broadcast of some bytes a draft token where there are several ranks, and nothing else.

        Args:
            ids: this rank's requests; one that the first rank does not have gets no draft.
            drafts: the first rank's; ``None`` on others.

        Raises:
            Exception: what the engine's MPI raises. Ranks that cannot talk cannot go on.
        """
        if self._broadcast is None:
            assert drafts is not None
            return drafts
        said = None if drafts is None else dict(zip(ids, drafts, strict=True))
        heard = self._broadcast(said, 0)
        return [list(heard.get(name, ())) for name in ids]


def _torch_ranks() -> int:
    """How many ranks torch knows of, where workers are not started by MPI."""
    try:
        from torch import distributed
    except ImportError:
        return 1
    return (
        int(distributed.get_world_size())
        if distributed.is_available() and distributed.is_initialized()
        else 1
    )
