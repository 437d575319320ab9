"""Lowtide lowers the peak memory of JAX training."""

from . import core as core
from . import ext as ext
from . import finetune as finetune
from . import losses as losses
from . import memory as memory
from . import models as models
from . import offload as offload
from . import ops as ops
from . import optim as optim
from . import pipeline as pipeline
from . import planning as planning
from . import quant as quant
from . import targets as targets
from . import testing as testing
from . import train as train
from .adapters import adapted as adapted
from .adapters import lora as lora
from .core import LayerStack as LayerStack
from .core import LowtideError as LowtideError
from .core import accumulate as accumulate
from .core import combine as combine
from .core import partition as partition
from .core import value_and_grad as value_and_grad
from .quant import QuantizedWeight as QuantizedWeight
from .quant import dequantize as dequantize
from .quant import quantize as quantize
from .targets import target as target
from .train import Trainer as Trainer
from .train import plan as plan

__version__: str
