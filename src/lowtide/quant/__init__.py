"""Quantised frozen weights: a `QuantizedWeight` is a pytree node that multiplies like the array that it replaces.

Users call `quantize` and `dequantize`. Code that loads models makes nodes one matrix at a time with `build`.
"""

from ._model import abstract as abstract
from ._model import build as build
from ._model import dequantize as dequantize
from ._model import matrices as matrices
from ._model import placed as placed
from ._model import quantize as quantize
from ._weight import Format as Format
from ._weight import QuantizedWeight as QuantizedWeight
from ._weight import dynamic_map as dynamic_map
from ._weight import format_named as format_named

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
