"""Weights that other software quantised: the scheme of a model directory, the tensors of each weight, and their values.

A weight is read as the parts of a `QuantizedWeight` (codes and scales), or as a dequantised array. `_RowMajor`,
`_Number`, `_Grid` and `_Spread` present tensors of a file in the shapes of these parts. They are `Readable` in pieces
of bounded size. `group_tensors` reads only tensors that describe the storage: JSON, tables, layout flags.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from ..core import ModelFileError, parse_json, shortened, shown, validate
from ..quant import Format, dynamic_map, format_named
from ._safetensors import Readable, Source, pieces

if TYPE_CHECKING:
    from ._schema import QuantizationFile
    from .gguf import GgufTensor

_METHODS = ("bitsandbytes", "compressed-tensors", "fp8", "fbgemm_fp8", "mxfp4")
_CALIBRATED = ("gptq", "awq", "auto-round", "hqq", "aqlm", "quip", "higgs", "spqr", "vptq", "eetq")
_SUPPORTED = "quant_method bitsandbytes (nf4, fp4, int8), compressed-tensors and fp8 (8 bits), or mxfp4"
_DENSE_HINT = "load the unquantised checkpoint, and quantise it while loading: lt.models.load(..., quantize='nf4')"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheme:
    """Quantisation of a directory according to its `config.json`."""

    method: str
    """Name of the software, from ``quant_method``."""
    form: Format | None
    """Format in which projections are read; None if they become arrays."""
    block: tuple[int, int] | None = None
    """Numbers of rows and columns that share a scale; None if scales are not two-dimensional blocks."""


def scheme_of(raw: Any, where: str) -> Scheme | None:
    """Return the scheme in a ``quantization_config``, or None if it is empty; `where` is the file's name for errors."""
    if raw is None or raw == {}:
        return None
    from ._schema import QuantizationFile

    file = validate(QuantizationFile, raw, f"{where}: quantization_config", hint="copy config.json again")
    # Old files of bitsandbytes have no quant_method.
    method = file.quant_method or ("bitsandbytes" if file.load_in_4bit or file.load_in_8bit else None)
    if method not in _METHODS:
        unnamed = f", but its quantization_config {shown(raw)} does not name the method"
        by = f" by {shown(method)}" if method else unnamed
        hint = ("its codes are packed for kernels that Lowtide lacks; " if method in _CALIBRATED else "") + _DENSE_HINT
        raise ModelFileError(f"{where}: the checkpoint is quantised{by}", expected=_SUPPORTED, hint=hint)
    if method == "compressed-tensors":
        return _compressed_scheme(file, method, where)
    if method == "bitsandbytes":
        if file.load_in_4bit == file.load_in_8bit:
            got = "both" if file.load_in_4bit else "neither"
            raise _unsupported(where, method, "load_in_4bit or load_in_8bit", got)
        return Scheme(method=method, form=format_named("nf4" if file.load_in_4bit else "int8"))
    if method == "fp8":
        if file.fmt not in ("e4m3", "float8_e4m3fn"):
            raise _unsupported(where, method, "fmt e4m3", f"fmt {shown(file.fmt)}")
        block = None if file.weight_block_size is None else (file.weight_block_size[0], file.weight_block_size[1])
        return Scheme(method=method, form=format_named("fp8", _columns(block, method, where)), block=block)
    return Scheme(method=method, form=format_named("fp8") if method == "fbgemm_fp8" else None)


def _compressed_scheme(file: QuantizationFile, method: str, filename: str) -> Scheme:
    groups = list((file.config_groups or {}).values())
    formats = {fmt for fmt in (file.format, *(group.format for group in groups)) if fmt is not None}
    kinds = {"float-quantized": ("float", "fp8"), "naive-quantized": ("float", "fp8"), "int-quantized": ("int", "int8")}
    storage = [kinds[fmt] for fmt in sorted(formats) if fmt in kinds]
    if len(storage) != len(formats) or len(set(storage)) != 1:
        got = f"format {shortened(', '.join(sorted(formats)) or 'none')}"
        raise _unsupported(filename, method, "format float-quantized or int-quantized", got)
    for name, extra in (("sparsity_config", file.sparsity_config), ("transform_config", file.transform_config)):
        if extra and extra.get("format", "other") != "dense" and extra.get("config_groups", "other"):
            raise _unsupported(filename, method, f"no {name}", f"{name} {shown(extra)}")
    kind, form = storage[0]
    blocks = set[tuple[int, int]]()
    for weights in [group.weights for group in groups if group.weights is not None]:
        if (weights.num_bits, weights.type, weights.symmetric) != (8, kind, True):
            got = f"{weights.num_bits} bits, {shown(weights.type)}, symmetric {weights.symmetric}"
            raise _unsupported(filename, method, f"weights of 8 bits, {kind}, symmetric", got)
        if weights.block_structure is not None and weights.strategy == "block":
            blocks.add((weights.block_structure[0], weights.block_structure[1]))
    if len(blocks) > 1:
        raise _unsupported(filename, method, "blocks of one size", shortened(sorted(blocks)))
    block = next(iter(blocks), None)
    return Scheme(method=method, form=format_named(form, _columns(block, method, filename)), block=block)


