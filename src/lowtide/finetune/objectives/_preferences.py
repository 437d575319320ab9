"""Preference tuning with adapters: the reference is the same model with its adapters switched off.

A row has pairs of documents: the prompt with the preferred answer, then the prompt with the other answer. Documents are
numbered from 1, so preferred answers have odd segment numbers. No second copy of a weight exists, and no logits of more
than a chunk.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ... import losses
from ...adapters import lora
from ...core import Tree
from ..data._pack import IGNORE
from ._objective import Hidden, Objective


def loss(model: Any, batch: Tree, hidden: Hidden, config: Any) -> tuple[Any, Tree]:
    """Compute the loss of `lowtide.losses.dpo` over the pairs of a batch."""
    base = lora.disable(model)

    def log_probs(model: Any) -> Array:
        tokens = model.log_probs(hidden(model, batch), batch["labels"])
        return sum_by_document(tokens, batch["segment_ids"])

    policy = log_probs(model)
    # The reference follows the policy, so that their activations do not exist at the same time.
    base, policy = jax.lax.optimization_barrier((jax.lax.stop_gradient(base), policy))
    reference = jax.lax.stop_gradient(log_probs(base))
    lengths = sum_by_document((batch["labels"] != IGNORE).astype(jnp.float32), batch["segment_ids"])
    chosen_length, rejected_length = split_pairs(lengths)
    return losses.dpo(
        *split_pairs(policy),
        *split_pairs(reference),
        beta=config.beta,
        variant=config.preference_loss,
        label_smoothing=config.label_smoothing,
        lengths=(chosen_length, rejected_length),
        weights=((chosen_length > 0) & (rejected_length > 0)).astype(jnp.float32),
    )


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


OBJECTIVE = Objective(
    description="preference tuning (DPO)",
    loss=loss,
    weight=num_pairs,
    group=2,
)
