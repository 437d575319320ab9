"""Operations of our own: how they are lowered, mapped and differentiated.

`jax.interpreters`, with which they are made, is in the table of `_compat`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ._compat import laid_out
from ._errors import StructureError


def laid_out_on_tpus(x: Any, order: tuple[int, ...]) -> Any:
    """`laid_out` in programs for TPUs: of a divided array XLA's other compilers gather all parts to do so."""
    return _on_tpus().bind(x, order=order)


@functools.cache
def _on_tpus() -> Any:
    def mapped(values: Any, axes: Any, order: tuple[int, ...]) -> Any:
        x = jnp.moveaxis(values[0], axes[0], 0)
        return laid_out_on_tpus(x, (0, *(axis + 1 for axis in order))), 0

    primitive: Any = Primitive("laid_out_on_tpus")
    primitive.def_impl(lambda x, order: x)
    primitive.def_abstract_eval(lambda x, order: x)
    ad.deflinear2(primitive, lambda cotangent, _, order: [cotangent])
    batching.primitive_batchers[primitive] = mapped
    mlir.register_lowering(primitive, lambda ctx, x, order: [x])
    mlir.register_lowering(primitive, mlir.lower_fun(laid_out, multiple_results=False), platform="tpu")
    return primitive


def no_derivative(x: Any, what: str) -> Any:
    """Return an array that is refused where a derivative goes through it, rather than to be lost.

    Args:
        x: an array.
        what: is differentiated then, for the `StructureError`.
    """
    return _without_derivative().bind(x, what=what)


@functools.cache
def _without_derivative() -> Any:
    def differentiated(primals: Any, tangents: Any, what: str) -> Any:
        if type(tangents[0]) is ad.Zero:
            return no_derivative(primals[0], what), tangents[0]
        raise StructureError(
            f"a derivative goes through {what}",
            got="it would be 0 there",
            hint="differentiate with the optimizer alone, or take jax.lax.stop_gradient of its gradients",
        )

    primitive: Any = Primitive("no_derivative")
    primitive.def_impl(lambda x, what: x)
    primitive.def_abstract_eval(lambda x, what: x)
    ad.primitive_jvps[primitive] = differentiated
    batching.primitive_batchers[primitive] = lambda values, axes, what: (no_derivative(values[0], what), axes[0])
    mlir.register_lowering(primitive, lambda ctx, x, what: [x])
    return primitive


def bilinear(name: str, fn: Callable[..., Any], of_first: Callable[..., Any], of_second: Callable[..., Any]) -> Any:
    """Make an operation of two arrays that is linear in each, with transposes of its own.

    Args:
        name: of the operation.
        fn: what it computes, by which it is mapped, too.
        of_first: ``of_first(cotangent, first, second)``: the first's cotangent, given the second.
        of_second: likewise of the second, given the first.
    """
    primitive: Any = Primitive(name)
    primitive.def_impl(jax.jit(fn))
    primitive.def_abstract_eval(lambda *avals: avals[0].update(shape=jax.eval_shape(fn, *avals).shape, weak_type=False))
    mlir.register_lowering(primitive, mlir.lower_fun(fn, multiple_results=False))
    ad.defbilinear(primitive, of_first, of_second)
    batching.primitive_batchers[primitive] = lambda values, axes: (jax.vmap(fn, axes)(*values), 0)
    return primitive
