"""Functions as JAX traces them, and the named values inside them.

This module is shared by the three functions on activations (`checkpoint`, `tag`, `names`). It reads jaxprs through
`jax.extend.core`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.extend.core.primitives import name_p

from ..core import Tree, is_own_name, leaves_with_paths
from ..jaxprs import Kind, equations, kind_of, make_jaxpr, variables_read, walk

HIDING: Mapping[Kind | None, str] = {
    Kind.CUSTOM_VJP: "inside a function with a custom_vjp",
    Kind.CUSTOM_JVP: "inside a function with a custom_jvp",
    Kind.WHILE: "inside a while loop, which reverse-mode differentiation does not enter",
    Kind.CHOICE: "inside the code that may replace a kernel",
    Kind.KERNEL: "inside a Pallas kernel",
    Kind.OPAQUE: "inside a function with its own recomputation rules",
}
"""Operations into which the policy of a `jax.checkpoint` cannot see."""


@dataclasses.dataclass(frozen=True)
class Traced:
    """A function of its array arguments; all other arguments are constants."""

    closed: Any
    """The `ClosedJaxpr`."""
    arrays: tuple[Any, ...]
    """The traced leaves, which are the arguments of the jaxpr."""
    paths: tuple[str, ...]
    """Path of each leaf within its argument; empty for an argument that is an array itself."""
    out_tree: Any
    """The structure of the result."""


def trace(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Traced:
    """Trace a function of its arrays; Python numbers, text and functions among its arguments stay unchanged."""
    named_leaves = leaves_with_paths((args, dict(kwargs)))
    leaves, treedef = jax.tree.flatten((args, dict(kwargs)))
    array_indices = [
        i for i, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))
    ]

    def call_with_arrays(*arrays: Any) -> Tree:
        new_leaves = list(leaves)
        for i, array in zip(array_indices, arrays, strict=True):
            new_leaves[i] = array
        positional, keywords = treedef.unflatten(new_leaves)
        return fn(*positional, **keywords)

    arrays = tuple(leaves[i] for i in array_indices)
    closed, shape = make_jaxpr(call_with_arrays)(*arrays)
    # A path starts with 0 or 1 (positional or keyword), then the position or name of the argument.
    paths = tuple("/".join(named_leaves[i][0].split("/")[2:]) for i in array_indices)
    return Traced(closed, arrays, paths, jax.tree.structure(shape))


@dataclasses.dataclass(frozen=True)
class NamedValue:
    """One `checkpoint_name` in a traced function."""

    name: str
    aval: Any
    hidden: str
    """Why a checkpoint policy cannot see the value; empty if it can."""


def is_name(eqn: Any) -> bool:
    """Return whether an operation gives a name that is not one of the library's own."""
    return eqn.primitive is name_p and not is_own_name(eqn.params["name"])


def named_values(jaxpr: Any) -> Iterator[NamedValue]:
    """Yield all named values of a jaxpr and the jaxprs inside it, in program order."""
    read = variables_read(jaxpr)
    for eqn, hidden in walk(jaxpr, "", lambda eqn, _, hidden: hidden or HIDING.get(kind_of(eqn), "")):
        if is_name(eqn):
            unread = "" if eqn.outvars[0] in read else "dead code: the result of checkpoint_name is not used"
            yield NamedValue(eqn.params["name"], eqn.outvars[0].aval, hidden or unread)


def has_custom_rule(jaxpr: Any) -> bool:
    """Return whether differentiation replaces a part of the jaxpr by code that the jaxpr does not contain."""
    kinds = map(kind_of, equations(jaxpr))
    return any(kind is not None and kind.is_custom for kind in kinds)


def names_under_differentiation(fn: Callable[..., Any], traced: Traced) -> set[str]:
    """Return the names that reach a checkpoint policy when `fn`, traced before, is linearised.

    Custom derivative rules add names that only differentiation shows. Empty if the function cannot be linearised, or
    has no argument to differentiate.
    """
    names = set[str]()

    def record(primitive: Any, *_: Any, **params: Any) -> bool:
        if primitive is name_p and not is_own_name(params["name"]):
            names.add(params["name"])
        return False

    is_floating = [jax.numpy.issubdtype(array.dtype, jax.numpy.inexact) for array in traced.arrays]

    def linearise(*arrays: Any) -> Any:
        def call_with_floats(*floats: Any) -> Any:
            return fn(*(array if value is None else value for value, array in zip(floats, arrays, strict=True)))

        floats = [array if is_float else None for is_float, array in zip(is_floating, arrays, strict=True)]
        return jax.linearize(jax.checkpoint(call_with_floats, policy=record), *floats)[0]

    if any(is_floating):
        try:
            make_jaxpr(linearise)(*traced.arrays)
        except Exception:  # the user's own differentiation raises the same error
            return set()
    return names
