"""Frozen weights in few bits: nodes that multiply like the arrays they replaced."""

from ._model import dequantize as dequantize
from ._model import quantize as quantize
from ._weight import QuantizedWeight as QuantizedWeight

__all__ = ["QuantizedWeight", "dequantize", "quantize"]
