"""Placement of arrays: mesh axes along which batches are sharded, and putting an array onto a sharding."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ._paths import is_key, key_numbers

BATCH_AXES = ("expert", "data", "fsdp")
"""Mesh axes along which rows of batches are sharded by default, where the mesh has them. `expert` comes first, so that
a block that `jax.shard_map` maps over experts alone finds its rows sharded the same way and moves none."""
CONTEXT = "context"
"""Mesh axis along which the tokens of each row are sharded, where the mesh has it."""


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
