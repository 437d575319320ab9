"""Text generation: prompts of different lengths in one batch, a KV cache, and a loop that stops when all rows end.

One compiled program processes prompts and another takes steps. To reuse them, lengths are rounded up to a few sizes,
and values that vary between calls are traced. A token is sampled with the random key of its row and position, so it
depends neither on the other rows nor on the padding.

Shapes: B rows, P columns of prompts, S columns in all, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from ..core import ConfigError, NonFiniteError, Tree
from ._cache import Cache, empty_cache, prefill, recompute_rows, step
from ._decoder import Decoder, activations, head_logits
from ._rope import frequencies_change
from ._sampling import Knobs, Sampling, SamplingSwitches, choose, knobs_of

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
    """Whether an end token stopped the generation, and not the limit."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["cache", "tokens", "lengths", "counts", "is_done", "is_finite", "seen", "keys"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class State:
    """State of a batch during generation."""

    cache: Cache
    tokens: Int[Array, "B S"]
    """Tokens, valid up to and including the cache's next column."""
    lengths: Int[Array, "B"]
    """Number of tokens of a row so far, including its prompt; also the position of the next token."""
    counts: Int[Array, "B"]
    """Number of new tokens of a row."""
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
            are not all on the device. It must be the same function object in each call. It processes all tokens again
            for each new one. None: a KV cache is used.

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
    if prompt.shape[0] < 1 or num_tokens < 0 or temperature < 0:
        raise ConfigError(
            "the prompt, num_tokens or temperature is out of range",
            expected="a prompt of at least one token, num_tokens >= 0, temperature >= 0",
            got=f"{prompt.shape[0]} tokens, num_tokens={num_tokens}, temperature={temperature}",
            hint="use the token of a newline when there is no prompt",
        )
    if num_tokens == 0:
        return prompt
    if hidden is not None:
        padded = jnp.concatenate([prompt, jnp.zeros((num_tokens,), prompt.dtype)])
        return _run_uncached(hidden, model, padded, jnp.int32(prompt.shape[0]), key, jnp.float32(temperature))
    rows = [[int(token) for token in np.asarray(prompt)]]
    check_prompts(model, rows, num_tokens, 1, 1)
    *_, (state, first_column) = _batch(model, rows, num_tokens, key[None], Sampling(temperature=temperature), ())
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
        prompts: token ids of each prompt, at least one.
        num_tokens: maximum number of new tokens.
        key: a JAX random key. With the same key, a prompt at the same index gets the same samples in any batch.
        sampling: sampling settings; None: `Sampling()`.
        end_tokens: tokens that end an answer.
        num_samples: answers per prompt.
        batch_size: number of rows at once; a row is one sample of a prompt.

    Returns:
        An iterator of completions in the order of prompts and their samples, as each batch finishes.

    Raises:
        ConfigError: for an empty prompt, tokens that are not in the vocabulary, or a number below 1.
        NonFiniteError: from the iterator, when logits are not finite.

    Memory:
        The keys and values of a batch (`cache_bytes`), with prompt and answer rounded up by at most a quarter; logits
        [B, V] in float32; and one layer's activations of the longest prompt. Nothing grows with the number of prompts.
        A GPU copies a layer's weights at each step, unless the model is unstacked (`unstack`). The rotary scaling types
        `longrope` and `dynamic` need activations, keys and values of all columns a second time. The reason is that
        texts beyond the length of pretraining are recomputed: with `longrope` once, with `dynamic` for each token.

    Examples:
        >>> from lowtide.models import DecoderConfig, init
        >>> config = DecoderConfig(vocab_size=32, hidden_size=8, intermediate_size=16, num_layers=1, num_heads=2,
        ...                        num_kv_heads=1, head_dim=4)
        >>> model = init(config, key=jax.random.key(0))
        >>> [len(c.tokens) for c in generate_batch(model, [[1, 2, 3], [4]], 5, key=jax.random.key(1))]
        [5, 5]
    """
    sampling = Sampling() if sampling is None else sampling
    check_prompts(model, prompts, num_tokens, num_samples, batch_size)
    ends = tuple(end_tokens)
    rows = [(index, sample) for index in range(len(prompts)) for sample in range(num_samples)]
    return _completions(model, prompts, num_tokens, key, sampling, ends, rows, batch_size)


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
        ConfigError: as in `generate_batch`.
        NonFiniteError: as in `generate_batch`.

    Memory:
        As in `generate_batch`, with one row.
    """
    sampling = Sampling() if sampling is None else sampling
    check_prompts(model, [prompt], num_tokens, 1, 1)
    return _tokens(model, prompt, num_tokens, key, sampling, tuple(end_tokens))


