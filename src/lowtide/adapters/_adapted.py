"""Compute any function with weights that are no arrays: adapters, quantised bases.

A node in the place of a weight multiplies itself (`core.LinearWeight`): through `lowtide.linear` or Python's ``@``.
Most programs do neither: Flax and Keras call `jax.lax.dot_general`, others `jnp.einsum`. So the function is traced with
arrays in the nodes' place, and its program is computed again, operation by operation, with the nodes: a product with a
weight is the node's own, what only moves a weight (a transposition, a cast, a slice of a stack, the constants of a
loop) moves the node, and anything else is refused with the line of the source that does it. W + BA exists nowhere.

Other ways that were weighed (docs/internals/adapters.md): Quax, which the field made for this, does it while the
function is traced, by a tracer of its own on JAX's private parts; Qwix intercepts the layers of Flax by name. A program
has one form, whatever wrote it.

Known inefficiency: the function is traced twice. Inner `jax.jit`s that hold a weight are dissolved.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..core import LinearWeight, StructureError, is_array_like, leaves_with_paths
from ..jaxprs import Kind, bodies, fold, kind_of, make_jaxpr, runner, scan_counts, source_line


class _Weight(NamedTuple):
    """A node while a program is computed."""

    node: Any
    path: str
    """Where it stands in the arguments of the function."""


def adapted(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function that multiplies by arrays take weights with adapters, or quantised ones, in their place.

    Models that multiply through `lowtide.linear` or ``@`` need it not. All others do: those of Flax and Keras, and
    functions that call `jnp.einsum` or `jax.lax.dot_general`.

    Args:
        fn: any function of pytrees that can be traced by `jax.jit`. With the weights it may do what is linear in one
            operand: products (`jnp.matmul`, `jnp.dot`, `jnp.einsum`, `jax.lax.dot_general`), transpose and cast them,
            take layers of a stack, close over them in `jax.lax.scan`, `fori_loop`, `cond`, `jax.checkpoint`, `jax.jit`,
            scan over their layers; in `jax.vmap` and under differentiation, too.

    Returns:
        A function of the same arguments, in which `LoRAWeight` and other nodes may stand for arrays. Without any it is
        `fn` itself.

    Raises:
        StructureError: when called, for what else is done to such a weight, with its path and the line of the source.

    Memory:
        That of `fn`; the factors of an adapter are multiplied one after the other, never with one another.

    Examples:
        >>> import lowtide as lt
        >>> def model(params, x):
        ...     return jnp.einsum("...i,io->...o", x, params["kernel"])
        >>> config = lt.lora.Config(rank=2, targets="kernel")
        >>> params = lt.lora.add({"kernel": jnp.ones((4, 3))}, config, key=jax.random.key(0))
        >>> lt.adapted(model)(params, jnp.ones((2, 4))).shape
        (2, 3)
    """

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=_is_node)
        if not any(map(_is_node, leaves)):
            return fn(*args, **kwargs)
        names = [path.split("/", 2)[-1] for path, _ in leaves_with_paths((args, kwargs), is_leaf=_is_node)]
        traced = [i for i, leaf in enumerate(leaves) if _is_node(leaf) or is_array_like(leaf)]
        static: list[Any] = []

        def with_arrays(*arrays: Any) -> list[Any]:
            given = {**dict(enumerate(leaves)), **dict(zip(traced, arrays, strict=True))}
            args, kwargs = treedef.unflatten(given.values())
            out, tree = jax.tree.flatten(fn(*args, **kwargs))
            static[:] = [tree, [None if is_array_like(leaf) else leaf for leaf in out]]
            return [leaf for leaf in out if is_array_like(leaf)]

        closed, _ = make_jaxpr(with_arrays)(*(_shape(leaves[i]) for i in traced))
        inputs = [_Weight(leaves[i], names[i]) if _is_node(leaves[i]) else leaves[i] for i in traced]
        results = iter([value.node if isinstance(value, _Weight) else value for value in _evaluate(closed, inputs)])
        tree, out = static
        return tree.unflatten([next(results) if leaf is None else leaf for leaf in out])

    return wrapped


def _is_node(leaf: Any) -> bool:
    return isinstance(leaf, LinearWeight)


