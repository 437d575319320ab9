"""Evaluate any function with weights that are not arrays: weights with adapters, quantised weights, and probes.

A node in place of a weight has its own product (`core.LinearWeight`), which `core.linear` and Python's ``@`` call. Most
programs use neither: Flax and Keras call `jax.lax.dot_general`, others `jnp.einsum`. So the function is traced with
arrays in place of the nodes, and its program is evaluated with the nodes, one operation at a time. A `Probe` in place
of a weight records how the function uses it, so that `lora.add` can choose a suitable adapter.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..core import LinearWeight, StructureError, is_array_like, is_key, leaves_with_paths, linear
from ..jaxprs import Kind, bodies, equations, fold, kind_of, make_jaxpr, runner, scan_counts, source_line

# A product with a weight calls the node's product. An operation that only moves a weight (a transposition, a cast, a
# slice of a stack, a constant of a loop) moves the node. Any other operation raises, with its source line. W + B A is
# never materialised. docs/internals/adapters.md compares this with Quax and Qwix. Known inefficiency: the function is
# traced twice. Inner `jax.jit`s that get a weight are inlined.


def adapted(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function accept weights with adapters, or quantised weights, in place of arrays.

    Models that multiply through `lowtide.core.linear` or ``@`` do not need it. Others do: models of Flax and Keras,
    and functions that call `jnp.einsum` or `jax.lax.dot_general`.

    Args:
        fn: any function of pytrees that `jax.jit` can trace. It may use the weights in operations that are linear in
            one operand: products (`jnp.matmul`, `jnp.dot`, `jnp.einsum`, `jax.lax.dot_general`), and convolutions and
            table lookups (with the adapters that `lt.lora.add(..., fn=)` makes for them). It may transpose and cast
            them, and take layers of a stack. It may close over them in `jax.lax.scan`, `fori_loop`, `cond`,
            `jax.checkpoint` and `jax.jit`, and scan over their layers. `jax.vmap` and differentiation work, too. The
            precision and the output sharding (`out_sharding`) of a product also apply to the products with factors. No
            weight may enter a `jax.shard_map` inside `fn`: write ``jax.shard_map(lt.adapted(fn), ...)``.

    Returns:
        A function of the same arguments, in which `LoRAWeight` and other nodes may stand for arrays. Without any node
        it calls `fn` itself. Code inside `fn` sees arrays, not nodes. `lt.lora.dropout` therefore belongs outside, as
        in ``lt.adapted(fn)(lt.lora.dropout(model, 0.1, key=key), batch)``. Python numbers are not traced.

    Raises:
        StructureError: from a call, for an operation on such a weight that is not listed above; the error names the
            path and the source line. Also for a node that lacks its factors, as after `lowtide.partition`.

    Memory:
        As `fn`. The factors of an adapter are applied one after the other and never multiplied together.

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
        # The program gets the trained copy of a `SavedWeight`, an array.
        unwrap = lambda leaf: leaf.folded() if hasattr(leaf, "lora_saved") else leaf  # noqa: E731
        args, kwargs = jax.tree.map(unwrap, (args, kwargs), is_leaf=_is_node)
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


class WrappedWeight:
    """A node with the shape and dtype of the weight that it holds."""

    weight: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return self.weight.shape

    @property
    def ndim(self) -> int:
        """Number of axes of the weight."""
        return len(self.weight.shape)

    @property
    def dtype(self) -> Any:
        """Dtype of the weight."""
        return self.weight.dtype


def is_weight(node: Any) -> bool:
    """Return whether a node stands for one weight."""
    if isinstance(node, WrappedWeight):
        return True
    # A user's module may have a field named ``linear``, but then it has no shape and dtype.
    return isinstance(node, LinearWeight) and hasattr(node, "shape") and hasattr(node, "dtype")


@functools.partial(jax.tree_util.register_dataclass, data_fields=["weight"], meta_fields=["num_axes", "uses"])
@dataclasses.dataclass(frozen=True)
class Probe(WrappedWeight):
    """A node in place of a weight that records the operations that use it."""

    weight: Any
    num_axes: int
    """Number of axes of the whole weight (static); leading axes may have been sliced off since."""
    uses: _UseSet
    """Uses recorded so far (static)."""


class _UseSet(set[Use]):
    """The set that all copies of a probe share. Its equality and hash are by identity, because its contents change."""

    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType, reportUnannotatedClassAttribute]

    def __eq__(self, other: object) -> bool:
        return self is other


def _is_kernel(node: Any) -> bool:
    """Return whether a node has two groups of axes, [*stack, *m, *n], as `lora.LoRAKernel` has.

    Such a node has the numbers of axes `ndim`, `num_stacked`, `num_rows` and `num_columns`, and two methods.
    ``transposed(order)`` returns None if the order mixes the groups. ``through`` computes a function that is linear
    in the weight.
    """
    return hasattr(node, "through") and hasattr(node, "num_rows")


class _Weight(NamedTuple):
    """A node that stands for a value of the traced program."""

    node: Any
    path: str
    """Path of the node in the function's arguments."""
    is_transposed: bool = False
    """Whether the program has transposed the weight's matrices."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape that the value has in the program."""
        shape = tuple(self.node.shape)
        return (*shape[:-2], shape[-1], shape[-2]) if self.is_transposed else shape


