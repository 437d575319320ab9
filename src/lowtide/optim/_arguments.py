"""Validation of the arguments of `low_precision`, and explanations of failed updates."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..core import (
    ConfigError,
    LowtideError,
    PlacementError,
    StructureError,
    Tree,
    is_count,
    leaves_with_paths,
    memory_space,
)
from ._formats import FORMATS
from ._moments import MOMENTS
from ._packed import BFLOAT16, is_packed
from ._weights import WEIGHTS

LEAST_SIZE = 4096
"""Leaves with fewer elements stay in their dtype, as in bitsandbytes."""
_SEEDS = range(-(2**31), 2**32)


def parse_patterns(format: Any, match: Any, weights: Any) -> list[tuple[re.Pattern[str], str]]:
    """Return pairs of a regular expression on the paths of a state and the format of the leaves that it matches.

    The arguments are those of `low_precision`. Raises `ConfigError` for an unknown format, an invalid regular
    expression, or arguments that have no effect.
    """
    if weights is not None and weights not in WEIGHTS:
        raise ConfigError(
            f"weights cannot be kept as {weights!r}",
            expected=f"one of {', '.join(WEIGHTS)}, or None",
            hint='"split" loses least for a byte',
        )
    has_no_format = format is None or (isinstance(format, (str, Mapping)) and not format)
    if has_no_format and weights is None:
        raise ConfigError(
            "neither a format nor weights: the optimizer would stay as it is",
            expected='format="8bit", weights="split" or both',
            hint="leave format out for 8 bits",
        )
    if match is not None and (has_no_format or isinstance(format, Mapping)):
        raise ConfigError(
            "match would do nothing",
            expected="match beside one format",
            got=f"match={match!r} beside {'weights alone' if has_no_format else 'a mapping, whose expressions select'}",
            hint="leave match out",
        )
    if isinstance(format, Mapping):
        pairs = list(format.items())
    else:
        pairs = [] if has_no_format else [(MOMENTS if match is None else match, format)]
    return [(_compile_pattern(expression), _check_format(form)) for expression, form in pairs]


def check_numbers(least_size: Any, seed: Any) -> None:
    """Raise `ConfigError` for an invalid `least_size` or `seed` of `low_precision`."""
    if not is_count(least_size, 1):
        raise ConfigError(
            "least_size is no number of elements",
            expected="an integer of at least 1",
            got=repr(least_size),
            hint=f"leave it out for {LEAST_SIZE}",
        )
    if not is_count(seed, _SEEDS.start) or seed not in _SEEDS:
        raise ConfigError(
            "seed is no seed of random numbers",
            expected=f"an integer of 32 bits, from {_SEEDS.start} to {_SEEDS.stop - 1}",
            got=repr(seed),
            hint="leave it out for 0",
        )


def _compile_pattern(text: Any) -> re.Pattern[str]:
    hint = 'globs are other: "mu/*" is r".*/mu/.*" here'
    try:
        pattern = re.compile(text)
    except (re.error, TypeError) as error:
        raise ConfigError(f"match is no regular expression: {error}", got=text, hint=hint) from error
    if not isinstance(pattern.pattern, str):
        raise ConfigError("match is no regular expression: paths are no bytes", got=text, hint=hint)
    return pattern


def _check_format(form: Any) -> str:
    names = (*FORMATS, BFLOAT16)
    if not isinstance(form, str) or form not in names:
        raise ConfigError(
            f"no format of a state is called {form!r}", expected=f"one of {', '.join(names)}", hint='"8bit" is usual'
        )
    return form


def state_error(expected: str, got: str) -> StructureError:
    """Return the error for a state that another transformation made."""
    return StructureError(
        "the state is none of this lt.optim.low_precision",
        expected=expected,
        got=got,
        hint="lt.optim.converted makes one of a state in another format, or of the optimizer that is wrapped",
    )


def explain(error: Exception, init: Callable[[Tree], Any], grads: Tree, state: Any, params: Tree) -> None:
    """Raise an error that explains a failed update, if its arguments are the cause.

    `PlacementError`: the state is in host memory. `StructureError`: the state is of other parameters or of another
    transformation, or the gradients are not like the parameters. `params` may be None.
    """
    if isinstance(error, LowtideError):
        return
    hosted = [path for path, leaf in leaves_with_paths(state) if memory_space(leaf) == jax.memory.Space.Host]
    if hosted:
        raise PlacementError(
            f"{hosted[0]}: the state is in host memory, and this update computes on the device",
            expected="the update of the transformation that placed it there",
            got=f"{len(hosted)} leaves in host memory",
            hint='lt.offload.optimizer(low_precision(tx), match=r".*/codes").update, or lt.offload.to_device(state)',
        ) from error
    try:
        expected = jax.eval_shape(init, grads if params is None else params).inner
    except Exception:  # init does not accept the arguments, either, so the expected state is unknown
        return
    # A leaf may be packed in one and dense in the other: states made with another least_size are valid.
    state_leaves, expected_leaves = (
        dict(leaves_with_paths(tree, is_leaf=is_packed)) for tree in (state.inner, expected)
    )
    if state_leaves.keys() != expected_leaves.keys():
        raise state_error(_join_paths(expected_leaves), _join_paths(state_leaves)) from error
    for path, leaf in state_leaves.items():
        shape = leaf.shape if is_packed(leaf) else jnp.shape(leaf)
        if tuple(shape) != tuple(expected_leaves[path].shape):
            raise state_error(f"{path}: {list(expected_leaves[path].shape)}", str(list(shape))) from error
    if params is not None and jax.tree.structure(grads) != jax.tree.structure(params):
        raise StructureError(
            "the gradients have not the structure of the parameters",
            expected=jax.tree.structure(params),
            got=jax.tree.structure(grads),
            hint="call update(grads, state, params) with those that init was called with",
        ) from error


def _join_paths(paths: Iterable[str]) -> str:
    paths = list(paths)
    return ", ".join(paths[:6]) + (f", … ({len(paths) - 6} more)" if len(paths) > 6 else "")
