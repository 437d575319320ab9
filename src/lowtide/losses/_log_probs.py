"""Log-probabilities of tokens without an array of all logits, [tokens, vocabulary].

The tokens are cut into chunks, as in `chunked_cross_entropy`. The backward pass computes the logits of a chunk again,
because the cotangent of each token is known only then: preference losses weight sequences by all of their tokens.

Shapes: B batch axes, T sequence, C chunk of the sequence, D model, V vocabulary.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..core import LinearWeight, check_integer, check_number, num_token_shards, uniformly_varying
from ._cross_entropy import check_arrays, chunk_length, chunk_log_probs


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
    if soft_cap is not None:
        check_number("soft_cap", soft_cap, above=0, hint="use None to leave logits unchanged")
    if chunk_size is not None:
        check_integer("chunk_size", chunk_size, hint="leave it out to choose it by the size of the vocabulary")
    length, parts = labels.shape[-1], num_token_shards(labels.shape[-1], (h, labels))
    # One device's part of a sequence is cut into chunks, and the parts stay one axis of each chunk.
    chunk = chunk_length(h, head, labels, chunk_size, parts)
    leaves, treedef = jax.tree.flatten(head)
    h, leaves, labels = uniformly_varying((h, leaves, labels))
    num_chunks = -(-length // (parts * chunk))
    padding = parts * chunk * num_chunks - length

    def split(x: Array, axis: int, fill: int) -> Array:
        """Reshape the axis of tokens to [parts, chunks, C], and move the chunks to the front."""
        widths = [(0, padding if index == axis else 0) for index in range(x.ndim)]
        x = jnp.pad(x, widths, constant_values=fill) if padding else x
        x = x.reshape(*x.shape[:axis], parts, num_chunks, chunk, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis + 1, 0)

    axis = labels.ndim - 1
    one_chunk = functools.partial(chunk_log_probs, ignore_index=ignore_index, soft_cap=soft_cap)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def body(leaves: list[Array], tokens: tuple[Array, Array]) -> Any:
        return one_chunk(tokens[0], treedef.unflatten(leaves), tokens[1])

    tokens = split(h, axis, 0), split(labels, axis, ignore_index)
    _, log_probs = jax.lax.scan(lambda _, chunk: (None, body(leaves, chunk)), None, tokens)
    log_probs = jnp.moveaxis(log_probs, 0, axis + 1)
    log_probs = log_probs.reshape(*labels.shape[:-1], length + padding)
    return log_probs[..., :length]
