"""The learning rates that `optax.inject_hyperparams` keeps in an optimizer's state."""

from __future__ import annotations

from typing import Any

import optax

from ..core import Tree


def rates(opt_state: Tree, under: str = "hyperparams") -> list[tuple[Any, Any]]:
    """Return the paths and values of the learning rates in an optimizer's state.

    A moment of a parameter that is named ``learning_rate`` is not among them.
    """
    found = optax.tree.get_all_with_path(opt_state, "learning_rate")
    return [(path, value) for path, value in found if len(path) > 1 and getattr(path[-2], "name", None) == under]


def recorded_rate(opt_state: Tree) -> dict[str, Any]:
    """Return the metric ``learning_rate`` for an optimizer's state, or {} where it has none or several."""
    found = rates(opt_state)
    return {"learning_rate": found[0][1]} if len(found) == 1 and found[0][1].ndim == 0 else {}