def _tokens(
    model: Decoder, prompt: Sequence[int], num_tokens: int, key: Array, sampling: Sampling, ends: tuple[int, ...]
) -> Iterator[int]:
    keys = row_keys(key, [(0, 0)])
    for count, (state, first_column) in enumerate(
        _batch(model, [prompt], num_tokens, keys, sampling, ends, steps_per_call=1)
    ):
        if state.counts[0] <= count:
            return
        yield int(state.tokens[0, first_column + count])


def _completions(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    key: Array,
    sampling: Sampling,
    ends: tuple[int, ...],
    rows: list[tuple[int, int]],
    batch_size: int,
) -> Iterator[Completion]:
    size = min(batch_size, len(rows))
    for start in range(0, len(rows), size):
        batch_rows = rows[start : start + size]
        # The last batch is padded to the size of the others, so that no further program is compiled.
        keys = row_keys(key, [*batch_rows, *[(0, 0)] * (size - len(batch_rows))])
        batch_prompts: list[Sequence[int]] = [prompts[index] for index, _ in batch_rows]
        *_, (state, first_column) = _batch(model, batch_prompts, num_tokens, keys, sampling, ends)
        tokens, counts = np.asarray(state.tokens), np.asarray(state.counts)
        for row, (index, sample) in enumerate(batch_rows):
            count = int(counts[row])
            new_tokens = tuple(int(token) for token in tokens[row, first_column : first_column + count])
            yield Completion(index, sample, new_tokens, bool(state.is_done[row]) and count < num_tokens)


def _batch(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    keys_B: Array,
    sampling: Sampling,
    ends: tuple[int, ...],
    steps_per_call: int = _STEPS_PER_CALL,
) -> Iterator[tuple[State, int]]:
    """Continue a batch; yield its state every `steps_per_call` steps, with the column of the first new token.

    With fewer prompts than keys, the other rows are padding. `advance` donates a state when the next one is requested.
    """
    width = _round_up(max(map(len, prompts)))
    size = _round_up(width + num_tokens)
    tokens_BS = np.zeros((len(keys_B), size), np.int32)
    segments_BS = np.zeros((len(keys_B), size), np.int32)
    for row, prompt in enumerate(prompts):
        tokens_BS[row, width - len(prompt) : width] = prompt
        segments_BS[row, width - len(prompt) :] = 1
    switches, knobs = knobs_of(sampling)
    ends_E = padded_ends(ends)
    limit = width + num_tokens
    state = _start(model, jnp.asarray(tokens_BS), jnp.asarray(segments_BS), keys_B, ends_E, knobs, switches, width)
    column = width + 1
    while True:
        check_finite(state)
        yield state, width
        if column >= limit or bool(jnp.all(state.is_done)):
            return
        column = min(column + steps_per_call, limit)
        state = advance(model, state, ends_E, knobs, jnp.int32(column), switches)


@partial(jax.jit, static_argnames=("switches", "width"))
def _start(
    model: Decoder,
    tokens_BS: Array,
    segments_BS: Array,
    keys_B: Array,
    ends_E: Array,
    knobs: Knobs,
    switches: SamplingSwitches,
    width: int,
) -> State:
    segments_BP = segments_BS[:, :width]
    lengths_B = jnp.sum(segments_BP, axis=1)
    # Prompts are padded on the left: positions begin at 0 at a row's first token, wherever that is.
    positions_BP = jnp.maximum(jnp.cumsum(segments_BP, axis=1) - 1, 0)
    logits_BV, cache = prefill(model, tokens_BS[:, :width], positions_BP, empty_cache(model, segments_BS))
    seen_BV = None
    if switches.penalises:
        rows_B1 = jnp.arange(len(tokens_BS))[:, None]
        seen_BV = jnp.zeros(logits_BV.shape, jnp.int32).at[rows_B1, tokens_BS[:, :width]].max(segments_BP) > 0
    # Rows without a prompt only fill the batch; they count as done from the start.
    zeros_B, is_padding_B = jnp.zeros_like(lengths_B), lengths_B == 0
    state = State(cache, tokens_BS, lengths_B, zeros_B, is_padding_B, jnp.bool_(True), seen_BV, keys_B)
    return append(state, logits_BV, ends_E, switches, knobs)


