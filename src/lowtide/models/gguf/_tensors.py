"""Tensors of a GGUF file as Hugging Face weights: reading reverses the changes of llama.cpp's conversion.

The conversion renames tensors, and permutes Llama's query and key rows so that each rotated pair is adjacent. It also
adds one to Gemma's norms, and stacks the experts of a layer in one tensor.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from ...core import ModelFileError, shortened, shown
from .._safetensors import DTYPES, pieces
from ._config import CONSTANTS
from ._header import Header, Place, dequantize, read_header, tensor_names

_CONVERT_HINT = "convert the original again: the file is damaged, or has another version of its architecture"
_MOST_EXPERTS = 2**18
"""Most experts in all layers together: ten times as many as the largest models have."""
_LAYER = re.compile(r"(?<=^model\.layers\.)\d+(?=\.)")
_EXPERT = re.compile(r"(?<=\.experts)\.(\d+)(?=\.)")
_STACKED = re.compile(r"blk\.\d+\.ffn_\w+_exps\.")
_PERMUTED = re.compile(r"self_attn\.([qk])_proj\.(weight|bias)$")


def map_tensors(
    file: Path, *, layers: int, experts: int, heads: Mapping[str, int], names: Iterable[str]
) -> dict[str, GgufTensor]:
    """Return the tensors of a file by Hugging Face name; `names` lazily yields the names of all weights.

    `experts` is 1 without a mixture of experts, and `heads` has the numbers of heads of ``"q"`` and ``"k"``. A damaged
    file, and a tensor that is missing or not part of the model, raise ModelFileError.
    """
    header = read_header(file)
    if layers > len(header.places):  # checked before `names` yields names for all layers
        raise _missing(header, f"the tensors of {layers} layers")
    if experts > 1:
        _check_experts(header, [place for name, place in header.places.items() if _STACKED.match(name)], experts)
        if layers * experts > _MOST_EXPERTS:
            problem = f"too many experts, {layers} layers of {experts:,}; at most {_MOST_EXPERTS:,} are supported"
            raise ModelFileError(f"{file}: {problem}", hint=_CONVERT_HINT)
    architecture = str(header.fields["general.architecture"])
    translate = tensor_names(architecture)
    tensors: dict[str, GgufTensor] = {}
    for hf_name in names:
        expert, layer = _EXPERT.search(hf_name), _LAYER.search(hf_name)
        # The library's table covers one layer and no experts: look up the name in layer 0, then insert the layer again.
        name = translate(_LAYER.sub("0", _EXPERT.sub("", hf_name)))
        if name is not None and layer is not None:
            name = name.replace("blk.0.", f"blk.{layer[0]}.", 1)
        place = header.places.get(name or "")
        if place is None:
            raise _missing(header, f"{name or 'a tensor'} for {hf_name}")
        if expert is not None:
            _check_experts(header, [place], experts)
        permuted = _PERMUTED.search(hf_name) if architecture == "llama" else None
        is_shifted = architecture.startswith("gemma") and hf_name.endswith("norm.weight")
        tensors[hf_name] = GgufTensor(
            file=header.file,
            place=place,
            expert=None if expert is None else int(expert[1]),
            heads=0 if permuted is None else heads[permuted[1]],
            added=1.0 if is_shifted else 0.0,
        )
    used = {tensor.place.name for tensor in tensors.values()}
    if unknown := [name for name in header.places if name not in used and name not in CONSTANTS]:
        problem = f"{header.file}: it has {shown(unknown[0])}, which its metadata does not describe"
        hint = "load the original safetensors, if Lowtide supports the family; this tensor would be ignored"
        raise ModelFileError(problem, got=shortened(", ".join(sorted(unknown))), hint=hint)
    return tensors


def _check_experts(header: Header, places: Iterable[Place], experts: int) -> None:
    for place in places:
        if len(place.shape) != 3 or place.shape[0] != experts:
            problem = f"the shape of {shown(place.name)} is {place.shape}, but the metadata has {experts} experts"
            raise ModelFileError(f"{header.file}: {problem}", hint=_CONVERT_HINT)


def _missing(header: Header, tensors: str) -> ModelFileError:
    problem = f"the metadata requires {tensors}, which the file lacks; it has {len(header.places)} tensors"
    return ModelFileError(f"{header.file}: {problem}", hint=_CONVERT_HINT)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """One weight, which was checked to be inside its file."""

    file: Path
    place: Place
    expert: int | None = None
    """Index of the expert along the first axis of a tensor of all experts; None for other tensors."""
    heads: int = 0
    """Number of heads with permuted rows; 0 for rows that were not permuted."""
    added: float = 0.0
    """Constant that the conversion added."""

    @property
    def shape(self) -> tuple[int, ...]:
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
        return self._value_dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return self.place.num_bytes if self.expert is None else self.place.num_bytes // self.place.shape[0]

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """Return a part of the weight: in float32 if it is quantised or has `added`, else in the stored dtype."""
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
        """Map the tensor as [rows, bytes]. Release the result soon: the number of maps per process is limited."""
        *rows, width = self.shape
        kind = self.place.kind
        shape = (math.prod(rows), width // kind.block * kind.block_bytes)
        start = self.place.start + (self.expert or 0) * self.num_bytes
        return np.memmap(self.file, np.uint8, "r", start, shape)

    def _file_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return the indices of the file's rows that hold the given rows of the weight."""
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
