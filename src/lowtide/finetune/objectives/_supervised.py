"""Supervised tuning: the cross-entropy of the learned tokens."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ...core import Tree
from ..data._pack import IGNORE
from ._objective import Hidden, Objective


def loss(model: Any, batch: Tree, hidden: Hidden, config: Any) -> tuple[Any, Tree]:
    """Compute the mean cross-entropy, with the load-balancing loss of a mixture of experts."""
    return model.stack.last(model.outer, hidden(model, batch), batch)


def num_targets(batch: Tree) -> Any:
    """Count the tokens that have a label."""
    return jnp.sum(batch["labels"] != IGNORE)


SUPERVISED = Objective(description="supervised tuning", loss=loss, weight=num_targets)
