"""Directories as other software quantises them, written without it, and the values that their tensors stand for."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from lowtide.models._safetensors import SINGLE
from lowtide.quant import dynamic_map
from lowtide.quant._weight import NF4_VALUES

Tensors = dict[str, tuple[str, np.ndarray]]
"""Dtype in the file, and what is stored, by name."""

FP4 = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3], np.float32) / np.float32(12)
NF4 = np.asarray(NF4_VALUES, np.float32)
SCHEMES: dict[str, dict[str, Any]] = {
    "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4 nested": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "rows": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
    },
    "tensor": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "tensor"}}},
        "sparsity_config": {"format": "dense"},
    },
    "int rows": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}},
    },
    "blocks": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32], "activation_scheme": "dynamic"},
}


def quantized_directory(source: Path, target: Path, kind: str, *, skip: str = "-") -> dict[str, np.ndarray]:
    """Quantise the projections of a directory.

    Args:
        source: a dense directory of one file.
        target: the folder to make.
        kind: of `SCHEMES`.
        skip: part of the names that stay dense.

    Returns:
        What the quantised weights stand for, by name.
    """
    tensors: Tensors = {}
    values: dict[str, np.ndarray] = {}
    for name, array in load_file(source / SINGLE).items():
        if name.endswith("_proj.weight") and skip not in name:
            more, values[name] = _quantized(name, array, kind)
            tensors |= more
        else:
            tensors[name] = ("F32", array)
    target.mkdir()
    write_tensors(target / SINGLE, tensors)
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": SCHEMES[kind]}))
    if (source / "tokenizer.json").exists():
        (target / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    return values


def write_tensors(path: Path, tensors: Tensors) -> None:
    """Write a file of safetensors, of any dtypes."""
    header: dict[str, Any] = {}
    end = 0
    ordered = sorted(tensors.items(), key=lambda item: -item[1][1].itemsize)
    for name, (dtype, array) in ordered:
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(array.tobytes() for _, (_, array) in ordered))


def _quantized(name: str, array: np.ndarray, kind: str) -> tuple[Tensors, np.ndarray]:
    array = array.astype(np.float32)
    if kind in ("nf4", "nf4 nested", "fp4"):
        return _four_bits(name, array, kind)
    module, (out, inner) = name.removesuffix(".weight"), array.shape
    if kind == "int8":
        largest = np.abs(array).max(1)
        codes = np.rint(array * (127 / largest)[:, None]).astype(np.int8)
        more: Tensors = {f"{module}.SCB": ("F32", largest), f"{module}.weight_format": ("U8", np.uint8(0).reshape(()))}
        return {name: ("I8", codes), **more}, codes * (largest / np.float32(127))[:, None]
    if kind == "blocks":
        grid = np.zeros((math.ceil(out / 32), math.ceil(inner / 32)), np.float32)
        for row, column in np.ndindex(*grid.shape):
            part = array[32 * row : 32 * row + 32, 32 * column : 32 * column + 32]
            grid[row, column] = np.abs(part).max() / 448
        spread = np.repeat(np.repeat(grid, 32, 0), 32, 1)[:out, :inner]
        codes = (array / spread).astype(jnp.float8_e4m3fn)
        return {name: ("F8_E4M3", codes), f"{module}.weight_scale_inv": ("F32", grid)}, codes.astype("f") * spread
    scales = np.abs(array).max(None if kind == "tensor" else 1) / np.float32(127 if kind == "int rows" else 448)
    scales = scales.astype(jnp.bfloat16).reshape((1,) if kind == "tensor" else (out, 1))
    scaled = array / scales.astype(np.float32)
    more = {f"{module}.weight_scale": ("BF16", scales), f"{module}.input_scale": ("F32", np.ones(1, np.float32))}
    if kind == "int rows":
        codes = np.clip(np.rint(scaled), -127, 127).astype(np.int8)
        return {name: ("I8", codes), **more}, codes.astype("f") * scales.astype("f")
    codes = np.clip(scaled, -448, 448).astype(jnp.float8_e4m3fn)
    return {name: ("F8_E4M3", codes), **more}, codes.astype("f") * scales.astype("f")


def _four_bits(name: str, array: np.ndarray, kind: str) -> tuple[Tensors, np.ndarray]:
    """Quantise blocks of 64 that go on from row to row."""
    table = FP4 if kind == "fp4" else NF4
    flat = array.reshape(-1)
    number = math.ceil(flat.size / 64)
    blocks = np.pad(flat, (0, number * 64 - flat.size)).reshape(number, 64)
    absmax = np.abs(blocks).max(1)
    codes = np.abs(blocks[..., None] / absmax[:, None, None] - table).argmin(-1).astype(np.uint8)
    state: dict[str, Any] = {"quant_type": kind[:3], "blocksize": 64, "dtype": "float32", "shape": list(array.shape)}
    more: Tensors = {f"{name}.absmax": ("F32", absmax), f"{name}.quant_map": ("F32", table)}
    if kind == "nf4 nested":
        mean = absmax.mean()
        groups = np.pad(absmax - mean, (0, -number % 256)).reshape(-1, 256)
        largest = np.abs(groups).max(1)
        small = np.abs((groups / largest[:, None])[..., None] - dynamic_map()).argmin(-1).astype(np.uint8)
        absmax = (dynamic_map()[small] * largest[:, None] + mean).reshape(-1)[:number]
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(mean)}
        more[f"{name}.absmax"] = ("U8", small.reshape(-1)[:number])
        more |= {f"{name}.nested_absmax": ("F32", largest), f"{name}.nested_quant_map": ("F32", dynamic_map())}
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    more[f"{name}.quant_state.bitsandbytes__{kind[:3]}"] = ("U8", text)
    packed = codes.reshape(-1)[: flat.size]
    more[name] = ("U8", (packed[::2] << 4 | packed[1::2])[:, None])
    return more, (table[codes] * absmax[:, None]).reshape(-1)[: flat.size].reshape(array.shape)
