"""Computation without shardings in types, for arrays on a mesh with explicit axes.

`jax.make_mesh` makes explicit axes by default. On them every operation derives the sharding of its result from its
operands, or raises. Most raise where a device's part of a row ends inside of a block, or where a loop starts from
zeros. So blocks and loops are computed as on a mesh with automatic axes, and the sharding of the result is set at the
end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


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


def rows_place(mesh: Any, ids: Any, table: Any) -> Any:
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


def kept(tree: Any) -> Any:
    """Return the shardings of the leaves, from their types."""
    return jax.tree.map(lambda leaf: jax.typeof(leaf).sharding, tree)
