"""Group the tensors of a quantised directory by weight, and check that they match.

This module reads no weights, only tensors that describe the storage: JSON, tables and layout flags of bitsandbytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...core import ModelFileError, parse_json, shown, validate
from ...quant import dynamic_map, format_named
from .._tensors import Source
from ._scheme import Scheme
from ._views import Grid, MxExperts, Number, Rows, Spread, Vector
from ._weights import Packed, Stored

_DOWNLOAD_HINT = "the file is damaged, or of another version of the software that wrote it; download it again"
_STATE = ".quant_state.bitsandbytes__"
_MOST_STATE_BYTES = 4096
_FP4_MAGNITUDES = (0.0, 0.0625 / 12, 8 / 12, 1.0, 4 / 12, 6 / 12, 2 / 12, 3 / 12)
_FP4 = (*_FP4_MAGNITUDES, *(-value for value in _FP4_MAGNITUDES))
_ACTIVATION_SCALES = (".input_scale", ".output_scale", ".activation_scale", ".input_scale_ub", ".k_scale", ".v_scale")
_IGNORED_SUFFIXES = (*_ACTIVATION_SCALES, ".q_scale", ".input_global_scale")


def folded(tensors: Mapping[str, Source], scheme: Scheme, notes: list[str]) -> dict[str, Stored]:
    """Group the tensors of each quantised weight.

    Args:
        tensors: tensors of the directory, by name.
        scheme: the quantisation scheme in `config.json`.
        notes: list to which messages for the user are appended.

    Returns:
        All weights by name, quantised and unquantised.

    Raises:
        ModelFileError: for a tensor that is missing, or that does not match its weight.
    """
    groupers: dict[str, Callable[[dict[str, Source], Scheme], dict[str, Packed]]] = {
        "bitsandbytes": _bitsandbytes if scheme.form is None or scheme.form.name == "nf4" else _bitsandbytes_int8,
        "mxfp4": _mxfp4,
    }
    remaining = dict(tensors)
    packed = groupers.get(scheme.method, _group_scaled)(remaining, scheme)
    if scheme.method not in groupers:
        ignored = [name for name in remaining if name.endswith(_IGNORED_SUFFIXES)]
        for name in ignored:
            del remaining[name]
        if ignored:
            notes.append(f"{len(ignored)} activation scales are not applied: products use only the stored weights")
    if unsupported := sorted({weight.dtype for weight in packed.values() if weight.form is None}):
        notes.append(
            f"weights in {' and '.join(unsupported)} are loaded as arrays: products with them are not supported yet"
        )
    return {**remaining, **packed}


def _bitsandbytes(tensors: dict[str, Source], scheme: Scheme) -> dict[str, Packed]:
    del scheme
    states = [name for name in tensors if _STATE in name]
    packed = {name: _pack_4bit(name.partition(_STATE)[0], name, tensors) for name in states}
    for name, source in tensors.items():
        if source.dtype == "U8" and name.endswith(".weight"):
            raise ModelFileError(
                f"{source.file}: {shown(name)} is quantised, but its quantisation state is missing",
                expected=f"a tensor {shown(name + _STATE + 'nf4')}",
                hint=_DOWNLOAD_HINT,
            )
    return {weight.name: weight for weight in packed.values()}


def _pack_4bit(name: str, state_name: str, tensors: dict[str, Source]) -> Packed:
    from ._schema import QuantState

    raw = tensors.pop(state_name)
    if raw.dtype != "U8" or len(raw.shape) != 1 or not 0 < raw.shape[0] <= _MOST_STATE_BYTES:
        raise _error(raw, f"JSON of at most {_MOST_STATE_BYTES} bytes", f"{raw.dtype} of shape {raw.shape}")
    source_name = f"{raw.file}: {shown(state_name)}"
    state = validate(
        QuantState,
        parse_json(raw.read((slice(0, raw.shape[0]),)).tobytes(), source_name),
        source_name,
        hint=_DOWNLOAD_HINT,
    )
    out, inner = state.shape
    weight = _pop_tensor(tensors, name, raw)
    count = -(-out * inner // state.blocksize)
    axes = [size for size in weight.shape if size != 1]
    if len(axes) > 1 or weight.dtype not in ("U8", "BF16", "F16", "F32") or 2 * weight.num_bytes != out * inner:
        raise _error(weight, f"{out * inner / 2:g} bytes in one column, for shape {state.shape}", weight.shape)
    # Codes are decoded with Lowtide's tables, so a file with another table would give wrong weights.
    _check_table(_pop_tensor(tensors, f"{name}.quant_map", raw), _FP4 if state.quant_type == "fp4" else None)
    absmax = _pop_tensor(tensors, f"{name}.absmax", raw)
    is_nested = state.nested_offset is not None
    _check_vector(absmax, count, "U8" if is_nested else "F32")
    nested = None
    if is_nested:
        nested = _pop_tensor(tensors, f"{name}.nested_absmax", raw)
        _check_vector(nested, -(-count // 256), "F32")
        _check_table(_pop_tensor(tensors, f"{name}.nested_quant_map", raw), dynamic_map())
    # `QuantizedWeight` has blocks within a row, but blocks of bitsandbytes may continue into the next row. Then shorter
    # blocks, whose length divides both, repeat the scale of the block that they come from (`Spread`).
    block = math.gcd(inner, state.blocksize)
    if block < 8:
        raise _error(weight, "rows of a multiple of 8 weights", f"{inner}, in blocks of {state.blocksize}")
    is_even, shape = block == state.blocksize, (out, inner // block)
    codes = Rows(weight, (out, inner), jnp.uint4)
    if not is_even:
        offset = state.nested_offset or 0.0
        parts = (codes, Spread(absmax, shape, state.blocksize, block, nested, offset, dynamic_map()))
    elif nested is None:
        parts = (codes, Rows(absmax, shape, np.float32))
    else:
        nested_parts = (Vector(nested, (-(-count // 256),), np.float32), Number(state.nested_offset or 0.0))
        parts = (codes, Rows(absmax, shape, np.uint8), *nested_parts)
    return Packed(
        name=name,
        file=weight.file,
        shape=(out, inner),
        dtype=state.quant_type.upper(),
        num_bytes=sum(tensor.num_bytes for tensor in (weight, absmax, nested) if tensor is not None),
        weight_dtype=state.dtype,
        form=format_named("nf4", block) if state.quant_type == "nf4" else None,
        block=block,
        parts=parts,
        table=_FP4 if state.quant_type == "fp4" else format_named("nf4").table,
    )


def _bitsandbytes_int8(tensors: dict[str, Source], scheme: Scheme) -> dict[str, Packed]:
    packed: list[Packed] = []
    for name in [name for name in tensors if name.endswith(".SCB")]:
        module, scales = name.removesuffix(".SCB"), tensors.pop(name)
        weight = _pop_tensor(tensors, f"{module}.weight", scales)
        _check_matrix(weight, "I8")
        _check_vector(scales, weight.shape[0], "F32")
        layout = tensors.pop(f"{module}.weight_format", None)
        if layout is not None and (
            math.prod(layout.shape) != 1 or int(layout.read(tuple(slice(0, 1) for _ in layout.shape)).item()) != 0
        ):
            raise _error(layout, "0, the original order of rows", "another order, for one kind of GPU")
        # 1 / 127, with the digits that bitsandbytes uses.
        grid = Grid(scales, (weight.shape[0], 1), 1, factor=7.874015718698502e-3)
        packed.append(_pack_8bit(f"{module}.weight", weight, scales, grid, scheme))
    return {weight.name: weight for weight in packed}


def _group_scaled(tensors: dict[str, Source], scheme: Scheme) -> dict[str, Packed]:
    """Group 8-bit weights with their scales: one per matrix, per row or per block."""
    assert scheme.form is not None
    is_inverse = scheme.method == "fp8" and any(name.endswith(".weight_scale_inv") for name in tensors)
    suffix = ".weight_scale_inv" if is_inverse else ".weight_scale"  # despite the name, both multiply the weights
    packed: list[Packed] = []
    for name in [name for name in tensors if name.endswith(suffix)]:
        scales = tensors.pop(name)
        weight = _pop_tensor(tensors, name.removesuffix(suffix) + ".weight", scales)
        _check_matrix(weight, "F8_E4M3" if scheme.form.name == "fp8" else "I8")
        out, inner = weight.shape
        rows, columns = scheme.block or (out, inner)
        blocks = (-(-out // rows), -(-inner // columns))
        if scheme.block is None and math.prod(scales.shape) == 1 and len(scales.shape) <= 2:
            grid = Grid(scales, (out, 1), out)
        elif scheme.block is None and scales.shape in ((out,), (out, 1)):
            grid = Grid(scales, (out, 1), 1)
        elif scheme.block is not None and scales.shape == blocks:
            grid = Grid(scales, (out, blocks[1]), rows)
        else:
            expected = (
                f"one, or one for each of the {out} rows" if scheme.block is None else f"{blocks} of {scheme.block}"
            )
            raise _error(scales, f"scales: {expected}", f"shape {scales.shape}")
        if scales.dtype not in ("F32", "BF16", "F16"):
            raise _error(scales, "F32, BF16 or F16", scales.dtype)
        packed.append(_pack_8bit(name.removesuffix(suffix) + ".weight", weight, scales, grid, scheme))
    return {weight.name: weight for weight in packed}


def _pack_8bit(name: str, weight: Source, scales: Source, grid: Grid, scheme: Scheme) -> Packed:
    assert scheme.form is not None
    return Packed(
        name=name,
        file=weight.file,
        shape=weight.shape,
        dtype=scheme.form.name.upper(),
        num_bytes=weight.num_bytes + scales.num_bytes,
        weight_dtype=None,
        form=scheme.form,
        block=scheme.form.block,
        parts=(weight, grid),
    )


def _mxfp4(tensors: dict[str, Source], scheme: Scheme) -> dict[str, Packed]:
    del scheme
    packed: list[Packed] = []
    for name in [name for name in tensors if name.endswith("_blocks")]:
        blocks = tensors.pop(name)
        weight_name = name.removesuffix("_blocks")
        scales = _pop_tensor(tensors, f"{weight_name}_scales", blocks)
        if len(blocks.shape) != 4 or blocks.shape[-1] != 16 or blocks.dtype != "U8":
            raise _error(blocks, "U8 of shape [experts, out, blocks, 16]", f"{blocks.dtype} of shape {blocks.shape}")
        if scales.shape != blocks.shape[:-1] or scales.dtype != "U8":
            raise _error(scales, f"U8 of shape {blocks.shape[:-1]}", f"{scales.dtype} of shape {scales.shape}")
        experts = MxExperts(blocks, scales, np.asarray(format_named("mxfp4").table, np.float32))
        packed.append(
            Packed(
                name=weight_name,
                file=blocks.file,
                shape=experts.shape,
                dtype="MXFP4",
                num_bytes=blocks.num_bytes + scales.num_bytes,
                weight_dtype="bfloat16",
                experts=experts,
            )
        )
    return {weight.name: weight for weight in packed}


def _pop_tensor(tensors: dict[str, Source], name: str, related: Source) -> Source:
    if name not in tensors:
        raise ModelFileError(
            f"{related.file}: {shown(name)} is missing",
            expected=f"this tensor in addition to {shown(related.name)}",
            hint="a shard is missing, or the file is damaged; download it again",
        )
    return tensors.pop(name)


def _check_vector(source: Source, size: int, dtype: str) -> None:
    if math.prod(source.shape) != size or source.dtype != dtype or sum(axis != 1 for axis in source.shape) > 1:
        raise _error(source, f"{size} values of {dtype}", f"{source.dtype} of shape {source.shape}")


def _check_matrix(source: Source, dtype: str) -> None:
    if len(source.shape) != 2 or source.dtype != dtype or 0 in source.shape:
        raise _error(source, f"a matrix of {dtype}", f"{source.dtype} of shape {source.shape}")


def _check_table(source: Source, table: Collection[float] | np.ndarray | None) -> None:
    """Check that a code table in the file equals Lowtide's."""
    expected = np.asarray(format_named("nf4").table if table is None else table, np.float32)
    _check_vector(source, expected.size, "F32")
    values = source.read(tuple(slice(0, size) for size in source.shape)).reshape(-1)
    if not np.allclose(values, expected, rtol=0, atol=1e-6):
        code = int(np.argmax(~(np.abs(values - expected) <= 1e-6)))
        raise _error(source, f"{expected[code]:.7g} for code {code}", f"{values[code]:.7g}: another data type")


def _error(source: Source, expected: str, got: Any) -> ModelFileError:
    return ModelFileError(
        f"{source.file}: {shown(source.name)} does not match the quantised weight",
        expected=expected,
        got=got,
        hint=_DOWNLOAD_HINT,
    )
