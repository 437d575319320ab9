"""Divergences between the next-token distributions of two models, without the logits of all tokens.

Sources: Hinton et al., "Distilling the Knowledge in a Neural Network" (arXiv:1503.02531; forward divergence and
temperature); Gu et al., "MiniLLM" (arXiv:2306.08543; reverse divergence).

Shapes: B batch axes, T sequence, C chunk of the sequence, D and E width of student and teacher, V vocabulary, K classes
that the teacher keeps.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..core import LinearWeight, StructureError, check_choice, check_integer, check_number
from ._cross_entropy import check_arrays, chunk_logits
from ._log_probs import check_chunks, map_chunks


def distillation(
    h: Float[Array, "*B T D"],
    head: Array | LinearWeight,
    teacher_h: Float[Array, "*B T E"],
    teacher_head: Array | LinearWeight,
    labels: Int[Array, "*B T"],
    *,
    direction: Literal["forward", "reverse"] = "forward",
    temperature: float = 1.0,
    ignore_index: int = -100,
    chunk_size: int | None = None,
    soft_cap: float | None = None,
    teacher_soft_cap: float | None = None,
) -> Float[Array, "*B T"]:
    """Compute the Kullback-Leibler divergence between teacher and student at each token, in chunks.

    Args:
        h: activations that enter the student's head, shape [..., T, D].
        head: the student's head, shape [V, D], or a `LinearWeight` in its place.
        teacher_h: activations that enter the teacher's head, shape [..., T, E]; they get no gradient.
        teacher_head: the teacher's head, shape [V, E], or a `LinearWeight` in its place; it gets no gradient.
        labels: `ignore_index` marks the positions without a divergence, shape [..., T]. Other labels are not read.
        direction: ``forward`` is KL(teacher, student), which covers all that the teacher may write. ``reverse`` is
            KL(student, teacher), which prefers what the teacher is most likely to write.
        temperature: both models' logits are divided by it. Gradients shrink with its square.
        ignore_index: the label of positions whose divergence is 0.
        chunk_size: number of tokens, over all batch axes and devices, whose logits exist at the same time. None: as in
            `chunked_cross_entropy`.
        soft_cap: soft cap of the student's logits, as in `chunked_cross_entropy`.
        teacher_soft_cap: soft cap of the teacher's logits.

    Returns:
        Divergences [..., T] in nats, in float32.

    Raises:
        StructureError: when shapes or dtypes do not fit, or the models have different vocabularies.
        ConfigError: for an unknown direction, or a number out of range.

    Memory:
        Float32 logits of one chunk for each of the two models, and copies of `h` and `teacher_h` in chunks. Under
        differentiation, the logits are computed twice.

    Examples:
        >>> h, head, labels = jnp.ones((1, 3, 2)), jnp.eye(3, 2), jnp.array([[0, 0, -100]])
        >>> [round(number, 3) for number in distillation(h, head, 2 * h, head, labels)[0].tolist()]
        [0.04, 0.04, 0.0]
    """
    check_arrays(h, head, labels)
    check_arrays(teacher_h, teacher_head, labels)
    check_choice("direction", direction, ("forward", "reverse"))
    _check_numbers(temperature, ignore_index)
    check_chunks(chunk_size, soft_cap=soft_cap, teacher_soft_cap=teacher_soft_cap)

    def one_chunk(heads: Any, h_BCD: Array, teacher_h_BCE: Array, labels_BC: Array) -> Array:
        logits_BCV = chunk_logits(h_BCD, heads[0], soft_cap)
        teacher_BCV = jax.lax.stop_gradient(chunk_logits(teacher_h_BCE, heads[1], teacher_soft_cap))
        if logits_BCV.shape != teacher_BCV.shape:
            hint = "distil from a model with the same tokenizer; cut off rows of a head that no token has"
            sizes = {"expected": logits_BCV.shape[-1], "got": teacher_BCV.shape[-1]}
            raise StructureError("the heads have different vocabularies", hint=hint, **sizes)
        first_BCV, second_BCV = (jax.nn.log_softmax(x / temperature) for x in (teacher_BCV, logits_BCV))
        if direction == "reverse":
            first_BCV, second_BCV = second_BCV, first_BCV
        divergence_BC = jnp.sum(jnp.exp(first_BCV) * (first_BCV - second_BCV), axis=-1)
        return jnp.where(labels_BC != ignore_index, divergence_BC, 0.0)

    return map_chunks(one_chunk, (head, teacher_head), (h, teacher_h, labels), chunk_size)


def distillation_top_k(
    h: Float[Array, "*B T D"],
    head: Array | LinearWeight,
    teacher_ids: Int[Array, "*B T K"],
    teacher_log_probs: Float[Array, "*B T K"],
    labels: Int[Array, "*B T"],
    *,
    temperature: float = 1.0,
    ignore_index: int = -100,
    chunk_size: int | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "*B T"]:
    """Compute KL(teacher, student) at each token from the teacher's K most probable classes, in chunks.

    The teacher's probabilities are normalised over its K classes.

    Args:
        h: activations that enter the student's head, shape [..., T, D].
        head: the student's head, shape [V, D], or a `LinearWeight` in its place.
        teacher_ids: the teacher's classes, as `top_log_probs` returns them, shape [..., T, K].
        teacher_log_probs: their log-probabilities, up to a constant for each token, shape [..., T, K].
        labels: as in `distillation`.
        temperature: as in `distillation`.
        ignore_index: as in `distillation`.
        chunk_size: as in `distillation`.
        soft_cap: as in `distillation`.

    Returns:
        Divergences [..., T] in nats, in float32.

    Raises:
        StructureError: when shapes or dtypes do not fit.
        ConfigError: for a number out of range.

    Memory:
        Float32 logits of one chunk, computed twice under differentiation.
    """
    check_arrays(h, head, labels)
    if teacher_ids.shape[:-1] != labels.shape or teacher_ids.shape != teacher_log_probs.shape:
        expected = "teacher_ids and teacher_log_probs must have the shape [..., T, K]"
        raise StructureError(f"{expected}, not {teacher_ids.shape} and {teacher_log_probs.shape}")
    _check_numbers(temperature, ignore_index)
    check_chunks(chunk_size, soft_cap=soft_cap)

    def one_chunk(head: Any, h_BCD: Array, ids_BCK: Array, teacher_BCK: Array, labels_BC: Array) -> Array:
        log_probs_BCV = jax.nn.log_softmax(chunk_logits(h_BCD, head, soft_cap) / temperature)
        log_probs_BCK = jnp.take_along_axis(log_probs_BCV, ids_BCK, axis=-1)
        first_BCK = jax.nn.log_softmax(jax.lax.stop_gradient(teacher_BCK).astype(jnp.float32) / temperature)
        divergence_BC = jnp.sum(jnp.exp(first_BCK) * (first_BCK - log_probs_BCK), axis=-1)
        return jnp.where(labels_BC != ignore_index, divergence_BC, 0.0)

    return map_chunks(one_chunk, head, (h, teacher_ids, teacher_log_probs, labels), chunk_size)


def top_log_probs(
    h: Float[Array, "*B T D"],
    head: Array | LinearWeight,
    k: int,
    *,
    vocab_size: int | None = None,
    chunk_size: int | None = None,
    soft_cap: float | None = None,
) -> tuple[Int[Array, "*B T K"], Float[Array, "*B T K"]]:
    """Return the `k` most probable classes of each token, and their log-probabilities, in chunks.

    Args:
        h: activations that enter the head, shape [..., T, D].
        head: the head, shape [V, D], or a `LinearWeight` in its place.
        k: number of classes for each token.
        vocab_size: number of classes that are considered, such as the student's vocabulary; None: all.
        chunk_size: as in `distillation`.
        soft_cap: as in `distillation`.

    Returns:
        Classes, int32 [..., T, K], by decreasing probability, and their log-probabilities, float32 [..., T, K].

    Raises:
        StructureError: when shapes or dtypes do not fit.
        ConfigError: for a number out of range.
    """
    labels = jnp.zeros(h.shape[:-1], jnp.int32)
    check_arrays(h, head, labels)
    check_integer("k", k)
    check_chunks(chunk_size, soft_cap=soft_cap)

    def one_chunk(head: Any, h_BCD: Array, labels_BC: Array) -> tuple[Array, Array]:
        log_probs_BCV = jax.nn.log_softmax(chunk_logits(h_BCD, head, soft_cap)[..., :vocab_size])
        check_integer("k", k, 1, log_probs_BCV.shape[-1], hint="keep at most all classes of the vocabulary")
        log_probs_BCK, ids_BCK = jax.lax.top_k(log_probs_BCV, k)
        return ids_BCK, log_probs_BCK

    return map_chunks(one_chunk, head, (h, labels), chunk_size)


def _check_numbers(temperature: float, ignore_index: int) -> None:
    check_number("temperature", temperature, above=0)
    check_integer("ignore_index", ignore_index, -(2**31), 2**31 - 1)
