"""Rules for operations of a program whose operands include weights that are not arrays.

A rule moves a weight (transpose, cast, slice) or multiplies by it. It takes an operation and its operands and returns
the results, or None where the operation is not supported for weights.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from ..core import StructureError, linear
from ..jaxprs import bodies, equations, source_line


@runtime_checkable
class KernelWeight(Protocol):
    """A node in place of a weight with two groups of axes: [*stack, *m, *n]."""

    ndim: int
    """Number of axes, including those of the stack."""
    num_rows: int
    """Number of axes of m."""
    num_columns: int
    """Number of axes of n."""
    num_stacked: int
    """Number of axes of the stack."""

    def transposed(self, order: tuple[int, ...]) -> Any:
        """Transpose the weight; return None where the order mixes the groups."""
        ...

    def through(self, run: Callable[[Any], Any], *, over_rows: bool, at: int, dtype: Any) -> Any:
        """Compute a function that is linear in the weight; see `lora.LoRAKernel.through`."""
        ...


class Weight(NamedTuple):
    """A node that stands for a value of the program."""

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


def num_stacked(node: Any) -> int:
    """Return the number of leading stack axes of a node."""
    return node.num_stacked if isinstance(node, KernelWeight) else node.ndim - 2


# Rules that move a weight.


def _identity(eqn: Any, operands: list[Any]) -> Sequence[Any]:
    return operands


def _move_rule(move: Callable[..., Any]) -> Callable[[Any, list[Any]], Sequence[Any] | None]:
    """Make a rule of a function that takes the operation, the weight and the other operands.

    The function returns the moved weight, or None where the weight cannot be moved so.
    """

    def rule(eqn: Any, operands: list[Any]) -> Sequence[Any] | None:
        weight, *others = operands
        if not isinstance(weight, Weight) or any(isinstance(value, Weight) for value in others):
            return None
        result = move(eqn, weight, *others)
        return None if result is None else [result]

    return rule


def _transpose(eqn: Any, weight: Weight) -> Weight | None:
    node, order = weight.node, tuple(eqn.params["permutation"])
    last, axes = node.ndim - 1, tuple(range(node.ndim))
    if order == axes:
        return weight
    if isinstance(node, KernelWeight):
        transposed = node.transposed(order)
        return None if transposed is None else weight._replace(node=transposed)
    return weight._replace(is_transposed=not weight.is_transposed) if order == (*axes[:-2], last, last - 1) else None


def _cast(eqn: Any, weight: Weight) -> Weight | None:
    # A node multiplies in the dtype of the activations, so a cast of the weight leaves the node as it is. A cast to an
    # 8-bit float is refused: that rounding belongs to the model, and the node would skip it.
    dtype, old_dtype = jnp.dtype(eqn.params["new_dtype"]), eqn.invars[0].aval.dtype
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize == 1:
        return None
    # The node would also skip a rounding to a shorter format that the program casts back before it multiplies.
    return None if _is_rounded(weight.node, old_dtype) and jnp.promote_types(old_dtype, dtype) != old_dtype else weight


def _is_rounded(node: Any, dtype: Any) -> bool:
    """Return whether the program has rounded a weight: `dtype`, its dtype now, cannot hold all values of the node's."""
    return jnp.promote_types(node.dtype, dtype) != dtype


def _mark_varying(eqn: Any, weight: Weight) -> Weight:
    """Mark a weight as varying along axes of a `jax.shard_map`; JAX inserts `pvary` where the other operand varies."""

    def mark_leaf(leaf: Any) -> Any:
        axes = tuple(axis for axis in eqn.params["axes"] if axis not in jax.typeof(leaf).mat.varying)
        return jax.lax.pcast(leaf, axes, to="varying") if axes else leaf

    return weight._replace(node=jax.tree.map(mark_leaf, weight.node))


def _slice_layers(weight: Weight, start: Any, size: int) -> Weight:
    """Slice the leading stack axis of a weight."""
    node = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start, size, 0), weight.node)
    return weight._replace(node=node)


def _slice(eqn: Any, weight: Weight) -> Weight | None:
    starts, ends, strides = (eqn.params[name] for name in ("start_indices", "limit_indices", "strides"))
    is_whole = not any(starts[1:]) and tuple(ends[1:]) == weight.shape[1:]
    if not num_stacked(weight.node) or not is_whole or not (strides is None or all(step == 1 for step in strides)):
        return None
    return _slice_layers(weight, starts[0], ends[0] - starts[0])


def _dynamic_slice(eqn: Any, weight: Weight, *starts: Any) -> Any:
    sizes = tuple(eqn.params["slice_sizes"])
    if not num_stacked(weight.node):
        return _lookup_row(eqn, weight, starts[0])
    return _slice_layers(weight, starts[0], sizes[0]) if sizes[1:] == weight.shape[1:] else None


