"""Evaluate any function with weights that are not arrays: weights with adapters, quantised weights, and probes.

A node in place of a weight multiplies itself (`core.LinearWeight`), through `core.linear` or Python's ``@``. Most
programs use neither: Flax and Keras call `jax.lax.dot_general`, others `jnp.einsum`. So the function is traced with
arrays in place of the nodes, and its program is evaluated with the nodes, one operation at a time. A `Probe` records
how the function uses a weight, so that each weight gets a suitable adapter before anything runs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ..core import LinearWeight, StructureError, is_array_like, is_key, leaves_with_paths
from ..jaxprs import Kind, bodies, fold, kind_of, make_jaxpr, runner, scan_counts
from ._products import RULES, KernelWeight, Weight, is_row_gather, is_row_slice, line_of, num_stacked, precision_name

# A product with a weight calls the node's own product. An operation that only moves a weight (a transposition, a cast,
# a slice of a stack, a constant of a loop) moves the node. Any other operation is refused with the source line that
# does it. W + BA is never materialised.
#
# Alternatives that were considered (docs/internals/adapters.md): Quax, which was made for this, replaces operations
# while the function is traced, with a custom tracer that uses private parts of JAX. Qwix intercepts the layers of Flax
# by name. A jaxpr has the same form, whichever library wrote the model.
#
# Known inefficiency: the function is traced twice. Inner `jax.jit`s that hold a weight are inlined.


def adapted(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that multiplies by arrays accept weights with adapters, or quantised ones, in their place.

    Models that multiply through `lowtide.core.linear` or ``@`` do not need it. All others do: those of Flax and Keras,
    and functions that call `jnp.einsum` or `jax.lax.dot_general`.

    Args:
        fn: any function of pytrees that `jax.jit` can trace. It may use the weights in operations that are linear in
            one operand: products (`jnp.matmul`, `jnp.dot`, `jnp.einsum`, `jax.lax.dot_general`), and convolutions and
            table lookups (with the adapters that `lt.lora.add(..., fn=)` makes for them). It may transpose and cast
            them, and take layers of a stack. It may close over them in `jax.lax.scan`, `fori_loop`, `cond`,
            `jax.checkpoint` and `jax.jit`, and scan over their layers. `jax.vmap` and differentiation work, too. The
            precision and the output sharding (`out_sharding`) of a product also apply to the products with factors. A
            `jax.shard_map` goes around, as in ``jax.shard_map(lt.adapted(fn), ...)``: no weight may enter one inside
            `fn`.

    Returns:
        A function of the same arguments, in which `LoRAWeight` and other nodes may stand for arrays. Without any node
        it calls `fn` itself. Code inside `fn` sees arrays, not nodes. `lt.lora.dropout` therefore belongs outside, as
        in ``lt.adapted(fn)(lt.lora.dropout(model, 0.1, key=key), batch)``. Python numbers are not traced.

    Raises:
        StructureError: when called, for any other operation on such a weight, with its path and the source line.

    Memory:
        That of `fn`. The factors of an adapter are applied one after the other and never multiplied together.

    Examples:
        >>> import jax.numpy as jnp
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
        args, kwargs = jax.tree.map(_unwrap_saved_weight, (args, kwargs), is_leaf=_is_node)
        if not any(map(_is_node, jax.tree.leaves((args, kwargs), is_leaf=_is_node))):
            return fn(*args, **kwargs)
        traced = _TracedProgram(fn, args, kwargs)
        return traced.result(_evaluate(traced.program, traced.inputs))

    return wrapped


class Use(NamedTuple):
    """One way in which a weight is used: its axes are [*stack, *m, *n], and the operation sums over m or over n."""

    num_stacked: int
    num_rows: int
    """Number of axes of m."""
    num_columns: int
    """Number of axes of n."""
    is_product: bool
    """Whether the operation is a product; otherwise it is a convolution or a table lookup."""
    over_rows: bool
    """Whether the operation sums over m, or takes rows along m."""

    @property
    def is_matrix(self) -> bool:
        """Whether the weight is multiplied as one matrix, or as a stack of matrices."""
        return self.is_product and self.num_rows == self.num_columns == 1


@functools.partial(jax.tree_util.register_dataclass, data_fields=["weight"], meta_fields=["num_axes", "uses"])
@dataclasses.dataclass(frozen=True)
class Probe:
    """An array that records the operations that use it."""

    weight: Any
    num_axes: int
    """Number of axes of the whole weight (static); leading axes may have been sliced off since."""
    uses: _UseSet
    """Uses recorded so far (static)."""

    @property
    def ndim(self) -> int:
        """Number of axes of the weight."""
        return self.weight.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return self.weight.shape

    @property
    def dtype(self) -> Any:
        """Dtype of the weight."""
        return self.weight.dtype


class _UseSet(set[Use]):
    """A set that is compared and hashed by identity, so that all copies of a probe share one."""

    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType, reportUnannotatedClassAttribute]

    def __eq__(self, other: object) -> bool:
        return self is other


def probe(leaf: Any) -> Probe:
    """Make a probe for a weight, from its array or its shape."""
    return Probe(leaf, len(leaf.shape), _UseSet())


def uses(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[set[Use]]:
    """Find how a function uses weights, from arrays or shapes with a `Probe` in place of each weight in question.

    Returns the set of uses of each probe, in the order of the leaves; empty where the function does not use it. An
    operation that no adapter supports raises `StructureError` with the path and the source line.
    """
    traced = _TracedProgram(fn, args, kwargs)
    nodes, rewrap = _unwrap_weights(traced.inputs)

    def run(values: list[Any]) -> list[Any]:
        return [value for value in _evaluate(traced.program, rewrap(values)) if not isinstance(value, Weight)]

    # Probes record uses while `run` is traced, so abstract evaluation is enough.
    jax.eval_shape(run, nodes)
    return [set(value.node.uses) for value in traced.inputs if isinstance(value, Weight)]


class _TracedProgram:
    """The program of a function, with arrays in place of the nodes among its arguments."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=_is_node)
        names = [path.split("/", 2)[-1] for path, _ in leaves_with_paths((args, kwargs), is_leaf=_is_node)]
        traced_indices = [i for i, leaf in enumerate(leaves) if _is_node(leaf) or _is_traced(leaf)]
        self.inputs = [Weight(leaves[i], names[i]) if _is_node(leaves[i]) else leaves[i] for i in traced_indices]
        """Inputs of the program: arrays, and weights."""
        # The tree of the results, and those that are not arrays, are known only after tracing.
        self._static: list[Any] = []

        def with_arrays(*arrays: Any) -> list[Any]:
            values = {**dict(enumerate(leaves)), **dict(zip(traced_indices, arrays, strict=True))}
            args, kwargs = treedef.unflatten(values.values())
            out, out_treedef = jax.tree.flatten(fn(*args, **kwargs))
            self._static[:] = [out_treedef, [None if _is_traced(leaf) else leaf for leaf in out]]
            return [leaf for leaf in out if _is_traced(leaf)]

        self.program, _ = make_jaxpr(with_arrays)(*(_abstract_value(leaves[i]) for i in traced_indices))
        """A `ClosedJaxpr`."""

    def result(self, values: Sequence[Any]) -> Any:
        """Build the function's result from the program's results."""
        for value in values:
            if isinstance(value, Weight) and value.is_transposed:
                raise StructureError(
                    f"{value.path}: the function returns this weight transposed",
                    expected="the weight as it is, or a result that is computed with it",
                    got=f"a {type(value.node).__name__}{list(value.node.shape)}",
                    hint="transpose it where it is multiplied, or leave it out of the targets",
                )
        results = iter([value.node if isinstance(value, Weight) else value for value in values])
        out_treedef, out = self._static
        return out_treedef.unflatten([next(results) if leaf is None else leaf for leaf in out])


