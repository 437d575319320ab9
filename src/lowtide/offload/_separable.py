"""Find the separable parts of an update: each row of the results needs only the same row of the arguments.

The update is traced once and read as a list of equations, with calls inlined. Leaves that meet in an operation form a
group, which is then updated in blocks of rows. Limits: an operation without a rule below is treated as if it mixed all
rows. This is safe, but a group may be updated whole without need. `while` loops and long scans are not analysed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..jaxprs import Kind, bodies, called, equations, fold, kind_of, make_jaxpr

# Kinds of values:
#
# - *with rows*: the leading `rows` axes are those of some input leaves. Elementwise operations keep all axes. A
#   reduction or transposition keeps the axes before the first axis that it changes.
# - *constant over rows*: a broadcast scalar, which can belong to every group.
# - *free*: every other value that depends on no host leaf, such as a step counter or the global norm of the gradients.
#   It is computed once, before the groups.
#
# If a value depends on a host leaf but has no rows left, its group can only be updated whole. Sums, maxima and minima
# over rows are an exception (the norm in LAMB's trust ratio, the global norm of gradients that `optax.MultiSteps`
# accumulated). A pass, which is a loop before the groups, folds them block by block; afterwards they are free. A `cond`
# on host leaves becomes a selection, so that its branches are analysed, too.

_ELEMENTWISE = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil
    clamp clz complex conj convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1
    floor ge gt igamma igammac imag integer_pow is_finite laid_out_on_tpus le lgamma log log1p logistic lt max min
    mul ne neg nextafter no_derivative not or polygamma population_count pow real reduce_precision
    regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign
    sin sinh sqrt square stop_gradient sub tan tanh xor zeta""".split()
)


def _num_common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the number of equal leading entries of two sequences."""
    return next(
        (axis for axis, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(map(len, (first, second)))
    )


# Number of leading axes that an operation keeps, from its parameters and the shape of its first operand.
_KEPT_AXES: dict[str, Callable[[Mapping[str, Any], tuple[int, ...]], int]] = {
    "broadcast_in_dim": lambda p, s: _num_common(
        list(zip(p["broadcast_dimensions"], s, strict=True)), list(enumerate(p["shape"]))
    ),
    "concatenate": lambda p, s: p["dimension"],
    "dot_general": lambda p, s: min(_num_common(axes, range(len(axes))) for axes in p["dimension_numbers"][1]),
    "dynamic_slice": lambda p, s: _num_common(p["slice_sizes"], s),
    "pad": lambda p, s: _num_common([tuple(edge) for edge in p["padding_config"]], [(0, 0, 0)] * len(s)),
    "reshape": lambda p, s: _num_common(p["new_sizes"], s) if p["dimensions"] is None else 0,
    "rev": lambda p, s: min(p["dimensions"], default=len(s)),
    "slice": lambda p, s: min(
        _num_common(p["start_indices"], [0] * len(s)),
        _num_common(p["limit_indices"], s),
        _num_common(p["strides"] or [1] * len(s), [1] * len(s)),
    ),
    "sort": lambda p, s: p["dimension"],
    "split": lambda p, s: p["axis"],
    "squeeze": lambda p, s: min(p["dimensions"], default=len(s)),
    "transpose": lambda p, s: _num_common(p["permutation"], range(len(s))),
}
for _name in (*(f"reduce_{kind}" for kind in ("sum", "max", "min", "prod", "and", "or", "xor")), "argmax", "argmin"):
    _KEPT_AXES[_name] = lambda p, s: min(p["axes"], default=len(s))
for _name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"):
    _KEPT_AXES[_name] = lambda p, s: p["axis"]

# Parameters that contain the shape of a full leaf; for a block, the block's shape replaces it.
_SHAPE_PARAMS = {
    "broadcast_in_dim": "shape",
    "dynamic_slice": "slice_sizes",
    "reshape": "new_sizes",
    "slice": "limit_indices",
}


_FOLDS: Mapping[str, Callable[[Any, Any], Any]] = {
    "reduce_sum": jax.lax.add,
    "reduce_max": jax.lax.max,
    "reduce_min": jax.lax.min,
    "reduce_and": jax.lax.bitwise_and,
    "reduce_or": jax.lax.bitwise_or,
}
"""JAX's reduction primitives, with the operation that combines the results of two blocks."""

# Scans of at most this many steps are unrolled. Muon's Newton-Schulz iteration takes five steps by default, or as many
# as its coefficients have rows.
_MAX_UNROLLED_STEPS = 16

