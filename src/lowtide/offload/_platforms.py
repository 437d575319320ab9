"""Make, read and write arrays in host memory, in the form that TPUs, GPUs and CPUs each need.

On all platforms a slice is cut in the memory that holds the array, and only the slice moves. In the other order, the
whole array would move. Inside a loop that carries the array, XLA writes the slice in place, in host and in device
memory.

| platform | needs | function |
|---|---|---|
| TPU | row-major slices: for others XLA changes the layout of the whole host array (libtpu 0.0.51) | `_moved` |
| TPU | tiles of 8 rows: it copies 8- and 4-bit arguments with other tiles whole (libtpu 0.0.51) | `warn_of_tall_tiles`
|
| TPU | reads with a data dependency: XLA would copy whole arrays when the program starts | `fetch`, `zero_after` |
| GPU | an XLA that slices host memory at the given index (jaxlib 0.11.1) | `check_host_slices` |
| GPU | zeros that are moved whole: broadcasting a scalar on the host would run there | `buffer` |
| CPU | a data dependency from reads to the writes after them: else each iteration copies the array | `later` |

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
    """Read one entry of every leaf's leading axis to the device.

    Args:
        tree: arrays or tracers.
        index: position of the entry.

    Returns:
        The entries, without that axis.

    Memory:
        One entry on the device.
    """

    def one(leaf: Any) -> Any:
        # Slice first, in the memory of the array, so that only the slice moves.
        return jnp.reshape(_moved(jax.lax.dynamic_slice_in_dim(leaf, index, 1), leaf, DEVICE), leaf.shape[1:])

    return jax.tree.map(one, tree)


def write(tree: Tree, values: Tree, index: Any) -> Tree:
    """Replace one entry of every leaf's leading axis.

    Args:
        tree: arrays or tracers on the host or on the device.
        values: the new entries, on the device, with the dtypes of `tree`.
        index: position of the entries.

    Returns:
        The tree with the entries replaced; every leaf stays in its memory.
    """

    def one(leaf: Any, value: Any) -> Any:
        entry = _moved(jnp.expand_dims(value, 0), leaf, memory_space(leaf))
        return jax.lax.dynamic_update_slice_in_dim(leaf, entry, index, 0)

    return jax.tree.map(one, tree, values)


def _moved(entry: Any, leaf: Any, space: Any) -> Any:
    """Move an entry from or to a leaf; on the device it has the row-major layout of the host array."""
    if HOST in (memory_space(leaf), space):
        check_host_slices()
    if memory_space(leaf) == DEVICE or not is_row_major(leaf.shape, leaf.dtype):
        return _to(entry, space)
    return row_major(_to(entry, space)) if space == DEVICE else _to(row_major(entry), space)


def entry_shape(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the shape of one entry of a leaf's leading axis."""
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)


def buffer(like: Tree, leading: tuple[int, ...], space: Any) -> Tree:
    """Make zeros to write entries into: for every leaf of `like` an array with more leading axes, in a memory space.

    XLA allocates the zeros directly on the host. Broadcasting a scalar on the host works on a TPU too, but a GPU
    program would compute it on the host. Random keys stay on the device.
    """

    def one(leaf: Any) -> Any:
        zeros = jnp.zeros((*leading, *leaf.shape), leaf.dtype)
        return zeros if is_key(leaf) else _to(zeros, space)

    return jax.tree.map(one, like)


def put(tree: Tree, space: Any) -> Tree:
    """Move all leaves to one memory space; leaves that are already there stay unchanged."""
    return jax.tree.map(lambda leaf: _to(leaf, space), tree)


