"""``quantization_config`` of `config.json`: the quantisation software and format of a directory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...core import ModelFileError, shortened, shown, validate
from ...quant import Format, format_named

if TYPE_CHECKING:
    from .._schema import QuantizationFile

_METHODS = ("bitsandbytes", "compressed-tensors", "fp8", "fbgemm_fp8", "mxfp4")
_CALIBRATED = ("gptq", "awq", "auto-round", "hqq", "aqlm", "quip", "higgs", "spqr", "vptq", "eetq")
_SUPPORTED = "bitsandbytes (nf4, fp4, int8), compressed-tensors and fp8 (8 bits), or mxfp4"
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
    """Parse a ``quantization_config``.

    Args:
        raw: the parsed entry, or None.
        where: the file's name, for messages.

    Returns:
        The scheme, or None if the entry is empty.

    Raises:
        ModelFileError: for software or a format that Lowtide does not read.
    """
    if raw is None or raw == {}:
        return None
    from .._schema import QuantizationFile

    entry = raw if isinstance(raw, Mapping) else {"quantization_config": raw}  # pyright: ignore[reportUnknownVariableType]
    file = validate(QuantizationFile, entry, f"{where}: quantization_config", hint="copy config.json again")
    # Old files of bitsandbytes have no quant_method.

    method = file.quant_method or ("bitsandbytes" if file.load_in_4bit or file.load_in_8bit else None)
    if method not in _METHODS or not isinstance(raw, Mapping):
        is_calibrated = method in _CALIBRATED
        raise ModelFileError(
            f"{where}: the checkpoint is quantised"
            + (f" by {shown(method)}" if method else ", but does not name the method"),
            expected=f"quant_method {_SUPPORTED}",
            got=f"quantization_config={shown(raw)}",
            hint=("its codes are packed for kernels that Lowtide lacks; " if is_calibrated else "") + _DENSE_HINT,
        )
    parse = {"bitsandbytes": _bitsandbytes, "compressed-tensors": _compressed, "fp8": _fp8}.get(
        method, _scheme_by_method
    )
    return parse(file, method, where)


def _bitsandbytes(file: QuantizationFile, method: str, filename: str) -> Scheme:
    if file.load_in_4bit == file.load_in_8bit:
        raise _unsupported(
            filename, method, "load_in_4bit or load_in_8bit", f"both are {str(file.load_in_4bit).lower()}"
        )
    return Scheme(method=method, form=format_named("nf4" if file.load_in_4bit else "int8"))


def _scheme_by_method(file: QuantizationFile, method: str, filename: str) -> Scheme:
    del file, filename
    return Scheme(method=method, form=format_named("fp8") if method == "fbgemm_fp8" else None)


def _fp8(file: QuantizationFile, method: str, filename: str) -> Scheme:
    if file.fmt not in ("e4m3", "float8_e4m3fn"):
        raise _unsupported(filename, method, "fmt e4m3", f"fmt {shown(file.fmt)}")
    block = None if file.weight_block_size is None else (file.weight_block_size[0], file.weight_block_size[1])
    return Scheme(method=method, form=format_named("fp8", _columns(block, method, filename)), block=block)


def _compressed(file: QuantizationFile, method: str, filename: str) -> Scheme:
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
    for weights in (group.weights for group in groups):
        if weights is None:
            continue
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
    return ModelFileError(
        f"{filename}: the checkpoint is quantised by {method} in a way that is not supported",
        expected=expected,
        got=got,
        hint=_DENSE_HINT,
    )
