"""Files of safetensors written one tensor at a time, so that they may be larger than memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_plugins.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["Streamed", "read_streamed", "streamed", "write_streamed"]

_WORDS = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""torch's names of dtypes, and those of safetensors."""
_PIECE = 1 << 23
"""Bytes that are copied at once from one file to another."""


@dataclass(frozen=True, slots=True)
class Streamed:
    """A tensor that is made when its turn comes to be written, and dropped after that."""

    dtype: str
    """As safetensors spells it, ``BF16`` say."""
    shape: tuple[int, ...]
    nbytes: int
    pieces: Callable[[], Iterator[bytes | memoryview]]
    """Its bytes, in order."""


def streamed(dtype: torch.dtype, shape: tuple[int, ...], make: Callable[[], torch.Tensor]) -> Streamed:
    """A tensor that ``make`` makes, of that dtype and shape; costs its size in memory while it is written.

    A contiguous view of a file that is mapped costs none.
    """

    def pieces() -> Iterator[memoryview]:
        import torch

        made = make()
        if made.dtype != dtype or tuple(made.shape) != shape:
            raise AssertionError(f"{made.dtype} {tuple(made.shape)} was made, not {dtype} {shape}")
        yield made.contiguous().reshape(-1).view(torch.uint8).numpy().data

    return Streamed(_WORDS[str(dtype).removeprefix("torch.")], shape, prod(shape) * dtype.itemsize, pieces)


def read_streamed(file: Path) -> dict[str, Streamed]:
    """The tensors of a safetensors file, of any dtype, to be copied as bytes: none is read yet.

    Raises:
        ConfigError: it is cut off, or no such file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy"):  # compares the header with the file's length
            pass
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(size))
    except (SafetensorError, OSError, ValueError) as error:
        raise ConfigError(f"{file}: cut off, or no safetensors file ({error}); make it again") from None
    header.pop("__metadata__", None)
    return {name: _copied(file, 8 + size, about) for name, about in header.items()}


def _copied(file: Path, data: int, about: Mapping[str, Any]) -> Streamed:
    start, end = map(int, about["data_offsets"])

    def pieces() -> Iterator[bytes]:
        with file.open("rb") as opened:
            opened.seek(data + start)
            left = end - start
            while left:
                piece = opened.read(min(left, _PIECE))
                if not piece:
                    raise ConfigError(f"{file}: became shorter while it was read")
                left -= len(piece)
                yield piece

    return Streamed(str(about["dtype"]), tuple(about["shape"]), end - start, pieces)


def write_streamed(
    file: Path, tensors: Mapping[str, Streamed], on_tensor: Callable[[str], None] = lambda name: None
) -> None:
    """Write a safetensors file; at no time is more than one of its tensors in memory.

    ``on_tensor`` is told each tensor's name when its turn comes. Raises :class:`OSError`.
    """
    # As safetensors orders them: elements of the widest first, so that each stands at a multiple of its size.
    order = sorted(tensors, key=lambda name: (-_width(tensors[name]), name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        found = tensors[name]
        header[name] = {
            "dtype": found.dtype, "shape": list(found.shape), "data_offsets": [end, end + found.nbytes]
        }  # fmt: skip
        end += found.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("xb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            on_tensor(name)
            for piece in tensors[name].pieces():
                opened.write(piece)


def _width(tensor: Streamed) -> int:
    return tensor.nbytes // max(1, prod(tensor.shape))
