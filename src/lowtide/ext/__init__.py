"""Bridges to other libraries, one module per library, imported on first use: for instance `lowtide.ext.nnx`."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
