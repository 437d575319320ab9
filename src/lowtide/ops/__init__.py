"""Attention and maps over tokens with small intermediate arrays, selected for the target of the traced program."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
