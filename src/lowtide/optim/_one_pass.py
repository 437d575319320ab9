"""One-pass updates on a GPU: kernels that read and write each block of every array exactly once.

The scale of a block of new state is known only when the whole block is. XLA therefore computes the update twice, the
first time for the scales alone. In AdamW, Lion or SGD, each number of an update depends only on numbers at the same
position. Then a kernel holds a few blocks of gradients, state and weights in registers, and computes once. The kernel
runs the wrapped transformation itself, which is traced and split as in `lowtide.offload.stream`.

Pallas' Triton backend is deprecated since JAX 0.11. Without it, the update runs in two passes.

Limits: each row of a leaf (of a device's shard, on a mesh) has to consist of whole blocks; Triton has to support the
operations and codes (not 4 bits, not fp8); all formats need one block size. If one leaf does not qualify, all leaves
are updated in two passes.
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

from ..core import StructureError, Tree, traced_device
from ..core._compat import has_pallas_triton, in_triton
from ..offload import plan
from ._formats import FORMATS
from ._packed import PackedArray, is_packed, refuse_derivatives, row_of
from ._weights import is_narrow, narrowed, widened

_MOST_NUMBERS, _BLOCK, _MOST_ROWS = 2**31, 256, 8
_OPERATIONS = frozenset(
    """abs add add_any and bitcast_convert_type ceil clamp convert_element_type cos div eq exp exp2 expm1 floor ge gt
    integer_pow is_finite le log log1p logistic lt max min mul ne neg not or pow rem rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sqrt square stop_gradient sub tan tanh xor""".split()
)
"""Elementwise operations that Triton supports (jax 0.10.2 to 0.12.0)."""
_OF_BITS = ("bitcast_convert_type", "convert_element_type")
_CODES = ("uint8", "bfloat16")

Name = tuple[str, int]
"""A leaf: ``grad`` (or its update) or ``param`` with the parameter's position, or ``state`` with the node's
position."""
Arrays = dict[Name, Any]
"""Stored arrays or blocks of them by kind and position: ``grad``, ``param``, ``rest``, ``codes``, ``scales``,
``plain``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored:
    """Inputs of an update of `lowtide.optim.low_precision`, as lists of leaves."""

    structures: tuple[Any, Any, Any]
    """Structures of the gradients, the packed state and the parameters."""

    grads: Sequence[Any]
    """Gradients in their own dtypes."""
    nodes: Sequence[Any]
    """State of the wrapped transformation, packed."""
    params: Sequence[Any]
    """Parameters; empty where the update is called without them."""
    rests: Sequence[Any] | None
    """Residual of each parameter; None without ``weights``."""
    state_keys: Sequence[Any]
    """A random uint32 for each node."""
    param_keys: Sequence[Any]
    """A random uint32 for each parameter."""
    shardings: Mapping[Name, Any] | None = None
    """A `jax.sharding.NamedSharding` for each array; None on one device."""

    @classmethod
    def of(
        cls,
        grads: Tree,
        inner: Tree,
        params: Tree,
        rests: Tree,
        key: Callable[[int], Any],
        placed: Sequence[Any] | None,
    ) -> Stored:
        """Flatten the trees of an update.

        Args:
            grads: gradients.
            inner: state of the wrapped transformation, packed.
            params: parameters, or None.
            rests: residuals of the parameters; None without ``weights``.
            key: makes a random uint32 from a number: nodes count up from 0, parameters count down from -1.
            placed: shardings of the gradients, the whole state and the parameters; None on one device.
        """
        (grads, of_grads), (params, of_params) = jax.tree.flatten(grads), jax.tree.flatten(params)
        nodes, of_nodes = jax.tree.flatten(inner, is_leaf=is_packed)
        return cls(
            structures=(of_grads, of_nodes, of_params),
            grads=grads,
            nodes=nodes,
            params=params,
            rests=None if rests is None else of_params.flatten_up_to(rests),
            state_keys=[key(at) for at in range(len(nodes))],
            param_keys=[key(-1 - at) for at in range(len(params))],
            shardings=None if placed is None else _named(placed, of_params, has_rests=rests is not None),
        )

    def name(self, leaf: int) -> Name:
        """Return the name of a flat argument of the wrapped update."""
        for kind, leaves in (("grad", self.grads), ("state", self.nodes), ("param", self.params)):
            if leaf < len(leaves):
                return kind, leaf
            leaf -= len(leaves)
        raise IndexError(leaf)

    def is_split(self, at: int) -> bool:
        """Return whether the wrapped transformation sees a float32 number in place of a bfloat16 parameter."""
        return self.rests is not None and is_narrow(self.params[at])

    def arrays(self, name: Name) -> Arrays:
        """Return the arrays from which a leaf is decoded, and with which its update is stored."""
        kind, at = name
        if kind == "state":
            node = self.nodes[at]
            if not is_packed(node):
                return {("plain", at): node}
            if node.scales is None:
                return {("codes", at): node.codes, ("state_key", at): self.state_keys[at]}
            return {("codes", at): node.codes, ("scales", at): node.scales}
        found = {name: self.grads[at] if kind == "grad" else self.params[at]}
        if not self.params or not self.is_split(at):
            return found
        found |= {("param", at): self.params[at], ("param_key", at): self.param_keys[at]}
        rest = self.rests[at] if self.rests is not None else None
        return found if rest is None else {**found, ("rest", at): rest}

    def written(self, name: Name) -> list[Name]:
        """List the arrays of a leaf that an update writes."""
        kept = ("grad", "rest") if name[0] == "grad" else ("plain", "codes", "scales")
        return [each for each in self.arrays(name) if each[0] in kept]

    def dense(self, name: Name, arrays: Mapping[Name, Any], row: tuple[int, ...] | None = None) -> Any:
        """Return a leaf in the form that the wrapped update takes; `row` is the shape of one block, for blocks."""
        kind, at = name
        if kind == "state":
            node = self.nodes[at]
            if not is_packed(node):
                return arrays["plain", at]
            codes, scales = arrays["codes", at], arrays.get(("scales", at))
            own = node.row if row is None or scales is None else row
            return dataclasses.replace(node, codes=codes, scales=scales, row=own).dense()
        if kind == "param":
            return widened(arrays[name], arrays.get(("rest", at))) if self.is_split(at) else arrays[name]
        return arrays[name].astype(jnp.float32) if self.rests is not None and is_narrow(arrays[name]) else arrays[name]

    def stored(
        self,
        name: Name,
        new: Any,
        arrays: Mapping[Name, Any],
        check: Callable[[Any], Any] = refuse_derivatives,
        **rounding: Any,
    ) -> Arrays:
        """Return the arrays that store the new value of a leaf; for a gradient, those of its update.

        Args:
            name: name of the leaf.
            new: its new value.
            arrays: the arrays that it was computed from.
            check: called with numbers before they are packed, which have no derivative there.
            rounding: as in `narrowed`.
        """
        kind, at = name
        if kind == "grad":
            if not self.params or not self.is_split(at):
                return {name: new}
            rest = arrays.get(("rest", at))
            wide = self.dense(("param", at), arrays)
            parts = arrays["param", at], wide, rest, new, [arrays["param_key", at]]
            update, rest = narrowed(*parts, **rounding)
            return {name: update} if rest is None else {name: update, ("rest", at): rest}
        node = self.nodes[at]
        if not is_packed(node):
            return {("plain", at): new}
        key: Any = arrays.get(("state_key", at))  # bfloat16 alone needs it
        made = PackedArray.stored(check(new), node.format, key, is_positive=node.is_positive)
        return {(name, at): x for name, x in (("codes", made.codes), ("scales", made.scales)) if x is not None}


