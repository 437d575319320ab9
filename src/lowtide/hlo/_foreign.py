"""Plain functions of arrays in place of functions that `equinox.filter_jit` or `flax.nnx.jit` returned.

Both wrap `jax.jit` around a function of flat arrays, whose arguments have no names that a user knows. So the function
inside of the wrapper is compiled again, with the wrapper's donation.

Checked with Equinox 0.13.8 and Flax 0.12.8.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from ..core import StructureError, Tree, combine
from ..core._compat import jit_options


class PlainCall(NamedTuple):
    """A plain function of arrays, its arguments, and how to compile it."""

    fn: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    donate_argnums: Sequence[int]
    donate_argnames: Sequence[str] = ()
    static_argnums: Sequence[int] = ()


def unwrap(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> PlainCall:
    """Return the function inside of the wrapper of `equinox.filter_jit` or `flax.nnx.jit`, and its arguments.

    Its arguments and results hold only arrays. Raises `StructureError` for a wrapper of another library.
    """
    library = type(fn).__module__.partition(".")[0]
    if library == "equinox" and hasattr(fn, "donate_first"):
        donated = [index for index in range(len(args)) if (fn.donate_rest if index else fn.donate_first)]
        inner, (positional, named) = close_over_constants(fn.__wrapped__, args, kwargs, only_modules=False)
        return PlainCall(inner, positional, named, donated, [*named] if fn.donate_rest else [])
    if library == "flax" and hasattr(fn, "jitted_fn"):
        inner, states = _split_modules(fn.__wrapped__, args)
        return PlainCall(inner, states, kwargs, *jit_options(fn.jitted_fn))
    raise foreign_jit_error(fn)


def foreign_jit_error(fn: Any) -> StructureError:
    """Return the error for a jit wrapper that Lowtide cannot remove."""
    return StructureError(
        f"the function is wrapped by {type(fn).__module__.partition('.')[0]}'s own jit, whose arguments Lowtide "
        "cannot name",
        expected="a plain function, or one that jax.jit, equinox.filter_jit or flax.nnx.jit returned",
        got=type(fn).__name__,
        hint="pass the undecorated function (often fn.__wrapped__), with donate_argnums if it donates",
    )


def close_over_constants(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, only_modules: bool
) -> tuple[Callable[..., Any], tuple[tuple[Any, ...], dict[str, Any]]]:
    """Make a function of arrays only, as `equinox.filter_jit` does: all other leaves become its constants.

    `jax.jit` refuses an argument that holds a function (a module's activation), and traces a dropout's switch. With
    `only_modules`, only arguments with a function or an Equinox module lose their non-array leaves. The returned
    function returns only arrays; the returned arguments have None in place of constants.
    """

    def is_constant(leaf: Any) -> bool:
        return not (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))

    def is_module(node: Any) -> bool:
        return any(f"{kind.__module__}.".startswith("equinox.") for kind in type(node).__mro__)

    def split(argument: Any) -> tuple[Any, Any]:
        leaves = jax.tree.leaves(argument, is_leaf=is_module)
        if only_modules and not any(is_module(leaf) or (callable(leaf) and is_constant(leaf)) for leaf in leaves):
            return None, argument
        return (
            jax.tree.map(lambda leaf: leaf if is_constant(leaf) else None, argument),
            jax.tree.map(lambda leaf: None if is_constant(leaf) else leaf, argument),
        )

    pairs, named = [split(arg) for arg in args], {key: split(arg) for key, arg in kwargs.items()}
    constants = tuple(constant for constant, _ in pairs), {key: constant for key, (constant, _) in named.items()}
    arrays = tuple(array for _, array in pairs), {key: array for key, (_, array) in named.items()}
    if not jax.tree.leaves(constants):
        return fn, arrays

    def merge(arg: Any, constant: Any) -> Any:
        return combine(arg, constant) if jax.tree.leaves(constant) else arg

    @functools.wraps(fn)
    def bound(*args: Any, **kwargs: Any) -> Any:
        result = fn(
            *map(merge, args, constants[0]), **{key: merge(arg, constants[1][key]) for key, arg in kwargs.items()}
        )
        # A step that returns the updated module also returns the module's functions.
        return jax.tree.map(lambda leaf: None if is_constant(leaf) else leaf, result)

    return bound, arrays


def _split_modules(fn: Callable[..., Any], args: Sequence[Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Make a function of the states of NNX modules that returns its result and the variables that it changed."""
    nnx: Any = sys.modules["flax.nnx"]

    def has_module(tree: Any) -> bool:
        leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, nnx.Pytree | nnx.Variable))
        return any(isinstance(leaf, nnx.Pytree | nnx.Variable) for leaf in leaves)

    def split(trees: Sequence[Any]) -> tuple[list[Any], tuple[Any, ...]]:
        with nnx.split_context() as context:
            parts = [context.split(tree) if has_module(tree) else (None, tree) for tree in trees]
        return [definition for definition, _ in parts], tuple(nnx.as_pure(state) for _, state in parts)

    definitions, states = split(args)

    @functools.wraps(fn)
    def bound(*states: Any, **kwargs: Any) -> Tree:
        with nnx.merge_context() as context:
            pairs = zip(definitions, states, strict=True)
            values = [state if definition is None else context.merge(definition, state) for definition, state in pairs]
        before = {id(leaf) for leaf in jax.tree.leaves(states)}
        result = fn(*values, **kwargs)
        modules = [value for value, definition in zip(values, definitions, strict=True) if definition is not None]
        _, (after, returned) = split([modules, result])
        # `nnx.jit` returns the other variables unchanged, which takes no bytes.
        return returned, jax.tree.map(lambda leaf: None if id(leaf) in before else leaf, after)

    return bound, states