def _num_stacked(node: Any) -> int:
    return node.num_stacked if _is_kernel(node) else node.ndim - 2


def probe(leaf: Any) -> Probe:
    """Make a probe for a weight, from its array or its shape."""
    return Probe(leaf, len(leaf.shape), _UseSet())


def uses(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[set[Use]]:
    """Return how a function uses each `Probe` among its arguments; the other arguments are arrays or shapes.

    The result has the set of uses of each probe, in the order of the leaves; empty if the function does not use it. An
    operation that no adapter supports raises `StructureError` with the path and the source line.
    """
    traced = _TracedProgram(fn, args, kwargs)
    nodes, rewrap = _unwrap_weights(traced.inputs)

    def run(values: list[Any]) -> list[Any]:
        return [value for value in _evaluate(traced.program, rewrap(values)) if not isinstance(value, _Weight)]

    # Probes record uses while `run` is traced, so abstract evaluation is enough.
    jax.eval_shape(run, nodes)
    return [set(value.node.uses) for value in traced.inputs if isinstance(value, _Weight)]


class _TracedProgram:
    """The program of a function, with arrays in place of the nodes among its arguments."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=_is_node)
        names = [path.split("/", 2)[-1] for path, _ in leaves_with_paths((args, kwargs), is_leaf=_is_node)]
        traced_indices = [i for i, leaf in enumerate(leaves) if _is_node(leaf) or _is_traced(leaf)]
        self.inputs = [_Weight(leaves[i], names[i]) if _is_node(leaves[i]) else leaves[i] for i in traced_indices]
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
        for value in values:
            if isinstance(value, _Weight) and value.is_transposed:
                hint = "transpose it where it is multiplied, or leave it out of the targets"
                raise StructureError(f"{value.path}: the function returns this weight transposed", hint=hint)
        results = iter([value.node if isinstance(value, _Weight) else value for value in values])
        out_treedef, out = self._static
        return out_treedef.unflatten([next(results) if leaf is None else leaf for leaf in out])


def _is_node(leaf: Any) -> bool:
    # `type`: a user's module may have a field named ``linear``.
    return is_weight(leaf) or (isinstance(leaf, LinearWeight) and hasattr(type(leaf), "linear"))


def _is_traced(leaf: Any) -> bool:
    """Return whether a leaf is an array to trace. Python and NumPy scalars are not: `if` and shapes use them."""
    return is_array_like(leaf) and not isinstance(leaf, (bool, int, float, complex, np.generic))


def _abstract_value(leaf: Any) -> Any:
    """Return the value with which a leaf is traced: the shape and dtype of a node, and any other leaf itself."""
    if not _is_node(leaf):
        return leaf
    fields = getattr(type(leaf), "__dataclass_fields__", {})
    factors = [getattr(leaf, name) for name in fields if name.startswith("lora_")]
    has_shape = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    if factors and (not has_shape or all(factor is None for factor in factors)):
        hint = "combine the halves of a partition first: lt.combine(trainable, frozen)"
        raise StructureError(f"a {type(leaf).__name__} has no weight, or no factors", hint=hint)
    if not has_shape:
        problem = f"a {type(leaf).__name__} stands for a weight, and has no shape or no dtype"
        raise StructureError(problem, hint="add the attributes shape, ndim and dtype to its class")
    shape = tuple(leaf.shape)
    arrays = [part for part in jax.tree.leaves(leaf) if part is not leaf and is_array_like(part) and not is_key(part)]
    like = next((part for part in arrays if np.shape(part) == shape), jax.ShapeDtypeStruct(shape, leaf.dtype))
    # Abstract `astype` keeps the sharding of `like` on explicit axes, and its varying axes in `shard_map`.
    return jax.eval_shape(lambda array: array.astype(leaf.dtype), like)


def _evaluate(jaxpr: Any, inputs: Sequence[Any]) -> list[Any]:
    """Evaluate a jaxpr, open or closed, whose inputs are arrays and weights."""
    return fold(jaxpr, inputs, _evaluate_eqn, lambda _, value: value)


def _evaluate_eqn(eqn: Any, operands: list[Any]) -> Sequence[Any]:
    if not any(isinstance(value, _Weight) for value in operands):
        return runner(eqn)(*operands)
    kind = kind_of(eqn)
    probes = [i for i, value in enumerate(operands) if isinstance(value, _Weight) and isinstance(value.node, Probe)]
    if kind is None and len(probes) == 1 and (outputs := _record_use(eqn, operands, probes[0])) is not None:
        return outputs
    rule = _RULES.get(eqn.primitive.name) if kind is None else _NESTED.get(kind)
    results = None if rule is None else rule(eqn, operands)
    if results is None:
        weight = next(value for value in operands if isinstance(value, _Weight))
        hint = f'leave it out of the targets, for instance with the pattern "!{weight.path}"'
        if kind is Kind.SHARD_MAP:
            hint = "put jax.shard_map outside: jax.shard_map(lt.adapted(fn), ...)"
        kind_of_node = "weight" if isinstance(weight.node, Probe) else type(weight.node).__name__
        raise StructureError(
            f"{weight.path}: the model does more with this weight than multiply by it",
            expected="products with activations; a weight may be transposed, cast, and taken from a stack of layers",
            got=f"{eqn.primitive.name} of a {kind_of_node}{list(weight.node.shape)}, at {_line_of(eqn)}",
            hint=hint,
        )
    return results


def _unwrap_weights(values: Sequence[Any]) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]:
    """Replace each `_Weight` by its node, for a JAX transformation; also return the function that reverses this."""
    weights = [value if isinstance(value, _Weight) else None for value in values]

    def rewrap(nodes: Sequence[Any]) -> list[Any]:
        pairs = zip(weights, nodes, strict=True)
        return [node if weight is None else weight._replace(node=node) for weight, node in pairs]

    return [value.node if isinstance(value, _Weight) else value for value in values], rewrap


# Rules for operations that contain programs.


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
    if isinstance(index, _Weight):
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
    constants, state_and_xs = operands[:num_consts], operands[num_consts:]
    init, xs = state_and_xs[:num_carry], state_and_xs[num_carry:]
    if any(isinstance(value, _Weight) for value in init):
        return None
    if any(isinstance(value, _Weight) and not _num_stacked(value.node) for value in xs):
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
    cond_consts, body_operands = operands[:num_cond_consts], operands[num_cond_consts:]
    body_consts, carry = body_operands[:num_body_consts], body_operands[num_body_consts:]
    if any(isinstance(value, _Weight) for value in carry):
        return None
    return jax.lax.while_loop(
        lambda state: _evaluate_arrays(eqn, cond.jaxpr, [*cond_consts, *state])[0],
        lambda state: list(_evaluate_arrays(eqn, body.jaxpr, [*body_consts, *state])),
        list(carry),
    )


def _evaluate_arrays(eqn: Any, jaxpr: Any, values: Sequence[Any]) -> Sequence[Any]:
    """Evaluate the body of a loop or a branch, whose results have to be arrays."""
    results = _evaluate(jaxpr, values)
    for value in results:
        if isinstance(value, _Weight):
            message = f"{value.path}: a loop or a branch of the model returns this weight"
            hint = "use the weight where it is multiplied, or leave it out of the targets"
            raise StructureError(message, got=f"{eqn.primitive.name} at {_line_of(eqn)}", hint=hint)
    return results


_NESTED: dict[Kind, Callable[[Any, list[Any]], Sequence[Any] | None]] = {
    Kind.CALL: lambda eqn, operands: _evaluate(bodies(eqn)[0].jaxpr, operands),
    Kind.REMAT: _remat,
    Kind.BRANCH: _branch,
    Kind.SCAN: _scan,
    Kind.WHILE: _while,
}
"""Rules for operations that contain programs. Functions with a custom derivative (`jax.custom_vjp`, `jax.custom_jvp`)
are refused, because the node's product has another derivative."""


def _record_use(eqn: Any, operands: Sequence[Any], index: int) -> Sequence[Any] | None:
    """Record a use of the probe ``operands[index]``, and return the operation's results; None for other operations."""
    recognize = _RECOGNIZERS.get(eqn.primitive.name)
    weight = operands[index]
    node: Probe = weight.node
    usage = None if recognize is None else recognize(eqn, node, index)
    if usage is None or (weight.is_transposed and (usage.num_rows, usage.num_columns) != (1, 1)):
        return None
    if "precision" in eqn.params:
        _precision_name(eqn, weight.path)
    num_stacked = usage.num_stacked + node.num_axes - node.ndim
    node.uses.add(usage._replace(num_stacked=num_stacked, over_rows=usage.over_rows != weight.is_transposed))
    array = node.weight.mT if weight.is_transposed else node.weight
    array = array.astype(eqn.invars[index].aval.dtype)  # the program may have cast the weight
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
    # The second-last axis is contracted, and axes before it are free: a stack of matrices multiplies one array.
    is_matrix = len(axes) == 1 and axes[0] >= node.ndim - 2 > 0
    return Use(node.ndim - 2, 1, 1, True, axes[0] == node.ndim - 2) if is_matrix else None


def _convolution_use(eqn: Any, node: Probe, index: int) -> Use | None:
    channel, last = eqn.params["dimension_numbers"].rhs_spec[0], node.ndim - 1
    is_grouped = eqn.params["feature_group_count"] != 1 or eqn.params["batch_group_count"] != 1
    if index != 1 or is_grouped or channel not in (0, last):
        return None
    return Use(0, 1, last, False, False) if channel == 0 else Use(0, last, 1, False, True)


def _gather_use(eqn: Any, node: Probe, index: int) -> Use | None:
    is_lookup = index == 0 and node.ndim > 1 and _is_row_gather(eqn, node.shape)
    return Use(0, 1, node.ndim - 1, False, True) if is_lookup else None


def _row_slice_use(eqn: Any, node: Probe, index: int) -> Use | None:
    is_table = index == 0 and node.ndim == node.num_axes == 2 and _is_row_slice(eqn, node.shape)
    return Use(0, 1, 1, False, True) if is_table else None


_RECOGNIZERS = {
    "dot_general": _product_use,
    "conv_general_dilated": _convolution_use,
    "gather": _gather_use,
    "dynamic_slice": _row_slice_use,
}
"""Functions that recognise a use of a weight, by primitive name. Other operations move the weight, or are refused."""


# Rules for operations that contain no program. A rule takes an operation and its operands. It returns the results, or
# None if it does not support the operation. These rules move a weight.


def _identity(eqn: Any, operands: list[Any]) -> Sequence[Any]:
    return operands


def _move_rule(move: Callable[..., Any]) -> Callable[[Any, list[Any]], Sequence[Any] | None]:
    """Make a rule from ``move(eqn, weight, *other_operands)``, which returns the moved weight, or None to refuse."""

    def rule(eqn: Any, operands: list[Any]) -> Sequence[Any] | None:
        weight, *others = operands
        if not isinstance(weight, _Weight) or any(isinstance(value, _Weight) for value in others):
            return None
        result = move(eqn, weight, *others)
        return None if result is None else [result]

    return rule


def _transpose(eqn: Any, weight: _Weight) -> _Weight | None:
    node, order = weight.node, tuple(eqn.params["permutation"])
    last, axes = node.ndim - 1, tuple(range(node.ndim))
    if order == axes:
        return weight
    if _is_kernel(node):
        transposed = node.transposed(order)
        return None if transposed is None else weight._replace(node=transposed)
    return weight._replace(is_transposed=not weight.is_transposed) if order == (*axes[:-2], last, last - 1) else None


def _cast(eqn: Any, weight: _Weight) -> _Weight | None:
    # A node multiplies in the dtype of the activations, so a cast of the weight leaves the node as it is. A cast to an
    # 8-bit float is refused: that rounding belongs to the model, and the node would skip it.
    dtype, old_dtype = jnp.dtype(eqn.params["new_dtype"]), eqn.invars[0].aval.dtype
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize == 1:
        return None
    # The node would also skip a rounding to a shorter format that the program casts back before it multiplies.
    return None if _is_rounded(weight.node, old_dtype) and jnp.promote_types(old_dtype, dtype) != old_dtype else weight


def _is_rounded(node: Any, dtype: Any) -> bool:
    """Return whether the program's cast of a weight to `dtype` rounds: `dtype` lacks values of the node's dtype."""
    return jnp.promote_types(node.dtype, dtype) != dtype


def _mark_varying(eqn: Any, weight: _Weight) -> _Weight:
    """Mark a weight as varying along axes of a `jax.shard_map`; JAX inserts `pvary` where the other operand varies."""

    def mark_leaf(leaf: Any) -> Any:
        axes = tuple(axis for axis in eqn.params["axes"] if axis not in jax.typeof(leaf).mat.varying)
        return jax.lax.pcast(leaf, axes, to="varying") if axes else leaf

    return weight._replace(node=jax.tree.map(mark_leaf, weight.node))


def _slice_layers(weight: _Weight, start: Any, size: int) -> _Weight:
    node = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start, size, 0), weight.node)
    return weight._replace(node=node)