@partial(jax.jit, static_argnames="switches", donate_argnames="state")
def advance(
    model: Decoder, state: State, ends_E: Array, knobs: Knobs, until: Array, switches: SamplingSwitches
) -> State:
    """Take steps up to a column, or until all rows have ended."""

    def is_running(state: State) -> Array:
        return (state.cache.column + 1 < until) & ~jnp.all(state.is_done) & state.is_finite

    def take_step(state: State) -> State:
        last_B1 = jax.lax.dynamic_slice_in_dim(state.tokens, state.cache.column, 1, axis=1)
        logits_BV, cache = step(model, last_B1, state.lengths[:, None] - 1, _recompute_if_stale(model, state))
        return append(dataclasses.replace(state, cache=cache), logits_BV, ends_E, switches, knobs)

    return jax.lax.while_loop(is_running, take_step, state)


def _recompute_if_stale(model: Decoder, state: State) -> Cache:
    """Return the cache, recomputed for rows whose newest token changes the rotary frequencies of earlier tokens."""
    changed_B = frequencies_change(model.config, state.lengths)
    if changed_B is None:
        return state.cache
    # Ended rows need no valid cache, so their growth must not trigger the costly recomputation.
    changed_B = changed_B & ~state.is_done

    def recompute(cache: Cache) -> Cache:
        return recompute_rows(model, state.tokens, cache, state.lengths, changed_B)

    return jax.lax.cond(jnp.any(changed_B), recompute, lambda cache: cache, state.cache)


def append(state: State, logits_BV: Array, ends_E: Array, switches: SamplingSwitches, knobs: Knobs) -> State:
    """Sample the token of the cache's next column."""
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


def row_keys(key: Array, rows: Sequence[tuple[int, int]]) -> Array:
    """Return a random key for each row, which is a pair of a prompt and a sample."""
    prompts, samples = (jnp.asarray(column, jnp.uint32) for column in zip(*rows, strict=True))
    return jax.vmap(lambda index, sample: jax.random.fold_in(jax.random.fold_in(key, index), sample))(prompts, samples)


def check_finite(state: State) -> None:
    """Raise NonFiniteError when a token was sampled from logits that are not finite."""
    if not bool(state.is_finite):
        raise NonFiniteError(
            "the logits of the next token are not finite",
            expected="weights that are finite numbers",
            hint="check for nan or inf in the weights, and for overflow in float16; lowtide inspect shows the dtypes",
        )


def padded_ends(ends: Sequence[int]) -> Int[Array, "E"]:
    """Return the end tokens, padded to a multiple of 8 with -1, so that few lengths are compiled."""
    return jnp.asarray([*ends, *[-1] * (-len(ends) % 8)] or [-1] * 8, jnp.int32)


def _round_up(length: int) -> int:
    """Round a length up, above 16 by at most a quarter, so that few lengths are compiled."""
    # A length of n bits is at least 2 ** (n - 1), and the unit is 2 ** (n - 3): rounding adds less than a quarter.
    unit = max(16, 1 << max(length.bit_length() - 3, 0))
    return -(-length // unit) * unit


def check_prompts(
    model: Decoder, prompts: Sequence[Sequence[int]], num_tokens: int, num_samples: int, batch_size: int
) -> None:
    for name, value in (("num_tokens", num_tokens), ("num_samples", num_samples), ("batch_size", batch_size)):
        if value < 1:
            raise ConfigError(f"{name} is too small", expected="at least 1", got=value, hint="pass at least 1")
    size = model.config.vocab_size
    for index, prompt in enumerate(prompts):
        if len(prompt) < 1:
            raise ConfigError(
                f"prompt {index} is empty",
                expected="at least one token",
                hint="use the token of a newline when there is no prompt",
            )
        if min(prompt) < 0 or max(prompt) >= size:
            raise ConfigError(
                f"prompt {index} has a token that is not in the vocabulary",
                expected=f"ids from 0 to {size - 1}",
                got=next(token for token in prompt if not 0 <= token < size),
                hint="use the tokenizer of this model",
            )


@partial(jax.jit, static_argnums=0)
def _run_uncached(hidden: Any, model: Decoder, padded: Array, start: Array, key: Array, temperature: Array) -> Array:
    def step(i: Any, tokens: Array) -> Array:
        # Columns without a token repeat the last position, so `document_lengths` does not count them.
        positions = jnp.minimum(jnp.arange(tokens.shape[0]), i - 1)
        h_BTD = activations(hidden(model, {"tokens": tokens[None], "positions": positions[None]}))
        last_V = head_logits(model, jax.lax.dynamic_slice_in_dim(h_BTD, i - 1, 1, axis=1))[0, 0]
        noise = jax.random.gumbel(jax.random.fold_in(key, i), last_V.shape)
        sampled = jnp.argmax(last_V + temperature * noise)
        return tokens.at[i].set(sampled.astype(tokens.dtype))

    return jax.lax.fori_loop(start, padded.shape[0], step, padded)
