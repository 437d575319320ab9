"""Read jaxprs: operations that hold jaxprs, traversals, FLOP counts, differences between JAX versions."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