def _unwrap_saved_weight(leaf: Any) -> Any:
    """Return the trained array of a `SavedWeight`, and any other leaf unchanged."""
    return leaf.folded() if hasattr(leaf, "lora_saved") else leaf


def _is_node(leaf: Any) -> bool:
    return isinstance(leaf, (LinearWeight, KernelWeight, Probe))


def _is_traced(leaf: Any) -> bool:
    """Return whether a leaf is an array; Python and NumPy scalars are not traced, so `if` and shapes can use them."""
    return is_array_like(leaf) and not isinstance(leaf, (bool, int, float, complex, np.generic))


def _abstract_value(leaf: Any) -> Any:
    """Return the stand-in for a leaf while the function is traced: for a node its shape and dtype.

    The node's first array of that shape determines the sharding on explicit axes, and the varying axes in `shard_map`.
    """
    if not _is_node(leaf):
        return leaf
    if _is_partitioned(leaf):
        raise StructureError(
            f"a {type(leaf).__name__} has no weight, or no factors",
            expected="a weight and its factors",
            got="one half of a partition",
            hint="combine the halves first: lt.combine(trainable, frozen)",
        )
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        raise StructureError(
            "a weight is not an array, and has no shape or dtype",
            expected="attributes shape, ndim and dtype of the weight that it represents",
            got=f"a {type(leaf).__name__}",
            hint="add these attributes to its class",
        )
    shape = tuple(leaf.shape)
    arrays = [part for part in jax.tree.leaves(leaf) if part is not leaf and is_array_like(part) and not is_key(part)]
    like = next((part for part in arrays if np.shape(part) == shape), jax.ShapeDtypeStruct(shape, leaf.dtype))
    # Abstract `astype` keeps the sharding of `like` and the axes along which it varies.
    return jax.eval_shape(lambda array: array.astype(leaf.dtype), like)