# The result of a fold stays on the device. It may have at most 1/8 of the elements of its operand.
_MIN_FOLD_REDUCTION = 8


@dataclasses.dataclass(frozen=True)
class Equation:
    """One operation; `inputs` and `outputs` identify values by their numbers in `Program`."""

    primitive: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    params: Mapping[str, Any]


@dataclasses.dataclass
class Program:
    """A traced function with calls inlined. Its values have numbers; ``0 … num_inputs - 1`` are its flat inputs."""

    num_inputs: int
    equations: list[Equation] = dataclasses.field(default_factory=list)
    avals: list[Any] = dataclasses.field(default_factory=list)
    constants: dict[int, Any] = dataclasses.field(default_factory=dict)
    outputs: list[int] = dataclasses.field(default_factory=list)
    effects: tuple[str, ...] = ()
    """Side effects of the function, such as printing; the equations omit them."""

    def rank(self, value: int) -> int:
        return len(self.avals[value].shape)

    def needed_for(
        self, values: Iterable[int], among: Sequence[Equation] | None = None, known: Collection[int] = ()
    ) -> list[Equation]:
        """List the equations, in program order, that compute `values` from the inputs and the `known` values."""
        required, needed = set(values).difference(known), list[Equation]()
        for equation in reversed(self.equations if among is None else among):
            if required.intersection(equation.outputs):
                needed.append(equation)
                required.update(set(equation.inputs).difference(known))
        return needed[::-1]

    def run(self, equations: Iterable[Equation], values: dict[int, Any], sizes: Sequence[int] = ()) -> None:
        """Compute equations in order, and add their results to `values`, which maps value numbers to arrays.

        If the arrays are blocks, `sizes` are the sizes of a block's leading axes.
        """
        for equation in equations:
            params = equation.params
            if sizes and (name := _SHAPE_PARAMS.get(equation.primitive.name)):
                params = {**params, name: (*sizes, *params[name][len(sizes) :])}
            operands = [values[value] if value in values else self.constants[value] for value in equation.inputs]
            results = equation.primitive.bind(*operands, **params)
            values.update(
                zip(equation.outputs, results if equation.primitive.multiple_results else [results], strict=True)
            )


def trace(fn: Callable[..., Any], args: Sequence[Any], on_host: Iterable[int]) -> tuple[Program, Any]:
    """Trace a function of device arrays; return its program and the tree structure of its result.

    Only shapes and dtypes of `args` are read. `on_host` holds the flat positions of the leaves in host memory.
    """
    avals = jax.tree.map(_on_device, tuple(args))
    closed, shapes = make_jaxpr(fn)(*avals)
    inliner = _Inliner(Program(num_inputs=len(closed.in_avals), effects=tuple(map(str, closed.effects))), set(on_host))
    inputs = [inliner.new_value(aval, index in inliner.host) for index, aval in enumerate(closed.in_avals)]
    inliner.program.outputs = inliner.add(closed, inputs)
    return inliner.program, jax.tree.structure(shapes)


def _on_device(leaf: Any) -> Any:
    aval = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


