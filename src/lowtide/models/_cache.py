"""A cache of keys and values, so that a new token costs one token's work.

Keys and values of all layers are two arrays, which a scan over the layers carries and XLA updates in place: a step
writes one column and copies nothing. Of layers that have arrays of their own (`unstack`) they are tuples, and the loop
over layers is unrolled. Prompts of different lengths end in one column: shorter ones are padded on the left, with
segment 0 in place of 1, which no token sees. A layer with a window holds as many columns as the others.

Shapes: B rows, T new tokens, S columns, D model, K key/value heads, H head, V vocabulary, L layers.

With the `dynamic` and `longrope` stretching of rotary positions a token more may change the frequencies of those before
it, and with them whatever layers beyond the first computed of these, values included. Nothing in the cache is of use
then, and it is computed again (`read_again`): with `longrope` once, where a row grows beyond the length of pretraining,
with `dynamic` at each token from there on.
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
    """Of all layers, as these are: stacked, or a tuple."""
    values: Float[Array, "L B S K H"] | tuple[Float[Array, "B S K H"], ...]
    segments: Int[Array, "B S"]
    """0 where a row is padded, 1 elsewhere, in columns that are not written yet, too."""
    column: Int[Array, ""]
    """The next one to be written."""


def cache_bytes(config: DecoderConfig, num_rows: int, length: int, compute_dtype: Any = "float32") -> int:
    """Count the bytes of the keys and values of a cache.

    Args:
        config: the model's sizes.
        num_rows: sequences that are continued at once: prompts times samples.
        length: tokens of a sequence, prompt included.
        compute_dtype: dtype that keys and values are stored in.

    Returns:
        ``2 * L * B * S * K * H`` times the bytes of a number.

    Examples:
        >>> cache_bytes(DecoderConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=2, num_heads=2,
        ...                           num_kv_heads=1, head_dim=4), num_rows=3, length=10)
        1920
    """
    numbers = 2 * config.num_layers * num_rows * length * config.num_kv_heads * config.head_dim
    return numbers * jnp.dtype(compute_dtype).itemsize


def empty_cache(model: Decoder, segments_BS: Int[Array, "B S"]) -> Cache:
    """Make a cache of as many columns as there are segments, with nothing in it."""
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
    """Read prompts into an empty cache; logits of what follows each, in float32.

    The tokens see each other alone, so that scores are [T, T] and not [T, S].
    """
    segments_BT = cache.segments[:, : tokens_BT.shape[1]]
    sight = Sight(segments=(segments_BT, segments_BT))
    return _forward(model, tokens_BT, positions_BT, cache, sight, lambda new, whole: new)


def step(
    model: Decoder, tokens_B1: Int[Array, "B 1"], positions_B1: Int[Array, "B 1"], cache: Cache
) -> tuple[Float[Array, "B V"], Cache]:
    """Add one token to each row; logits of what follows it, in float32."""
    of_queries = jax.lax.dynamic_slice_in_dim(cache.segments, cache.column, tokens_B1.shape[1], axis=1)
    sight = Sight(segments=(of_queries, cache.segments), start=cache.column)
    return _forward(model, tokens_B1, positions_B1, cache, sight, lambda new, whole: whole)


def read_again(model: Decoder, tokens_BS: Int[Array, "B S"], cache: Cache, lengths_B: Array, which_B: Array) -> Cache:
    """Compute keys and values of some rows again, with the frequencies of the length that they have now.

    Args:
        model: the decoder.
        tokens_BS: all tokens so far.
        cache: of which columns that are not written yet get what `step` will overwrite.
        lengths_B: tokens of each row so far, that of the cache's next column included.
        which_B: the rows.
    """
    # What is not there yet has the last position again, and so is no part of a document's length.
    positions_BS = jnp.clip(jnp.cumsum(cache.segments, axis=1) - 1, 0, jnp.maximum(lengths_B - 1, 0)[:, None])
    whole = dataclasses.replace(cache, column=jnp.int32(0))
    sight = Sight(segments=(cache.segments, cache.segments))
    _, keys, values = _through(model, tokens_BS, positions_BS, whole, sight, lambda new, whole: new)
    axes = (0, 2, 3, 4) if not isinstance(keys, tuple) else (1, 2, 3)

    def chosen(new: Array, old: Array) -> Array:
        return jnp.where(jnp.expand_dims(which_B, axes), new, old)

    keys, values = jax.tree.map(chosen, (keys, values), (cache.keys, cache.values))
    return dataclasses.replace(cache, keys=keys, values=values)


def _forward(
    model: Decoder,
    tokens_BT: Array,
    positions_BT: Array,
    cache: Cache,
    sight: Sight,
    attended: Callable[[Array, Array], Array],
) -> tuple[Array, Cache]:
    h_BTD, keys, values = _through(model, tokens_BT, positions_BT, cache, sight, attended)
    logits_BV = head_logits(model, h_BTD[:, -1:])[:, 0]
    return logits_BV, Cache(keys, values, cache.segments, cache.column + tokens_BT.shape[1])


def _through(
    model: Decoder,
    tokens_BT: Array,
    positions_BT: Array,
    cache: Cache,
    sight: Sight,
    attended: Callable[[Array, Array], Array],
) -> tuple[Array, Any, Any]:
    """Embedding and layers; activations, and the keys and values with those of these tokens in them."""
    stack = stack_of(model.config, model.compute_dtype)
    h_BTD = activations(stack.first(model.outer, {"tokens": tokens_BT}))
    over_layers = _unrolled if isinstance(model.layers, tuple) else _scanned
    return over_layers(model, h_BTD, positions_BT, cache, sight, attended)


def _scanned(
    model: Decoder,
    h_BTD: Array,
    positions_BT: Array,
    cache: Cache,
    sight: Sight,
    attended: Callable[[Array, Array], Array],
) -> tuple[Array, Any, Any]:
    def body(carry: tuple[Array, Array, Array], each: tuple[Array, Any]) -> tuple[tuple[Array, Array, Array], None]:
        h_BTD, keys, values = carry
        index, layer = each
        written: list[Array] = []

        def store(*new: Array) -> tuple[Array, Array]:
            seen: list[Array] = []
            for whole, part in zip((keys, values), new, strict=True):
                at = (index, zero, cache.column, zero, zero)
                written.append(jax.lax.dynamic_update_slice(whole, part[None].astype(whole.dtype), at))
                of_layer = jax.lax.dynamic_index_in_dim(written[-1], index, keepdims=False)
                seen.append(attended(part, of_layer).astype(part.dtype))
            return seen[0], seen[1]

        h_BTD, _, _ = layer_forward(layer, h_BTD, positions_BT, sight, model.config, store)
        return (h_BTD, written[0], written[1]), None

    zero, indices = np.int32(0), jnp.arange(model.config.num_layers, dtype=jnp.int32)  # one dtype with x64, too
    carry: Any = (h_BTD, cache.keys, cache.values)
    return jax.lax.scan(body, carry, (indices, model.layers))[0]


def _unrolled(
    model: Decoder,
    h_BTD: Array,
    positions_BT: Array,
    cache: Cache,
    sight: Sight,
    attended: Callable[[Array, Array], Array],
) -> tuple[Array, Any, Any]:
    stored: list[tuple[Array, Array]] = []
    zero = np.int32(0)

    def store(*new: Array) -> tuple[Array, Array]:
        written, seen = list[Array](), list[Array]()
        for whole, part in zip((cache.keys, cache.values), new, strict=True):
            of_layer = whole[len(stored)]
            at = (zero, cache.column, zero, zero)
            written.append(jax.lax.dynamic_update_slice(of_layer, part.astype(of_layer.dtype), at))
            seen.append(attended(part, written[-1]).astype(part.dtype))
        stored.append((written[0], written[1]))
        return seen[0], seen[1]

    for layer in model.layers:
        h_BTD, _, _ = layer_forward(layer, h_BTD, positions_BT, sight, model.config, store)
    keys, values = zip(*stored, strict=True)
    return h_BTD, keys, values