def _is_partitioned(node: Any) -> bool:
    fields = getattr(type(node), "__dataclass_fields__", {})
    factors = [getattr(node, name) for name in fields if name.startswith("lora_")]
    return bool(factors) and (getattr(node, "weight", node) is None or all(factor is None for factor in factors))


def _evaluate(jaxpr: Any, inputs: Sequence[Any]) -> list[Any]:
    """Evaluate a jaxpr, open or closed, whose inputs are arrays and weights."""
    return fold(jaxpr, inputs, _evaluate_eqn, lambda _, value: value)


def _evaluate_eqn(eqn: Any, operands: list[Any]) -> Sequence[Any]:
    if not any(isinstance(value, Weight) for value in operands):
        return runner(eqn)(*operands)
    kind = kind_of(eqn)
    probes = [i for i, value in enumerate(operands) if isinstance(value, Weight) and isinstance(value.node, Probe)]
    if kind is None and len(probes) == 1 and (outputs := _record_use(eqn, operands, probes[0])) is not None:
        return outputs
    rule = RULES.get(eqn.primitive.name) if kind is None else _NESTED.get(kind)
    results = None if rule is None else rule(eqn, operands)
    if results is None:
        weight = next(value for value in operands if isinstance(value, Weight))
        hint = f'leave it out of the targets, for instance with the pattern "!{weight.path}"'
        if kind is Kind.SHARD_MAP:
            hint = "put jax.shard_map outside: jax.shard_map(lt.adapted(fn), ...)"
        kind_of_node = "weight" if isinstance(weight.node, Probe) else type(weight.node).__name__
        raise StructureError(
            f"{weight.path}: the model does more with this weight than multiply by it",
            expected="products with activations; a weight may be transposed, cast, and taken from a stack of layers",
            got=f"{eqn.primitive.name} of a {kind_of_node}{list(weight.node.shape)}, at {line_of(eqn)}",
            hint=hint,
        )
    return results


def _unwrap_weights(values: Sequence[Any]) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]:
    """Take the nodes out of weights, for a JAX transformation; also return the function that puts them back."""
    weights = [value if isinstance(value, Weight) else None for value in values]

    def rewrap(nodes: Sequence[Any]) -> list[Any]:
        return [
            node if weight is None else weight._replace(node=node) for node, weight in zip(nodes, weights, strict=True)
        ]

    return [value.node if isinstance(value, Weight) else value for value in values], rewrap


