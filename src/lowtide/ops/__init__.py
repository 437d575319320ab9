"""Attention and maps over tokens with small intermediate arrays, implemented for the target of the traced program."""

from ._attention import attention as attention
from ._attention import attention_implementation as attention_implementation
from ._options import AttentionMask as AttentionMask
from ._options import Implementation as Implementation
from ._tiled_map import tiled_map as tiled_map

__all__ = ["AttentionMask", "Implementation", "attention", "attention_implementation", "tiled_map"]
