"""One-pass updates on a GPU: kernels that read and write each block of every array exactly once.

`lowtide.optim.low_precision` stores optimizer state in blocks: codes of 8 or 4 bits with one scale per block. The scale
of a new block depends on all its numbers. XLA therefore computes the update twice, the first time for the scales alone.
In AdamW, Lion or SGD, each number of an update depends only on numbers at the same position. For such optimizers, a
kernel holds a few blocks of gradients, state and weights in registers, and computes once. The kernel runs the wrapped
transformation itself, which is traced and split as in `lowtide.offload.stream`.

Limits: each row of a leaf (of a device's shard, on a mesh) has to consist of whole blocks; Triton has to support the
operations and codes (not 4 bits, not fp8); all formats of a kernel need the same block size. If one leaf does not
qualify, or without Pallas' Triton backend (deprecated since JAX 0.11), all leaves are updated in two passes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array

from ..core import StructureError, Tree, leaf_bytes, traced_device
from ..core._compat import has_pallas_triton, in_triton
from ..offload import plan
from ._formats import FORMATS
from ._packed import PackedArray, is_packed, refuse_derivatives, row_of
from ._weights import is_narrow, narrow_updates, widen

_MAX_ELEMENTS, _BLOCK, _MAX_ROWS = 2**31, 256, 8
_OPERATIONS = frozenset(
    """abs add add_any and bitcast_convert_type ceil clamp convert_element_type cos div eq exp exp2 expm1 floor ge gt
    integer_pow is_finite le log log1p logistic lt max min mul ne neg not or pow rem rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sqrt square stop_gradient sub tan tanh xor""".split()
)
"""Elementwise operations that Triton supports (jax 0.10.2 to 0.12.0)."""
_BIT_OPERATIONS = ("bitcast_convert_type", "convert_element_type")
_CODE_DTYPES = ("uint8", "bfloat16")

Name = tuple[str, int]
"""Kind and position of a leaf, or of an array that stores it. Kinds of leaves: ``grad`` (a gradient or its update),
``param``, and ``state`` (a node of the state)."""
Arrays = dict[Name, Any]
"""Stored arrays, or blocks of them, by kind and position. Kinds of arrays of state: ``codes``, ``scales``, ``plain``
(not packed), ``state_key``. Kinds of a parameter: ``grad``, ``param``, ``residual``, ``param_key``. ``value`` is a
scalar that every block of a kernel reads."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateInputs:
    """Inputs of an update of `lowtide.optim.low_precision`, as lists of leaves."""

    structure: Any
    """Structure of the tuple of gradients, state and parameters, with packed nodes as leaves."""
    grads: Sequence[Any]
    """Gradients in their own dtypes."""
    nodes: Sequence[Any]
    """Leaves of the state of the wrapped transformation; a `PackedArray` is one leaf."""
    params: Sequence[Any]
    """Parameters; empty where the update is called without them."""
    residuals: Sequence[Any] | None
    """Residual of each parameter; None without ``weights``."""
    state_keys: Sequence[Any]
    """A random uint32 for each node."""
    param_keys: Sequence[Any]
    """A random uint32 for each parameter."""
    shardings: Mapping[Name, Any] | None = None
    """A `jax.sharding.NamedSharding` for each array; None on one device."""

    @functools.cached_property
    def names(self) -> list[Name]:
        """Names of the flat arguments of the wrapped update."""
        leaves_by_kind = {"grad": self.grads, "state": self.nodes, "param": self.params}
        return [(kind, position) for kind, leaves in leaves_by_kind.items() for position in range(len(leaves))]

    def is_widened(self, position: int) -> bool:
        """Return whether the wrapped transformation gets float32 numbers in place of a bfloat16 parameter."""
        return self.residuals is not None and is_narrow(self.params[position])

    def arrays(self, name: Name) -> Arrays:
        """Return the stored arrays that are needed to decode a leaf and to store its new value."""
        kind, position = name
        if kind == "state":
            node = self.nodes[position]
            if not is_packed(node):
                return {("plain", position): node}
            if node.scales is None:
                return {("codes", position): node.codes, ("state_key", position): self.state_keys[position]}
            return {("codes", position): node.codes, ("scales", position): node.scales}
        arrays = {name: self.grads[position] if kind == "grad" else self.params[position]}
        if not self.params or not self.is_widened(position):
            return arrays
        arrays |= {("param", position): self.params[position], ("param_key", position): self.param_keys[position]}
        residual = self.residuals[position] if self.residuals is not None else None
        return arrays if residual is None else {**arrays, ("residual", position): residual}

    def dense(self, name: Name, arrays: Mapping[Name, Any], row: tuple[int, ...] | None = None) -> Any:
        """Return a leaf in the form that the wrapped update takes. If `arrays` are blocks, `row` is a block's shape."""
        kind, position = name
        if kind == "state":
            node = self.nodes[position]
            if not is_packed(node):
                return arrays["plain", position]
            codes, scales = arrays["codes", position], arrays.get(("scales", position))
            row_shape = node.row if row is None or scales is None else row
            return dataclasses.replace(node, codes=codes, scales=scales, row=row_shape).dense()
        if kind == "param":
            array, residual = arrays[name], arrays.get(("residual", position))
            return widen(array, residual) if self.is_widened(position) else array
        is_wide = self.residuals is not None and is_narrow(arrays[name])
        return arrays[name].astype(jnp.float32) if is_wide else arrays[name]

    def store(
        self,
        name: Name,
        new: Any,
        arrays: Mapping[Name, Any],
        check: Callable[[Any], Any] = refuse_derivatives,
        **rounding: Any,
    ) -> Arrays:
        """Return the arrays that store the new value of a leaf; the new value of a gradient is its update.

        `arrays` are the arrays from which the value was computed. `check` is called with state before it is packed; by
        default it refuses derivatives. `rounding` holds keyword arguments of `narrow_updates`.
        """
        kind, position = name
        if kind == "grad":
            if not self.params or not self.is_widened(position):
                return {name: new}
            residual = arrays.get(("residual", position))
            wide = self.dense(("param", position), arrays)
            arguments = arrays["param", position], wide, residual, new, [arrays["param_key", position]]
            update, residual = narrow_updates(*arguments, **rounding)
            return {name: update} if residual is None else {name: update, ("residual", position): residual}
        node = self.nodes[position]
        if not is_packed(node):
            return {("plain", position): new}
        key: Any = arrays.get(("state_key", position))  # only bfloat16 needs it, to round
        packed = PackedArray.stored(check(new), node.format, key, is_positive=node.is_positive)
        stored = {("codes", position): packed.codes, ("scales", position): packed.scales}
        return {name: x for name, x in stored.items() if x is not None}


