"""Preference tuning, with or without a reference.

A row has pairs of documents: the prompt with the preferred answer, then the prompt with the other answer. Documents are
numbered from 1, so preferred answers have odd segment numbers. With adapters, the reference of DPO is the same model
with its adapters switched off, so no second copy of a weight exists. With `full`, the untuned model stays on the host,
and its sums are a column of the batch. No logits of more than a chunk exist.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ... import losses
from ...adapters import lora
from ...core import Tree
from ..data._pack import IGNORE
from ._objective import Hidden, Objective


class _Pairs(NamedTuple):
    """Sums over the answers of the pairs of a batch; absent pairs have the weight 0."""

    chosen: Float[Array, "P"]
    """Log-probability of each preferred answer."""
    rejected: Float[Array, "P"]
    lengths: tuple[Array, Array]
    """Numbers of tokens of preferred and of other answers."""
    weights: Float[Array, "P"]

    @property
    def means(self) -> tuple[Array, Array]:
        """Log-probabilities per token."""
        of_chosen, of_rejected = (jnp.maximum(length, 1) for length in self.lengths)
        return self.chosen / of_chosen, self.rejected / of_rejected

    @property
    def nll(self) -> Array:
        """Mean cross-entropy of the tokens of all preferred answers."""
        return -jnp.sum(self.chosen * self.weights) / jnp.maximum(jnp.sum(self.lengths[0] * self.weights), 1)


def dpo_loss(model: Any, batch: Tree, hidden: Hidden, config: Any) -> tuple[Any, Tree]:
    """Compute the loss of `lowtide.losses.dpo` over the pairs of a batch."""
    sums, references = _sums_with_reference(model, batch, hidden)
    policy, reference = _pairs_of(sums, batch), split_pairs(references)
    return losses.dpo(
        *(policy.chosen, policy.rejected, *reference),
        beta=config.beta or 0.1,
        variant=config.preference_loss,
        label_smoothing=config.label_smoothing,
        lengths=policy.lengths,
        weights=policy.weights,
    )


def kto_loss(model: Any, batch: Tree, hidden: Hidden, config: Any) -> tuple[Any, Tree]:
    """Compute the loss of `lowtide.losses.kto`.

    The first document of a pair is the answer, and the second one the prompt with the answer of another record, which
    only estimates the divergence from the reference.
    """
    sums, references = _sums_with_reference(model, batch, hidden)
    policy, reference = _pairs_of(sums, batch), split_pairs(references)
    mismatches = (policy.rejected - reference[1]) * policy.weights
    verdicts = sum_by_document((batch["targets"] == 1).astype(jnp.float32), batch["segment_ids"])
    is_desirable, count = split_pairs(verdicts)[0] > 0, jnp.maximum(jnp.sum(policy.weights), 1)
    loss, metrics = losses.kto(
        *(policy.chosen, reference[0], is_desirable),
        jnp.sum(mismatches) / count,
        beta=config.beta or 0.1,
        desirable_weight=config.desirable_weight,
        undesirable_weight=config.undesirable_weight,
        weights=policy.weights,
    )
    # Means over one kind of answers could not be averaged over microbatches, which have different numbers of them.
    margins = (policy.chosen - reference[0]) * jnp.where(is_desirable, 1.0, -1.0) * policy.weights
    rewards = jax.lax.stop_gradient((config.beta or 0.1) * margins)
    return loss, {
        "kl": metrics["kl"],
        "rewards/signed": jnp.sum(rewards) / count,
        "rewards/accuracies": jnp.sum(rewards > 0) / count,
    }


def orpo_loss(model: Any, batch: Tree, hidden: Hidden, config: Any) -> tuple[Any, Tree]:
    """Compute the loss of `lowtide.losses.orpo`; only answers count in its cross-entropy."""
    pairs = _pairs(model, batch, hidden)
    return losses.orpo(*pairs.means, pairs.nll, beta=config.beta or 0.1, weights=pairs.weights)


def simpo_loss(model: Any, batch: Tree, hidden: Hidden, config: Any) -> tuple[Any, Tree]:
    """Compute the loss of `lowtide.losses.simpo`."""
    pairs, options = _pairs(model, batch, hidden), {"label_smoothing": config.label_smoothing}
    margin = config.preference_margin
    return losses.simpo(*pairs.means, beta=config.beta or 2.0, margin=margin, weights=pairs.weights, **options)


def cpo_loss(model: Any, batch: Tree, hidden: Hidden, config: Any) -> tuple[Any, Tree]:
    """Compute the loss of `lowtide.losses.cpo`; only answers count in its cross-entropy."""
    pairs, options = _pairs(model, batch, hidden), {"label_smoothing": config.label_smoothing}
    options |= {"beta": config.beta or 0.1, "nll_weight": 1.0 if config.nll_weight is None else config.nll_weight}
    return losses.cpo(pairs.chosen, pairs.rejected, pairs.nll, weights=pairs.weights, **options)


def reference_column(model: Any, batch: Tree, hidden: Hidden, config: Any) -> Tree:
    """Compute the column ``reference``: the log-probability of each answer of a row, [B, T + 2]."""
    return {"reference": _answer_sums(model, batch, hidden)}


def _sums_with_reference(model: Any, batch: Tree, hidden: Hidden) -> tuple[Array, Array]:
    """Return the log-probability of each answer under the model and its reference, both [B, T + 2]."""
    sums = _answer_sums(model, batch, hidden)
    if "reference" in batch:
        return sums, batch["reference"]
    # The reference follows the policy, so that their activations do not exist at the same time.
    base, sums = jax.lax.optimization_barrier((jax.lax.stop_gradient(lora.disable(model)), sums))
    return sums, jax.lax.stop_gradient(_answer_sums(base, batch, hidden))


def _answer_sums(model: Any, batch: Tree, hidden: Hidden) -> Array:
    return sum_by_document(model.log_probs(hidden(model, batch), batch["labels"]), batch["segment_ids"])


def _pairs(model: Any, batch: Tree, hidden: Hidden) -> _Pairs:
    return _pairs_of(_answer_sums(model, batch, hidden), batch)


def _pairs_of(sums: Array, batch: Tree) -> _Pairs:
    is_answer = (batch["labels"] != IGNORE).astype(jnp.float32)
    lengths = split_pairs(sum_by_document(is_answer, batch["segment_ids"]))
    weights = ((lengths[0] > 0) & (lengths[1] > 0)).astype(jnp.float32)
    return _Pairs(*split_pairs(sums), lengths, weights)


def sum_by_document(values_BT: Array, segments_BT: Array) -> Array:
    """Sum the values of each document, [B, T + 2]; index 0 is padding."""
    rows, length = values_BT.shape
    sums = jnp.zeros((rows, length + length % 2 + 2), values_BT.dtype)
    return sums.at[jnp.arange(rows)[:, None], segments_BT].add(values_BT)


def split_pairs(sums: Array) -> tuple[Array, Array]:
    """Return the sums of preferred and of other answers, both flat."""
    return sums[:, 1:-1:2].ravel(), sums[:, 2::2].ravel()


def num_pairs(batch: Tree) -> Any:
    """Count the pairs of a batch."""
    return jnp.sum(jnp.max(batch["segment_ids"], axis=1) // 2)


def _objective(description: str, loss: Any, reference: Any = None, **options: Any) -> Objective:
    return Objective(description=description, loss=loss, weight=num_pairs, reference=reference, group=2, **options)


DPO = _objective("preference tuning with a reference (DPO)", dpo_loss, reference_column)
KTO = _objective("tuning on answers with a verdict (KTO)", kto_loss, reference_column, targets="verdict")
ORPO = _objective("supervised and preference tuning (ORPO)", orpo_loss)
SIMPO = _objective("preference tuning by mean log-probabilities (SimPO)", simpo_loss)
CPO = _objective("contrastive preference tuning (CPO)", cpo_loss)
