"""An update on a GPU in one pass: kernels that read a block of everything once, and write all of it once.

The scale of a block of new state is known when all of the block is, so XLA computes the update twice, once for the
scales. Where each number of an update depends on numbers at its own place alone, as of AdamW, Lion or SGD, a kernel has
a few blocks of gradients, state and weights in registers, and needs no second look. What runs there is the wrapped
transformation itself, taken apart as `lowtide.offload.stream` does.

Pallas' Triton backend is deprecated since JAX 0.11; where it is gone there are two passes again.

Limits: leaves whose rows are whole blocks, on a mesh each device's part of them; operations and codes that Triton has
(not 4 bits, not fp8); one size of blocks. Where one leaf is otherwise, all are updated in two passes.
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
"""Of single numbers; Triton has all of them (jax 0.10.2 to 0.12.0)."""
_OF_BITS = ("bitcast_convert_type", "convert_element_type")
_CODES = ("uint8", "bfloat16")

Name = tuple[str, int]
"""A leaf: ``grad`` (or its update) or ``param`` with the position of the parameter, ``state`` with that of the node."""
Arrays = dict[Name, Any]
"""Arrays as they are stored, whole ones or blocks: ``grad``, ``param``, ``rest``, ``codes``, ``scales``, ``plain``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored:
    """What an update of `lowtide.optim.low_precision` begins with, each a list of leaves."""

    structures: tuple[Any, Any, Any]
    """Of gradients, of the packed state and of parameters."""

    grads: Sequence[Any]
    """Gradients, as they are."""
    nodes: Sequence[Any]
    """State of the wrapped transformation, packed."""
    params: Sequence[Any]
    """Parameters; none where the update is called without."""
    rests: Sequence[Any] | None
    """What each parameter lacks; None without ``weights``."""
    state_keys: Sequence[Any]
    """A random uint32 for each node."""
    param_keys: Sequence[Any]
    """The same for each parameter."""
    shardings: Mapping[Name, Any] | None = None
    """Of each array a `jax.sharding.NamedSharding`; None on one device."""

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
        """Take trees apart.

        Args:
            grads: gradients.
            inner: state of the wrapped transformation, packed.
            params: parameters, or None.
            rests: what parameters lack; None without ``weights``.
            key: makes a random uint32 of a number: from 0 of nodes, below of parameters.
            placed: how gradients, the whole state and parameters are divided; None on one device.
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
        """Name a flat argument of the wrapped update."""
        for kind, leaves in (("grad", self.grads), ("state", self.nodes), ("param", self.params)):
            if leaf < len(leaves):
                return kind, leaf
            leaf -= len(leaves)
        raise IndexError(leaf)

    def is_split(self, at: int) -> bool:
        """Whether a parameter stands for a wider one."""
        return self.rests is not None and is_narrow(self.params[at])

    def arrays(self, name: Name) -> Arrays:
        """Return what a leaf is computed from, and an update is stored with."""
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
        """List the arrays of a leaf that an update makes."""
        kept = ("grad", "rest") if name[0] == "grad" else ("plain", "codes", "scales")
        return [each for each in self.arrays(name) if each[0] in kept]

    def dense(self, name: Name, arrays: Mapping[Name, Any], row: tuple[int, ...] | None = None) -> Any:
        """Return a leaf as the wrapped update takes it; of blocks, `row` is the shape of one."""
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
        """Return the arrays of a leaf that has become `new`; of a gradient those of its update.

        Args:
            name: of the leaf.
            new: its numbers.
            arrays: what it was computed from.
            check: called with numbers that are stored in few bits, which have no derivative there.
            rounding: as of `narrowed`.
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
        key: Any = arrays.get(("state_key", at))  # of bfloat16 alone
        made = PackedArray.stored(check(new), node.format, key, is_positive=node.is_positive)
        return {(name, at): x for name, x in (("codes", made.codes), ("scales", made.scales)) if x is not None}


def has_triton() -> bool:
    """Whether the program is traced for a GPU that Triton compiles for: of compute capability 8.0 or later."""
    device = traced_device()
    capability = str(getattr(device, "compute_capability", "")).partition(".")[0]
    return device.platform == "gpu" and capability.isdigit() and int(capability) >= 8 and has_pallas_triton()


