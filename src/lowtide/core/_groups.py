"""A loop over equal layers that keeps what enters each group of them, and computes all else again, group by group.

Recomputing single layers keeps an activation for each: 512 MiB for 2,048 tokens of Llama 8B, 24.5 GiB for 100,352. Of
groups of about the root of their number it is two roots' worth (Chen et al. 2016, arXiv:1604.06174, section 4.3): one
for each group, and in the backward pass one for each layer of the group whose turn it is. All layers but the last of
each group run forward once more than with single ones.

Nested `jax.checkpoint`s would say the same, but a scan over groups hands each inner scan a copy of its group's
parameters, and stacks its gradients a second time. So this is one operation with a derivative rule of its own: layers
are slices of the whole stack, taken where they are used, and gradients are written into theirs in place. Parameters
that do not train have none, not even inside; all floating-point activations that layers change have.

Limits: reverse mode only, as for every `jax.custom_vjp`. Where groups are not all of one size, they differ by one
layer, and are two loops, each compiled by itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from ._closing import Closed
from ._partition import combine
from ._paths import Tree

Leaves = list[Any]
Move = Callable[[Leaves], Leaves]
Moves = tuple[Move, Move]
STAYS: Moves = (lambda leaves: leaves, lambda leaves: leaves)


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
        size: layers of a group, at most `num_layers`. What does not divide makes some groups smaller by one.
        moves: called with a list of the arrays that enter a group, on their way to where they wait and back.

    Returns:
        What leaves the last layer.

    Memory:
        When differentiated ceil(num_layers / size) activations where they wait and `size` on the device, one layer's
        residuals, and the gradients of what is differentiated. What every layer gives back as it was is kept once.
    """
    closed = Closed(body, init, _at(xs, 0))
    if _types(closed.shapes) != _types(init):
        # Says what does not fit, unless it is a number of Python among what enters, which then is an array of its type.
        after = jax.eval_shape(lambda init: jax.lax.scan(lambda h, x: (body(h, x), None), init, xs)[0], init)
        init = jax.tree.map(lambda leaf, like: jnp.asarray(leaf, like.dtype), init, after)
        closed = Closed(body, init, _at(xs, 0))
    given, structure = jax.tree.flatten(init)
    passes, tracers = closed.passes, closed.tracers
    fixed = [leaf for leaf, is_fixed in zip(given, passes, strict=True) if is_fixed]

    def pure(h: Leaves, x: Leaves, held: Leaves) -> Leaves:
        # What passes all layers is held like what they close over.
        others, moved = iter(held[: len(fixed)]), iter(h)
        args = [next(others if is_fixed else moved) for is_fixed in passes]
        outs = closed([*args, *x], held[len(fixed) :])
        return [out for out, is_fixed in zip(outs, passes, strict=True) if not is_fixed]

    h = [leaf for leaf, is_fixed in zip(given, passes, strict=True) if not is_fixed]
    weights = jax.tree.leaves(xs)
    run = _in_groups(pure, weights[0].shape[0], size, moves)
    done = iter(run(h, (weights, [*fixed, *tracers])))
    return structure.unflatten([leaf if is_fixed else next(done) for leaf, is_fixed in zip(given, passes, strict=True)])


def _in_groups(pure: Callable[..., Leaves], length: int, size: int, moves: Moves) -> Callable[..., Leaves]:
    """Make the operation, of what enters the first layer, and of the layers with what they hold."""
    keep, fetch = moves
    num_groups = -(-length // size)
    least, longer = divmod(length, num_groups)
    spans = [_Span(0, longer, least + 1), _Span(longer * (least + 1), num_groups - longer, least)]
    spans = [span for span in spans if span.num_groups]

    @jax.custom_vjp
    def run(h: Leaves, operands: Any) -> Leaves:
        xs, held = operands
        return jax.lax.scan(lambda h, x: (pure(h, x, held), None), h, xs)[0]

    def forward(h: Any, operands: Any) -> tuple[Leaves, Any]:
        h = [primal.value for primal in h]
        moving = jax.tree.map(lambda primal: primal.value if primal.perturbed else None, operands)
        others = jax.tree.map(lambda primal: None if primal.perturbed else primal.value, operands)
        xs, held = combine(moving, others)

        def layer(h: Leaves, at: Any) -> tuple[Leaves, None]:
            return pure(h, _at(xs, at), held), None

        entered: list[Leaves] = []
        for span in spans:

            def group(h: Leaves, start: Any, size: int = span.size) -> tuple[Leaves, Leaves]:
                return jax.lax.scan(layer, h, start + jnp.arange(size))[0], keep(h)

            h, kept = jax.lax.scan(group, h, span.starts)
            entered.append(kept)
        return h, (entered, moving, others)

    def backward(residuals: Any, d_out: Leaves) -> Any:
        entered, moving, others = residuals
        state = _dense(_floating(d_out)), jax.tree.map(jnp.zeros_like, moving)
        for span, kept in zip(reversed(spans), reversed(entered), strict=True):

            def group(state: Any, slices: Any, size: int = span.size) -> tuple[Any, None]:
                start, h = slices
                with jax.named_scope("rematted_computation"):
                    waiting = _inputs(pure, combine(moving, others), fetch(h), start, size)
                back = functools.partial(_layer_back, pure, moving, others, is_alone=size == 1)

                def layer(state: Any, number: Any) -> tuple[Any, None]:
                    return back(state, _at(waiting, number), start + number), None

                return jax.lax.scan(layer, state, jnp.arange(size), reverse=True)[0], None

            state = jax.lax.scan(group, state, (span.starts, kept), reverse=True)[0]
        return state

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run


def _inputs(pure: Callable[..., Leaves], operands: Any, h: Leaves, start: Any, size: int) -> Leaves:
    """Compute what enters each layer of a group, stacked, from what enters the first."""
    xs, held = operands

    def layer(carry: tuple[Leaves, Leaves], number: Any) -> tuple[tuple[Leaves, Leaves], None]:
        h, stacked = carry
        h = pure(h, _at(xs, start + number), held)
        return (h, _written(stacked, h, number + 1)), None

    stacked = [jnp.broadcast_to(leaf, (size, *leaf.shape)) for leaf in h]
    return jax.lax.scan(layer, (h, stacked), jnp.arange(size - 1))[0][1]


def _layer_back(
    pure: Callable[..., Leaves], moving: Any, others: Any, state: Any, h: Leaves, at: Any, *, is_alone: bool
) -> Any:
    """Pull the gradient of what leaves one layer back to what enters it and to its parameters."""
    d_h, (d_xs, d_held) = state
    xs_rest, held_rest = others
    rest = [None if _is_floating(leaf) else leaf for leaf in h]

    def layer(h: Leaves, x: Leaves, held: Leaves) -> Leaves:
        return _floating(pure(combine(h, rest), combine(x, _at(xs_rest, at)), combine(held, held_rest)))

    # The pass of the residuals bears the names of recomputation; what runs forward here is dead, but for its effects.
    # Where one layer is all of its group, XLA takes both loops apart, and would find the forward pass's own residuals.
    again = jax.checkpoint(layer, prevent_cse=is_alone)
    _, pull = jax.vjp(again, _floating(h), _at(moving[0], at), moving[1])
    d_h, d_x, more = pull(d_h)
    return d_h, (_written(d_xs, d_x, at), jax.tree.map(jnp.add, d_held, more))


def _types(tree: Tree) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves]


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
    full: Any = jax.lax.full_like
    return jax.tree.map(lambda leaf: full(leaf.aval, 0) if isinstance(leaf, SymbolicZero) else leaf, tree)
