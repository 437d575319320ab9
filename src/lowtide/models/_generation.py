"""Text generation: batches of prompts of different lengths, conversations, sampling, and the KV cache.

One compiled program processes prompts, and another generates tokens until all rows end. To reuse these programs,
lengths are rounded up to a few sizes, and values that vary between calls are traced. A token is sampled with the random
key of its row and position, so it depends neither on the other rows nor on the padding.

Shapes: B rows (samples of prompts), P columns of prompts, S columns in all, T tokens of a call, E end tokens, D model,
K key/value heads, H head, V vocabulary, L layers.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ..core import ConfigError, NonFiniteError, Tree, check_integer, check_number, tree_bytes
from ..ops import AttentionMask
from ._config import DecoderConfig
from ._decoder import Decoder, activations, embed, head_logits
from ._layers import LayerCache, layer_forward
from ._rope import frequencies_change
from ._shapes import map_blocks

_EMPTY_HINT = "use the token of a newline when there is no prompt"
_ZERO = np.int32(0)  # indices stay int32, like `_Cache.column`, also with `jax_enable_x64`
_STEPS_PER_CALL = 32  # steps per call of the compiled loop; Python handles signals between calls


@dataclasses.dataclass(frozen=True)
class Completion:
    """Generated continuation of a prompt."""

    prompt: int
    """Index of the prompt."""
    sample: int
    """Index among the samples of this prompt."""
    tokens: tuple[int, ...]
    """New tokens, without the end token."""
    is_ended: bool
    """Whether an end token stopped the generation, and not the limit `num_tokens`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _State:
    """State of a batch during generation."""

    cache: _Cache
    tokens: Int[Array, "B S"]
    """Tokens of prompts and answers, valid up to and including column ``cache.column``."""
    lengths: Int[Array, "B"]
    """Number of tokens of a row so far, including its prompt; also the position of the next token."""
    counts: Int[Array, "B"]
    """Number of new tokens of a row, without the end token."""
    is_done: Array
    is_finite: Array
    """Whether all logits that tokens were sampled from are finite."""
    seen: Array | None
    """Which tokens a row contains, [B, V]; None without a repetition penalty."""
    keys: Array


def generate(
    model: Decoder,
    prompt: Int[Array, "P"],
    num_tokens: int,
    *,
    key: Array,
    temperature: float = 0.8,
    hidden: Callable[[Decoder, Tree], Array] | None = None,
) -> Int[Array, "P+num_tokens"]:
    """Continue one prompt by a number of tokens; `generate_batch` takes several prompts and more settings.

    Args:
        model: the decoder, with or without adapters.
        prompt: token ids, shape [P], at least one.
        num_tokens: number of tokens to append.
        key: a JAX random key.
        temperature: divides the logits; 0 takes the most likely token.
        hidden: ``hidden(model, batch)`` returns the activations [B, T, D] of the last block, for a model whose layers
            are not all on the device. Each function object is compiled once, and called with all tokens for each new
            token. None: all layers are on the device, and a KV cache is used.

    Returns:
        The prompt followed by the new tokens.

    Raises:
        ConfigError: for an empty prompt, a negative length or temperature, or, without `hidden`, tokens that are not
            in the vocabulary.
        NonFiniteError: without `hidden`, when logits are not finite.

    Memory:
        A cache of one row (`cache_bytes`), logits of one position, and one layer's activations of the prompt. With
        `hidden` no cache, and activations of P + num_tokens positions.
    """
    sampling = Sampling(temperature=temperature)
    check_integer("num_tokens", num_tokens, 0)
    if prompt.shape[0] < 1:
        raise ConfigError("the prompt is empty", hint=_EMPTY_HINT)
    if num_tokens == 0:
        return prompt
    if hidden is not None:
        padded = jnp.concatenate([prompt, jnp.zeros((num_tokens,), prompt.dtype)])
        return _run_uncached(hidden, model, padded, jnp.int32(prompt.shape[0]), key, jnp.float32(temperature))
    rows = [[int(token) for token in np.asarray(prompt)]]
    _check_prompts(model, rows, num_tokens, 1, 1)
    *_, (state, first_column) = _batch(model, rows, num_tokens, key[None], sampling, ())
    new_tokens = jax.lax.dynamic_slice_in_dim(state.tokens[0], first_column, num_tokens)
    return jnp.concatenate([prompt, new_tokens.astype(prompt.dtype)])


