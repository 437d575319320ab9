"""The interface of an objective."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from ...core import Tree

Hidden = Callable[[Any, Tree], Any]
"""Computes the last block's output [B, T, D] from a model and a batch, with recomputation as the run is configured."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """Loss of a run, and the records and the reference that it needs."""

    description: str
    """A phrase for messages and help."""
    loss: Callable[[Any, Tree, Hidden, Any], tuple[Any, Tree]]
    """Computes the loss and metrics from the model, a batch, a function for the last block's output, and the config."""
    weight: Callable[[Tree], Any]
    """Returns the weight of a microbatch in the mean over microbatches."""
    reference: Callable[[Any, Tree, Hidden, Any], Tree] | None = None
    """Computes columns of a batch, with a leading axis of rows, from a frozen model and the arguments of `loss`. None:
    the loss has no reference. With adapters the loss may compute the columns from the model without adapters."""
    targets: Literal["verdict", "class"] | None = None
    """The meaning of the field ``label`` of records. If it has one, batches have the column ``targets``."""
    group: int = 1
    """Number of documents that a record becomes: 2 for preferences."""
