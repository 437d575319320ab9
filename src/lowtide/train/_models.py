"""Models and loss functions as a step takes them: the arrays of a pytree, what a loss function takes and returns."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..core import StructureError, Tree, Where, combine, products_explained, split_static

_KEYWORDS = ("key", "training")
_RESERVED = frozenset({"step", "loss", "grad_norm", "learning_rate", "seconds"})
"""What the trainer itself puts into records."""


class Pytree:
    """A model that is a pytree, in the part of a `ModelObject`.

    Args:
        model: the model, of which only leaves that hold no numbers are kept.
    """

    wrt: Where = "**"
    mutable: Where | None = None

    def __init__(self, model: Tree) -> None:
        self._static = split_static(model)[1]

    def rebuild(self, *parts: Tree) -> Tree:
        """Make the model that trees of its arrays are of."""
        return combine(*parts, self._static)

    def bind(self, fn: Callable[..., Any], *, training: bool) -> Callable[..., tuple[Any, Tree]]:
        """See `ModelObject`; a pytree does not change in a call."""

        def run(arrays: Tree, *args: Any) -> tuple[Any, Tree]:
            model = combine(arrays, self._static)
            with products_explained(model):
                return fn(model, *args), arrays

        return run


def sides(model: Any, what: str) -> tuple[Tree, Tree]:
    """Return what is outside of the stack of a model, and its layers.

    Args:
        model: a dictionary of ``outer`` and ``layers`` alone, or a dataclass that has them.
        what: needs it, for the message.

    Raises:
        StructureError: for any other model.
    """
    fields = {"outer", "layers"}
    if isinstance(model, Mapping) and set(model) == fields:
        return model["outer"], model["layers"]
    if dataclasses.is_dataclass(model) and fields <= {field.name for field in dataclasses.fields(model)}:
        given: Any = model
        return given.outer, given.layers
    raise StructureError(
        f"{what} trains a model that is made of outer and layers",
        expected='{"outer": ..., "layers": ...}, or a dataclass with these fields',
        got=type(model).__name__,
        hint="put the stacked parameters under layers and all others under outer",
    )


def with_sides(model: Any, outer: Tree, layers: Tree) -> Any:
    """Put others in their place in the model."""
    if isinstance(model, Mapping):
        return {**model, "outer": outer, "layers": layers}
    return dataclasses.replace(model, outer=outer, layers=layers)


def keywords(fn: Callable[..., Any], **values: Any) -> dict[str, Any]:
    """Those of ``key`` and ``training`` that a function takes by name."""
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):  # a builtin
        return {}
    bound: set[str] = set(fn.keywords) if isinstance(fn, functools.partial) else set()
    return {name: values[name] for name in _KEYWORDS if name in {*parameters} - bound and name in values}


def parse_loss(result: Any, arrays: Tree, *, has_mutable: bool, is_training: bool = True) -> tuple[Any, Tree, Tree]:
    """Parse the three values of a loss function: a scalar, metrics, and the model's arrays after it.

    Args:
        result: ``loss``, ``(loss, metrics)`` or, of a pytree with mutable leaves, ``(loss, metrics, model)``.
        arrays: the model's arrays after the call, as the model says.
        has_mutable: whether leaves of a pytree are declared mutable.
        is_training: whether the model has to be returned then.

    Raises:
        StructureError: for anything else.
    """
    parts = result if isinstance(result, tuple) else (result, {})
    if len(parts) == 3 and not has_mutable:
        raise StructureError(
            "the loss function returns a model, and none of its leaves may change",
            expected="(loss, metrics)",
            got="3 values",
            hint='Trainer(..., mutable="**/stats") names the leaves that the model changes itself',
        )
    if len(parts) == 3:
        parts, arrays = parts[:2], split_static(parts[2])[0]
    elif has_mutable and is_training:
        raise StructureError(
            "the loss function does not return the model, although some of its leaves are mutable",
            expected="(loss, metrics, model), the model as it is after the call",
            got=f"{len(parts)} values" if isinstance(result, tuple) else type(result).__name__,
            hint="return the new batch statistics in the model's place, or leave `mutable` out",
        )
    if len(parts) != 2 or not isinstance(parts[1], dict) or not _is_loss(parts[0]):
        raise StructureError(
            "the loss function returns neither a loss nor a loss and metrics",
            expected="a floating-point scalar, or a tuple (scalar, {name: scalar})",
            got=jax.tree.map(described, result, is_leaf=lambda x: x is None),
            hint="jnp.mean the losses of the examples; return {} for no metrics",
        )
    metrics: dict[Any, Any] = parts[1]
    for name, value in metrics.items():
        shape = getattr(value, "shape", () if isinstance(value, int | float) else None)
        if not isinstance(name, str):
            raise StructureError(
                f"metric {name!r} has no name", expected="text", got=type(name).__name__, hint=f'"metric_{name}"'
            )
        if name in _RESERVED or name.startswith("eval_"):
            raise StructureError(
                f"metric {name!r} has a name that the trainer itself records",
                expected=f"another name than {', '.join(sorted(_RESERVED))}, or eval_... of evaluations",
                got=repr(name),
                hint="rename it",
            )
        is_real = shape is not None and not jnp.issubdtype(jnp.result_type(value), jnp.complexfloating)
        if shape != () or not is_real:
            raise StructureError(
                f"metric {name!r} cannot be recorded",
                expected="a scalar",
                got=type(value).__name__
                if shape is None
                else described(value)
                if shape == ()
                else f"shape {list(shape)}",
                hint="jnp.mean what is one value for each example",
            )
    return parts[0], parts[1], arrays


def _is_loss(value: Any) -> bool:
    is_number = isinstance(value, float) or hasattr(value, "dtype")
    return is_number and jnp.shape(value) == () and jnp.issubdtype(jnp.result_type(value), jnp.floating)


def described(leaf: Any) -> str:
    """Write what a leaf is: the dtype and shape of an array, else its type."""
    return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else type(leaf).__name__
