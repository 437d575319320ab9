"""Frozen weights in few bits: nodes that multiply like the arrays they replaced.

What loads models builds nodes itself, with `build`; users have `quantize` and `dequantize`.
"""

from ._double import dynamic_map as dynamic_map
from ._formats import Format as Format
from ._formats import format_named as format_named
from ._model import abstract as abstract
from ._model import build as build
from ._model import dequantize as dequantize
from ._model import matrices as matrices
from ._model import placed as placed
from ._model import quantize as quantize
from ._weight import QuantizedWeight as QuantizedWeight

__all__ = [
    "Format",
    "QuantizedWeight",
    "abstract",
    "build",
    "dequantize",
    "dynamic_map",
    "format_named",
    "matrices",
    "placed",
    "quantize",
]