def _squeeze_layer(eqn: Any, weight: Weight) -> Weight | None:
    """Take the one layer out of a stack of one, for `squeeze` and for a `reshape` with the same effect."""
    is_one = num_stacked(weight.node) and weight.shape == (1, *eqn.outvars[0].aval.shape)
    return weight._replace(node=jax.tree.map(lambda leaf: leaf[0], weight.node)) if is_one else None


# Rules that multiply by a weight.


def _dot(eqn: Any, operands: list[Any]) -> Sequence[Any] | None:
    left, right = operands
    x: Any
    (left_axes, right_axes), (stack_left, stack_right) = eqn.params["dimension_numbers"]
    if isinstance(left, Weight) and isinstance(right, Weight):
        return None
    is_right = isinstance(right, Weight)
    weight, x = (right, left) if is_right else (left, right)
    node = weight.node
    weight_axes, x_axes = (right_axes, left_axes) if is_right else (left_axes, right_axes)
    weight_stack, x_stack = (stack_right, stack_left) if is_right else (stack_left, stack_right)
    num_stack = num_stacked(node)
    if weight_stack != tuple(range(len(weight_stack))) or len(weight_stack) > num_stack:
        return None
    # `weight_axes` counts axes of the weight as the program has it. For a transposed weight, the program's first group
    # is the node's second one, so `over_rows` is inverted below.
    num_rows = node.num_rows if isinstance(node, KernelWeight) else 1
    is_first = sorted(weight_axes) == list(range(num_stack, num_stack + num_rows))
    if not is_first and sorted(weight_axes) != list(range(num_stack + num_rows, node.ndim)):
        return None
    over_rows = is_first != weight.is_transposed
    if over_rows and not isinstance(node, KernelWeight) and not _supports_rmatmul(node):
        raise StructureError(
            f"{weight.path}: the model multiplies by this weight as [in, out]",
            expected="a weight [out, in], x Wᵀ, as DoRA, (IA)³, VeRA and dropout act on its inputs or outputs",
            got=f"a {type(node).__name__}{list(node.shape)}, at {line_of(eqn)}",
            hint="use plain LoRA without dropout, or store the weight transposed",
        )
    pairs = tuple((axis - num_stack, x_axis) for axis, x_axis in zip(weight_axes, x_axes, strict=True))
    product = _Product(pairs, over_rows, is_right)
    return [_multiply(eqn, weight, int(is_right), lambda node, x: product.apply(node, x, tuple(x_stack)), x)]


def _multiply(eqn: Any, weight: Weight, index: int, run: Callable[[Any, Any], Any], x: Any) -> Any:
    """Multiply by a node with the precision and the output sharding of the program's product.

    Operands are cast to the widest dtype of operands and result. A weight that the program has rounded is rounded
    first. A product with an `out_sharding` runs under `jax.sharding.auto_axes`.
    """
    sharding, precision = eqn.params.get("out_sharding"), precision_name(eqn, weight.path)
    weight_dtype, out_dtype = eqn.invars[index].aval.dtype, eqn.outvars[0].aval.dtype
    try:
        dtype = functools.reduce(jnp.promote_types, (x.dtype, weight_dtype, out_dtype))
    except jax.dtypes.TypePromotionError as error:
        raise StructureError(
            f"{weight.path}: the dtypes of a product with this weight have no common wider dtype",
            expected="activations that are cast to a common dtype",
            got=f"{x.dtype}, {weight_dtype} and {out_dtype}, at {line_of(eqn)}",
            hint="cast the activations before they are multiplied",
        ) from error

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


