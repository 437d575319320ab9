"""Read single tensors of an adapter's file, and check them against the model and the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ...core import ModelFileError

_DTYPES = ("F64", "F32", "F16", "BF16")


def read_tensor(file: Any, path: Path, key: str, shape: tuple[int, ...]) -> np.ndarray:
    """Read a tensor in float32.

    Args:
        file: an open safetensors file.
        path: the file's path, for messages.
        key: the tensor's name.
        shape: the shape that it must have.

    Raises:
        ModelFileError: when the shape or the dtype does not fit, or a value is not a finite number.
    """
    check_fits(file, path, key, shape)
    with np.errstate(over="ignore"):  # a float64 value may overflow to infinity
        values = np.asarray(file.get_tensor(key), np.float32)
    if not np.isfinite(values).all():
        raise ModelFileError(
            f"{path}: tensor {key} has values that are no finite numbers",
            got=f"{np.count_nonzero(~np.isfinite(values))} of {values.size}",
            hint="the file is damaged, or the training that wrote it had diverged",
        )
    return values


def check_fits(file: Any, path: Path, key: str, shape: tuple[int, ...]) -> None:
    """Check the shape and dtype of a tensor without reading its values.

    Raises:
        ModelFileError: for another shape, or a dtype that is not floating-point.
    """
    found = file.get_slice(key)
    if tuple(found.get_shape()) != shape or found.get_dtype() not in _DTYPES:
        raise ModelFileError(
            f"{path}: tensor {key} does not fit",
            expected=f"a floating-point tensor of shape {list(shape)}",
            got=f"{found.get_dtype()}{list(found.get_shape())}",
            hint="load it into the model that it was made for, with the configuration it was saved with",
        )
