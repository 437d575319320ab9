"""A tensor of a GGUF file read as Hugging Face's weight: reading reverses the changes of llama.cpp's conversion.

The conversion permutes Llama's query and key rows so that each rotated pair is adjacent. It also adds one to Gemma's
norms, and stacks the experts of a layer in one tensor.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from .._tensors import DTYPES, pieces
from ._header import Place
from ._library import dequantize


@dataclasses.dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """One weight, which was checked to be inside its file."""

    name: str
    """Name of the tensor in the file."""
    file: Path
    place: Place
    expert: int | None = None
    """Index of the expert in the first axis, for a tensor of all experts."""
    heads: int = 0
    """Number of heads with permuted rows; 0 for rows that were not permuted."""
    added: float = 0.0
    """Constant that the conversion added."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return self.place.shape if self.expert is None else self.place.shape[1:]

    @property
    def dtype(self) -> str:
        """Type in the file, such as ``"BF16"`` or ``"Q4_K"``."""
        return self.place.kind.name

    @property
    def weight_dtype(self) -> str | None:
        """Dtype that holds the weight exactly; None if it is quantised: the file does not record the original dtype."""
        return DTYPES.get(self.dtype)

    @property
    def itemsize(self) -> int:
        """Bytes per element while it is read."""
        return 4 if self.weight_dtype is None or self.added else jnp.dtype(self.weight_dtype).itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.place.num_bytes if self.expert is None else self.place.num_bytes // self.place.shape[0]

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """Return a part of the weight: in the stored dtype, or in float32 if it is quantised."""
        if len(self.shape) == 1:  # a vector is small, so all of it is read
            values = self._values(np.arange(1), slice(0, self.shape[0]))[0]
            return values[self._file_rows(np.arange(values.size))][index[0]]
        rows, columns = index
        out = np.empty((rows.stop - rows.start, columns.stop - columns.start), self._value_dtype)
        for piece, _ in pieces(out.shape, 16):
            file_rows = self._file_rows(np.arange(rows.start + piece.start, rows.start + piece.stop))
            out[piece] = self._values(file_rows, columns)
        return out

    @property
    def _value_dtype(self) -> np.dtype:
        return np.dtype(np.float32) if self.weight_dtype is None or self.added else jnp.dtype(self.weight_dtype)

    def _bytes(self) -> np.ndarray:
        """Map the rows of the tensor, [rows, bytes]; only briefly, since the number of maps per process is limited."""
        *rows, width = self.shape
        kind = self.place.kind
        shape = (math.prod(rows), width // kind.block * kind.block_bytes)
        start = self.place.start + (self.expert or 0) * self.num_bytes
        return np.memmap(self.file, np.uint8, "r", start, shape)

    def _file_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return the rows of the file that hold the given rows of the weight."""
        if not self.heads:
            return rows
        width = self.shape[0] // self.heads
        # Hugging Face stores the two halves of a head one after the other; the file alternates between them.
        head, row = np.divmod(rows, width)
        half, pair = np.divmod(row, width // 2)
        return head * width + 2 * pair + half

    def _values(self, rows: np.ndarray, columns: slice) -> np.ndarray:
        kind = self.place.kind
        low, high = columns.start // kind.block, -(-columns.stop // kind.block)
        # Only whole blocks can be dequantised, so read the blocks that cover the columns and cut the result.
        raw = np.ascontiguousarray(self._bytes()[rows, low * kind.block_bytes : high * kind.block_bytes])
        values = dequantize(raw, self.dtype) if self.weight_dtype is None else raw.view(jnp.dtype(self.weight_dtype))
        values = values[:, columns.start - low * kind.block : columns.stop - low * kind.block]
        return values.astype(np.float32) - np.float32(self.added) if self.added else values
