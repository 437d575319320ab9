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

    Leaves of `xs` have the shape ``[num_layers, ...]``. `body` may close over differentiated arrays. `moves` moves a
    group's input to where it is kept, and back. The backward pass holds ceil(num_layers / size) inputs there, `size`
    activations and one layer's residuals on the device. Activations that layers do not change are kept once.
    """
    closed = Closed(body, init, _take(xs, 0))
    if _types(closed.shapes) != _types(init):
        # `scan` raises a message that names the misfit. It accepts a Python number in `init` whose dtype is only weak:
        # the number then becomes an array of the dtype that the layers return.
        after = jax.eval_shape(lambda init: jax.lax.scan(lambda h, x: (body(h, x), None), init, xs)[0], init)
        init = jax.tree.map(lambda leaf, like: jnp.asarray(leaf, like.dtype), init, after)
        closed = Closed(body, init, _take(xs, 0))
    leaves, structure = jax.tree.flatten(init)
    passes, tracers = closed.passes, closed.tracers
    fixed = [leaf for leaf, is_fixed in zip(leaves, passes, strict=True) if is_fixed]

    def pure(h: Leaves, x: Leaves, captured: Leaves) -> Leaves:
        # Activations that all layers return unchanged are passed in like the values that layers close over.
        constants, activations = iter(captured[: len(fixed)]), iter(h)
        args = [next(constants if is_fixed else activations) for is_fixed in passes]
        outs = closed([*args, *x], captured[len(fixed) :])
        return [out for out, is_fixed in zip(outs, passes, strict=True) if not is_fixed]

    h = [leaf for leaf, is_fixed in zip(leaves, passes, strict=True) if not is_fixed]
    weights = jax.tree.leaves(xs)
    run = _build_scan(pure, weights[0].shape[0], size, moves)
    outputs = iter(run(h, (weights, [*fixed, *tracers])))
    return structure.unflatten(
        [leaf if is_fixed else next(outputs) for leaf, is_fixed in zip(leaves, passes, strict=True)]
    )


def _build_scan(pure: Callable[..., Leaves], length: int, size: int, moves: Moves) -> Callable[..., Leaves]:
    """Build the differentiable function ``(h, (xs, captured))``: first input, stacked parameters, captured values."""
    keep, fetch = moves
    # Balanced groups: `longer` of them have `least + 1` layers, the others `least`.
    num_groups = -(-length // size)
    least, longer = divmod(length, num_groups)
    spans = [_Span(0, longer, least + 1), _Span(longer * (least + 1), num_groups - longer, least)]
    spans = [span for span in spans if span.num_groups]

    @jax.custom_vjp
    def run(h: Leaves, operands: Any) -> Leaves:
        xs, captured = operands
        return jax.lax.scan(lambda h, x: (pure(h, x, captured), None), h, xs)[0]

    def forward(h: Any, operands: Any) -> tuple[Leaves, Any]:
        # With `symbolic_zeros`, `perturbed` says which operands are differentiated. Only those get gradients.
        h = [primal.value for primal in h]
        trainable = jax.tree.map(lambda primal: primal.value if primal.perturbed else None, operands)
        frozen = jax.tree.map(lambda primal: None if primal.perturbed else primal.value, operands)
        xs, captured = combine(trainable, frozen)

        def layer(h: Leaves, index: Any) -> tuple[Leaves, None]:
            return pure(h, _take(xs, index), captured), None

        group_inputs: list[Leaves] = []
        for span in spans:

            def group(h: Leaves, start: Any, size: int = span.size) -> tuple[Leaves, Leaves]:
                return jax.lax.scan(layer, h, start + jnp.arange(size))[0], keep(h)

            h, saved = jax.lax.scan(group, h, span.starts)
            group_inputs.append(saved)
        return h, (group_inputs, trainable, frozen)

    def backward(residuals: Any, d_out: Leaves) -> Any:
        group_inputs, trainable, frozen = residuals
        state = _instantiate_zeros(_floating(d_out)), jax.tree.map(jnp.zeros_like, trainable)
        # Spans, groups and layers run in reverse. Inputs of one group's layers exist at a time.
        for span, saved in zip(reversed(spans), reversed(group_inputs), strict=True):

            def group(state: Any, slices: Any, size: int = span.size) -> tuple[Any, None]:
                start, h = slices
                with jax.named_scope("rematted_computation"):
                    layer_inputs = _recompute_inputs(pure, combine(trainable, frozen), fetch(h), start, size)
                propagate = functools.partial(_layer_backward, pure, trainable, frozen, is_alone=size == 1)

                def layer(state: Any, offset: Any) -> tuple[Any, None]:
                    return propagate(state, _take(layer_inputs, offset), start + offset), None

                return jax.lax.scan(layer, state, jnp.arange(size), reverse=True)[0], None

            state = jax.lax.scan(group, state, (span.starts, saved), reverse=True)[0]
        return state

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run


def _recompute_inputs(pure: Callable[..., Leaves], operands: Any, h: Leaves, start: Any, size: int) -> Leaves:
    """Recompute the input of each layer of a group, stacked, from the group's input."""
    xs, captured = operands

    def layer(carry: tuple[Leaves, Leaves], offset: Any) -> tuple[tuple[Leaves, Leaves], None]:
        h, stacked = carry
        h = pure(h, _take(xs, start + offset), captured)
        return (h, _put(stacked, h, offset + 1)), None

    stacked = [jnp.broadcast_to(leaf, (size, *leaf.shape)) for leaf in h]
    # The last layer does not run: its output enters no layer of this group.
    return jax.lax.scan(layer, (h, stacked), jnp.arange(size - 1))[0][1]


