"""Losses that avoid large intermediate arrays, such as the logits of all tokens."""

from ._cross_entropy import chunked_cross_entropy as chunked_cross_entropy

__all__ = ["chunked_cross_entropy"]
