"""The one module that imports the library `gguf`: what its types are called, what their blocks mean, and names.

Its reader is not used: it makes an object of every token of the vocabulary, and believes the counts of a file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ...core import ConfigError

_LONG_ROW = 20_000
"""Bytes: with 18,432 instead of 1,152 Q4_K takes 0.42 of the time, Q6_K 0.68, and more do not help."""


class Kind(NamedTuple):
    """A type of tensors."""

    name: str
    """Such as ``"Q4_K"``."""
    block: int
    """Neighbours of a row that are stored together."""
    block_bytes: int
    """Of such a block."""


def kinds() -> dict[int, Kind]:
    """Return the types that the library knows, by their numbers in files.

    Raises:
        ConfigError: when the library is not installed.
    """
    gguf = _gguf()
    sizes = gguf.GGML_QUANT_SIZES
    return {int(each): Kind(each.name, *sizes[each]) for each in gguf.GGMLQuantizationType if each in sizes}


def dequantize(blocks: np.ndarray, kind: str) -> np.ndarray:
    """Compute the numbers of whole blocks.

    Args:
        blocks: rows of bytes.
        kind: of the type.

    Returns:
        Rows of float32.

    Memory:
        The numbers twice.
    """
    gguf = _gguf()
    rows, width = blocks.shape
    together = 1  # the library takes 16 rows at a time; blocks do not care where a row ends, and longer ones are faster
    while rows % (2 * together) == 0 and 2 * together * width <= _LONG_ROW:
        together *= 2
    values = gguf.quants.dequantize(blocks.reshape(rows // together, -1), gguf.GGMLQuantizationType[kind])
    return values.reshape(rows, -1)


@functools.cache
def is_dequantized(kind: Kind) -> bool:
    """Whether the library can compute the numbers of a type."""
    try:
        dequantize(np.zeros((1, kind.block_bytes), np.uint8), kind.name)
    except NotImplementedError:
        return False
    return True


def tensor_names(architecture: str) -> Callable[[str], str | None]:
    """Return what turns a name of Hugging Face in the first layer into the file's, or None where it has none.

    Args:
        architecture: as the file's metadata says it.
    """
    gguf = _gguf()
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(number, 1)

    def name(theirs: str) -> str | None:
        return table.get_name(theirs, try_suffixes=(".weight", ".bias"))

    return name


def _gguf() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ConfigError("GGUF files need the library gguf", hint='pip install "lowtide[gguf]"') from error
    return gguf
