"""Objectives of a fine-tuning run: the loss, and the records that it reads.

A new objective is an `Objective` in a module, and its name here. Importing this package does not import JAX.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ._objective import Objective

ObjectiveName = Literal[
    "sft", "dpo", "kto", "orpo", "simpo", "cpo", "distillation", "reward", "classification", "embedding"
]
_PLACES: Mapping[str, tuple[str, str]] = {
    "sft": ("_supervised", "SUPERVISED"),
    "embedding": ("_embedding", "EMBEDDING"),
    "distillation": ("_distillation", "DISTILLATION"),
    **{name: ("_heads", name.upper()) for name in ("reward", "classification")},
    **{name: ("_preferences", name.upper()) for name in ("dpo", "kto", "orpo", "simpo", "cpo")},
}
"""Module and name of each objective."""


def objective(name: str) -> Objective:
    """Return an objective by the name that `FinetuneConfig.objective` has, such as ``dpo``."""
    module, attribute = _PLACES[name]
    return getattr(importlib.import_module(f"{__name__}.{module}"), attribute)


__all__ = ["ObjectiveName", "objective"]
