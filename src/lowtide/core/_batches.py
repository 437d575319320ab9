"""Leaves of a batch: their conversion to arrays that JAX accepts, their shapes, and errors for non-numeric leaves."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._errors import DataError
from ._paths import Tree, is_array_like, leaves_with_paths

_NON_NUMERIC_KINDS = "OSUMm"
"""NumPy's dtype kinds of objects, text and times."""


def as_arguments(batch: Tree) -> Tree:
    """Convert a batch to arguments of the compiled step.

    On a CPU a call shares the buffers of NumPy arrays, and the user may refill them while the step runs. So they are
    copied, which costs the host less than converting them to JAX arrays.
    """
    is_cpu = jax.default_backend() == "cpu"

    def convert(leaf: Any) -> Any:
        is_array = type(leaf) is np.ndarray and leaf.dtype.kind not in _NON_NUMERIC_KINDS
        if is_cpu and is_array and leaf.dtype == jax.dtypes.canonicalize_dtype(leaf.dtype):
            return leaf.copy()
        return jnp.asarray(check_range(as_numpy(leaf)))

    leaves, structure = jax.tree.flatten(batch)
    try:
        return structure.unflatten([convert(leaf) for leaf in leaves])
    except (TypeError, OverflowError):
        refuse_objects(batch)
        raise


def check_range(leaf: Any) -> Any:
    """Return a leaf unchanged, or raise `OverflowError` if JAX's integers (32 bits without x64) cannot hold its values.

    JAX would keep only the lower bits.
    """
    wide: Any = np.int64(leaf) if type(leaf) is int else leaf
    if isinstance(wide, np.ndarray | np.generic) and wide.dtype.kind in "iu":
        narrow = jax.dtypes.canonicalize_dtype(wide.dtype)
        if narrow != wide.dtype and wide.size:
            lowest, highest = np.iinfo(narrow).min, np.iinfo(narrow).max
            if wide.min() < lowest or wide.max() > highest:
                raise OverflowError(f"{wide.min()} to {wide.max()}")
    return leaf


def as_numpy(leaf: Any) -> Any:
    """Convert a leaf of another library, such as a PyTorch tensor in host memory, to NumPy.

    Raises:
        DataError: for a leaf that cannot be converted: on another device, in an autograd graph, or of bfloat16.
    """
    if not hasattr(leaf, "__array__") or isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic):
        return leaf
    try:
        return np.asarray(leaf)
    except (TypeError, RuntimeError, ValueError) as error:
        raise DataError(
            f"a {type(leaf).__module__}.{type(leaf).__name__} of a batch cannot be converted to a NumPy array",
            expected="arrays of JAX or NumPy, or objects that NumPy can read",
            got=str(error).splitlines()[0] if str(error) else type(error).__name__,
            hint="convert a PyTorch tensor with tensor.detach().cpu().float().numpy(), for instance in collate_fn",
        ) from error


def numbers(batch: Tree) -> Tree:
    """Convert arrays of other libraries in a batch to NumPy; raise for leaves that hold no numbers."""
    batch = jax.tree.map(as_numpy, batch)
    refuse_objects(batch)
    return batch


def argument_shapes(batch: Tree) -> Tree:
    """Return the batch with shapes in place of the leaves that `as_arguments` would still convert."""
    array_types = (jax.Array, jax.ShapeDtypeStruct)
    return jax.tree.map(lambda x: x if isinstance(x, array_types) else jax.eval_shape(jnp.asarray, x), numbers(batch))


def refuse_objects(batch: Tree) -> None:
    """Raise for leaves of a batch that hold no numbers, or integers too large for JAX's dtype.

    Raises:
        DataError: with the path of the first such leaf.
    """
    for path, leaf in leaves_with_paths(batch):
        try:
            check_range(leaf)
        except OverflowError as error:
            raise DataError(
                f"batch leaf {path or '(root)'} holds integers of more than 32 bits",
                expected="-2**31 to 2**31 - 1, or 0 to 2**32 - 1 for unsigned integers",
                got=error,
                hint="take them modulo the table's size, or set jax_enable_x64; JAX would keep only their lower bits",
            ) from None
        if not is_array_like(leaf) or getattr(getattr(leaf, "dtype", None), "kind", "f") in _NON_NUMERIC_KINDS:
            raise DataError(
                f"batch leaf {path or '(root)'} holds no numbers",
                expected="an array, or a number",
                got=f"dtype {leaf.dtype}" if hasattr(leaf, "dtype") else type(leaf).__name__,
                hint="make the dataclass a pytree with jax.tree_util.register_dataclass"
                if dataclasses.is_dataclass(leaf)
                else "encode strings as tokens, and leave other objects out of the batches",
            )