def generate_batch(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    *,
    key: Array,
    sampling: Sampling | None = None,
    end_tokens: Iterable[int] = (),
    num_samples: int = 1,
    batch_size: int = 8,
) -> Iterator[Completion]:
    """Continue several prompts in batches.

    Args:
        model: the decoder, with or without adapters, all of it on the device.
        prompts: token ids of each prompt, at least one token per prompt.
        num_tokens: maximum number of new tokens.
        key: a JAX random key. With the same key, a prompt at the same index gets the same samples in any batch.
        sampling: sampling settings; None: `Sampling()`.
        end_tokens: tokens that end an answer.
        num_samples: answers per prompt.
        batch_size: number of rows at once; a row is one sample of a prompt.

    Returns:
        An iterator of completions in the order of prompts and their samples, as each batch finishes.

    Raises:
        ConfigError: for an empty prompt, tokens that are not in the vocabulary, or a `num_tokens`, `num_samples` or
            `batch_size` below 1.
        NonFiniteError: from the iterator, when logits are not finite.

    Memory:
        The keys and values of a batch (`cache_bytes`); logits [batch_size, vocab_size] in float32; and one layer's
        activations of the longest prompt. The lengths of the prompt, and then of the whole text, are rounded up to a
        multiple of 16; lengths above 64 grow by less than a quarter. Nothing grows with the number of prompts.
        A GPU copies a layer's weights at each step, unless the model is unstacked (`unstack`). The rotary scaling types
        `longrope` and `dynamic` need a second copy of keys and values, and one layer's activations of all tokens.
        Texts beyond the length of pretraining are recomputed: with `longrope` once, with `dynamic` for each token.

    Examples:
        >>> from lowtide.models import DecoderConfig, init
        >>> config = DecoderConfig(vocab_size=32, hidden_size=8, intermediate_size=16, num_layers=1, num_heads=2,
        ...                        num_kv_heads=1, head_dim=4)
        >>> model = init(config, key=jax.random.key(0))
        >>> [len(c.tokens) for c in generate_batch(model, [[1, 2, 3], [4]], 5, key=jax.random.key(1))]
        [5, 5]
    """
    settings = Sampling() if sampling is None else sampling
    _check_prompts(model, prompts, num_tokens, num_samples, batch_size)
    ends = tuple(end_tokens)
    rows = [(index, sample) for index in range(len(prompts)) for sample in range(num_samples)]
    size = max(1, min(batch_size, len(rows)))

    def completions() -> Iterator[Completion]:
        for start in range(0, len(rows), size):
            batch_rows = rows[start : start + size]
            # The last batch is padded to the size of the others, so that no further program is compiled.
            keys = _row_keys(key, [*batch_rows, *[(0, 0)] * (size - len(batch_rows))])
            batch_prompts: list[Sequence[int]] = [prompts[index] for index, _ in batch_rows]
            *_, (state, first_column) = _batch(model, batch_prompts, num_tokens, keys, settings, ends)
            tokens, counts = np.asarray(state.tokens), np.asarray(state.counts)
            for row, (index, sample) in enumerate(batch_rows):
                count = int(counts[row])
                new_tokens = tuple(int(token) for token in tokens[row, first_column : first_column + count])
                yield Completion(index, sample, new_tokens, bool(state.is_done[row]) and count < num_tokens)

    return completions()


def stream(
    model: Decoder,
    prompt: Sequence[int],
    num_tokens: int,
    *,
    key: Array,
    sampling: Sampling | None = None,
    end_tokens: Iterable[int] = (),
) -> Iterator[int]:
    """Continue one prompt and yield each token as soon as it is sampled.

    Args:
        model: the decoder, with or without adapters, all of it on the device.
        prompt: token ids, at least one.
        num_tokens: maximum number of new tokens.
        key: a JAX random key; with the same key `generate_batch` gives its first prompt the same tokens.
        sampling: sampling settings; None: `Sampling()`.
        end_tokens: tokens that end the answer; they are not yielded.

    Returns:
        An iterator of token ids.

    Raises:
        ConfigError, NonFiniteError: as in `generate_batch`.

    Memory:
        As in `generate_batch`, with one row.
    """
    settings = Sampling() if sampling is None else sampling
    _check_prompts(model, [prompt], num_tokens, 1, 1)
    ends = tuple(end_tokens)

    def tokens() -> Iterator[int]:
        states = _batch(model, [prompt], num_tokens, _row_keys(key, [(0, 0)]), settings, ends, steps_per_call=1)
        for count, (state, first_column) in enumerate(states):
            if state.counts[0] <= count:
                return
            yield int(state.tokens[0, first_column + count])

    return tokens()


