"""Conversation with a model: the KV cache of earlier turns is kept, and later turns need no compilation.

Text is processed in chunks of a few sizes, into a cache whose length is a power of two. So later turns reuse the
programs of the first one until the cache has to grow. Shapes: B = 1 row, S columns of the cache, V vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ._cache import Cache, empty_cache, step
from ._decoder import Decoder
from ._generate import State, advance, append, check_finite, check_prompts, padded_ends, row_keys, stream
from ._rope import frequencies_change
from ._sampling import Knobs, Sampling, SamplingSwitches, knobs_of

_CHUNKS = (512, 64, 8, 1)
"""Sizes of chunks, each with a compiled program; every length is a sum of them."""
_FEWEST_COLUMNS = 1024


class Conversation:
    """Answers of one model to a growing text. This object is mutated: it holds the cache.

    Args:
        model: the decoder, with or without adapters, all of it on the device.

    Memory:
        The keys and values of one row (`cache_bytes`); the number of tokens is a power of two, at least 1,024.

    Examples:
        >>> from lowtide.models import DecoderConfig, init
        >>> config = DecoderConfig(vocab_size=32, hidden_size=8, intermediate_size=16, num_layers=1, num_heads=2,
        ...                        num_kv_heads=1, head_dim=4)
        >>> conversation = Conversation(init(config, key=jax.random.key(0)))
        >>> answer = list(conversation.stream([1, 2, 3], 4, key=jax.random.key(1)))
        >>> len(answer), len(list(conversation.stream([1, 2, 3, *answer, 5], 4, key=jax.random.key(2))))
        (4, 4)
    """

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._cache: Cache | None = None
        self._cached_tokens: list[int] = []
        """Tokens whose keys and values are in the cache."""

    def stream(
        self,
        prompt: Sequence[int],
        num_tokens: int,
        *,
        key: Array,
        sampling: Sampling | None = None,
        end_tokens: Iterable[int] = (),
    ) -> Iterator[int]:
        """Continue a text and yield each token as soon as it is sampled, like `lowtide.models.stream`.

        Args:
            prompt: token ids of the whole text. The prefix in common with the previous text is not processed again.
            num_tokens: maximum number of new tokens.
            key: a JAX random key.
            sampling: sampling settings; None: `Sampling()`.
            end_tokens: tokens that end the answer; they are not yielded.

        Returns:
            An iterator of token ids.

        Raises:
            ConfigError: for an empty prompt, tokens that are not in the vocabulary, or a number below 1.
            NonFiniteError: from the iterator, when logits are not finite.
        """
        sampling = Sampling() if sampling is None else sampling
        check_prompts(self._model, [prompt], num_tokens, 1, 1)
        if frequencies_change(self._model.config, jnp.ones((1,), jnp.int32)) is not None:
            # A longer text may change the rotary frequencies of all tokens, which would invalidate the cache.
            return stream(self._model, prompt, num_tokens, key=key, sampling=sampling, end_tokens=end_tokens)
        return self._tokens(list(prompt), num_tokens, key, sampling, tuple(end_tokens))

    def _tokens(
        self, prompt: list[int], num_tokens: int, key: Array, sampling: Sampling, ends: tuple[int, ...]
    ) -> Iterator[int]:
        switches, knobs = knobs_of(sampling)
        ends_E = padded_ends(ends)
        cache, logits_BV = self._prefill(prompt, num_tokens)
        state = _sample_first(
            cache, logits_BV, self._padded_tokens(prompt, cache), row_keys(key, [(0, 0)]), ends_E, switches, knobs
        )
        text = list(prompt)
        try:
            for count in range(num_tokens):
                check_finite(state)
                if state.counts[0] <= count:
                    return
                text.append(int(state.tokens[0, len(prompt) + count]))
                yield text[-1]
                if count + 1 < num_tokens:
                    until = jnp.int32(len(prompt) + count + 2)
                    state = advance(self._model, state, ends_E, knobs, until, switches)
        finally:  # also when the caller closes the iterator early
            self._cache, self._cached_tokens = state.cache, text[: int(state.cache.column)]

    def _prefill(self, prompt: list[int], num_tokens: int) -> tuple[Cache, Array]:
        """Process a text into the cache, except for the prefix that is already in it."""
        num_columns = max(_FEWEST_COLUMNS, 1 << (len(prompt) + num_tokens).bit_length())
        # The cache is donated below: if processing fails, none is left, and the next call starts with an empty one.
        cache, self._cache = self._cache, None
        # The last token is always processed, because its logits are needed.
        num_cached = min(len(os.path.commonprefix([self._cached_tokens, prompt])), len(prompt) - 1)
        if cache is None or cache.segments.shape[1] < num_columns:
            cache, num_cached = empty_cache(self._model, jnp.ones((1, num_columns), jnp.int32)), 0
        cache, logits_BV = replace(cache, column=jnp.int32(num_cached)), None
        while num_cached < len(prompt):
            size = next(size for size in _CHUNKS if size <= len(prompt) - num_cached)
            tokens_BT = np.asarray([prompt[num_cached : num_cached + size]], np.int32)
            positions_BT = np.arange(num_cached, num_cached + size, dtype=np.int32)[None]
            logits_BV, cache = _read_chunk(self._model, tokens_BT, positions_BT, cache)
            num_cached += size
        assert logits_BV is not None
        return cache, logits_BV

    def _padded_tokens(self, prompt: list[int], cache: Cache) -> np.ndarray[Any, Any]:
        tokens_BS = np.zeros(cache.segments.shape, np.int32)
        tokens_BS[0, : len(prompt)] = prompt
        return tokens_BS


@partial(jax.jit, donate_argnames="cache")
def _read_chunk(model: Decoder, tokens_BT: Array, positions_BT: Array, cache: Cache) -> tuple[Array, Cache]:
    return step(model, tokens_BT, positions_BT, cache)


@partial(jax.jit, static_argnames="switches", donate_argnames="cache")
def _sample_first(
    cache: Cache,
    logits_BV: Array,
    tokens_BS: Array,
    keys_B: Array,
    ends_E: Array,
    switches: SamplingSwitches,
    knobs: Knobs,
) -> State:
    """Sample the first token of an answer."""
    seen_BV = None
    if switches.penalises:
        is_text_BS = jnp.arange(tokens_BS.shape[1])[None] < cache.column
        seen_BV = jnp.zeros(logits_BV.shape, jnp.int32).at[jnp.zeros_like(tokens_BS), tokens_BS].max(is_text_BS) > 0
    zeros_B = jnp.zeros((1,), jnp.int32)
    state = State(
        cache, tokens_BS, zeros_B + cache.column, zeros_B, jnp.zeros((1,), bool), jnp.bool_(True), seen_BV, keys_B
    )
    return append(state, logits_BV, ends_E, switches, knobs)