def _columns(block: tuple[int, int] | None, method: str, filename: str) -> int | None:
    if block is not None and block[1] % 8:
        raise _unsupported(filename, method, "blocks of a multiple of 8 columns", f"{block[1]} columns")
    return None if block is None else block[1]


def _unsupported(filename: str, method: str, expected: str, got: str) -> ModelFileError:
    problem = f"{filename}: the checkpoint is quantised by {method} in a way that is not supported"
    return ModelFileError(problem, expected=expected, got=got, hint=_DENSE_HINT)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packed:
    """One quantised weight whose description in the file has been checked."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    """Name of the weight's format in messages and tables, such as ``"NF4"``."""
    num_bytes: int
    """Bytes in the file, including scales."""
    weight_dtype: str | None = None
    """Dtype before quantisation; None if the file does not record it."""
    form: Format | None = None
    """Format of a `QuantizedWeight` that can hold the weight; None: the weight becomes an array."""
    block: int = 0
    """Number of consecutive weights in a row that share a scale; 0: the whole row."""
    parts: tuple[Readable, ...] = ()
    """Codes, scales and, for double quantisation, the scales of the scales and their offset."""
    table: tuple[float, ...] = ()
    """Values of the codes; empty for formats whose codes are numbers."""
    itemsize: int = 4
    """Bytes per element while the weight is read as an array."""

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """Dequantise a part of the weight, in float32."""
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
        scales = self.parts[1].read((rows, slice(low, high)))
        if len(self.parts) == 4:
            # Double quantisation: 256 consecutive scales of the file share a scale, also across rows.
            first_in_row = np.arange(rows.start, rows.stop)[:, None] * self.parts[1].shape[1]
            nested_index = (first_in_row + np.arange(low, high)) // 256
            start = int(nested_index.min())
            nested = self.parts[2].read((slice(start, int(nested_index.max()) + 1),))
            scales = dynamic_map()[scales] * nested[nested_index - start] + self.parts[3].read(())
        return np.repeat(scales, block, axis=1)[:, columns.start - low * block : columns.stop - low * block]


_DOWNLOAD_HINT = "the file is damaged, or of another version of the software that wrote it; download it again"
_STATE = ".quant_state.bitsandbytes__"
_MOST_STATE_BYTES = 4096
_FP4_MAGNITUDES = (0.0, 0.0625 / 12, 8 / 12, 1.0, 4 / 12, 6 / 12, 2 / 12, 3 / 12)
_FP4 = (*_FP4_MAGNITUDES, *(-value for value in _FP4_MAGNITUDES))
_ACTIVATION_SCALES = (".input_scale", ".output_scale", ".activation_scale", ".input_scale_ub", ".k_scale", ".v_scale")
_IGNORED_SUFFIXES = (*_ACTIVATION_SCALES, ".q_scale", ".input_global_scale")


def group_tensors(tensors: Mapping[str, Source], scheme: Scheme, notes: list[str]) -> dict[str, Stored]:
    """Return all weights by name, with the tensors of each quantised weight grouped.

    Messages for the user are appended to `notes`. A tensor that is missing or does not match raises ModelFileError.
    """
    remaining = dict(tensors)
    packed: Mapping[str, Packed | MxExperts]
    if scheme.method == "mxfp4":
        packed = _group_mxfp4(remaining)
    elif scheme.method != "bitsandbytes":
        packed = _group_scaled(remaining, scheme)
        num_tensors = len(remaining)
        remaining = {name: source for name, source in remaining.items() if not name.endswith(_IGNORED_SUFFIXES)}
        if num_ignored := num_tensors - len(remaining):
            notes.append(f"{num_ignored} activation scales are not applied: products use only the stored weights")
    elif scheme.form is None or scheme.form.name == "nf4":
        packed = _group_4bit(remaining)
    else:
        packed = _group_int8(remaining, scheme)
    if unsupported := sorted({weight.dtype for weight in packed.values() if weight.form is None}):
        names = " and ".join(unsupported)
        notes.append(f"weights in {names} are loaded as arrays: products with them are not supported yet")
    return {**remaining, **packed}


