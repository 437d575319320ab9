"""What each of several devices has of arrays that they divide, and in which dtype sums are kept."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ..core import BATCH_AXES, divided_along


def wide_of(dtype: Any) -> Any:
    """Return float32, or float64 of numbers that have it."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def divided_sizes(batch: int, heads: int) -> tuple[int, int]:
    """Return how many rows and heads one device has of all, where a mesh is known that divides them."""
    for name in BATCH_AXES:
        batch = _part(batch, divided_along(name))
    return batch, _part(heads, divided_along("tensor"))


def _part(whole: int, size: int) -> int:
    """Return what a device has of an axis, which is divided evenly or not at all."""
    return whole if whole % size else whole // size
