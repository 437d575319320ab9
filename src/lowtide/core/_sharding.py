"""Sharded arrays: mesh axes, how devices share activations and tokens, and meshes with explicit axes.

Functions that cut rows into pieces are mapped over each device's own tokens (`on_own_tokens`). On an array of all
tokens the compiler would gather the tokens for every piece, and add up gradients of weights for every piece.

`jax.make_mesh` makes explicit axes by default. On them every operation derives the sharding of its result from its
operands, or raises. Most raise where a device's part of a row ends inside of a block, or where a loop starts from
zeros. So blocks and loops are computed as on a mesh with automatic axes, and the sharding of the result is set at the
end (`without_explicit_axes`).
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Generator
from typing import Any

import jax

from ._paths import Tree

BATCH_AXES = ("expert", "data", "fsdp")
"""Mesh axes along which rows of batches are sharded by default, where the mesh has them. `expert` comes first, so that
a block that `jax.shard_map` maps over experts alone finds its rows sharded the same way and moves none."""
CONTEXT = "context"
"""Mesh axis along which the tokens of each row are sharded, where the mesh has it."""
_constrain: contextvars.ContextVar[Callable[[Any], Any]] = contextvars.ContextVar("constrain", default=lambda h: h)
_mesh: contextvars.ContextVar[Any] = contextvars.ContextVar("mesh", default=None)


@contextlib.contextmanager
def activation_sharding(constrain: Callable[[Any], Any], mesh: Any = None) -> Generator[None]:
    """Constrain, inside the ``with`` block, the sharding of the activations between layers of a traced stack.

    If weights are sharded and activations have no constraint, XLA may gather the activations instead of one layer's
    weights. Every device then computes all rows.

    Args:
        constrain: a function that returns activations with a sharding constraint.
        mesh: mesh of the devices, for blocks that shard their work themselves (`traced_mesh`).
    """
    tokens = _constrain.set(constrain), _mesh.set(mesh)
    try:
        yield
    finally:
        _constrain.reset(tokens[0])
        _mesh.reset(tokens[1])


def activation_constraint() -> Callable[[Any], Any]:
    """Return the function that `activation_sharding` got; the identity outside of its ``with`` block."""
    return _constrain.get()


def traced_mesh() -> Any:
    """Return the mesh that a block is traced for: that of `jax.set_mesh` or a pipeline, else a trainer's, else None."""
    current = jax.sharding.get_abstract_mesh()
    return _mesh.get() if current.empty else current


def num_shards_along(axis: str) -> int:
    """Return the number of shards of traced arrays along an axis of `traced_mesh` that the compiler partitions.

    Args:
        axis: name of the mesh axis. The result is 1 if the mesh lacks it, and inside of a `jax.shard_map` over it,
            where arrays are local to one device.
    """
    mesh = traced_mesh()
    return 1 if mesh is None or axis in getattr(mesh, "manual_axes", ()) else mesh.shape.get(axis, 1)


def token_parts(length: int, arrays: Tree) -> int:
    """Return the number of devices that share the tokens of a row; 1 if they cannot be shared evenly.

    Args:
        length: tokens of a row.
        arrays: arrays to compute with. If their types carry explicit shardings, the result is 1 and they stay as they
            are.
    """
    size = num_shards_along(CONTEXT)
    return 1 if size == 1 or length % size or explicit_mesh(arrays) is not None else size


def on_own_tokens(
    fn: Callable[[Tree, Tree], Tree], whole: Tree, tokens: Tree, *, axis: int = 1, out_axis: int = 1
) -> Any:
    """Call ``fn(whole, tokens)`` on each device's tokens.

    Args:
        fn: the function.
        whole: arrays that every device has whole. Their gradients are added up over the devices once.
        tokens: arrays whose token axis is sharded.
        axis: the token axis of `tokens`.
        out_axis: the sharded axis of the results.
    """
    # Outside of `jax.jit` a `jax.shard_map` maps over all axes of a mesh or none (0.10.2).
    mapped = jax.jit(
        jax.shard_map(
            fn,
            mesh=traced_mesh(),
            in_specs=(jax.P(), _token_spec(axis)),
            out_specs=_token_spec(out_axis),
            axis_names={CONTEXT},
            check_vma=False,
        )
    )
    return mapped(whole, tokens)


def _token_spec(axis: int) -> jax.P:
    return jax.P(*[None] * axis, CONTEXT)


def explicit_mesh(tree: Any) -> Any:
    """Return the mesh with explicit axes that holds a leaf of a tree, or None."""
    meshes = (jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves(tree))
    return next((mesh for mesh in meshes if mesh.explicit_axes), None)


def without_explicit_axes(fn: Callable[..., Any], shardings: Callable[[Any], Any], *args: Any) -> Any:
    """Call a function of arrays on a mesh with explicit axes as if the axes were automatic.

    Args:
        fn: the function.
        shardings: a function from the mesh to the shardings of the results; called only if there are explicit axes.
        args: trees of arrays.
    """
    mesh = explicit_mesh(args)
    if mesh is None:
        return fn(*args)
    return jax.sharding.auto_axes(fn, axes=mesh.explicit_axes, out_sharding=shardings(mesh))(*args)


def lookup_sharding(mesh: Any, ids: Any, table: Any) -> Any:
    """Return the sharding of looked-up rows: as the ids, and within a row as the table if that axis is unused."""
    ids_spec = jax.typeof(ids).sharding.spec
    columns = (*jax.typeof(table).sharding.spec, None, None)[1]
    used = {name for axis in ids_spec for name in axis_names(axis)}
    # A mesh axis may shard only one axis of an array.
    columns = None if used & {*axis_names(columns)} else columns
    return jax.sharding.NamedSharding(mesh, jax.P(*ids_spec, *(None,) * (ids.ndim - len(ids_spec)), columns))


def axis_names(axis: Any) -> tuple[Any, ...]:
    """Return the names of the mesh axes that shard one axis of an array."""
    return () if axis is None else axis if isinstance(axis, tuple) else (axis,)


def shardings_of(tree: Any) -> Any:
    """Return the shardings of the leaves, from their types."""
    return jax.tree.map(lambda leaf: jax.typeof(leaf).sharding, tree)