def _batch(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    keys_B: Array,
    sampling: Sampling,
    ends: tuple[int, ...],
    steps_per_call: int = _STEPS_PER_CALL,
) -> Iterator[tuple[_State, int]]:
    """Continue a batch; yield its state every `steps_per_call` steps, with the column of the first new token.

    Rows beyond the prompts are padding. A state is donated when the next state is requested.
    """
    width = _round_up(max(map(len, prompts)))
    size = _round_up(width + num_tokens)
    tokens_BS = np.zeros((len(keys_B), size), np.int32)
    segments_BS = np.zeros((len(keys_B), size), np.int32)
    for row, prompt in enumerate(prompts):
        tokens_BS[row, width - len(prompt) : width] = prompt
        segments_BS[row, width - len(prompt) :] = 1
    switches, knobs = knobs_of(sampling)
    ends_E = _padded_ends(ends)
    limit = width + num_tokens
    state = _start(model, jnp.asarray(tokens_BS), jnp.asarray(segments_BS), keys_B, ends_E, knobs, switches, width)
    column = width + 1
    while True:
        _check_finite(state)
        yield state, width
        if column >= limit or bool(jnp.all(state.is_done)):
            return
        column = min(column + steps_per_call, limit)
        state = _advance(model, state, ends_E, knobs, jnp.int32(column), switches)


@functools.partial(jax.jit, static_argnames=("switches", "width"))
def _start(
    model: Decoder,
    tokens_BS: Array,
    segments_BS: Array,
    keys_B: Array,
    ends_E: Array,
    knobs: _Knobs,
    switches: _SamplingSwitches,
    width: int,
) -> _State:
    # Prompts are padded on the left: positions begin at 0 at a row's first token, wherever that is.
    positions_BP = jnp.maximum(jnp.cumsum(segments_BS[:, :width], axis=1) - 1, 0)
    logits_BV, cache = prefill(model, tokens_BS[:, :width], positions_BP, empty_cache(model, segments_BS))
    is_text_BS = (segments_BS > 0) & (jnp.arange(segments_BS.shape[1])[None] < width)
    return _first_state(cache, logits_BV, tokens_BS, is_text_BS, keys_B, ends_E, switches, knobs)


def _first_state(
    cache: _Cache,
    logits_BV: Array,
    tokens_BS: Array,
    is_text_BS: Array,
    keys_B: Array,
    ends_E: Array,
    switches: _SamplingSwitches,
    knobs: _Knobs,
) -> _State:
    """Sample the first new token; rows without text only fill the batch, and count as done from the start."""
    seen_BV = None
    if switches.penalises:
        rows_B1 = jnp.arange(len(tokens_BS))[:, None]
        seen_BV = jnp.zeros(logits_BV.shape, jnp.int32).at[rows_B1, tokens_BS].max(is_text_BS) > 0
    lengths_B = jnp.sum(is_text_BS, axis=1, dtype=jnp.int32)
    counts_B, is_done_B = jnp.zeros_like(lengths_B), lengths_B == 0
    state = _State(cache, tokens_BS, lengths_B, counts_B, is_done_B, jnp.bool_(True), seen_BV, keys_B)
    return _append(state, logits_BV, ends_E, switches, knobs)


_sample_first = jax.jit(_first_state, static_argnames="switches", donate_argnames="cache")


@functools.partial(jax.jit, static_argnames="switches", donate_argnames="state")
def _advance(
    model: Decoder, state: _State, ends_E: Array, knobs: _Knobs, until: Array, switches: _SamplingSwitches
) -> _State:
    """Generate tokens up to the column `until`, until all rows have ended, or until logits are not finite."""

    def is_running(state: _State) -> Array:
        return (state.cache.column + 1 < until) & ~jnp.all(state.is_done) & state.is_finite

    def take_step(state: _State) -> _State:
        last_B1 = jax.lax.dynamic_slice_in_dim(state.tokens, state.cache.column, 1, axis=1)
        logits_BV, cache = step(model, last_B1, state.lengths[:, None] - 1, _recompute_if_stale(model, state))
        return _append(dataclasses.replace(state, cache=cache), logits_BV, ends_E, switches, knobs)

    return jax.lax.while_loop(is_running, take_step, state)


def _recompute_if_stale(model: Decoder, state: _State) -> _Cache:
    """Return the cache, recomputed for rows whose newest token changes the rotary frequencies of earlier tokens."""
    changed_B = frequencies_change(model.config, state.lengths)
    if changed_B is None:
        return state.cache
    # Ended rows need no valid cache, so their growth must not trigger the costly recomputation.
    changed_B = changed_B & ~state.is_done

    def recompute(cache: _Cache) -> _Cache:
        return _recompute_rows(model, state.tokens, cache, state.lengths, changed_B)

    return jax.lax.cond(jnp.any(changed_B), recompute, lambda cache: cache, state.cache)


