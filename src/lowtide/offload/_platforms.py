"""Make, read and write arrays in host memory, in the form that TPUs, GPUs and CPUs each need.

On all platforms a slice is cut in the memory that holds the array, and only the slice moves. In the other order, the
whole array would move. Inside a loop that carries the array, XLA writes the slice in place, in host and in device
memory.

| platform | needs | function |
|---|---|---|
| TPU | row-major slices: for others XLA changes the layout of the whole host array (libtpu 0.0.51) | `_move_entry` |
| TPU | tiles of 8 rows: 8- and 4-bit arguments with other tiles are copied whole (libtpu 0.0.51) | `is_tall` |
| TPU | reads with a data dependency: XLA would copy whole arrays when the program starts | `fetch`, `zero_after` |
| GPU | an XLA that slices host memory at the given index (jaxlib 0.11.1) | `check_host_slices` |
| GPU | zeros that are moved whole: broadcasting a scalar on the host would run there | `zero_buffer` |
| CPU | writes that depend on the reads before them: else each iteration copies the array | `index_after` |

Platform-specific forms are chosen here by `jax.lax.platform_dependent`, so callers need no cases.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..core import (
    LOW_TILES,
    PlacementWarning,
    Tree,
    check_host_slices,
    has_tall_tiles,
    is_key,
    is_row_major,
    memory_space,
    slice_step,
    traced_device,
    zero_after,
)
from ..core._compat import row_major

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
SPACES = {"host": HOST, "device": DEVICE}
"""Memory spaces by the words of a user's arguments."""


def read(tree: Tree, index: Any) -> Tree:
    """Read one entry of every leaf's leading axis to the device, without that axis; only the entry moves."""

    def read_leaf(leaf: Any) -> Any:
        # Slice first, in the memory of the array, so that only the slice moves.
        return jnp.reshape(_move_entry(jax.lax.dynamic_slice_in_dim(leaf, index, 1), leaf, DEVICE), leaf.shape[1:])

    return jax.tree.map(read_leaf, tree)


def write(tree: Tree, values: Tree, index: Any) -> Tree:
    """Replace one entry of every leaf's leading axis; every leaf stays in its memory.

    The new values are on the device and have the dtypes of `tree`.
    """

    def write_leaf(leaf: Any, value: Any) -> Any:
        entry = _move_entry(jnp.expand_dims(value, 0), leaf, memory_space(leaf))
        return jax.lax.dynamic_update_slice_in_dim(leaf, entry, index, 0)

    return jax.tree.map(write_leaf, tree, values)


def _move_entry(entry: Any, leaf: Any, space: Any) -> Any:
    """Move an entry from or to a leaf; on the device it has the row-major layout of the host array."""
    if HOST in (memory_space(leaf), space):
        check_host_slices()
    if memory_space(leaf) == DEVICE or not is_row_major(leaf.shape, leaf.dtype):
        return _put_leaf(entry, space)
    return row_major(_put_leaf(entry, space)) if space == DEVICE else _put_leaf(row_major(entry), space)


def entry_shape(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the shape of one entry of a leaf's leading axis."""
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)


def zero_buffer(like: Tree, leading: tuple[int, ...], space: Any) -> Tree:
    """Make zeros with more leading axes for every leaf of `like`, in a memory space, to write entries into.

    XLA allocates the zeros directly on the host. Broadcasting a scalar on the host works on a TPU too, but a GPU
    program would compute it on the host. Random keys stay on the device.
    """

    def make_leaf(leaf: Any) -> Any:
        zeros = jnp.zeros((*leading, *leaf.shape), leaf.dtype)
        return zeros if is_key(leaf) else _put_leaf(zeros, space)

    return jax.tree.map(make_leaf, like)


def put(tree: Tree, space: Any) -> Tree:
    """Move all leaves to one memory space; leaves that are already there stay unchanged."""
    return jax.tree.map(lambda leaf: _put_leaf(leaf, space), tree)


def fetch(tree: Tree, after: Tree) -> Tree:
    """Move all leaves to the device; host leaves move only after `after` is computed.

    XLA starts to copy whole arrays from the host when the program starts, and keeps the copies. So matrices are copied
    in blocks of rows, in a loop that depends on `after`.
    """
    first_block = zero_after(after)

    def fetch_leaf(leaf: Any) -> Any:
        rows = next(
            (n for n in (4096, 2048, 1024, 512, 256, 128, 64, 32, 16, 8) if leaf.shape and not leaf.shape[0] % n), 0
        )
        if memory_space(leaf) == DEVICE or leaf.ndim < 2 or not rows or not is_row_major(leaf.shape, leaf.dtype):
            return _put_leaf(leaf, DEVICE)

        check_host_slices()

        def copy(i: Any, result: Any) -> Any:
            block = jax.lax.dynamic_slice_in_dim(leaf, i * rows, rows)
            return jax.lax.dynamic_update_slice_in_dim(result, row_major(_put_leaf(block, DEVICE)), i * rows, 0)

        return jax.lax.fori_loop(first_block, leaf.shape[0] // rows, copy, jnp.zeros(leaf.shape, leaf.dtype))

    return jax.tree.map(fetch_leaf, tree)


def index_after(index: Any, dependencies: Tree) -> Any:
    """Make an index that on a CPU depends on every leaf of a tree.

    XLA for CPUs copies an array that a loop carries in each iteration. It avoids the copy only if the writes depend on
    the reads of old values. For TPUs and GPUs XLA finds such an order without help.
    """
    wait = jax.lax.platform_dependent(dependencies, cpu=zero_after, default=lambda _: jnp.int32(0))
    return index + wait


def is_tall(leaf: Any) -> bool:
    """Return whether a leaf is in a TPU's host memory, in tiles that its compiler cannot slice."""
    is_tpu = traced_device().platform == "tpu"
    return is_tpu and memory_space(leaf) == HOST and has_tall_tiles(leaf.shape, leaf.dtype)


def warn_of_tall_tiles(leaves: Iterable[tuple[str, Any]]) -> None:
    """Warn of leaves in a TPU's host memory that cannot be streamed because of their tiles; `leaves` have paths."""
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


def _put_leaf(leaf: Any, space: Any) -> Any:
    return leaf if memory_space(leaf) == space else jax.device_put(leaf, space)


def cut_block(
    prefix: Sequence[int], ndim: int, num_bytes: int, chunk_bytes: int, *, device_rows: int | None = None
) -> tuple[int, int] | None:
    """Choose the axis that a block cuts and its size along it; None if the rows form one block or cannot be cut.

    `prefix` holds the sizes of the leading axes that may be cut; a block has one row along axes before the cut. Along
    the last two axes, blocks are multiples of a TPU's tiles; eight long rows are one tile. `device_rows` are the rows
    of the largest tile if all arrays are on the device.
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
    # A divisor of the axis saves the second loop over remaining rows. Sizes down to half the wanted one are tried.
    return axis, next((size for size in range(target_size, target_size // 2, -tile) if length % size == 0), target_size)
