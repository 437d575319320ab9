"""Distillation: the divergence from a teacher's most probable tokens, at every learned token.

The teacher runs before the step, from host memory, and leaves its top classes of each token as columns of the batch. So
the logits of all tokens exist for neither model.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ... import losses
from ...core import Tree
from ._objective import Hidden, Objective
from ._supervised import num_targets


def loss(model: Any, batch: Tree, hidden: Hidden, config: Any) -> tuple[Any, Tree]:
    """Compute the mean of `lowtide.losses.distillation_top_k`, plus `nll_weight` times the cross-entropy."""
    h, labels = hidden(model, batch), batch["labels"]
    h_BTD, head = model.head_inputs(h)
    ids, log_probs = batch["teacher_ids"], batch["teacher_log_probs"]
    options: dict[str, Any] = {"temperature": config.temperature or 1.0, "soft_cap": model.config.final_soft_cap}
    divergences = losses.distillation_top_k(h_BTD, head, ids, log_probs, labels, **options)
    num_tokens = jnp.maximum(num_targets(batch), 1)
    divergence = jnp.sum(divergences) / num_tokens
    if not config.nll_weight:
        return divergence, {"kl": divergence}
    nll = -jnp.sum(model.log_probs(h, labels)) / num_tokens
    return divergence + config.nll_weight * nll, {"kl": divergence, "nll": nll}


def teacher_columns(model: Any, batch: Tree, hidden: Hidden, config: Any) -> Tree:
    """Compute the teacher's most probable classes of each token and their log-probabilities, both [B, T, K]."""
    h_BTD, head = model.head_inputs(hidden(model, batch))
    options = {"vocab_size": model.config.vocab_size, "soft_cap": model.config.final_soft_cap}
    ids, log_probs = losses.top_log_probs(h_BTD, head, config.teacher_top_k, **options)
    return {"teacher_ids": ids, "teacher_log_probs": log_probs}


DISTILLATION = Objective(
    description="distillation from a teacher", loss=loss, weight=num_targets, reference=teacher_columns
)
