"""Data that people have: records of several kinds and formats, chat templates, packing."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
