"""Training data: files of text and records, chat templates, tokenisation and packing."""

import lazy_loader

from ...core import require_extra

require_extra("finetune")

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
