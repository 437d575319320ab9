"""Selection of the leaves of an optimizer's state that `low_precision` packs, and of their formats.

Regular expressions select leaves by path. Tables about the states of Optax's optimizers list the names of moments, the
fields that are never negative, and the fewest bits that a field tolerates.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from ..core import ConfigError, Tree, check_choice, check_type, leaves_with_paths, path_str
from ._formats import FORMATS
from ._packed import BFLOAT16, bits_of
from ._weights import WEIGHTS

MOMENTS = r".*/(mu|nu|nu_max|m1|exp_avg|exp_avg_sq|trace)/.*"
"""Default regular expression, matched against `optimizer_paths`. It omits Optax's moments named ``m`` and ``v``,
because these names mean weights elsewhere. It also omits AdEMAMix's ``m2``: `_MIN_BITS` refuses that field, but the
optimizer's other moments may be quantised."""
_POSITIVE_FIELDS = {
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
"""Fields of Optax's state classes that are never negative: means or sums of squares or of magnitudes. Other fields are
stored with signs, whatever their names (SM3 calls its momentum nu)."""
_MIN_BITS = {
    "ScaleByRStdDevState": ({"mu": 32, "nu": 32}, "computes the difference of two moments, nu - mu ** 2"),
    "ScaleByRStdDevWithCountState": ({"mu": 32, "nu": 32}, "computes the difference of two moments, nu - mu ** 2"),
    "ScaleByAdemamixState": ({"m2": 16}, "changes its slow mean by less than the distance between two codes"),
    "MomoState": ({"exp_avg": 16}, "computes the length of its steps from it"),
    "MomoAdamState": ({"exp_avg": 16, "exp_avg_sq": 16}, "computes the length of its steps from it"),
    "EmaState": ({"average": 32}, "changes its average by less than the distance between two numbers"),
    "DAdaptAdamWState": ({"exp_avg": 8, "exp_avg_sq": 8}, "computes the length of its steps from it"),
}
"""Fields of Optax's state classes whose rounding changes the optimizer: the fewest bits they tolerate, and the reason.
Measured on a quadratic with 4,096 parameters, 3,000 steps: AdEMAMix with m2 in 8 bits ended four times as far from the
minimum as in float32. D-Adaptation in 4 bits ended twice as far, and Momo in 4 bits had not moved."""


class Moment(NamedTuple):
    """Properties of one leaf of a state."""

    is_positive: bool = False
    """Whether no number is negative, as in second moments."""
    min_bits: int = 0
    """Fewest bits per number that the optimizer tolerates."""
    reason: str = ""
    """Why the optimizer needs that many bits, for an error message."""


def parse_patterns(format: Any, match: Any, weights: Any) -> list[tuple[re.Pattern[str], str]]:
    """Return pairs of a regular expression on the paths of a state and the format of the leaves that it matches.

    The arguments are those of `low_precision`; `weights` is only checked. Raises `ConfigError` for an unknown format or
    value of `weights`, an invalid regular expression, or arguments that have no effect.
    """
    if weights is not None:
        hint = 'use "split", which loses the least precision per byte, or leave weights out'
        check_choice("weights", weights, WEIGHTS, hint=hint)
    has_no_format = format is None or (isinstance(format, (str, Mapping)) and not format)
    if has_no_format and weights is None:
        problem = "low_precision has neither a format nor weights, so it would not change the optimizer"
        raise ConfigError(problem, hint="leave out format to use 8 bits")
    if match is not None and (has_no_format or isinstance(format, Mapping)):
        reason = "weights alone" if has_no_format else "a mapping of formats, whose keys select leaves"
        raise ConfigError(f"match={match!r} has no effect with {reason}", hint="leave out match")
    pairs: list[tuple[Any, Any]]
    if isinstance(format, Mapping):
        pairs = list(format.items())
    else:
        pairs = [] if has_no_format else [(MOMENTS if match is None else match, format)]
    for _, form in pairs:
        check_choice("format", form, (*FORMATS, BFLOAT16), hint='use "8bit", the usual format')
    return [(_compile_pattern(expression), form) for expression, form in pairs]


def _compile_pattern(text: Any) -> re.Pattern[str]:
    hint = 'write a regular expression, not a glob: r".*/mu/.*" instead of "mu/*"'
    check_type("match", getattr(text, "pattern", text), str, "a regular expression", hint=hint)
    try:
        return re.compile(text)
    except (re.error, TypeError) as error:  # TypeError: a pattern of another library, or of bytes
        raise ConfigError(f"match={text!r} is not a regular expression: {error}", hint=hint) from error


def moments(state: Tree) -> list[Moment]:
    """Return the `Moment` of each leaf of a state, in order."""
    leaf_moments = list[Moment]()

    def visit(tree: Any, moment: Moment) -> None:
        for leaf in jax.tree.leaves(tree, is_leaf=_is_namedtuple):
            if not _is_namedtuple(leaf):
                leaf_moments.append(moment)
                continue
            class_name = type(leaf).__name__ if _is_library_type(leaf) else ""
            min_bits, reason = _MIN_BITS.get(class_name, ({}, ""))
            for name in leaf._fields:
                child = moment._replace(is_positive=moment.is_positive or name in _POSITIVE_FIELDS.get(class_name, ()))
                child = child._replace(min_bits=min_bits[name], reason=reason) if name in min_bits else child
                visit(getattr(leaf, name), child)

    visit(state, Moment())
    return leaf_moments


def check_bits(path: str, form: str, moment: Moment) -> None:
    """Raise `ConfigError` for a format with fewer bits than a moment needs; `path` is for the message."""
    if bits_of(form) >= moment.min_bits:
        return
    tolerated = {8: "8bit", 16: "bfloat16"}.get(moment.min_bits)
    parent = path.rpartition("/")[0]
    remedy = f'pass format={{r".*{parent}.*": "{tolerated}", ...}}' if tolerated else "leave out centered"
    expected = f"{tolerated}, or float32" if tolerated else "float32"
    problem = f"{path} cannot be stored as {form}: the optimizer {moment.reason}"
    raise ConfigError(problem, expected=expected, hint=f"{remedy}, or exclude it from match")


def optimizer_paths(state: Tree, params: Tree, is_leaf: Callable[[Any], bool] | None = None) -> list[str]:
    """Return the path of each leaf of a state, in order, without the path of the parameter that the leaf belongs to.

    So a regular expression for the moment mu does not match a module named mu, as in variational models. For the
    parameter ``mu/kernel``, the state's path ``z/mu/kernel`` becomes ``z``, and ``0/mu/mu/kernel`` becomes ``0/mu``.
    """
    param_paths, paths = {path for path, _ in leaves_with_paths(params)}, list[str]()

    def visit(path: str, node: Any) -> None:
        leaves = leaves_with_paths(node, is_leaf=is_leaf)
        # A node whose leaves all have paths of parameters is a copy of the parameter tree, such as `mu`. Optax's own
        # NamedTuples never count as copies, even if a parameter has the name of a field.
        is_param_tree = all(leaf_path in param_paths for leaf_path, _ in leaves) and not (
            _is_namedtuple(node) and _is_library_type(node)
        )
        if is_param_tree or [leaf_path for leaf_path, _ in leaves] == [""]:
            paths.extend([path] * len(leaves))
            return
        children, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda subtree: subtree is not node)
        for keys, child in children:
            visit("/".join(filter(None, (path, path_str(keys)))), child)

    visit("", state)
    return paths


def _is_library_type(node: Any) -> bool:
    return type(node).__module__.split(".")[0] in ("optax", "lowtide")


def _is_namedtuple(node: Any) -> bool:
    return isinstance(node, tuple) and hasattr(node, "_fields")
