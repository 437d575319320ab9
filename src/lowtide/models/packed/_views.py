"""Views of tensors in files, with the shapes of a quantised weight's parts, read in pieces of bounded size.

Each view implements `_tensors.Readable`, like a tensor of a file.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...core import ModelFileError
from .._tensors import Source, pieces


def elements(source: Source, start: int, stop: int, dtype: Any) -> np.ndarray:
    """Read consecutive elements of a tensor that is a vector, a column, a row or a number.

    The bytes are reinterpreted as `dtype`, in which `start` and `stop` count. A byte holds two 4-bit elements, the high
    half first.
    """
    element_dtype = np.dtype(dtype)
    is_half = element_dtype == jnp.uint4
    # The file may store elements in a wider dtype, such as 4-bit codes in bfloat16: find the range of bytes, then read
    # the stored elements that cover it.
    low, high = (
        (start // 2, -(-stop // 2)) if is_half else (start * element_dtype.itemsize, stop * element_dtype.itemsize)
    )
    size = source.itemsize
    first, last = low // size, -(-high // size)
    if math.prod(source.shape) == 1 or not source.shape:
        values = source.read(tuple(slice(0, 1) for _ in source.shape))
    else:
        values = source.read(tuple(slice(first, last) if axis > 1 else slice(0, 1) for axis in source.shape))
    raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)[low - first * size : high - first * size]
    if not is_half:
        return raw.view(element_dtype)
    halves = np.empty((raw.size, 2), np.uint8)
    np.right_shift(raw, 4, out=halves[:, 0])
    np.bitwise_and(raw, 15, out=halves[:, 1])
    return halves.reshape(-1)[start % 2 : start % 2 + stop - start].view(element_dtype)


@dataclasses.dataclass(frozen=True)
class Rows:
    """A matrix that a file stores row by row."""

    source: Source
    shape: tuple[int, ...]
    dtype: Any

    @property
    def itemsize(self) -> int:
        """Bytes per element; 4-bit elements take a byte on the host."""
        return np.dtype(self.dtype).itemsize

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """Copy a part into memory; whole rows are read in pieces and then cut."""
        rows, columns = index
        width = self.shape[1]
        row_pieces = list(pieces((rows.stop - rows.start, width), self.itemsize))
        if len(row_pieces) == 1 and columns.stop - columns.start == width:  # needs no second copy
            values = elements(self.source, width * rows.start, width * rows.stop, self.dtype)
            return values.reshape(-1, width)
        out = np.empty((rows.stop - rows.start, columns.stop - columns.start), self.dtype)
        for piece, _ in row_pieces:
            first, last = (width * (rows.start + row) for row in (piece.start, piece.stop))
            values = elements(self.source, first, last, self.dtype)
            out[piece] = values.reshape(-1, width)[:, columns]
        return out


@dataclasses.dataclass(frozen=True)
class Vector:
    """A vector of a file, unchanged."""

    source: Source
    shape: tuple[int, ...]
    dtype: Any

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return np.dtype(self.dtype).itemsize

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """Copy a part into memory."""
        return elements(self.source, index[0].start, index[0].stop, self.dtype)


@dataclasses.dataclass(frozen=True)
class Number:
    """A number from a JSON file, as a scalar array."""

    value: float
    shape: tuple[int, ...] = ()
    itemsize: int = 4

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """Return the number."""
        del index
        return np.asarray(self.value, np.float32)


@dataclasses.dataclass(frozen=True)
class Grid:
    """Scales [out, blocks] of which the file stores one for several rows."""

    source: Source
    shape: tuple[int, ...]
    rows: int
    """Number of rows that share a scale; all rows if the matrix has only one."""
    factor: float = 1.0
    itemsize: int = 8

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """Copy a part into memory, with each scale repeated for its rows."""
        rows, columns = index
        first, last = rows.start // self.rows, -(-rows.stop // self.rows)
        if len(self.source.shape) == 2:
            stored = self.source.read((slice(first, last), columns))
        else:
            source_index = tuple(slice(first, last) for _ in self.source.shape)
            stored = self.source.read(source_index).reshape(-1, 1)
        scales = stored.astype(np.float32) * np.float32(self.factor)
        return scales[np.arange(rows.start, rows.stop) // self.rows - first]


@dataclasses.dataclass(frozen=True)
class Spread:
    """Scales of blocks that continue from row to row, repeated for shorter blocks that do not."""

    absmax: Source
    shape: tuple[int, ...]
    block: int
    """Number of weights that share a scale in the file."""
    short: int
    """Number of weights per shorter block."""
    nested: Source | None
    offset: float
    table: Any
    """Values of the codes of scales."""
    itemsize: int = 32

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """Compute a part of the scales in float32."""
        rows, columns = (np.arange(axis.start, axis.stop) for axis in index)
        # Index of the file's block that contains each shorter block, in the order of the flat matrix.
        block_index = (rows[:, None] * self.shape[1] + columns[None]) * self.short // self.block
        start, stop = int(block_index.min()), int(block_index.max()) + 1
        if self.nested is None:
            return elements(self.absmax, start, stop, np.float32)[block_index - start]
        codes = elements(self.absmax, start, stop, np.uint8)
        low = start // 256
        nested_scales = elements(self.nested, low, (stop - 1) // 256 + 1, np.float32)
        scales = self.table[codes] * nested_scales[np.arange(start, stop) // 256 - low] + np.float32(self.offset)
        return scales[block_index - start]


@dataclasses.dataclass(frozen=True)
class MxExperts:
    """Experts in MXFP4: [experts, out, blocks, 16] and [experts, out, blocks] in the file, [experts, in, out] here."""

    blocks: Source
    scales: Source
    values: Any
    itemsize: int = 2

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the experts' weights in the decoder."""
        experts, out, num_blocks, _ = self.blocks.shape
        return (experts, num_blocks * 32, out)

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """Dequantise a part to bfloat16, which represents every value exactly."""
        experts, inner, outer = index
        low, high = inner.start // 32, -(-inner.stop // 32)
        weights = np.empty([axis.stop - axis.start for axis in index], jnp.bfloat16)
        for expert in range(experts.start, experts.stop):
            for piece, _ in pieces((outer.stop - outer.start, 32 * (high - low)), 16):
                rows = slice(outer.start + piece.start, outer.start + piece.stop)
                part = self._decode(expert, rows, slice(low, high))[:, inner.start - 32 * low : inner.stop - 32 * low]
                weights[expert - experts.start, :, piece] = part.T
        return weights

    def _decode(self, expert: int, rows: slice, blocks: slice) -> np.ndarray:
        expert_slice = slice(expert, expert + 1)
        raw = self.blocks.read((expert_slice, rows, blocks, slice(0, 16)))[0]
        exponents = self.scales.read((expert_slice, rows, blocks))[0]
        if np.any(exponents == 255):
            raise ModelFileError(
                f"{self.scales.file}: {self.scales.name} has a scale that is NaN",
                expected="exponents 0 to 254",
                got="255, in expert " + str(expert),
                hint="the file is damaged; download it again",
            )
        # The first element of a byte is in its low half. Scales are powers of two with bias 127; 255 is NaN.
        codes = np.stack([raw & 15, raw >> 4], axis=-1).reshape(*raw.shape[:2], 32)
        values = np.ldexp(self.values[codes], exponents[..., None].astype(np.int32) - 127)
        return values.reshape(len(values), -1).astype(jnp.bfloat16)