def _shape(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if _is_node(leaf) else leaf


def _evaluate(jaxpr: Any, inputs: Sequence[Any]) -> list[Any]:
    """Compute a program, open or closed, of arrays and weights."""
    return fold(jaxpr, inputs, _apply, lambda _, value: value)


def _apply(eqn: Any, operands: list[Any]) -> Sequence[Any]:
    """Compute an operation of arrays and weights."""
    if not any(isinstance(value, _Weight) for value in operands):
        return runner(eqn)(*operands)
    kind = kind_of(eqn)
    rule = _RULES.get(eqn.primitive.name) if kind is None else _NESTED.get(kind)
    results = None if rule is None else rule(eqn, operands)
    if results is None:
        weight = next(value for value in operands if isinstance(value, _Weight))
        raise StructureError(
            f"{weight.path}: the model does more with this weight than to multiply by it",
            expected="products with activations; a weight may be transposed, cast, and taken from a stack of layers",
            got=f"{eqn.primitive.name} of a {type(weight.node).__name__}{list(weight.node.shape)}, at "
            f"{source_line(eqn) or 'an unknown line'}",
            hint=f'leave it out of the targets, for instance with the pattern "!{weight.path}"',
        )
    return results


def _packed(values: Sequence[Any]) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]:
    """Take nodes out of weights, for a function of JAX; and what puts them back."""
    paths = [value.path if isinstance(value, _Weight) else None for value in values]

    def back(given: Sequence[Any]) -> list[Any]:
        return [one if path is None else _Weight(one, path) for one, path in zip(given, paths, strict=True)]

    return [value.node if isinstance(value, _Weight) else value for value in values], back


# What moves a weight.


def _same(eqn: Any, operands: list[Any]) -> Sequence[Any]:
    return operands


def _moved(change: Callable[[Any, Any], Any]) -> Callable[[Any, list[Any]], Sequence[Any] | None]:
    """Make a rule of a function from operation and node to node, or to None where it cannot be done."""

    def rule(eqn: Any, operands: list[Any]) -> Sequence[Any] | None:
        weight, others = operands[0], operands[1:]
        if not isinstance(weight, _Weight) or any(isinstance(value, _Weight) for value in others):
            return None
        node = change(eqn, weight.node, *others) if others else change(eqn, weight.node)
        return None if node is None else [weight._replace(node=node)]

    return rule


def _transpose(eqn: Any, node: Any) -> Any:
    last, order = node.ndim - 1, tuple(eqn.params["permutation"])
    same = tuple(range(node.ndim))
    return node if order == same else node.mT if order == (*same[:-2], last, last - 1) else None


def _cast(eqn: Any, node: Any) -> Any:
    # A node multiplies in the dtype of what it is multiplied with, which the program has cast, too.
    return node if jnp.issubdtype(eqn.params["new_dtype"], jnp.floating) else None


def _layers(eqn: Any, node: Any, start: Any, size: int) -> Any:
    """Slice the layers of a stack, and nothing else."""
    return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start, size, 0), node)


def _slice(eqn: Any, node: Any) -> Any:
    starts, ends, strides = (eqn.params[name] for name in ("start_indices", "limit_indices", "strides"))
    is_whole = not any(starts[1:]) and tuple(ends[1:]) == tuple(node.shape[1:])
    if node.ndim < 3 or not is_whole or not (strides is None or all(step == 1 for step in strides)):
        return None
    return _layers(eqn, node, starts[0], ends[0] - starts[0])


def _dynamic_slice(eqn: Any, node: Any, *starts: Any) -> Any:
    sizes = tuple(eqn.params["slice_sizes"])
    return _layers(eqn, node, starts[0], sizes[0]) if node.ndim > 2 and sizes[1:] == tuple(node.shape[1:]) else None


def _without_layers(eqn: Any, node: Any) -> Any:
    """Take the one layer out of a stack of one; `reshape` may do it, too."""
    is_one = node.ndim > 2 and node.shape[0] == 1 and tuple(eqn.outvars[0].aval.shape) == tuple(node.shape[1:])
    return jax.tree.map(lambda leaf: leaf[0], node) if is_one else None


# Products.


def _dot(eqn: Any, operands: list[Any]) -> Sequence[Any] | None:
    left, right = operands
    x: Any
    (of_left, of_right), (stack_left, stack_right) = eqn.params["dimension_numbers"]
    if isinstance(left, _Weight) and isinstance(right, _Weight):
        return None
    is_right = isinstance(right, _Weight)
    node, x = (right.node, left) if is_right else (left.node, right)
    own, others = (of_right, of_left) if is_right else (of_left, of_right)
    own_stack, other_stack = (stack_right, stack_left) if is_right else (stack_left, stack_right)
    if len(own) != 1 or own_stack != tuple(range(len(own_stack))) or own[0] < node.ndim - 2:
        return None
    out = eqn.outvars[0].aval
    # In a wider dtype than the operands' the product is summed, and given: what is multiplied is cast before.
    x = x.astype(jnp.promote_types(x.dtype, out.dtype))
    result = _product(node, x, own[0] == node.ndim - 1, others[0], tuple(other_stack), is_right)
    return [result.astype(out.dtype)]


