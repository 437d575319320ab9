"""Log-probabilities of tokens without an array of all logits, [tokens, vocabulary].

The tokens are cut into chunks, as in `chunked_cross_entropy`. The backward pass computes the logits of a chunk again,
because the cotangent of each token is known only then: preference losses weight sequences by all of their tokens.

Shapes: B batch axes, T sequence, C chunk of the sequence, D model, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..core import LinearWeight, Tree, check_integer, check_number, num_token_shards, uniformly_varying
from ._cross_entropy import check_arrays, chunk_length, chunk_log_probs

_Result = TypeVar("_Result")


def chunked_log_probs(
    h: Float[Array, "*B T D"],
    head: Array | LinearWeight,
    labels: Int[Array, "*B T"],
    *,
    ignore_index: int = -100,
    chunk_size: int | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "*B T"]:
    """Compute the log-probability of each label under ``softmax(h @ head.T)``, in chunks.

    Args:
        h: activations that enter the head, shape [..., T, D], any floating dtype.
        head: the head, shape [V, D] (an embedding can be passed unchanged), or a `LinearWeight` in its place.
        labels: the class of each position, shape [..., T]. A label outside [0, V) other than `ignore_index` gives NaN,
            also in the gradients.
        ignore_index: the label of positions whose log-probability is 0.
        chunk_size: number of tokens, over all batch axes and devices, whose logits exist at the same time. None: as in
            `chunked_cross_entropy`.
        soft_cap: logits become ``soft_cap * tanh(logits / soft_cap)``; None leaves them unchanged.

    Returns:
        Log-probabilities [..., T] in float32. A sum over the last axis is the log-probability of a sequence.

    Raises:
        StructureError: when shapes or dtypes do not fit.
        ConfigError: for a chunk size below 1, an `ignore_index` that is not a 32-bit integer, or a `soft_cap` that is
            not a positive number.

    Memory:
        Float32 logits of one chunk, in the gradient a small multiple of these, and a copy of `h` in chunks. Logits are
        computed twice under differentiation.

    Examples:
        >>> h, head = jnp.ones((2, 8, 4)), jnp.zeros((10, 4))
        >>> labels = jnp.array([[1] * 8, [2] * 4 + [-100] * 4])
        >>> sums = jnp.sum(chunked_log_probs(h, head, labels, chunk_size=4), axis=-1)
        >>> [round(number, 2) for number in sums.tolist()]
        [-18.42, -9.21]
    """
    check_arrays(h, head, labels)
    hint = "if no position is ignored, pass an integer that is not a label"
    check_integer("ignore_index", ignore_index, -(2**31), 2**31 - 1, hint=hint)
    check_chunks(chunk_size, soft_cap=soft_cap)
    one_chunk = functools.partial(chunk_log_probs, ignore_index=ignore_index, soft_cap=soft_cap)
    return map_chunks(lambda head, h, labels: one_chunk(h, head, labels), head, (h, labels), chunk_size)


def check_chunks(chunk_size: int | None, **soft_caps: float | None) -> None:
    """Raise ConfigError for a chunk size below 1, or a soft cap that is not positive."""
    for name, soft_cap in soft_caps.items():
        if soft_cap is not None:
            check_number(name, soft_cap, above=0, hint="use None to leave logits unchanged")
    if chunk_size is not None:
        check_integer("chunk_size", chunk_size, hint="leave it out to choose it by the size of the vocabulary")


def map_chunks(fn: Callable[..., _Result], weights: Tree, tokens: tuple[Array, ...], chunk_size: int | None) -> _Result:
    """Apply a function to chunks of a sequence, one after the other; the backward pass computes each chunk again.

    `fn` computes arrays [*B, C, ...] from `weights`, a head or a tuple of heads, and the chunks of `tokens`. These are
    arrays [*B, T, ...], first the activations [*B, T, D] and last the labels [*B, T]. Padding of the last chunk is 0.
    """
    labels = tokens[-1]
    axis, length = labels.ndim - 1, labels.shape[-1]
    parts = num_token_shards(length, (tokens[0], labels))
    # One device's part of a sequence is cut into chunks, and the parts stay one axis of each chunk.
    head = weights[0] if isinstance(weights, tuple) else weights
    chunk = chunk_length(tokens[0], head, labels, chunk_size, parts)
    leaves, treedef = jax.tree.flatten(weights)
    leaves, tokens = uniformly_varying((leaves, tokens))
    num_chunks = -(-length // (parts * chunk))
    padding = parts * chunk * num_chunks - length

    def split(x: Array) -> Array:
        """Reshape the axis of tokens to [parts, chunks, C], and move the chunks to the front."""
        x = jnp.pad(x, [(0, padding if index == axis else 0) for index in range(x.ndim)]) if padding else x
        x = x.reshape(*x.shape[:axis], parts, num_chunks, chunk, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis + 1, 0)

    def join(x: Array) -> Array:
        x = jnp.moveaxis(x, 0, axis + 1)
        x = x.reshape(*x.shape[:axis], length + padding, *x.shape[axis + 3 :])
        return jax.lax.slice_in_dim(x, 0, length, axis=axis)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def body(leaves: list[Array], chunks: tuple[Array, ...]) -> Any:
        return fn(treedef.unflatten(leaves), *chunks)

    _, results = jax.lax.scan(lambda _, chunks: (None, body(leaves, chunks)), None, tuple(map(split, tokens)))
    return jax.tree.map(join, results)
