"""Work on each device's own tokens, where rows are sharded along the mesh axis ``context``.

Functions that cut rows into pieces are mapped over each device's own part. On an array of all tokens the compiler would
gather the tokens for every piece, and add up gradients of weights for every piece.
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
    """Return the number of devices that share the tokens of a row; 1 if they cannot be shared evenly.

    Args:
        length: tokens of a row.
        arrays: arrays to compute with. If their types carry explicit shardings, the result is 1 and they stay as they
            are.
    """
    size = divided_along(CONTEXT)
    return 1 if size == 1 or length % size or explicit_mesh(arrays) is not None else size


def on_own_tokens(
    fn: Callable[[Tree, Tree], Tree], whole: Tree, tokens: Tree, *, axis: int = 1, out_axis: int = 1
) -> Any:
    """Call ``fn(whole, tokens)`` on each device's tokens.

    Args:
        fn: the function.
        whole: arrays that every device has whole. Their gradients are added up over the devices once.
        tokens: arrays whose token axis is sharded.
        axis: the token axis of `tokens`.
        out_axis: the sharded axis of the results.
    """
    # Outside of `jax.jit` a `jax.shard_map` maps over all axes of a mesh or none (0.10.2).
    mapped = jax.jit(
        jax.shard_map(
            fn,
            mesh=divided_mesh(),
            in_specs=(jax.P(), _token_spec(axis)),
            out_specs=_token_spec(out_axis),
            axis_names={CONTEXT},
            check_vma=False,
        )
    )
    return mapped(whole, tokens)


def _token_spec(axis: int) -> jax.P:
    return jax.P(*[None] * axis, CONTEXT)
