"""Operations that hold jaxprs: which parameter has them, what their inputs are, how often they run.

The one table of the house, and how it is read: `walk` for what an operation is and where it stands, `fold` for what
values are. Whoever needs a rule of its own for a kind of operation keeps it, and asks here what is of that kind.

| kind | inputs of the jaxprs inside | their outputs |
|---|---|---|
| call, remat, custom derivative | the operands | the results |
| branch | the operands behind the first, which chooses | the results |
| scan | the operands: constants, carry, and of stacked ones a slice | the results; of stacked ones a slice |
| while | of the condition and of the body their constants each, then the carry | whether to go on; the carry |
| choice | the operands | the results, of each of two jaxprs alike, of which the second is shown here |
| `shard_map` | each device's part of the operands | its part of the results |
| kernel | references, for each point of a grid | none |
| scalar | two numbers, which it adds up, compares or replaces | one number |
| opaque | none that anybody sees: it has rules of its own | |
| other: everything that is not in the table and holds a jaxpr | unknown | unknown |
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from jax.extend import core as jex

from ._versions import close, consts_of, is_jaxpr, opened, scan_counts, with_jaxprs

Context = TypeVar("Context")
Known = TypeVar("Known")


class Kind(enum.Enum):
    """What an operation does with the jaxprs that it holds."""

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
        """Whether differentiation replaces it by code that its jaxpr does not show."""
        return self in (Kind.CUSTOM_JVP, Kind.CUSTOM_VJP)

    @property
    def only_groups(self) -> bool:
        """Whether it computes what its one jaxpr does, once, from the same operands."""
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
    "cond": (Kind.BRANCH, ("branches",)),
    "scan": (Kind.SCAN, ("jaxpr",)),
    "while": (Kind.WHILE, ("cond_jaxpr", "body_jaxpr")),
    "on_one_device": (Kind.CHOICE, ("among",)),
    "shard_map": (Kind.SHARD_MAP, ("jaxpr",)),
    "pallas_call": (Kind.KERNEL, ("jaxpr",)),
    "call_hi_primitive": (Kind.OPAQUE, ()),
}
"""Operations by the names of all versions: their kind, and which parameters hold their jaxprs."""

_SCALAR = ("scatter", "reduce", "select_and")
"""What operations are called whose jaxpr is of two numbers."""


@dataclasses.dataclass(frozen=True)
class Body:
    """A jaxpr inside of an operation."""

    jaxpr: Any
    """As the operation holds it, open or closed."""
    reads: tuple[int, ...] | None
    """For each of its inputs the operand that it is, or a part of; None where that is not so, or nobody knows."""
    carried: range = range(0)
    """Its inputs that are operands in the first iteration alone, and then what the one before gave."""
    times: int = 1
    """How often it runs on one device for each run of the operation; a `while` loop counts once."""


def kind_of(eqn: Any) -> Kind | None:
    """Return what an operation does with the jaxprs that it holds; None when it holds none."""
    name = eqn.primitive.name
    if name in PRIMITIVES:
        return PRIMITIVES[name][0]
    if next(_jaxprs(tuple(eqn.params.values())), None) is None:
        return None
    return Kind.SCALAR if name.startswith(_SCALAR) else Kind.OTHER


def called(eqn: Any) -> Any:
    """Return the jaxpr of an operation that only groups others, as it holds it; None of any other operation."""
    kind, names = PRIMITIVES.get(eqn.primitive.name, (Kind.OTHER, ()))
    return eqn.params[names[0]] if kind.only_groups else None


def bodies(eqn: Any) -> list[Body]:
    """List the jaxprs inside of an operation, in order; none is left out of an operation that nobody knows."""
    params, operands = eqn.params, tuple(range(len(eqn.invars)))
    kind, names = PRIMITIVES.get(eqn.primitive.name, (Kind.OTHER, ()))
    held = list(_jaxprs(tuple(params[name] for name in names or params)))
    if kind is Kind.BRANCH:
        return [Body(one, operands[1:]) for one in held]
    if kind is Kind.SCAN:
        consts, carry = scan_counts(params)
        return [Body(held[0], operands, range(consts, consts + carry), params["length"])]
    if kind is Kind.WHILE:
        first, second = params["cond_nconsts"], params["body_nconsts"]
        own = (operands[:first], operands[first : first + second])
        carry = operands[first + second :]
        return [
            Body(one, (*consts, *carry), range(len(consts), len(consts) + len(carry)))
            for one, consts in zip(held, own, strict=True)
        ]
    if kind is Kind.KERNEL:
        grid = getattr(params.get("grid_mapping"), "grid", ())
        return [Body(one, None, times=math.prod(n for n in grid if isinstance(n, int))) for one in held]
    return [Body(one, operands if names else None) for one in held]


def with_bodies(eqn: Any, change: Callable[[Body], Any]) -> Any:
    """Put other jaxprs inside of an operation.

    Args:
        eqn: the operation.
        change: gives the jaxpr that takes the place of a body's, of the same inputs and outputs.
    """
    by_id = {id(body.jaxpr): body for body in bodies(eqn)}
    return with_jaxprs(eqn, lambda jaxpr: change(by_id[id(jaxpr)]) if id(jaxpr) in by_id else jaxpr)


def equations(jaxpr: Any) -> Iterator[Any]:
    """All operations of a jaxpr and of those inside, in program order."""
    return (eqn for eqn, _ in walk(jaxpr, None, lambda *_: None))


def walk(jaxpr: Any, context: Context, enter: Callable[[Any, Body, Context], Context]) -> Iterator[tuple[Any, Context]]:
    """All operations of a jaxpr and of those inside, in program order, each with what is known of where it stands.

    Args:
        jaxpr: open or closed.
        context: of its own operations.
        enter: ``enter(eqn, body, context)``: the context inside of a body of an operation, given the operation's.

    Yields:
        Operations, and their contexts.
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
    """Something about every value of a jaxpr, from its inputs to its outputs.

    Args:
        jaxpr: open or closed; what is inside of its operations is left to `apply`, as by folding it.
        inputs: of each input what is to be known.
        apply: ``apply(eqn, operands)``: of each result of an operation, given its operands.
        known: ``known(var, value)``: of a literal or a constant; the value is None of constants that are not there.

    Returns:
        Of each output.
    """
    inner = opened(jaxpr)
    held = consts_of(jaxpr) or [None] * len(inner.constvars)
    of = {var: known(var, value) for var, value in zip(inner.constvars, held, strict=True)}
    of.update(zip(inner.invars, inputs, strict=True))

    def read(var: Any) -> Known:
        return known(var, var.val) if isinstance(var, jex.Literal) else of[var]

    for eqn in inner.eqns:
        of.update(zip(eqn.outvars, apply(eqn, [read(var) for var in eqn.invars]), strict=True))
    return [read(var) for var in inner.outvars]


