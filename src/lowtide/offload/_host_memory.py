"""Move leaves of a tree to host memory and back; make, read and write arrays in host memory.

JAX has a memory kind in every concrete sharding and a memory space in every traced type. This module sets both, so one
call works for a loaded checkpoint, a traced function and ahead-of-time compilation.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from ..core import (
    LOW_TILES,
    ConfigError,
    PlacementWarning,
    SelectionError,
    Selector,
    Tree,
    check_choice,
    check_host_slices,
    has_tall_tiles,
    is_key,
    is_row_major,
    leaves_with_paths,
    memory_space,
    on_host,
    select,
    slice_step,
    traced_device,
    zero_after,
)
from ..core._compat import row_major

# Limits. A program can access only host memory of the kind ``pinned_host``, so `to_host` uses no other kind.
# Compile-only GPUs have no host memory: a shape for such a GPU stays on the device, with a warning.


def to_host(tree: Tree, selector: Selector = "**") -> Tree:
    """Move leaves to the host memory of the machine that holds their device.

    Args:
        tree: any pytree. Arrays (including NumPy's) and tracers are moved. A `jax.ShapeDtypeStruct` gets a sharding in
            host memory, on JAX's default device if it has no sharding. Other leaves stay unchanged.
        selector: selects the leaves: globs on tree paths or a predicate, as in `lowtide.core.select`.

    Returns:
        The tree. Moved arrays keep their devices and partitions, and get the memory kind ``pinned_host``. A leaf on a
        compile-only GPU, which has no host memory, stays on the device, with a `PlacementWarning`.

    Raises:
        SelectionError: when `selector` selects nothing.

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
    return _move(tree, selector, "pinned_host")


def to_device(tree: Tree, selector: Selector = "**") -> Tree:
    """Move leaves to device memory: the inverse of `to_host`, with the same arguments.

    Args:
        tree: any pytree, as in `to_host`.
        selector: selects the leaves, as in `to_host`.

    Returns:
        The tree, with the selected arrays in the memory kind ``device``.

    Raises:
        SelectionError: when `selector` selects nothing.

    Memory:
        One device copy of every leaf that moves. Inside a jitted function the compiler decides how long the copies
        live, and all may exist at once (`lowtide.offload.scan` moves one layer at a time).

    Examples:
        >>> import jax.numpy as jnp
        >>> double = jax.jit(lambda w: to_device(w) * 2)
        >>> double(to_host(jnp.ones(3))).sharding.memory_kind
        'device'
    """
    return _move(tree, selector, "device")


def _move(tree: Tree, selector: Selector, kind: str) -> Tree:
    leaves, treedef = jax.tree.flatten(tree)
    pairs = zip(leaves, select(tree, selector), strict=True)
    return treedef.unflatten(_move_leaf(leaf, kind) if is_selected else leaf for leaf, is_selected in pairs)


def _move_leaf(leaf: Any, kind: str) -> Any:
    if isinstance(leaf, Tracer):
        # A tracer has no memory kind, only a memory space in its type.
        return jax.device_put(leaf, jax.memory.Space.Device if kind == "device" else jax.memory.Space.Host)
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        return jax.device_put(leaf, _with_memory_kind(_sharding_of(leaf, None), kind))
    if isinstance(leaf, jax.ShapeDtypeStruct):
        sharding = _with_memory_kind(_sharding_of(leaf, None), kind)
        # JAX drops the memory kind of a SingleDeviceSharding when it traces the shape (jax 0.10.2), so the shape gets a
        # mesh of that one device.
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
        kind: memory kind of the matching leaves: ``pinned_host``, ``unpinned_host`` or ``device``.
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
    hint = 'use "pinned_host", the host memory that a device can read directly'
    check_choice("kind", kind, ("device", "pinned_host", "unpinned_host"), hint=hint)
    leaves, treedef = jax.tree.flatten(tree, is_leaf=_is_placement)
    paths = [path for path, _ in leaves_with_paths(tree, is_leaf=_is_placement)]
    sample = ", ".join(paths[:6]) + (f", … ({len(paths) - 6} more)" if len(paths) > 6 else "")
    try:
        is_match = [re.fullmatch(match, path) is not None for path in paths]
    except re.error as error:
        problem = f"match={match!r} is not a regular expression: {error}"
        raise SelectionError(problem, hint=f"paths look like: {sample}") from error
    if not any(is_match):
        partial_matches = [path for path in paths if re.search(match, path)]
        hint = "separate segments by '/', as in '.*/mu/.*'"
        raise SelectionError(
            f"the regular expression {match!r} matches none of {len(paths)} whole paths: {sample}",
            hint=f"did you mean {f'.*({match}).*'!r}?" if partial_matches else hint,
        )
    return treedef.unflatten(
        _with_memory_kind(_sharding_of(leaf, mesh), kind if is_matching else "device")
        for leaf, is_matching in zip(leaves, is_match, strict=True)
    )


def _is_placement(leaf: Any) -> bool:
    return isinstance(leaf, (PartitionSpec, Sharding))


def _sharding_of(leaf: Any, mesh: Mesh | None) -> Sharding:
    if isinstance(leaf, Sharding):
        return leaf
    if isinstance(leaf, PartitionSpec):
        if mesh is None:
            raise ConfigError("a tree of PartitionSpecs needs a mesh", hint="pass memory_kinds(..., mesh=mesh)")
        return NamedSharding(mesh, leaf)
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, Sharding):
        return sharding
    return SingleDeviceSharding(traced_device()) if mesh is None else NamedSharding(mesh, PartitionSpec())


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