def _append(state: _State, logits_BV: Array, ends_E: Array, switches: _SamplingSwitches, knobs: _Knobs) -> _State:
    """Sample a token for each row and store it at the cache's next column."""
    keys_B = jax.vmap(jax.random.fold_in)(state.keys, state.lengths)
    new_B = choose(logits_BV, keys_B, state.seen, switches, knobs)
    is_finite_B = jnp.all(jnp.isfinite(logits_BV), axis=1)
    is_done = state.is_done | jnp.any(new_B[:, None] == ends_E[None], axis=1)
    # Rows that have ended take part in further steps with token 0; their counts stay, and their logits do not matter.
    new_B = jnp.where(is_done, 0, new_B)
    seen_BV = state.seen
    if seen_BV is not None:
        seen_BV = seen_BV.at[jnp.arange(len(new_B)), new_B].max(~is_done)
    return dataclasses.replace(
        state,
        tokens=jax.lax.dynamic_update_slice_in_dim(state.tokens, new_B[:, None], state.cache.column, axis=1),
        lengths=state.lengths + 1,
        counts=state.counts + (~is_done).astype(state.counts.dtype),
        is_done=is_done,
        is_finite=state.is_finite & jnp.all(is_finite_B | state.is_done),
        seen=seen_BV,
    )


def _row_keys(key: Array, rows: Sequence[tuple[int, int]]) -> Array:
    """Return a random key for each row; a row is a pair of a prompt index and a sample index."""
    prompts, samples = (jnp.asarray(column, jnp.uint32) for column in zip(*rows, strict=True))
    return jax.vmap(lambda index, sample: jax.random.fold_in(jax.random.fold_in(key, index), sample))(prompts, samples)


def _check_finite(state: _State) -> None:
    if not bool(state.is_finite):
        hint = "check for nan or inf in the weights, and for overflow in float16; lowtide inspect shows the dtypes"
        raise NonFiniteError("the logits of the next token are not finite", hint=hint)


def _padded_ends(ends: Sequence[int]) -> Int[Array, "E"]:
    """Return the end tokens, padded to a multiple of 8 with -1, so that few lengths are compiled."""
    return jnp.asarray([*ends, *[-1] * (-len(ends) % 8)] or [-1] * 8, jnp.int32)


