"""Lowtide lowers the high-water mark of JAX training."""

from .core import LayerStack as LayerStack
from .core import accumulate as accumulate
from .core import combine as combine
from .core import partition as partition
from .core import value_and_grad as value_and_grad

__version__ = "0.1.0"

__all__ = ["LayerStack", "__version__", "accumulate", "combine", "partition", "value_and_grad"]
