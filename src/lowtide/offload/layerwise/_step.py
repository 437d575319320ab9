"""One layerwise step over one batch: forward, backward for the norm of exact clipping, and backward with updates."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ...core import StructureError, Tree, combine, leaves_with_paths, zero_after
from ...jaxprs import variables_read
from .._platforms import DEVICE, entry_shape, put
from ._clip import Clip, square_norm
from ._contract import refuse_metrics
from ._passes import StackPasses
from ._state import LayerwiseState, only, under
from ._updates import update, update_layer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A batch and the state before its step; every method is pure."""

    tx: Any
    """The optimizer."""
    clip: Clip | None
    """How gradients are clipped."""
    chunk_bytes: int
    """Bytes that one block of an update moves from the host."""
    is_guarded: bool
    """Whether updates are skipped from the first gradient on that is not finite."""
    outer_space: Any
    """Memory space of the outer parameters, and of gradients that are kept until the end of the backward pass."""
    state: LayerwiseState
    """The state that the step consumes."""
    passes: StackPasses
    """The passes over the batch."""

    def measure(self) -> tuple[Any, Tree]:
        """Compute the norm of all gradients, without keeping them; return it with the stacked leaves."""
        first, last = self._readers()
        inputs, boundary, layers = self.passes.forward(self._outer(first), self.state.layers, self.state.step)
        _, _, grads_last, boundary = self.passes.last(self._outer(last), boundary)
        shared = self._waiting(grads_last, first & last)
        squares = square_norm(_but(grads_last, first))

        def consume(squares: Any, i: Any, layer: Tree, grads: Tree) -> Any:
            return squares + square_norm(grads)

        after = zero_after(squares)
        squares, boundary = self.passes.backward(lambda _: layers, inputs, boundary, consume, squares, after)
        grads = _added(self._first(first, boundary), shared)
        return jnp.sqrt(squares + square_norm(grads)), layers

    def update(self, factor: Any, is_finite: Any = True) -> tuple[LayerwiseState, dict[str, Any]]:
        """Compute the new state and the metrics.

        Args:
            factor: factor of the gradients before they are used; None if each layer's norm decides, or nothing is
                clipped.
            is_finite: whether the gradients are known to be finite so far; read if steps are guarded.
        """
        state, (first, last) = self.state, self._readers()
        inputs, boundary, layers = self.passes.forward(self._outer(first), state.layers, (state.step, factor))
        loss, metrics, grads_last, boundary = self.passes.last(self._outer(last), boundary)
        shared = self._waiting(grads_last, first & last)
        # Leaves that only `last` reads are updated before the blocks. Leaves that `first` reads, too, wait for its
        # gradient at the end of the backward pass.
        head = _but(grads_last, first)
        squares = square_norm(head)
        outer, outer_opt = self._update_outer(head, factor, loss, self._guard(squares, loss, is_finite))

        def consume(carry: Any, i: Any, layer: Tree, grads: Tree) -> Any:
            layers, opt, squares = carry
            part, squares = self._factor(grads, factor), squares + square_norm(grads)
            options = {"guard": self._guard(squares, loss, is_finite), **self._options}
            tx = under(self.tx, "layers")
            layers, opt = update_layer(tx, grads, layer, layers, opt, i, loss, part, **options)
            return layers, opt, squares

        # The dependency frees the gradients of the head before the first block runs backward.
        after = zero_after((outer, squares))
        carry = (layers, state.layers_opt, squares)
        carry, boundary = self.passes.backward(lambda carry: carry[0], inputs, boundary, consume, carry, after)
        layers, layers_opt, squares = carry
        grads = _added(self._first(first, boundary), shared)
        squares = squares + square_norm(grads)
        guard = self._guard(squares, loss, is_finite)
        rest, rest_opt = self._update_outer(grads, factor, loss, guard)
        norm = jnp.sqrt(squares)
        new = LayerwiseState(
            step=state.step + 1,
            outer=combine(outer, rest),
            layers=layers,
            outer_opt={**outer_opt, **rest_opt},
            layers_opt=layers_opt,
            grad_norm=norm if guard is None else jnp.where(guard, norm, state.grad_norm),
        )
        return new, {**metrics, "loss": loss, "grad_norm": norm}

    def _readers(self) -> tuple[frozenset[str], frozenset[str]]:
        """Return the paths of the trainable outer leaves that `first` reads, and of those that `last` reads.

        Raises:
            StructureError: for a leaf that neither reads, or functions that return a wrong result.
        """
        passes, outer = self.passes, jax.tree.map(_shape, put(self.state.outer, DEVICE))
        frozen = jax.tree.map(_shape, put(passes.frozen_outer, DEVICE))
        batch = jax.tree.map(_shape, passes.batch(0))
        layer = jax.tree.map(entry_shape, combine(self.state.layers, passes.frozen_layers))
        stack = passes.stack
        h, metrics = stack.shapes(combine(outer, frozen), layer, batch)
        refuse_metrics(metrics)
        first = _paths_read(lambda o, f, b: stack.first(combine(o, f), b), outer, frozen, batch)
        last = _paths_read(lambda o, f, h, b: stack.last(combine(o, f), h, b), outer, frozen, h, batch)
        for path, _ in leaves_with_paths(outer):
            if path not in first | last:
                raise StructureError(
                    f"outer/{path} cannot train: neither first nor last reads it",
                    hint=f'leave it out of the selection, for instance with the pattern "!outer/{path}"',
                )
        return first, last

    def _outer(self, paths: frozenset[str]) -> Tree:
        return only(self.state.outer, paths)

    def _first(self, paths: frozenset[str], boundary: Tree) -> Tree:
        return self.passes.first(self._outer(paths), boundary) if paths else self._outer(paths)

    def _waiting(self, grads: Tree, paths: frozenset[str]) -> Tree:
        """Move gradients that are kept until the end of the backward pass to the memory of their parameters."""
        return jax.tree.map(lambda x: put(x, self.outer_space) if x.ndim > 1 else x, only(grads, paths))

    def _factor(self, grads: Tree, factor: Any) -> Any:
        if self.clip is not None and self.clip.mode == "layer":
            return self.clip.factor(jnp.sqrt(square_norm(grads)))
        return factor

    @property
    def _options(self) -> dict[str, Any]:
        # On a mesh, rows can be sharded, and cutting them would gather the leaf. So leaves are updated whole, one at a
        # time.
        meshes = [jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves((self.state.outer, self.state.layers))]
        return {"chunk_bytes": self.chunk_bytes, "by_leaf": any(mesh.size > 1 for mesh in meshes)}

    def _guard(self, squares: Any, loss: Any, is_finite: Any) -> Any:
        """Return whether the loss and all gradients so far are finite; None if steps are not guarded."""
        return jnp.isfinite(squares) & jnp.isfinite(loss) & is_finite if self.is_guarded else None

    def _update_outer(self, grads: Tree, factor: Any, loss: Any, guard: Any) -> tuple[Tree, dict[str, Tree]]:
        """Update outer leaves one after the other; return the new leaves, and optimizer states by path."""
        outer, states = only(self.state.outer, ()), dict[str, Tree]()
        for path, _ in leaves_with_paths(grads):
            grad, old = only(grads, {path}), only(self.state.outer, {path})
            part, opt = self._factor(grad, factor), self.state.outer_opt[path]
            options = {"guard": guard, **self._options}
            new, states[path] = update(under(self.tx, "outer"), grad, old, opt, loss, part, **options)
            outer = combine(outer, new)
        return outer, states


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _but(tree: Tree, paths: frozenset[str]) -> Tree:
    return only(tree, {path for path, _ in leaves_with_paths(tree)} - paths)


def _added(grads: Tree, shared: Tree) -> Tree:
    """Return the gradients of `first`, plus those of `last` for shared leaves."""
    waiting = dict(leaves_with_paths(shared))
    leaves = [
        leaf + put(waiting[path], DEVICE).astype(leaf.dtype) if path in waiting else leaf
        for path, leaf in leaves_with_paths(grads)
    ]
    return jax.tree.unflatten(jax.tree.structure(grads), leaves)


def _paths_read(fn: Callable[..., Any], outer: Tree, *rest: Tree) -> frozenset[str]:
    """Return the paths of the leaves of `outer` that a function of it reads."""
    jaxpr = jax.make_jaxpr(fn)(outer, *rest).jaxpr
    read = variables_read(jaxpr)
    paths = [path for path, _ in leaves_with_paths(outer)]
    return frozenset(path for path, var in zip(paths, jaxpr.invars, strict=False) if var in read)
