"""LoRA and related adapters: train a small correction of chosen weights and keep the weights frozen.

Use it as a namespace: ``lt.lora.Config``, ``lt.lora.add``, ``lt.lora.merge``, ``lt.lora.save``, ``lt.lora.load``.
"""

from ._adapter import TRAINABLE as TRAINABLE
from ._attach import attach as attach
from ._attach import split as split
from ._attach import unmerge as unmerge
from ._combine import combine as combine
from ._config import Config as Config
from ._config import IA3Config as IA3Config
from ._config import VeRAConfig as VeRAConfig
from ._dropout import dropout as dropout
from ._eva import check_eva as check_eva
from ._eva import eva as eva
from ._files import check as check
from ._files import load as load
from ._files import save as save
from ._kernel import LoRAKernel as LoRAKernel
from ._loftq import loftq as loftq
from ._model import add as add
from ._model import disable as disable
from ._model import merge as merge
from ._names import check_names as check_names
from ._plus import plus as plus
from ._report import Report as Report
from ._report import report as report
from ._saved import SavedWeight as SavedWeight
from ._vectors import IA3Weight as IA3Weight
from ._vectors import VeRAWeight as VeRAWeight
from ._weight import LoRAWeight as LoRAWeight

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