def _slice(eqn: Any, weight: _Weight) -> _Weight | None:
    starts, ends, strides = (eqn.params[name] for name in ("start_indices", "limit_indices", "strides"))
    is_whole = not any(starts[1:]) and tuple(ends[1:]) == weight.shape[1:]
    if not _num_stacked(weight.node) or not is_whole or not (strides is None or all(step == 1 for step in strides)):
        return None
    return _slice_layers(weight, starts[0], ends[0] - starts[0])


def _dynamic_slice(eqn: Any, weight: _Weight, *starts: Any) -> Any:
    sizes = tuple(eqn.params["slice_sizes"])
    if _num_stacked(weight.node):
        return _slice_layers(weight, starts[0], sizes[0]) if sizes[1:] == weight.shape[1:] else None
    if not _is_row_slice(eqn, weight.shape) or not _is_table(weight):
        return None
    # One row of a table, as ``table[i]`` looks it up.
    run = lambda table: jax.lax.dynamic_slice_in_dim(table, starts[0], 1, 0)  # noqa: E731
    return weight.node.through(run, over_rows=True, at=1, dtype=eqn.outvars[0].aval.dtype)


def _squeeze_layer(eqn: Any, weight: _Weight) -> _Weight | None:
    """Take the layer out of a stack of one layer, for `squeeze` and for a `reshape` with the same effect."""
    is_one = _num_stacked(weight.node) and weight.shape == (1, *eqn.outvars[0].aval.shape)
    return weight._replace(node=jax.tree.map(lambda leaf: leaf[0], weight.node)) if is_one else None


