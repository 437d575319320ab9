"""Lowtide lowers the high-water mark of JAX training."""

from . import losses as losses
from . import memory as memory
from . import models as models
from . import offload as offload
from .adapters import lora as lora
from .core import LayerStack as LayerStack
from .core import LowtideError as LowtideError
from .core import accumulate as accumulate
from .core import combine as combine
from .core import partition as partition
from .core import value_and_grad as value_and_grad
from .memory import target as target
from .train import Trainer as Trainer

__version__ = "0.1.0"

__all__ = [
    "LayerStack",
    "LowtideError",
    "Trainer",
    "__version__",
    "accumulate",
    "combine",
    "lora",
    "losses",
    "memory",
    "models",
    "offload",
    "partition",
    "target",
    "value_and_grad",
]