def _round_up(length: int) -> int:
    """Round a length up to a multiple of 16, to compile few lengths; lengths above 64 grow by less than 25 %."""
    # A length of n bits is at least 2 ** (n - 1), and the unit is 2 ** (n - 3): rounding adds less than a quarter.
    unit = max(16, 1 << max(length.bit_length() - 3, 0))
    return -(-length // unit) * unit


def _check_prompts(
    model: Decoder, prompts: Sequence[Sequence[int]], num_tokens: int, num_samples: int, batch_size: int
) -> None:
    for name, value in (("num_tokens", num_tokens), ("num_samples", num_samples), ("batch_size", batch_size)):
        check_integer(name, value)
    size = model.config.vocab_size
    for index, prompt in enumerate(prompts):
        if len(prompt) < 1:
            raise ConfigError(f"prompt {index} is empty", hint=_EMPTY_HINT)
        if min(prompt) < 0 or max(prompt) >= size:
            token = next(token for token in prompt if not 0 <= token < size)
            problem = f"prompt {index} has token {token}, which is not in the vocabulary (0 to {size - 1})"
            raise ConfigError(problem, hint="use the tokenizer of this model")


@functools.partial(jax.jit, static_argnums=0)
def _run_uncached(hidden: Any, model: Decoder, padded: Array, start: Array, key: Array, temperature: Array) -> Array:
    def step(i: Any, tokens: Array) -> Array:
        # Columns without a token repeat the last position, so `document_lengths` does not count them.
        positions = jnp.minimum(jnp.arange(tokens.shape[0]), i - 1)
        h_BTD = activations(hidden(model, {"tokens": tokens[None], "positions": positions[None]}))
        last_V = head_logits(model, jax.lax.dynamic_slice_in_dim(h_BTD, i - 1, 1, axis=1))[0, 0]
        noise = jax.random.gumbel(jax.random.fold_in(key, i), last_V.shape)
        return tokens.at[i].set(jnp.argmax(last_V + temperature * noise).astype(tokens.dtype))

    return jax.lax.fori_loop(start, padded.shape[0], step, padded)


# A conversation processes text in chunks of a few sizes, into a cache whose length is a power of two. So later turns
# reuse the programs of the first one until the cache has to grow.
_CHUNKS = (512, 64, 8, 1)
"""Sizes of chunks, each with a compiled program; every length is a sum of them."""
_FEWEST_COLUMNS = 1024


class Conversation:
    """Answers of one model to a growing text. Mutable: it holds the cache.

    Args:
        model: the decoder, with or without adapters, all of it on the device.

    Memory:
        The keys and values of one row (`cache_bytes`); the length of the cache is a power of two, at least 1,024.

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
        self._cache: _Cache | None = None
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
            prompt: token ids of the whole text. The prefix in common with the previous text is not processed again,
                except with the rotary scaling types `longrope` and `dynamic`. A model with delta nets processes the
                whole text again if the previous text is not a prefix of it.
            num_tokens: maximum number of new tokens.
            key: a JAX random key.
            sampling: sampling settings; None: `Sampling()`.
            end_tokens: tokens that end the answer; they are not yielded.

        Returns:
            An iterator of token ids.

        Raises:
            ConfigError, NonFiniteError: as in `lowtide.models.generate_batch`.
        """
        sampling = Sampling() if sampling is None else sampling
        _check_prompts(self._model, [prompt], num_tokens, 1, 1)
        if frequencies_change(self._model.config, jnp.ones((1,), jnp.int32)) is not None:
            # A longer text may change the rotary frequencies of all tokens, which would invalidate the cache.
            return stream(self._model, prompt, num_tokens, key=key, sampling=sampling, end_tokens=end_tokens)
        return self._tokens(list(prompt), num_tokens, key, sampling, tuple(end_tokens))

    def _tokens(
        self, prompt: list[int], num_tokens: int, key: Array, sampling: Sampling, ends: tuple[int, ...]
    ) -> Iterator[int]:
        switches, knobs = knobs_of(sampling)
        ends_E = _padded_ends(ends)
        cache, logits_BV = self._prefill(prompt, num_tokens)
        tokens_BS = np.zeros(cache.segments.shape, np.int32)
        tokens_BS[0, : len(prompt)] = prompt
        is_text_BS = np.arange(tokens_BS.shape[1])[None] < len(prompt)
        keys_B = _row_keys(key, [(0, 0)])
        state = _sample_first(cache, logits_BV, tokens_BS, is_text_BS, keys_B, ends_E, switches, knobs)
        text = list(prompt)
        try:
            for count in range(num_tokens):
                _check_finite(state)
                if state.counts[0] <= count:
                    return
                text.append(int(state.tokens[0, len(prompt) + count]))
                yield text[-1]
                if count + 1 < num_tokens:
                    until = jnp.int32(len(prompt) + count + 2)
                    state = _advance(self._model, state, ends_E, knobs, until, switches)
        finally:  # also when the caller closes the iterator early
            self._cache, self._cached_tokens = state.cache, text[: int(state.cache.column)]

    def _prefill(self, prompt: list[int], num_tokens: int) -> tuple[_Cache, Array]:
        """Process a text without its cached prefix; return the cache, and the logits of the next token."""
        num_columns = max(_FEWEST_COLUMNS, 1 << (len(prompt) + num_tokens).bit_length())
        # The cache is donated below: if processing fails, none is left, and the next call starts with an empty one.
        cache, self._cache = self._cache, None
        # The last token is always processed, because its logits are needed.
        num_cached = min(len(os.path.commonprefix([self._cached_tokens, prompt])), len(prompt) - 1)
        # Later columns of keys and values are overwritten, but a state cannot go back to an earlier token.
        is_too_late = self._model.config.has_state and num_cached < len(self._cached_tokens)
        if cache is None or is_too_late or cache.segments.shape[1] < num_columns:
            cache, num_cached = empty_cache(self._model, jnp.ones((1, num_columns), jnp.int32)), 0
        cache, logits_BV = dataclasses.replace(cache, column=jnp.int32(num_cached)), None
        while num_cached < len(prompt):
            size = next(size for size in _CHUNKS if size <= len(prompt) - num_cached)
            tokens_BT = np.asarray([prompt[num_cached : num_cached + size]], np.int32)
            positions_BT = np.arange(num_cached, num_cached + size, dtype=np.int32)[None]
            logits_BV, cache = _read_chunk(self._model, tokens_BT, positions_BT, cache)
            num_cached += size
        assert logits_BV is not None
        return cache, logits_BV


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings for sampling the next token, in transformers' order: penalty, temperature, top-k, top-p, min-p.

    Raises:
        ConfigError: for a value out of range.

    Examples:
        >>> Sampling(temperature=0).is_greedy
        True

    References:
        Holtzman et al., "The Curious Case of Neural Text Degeneration" (arXiv:1904.09751), for top-p.
        Nguyen et al., "Turning Up the Heat: Min-p Sampling" (arXiv:2407.01082).
        Keskar et al., "CTRL" (arXiv:1909.05858), for the repetition penalty.
    """

    temperature: float = 1.0
    """Divides the logits; 0 selects the most likely token."""
    top_k: int = 0
    """Keep only this number of most likely tokens; 0: all."""
    top_p: float = 1.0
    """Keep the most likely tokens up to this cumulative probability, including the token that reaches it."""
    min_p: float = 0.0
    """Keep tokens with at least this fraction of the most likely token's probability."""
    repetition_penalty: float = 1.0
    """Divides the positive, and multiplies the negative logits of tokens in the prompt or in the answer so far."""

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, least=0, hint="0 selects the most likely token")
        check_integer("top_k", self.top_k, 0, hint="0 keeps all tokens")
        check_number("top_p", self.top_p, above=0, most=1)
        check_number("min_p", self.min_p, least=0, most=1)
        check_number("repetition_penalty", self.repetition_penalty, above=0)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature == 0