# Rules that multiply by a weight.


def _dot(eqn: Any, operands: list[Any]) -> Sequence[Any] | None:
    index = int(isinstance(operands[1], _Weight))
    weight, x = operands[index], operands[1 - index]
    if isinstance(x, _Weight):
        return None
    contracted, stacked = eqn.params["dimension_numbers"]
    weight_axes, x_axes = contracted[index], contracted[1 - index]
    weight_stack, x_stack = stacked[index], stacked[1 - index]
    node, num_stack = weight.node, _num_stacked(weight.node)
    if weight_stack != tuple(range(len(weight_stack))) or len(weight_stack) > num_stack:
        return None
    # `weight_axes` counts axes of the weight as the program has it. For a transposed weight, the program's first group
    # is the node's second one, so `over_rows` is inverted below.
    num_rows = node.num_rows if _is_kernel(node) else 1
    is_first = sorted(weight_axes) == list(range(num_stack, num_stack + num_rows))
    if not is_first and sorted(weight_axes) != list(range(num_stack + num_rows, node.ndim)):
        return None
    over_rows = is_first != weight.is_transposed
    supports_rmatmul = hasattr(node, "__rmatmul__") and getattr(node, "is_plain", True)
    if over_rows and not _is_kernel(node) and not supports_rmatmul:
        message = f"{weight.path}: the model multiplies by this weight as [in, out], at {_line_of(eqn)}"
        suffix = "" if getattr(node, "dropout_key", None) is None else " with dropout"
        kind = f"{getattr(node, 'kind', type(node).__name__)}{suffix}"
        hint = f"store it as [out, in], which {kind} needs, or use plain LoRA without dropout"
        raise StructureError(message, got=f"a {type(node).__name__}{list(node.shape)}", hint=hint)
    pairs = tuple((axis - num_stack, x_axis) for axis, x_axis in zip(weight_axes, x_axes, strict=True))
    product = _Product(pairs, over_rows, bool(index))
    return [_multiply(eqn, weight, index, lambda node, x: product.apply(node, x, tuple(x_stack)), x)]


