"""Faults of SGLang's that drafts bring out, mended in the scheduler's process where ours is its algorithm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
from sglang.srt.runtime_context import get_schedule

from spec_plugins.adapters.sglang.hooks import FINISH, ROW_WIDTH
from spec_plugins.errors import UnsupportedError
from spec_plugins.hooks import wrap

__all__ = ["mend"]


def mend() -> None:
    """Mend what is known; any number of times.

    Raises:
        UnsupportedError: what must be mended cannot be.
    """
    if not wrap(ROW_WIDTH, _wide_rows):
        raise UnsupportedError(f"{ROW_WIDTH.path} is not as expected; `spec-plugins doctor` shows more")
    wrap(FINISH, _token_by_token)


def _wide_rows(original: Callable[..., int]) -> Callable[..., int]:
    """0.5.23 reserves more KV slots than a row holds where a request nears the context's end, for any draft
    of more than four tokens: on a CPU it stops, on a GPU it writes past the row."""

    def get_req_to_token_extra_context_len() -> int:
        return max(original(), int(get_alloc_reserve_per_decode() + get_schedule().page_size))

    return get_req_to_token_extra_context_len


def _token_by_token(original: Callable[..., None]) -> Callable[..., None]:
    """Of several stops in the tokens of one step 0.5.23 takes the first that it looks for, which need not be
    the first in the text."""

    def update_finish_state(self: Any, new_accepted_len: int = 1) -> None:
        params = self.sampling_params
        if new_accepted_len < 2 or not (params.stop_strs or params.stop_regex_strs):
            original(self, new_accepted_len)
            return
        tokens = self.output_ids
        new = tokens[len(tokens) - new_accepted_len :]
        del tokens[len(tokens) - new_accepted_len :]
        ended = False
        for token in new:
            tokens.append(token)
            if not ended:
                original(self, 1)
                ended = self.finished()
                if ended and self.finished_len is None:
                    self.finished_len = len(tokens)

    return update_finish_state
