"""The only module that imports the library `gguf`: type names, dequantisation and tensor names.

The library's reader is not used: it creates an object for every token of the vocabulary, and trusts the file's counts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ...core import ConfigError

_LONG_ROW = 20_000
"""Most bytes per row passed to the library. With rows of 18,432 bytes instead of 1,152, Q4_K takes 0.42 of the time and
Q6_K 0.68; longer rows do not help."""


class Kind(NamedTuple):
    """A tensor type."""

    name: str
    """Name, such as ``"Q4_K"``."""
    block: int
    """Number of neighbours in a row that form a block."""
    block_bytes: int


def kinds() -> dict[int, Kind]:
    """Return the types that the library knows, by their numbers in files; without the library, raise ConfigError."""
    gguf = _gguf()
    sizes = gguf.GGML_QUANT_SIZES
    return {
        int(tensor_type): Kind(tensor_type.name, *sizes[tensor_type])
        for tensor_type in gguf.GGMLQuantizationType
        if tensor_type in sizes
    }


def dequantize(blocks: np.ndarray, kind: str) -> np.ndarray:
    """Dequantise whole blocks, given as rows of bytes, to rows of float32, which are in memory twice."""
    gguf = _gguf()
    rows, width = blocks.shape
    # The library dequantises 16 rows at a time. Blocks are independent of row boundaries, and longer rows are faster.
    num_merged = 1
    while rows % (2 * num_merged) == 0 and 2 * num_merged * width <= _LONG_ROW:
        num_merged *= 2
    values = gguf.quants.dequantize(blocks.reshape(rows // num_merged, -1), gguf.GGMLQuantizationType[kind])
    return values.reshape(rows, -1)


@functools.cache
def is_dequantized(kind: Kind) -> bool:
    """Return whether the library can dequantise a type."""
    try:
        dequantize(np.zeros((1, kind.block_bytes), np.uint8), kind.name)
    except NotImplementedError:
        return False
    return True


def tensor_names(architecture: str) -> Callable[[str], str | None]:
    """Return a function from Hugging Face names in the first layer to names in the file, or None for unknown names."""
    gguf = _gguf()
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(number, 1)

    def name(hf_name: str) -> str | None:
        return table.get_name(hf_name, try_suffixes=(".weight", ".bias"))

    return name


def _gguf() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ConfigError("GGUF files need the library gguf", hint='pip install "lowtide[gguf]"') from error
    return gguf
