"""Cross-entropy of a language-model head without an array of all logits, [tokens, vocabulary].

The sequence is cut into chunks, and a chunk's logits live only while its loss is computed. The gradient is computed in
the forward pass, chunk by chunk, as in Liger Kernel (arXiv:2410.10989). So logits are not computed twice. The residual
for the backward pass is d loss / d h, of the size of h. Second derivatives work in reverse mode. Exception: a
`RunningGradient` head adds its gradient to a running total. Then h is kept, and the backward pass recomputes logits.

Chunks are cut along the sequence axis only, so a batch axis that is sharded over devices stays sharded. If the mesh
axis ``context`` shards the sequence, each device cuts its own part into chunks.

Shapes: B batch axes, T sequence, C chunk of the sequence, D model, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..core import (
    LinearWeight,
    RunningGradient,
    StructureError,
    add_running,
    check_choice,
    check_integer,
    check_number,
    if_active,
    initial_carry,
    linear,
    map_token_shards,
    num_token_shards,
    uniformly_varying,
)

_Carry = Any

# Most bytes of a default chunk's float32 logits, and tokens of a default chunk. With fewer than 512 tokens a chip would
# wait for reads of the head. More than 1024 gain no time.
_LOGIT_BYTES = 2**28
_LEAST_CHUNK, _MOST_CHUNK = 512, 1024
_MOST_INDEX = 2**31 - 1
_DTYPES = {
    "h": ((jnp.floating,), "a floating-point", "cast it"),
    "labels": ((jnp.integer,), "an integer", "pass class indices, not one-hot"),
    "head": ((jnp.floating, jnp.integer), "a floating-point or integer", "cast it"),
}
"""Maps each array to its allowed kinds of dtypes, their description, and the hint for any other dtype."""


class _Options(NamedTuple):
    """Settings that all chunks share."""

    chunk: int
    ignore_index: int
    soft_cap: float | None
    z_loss: float


def chunked_cross_entropy(
    h: Float[Array, "*B T D"],
    head: Array | LinearWeight,
    labels: Int[Array, "*B T"],
    *,
    ignore_index: int = -100,
    chunk_size: int | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    soft_cap: float | None = None,
    z_loss: float = 0.0,
) -> Float[Array, ""]:
    """Compute softmax cross-entropy of ``h @ head.T`` with integer labels, in chunks.

    Args:
        h: activations that enter the head, shape [..., T, D], any floating dtype.
        head: the head, shape [V, D] (an embedding can be passed unchanged), or a `LinearWeight` in its place.
        labels: the class of each position, shape [..., T]. A label outside [0, V) other than `ignore_index` gives NaN,
            also in the gradients.
        ignore_index: the label of positions that count neither in the loss nor in the mean.
        chunk_size: number of tokens, over all batch axes and devices, whose logits exist at the same time. A chunk has
            at least one position of each sequence, so a large batch may exceed this number. For a `RunningGradient`
            head, chunks have half the size. None means 1024, or 512 if the logits of 1024 tokens exceed 256 MiB.
        reduction: ``"mean"`` over the positions that are not ignored (0 when all are), or ``"sum"``.
        soft_cap: logits become ``soft_cap * tanh(logits / soft_cap)``; None leaves them unchanged.
        z_loss: adds ``z_loss * logsumexp(logits) ** 2`` to the loss of each position, to keep logits from drifting;
            1e-4 is common.

    Returns:
        The loss, a float32 scalar. Logits are computed and reduced in float32. Only reverse-mode derivatives exist: JAX
        refuses `jax.jvp`, `jax.linearize` and `jax.hessian` of the loss.

    Raises:
        StructureError: when shapes or dtypes do not fit.
        ConfigError: for an unknown reduction; a chunk size below 1; an `ignore_index` that is not a 32-bit integer; a
            `soft_cap` that is not a positive number; or a `z_loss` that is not a number of at least 0.

    Memory:
        Float32 logits of one chunk instead of all: ``chunk_size * V * 4`` bytes, in the gradient a small multiple of
        these. Under differentiation, one array of the size of `h` is kept for the backward pass. If the head trains and
        is no `RunningGradient`, one float32 array of its size is also kept. A frozen head gets no cotangent.

    Examples:
        >>> h, head = jnp.ones((2, 8, 4)), jnp.zeros((10, 4))
        >>> loss = chunked_cross_entropy(h, head, jnp.zeros((2, 8), jnp.int32), chunk_size=4)
        >>> bool(jnp.isclose(loss, jnp.log(10.0)))
        True

    References:
        Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training", arXiv:2410.10989, section 3.2.
        Chowdhery et al., "PaLM", arXiv:2204.02311, section 5 (`z_loss`).
    """
    check_arrays(h, head, labels)
    hint = "if no position is ignored, pass an integer that is not a label"
    check_integer("ignore_index", ignore_index, -_MOST_INDEX - 1, _MOST_INDEX, hint=hint)
    check_choice("reduction", reduction, ("mean", "sum"))
    if soft_cap is not None:
        check_number("soft_cap", soft_cap, above=0, hint="use None to leave logits unchanged")
    check_number("z_loss", z_loss, least=0, hint="use 0 to add nothing; 1e-4 is common")
    if chunk_size is not None:
        check_integer("chunk_size", chunk_size, hint="leave it out to choose it by the size of the vocabulary")
    parts = num_token_shards(labels.shape[-1], (h, labels))
    chunk = chunk_length(h, head, labels, chunk_size, parts)
    if isinstance(head, RunningGradient):
        chunk = max(1, chunk // 2)  # its backward pass holds a chunk's logits twice
    options = _Options(chunk, ignore_index, soft_cap, float(z_loss))
    if isinstance(head, RunningGradient):
        total: Any = _running_cross_entropy(options, h, head, labels)
    else:
        leaves, treedef = jax.tree.flatten(head)
        h, leaves, labels = uniformly_varying((h, leaves, labels))

        def loss_sum(leaves: Any, tokens: Any) -> Any:
            return _sum_cross_entropy((treedef, options), tokens[0], tuple(leaves), tokens[1])

        def local_sum(leaves: Any, tokens: Any) -> Any:
            return loss_sum(leaves, tokens)[None]

        if parts == 1:
            total = loss_sum(leaves, (h, labels))
        else:
            total = jnp.sum(map_token_shards(local_sum, leaves, (h, labels), axis=labels.ndim - 1, out_axis=0))
    if reduction == "sum":
        return total
    return total / jnp.maximum(jnp.sum(labels != ignore_index), 1).astype(jnp.float32)


def chunk_length(h: Array, head: Any, labels: Array, chunk_size: int | None, parts: int) -> int:
    """Return the positions of a chunk in one of `parts` equal parts of each sequence.

    `chunk_size` counts tokens of all sequences and parts; None chooses it by the size of the vocabulary.
    """
    if chunk_size is None:
        chunk_size = _MOST_CHUNK if 4 * _MOST_CHUNK * _vocabulary(h, head) <= _LOGIT_BYTES else _LEAST_CHUNK
    num_sequences = max(1, labels.size // labels.shape[-1])
    return min(labels.shape[-1] // parts, max(1, chunk_size // (num_sequences * parts)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_cross_entropy(static: tuple[Any, _Options], h: Array, leaves: tuple[Array, ...], labels: Array) -> Array:
    treedef, options = static
    return _sum_of_chunks(options, h, treedef.unflatten(leaves), labels)


def _forward(static: tuple[Any, _Options], h: Any, leaves: tuple[Any, ...], labels: Any) -> tuple[Array, Any]:
    """Compute the summed loss, and the gradients, which the backward pass scales by the loss's cotangent."""
    treedef, options = static
    is_h_perturbed, trained = h.perturbed, tuple(leaf.value if leaf.perturbed else None for leaf in leaves)
    h, leaves, labels = h.value, tuple(leaf.value for leaf in leaves), labels.value

    def body(start: Any, size: int, carry: _Carry) -> _Carry:
        total, dh, dleaves = carry
        h_BCD, labels_BC = _slice(h, start, size, -2), _slice(labels, start, size, -1)

        def loss(h_BCD: Array, trained: tuple[Array | None, ...]) -> Array:
            head = treedef.unflatten([old if new is None else new for old, new in zip(leaves, trained, strict=True)])
            return _chunk_loss(options, h_BCD, head, labels_BC)

        if is_h_perturbed:
            value, (grad_h, grads) = jax.value_and_grad(loss, argnums=(0, 1))(h_BCD, trained)
            dh = jax.lax.dynamic_update_slice_in_dim(dh, grad_h.astype(dh.dtype), start, axis=dh.ndim - 2)
        else:
            value, grads = jax.value_and_grad(functools.partial(loss, h_BCD))(trained)
        return total + value, dh, jax.tree.map(lambda acc, grad: acc + grad.astype(acc.dtype), dleaves, grads)

    args = (h, *leaves, labels)
    zeros = jax.tree.map(
        lambda leaf: initial_carry(args, leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32)), trained
    )
    total = initial_carry(args, (), jnp.float32)
    dh = uniformly_varying((jnp.zeros_like(h), *args))[0] if is_h_perturbed else None
    total, dh, dleaves = _over_chunks(labels.shape[-1], options.chunk, body, (total, dh, zeros))
    # Empty arrays carry the dtypes of the trained leaves to the backward pass.
    return total, (dh, dleaves, jax.tree.map(lambda leaf: jnp.zeros_like(leaf, shape=(0,)), trained))


