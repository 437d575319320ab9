"""Move the leaves of a tree to host memory or back: arrays, tracers and shapes.

JAX has a memory kind in every concrete sharding and a memory space in every traced type. This module sets both, so one
call works for a loaded checkpoint, a traced function and an ahead-of-time compile.

Limits. A program can reach only ``pinned_host``, so `to_host` has no other kind. A shape with a
`jax.sharding.SingleDeviceSharding` loses its memory kind when JAX traces it (jax 0.10.2), so it gets a mesh of that one
device. Compile-only GPUs have no host memory: a shape placed there stays on the device, with a warning.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from ..core import (
    ConfigError,
    PlacementWarning,
    SelectionError,
    Tree,
    Selector,
    leaves_with_paths,
    on_host,
    select,
)

MEMORY_KINDS = ("device", "pinned_host", "unpinned_host")


def to_host(tree: Tree, where: Selector = "**") -> Tree:
    """Move leaves to the memory of the machine that holds their device.

    Args:
        tree: any pytree. Arrays (including NumPy's) and tracers are moved. A `jax.ShapeDtypeStruct` gets a sharding in
            host memory, on JAX's default device if it has none. Other leaves stay unchanged.
        where: selects the leaves: globs on tree paths or a predicate, as in `lowtide.core.select`.

    Returns:
        The tree; arrays keep their devices and sharding, with the memory kind ``pinned_host``.

    Raises:
        SelectionError: when `where` selects nothing.

    Memory:
        One host copy of every leaf that moves. The device copy lives until the caller drops or donates it.

    Examples:
        >>> import jax.numpy as jnp
        >>> moved = to_host({"layers": jnp.ones((2, 3)), "head": jnp.ones(3)}, "layers")
        >>> moved["layers"].sharding.memory_kind, moved["head"].sharding.memory_kind
        ('pinned_host', 'device')

    References:
        JAX's tutorial "Memories and host offloading".
    """
    return _move(tree, where, "pinned_host")


def to_device(tree: Tree, where: Selector = "**") -> Tree:
    """Move leaves to device memory: the inverse of `to_host`, with the same arguments.

    Args:
        tree: any pytree, as in `to_host`.
        where: selects the leaves, as in `to_host`.

    Returns:
        The tree, with the selected arrays in the memory kind ``device``.

    Raises:
        SelectionError: when `where` selects nothing.

    Memory:
        One device copy of every leaf that moves. Inside a jitted function the compiler decides how long it lives. It
        copies all leaves of a tree at once (`lowtide.offload.scan` moves one layer at a time).

    Examples:
        >>> import jax.numpy as jnp
        >>> double = jax.jit(lambda w: to_device(w) * 2)
        >>> double(to_host(jnp.ones(3))).sharding.memory_kind
        'device'
    """
    return _move(tree, where, "device")


def _move(tree: Tree, selector: Selector, kind: str) -> Tree:
    is_selected = select(tree, selector)
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten(
        _move_leaf(leaf, kind) if is_chosen else leaf for leaf, is_chosen in zip(leaves, is_selected, strict=True)
    )


def _move_leaf(leaf: Any, kind: str) -> Any:
    if isinstance(leaf, Tracer):
        # A tracer has no memory kind, only a memory space in its type.
        return jax.device_put(leaf, jax.memory.Space.Device if kind == "device" else jax.memory.Space.Host)
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        return jax.device_put(leaf, _with_memory_kind(_sharding_of(leaf, None), kind))
    if isinstance(leaf, jax.ShapeDtypeStruct):
        sharding = _with_memory_kind(_sharding_of(leaf, None), kind)
        # JAX drops the memory kind of a SingleDeviceSharding when it traces the shape (jax 0.10.2).
        if kind != "device" and isinstance(sharding, SingleDeviceSharding):
            mesh = Mesh(np.array(list(sharding.device_set), dtype=object), ("device",))
            sharding = NamedSharding(mesh, PartitionSpec(), memory_kind=sharding.memory_kind)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=leaf.weak_type)
    return leaf


def memory_kinds(tree: Tree, match: str, kind: str = "pinned_host", *, mesh: Mesh | None = None) -> Tree:
    """Return shardings for `in_shardings` and `out_shardings` of `jax.jit`, with memory kinds by path.

    Args:
        tree: a pytree of arrays, `jax.ShapeDtypeStruct`s, shardings, or (with `mesh`) `PartitionSpec`s.
        match: a regular expression for whole tree paths, such as ``.*/(mu|nu)/.*``.
        kind: memory kind of the leaves that it matches: ``pinned_host``, ``unpinned_host`` or ``device``.
        mesh: mesh of `PartitionSpec`s, and of leaves without a sharding, which are replicated on it. Without a mesh
            such leaves go to JAX's default device.

    Returns:
        A tree with the sharding of each leaf, in `kind` where the path matches, else in ``device``.

    Raises:
        SelectionError: when no path matches, or `match` is not a regular expression.
        ConfigError: for an unknown `kind`, or `PartitionSpec`s without a mesh.

    Memory:
        None: shardings hold no data.

    Examples:
        >>> import jax.numpy as jnp
        >>> kinds = memory_kinds({"adam": {"mu": jnp.ones(3), "count": jnp.zeros(())}}, ".*/(mu|nu)")
        >>> kinds["adam"]["mu"].memory_kind, kinds["adam"]["count"].memory_kind
        ('pinned_host', 'device')
    """
    if kind not in MEMORY_KINDS:
        raise ConfigError(
            f"unknown memory kind {kind!r}",
            expected=" or ".join(MEMORY_KINDS),
            got=repr(kind),
            hint='use "pinned_host", the host memory that a device can read directly',
        )
    is_match = match_paths(tree, match, is_leaf=_is_placement)
    leaves, treedef = jax.tree.flatten(tree, is_leaf=_is_placement)
    shardings = [_sharding_of(leaf, mesh) for leaf in leaves]
    return treedef.unflatten(
        _with_memory_kind(s, kind if is_matching else "device")
        for s, is_matching in zip(shardings, is_match, strict=True)
    )


def match_paths(tree: Tree, match: str, is_leaf: Callable[[Any], bool] | None = None) -> list[bool]:
    """Return for every leaf, in flattening order, whether a regular expression matches its whole path.

    Paths look like ``0/mu/layers/w``. Raises `SelectionError` when it matches none, or is not a regular expression.
    """
    paths = [path for path, _ in leaves_with_paths(tree, is_leaf=is_leaf)]
    sample = ", ".join(paths[:6]) + (f", … ({len(paths) - 6} more)" if len(paths) > 6 else "")
    try:
        is_match = [re.fullmatch(match, path) is not None for path in paths]
    except re.error as error:
        raise SelectionError(
            f"{match!r} is not a regular expression",
            expected="a regular expression for whole tree paths",
            got=str(error),
            hint=f"paths look like: {sample}",
        ) from error
    if not any(is_match):
        partial_matches = [path for path in paths if re.search(match, path)]
        remedy = (
            f"did you mean {f'.*({match}).*'!r}?" if partial_matches else "separate segments by '/', as in '.*/mu/.*'"
        )
        raise SelectionError(
            f"the regular expression {match!r} matches nothing",
            expected="a regular expression for whole tree paths",
            got=f"{len(paths)} paths: {sample}",
            hint=remedy,
        )
    return is_match


def _is_placement(leaf: Any) -> bool:
    return isinstance(leaf, (PartitionSpec, Sharding))


def _sharding_of(leaf: Any, mesh: Mesh | None) -> Sharding:
    if isinstance(leaf, Sharding):
        return leaf
    if isinstance(leaf, PartitionSpec):
        if mesh is None:
            raise ConfigError(
                "a tree of PartitionSpecs needs a mesh", got=repr(leaf), hint="pass memory_kinds(..., mesh=mesh)"
            )
        return NamedSharding(mesh, leaf)
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, Sharding):
        return sharding
    return SingleDeviceSharding(default_device()) if mesh is None else NamedSharding(mesh, PartitionSpec())


def _with_memory_kind(sharding: Sharding, kind: str) -> Sharding:
    result = sharding.with_memory_kind(kind)
    if kind != "device" and not on_host(result):
        warnings.warn(
            f"{sharding}: its devices have no memory {kind!r}, so the leaf counts as device memory\n"
            "hint: for a compile-only GPU, which has no memory kinds, place arrays on the CPU, and let "
            "lowtide.memory.compile move them to the target",
            PlacementWarning,
            stacklevel=4,
        )
    return result


def default_device() -> Any:
    """Return JAX's default device; while a function is traced for another target, a device of that target."""
    device: Any = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    return device if hasattr(device, "platform") else jax.devices(device)[0]
