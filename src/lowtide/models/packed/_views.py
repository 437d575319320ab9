"""Parts of a file's tensors as arrays of the shape that a node has, read a bounded piece at a time.

A view has what `_tensors.Readable` asks for, as a tensor of a file has.
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
    """Read neighbours of a tensor that is a vector, a column, a row or a number.

    Args:
        source: the tensor; its bytes count, whatever dtype the file gives them.
        start: the first of the elements, counted in `dtype`.
        stop: the one behind the last.
        dtype: of an element; 4-bit ones stand two to a byte, the first in its high half.
    """
    wanted = np.dtype(dtype)
    is_half = wanted == jnp.uint4
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
    """A matrix whose rows a file stores one after another."""

    source: Source
    shape: tuple[int, ...]
    dtype: Any

    @property
    def itemsize(self) -> int:
        """Of an element; 4-bit ones take a byte on the host."""
        return np.dtype(self.dtype).itemsize

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """Copy a part into memory, and for it whole rows, by pieces."""
        rows, columns = index
        width = self.shape[1]
        cuts = list(pieces((rows.stop - rows.start, width), self.itemsize))
        if len(cuts) == 1 and columns.stop - columns.start == width:  # no copy of it
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
    """A vector of a file as it is."""

    source: Source
    shape: tuple[int, ...]
    dtype: Any

    @property
    def itemsize(self) -> int:
        """Of an element."""
        return np.dtype(self.dtype).itemsize

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """Copy a part into memory."""
        return elements(self.source, index[0].start, index[0].stop, self.dtype)


@dataclasses.dataclass(frozen=True)
class Number:
    """A number that a file says in JSON."""

    value: float
    shape: tuple[int, ...] = ()
    itemsize: int = 4

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """Return it."""
        del index
        return np.asarray(self.value, np.float32)


@dataclasses.dataclass(frozen=True)
class Grid:
    """Scales of rows and columns, [out, blocks], of which a file has one for several rows."""

    source: Source
    shape: tuple[int, ...]
    rows: int
    """That share a scale; those of the whole matrix where it has one alone."""
    factor: float = 1.0
    itemsize: int = 8

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """Copy a part into memory, each scale as often as rows share it."""
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
    """Scales of blocks that go on from row to row, as scales of shorter blocks that do not."""

    absmax: Source
    shape: tuple[int, ...]
    block: int
    """Weights that share one of the file's scales."""
    short: int
    """Weights that share one of these."""
    nested: Source | None
    offset: float
    table: Any
    """What the codes of scales stand for."""
    itemsize: int = 32

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """Compute a part, float32."""
        rows, columns = (np.arange(axis.start, axis.stop) for axis in index)
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
    """Experts in MXFP4, of the file [experts, out, blocks, 16] and [experts, out, blocks], as [experts, in, out]."""

    blocks: Source
    scales: Source
    values: Any
    itemsize: int = 2

    @property
    def shape(self) -> tuple[int, ...]:
        """As the decoder multiplies by them."""
        experts, out, number, _ = self.blocks.shape
        return (experts, number * 32, out)

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """Compute a part, bfloat16, which holds every such number."""
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
        codes = np.stack([raw & 15, raw >> 4], axis=-1).reshape(*raw.shape[:2], 32)
        values = np.ldexp(self.values[codes], exponents[..., None].astype(np.int32) - 127)
        return values.reshape(len(values), -1).astype(jnp.bfloat16)