def _backward(static: tuple[Any, _Options], residuals: Any, cotangent: Any) -> tuple[Any, Any, None]:
    dh, dleaves, dtypes = residuals
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        cotangent = jnp.float32(0)
    # The cotangent of a mean is 1 / tokens, which would lose digits in the dtype of h.
    dh = None if dh is None else (dh.astype(jnp.float32) * cotangent).astype(dh.dtype)
    scaled = jax.tree.map(lambda g, like: (g * cotangent.astype(g.dtype)).astype(like.dtype), dleaves, dtypes)
    return dh, scaled, None


_sum_cross_entropy.defvjp(_forward, _backward, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _running_cross_entropy(options: _Options, h: Array, head: RunningGradient, labels: Array) -> Array:
    """Compute the summed loss for a `RunningGradient` head.

    The head's cotangent is its `total` plus the gradient. The gradient has to be scaled by the loss's cotangent before
    this addition, so the backward pass computes the gradient.
    """
    return _sum_of_chunks(options, h, head.weight, labels)


def _running_forward(options: _Options, h: Array, head: RunningGradient, labels: Array) -> Any:
    return _running_cross_entropy(options, h, head, labels), (h, head, labels)


def _running_backward(options: _Options, residuals: Any, cotangent: Array) -> tuple[Array, RunningGradient, None]:
    h, head, labels = residuals
    h, cotangent = if_active(head.active, h), if_active(head.active, cotangent)

    def body(start: Any, size: int, carry: _Carry) -> _Carry:
        dh, total = carry

        def loss(h_BCD: Array, weight: Array) -> Array:
            return _chunk_loss(options, h_BCD, weight, _slice(labels, start, size, -1))

        _, vjp = jax.vjp(loss, _slice(h, start, size, -2), head.weight)
        grad_h, grad = vjp(cotangent)
        dh = jax.lax.dynamic_update_slice_in_dim(dh, grad_h.astype(dh.dtype), start, axis=dh.ndim - 2)
        return dh, add_running(total, grad.astype(total.dtype))

    dh, total = _over_chunks(labels.shape[-1], options.chunk, body, (jnp.zeros_like(h), head.total))
    return dh, RunningGradient(total, None, None), None


_running_cross_entropy.defvjp(_running_forward, _running_backward)


def _sum_of_chunks(options: _Options, h: Array, head: Any, labels: Array) -> Array:
    def body(start: Any, size: int, total: Array) -> Array:
        h_BCD, labels_BC = _slice(h, start, size, -2), _slice(labels, start, size, -1)
        return total + _chunk_loss(options, h_BCD, head, labels_BC)

    args = (h, *jax.tree.leaves(head), labels)
    return _over_chunks(labels.shape[-1], options.chunk, body, initial_carry(args, (), jnp.float32))


def _chunk_loss(options: _Options, h_BCD: Array, head: Any, labels_BC: Array) -> Array:
    labels_BC = _widen(labels_BC)
    log_probs_BC, partition_BC, vocabulary = _chunk_terms(h_BCD, head, labels_BC, options.soft_cap)
    loss_BC = -log_probs_BC
    if options.z_loss:
        loss_BC = loss_BC + options.z_loss * jnp.square(partition_BC)
    return jnp.sum(_masked(loss_BC, labels_BC, options.ignore_index, vocabulary))


def chunk_log_probs(h_BCD: Array, head: Any, labels_BC: Array, *, ignore_index: int, soft_cap: float | None) -> Array:
    """Return the log-probabilities of the labels of one chunk; 0 where a label is ignored."""
    labels_BC = _widen(labels_BC)
    log_probs_BC, _, vocabulary = _chunk_terms(h_BCD, head, labels_BC, soft_cap)
    return _masked(log_probs_BC, labels_BC, ignore_index, vocabulary)


def _chunk_terms(h_BCD: Array, head: Any, labels_BC: Array, soft_cap: float | None) -> tuple[Array, Array, int]:
    """Return the log-probability of each label, the log of the sum of exponentials, and the size of the vocabulary."""
    logits_BCV = chunk_logits(h_BCD, head, soft_cap)
    # Not a lookup, whose gradient would be scattered into a float32 array of the logits' size.
    vocabulary = logits_BCV.shape[-1]
    is_gold_BCV = (
        jax.lax.broadcasted_iota(labels_BC.dtype, logits_BCV.shape, logits_BCV.ndim - 1) == labels_BC[..., None]
    )
    gold_BC = jnp.sum(jnp.where(is_gold_BCV, logits_BCV, 0.0), axis=-1)
    partition_BC = jax.nn.logsumexp(logits_BCV, axis=-1)
    return gold_BC - partition_BC, partition_BC, vocabulary


def chunk_logits(h_BCD: Array, head: Any, soft_cap: float | None) -> Array:
    """Return the logits of one chunk in float32."""
    if isinstance(head, LinearWeight):
        logits_BCV = linear(h_BCD, head).astype(jnp.float32)
    else:
        logits_BCV = _logits(h_BCD, head.astype(h_BCD.dtype))
    return logits_BCV if soft_cap is None else soft_cap * jnp.tanh(logits_BCV / soft_cap)


def _widen(labels_BC: Array) -> Array:
    """Convert labels whose dtype may be too narrow for the indices of all classes."""
    return labels_BC.astype(jnp.int32) if labels_BC.dtype.itemsize < 4 else labels_BC


def _masked(values_BC: Array, labels_BC: Array, ignore_index: int, vocabulary: int) -> Array:
    """Return 0 where a label is ignored, and NaN where it is no class."""
    keep_BC = labels_BC != ignore_index
    # Multiply by NaN instead of selecting it, so that gradients are NaN, too.
    is_class_BC = (labels_BC >= 0) & (labels_BC < vocabulary)
    return jnp.where(keep_BC, values_BC, 0.0) * jnp.where(keep_BC & ~is_class_BC, jnp.nan, 1.0)


@jax.custom_vjp
def _logits(h_BCD: Array, head_VD: Array) -> Array:
    """Compute h headᵀ with a float32 result."""
    contract = (((h_BCD.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(h_BCD, head_VD, contract, preferred_element_type=jnp.float32)


def _logits_forward(h: Any, head: Any) -> tuple[Array, Any]:
    return _logits(h.value, head.value), (h.value, head.value, h.perturbed, head.perturbed)


def _logits_backward(residuals: Any, d_BCV: Any) -> tuple[Array | None, Array | None]:
    """Compute the cotangents of `h` and the head, by products in the dtype of `h` as in a linear layer.

    With float32 products, XLA would hold a float32 copy of the head. If `h` is float16, the cotangent of the logits
    stays float32.
    """
    h_BCD, head_VD, is_h_perturbed, is_head_perturbed = residuals
    if isinstance(d_BCV, jax.custom_derivatives.SymbolicZero):
        return None, None
    if h_BCD.dtype != jnp.float16:  # its range is too small for these gradients
        d_BCV = d_BCV.astype(h_BCD.dtype)
    rows = tuple(range(h_BCD.ndim - 1))

    def product(a: Array, b: Array, contract: Any, like: Array) -> Array:
        sharding = jax.typeof(like).sharding  # part of the type on a mesh with explicit axes
        return jax.lax.dot_general(
            a,
            b,
            (contract, ((), ())),
            preferred_element_type=jnp.promote_types(h_BCD.dtype, jnp.float32),
            out_sharding=sharding if sharding.mesh.explicit_axes else None,
        ).astype(like.dtype)

    dh = product(d_BCV, head_VD, ((len(rows),), (0,)), h_BCD) if is_h_perturbed else None
    return dh, product(d_BCV, h_BCD, (rows, rows), head_VD) if is_head_perturbed else None


_logits.defvjp(_logits_forward, _logits_backward, symbolic_zeros=True)


def _over_chunks(length: int, chunk: int, body: Callable[[Any, int, _Carry], _Carry], carry: _Carry) -> _Carry:
    """Run body(start, size, carry) over all full chunks in a loop, then over the shorter last chunk, if any."""
    full = length // chunk
    carry = jax.lax.fori_loop(0, full, lambda i, c: body(i * chunk, chunk, c), carry)
    return body(full * chunk, length - full * chunk, carry) if length % chunk else carry


def _slice(x: Array, start: Any, size: int, axis: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis=x.ndim + axis)


def _vocabulary(h: Array, head: Any) -> int:
    if not isinstance(head, LinearWeight):
        return head.shape[0]
    token = jax.ShapeDtypeStruct((1, h.shape[-1]), h.dtype)
    return jax.eval_shape(lambda token: linear(token, head), token).shape[-1]


def check_arrays(h: Any, head: Any, labels: Any) -> None:
    is_array = not isinstance(head, LinearWeight)
    for name, array in {"h": h, "labels": labels, **({"head": head} if is_array else {})}.items():
        if not (hasattr(array, "shape") and hasattr(array, "dtype")):
            hint = "convert it with jnp.asarray"
            raise StructureError(f"{name} must be an array, not {type(array).__name__}", hint=hint)
        kinds, requirement, hint = _DTYPES[name]
        if not any(jnp.issubdtype(array.dtype, kind) for kind in kinds):
            raise StructureError(f"{name} must have {requirement} dtype, not {array.dtype}", hint=hint)
    if is_array and (head.shape[1:] != h.shape[-1:] or 0 in head.shape):
        shape = f"[V, {h.shape[-1] if h.shape else 'D'}]"
        hint = "transpose the head if it is [model, vocabulary]; it is stored as [vocabulary, model]"
        raise StructureError(f"head must have shape {shape} with V at least 1, not {head.shape}", hint=hint)
    if h.ndim < 2 or h.shape[:-1] != labels.shape or not labels.shape[-1]:
        expected = "h and labels must have shapes [..., T, D] and [..., T] with T at least 1"
        raise StructureError(f"{expected}, not {h.shape} and {labels.shape}")
