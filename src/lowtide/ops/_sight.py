"""What attention is told beside queries, keys and values: which keys a query sees, and what becomes of scores.

Shapes: B batch, T queries, S keys, N query heads.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

Implementation = Literal["cudnn", "splash", "blocks", "xla"]
"""Who computes attention."""


@dataclasses.dataclass(frozen=True)
class Sight:
    """Which keys a query sees: those before it and itself, in its window, of its segment."""

    window: int | Array | None = None
    """How many, itself included; a traced number where layers differ."""
    segments: tuple[Array, Array] | None = None
    """Integers of queries [B, T] and of keys [B, S]; those that are equal see each other."""
    start: int | Array = 0
    """Index of the first query among the keys."""
    causal: bool = True
    """Whether keys that come after a query are not seen."""

    @property
    def is_static(self) -> bool:
        """Whether kernels know by themselves what is seen."""
        return self.segments is None and not isinstance(self.window, jax.Array) and isinstance(self.start, int)

    def mask(self, num_queries: int, num_keys: int) -> Array:
        """Booleans of shape [B or 1, 1, T, S]."""
        distance_TS = (jnp.arange(num_queries) + self.start)[:, None] - jnp.arange(num_keys)[None]
        seen = distance_TS >= 0 if self.causal else jnp.ones(distance_TS.shape, bool)
        if self.window is not None:
            seen &= distance_TS < self.window
        seen = seen[None, None]
        if self.segments is not None:
            of_queries, of_keys = self.segments
            seen = seen & (of_queries[:, None, :, None] == of_keys[:, None, None, :])
        return seen


@dataclasses.dataclass(frozen=True)
class Scores:
    """What becomes of the products of queries and keys."""

    scale: float
    """What they are multiplied by; a program may compute it."""
    soft_cap: float | None = None
    """The range that tanh squashes them into."""
    sinks: Array | None = None
    """Of each head a score without a key, shape [N]."""

    @property
    def is_plain(self) -> bool:
        """Whether `jax.nn.dot_product_attention` computes them."""
        return self.soft_cap is None and self.sinks is None
