"""Optimizer updates of one layer of a stack, or of one outer leaf, in the memory that holds them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ...core import StructureError, Tree, memory_space, traced_device
from .._platforms import HOST, later, read, write
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

    Args:
        tx: the optimizer, which takes extra arguments.
        grads: gradients, on the device.
        params: the parameters' values, on the host or on the device.
        opt: the optimizer's state, on the host or on the device.
        loss: the loss, for optimizers that read it.
        factor: factor of the gradients, or None.
        into: arrays that the new parameters overwrite, if not `params`.
        guard: whether to update at all, a boolean scalar; None for always.
        **options: options of `stream`.

    Returns:
        New parameters and state, each in the memory of the arrays that it overwrites.
    """

    def apply(grads: Tree, opt: Tree, params: Tree, into: Tree, loss: Any, factor: Any, guard: Any) -> Any:
        updates, new = tx.update(grads if factor is None else scale(grads, factor), opt, params, value=loss)
        made = optax.apply_updates(params, updates), new
        return made if guard is None else jax.tree.map(functools.partial(_chosen, guard), made, (params, opt))

    def replaces(grads: Tree, opt: Tree, params: Tree, into: Tree, loss: Any, factor: Any, guard: Any) -> Any:
        return params if into is None else into, opt

    before = len(jax.tree.leaves(grads))
    declared = [before + at for at, leaf in enumerate(jax.tree.leaves(opt)) if _is_narrow(leaf)]
    args = grads, opt, params, into, jnp.asarray(loss), factor, guard
    return stream(apply, args, replaces, declared=declared, **options)


def _is_narrow(leaf: Any) -> bool:
    """Return whether a state leaf has 8-bit elements; it is streamed, so only a block of it exists in float32."""
    return leaf.ndim > 1 and leaf.dtype.itemsize == 1


def _chosen(guard: Any, new: Any, old: Any) -> Any:
    """Choose the new or the old value; values whose shape or dtype changed are refused elsewhere, with their name."""
    return jnp.where(guard, new, old) if (new.shape, new.dtype) == (old.shape, old.dtype) else new


def update_layer(
    tx: Any, grads: Tree, layer: Tree, layers: Tree, opt: Tree, i: Any, loss: Any, factor: Any, **options: Any
) -> tuple[Tree, Tree]:
    """Update layer i of a stack.

    Args:
        tx: the optimizer.
        grads: the layer's gradients, on the device.
        layer: its parameters, on the device.
        layers: the stacked parameters.
        opt: the stacked optimizer state.
        i: position of the layer.
        loss: the loss, for optimizers that read it.
        factor: factor of the gradients, or None.
        **options: options of `stream`.

    Returns:
        The stacked parameters and state, with layer i replaced in place.
    """
    is_narrow = any(map(_is_narrow, jax.tree.leaves(opt)))
    # On a GPU the parameters are updated in place, too. On a TPU XLA would keep a copy of all layers for later reads
    # (compiled).
    is_all_narrow = is_narrow and traced_device().platform == "gpu"

    def entry(leaf: Any, is_in_place: bool) -> Any:
        return Entry(leaf, i) if memory_space(leaf) == HOST or (is_in_place and leaf.ndim > 2) else read(leaf, i)

    at = i

    def back(stacked: Any, new: Any) -> Any:
        nonlocal at
        if new.shape == stacked.shape:
            return new
        if (new.shape, new.dtype) != (stacked.shape[1:], stacked.dtype):
            raise StructureError(
                "an update changes the shape or dtype of the state of a layer",
                expected=f"{stacked.dtype}{list(stacked.shape[1:])}",
                got=f"{new.dtype}{list(new.shape)}",
                hint="choose an optimizer whose state keeps its dtype, or store parameters in that of their updates",
            )
        written = write(stacked, new, at)
        at = later(i, written)  # new parameters depend on the old state, so the state is overwritten after them
        return written

    into = jax.tree.map(functools.partial(entry, is_in_place=is_all_narrow), layers)
    state = jax.tree.map(functools.partial(entry, is_in_place=is_narrow), opt)
    new, new_state = update(tx, grads, layer, state, loss, factor, into=into, **options)
    return jax.tree.map(back, layers, new), jax.tree.map(back, opt, new_state)
