"""Read single tensors of an adapter's file, and check them against the model and the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ...core import ModelFileError

_DTYPES = ("F64", "F32", "F16", "BF16")


def read_tensor(file: Any, path: Path, key: str, shape: tuple[int, ...]) -> np.ndarray:
    """Read a tensor of this shape and finite values from an open safetensors file, in float32."""
    check_tensor(file, path, key, shape)
    with np.errstate(over="ignore"):  # a float64 value may overflow to infinity
        values = np.asarray(file.get_tensor(key), np.float32)
    if not np.isfinite(values).all():
        raise ModelFileError(
            f"{path}: tensor {key} has values that are not finite",
            got=f"{np.count_nonzero(~np.isfinite(values))} of {values.size}",
            hint="save the adapter again: the file is damaged, or its training diverged",
        )
    return values


def check_tensor(file: Any, path: Path, key: str, shape: tuple[int, ...]) -> None:
    """Check without reading values that a tensor has this shape and a floating-point dtype."""
    tensor = file.get_slice(key)
    if tuple(tensor.get_shape()) != shape or tensor.get_dtype() not in _DTYPES:
        raise ModelFileError(
            f"{path}: tensor {key} does not fit",
            expected=f"a floating-point tensor of shape {list(shape)}",
            got=f"{tensor.get_dtype()}{list(tensor.get_shape())}",
            hint="load it into the model that it was made for, with the configuration it was saved with",
        )