class _Knobs(NamedTuple):
    """Values of a `Sampling` as arrays, so that other values need no recompilation."""

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    repetition_penalty: Array


class _SamplingSwitches(NamedTuple):
    """Static switches that omit unused parts of the program: a sort costs more than one layer of a small model."""

    filters: bool
    """Whether top-k, top-p or min-p is in use."""
    penalises: bool
    """Whether the repetition penalty is in use."""


def knobs_of(sampling: Sampling) -> tuple[_SamplingSwitches, _Knobs]:
    """Split a `Sampling` into static switches and traced values."""
    filters = not sampling.is_greedy and (sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0)
    knobs = _Knobs(*(jnp.float32(getattr(sampling, name)) for name in _Knobs._fields))
    return _SamplingSwitches(filters, sampling.repetition_penalty != 1), knobs._replace(top_k=jnp.int32(sampling.top_k))


def choose(
    logits_BV: Float[Array, "B V"],
    keys_B: Array,
    seen_BV: Bool[Array, "B V"] | None,
    switches: _SamplingSwitches,
    knobs: _Knobs,
) -> Int[Array, "B"]:
    """Choose a token for each row with the row's random key."""
    if seen_BV is not None:
        penalty = knobs.repetition_penalty
        logits_BV = jnp.where(seen_BV, jnp.where(logits_BV < 0, logits_BV * penalty, logits_BV / penalty), logits_BV)
    if switches.filters:
        logits_BV = _filter_logits(logits_BV, knobs)
    # Gumbel-max: argmax(logits / T + g) samples from softmax(logits / T). Multiplied by T it also covers T = 0, greedy.
    noise_BV = jax.vmap(lambda key: jax.random.gumbel(key, logits_BV.shape[1:]))(keys_B)
    return jnp.argmax(logits_BV + knobs.temperature * noise_BV, axis=-1).astype(jnp.int32)


