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
from ._state import LayerwiseState, scope_optimizer, select_paths
from ._updates import update, update_layer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A batch and the state before its step; every method is pure."""

    tx: Any
    clip: Clip | None
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
        first, last = self._find_read_paths()
        inputs, boundary, layers = self.passes.forward(self._select_outer(first), self.state.layers, self.state.step)
        _, _, grads_last, boundary = self.passes.last(self._select_outer(last), boundary)
        shared = self._store_shared(grads_last, first & last)
        squares = square_norm(_without_paths(grads_last, first))

        def consume(squares: Any, i: Any, layer: Tree, grads: Tree) -> Any:
            return squares + square_norm(grads)

        after = zero_after(squares)
        squares, boundary = self.passes.backward(lambda _: layers, inputs, boundary, consume, squares, after)
        grads = _add_shared(self._first_gradients(first, boundary), shared)
        return jnp.sqrt(squares + square_norm(grads)), layers

    def update(self, factor: Any, is_finite: Any = True) -> tuple[LayerwiseState, dict[str, Any]]:
        """Compute the new state and the metrics.

        `factor` scales the gradients before they are used; None if each layer's norm decides, or nothing is clipped.
        `is_finite` is whether the gradients are known to be finite so far; read if steps are guarded.
        """
        state, (first, last) = self.state, self._find_read_paths()
        inputs, boundary, layers = self.passes.forward(self._select_outer(first), state.layers, (state.step, factor))
        loss, metrics, grads_last, boundary = self.passes.last(self._select_outer(last), boundary)
        shared = self._store_shared(grads_last, first & last)
        # Leaves that only `last` reads are updated before the blocks. Leaves that `first` reads, too, wait for its
        # gradient at the end of the backward pass.
        head = _without_paths(grads_last, first)
        squares = square_norm(head)
        outer, outer_opt = self._update_outer(head, factor, loss, self._guard(squares, loss, is_finite))

        def consume(carry: Any, i: Any, layer: Tree, grads: Tree) -> Any:
            layers, opt, squares = carry
            layer_factor, squares = self._factor(grads, factor), squares + square_norm(grads)
            options = {"guard": self._guard(squares, loss, is_finite), **self._options}
            tx = scope_optimizer(self.tx, "layers")
            layers, opt = update_layer(tx, grads, layer, layers, opt, i, loss, layer_factor, **options)
            return layers, opt, squares

        # The dependency frees the gradients of the head before the first block runs backward.
        after = zero_after((outer, squares))
        carry = (layers, state.layers_opt, squares)
        carry, boundary = self.passes.backward(lambda carry: carry[0], inputs, boundary, consume, carry, after)
        layers, layers_opt, squares = carry
        grads = _add_shared(self._first_gradients(first, boundary), shared)
        squares = squares + square_norm(grads)
        guard = self._guard(squares, loss, is_finite)
        remaining, remaining_opt = self._update_outer(grads, factor, loss, guard)
        norm = jnp.sqrt(squares)
        new_state = LayerwiseState(
            step=state.step + 1,
            outer=combine(outer, remaining),
            layers=layers,
            outer_opt={**outer_opt, **remaining_opt},
            layers_opt=layers_opt,
            grad_norm=norm if guard is None else jnp.where(guard, norm, state.grad_norm),
        )
        return new_state, {**metrics, "loss": loss, "grad_norm": norm}

    def _find_read_paths(self) -> tuple[frozenset[str], frozenset[str]]:
        """Return the paths of the trainable outer leaves that `first` reads, and of those that `last` reads.

        Raises `StructureError` for a leaf that neither reads, or functions that return a wrong result.
        """
        passes, outer = self.passes, jax.tree.map(_shape, put(self.state.outer, DEVICE))
        frozen = jax.tree.map(_shape, put(passes.frozen_outer, DEVICE))
        batch = jax.tree.map(_shape, passes.batch(0))
        layer = jax.tree.map(entry_shape, combine(self.state.layers, passes.frozen_layers))
        stack = passes.stack
        h, metrics = stack.shapes(combine(outer, frozen), layer, batch)
        refuse_metrics(metrics)
        first = _find_paths_read_by(lambda o, f, b: stack.first(combine(o, f), b), outer, frozen, batch)
        last = _find_paths_read_by(lambda o, f, h, b: stack.last(combine(o, f), h, b), outer, frozen, h, batch)
        for path, _ in leaves_with_paths(outer):
            if path not in first | last:
                raise StructureError(
                    f"outer/{path} cannot train: neither first nor last reads it",
                    hint=f'leave it out of the selection, for instance with the pattern "!outer/{path}"',
                )
        return first, last

    def _select_outer(self, paths: frozenset[str]) -> Tree:
        return select_paths(self.state.outer, paths)

    def _first_gradients(self, paths: frozenset[str], boundary: Tree) -> Tree:
        return self.passes.first(self._select_outer(paths), boundary) if paths else self._select_outer(paths)

    def _store_shared(self, grads: Tree, paths: frozenset[str]) -> Tree:
        """Move gradients that are kept until the end of the backward pass to the memory of their parameters."""
        return jax.tree.map(lambda x: put(x, self.outer_space) if x.ndim > 1 else x, select_paths(grads, paths))

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
        outer, states = select_paths(self.state.outer, ()), dict[str, Tree]()
        for path, _ in leaves_with_paths(grads):
            grad, old_leaf = select_paths(grads, {path}), select_paths(self.state.outer, {path})
            leaf_factor, opt = self._factor(grad, factor), self.state.outer_opt[path]
            options = {"guard": guard, **self._options}
            new_leaf, states[path] = update(
                scope_optimizer(self.tx, "outer"), grad, old_leaf, opt, loss, leaf_factor, **options
            )
            outer = combine(outer, new_leaf)
        return outer, states


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _without_paths(tree: Tree, paths: frozenset[str]) -> Tree:
    return select_paths(tree, {path for path, _ in leaves_with_paths(tree)} - paths)


def _add_shared(grads: Tree, shared: Tree) -> Tree:
    """Return the gradients of `first`, plus those of `last` for shared leaves."""
    shared_by_path = dict(leaves_with_paths(shared))
    leaves = [
        leaf + put(shared_by_path[path], DEVICE).astype(leaf.dtype) if path in shared_by_path else leaf
        for path, leaf in leaves_with_paths(grads)
    ]
    return jax.tree.unflatten(jax.tree.structure(grads), leaves)


def _find_paths_read_by(fn: Callable[..., Any], outer: Tree, *other_args: Tree) -> frozenset[str]:
    """Return the paths of the leaves of `outer` that a function of it reads."""
    jaxpr = jax.make_jaxpr(fn)(outer, *other_args).jaxpr
    used_variables = variables_read(jaxpr)
    paths = [path for path, _ in leaves_with_paths(outer)]
    return frozenset(path for path, var in zip(paths, jaxpr.invars, strict=False) if var in used_variables)
