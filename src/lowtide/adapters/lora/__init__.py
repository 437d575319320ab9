"""LoRA: train a low-rank correction of chosen weights and leave the weights alone.

Use it as a namespace: ``lt.lora.Config``, ``lt.lora.add``, ``lt.lora.merge``, ``lt.lora.save``, ``lt.lora.load``.
"""

from ._combine import combine as combine
from ._config import Config as Config
from ._files import check as check
from ._files import load as load
from ._files import save as save
from ._kernel import LoRAKernel as LoRAKernel
from ._model import add as add
from ._model import merge as merge
from ._weight import LoRAWeight as LoRAWeight

__all__ = ["Config", "LoRAKernel", "LoRAWeight", "add", "check", "combine", "load", "merge", "save"]
