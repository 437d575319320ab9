"""Catalogue of chips (`chips.toml`), and compile targets. Only `target`, `targets` and `Target.devices` import JAX."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
