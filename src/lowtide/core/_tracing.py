"""Helpers for traced code: order of execution, varying axes of `jax.shard_map`, and closed-over tracers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend import core as jex

from ._devices import most_tile_rows
from ._paths import Tree, is_key
from ._placement import memory_space


def zero_after(tree: Tree) -> Any:
    """Make an int32 zero that is known only when every leaf of a tree has been computed.

    Added to an index, the zero makes one part of a program wait for another part whose results it does not read. Other
    ways failed: XLA started host copies before an optimization barrier, computed tiles concurrently despite a barrier,
    and removed a loop variable that did not change.
    """
    zero = jnp.int32(0)
    for leaf in jax.tree.leaves(tree):
        # Slice whole tiles: XLA copies nothing smaller from the host.
        max_sizes = (*[1] * (leaf.ndim - 2), max(32, most_tile_rows(leaf.dtype)), leaf.size)[-leaf.ndim :]
        limits = tuple(min(size, limit) for size, limit in zip(leaf.shape, max_sizes, strict=False))
        corner = jax.lax.slice(leaf, (0,) * leaf.ndim, limits)
        if memory_space(leaf) == jax.memory.Space.Host:
            corner = jax.device_put(corner, jax.memory.Space.Device)
        corner = jax.random.key_data(corner) if is_key(corner) else corner
        bits = jnp.sum(jnp.real(jnp.ravel(corner)[:1]).astype(jnp.float32))
        # A population count of 32 bits is at most 32, so `count >> 6` is 0. XLA does not know that, and keeps the
        # dependency.
        count = jax.lax.population_count(jax.lax.bitcast_convert_type(bits, jnp.uint32))
        zero = zero + (count >> 6).astype(jnp.int32)
    return zero


def varying_axes(aval: Any) -> frozenset[str]:
    """Return the axes of a `jax.shard_map` with ``check_vma`` along which an array varies (jax 0.10.2 to 0.12.0)."""
    return getattr(getattr(aval, "mat", None), "varying", frozenset())


def initial_carry(arrays: Iterable[Any], shape: tuple[int, ...], dtype: Any, fill: float = 0) -> Any:
    """Make a constant initial carry for a loop that computes from `arrays`; it has the varying axes of all of them."""
    # With `check_vma` a loop's carry needs the same varying axes before and after each step; a plain constant has none.
    full = jnp.full(shape, fill, dtype)
    axes = frozenset[str]().union(*(varying_axes(jax.typeof(array)) for array in arrays))
    return jax.lax.pcast(full, tuple(sorted(axes)), to="varying") if axes else full


def uniformly_varying(tree: Any) -> Any:
    """Cast all arrays of a tree to vary along the same axes of a `jax.shard_map`: the union of their varying axes.

    Without the cast, a custom derivative would have to sum the gradient of each array over the axes that the array
    lacks. The derivative of the cast computes this sum.
    """
    leaves, structure = jax.tree.flatten(tree)
    axes = frozenset[str]().union(*(varying_axes(jax.typeof(leaf)) for leaf in leaves))
    missing = [tuple(sorted(axes - varying_axes(jax.typeof(leaf)))) for leaf in leaves]
    pairs = zip(leaves, missing, strict=True)
    return structure.unflatten(
        [jax.lax.pcast(leaf, missing_axes, to="varying") if missing_axes else leaf for leaf, missing_axes in pairs]
    )


def closure_convert(fn: Callable[..., Tree], *args: Tree) -> ConvertedClosure:
    """Trace a function of trees, and turn the tracers that it closes over into arguments.

    Rules of a `jax.custom_vjp` need the tracers as arguments. `jax.closure_convert` makes arguments only of values that
    may have a gradient. An integer tracer, such as a batch's segment ids, stays inside the function and is no longer
    valid when the rules run. `jax.closure_convert` also keeps closed-over values alive for the lifetime of the process
    (jax 0.10.2 to 0.12.0).

    `args` are the arguments of `fn`, or trees of their shapes and dtypes.

    Memory:
        The result references the concrete arrays that `fn` closes over, and the tracers.

    Examples:
        >>> def scale_three(y):
        ...     converted = closure_convert(lambda x: x * y, jnp.float32(1))
        ...     return converted([jnp.float32(3)], converted.tracers)[0]
        >>> jax.jit(scale_three)(jnp.float32(2)).item()
        6.0
    """
    traced, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    return ConvertedClosure(traced, shapes)


class ConvertedClosure:
    """A traced function of trees, called with the leaves of its arguments and values for its closed-over tracers."""

    def __init__(self, traced: Any, shapes: Tree) -> None:
        self._traced = traced
        self.shapes = shapes
        """Tree of the result, with shapes and dtypes in place of arrays."""
        # Concrete constants stay inside of the function; only tracers become arguments.
        self._is_const = [not isinstance(const, Tracer) for const in traced.consts]

    @property
    def tracers(self) -> list[Any]:
        """Tracers that the function closes over."""
        return [const for const, is_const in zip(self._traced.consts, self._is_const, strict=True) if not is_const]

    @property
    def passes(self) -> list[bool]:
        """Whether each leaf of the result is the argument leaf at the same position, unchanged."""
        return [out is arg for out, arg in zip(self._traced.jaxpr.outvars, self._traced.jaxpr.invars, strict=False)]

    def __call__(self, leaves: Sequence[Any], tracers: Sequence[Any]) -> list[Any]:
        """Return the leaves of the result, from the leaves of the arguments and a value for each entry of `tracers`."""
        values = iter(tracers)
        pairs = zip(self._traced.consts, self._is_const, strict=True)
        consts = [const if is_const else next(values) for const, is_const in pairs]
        return jex.jaxpr_as_fun(self._traced.replace(consts=consts))(*leaves)