@dataclasses.dataclass
class _Inliner:
    program: Program
    host: set[int]  # values that depend on host leaves
    flat: dict[int, int] = dataclasses.field(default_factory=dict)  # from the result of a flattening to its operand

    def new_value(self, aval: Any, on_host: bool) -> int:
        self.program.avals.append(aval)
        value = len(self.program.avals) - 1
        if on_host:
            self.host.add(value)
        return value

    def new_constant(self, array: Any) -> int:
        value = self.new_value(jax.typeof(array), False)
        self.program.constants[value] = array
        return value

    def add(self, jaxpr: Any, inputs: Sequence[int]) -> list[int]:
        return fold(jaxpr, inputs, self.add_equation, lambda _, array: self.new_constant(array))

    def add_equation(self, eqn: Any, inputs: list[int]) -> list[int]:
        name = eqn.primitive.name
        if (inner := called(eqn)) is not None:
            return self.add(inner, inputs)
        if kind_of(eqn) is Kind.BRANCH and self.host.intersection(inputs):
            # A `cond` on host leaves becomes a selection, which runs all branches. A `cond` with loops stays as it is.
            kinds = {kind_of(inner_eqn) for branch in bodies(eqn) for inner_eqn in equations(branch.jaxpr)}
            if kinds.isdisjoint((Kind.SCAN, Kind.WHILE)):
                cases = [self.add(branch.jaxpr, inputs[1:]) for branch in bodies(eqn)]
                return [self.add_select(inputs[0], column) for column in zip(*cases, strict=True)]
        if kind_of(eqn) is Kind.SCAN and (carry := self.add_short_scan(eqn, inputs)) is not None:
            return carry
        if name == "dot_general" and (product := self.add_inner_product(inputs, eqn.outvars[0].aval)) is not None:
            return product
        outputs = self.add_operation(eqn.primitive, inputs, [var.aval for var in eqn.outvars], eqn.params)
        if name == "reshape" and len(eqn.outvars[0].aval.shape) == 1:
            self.flat[outputs[0]] = inputs[0]
        return outputs

    def add_short_scan(self, eqn: Any, inputs: Sequence[int]) -> list[int] | None:
        """Unroll a short scan with a carry that depends on host leaves; None if it slices these or stacks results."""
        (body,) = bodies(eqn)
        first, last = body.carried.start, body.carried.stop
        carry, stacked = list(inputs[first:last]), inputs[last:]
        is_supported = len(eqn.outvars) == len(carry) and not self.host.intersection(stacked)
        if body.times > _MAX_UNROLLED_STEPS or not is_supported or not self.host.intersection(carry):
            return None
        for step in sorted(range(body.times), reverse=eqn.params["reverse"]):
            entries = [self.add_entry(value, step) for value in stacked]
            carry = self.add(body.jaxpr, [*inputs[:first], *carry, *entries])
        return carry

    def add_entry(self, value: int, index: int) -> int:
        aval = self.program.avals[value]
        array = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
        closed, _ = make_jaxpr(lambda x: jax.lax.index_in_dim(x, index, keepdims=False))(array)
        return self.add(closed, [value])[0]

    def add_inner_product(self, inputs: Sequence[int], aval: Any) -> list[int] | None:
        """Rewrite `jnp.vdot` of arrays of one shape, which flattens them, as a sum of products; else return None."""
        arrays = [self.flat.get(value, value) for value in inputs]
        avals = [self.program.avals[value] for value in arrays]
        shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        if aval.shape or not self.host.intersection(arrays) or shapes[0].shape != shapes[1].shape:
            return None
        closed, _ = make_jaxpr(lambda x, y: jnp.sum(x.astype(aval.dtype) * y.astype(aval.dtype)))(*shapes)
        return self.add(closed, arrays)

    def add_select(self, predicate: int, cases: Sequence[int]) -> int:
        if len(set(cases)) == 1:
            return cases[0]
        return self.add_operation(jax.lax.select_n_p, [predicate, *cases], [self.program.avals[cases[0]]], {})[0]

    def add_operation(
        self, primitive: Any, inputs: Sequence[int], avals: Sequence[Any], params: Mapping[str, Any]
    ) -> list[int]:
        on_host = bool(self.host.intersection(inputs))
        outputs = [self.new_value(aval, on_host) for aval in avals]
        self.program.equations.append(Equation(primitive, tuple(inputs), tuple(outputs), params))
        return outputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Leaves that are updated together, and the equations of the update."""

    leaves: tuple[int, ...]
    """Input leaves that the group reads."""
    free: tuple[int, ...]
    """Values that the group reads and that are computed before it."""
    outputs: tuple[int, ...]
    """Positions of the group's results among the program's outputs."""
    equations: tuple[Equation, ...]
    """Equations that compute a block of the results from a block of `leaves`."""
    rows: int
    """Number of leading axes along which blocks may be cut; 0 if the group can only be updated whole."""
    blocked_by: str | None
    """Name of the operation that prevents blocks; None if `rows` is above 0."""
    folds: tuple[Equation, ...] = ()
    """Reductions of a pass (see `separate`), which computes them block by block; empty for groups with `outputs`."""


def separate(
    program: Program, on_host: Iterable[int], replaced: Sequence[int], *, fold: bool = False
) -> tuple[list[Group], list[Group]]:
    """Divide a program into independent groups of leaves; return the passes, then the groups.

    `replaced` holds the input leaf that each output overwrites. With `fold`, sums and extremes over rows of host leaves
    are computed in passes: loops over blocks that run before the groups and overwrite nothing. An output is in no group
    if it is an unchanged input, or depends on host leaves only through passes or not at all.
    """
    host = set(on_host)
    program.equations = program.needed_for(program.outputs)
    flow = _Flow(program, host, fold)
    for equation in program.equations:
        flow.propagate(equation)
    members: dict[int, list[int]] = {}
    for position, value in enumerate(program.outputs):
        leaf = flow.leaf.get(value)
        if leaf is not None and program.rank(replaced[position]):
            flow.unite(leaf, replaced[position])
    hosted = {flow.find(leaf) for leaf in host}
    for position, value in enumerate(program.outputs):
        leaf = flow.leaf.get(value)
        if value in flow.rows and value >= program.num_inputs and leaf is not None and flow.find(leaf) in hosted:
            members.setdefault(flow.find(leaf), []).append(position)
    return flow.passes(), [flow.best_group(positions, replaced) for positions in members.values()]


class _Flow:
    """Forward analysis of a program: the rows and leaves of every value. Leaves that meet are merged by union-find."""

    def __init__(self, program: Program, host: set[int], fold: bool) -> None:
        leaves = [leaf for leaf in range(program.num_inputs) if program.rank(leaf) or leaf in host]
        self.program = program
        self.rows = {leaf: program.rank(leaf) for leaf in leaves}  # a value that is missing here is free
        self.leaf = {leaf: leaf for leaf in leaves}  # one leaf that a value depends on; none for constants over rows
        self.parent = {leaf: leaf for leaf in leaves}
        self.host = set(host)
        self.fold = fold
        self.folds: list[tuple[Equation, int]] = []  # with the number of axes of the operand that may be cut
        self.level: dict[int, int] = {}  # number of passes that have to run before a value is known

    def find(self, leaf: int) -> int:
        while self.parent[leaf] != leaf:
            leaf = self.parent[leaf]
        return leaf

    def unite(self, first: int, second: int) -> None:
        self.parent[self.find(second)] = self.find(first)

    def propagate(self, equation: Equation) -> None:
        program, name = self.program, equation.primitive.name
        carriers = [value for value in equation.inputs if value in self.rows]
        on_host = bool(self.host.intersection(equation.inputs))
        level = max((self.level.get(value, 0) for value in equation.inputs), default=0)
        axes = self._num_foldable_axes(equation) if self.fold and on_host else 0
        self.level.update(dict.fromkeys(equation.outputs, level + (axes > 0)))
        if axes:
            self.folds.append((equation, axes))
            return
        if not carriers:
            if name == "broadcast_in_dim" and not program.rank(equation.inputs[0]):
                self.rows[equation.outputs[0]] = program.rank(equation.outputs[0])
            return
        if name in _ELEMENTWISE:
            self._free_repeated_operands(equation, carriers)
            carriers = [value for value in carriers if value in self.rows]
            if not carriers:  # such as a row vector times a column vector: each block can compute its part
                self.rows[equation.outputs[0]] = program.rank(equation.outputs[0])
                return
        rows = self._num_row_axes(equation, carriers)
        if not rows and not on_host:
            return
        if not rows:  # whole operands: leaves on the device need not join the group
            carriers = [value for value in carriers if value in self.host]
        leaves = [self.leaf[value] for value in carriers if value in self.leaf]
        for leaf in leaves[1:]:
            self.unite(leaves[0], leaf)
        for output in equation.outputs:
            self.rows[output] = rows
            self.leaf.update({output: leaves[0]} if leaves else {})
            self.host.update([output] if on_host else [])

    def _free_repeated_operands(self, equation: Equation, carriers: Sequence[int]) -> None:
        """Mark operands that an elementwise operation repeats along rows as free: computed before the groups.

        Such device arrays have one row where the result has many: Adafactor's column statistics, SM3's accumulators.
        """
        avals, shape = self.program.avals, self.program.avals[equation.outputs[0]].shape
        for value in carriers:
            is_repeated = value in self.leaf and value not in self.host and avals[value].shape != shape
            if is_repeated and min(self._num_shared_axes(equation, value), self.rows[value]) < len(shape):
                del self.rows[value]

    def _num_shared_axes(self, equation: Equation, operand: int) -> int:
        return _num_common(self.program.avals[operand].shape, self.program.avals[equation.outputs[0]].shape)

    def _num_row_axes(self, equation: Equation, carriers: Sequence[int]) -> int:
        program, name = self.program, equation.primitive.name
        if name in _ELEMENTWISE:
            shared_axes = [self._num_shared_axes(equation, value) for value in carriers if value in self.leaf]
            return min([*(self.rows[value] for value in carriers), *shared_axes])
        if (count_kept_axes := _KEPT_AXES.get(name)) is None:
            return 0
        arrays = [value for value in equation.inputs if program.rank(value) or value in self.rows]
        num_kept_axes = count_kept_axes(equation.params, program.avals[equation.inputs[0]].shape)
        return min(num_kept_axes, *(self.rows.get(value, program.rank(value)) for value in arrays))

    def best_group(self, positions: list[int], replaced: Sequence[int]) -> Group:
        """Return the group of some outputs; drop outputs without a host leaf if this lets more axes be cut."""
        whole_group = self.group(positions)
        host_positions = [
            position for position in positions if {self.program.outputs[position], replaced[position]} & self.host
        ]
        if not host_positions or len(host_positions) == len(positions):
            return whole_group
        host_group = self.group(host_positions)
        return host_group if host_group.rows > whole_group.rows else whole_group

    def _num_foldable_axes(self, equation: Equation) -> int:
        """Return the number of leading axes along which a reduction can be computed in blocks; else 0."""
        if equation.primitive.name not in _FOLDS or len(equation.inputs) != 1:
            return 0
        (operand,), avals = equation.inputs, self.program.avals
        axes = _num_common(sorted(equation.params["axes"]), range(self.program.rank(operand)))
        sizes = [math.prod(avals[value].shape) for value in (*equation.inputs, *equation.outputs)]
        return min(axes, self.rows.get(operand, 0)) if sizes[1] * _MIN_FOLD_REDUCTION <= sizes[0] else 0

    def passes(self) -> list[Group]:
        """Return the passes. Folds of a group share a pass if they have equal rows and follow equally many passes."""
        equations_by_pass: dict[Any, list[Equation]] = {}
        for equation, axes in self.folds:
            (operand,) = equation.inputs
            rows = self.program.avals[operand].shape[:axes]
            key = self.level[equation.outputs[0]], self.find(self.leaf[operand]), rows
            equations_by_pass.setdefault(key, []).append(equation)
        return [self.group([], equations_by_pass[key], len(key[2])) for key in sorted(equations_by_pass)]

    def group(self, positions: list[int], folds: Sequence[Equation] = (), max_rows: int | None = None) -> Group:
        program = self.program
        values = [program.outputs[position] for position in positions] + [fold.inputs[0] for fold in folds]
        row_equations = [
            equation for equation in program.equations if all(value in self.rows for value in equation.outputs)
        ]
        equations = program.needed_for(values, row_equations)
        operands = {value for equation in (*equations, *folds) for value in equation.inputs}
        produced = {value for equation in equations for value in equation.outputs}
        leaves = sorted(value for value in operands if value < program.num_inputs and value in self.rows)
        rows = min(self.rows[value] for value in {*leaves, *produced})
        rows = rows if max_rows is None else min(rows, max_rows)
        free = operands - produced - set(leaves)
        row_losing = (
            e for e in equations if not self.rows[e.outputs[0]] and all(self.rows.get(value, 1) for value in e.inputs)
        )
        return Group(
            leaves=tuple(leaves),
            free=tuple(sorted(v for v in free if v not in program.constants or program.rank(v))),
            outputs=tuple(positions),
            equations=tuple(equations),
            rows=rows,
            blocked_by=None if rows else next((e.primitive.name for e in row_losing), "a scalar"),
            folds=tuple(folds),
        )


# Reductions over rows that are computed block by block.


def initial_value(primitive: Any, aval: Any) -> Any:
    """Return the initial value of a fold in `_FOLDS`; sums of narrow floats are in float32, as XLA computes them."""
    name, dtype = primitive.name, aval.dtype
    if name == "reduce_sum":
        is_float = jnp.issubdtype(dtype, jnp.floating)
        return jnp.zeros(aval.shape, jnp.promote_types(dtype, jnp.float32) if is_float else dtype)
    if dtype == jnp.bool_ or name in ("reduce_and", "reduce_or"):
        return jnp.full(aval.shape, -1 if name in ("reduce_and", "reduce_min") else 0).astype(dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.full(aval.shape, -jnp.inf if name == "reduce_max" else jnp.inf, dtype)
    limits = jnp.iinfo(dtype)
    return jnp.full(aval.shape, limits.min if name == "reduce_max" else limits.max, dtype)


def fold_block(primitive: Any, params: Mapping[str, Any], block: Any, total: Any) -> Any:
    return _FOLDS[primitive.name](total, primitive.bind(block, **params).astype(total.dtype))
