"""Lowtide lowers the peak memory of JAX training."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__ += ["__version__"]
__version__ = "0.2.0"