def has_triton() -> bool:
    """Return whether the program is traced for a GPU that Triton supports: compute capability 8.0 or later."""
    device = traced_device()
    capability = str(getattr(device, "compute_capability", "")).partition(".")[0]
    return device.platform == "gpu" and capability.isdigit() and int(capability) >= 8 and has_pallas_triton()


def in_one_pass(
    update: Callable[..., Any],
    grads: Tree,
    inner: Tree,
    params: Tree,
    residuals: Tree,
    key: Callable[[int], Any],
    shardings: Sequence[Any] | None,
    *,
    interpret: bool = False,
) -> Any:
    """Update with kernels that read every array once; return None if the kernels do not support the update.

    `params` may be None, and `residuals` is None without ``weights``. `key` makes a random uint32 from a number: 0, 1,
    ... for nodes of the state, -1, -2, ... for parameters. `shardings` are those of the gradients, the whole state and
    the parameters; None on one device. With `interpret`, JAX runs the kernels without Triton, on any device.

    Returns updates, the packed state and the residuals. They overwrite the old state and residuals, and gradients of
    the same dtype.
    """
    structure = jax.tree.structure((grads, inner, params), is_leaf=is_packed)
    (grads, grads_structure), (params, params_structure) = jax.tree.flatten(grads), jax.tree.flatten(params)
    nodes, nodes_structure = jax.tree.flatten(inner, is_leaf=is_packed)
    if params and params_structure != grads_structure:
        return None
    has_residuals = residuals is not None
    inputs = UpdateInputs(
        structure=structure,
        grads=grads,
        nodes=nodes,
        params=params,
        residuals=params_structure.flatten_up_to(residuals) if has_residuals else None,
        state_keys=[key(position) for position in range(len(nodes))],
        param_keys=[key(-1 - position) for position in range(len(params))],
        shardings=None if shardings is None else _name_shardings(shardings, params_structure, has_residuals),
    )
    results = _compute_arrays(update, inputs, interpret)
    if results is None:
        return None

    def updated_node(position: int, old: Any) -> Any:
        if not is_packed(old):
            return results.get(("plain", position), old)
        codes, scales = results.get(("codes", position), old.codes), results.get(("scales", position), old.scales)
        return dataclasses.replace(old, codes=codes, scales=scales)

    new_inner = nodes_structure.unflatten([updated_node(position, old) for position, old in enumerate(nodes)])
    new_residuals = [results.get(("residual", position), old) for position, old in enumerate(inputs.residuals or ())]
    updates = grads_structure.unflatten([results["grad", position] for position in range(len(grads))])
    return updates, new_inner, params_structure.unflatten(new_residuals) if has_residuals else None


