"""A traced function whose closed-over tracers become arguments, as the rules of a `jax.custom_vjp` need.

`jax.closure_convert` makes arguments only of values that may have a gradient. An integer tracer, such as a batch's
segment ids, stays inside the function and is no longer valid when the rules run. `jax.closure_convert` also keeps
closed-over values alive for the lifetime of the process (jax 0.10.2 to 0.12.0).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.extend import core as jex

from ._paths import Tree


class Closed:
    """A traced function of trees, called with the leaves of its arguments and values for its closed-over tracers."""

    def __init__(self, fn: Callable[..., Tree], *args: Tree) -> None:
        self._traced, self.shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        # Concrete constants stay inside of the function; only tracers become arguments.
        self._is_const = [not isinstance(const, Tracer) for const in self._traced.consts]

    @property
    def tracers(self) -> list[Any]:
        """Tracers that the function closes over."""
        return [const for const, is_const in zip(self._traced.consts, self._is_const, strict=True) if not is_const]

    @property
    def passes(self) -> list[bool]:
        """Whether each leaf of the result is the argument leaf at the same position, unchanged."""
        return [out is arg for out, arg in zip(self._traced.jaxpr.outvars, self._traced.jaxpr.invars, strict=False)]

    def __call__(self, leaves: Sequence[Any], tracers: Sequence[Any]) -> list[Any]:
        """Return the leaves of the result.

        Args:
            leaves: leaves of the arguments.
            tracers: values in place of the attribute `tracers`, in its order.
        """
        values = iter(tracers)
        pairs = zip(self._traced.consts, self._is_const, strict=True)
        consts = [const if is_const else next(values) for const, is_const in pairs]
        return jex.jaxpr_as_fun(jex.ClosedJaxpr(self._traced.jaxpr, consts))(*leaves)
