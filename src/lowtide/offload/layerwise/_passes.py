"""Forward and backward passes over a layer stack, one block at a time, with all microbatches at each block.

The forward pass keeps only the input of each block. The backward pass recomputes a block from its input, passes the
block's gradients to a function, and goes to the next block. So gradients of two blocks never exist together. The
weights of a block move to the device once per pass, and all microbatches then run through the block in turn.

Shapes: L layers, M microbatches. Indices: block i, microbatch m. The *boundary* holds the activations between two
blocks, or their cotangents in the backward pass; its leading axis is [M]. `inputs` holds the input of each block and
the output of the last. Its leading axis is [(L + 1) * M], because libtpu slices host arrays along one axis only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...core import (
    LayerStack,
    RunningGradient,
    StructureError,
    Tree,
    combine,
    if_active,
    leaves_with_paths,
    map_with_paths,
    match_path,
    memory_space,
    path_str,
    recomputed,
)
from ...jaxprs import Kind, called, kind_of, make_jaxpr, opened
from .._host_memory import DEVICE, entry_shape, fetch, index_after, read, warn_of_tall_tiles, write, zero_buffer

_RUNNING_HINT = (
    "use it once, outside of loops, in lowtide.core.linear or lowtide.losses.chunked_cross_entropy; or remove its "
    "pattern from LayerStack.running"
)
Carry = Any
Consume = Callable[[Carry, Any, Tree, Tree], Carry]
"""``consume(carry, i, layer, grads) -> carry`` uses the gradients of block i."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackPasses:
    """Forward and backward passes over one batch; every method is pure."""

    stack: LayerStack
    frozen_outer: Tree
    frozen_layers: Tree
    """Stacked leaves that do not train, on the host or on the device."""
    batches: Tree
    """The batch, every leaf with a leading axis of length M."""
    loss_weights: Any
    """Weight of each microbatch in the loss, [M]; the weights add up to 1."""
    num_layers: int
    """Number of layers, L."""
    inputs_space: Any
    """Memory space that keeps the inputs of blocks until the backward pass."""

    @property
    def num_microbatches(self) -> int:
        return self.loss_weights.shape[0]

    def batch(self, m: Any) -> Tree:
        return read(self.batches, m)

    def forward(self, outer: Tree, layers: Tree, after: Tree) -> tuple[Tree, Tree, Tree]:
        """Run `first` and all blocks; return `inputs`, the boundary after the last block, and the stacked leaves.

        `outer` holds the trainable leaves that `first` reads, and is fetched after `after` is computed. `layers` holds
        the trainable stacked leaves, which may be on the host.
        """
        warn_of_tall_tiles(leaves_with_paths(self.frozen_layers))
        outer_on_device = fetch(combine(outer, self.frozen_outer), after)
        h = jax.eval_shape(self.stack.first, outer_on_device, self.batch(0))
        inputs = zero_buffer(h, ((self.num_layers + 1) * self.num_microbatches,), self.inputs_space)
        # With one microbatch the boundary is on the device, and a block's input is written to `inputs` when the block
        # starts. With several, the boundary is in the memory of `inputs`, by default on the host. XLA would route a
        # copy from the boundary to `inputs` through the device. So a block's output is written to both of them.
        is_single = self.num_microbatches == 1
        boundary = zero_buffer(h, (self.num_microbatches,), DEVICE if is_single else self.inputs_space)

        def enter(m: Any, carry: Carry) -> Carry:
            inputs, boundary = carry
            h = self.stack.first(outer_on_device, self.batch(m))
            return inputs if is_single else write(inputs, h, m), write(boundary, h, m)

        def body(i: Any, carry: Carry) -> Carry:
            carry, layers = carry
            trainable_layer = read(layers, i)
            layer = combine(trainable_layer, read(self.frozen_layers, i))

            def visit(m: Any, carry: Carry) -> Carry:
                inputs, boundary = carry
                block_input = read(boundary, m)
                block_output = recomputed(self.stack.block)(layer, block_input, self.batch(m))
                new_inputs = (
                    write(inputs, block_input, i)
                    if is_single
                    else write(inputs, block_output, (i + 1) * self.num_microbatches + m)
                )
                return new_inputs, write(boundary, block_output, m)

            inputs, boundary = self._loop_microbatches(visit, carry)
            return (inputs, boundary), _write_back(layers, trainable_layer, index_after(i, boundary))

        initial = self._loop_microbatches(enter, (inputs, boundary)), layers
        (inputs, boundary), layers = jax.lax.fori_loop(0, self.num_layers, body, initial)
        return inputs, boundary, layers

    def last(self, outer: Tree, boundary: Tree) -> tuple[Any, Tree, Tree, Tree]:
        """Run `last` forward and backward on the boundary after the last block.

        `outer` holds the trainable outer leaves that `last` reads. Return the loss, the metrics, the gradients of
        `outer`, and the boundary with the cotangents of the last block's output.
        """
        trained, frozen = fetch((outer, self.frozen_outer), boundary)
        running_paths = frozenset(
            path
            for path, leaf in leaves_with_paths(trained)
            if leaf.dtype == jnp.promote_types(leaf.dtype, jnp.float32)
            and any(match_path(path, pattern) for pattern in self.stack.running)
        )

        def grads_of(m: Any, h: Tree, totals: Tree) -> tuple[Any, Tree, Tree, Tree]:
            """Compute the loss, metrics, gradients (for `running_paths` the new totals), and the cotangent of h."""

            def loss_fn(trained: Tree, h: Tree) -> tuple[Any, Tree]:
                outer = _with_totals(combine(trained, frozen), running_paths, totals, self._is_active(m))
                return self.stack.last(outer, h, self.batch(m))

            loss, vjp, metrics = jax.vjp(loss_fn, trained, h, has_aux=True)
            return loss, metrics, *vjp(self.loss_weights[m].astype(loss.dtype))

        totals = jax.tree.map(_wide_zeros, trained)
        self._check_running_totals(trained, frozen, running_paths, dict(leaves_with_paths(totals)), boundary)
        values = jax.eval_shape(lambda: grads_of(0, read(boundary, 0), totals)[:2])

        def visit(m: Any, carry: Carry) -> Carry:
            values, totals, boundary = carry
            loss, metrics, grads, dh = grads_of(m, read(boundary, m), totals)

            def contribution(value: Any) -> Any:
                # A microbatch of weight 0 adds 0, even if its value is NaN, as in a mean over no tokens.
                return value if value.dtype == jax.dtypes.float0 else if_active(self._is_active(m), value)

            values = jax.tree.map(
                lambda total, value: total + contribution(value * self.loss_weights[m].astype(total.dtype)),
                values,
                (loss, metrics),
            )
            # A running total already excludes microbatches of weight 0. Selecting between it and the previous total
            # would keep both in memory.
            totals = jax.tree_util.tree_map_with_path(
                lambda key, old, new: new if path_str(key) in running_paths else _add(old, contribution(new)),
                totals,
                grads,
            )
            return values, totals, _write_cotangents(boundary, jax.tree.map(contribution, dh), m)

        (loss, metrics), totals, boundary = self._loop_microbatches(
            visit, (jax.tree.map(_wide_zeros, values), totals, boundary)
        )
        return loss, metrics, _cast_like(totals, trained), boundary

    def backward(
        self, layers: Callable[[Carry], Tree], inputs: Tree, boundary: Tree, consume: Consume, carry: Carry, after: Any
    ) -> tuple[Carry, Tree]:
        """Run all blocks backward, and pass the gradients of each to `consume`; return the carry and the boundary.

        `layers` is a function that returns the trainable stacked leaves in a carry; `consume` may overwrite them.
        `boundary` holds the cotangents of the last block's output. `after` is a zero from `zero_after`.
        """

        def body(k: Any, state: Carry) -> Carry:
            i = self.num_layers - 1 - k + after
            carry, boundary = state
            layer, frozen = read(layers(carry), i), read(self.frozen_layers, i)

            def grads_of(m: Any, boundary: Tree) -> tuple[Tree, Tree]:
                def run(trained: Tree, h: Tree) -> Tree:
                    return recomputed(self.stack.block)(combine(trained, frozen), h, self.batch(m))

                dh = _read_cotangents(boundary, m)
                grads, dh = jax.vjp(run, layer, read(inputs, i * self.num_microbatches + m))[1](dh)
                return grads, _write_cotangents(boundary, dh, m)

            grads, boundary = self._sum_gradients(grads_of, layer, boundary)
            return consume(carry, index_after(i, boundary), layer, grads), boundary

        return jax.lax.fori_loop(0, self.num_layers, body, (carry, boundary))

    def first(self, outer: Tree, boundary: Tree) -> Tree:
        """Compute the gradients of `outer`, the leaves that `first` reads, from the boundary after `backward`."""
        outer_on_device, frozen = fetch((outer, self.frozen_outer), boundary)

        def grads_of(m: Any, carry: Carry) -> tuple[Tree, Carry]:
            run = lambda trained: self.stack.first(combine(trained, frozen), self.batch(m))  # noqa: E731
            return jax.vjp(run, outer_on_device)[1](_read_cotangents(boundary, m))[0], carry

        return self._sum_gradients(grads_of, outer_on_device, ())[0]

    def _check_running_totals(
        self, trained: Tree, frozen: Tree, running_paths: frozenset[str], totals: dict[str, Any], boundary: Tree
    ) -> None:
        paths = sorted(running_paths)
        if not paths:
            return

        def loss_fn(totals: list[Any], h: Tree) -> Any:
            by_path = dict(zip(paths, totals, strict=True))
            outer = _with_totals(combine(trained, frozen), running_paths, by_path, self._is_active(0))
            return self.stack.last(outer, h, self.batch(0))

        try:
            closed, _ = make_jaxpr(loss_fn)([totals[path] for path in paths], jax.tree.map(entry_shape, boundary))
        except (TypeError, AttributeError) as error:
            if RunningGradient.__name__ not in str(error):
                raise
            problem = f"last uses a leaf of LayerStack.running in another operation: {', '.join(paths)}"
            raise StructureError(problem, got=str(error), hint=_RUNNING_HINT) from error
        for path, var in zip(paths, closed.jaxpr.invars, strict=False):
            if (num_uses := _num_uses(closed.jaxpr, var)) != 1:
                problem = f"outer/{path}: last does not use it exactly once, so its gradient has no running total"
                got = "several uses, or one inside a loop or another operation" if num_uses else "no use"
                raise StructureError(problem, got=got, hint=_RUNNING_HINT)

    def _is_active(self, m: Any) -> Any:
        """Return whether a microbatch has a weight other than 0; None if it is the only microbatch."""
        return None if self.num_microbatches == 1 else self.loss_weights[m] != 0

    def _sum_gradients(
        self, grads_of: Callable[[Any, Carry], tuple[Tree, Carry]], like: Tree, carry: Carry
    ) -> tuple[Tree, Carry]:
        """Add up the gradients of all microbatches; sums of several are in float32 or wider, then cast like `like`."""
        if self.num_microbatches == 1:
            return grads_of(0, carry)

        def visit(m: Any, state: Carry) -> Carry:
            total, carry = state
            grads, carry = grads_of(m, carry)
            return jax.tree.map(_add, total, grads), carry

        total, carry = self._loop_microbatches(visit, (jax.tree.map(_wide_zeros, like), carry))
        return _cast_like(total, like), carry

    def _loop_microbatches(self, visit: Callable[[Any, Carry], Carry], carry: Carry) -> Carry:
        if self.num_microbatches == 1:
            return visit(0, carry)
        return jax.lax.fori_loop(0, self.num_microbatches, visit, carry)


