"""Jaxprs inside of operations: the parameters that hold them, their inputs, and how often they run; and FLOPs.

`PRIMITIVES` is Lowtide's only table of this kind. `walk` visits operations in their context, and `fold` propagates
facts about values. Special rules for a kind of operation are in the modules that need them, which call `kind_of`.

| kind | inputs of the jaxprs inside | their outputs |
|---|---|---|
| call, remat, custom derivative | the operands | the results |
| branch | the operands after the first, which selects the branch | the results |
| scan | the operands: constants, carry, slices of stacked operands | the carry, and slices of stacked results |
| while | own constants of the condition or the body, then the carry | condition: whether to continue; body: the carry |
| choice | the operands | the results; lowering selects one of two jaxprs, and `bodies` lists only the second |
| `shard_map` | one device's part of the operands | the same device's part of the results |
| kernel | references, for each point of a grid | none |
| scalar | two numbers, which the jaxpr adds up, compares or replaces | one number |
| opaque | not visible, because the operation has its own rules | |
| other: an operation with a jaxpr that is not in `PRIMITIVES` | unknown | unknown |
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from jax.extend import core as jex
from jax.extend.core.primitives import name_p

from ._versions import close, consts_of, is_jaxpr, opened, scan_counts, with_jaxprs

Context = TypeVar("Context")
Known = TypeVar("Known")


class Kind(enum.Enum):
    """How an operation uses the jaxprs that it holds."""

    CALL = enum.auto()
    REMAT = enum.auto()
    CUSTOM_JVP = enum.auto()
    CUSTOM_VJP = enum.auto()
    BRANCH = enum.auto()
    SCAN = enum.auto()
    WHILE = enum.auto()
    CHOICE = enum.auto()
    SHARD_MAP = enum.auto()
    KERNEL = enum.auto()
    SCALAR = enum.auto()
    OPAQUE = enum.auto()
    OTHER = enum.auto()

    @property
    def is_custom(self) -> bool:
        """Whether differentiation replaces the operation by code that its jaxpr does not show."""
        return self in (Kind.CUSTOM_JVP, Kind.CUSTOM_VJP)

    @property
    def only_groups(self) -> bool:
        """Whether the operation runs its only jaxpr once, on its own operands."""
        return self in (Kind.CALL, Kind.REMAT) or self.is_custom


PRIMITIVES: Mapping[str, tuple[Kind, tuple[str, ...]]] = {
    "jit": (Kind.CALL, ("jaxpr",)),
    "pjit": (Kind.CALL, ("jaxpr",)),
    "closed_call": (Kind.CALL, ("call_jaxpr",)),
    "core_call": (Kind.CALL, ("call_jaxpr",)),
    "eval_jaxpr": (Kind.CALL, ("call_jaxpr",)),
    "remat2": (Kind.REMAT, ("jaxpr",)),
    "checkpoint": (Kind.REMAT, ("jaxpr",)),
    "custom_jvp_call": (Kind.CUSTOM_JVP, ("call_jaxpr",)),
    "custom_vjp_call": (Kind.CUSTOM_VJP, ("call_jaxpr",)),
    "custom_vmap_call": (Kind.CALL, ("call",)),
    "cond": (Kind.BRANCH, ("branches",)),
    "scan": (Kind.SCAN, ("jaxpr",)),
    "while": (Kind.WHILE, ("cond_jaxpr", "body_jaxpr")),
    "on_one_device": (Kind.CHOICE, ("among",)),
    "shard_map": (Kind.SHARD_MAP, ("jaxpr",)),
    "pallas_call": (Kind.KERNEL, ("jaxpr",)),
    "call_hi_primitive": (Kind.OPAQUE, ()),
}
"""Maps the name of an operation, in any JAX version, to its kind and the parameters that hold its jaxprs."""


@dataclasses.dataclass(frozen=True)
class Body:
    """A jaxpr inside of an operation."""

    jaxpr: Any
    """The jaxpr as the operation holds it, open or closed."""
    reads: tuple[int, ...] | None
    """For each input, the index of the operand that the jaxpr gets, whole or in part; None if operands are unknown."""
    carried: range = range(0)
    """Indices of inputs that are operands in the first iteration, and then results of the previous iteration."""
    times: int = 1
    """How often the jaxpr runs on one device per run of the operation; a `while` loop counts once."""


def kind_of(eqn: Any) -> Kind | None:
    """Return how an operation uses the jaxprs that it holds; None when it holds none."""
    name = eqn.primitive.name
    if name in PRIMITIVES:
        return PRIMITIVES[name][0]
    # A primitive that is not in the table may hold jaxprs in any parameter.
    if next(_jaxprs(tuple(eqn.params.values())), None) is None:
        return None
    # The jaxprs of these operations combine two numbers.
    return Kind.SCALAR if name.startswith(("scatter", "reduce", "select_and")) else Kind.OTHER


def called(eqn: Any) -> Any:
    """Return the jaxpr, open or closed, of an operation with `Kind.only_groups`; None for other operations."""
    kind, names = PRIMITIVES.get(eqn.primitive.name, (Kind.OTHER, ()))
    return eqn.params[names[0]] if kind.only_groups else None


def bodies(eqn: Any) -> list[Body]:
    """List the jaxprs inside of an operation, in order; for an unknown operation, the jaxprs of all parameters."""
    params, operands = eqn.params, tuple(range(len(eqn.invars)))
    kind, names = PRIMITIVES.get(eqn.primitive.name, (Kind.OTHER, ()))
    jaxprs = list(_jaxprs(tuple(params[name] for name in names or params)))
    if kind is Kind.BRANCH:
        return [Body(jaxpr, operands[1:]) for jaxpr in jaxprs]
    if kind is Kind.SCAN:
        consts, carry = scan_counts(params)
        return [Body(jaxprs[0], operands, range(consts, consts + carry), params["length"])]
    if kind is Kind.WHILE:
        first, second = params["cond_nconsts"], params["body_nconsts"]
        # Condition and body have their own constants; both take the carry after them.
        constants = (operands[:first], operands[first : first + second])
        carry = operands[first + second :]
        return [
            Body(jaxpr, (*consts, *carry), range(len(consts), len(consts) + len(carry)))
            for jaxpr, consts in zip(jaxprs, constants, strict=True)
        ]
    if kind is Kind.KERNEL:
        # Grid sizes may be dynamic; such a size counts as 1.
        grid = getattr(params.get("grid_mapping"), "grid", ())
        return [Body(jaxpr, None, times=math.prod(n for n in grid if isinstance(n, int))) for jaxpr in jaxprs]
    return [Body(jaxpr, operands if names else None) for jaxpr in jaxprs]


def with_bodies(eqn: Any, change: Callable[[Body], Any]) -> Any:
    """Replace each jaxpr inside of an operation by ``change(body)``, which must have the same inputs and outputs."""
    by_id = {id(body.jaxpr): body for body in bodies(eqn)}
    return with_jaxprs(eqn, lambda jaxpr: change(by_id[id(jaxpr)]) if id(jaxpr) in by_id else jaxpr)


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yield all operations of a jaxpr and of the jaxprs inside of it, in program order."""
    return (eqn for eqn, _ in walk(jaxpr, None, lambda *_: None))


