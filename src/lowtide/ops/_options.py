"""Settings of attention: which keys a query sees, how scores are computed, and the names of implementations.

Shapes: B batch, T queries, S keys, N query heads.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Implementation = Literal["cudnn", "splash", "blocks", "xla"]
"""Name of an implementation of attention."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionMask:
    """Which keys a query sees: its own and those before it, within its window and its segment.

    The window and the start may be integers that the program computes. They have no axes, because they are the same for
    all rows; use `jax.vmap` over rows if they differ.

    Examples:
        >>> mask = AttentionMask(window=2, segment_ids=jnp.array([[1, 1, 1, 2]]))
        >>> mask.to_array(4, 4)[0, 0].astype(int).tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]]
    """

    causal: bool = True
    """Whether a query sees no key after its own."""
    segment_ids: Int[Array, "B T"] | tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None
    """Document numbers of packed rows: a query sees only keys with its own number. Either a tuple of two arrays, of
    queries [B, T] and of keys [B, S], or one array for both if T is S. The shapes may be [1, T] and [1, S] if all rows
    share the numbers."""
    window: int | Int[Array, ""] | None = None
    """Number of keys that a causal query sees, its own included; None means all before it. It may be traced, for layers
    with different windows. Without causality a window only excludes keys that are too far before a query."""
    start: int | Int[Array, ""] | None = None
    """Index of the first query among the keys, for a decoder with a cache; may be traced. None means 0, and that causal
    attention has as many queries as keys."""

    @property
    def first_query(self) -> int | Array:
        """Index of the first query among the keys."""
        return 0 if self.start is None else self.start

    @property
    def segments(self) -> tuple[Array, Array] | None:
        """Document numbers of queries [B, T] and of keys [B, S]; the same array twice if one was passed for both."""
        ids: Any = self.segment_ids
        return ids if ids is None or isinstance(ids, tuple) else (ids, ids)

    @property
    def is_static(self) -> bool:
        """Whether the mask is known at trace time, so that kernels need no mask array."""
        return self.segment_ids is None and not isinstance(self.window, jax.Array) and isinstance(self.first_query, int)

    def to_array(self, num_queries: int, num_keys: int) -> Array:
        """Return booleans of shape [B or 1, 1, T, S], True where a query sees a key."""
        distance_TS = (jnp.arange(num_queries) + self.first_query)[:, None] - jnp.arange(num_keys)[None]
        visible = distance_TS >= 0 if self.causal else jnp.ones(distance_TS.shape, bool)
        if self.window is not None:
            visible &= distance_TS < self.window
        visible = visible[None, None]
        if self.segments is not None:
            query_segments, key_segments = self.segments
            visible = visible & (query_segments[:, None, :, None] == key_segments[:, None, None, :])
        return visible


CAUSAL = AttentionMask()
"""The default mask: a query sees its own key and those before it."""


@dataclasses.dataclass(frozen=True)
class ScoreOptions:
    """How scores are computed from the products of queries and keys; keyword arguments of `attention`."""

    scale: float
    """Factor of the products."""
    soft_cap: float | None = None
    """Soft cap: scores become ``soft_cap * tanh(scores / soft_cap)``."""
    sinks: Float[Array, "N"] | None = None
    """For each head the score of a sink, a key without a value, shape [N]."""

    @property
    def is_plain(self) -> bool:
        """Whether `jax.nn.dot_product_attention` can compute these scores."""
        return self.soft_cap is None and self.sinks is None
