"""Reward models and classifiers: a new head reads the last token of each document, as in `transformers`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ... import losses
from ...core import Tree
from ._objective import Hidden, Objective
from ._preferences import num_pairs, split_pairs, sum_by_document


def reward_loss(model: Any, batch: Tree, hidden: Hidden, config: Any) -> tuple[Any, Tree]:
    """Compute the loss of `lowtide.losses.reward` over the pairs of a batch."""
    is_end, segments = is_last(batch), batch["segment_ids"]
    scores = jnp.where(is_end, model.scores(hidden(model, batch))[..., 0], 0.0)
    chosen, rejected = split_pairs(sum_by_document(scores, segments))
    weights = split_pairs(sum_by_document(is_end.astype(jnp.float32), segments))[1]
    return losses.reward(chosen, rejected, margin=config.reward_margin, weights=weights)


def classification_loss(model: Any, batch: Tree, hidden: Hidden, config: Any) -> tuple[Any, Tree]:
    """Compute the mean cross-entropy of the classes of a batch, and the accuracy."""
    weights = is_last(batch) & (batch["targets"] >= 0)
    log_probs = jax.nn.log_softmax(model.scores(hidden(model, batch)))
    targets = jnp.maximum(batch["targets"], 0)
    gold = jnp.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]
    count = jnp.maximum(jnp.sum(weights), 1)
    is_right = jnp.argmax(log_probs, axis=-1) == targets
    return -jnp.sum(jnp.where(weights, gold, 0.0)) / count, {"accuracy": jnp.sum(is_right & weights) / count}


def num_texts(batch: Tree) -> Any:
    """Count the documents of a batch."""
    return jnp.sum(jnp.max(batch["segment_ids"], axis=1))


def is_last(batch: Tree) -> Array:
    """Return whether each token is the last one of its document."""
    segments = batch["segment_ids"]
    following = jnp.pad(segments[:, 1:], ((0, 0), (0, 1)))
    return (segments > 0) & (segments != following)


REWARD = Objective(description="a reward model", loss=reward_loss, weight=num_pairs, group=2)
CLASSIFICATION = Objective(description="classification", loss=classification_loss, weight=num_texts, targets="class")