# Rules for operations that hold programs.


def _call(eqn: Any, operands: list[Any]) -> Sequence[Any] | None:
    return _evaluate(bodies(eqn)[0].jaxpr, operands)


def _remat(eqn: Any, operands: list[Any]) -> Sequence[Any] | None:
    values, rewrap = _unwrap_weights(operands)
    body = bodies(eqn)[0].jaxpr
    # Results may be weights, such as a transposed one. `jax.checkpoint` returns their nodes as pytrees. The function
    # that makes weights of them is only known once `run` has been traced, so `run` leaves it in `rewrappers`.
    rewrappers = list[Any]()

    def run(*nodes: Any) -> list[Any]:
        results, rewrap_results = _unwrap_weights(_evaluate(body, rewrap(nodes)))
        rewrappers[:] = [rewrap_results]
        return results

    options = {name: eqn.params[name] for name in ("policy", "prevent_cse") if name in eqn.params}
    results = jax.checkpoint(run, **options)(*values)
    return rewrappers[0](results)


def _branch(eqn: Any, operands: list[Any]) -> Sequence[Any] | None:
    index, *branch_operands = operands
    if isinstance(index, Weight):
        return None
    values, rewrap = _unwrap_weights(branch_operands)
    # `partial` binds each branch's jaxpr now; a plain closure would use only the last one.
    branches = [
        functools.partial(lambda jaxpr, *nodes: _evaluate_arrays(eqn, jaxpr, rewrap(nodes)), body.jaxpr)
        for body in bodies(eqn)
    ]
    return jax.lax.switch(index, branches, *values)


def _scan(eqn: Any, operands: list[Any]) -> Sequence[Any] | None:
    num_consts, num_carry = scan_counts(eqn.params)
    body = bodies(eqn)[0].jaxpr
    constants, init, xs = (
        operands[:num_consts],
        operands[num_consts : num_consts + num_carry],
        operands[num_consts + num_carry :],
    )
    if any(isinstance(value, Weight) for value in init):
        return None
    if any(isinstance(value, Weight) and not num_stacked(value.node) for value in xs):
        return None  # a scan over the rows of a matrix
    xs_nodes, rewrap = _unwrap_weights(xs)

    # `step` closes over weights among the constants. Weights among the scanned inputs go through `scan` as pytrees,
    # which slices their leaves.
    def step(state: list[Any], xs_slices: list[Any]) -> tuple[list[Any], list[Any]]:
        results = _evaluate_arrays(eqn, body, [*constants, *state, *rewrap(xs_slices)])
        return list(results[:num_carry]), list(results[num_carry:])

    options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    state, out = jax.lax.scan(step, list(init), xs_nodes, **options)
    return [*state, *out]


def _while(eqn: Any, operands: list[Any]) -> Sequence[Any] | None:
    cond, body = bodies(eqn)
    num_cond_consts, num_body_consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond_consts, body_consts, carry = (
        operands[:num_cond_consts],
        operands[num_cond_consts : num_cond_consts + num_body_consts],
        operands[num_cond_consts + num_body_consts :],
    )
    if any(isinstance(value, Weight) for value in carry):
        return None

    def cond_fn(state: Any) -> Any:
        return _evaluate_arrays(eqn, cond.jaxpr, [*cond_consts, *state])[0]

    return jax.lax.while_loop(
        cond_fn, lambda state: list(_evaluate_arrays(eqn, body.jaxpr, [*body_consts, *state])), list(carry)
    )


def _evaluate_arrays(eqn: Any, jaxpr: Any, values: Sequence[Any]) -> Sequence[Any]:
    """Evaluate the body of a loop or a branch, whose results have to be arrays."""
    results = _evaluate(jaxpr, values)
    for value in results:
        if isinstance(value, Weight):
            raise StructureError(
                f"{value.path}: a loop or a branch of the model returns this weight",
                expected="a result that is computed with it",
                got=f"{eqn.primitive.name} at {line_of(eqn)}",
                hint="use the weight where it is multiplied, or leave it out of the targets",
            )
    return results


