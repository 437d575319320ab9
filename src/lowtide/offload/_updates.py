"""Optimizer updates of one layer of a stack, and of one outer leaf, in the memory where they live."""

from __future__ import annotations

from typing import Any

import optax

from lowtide.core import Tree

from ._rows import stream
from ._slices import read, write


def update_layer(
    tx: Any, grads: Tree, layer: Tree, layers: Tree, opt: Tree, i: Any, loss: Any, chunk_bytes: int
) -> tuple[Tree, Tree]:
    s = read(opt, i)
    updates, s = tx.update(grads, s, layer, value=loss)
    return write(layers, optax.apply_updates(layer, updates), i), write(opt, s, i)


def update_leaf(tx: Any, grads: Tree, params: Tree, opt: Tree, loss: Any, chunk_bytes: int) -> tuple[Tree, Tree]:
    """Update a tree in place, wherever its leaves live, a block of rows at a time.

    Args:
        tx: the optimizer.
        grads: gradients, on the device.
        params: the parameters, on the host or on the device.
        opt: the optimizer's state, likewise.
        loss: for optimizers that read it.
        chunk_bytes: bytes from the host in one block.

    Returns:
        New parameters and state, each in the memory of the old.
    """

    def update(grads: Tree, opt: Tree, params: Tree, loss: Any) -> tuple[Tree, Tree]:
        updates, opt = tx.update(grads, opt, params, value=loss)
        return optax.apply_updates(params, updates), opt

    return stream(
        update, (grads, opt, params, loss), lambda grads, opt, params, loss: (params, opt), chunk_bytes=chunk_bytes
    )
