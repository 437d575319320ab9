"""Memory spaces: whether a leaf is on the device or on its host.

JAX has two notions. Concrete arrays and shape structs carry a sharding with a memory kind (``device``, ``pinned_host``,
``unpinned_host``). Tracers carry a `jax.memory.Space` in their type. This module reads both.
"""

from __future__ import annotations

from typing import Any, NoReturn

import jax
from jax.core import Tracer

from ._errors import StructureError


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
        "a parameter in host memory is differentiated by a function that only reads it",
        expected="parameters on the device",
        hint="lt.offload.scan and lt.offload.layerwise_step differentiate layers in host memory",
    )