def _multiply(eqn: Any, weight: _Weight, index: int, run: Callable[[Any, Any], Any], x: Any) -> Any:
    """Multiply by a node in the widest dtype of the program's product, with its precision and output sharding."""
    sharding, precision = eqn.params.get("out_sharding"), _precision_name(eqn, weight.path)
    weight_dtype, out_dtype = eqn.invars[index].aval.dtype, eqn.outvars[0].aval.dtype
    try:
        dtype = functools.reduce(jnp.promote_types, (x.dtype, weight_dtype, out_dtype))
    except jax.dtypes.TypePromotionError as error:
        message = f"{weight.path}: the dtypes of a product with this weight have no common wider dtype"
        dtypes = f"{x.dtype}, {weight_dtype} and {out_dtype}, at {_line_of(eqn)}"
        raise StructureError(message, got=dtypes, hint="cast the activations before they are multiplied") from error

    def cast(node: Any, x: Any) -> Any:
        return run(node, x.astype(dtype)).astype(out_dtype)

    def rounded(node: Any, x: Any) -> Any:
        return cast(_round_base(eqn, weight.path, node, weight_dtype), x)

    # `jax.checkpoint` rounds again in the backward pass, so that the rounded copy is not kept as a residual.
    is_rounded = dtype != weight_dtype and _is_rounded(weight.node, weight_dtype)
    compute = jax.checkpoint(rounded) if is_rounded else cast
    with jax.default_matmul_precision(precision):
        if sharding is None:
            return compute(weight.node, x)
        sharded: Any = jax.sharding.auto_axes(compute, axes=sharding.mesh.explicit_axes, out_sharding=sharding)
        return sharded(weight.node, x)


