"""A scan over equal layers that keeps one activation per group of layers and recomputes all others, group by group.

Recomputing single layers keeps one activation per layer: for Llama 8B 512 MiB at 2,048 tokens, 24.5 GiB at 100,352.
With groups of about sqrt(num_layers) layers, about 2 sqrt(num_layers) activations are live (Chen et al. 2016,
arXiv:1604.06174, section 4.3): one per group, and in the backward pass one per layer of the current group. All layers
but the last of each group run forward one time more than with recomputation of single layers.

Nested `jax.checkpoint`s compute the same. But a scan over groups gives each inner scan a copy of its group's
parameters, and stacks their gradients a second time. So this module defines one operation with a custom derivative.
Layers are slices of the whole stack, taken where they are used, and gradients are written in place into the gradient of
the stack. Frozen parameters get no gradient, not even an intermediate one. Every floating-point activation that layers
change gets one.

Limits: reverse mode only, as for every `jax.custom_vjp`. If groups cannot all have one size, their sizes differ by one
layer. Each of the two sizes then has its own loop, which is compiled separately.
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
    """Consecutive groups of one size: index of their first layer, number of groups, layers per group."""

    first: int
    num_groups: int
    size: int

    @property
    def starts(self) -> Any:
        """Index of the first layer of each group."""
        return self.first + self.size * jnp.arange(self.num_groups)


def scan_in_groups(body: Callable[[Tree, Tree], Tree], init: Tree, xs: Tree, size: int, moves: Moves = STAYS) -> Tree:
    """Run ``h = body(h, x)`` over the slices of `xs`, and keep only each group's input for the backward pass.

    Args:
        body: ``body(h, x) -> h``, one layer. It may close over any arrays, including differentiated ones.
        init: input of the first layer.
        xs: parameters, every leaf of shape ``[num_layers, ...]``, with at least one leaf.
        size: the most layers of a group, at most `num_layers`. If it does not divide `num_layers`, group sizes differ
            by one layer.
        moves: two functions of a list of arrays. The first moves a group's input to where it is kept, the second moves
            it back.

    Returns:
        Output of the last layer.

    Memory:
        When differentiated: ceil(num_layers / size) activations where `moves` keeps them, `size` activations on the
        device, one layer's residuals, and the gradients of the differentiated inputs. Activations that every layer
        returns unchanged are kept once.
    """
    closed = Closed(body, init, _at(xs, 0))
    if _types(closed.shapes) != _types(init):
        # `scan` raises a message that names the misfit. It accepts a Python number in `init` whose dtype is only weak:
        # the number then becomes an array of the dtype that the layers return.
        after = jax.eval_shape(lambda init: jax.lax.scan(lambda h, x: (body(h, x), None), init, xs)[0], init)
        init = jax.tree.map(lambda leaf, like: jnp.asarray(leaf, like.dtype), init, after)
        closed = Closed(body, init, _at(xs, 0))
    given, structure = jax.tree.flatten(init)
    passes, tracers = closed.passes, closed.tracers
    fixed = [leaf for leaf, is_fixed in zip(given, passes, strict=True) if is_fixed]

    def pure(h: Leaves, x: Leaves, held: Leaves) -> Leaves:
        # Activations that all layers return unchanged are passed in like the values that layers close over.
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
    """Build the differentiable function ``(h, (xs, held))``: first input, stacked parameters, closed-over values."""
    keep, fetch = moves
    # Balanced groups: `longer` of them have `least + 1` layers, the others `least`.
    num_groups = -(-length // size)
    least, longer = divmod(length, num_groups)
    spans = [_Span(0, longer, least + 1), _Span(longer * (least + 1), num_groups - longer, least)]
    spans = [span for span in spans if span.num_groups]

    @jax.custom_vjp
    def run(h: Leaves, operands: Any) -> Leaves:
        xs, held = operands
        return jax.lax.scan(lambda h, x: (pure(h, x, held), None), h, xs)[0]

    def forward(h: Any, operands: Any) -> tuple[Leaves, Any]:
        # With `symbolic_zeros`, `perturbed` says which operands are differentiated. Only those get gradients.
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
        # Spans, groups and layers run in reverse. Inputs of one group's layers exist at a time.
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
    """Recompute the input of each layer of a group, stacked, from the group's input."""
    xs, held = operands

    def layer(carry: tuple[Leaves, Leaves], number: Any) -> tuple[tuple[Leaves, Leaves], None]:
        h, stacked = carry
        h = pure(h, _at(xs, start + number), held)
        return (h, _written(stacked, h, number + 1)), None

    stacked = [jnp.broadcast_to(leaf, (size, *leaf.shape)) for leaf in h]
    # The last layer does not run: its output enters no layer of this group.
    return jax.lax.scan(layer, (h, stacked), jnp.arange(size - 1))[0][1]


def _layer_back(
    pure: Callable[..., Leaves], moving: Any, others: Any, state: Any, h: Leaves, at: Any, *, is_alone: bool
) -> Any:
    """Propagate the gradient of one layer's output to its input and its parameters."""
    d_h, (d_xs, d_held) = state
    xs_rest, held_rest = others
    rest = [None if _is_floating(leaf) else leaf for leaf in h]

    def layer(h: Leaves, x: Leaves, held: Leaves) -> Leaves:
        return _floating(pure(combine(h, rest), combine(x, _at(xs_rest, at)), combine(held, held_rest)))

    # `jax.checkpoint` labels the computation of residuals as recomputation. The forward pass of this `vjp` is dead code
    # but for its effects. If a group has one layer, XLA unrolls both loops. It would then merge the recomputation with
    # the original forward pass and keep that pass's residuals alive, so `prevent_cse` is on there.
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
    """Replace leaves without a gradient, such as counters and keys, by None."""
    return jax.tree.map(lambda leaf: leaf if _is_floating(leaf) else None, tree)


def _dense(tree: Tree) -> Tree:
    """Replace symbolic zero gradients by arrays."""
    full: Any = jax.lax.full_like
    return jax.tree.map(lambda leaf: full(leaf.aval, 0) if isinstance(leaf, SymbolicZero) else leaf, tree)
