"""KV cache, so that a new token costs the work of one token.

A scan over the layers carries two stacked arrays, the keys and values of all layers. XLA updates them in place: a step
writes one column and copies nothing. After `unstack` they are tuples and the loop over layers is unrolled. Prompts of
different lengths end in the same column: shorter ones are padded on the left with segment 0 in place of 1, which no
token attends to. A layer with a sliding window holds as many columns as the others.

Shapes: B rows, T new tokens, S columns, D model, K key/value heads, H head, V vocabulary, L layers.

With the rotary scaling types `dynamic` and `longrope`, one more token may change the frequencies of all earlier tokens.
This changes their keys, and the values of every layer beyond the first. `recompute_rows` recomputes both: with
`longrope` once, when a row grows beyond the length of pretraining; with `dynamic` at each token from there on.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..ops import Sight
from ._config import DecoderConfig
from ._decoder import Decoder, activations, head_logits, layer_forward, stack_of


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["keys", "values", "segments", "column"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of the tokens so far; a pytree."""

    keys: Float[Array, "L B S K H"] | tuple[Float[Array, "B S K H"], ...]
    """Keys of all layers: stacked, or a tuple where the layers are a tuple."""
    values: Float[Array, "L B S K H"] | tuple[Float[Array, "B S K H"], ...]
    segments: Int[Array, "B S"]
    """0 where a row is padded, 1 elsewhere, also in columns that are not yet written."""
    column: Int[Array, ""]
    """Next column to write."""


def cache_bytes(config: DecoderConfig, num_rows: int, length: int, compute_dtype: Any = "float32") -> int:
    """Count the bytes of the keys and values of a cache.

    Args:
        config: the model's sizes.
        num_rows: number of sequences that are generated at once: prompts times samples.
        length: tokens per sequence, including the prompt.
        compute_dtype: dtype of the cached keys and values.

    Returns:
        ``2 * L * B * S * K * H`` times the bytes per element.

    Examples:
        >>> cache_bytes(DecoderConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=2, num_heads=2,
        ...                           num_kv_heads=1, head_dim=4), num_rows=3, length=10)
        1920
    """
    num_elements = 2 * config.num_layers * num_rows * length * config.num_kv_heads * config.head_dim
    return num_elements * jnp.dtype(compute_dtype).itemsize


def empty_cache(model: Decoder, segments_BS: Int[Array, "B S"]) -> Cache:
    """Create an empty cache with as many columns as there are segments."""
    config = model.config
    shape = (*segments_BS.shape, config.num_kv_heads, config.head_dim)
    if isinstance(model.layers, tuple):
        keys, values = (tuple(jnp.zeros(shape, model.compute_dtype) for _ in model.layers) for _ in range(2))
    else:
        keys, values = (jnp.zeros((config.num_layers, *shape), model.compute_dtype) for _ in range(2))
    return Cache(keys, values, segments_BS, jnp.int32(0))


def prefill(
    model: Decoder, tokens_BT: Int[Array, "B T"], positions_BT: Int[Array, "B T"], cache: Cache
) -> tuple[Float[Array, "B V"], Cache]:
    """Process prompts into an empty cache and return the float32 logits of the next tokens.

    The tokens attend only to each other, so scores have shape [T, T] and not [T, S].
    """
    segments_BT = cache.segments[:, : tokens_BT.shape[1]]
    sight = Sight(segments=(segments_BT, segments_BT))
    return _forward(model, tokens_BT, positions_BT, cache, sight, lambda new, cached: new)


def step(
    model: Decoder, tokens_B1: Int[Array, "B 1"], positions_B1: Int[Array, "B 1"], cache: Cache
) -> tuple[Float[Array, "B V"], Cache]:
    """Append one token to each row and return the logits of the next tokens, in float32."""
    query_segments = jax.lax.dynamic_slice_in_dim(cache.segments, cache.column, tokens_B1.shape[1], axis=1)
    sight = Sight(segments=(query_segments, cache.segments), start=cache.column)
    return _forward(model, tokens_B1, positions_B1, cache, sight, lambda new, cached: cached)


