"""The loss of a decoder as `lowtide finetune` computes it, with its layers or their inputs in host memory."""

from __future__ import annotations

from typing import Any

from lowtide.finetune import FinetuneConfig
from lowtide.finetune._job import objective_loss


def offloaded_loss(
    model: Any, batch: Any, *, remat: bool = True, layers_per_remat: int = 1, inputs: Any = "device"
) -> tuple[Any, Any]:
    """Return the loss and metrics of supervised tuning; `inputs` is the memory of the kept inputs of layers."""
    config = FinetuneConfig(remat=remat, layers_per_remat=layers_per_remat)
    return objective_loss(config, inputs)(model, batch)
