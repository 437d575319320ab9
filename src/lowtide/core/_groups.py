"""A loop over equal layers that keeps what enters each group of them, and computes all else again, group by group.

Recomputing single layers keeps an activation for each: 512 MiB for 2,048 tokens of Llama 8B, 24.5 GiB for 100,352. Of
groups of about the root of their number it is two roots' worth (Chen et al. 2016, arXiv:1604.06174, section 4.3): one
for each group, and in the backward pass one for each layer of the group whose turn it is. All layers but the last of
each group run forward once more than with single ones.

Nested `jax.checkpoint`s would say the same, but a scan over groups hands each inner scan a copy of its group's
parameters, and stacks its gradients a second time. So this is one operation with a derivative rule of its own: layers
are slices of the whole stack, taken where they are used, and gradients are written into theirs in place. What does
not train has none, not even inside.

Limits: reverse mode only, as for every `jax.custom_vjp`. A rest that is no whole group is a loop of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from ._partition import combine
from ._paths import Tree
from ._varying import varying_axes

Moves = tuple[Callable[[Tree], Tree], Callable[[Tree], Tree]]
STAYS: Moves = (lambda tree: tree, lambda tree: tree)


class _Span(NamedTuple):
    """Groups of one size, one after the other: their first layer, how many they are, and the layers of each."""

    first: int
    num_groups: int
    size: int

    @property
    def starts(self) -> Any:
        """The first layer of each."""
        return self.first + self.size * jnp.arange(self.num_groups)


def scan_in_groups(body: Callable[[Tree, Tree], Tree], init: Tree, xs: Tree, size: int, moves: Moves = STAYS) -> Tree:
    """Run ``h = body(h, x)`` over the slices of `xs`, and keep what enters each group of layers for the backward pass.

    Args:
        body: ``body(h, x) -> h``, one layer; it may close over anything, also what is differentiated.
        init: what enters the first layer.
        xs: parameters, every leaf of shape ``[num_layers, ...]``, with at least one leaf.
        size: layers of a group, at most `num_layers`.
        moves: called with what enters a group, on its way to where it waits and back.

    Returns:
        What leaves the last layer.

    Memory:
        When differentiated ceil(num_layers / size) activations where they wait and `size` on the device, one layer's
        residuals, and the gradients of what is differentiated.
    """
    keep, fetch = moves
    length = jax.tree.leaves(xs)[0].shape[0]
    spans = [_Span(0, length // size, size)]
    if rest := length % size:
        spans.append(_Span(length - rest, 1, rest))
    pure, closed = jax.closure_convert(body, init, _at(xs, 0))

    @jax.custom_vjp
    def run(init: Tree, operands: Any) -> Tree:
        xs, closed = operands
        return jax.lax.scan(lambda h, x: (pure(h, x, *closed), None), init, xs)[0]

    def forward(init: Tree, operands: Any) -> tuple[Tree, Any]:
        h = jax.tree.map(lambda primal: primal.value, init)
        moving = jax.tree.map(lambda primal: primal.value if primal.perturbed else None, operands)
        others = jax.tree.map(lambda primal: None if primal.perturbed else primal.value, operands)
        xs, closed = combine(moving, others)

        def layer(h: Tree, at: Any) -> tuple[Tree, None]:
            return pure(h, _at(xs, at), *closed), None

        entered: list[Tree] = []
        for span in spans:

            def group(h: Tree, start: Any, size: int = span.size) -> tuple[Tree, Tree]:
                return jax.lax.scan(layer, h, start + jnp.arange(size))[0], keep(h)

            h, kept = jax.lax.scan(group, h, span.starts)
            entered.append(kept)
        return h, (entered, moving, others)

    def backward(residuals: Any, d_out: Tree) -> Any:
        entered, moving, others = residuals
        state = _dense(_floating(d_out)), jax.tree.map(jnp.zeros_like, moving)
        for span, kept in zip(reversed(spans), reversed(entered), strict=True):

            def group(state: Any, slices: Any, size: int = span.size) -> tuple[Any, None]:
                start, h = slices
                with jax.named_scope("rematted_computation"):
                    waiting = _inputs(pure, combine(moving, others), fetch(h), start, size)

                def layer(state: Any, number: Any) -> tuple[Any, None]:
                    return _layer_back(pure, moving, others, state, _at(waiting, number), start + number), None

                return jax.lax.scan(layer, state, jnp.arange(size), reverse=True)[0], None

            state = jax.lax.scan(group, state, (span.starts, kept), reverse=True)[0]
        return state

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run(init, (xs, tuple(closed)))


def _inputs(pure: Callable[..., Tree], operands: Any, h: Tree, start: Any, size: int) -> Tree:
    """Compute what enters each layer of a group, stacked, from what enters the first."""
    xs, closed = operands

    def layer(carry: tuple[Tree, Tree], number: Any) -> tuple[tuple[Tree, Tree], None]:
        h, stacked = carry
        h = pure(h, _at(xs, start + number), *closed)
        return (h, _written(stacked, h, number + 1)), None

    stacked = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (size, *leaf.shape)), h)
    return jax.lax.scan(layer, (h, stacked), jnp.arange(size - 1))[0][1]


def _layer_back(pure: Callable[..., Tree], moving: Any, others: Any, state: Any, h: Tree, at: Any) -> Any:
    """Pull the gradient of what leaves one layer back to what enters it and to its parameters."""
    d_h, (d_xs, d_closed) = state
    xs_rest, closed_rest = others
    rest = jax.tree.map(lambda leaf: None if _is_floating(leaf) else leaf, h)

    def layer(h: Tree, x: Tree, closed: Any) -> Tree:
        x = combine(x, _at(xs_rest, at))
        return _floating(pure(combine(h, rest), x, *combine(closed, closed_rest)))

    # What runs forward here is dead; the pass of the residuals bears the names of recomputation.
    _, pull = jax.vjp(jax.checkpoint(layer, prevent_cse=False), _floating(h), _at(moving[0], at), moving[1])
    d_h, d_x, more = pull(d_h)
    return d_h, (_written(d_xs, d_x, at), jax.tree.map(jnp.add, d_closed, more))


def _at(tree: Tree, at: Any) -> Tree:
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, at, keepdims=False), tree)


def _written(stacked: Tree, tree: Tree, at: Any) -> Tree:
    return jax.tree.map(lambda whole, leaf: jax.lax.dynamic_update_index_in_dim(whole, leaf, at, 0), stacked, tree)


def _is_floating(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _floating(tree: Tree) -> Tree:
    """Replace what has no gradient, such as counters and keys, by None."""
    return jax.tree.map(lambda leaf: leaf if _is_floating(leaf) else None, tree)


def _dense(tree: Tree) -> Tree:
    """Make arrays of the gradients that are known to be zero."""
    return jax.tree.map(lambda leaf: _zeros(leaf.aval) if isinstance(leaf, SymbolicZero) else leaf, tree)


def _zeros(aval: Any) -> Any:
    axes = tuple(sorted(varying_axes(aval)))
    zeros = jnp.zeros(aval.shape, aval.dtype)
    return jax.lax.pcast(zeros, axes, to="varying") if axes else zeros