def runner(eqn: Any) -> Callable[..., Sequence[Any]]:
    """Return an operation as a function of all that it reads; literals are put in again by its jaxpr."""
    variables = list(dict.fromkeys(var for var in eqn.invars if isinstance(var, jex.Var)))
    at = [next(i for i, var in enumerate(eqn.invars) if var is variable) for variable in variables]
    results = [var for var in eqn.outvars if not isinstance(var, jex.DropVar)]

    def run(*values: Any) -> Sequence[Any]:
        jaxpr = jex.Jaxpr([], variables, results, [eqn], eqn.effects, _DEBUG_INFO)
        found = iter(jex.jaxpr_as_fun(close(jaxpr))(*(values[i] for i in at)))
        return [None if isinstance(var, jex.DropVar) else next(found) for var in eqn.outvars]

    return run


def variables_read(jaxpr: Any) -> set[Any]:
    """Return the variables that an operation reads, or that are an output, in a jaxpr and in those inside."""
    inner = opened(jaxpr)
    groups = [*(eqn.invars for eqn in inner.eqns), inner.outvars]
    read = {var for group in groups for var in group if isinstance(var, jex.Var)}
    return read.union(*(variables_read(body.jaxpr) for eqn in inner.eqns for body in bodies(eqn)))


def _jaxprs(value: Any) -> Iterator[Any]:
    """List the jaxprs in a parameter, and in tuples there; JAX allows no other containers."""
    if is_jaxpr(value):
        yield value
    elif isinstance(value, tuple):
        for one in value:
            yield from _jaxprs(one)


_DEBUG_INFO = jex.DebugInfo("lowtide", "one operation", None, None)
