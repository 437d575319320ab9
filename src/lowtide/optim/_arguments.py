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
            f"weights={weights!r} is not a supported value",
            expected=f"one of {', '.join(WEIGHTS)}, or None",
            hint='use "split", which loses the least precision per byte',
        )
    has_no_format = format is None or (isinstance(format, (str, Mapping)) and not format)
    if has_no_format and weights is None:
        raise ConfigError(
            "low_precision has neither a format nor weights, so it would not change the optimizer",
            expected='format="8bit", weights="split" or both',
            hint="leave out format to use 8 bits",
        )
    if match is not None and (has_no_format or isinstance(format, Mapping)):
        raise ConfigError(
            "match has no effect",
            expected="match together with one format",
            got=f"match={match!r} with {'only weights' if has_no_format else 'a mapping, whose keys select leaves'}",
            hint="leave out match",
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
            "least_size is not a number of elements",
            expected="an integer of at least 1",
            got=repr(least_size),
            hint=f"leave it out to use {LEAST_SIZE}",
        )
    if not is_count(seed, _SEEDS.start) or seed not in _SEEDS:
        raise ConfigError(
            "seed is not a valid seed of random numbers",
            expected=f"a 32-bit integer from {_SEEDS.start} to {_SEEDS.stop - 1}",
            got=repr(seed),
            hint="leave it out to use 0",
        )


def _compile_pattern(text: Any) -> re.Pattern[str]:
    hint = 'write a regular expression, not a glob: r".*/mu/.*" instead of "mu/*"'
    try:
        pattern = re.compile(text)
    except (re.error, TypeError) as error:
        raise ConfigError(f"match is not a regular expression: {error}", got=text, hint=hint) from error
    if not isinstance(pattern.pattern, str):
        raise ConfigError("match is a regular expression of bytes, but paths are text", got=text, hint=hint)
    return pattern


def _check_format(form: Any) -> str:
    names = (*FORMATS, BFLOAT16)
    if not isinstance(form, str) or form not in names:
        raise ConfigError(
            f"{form!r} is not a format of optimizer state",
            expected=f"one of {', '.join(names)}",
            hint='use "8bit", the usual format',
        )
    return form


def state_error(expected: str, got: str) -> StructureError:
    """Return the error for a state that another transformation made."""
    return StructureError(
        "the state does not belong to this lt.optim.low_precision",
        expected=expected,
        got=got,
        hint="convert a state of another format, or of the wrapped optimizer, with lt.optim.converted",
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
            f"{hosted[0]}: the state is in host memory, but this update computes on the device",
            expected="the update of the transformation that placed it there",
            got=f"{len(hosted)} leaves in host memory",
            hint='call lt.offload.optimizer(low_precision(tx), match=r".*/codes").update, or pass '
            "lt.offload.to_device(state)",
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
            "the gradients do not have the structure of the parameters",
            expected=jax.tree.structure(params),
            got=jax.tree.structure(grads),
            hint="call update(grads, state, params) with the parameters that init was called with",
        ) from error


def _join_paths(paths: Iterable[str]) -> str:
    paths = list(paths)
    return ", ".join(paths[:6]) + (f", … ({len(paths) - 6} more)" if len(paths) > 6 else "")
