"""What is known of the states of Optax's optimizers: their moments, and which of them are never negative."""

from __future__ import annotations

from typing import Any

import jax

from ..core import Tree

MOMENTS = r".*/(mu|nu|nu_max|m1|m2|exp_avg|exp_avg_sq|trace)/.*"
"""On paths of a state. Optax has moments of other names, too (``m``, ``v``), which parameters may have."""
_POSITIVE = {
    "ScaleByAdamState": ("nu",),
    "ScaleByAmsgradState": ("nu", "nu_max"),
    "ScaleByBeliefState": ("nu",),
    "ScaleByRmsState": ("nu",),
    "ScaleByRmsWithCountState": ("nu",),
    "ScaleByRssState": ("sum_of_squares",),
    "ScaleByAdaDeltaState": ("e_g", "e_x"),
    "ScaleByAdanState": ("n",),
    "ScaleByAdemamixState": ("nu",),
    "ScaleBySimplifiedAdEMAMixState": ("n",),
    "FactoredState": ("v_row", "v_col", "v"),
    "MomoAdamState": ("exp_avg_sq",),
    "DAdaptAdamWState": ("exp_avg_sq",),
    "ProdigyState": ("exp_avg_sq",),
    "MadgradState": ("grad_sum_sq",),
    "COCOBState": ("scale", "subgradients", "reward"),
}
"""Fields of Optax's classes that are means or sums of squares, or of magnitudes; of others nothing is known (SM3 calls
its momentum nu), and they keep a sign."""
_DIFFERENCES = ("ScaleByRStdDevState", "ScaleByRStdDevWithCountState")
"""Of `optax.rmsprop(centered=True)`: its variance is ``nu - mu ** 2``."""


def are_positive(state: Tree) -> list[bool | None]:
    """Whether each leaf of a state, in order, is one of second moments and the like; None where no format is near."""
    found = list[bool | None]()

    def below(tree: Any, is_one: bool | None) -> None:
        for leaf in jax.tree.leaves(tree, is_leaf=_is_named):
            if not _is_named(leaf):
                found.append(is_one)
                continue
            kind = type(leaf).__name__ if type(leaf).__module__.split(".")[0] == "optax" else ""
            for name in leaf._fields:
                is_difference = kind in _DIFFERENCES and name in ("mu", "nu")
                is_other = is_difference or is_one is None
                below(getattr(leaf, name), None if is_other else is_one or name in _POSITIVE.get(kind, ()))

    below(state, False)
    return found


def _is_named(node: Any) -> bool:
    return isinstance(node, tuple) and hasattr(node, "_fields")