def _layer_backward(
    pure: Callable[..., Leaves], trainable: Any, frozen: Any, state: Any, h: Leaves, index: Any, *, is_alone: bool
) -> Any:
    """Propagate the gradient of one layer's output to its input and its parameters."""
    d_h, (d_xs, d_captured) = state
    frozen_xs, frozen_captured = frozen
    non_floating = [None if _is_floating(leaf) else leaf for leaf in h]

    def layer(h: Leaves, x: Leaves, captured: Leaves) -> Leaves:
        return _floating(
            pure(combine(h, non_floating), combine(x, _take(frozen_xs, index)), combine(captured, frozen_captured))
        )

    # `jax.checkpoint` labels the computation of residuals as recomputation. The forward pass of this `vjp` is dead code
    # but for its effects. If a group has one layer, XLA unrolls both loops. It would then merge the recomputation with
    # the original forward pass and keep that pass's residuals alive, so `prevent_cse` is on there.
    remat_layer = jax.checkpoint(layer, prevent_cse=is_alone)
    _, pull = jax.vjp(remat_layer, _floating(h), _take(trainable[0], index), trainable[1])
    d_h, d_x, d_layer_captured = pull(d_h)
    return d_h, (_put(d_xs, d_x, index), jax.tree.map(jnp.add, d_captured, d_layer_captured))


def _types(tree: Tree) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves]


def _take(tree: Tree, index: Any) -> Tree:
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), tree)


def _put(stacked: Tree, tree: Tree, index: Any) -> Tree:
    return jax.tree.map(lambda stack, leaf: jax.lax.dynamic_update_index_in_dim(stack, leaf, index, 0), stacked, tree)


def _is_floating(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _floating(tree: Tree) -> Tree:
    """Replace leaves without a gradient, such as counters and keys, by None."""
    return jax.tree.map(lambda leaf: leaf if _is_floating(leaf) else None, tree)


def _instantiate_zeros(tree: Tree) -> Tree:
    """Replace symbolic zero gradients by arrays."""
    full: Any = jax.lax.full_like
    return jax.tree.map(lambda leaf: full(leaf.aval, 0) if isinstance(leaf, SymbolicZero) else leaf, tree)