def walk(jaxpr: Any, context: Context, enter: Callable[[Any, Body, Context], Context]) -> Iterator[tuple[Any, Context]]:
    """Yield all operations of a jaxpr and of the jaxprs inside of it, in program order, each with its context.

    `context` belongs to the outermost operations. ``enter(eqn, body, context)`` gets an operation, one of its bodies
    and the operation's context, and returns the context of the operations in that body.
    """
    for eqn in opened(jaxpr).eqns:
        yield eqn, context
        for body in bodies(eqn):
            yield from walk(body.jaxpr, enter(eqn, body, context), enter)


def fold(
    jaxpr: Any,
    inputs: Sequence[Known],
    apply: Callable[[Any, list[Known]], Sequence[Known]],
    known: Callable[[Any, Any], Known],
) -> list[Known]:
    """Propagate facts about values through a jaxpr, open or closed, from its inputs to its outputs.

    ``apply(eqn, operands)`` returns the fact about each result, given the facts about the operands. It may fold the
    jaxprs inside of the operation. ``known(var, value)`` returns the fact about a literal or constant. Constants of an
    open jaxpr have the value None.
    """
    inner = opened(jaxpr)
    # An open jaxpr names its constants but does not hold them.
    consts = consts_of(jaxpr) or [None] * len(inner.constvars)
    facts = {var: known(var, value) for var, value in zip(inner.constvars, consts, strict=True)}
    facts.update(zip(inner.invars, inputs, strict=True))

    def read(var: Any) -> Known:
        return known(var, var.val) if isinstance(var, jex.Literal) else facts[var]

    for eqn in inner.eqns:
        facts.update(zip(eqn.outvars, apply(eqn, [read(var) for var in eqn.invars]), strict=True))
    return [read(var) for var in inner.outvars]


