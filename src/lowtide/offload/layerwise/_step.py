"""One layerwise step over one batch: forward, backward for the norm of exact clipping, and backward with updates.

The global norm is known only when the last gradient has been computed. An update inside the backward pass has already
happened by then. `Clip` lists the alternatives and their costs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax

from ...core import (
    ConfigError,
    StructureError,
    Tree,
    combine,
    leaves_with_paths,
    memory_space,
    traced_device,
    zero_after,
)
from ...jaxprs import variables_read
from .._host_memory import DEVICE, HOST, entry_shape, index_after, put, read, write
from .._streaming import Entry, stream
from ._checks import refuse_metrics
from ._passes import StackPasses
from ._state import LayerwiseState, scope_optimizer, select_paths

ClipMode = Literal["exact", "previous", "layer"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clip:
    """Scale gradients down to a norm, as `optax.clip_by_global_norm` does.

    Examples:
        >>> Clip(max_norm=1.0)
        Clip(max_norm=1.0, mode='exact')
    """

    max_norm: float
    """Largest norm that is not scaled down."""
    mode: ClipMode = "exact"
    """``"exact"``: the norm of all gradients of this step, from a second forward and backward pass. It costs twice the
    arithmetic and 1.3 times the host traffic of weights and optimizer state. ``"previous"``: the factor for the norm of
    the previous step; the first step is not clipped; no extra cost. ``"layer"``: each layer, and each outer leaf, by
    its norm; no extra cost."""

    def __post_init__(self) -> None:
        value: Any = self.max_norm
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ConfigError(
                "max_norm is out of range",
                expected="a finite number above 0",
                got=repr(value),
                hint="use for instance 1.0, or clip=None for no clipping",
            )
        if self.mode not in get_args(ClipMode):
            raise ConfigError(
                f"unknown clip mode {self.mode!r}",
                expected=" or ".join(map(repr, get_args(ClipMode))),
                got=repr(self.mode),
                hint='use "exact", which equals optax.clip_by_global_norm',
            )

    def factor(self, norm: Any) -> Any:
        """Return the factor for gradients of this norm: 1, or the factor that reduces the norm to `max_norm`."""
        return jnp.where(norm < self.max_norm, 1.0, self.max_norm / norm)


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
        squares = _square_norm(_without_paths(grads_last, first))

        def consume(squares: Any, i: Any, layer: Tree, grads: Tree) -> Any:
            return squares + _square_norm(grads)

        after = zero_after(squares)
        squares, boundary = self.passes.backward(lambda _: layers, inputs, boundary, consume, squares, after)
        grads = _add_shared(self._first_gradients(first, boundary), shared)
        return jnp.sqrt(squares + _square_norm(grads)), layers

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
        squares = _square_norm(head)
        outer, outer_opt = self._update_outer(head, factor, loss, self._guard(squares, loss, is_finite))

        def consume(carry: Any, i: Any, layer: Tree, grads: Tree) -> Any:
            layers, opt, squares = carry
            layer_factor, squares = self._factor(grads, factor), squares + _square_norm(grads)
            options = {"guard": self._guard(squares, loss, is_finite), **self._options}
            tx = scope_optimizer(self.tx, "layers")
            layers, opt = _update_layer(tx, grads, layer, layers, opt, i, loss, layer_factor, **options)
            return layers, opt, squares

        # The dependency frees the gradients of the head before the first block runs backward.
        after = zero_after((outer, squares))
        carry = (layers, state.layers_opt, squares)
        carry, boundary = self.passes.backward(lambda carry: carry[0], inputs, boundary, consume, carry, after)
        layers, layers_opt, squares = carry
        grads = _add_shared(self._first_gradients(first, boundary), shared)
        squares = squares + _square_norm(grads)
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
            return self.clip.factor(jnp.sqrt(_square_norm(grads)))
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
            new_leaf, states[path] = _update(
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


def _square_norm(tree: Tree) -> Any:
    """Return the sum of the squares of all leaves, in float32, or in float64 with `jax_enable_x64`."""

    def square(leaf: Any) -> Any:
        size = jnp.abs(leaf)
        return jnp.sum(jnp.square(size.astype(jnp.promote_types(size.dtype, jnp.float32))))

    return sum((square(leaf).astype(float) for leaf in jax.tree.leaves(tree)), jnp.zeros((), float))


def _scale(tree: Tree, factor: Any) -> Tree:
    """Multiply all leaves by a scalar, in their dtypes."""
    return jax.tree.map(lambda leaf: leaf * factor.astype(leaf.dtype), tree)


# Updates of one layer of a stack, or of one outer leaf, in the memory that holds them.


def _update(
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
        updates, new_state = tx.update(grads if factor is None else _scale(grads, factor), opt, params, value=loss)
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


def _update_layer(
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
    new, new_state = _update(tx, grads, layer, state, loss, factor, into=into, **options)
    return jax.tree.map(write_back, layers, new), jax.tree.map(write_back, opt, new_state)
