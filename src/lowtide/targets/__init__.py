"""Chips as data, and compile targets made of them. JAX is not needed before a target's devices are requested."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
