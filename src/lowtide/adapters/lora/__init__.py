"""LoRA and related adapters: train a small correction of chosen weights and keep the weights frozen.

Use it as a namespace: ``lt.lora.Config``, ``lt.lora.add``, ``lt.lora.merge``, ``lt.lora.save``, ``lt.lora.load``.
"""

from ._composition import attach as attach
from ._composition import combine as combine
from ._composition import split as split
from ._composition import unmerge as unmerge
from ._files import check as check
from ._files import check_names as check_names
from ._files import load as load
from ._files import save as save
from ._ia3 import IA3Config as IA3Config
from ._ia3 import IA3Weight as IA3Weight
from ._initialization import check_eva as check_eva
from ._initialization import eva as eva
from ._initialization import loftq as loftq
from ._kernel import LoRAKernel as LoRAKernel
from ._lora import Config as Config
from ._lora import LoRAWeight as LoRAWeight
from ._lora import plus as plus
from ._model import Report as Report
from ._model import add as add
from ._model import disable as disable
from ._model import dropout as dropout
from ._model import merge as merge
from ._model import report as report
from ._node import TRAINABLE as TRAINABLE
from ._saved import SavedWeight as SavedWeight
from ._vera import VeRAConfig as VeRAConfig
from ._vera import VeRAWeight as VeRAWeight

__all__ = [
    "TRAINABLE",
    "Config",
    "IA3Config",
    "IA3Weight",
    "LoRAKernel",
    "LoRAWeight",
    "Report",
    "SavedWeight",
    "VeRAConfig",
    "VeRAWeight",
    "add",
    "attach",
    "check",
    "check_eva",
    "check_names",
    "combine",
    "disable",
    "dropout",
    "eva",
    "load",
    "loftq",
    "merge",
    "plus",
    "report",
    "save",
    "split",
    "unmerge",
]
