"""TPU memory layout: two axes of an array are stored in tiles of 8 x 128 words of 32 bits.

XLA picks the two axes with the smallest padding. These rules describe its layouts of arguments, on the device and on
the host, in programs compiled for a v5e:

- Narrow elements share a word along the rows of a tile: two bfloat16, four int8, eight int4. Tiles do not grow.
- Arrays of fewer than five rows have tiles of the next power of two, and at least of as many rows as share a word.
- int8 arrays whose rows are a multiple of 32 have tiles of 32 rows (int4: 64), which adds no padding.
- Arrays of one axis have tiles of 1024 elements.
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

_LANES, _SUBLANES, _WORD_BITS, _FLAT_TILE = 128, 8, 32, 1024
_VARIABLE, _TALL_TILES = "LIBTPU_INIT_ARGS", "--xla_tpu_impure_enable_large_2nd_minor_entry_layout"
LOW_TILES = f"{_VARIABLE}={_TALL_TILES}=false"
"""Environment setting with which libtpu (0.0.51) gives every argument tiles of 8 rows; set it before JAX starts."""


def tile_axes(shape: Sequence[int], dtype: Any) -> tuple[int, int]:
    """Return the two axes that a TPU stores in tiles: the pair with the smallest padding, and the last of equal pairs.

    Args:
        shape: shape of an array with at least two axes.
        dtype: its dtype.

    Returns:
        The axis of a tile's rows and the axis of its columns.
    """
    axes = range(len(shape))
    pairs = ((rows, columns) for rows in axes for columns in axes if rows != columns)
    return min(pairs, key=lambda pair: (_padding(shape, dtype, *pair), -pair[1], -pair[0]))


def is_row_major(shape: Sequence[int], dtype: Any) -> bool:
    """Return whether a TPU stores an array with its last axis innermost; others cannot be sliced by rows on the host.

    Args:
        shape: shape of an array with any number of axes.
        dtype: its dtype.
    """
    return len(shape) < 2 or tile_axes(shape, dtype) == (len(shape) - 2, len(shape) - 1)


def most_tile_rows(dtype: Any) -> int:
    """Return the most rows that a tile has.

    Args:
        dtype: dtype of the array.
    """
    return _SUBLANES * _packing(dtype)


def has_tall_tiles(shape: Sequence[int], dtype: Any) -> bool:
    """Return whether an argument has tiles of more than 8 rows, whereas a slice of it on the host has tiles of 8.

    XLA does not slice such an array in host memory. It copies the whole array to the device, changes its layout there,
    and copies it back (libtpu 0.0.51).

    Args:
        shape: shape of an array with any number of axes.
        dtype: its dtype.
    """
    return (
        len(shape) > 1
        and item_bits(dtype) <= 8
        and not shape[-2] % most_tile_rows(dtype)
        and re.findall(rf"{_TALL_TILES}(?:=(\w+))?", os.environ.get(_VARIABLE, ""))[-1:] not in (["false"], ["0"])
    )


def choose_low_tiles() -> None:
    """Make libtpu give every argument tiles of 8 rows, unless the environment already sets the flag.

    The call has an effect only before JAX starts a TPU. It does nothing if the installed libtpu lacks the flag, because
    an unknown flag ends the process (0.0.42 lacks it, 0.0.45 and later have it). 8-bit matrices on the device then
    change their layout where they are multiplied, which takes memory (compiled). So this is for programs that keep such
    matrices on the host.
    """
    flags = os.environ.get(_VARIABLE, "")
    if _TALL_TILES not in flags and _libtpu_has_flag(_TALL_TILES):
        os.environ[_VARIABLE] = f"{flags} {_TALL_TILES}=false".strip()


def _libtpu_has_flag(flag: str) -> bool:
    """Return whether the libtpu that JAX would load has a flag, by searching the library for the flag's name."""
    spec = importlib.util.find_spec("libtpu")
    folders = (spec.submodule_search_locations or [""]) if spec is not None else [""]
    path = Path(os.environ.get("TPU_LIBRARY_PATH") or Path(folders[0], "libtpu.so"))
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library:
        return library.find(flag.removeprefix("--").encode()) >= 0


def slice_step(ndim: int, axis: int) -> int:
    """Return the number of which slices of a row-major array along an axis must be multiples to be whole tiles.

    Args:
        ndim: number of axes of the array.
        axis: the sliced axis, not the last of several.
    """
    return {1: _FLAT_TILE, 2: _SUBLANES}.get(ndim - axis, 1)


def _padding(shape: Sequence[int], dtype: Any, rows: int, columns: int) -> float:
    """Return the factor by which padding enlarges an array when these two axes are in tiles."""
    tile, num_rows, num_columns = _tile_rows(shape[rows], dtype), shape[rows], shape[columns]
    return _round_up(num_rows, tile) / max(num_rows, 1) * _round_up(num_columns, _LANES) / max(num_columns, 1)


def _tile_rows(num_rows: int, dtype: Any) -> int:
    return _SUBLANES if num_rows > _SUBLANES // 2 else max(_packing(dtype), 1 << max(num_rows - 1, 0).bit_length())


def _packing(dtype: Any) -> int:
    """Return how many elements share a word."""
    return max(1, _WORD_BITS // item_bits(dtype))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