def fetch(tree: Tree, after: Tree) -> Tree:
    """Move all leaves to the device; host leaves move only after `after` is computed.

    XLA starts to copy whole arrays from the host when the program starts, and keeps the copies. So matrices are copied
    in blocks of rows, in a loop that depends on `after`.
    """
    begin = zero_after(after)

    def one(leaf: Any) -> Any:
        rows = next(
            (n for n in (4096, 2048, 1024, 512, 256, 128, 64, 32, 16, 8) if leaf.shape and not leaf.shape[0] % n), 0
        )
        if memory_space(leaf) == DEVICE or leaf.ndim < 2 or not rows or not is_row_major(leaf.shape, leaf.dtype):
            return _to(leaf, DEVICE)

        check_host_slices()

        def copy(i: Any, made: Any) -> Any:
            block = jax.lax.dynamic_slice_in_dim(leaf, i * rows, rows)
            return jax.lax.dynamic_update_slice_in_dim(made, row_major(_to(block, DEVICE)), i * rows, 0)

        return jax.lax.fori_loop(begin, leaf.shape[0] // rows, copy, jnp.zeros(leaf.shape, leaf.dtype))

    return jax.tree.map(one, tree)


def later(index: Any, after: Tree) -> Any:
    """Make an index that on a CPU depends on every leaf of a tree.

    XLA for CPUs copies an array that a loop carries in each iteration. It avoids the copy only if the writes depend on
    the reads of old values. For TPUs and GPUs XLA finds such an order without help.
    """
    wait = jax.lax.platform_dependent(after, cpu=zero_after, default=lambda _: jnp.int32(0))
    return index + wait


def is_tall(leaf: Any) -> bool:
    """Return whether a leaf is in a TPU's host memory, in tiles that its compiler cannot slice."""
    is_tpu = traced_device().platform == "tpu"
    return is_tpu and memory_space(leaf) == HOST and has_tall_tiles(leaf.shape, leaf.dtype)


def warn_of_tall_tiles(leaves: Iterable[tuple[str, Any]]) -> None:
    """Warn of leaves in a TPU's host memory that cannot be streamed because of their tiles.

    Args:
        leaves: paths, and arrays or tracers.

    Warns:
        PlacementWarning: naming the leaves, and the setting that helps.
    """
    found = [f"{path}: {leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves if is_tall(leaf)]
    if found:
        listed = ", ".join(found[:4]) + (f", … ({len(found) - 4} more)" if len(found) > 4 else "")
        warnings.warn(
            f"{listed}: not streamed from a TPU's host, because arguments of 8 and 4 bits get tiles of 32 and 64 rows, "
            "of which the compiler takes no slices there: all of such an array is on the device\n"
            f"hint: set {LOW_TILES} in the environment before JAX starts, where no large matrices of 8 bits are on the "
            "device, which take more room then",
            PlacementWarning,
            stacklevel=3,
        )


def _to(leaf: Any, space: Any) -> Any:
    return leaf if memory_space(leaf) == space else jax.device_put(leaf, space)


def cut_block(
    prefix: Sequence[int], ndim: int, num_bytes: int, chunk_bytes: int, *, device_rows: int | None = None
) -> tuple[int, int] | None:
    """Choose the axis that a block cuts, and its size along it.

    Args:
        prefix: sizes of the leading axes that may be cut. Along the axes before the cut, a block has one row.
        ndim: rank of the arrays.
        num_bytes: bytes of all rows.
        chunk_bytes: wanted bytes of a block.
        device_rows: if all arrays are on the device, the rows of their largest tile. Blocks are multiples of it; the
            remainder need not be.

    Returns:
        Axis and size, or None if the rows form one block or cannot be cut. Along the last two axes, the axis and its
        blocks have to be multiples of a TPU's tiles; eight long rows are one tile. Among sizes near the wanted one, a
        divisor of the axis is preferred.
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
    wanted = min(max(int(chunk_bytes / row_bytes) // tile * tile, tile), length)
    if wanted == length and not axis:
        return None
    # A divisor of the axis saves the second loop over remaining rows. Sizes down to half the wanted one are tried.
    return axis, next((size for size in range(wanted, wanted // 2, -tile) if length % size == 0), wanted)
