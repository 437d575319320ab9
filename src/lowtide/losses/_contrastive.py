"""Contrastive loss of embeddings, and embeddings of large batches in the memory of a small one.

A contrastive loss compares every query with every document of the batch, so its batch should be large. The embeddings
themselves are small; the activations that produce them are not. `embed_in_chunks` keeps no activations: the backward
pass embeds one chunk after the other again, as GradCache does.

Sources: van den Oord et al., arXiv:1807.03748 (InfoNCE); Gao et al., arXiv:2101.06983 (GradCache).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..core import StructureError, Tree, check_integer, check_number, leaves_with_paths


def info_nce(
    queries: Float[Array, "B D"],
    documents: Float[Array, "C D"],
    *,
    temperature: float = 0.05,
    is_symmetric: bool = False,
    weights: Float[Array, "B"] | None = None,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Compute the InfoNCE loss: each query has to select its document among all documents of the batch.

    Args:
        queries: embeddings of the queries, [B, D]; they are normalised here.
        documents: embeddings of the documents, [C, D] with C at least B. Document ``i`` belongs to query ``i``; those
            from B on are negatives of all queries, such as hard negatives.
        temperature: divisor of the cosine similarities.
        is_symmetric: whether documents also have to select their queries; the loss is then the mean of both.
        weights: 0 for a query and its document that are padding, else 1; None: 1 for each.

    Returns:
        The mean loss in nats, and the metrics ``accuracy`` and ``similarity`` (of a query and its document).

    Raises:
        StructureError: for arrays whose shapes do not fit.
        ConfigError: for a `temperature` that is not above 0.

    Memory:
        Similarities [B, C] in float32, 64 MiB for 4,096 queries and documents.

    Examples:
        >>> loss, metrics = info_nce(jnp.eye(3), jnp.eye(3), temperature=1.0)
        >>> round(float(loss), 3), float(metrics["accuracy"])
        (0.551, 1.0)
    """
    check_number("temperature", temperature, above=0, hint="0.05 is common")
    if queries.ndim != 2 or documents.ndim != 2 or queries.shape[1] != documents.shape[1]:
        raise StructureError(f"queries and documents must be [B, D] and [C, D], not {queries.shape}, {documents.shape}")
    num_queries = queries.shape[0]
    if documents.shape[0] < num_queries:
        hint = "give each query its document at the same index"
        raise StructureError(f"{num_queries} queries need as many documents, not {documents.shape[0]}", hint=hint)
    units = (_normalised(array.astype(jnp.float32)) for array in (queries, documents))
    similarities = jnp.einsum("bd,cd->bc", *units)
    logits, matches = similarities / temperature, jnp.arange(num_queries)
    weights = jnp.ones(num_queries) if weights is None else weights
    # A padding query keeps its own match, so that its softmax has a finite term.
    is_padding = jnp.pad(weights == 0, (0, documents.shape[0] - num_queries))
    is_match = jnp.eye(num_queries, documents.shape[0], dtype=bool)
    logits = jnp.where((is_padding[None] | (weights == 0)[:, None]) & ~is_match, -jnp.inf, logits)
    mean = lambda values: jnp.sum(values * weights) / jnp.maximum(jnp.sum(weights), 1)  # noqa: E731
    loss = -mean(jax.nn.log_softmax(logits, axis=1)[matches, matches])
    if is_symmetric:
        of_documents = jax.nn.log_softmax(logits[:, :num_queries], axis=0)
        loss = (loss - mean(of_documents[matches, matches])) / 2
    is_right = jnp.argmax(logits, axis=1) == matches
    metrics = {
        "accuracy": mean(is_right),
        "similarity": mean(similarities[matches, matches]),
    }
    return loss, jax.lax.stop_gradient(metrics)


def embed_in_chunks(embed: Callable[[Tree, Tree], Array], model: Tree, batch: Tree, chunk_size: int) -> Array:
    """Compute the embeddings of a batch chunk by chunk; the backward pass computes each chunk again.

    Args:
        embed: a function of the model and a chunk of the batch that returns embeddings [rows, D].
        model: the model, with or without adapters; `embed` may also close over it.
        batch: a tree of arrays [B, ...].
        chunk_size: rows of a chunk; it has to divide B.

    Returns:
        The embeddings [B, D], with the gradients of ``embed(model, batch)``.

    Raises:
        StructureError: for leaves with different numbers of rows, or if `chunk_size` does not divide them.
        ConfigError: for a `chunk_size` below 1.

    Memory:
        Activations of one chunk, and all embeddings. With several chunks, a gradient costs one more forward pass.

    Examples:
        >>> w, x = jnp.ones((4, 2)), jnp.ones((6, 4))
        >>> embed_in_chunks(lambda w, x: x @ w, w, x, 3).shape
        (6, 2)
    """
    check_integer("chunk_size", chunk_size)
    rows = {path: leaf.shape[:1] for path, leaf in leaves_with_paths(batch)}
    sizes = set(rows.values())
    if len(sizes) != 1 or () in sizes or next(iter(sizes))[0] % chunk_size:
        listed = ", ".join(f"{path} {list(size)}" for path, size in rows.items())
        hint = "pad the batch to a multiple of chunk_size"
        raise StructureError(f"leaves need one number of rows, a multiple of {chunk_size}, not {listed}", hint=hint)
    if next(iter(sizes))[0] == chunk_size:
        return embed(model, batch)
    chunks = jax.tree.map(lambda leaf: leaf.reshape(-1, chunk_size, *leaf.shape[1:]), batch)
    recomputed = jax.checkpoint(embed, prevent_cse=False)
    _, embeddings = jax.lax.scan(lambda _, chunk: (None, recomputed(model, chunk)), None, chunks)
    return embeddings.reshape(-1, *embeddings.shape[2:])


def _normalised(x_BD: Array) -> Array:
    # A row of zeros stays zero, with a finite gradient.
    squares = jnp.sum(x_BD * x_BD, axis=1, keepdims=True)
    return x_BD * jax.lax.rsqrt(jnp.maximum(squares, 1e-24))