def _product(node: Any, x: Any, is_last: bool, axis: int, stack: tuple[int, ...], is_right: bool) -> Any:
    """Multiply as `dot_general` does: axes of the stack, then those of the left operand, then those of the right one.

    Args:
        node: the weight, [*stack, *free, m, n].
        x: activations.
        is_last: whether n is summed over, or m.
        axis: the axis of `x` that is summed over.
        stack: the axes of `x` that go with the leading axes of the weight.
        is_right: whether the weight is the right operand.
    """
    if stack:
        first, rest = stack[0], tuple(i - (i > stack[0]) for i in stack[1:])
        axis -= axis > first
        return jax.vmap(lambda one, y: _product(one, y, is_last, axis, rest, is_right), (0, first))(node, x)
    if node.ndim > 2:
        at = x.ndim - 1 if is_right else 0
        return jax.vmap(lambda one: _product(one, x, is_last, axis, stack, is_right), out_axes=at)(node)
    x = jnp.moveaxis(x, axis, -1)
    result = node.linear(x) if is_last else x @ node
    return result if is_right else jnp.moveaxis(result, -1, 0)


# What holds programs.


def _call(eqn: Any, operands: list[Any]) -> Sequence[Any] | None:
    return _evaluate(bodies(eqn)[0].jaxpr, operands)


def _remat(eqn: Any, operands: list[Any]) -> Sequence[Any] | None:
    values, back = _packed(operands)
    body = bodies(eqn)[0].jaxpr
    moved = list[Any]()

    def run(*given: Any) -> list[Any]:
        results, restore = _packed(_evaluate(body, back(given)))
        moved[:] = [restore]
        return results

    options = {name: eqn.params[name] for name in ("policy", "prevent_cse") if name in eqn.params}
    results = jax.checkpoint(run, **options)(*values)
    return moved[0](results)


def _branch(eqn: Any, operands: list[Any]) -> Sequence[Any] | None:
    index, *rest = operands
    if isinstance(index, _Weight):
        return None
    values, back = _packed(rest)
    runs = [functools.partial(lambda jaxpr, *given: _arrays(eqn, jaxpr, back(given)), one.jaxpr) for one in bodies(eqn)]
    return jax.lax.switch(index, runs, *values)


def _scan(eqn: Any, operands: list[Any]) -> Sequence[Any] | None:
    consts, carry = scan_counts(eqn.params)
    body = bodies(eqn)[0].jaxpr
    held, first, stacked = operands[:consts], operands[consts : consts + carry], operands[consts + carry :]
    if any(isinstance(value, _Weight) for value in first):
        return None
    if any(isinstance(value, _Weight) and value.node.ndim < 3 for value in stacked):
        return None  # rows of a matrix
    slices, back = _packed(stacked)

    def step(state: list[Any], given: list[Any]) -> tuple[list[Any], list[Any]]:
        results = _arrays(eqn, body, [*held, *state, *back(given)])
        return list(results[:carry]), list(results[carry:])

    options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    state, out = jax.lax.scan(step, list(first), slices, **options)
    return [*state, *out]


def _while(eqn: Any, operands: list[Any]) -> Sequence[Any] | None:
    until, step = bodies(eqn)
    first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    asked, held, carry = operands[:first], operands[first : first + second], operands[first + second :]
    if any(isinstance(value, _Weight) for value in carry):
        return None

    def go_on(state: Any) -> Any:
        return _arrays(eqn, until.jaxpr, [*asked, *state])[0]

    return jax.lax.while_loop(go_on, lambda state: list(_arrays(eqn, step.jaxpr, [*held, *state])), list(carry))


def _arrays(eqn: Any, jaxpr: Any, values: Sequence[Any]) -> Sequence[Any]:
    """Compute what a loop or a branch runs, which gives arrays."""
    results = _evaluate(jaxpr, values)
    for value in results:
        if isinstance(value, _Weight):
            raise StructureError(
                f"{value.path}: the model gives this weight out of a loop or a branch",
                expected="what is computed with it",
                got=f"{eqn.primitive.name} at {source_line(eqn) or 'an unknown line'}",
                hint="use the weight where it is multiplied, or leave it out of the targets",
            )
    return results


_RULES: dict[str, Callable[[Any, list[Any]], Sequence[Any] | None]] = {
    "dot_general": _dot,
    "transpose": _moved(_transpose),
    "convert_element_type": _moved(_cast),
    "slice": _moved(_slice),
    "dynamic_slice": _moved(_dynamic_slice),
    "squeeze": _moved(_without_layers),
    "reshape": _moved(_without_layers),
    "copy": _same,
    "copy_p": _same,
    "optimization_barrier": _same,
}
"""What is done with weights by operations that hold no program; None is what cannot be done."""
_NESTED: dict[Kind, Callable[[Any, list[Any]], Sequence[Any] | None]] = {
    Kind.CALL: _call,
    Kind.CUSTOM_JVP: _call,
    Kind.REMAT: _remat,
    Kind.BRANCH: _branch,
    Kind.SCAN: _scan,
    Kind.WHILE: _while,
}
"""Likewise by those that hold programs. A product with a derivative of its own (`jax.custom_vjp`) is refused: that of
the node is another one."""