def runner(eqn: Any) -> Callable[..., Sequence[Any]]:
    """Return a function that runs an operation on one value per operand; values for its literals are ignored."""
    variables = list(dict.fromkeys(var for var in eqn.invars if isinstance(var, jex.Var)))
    positions = [next(i for i, var in enumerate(eqn.invars) if var is variable) for variable in variables]
    # Dropped results are left out of the jaxpr; `run` returns None in their places.
    results = [var for var in eqn.outvars if not isinstance(var, jex.DropVar)]
    debug_info = jex.DebugInfo("lowtide", "one operation", None, None)

    def run(*values: Any) -> Sequence[Any]:
        jaxpr = jex.Jaxpr([], variables, results, [eqn], eqn.effects, debug_info)
        outputs = iter(jex.jaxpr_as_fun(close(jaxpr))(*(values[i] for i in positions)))
        return [None if isinstance(var, jex.DropVar) else next(outputs) for var in eqn.outvars]

    return run


def evaluate(jaxpr: Any, args: Sequence[Any], on_name: Callable[[str, Any], Any]) -> list[Any]:
    """Compute the results of a jaxpr, and replace each value that has a `checkpoint_name`.

    ``on_name(name, value)`` returns the value with which the computation goes on. Names inside of loops, branches and
    functions with rules for differentiation are not replaced.
    """

    def apply(eqn: Any, operands: list[Any]) -> Sequence[Any]:
        if eqn.primitive is name_p:
            return [on_name(eqn.params["name"], operands[0])]
        if kind_of(eqn) is Kind.CALL and any(inner.primitive is name_p for inner in equations(called(eqn))):
            return fold(called(eqn), operands, apply, lambda _, value: value)
        return runner(eqn)(*operands)

    return fold(jaxpr, args, apply, lambda _, value: value)


def variables_read(jaxpr: Any) -> set[Any]:
    """Return the variables that operations read or that are outputs, in a jaxpr and in the jaxprs inside of it."""
    inner = opened(jaxpr)
    groups = [*(eqn.invars for eqn in inner.eqns), inner.outvars]
    read = {var for group in groups for var in group if isinstance(var, jex.Var)}
    return read.union(*(variables_read(body.jaxpr) for eqn in inner.eqns for body in bodies(eqn)))


def _jaxprs(value: Any) -> Iterator[Any]:
    """Yield the jaxprs in a parameter, also in tuples; JAX allows no other containers."""
    if is_jaxpr(value):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _jaxprs(item)


# --- FLOPs ------------------------------------------------------------------------------------------------------------
# The count serves to compare alternatives, not to predict time: 2mnk for a product, one per element of any other
# result, one per element that a reduction reads, none for moving data. A Pallas kernel counts its own estimate
# (`cost_estimate`), or else its body for each point of its grid. Other opaque kernels count one per element of their
# results, except cuDNN's attention. A `while` loop counts once, a `cond` its most expensive branch, a `shard_map` the
# work of all devices.

_FREE_PRIMITIVES = {
    *("reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims", "slice", "dynamic_slice", "gather", "rev"),
    *("dynamic_update_slice", "concatenate", "pad", "convert_element_type", "bitcast_convert_type", "copy"),
    *("name", "device_put", "iota", "split", "stop_gradient", "optimization_barrier", "sharding_constraint"),
    *("get", "swap", "masked_load", "masked_swap", "program_id", "num_programs"),  # of Pallas kernels
    *("pcast", "pvary", "reshard", "layout_constraint", "laid_out_on_tpus", "no_derivative"),
    *("ppermute", "all_gather", "all_gather_invariant", "all_to_all"),
}