def _group_4bit(tensors: dict[str, Source]) -> dict[str, Packed]:
    states = {name.partition(_STATE)[0]: name for name in tensors if _STATE in name}
    packed = {name: _pack_4bit(name, state_name, tensors) for name, state_name in states.items()}
    for name, source in tensors.items():
        if source.dtype == "U8" and name.endswith(".weight"):
            problem = f"{source.file}: {shown(name)} is quantised, but its quantisation state is missing"
            raise ModelFileError(problem, hint=_DOWNLOAD_HINT)
    return packed


def _pack_4bit(name: str, state_name: str, tensors: dict[str, Source]) -> Packed:
    from ._schema import QuantState

    raw = tensors.pop(state_name)
    if raw.dtype != "U8" or len(raw.shape) != 1 or not 0 < raw.shape[0] <= _MOST_STATE_BYTES:
        raise _error(raw, f"JSON of at most {_MOST_STATE_BYTES} bytes", f"{raw.dtype} of shape {raw.shape}")
    source_name = f"{raw.file}: {shown(state_name)}"
    contents = parse_json(raw.read((slice(0, raw.shape[0]),)).tobytes(), source_name)
    state = validate(QuantState, contents, source_name, hint=_DOWNLOAD_HINT)
    out, inner = state.shape
    weight = _pop_tensor(tensors, name, raw)
    count = -(-out * inner // state.blocksize)
    axes = [size for size in weight.shape if size != 1]
    if len(axes) > 1 or weight.dtype not in ("U8", "BF16", "F16", "F32") or 2 * weight.num_bytes != out * inner:
        raise _error(weight, f"{out * inner / 2:g} bytes in one column, for shape {state.shape}", weight.shape)
    # Codes are decoded with Lowtide's tables, so a file with another table would give wrong weights.
    table = _FP4 if state.quant_type == "fp4" else format_named("nf4").table
    _check_table(_pop_tensor(tensors, f"{name}.quant_map", raw), table)
    absmax = _pop_tensor(tensors, f"{name}.absmax", raw)
    is_nested = state.nested_offset is not None
    _check_vector(absmax, count, "U8" if is_nested else "F32")
    nested = None
    if is_nested:
        nested = _pop_tensor(tensors, f"{name}.nested_absmax", raw)
        _check_vector(nested, -(-count // 256), "F32")
        _check_table(_pop_tensor(tensors, f"{name}.nested_quant_map", raw), dynamic_map())
    # `QuantizedWeight` has blocks within a row, but blocks of bitsandbytes may continue into the next row. Then blocks
    # are shortened to a length that divides the row and the block, and repeat the original block's scale (`_Spread`).
    block = math.gcd(inner, state.blocksize)
    if block < 8:
        raise _error(weight, "rows of a multiple of 8 weights", f"{inner}, in blocks of {state.blocksize}")
    shape, offset = (out, inner // block), state.nested_offset or 0.0
    codes = _RowMajor(weight, (out, inner), jnp.uint4)
    if block != state.blocksize:
        parts = (codes, _Spread(absmax, shape, state.blocksize, block, nested, offset, dynamic_map()))
    elif nested is None:
        parts = (codes, _RowMajor(absmax, shape, np.float32))
    else:
        nested_scales = _RowMajor(nested, (-(-count // 256),), np.float32)
        parts = (codes, _RowMajor(absmax, shape, np.uint8), nested_scales, _Number(offset))
    return Packed(
        file=weight.file,
        shape=(out, inner),
        dtype=state.quant_type.upper(),
        num_bytes=sum(tensor.num_bytes for tensor in (weight, absmax, nested) if tensor is not None),
        weight_dtype=state.dtype,
        form=format_named("nf4", block) if state.quant_type == "nf4" else None,
        block=block,
        parts=parts,
        table=table,
    )


def _group_int8(tensors: dict[str, Source], scheme: Scheme) -> dict[str, Packed]:
    packed: dict[str, Packed] = {}
    for name in [name for name in tensors if name.endswith(".SCB")]:
        module, scales = name.removesuffix(".SCB"), tensors.pop(name)
        weight = _pop_tensor(tensors, f"{module}.weight", scales)
        _check_matrix(weight, "I8")
        _check_vector(scales, weight.shape[0], "F32")
        if scales.shape[0] != weight.shape[0]:
            raise _error(scales, f"one row for each of {weight.shape[0]} rows of weights", f"shape {scales.shape}")
        layout = tensors.pop(f"{module}.weight_format", None)
        if layout is not None and (
            math.prod(layout.shape) != 1 or layout.read((slice(0, 1),) * len(layout.shape)).any()
        ):
            raise _error(layout, "0, the original order of rows", "another order, for one kind of GPU")
        # 1 / 127, with the digits that bitsandbytes uses.
        grid = _Grid(scales, (weight.shape[0], 1), 1, factor=7.874015718698502e-3)
        packed[f"{module}.weight"] = _pack_8bit(weight, scales, grid, scheme)
    return packed


def _group_scaled(tensors: dict[str, Source], scheme: Scheme) -> dict[str, Packed]:
    """Group 8-bit weights with their scales. There is one scale per matrix, per row or per block."""
    assert scheme.form is not None
    is_inverse = scheme.method == "fp8" and any(name.endswith(".weight_scale_inv") for name in tensors)
    suffix = ".weight_scale_inv" if is_inverse else ".weight_scale"  # despite the name, both multiply the weights
    packed: dict[str, Packed] = {}
    for name in [name for name in tensors if name.endswith(suffix)]:
        scales, weight_name = tensors.pop(name), f"{name.removesuffix(suffix)}.weight"
        weight = _pop_tensor(tensors, weight_name, scales)
        _check_matrix(weight, "F8_E4M3" if scheme.form.name == "fp8" else "I8")
        out, inner = weight.shape
        rows, columns = scheme.block or (out, inner)
        blocks = (-(-out // rows), -(-inner // columns))
        if scheme.block is None and math.prod(scales.shape) == 1 and len(scales.shape) <= 2:
            grid = _Grid(scales, (out, 1), out)
        elif scheme.block is None and scales.shape in ((out,), (out, 1)):
            grid = _Grid(scales, (out, 1), 1)
        elif scheme.block is not None and scales.shape == blocks:
            grid = _Grid(scales, (out, blocks[1]), rows)
        else:
            per_row = f"one, or one for each of the {out} rows"
            expected = per_row if scheme.block is None else f"{blocks} of {scheme.block}"
            raise _error(scales, f"scales: {expected}", f"shape {scales.shape}")
        if scales.dtype not in ("F32", "BF16", "F16"):
            raise _error(scales, "F32, BF16 or F16", scales.dtype)
        packed[weight_name] = _pack_8bit(weight, scales, grid, scheme)
    return packed


def _pack_8bit(weight: Source, scales: Source, grid: _Grid, scheme: Scheme) -> Packed:
    assert scheme.form is not None
    return Packed(
        file=weight.file,
        shape=weight.shape,
        dtype=scheme.form.name.upper(),
        num_bytes=weight.num_bytes + scales.num_bytes,
        form=scheme.form,
        block=scheme.form.block,
        parts=(weight, grid),
    )


def _group_mxfp4(tensors: dict[str, Source]) -> dict[str, MxExperts]:
    packed: dict[str, MxExperts] = {}
    for name in [name for name in tensors if name.endswith("_blocks")]:
        blocks = tensors.pop(name)
        weight_name = name.removesuffix("_blocks")
        scales = _pop_tensor(tensors, f"{weight_name}_scales", blocks)
        if len(blocks.shape) != 4 or blocks.shape[-1] != 16 or blocks.dtype != "U8":
            raise _error(blocks, "U8 of shape [experts, out, blocks, 16]", f"{blocks.dtype} of shape {blocks.shape}")
        if scales.shape != blocks.shape[:-1] or scales.dtype != "U8":
            raise _error(scales, f"U8 of shape {blocks.shape[:-1]}", f"{scales.dtype} of shape {scales.shape}")
        packed[weight_name] = MxExperts(blocks, scales, np.asarray(format_named("mxfp4").table, np.float32))
    return packed


def _pop_tensor(tensors: dict[str, Source], name: str, related: Source) -> Source:
    if name not in tensors:
        problem = f"{related.file}: {shown(name)} is missing, but {shown(related.name)} needs it"
        raise ModelFileError(problem, hint="a shard is missing, or the file is damaged; download it again")
    return tensors.pop(name)


def _check_vector(source: Source, size: int, dtype: str) -> None:
    if math.prod(source.shape) != size or source.dtype != dtype or sum(axis != 1 for axis in source.shape) > 1:
        raise _error(source, f"{size} values of {dtype}", f"{source.dtype} of shape {source.shape}")


def _check_matrix(source: Source, dtype: str) -> None:
    if len(source.shape) != 2 or source.dtype != dtype or 0 in source.shape:
        raise _error(source, f"a matrix of {dtype}", f"{source.dtype} of shape {source.shape}")


def _check_table(source: Source, table: tuple[float, ...] | np.ndarray) -> None:
    """Raise ModelFileError unless a table of codes in the file equals Lowtide's table."""
    expected = np.asarray(table, np.float32)
    _check_vector(source, expected.size, "F32")
    values = source.read(tuple(slice(0, size) for size in source.shape)).reshape(-1)
    if not np.allclose(values, expected, rtol=0, atol=1e-6):
        code = int(np.argmax(~(np.abs(values - expected) <= 1e-6)))
        raise _error(source, f"{expected[code]:.7g} for code {code}", f"{values[code]:.7g}: another data type")


def _error(source: Source, expected: str, got: Any) -> ModelFileError:
    problem = f"{source.file}: {shown(source.name)} does not match the quantised weight"
    return ModelFileError(problem, expected=expected, got=got, hint=_DOWNLOAD_HINT)


def _elements(source: Source, start: int, stop: int, dtype: Any) -> np.ndarray:
    """Read consecutive elements of a tensor that is a vector, a column, a row or a number.

    The bytes are reinterpreted as `dtype`; `start` and `stop` count elements of that dtype. A byte holds two 4-bit
    elements, the high half first.
    """
    element_dtype = np.dtype(dtype)
    is_half = element_dtype == jnp.uint4
    # The file may store elements in a wider dtype, such as 4-bit codes in bfloat16: find the range of bytes, then read
    # the stored elements that cover it.
    low, high = start * element_dtype.itemsize, stop * element_dtype.itemsize
    if is_half:
        low, high = start // 2, -(-stop // 2)
    size = source.itemsize
    first, last = low // size, -(-high // size)
    if math.prod(source.shape) == 1 or not source.shape:
        values = source.read(tuple(slice(0, 1) for _ in source.shape))
    else:
        values = source.read(tuple(slice(first, last) if axis > 1 else slice(0, 1) for axis in source.shape))
    raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)[low - first * size : high - first * size]
    if not is_half:
        return raw.view(element_dtype)
    halves = np.empty((raw.size, 2), np.uint8)
    np.right_shift(raw, 4, out=halves[:, 0])
    np.bitwise_and(raw, 15, out=halves[:, 1])
    return halves.reshape(-1)[start % 2 : start % 2 + stop - start].view(element_dtype)


@dataclasses.dataclass(frozen=True)
class _RowMajor:
    """A vector, or a matrix that a file stores row by row."""

    source: Source
    shape: tuple[int, ...]
    dtype: Any

    @property
    def itemsize(self) -> int:
        """Bytes per element; 4-bit elements take a byte on the host."""
        return np.dtype(self.dtype).itemsize

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """Copy a part into memory; whole rows are read in pieces and then cut."""
        if len(index) == 1:
            return _elements(self.source, index[0].start, index[0].stop, self.dtype)
        rows, columns = index
        width = self.shape[1]
        row_pieces = list(pieces((rows.stop - rows.start, width), self.itemsize))
        if len(row_pieces) == 1 and columns.stop - columns.start == width:  # needs no second copy
            values = _elements(self.source, width * rows.start, width * rows.stop, self.dtype)
            return values.reshape(-1, width)
        out = np.empty((rows.stop - rows.start, columns.stop - columns.start), self.dtype)
        for piece, _ in row_pieces:
            first, last = (width * (rows.start + row) for row in (piece.start, piece.stop))
            values = _elements(self.source, first, last, self.dtype)
            out[piece] = values.reshape(-1, width)[:, columns]
        return out


@dataclasses.dataclass(frozen=True)
class _Number:
    """A number from a JSON file, as a scalar array."""

    value: float
    shape: tuple[int, ...] = ()
    itemsize: int = 4

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        del index
        return np.asarray(self.value, np.float32)


@dataclasses.dataclass(frozen=True)
class _Grid:
    """Scales [out, blocks]; the file stores each of them once for several rows."""

    source: Source
    shape: tuple[int, ...]
    rows: int
    """Number of rows that share a scale; all rows if the matrix has only one scale."""
    factor: float = 1.0
    itemsize: int = 8

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """Copy a part into memory, with each scale repeated for its rows."""
        rows, columns = index
        first, last = rows.start // self.rows, -(-rows.stop // self.rows)
        if len(self.source.shape) == 2:
            stored = self.source.read((slice(first, last), columns))
        else:
            stored = self.source.read((slice(first, last),) * len(self.source.shape)).reshape(-1, 1)
        scales = stored.astype(np.float32) * np.float32(self.factor)
        return scales[np.arange(rows.start, rows.stop) // self.rows - first]


@dataclasses.dataclass(frozen=True)
class _Spread:
    """Scales of short blocks, each inside one row and one block of the file; the file's blocks may cross row ends."""

    absmax: Source
    shape: tuple[int, ...]
    block: int
    """Number of weights that share a scale in the file."""
    short: int
    """Number of weights in a short block."""
    nested: Source | None
    offset: float
    table: Any
    """Values of the codes of quantised scales; unused without `nested`."""
    itemsize: int = 32

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        rows, columns = (np.arange(axis.start, axis.stop) for axis in index)
        # For each shorter block, the index of the block in the file that contains it.
        block_index = (rows[:, None] * self.shape[1] + columns[None]) * self.short // self.block
        start, stop = int(block_index.min()), int(block_index.max()) + 1
        if self.nested is None:
            return _elements(self.absmax, start, stop, np.float32)[block_index - start]
        codes = _elements(self.absmax, start, stop, np.uint8)
        low = start // 256
        nested_scales = _elements(self.nested, low, (stop - 1) // 256 + 1, np.float32)
        scales = self.table[codes] * nested_scales[np.arange(start, stop) // 256 - low] + np.float32(self.offset)
        return scales[block_index - start]


@dataclasses.dataclass(frozen=True)
class MxExperts:
    """Experts in MXFP4, [experts, in, out]: codes [experts, out, blocks, 16] and scales [experts, out, blocks]."""

    blocks: Source
    scales: Source
    values: Any
    itemsize: int = 2
    dtype: str = "MXFP4"
    weight_dtype: str | None = "bfloat16"
    form: Format | None = None

    @property
    def file(self) -> Path:
        return self.blocks.file

    @property
    def num_bytes(self) -> int:
        return self.blocks.num_bytes + self.scales.num_bytes

    @property
    def shape(self) -> tuple[int, ...]:
        experts, out, num_blocks, _ = self.blocks.shape
        return (experts, num_blocks * 32, out)

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """Dequantise a part to bfloat16, which represents every value exactly."""
        experts, inner, outer = index
        low, high = inner.start // 32, -(-inner.stop // 32)
        weights = np.empty([axis.stop - axis.start for axis in index], jnp.bfloat16)
        for expert in range(experts.start, experts.stop):
            for piece, _ in pieces((outer.stop - outer.start, 32 * (high - low)), 16):
                rows = slice(outer.start + piece.start, outer.start + piece.stop)
                part = self._decode(expert, rows, slice(low, high))[:, inner.start - 32 * low : inner.stop - 32 * low]
                weights[expert - experts.start, :, piece] = part.T
        return weights

    def _decode(self, expert: int, rows: slice, blocks: slice) -> np.ndarray:
        expert_slice = slice(expert, expert + 1)
        raw = self.blocks.read((expert_slice, rows, blocks, slice(0, 16)))[0]
        exponents = self.scales.read((expert_slice, rows, blocks))[0]
        if np.any(exponents == 255):
            problem = f"{self.scales.file}: {self.scales.name} has a scale that is NaN, in expert {expert}"
            raise ModelFileError(problem, hint="the file is damaged; download it again")
        # The first element of a byte is in its low half. Scales are exponents of two with bias 127; 255 is NaN.
        codes = np.stack([raw & 15, raw >> 4], axis=-1).reshape(*raw.shape[:2], 32)
        values = np.ldexp(self.values[codes], exponents[..., None].astype(np.int32) - 127)
        return values.reshape(len(values), -1).astype(jnp.bfloat16)


Stored: TypeAlias = "Source | Packed | MxExperts | GgufTensor"
"""A weight in a file: a plain tensor, a quantised weight or experts, or a tensor of a GGUF file."""