def has_triton() -> bool:
    """Return whether the program is traced for a GPU that Triton supports: compute capability 8.0 or later."""
    device = traced_device()
    capability = str(getattr(device, "compute_capability", "")).partition(".")[0]
    return device.platform == "gpu" and capability.isdigit() and int(capability) >= 8 and has_pallas_triton()


def in_one_pass(update: Callable[..., Any], given: Stored, *, interpret: bool = False) -> Any:
    """Update with kernels that read every array once.

    Args:
        update: update of the wrapped transformation: takes gradients, state and parameters, returns updates and state.
        given: the inputs.
        interpret: run the kernels without Triton, on any device.

    Returns:
        Updates, the packed state and the residuals (None without ``weights``); or None where the kernels do not
        support the update.

    Memory:
        The update overwrites state, residuals and, where the dtypes are equal, gradients.
    """
    of_grads, of_nodes, of_params = given.structures
    if given.params and of_params != of_grads:
        return None
    made = _arrays(update, given, interpret)
    if made is None:
        return None

    def node(at: int, old: Any) -> Any:
        if not is_packed(old):
            return made.get(("plain", at), old)
        codes, scales = made.get(("codes", at), old.codes), made.get(("scales", at), old.scales)
        return dataclasses.replace(old, codes=codes, scales=scales)

    inner = of_nodes.unflatten([node(at, old) for at, old in enumerate(given.nodes)])
    rests = [made.get(("rest", at), old) for at, old in enumerate(given.rests or ())]
    updates = of_grads.unflatten([made["grad", at] for at in range(len(given.grads))])
    return updates, inner, None if given.rests is None else of_params.unflatten(rests)