_NESTED: dict[Kind, Callable[[Any, list[Any]], Sequence[Any] | None]] = {
    Kind.CALL: _call,
    Kind.REMAT: _remat,
    Kind.BRANCH: _branch,
    Kind.SCAN: _scan,
    Kind.WHILE: _while,
}
"""Rules for operations that hold programs. Products with a custom derivative (`jax.custom_vjp`, `jax.custom_jvp`) are
refused, because the node's product has another derivative."""


# Uses of weights.


def _record_use(eqn: Any, operands: Sequence[Any], index: int) -> Sequence[Any] | None:
    """Record a use of the probe ``operands[index]`` and compute the operation.

    The probe comes as a `Weight`. The result is None where the operation is not a use of a weight.
    """
    recognize = _RECOGNIZERS.get(eqn.primitive.name)
    weight = operands[index]
    node: Probe = weight.node
    usage = None if recognize is None else recognize(eqn, node, index)
    if usage is None or (weight.is_transposed and (usage.num_rows, usage.num_columns) != (1, 1)):
        return None
    if "precision" in eqn.params:
        precision_name(eqn, weight.path)
    num_stacked = usage.num_stacked + node.num_axes - node.ndim
    node.uses.add(usage._replace(num_stacked=num_stacked, over_rows=usage.over_rows != weight.is_transposed))
    array = node.weight.mT if weight.is_transposed else node.weight
    array = array.astype(eqn.invars[index].aval.dtype)  # a cast leaves the node as it is
    return runner(eqn)(*(array if i == index else value for i, value in enumerate(operands)))


def _product_use(eqn: Any, node: Probe, index: int) -> Use | None:
    contracted, batch_axes = eqn.params["dimension_numbers"]
    axes, stack_axes = sorted(contracted[index]), batch_axes[index]
    if stack_axes != tuple(range(len(stack_axes))):
        return None
    # Contracted axes directly after the stack are m, and those at the end are n.
    num_stack, num_axes = len(stack_axes), node.ndim - len(stack_axes)
    if num_axes > len(axes) and axes == list(range(num_stack, num_stack + len(axes))):
        return Use(num_stack, len(axes), num_axes - len(axes), True, True)
    if num_axes > len(axes) and axes == list(range(node.ndim - len(axes), node.ndim)):
        return Use(num_stack, num_axes - len(axes), len(axes), True, False)
    # The contracted axis is the second-last, and axes before it are free: a stack whose matrices all multiply the same
    # array.
    is_matrix = len(axes) == 1 and axes[0] >= node.ndim - 2 > 0
    return Use(node.ndim - 2, 1, 1, True, axes[0] == node.ndim - 2) if is_matrix else None


def _convolution_use(eqn: Any, node: Probe, index: int) -> Use | None:
    channel, last = eqn.params["dimension_numbers"].rhs_spec[0], node.ndim - 1
    is_grouped = eqn.params["feature_group_count"] != 1 or eqn.params["batch_group_count"] != 1
    if index != 1 or is_grouped or channel not in (0, last):
        return None
    return Use(0, 1, last, False, False) if channel == 0 else Use(0, last, 1, False, True)


def _gather_use(eqn: Any, node: Probe, index: int) -> Use | None:
    return (
        Use(0, 1, node.ndim - 1, False, True)
        if index == 0 and node.ndim > 1 and is_row_gather(eqn, node.shape)
        else None
    )


def _row_slice_use(eqn: Any, node: Probe, index: int) -> Use | None:
    is_table = index == 0 and node.ndim == node.num_axes == 2 and is_row_slice(eqn, node.shape)
    return Use(0, 1, 1, False, True) if is_table else None


_RECOGNIZERS = {
    "dot_general": _product_use,
    "conv_general_dilated": _convolution_use,
    "gather": _gather_use,
    "dynamic_slice": _row_slice_use,
}
"""Functions that recognise a use of a weight, by primitive name. Other operations move the weight, or are refused."""
