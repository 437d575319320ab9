"""Computing where no sharding is part of a type.

On a mesh with explicit axes, which `jax.make_mesh` gives by default, every operation says from its operands how its
result is divided, or refuses, as most do where a device's part of a row ends inside of a block, or where a loop begins
with zeros. So blocks and loops are computed as on a mesh with automatic axes, and how the result is divided is said at
the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def explicit_mesh(tree: Any) -> Any:
    """Return the mesh with explicit axes that leaves of a tree are on, or None."""
    meshes = (jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves(tree))
    return next((mesh for mesh in meshes if mesh.explicit_axes), None)


def without_explicit_axes(fn: Callable[..., Any], shardings: Callable[[Any], Any], *args: Any) -> Any:
    """Call a function of arrays, on a mesh with explicit axes as if they were automatic.

    Args:
        fn: the function.
        shardings: of its results, given the mesh; called where there are explicit axes.
        args: trees of arrays.
    """
    mesh = explicit_mesh(args)
    if mesh is None:
        return fn(*args)
    return jax.sharding.auto_axes(fn, axes=mesh.explicit_axes, out_sharding=shardings(mesh))(*args)


def rows_place(mesh: Any, ids: Any, table: Any) -> Any:
    """Return how rows of a table are divided: as the ids are, and along a row as the table is, where that is left."""
    own = jax.typeof(ids).sharding.spec
    columns = (*jax.typeof(table).sharding.spec, None, None)[1]
    used = {name for axis in own for name in axis_names(axis)}
    columns = None if used & {*axis_names(columns)} else columns
    return jax.sharding.NamedSharding(mesh, jax.P(*own, *(None,) * (ids.ndim - len(own)), columns))


def axis_names(axis: Any) -> tuple[Any, ...]:
    """Return the names of the axes of a mesh that one axis of an array is divided by."""
    return () if axis is None else axis if isinstance(axis, tuple) else (axis,)


def kept(tree: Any) -> Any:
    """Return how leaves are divided by their types."""
    return jax.tree.map(lambda leaf: jax.typeof(leaf).sharding, tree)
