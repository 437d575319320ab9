"""Sizes of one device's part of sharded arrays, and the dtype in which sums are kept."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ..core import BATCH_AXES, num_shards_along


def wide_dtype(dtype: Any) -> Any:
    """Return float64 for float64, and float32 for any other dtype."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def local_sizes(batch: int, heads: int) -> tuple[int, int]:
    """Return how many of all rows and heads one device has, if a mesh that shards them is known."""
    for name in BATCH_AXES:
        batch = _local_size(batch, num_shards_along(name))
    return batch, _local_size(heads, num_shards_along("tensor"))


def _local_size(total: int, num_parts: int) -> int:
    """Return one device's part of an axis; an axis that does not divide evenly is not sharded."""
    return total if total % num_parts else total // num_parts