def _precision_name(eqn: Any, path: str) -> Any:
    """Return a product's precision for `jax.default_matmul_precision`; raise if it or the sharding is unsupported."""
    precision: Any = eqn.params["precision"]
    spec: Any = getattr(eqn.params.get("out_sharding"), "spec", None)
    is_reduced = spec is None or not spec.unreduced
    is_preset = isinstance(precision, jax.lax.DotAlgorithmPreset)
    is_tuple = isinstance(precision, tuple) and not isinstance(precision, jax.lax.DotAlgorithm)  # which is a tuple, too
    pair: list[Any] = [*precision] if is_tuple else []
    if not is_reduced or not (precision is None or is_preset or (pair and pair[0] == pair[1])):
        option = f"precision={precision}" if is_reduced else f"out_sharding={spec}"
        raise StructureError(
            f"{path}: factors do not support a product with {option}, at {_line_of(eqn)}",
            expected="one precision or algorithm that jax.default_matmul_precision accepts, and a reduced result",
            hint=f'change the product, or leave the weight out of the targets with the pattern "!{path}"',
        )
    if is_preset:
        return None if precision == jax.lax.DotAlgorithmPreset.DEFAULT else precision.name
    return pair[0].name.lower() if pair else None


def _round_base(eqn: Any, path: str, node: Any, dtype: Any) -> Any:
    """Round the base weight of a node to `dtype`; a quantised base is dequantised in `dtype`."""
    if isinstance(node, (jax.Array, np.ndarray)):
        return jnp.asarray(node, dtype)
    if getattr(node, "is_frozen", False) and hasattr(node, "dense"):
        return jax.lax.stop_gradient(node.dense(dtype))
    base: Any = getattr(node, "weight", None)
    fields = getattr(type(node), "__dataclass_fields__", {})
    # A node of a class outside of Lowtide may hold its weight in another form, such as transposed.
    is_whole = hasattr(base, "dtype") and (tuple(base.shape), base.dtype) == (tuple(node.shape), node.dtype)
    if "weight" not in fields or not is_whole:
        message = f"{path}: the model rounds this weight to {dtype}, and multiplies in a wider dtype"
        hint = f"also cast the array that it is multiplied with to {dtype}"
        raise StructureError(message, got=f"a {type(node).__name__}, at {_line_of(eqn)}", hint=hint)
    return dataclasses.replace(node, weight=_round_base(eqn, path, base, dtype))


