"""Memory reports as plain data, their differences, and their views; this package needs no JAX."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
