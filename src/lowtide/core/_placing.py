"""Where arrays are put: along which axes of a mesh rows are divided, and how an array gets where a sharding says."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ._paths import is_key, key_numbers

BATCH_AXES = ("expert", "data", "fsdp")
"""The axes that rows of batches are divided along, where the mesh has them and nobody says otherwise. Experts come
first: a block that is mapped over them alone, by `jax.shard_map`, divides its rows so, and moves none."""
CONTEXT = "context"
"""The axis of a mesh that the tokens of each row are divided along, where there is one."""


def canonical(leaf: Any) -> np.ndarray:
    """Make an array NumPy's, of a dtype that JAX has."""
    array = np.asarray(leaf)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


def put(leaf: Any, sharding: Any) -> Any:
    """Put an array of which each process has the whole, or that is divided already, where a sharding says.

    Args:
        leaf: an array of JAX, also of random keys, or of NumPy, of which no buffer is shared.
        sharding: of all processes' devices.

    Memory:
        The parts of this process's devices; of NumPy's array, a copy while it is put.
    """
    if getattr(leaf, "sharding", None) == sharding:
        return leaf
    if jax.process_count() == 1:
        # On a CPU JAX may share NumPy's buffer: what is written there later would be in the weights.
        return jax.device_put(np.array(leaf) if isinstance(leaf, np.ndarray) else leaf, sharding)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    if is_key(leaf):
        return jax.random.wrap_key_data(put(key_numbers(leaf), sharding), impl=jax.random.key_impl(leaf))
    whole = canonical(leaf)
    # Not `device_put`: where each process has one device, JAX (to 0.12 at least) would make an array whose shards
    # cannot be read. Copies: on a CPU JAX may share NumPy's buffers, and what trains is consumed by the next step.
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: np.array(whole[index]))
