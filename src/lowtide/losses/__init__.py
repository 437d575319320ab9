"""Losses that do not materialise what they do not have to."""

from ._cross_entropy import chunked_cross_entropy as chunked_cross_entropy

__all__ = ["chunked_cross_entropy"]
