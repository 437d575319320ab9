"""A function with what it closes over as arguments, as the rules of a `jax.custom_vjp` need it.

`jax.closure_convert` makes arguments of what may have a gradient alone: an integer of a program that is traced, such as
a batch's segments, stays inside, and is gone when the rules run. It also keeps what a function closed over as long as
the process lives (jax 0.10.2 to 0.12.0).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.extend import core as jex

from ._paths import Tree


class Closed:
    """A function of trees, traced; called with the leaves of its arguments and with what it closes over."""

    def __init__(self, fn: Callable[..., Tree], *args: Tree) -> None:
        self._traced, self.shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        self._is_held = [not isinstance(const, Tracer) for const in self._traced.consts]

    @property
    def tracers(self) -> list[Any]:
        """What it closes over of programs that are traced."""
        return [const for const, is_held in zip(self._traced.consts, self._is_held, strict=True) if not is_held]

    @property
    def passes(self) -> list[bool]:
        """Whether each leaf of the result is the leaf of the arguments in its place, unchanged."""
        return [out is given for out, given in zip(self._traced.jaxpr.outvars, self._traced.jaxpr.invars, strict=False)]

    def __call__(self, leaves: Sequence[Any], tracers: Sequence[Any]) -> list[Any]:
        """Return the leaves of the result.

        Args:
            leaves: of the arguments.
            tracers: in the place of `tracers`.
        """
        given = iter(tracers)
        pairs = zip(self._traced.consts, self._is_held, strict=True)
        consts = [const if is_held else next(given) for const, is_held in pairs]
        return jex.jaxpr_as_fun(jex.ClosedJaxpr(self._traced.jaxpr, consts))(*leaves)
