"""The learning rates that `optax.inject_hyperparams` keeps in an optimizer's state."""

from __future__ import annotations

from typing import Any

import optax

from ..core import Tree


def find_learning_rates(opt_state: Tree, field_name: str = "hyperparams") -> list[tuple[Any, Any]]:
    """Return the paths and values of the learning rates in an optimizer's state.

    A moment of a parameter that is named ``learning_rate`` is not among them.
    """
    matches = optax.tree.get_all_with_path(opt_state, "learning_rate")
    return [(path, value) for path, value in matches if len(path) > 1 and getattr(path[-2], "name", None) == field_name]


def learning_rate_metric(opt_state: Tree) -> dict[str, Any]:
    """Return the metric ``learning_rate`` for an optimizer's state, or {} where it has none or several."""
    matches = find_learning_rates(opt_state)
    return {"learning_rate": matches[0][1]} if len(matches) == 1 and matches[0][1].ndim == 0 else {}
