"""The state of a layerwise step: its fields, and how it is initialised one layer at a time."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ...core import LowtideError, Tree, leaf_bytes, leaves_with_paths, num_layers, on_host
from .._host_memory import DEVICE, SPACES, put, read, to_device, to_host, write, zero_buffer
from .._optimizer import replicated, state_shardings
from .._streaming import part_of_parameters


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "outer", "layers", "outer_opt", "layers_opt", "grad_norm"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class LayerwiseState:
    """All arrays that a layerwise step changes."""

    step: Any
    """Number of steps taken, an int32 scalar."""
    outer: Tree
    """Trainable outer leaves, `None` elsewhere."""
    layers: Tree
    """Trainable stacked leaves, `None` elsewhere."""
    outer_opt: Mapping[str, Tree]
    """The optimizer's state of each outer leaf, by the path of the leaf."""
    layers_opt: Tree
    """The optimizer's state of one layer, every leaf with a leading axis for the layers."""
    grad_norm: Any
    """Norm of all gradients of the last step, float32 (float64 with `jax_enable_x64`); 0 before the first step."""


def select_paths(tree: Tree, paths: Collection[str]) -> Tree:
    """Keep the leaves of the tree at the given paths; the others become None."""
    leaves = [leaf if path in paths else None for path, leaf in leaves_with_paths(tree)]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def scope_optimizer(tx: optax.GradientTransformation, name: str) -> optax.GradientTransformationExtraArgs:
    """Make the optimizer of a part of the parameters, at the paths of the whole tree: ``layers/...``.

    So labels and masks that are functions of paths decide as in a plain step.
    """
    inner: Any = optax.with_extra_args_support(tx)

    def init(params: Tree) -> Tree:
        with part_of_parameters():
            return inner.init({name: params})

    def update(updates: Tree, state: Tree, params: Tree = None, **extra: Any) -> tuple[Tree, Tree]:
        updates, state = inner.update({name: updates}, state, {name: params}, **extra)
        return updates[name], state

    return optax.GradientTransformationExtraArgs(init, update)


def can_move_to_host(leaf: Any, *, is_stacked: bool) -> bool:
    """Return whether a leaf may move to the host: it is no vector, or has at least 1 MiB (per entry, if stacked).

    A TPU cannot slice parts of smaller vectors in host memory, which a partitioned program may need.
    """
    entry = leaf.shape[1:] if is_stacked else leaf.shape
    return len(entry) > 1 or leaf_bytes(jax.ShapeDtypeStruct(entry, leaf.dtype)) >= 2**20


def place_parameters(tree: Tree, place: Mapping[str, str]) -> Tree:
    """Place the trees ``{"outer", "layers"}``, each leaf in its memory."""

    def place_part(name: str) -> Tree:
        def place_leaf(leaf: Any) -> Any:
            is_on_host = place[name] == "host" and can_move_to_host(leaf, is_stacked=name == "layers")
            # `to_device` also commits arrays to the device. Otherwise the second step, which gets the results of the
            # first, would compile again.
            return to_host(leaf) if is_on_host else to_device(leaf)

        return jax.tree.map(place_leaf, tree[name])

    return {"outer": place_part("outer"), "layers": place_part("layers")}


def initial_state(tx: optax.GradientTransformation, outer: Tree, layers: Tree, opt_place: str) -> LayerwiseState:
    """Make the state of step 0 for placed parameters; for shapes, return shapes."""
    space = SPACES[opt_place]

    def make_layers(layers: Tree) -> Tree:
        init = scope_optimizer(tx, "layers").init
        shapes = jax.eval_shape(lambda: init(read(layers, 0)))
        empty = jax.tree.map(
            lambda leaf: zero_buffer(leaf, (count,), space if can_move_to_host(leaf, is_stacked=False) else DEVICE),
            shapes,
        )
        return jax.lax.fori_loop(0, count, lambda i, state: write(state, init(read(layers, i)), i), empty)

    def make_outer(leaf: Tree) -> Tree:
        state = scope_optimizer(tx, "outer").init(put(leaf, DEVICE))
        return jax.tree.map(lambda x: put(x, space) if can_move_to_host(x, is_stacked=False) else x, state)

    count = num_layers(layers)
    _refuse_empty_selection(tx, outer, layers)
    return LayerwiseState(
        step=_zero_scalar(layers, jnp.int32),
        outer=outer,
        layers=layers,
        outer_opt={
            path: _make_sharded(make_outer, select_paths(outer, {path})) for path, _ in leaves_with_paths(outer)
        },
        layers_opt=_make_sharded(make_layers, layers),
        grad_norm=_zero_scalar(layers, jnp.result_type(float)),
    )


def _refuse_empty_selection(tx: optax.GradientTransformation, outer: Tree, layers: Tree) -> None:
    """Raise the optimizer's error if it selects no parameter at all; selecting none in one part is no error."""
    try:
        jax.eval_shape(lambda outer, layers: tx.init({"outer": outer, "layers": read(layers, 0)}), outer, layers)
    except LowtideError:
        raise
    except Exception:  # noqa: S110, BLE001 -- labels or masks that fit parts alone
        pass


def _make_sharded(make: Callable[[Tree], Tree], params: Tree) -> Tree:
    """Compute ``make(params)``, with each leaf sharded like its parameter; for shapes, return shapes."""
    initialiser: Any = make  # only `init` of the transformation is called
    shardings = state_shardings(optax.GradientTransformation(initialiser, initialiser), params)
    if not _has_shapes(params):
        return jax.jit(make, out_shardings=shardings)(params)

    def make_shape(leaf: Any, sharding: Any) -> Any:
        shape = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        return to_host(shape) if on_host(sharding) else shape

    return jax.tree.map(make_shape, jax.eval_shape(make, params), shardings)


def _has_shapes(tree: Tree) -> bool:
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))


def _zero_scalar(like: Tree, dtype: Any) -> Any:
    """Make a scalar zero on the devices of a tree; for shapes, return a shape."""
    if _has_shapes(like):
        return jax.ShapeDtypeStruct((), dtype)
    return jax.device_put(jnp.zeros((), dtype), replicated(like).with_memory_kind("device"))
