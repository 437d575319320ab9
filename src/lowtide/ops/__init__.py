"""Kernels that materialise little, chosen by the target that a program is traced for."""

from ._attention import attend as attend
from ._attention import attention as attention
from ._attention import attention_implementation as attention_implementation
from ._device import traced_device as traced_device
from ._sight import Scores as Scores
from ._sight import Sight as Sight

__all__ = ["Scores", "Sight", "attend", "attention", "attention_implementation", "traced_device"]
