"""A quantised weight of a file, read as the parts of a `QuantizedWeight` or as a dequantised array."""

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
    """One quantised weight whose description in the file has been checked."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    """Name of its format in messages and tables, such as ``"NF4"``."""
    num_bytes: int
    """Bytes in the file, including scales."""
    weight_dtype: str | None
    """Dtype before quantisation; None if the file does not record it."""
    form: Format | None = None
    """Format of the `QuantizedWeight` that can hold it, or None."""
    block: int = 0
    """Number of neighbours in a row that share a scale, 0 for the whole row."""
    parts: tuple[Readable, ...] = ()
    """Codes, scales and, for double quantisation, the scales of the scales and their offset."""
    table: tuple[float, ...] = ()
    """Values of the codes; empty for formats whose codes are numbers."""
    experts: MxExperts | None = None
    """Experts in MXFP4, which replace `parts`."""

    @property
    def itemsize(self) -> int:
        """Bytes per element while it is read as an array."""
        return 2 if self.experts is not None else 4

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """Dequantise a part of the weight: in float32, or in bfloat16 if that represents every value exactly."""
        if self.experts is not None:
            return self.experts.read(index)
        rows, columns = index
        weights = np.empty((rows.stop - rows.start, columns.stop - columns.start), np.float32)
        for piece, _ in pieces(weights.shape, 16):
            piece_rows = slice(rows.start + piece.start, rows.start + piece.stop)
            weights[piece] = self._values((piece_rows, columns)) * self._scales(piece_rows, columns)
        return weights

    def _values(self, index: tuple[slice, ...]) -> np.ndarray:
        codes = self.parts[0].read(index)
        if self.table:
            return np.asarray(self.table, np.float32)[codes.view(np.uint8)]
        return codes.view(jnp.float8_e4m3fn).astype(np.float32) if self.dtype == "FP8" else codes.astype(np.float32)

    def _scales(self, rows: slice, columns: slice) -> np.ndarray:
        block = self.block or self.shape[1]
        low, high = columns.start // block, -(-columns.stop // block)
        scales = _read_scales(self, rows, slice(low, high))
        return np.repeat(scales, block, axis=1)[:, columns.start - low * block : columns.stop - low * block]


def _read_scales(weight: Packed, rows: slice, columns: slice) -> np.ndarray:
    """Return the scales of a weight as float32, [rows, blocks]."""
    scales = weight.parts[1].read((rows, columns))
    if len(weight.parts) == 2:
        return scales
    blocks_per_row = weight.parts[1].shape[1]
    # Double quantisation: 256 consecutive scales of the file share one scale, across rows.
    nested_index = (
        np.arange(rows.start, rows.stop)[:, None] * blocks_per_row + np.arange(columns.start, columns.stop)
    ) // 256
    low = int(nested_index.min())
    nested = weight.parts[2].read((slice(low, int(nested_index.max()) + 1),))
    return dynamic_map()[scales] * nested[nested_index - low] + weight.parts[3].read(())


Stored = Source | Packed | GgufTensor
"""A weight in a file: a plain tensor, a quantised weight, or a tensor of a GGUF file."""
