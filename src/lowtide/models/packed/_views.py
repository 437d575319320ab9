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

    Args:
        source: the tensor; its bytes are reinterpreted, whatever dtype the file states.
        start: index of the first element, counted in `dtype`.
        stop: index after the last element.
        dtype: dtype of an element; a byte holds two 4-bit elements, the first in its high half.
    """
    wanted = np.dtype(dtype)
    is_half = wanted == jnp.uint4
    # The file may store elements in a wider dtype, such as 4-bit codes in bfloat16: find the range of bytes, then read
    # the stored elements that cover it.
    low, high = (start // 2, -(-stop // 2)) if is_half else (start * wanted.itemsize, stop * wanted.itemsize)
    size = source.itemsize
    first, last = low // size, -(-high // size)
    if math.prod(source.shape) == 1 or not source.shape:
        found = source.read(tuple(slice(0, 1) for _ in source.shape))
    else:
        found = source.read(tuple(slice(first, last) if axis > 1 else slice(0, 1) for axis in source.shape))
    raw = np.ascontiguousarray(found).reshape(-1).view(np.uint8)[low - first * size : high - first * size]
    if not is_half:
        return raw.view(wanted)
    halves = np.empty((raw.size, 2), np.uint8)
    np.right_shift(raw, 4, out=halves[:, 0])
    np.bitwise_and(raw, 15, out=halves[:, 1])
    return halves.reshape(-1)[start % 2 : start % 2 + stop - start].view(wanted)


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
        cuts = list(pieces((rows.stop - rows.start, width), self.itemsize))
        if len(cuts) == 1 and columns.stop - columns.start == width:  # needs no second copy
            found = elements(self.source, width * rows.start, width * rows.stop, self.dtype)
            return found.reshape(-1, width)
        whole = np.empty((rows.stop - rows.start, columns.stop - columns.start), self.dtype)
        for cut, _ in cuts:
            first, last = (width * (rows.start + each) for each in (cut.start, cut.stop))
            found = elements(self.source, first, last, self.dtype)
            whole[cut] = found.reshape(-1, width)[:, columns]
        return whole


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
            found = self.source.read((slice(first, last), columns))
        else:
            whole = tuple(slice(first, last) for _ in self.source.shape)
            found = self.source.read(whole).reshape(-1, 1)
        scales = found.astype(np.float32) * np.float32(self.factor)
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
        at = (rows[:, None] * self.shape[1] + columns[None]) * self.short // self.block
        start, stop = int(at.min()), int(at.max()) + 1
        if self.nested is None:
            return elements(self.absmax, start, stop, np.float32)[at - start]
        codes = elements(self.absmax, start, stop, np.uint8)
        low = start // 256
        largest = elements(self.nested, low, (stop - 1) // 256 + 1, np.float32)
        scales = self.table[codes] * largest[np.arange(start, stop) // 256 - low] + np.float32(self.offset)
        return scales[at - start]


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
        experts, out, number, _ = self.blocks.shape
        return (experts, number * 32, out)

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """Dequantise a part to bfloat16, which represents every value exactly."""
        experts, inner, outer = index
        low, high = inner.start // 32, -(-inner.stop // 32)
        whole = np.empty([axis.stop - axis.start for axis in index], jnp.bfloat16)
        for one in range(experts.start, experts.stop):
            for cut, _ in pieces((outer.stop - outer.start, 32 * (high - low)), 16):
                rows = slice(outer.start + cut.start, outer.start + cut.stop)
                part = self._rows(one, rows, slice(low, high))[:, inner.start - 32 * low : inner.stop - 32 * low]
                whole[one - experts.start, :, cut] = part.T
        return whole

    def _rows(self, expert: int, rows: slice, blocks: slice) -> np.ndarray:
        number = slice(expert, expert + 1)
        raw = self.blocks.read((number, rows, blocks, slice(0, 16)))[0]
        exponents = self.scales.read((number, rows, blocks))[0]
        if np.any(exponents == 255):
            raise ModelFileError(
                f"{self.scales.file}: {self.scales.name} has a scale that is no number",
                expected="exponents 0 to 254",
                got="255, at expert " + str(expert),
                hint="the file is damaged; download it again",
            )
        # The first element of a byte is in its low half. Scales are powers of two with bias 127; 255 is NaN.
        codes = np.stack([raw & 15, raw >> 4], axis=-1).reshape(*raw.shape[:2], 32)
        values = np.ldexp(self.values[codes], exponents[..., None].astype(np.int32) - 127)
        return values.reshape(len(values), -1).astype(jnp.bfloat16)