def precision_name(eqn: Any, path: str) -> Any:
    """Return the name that `jax.default_matmul_precision` has for the precision of a product.

    Raises `StructureError` if it has no such name, or if the result is unreduced, which factors cannot compute.
    """
    precision: Any = eqn.params["precision"]
    spec: Any = getattr(eqn.params.get("out_sharding"), "spec", None)
    is_reduced = spec is None or not spec.unreduced
    is_preset = isinstance(precision, jax.lax.DotAlgorithmPreset)
    is_tuple = isinstance(precision, tuple) and not isinstance(precision, jax.lax.DotAlgorithm)  # which is a tuple, too
    pair: list[Any] = [*precision] if is_tuple else []
    if not is_reduced or not (precision is None or is_preset or (pair and pair[0] == pair[1])):
        raise StructureError(
            f"{path}: the model multiplies by this weight in a way that factors do not support",
            expected="one precision or algorithm that jax.default_matmul_precision accepts, and a reduced result",
            got=f"{f'precision={precision}' if is_reduced else f'out_sharding={spec}'}, at {line_of(eqn)}",
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
    base, fields = getattr(node, "weight", None), getattr(type(node), "__dataclass_fields__", {})
    if "weight" not in fields or not _has_same_shape_and_dtype(base, node):
        raise StructureError(
            f"{path}: the model rounds this weight, and multiplies in a wider dtype",
            expected=f"a weight that holds an array of {node.dtype}, or a product in {dtype}",
            got=f"a {type(node).__name__}, at {line_of(eqn)}",
            hint="also cast the array that it is multiplied with",
        )
    return dataclasses.replace(node, weight=_round_base(eqn, path, base, dtype))


def _has_same_shape_and_dtype(base: Any, node: Any) -> bool:
    """Return whether a node has the shape and dtype of the weight that it holds."""
    return hasattr(base, "dtype") and (tuple(base.shape), base.dtype) == (tuple(node.shape), node.dtype)


def line_of(eqn: Any) -> str:
    """Return the source line, in the traced function, of an operation or of the first one inside it."""
    inner_eqns = (inner for body in bodies(eqn) for inner in equations(body.jaxpr))
    return next(filter(None, (source_line(candidate, own=True) for candidate in (eqn, *inner_eqns))), "an unknown line")


def _supports_rmatmul(node: Any) -> bool:
    return hasattr(node, "__rmatmul__") and getattr(node, "is_plain", True)


class _Product(NamedTuple):
    """A product as `dot_general` defines it.

    Axes of the result: the batch axes, then the free axes of the left operand, then those of the right operand.
    """

    pairs: tuple[tuple[int, int], ...]
    """Contracted axes: of the weight without its stack, and of the activations."""
    over_rows: bool
    """Whether the contracted axes are m of a weight [*stack, *m, *n], or n."""
    is_right: bool
    """Whether the weight is the right operand."""

    def apply(self, node: Any, x: Any, stack: tuple[int, ...]) -> Any:
        """Multiply; `stack` lists the batch axes of `x`, in the order of the weight's leading axes."""
        if stack:
            # One batch axis at a time: `vmap` over the weight's first axis and the matching axis of `x`, which shifts
            # the others.
            batch_axis, remaining_stack = stack[0], tuple(i - (i > stack[0]) for i in stack[1:])
            unstacked = self._replace(
                pairs=tuple((weight_axis, axis - (axis > batch_axis)) for weight_axis, axis in self.pairs)
            )
            return jax.vmap(lambda layer, y: unstacked.apply(layer, y, remaining_stack), (0, batch_axis))(node, x)
        out_axis = x.ndim - len(self.pairs) if self.is_right else 0
        if num_stacked(node):
            # A stack that is no batch axis: each matrix multiplies the same `x`, and the stack is a free axis of the
            # weight.
            return jax.vmap(lambda layer: self.apply(layer, x, ()), out_axes=out_axis)(node)
        if isinstance(node, KernelWeight):
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
    if isinstance(x, Weight) or is_grouped or not isinstance(weight.node, KernelWeight) or num_stacked(weight.node):
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
    if isinstance(indices, Weight) or not is_row_gather(eqn, weight.shape) or not _is_table(weight):
        return None
    node, out, row_axis = weight.node, eqn.outvars[0].aval, numbers.offset_dims[0]
    num_row_axes = 1 - len(numbers.collapsed_slice_dims)  # 1 where the row's axis stays, with size one

    def run(table: Any) -> Any:
        options = {name: params[name] for name in ("unique_indices", "indices_are_sorted", "mode", "fill_value")}
        offsets = tuple(range(row_axis, row_axis + table.ndim - 1 + num_row_axes))
        dimension_numbers = numbers._replace(offset_dims=offsets, start_index_map=(0,))
        return jax.lax.gather(table, indices[..., :1], dimension_numbers, (1, *table.shape[1:]), **options)

    return [node.through(run, over_rows=True, at=row_axis + num_row_axes, dtype=out.dtype)]


def _lookup_row(eqn: Any, weight: Weight, start: Any) -> Any:
    """Look up one row of a table, as ``table[i]`` does."""
    if not is_row_slice(eqn, weight.shape) or not _is_table(weight):
        return None
    run = lambda table: jax.lax.dynamic_slice_in_dim(table, start, 1, 0)  # noqa: E731
    return weight.node.through(run, over_rows=True, at=1, dtype=eqn.outvars[0].aval.dtype)


def _is_table(weight: Weight) -> bool:
    return isinstance(weight.node, KernelWeight) and not num_stacked(weight.node) and weight.node.num_rows == 1


def is_row_slice(eqn: Any, shape: tuple[int, ...]) -> bool:
    """Return whether a `dynamic_slice` takes one whole row along the first axis; other starts are clamped to 0."""
    return tuple(eqn.params["slice_sizes"]) == (1, *shape[1:])


def is_row_gather(eqn: Any, shape: tuple[int, ...]) -> bool:
    """Return whether a `gather` takes whole rows along the first axis, with zeros or NaN for rows out of range."""
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


RULES: dict[str, Callable[[Any, list[Any]], Sequence[Any] | None]] = {
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
"""Rules for operations that hold no program, by primitive name. A result of None means that the operation is
refused."""