def in_one_pass(update: Callable[..., Any], given: Stored, *, interpret: bool = False) -> Any:
    """Update in kernels.

    Args:
        update: what the wrapped transformation makes of gradients, state and parameters: updates and state.
        given: what there is.
        interpret: compute the kernels without Triton, on any device.

    Returns:
        Updates, the packed state and rests (None without); or None where there is something that kernels cannot do.

    Memory:
        What is updated is overwritten, and a gradient by its update where both have one dtype.
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
    """Return how arrays are divided."""
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
    """Return the new arrays, but for those that stay; None where there is something that kernels cannot do."""
    if not any(is_packed(node) and node.scales is not None for node in given.nodes):
        return None  # without scales XLA needs one pass, too, and applies the update in it
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
    except StructureError:  # two passes say what they think of it
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
    # State that stays as it is stays packed.
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
    """Make the kernel of a group of leaves, if there can be one."""
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
    """Return the shape of one device's part of the leaves of a kernel; None where they are not divided alike."""
    if shardings is None:
        return shape
    named = [(kind, shardings[kind, at]) for kind, at in arrays if (kind, at) in shardings]
    if not all(isinstance(sharding, jax.NamedSharding) for _, sharding in named):
        return None
    parts = {sharding.shard_shape(shape) for kind, sharding in named if kind != "scales"}
    # Scales of rows of several axes have one axis for those, which are then whole.
    return parts.pop() if len({_axes(sharding.spec) for _, sharding in named}) == 1 else None


def _axes(spec: Sequence[Any]) -> tuple[Any, ...]:
    """Return a partition without what it does not divide at its end."""
    known = list(spec)
    while known and not known[-1]:
        known.pop()
    return tuple(known)


def _traced(constants: Mapping[int, Any], equations: Iterable[Any]) -> list[int]:
    """List the constants of operations that are arrays of JAX."""
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
    """The update of a group of leaves of one shape; called with what was computed before."""

    program: Any
    group: Any
    given: Stored
    arrays: Arrays
    """What it reads."""
    outputs: Sequence[tuple[int, Name]]
    """Values, and the leaves that become them."""
    scalars: Sequence[int]
    """Values that all blocks read."""
    block: int
    """Numbers with one scale."""

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
        """Arrays that it makes."""
        return [name for _, leaf in self.outputs for name in self.given.written(leaf)]

    def part(self, interpret: bool, arrays: Arrays) -> Arrays:
        """Compute one device's part of the results."""
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
            """Do what XLA makes of it, in which what does not vary, such as gradients by a rate, is a constant."""
            moved = {at: x for at, x in enumerate(tangents) if not isinstance(x, SymbolicZero)}

            def by(*these: Any) -> Any:
                given = dict(enumerate(primals)) | dict(zip(moved, these, strict=True))
                return of_blocks(*given.values(), check=refuse_derivatives)

            return jax.jvp(by, [primals[at] for at in moved], [*moved.values()])

        call.defjvp(differentiated, symbolic_zeros=True)
        return {name: x.reshape(arrays[name].shape) for name, x in zip(results, call(*views), strict=True)}

    def blocks(self, arrays: Mapping[Name, Any], check: Callable[[Any], Any] = lambda x: x) -> Arrays:
        """Compute blocks of the results; `check` as of `Stored.stored`."""
        given, avals = self.given, self.program.avals
        values = {at: arrays["value", at].astype(avals[at].dtype) for at in self.scalars}
        values |= {at: given.dense(given.name(at), arrays, (self.block,)) for at in self.group.leaves}
        shape = values[self.group.leaves[0]].shape
        for equation in self.group.equations:
            read = [values[at] if at in values else _literal(self.program.constants[at]) for at in equation.inputs]
            (at,) = equation.outputs
            if equation.primitive.name == "select_n":  # of two cases, by a boolean alone
                read[0] = read[0].astype(bool)
            if equation.primitive.name == "broadcast_in_dim":
                values[at] = jnp.broadcast_to(read[0], shape)
            elif equation.primitive.name in _OF_BITS:
                values[at] = equation.primitive.bind(*read, **equation.params)
            else:  # Triton divides no half precision
                values[at] = equation.primitive.bind(*map(_wide, read), **equation.params).astype(avals[at].dtype)
        found = Arrays()
        for at, name in self.outputs:
            found.update(given.stored(name, values[at], arrays, check, to_bfloat16=_to_bfloat16))
        return found


def _in_place(call: Callable[..., Any], arrays: Sequence[Any], aliases: Mapping[int, int]) -> tuple[Any, ...]:
    """Call a kernel in a loop of one round, which carries what is overwritten.

    When XLA puts a program in order it takes each result of a kernel for an array of its own, whatever it overwrites,
    and what a loop carries for one array: a step of Llama 1B's shapes has 6.80 bytes a parameter with the loop, 7.46
    without it (compiled, H100).
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
    return x.astype(jnp.bfloat16).astype(jnp.float32)  # Triton has no reduce_precision, and leaves out no conversion
