"""A weight of a file in few bits: its parts as a node has them, and its numbers as an array has them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from ...quant import Format, dynamic_map
from .._tensors import Readable, Source, pieces
from ..gguf import GgufTensor
from ._views import MxExperts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packed:
    """One weight; what a file says about it has been checked."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    """What its format is called in messages and tables, such as ``"NF4"``."""
    num_bytes: int
    """In the file, with everything that belongs to it."""
    weight_dtype: str | None
    """Of the weight that was quantised; None where the file does not say."""
    form: Format | None = None
    """The format of the node that holds it; None where no node does."""
    block: int = 0
    """Neighbours of a row that share a scale, 0 for the whole row."""
    parts: tuple[Readable, ...] = ()
    """Codes, scales and, where scales have scales, those and the offset."""
    table: tuple[float, ...] = ()
    """What codes stand for, where no node has them."""
    experts: MxExperts | None = None
    """In place of parts."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element while it is read as an array."""
        return 2 if self.experts is not None else 4

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """Compute a part of the weight: float32, or bfloat16 where that holds every number."""
        if self.experts is not None:
            return self.experts.read(index)
        rows, columns = index
        whole = np.empty((rows.stop - rows.start, columns.stop - columns.start), np.float32)
        for cut, _ in pieces(whole.shape, 16):
            inside = slice(rows.start + cut.start, rows.start + cut.stop)
            whole[cut] = self._values((inside, columns)) * self._scales(inside, columns)
        return whole

    def _values(self, index: tuple[slice, ...]) -> np.ndarray:
        codes = self.parts[0].read(index)
        if self.table:
            return np.asarray(self.table, np.float32)[codes.view(np.uint8)]
        return codes.view(jnp.float8_e4m3fn).astype(np.float32) if self.dtype == "FP8" else codes.astype(np.float32)

    def _scales(self, rows: slice, columns: slice) -> np.ndarray:
        block = self.block or self.shape[1]
        low, high = columns.start // block, -(-columns.stop // block)
        scales = _numbers(self, rows, slice(low, high))
        return np.repeat(scales, block, axis=1)[:, columns.start - low * block : columns.stop - low * block]


def _numbers(weight: Packed, rows: slice, columns: slice) -> np.ndarray:
    """Scales of a weight as float32, [rows, blocks]."""
    found = weight.parts[1].read((rows, columns))
    if len(weight.parts) == 2:
        return found
    number = weight.parts[1].shape[1]
    at = (np.arange(rows.start, rows.stop)[:, None] * number + np.arange(columns.start, columns.stop)) // 256
    low = int(at.min())
    nested = weight.parts[2].read((slice(low, int(at.max()) + 1),))
    return dynamic_map()[found] * nested[at - low] + weight.parts[3].read(())


Stored = Source | Packed | GgufTensor
"""What a weight may be in a file."""