def _name_shardings(shardings: Sequence[Any], params_structure: Any, has_residuals: bool) -> dict[Name, Any]:
    grads, state, params = shardings[:3]
    named = {("grad", position): sharding for position, sharding in enumerate(jax.tree.leaves(grads))}
    named |= {("param", position): sharding for position, sharding in enumerate(jax.tree.leaves(params))}
    residuals = params_structure.flatten_up_to(state.residuals) if has_residuals else []
    named |= {("residual", position): sharding for position, sharding in enumerate(residuals) if sharding is not None}
    for position, node in enumerate(jax.tree.leaves(state.inner, is_leaf=is_packed)):
        arrays = {"codes": node.codes, "scales": node.scales} if is_packed(node) else {"plain": node}
        named |= {(kind, position): sharding for kind, sharding in arrays.items() if sharding is not None}
    return named


def _compute_arrays(update: Callable[..., Any], inputs: UpdateInputs, interpret: bool) -> Arrays | None:
    """Return the changed arrays, or None if the kernels do not support the update."""
    if not any(is_packed(node) and node.scales is not None for node in inputs.nodes):
        return None  # without scales, XLA needs only one pass, too, and fuses optax.apply_updates into it
    names = inputs.names
    declared = {
        index for index, (kind, position) in enumerate(names) if kind == "state" and is_packed(inputs.nodes[position])
    }

    def dense_leaf(index: int) -> Any:
        return inputs.dense(names[index], inputs.arrays(names[index]))

    args = inputs.structure.unflatten(jax.eval_shape(lambda: [dense_leaf(index) for index in range(len(names))]))
    try:
        update_plan = plan(update, args, lambda grads, state, params: (grads, state), chunk_bytes=0, declared=declared)
    except StructureError:  # the update in two passes raises its own error
        return None
    kernels = [_make_kernel(update_plan, group, inputs) for group in update_plan.groups]
    program, results = update_plan.program, Arrays()
    outputs = [(value, names[index]) for value, index in zip(program.outputs, update_plan.replaced, strict=True)]
    dtypes = {name: program.avals[value].dtype.name for value, name in outputs}
    packed = [(position, node) for position, node in enumerate(inputs.nodes) if is_packed(node)]
    has_same_dtypes = all(dtypes["state", position] == node.dtype for position, node in packed)
    if program.effects or not has_same_dtypes or any(kernel is None for kernel in kernels):
        return None
    kernel_outputs = {position for group in update_plan.groups for position in group.outputs}
    other_outputs = [
        (value, name)
        for index, (value, name) in enumerate(outputs)
        # Leaves that the update returns unchanged stay packed.
        if index not in kernel_outputs and not (name[0] == "state" and value < len(names) and names[value] == name)
    ]
    needed = {*(value for value, _ in other_outputs), *(value for group in update_plan.groups for value in group.free)}
    values = {
        index: dense_leaf(index) for index in range(len(names)) if index in needed or index not in update_plan.on_host
    }
    values.update({value: program.constants[value] for value in program.constants.keys() & needed})
    program.run(program.needed_for(needed, known=values), values)
    for value, name in other_outputs:
        results.update(inputs.store(name, values[value], inputs.arrays(name)))
    for kernel in kernels:
        results.update(kernel(values, interpret) if kernel is not None else {})
    return results