def warn_without_host_memory(owner: str, leaves: str) -> bool:
    """Return whether JAX's default device is compile-only, without host memory; if so, warn of leaves on the device."""
    if traced_device().addressable_memories():
        return False
    warnings.warn(
        f"{owner}: this compile-only device has no host memory, so {leaves} are arguments on the device\n"
        "hint: use lowtide.memory.analyze, which counts them as host memory if they were placed there",
        PlacementWarning,
        stacklevel=3,
    )
    return True


# Requirements of each platform for reading and writing entries of arrays in host memory. A slice is cut in the memory
# that holds the array, and only the slice moves. If the array moved first, all of it would move. Inside a loop that
# carries the array, XLA writes the slice in place, in host and in device memory.
#
# | platform | requirement | function |
# |---|---|---|
# | TPU | row-major slices: for others XLA changes the layout of the whole host array (libtpu 0.0.51) | `_move_entry` |
# | TPU | tiles of 8 rows: 8- and 4-bit arguments with other tiles are copied whole (libtpu 0.0.51) | `is_tall` |
# | TPU | reads with a data dependency: XLA would copy whole arrays when the program starts | `fetch`, `zero_after` |
# | GPU | an XLA that slices host memory at the right index (jaxlib 0.11.1 or newer) | `check_host_slices` |
# | GPU | zeros made on the device and moved: the host itself would broadcast a scalar in its memory | `zero_buffer` |
# | CPU | writes that depend on the reads before them: else each iteration copies the array | `index_after` |
#
# `jax.lax.platform_dependent` selects the code for the platform here, so callers need no case distinctions.

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
SPACES = {"host": HOST, "device": DEVICE}
"""Memory spaces by their names in the arguments of public functions."""


def read(tree: Tree, index: Any) -> Tree:
    """Read one entry of every leaf's leading axis to the device, without that axis; only the entry moves."""

    def read_leaf(leaf: Any) -> Any:
        return jnp.reshape(_move_entry(jax.lax.dynamic_slice_in_dim(leaf, index, 1), leaf, DEVICE), leaf.shape[1:])

    return jax.tree.map(read_leaf, tree)


def write(tree: Tree, values: Tree, index: Any) -> Tree:
    """Replace one entry of every leaf's leading axis, in the leaf's memory, by values that are on the device."""

    def write_leaf(leaf: Any, value: Any) -> Any:
        entry = _move_entry(jnp.expand_dims(value, 0), leaf, memory_space(leaf))
        return jax.lax.dynamic_update_slice_in_dim(leaf, entry, index, 0)

    return jax.tree.map(write_leaf, tree, values)


def _move_entry(entry: Any, leaf: Any, space: Any) -> Any:
    """Move an entry of a leaf to a memory space; on the device it has the row-major layout of the host array."""
    if HOST in (memory_space(leaf), space):
        check_host_slices()
    if memory_space(leaf) == DEVICE or not is_row_major(leaf.shape, leaf.dtype):
        return put(entry, space)
    return row_major(put(entry, space)) if space == DEVICE else put(row_major(entry), space)


def entry_shape(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)


def zero_buffer(like: Tree, leading: tuple[int, ...], space: Any) -> Tree:
    """Make zeros of shape [*leading, *leaf.shape] for every leaf, in a memory space; random keys stay on the device."""
    # XLA allocates the zeros directly on the host. Moving a scalar and broadcasting it on the host works on a TPU, too.
    # But in a GPU program the host would compute the broadcast.
    zeros = jax.tree.map(lambda leaf: jnp.zeros((*leading, *leaf.shape), leaf.dtype), like)
    return jax.tree.map(lambda leaf: leaf if is_key(leaf) else put(leaf, space), zeros)


