"""Gated delta rule: linear attention whose state forgets and corrects, computed in chunks of tokens.

Each value head has a state S [X, Y]. A token decays the state, and then moves the value that the state returns for the
token's key towards the token's value:

    S_t = a_t S_{t-1} + b_t k_t (v_t - a_t S_{t-1}ᵀ k_t)ᵀ        out_t = S_tᵀ q_t

Within a chunk, the corrections solve a triangular system, so that a chunk costs a few matrix products. Spans of chunks
are checkpoints: the forward pass keeps the state before each span, and the backward pass recomputes one span at a time.

Shapes: B batch, T sequence, K key heads, G value heads per key head, X key width, Y value width, N chunks of a span,
C tokens of a chunk (indices i and j), W channels of a convolution.

Sources: Yang et al., "Gated Delta Networks" (arXiv:2412.06464), section 3.3; Yang et al., "Parallelizing Linear
Transformers with the Delta Rule" (arXiv:2406.06484), for the triangular system.

Known inefficiency: XLA runs the products of one chunk after another. A fused kernel would keep the state on the chip.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..core import ConfigError, Tree, check_integer

_CHUNK = 64
_SPAN_TOKENS = 1024
"""Tokens of a span. Longer spans keep fewer states for the backward pass, and need more memory for one span."""
_NORM_EPS = 1e-6
"""Added to the squared length of queries and keys, as in flash-linear-attention and in transformers."""


def gated_delta_rule(
    q: Float[Array, "B T K X"],
    k: Float[Array, "B T K X"],
    v: Float[Array, "B T H Y"],
    log_decay: Float[Array, "B T H"],
    beta: Float[Array, "B T H"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    state: Float[Array, "B H X Y"] | None = None,
    scale: float | None = None,
    normalize: bool = False,
    chunk_size: int = _CHUNK,
) -> tuple[Float[Array, "B T H Y"], Float[Array, "B H X Y"]]:
    """Compute the gated delta rule, the linear attention of Qwen3-Next and Qwen3.5.

    Products have operands of the dtype of `q`, and float32 sums. The state is float32.

    Args:
        q: queries, [B, T, K, X].
        k: keys, [B, T, K, X].
        v: values, [B, T, H, Y]. H is a multiple of K; consecutive value heads share a key head.
        log_decay: logarithm of the decay of the state before each token, at most 0, [B, T, H].
        beta: weight of each token's correction, usually between 0 and 1, [B, T, H].
        segment_ids: document of each token. The state is reset where the document changes. None: one document per row.
        state: state before the first token, in float32; None: zeros. It belongs to the document of the first token.
        scale: factor of the queries; None: ``X ** -0.5``.
        normalize: whether queries and keys are divided by their lengths first.
        chunk_size: tokens of a chunk. The result does not depend on it, except for rounding.

    Returns:
        The output, with the shape and dtype of `v`, and the state after the last token in float32.

    Raises:
        ConfigError: for shapes that do not fit, no tokens, a number of value heads that is no multiple of the number of
            key heads, and a `chunk_size` below 1.

    Memory:
        In the backward pass one state of ``H * X * Y * 4`` bytes per row for every 1,024 tokens, and the intermediate
        arrays of 1,024 tokens. The cost: the backward pass computes each span once more.

    Examples:
        >>> q = k = jnp.ones((1, 5, 1, 4))
        >>> v, gates = jnp.ones((1, 5, 2, 3)), jnp.full((1, 5, 2), 0.5)
        >>> out, state = gated_delta_rule(q, k, v, jnp.log(gates), gates, normalize=True)
        >>> out.shape, state.shape
        ((1, 5, 2, 3), (1, 2, 4, 3))
    """
    check_integer("chunk_size of gated_delta_rule", chunk_size)
    _check_shapes(q, k, v, log_decay, beta, segment_ids)
    (num_rows, _, num_keys, key_dim), (num_values, value_dim) = q.shape, v.shape[2:]
    if num_values % num_keys:
        problem = f"gated_delta_rule: {num_values} value heads are no multiple of {num_keys} key heads"
        raise ConfigError(problem, hint="give q and k the same number of heads, and v that number or a multiple of it")
    if state is None:
        state = jnp.zeros((num_rows, num_values, key_dim, value_dim), jnp.float32)
    tokens = {"q": q, "k": k, "v": v, "log_decay": log_decay, "beta": beta}

    def step(state: Array, tokens: Tree, documents: Documents | None) -> tuple[Array, Array]:
        out, state = delta_span(
            **tokens, documents=documents, state=state, scale=scale, normalize=normalize, chunk_size=chunk_size
        )
        return state, out

    final_state, out = scan_spans(step, state, tokens, segment_ids)
    return out, final_state


def _check_shapes(q: Array, k: Array, v: Array, log_decay: Array, beta: Array, segment_ids: Array | None) -> None:
    shapes = {"q": q, "k": k, "v": v, "log_decay": log_decay, "beta": beta, "segment_ids": segment_ids}
    expected = {"q": (*v.shape[:2], *q.shape[2:4]), "k": q.shape, "v": (*v.shape[:3], *v.shape[-1:])}
    expected |= dict.fromkeys(("log_decay", "beta"), v.shape[:3]) | {"segment_ids": v.shape[:2]}
    for name, array in shapes.items():
        if array is not None and (array.shape != expected[name] or 0 in array.shape or q.ndim != 4 or v.ndim != 4):
            hint = "give q and k [B, T, K, X], v [B, T, H, Y], log_decay and beta [B, T, H], segment_ids [B, T]"
            raise ConfigError(f"gated_delta_rule: {name} has shape {array.shape}", hint=hint)


class Documents(NamedTuple):
    """Documents of the tokens of a span, numbered within each row."""

    tokens: Int[Array, "B t"]
    """Document of each token."""
    before: Int[Array, "B"]
    """Document of the last token before the span."""


def scan_spans(
    step: Callable[[Any, Tree, Documents | None], tuple[Any, Array]],
    state: Any,
    tokens: Tree,
    segment_ids: Int[Array, "B T"] | None = None,
) -> tuple[Any, Array]:
    """Run a recurrence over spans of tokens, with one checkpoint per span.

    Args:
        step: function ``(state, tokens, documents) -> (state, out)`` of up to 2,047 tokens [B, t, ...]; spans have
            1,024 tokens, and fewer than two spans are one. There are no `documents` without `segment_ids`.
        state: tree of arrays before the first token, which belongs to the document of the first token.
        tokens: tree of arrays [B, T, ...].
        segment_ids: document of each token; a document begins where the id changes.

    Returns:
        The state after the last token, and the outputs of all tokens [B, T, ...].

    Memory:
        For the backward pass, the state before each span; the residuals of `step` exist for one span at a time.
    """
    documents = None
    if segment_ids is not None:
        borders = segment_ids[:, 1:] != segment_ids[:, :-1]
        documents = jnp.pad(jnp.cumsum(borders, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))
    length = jax.tree.leaves(tokens)[0].shape[1]
    num_spans, num_rest = divmod(length, _SPAN_TOKENS)

    def run_span(carry: Any, xs: Any) -> tuple[Any, Array]:
        (state, before), (tokens, documents) = carry, xs
        state, out = step(state, tokens, None if documents is None else Documents(documents, before))
        return (state, before if documents is None else documents[:, -1]), out

    def split(array: Array) -> Array:
        spans = array[:, : num_spans * _SPAN_TOKENS]
        return jnp.moveaxis(spans.reshape(array.shape[0], num_spans, _SPAN_TOKENS, *array.shape[2:]), 1, 0)

    xs = (tokens, documents)
    carry: Any = (state, None if documents is None else documents[:, 0])
    outs: list[Array] = []
    if num_spans > 1 or (num_spans and not num_rest):
        carry, out = jax.lax.scan(jax.checkpoint(run_span, prevent_cse=False), carry, jax.tree.map(split, xs))
        outs.append(jnp.moveaxis(out, 0, 1).reshape(out.shape[1], -1, *out.shape[3:]))
    else:
        num_rest = length
    if num_rest:
        carry, out = jax.checkpoint(run_span)(carry, jax.tree.map(lambda array: array[:, length - num_rest :], xs))
        outs.append(out)
    return carry[0], outs[0] if len(outs) == 1 else jnp.concatenate(outs, axis=1)


def delta_span(
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    beta: Array,
    documents: Documents | None,
    state: Array,
    *,
    scale: float | None = None,
    normalize: bool = False,
    chunk_size: int = _CHUNK,
) -> tuple[Array, Array]:
    """Compute `gated_delta_rule` for one span of `scan_spans`, without checkpoints; arguments as there."""
    (num_rows, length, num_keys, key_dim), (num_values, value_dim) = q.shape, v.shape[2:]
    dtype, chunk = q.dtype, min(chunk_size, length)
    num_chunks = -(-length // chunk)
    dot = functools.partial(
        jnp.einsum,
        preferred_element_type=jnp.float32,
        precision=jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None,
    )
    if normalize:
        q, k = (_normalized(x) for x in (q, k))
    q = (q * (key_dim**-0.5 if scale is None else scale)).astype(dtype)

    def chunks(x: Array, *heads: int, mode: str = "constant") -> Array:
        """Pad, split the tokens into chunks, and move the chunks to the front and the heads before the tokens."""
        widths = [(0, 0), (0, num_chunks * chunk - length)] + [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, widths, mode=mode) if num_chunks * chunk > length else x
        x = x.reshape(num_rows, num_chunks, chunk, *heads, *x.shape[3:])
        return jnp.moveaxis(jnp.moveaxis(x, 1, 0), 2, 2 + len(heads))

    # Padding has keys, values and betas of zero and a decay of one, so it changes neither outputs nor the state.
    groups = (num_keys, num_values // num_keys)
    q_NBKCX, k_NBKCX, v_NBKGCY = chunks(q, num_keys), chunks(k, num_keys), chunks(v, *groups)
    beta_NBKGC = chunks(beta.astype(jnp.float32), *groups)
    total_NBKGC = jnp.cumsum(chunks(log_decay.astype(jnp.float32), *groups), axis=-1)
    # mask_ij: token i reads the correction of token j. Differences of other tokens may overflow, so they are replaced
    # before the exponential, which keeps gradients finite.
    mask = jnp.expand_dims(jnp.tri(chunk, dtype=bool), (0, 1, 2, 3))
    entry_decay = jnp.exp(total_NBKGC)
    if documents is not None:
        documents_NBC = chunks(documents.tokens, mode="edge")
        same = documents_NBC[..., :, None] == documents_NBC[..., None, :]
        mask = mask & same[:, :, None, None]
        before_NB = jnp.concatenate([documents.before[None], documents_NBC[:-1, :, -1]])
        continues_NBC = documents_NBC == before_NB[..., None]
        entry_decay = jnp.where(continues_NBC[:, :, None, None], entry_decay, 0.0)
    differences = total_NBKGC[..., :, None] - total_NBKGC[..., None, :]
    decay_ij = jnp.where(mask, jnp.exp(jnp.where(mask, differences, 0.0)), 0.0)
    gram = dot("nbkix,nbkjx->nbkij", k_NBKCX, k_NBKCX)[:, :, :, None]
    lower = (
        beta_NBKGC[..., None]
        * gram
        * jnp.where(jnp.expand_dims(jnp.eye(chunk, dtype=bool), (0, 1, 2, 3)), 0.0, decay_ij)
    )
    inverse = _inverse(lower, dtype == jnp.float32)
    weighted = inverse * beta_NBKGC[..., None, :]
    # corrections = u - w @ (state before the chunk)
    u_NBKGCY = dot("nbkgij,nbkgjy->nbkgiy", weighted.astype(dtype), v_NBKGCY.astype(dtype))
    w_NBKGCX = dot("nbkgij,nbkjx->nbkgix", (weighted * entry_decay[..., None, :]).astype(dtype), k_NBKCX).astype(dtype)
    exit_decay = decay_ij[..., -1, :]

    def chunk_step(state: Array, inputs: Any) -> tuple[Array, tuple[Array, Array]]:
        u, w, k, exit_decay, chunk_decay = inputs
        corrections = u - dot("bkgix,bkgxy->bkgiy", w, state.astype(dtype))
        update = dot("bkjx,bkgjy->bkgxy", k, (corrections * exit_decay[..., None]).astype(dtype))
        return state * chunk_decay[..., None, None] + update, (state.astype(dtype), corrections.astype(dtype))

    state = state.astype(jnp.float32).reshape(num_rows, *groups, key_dim, value_dim)
    inputs = (u_NBKGCY, w_NBKGCX, k_NBKCX, exit_decay, entry_decay[..., -1])
    state, (states, corrections) = jax.lax.scan(chunk_step, state, inputs)
    scores = dot("nbkix,nbkjx->nbkij", q_NBKCX, k_NBKCX)[:, :, :, None] * decay_ij
    out = dot("nbkgij,nbkgjy->nbkgiy", scores.astype(dtype), corrections)
    out = out + entry_decay[..., None] * dot("nbkix,nbkgxy->nbkgiy", q_NBKCX, states)
    out = jnp.moveaxis(jnp.moveaxis(out, 4, 2), 0, 1).reshape(num_rows, num_chunks * chunk, num_values, value_dim)
    return out[:, :length].astype(v.dtype), state.reshape(num_rows, num_values, key_dim, value_dim)


def _normalized(x: Array) -> Array:
    """Divide each vector by its length, in float32; the result has the dtype of `x`."""
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.sum(x32 * x32, axis=-1, keepdims=True) + _NORM_EPS)).astype(x.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _inverse(lower: Float[Array, "*B C C"], exact: bool) -> Float[Array, "*B C C"]:
    """Return the inverse of ``I + lower`` for a strictly lower triangular matrix.

    The inverse is built from inverses of diagonal blocks of 1, 2, 4, ... rows. For two blocks P and Q with the block R
    below P, the inverse of [[P, 0], [R, Q]] has the block -Q⁻¹ R P⁻¹ in the place of R. Like forward substitution, this
    is stable. The shorter product (I - L)(I + L²)(I + L⁴)... is not: equal keys make powers of L as large as 1e18.
    """
    size, product = lower.shape[-1], _product(exact)
    index = jnp.arange(size)
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=lower.dtype), lower.shape)
    block = 1
    while block < size:
        rows, columns = index[:, None] // block, index[None] // block
        is_below = jnp.expand_dims((rows == columns + 1) & (rows % 2 == 1), [*range(lower.ndim - 2)])
        below = jnp.where(is_below, lower, 0.0)
        inverse = inverse - (below if block == 1 else product(product(inverse, below), inverse))
        block *= 2
    return inverse


@_inverse.defjvp
def _inverse_jvp(exact: bool, primals: Any, tangents: Any) -> tuple[Array, Array]:
    inverse, product = _inverse(*primals, exact), _product(exact)
    return inverse, -product(product(inverse, tangents[0]), inverse)


def _product(exact: bool) -> Callable[[Array, Array], Array]:
    # One pass of bfloat16 would lose the digits that later blocks need; three passes are exact enough for bfloat16.
    precision = jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.HIGH
    return functools.partial(jnp.matmul, precision=precision)


def short_convolution(
    x_BTW: Float[Array, "B t W"],
    weight: Float[Array, "W S"],
    state: Float[Array, "B S-1 W"],
    documents: Documents | None = None,
) -> tuple[Float[Array, "B t W"], Float[Array, "B S-1 W"]]:
    """Apply a causal convolution of S taps to each channel, for one span of `scan_spans`.

    A token reads only its own document, so packed documents do not mix.

    Args:
        x_BTW: inputs, [B, t, W].
        weight: one tap per column, the last one for the token itself, [W, S].
        state: the last S - 1 inputs before `x_BTW`, [B, S - 1, W]; zeros before the first token.
        documents: documents of the tokens; None: one document per row.

    Returns:
        The result in the dtype of `x_BTW`, and the state after the last token.
    """
    num_taps, length = weight.shape[1], x_BTW.shape[1]
    padded = jnp.concatenate([state.astype(x_BTW.dtype), x_BTW], axis=1)
    next_state, numbers = padded[:, length:], None
    if documents is not None:
        before = jnp.broadcast_to(documents.before[:, None], (x_BTW.shape[0], num_taps - 1))
        numbers = jnp.concatenate([before, documents.tokens], axis=1)
        # Inputs of earlier documents become zeros, so that the whole state belongs to the document of the last token.
        next_state = jnp.where((numbers[:, length:] == numbers[:, -1:])[..., None], next_state, 0)
    out = jnp.zeros(x_BTW.shape, jnp.float32)
    for tap in range(num_taps):
        term = padded[:, tap : tap + length].astype(jnp.float32) * weight[None, None, :, tap].astype(jnp.float32)
        if numbers is not None:
            same = numbers[:, tap : tap + length] == numbers[:, num_taps - 1 :]
            term = jnp.where(same[..., None], term, 0.0)
        out = out + term
    return out.astype(x_BTW.dtype), next_state