def _make_kernel(update_plan: Any, group: Any, inputs: UpdateInputs) -> _Kernel | None:
    """Return the kernel of a group of leaves, or None if the group cannot be one kernel on a GPU."""
    program = update_plan.program
    outputs = [(program.outputs[output], inputs.names[update_plan.replaced[output]]) for output in group.outputs]
    arrays = Arrays()
    for name in (*(inputs.names[leaf] for leaf in group.leaves), *(name for _, name in outputs)):
        arrays.update(inputs.arrays(name))
    values = {
        *group.leaves,
        *(value for value, _ in outputs),
        *(value for equation in group.equations for value in equation.outputs),
    }
    shape = program.avals[group.leaves[0]].shape
    operands = {value for equation in group.equations for value in equation.inputs}
    constants = operands & program.constants.keys()
    scalars = {*group.free, *(v for v in constants if isinstance(program.constants[v], (Tracer, jax.Array)))}
    nodes = [inputs.nodes[position] for kind, position in arrays if kind == "codes"]
    scaled_nodes = [node for node in nodes if node.scales is not None]
    blocks = {FORMATS[node.format].block for node in scaled_nodes} or {_BLOCK}
    has_one_shape = all(program.avals[value].shape == shape for value in values)
    shard_shape = _shard_shape(shape, arrays, inputs.shardings) if has_one_shape else None
    if shard_shape is None:
        return None
    lengths = [math.prod(shard_shape), *(math.prod(row_of(shard_shape, node.format)) for node in scaled_nodes)]
    is_supported = (
        not any(map(program.rank, scalars))
        and all(leaf_bytes(program.avals[value]) >= program.avals[value].size for value in values)  # no 4-bit dtypes
        and all(_is_supported(program, equation) for equation in group.equations)
        and all(node.codes.dtype.name in _CODE_DTYPES for node in nodes)
        and len(blocks) == 1
        and not any(length % max(blocks) for length in lengths)
        and all(len(row_of(shard_shape, node.format)) == len(node.row) for node in scaled_nodes)
        and lengths[0] < _MAX_ELEMENTS
    )
    if not is_supported:
        return None
    return _Kernel(
        program=program,
        group=group,
        inputs=inputs,
        arrays=arrays,
        outputs=outputs,
        scalars=sorted(scalars),
        block=max(blocks),
    )


def _shard_shape(shape: tuple[int, ...], arrays: Iterable[Name], shardings: Mapping[Name, Any] | None) -> Any:
    """Return the shape of one device's shard of a kernel's leaves, or None if their shardings differ."""
    if shardings is None:
        return shape
    named_shardings = [(kind, shardings[kind, position]) for kind, position in arrays if (kind, position) in shardings]
    if not all(isinstance(sharding, jax.NamedSharding) for _, sharding in named_shardings):
        return None
    shapes = {sharding.shard_shape(shape) for kind, sharding in named_shardings if kind != "scales"}
    # A row may span several axes. Its scales have one axis for all of them, so such a row is not sharded.
    specs = {(*sharding.spec, *(None,) * (len(shape) - len(sharding.spec))) for _, sharding in named_shardings}
    return shapes.pop() if len(specs) == 1 else None


