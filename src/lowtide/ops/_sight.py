"""Settings of attention in addition to queries, keys and values: which keys a query sees, and how scores are computed.

Shapes: B batch, T queries, S keys, N query heads.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

Implementation = Literal["cudnn", "splash", "blocks", "xla"]
"""Name of an implementation of attention."""


@dataclasses.dataclass(frozen=True)
class Sight:
    """Which keys a query sees: its own and those before it, within its window and its segment."""

    window: int | Array | None = None
    """The number of visible keys, the query's own included; a traced number if layers differ."""
    segments: tuple[Array, Array] | None = None
    """Integers of queries [B, T] and of keys [B, S]; a query sees keys with its own number."""
    start: int | Array = 0
    """Index of the first query among the keys."""
    causal: bool = True
    """Whether a query sees no key after its own."""

    @property
    def is_static(self) -> bool:
        """Whether the mask is known at trace time, so that kernels need no mask array."""
        return self.segments is None and not isinstance(self.window, jax.Array) and isinstance(self.start, int)

    def mask(self, num_queries: int, num_keys: int) -> Array:
        """Return booleans of shape [B or 1, 1, T, S], True where a query sees a key."""
        distance_TS = (jnp.arange(num_queries) + self.start)[:, None] - jnp.arange(num_keys)[None]
        visible = distance_TS >= 0 if self.causal else jnp.ones(distance_TS.shape, bool)
        if self.window is not None:
            visible &= distance_TS < self.window
        visible = visible[None, None]
        if self.segments is not None:
            query_segments, key_segments = self.segments
            visible = visible & (query_segments[:, None, :, None] == key_segments[:, None, None, :])
        return visible


@dataclasses.dataclass(frozen=True)
class Scores:
    """How scores are computed from the products of queries and keys."""

    scale: float
    """Factor of the products; the program may compute it."""
    soft_cap: float | None = None
    """Soft cap: scores become ``soft_cap * tanh(scores / soft_cap)``."""
    sinks: Array | None = None
    """For each head the score of a sink, a key without a value, shape [N]."""

    @property
    def is_plain(self) -> bool:
        """Whether `jax.nn.dot_product_attention` can compute these scores."""
        return self.soft_cap is None and self.sinks is None
