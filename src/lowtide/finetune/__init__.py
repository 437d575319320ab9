"""The fine-tuning job: its configuration, data, run folders and files."""

import sys
import types
from typing import Any

import lazy_loader

from ..core import ConfigError

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


class _Package(types.ModuleType):
    """Module class that rejects `lt.finetune(...)`, since other libraries offer a function of that name."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hint = 'call lt.finetune.Finetune(lt.finetune.FinetuneConfig(model="model", data="chats.jsonl"), "run")'
        raise ConfigError("lowtide.finetune is a package, not a function", hint=hint)


sys.modules[__name__].__class__ = _Package
