"""Clipping gradients that are never all there at the same time.

The global norm of all gradients is known only when the last of them has been computed, and by then an update inside the
backward pass has long been made. `Clip` names the ways out; what each costs is in its documentation.
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
    """The largest norm that is left alone."""
    mode: ClipMode = "exact"
    """``"exact"``: the norm of all gradients of this step, by running forward and backward twice (twice the arithmetic,
    1.3 times the host traffic of weights and optimizer state). ``"previous"``: the factor that the previous step's norm
    asks for, and the first step unclipped; costs nothing. ``"layer"``: each layer, and each outer leaf, by its own
    norm; costs nothing."""

    def __post_init__(self) -> None:
        given: Any = self.max_norm
        if not isinstance(given, int | float) or not 0 < given < math.inf:
            raise ConfigError(
                "max_norm is out of range",
                expected="a finite number above 0",
                got=repr(given),
                hint="1.0 is customary; clip=None does not clip",
            )
        if self.mode not in get_args(ClipMode):
            raise ConfigError(
                "unknown way to clip",
                expected=" or ".join(map(repr, get_args(ClipMode))),
                got=repr(self.mode),
                hint='"exact" equals optax.clip_by_global_norm',
            )

    def factor(self, norm: Any) -> Any:
        """Return what to multiply gradients of a norm by: one, or what makes the norm `max_norm`."""
        return jnp.where(norm < self.max_norm, 1.0, self.max_norm / norm)


def square_norm(tree: Tree) -> Any:
    """Sum of the squares of all leaves, float32 or with `jax_enable_x64` float64."""

    def square(leaf: Any) -> Any:
        size = jnp.abs(leaf)
        return jnp.sum(jnp.square(size.astype(jnp.promote_types(size.dtype, jnp.float32))))

    return sum((square(leaf).astype(float) for leaf in jax.tree.leaves(tree)), jnp.zeros((), float))


def scale(tree: Tree, factor: Any) -> Tree:
    """All leaves times a scalar, in their own dtypes."""
    return jax.tree.map(lambda leaf: leaf * factor.astype(leaf.dtype), tree)
