"""Mixed precision: the model computes in bfloat16, and trainable leaves keep their dtype.

The casts are part of the differentiated function, so gradients have the dtype of the trainable leaves. `mutable` leaves
are never cast, because state in half precision would lose small changes. bfloat16 has the range of float32 and needs no
loss scaling. float16 would need it, and is refused.

Layers may cast on their own, and then the bridges help. The Keras bridge has ``autocast(dtype)``, a context for tracing
the model, and nothing is cast here. The NNX bridge has ``lowered(model, dtype)``, which sets the dtype of the layers of
the model that is passed to a function.

Known inefficiency: frozen float32 leaves are cast in every step. A frozen base is better stored in bfloat16.

References: Micikevicius et al., "Mixed Precision Training", 2018; Kalamkar et al., "A Study of BFLOAT16 for Deep
Learning Training", 2019.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..core import ConfigError, Tree, Where, combine, partition


class Precision:
    """The dtype in which functions of a model compute: bfloat16, or None for the dtypes of the arrays.

    `mutable` leaves are not cast. `ConfigError` is raised for another dtype, or a model that has its own policy.
    """

    def __init__(self, compute_dtype: Any, source: Any, mutable: Where | None) -> None:
        self._source, self._mutable = source, mutable
        self._dtype = None if compute_dtype is None else _check_dtype(compute_dtype)
        self._autocast: Any = None
        if self._dtype is not None and hasattr(source, "autocast"):
            self._autocast = functools.partial(source.autocast, self._dtype.name)
            with self._autocast():  # raises now rather than in the first step
                pass

    def bind(self, fn: Callable[..., Any], *, training: bool) -> Callable[..., tuple[Any, Tree]]:
        """Bind a function as `ModelObject.bind` does; it gets the model and its arguments in the compute dtype."""
        if self._dtype is None:
            return self._source.bind(fn, training=training)

        def on_lowered_model(model: Any, *args: Any) -> Any:
            return fn(self._source.lowered(model, self._dtype), *args)

        run = self._source.bind(on_lowered_model if hasattr(self._source, "lowered") else fn, training=training)

        def with_autocast(arrays: Tree, *args: Any) -> tuple[Any, Tree]:
            with self._autocast():
                return run(arrays, *args)

        def on_lowered_arrays(arrays: Tree, *args: Any) -> tuple[Any, Tree]:
            if self._mutable is None:
                return run(self._lower(arrays), *self._lower(args))
            mutable, other_leaves = partition(arrays, self._mutable)
            return run(combine(mutable, self._lower(other_leaves)), *self._lower(args))

        return on_lowered_arrays if self._autocast is None else with_autocast

    def widen(self, results: Tree) -> Tree:
        """Convert half-precision results of a function to float32."""
        if self._dtype is None:
            return results
        return jax.tree.map(lambda x: x.astype(jnp.float32) if _bits(x) == 16 else x, results)

    def _lower(self, tree: Tree) -> Tree:
        return jax.tree.map(lambda x: x.astype(self._dtype) if _bits(x) > 16 else x, tree)


def refuse_precision(compute_dtype: Any) -> None:
    """Raise when a compute dtype is passed together with a layerwise step."""
    if compute_dtype is not None:
        raise ConfigError(
            "compute_dtype cannot be combined with a layerwise step",
            expected="a layerwise step whose blocks cast their weights",
            got=f"compute_dtype={compute_dtype!r} and a layerwise step",
            hint="cast in the stack's functions, as lt.models.load(..., compute_dtype=...) does",
        )


def _bits(leaf: Any) -> int:
    """Return the bits of a floating-point array's dtype; 0 for any other leaf."""
    dtype = getattr(leaf, "dtype", None)
    return jnp.finfo(dtype).bits if dtype is not None and jnp.issubdtype(dtype, jnp.floating) else 0


def _check_dtype(compute_dtype: Any) -> Any:
    try:
        dtype = jnp.dtype(compute_dtype)
    except TypeError:
        dtype = None
    if dtype != jnp.bfloat16:
        raise ConfigError(
            "compute_dtype has to be bfloat16, which trains without loss scaling",
            expected='"bfloat16", or None for the dtypes of the arrays',
            got=repr(compute_dtype) if dtype is None else dtype.name,
            hint='compute_dtype="bfloat16" has the range of float32',
        )
    return dtype