def _filter_logits(logits_BV: Array, knobs: _Knobs) -> Array:
    """Set the logits of excluded tokens to minus infinity."""
    size = logits_BV.shape[-1]
    sorted_BV = -jnp.sort(-logits_BV, axis=-1)
    rank_V = jnp.arange(size)[None]
    top_k = jnp.where(knobs.top_k > 0, knobs.top_k, size)
    scaled_BV = jnp.where(rank_V < top_k, sorted_BV, -jnp.inf) / knobs.temperature
    probs_BV = jax.nn.softmax(scaled_BV, axis=-1)
    cumulative_BV = jnp.cumsum(probs_BV, axis=-1) - probs_BV
    mask_BV = (rank_V < top_k) & (cumulative_BV < knobs.top_p) & (probs_BV >= knobs.min_p * probs_BV[:, :1])
    mask_BV = mask_BV | (rank_V == 0)  # whatever rounding does, the most likely token stays
    threshold_B1 = jnp.min(jnp.where(mask_BV, sorted_BV, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits_BV >= threshold_B1, logits_BV, -jnp.inf)


# The KV cache: a new token costs the work of one token. A scan over the layers carries two stacked arrays, the keys and
# values of all layers. XLA updates them in place: a step writes one column and copies nothing. After `unstack`, keys
# and values are tuples, and the loop over layers is unrolled. Prompts of different lengths end in the same column, with
# padding on the left. Padding has segment 0 in place of 1, so no token attends to it. A layer with a sliding window
# holds as many columns as the others.
# With the rotary scaling types `dynamic` and `longrope`, one more token may change the frequencies of all earlier
# tokens. This changes their keys, and the values of every layer except the first. `_recompute_rows` recomputes both:
# with `longrope` once, when a row grows beyond the length of pretraining; with `dynamic` at each token from there on.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Cache:
    """Keys, values and states of the tokens so far; a pytree."""

    entries: Tree
    """Arrays of the layers. For layers with attention keys and values [B, S, K, H], for those with a delta net the last
    inputs of the convolution and the state. They are stacked, or a tuple of trees if the model's layers are a tuple."""
    segments: Int[Array, "B S"]
    """0 in the padding of a row, 1 elsewhere, also in columns that are not yet written."""
    column: Int[Array, ""]
    """Next column to write."""
    leading: tuple[tuple[Array, ...], ...] = ()
    """Arrays of the leading layers, which are not stacked."""


def cache_bytes(config: DecoderConfig, num_rows: int, length: int, compute_dtype: Any = "float32") -> int:
    """Count the bytes of a cache.

    Args:
        config: the model's sizes.
        num_rows: number of sequences that are generated at once: prompts times samples.
        length: tokens per sequence, including the prompt.
        compute_dtype: dtype of the cached keys and values.

    Returns:
        For each layer with attention ``2 * num_rows * length * num_kv_heads * head_dim`` times the bytes per element.
        The state of a delta net does not depend on `length`.

    Examples:
        >>> cache_bytes(DecoderConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=2, num_heads=2,
        ...                           num_kv_heads=1, head_dim=4), num_rows=3, length=10)
        1920
    """

    def shapes(block: DecoderConfig) -> tuple[jax.ShapeDtypeStruct, ...]:
        return _entry_shapes(block, num_rows, length, compute_dtype)

    return tree_bytes((map_blocks(shapes, config), [*map(shapes, config.leading)]))


def _entry_shapes(config: DecoderConfig, num_rows: int, length: int, dtype: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Return the shapes of the cache of equal layers."""
    net, n = config.delta_net, config.num_layers
    if net is None:
        keys = jax.ShapeDtypeStruct((n, num_rows, length, config.num_kv_heads, config.head_dim), jnp.dtype(dtype))
        return keys, keys
    inputs = jax.ShapeDtypeStruct((n, num_rows, net.conv_size - 1, net.qkv_width), jnp.dtype(dtype))
    state = (n, num_rows, net.num_value_heads, net.key_dim, net.value_dim)
    return inputs, jax.ShapeDtypeStruct(state, jnp.float32)


def empty_cache(model: Decoder, segments_BS: Int[Array, "B S"]) -> _Cache:
    """Create an empty cache with the rows and columns of `segments_BS`."""

    def zeros(config: DecoderConfig, stack: bool) -> tuple[Array, ...]:
        shapes = _entry_shapes(config, segments_BS.shape[0], segments_BS.shape[1], model.compute_dtype)
        return tuple(jnp.zeros(shape.shape if stack else shape.shape[1:], shape.dtype) for shape in shapes)

    if isinstance(model.layers, tuple):
        entries: Any = tuple(map_blocks(lambda block: zeros(block, False), model.config) for _ in model.layers)
    else:
        entries = map_blocks(lambda block: zeros(block, True), model.config)
    leading = tuple(zeros(block, False) for block in model.config.leading)
    return _Cache(entries, segments_BS, jnp.int32(0), leading)


def prefill(
    model: Decoder, tokens_BT: Int[Array, "B T"], positions_BT: Int[Array, "B T"], cache: _Cache
) -> tuple[Float[Array, "B V"], _Cache]:
    """Process prompts into an empty cache and return the float32 logits of the next tokens.

    The tokens attend only to each other, so scores have shape [T, T] and not [T, S].
    """
    mask = AttentionMask(segment_ids=cache.segments[:, : tokens_BT.shape[1]])
    h_BTD, cache = _apply_layers(model, tokens_BT, positions_BT, cache, mask, reads_cache=False)
    return head_logits(model, h_BTD[:, -1:])[:, 0], cache


def step(
    model: Decoder, tokens_B1: Int[Array, "B 1"], positions_B1: Int[Array, "B 1"], cache: _Cache
) -> tuple[Float[Array, "B V"], _Cache]:
    """Append tokens to each row (one, or a chunk of a prompt) and return the float32 logits of the next tokens."""
    query_segments = jax.lax.dynamic_slice_in_dim(cache.segments, cache.column, tokens_B1.shape[1], axis=1)
    mask = AttentionMask(segment_ids=(query_segments, cache.segments), start=cache.column)
    h_BTD, cache = _apply_layers(model, tokens_B1, positions_B1, cache, mask, reads_cache=True)
    return head_logits(model, h_BTD[:, -1:])[:, 0], cache


_read_chunk = jax.jit(step, donate_argnames="cache")


def _recompute_rows(
    model: Decoder, tokens_BS: Int[Array, "B S"], cache: _Cache, lengths_B: Array, mask_B: Array
) -> _Cache:
    """Recompute keys and values of the rows in `mask_B`, with the frequencies of their present lengths.

    `lengths_B` include the token of the cache's next column. Later columns get values that `step` overwrites.
    """
    # Columns not yet written repeat the last position, so `document_lengths` does not count them.
    positions_BS = jnp.clip(jnp.cumsum(cache.segments, axis=1) - 1, 0, jnp.maximum(lengths_B - 1, 0)[:, None])
    rewound_cache = dataclasses.replace(cache, column=jnp.int32(0))
    mask = AttentionMask(segment_ids=cache.segments)
    _, new_cache = _apply_layers(model, tokens_BS, positions_BS, rewound_cache, mask, reads_cache=False)

    def merge(axis: int, new: Array, old: Array) -> Array:
        is_changed = jnp.expand_dims(mask_B, [index for index in range(new.ndim) if index != axis])
        return jnp.where(is_changed, new, old)

    # All rows are computed in one program, and rows that did not change keep their old entries.
    stacked = functools.partial(merge, 0 if isinstance(model.layers, tuple) else 1)
    entries = jax.tree.map(stacked, new_cache.entries, cache.entries)
    leading = jax.tree.map(functools.partial(merge, 0), new_cache.leading, cache.leading)
    return dataclasses.replace(cache, entries=entries, leading=leading)


class _LayerEntries(LayerCache):
    """A layer's part of a cache. Mutable: it holds the entries as the layer has changed them."""

    def __init__(self, entries: tuple[Array, ...], column: Array, index: Array | None, reads_cache: bool) -> None:
        self.entries = entries
        """Arrays of this layer or, with an `index`, of all layers of the stack."""
        self._column, self._index, self._reads_cache = column, index, reads_cache

    def append(self, keys: Array, values: Array) -> tuple[Array, Array]:
        new = (keys, values)
        self._write(new, (_ZERO, self._column))
        if not self._reads_cache:
            return new
        keys, values = (entry.astype(array.dtype) for entry, array in zip(self._read(), new, strict=True))
        return keys, values

    def state(self, empty: tuple[Array, ...]) -> tuple[Array, ...]:
        return self._read() if self._reads_cache else empty

    def replace(self, state: tuple[Array, ...]) -> None:
        self._write(state, ())

    def _read(self) -> tuple[Array, ...]:
        if self._index is None:
            return self.entries
        return tuple(jax.lax.dynamic_index_in_dim(entry, self._index, keepdims=False) for entry in self.entries)

    def _write(self, new: tuple[Array, ...], start: tuple[Any, ...]) -> None:
        written: list[Array] = []
        for entry, array in zip(self.entries, new, strict=True):
            update = array.astype(entry.dtype) if self._index is None else array[None].astype(entry.dtype)
            indices = start if self._index is None else (self._index, *start)
            indices = (*indices, *[_ZERO] * (entry.ndim - len(indices)))
            written.append(jax.lax.dynamic_update_slice(entry, update, indices))
        self.entries = tuple(written)


def _apply_layers(
    model: Decoder, tokens_BT: Array, positions_BT: Array, cache: _Cache, mask: AttentionMask, *, reads_cache: bool
) -> tuple[Array, _Cache]:
    """Apply embedding and layers; return activations, and the cache with the keys and values of these tokens.

    With `reads_cache`, tokens attend to the whole cache (step), otherwise only to each other (prefill).
    """
    h_BTD = embed(model.outer, tokens_BT, model.config, jnp.dtype(model.compute_dtype))
    leading: list[tuple[Array, ...]] = []
    for number, config in enumerate(model.config.leading):
        layer_cache = _LayerEntries(cache.leading[number], cache.column, None, reads_cache)
        h_BTD, _ = layer_forward(model.outer["layers"][str(number)], h_BTD, positions_BT, mask, config, layer_cache)
        leading.append(layer_cache.entries)

    def apply_group(h_BTD: Array, layers: Tree, entries: Tree, index: Any = None) -> tuple[Array, Tree]:
        """Apply one group of layers; `entries` are those of the group or, with an `index`, of all groups."""

        def apply_layer(config: DecoderConfig, layer: Tree, layer_entries: tuple[Array, ...]) -> tuple[Array, ...]:
            nonlocal h_BTD
            layer_cache = _LayerEntries(layer_entries, cache.column, index, reads_cache)
            h_BTD, _ = layer_forward(layer, h_BTD, positions_BT, mask, config, layer_cache)
            return layer_cache.entries

        entries = map_blocks(apply_layer, model.config, layers, entries)
        return h_BTD, entries

    def scan_body(carry: Any, inputs: Any) -> tuple[Any, None]:
        index, layers = inputs
        return apply_group(carry[0], layers, carry[1], index), None

    if isinstance(model.layers, tuple):
        written: list[Tree] = []
        for layers, group_entries in zip(model.layers, cache.entries, strict=True):
            h_BTD, group_entries = apply_group(h_BTD, layers, group_entries)
            written.append(group_entries)
        entries: Any = tuple(written)
    else:
        indices = jnp.arange(model.config.num_groups, dtype=jnp.int32)
        # The cache is in the carry, which XLA updates in place; as scan outputs its entries would be new arrays.
        h_BTD, entries = jax.lax.scan(scan_body, (h_BTD, cache.entries), (indices, model.layers))[0]
    return h_BTD, _Cache(entries, cache.segments, cache.column + tokens_BT.shape[1], tuple(leading))
