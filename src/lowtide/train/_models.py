"""Models and loss functions in the form that a step uses: arrays of a pytree, arguments and results of a loss."""

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
"""Names of values that the trainer itself writes into records."""


class Pytree:
    """A pytree with the interface of a `ModelObject`; only the leaves without numbers are kept."""

    wrt: Where = "**"
    mutable: Where | None = None

    def __init__(self, model: Tree) -> None:
        self._static = split_static(model)[1]

    def rebuild(self, *parts: Tree) -> Tree:
        """Rebuild the model from trees of its arrays."""
        return combine(*parts, self._static)

    def bind(self, fn: Callable[..., Any], *, training: bool) -> Callable[..., tuple[Any, Tree]]:
        """Bind a function to arrays; see `ModelObject`. A call does not change a pytree."""

        def run(arrays: Tree, *args: Any) -> tuple[Any, Tree]:
            model = combine(arrays, self._static)
            with products_explained(model):
                return fn(model, *args), arrays

        return run


def outer_and_layers(model: Any, feature: str) -> tuple[Tree, Tree]:
    """Return ``outer`` and ``layers`` of a dictionary with only these keys, or of a dataclass with these fields.

    `StructureError` is raised for any other model; its message names `feature`.
    """
    fields = {"outer", "layers"}
    if isinstance(model, Mapping) and set(model) == fields:
        return model["outer"], model["layers"]
    if dataclasses.is_dataclass(model) and fields <= {field.name for field in dataclasses.fields(model)}:
        dataclass_model: Any = model
        return dataclass_model.outer, dataclass_model.layers
    raise StructureError(
        f"{feature} needs a model that is made of outer and layers",
        expected='{"outer": ..., "layers": ...}, or a dataclass with these fields',
        got=type(model).__name__,
        hint="put the stacked parameters under layers and all others under outer",
    )


def with_outer_and_layers(model: Any, outer: Tree, layers: Tree) -> Any:
    """Return the model with other values of ``outer`` and ``layers``."""
    if isinstance(model, Mapping):
        return {**model, "outer": outer, "layers": layers}
    return dataclasses.replace(model, outer=outer, layers=layers)


def accepted_keywords(fn: Callable[..., Any], **values: Any) -> dict[str, Any]:
    """Return those of ``key`` and ``training`` that a function takes by name."""
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):  # a builtin
        return {}
    bound: set[str] = set(fn.keywords) if isinstance(fn, functools.partial) else set()
    return {name: values[name] for name in _KEYWORDS if name in {*parameters} - bound and name in values}


def parse_loss(result: Any, arrays: Tree, *, has_mutable: bool, is_training: bool = True) -> tuple[Any, Tree, Tree]:
    """Return the three values of a loss function: a scalar, metrics, and the model's arrays after the call.

    `result` is ``loss``, ``(loss, metrics)`` or, for a pytree with mutable leaves, ``(loss, metrics, model)``, which is
    required in training. `StructureError` is raised for any other result. `ModelObject.bind` returns `arrays`.
    """
    parts = result if isinstance(result, tuple) else (result, {})
    if len(parts) == 3 and not has_mutable:
        raise StructureError(
            "the loss function returns a model, but no leaf of it is declared mutable",
            expected="(loss, metrics)",
            got="3 values",
            hint='Trainer(..., mutable="**/stats") names the leaves that the model changes itself',
        )
    if len(parts) == 3:
        parts, arrays = parts[:2], split_static(parts[2])[0]
    elif has_mutable and is_training:
        raise StructureError(
            "the loss function does not return the model, although some of its leaves are mutable",
            expected="(loss, metrics, model), with the model after the call",
            got=f"{len(parts)} values" if isinstance(result, tuple) else type(result).__name__,
            hint="return the model with its new batch statistics, or leave `mutable` out",
        )
    if len(parts) != 2 or not isinstance(parts[1], dict) or not _is_loss(parts[0]):
        raise StructureError(
            "the loss function returns neither a loss nor a loss and metrics",
            expected="a floating-point scalar, or a tuple (scalar, {name: scalar})",
            got=jax.tree.map(describe, result, is_leaf=lambda x: x is None),
            hint="average the losses of the examples with jnp.mean; return {} for no metrics",
        )
    metrics: dict[Any, Any] = parts[1]
    for name, value in metrics.items():
        shape = getattr(value, "shape", () if isinstance(value, int | float) else None)
        if not isinstance(name, str):
            raise StructureError(
                f"the name of metric {name!r} is not text",
                expected="text",
                got=type(name).__name__,
                hint=f'"metric_{name}"',
            )
        if name in _RESERVED or name.startswith("eval_"):
            raise StructureError(
                f"metric {name!r} has a name that is reserved for the trainer's own values",
                expected=f"another name than {', '.join(sorted(_RESERVED))} and eval_...",
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
                else describe(value)
                if shape == ()
                else f"shape {list(shape)}",
                hint="average the values of the examples with jnp.mean",
            )
    return parts[0], parts[1], arrays


def _is_loss(value: Any) -> bool:
    is_number = isinstance(value, float) or hasattr(value, "dtype")
    return is_number and jnp.shape(value) == () and jnp.issubdtype(jnp.result_type(value), jnp.floating)


def describe(leaf: Any) -> str:
    """Return the dtype and shape of an array as text, or the name of another leaf's type."""
    return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else type(leaf).__name__
