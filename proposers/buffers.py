"""int32 buffers that Python owns and compiled code reaches by address, a whole batch in one call."""

from __future__ import annotations

from typing import Any

import numba
from numba.core import types
from numba.extending import intrinsic

from spec_plugins.proposer import IntArray

__all__ = ["buffer_at"]


@intrinsic
def _pointer(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.int32)(types.int64), generate  # type: ignore[no-untyped-call]


@numba.njit(cache=True, inline="always")
def buffer_at(address: int, size: int) -> IntArray:
    """An array over ``size`` int32 at ``address``, for compiled code only.

    The caller keeps the owning array alive during the call and knows that it is that long.
    """
    return numba.carray(_pointer(address), (size,))  # type: ignore[attr-defined, call-arg]