def jaxpr_flops(jaxpr: Any) -> int:
    """Return the FLOPs of a jaxpr, open or closed, including everything inside.

    Operations whose results nothing reads count nothing, because compilers drop them. Limit: if something reads only
    one result of a call or loop, the operations inside that compute its other results still count.
    """
    jaxpr = opened(jaxpr)
    read = set(map(id, jaxpr.outvars))
    total = 0
    # Backwards, so that the readers of a result are known before the operation that computes it.
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or not read.isdisjoint(map(id, eqn.outvars)):
            total += eqn_flops(eqn)
            read.update(map(id, eqn.invars))
    return total


def eqn_flops(eqn: Any) -> int:
    """Return the FLOPs of one operation, including all iterations of a scan."""
    primitive = eqn.primitive.name
    out = eqn.outvars[0].aval if eqn.outvars else None
    if primitive in ("dot_general", "scaled_dot"):
        (contracted, _), _ = eqn.params["dimension_numbers"]
        lhs = eqn.invars[0].aval.shape
        return 2 * _size(out) * math.prod(lhs[dim] for dim in contracted)
    if primitive == "transposed_product":
        return 2 * _size(out) * eqn.invars[1].aval.shape[-1]
    if primitive == "conv_general_dilated":
        features = eqn.params["dimension_numbers"].rhs_spec[0]  # axis of the output features; its size may be 0
        kernel = math.prod(size for dim, size in enumerate(eqn.invars[1].aval.shape) if dim != features)
        stuffed = math.prod(eqn.params["lhs_dilation"])  # the gradient of a strided convolution inserts zeros
        return 2 * _size(out) * kernel // stuffed
    if primitive == "ragged_dot_general":
        return _ragged_flops(eqn)
    if primitive.startswith("scaled_matmul"):  # [B, M, K] and [B, N, K]
        return 2 * _size(out) * eqn.invars[0].aval.shape[-1]
    if primitive.startswith("dot_product_attention"):  # query [B, T, N, H], key [B, S, K, H]; layout 1: heads first
        num_products = 5 if "_bwd" in primitive else 2  # backward: recomputed scores, and four gradients
        return 2 * num_products * _size(eqn.invars[0].aval) * eqn.invars[1].aval.shape[1 + eqn.params["layout"]]
    estimate = eqn.params.get("cost_estimate")
    if estimate is not None:
        return estimate.flops
    kind = kind_of(eqn)
    if kind not in (None, Kind.SCALAR):
        inner = [body.times * jaxpr_flops(body.jaxpr) for body in bodies(eqn)]
        num_devices = manual_devices(eqn.params) if kind is Kind.SHARD_MAP else 1
        return max(inner) if kind is Kind.BRANCH else num_devices * sum(inner)
    if primitive in _FREE_PRIMITIVES:
        return 0
    if primitive.startswith(("reduce_", "arg", "cum")) and primitive != "reduce_precision":
        return _size(eqn.invars[0].aval)
    return sum(_size(var.aval) for var in eqn.outvars)


def _ragged_flops(eqn: Any) -> int:
    """Return the FLOPs of a grouped product, in which rows or the summed axis are split into groups."""
    numbers, (lhs, _, groups) = eqn.params["ragged_dot_dimension_numbers"], (var.aval for var in eqn.invars)
    (contracted, _), _ = numbers.dot_dimension_numbers
    flops = 2 * _size(eqn.outvars[0].aval) * math.prod(lhs.shape[dim] for dim in contracted)
    return flops // max(groups.shape[-1], 1) if set(numbers.lhs_ragged_dimensions) & set(contracted) else flops


def manual_devices(params: Any) -> int:
    """Return the number of devices over which a `shard_map` with these parameters shards its arrays."""
    return math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])


def _size(aval: Any) -> int:
    return math.prod(getattr(aval, "shape", ()))
