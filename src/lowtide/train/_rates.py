"""The learning rates that `optax.inject_hyperparams` keeps in an optimizer's state."""

from __future__ import annotations

from typing import Any

import optax

from ..core import Tree


def rates(opt_state: Tree, under: str = "hyperparams") -> list[tuple[Any, Any]]:
    """Where in an optimizer's state there are learning rates, and these; not a parameter's moments with that name."""
    found = optax.tree.get_all_with_path(opt_state, "learning_rate")
    return [(path, value) for path, value in found if len(path) > 1 and getattr(path[-2], "name", None) == under]


def recorded_rate(opt_state: Tree) -> dict[str, Any]:
    """Return the metric ``learning_rate`` of a step that made this state, when there is one."""
    found = rates(opt_state)
    return {"learning_rate": found[0][1]} if len(found) == 1 and found[0][1].ndim == 0 else {}
