"""Attention and maps over tokens with small intermediate arrays, implemented for the target of the traced program."""

from ._attention import attend as attend
from ._attention import attention as attention
from ._attention import attention_implementation as attention_implementation
from ._sight import Implementation as Implementation
from ._sight import Scores as Scores
from ._sight import Sight as Sight
from ._tokens import over_tokens as over_tokens

__all__ = ["Implementation", "Scores", "Sight", "attend", "attention", "attention_implementation", "over_tokens"]
