"""Adapters: small trainable weights next to frozen base weights, on any pytree."""

from . import lora as lora
from ._adapted import adapted as adapted

__all__ = ["adapted", "lora"]