def _named(placed: Sequence[Any], of_params: Any, *, has_rests: bool) -> dict[Name, Any]:
    """Return the sharding of each array."""
    grads, state, params = placed[:3]
    found = {("grad", at): of for at, of in enumerate(jax.tree.leaves(grads))}
    found |= {("param", at): of for at, of in enumerate(jax.tree.leaves(params))}
    rests = of_params.flatten_up_to(state.rests) if has_rests else []
    found |= {("rest", at): of for at, of in enumerate(rests) if of is not None}
    for at, node in enumerate(jax.tree.leaves(state.inner, is_leaf=is_packed)):
        arrays = {"codes": node.codes, "scales": node.scales} if is_packed(node) else {"plain": node}
        found |= {(kind, at): of for kind, of in arrays.items() if of is not None}
    return found


def _arrays(update: Callable[..., Any], given: Stored, interpret: bool) -> Arrays | None:
    """Return the changed arrays, or None where the kernels do not support the update."""
    if not any(is_packed(node) and node.scales is not None for node in given.nodes):
        return None  # without scales, XLA needs only one pass, too, and fuses optax.apply_updates into it
    names = [given.name(at) for at in range(len(given.grads) + len(given.nodes) + len(given.params))]
    declared = {at for at, (kind, of) in enumerate(names) if kind == "state" and is_packed(given.nodes[of])}

    def whole(at: int) -> Any:
        return given.dense(names[at], given.arrays(names[at]))

    leaves = iter(jax.eval_shape(lambda: [whole(at) for at in range(len(names))]))
    of_grads, of_nodes, of_params = given.structures
    of_state = jax.tree.structure(of_nodes.unflatten([0] * len(given.nodes)))
    args = [of.unflatten([next(leaves) for _ in range(of.num_leaves)]) for of in (of_grads, of_state, of_params)]
    try:
        made = plan(update, args, lambda grads, state, params: (grads, state), chunk_bytes=0, declared=declared)
    except StructureError:  # the update in two passes raises its own error
        return None
    kernels = [_kernel(made, group, given) for group in made.groups]
    program, results = made.program, Arrays()
    packed = {("state", at): node.dtype for at, node in enumerate(given.nodes) if is_packed(node)}
    dtypes = {
        names[of]: program.avals[value].dtype.name for value, of in zip(program.outputs, made.replaced, strict=True)
    }
    keeps_dtypes = all(dtypes[name] == dtype for name, dtype in packed.items())
    if program.effects or not keeps_dtypes or any(kernel is None for kernel in kernels):
        return None
    inside = {position for group in made.groups for position in group.outputs}
    outside = [(value, names[of]) for value, of in zip(program.outputs, made.replaced, strict=True)]
    # Leaves that the update returns unchanged stay packed.
    stays = {("state", at) for at in range(len(given.nodes))}
    outside = [
        (value, name)
        for at, (value, name) in enumerate(outside)
        if at not in inside and not (name in stays and value < len(names) and names[value] == name)
    ]
    wanted = {*(value for value, _ in outside), *(at for group in made.groups for at in group.free)}
    values = {at: whole(at) for at in range(len(names)) if at in wanted or at not in made.on_host}
    values.update({at: program.constants[at] for at in program.constants.keys() & wanted})
    program.run(program.needed_for(wanted, known=values), values)
    for value, name in outside:
        results.update(given.stored(name, values[value], given.arrays(name)))
    for kernel in kernels:
        results.update(kernel(values, interpret) if kernel is not None else {})
    return results


def _kernel(made: Any, group: Any, given: Stored) -> _Kernel | None:
    """Return the kernel of a group of leaves, or None where Triton does not support it."""
    program = made.program
    outputs = [(program.outputs[at], given.name(made.replaced[at])) for at in group.outputs]
    arrays = Arrays()
    for name in (*map(given.name, group.leaves), *(name for _, name in outputs)):
        arrays.update(given.arrays(name))
    values = {
        *group.leaves,
        *(at for at, _ in outputs),
        *(at for equation in group.equations for at in equation.outputs),
    }
    shape = program.avals[group.leaves[0]].shape
    scalars = {*group.free, *_traced(program.constants, group.equations)}
    nodes = [given.nodes[at] for kind, at in arrays if kind == "codes"]
    scaled = [node for node in nodes if node.scales is not None]
    blocks = {FORMATS[node.format].block for node in scaled} or {_BLOCK}
    is_of_one_shape = all(program.avals[at].shape == shape for at in values)
    part = _part(shape, arrays, given.shardings) if is_of_one_shape else None
    if part is None:
        return None
    lengths = [math.prod(part), *(math.prod(row_of(part, node.format)) for node in scaled)]
    is_possible = (
        not any(map(program.rank, scalars))
        and all(_has_whole_bytes(program.avals[at].dtype) for at in values)
        and all(_is_possible(program, equation) for equation in group.equations)
        and all(node.codes.dtype.name in _CODES for node in nodes)
        and len(blocks) == 1
        and not any(length % max(blocks) for length in lengths)
        and all(len(row_of(part, node.format)) == len(node.row) for node in scaled)
        and lengths[0] < _MOST_NUMBERS
    )
    if not is_possible:
        return None
    return _Kernel(
        program=program,
        group=group,
        given=given,
        arrays=arrays,
        outputs=outputs,
        scalars=sorted(scalars),
        block=max(blocks),
    )


