"""Small trainable weights beside frozen ones, on any pytree."""

from . import lora as lora

__all__ = ["lora"]
