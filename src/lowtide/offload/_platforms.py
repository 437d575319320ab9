"""How arrays on the host are made, read, written and waited for, in the form that TPUs, GPUs and CPUs each need.

On all of them a slice is cut in the memory that holds the array and only the slice is moved; the other order would move
the array. Inside a loop that carries the array, XLA writes the slice in place, in host memory as on the device.

| platform | needs | where |
|---|---|---|
| TPU | row-major slices: of others XLA lays out the whole host array anew (libtpu 0.0.51) | `_moved` |
| TPU | tiles of 8 rows: of arguments in 8 and 4 bits with others it copies all (libtpu 0.0.51) | `warn_of_tall_tiles` |
| TPU | reading that waits by data: XLA would copy whole arrays as the program begins | `fetch`, `zero_after` |
| GPU | an XLA that takes slices of host memory at the index that is given (jaxlib 0.11.1) | `check_host_slices` |
| GPU | zeros that are moved as a whole: a scalar that is broadcast on the host would be computed there | `buffer` |
| CPU | reading that comes before what overwrites, by data: else each iteration copies the array | `later` |

A platform that needs another form gets it here, by `jax.lax.platform_dependent`; who streams does not ask for it.
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
"""By the words for them in a user's arguments."""


def read(tree: Tree, index: Any) -> Tree:
    """One entry of every leaf's leading axis, on the device.

    Args:
        tree: arrays or tracers.
        index: its position.

    Returns:
        The entries, without that axis.

    Memory:
        One entry on the device.
    """

    def one(leaf: Any) -> Any:
        return jnp.reshape(_moved(jax.lax.dynamic_slice_in_dim(leaf, index, 1), leaf, DEVICE), leaf.shape[1:])

    return jax.tree.map(one, tree)


def write(tree: Tree, values: Tree, index: Any) -> Tree:
    """Replace one entry of every leaf's leading axis.

    Args:
        tree: arrays or tracers on the host or on the device.
        values: the new entries, on the device, of the dtypes of `tree`.
        index: their position.

    Returns:
        The tree with the entries replaced, every leaf in the memory where it was.
    """

    def one(leaf: Any, value: Any) -> Any:
        entry = _moved(jnp.expand_dims(value, 0), leaf, memory_space(leaf))
        return jax.lax.dynamic_update_slice_in_dim(leaf, entry, index, 0)

    return jax.tree.map(one, tree, values)


def _moved(entry: Any, leaf: Any, space: Any) -> Any:
    """Move an entry of a leaf, or for one, to another memory; on the device laid out as the leaf is on the host."""
    if HOST in (memory_space(leaf), space):
        check_host_slices()
    if memory_space(leaf) == DEVICE or not is_row_major(leaf.shape, leaf.dtype):
        return _to(entry, space)
    return row_major(_to(entry, space)) if space == DEVICE else _to(row_major(entry), space)


def entry_shape(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the shape of one entry of a leaf's leading axis."""
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)


def buffer(like: Tree, leading: tuple[int, ...], space: Any) -> Tree:
    """Zeros to write entries into: for every leaf of `like` an array with more leading axes, in a memory space.

    XLA allocates them on the host at once. A scalar that is broadcast there would do for a TPU, too; GPUs would compute
    it on the host. Random keys stay on the device.
    """

    def one(leaf: Any) -> Any:
        zeros = jnp.zeros((*leading, *leaf.shape), leaf.dtype)
        return zeros if is_key(leaf) else _to(zeros, space)

    return jax.tree.map(one, like)


def put(tree: Tree, space: Any) -> Tree:
    """All leaves in one memory space; those that are there already stay as they are."""
    return jax.tree.map(lambda leaf: _to(leaf, space), tree)


def fetch(tree: Tree, after: Tree) -> Tree:
    """All leaves on the device, those from the host not before `after` has been computed.

    XLA begins to copy whole arrays from the host as soon as the program begins, and keeps them; so matrices are copied
    a block of rows at a time, in a loop that waits for `after`.
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
    """Make an index that a CPU knows only when every leaf of a tree has been computed.

    Of an array that a loop carries, XLA for CPUs makes a copy at each iteration, of all of it, unless whatever reads
    old values comes before what overwrites them, by data. For TPUs and GPUs it finds such an order by itself.
    """
    wait = jax.lax.platform_dependent(after, cpu=zero_after, default=lambda _: jnp.int32(0))
    return index + wait


def is_tall(leaf: Any) -> bool:
    """Whether a leaf is in a TPU's host memory, in tiles that its compiler takes no slices of."""
    is_tpu = traced_device().platform == "tpu"
    return is_tpu and memory_space(leaf) == HOST and has_tall_tiles(leaf.shape, leaf.dtype)


def warn_of_tall_tiles(leaves: Iterable[tuple[str, Any]]) -> None:
    """Warn of leaves in a TPU's host memory that it does not stream, as the compiler lays them out.

    Args:
        leaves: paths, and arrays or tracers.

    Warns:
        PlacementWarning: naming the leaves, and what to set.
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
    """Which axis a block cuts, and its size along it.

    Args:
        prefix: the leading axes that may be cut. Along those before the cut a block has one row.
        ndim: the rank of the arrays.
        num_bytes: bytes of all rows.
        chunk_bytes: bytes wanted in a block.
        device_rows: where all of them are on the device, rows of their largest tile: blocks are multiples of it, and
            what is left need not be.

    Returns:
        Axis and size, or None when the rows are one block, or cannot be cut: along the last two axes the axis and its
        blocks have to be multiples of a TPU's tiles, and eight long rows are one tile. Of sizes near the wanted one,
        one that divides the axis is taken.
    """
    if num_bytes <= chunk_bytes or not prefix:
        return None
    tiles = [slice_step(ndim, axis) for axis in range(len(prefix))]
    axis, row_bytes = 0, num_bytes / prefix[0]
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
    return axis, next((size for size in range(wanted, wanted // 2, -tile) if length % size == 0), wanted)