def put(tree: Tree, space: Any) -> Tree:
    """Move all leaves to one memory space; leaves that are already there stay unchanged."""
    return jax.tree.map(lambda leaf: leaf if memory_space(leaf) == space else jax.device_put(leaf, space), tree)


def fetch(tree: Tree, after: Tree) -> Tree:
    """Move all leaves to the device; matrices in host memory move only after `after` is computed.

    XLA would copy whole arrays from the host when the program starts, and keep the copies. So matrices are copied in
    blocks of rows, in a loop that depends on `after`. Vectors, and matrices without such blocks, do not wait.
    """
    first_block = zero_after(after)

    def fetch_leaf(leaf: Any) -> Any:
        rows = math.gcd(leaf.shape[0], 4096) if leaf.ndim > 1 and leaf.size else 0
        if memory_space(leaf) == DEVICE or rows < 8 or not is_row_major(leaf.shape, leaf.dtype):
            return put(leaf, DEVICE)
        check_host_slices()

        def copy(i: Any, result: Any) -> Any:
            block = jax.lax.dynamic_slice_in_dim(leaf, i * rows, rows)
            return jax.lax.dynamic_update_slice_in_dim(result, row_major(put(block, DEVICE)), i * rows, 0)

        return jax.lax.fori_loop(first_block, leaf.shape[0] // rows, copy, jnp.zeros(leaf.shape, leaf.dtype))

    return jax.tree.map(fetch_leaf, tree)


def index_after(index: Any, dependencies: Tree) -> Any:
    """Return `index`; on a CPU, the result depends on every leaf of `dependencies`.

    In each iteration of a loop, XLA for CPUs copies an array that the loop carries, unless each write into the array
    depends on the reads of its old values. For TPUs and GPUs XLA finds an order without copies.
    """
    wait = jax.lax.platform_dependent(dependencies, cpu=zero_after, default=lambda _: jnp.int32(0))
    return index + wait


def is_tall(leaf: Any) -> bool:
    """Return whether a leaf is in a TPU's host memory, in tiles that the compiler cannot slice there."""
    is_tpu = traced_device().platform == "tpu"
    return is_tpu and memory_space(leaf) == HOST and has_tall_tiles(leaf.shape, leaf.dtype)


def warn_of_tall_tiles(leaves: Iterable[tuple[str, Any]]) -> None:
    """Warn of leaves, given with paths, in a TPU's host memory that cannot be streamed because of their tiles."""
    tall_leaves = [f"{path}: {leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves if is_tall(leaf)]
    if tall_leaves:
        listed = ", ".join(tall_leaves[:4]) + (f", … ({len(tall_leaves) - 4} more)" if len(tall_leaves) > 4 else "")
        warnings.warn(
            f"{listed}: not streamed from a TPU's host, because 8-bit and 4-bit arguments get tiles of 32 and 64 rows, "
            "which the compiler cannot slice there: the whole array is on the device\n"
            f"hint: set {LOW_TILES} in the environment before JAX starts, unless large 8-bit matrices are on the "
            "device, which then take more memory",
            PlacementWarning,
            stacklevel=3,
        )


def cut_block(
    prefix: Sequence[int], ndim: int, num_bytes: int, chunk_bytes: int, *, device_rows: int | None = None
) -> tuple[int, int] | None:
    """Return the axis along which blocks are cut, and their size on it; None for a single block, or if tiles forbid it.

    `prefix` holds the sizes of the leading axes that may be cut. A block has size 1 on the axes before the cut axis.
    `device_rows` is the number of rows of the largest tile if all arrays are on the device, else None.
    """
    if num_bytes <= chunk_bytes or not prefix:
        return None
    tiles = [slice_step(ndim, axis) for axis in range(len(prefix))]
    axis, row_bytes = 0, num_bytes / prefix[0]
    # Move the cut to the next axis while one row exceeds a block, but keep the last axis whole.
    while row_bytes > chunk_bytes and axis + 1 < min(len(prefix), ndim - 1) and not prefix[axis + 1] % tiles[axis + 1]:
        axis += 1
        row_bytes /= prefix[axis]
    length, tile = prefix[axis], tiles[axis]
    if device_rows is not None and ndim - axis == 2 and length > device_rows:
        tile = device_rows
    elif length % tile:
        return None
    target_size = min(max(int(chunk_bytes / row_bytes) // tile * tile, tile), length)
    if target_size == length and not axis:
        return None
    # A divisor of the axis saves the second loop over remaining rows. Sizes above half of `target_size` are tried.
    return axis, next((size for size in range(target_size, target_size // 2, -tile) if length % size == 0), target_size)
