"""Header of a GGUF file: metadata and the places of the tensors; every count is checked before it is used.

The layout follows the specification in ggml's `docs/gguf.md`, versions 2 and 3, little-endian. A file holds a magic
number, counts and key-value pairs; then names, shapes, types and offsets of tensors; then padding and the tensors'
data. Long texts and long arrays, such as the vocabulary, are skipped. The total of everything that is kept is limited.
Only this module imports the library `gguf`, in functions.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import mmap
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...core import ConfigError, ModelFileError, format_bytes, shortened, shown

CONVERT_HINT = "convert the original model again with a recent llama.cpp"
_DOWNLOAD_HINT = "the file is truncated or damaged; download it again"
_MAGIC = b"GGUF"
_MOST_TENSORS, _MOST_KEYS, _MOST_TEXTS = 2**20, 2**16, 2**24
_MOST_NAME, _KEPT_TEXT, _KEPT_ARRAY = 2**16, 2**16, 2**14
_ALL_NUMBERS, _ALL_TEXT = 2**20, 16 * 1024**2
"""Limits per file: numbers in all arrays; bytes of all names and, separately, of all texts. Models have far less."""
_MIN_KEY, _MIN_TENSOR = 13, 32
"""Fewest bytes of a key with its value, and of a tensor's description; counts too large for the file are errors."""
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_LONG_ROW = 20_000
"""Most bytes per row passed to the library. With rows of 18,432 bytes instead of 1,152, Q4_K takes 0.42 of the time and
Q6_K 0.68; longer rows do not help."""


@dataclasses.dataclass(frozen=True)
class Long:
    """Length of a value that is not kept: any array of texts, or a text or array that exceeds the limits."""

    count: int


class Kind(NamedTuple):
    """A tensor type."""

    name: str
    """Name, such as ``"Q4_K"``."""
    block: int
    """Number of consecutive elements in a row that form a block."""
    block_bytes: int


@dataclasses.dataclass(frozen=True)
class Place:
    """Place of a tensor in the file."""

    name: str
    kind: Kind
    shape: tuple[int, ...]
    """Shape with adjacent elements in the last axis, as in NumPy."""
    start: int
    """Offset from the beginning of the file, in bytes."""
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class Header:
    """Parsed header of a file."""

    file: Path
    fields: Mapping[str, Any]
    """Metadata by key: numbers, booleans, texts, lists, and `Long`."""
    places: Mapping[str, Place]


def read_header(file: Path) -> Header:
    """Read the header of a regular file; a damaged or unsupported file raises ModelFileError.

    Without the library `gguf` it raises ConfigError. Memory: names of tensors and short values; the file is mapped.
    """
    tensor_kinds = _kinds()
    try:
        with open(file, "rb") as stream:
            size = stream.seek(0, 2)
            if size < 24:
                raise _error(file, "a header of at least 24 bytes", format_bytes(size))
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _Reader(file, content, size).header(tensor_kinds)
    except OSError as error:
        raise ModelFileError(f"{file}: cannot be read: {error}", hint="check the file's permissions") from error


