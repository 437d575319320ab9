"""Compile a function for a target, and read the result: graph of values, heap of temporaries, arguments, outputs."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
