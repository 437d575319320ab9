"""Sampling text from the decoder, to see what it learned.

One compiled loop that runs the whole prefix for every new token: no key/value cache. That is the right trade for a
sample of a hundred tokens before and after a run; serving belongs to other software.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from ..core import ConfigError, Tree
from ._decoder import Decoder, activations, head_logits


def generate(
    model: Decoder,
    prompt: Int[Array, "P"],
    num_tokens: int,
    *,
    key: Array,
    temperature: float = 0.8,
    hidden: Callable[[Decoder, Tree], Array] | None = None,
) -> Int[Array, "P+num_tokens"]:
    """Continue a prompt.

    Args:
        model: the decoder, with or without adapters.
        prompt: token ids, shape [P], at least one.
        num_tokens: how many tokens to append.
        key: a JAX random key.
        temperature: divides the logits; 0 takes the most likely token.
        hidden: ``hidden(model, batch)``: the activations [B, T, D] that leave the last block, for a model whose layers
            are not all on the device; a function, the same object for each call. By default ``model.stack.hidden``.

    Returns:
        The prompt followed by the new tokens.

    Raises:
        ConfigError: for an empty prompt, or a negative length or temperature.

    Memory:
        Logits of one position and one layer's attention scores over P + num_tokens positions.
    """
    if prompt.shape[0] < 1 or num_tokens < 0 or temperature < 0:
        raise ConfigError(
            "nothing to continue",
            expected="a prompt of at least one token, num_tokens >= 0, temperature >= 0",
            got=f"{prompt.shape[0]} tokens, num_tokens={num_tokens}, temperature={temperature}",
            hint="begin with the token of a newline when there is no prompt",
        )
    padded = jnp.concatenate([prompt, jnp.zeros((num_tokens,), prompt.dtype)])
    return _run(hidden or _hidden, model, padded, jnp.int32(prompt.shape[0]), key, jnp.float32(temperature))


def _hidden(model: Decoder, batch: Tree) -> Array:
    return model.stack.hidden(model.outer, model.layers, batch)


@partial(jax.jit, static_argnums=0)
def _run(hidden: Any, model: Decoder, padded: Array, start: Array, key: Array, temperature: Array) -> Array:
    def step(i: Any, tokens: Array) -> Array:
        h_BTD = activations(hidden(model, {"tokens": tokens[None]}))
        last_V = head_logits(model, jax.lax.dynamic_slice_in_dim(h_BTD, i - 1, 1, axis=1))[0, 0]
        noise = jax.random.gumbel(jax.random.fold_in(key, i), last_V.shape)
        sampled = jnp.argmax(last_V + temperature * noise)
        return tokens.at[i].set(sampled.astype(tokens.dtype))

    return jax.lax.fori_loop(start, padded.shape[0], step, padded)
