"""Optimizer updates of one layer of a stack, or of one outer leaf, in the memory that holds them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ...core import StructureError, Tree, memory_space, traced_device
from .._platforms import HOST, index_after, read, write
from .._streaming import Entry, stream
from ._clip import scale


def update(
    tx: Any,
    grads: Tree,
    params: Tree,
    opt: Tree,
    loss: Any,
    factor: Any,
    *,
    into: Tree = None,
    guard: Any = None,
    **options: Any,
) -> tuple[Tree, Tree]:
    """Update parameters and state in place, in host or device memory, one block of rows at a time.

    Gradients are on the device. `into` are arrays that the new parameters overwrite, if not `params`. `guard` is
    whether to update at all, a boolean scalar; None for always. `options` are those of `stream`.
    """

    def apply(grads: Tree, opt: Tree, params: Tree, into: Tree, loss: Any, factor: Any, guard: Any) -> Any:
        updates, new_state = tx.update(grads if factor is None else scale(grads, factor), opt, params, value=loss)
        result = optax.apply_updates(params, updates), new_state
        return (
            result if guard is None else jax.tree.map(functools.partial(_select_by_guard, guard), result, (params, opt))
        )

    def replaces(grads: Tree, opt: Tree, params: Tree, into: Tree, loss: Any, factor: Any, guard: Any) -> Any:
        return params if into is None else into, opt

    num_grads = len(jax.tree.leaves(grads))
    declared = [num_grads + index for index, leaf in enumerate(jax.tree.leaves(opt)) if _is_8_bit(leaf)]
    args = grads, opt, params, into, jnp.asarray(loss), factor, guard
    return stream(apply, args, replaces, declared=declared, **options)


def _is_8_bit(leaf: Any) -> bool:
    """Return whether a state leaf has 8-bit elements; it is streamed, so only a block of it exists in float32."""
    return leaf.ndim > 1 and leaf.dtype.itemsize == 1


def _select_by_guard(guard: Any, new: Any, old: Any) -> Any:
    """Choose the new or the old value; values whose shape or dtype changed are refused elsewhere, with their name."""
    return jnp.where(guard, new, old) if (new.shape, new.dtype) == (old.shape, old.dtype) else new


def update_layer(
    tx: Any, grads: Tree, layer: Tree, layers: Tree, opt: Tree, i: Any, loss: Any, factor: Any, **options: Any
) -> tuple[Tree, Tree]:
    """Update layer i of a stack; return the stacked parameters and state, with layer i replaced in place.

    `grads` and `layer` belong to layer i and are on the device. `layers` and `opt` are stacked. `options` are those of
    `stream`.
    """
    is_narrow = any(map(_is_8_bit, jax.tree.leaves(opt)))
    # On a GPU the parameters are updated in place, too. On a TPU XLA would keep a copy of all layers for later reads
    # (compiled).
    is_all_narrow = is_narrow and traced_device().platform == "gpu"

    def entry(leaf: Any, is_in_place: bool) -> Any:
        return Entry(leaf, i) if memory_space(leaf) == HOST or (is_in_place and leaf.ndim > 2) else read(leaf, i)

    at = i

    def write_back(stacked: Any, new: Any) -> Any:
        nonlocal at
        if new.shape == stacked.shape:
            return new
        if (new.shape, new.dtype) != (stacked.shape[1:], stacked.dtype):
            raise StructureError(
                "an update changes the shape or dtype of the state of a layer",
                expected=f"{stacked.dtype}{list(stacked.shape[1:])}",
                got=f"{new.dtype}{list(new.shape)}",
                hint="choose an optimizer whose state keeps its dtype, or store parameters in the dtype of the updates",
            )
        written = write(stacked, new, at)
        at = index_after(i, written)  # new parameters depend on the old state, so the state is overwritten after them
        return written

    into = jax.tree.map(functools.partial(entry, is_in_place=is_all_narrow), layers)
    state = jax.tree.map(functools.partial(entry, is_in_place=is_narrow), opt)
    new, new_state = update(tx, grads, layer, state, loss, factor, into=into, **options)
    return jax.tree.map(write_back, layers, new), jax.tree.map(write_back, opt, new_state)
