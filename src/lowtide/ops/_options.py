"""Settings of attention, and their checks: which keys a query sees, and how scores are computed.

Shapes: B batch, T queries, S keys, N query heads, K key/value heads, H size of a head.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..core import ConfigError, check_number, is_count

_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionMask:
    """Which keys a query sees: by default its own and earlier keys; a window or segments hide some of them.

    The window and the start may be integers that the program computes. They have no axes, because they are the same for
    all rows; use `jax.vmap` over rows if they differ.

    Examples:
        >>> mask = AttentionMask(window=2, segment_ids=jnp.array([[1, 1, 1, 2]]))
        >>> mask.to_array(4, 4)[0, 0].astype(int).tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]]
    """

    causal: bool = True
    """Whether a query sees only its own key and earlier keys."""
    segment_ids: Int[Array, "B T"] | tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None
    """Document numbers of packed rows: a query sees only keys with its own number. Either a tuple of two arrays, of
    queries [B, T] and of keys [B, S], or one array for both if T is S. The shapes may be [1, T] and [1, S] if all rows
    share the numbers."""
    window: int | Int[Array, ""] | None = None
    """Number of keys that a causal query sees, its own included; None means no limit. It may be traced, for layers with
    different windows. Without causality a window only excludes keys that are too far before a query."""
    windows: tuple[int, ...] | None = None
    """Values that a traced window can have. cuDNN's kernel then needs no mask array. With any other value of the
    window, attention is correct, but slow."""
    start: int | Int[Array, ""] | None = None
    """Index of the first query among the keys, for a decoder with a cache; may be traced. None means 0; causal
    attention then needs as many queries as keys."""

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
    def first_query_is_first_key(self) -> bool:
        """Whether the first query has the index of the first key, as is known at trace time."""
        return isinstance(self.first_query, int) and self.first_query == 0

    @property
    def is_static(self) -> bool:
        """Whether the mask is known at trace time and has no segments."""
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
"""The default mask: a query sees its own key and earlier keys."""


@dataclasses.dataclass(frozen=True)
class ScoreOptions:
    """How scores are computed from the products of queries and keys; keyword arguments of `attention`."""

    scale: float
    soft_cap: float | None = None
    sinks: Float[Array, "N"] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether `jax.nn.dot_product_attention` can compute these scores."""
        return self.soft_cap is None and self.sinks is None


def dot_product_options(mask: AttentionMask, num_queries: int, num_keys: int) -> dict[str, Any]:
    """Return the arguments of `jax.nn.dot_product_attention` for a mask: options if they suffice, else a mask array."""
    if mask.is_static and mask.first_query == 0 and (mask.causal or not mask.window):
        window: Any = mask.window
        local_window = None if window is None or window >= num_queries else (window - 1, 0)
        return {"is_causal": mask.causal, "local_window_size": local_window}
    return {"mask": mask.to_array(num_queries, num_keys)}


def check_arrays(q: Any, k: Any, v: Any) -> None:
    shapes: list[Any] = [tuple(getattr(array, "shape", ())) for array in (q, k, v)]
    _require(
        all(len(shape) == 4 for shape in shapes) and 0 not in {size for shape in shapes for size in shape[1:]},
        "queries, keys and values must have four axes [batch, tokens, heads, head], and only batch may be empty",
        *(q, k, v),
        hint="reshape the projections; use jnp.swapaxes(x, 1, 2) if heads come before tokens",
    )
    (batch, _, heads, dim), (_, num_keys, groups, _) = shapes[:2]
    _require(
        shapes[1] == (batch, num_keys, groups, dim) and shapes[2] == shapes[1] and not heads % groups,
        "q must have the shape [B, T, N, H], and k and v the shape [B, S, K, H] where K divides N",
        *(q, k, v),
        hint="do not repeat key/value heads that queries share",
    )
    _require(
        q.dtype == k.dtype == v.dtype and q.dtype in _DTYPES,
        "queries, keys and values must have one floating-point dtype",
        *(q, k, v),
        hint="cast them to bfloat16, float16, float32 or float64: x.astype(q.dtype)",
    )