def _part(shape: tuple[int, ...], arrays: Iterable[Name], shardings: Mapping[Name, Any] | None) -> Any:
    """Return the shape of one device's shard of a kernel's leaves; None where their shardings differ."""
    if shardings is None:
        return shape
    named = [(kind, shardings[kind, at]) for kind, at in arrays if (kind, at) in shardings]
    if not all(isinstance(sharding, jax.NamedSharding) for _, sharding in named):
        return None
    parts = {sharding.shard_shape(shape) for kind, sharding in named if kind != "scales"}
    # A row may span several axes. Its scales have one axis for all of them, so such a row is not sharded.
    return parts.pop() if len({_axes(sharding.spec) for _, sharding in named}) == 1 else None


def _axes(spec: Sequence[Any]) -> tuple[Any, ...]:
    """Return a partition spec without trailing unsharded axes."""
    known = list(spec)
    while known and not known[-1]:
        known.pop()
    return tuple(known)


def _traced(constants: Mapping[int, Any], equations: Iterable[Any]) -> list[int]:
    """List the constants of equations that are JAX arrays."""
    read = {at for equation in equations for at in equation.inputs}
    return [at for at in read & constants.keys() if isinstance(constants[at], (Tracer, jax.Array))]


def _has_whole_bytes(dtype: Any) -> bool:
    return (
        jnp.issubdtype(dtype, jnp.bool_)
        or (jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo)(dtype).bits >= 8
    )


