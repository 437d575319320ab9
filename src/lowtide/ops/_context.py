"""Attention over sharded tokens: devices exchange tokens for heads before it, and heads for tokens after it.

Along the axis ``context`` of a mesh each device has a part of every row. For attention it gets all tokens of a part of
the heads, by one all-to-all each of queries, keys and values. Another all-to-all returns the result. So causal masks,
windows and documents cost every device the same, and every implementation of attention sees whole rows.

If there are fewer key heads than devices, heads are repeated before they are sent: each device gets the heads that its
queries share, once. If heads are sharded along ``tensor``, each device shards its own heads further.

Sharding constraints do not suffice: the compiler cannot partition the calls of kernels, and an exchange by `shard_map`
determines which collectives run.

Shapes: B batch, T queries, S keys, N query heads, K key/value heads, H head.

Source: Jacobs et al., "DeepSpeed Ulysses" (arXiv:2309.14509).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import P
from jaxtyping import Array

from ..core import (
    BATCH_AXES,
    CONTEXT,
    ConfigError,
    num_shards_along,
    shardings_of,
    traced_mesh,
    without_explicit_axes,
)
from ._options import AttentionMask, ScoreOptions

Attend = Callable[[Array, Array, Array, AttentionMask, ScoreOptions], Array]


def over_context(
    attend: Attend, q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, mask: AttentionMask, scores: ScoreOptions
) -> Array:
    """Compute attention where tokens may be sharded along ``context``; without that axis, call `attend`.

    `attend` computes attention of whole rows. `ConfigError` is raised when the axis does not divide tokens or heads.
    """
    if num_shards_along(CONTEXT) == 1:
        return attend(q_BTNH, k_BSKH, v_BSKH, mask, scores)
    arrays = {
        "window": mask.window if isinstance(mask.window, jax.Array) else None,
        "start": mask.first_query if isinstance(mask.first_query, jax.Array) else None,
        "segment_ids": _drop_shared_segments(mask.segments),
        "sinks": scores.sinks,
    }

    def run(q: Array, k: Array, v: Array, arrays: Any) -> Array:
        return _attend_exchanged(attend, q, k, v, arrays, mask, scores)

    return without_explicit_axes(run, lambda _: shardings_of(q_BTNH), q_BTNH, k_BSKH, v_BSKH, arrays)


def _attend_exchanged(
    attend: Attend, q: Array, k: Array, v: Array, arrays: Any, mask: AttentionMask, scores: ScoreOptions
) -> Array:
    mesh, parts, tensor = traced_mesh(), num_shards_along(CONTEXT), num_shards_along("tensor")
    _check(q.shape, k.shape, parts, tensor)
    k, v = (_repeat_heads(array, tensor) for array in (k, v))
    # All axes, also those of one device: the compiler cannot partition a kernel along any of them.
    free_axes = set(mesh.axis_names).difference(getattr(mesh, "manual_axes", ()))
    batch = tuple(name for name in BATCH_AXES if name in free_axes)
    if q.shape[0] % math.prod(mesh.shape[name] for name in batch):
        batch = ()  # rows that do not divide, such as the last of an evaluation, are on every device
    heads = ("tensor",) if "tensor" in free_axes else ()
    tokens = P(batch, CONTEXT, heads)
    # Sinks are sharded like the heads after the exchange.
    specs = {"window": P(), "start": P(), "segment_ids": P(batch), "sinks": P((*heads, CONTEXT))}

    def attend_local(q: Array, k: Array, v: Array, arrays: Any) -> Array:
        q, k, v = (
            jax.lax.all_to_all(array, CONTEXT, split_axis=2, concat_axis=1, tiled=True)
            for array in (q, _repeat_heads(k, parts), _repeat_heads(v, parts))
        )
        replacements = {name: array for name, array in arrays.items() if array is not None}
        if "segment_ids" in replacements:
            replacements["segment_ids"] = replacements["segment_ids"][0], replacements["segment_ids"][-1]
        sinks = {name: replacements.pop(name) for name in ("sinks",) if name in replacements}
        out = attend(q, k, v, dataclasses.replace(mask, **replacements), dataclasses.replace(scores, **sinks))
        return jax.lax.all_to_all(out, CONTEXT, split_axis=1, concat_axis=2, tiled=True)

    mapped = jax.shard_map(
        attend_local,
        mesh=mesh,
        in_specs=(tokens, tokens, tokens, specs),
        out_specs=tokens,
        axis_names=free_axes.intersection((*BATCH_AXES, "tensor", CONTEXT)),
        check_vma=False,  # kernels do not say along which axes their results vary
    )
    return mapped(q, k, v, arrays)


def _drop_shared_segments(segments: tuple[Array, Array] | None) -> tuple[Array, ...] | None:
    """Drop the segments of keys if they are the array of the queries, since a kernel may have to know that."""
    return segments[:1] if segments is not None and segments[0] is segments[1] else segments


def _repeat_heads(x_BSKH: Array, parts: int) -> Array:
    """Repeat heads until `parts` divides their number."""
    count = x_BSKH.shape[2]
    times = math.lcm(count, parts) // count
    return x_BSKH if times == 1 else jnp.repeat(x_BSKH, times, axis=2)


def _check(queries: tuple[int, ...], keys: tuple[int, ...], parts: int, tensor: int) -> None:
    lengths = {queries[1], keys[1]}
    if any(length % parts for length in lengths):
        raise ConfigError(
            f"attention: {' or '.join(map(str, sorted(lengths)))} tokens cannot be sharded along the axis {CONTEXT!r}",
            expected=f"a multiple of {parts}, the number of devices along it",
            got=max(lengths),
            hint="pad rows to a multiple; generate text outside of such a mesh",
        )
    if queries[2] % (parts * tensor):
        factor = f" × tensor {tensor}" if tensor > 1 else ""
        raise ConfigError(
            f"attention: {queries[2]} query heads cannot be sharded along the axis {CONTEXT!r}",
            expected=f"a multiple of {parts * tensor} ({CONTEXT} {parts}{factor}): each device computes some heads",
            got=queries[2],
            hint=f"call make_mesh with a context that divides {queries[2] // math.gcd(queries[2], tensor)}, and fsdp "
            "or data for the other devices",
        )
