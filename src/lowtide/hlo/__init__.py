"""Compile for a target, and read the compiled program: its graph, its heap, the memory of arguments and results."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
