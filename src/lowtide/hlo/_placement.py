"""Arguments for a compile: shapes on the target's devices in place of arrays on other devices.

The rules are those of `jit` with the real arguments. A leaf on one device goes to the target's first device. A leaf on
a mesh goes to a mesh of the same axes over the target's devices. If some leaf is on a mesh, an uncommitted leaf stays
unplaced, so that the compiler may shard it as `jit` lets it. Host memory stays host memory.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ..core import StructureError, TargetError, on_host, path_str
from ..targets import Target
from ._executable import argument_of


def place_arguments(arguments: Any, goal: Target, *, strict: bool) -> tuple[Any, frozenset[str]]:
    """Replace every array of a tree by a `jax.ShapeDtypeStruct` on the target; also return the paths in host memory.

    The first two path segments are a group (positional or keyword) and an argument. A leaf that `jit` would refuse is
    an error if `strict`; otherwise it stays, because it may be static. Structs have no host memory if the target's
    compile-only devices have none. Raises `TargetError` when a mesh has more devices than the target.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(arguments)
    mapper = _MeshMapper(goal)
    meshes = [mapper.mesh(leaf, path) for path, leaf in leaves if _mesh_size(_sharding(leaf)) > 1]
    placed = [_target_struct(path, leaf, mapper, meshes[0] if meshes else None, strict) for path, leaf in leaves]
    host_paths = frozenset(path_str(path[1:]) for path, leaf in leaves if on_host(_sharding(leaf)))
    return treedef.unflatten(placed), host_paths


class _MeshMapper:
    """Meshes over the target's devices, one for each distinct mesh of the arguments."""

    def __init__(self, goal: Target) -> None:
        self.goal, self.devices = goal, goal.devices()
        self._meshes: dict[Any, Mesh] = {}

    def mesh(self, leaf: Any, path: Any) -> Mesh:
        mesh = leaf.sharding.mesh
        if mesh not in self._meshes:
            self._meshes[mesh] = self._rebuild(mesh, path)
        return self._meshes[mesh]

    def _rebuild(self, mesh: Any, path: Any) -> Mesh:
        # A mesh of the target's own devices keeps the user's order of devices.
        if isinstance(mesh, Mesh) and set(mesh.devices.flat) <= set(self.devices):
            return mesh
        sizes = tuple(mesh.axis_sizes)
        if math.prod(sizes) > len(self.devices):
            raise TargetError(
                f"{describe(path)}: its mesh needs more devices than target {self.goal.name!r} has",
                expected=f"at most {len(self.devices)} devices",
                got=f"{math.prod(sizes)} ({dict(zip(mesh.axis_names, sizes, strict=True))})",
                hint="choose a larger topology, or a smaller mesh",
            )
        grid = np.array(self.devices[: math.prod(sizes)], dtype=object).reshape(sizes)
        return Mesh(grid, mesh.axis_names, axis_types=mesh.axis_types)


def describe(path: Any) -> str:
    """Describe a leaf's place in a call: ``argument 0 at params/w``, ``argument 'batch'``."""
    argument, inner = argument_of(path), path_str(path[2:])
    return f"argument {argument!r} at {inner}" if inner else f"argument {argument!r}"


def _target_struct(path: Any, leaf: Any, mapper: _MeshMapper, mesh: Mesh | None, strict: bool) -> Any:
    if isinstance(leaf, (bool, int, float, complex)) and not isinstance(leaf, np.generic):
        return leaf
    try:
        aval = jax.typeof(leaf)
        shape, dtype = aval.shape, aval.dtype
    except (TypeError, AttributeError) as error:
        if isinstance(leaf, jax.ShapeDtypeStruct) and not all(isinstance(dim, int) for dim in leaf.shape):
            raise StructureError(
                f"{describe(path)}: the dimensions of the shape are not whole numbers",
                expected="non-negative whole numbers",
                got=repr(tuple(leaf.shape)),
                hint="pass numbers for settings on the command line, such as --set batch=8; other values are text",
            ) from error
        if not strict:
            return leaf
        raise StructureError(
            f"{describe(path)}: a compiled function does not support its type",
            expected="an array, a jax.ShapeDtypeStruct or a number",
            got=f"{type(leaf).__name__}{f' of dtype {leaf.dtype}' if isinstance(leaf, np.ndarray) else ''}",
            hint="name the argument in static_argnums, or leave it out of the tree",
        ) from error
    sharding = _target_sharding(path, leaf, mapper, mesh)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, weak_type=getattr(aval, "weak_type", False))


def _target_sharding(path: Any, leaf: Any, mapper: _MeshMapper, mesh: Mesh | None) -> Any:
    sharding = _sharding(leaf)
    kind = sharding.memory_kind if on_host(sharding) else None
    if isinstance(sharding, NamedSharding):
        return NamedSharding(mapper.mesh(leaf, path), sharding.spec, memory_kind=kind)
    if sharding is not None and len(sharding.device_set) > 1:
        raise StructureError(
            f"{describe(path)}: a {type(sharding).__name__} cannot be moved to another target",
            expected="a NamedSharding",
            hint="shard it with jax.sharding.NamedSharding(mesh, PartitionSpec(...))",
        )
    if kind is not None:
        # The type of a traced shape carries a sharding's memory space only when there is a mesh (jax 0.10.2).
        target_mesh = Mesh(np.array(mapper.devices[:1], dtype=object), ("device",)) if mesh is None else mesh
        return NamedSharding(target_mesh, PartitionSpec(), memory_kind=kind)
    if mesh is None or (sharding is not None and getattr(leaf, "committed", True)):
        return SingleDeviceSharding(mapper.devices[0])
    return None


def _sharding(leaf: Any) -> Any:
    return getattr(leaf, "sharding", None) if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) else None


def _mesh_size(sharding: Any) -> int:
    return sharding.mesh.size if isinstance(sharding, NamedSharding) else 1