def check_mask(q: Array, k: Array, mask: Any) -> None:
    check_mask_type(mask)
    hint = "use two calls, or segment_ids, for masks that differ within a program"
    _require(isinstance(mask.causal, bool | np.bool_), "causal must be a bool", mask.causal, hint=hint)
    _require(
        mask.window is None or _is_position(mask.window, 1),
        "window must be an integer of at least 1, or an integer array without axes",
        mask.window,
        hint="leave window out to use all keys; use jax.vmap over rows whose windows differ",
    )
    _require(
        mask.windows is None or (isinstance(mask.windows, tuple) and _are_sizes(mask.windows)),
        "windows must be a tuple of one or more integers from 1 to 2**31 - 1",
        mask.windows,
        hint="list the values that a traced window can have, such as windows=(1024, 2**30)",
    )
    _require(
        mask.start is None or _is_position(mask.start, 0),
        "start must be an integer of at least 0, or an integer array without axes",
        mask.start,
        hint="pass the index of the first query among the keys; use jax.vmap over rows that start at different indices",
    )
    _require(
        not mask.causal or mask.start is not None or q.shape[1] == k.shape[1],
        f"causal attention without a start needs {k.shape[1]} queries, one for each key",
        q.shape[1],
        hint="if the first query has the index `start` among the keys, as with a cache, pass "
        "mask=AttentionMask(start=start); if queries see all keys, pass mask=AttentionMask(causal=False)",
    )
    if mask.segment_ids is None:
        return
    segments, shapes = mask.segments, (q.shape[:2], k.shape[:2])
    array_types: list[Any] = [(getattr(array, "shape", None), getattr(array, "dtype", None)) for array in segments]
    fits = len(segments) == 2 and all(
        shape in (expected, (1, expected[1])) for (shape, _), expected in zip(array_types, shapes, strict=True)
    )
    _require(
        fits and all(jnp.issubdtype(dtype, jnp.integer) for _, dtype in array_types),
        f"segment_ids must be integers of shape {shapes[0]} for queries and {shapes[1]} for keys",
        *segments,
        hint="give each token the number of its document in the row, in one array for both or in a tuple of two",
    )


def check_mask_type(settings: Any) -> None:
    _require(
        isinstance(settings, AttentionMask),
        "mask must be a lowtide.ops.AttentionMask",
        settings,
        hint="leave mask out for causal attention, or pass AttentionMask(causal=False) to use all keys; "
        "jax.nn.dot_product_attention takes arrays of booleans",
    )


def check_scores(heads: int, scale: Any, soft_cap: Any, sinks: Any) -> None:
    # The scale is a number of Python or NumPy, or a traced scalar, which may be learned.
    is_array = isinstance(scale, jax.Array | np.ndarray)
    _require(
        scale.shape == () if is_array else not isinstance(scale, bool) and isinstance(scale, numbers.Real),
        "scale must be one number, or an array without axes",
        scale,
        hint="multiply the queries by scales that differ between heads, and pass scale=1.0",
    )
    if isinstance(scale, jax.Array):
        is_valid = jnp.issubdtype(scale.dtype, jnp.floating)
    else:
        dtype = np.asarray(scale).dtype
        is_real = jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
        is_valid = is_real and math.isfinite(float(scale))
    _require(
        is_valid,
        "scale must be a finite number, and a traced scale must have a floating-point dtype",
        scale if isinstance(scale, jax.Array) else np.asarray(scale).tolist(),
        hint="leave it out to use head ** -0.5",
    )
    if soft_cap is not None:
        hint = "use a number of Python or NumPy, known when the program is traced; leave it out to apply none"
        check_number("attention: soft_cap", soft_cap, above=0, hint=hint)
    shape, dtype = getattr(sinks, "shape", None), getattr(sinks, "dtype", None)
    _require(
        sinks is None or (shape == (heads,) and dtype is not None and jnp.issubdtype(dtype, jnp.floating)),
        f"sinks must be one score for each query head, an array [{heads}] of floating-point numbers",
        sinks,
        hint="leave them out to use none",
    )


def _require(is_valid: bool, requirement: str, *values: Any, hint: str) -> None:
    """Raise `ConfigError` with a requirement of `attention` and the values that do not satisfy it."""
    if not is_valid:
        raise ConfigError(f"attention: {requirement}, not {', '.join(map(_describe, values))}", hint=hint)


def _is_position(value: Any, least: int) -> bool:
    """Return whether a value is an integer of at least `least`, a traced integer, or a symbolic dimension."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        is_integer = value.shape == () and jnp.issubdtype(value.dtype, jnp.integer)
        return is_integer and (isinstance(value, jax.Array) or int(value) >= least)
    return is_count(value, least) or jax.export.is_symbolic_dim(value)


def _are_sizes(values: tuple[Any, ...]) -> bool:
    return bool(values) and all(is_count(size, 1) and size < 2**31 for size in values)


def _describe(value: Any) -> str:
    """Format an array by its dtype and shape, and any other value by its repr."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}"
    return f"{type(value).__name__} {value!r}" if isinstance(value, list | tuple | dict) else repr(value)
