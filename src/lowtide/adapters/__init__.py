"""Small trainable weights beside frozen ones, on any pytree."""

from . import lora as lora
from ._adapted import adapted as adapted

__all__ = ["adapted", "lora"]
