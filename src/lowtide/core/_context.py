"""Tokens of rows that devices divide along the axis ``context`` of a mesh: work that each does on its own.

What cuts rows into pieces by itself is called on what a device has: in an array of all tokens the compiler would gather
them for each piece, and add up gradients of weights for each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from ._explicit import explicit_mesh
from ._paths import Tree
from ._placing import CONTEXT
from ._stack import divided_along, divided_mesh


def token_parts(length: int, arrays: Tree) -> int:
    """Return among how many devices the tokens of rows are divided, evenly or not at all.

    Args:
        length: tokens of a row.
        arrays: whose types may say themselves how they are divided: those are left alone.
    """
    size = divided_along(CONTEXT)
    return 1 if size == 1 or length % size or explicit_mesh(arrays) is not None else size


def on_own_tokens(
    fn: Callable[[Tree, Tree], Tree], whole: Tree, tokens: Tree, *, axis: int = 1, out_axis: int = 1
) -> Any:
    """Call ``fn(whole, tokens)`` on each device's tokens.

    Args:
        fn: the function.
        whole: what every device has all of; gradients for it are added up over the devices once.
        tokens: arrays with tokens in one of their axes, which the devices divide.
        axis: which.
        out_axis: which axis of the results the devices divide.
    """
    # Outside of `jax.jit` JAX maps over all axes of a mesh or none (0.10.2).
    mapped = jax.jit(
        jax.shard_map(
            fn,
            mesh=divided_mesh(),
            in_specs=(jax.P(), _along(axis)),
            out_specs=_along(out_axis),
            axis_names={CONTEXT},
            check_vma=False,
        )
    )
    return mapped(whole, tokens)


def _along(axis: int) -> jax.P:
    return jax.P(*[None] * axis, CONTEXT)
