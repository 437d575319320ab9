"""Whether weights are numbers still, asked where a run pauses: before copies, checkpoints and evaluations, at its end.

A loss and gradients that are finite say nothing of the update that follows: a schedule that divides by zero, a norm of
zero, or a rate that is far too high makes NaN of them. To leave such an update out, a step would have to hold both
states at once; so it is found afterwards, before the state is taken for a good one. What is on the host is not asked:
it would have to come to the device.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..core import Tree, leaves_with_paths, on_host


@jax.jit
def _are_finite(leaves: list[jax.Array]) -> list[jax.Array]:
    # Scalars: of several processes each has them whole.
    return [jnp.all(jnp.isfinite(leaf)) for leaf in leaves]


def not_finite(tree: Tree) -> frozenset[str]:
    """Paths of the leaves that hold NaN or infinity.

    Args:
        tree: arrays.

    Memory:
        One number for each leaf.
    """
    asked = {
        path: leaf
        for path, leaf in leaves_with_paths(tree)
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and not on_host(leaf.sharding)
    }
    answers = jax.device_get(_are_finite(list(asked.values())))
    return frozenset(path for path, is_finite in zip(asked, answers, strict=True) if not is_finite)
