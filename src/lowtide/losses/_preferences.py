"""Losses of preference tuning and of reward models, from log-probabilities or scores of whole answers.

All functions take float32 arrays with one number for each pair or answer, [B], and return a scalar loss and metrics.
`chunked_log_probs` computes log-probabilities without all logits. A reference model is not needed here: its
log-probabilities may come from the same model without its adapters, or from a file.

Sources: Rafailov et al., arXiv:2305.18290 (DPO); Azar et al., arXiv:2310.12036 (IPO); Zhao et al., arXiv:2305.10425
(hinge, SLiC); Chowdhury et al., arXiv:2403.00409 (robust DPO); Hong et al., arXiv:2403.07691 (ORPO); Ethayarajh et al.,
arXiv:2402.01306 (KTO); Meng et al., arXiv:2405.14734 (SimPO); Xu et al., arXiv:2401.08417 (CPO). Conventions that the
papers leave open are those of TRL 1.16.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ..core import ConfigError, StructureError, check_choice, check_number

Metrics = dict[str, Array]
PairVariant = Literal["sigmoid", "hinge", "ipo", "robust"]


def dpo(
    chosen: Float[Array, "B"],
    rejected: Float[Array, "B"],
    reference_chosen: Float[Array, "B"] | None = None,
    reference_rejected: Float[Array, "B"] | None = None,
    *,
    beta: float = 0.1,
    variant: PairVariant = "sigmoid",
    label_smoothing: float = 0.0,
    lengths: tuple[Any, Any] | None = None,
    weights: Float[Array, "B"] | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """Compute the loss of direct preference optimization, and its variants.

    Args:
        chosen: log-probabilities of the preferred answers, sums over their tokens, in nats.
        rejected: those of the other answers.
        reference_chosen: log-probabilities of the preferred answers by the reference model. None for both references:
            reference-free, as if the reference gave all answers one probability.
        reference_rejected: those of the other answers.
        beta: strength of the preference relative to the distance from the reference.
        variant: ``sigmoid`` (DPO), ``hinge`` (SLiC), ``ipo`` (squared distance of the log-ratios per token from
            ``1 / (2 beta)``), or ``robust`` (DPO without the bias of wrong labels).
        label_smoothing: share of pairs whose labels are wrong, below 0.5; for ``sigmoid`` and ``robust``.
        lengths: numbers of tokens of preferred and other answers, two arrays [B]; needed for ``ipo``.
        weights: weights of the pairs in all means; 0 leaves a pair out. None: all pairs have one weight.

    Returns:
        The mean loss, and the metrics ``rewards/chosen``, ``rewards/rejected``, ``rewards/margins``,
        ``rewards/accuracies``, ``logps/chosen`` and ``logps/rejected``. Rewards are ``beta`` times the log-ratios.

    Raises:
        ConfigError: for a `beta` that is not above 0, an unknown variant, or smoothing that the variant lacks.
        StructureError: for arrays of different shapes, one reference of two, or missing `lengths`.

    Memory:
        None: all arrays have the size of the batch.

    Examples:
        >>> loss, metrics = dpo(jnp.array([-4.0]), jnp.array([-6.0]), jnp.array([-5.0]), jnp.array([-5.0]), beta=1.0)
        >>> round(float(loss), 3), float(metrics["rewards/margins"])
        (0.127, 2.0)
    """
    _check_strength(beta)
    check_choice("variant", variant, ("sigmoid", "hinge", "ipo", "robust"))
    _check_smoothing(label_smoothing, f"variant {variant!r}", variant in ("sigmoid", "robust"))
    if (reference_chosen is None) != (reference_rejected is None):
        raise StructureError("one reference of two is None", hint="pass both, or none for a loss without a reference")
    if reference_chosen is None or reference_rejected is None:
        reference_chosen = reference_rejected = jnp.zeros_like(chosen)
    _check_shapes(
        chosen=chosen, rejected=rejected, reference_chosen=reference_chosen, reference_rejected=reference_rejected
    )
    ratios = chosen - reference_chosen, rejected - reference_rejected
    margin = ratios[0] - ratios[1]
    if variant == "hinge":
        losses = jax.nn.relu(1 - beta * margin)
    elif variant == "ipo":
        if lengths is None:
            raise StructureError(
                "variant 'ipo' needs the lengths of the answers", hint="pass lengths=(of chosen, of rejected)"
            )
        means = (ratio / jnp.maximum(length, 1) for ratio, length in zip(ratios, lengths, strict=True))
        first, second = means
        losses = jnp.square(first - second - 1 / (2 * beta))
    else:
        losses = _pair_losses(beta * margin, label_smoothing, is_robust=variant == "robust")
    metrics = _pair_metrics(chosen, rejected, beta * ratios[0], beta * ratios[1], weights)
    return _mean(losses, weights), metrics


def orpo(
    chosen: Float[Array, "B"],
    rejected: Float[Array, "B"],
    nll: Float[Array, ""],
    *,
    beta: float = 0.1,
    weights: Float[Array, "B"] | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """Compute the odds-ratio loss: supervised tuning on the preferred answers, and a preference without a reference.

    Args:
        chosen: mean log-probabilities per token of the preferred answers.
        rejected: those of the other answers.
        nll: mean cross-entropy of the preferred answers, over all tokens of the batch.
        beta: weight of the preference (lambda in the paper).
        weights: weights of the pairs in all means; 0 leaves a pair out. None: all pairs have one weight.

    Returns:
        The loss, and the metrics of `dpo`, with ``nll`` and ``log_odds`` in addition.

    Raises:
        ConfigError: for a `beta` that is not above 0.
        StructureError: for arrays of different shapes.

    Examples:
        >>> loss, _ = orpo(jnp.array([-0.5]), jnp.array([-1.5]), jnp.float32(0.5), beta=1.0)
        >>> round(float(loss), 3)
        0.671
    """
    _check_strength(beta)
    _check_shapes(chosen=chosen, rejected=rejected)
    log_odds = chosen - rejected - (_log1mexp(chosen) - _log1mexp(rejected))
    loss = nll - beta * _mean(jax.nn.log_sigmoid(log_odds), weights)
    metrics = _pair_metrics(chosen, rejected, beta * chosen, beta * rejected, weights)
    return loss, {**metrics, "nll": nll, "log_odds": jax.lax.stop_gradient(_mean(log_odds, weights))}


def simpo(
    chosen: Float[Array, "B"],
    rejected: Float[Array, "B"],
    *,
    beta: float = 2.0,
    margin: float = 1.0,
    label_smoothing: float = 0.0,
    weights: Float[Array, "B"] | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """Compute the loss of simple preference optimization: mean log-probabilities, a margin, and no reference.

    Args:
        chosen: mean log-probabilities per token of the preferred answers.
        rejected: those of the other answers.
        beta: factor of the log-probabilities.
        margin: least difference of the rewards (gamma in the paper).
        label_smoothing: share of pairs whose labels are wrong, below 0.5.
        weights: weights of the pairs in all means; 0 leaves a pair out. None: all pairs have one weight.

    Returns:
        The mean loss, and the metrics of `dpo`.

    Raises:
        ConfigError: for a `beta` that is not above 0, or smoothing out of range.
        StructureError: for arrays of different shapes.

    Examples:
        >>> loss, _ = simpo(jnp.array([-0.5]), jnp.array([-1.5]), beta=2.0, margin=1.0)
        >>> round(float(loss), 3)
        0.313
    """
    _check_strength(beta)
    _check_smoothing(label_smoothing, "SimPO", True)
    check_number("margin", margin, least=0)
    _check_shapes(chosen=chosen, rejected=rejected)
    losses = _pair_losses(beta * (chosen - rejected) - margin, label_smoothing)
    return _mean(losses, weights), _pair_metrics(chosen, rejected, beta * chosen, beta * rejected, weights)


def cpo(
    chosen: Float[Array, "B"],
    rejected: Float[Array, "B"],
    nll: Float[Array, ""],
    *,
    beta: float = 0.1,
    nll_weight: float = 1.0,
    label_smoothing: float = 0.0,
    weights: Float[Array, "B"] | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """Compute the loss of contrastive preference optimization: DPO without a reference, and supervised tuning.

    Args:
        chosen: log-probabilities of the preferred answers, sums over their tokens.
        rejected: those of the other answers.
        nll: mean cross-entropy of the preferred answers, over all tokens of the batch.
        beta: factor of the log-probabilities.
        nll_weight: weight of `nll`.
        label_smoothing: share of pairs whose labels are wrong, below 0.5.
        weights: weights of the pairs in all means; 0 leaves a pair out. None: all pairs have one weight.

    Returns:
        The loss, and the metrics of `dpo`, with ``nll`` in addition.

    Raises:
        ConfigError: for a `beta` that is not above 0, a negative weight, or smoothing out of range.
        StructureError: for arrays of different shapes.

    Examples:
        >>> loss, _ = cpo(jnp.array([-4.0]), jnp.array([-6.0]), jnp.float32(0.5), beta=1.0)
        >>> round(float(loss), 3)
        0.627
    """
    _check_strength(beta)
    _check_smoothing(label_smoothing, "CPO", True)
    check_number("nll_weight", nll_weight, least=0)
    _check_shapes(chosen=chosen, rejected=rejected)
    loss = _mean(_pair_losses(beta * (chosen - rejected), label_smoothing), weights) + nll_weight * nll
    return loss, {**_pair_metrics(chosen, rejected, beta * chosen, beta * rejected, weights), "nll": nll}


def kto(
    answers: Float[Array, "B"],
    reference: Float[Array, "B"],
    is_desirable: Bool[Array, "B"],
    divergence: Float[Array, ""] | float,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    weights: Float[Array, "B"] | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """Compute the loss of Kahneman-Tversky optimization, from single answers that are desirable or not.

    Args:
        answers: log-probabilities of the answers, sums over their tokens.
        reference: those by the reference model.
        is_desirable: whether each answer is desirable.
        divergence: estimate of the divergence of model and reference: the mean log-ratio of answers to other prompts,
            at least 0. No gradient flows through it.
        beta: strength of the preference relative to the distance from the reference.
        desirable_weight: factor of the loss of desirable answers.
        undesirable_weight: factor of the loss of undesirable answers.
        weights: weights of the answers in means, such as 0 for padding; None: 1 for each.

    Returns:
        The mean loss, and the metrics ``rewards/desirable``, ``rewards/undesirable`` (means, 0 without such answers)
        and ``kl``.

    Raises:
        ConfigError: for a `beta` that is not above 0, or a negative weight.
        StructureError: for arrays of different shapes.

    Examples:
        >>> loss, _ = kto(jnp.array([-4.0]), jnp.array([-5.0]), jnp.array([True]), 0.0, beta=1.0)
        >>> round(float(loss), 3)
        0.269
    """
    _check_strength(beta)
    for name, factor in (("desirable_weight", desirable_weight), ("undesirable_weight", undesirable_weight)):
        check_number(name, factor, least=0)
    _check_shapes(answers=answers, reference=reference, is_desirable=is_desirable)
    ratios = answers - reference
    zero = jax.lax.stop_gradient(jnp.maximum(jnp.asarray(divergence, jnp.float32), 0.0))
    signs = jnp.where(is_desirable, 1.0, -1.0)
    losses = jnp.where(is_desirable, desirable_weight, undesirable_weight) * (
        1 - jax.nn.sigmoid(beta * signs * (ratios - zero))
    )
    rewards, metrics = jax.lax.stop_gradient(beta * ratios), {"kl": zero}
    for name, mask in (("desirable", is_desirable), ("undesirable", ~is_desirable)):
        metrics[f"rewards/{name}"] = _mean(rewards, mask * (1.0 if weights is None else weights))
    return _mean(losses, weights), metrics


def reward(
    chosen: Float[Array, "B"],
    rejected: Float[Array, "B"],
    *,
    margin: Float[Array, "B"] | float = 0.0,
    center_weight: float = 0.0,
    weights: Float[Array, "B"] | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """Compute the Bradley-Terry loss of a reward model.

    Args:
        chosen: scores of the preferred answers.
        rejected: scores of the other answers.
        margin: least difference of the scores, for all pairs or for each.
        center_weight: weight of the squared sum of both scores, which keeps scores near 0.
        weights: weights of the pairs in all means; 0 leaves a pair out. None: all pairs have one weight.

    Returns:
        The mean loss, and the metrics ``rewards/chosen``, ``rewards/rejected``, ``rewards/margins`` and
        ``rewards/accuracies``.

    Raises:
        ConfigError: for a negative `center_weight`.
        StructureError: for arrays of different shapes.

    Examples:
        >>> loss, _ = reward(jnp.array([1.0]), jnp.array([-1.0]))
        >>> round(float(loss), 3)
        0.127
    """
    check_number("center_weight", center_weight, least=0)
    _check_shapes(chosen=chosen, rejected=rejected)
    losses = -jax.nn.log_sigmoid(chosen - rejected - margin)
    if center_weight:
        losses = losses + center_weight * jnp.square(chosen + rejected)
    return _mean(losses, weights), _reward_metrics(chosen, rejected, weights)


def _pair_losses(logits: Array, smoothing: float, *, is_robust: bool = False) -> Array:
    """Return the losses of pairs whose label is right with the probability ``1 - smoothing``."""
    right, wrong = -jax.nn.log_sigmoid(logits), -jax.nn.log_sigmoid(-logits)
    if is_robust:
        return ((1 - smoothing) * right - smoothing * wrong) / (1 - 2 * smoothing)
    return (1 - smoothing) * right + smoothing * wrong


def _log1mexp(x: Array) -> Array:
    """Compute log(1 - exp(x)) for x < 0; a probability of 1 gives a large negative number, with a finite gradient."""
    x = jnp.minimum(x, -1e-7)
    # Both forms are computed, so each gets arguments for which its gradient is finite.
    is_near = x > -0.6931472
    near = jnp.log(-jnp.expm1(jnp.where(is_near, x, -0.5)))
    return jnp.where(is_near, near, jnp.log1p(-jnp.exp(jnp.where(is_near, -1.0, x))))


def _mean(values: Array, weights: Array | None) -> Array:
    """Return the weighted mean; 0 if all weights are 0."""
    if weights is None:
        return jnp.mean(values)
    # A pair without weight may have any values, also NaN.
    total = jnp.sum(jnp.where(weights == 0, 0.0, values * weights))
    return total / jnp.where(jnp.sum(weights) == 0, 1.0, jnp.sum(weights))


def _pair_metrics(
    chosen: Array, rejected: Array, chosen_reward: Array, rejected_reward: Array, weights: Array | None = None
) -> Metrics:
    metrics = _reward_metrics(chosen_reward, rejected_reward, weights)
    log_probs = {"logps/chosen": _mean(chosen, weights), "logps/rejected": _mean(rejected, weights)}
    return metrics | {name: jax.lax.stop_gradient(value) for name, value in log_probs.items()}


def _reward_metrics(chosen: Array, rejected: Array, weights: Array | None = None) -> Metrics:
    chosen, rejected = jax.lax.stop_gradient((chosen, rejected))
    return {
        "rewards/chosen": _mean(chosen, weights),
        "rewards/rejected": _mean(rejected, weights),
        "rewards/margins": _mean(chosen - rejected, weights),
        "rewards/accuracies": _mean((chosen > rejected).astype(jnp.float32), weights),
    }


def _check_strength(beta: float) -> None:
    check_number("beta", beta, above=0, hint="0.1 is common")


def _check_smoothing(value: float, name: str, is_supported: bool) -> None:
    check_number("label_smoothing", value, least=0)
    if value >= 0.5:
        raise ConfigError(f"label_smoothing must be below 0.5, not {value}", hint="swap chosen and rejected")
    if value and not is_supported:
        raise ConfigError(f"{name} has no label_smoothing", hint="leave it out, or choose another variant")


def _check_shapes(**arrays: Any) -> None:
    shapes = {name: tuple(getattr(array, "shape", ())) for name, array in arrays.items()}
    if len(set(shapes.values())) > 1 or any(len(shape) != 1 for shape in shapes.values()):
        listed = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        hint = "sum the log-probabilities of an answer over its tokens"
        raise StructureError(f"arrays must have one shape [B], not {listed}", hint=hint)
