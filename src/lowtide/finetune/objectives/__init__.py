"""Objectives of a fine-tuning run: the loss, and the records that it reads.

Each module has one objective, ``OBJECTIVE``. A new objective is a module and its name here. Importing this package does
not import JAX.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ._objective import Objective

ObjectiveName = Literal["sft", "dpo"]
_MODULES: Mapping[str, str] = {"sft": "_supervised", "dpo": "_preferences"}


def objective(name: str) -> Objective:
    """Return an objective by the name that `FinetuneConfig.objective` has."""
    return importlib.import_module(f"{__name__}.{_MODULES[name]}").OBJECTIVE


__all__ = ["ObjectiveName", "objective"]
