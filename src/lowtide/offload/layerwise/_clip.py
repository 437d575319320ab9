"""Clip gradients that never exist all at the same time.

The global norm is known only when the last gradient has been computed. An update inside the backward pass has already
happened by then. `Clip` lists the alternatives and their costs.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from ...core import ConfigError, Tree

ClipMode = Literal["exact", "previous", "layer"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clip:
    """Scale gradients down to a norm, as `optax.clip_by_global_norm` does.

    Examples:
        >>> Clip(max_norm=1.0)
        Clip(max_norm=1.0, mode='exact')
    """

    max_norm: float
    """Largest norm that is not scaled down."""
    mode: ClipMode = "exact"
    """``"exact"``: the norm of all gradients of this step, from a second forward and backward pass. It costs twice the
    arithmetic and 1.3 times the host traffic of weights and optimizer state. ``"previous"``: the factor for the norm of
    the previous step; the first step is not clipped; no extra cost. ``"layer"``: each layer, and each outer leaf, by
    its norm; no extra cost."""

    def __post_init__(self) -> None:
        value: Any = self.max_norm
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ConfigError(
                "max_norm is out of range",
                expected="a finite number above 0",
                got=repr(value),
                hint="use for instance 1.0, or clip=None for no clipping",
            )
        if self.mode not in get_args(ClipMode):
            raise ConfigError(
                f"unknown clip mode {self.mode!r}",
                expected=" or ".join(map(repr, get_args(ClipMode))),
                got=repr(self.mode),
                hint='use "exact", which equals optax.clip_by_global_norm',
            )

    def factor(self, norm: Any) -> Any:
        """Return the factor for gradients of this norm: 1, or the factor that reduces the norm to `max_norm`."""
        return jnp.where(norm < self.max_norm, 1.0, self.max_norm / norm)


def square_norm(tree: Tree) -> Any:
    """Return the sum of the squares of all leaves, in float32, or in float64 with `jax_enable_x64`."""

    def square(leaf: Any) -> Any:
        size = jnp.abs(leaf)
        return jnp.sum(jnp.square(size.astype(jnp.promote_types(size.dtype, jnp.float32))))

    return sum((square(leaf).astype(float) for leaf in jax.tree.leaves(tree)), jnp.zeros((), float))


def scale(tree: Tree, factor: Any) -> Tree:
    """Multiply all leaves by a scalar, in their dtypes."""
    return jax.tree.map(lambda leaf: leaf * factor.astype(leaf.dtype), tree)