def _num_uses(jaxpr: Any, var: Any) -> int:
    """Count the operations with a custom derivative rule that read a variable; any other reader counts as two."""
    count = 2 * sum(output is var for output in jaxpr.outvars)
    for eqn in jaxpr.eqns:
        positions = [position for position, operand in enumerate(eqn.invars) if operand is var]
        kind = kind_of(eqn)
        if positions and kind in (Kind.CALL, Kind.REMAT):
            inner = opened(called(eqn))
            count += sum(_num_uses(inner, inner.invars[position]) for position in positions)
        elif positions:
            count += 1 if kind is Kind.CUSTOM_VJP and len(positions) == 1 else 2
    return count


def _write_back(layers: Tree, layer: Tree, i: Any) -> Tree:
    """Write layer i back into the stacked leaves on the device, unchanged; return all stacked leaves.

    If a loop only reads a float32 stack, XLA first makes a copy of all layers in the dtype of the products.
    """
    return jax.tree.map(
        lambda leaf, entry: write(leaf, entry, i) if memory_space(leaf) == DEVICE and entry.ndim > 1 else leaf,
        layers,
        layer,
    )


def _with_totals(outer: Tree, running_paths: frozenset[str], totals: Tree, active: Any) -> Tree:
    """Replace the leaves at `running_paths` by `RunningGradient` nodes with the gradients so far."""
    totals_by_path = dict(leaves_with_paths(totals))

    def node(path: str, leaf: Any) -> Any:
        return RunningGradient(leaf, totals_by_path[path], active) if path in running_paths else leaf

    return map_with_paths(node, outer)


def _read_cotangents(boundary: Tree, m: Any) -> Tree:
    """Read a microbatch's cotangents; for integers and booleans, these are zeros of dtype float0, without bytes."""

    def read_leaf(leaf: Any) -> Any:
        is_inexact = jnp.issubdtype(leaf.dtype, jnp.inexact)
        return read(leaf, m) if is_inexact else np.zeros(leaf.shape[1:], jax.dtypes.float0)

    return jax.tree.map(read_leaf, boundary)


def _write_cotangents(boundary: Tree, values: Tree, m: Any) -> Tree:
    def write_leaf(leaf: Any, value: Any) -> Any:
        return leaf if value.dtype == jax.dtypes.float0 else write(leaf, value, m)

    return jax.tree.map(write_leaf, boundary, values)


def _wide_zeros(like: Any) -> Any:
    return jnp.zeros(like.shape, jnp.promote_types(like.dtype, jnp.float32))


def _add(total: Any, value: Any) -> Any:
    return total + value.astype(total.dtype)


def _cast_like(total: Tree, like: Tree) -> Tree:
    return jax.tree.map(lambda x, leaf: x.astype(leaf.dtype), total, like)