def _line_of(eqn: Any) -> str:
    """Return the source line of an operation in the traced function, or else of the first operation inside it."""
    inner_eqns = (inner for body in bodies(eqn) for inner in equations(body.jaxpr))
    return next(filter(None, (source_line(candidate, own=True) for candidate in (eqn, *inner_eqns))), "an unknown line")


class _Product(NamedTuple):
    """A product as `dot_general` defines it.

    Axes of the result: the batch axes, then the free axes of the left operand, then those of the right operand.
    """

    pairs: tuple[tuple[int, int], ...]
    """Pairs of contracted axes: an axis of the weight, counted after its stack, and an axis of the activations."""
    over_rows: bool
    """Whether the contracted axes of a weight [*stack, *m, *n] are m; otherwise they are n."""
    is_right: bool
    """Whether the weight is the right operand."""

    def apply(self, node: Any, x: Any, stack: tuple[int, ...]) -> Any:
        """Multiply; `stack` lists the batch axes of `x`, in the order of the weight's leading axes."""
        if stack:
            # Map over one batch axis at a time, which shifts the later axes of `x`.
            batch_axis, remaining_stack = stack[0], tuple(i - (i > stack[0]) for i in stack[1:])
            pairs = tuple((weight_axis, axis - (axis > batch_axis)) for weight_axis, axis in self.pairs)
            unstacked = self._replace(pairs=pairs)
            return jax.vmap(lambda layer, y: unstacked.apply(layer, y, remaining_stack), (0, batch_axis))(node, x)
        out_axis = x.ndim - len(self.pairs) if self.is_right else 0
        if _num_stacked(node):
            # The stack is a free axis of the weight, not a batch axis: each matrix multiplies the same `x`.
            return jax.vmap(lambda layer: self.apply(layer, x, ()), out_axes=out_axis)(node)
        if _is_kernel(node):
            run = lambda kernel: self._apply_dense(kernel, x, node.num_rows)  # noqa: E731
            return node.through(run, over_rows=self.over_rows, at=out_axis, dtype=x.dtype)
        x = jnp.moveaxis(x, self.pairs[0][1], -1)
        if self.over_rows and hasattr(node, "mT"):  # computes in the dtype of `x`; `@` would promote
            result = linear(x, node.mT)
        else:
            result = x @ node if self.over_rows else linear(x, node)
        return result if self.is_right else jnp.moveaxis(result, -1, 0)

    def _apply_dense(self, kernel: Any, x: Any, num_rows: int) -> Any:
        """Multiply by an array that may have other axes in place of the weight's free axes."""
        # The axes in `pairs` count as in W [*m, *n]. A sum over m finds them unchanged in B [*m, r]. A sum over n finds
        # them at the end of A [r, *n], where r replaces the `num_rows` axes of m.
        shift = 0 if self.over_rows else kernel.ndim - len(self.pairs) - num_rows
        kernel_axes, x_axes = [axis + shift for axis, _ in self.pairs], [axis for _, axis in self.pairs]
        if self.is_right:
            return jax.lax.dot_general(x, kernel, ((x_axes, kernel_axes), ((), ())))
        return jax.lax.dot_general(kernel, x, ((kernel_axes, x_axes), ((), ())))


