"""Placement of arrays: memory spaces, shardings, assembly from pieces, and mesh axes of activations and tokens.

JAX has two notions of memory. Concrete arrays and shape structs carry a sharding with a memory kind (``device``,
``pinned_host``, ``unpinned_host``). Tracers carry a `jax.memory.Space` in their type. `memory_space` reads both.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ._errors import StructureError
from ._paths import Tree, is_key, key_numbers

PIECE_BYTES = 64 * 1024**2
"""The most bytes of a tensor that are read or written at once, unless one row of the tensor has more."""
Pieces = Iterator[tuple[tuple[int, ...], np.ndarray]]
"""Iterator over ``(start, values)`` of the pieces of a part of an array; `start` is an index within that part."""
Reader = Callable[[tuple[slice, ...]], Pieces]
"""Function from an index (a slice with start and stop for every axis) to pieces that cover that part of an array."""
BATCH_AXES = ("expert", "data", "fsdp")
"""Mesh axes along which rows of batches are sharded by default, where the mesh has them. `expert` comes first, so
it is the outermost axis: a `jax.shard_map` over it alone then moves no rows between devices."""
CONTEXT = "context"
"""Mesh axis along which the tokens of each row are sharded, where the mesh has it."""
_constrain: contextvars.ContextVar[Callable[[Any], Any]] = contextvars.ContextVar("constrain", default=lambda h: h)
_mesh: contextvars.ContextVar[Any] = contextvars.ContextVar("mesh", default=None)


def memory_space(leaf: Any) -> jax.memory.Space:  # pyright: ignore[reportInvalidTypeForm]
    """Return the memory space of an array, a tracer, a `jax.ShapeDtypeStruct`, or anything else that a tree may hold.

    Leaves without a space (a NumPy array, a number, a shape struct without a sharding) count as device, because JAX
    puts them there.

    Examples:
        >>> memory_space(jax.numpy.ones(3)) == jax.memory.Space.Device
        True
    """
    # From JAX 0.12, structs of `jax.eval_shape` keep a memory space without a sharding.
    if isinstance(leaf, Tracer) or (isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None):
        return jax.typeof(leaf).memory_space
    return jax.memory.Space.Host if on_host(getattr(leaf, "sharding", None)) else jax.memory.Space.Device


def on_host(sharding: Any) -> bool:
    """Return whether a sharding (or None) puts arrays in host memory."""
    return "host" in (getattr(sharding, "memory_kind", None) or "")


def on_device(tree: Any) -> Any:
    """Move the host-memory leaves of a tree to the device; differentiating one of them raises `StructureError`."""
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
        hint="use lt.offload.scan or lt.offload.layerwise_step, which differentiate layers in host memory",
    )


def canonical_array(leaf: Any) -> np.ndarray:
    """Convert an array to NumPy, in the dtype that JAX would give it: without x64, 32 bits instead of 64."""
    array = np.asarray(leaf)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


def put(leaf: Any, sharding: Any) -> Any:
    """Place an array with a sharding; every process must hold the whole array, unless it is already sharded.

    Args:
        leaf: a JAX array (random keys included) or a NumPy array, which is copied.
        sharding: a sharding over the devices of all processes.

    Memory:
        The shards on this process's devices. For a NumPy array, the host also holds a copy during the transfer.
    """
    if getattr(leaf, "sharding", None) == sharding:
        return leaf
    if jax.process_count() == 1:
        # Copy: on a CPU JAX may share NumPy's buffer, and later writes to that buffer would change the array.
        return jax.device_put(np.array(leaf) if isinstance(leaf, np.ndarray) else leaf, sharding)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    if is_key(leaf):
        return jax.random.wrap_key_data(put(key_numbers(leaf), sharding), impl=jax.random.key_impl(leaf))
    array = canonical_array(leaf)
    # Not `device_put`: if each process has one device, JAX (to 0.12 at least) would make an array whose shards cannot
    # be read. The parts are copies: on a CPU JAX may share NumPy's buffers, and a step may donate the array.
    return jax.make_array_from_callback(array.shape, sharding, lambda index: np.array(array[index]))


def assemble(read: Reader, shape: tuple[int, ...], dtype: Any, sharding: jax.sharding.Sharding | None) -> jax.Array:
    """Make an array from pieces, on the devices of its sharding.

    A device's part of the array starts as zeros there and is overwritten in place by pieces. Each piece is read, sent
    and freed before the next one. So the host holds a few pieces in addition to the placed arrays, even if the device
    is the CPU. A part is read as a whole if it has at most `PIECE_BYTES`, or is in pinned host memory (only a program
    on the device could write pieces there). Known inefficiency: reading waits until the previous piece is sent.

    Args:
        read: a function that returns the pieces of a part, in `dtype`. Its argument has a slice for each axis.
        shape: shape of the array.
        dtype: dtype of the array.
        sharding: sharding of the array, or None for JAX's default device.

    Returns:
        The array. This process reads only what its own devices hold.

    Memory:
        On the host: the pieces that `read` holds, and a copy of one piece. For pinned host memory (`is_staged`): one
        device's part, in addition to the result.
    """
    full_index = tuple(slice(0, size) for size in shape)
    if sharding is None:
        return _fill_part(read, full_index, dtype, [None])[0]
    devices_by_part: dict[tuple[tuple[int, int], ...], list[Any]] = {}  # a part that several devices hold is read once
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        axes = zip(index or full_index, shape, strict=True)
        devices_by_part.setdefault(tuple(axis.indices(size)[:2] for axis, size in axes), []).append(device)
    kind = sharding.memory_kind
    parts: list[jax.Array] = []
    for bounds, devices in devices_by_part.items():
        shardings = [jax.sharding.SingleDeviceSharding(device, memory_kind=kind) for device in devices]
        parts += _fill_part(read, tuple(slice(*bound) for bound in bounds), dtype, shardings)
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        return parts[0]  # JAX (0.10 at least) would give the assembled array a type in device memory
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def is_staged(sharding: jax.sharding.Sharding) -> bool:
    """Return whether `assemble` reads even large parts as a whole, because it cannot write into pinned host memory."""
    return sharding.memory_kind == "pinned_host"


def _fill_part(
    read: Reader, index: tuple[slice, ...], dtype: Any, shardings: Sequence[jax.sharding.Sharding | None]
) -> list[jax.Array]:
    """Read a part of an array once, and place it with each of several shardings (None: the default device)."""
    shape = tuple(axis.stop - axis.start for axis in index)
    is_small = math.prod(shape) * jnp.dtype(dtype).itemsize <= PIECE_BYTES  # one transfer, and nothing to compile
    if is_small or any(target is not None and is_staged(target) for target in shardings):
        host_array = np.empty(shape, dtype)
        for start, values in read(index):
            host_array[tuple(slice(i, i + size) for i, size in zip(start, values.shape, strict=True))] = values
        arrays = [
            jnp.asarray(host_array) if target is None else jax.device_put(host_array, target) for target in shardings
        ]
        return jax.block_until_ready(arrays)
    arrays = [jnp.zeros(shape, dtype, device=target) for target in shardings]
    for start, values in read(index):
        arrays = [_write_piece(array, values, tuple(np.int32(i) for i in start)) for array in arrays]
        jax.block_until_ready(arrays)  # otherwise pieces queue up on the host
    return arrays


@functools.partial(jax.jit, donate_argnums=0)
def _write_piece(array: Any, piece: Any, start: tuple[Any, ...]) -> Any:
    return jax.lax.dynamic_update_slice(array, piece, start)


# --- Sharded activations and tokens -----------------------------------------------------------------------------------
#
# Functions that cut sequences into pieces are mapped over each device's own tokens (`map_token_shards`). On an array of
# all tokens the compiler would gather the tokens, and sum gradients of weights over the devices, once for every piece.
#
# `jax.make_mesh` makes explicit axes by default. On them every operation derives the sharding of its result from its
# operands, or raises. Most operations raise if a device's part of a sequence ends inside of a block, or if a loop
# starts from zeros. So blocks and loops are computed as on a mesh with automatic axes, and the sharding of the result
# is set at the end (`without_explicit_axes`).


@contextlib.contextmanager
def activation_sharding(constrain: Callable[[Any], Any], mesh: Any = None) -> Generator[None]:
    """Constrain, inside the ``with`` block, the sharding of the activations between layers of a traced stack.

    If weights are sharded and activations have no constraint, XLA may gather the activations instead of one layer's
    weights. Every device then computes all rows.

    Args:
        constrain: a function that returns activations with a sharding constraint.
        mesh: device mesh for `traced_mesh`; attention and MoE layers map over it with `jax.shard_map`.
    """
    tokens = _constrain.set(constrain), _mesh.set(mesh)
    try:
        yield
    finally:
        _constrain.reset(tokens[0])
        _mesh.reset(tokens[1])


def activation_constraint() -> Callable[[Any], Any]:
    """Return the function `constrain` of the surrounding `activation_sharding` block, or the identity outside of it."""
    return _constrain.get()


def traced_mesh() -> Any:
    """Return the mesh of the traced code: the current mesh of JAX, else that of `activation_sharding`, else None."""
    current = jax.sharding.get_abstract_mesh()
    return _mesh.get() if current.empty else current


def num_shards_along(axis: str) -> int:
    """Return the number of shards into which the compiler cuts traced arrays along an axis of `traced_mesh`.

    It is 1 if the mesh lacks the axis. It is also 1 inside of a `jax.shard_map` over the axis, where arrays are local.
    """
    mesh = traced_mesh()
    return 1 if mesh is None or axis in getattr(mesh, "manual_axes", ()) else mesh.shape.get(axis, 1)


def num_token_shards(length: int, arrays: Tree) -> int:
    """Return the number of shards of the token axis; 1 if the `length` tokens of a row cannot be split evenly.

    It is also 1 if one of `arrays` is on a mesh with explicit axes.
    """
    size = num_shards_along(CONTEXT)
    return 1 if size == 1 or length % size or explicit_mesh(arrays) is not None else size


def map_token_shards(
    fn: Callable[[Tree, Tree], Tree], whole: Tree, tokens: Tree, *, axis: int = 1, out_axis: int = 1
) -> Any:
    """Call ``fn(whole, tokens)`` on each device's shard of the tokens.

    Args:
        fn: a function of `whole` and of one shard of `tokens`.
        whole: arrays replicated over the devices. Their gradients are summed over the devices once per call.
        tokens: arrays whose token axis is sharded.
        axis: the token axis of `tokens`.
        out_axis: the sharded axis of the results.
    """
    # Without `jax.jit`, a `jax.shard_map` cannot map over only some axes of a mesh (jax 0.10.2).
    mapped = jax.jit(
        jax.shard_map(
            fn,
            mesh=traced_mesh(),
            in_specs=(jax.P(), jax.P(*[None] * axis, CONTEXT)),
            out_specs=jax.P(*[None] * out_axis, CONTEXT),
            axis_names={CONTEXT},
            check_vma=False,
        )
    )
    return mapped(whole, tokens)


def explicit_mesh(tree: Any) -> Any:
    """Return the mesh of the first leaf of a tree that is on a mesh with explicit axes, or None."""
    meshes = (jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves(tree))
    return next((mesh for mesh in meshes if mesh.explicit_axes), None)


def without_explicit_axes(fn: Callable[..., Any], shardings: Callable[[Any], Any], *args: Any) -> Any:
    """Call a function of trees of arrays on a mesh with explicit axes as if the axes were automatic.

    `shardings` maps the mesh to the shardings of the results. It is called only if there are explicit axes.
    """
    mesh = explicit_mesh(args)
    if mesh is None:
        return fn(*args)
    return jax.sharding.auto_axes(fn, axes=mesh.explicit_axes, out_sharding=shardings(mesh))(*args)


def lookup_sharding(mesh: Any, ids: Any, table: Any) -> Any:
    """Return the sharding of looked-up rows: that of the ids, then that of the columns unless both use one axis."""
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
    """Replace each leaf of a tree by the sharding in its type."""
    return jax.tree.map(lambda leaf: jax.typeof(leaf).sharding, tree)