def _is_supported(program: Any, equation: Any) -> bool:
    name = equation.primitive.name
    if name == "select_n" and len(equation.inputs) > 3:
        return False
    return name in _OPERATIONS or (name == "broadcast_in_dim" and not program.rank(equation.inputs[0]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Kernel:
    """Kernel that updates a group of leaves of one shape. A call takes the values computed before all kernels."""

    program: Any
    group: Any
    inputs: UpdateInputs
    arrays: Arrays
    outputs: Sequence[tuple[int, Name]]
    """Value numbers of the outputs, each with the name of the leaf that the output replaces."""
    scalars: Sequence[int]
    """Value numbers of the scalars that every block reads."""
    block: int
    """Number of elements that share a scale."""

    def __call__(self, values: Mapping[int, Any], interpret: bool) -> Arrays:
        all_values = {**self.program.constants, **values}
        scalars = {("value", value): jnp.asarray(all_values[value]) for value in self.scalars}
        arrays = self.arrays | {name: x.astype(jnp.int32) if x.dtype == bool else x for name, x in scalars.items()}
        run = functools.partial(self.compute_shard, interpret)
        shardings = self.inputs.shardings
        if shardings is None:
            return run(arrays)
        specs = {name: shardings[name].spec if name in shardings else jax.P() for name in arrays}
        mesh = next(shardings[name].mesh for name in arrays if name in shardings)
        out_specs = {name: specs[name] for name in self.results}
        return jax.shard_map(run, mesh=mesh.abstract_mesh, in_specs=(specs,), out_specs=out_specs, check_vma=False)(
            arrays
        )

    @property
    def results(self) -> list[Name]:
        kinds = {"grad": ("grad", "residual"), "state": ("plain", "codes", "scales")}
        return [name for _, leaf in self.outputs for name in self.inputs.arrays(leaf) if name[0] in kinds[leaf[0]]]

    def compute_shard(self, interpret: bool, arrays: Arrays) -> Arrays:
        names, results = list(arrays), self.results
        widths = [1 if kind == "scales" else self.block for kind, _ in names]
        views = [x.reshape(-1, width) if x.ndim else x for x, width in zip(arrays.values(), widths, strict=True)]
        result_shapes = jax.eval_shape(lambda views: self.compute_blocks(dict(zip(names, views, strict=True))), views)
        rows = math.gcd(_MAX_ROWS, result_shapes[results[0]].shape[0])

        def compute(*blocks: Any, check: Callable[[Any], Any] = lambda x: x) -> tuple[Any, ...]:
            new = self.compute_blocks(dict(zip(names, blocks, strict=True)), check)
            return tuple(new[name] for name in results)

        def kernel(*refs: Any) -> None:
            blocks = [ref[...] for ref in refs[: len(names)]]
            for ref, new in zip(refs[len(names) :], compute(*blocks), strict=True):
                ref[...] = new

        shapes = [
            [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in group]
            for group in (views, [result_shapes[name] for name in results])
        ]
        has_same_dtype = [
            name in result_shapes and result_shapes[name].dtype == x.dtype for name, x in zip(names, views, strict=True)
        ]
        aliases = {index: results.index(name) for index, name in enumerate(names) if has_same_dtype[index]}
        run_kernel = in_triton(kernel, shapes, rows, aliases=aliases, interpret=interpret)
        call = jax.custom_jvp(lambda *views: _in_place(run_kernel, views, aliases))

        def jvp(primals: Any, tangents: Any) -> Any:
            """Differentiate the same computation in XLA operations; inputs without a tangent are constants."""
            nonzero_tangents = {index: x for index, x in enumerate(tangents) if not isinstance(x, SymbolicZero)}

            def compute_from(*variables: Any) -> Any:
                primal_values = dict(enumerate(primals)) | dict(zip(nonzero_tangents, variables, strict=True))
                return compute(*primal_values.values(), check=refuse_derivatives)

            return jax.jvp(compute_from, [primals[index] for index in nonzero_tangents], [*nonzero_tangents.values()])

        call.defjvp(jvp, symbolic_zeros=True)
        return {name: x.reshape(arrays[name].shape) for name, x in zip(results, call(*views), strict=True)}

    def compute_blocks(self, arrays: Mapping[Name, Any], check: Callable[[Any], Any] = lambda x: x) -> Arrays:
        """Compute blocks of the results; `check` as in `UpdateInputs.store`."""
        inputs, avals = self.inputs, self.program.avals
        values = {value: arrays["value", value].astype(avals[value].dtype) for value in self.scalars}
        values |= {value: inputs.dense(inputs.names[value], arrays, (self.block,)) for value in self.group.leaves}
        shape = values[self.group.leaves[0]].shape
        for equation in self.group.equations:
            operands = [
                values[value] if value in values else np.asarray(self.program.constants[value])[()]
                for value in equation.inputs
            ]
            (value,) = equation.outputs
            if equation.primitive.name == "select_n":  # `_is_supported` allows two cases, so a boolean selects
                operands[0] = operands[0].astype(bool)
            if equation.primitive.name == "broadcast_in_dim":
                values[value] = jnp.broadcast_to(operands[0], shape)
            elif equation.primitive.name in _BIT_OPERATIONS:
                values[value] = equation.primitive.bind(*operands, **equation.params)
            else:  # Triton does not divide numbers in half precision
                half = (jnp.bfloat16, jnp.float16)
                operands = [x.astype(jnp.float32) if x.dtype in half else x for x in operands]
                values[value] = equation.primitive.bind(*operands, **equation.params).astype(avals[value].dtype)
        results = Arrays()
        for value, name in self.outputs:
            results.update(inputs.store(name, values[value], arrays, check, to_bfloat16=_to_bfloat16))
        return results


def _in_place(call: Callable[..., Any], arrays: Sequence[Any], aliases: Mapping[int, int]) -> tuple[Any, ...]:
    """Call a kernel in a loop of one iteration that carries the arrays that the kernel overwrites.

    When XLA schedules a program, it counts each result of a kernel as a new array, even if the result overwrites an
    argument. It counts the carry of a loop as one array. A step with Llama 1B's shapes needs 6.80 bytes a parameter
    with the loop, and 7.46 without (compiled, H100). A barrier hides the trip count, so that XLA keeps the loop.
    """
    trips, arrays = jax.lax.optimization_barrier((jnp.int32(1), list(arrays)))
    shapes, argument_of = jax.eval_shape(call, *arrays), {result: argument for argument, result in aliases.items()}
    initial = [
        arrays[argument_of[i]] if i in argument_of else jnp.zeros(x.shape, x.dtype) for i, x in enumerate(shapes)
    ]

    def body(carry: Any) -> Any:
        count, old = carry
        current = dict(enumerate(arrays)) | {argument_of[i]: x for i, x in enumerate(old) if i in argument_of}
        return count + 1, list(call(*current.values()))

    return tuple(jax.lax.while_loop(lambda carry: carry[0] < trips, body, (jnp.int32(0), initial))[1])


def _to_bfloat16(x: Array) -> Array:
    return x.astype(jnp.bfloat16).astype(jnp.float32)  # Triton has no reduce_precision, and drops no conversions
