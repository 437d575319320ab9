"""Knowledge about the states of Optax's optimizers: names of moments, their signs, and the rounding they tolerate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from ..core import ConfigError, Tree, leaves_with_paths, path_str
from ._packed import bits_of

MOMENTS = r".*/(mu|nu|nu_max|m1|exp_avg|exp_avg_sq|trace)/.*"
"""Regular expression on `own_paths` of a state. Optax also has moments named ``m`` and ``v``, but elsewhere these names
mean weights. The expression omits fields that `_ROUNDED` refuses in optimizers whose other moments may be quantised,
such as AdEMAMix's ``m2``."""
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
"""Fields of Optax's state classes that hold means or sums of squares or of magnitudes, so they are never negative.
Other fields keep a sign, because nothing is known about them (SM3 calls its momentum nu)."""
_ROUNDED = {
    "ScaleByRStdDevState": ({"mu": 32, "nu": 32}, "takes the difference of two moments, nu - mu ** 2"),
    "ScaleByRStdDevWithCountState": ({"mu": 32, "nu": 32}, "takes the difference of two moments, nu - mu ** 2"),
    "ScaleByAdemamixState": ({"m2": 16}, "moves its slow mean by less than from one code to the next"),
    "MomoState": ({"exp_avg": 16}, "takes the length of its steps from it"),
    "MomoAdamState": ({"exp_avg": 16, "exp_avg_sq": 16}, "takes the length of its steps from it"),
    "EmaState": ({"average": 32}, "moves its average by less than from one number to the next"),
    "DAdaptAdamWState": ({"exp_avg": 8, "exp_avg_sq": 8}, "takes the length of its steps from it"),
}
"""Fields of Optax's state classes whose rounding changes the optimizer: the fewest bits they tolerate, and the reason.
Measured on a quadratic with 4,096 parameters, 3,000 steps: AdEMAMix with m2 in 8 bits ended four times as far from the
minimum as in float32. D-Adaptation in 4 bits ended twice as far, and Momo in 4 bits had not moved."""


class Moment(NamedTuple):
    """Properties of one leaf of a state."""

    is_positive: bool = False
    """Whether no number is negative, as in second moments."""
    least_bits: int = 0
    """Fewest bits per number that the optimizer tolerates."""
    reason: str = ""
    """Why it needs that many bits, for an error message."""


def moments(state: Tree) -> list[Moment]:
    """Return the `Moment` of each leaf of a state, in order."""
    found = list[Moment]()

    def below(tree: Any, known: Moment) -> None:
        for leaf in jax.tree.leaves(tree, is_leaf=_is_named):
            if not _is_named(leaf):
                found.append(known)
                continue
            kind = type(leaf).__name__ if _is_known(leaf) else ""
            least, reason = _ROUNDED.get(kind, ({}, ""))
            for name in leaf._fields:
                own = known._replace(is_positive=known.is_positive or name in _POSITIVE.get(kind, ()))
                own = own._replace(least_bits=least[name], reason=reason) if name in least else own
                below(getattr(leaf, name), own)

    below(state, Moment())
    return found


def refuse_few_bits(path: str, form: str, moment: Moment) -> None:
    """Raise `ConfigError` for a format with fewer bits than a moment needs.

    Args:
        path: path of the moment.
        form: name of the format.
        moment: properties of the moment.
    """
    if bits_of(form) >= moment.least_bits:
        return
    kept = {8: "8bit", 16: "bfloat16"}.get(moment.least_bits)
    raise ConfigError(
        f"{path} bears no {form}: the optimizer {moment.reason}",
        expected=f"{kept}, or float32" if kept else "float32",
        hint=f'format={{r".*{path.rpartition("/")[0]}.*": "{kept}", ...}}, or a match without it'
        if kept
        else "leave centered out, or choose a match without it",
    )


def own_paths(state: Tree, params: Tree, is_leaf: Callable[[Any], bool] | None = None) -> list[str]:
    """Return the path of each leaf of a state, in order, without the path of the parameter that the leaf belongs to.

    A parameter may also be called mu, as in variational models: the optimizer's part of ``z/mu/kernel`` is ``z``, and
    that of ``0/mu/mu/kernel`` is ``0/mu``.

    Args:
        state: the state of an optimizer.
        params: its parameters.
        is_leaf: which nodes of the state are leaves.
    """
    names, found = {path for path, _ in leaves_with_paths(params)}, list[str]()

    def below(path: str, node: Any) -> None:
        inside = leaves_with_paths(node, is_leaf=is_leaf)
        # A node whose leaves all have paths of parameters is one copy of the parameter tree, as `mu` is. Optax's own
        # NamedTuples are never taken for one, even where a parameter has the name of a field.
        is_beside = all(each in names for each, _ in inside) and not (_is_named(node) and _is_known(node))
        if is_beside or [each for each, _ in inside] == [""]:
            found.extend([path] * len(inside))
            return
        children, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda each: each is not node)
        for keys, child in children:
            below("/".join(filter(None, (path, path_str(keys)))), child)

    below("", state)
    return found


def _is_known(node: Any) -> bool:
    return type(node).__module__.split(".")[0] in ("optax", "lowtide")


def _is_named(node: Any) -> bool:
    return isinstance(node, tuple) and hasattr(node, "_fields")