def _convolution(eqn: Any, operands: list[Any]) -> Sequence[Any] | None:
    x, weight = operands
    numbers, params = eqn.params["dimension_numbers"], eqn.params
    is_grouped = params["feature_group_count"] != 1 or params["batch_group_count"] != 1
    if isinstance(x, _Weight) or is_grouped or not _is_kernel(weight.node) or _num_stacked(weight.node):
        return None
    node, channel = weight.node, numbers.rhs_spec[0]  # the free axis of the weight
    over_rows = channel == node.ndim - 1
    if (node.num_columns if over_rows else node.num_rows) != 1 or channel not in (0, node.ndim - 1):
        return None
    names = ("window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers")
    options = {name: params[name] for name in names}

    def run(node: Any, x: Any) -> Any:
        convolve = lambda kernel: jax.lax.conv_general_dilated(x, kernel, **options)  # noqa: E731
        return node.through(convolve, over_rows=over_rows, at=numbers.out_spec[1], dtype=x.dtype)

    return [_multiply(eqn, weight, 1, run, x)]


def _lookup_rows(eqn: Any, operands: list[Any]) -> Sequence[Any] | None:
    """Look up rows of a table, as ``table[ids]``, `jnp.take` and a vmapped ``table[i]`` do."""
    weight, indices = operands
    numbers, params = eqn.params["dimension_numbers"], eqn.params
    if isinstance(indices, _Weight) or not _is_row_gather(eqn, weight.shape) or not _is_table(weight):
        return None
    node, out, row_axis = weight.node, eqn.outvars[0].aval, numbers.offset_dims[0]
    num_row_axes = 1 - len(numbers.collapsed_slice_dims)  # 1 if the axis of rows stays, with size 1

    def run(table: Any) -> Any:
        options = {name: params[name] for name in ("unique_indices", "indices_are_sorted", "mode", "fill_value")}
        offsets = tuple(range(row_axis, row_axis + table.ndim - 1 + num_row_axes))
        dimension_numbers = numbers._replace(offset_dims=offsets, start_index_map=(0,))
        return jax.lax.gather(table, indices[..., :1], dimension_numbers, (1, *table.shape[1:]), **options)

    return [node.through(run, over_rows=True, at=row_axis + num_row_axes, dtype=out.dtype)]


def _is_table(weight: _Weight) -> bool:
    return _is_kernel(weight.node) and not _num_stacked(weight.node) and weight.node.num_rows == 1


def _is_row_slice(eqn: Any, shape: tuple[int, ...]) -> bool:
    """Return whether a `dynamic_slice` takes one whole row; JAX clamps its start indices on other axes to 0."""
    return tuple(eqn.params["slice_sizes"]) == (1, *shape[1:])


def _is_row_gather(eqn: Any, shape: tuple[int, ...]) -> bool:
    """Return whether a `gather` takes whole rows of the first axis, and fills missing rows only with zeros or NaN."""
    numbers, sizes = eqn.params["dimension_numbers"], tuple(eqn.params["slice_sizes"])
    # A `fill_value` of None means NaN. Another value would fill rows of a factor, and the other factor would scale it.
    mode, fill = eqn.params["mode"], eqn.params["fill_value"]
    if mode == jax.lax.GatherScatterMode.FILL_OR_DROP and fill is not None and fill == fill and fill != 0:
        return False
    offsets, starts = numbers.offset_dims, numbers.start_index_map
    # A row covers the other axes whole. Start indices for them have no effect where they are clamped to 0.
    is_first = starts == (0,) or (starts[:1] == (0,) and mode == jax.lax.GatherScatterMode.CLIP)
    return (
        (is_first and numbers.collapsed_slice_dims in ((0,), ()) and numbers.operand_batching_dims == ())
        and sizes == (1, *shape[1:])
        and offsets == tuple(range(offsets[0], offsets[0] + len(offsets)))
    )


_RULES: dict[str, Callable[[Any, list[Any]], Sequence[Any] | None]] = {
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "gather": _lookup_rows,
    "transpose": _move_rule(_transpose),
    "convert_element_type": _move_rule(_cast),
    "slice": _move_rule(_slice),
    "dynamic_slice": _move_rule(_dynamic_slice),
    "squeeze": _move_rule(_squeeze_layer),
    "reshape": _move_rule(_squeeze_layer),
    "pvary": _move_rule(_mark_varying),
    "copy": _identity,
    "copy_p": _identity,
    "optimization_barrier": _identity,
}
"""Rules for operations that contain no program, by primitive name. A result of None refuses the operation."""