def recompute_rows(
    model: Decoder, tokens_BS: Int[Array, "B S"], cache: Cache, lengths_B: Array, mask_B: Array
) -> Cache:
    """Recompute keys and values of the rows in `mask_B`, with the frequencies of their present lengths.

    `lengths_B` include the token of the cache's next column. Later columns get values that `step` overwrites.
    """
    # Columns not yet written repeat the last position, so `document_lengths` does not count them.
    positions_BS = jnp.clip(jnp.cumsum(cache.segments, axis=1) - 1, 0, jnp.maximum(lengths_B - 1, 0)[:, None])
    rewound_cache = dataclasses.replace(cache, column=jnp.int32(0))
    sight = Sight(segments=(cache.segments, cache.segments))
    _, keys, values = _apply_layers(model, tokens_BS, positions_BS, rewound_cache, sight, lambda new, cached: new)
    axes = (0, 2, 3, 4) if not isinstance(keys, tuple) else (1, 2, 3)

    def merge_rows(new: Array, old: Array) -> Array:
        return jnp.where(jnp.expand_dims(mask_B, axes), new, old)

    # All rows are computed in one program, and rows that did not change keep their old entries.
    keys, values = jax.tree.map(merge_rows, (keys, values), (cache.keys, cache.values))
    return dataclasses.replace(cache, keys=keys, values=values)


def _forward(
    model: Decoder,
    tokens_BT: Array,
    positions_BT: Array,
    cache: Cache,
    sight: Sight,
    select_kv: Callable[[Array, Array], Array],
) -> tuple[Array, Cache]:
    h_BTD, keys, values = _apply_layers(model, tokens_BT, positions_BT, cache, sight, select_kv)
    logits_BV = head_logits(model, h_BTD[:, -1:])[:, 0]
    return logits_BV, Cache(keys, values, cache.segments, cache.column + tokens_BT.shape[1])


def _apply_layers(
    model: Decoder,
    tokens_BT: Array,
    positions_BT: Array,
    cache: Cache,
    sight: Sight,
    select_kv: Callable[[Array, Array], Array],
) -> tuple[Array, Any, Any]:
    """Apply embedding and layers; return activations, and keys and values that include the new tokens."""
    stack = stack_of(model.config, model.compute_dtype)
    h_BTD = activations(stack.first(model.outer, {"tokens": tokens_BT}))
    # `select_kv` chooses what the tokens attend to: the new keys and values (prefill), or the whole cache (step).
    apply_layers = _unroll_layers if isinstance(model.layers, tuple) else _scan_layers
    return apply_layers(model, h_BTD, positions_BT, cache, sight, select_kv)


def _scan_layers(
    model: Decoder,
    h_BTD: Array,
    positions_BT: Array,
    cache: Cache,
    sight: Sight,
    select_kv: Callable[[Array, Array], Array],
) -> tuple[Array, Any, Any]:
    def body(carry: tuple[Array, Array, Array], inputs: tuple[Array, Any]) -> tuple[tuple[Array, Array, Array], None]:
        h_BTD, keys, values = carry
        index, layer = inputs
        written: list[Array] = []

        def store(*new: Array) -> tuple[Array, Array]:
            selected: list[Array] = []
            for operand, update in zip((keys, values), new, strict=True):
                start_indices = (index, zero, cache.column, zero, zero)
                written.append(jax.lax.dynamic_update_slice(operand, update[None].astype(operand.dtype), start_indices))
                layer_cache = jax.lax.dynamic_index_in_dim(written[-1], index, keepdims=False)
                selected.append(select_kv(update, layer_cache).astype(update.dtype))
            return selected[0], selected[1]

        h_BTD, _, _ = layer_forward(layer, h_BTD, positions_BT, sight, model.config, store)
        return (h_BTD, written[0], written[1]), None

    # Indices stay int32, like `cache.column`, also with `jax_enable_x64`: `dynamic_update_slice` takes one dtype.
    zero, indices = np.int32(0), jnp.arange(model.config.num_layers, dtype=jnp.int32)
    # Keys and values are in the carry, which XLA updates in place; as scan outputs they would be new arrays.
    carry: Any = (h_BTD, cache.keys, cache.values)
    return jax.lax.scan(body, carry, (indices, model.layers))[0]


def _unroll_layers(
    model: Decoder,
    h_BTD: Array,
    positions_BT: Array,
    cache: Cache,
    sight: Sight,
    select_kv: Callable[[Array, Array], Array],
) -> tuple[Array, Any, Any]:
    stored: list[tuple[Array, Array]] = []
    zero = np.int32(0)

    def store(*new: Array) -> tuple[Array, Array]:
        written, selected = list[Array](), list[Array]()
        for cached, update in zip((cache.keys, cache.values), new, strict=True):
            layer_cache = cached[len(stored)]
            start_indices = (zero, cache.column, zero, zero)
            written.append(jax.lax.dynamic_update_slice(layer_cache, update.astype(layer_cache.dtype), start_indices))
            selected.append(select_kv(update, written[-1]).astype(update.dtype))
        stored.append((written[0], written[1]))
        return selected[0], selected[1]

    for layer in model.layers:
        h_BTD, _, _ = layer_forward(layer, h_BTD, positions_BT, sight, model.config, store)
    keys, values = zip(*stored, strict=True)
    return h_BTD, keys, values
