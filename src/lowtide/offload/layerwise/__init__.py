"""The layerwise step: each layer is updated inside the backward pass."""

from ._layerwise import Clip as Clip
from ._layerwise import LayerwiseState as LayerwiseState
from ._layerwise import LayerwiseStep as LayerwiseStep
from ._layerwise import layerwise_step as layerwise_step

__all__ = ["Clip", "LayerwiseState", "LayerwiseStep", "layerwise_step"]
