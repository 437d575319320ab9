"""A tensor of a GGUF file as Hugging Face's weight: what its conversion changed is undone while it is read.

The conversion of llama.cpp turns rows of queries and keys of Llamas from halves to pairs, adds one to Gemma's norms,
and puts the experts of a layer into one tensor.
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
    """One weight; that it is inside of its file has been checked."""

    name: str
    """In the file."""
    file: Path
    place: Place
    expert: int | None = None
    """Which of the first axis it is, of a tensor of all experts."""
    heads: int = 0
    """Heads whose rows stand in pairs; 0 for rows as they were."""
    added: float = 0.0
    """What the conversion added."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight."""
        return self.place.shape if self.expert is None else self.place.shape[1:]

    @property
    def dtype(self) -> str:
        """As the file has it, such as ``"BF16"`` or ``"Q4_K"``."""
        return self.place.kind.name

    @property
    def weight_dtype(self) -> str | None:
        """Of arrays that lose nothing; None where it is quantised, of which the file does not say what it was."""
        return DTYPES.get(self.dtype)

    @property
    def itemsize(self) -> int:
        """Bytes of an element while it is read."""
        return 4 if self.weight_dtype is None or self.added else jnp.dtype(self.weight_dtype).itemsize

    @property
    def num_bytes(self) -> int:
        """In the file."""
        return self.place.num_bytes if self.expert is None else self.place.num_bytes // self.place.shape[0]

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """Compute a part of the weight: as it is stored, or float32 where it is quantised."""
        if len(self.shape) == 1:  # of a vector all of it, which is small
            values = self._values(np.arange(1), slice(0, self.shape[0]))[0]
            return values[self._order(np.arange(values.size))][index[0]]
        rows, columns = index
        whole = np.empty((rows.stop - rows.start, columns.stop - columns.start), self._kind)
        for cut, _ in pieces(whole.shape, 16):
            order = self._order(np.arange(rows.start + cut.start, rows.start + cut.stop))
            whole[cut] = self._values(order, columns)
        return whole

    @property
    def _kind(self) -> np.dtype:
        return np.dtype(np.float32) if self.weight_dtype is None or self.added else jnp.dtype(self.weight_dtype)

    def _bytes(self) -> np.ndarray:
        """Map the rows of the tensor, [rows, bytes]; not for long, since a process may have only so many maps."""
        *rows, width = self.shape
        kind = self.place.kind
        shape = (math.prod(rows), width // kind.block * kind.block_bytes)
        start = self.place.start + (self.expert or 0) * self.num_bytes
        return np.memmap(self.file, np.uint8, "r", start, shape)

    def _order(self, rows: np.ndarray) -> np.ndarray:
        """Rows of the file that hold rows of the weight."""
        if not self.heads:
            return rows
        width = self.shape[0] // self.heads
        head, row = np.divmod(rows, width)
        half, pair = np.divmod(row, width // 2)
        return head * width + 2 * pair + half

    def _values(self, rows: np.ndarray, columns: slice) -> np.ndarray:
        kind = self.place.kind
        low, high = columns.start // kind.block, -(-columns.stop // kind.block)
        raw = np.ascontiguousarray(self._bytes()[rows, low * kind.block_bytes : high * kind.block_bytes])
        values = dequantize(raw, self.dtype) if self.weight_dtype is None else raw.view(jnp.dtype(self.weight_dtype))
        values = values[:, columns.start - low * kind.block : columns.stop - low * kind.block]
        return values.astype(np.float32) - np.float32(self.added) if self.added else values