@dataclasses.dataclass
class _Reader:
    """Reader of a header. Mutable: its position moves forward, and its limits shrink."""

    file: Path
    content: mmap.mmap
    size: int
    position: int = 0
    texts: int = 0
    numbers_left: int = _ALL_NUMBERS
    names_left: int = _ALL_TEXT
    text_left: int = _ALL_TEXT

    def header(self, tensor_kinds: Mapping[int, Kind]) -> Header:
        tensors, keys = self._counts()
        fields: dict[str, Any] = {}
        for _ in range(keys):
            key = self._name("a key")
            if key in fields:
                raise _error(self.file, "unique keys", f"{shown(key)} twice")
            fields[key] = self._value(key, self._number("I"))
        descriptions = [self._tensor(tensor_kinds) for _ in range(tensors)]
        alignment = fields.get("general.alignment", 32)
        if type(alignment) is not int or not 8 <= alignment <= 2**20 or alignment & (alignment - 1):
            raise _error(self.file, "general.alignment: a power of two of at least 8", shown(alignment))
        start = -(-self.position // alignment) * alignment
        places: dict[str, Place] = {}
        for name, kind, shape, offset in descriptions:
            if name in places:
                raise _error(self.file, "unique tensors", f"{shown(name)} twice")
            num_bytes = math.prod(shape) // kind.block * kind.block_bytes
            if offset % alignment or start + offset + num_bytes > self.size:
                got = f"{format_bytes(num_bytes)} of {shown(name)} at {offset}, in a file of {format_bytes(self.size)}"
                raise _error(self.file, f"tensors inside the file, at multiples of {alignment}", got)
            places[name] = Place(name, kind, shape, start + offset, num_bytes)
        end = 0
        for place in sorted(places.values(), key=lambda place: place.start):
            if place.start < end:
                raise _error(self.file, "tensors that do not overlap", f"{shown(place.name)} begins inside another")
            end = place.start + place.num_bytes
        return Header(self.file, fields, places)

    def _counts(self) -> tuple[int, int]:
        magic = self.content[:4]
        if magic != _MAGIC:
            raise ModelFileError(f"{self.file}: not a GGUF file, because it begins with {magic!r} and not {_MAGIC!r}")
        self.position = 4
        version = self._number("I")
        if version not in (2, 3):
            # A small big-endian number, read as little-endian, has zeros in its low 16 bits.
            got = "big-endian" if version & 0xFFFF == 0 else f"version {version}"
            problem = f"{self.file}: GGUF must be little-endian and of version 2 or 3, not {got}"
            raise ModelFileError(problem, hint=CONVERT_HINT)
        tensors, keys = self._number("Q"), self._number("Q")
        remaining = self.size - self.position
        if tensors > min(_MOST_TENSORS, remaining // _MIN_TENSOR) or keys > min(_MOST_KEYS, remaining // _MIN_KEY):
            raise _error(self.file, f"counts that fit in {format_bytes(remaining)}", f"{tensors} tensors, {keys} keys")
        return tensors, keys

    def _number(self, code: str) -> Any:
        return self._numbers(code, 1)[0]

    def _numbers(self, code: str, count: int) -> list[Any]:
        layout = f"<{count}{code}"
        start = self._advance(struct.calcsize(layout))
        if code == "?" and (largest := max(self.content[start : self.position], default=0)) > 1:
            raise _error(self.file, "booleans, 0 or 1", largest)  # struct accepts any byte
        values = struct.unpack_from(layout, self.content, start)
        # The shortest decimal of a float32 restores the value in the config before conversion.
        return [float(str(np.float32(value))) for value in values] if code == "f" else list(values)

    def _advance(self, num_bytes: int) -> int:
        start = self.position
        if num_bytes > self.size - start:
            raise _error(self.file, f"{num_bytes} more bytes at byte {start}", f"a file of {format_bytes(self.size)}")
        self.position += num_bytes
        return start

    def _name(self, description: str) -> str:
        length = self._number("Q")
        if length > _MOST_NAME:
            raise _error(self.file, f"{description} of at most {_MOST_NAME} bytes", f"{length}")
        if length > self.names_left:
            raise _error(self.file, f"names of at most {format_bytes(_ALL_TEXT)} in total", f"more, with {description}")
        self.names_left -= length
        return self._text(length, description)

    def _text(self, length: int, description: str) -> str:
        start = self._advance(length)
        try:
            return self.content[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise _error(self.file, f"{description} in UTF-8", shortened(error)) from error

    def _value(self, key: str, kind: int) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _TEXT:
            length = self._number("Q")
            if length > min(_KEPT_TEXT, self.text_left):
                self._advance(length)
                return Long(length)
            self.text_left -= length
            return self._text(length, f"the text of {shown(key)}")
        if kind != _ARRAY:
            raise _error(self.file, "a value type of GGUF, 0 to 12", f"{kind}, of {shown(key)}")
        element_kind, count = self._number("I"), self._number("Q")
        if element_kind == _TEXT:
            self.texts += count
            if count > (self.size - self.position) // 8 or self.texts > _MOST_TEXTS:
                raise _error(self.file, f"at most {_MOST_TEXTS} strings, inside the file", f"{count}, of {shown(key)}")
            for _ in range(count):
                start = self._advance(8)
                self._advance(int.from_bytes(self.content[start : start + 8], "little"))
            return Long(count)
        if element_kind not in _SCALARS:
            raise _error(self.file, "an array of numbers or strings", f"type {element_kind}, of {shown(key)}")
        code = _SCALARS[element_kind]
        if count > min(_KEPT_ARRAY, self.numbers_left):
            self._advance(count * struct.calcsize(f"<{code}"))
            return Long(count)
        self.numbers_left -= count
        return self._numbers(code, count)

    def _tensor(self, tensor_kinds: Mapping[int, Kind]) -> tuple[str, Kind, tuple[int, ...], int]:
        name = self._name("a tensor's name")
        axes = self._number("I")
        if not 1 <= axes <= 4:
            raise _error(self.file, f"1 to 4 axes of {shown(name)}", axes)
        shape = tuple(self._number("Q") for _ in range(axes))[::-1]
        number, offset = self._number("I"), self._number("Q")
        kind = tensor_kinds.get(number)
        if kind is None or not (kind.name == "F64" or _is_dequantized(kind)):
            type_name = f"type {number}" if kind is None else kind.name
            hint = "get the model in another quantisation, such as Q8_0, or update the library gguf"
            raise ModelFileError(f"{self.file}: {type_name} of {shown(name)} is not supported", hint=hint)
        if 0 in shape or math.prod(shape) > 2**48 or shape[-1] % kind.block:
            raise _error(self.file, f"rows of a multiple of {kind.block} in {kind.name}", f"{shape}, of {shown(name)}")
        return name, kind, shape, offset


def _error(file: Path, expected: str, got: Any) -> ModelFileError:
    return ModelFileError(f"{file}: not a complete GGUF file", expected=expected, got=got, hint=_DOWNLOAD_HINT)


# The reader of the library `gguf` is not used: it creates an object for every token of the vocabulary, and trusts the
# file's counts.
def _gguf() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ConfigError("GGUF files need the library gguf", hint='pip install "lowtide[gguf]"') from error
    return gguf


def _kinds() -> dict[int, Kind]:
    """Return the types that the library knows, by their numbers in files; without the library, raise ConfigError."""
    sizes = _gguf().GGML_QUANT_SIZES
    return {int(tensor_type): Kind(tensor_type.name, *size) for tensor_type, size in sizes.items()}


def dequantize(blocks: np.ndarray, kind: str) -> np.ndarray:
    """Dequantise rows of whole blocks, given as bytes, to float32. The result is in memory twice while it is made."""
    gguf = _gguf()
    rows, width = blocks.shape
    # The library dequantises 16 rows at a time. Merged rows are faster, and a block does not depend on its row.
    num_merged = 1
    while rows % (2 * num_merged) == 0 and 2 * num_merged * width <= _LONG_ROW:
        num_merged *= 2
    values = gguf.quants.dequantize(blocks.reshape(rows // num_merged, -1), gguf.GGMLQuantizationType[kind])
    return values.reshape(rows, -1)


@functools.cache
def _is_dequantized(kind: Kind) -> bool:
    try:
        dequantize(np.zeros((1, kind.block_bytes), np.uint8), kind.name)
    except NotImplementedError:
        return False
    return True


def tensor_names(architecture: str) -> Callable[[str], str | None]:
    """Return a function that maps Hugging Face names of layer 0 to names in the file, and unknown names to None."""
    gguf = _gguf()
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    return functools.partial(gguf.get_tensor_name_map(number, 1).get_name, try_suffixes=(".weight", ".bias"))