def _is_possible(program: Any, equation: Any) -> bool:
    name = equation.primitive.name
    if name == "select_n" and len(equation.inputs) > 3:
        return False
    return name in _OPERATIONS or (name == "broadcast_in_dim" and not program.rank(equation.inputs[0]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Kernel:
    """Kernel that updates a group of leaves of one shape; called with values that were computed before."""

    program: Any
    group: Any
    given: Stored
    arrays: Arrays
    """Arrays that it reads."""
    outputs: Sequence[tuple[int, Name]]
    """Output values, each with the name of the leaf that it replaces."""
    scalars: Sequence[int]
    """Scalar values that every block reads."""
    block: int
    """Numbers per scale."""

    def __call__(self, values: Mapping[int, Any], interpret: bool) -> Arrays:
        known = {**self.program.constants, **values}
        scalars = {("value", at): jnp.asarray(known[at]) for at in self.scalars}
        arrays = self.arrays | {at: x.astype(jnp.int32) if x.dtype == bool else x for at, x in scalars.items()}
        run = functools.partial(self.part, interpret)
        of = self.given.shardings
        if of is None:
            return run(arrays)
        specs = {name: of[name].spec if name in of else jax.P() for name in arrays}
        mesh = next(of[name].mesh for name in arrays if name in of)
        made = {name: specs[name] for name in self.results}
        return jax.shard_map(run, mesh=mesh.abstract_mesh, in_specs=(specs,), out_specs=made, check_vma=False)(arrays)

    @property
    def results(self) -> list[Name]:
        """Names of the arrays that it writes."""
        return [name for _, leaf in self.outputs for name in self.given.written(leaf)]

    def part(self, interpret: bool, arrays: Arrays) -> Arrays:
        """Compute one device's shard of the results."""
        names, results = list(arrays), self.results
        widths = [1 if kind == "scales" else self.block for kind, _ in names]
        views = [x.reshape(-1, width) if x.ndim else x for x, width in zip(arrays.values(), widths, strict=True)]
        made = jax.eval_shape(lambda views: self.blocks(dict(zip(names, views, strict=True))), views)
        rows = math.gcd(_MOST_ROWS, made[results[0]].shape[0])

        def of_blocks(*blocks: Any, check: Callable[[Any], Any] = lambda x: x) -> tuple[Any, ...]:
            new = self.blocks(dict(zip(names, blocks, strict=True)), check)
            return tuple(new[name] for name in results)

        def kernel(*refs: Any) -> None:
            blocks = [ref[...] for ref in refs[: len(names)]]
            for ref, new in zip(refs[len(names) :], of_blocks(*blocks), strict=True):
                ref[...] = new

        shapes = [
            [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in part] for part in (views, [made[name] for name in results])
        ]
        same = [name in made and made[name].dtype == x.dtype for name, x in zip(names, views, strict=True)]
        aliases = {at: results.index(name) for at, name in enumerate(names) if same[at]}
        in_kernel = in_triton(kernel, shapes, rows, aliases=aliases, interpret=interpret)
        call = jax.custom_jvp(lambda *views: _in_place(in_kernel, views, aliases))

        def differentiated(primals: Any, tangents: Any) -> Any:
            """Differentiate XLA's form of the kernel, with inputs that have no tangent as constants.

            With respect to a learning rate, for example, gradients are constants.
            """
            moved = {at: x for at, x in enumerate(tangents) if not isinstance(x, SymbolicZero)}

            def by(*these: Any) -> Any:
                given = dict(enumerate(primals)) | dict(zip(moved, these, strict=True))
                return of_blocks(*given.values(), check=refuse_derivatives)

            return jax.jvp(by, [primals[at] for at in moved], [*moved.values()])

        call.defjvp(differentiated, symbolic_zeros=True)
        return {name: x.reshape(arrays[name].shape) for name, x in zip(results, call(*views), strict=True)}

    def blocks(self, arrays: Mapping[Name, Any], check: Callable[[Any], Any] = lambda x: x) -> Arrays:
        """Compute blocks of the results; `check` as in `Stored.stored`."""
        given, avals = self.given, self.program.avals
        values = {at: arrays["value", at].astype(avals[at].dtype) for at in self.scalars}
        values |= {at: given.dense(given.name(at), arrays, (self.block,)) for at in self.group.leaves}
        shape = values[self.group.leaves[0]].shape
        for equation in self.group.equations:
            read = [values[at] if at in values else _literal(self.program.constants[at]) for at in equation.inputs]
            (at,) = equation.outputs
            if equation.primitive.name == "select_n":  # `_is_possible` allows two cases, so a boolean selects
                read[0] = read[0].astype(bool)
            if equation.primitive.name == "broadcast_in_dim":
                values[at] = jnp.broadcast_to(read[0], shape)
            elif equation.primitive.name in _OF_BITS:
                values[at] = equation.primitive.bind(*read, **equation.params)
            else:  # Triton does not divide numbers in half precision
                values[at] = equation.primitive.bind(*map(_wide, read), **equation.params).astype(avals[at].dtype)
        found = Arrays()
        for at, name in self.outputs:
            found.update(given.stored(name, values[at], arrays, check, to_bfloat16=_to_bfloat16))
        return found


def _in_place(call: Callable[..., Any], arrays: Sequence[Any], aliases: Mapping[int, int]) -> tuple[Any, ...]:
    """Call a kernel in a loop of one iteration that carries the arrays that the kernel overwrites.

    When XLA schedules a program, it counts each result of a kernel as a new array, even where it overwrites an
    argument. It counts the carry of a loop as one array. A step with Llama 1B's shapes needs 6.80 bytes a parameter
    with the loop, and 7.46 bytes without it (compiled, H100). The barrier hides the trip count, so that XLA keeps the
    loop.
    """
    trips, arrays = jax.lax.optimization_barrier((jnp.int32(1), list(arrays)))
    shapes, at = jax.eval_shape(call, *arrays), {result: argument for argument, result in aliases.items()}
    first = [arrays[at[i]] if i in at else jnp.zeros(x.shape, x.dtype) for i, x in enumerate(shapes)]

    def body(carry: Any) -> Any:
        count, old = carry
        now = dict(enumerate(arrays)) | {at[i]: x for i, x in enumerate(old) if i in at}
        return count + 1, list(call(*now.values()))

    return tuple(jax.lax.while_loop(lambda carry: carry[0] < trips, body, (jnp.int32(0), first))[1])


def _literal(constant: Any) -> Any:
    return np.asarray(constant)[()]


def _wide(x: Any) -> Any:
    return x.astype(jnp.float32) if x.dtype in (jnp.bfloat16, jnp.float16) else x


def _to_bfloat16(x: Array) -> Array:
    return x.astype(jnp.bfloat16).astype(jnp.float32)  # Triton has no reduce_precision, and drops no conversions
