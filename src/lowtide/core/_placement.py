"""Placement of arrays: their memory spaces, putting them onto shardings, and assembling them piece by piece.

JAX has two notions of memory. Concrete arrays and shape structs carry a sharding with a memory kind (``device``,
``pinned_host``, ``unpinned_host``). Tracers carry a `jax.memory.Space` in their type. `memory_space` reads both.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ._errors import StructureError
from ._paths import is_key, key_numbers

PIECE_BYTES = 64 * 1024**2
"""The most bytes that are read or written at once, unless one row of a tensor has more."""
Pieces = Iterator[tuple[tuple[int, ...], np.ndarray]]
"""Pieces of a part of an array, each with its start within that part."""
Reader = Callable[[tuple[slice, ...]], Pieces]
"""Function that reads a part of an array, given by a start and an end along every axis, in pieces that cover it."""


def memory_space(leaf: Any) -> jax.memory.Space:  # pyright: ignore[reportInvalidTypeForm]
    """Return the memory space of one leaf.

    Args:
        leaf: an array, a tracer, a `jax.ShapeDtypeStruct`, or anything else that a tree may hold.

    Returns:
        `jax.memory.Space.Host` or `jax.memory.Space.Device`. Leaves without a space (a NumPy array, a number, a shape
        struct without a sharding) count as device, because JAX puts them there.

    Examples:
        >>> memory_space(jax.numpy.ones(3)) == jax.memory.Space.Device
        True
    """
    if isinstance(leaf, Tracer):
        return jax.typeof(leaf).memory_space
    return jax.memory.Space.Host if on_host(getattr(leaf, "sharding", None)) else jax.memory.Space.Device


def on_host(sharding: Any) -> bool:
    """Return whether a sharding (or None) puts arrays in host memory."""
    return "host" in (getattr(sharding, "memory_kind", None) or "")


def on_device(tree: Any) -> Any:
    """Move the host-memory leaves of a tree to the device; a derivative with respect to one is a `StructureError`."""
    return jax.tree.map(
        lambda leaf: _move_to_device(leaf) if memory_space(leaf) == jax.memory.Space.Host else leaf, tree
    )


@jax.custom_jvp
def _move_to_device(leaf: Any) -> Any:
    return jax.device_put(leaf, jax.memory.Space.Device)


@_move_to_device.defjvp
def _refuse_derivative(*_: Any) -> NoReturn:  # pyright: ignore[reportUnusedFunction]
    raise StructureError(
        "a parameter in host memory is differentiated, but this function can only read it",
        expected="parameters on the device",
        hint="use lt.offload.scan or lt.offload.layerwise_step, which differentiate layers in host memory",
    )


def canonical(leaf: Any) -> np.ndarray:
    """Convert an array to NumPy, in a dtype that JAX has."""
    array = np.asarray(leaf)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


def put(leaf: Any, sharding: Any) -> Any:
    """Put an array on a sharding; each process has the whole array, or the array is sharded already.

    Args:
        leaf: a JAX array (random keys included) or a NumPy array, whose buffer is not shared.
        sharding: a sharding over the devices of all processes.

    Memory:
        The parts of this process's devices; for a NumPy array also a copy during the transfer.
    """
    if getattr(leaf, "sharding", None) == sharding:
        return leaf
    if jax.process_count() == 1:
        # On a CPU JAX may share NumPy's buffer, and later writes to it would change the weights: copy.
        return jax.device_put(np.array(leaf) if isinstance(leaf, np.ndarray) else leaf, sharding)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    if is_key(leaf):
        return jax.random.wrap_key_data(put(key_numbers(leaf), sharding), impl=jax.random.key_impl(leaf))
    array = canonical(leaf)
    # Not `device_put`: if each process has one device, JAX (to 0.12 at least) would make an array whose shards cannot
    # be read. The parts are copies: on a CPU JAX may share NumPy's buffers, and the next step consumes trainable
    # arrays.
    return jax.make_array_from_callback(array.shape, sharding, lambda index: np.array(array[index]))


def assemble(read: Reader, shape: tuple[int, ...], dtype: Any, sharding: jax.sharding.Sharding | None) -> jax.Array:
    """Make an array from pieces, on the devices of its sharding.

    A device's part of the array starts as zeros there and is overwritten in place by pieces. Each piece is read, sent
    and freed before the next one. So the host holds a few pieces in addition to the placed arrays, even if the device
    is the CPU. An array in the host memory of a device is read as a whole, since only its device could write into it.
    Known inefficiency: reading waits until the previous piece is sent.

    Args:
        read: returns the pieces of a part, in this dtype.
        shape: shape of the array.
        dtype: dtype of the array.
        sharding: sharding of the array, or None for JAX's default device.

    Returns:
        The array. This process reads only what its own devices hold.

    Memory:
        On the host: the pieces that `read` holds, and a copy of one. For an array in host memory (`is_staged`) instead
        what one device holds of it.
    """
    full_index = tuple(slice(0, size) for size in shape)
    if sharding is None:
        return _fill_part(read, full_index, dtype, [None])[0]
    devices_by_part: dict[tuple[tuple[int, int], ...], list[Any]] = {}  # a part that several devices hold is read once
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounded = _bound_index(index or (), shape)
        devices_by_part.setdefault(tuple((axis.start, axis.stop) for axis in bounded), []).append(device)
    kind = sharding.memory_kind
    parts: list[jax.Array] = []
    for bounds, devices in devices_by_part.items():
        shardings = [jax.sharding.SingleDeviceSharding(device, memory_kind=kind) for device in devices]
        parts += _fill_part(read, tuple(slice(*bound) for bound in bounds), dtype, shardings)
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        return parts[0]  # JAX (0.10 at least) would give the assembled array a type in device memory
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def is_staged(sharding: jax.sharding.Sharding) -> bool:
    """Return whether a leaf is assembled as a whole before it is placed: host memory is not written in place."""
    return sharding.memory_kind == "pinned_host"


def _fill_part(
    read: Reader,
    index: tuple[slice, ...],
    dtype: Any,
    shardings: Sequence[jax.sharding.Sharding | None],
) -> list[jax.Array]:
    """Make a part of an array on each of several shardings."""
    shape = tuple(axis.stop - axis.start for axis in index)
    is_small = math.prod(shape) * jnp.dtype(dtype).itemsize <= PIECE_BYTES  # one transfer, and nothing to compile
    if is_small or any(target is not None and is_staged(target) for target in shardings):
        host_array = _read_to_host(read, index, dtype)
        arrays = [
            jnp.asarray(host_array) if target is None else jax.device_put(host_array, target) for target in shardings
        ]
        return jax.block_until_ready(arrays)
    arrays = [jnp.zeros(shape, dtype, device=target) for target in shardings]
    for start, values in read(index):
        arrays = [_write_piece(array, values, tuple(np.int32(i) for i in start)) for array in arrays]
        jax.block_until_ready(arrays)  # otherwise pieces queue up on the host
    return arrays


def _read_to_host(read: Reader, index: tuple[slice, ...], dtype: Any) -> np.ndarray:
    """Read a part of an array into host memory."""
    array = np.empty(tuple(axis.stop - axis.start for axis in index), dtype)
    for start, values in read(index):
        array[tuple(slice(i, i + size) for i, size in zip(start, values.shape, strict=True))] = values
    return array


@functools.partial(jax.jit, donate_argnums=0)
def _write_piece(array: Any, piece: Any, start: tuple[Any, ...]) -> Any:
    return jax.lax.dynamic_update_slice(array, piece, start)


def _bound_index(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Give every axis of an index a start and an end."""
    full = (*index, *(slice(None) for _ in shape[len(index) :]))
    return tuple(slice(*axis.indices(size)[:2]) for axis, size in zip(full, shape, strict=True))
