"""How a TPU stores arrays: two axes in tiles of 8 x 128 words of 32 bits, those two that need the least padding.

As XLA lays out arguments, on the device and on the host, compiled for a v5e:

- Narrow numbers share a word along the tile's rows: two bfloat16, four int8, eight int4. They do not make tiles larger.
- Fewer than five rows take a tile of as many rows as the next power of two, and a word's at least.
- Of int8 a multiple of 32 rows has tiles of 32 rows (of int4 64), which pads nothing.
- An array of one axis has tiles of 1024 numbers.
"""

from __future__ import annotations

import importlib.util
import mmap
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ._paths import item_bits

_LANES, _SUBLANES, _WORD_BITS, _LINE = 128, 8, 32, 1024
_VARIABLE, _TALL_TILES = "LIBTPU_INIT_ARGS", "--xla_tpu_impure_enable_large_2nd_minor_entry_layout"
LOW_TILES = f"{_VARIABLE}={_TALL_TILES}=false"
"""What makes libtpu (0.0.51) give every argument tiles of 8 rows, in the environment before JAX starts."""


def tile_axes(shape: Sequence[int], dtype: Any) -> tuple[int, int]:
    """Find the two axes of an array that a TPU stores in tiles: those with the least padding, of equals the last.

    Args:
        shape: of two axes at least.
        dtype: its numbers.

    Returns:
        The axis of a tile's rows and that of its columns.
    """
    axes = range(len(shape))
    pairs = ((rows, columns) for rows in axes for columns in axes if rows != columns)
    return min(pairs, key=lambda pair: (_padding(shape, dtype, *pair), -pair[1], -pair[0]))


def is_row_major(shape: Sequence[int], dtype: Any) -> bool:
    """Whether a TPU stores an array with its last axis innermost; rows of others on the host cannot be sliced there.

    Args:
        shape: of any number of axes.
        dtype: its numbers.
    """
    return len(shape) < 2 or tile_axes(shape, dtype) == (len(shape) - 2, len(shape) - 1)


def most_tile_rows(dtype: Any) -> int:
    """How many rows a tile has at most.

    Args:
        dtype: the numbers of an array.
    """
    return _SUBLANES * _in_word(dtype)


def has_tall_tiles(shape: Sequence[int], dtype: Any) -> bool:
    """Whether an argument has tiles of more than 8 rows, where a slice of it on the host would have tiles of 8.

    Of such an array on the host XLA takes no slices there: the whole of it is copied to the device, laid out anew and
    copied back (libtpu 0.0.51).

    Args:
        shape: of any number of axes.
        dtype: its numbers.
    """
    return (
        len(shape) > 1
        and item_bits(dtype) <= 8
        and not shape[-2] % most_tile_rows(dtype)
        and re.findall(rf"{_TALL_TILES}(?:=(\w+))?", os.environ.get(_VARIABLE, ""))[-1:] not in (["false"], ["0"])
    )


def choose_low_tiles() -> None:
    """Make libtpu give every argument tiles of 8 rows, unless the environment says something about it already.

    It works before JAX has started a TPU, and does nothing where the installed libtpu does not know the flag, which
    would end the process (0.0.42; 0.0.45 and later know it). Matrices in 8 bits on the device are then laid out anew
    where they are multiplied, which takes room (compiled): it is for programs that have theirs on the host.
    """
    said = os.environ.get(_VARIABLE, "")
    if _TALL_TILES not in said and _libtpu_knows(_TALL_TILES):
        os.environ[_VARIABLE] = f"{said} {_TALL_TILES}=false".strip()


def _libtpu_knows(flag: str) -> bool:
    """Whether the libtpu that JAX would load has a flag."""
    spec = importlib.util.find_spec("libtpu")
    folders = (spec.submodule_search_locations or [""]) if spec is not None else [""]
    path = Path(os.environ.get("TPU_LIBRARY_PATH") or Path(folders[0], "libtpu.so"))
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library:
        return library.find(flag.removeprefix("--").encode()) >= 0


def slice_step(ndim: int, axis: int) -> int:
    """Return what slices of a row-major array along an axis have to be multiples of, so as to be whole tiles.

    Args:
        ndim: how many axes the array has.
        axis: which of them, not the last of several.
    """
    return {1: _LINE, 2: _SUBLANES}.get(ndim - axis, 1)


def _padding(shape: Sequence[int], dtype: Any, rows: int, columns: int) -> float:
    """How much larger an array becomes when these two axes are in tiles."""
    tile, num_rows, num_columns = _tile_rows(shape[rows], dtype), shape[rows], shape[columns]
    return _up(num_rows, tile) / max(num_rows, 1) * _up(num_columns, _LANES) / max(num_columns, 1)


def _tile_rows(num_rows: int, dtype: Any) -> int:
    return _SUBLANES if num_rows > _SUBLANES // 2 else max(_in_word(dtype), 1 << max(num_rows - 1, 0).bit_length())


def _in_word(dtype: Any) -> int:
    """How many numbers share a word."""
    return max(1, _WORD_BITS // item_bits(dtype))


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
