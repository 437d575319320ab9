"""The layerwise step: each layer is updated inside the backward pass."""

from ._layerwise import LayerwiseStep as LayerwiseStep
from ._layerwise import layerwise_step as layerwise_step
from ._state import LayerwiseState as LayerwiseState
from ._step import Clip as Clip

__all__ = [
    "Clip",
    "LayerwiseState",
    "LayerwiseStep",
    "layerwise_step",
]
