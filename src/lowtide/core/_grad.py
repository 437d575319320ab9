"""Gradients of the trainable leaves only.

`jax.value_and_grad` of a whole model builds a cotangent for every leaf: a full array of zeros for each frozen
weight (JAX issue 23316). Here only the selected leaves are differentiated. The frozen leaves enter the function as
constants, so they never get a cotangent, a zero array or an accumulator, eagerly or under jit.

The alternative `jax.vjp(...)[1].with_refs(jax.ad.DontWant(), ...)` was measured, too (benchmarks/log/). Under jit it
needs the same bytes. Outside of jit, `lax.scan` still computes and stacks the gradient of the frozen weights, and then
drops it. With a `Ref` for the trainable leaves, a scan raises or gives wrong gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ._errors import SelectionError
from ._linear import products_explained
from ._paths import Tree, is_array_like, leaves_with_paths
from ._selection import Selector, combine, partition, refuse_shared


def value_and_grad(
    fn: Callable[..., Any], wrt: Selector = "**", *, has_aux: bool = False
) -> Callable[..., tuple[Any, Tree]]:
    """Differentiate `fn` like `jax.value_and_grad`, but only with respect to the selected leaves.

    Args:
        fn: a function ``fn(model, *args, **kwargs)`` that returns a scalar loss, or ``(loss, aux)`` with `has_aux`.
        wrt: which leaves of `model` to differentiate: globs or compiled regular expressions on tree paths, or a
            predicate ``(path, leaf) -> bool``.
        has_aux: whether `fn` returns auxiliary values in addition to the loss.

    Returns:
        A function with the arguments of `fn` that returns ``(loss, grads)``, or ``((loss, aux), grads)``. `grads`
        has the structure of `model` with `None` at every leaf that was not selected.

    Raises:
        SelectionError: when `wrt` selects nothing, an integer or boolean leaf, a leaf of a quantised weight, or an
            array that the model holds at two paths.
        StructureError: when `fn` uses a quantised weight, or a weight with an adapter, for anything but products.

    Memory:
        Gradients take exactly the bytes of the selected leaves. Their values equal those of `jax.value_and_grad`.

    Examples:
        >>> model = {"base": jnp.ones((3,)), "lora_a": jnp.ones((3,))}
        >>> loss_fn = lambda model, x: jnp.sum(model["base"] * model["lora_a"] * x)
        >>> loss, grads = value_and_grad(loss_fn, wrt="lora_*")(model, jnp.arange(3.0))
        >>> grads["base"] is None, grads["lora_a"].tolist()
        (True, [0.0, 1.0, 2.0])

    References:
        JAX issue 23316, "Full zero arrays allocated for gradients of stop_gradient parameters".
    """

    @functools.wraps(fn)
    def wrapped(model: Tree, *args: Any, **kwargs: Any) -> tuple[Any, Tree]:
        trainable, frozen = partition(model, wrt)
        check_differentiable(trainable)
        refuse_shared(trainable)

        def loss_fn(trainable: Tree) -> Any:
            full_model = combine(trainable, frozen)
            with products_explained(full_model):
                return fn(full_model, *args, **kwargs)

        return jax.value_and_grad(loss_fn, has_aux=has_aux)(trainable)

    return wrapped


def check_differentiable(trainable: Tree) -> None:
    """Refuse selected leaves that have no gradient.

    Raises:
        SelectionError: with the path of an integer, boolean or non-numeric leaf; or of a leaf of a frozen node
            (``is_frozen = True``), such as the scales of a quantised weight.
    """
    for path, leaf in leaves_with_paths(trainable):
        dtype = _dtype(path, leaf)
        if not is_array_like(leaf) or not jnp.issubdtype(dtype, jnp.inexact):
            raise SelectionError(
                f"{path}: a leaf of type {dtype} cannot be differentiated, only floating-point leaves can",
                hint=f'leave it out of the selection, for instance with the pattern "!{path}"; '
                "or, for a module of another library, use its bridge in lowtide.ext",
            )
    is_frozen = lambda node: getattr(type(node), "is_frozen", False) is True  # noqa: E731
    for path, node in leaves_with_paths(trainable, is_leaf=is_frozen):
        if is_frozen(node) and (leaves := leaves_with_paths(node)):
            name = "/".join(part for part in (path, leaves[0][0]) if part)
            hint = f'train an adapter on this weight, leave it out with the pattern "!{name}", or call lt.dequantize'
            raise SelectionError(f"{name}: a leaf of a {type(node).__name__} cannot be trained", hint=hint)


def _dtype(path: str, leaf: Any) -> Any:
    """Return the dtype of an array leaf, or the type name of any other leaf."""
    kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}".removeprefix("builtins.")
    try:
        return jnp.result_type(leaf) if is_array_like(leaf) else kind
    except TypeError:  # an array type of another library
        hint = "convert a PyTorch tensor with jnp.asarray(tensor.detach().cpu().numpy())"
        raise SelectionError(f"{path}: a leaf of type {kind} cannot be differentiated", hint=hint) from None
