"""Lint rules on the traced function: checkpoint names, constants, multiplied-out adapters, duplicated averages."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from ...core import format_bytes, is_own_name, leaf_bytes
from ...jaxprs import bodies, consts_of, equations, fold, kind_of, opened, policy_names, saves_name, source_line, walk
from .._owners import Owners
from ._finding import Finding, of_leaf

# --- names ---------------------------------------------------------------------------------------------------------


def unmatched_names(jaxpr: Any) -> Iterator[Finding]:
    """Find names in a policy that no `checkpoint_name` gives; the policy has no effect for a misspelt name."""
    tags, policies = _names(jaxpr)
    known = set[str]().union(*(names for _, names in policies))
    missed = {name: size for name, size in tags.items() if name not in known}
    for name in sorted(known - set(tags)):
        listed = ", ".join(f"{tag} ({format_bytes(size)})" for tag, size in sorted(missed.items())) or "none"
        yield Finding(
            rule="checkpoint-name-unmatched",
            path=name,
            num_bytes=sum(missed.values()),
            detail=f"names that are given and not asked for: {listed}",
            remedy="spell the name as in jax.ad_checkpoint.checkpoint_name, or remove it from the policy",
        )


def unused_names(jaxpr: Any) -> Iterator[Finding]:
    """Find names that no policy requests or saves, so that their values are recomputed.

    If no policy requests a name, only names inside `jax.checkpoint` count. Elsewhere a library gives names for an
    optional policy, and they have no effect.
    """
    tags, policies = _names(jaxpr)
    asked = {name for _, names in policies for name, is_saved in names.items() if is_saved}
    known = asked.union(*(names for _, names in policies))
    unused = {tag for tag in tags if tag not in known and not any(saves_name(policy, tag) for policy, _ in policies)}
    if not asked:
        unused &= {e.params["name"] for e in _recomputed_equations(jaxpr) if e.primitive.name == "name"}
    # If policies request only names that do not exist, `unmatched_names` reports them instead.
    if unused and (not asked or asked & set(tags)):
        yield Finding(
            rule="checkpoint-name-unused",
            path=", ".join(sorted(unused)),
            num_bytes=sum(tags[tag] for tag in unused),
            detail=f"names that policies ask for: {', '.join(sorted(asked)) or 'none'}; the others are recomputed",
            remedy="name it in the policy to keep or offload it, or leave it: recomputing costs time, no bytes",
        )


def _recomputed_equations(jaxpr: Any) -> Iterator[Any]:
    """Yield the equations inside `jax.checkpoint`."""
    for equation in equations(jaxpr):
        if "policy" in equation.params:
            for body in bodies(equation):
                yield from equations(body.jaxpr)


def _names(jaxpr: Any) -> tuple[dict[str, int], list[tuple[Any, dict[str, bool]]]]:
    """Return the bytes of each `checkpoint_name`, and each policy with the names that it mentions."""
    tags, policies = dict[str, int](), dict[int, Any]()
    for equation, runs in with_runs(jaxpr):
        if equation.primitive.name == "name" and not is_own_name(equation.params["name"]):
            name = equation.params["name"]
            tags[name] = max(tags.get(name, 0), runs * sum(leaf_bytes(v.aval) for v in equation.outvars))
        elif "policy" in equation.params and equation.params["policy"] is not None:
            policies[id(equation.params["policy"])] = equation.params["policy"]
    known = [(policy, policy_names(policy)) for policy in policies.values()]
    return tags, [(policy, names) for policy, names in known if not names or not all(map(is_own_name, names))]


def with_runs(jaxpr: Any) -> Iterator[tuple[Any, int]]:
    """Yield all equations of a jaxpr and of its inner jaxprs, each with the number of its runs."""
    return walk(jaxpr, 1, lambda _, body, runs: runs * body.times)


def casts(jaxpr: Any) -> set[str]:
    """Return XLA's names of the types that the function casts to, or that its arguments have."""
    made = {
        str(v.aval.dtype) for e in equations(jaxpr) if e.primitive.name == "convert_element_type" for v in e.outvars
    }
    given = {str(variable.aval.dtype) for variable in jaxpr.jaxpr.invars if hasattr(variable.aval, "dtype")}
    return {name.replace("bfloat", "bf").replace("float", "f").replace("_", "") for name in made | given}


# --- constants -----------------------------------------------------------------------------------------------------


def constants(jaxpr: Any) -> Iterator[Finding]:
    """Find the arrays that the function closes over."""
    found = {id(array): array for array in _constants(jaxpr) if hasattr(array, "shape") and hasattr(array, "dtype")}
    for array in found.values():
        yield Finding(
            rule="large-constant",
            path=f"{array.dtype}{list(array.shape)}",
            num_bytes=leaf_bytes(array),
            remedy="pass it as an argument: the program holds a copy of its own, and so does every compile",
        )


def _constants(closed: Any) -> Iterator[Any]:
    yield from consts_of(closed)
    for equation in equations(closed):
        for body in bodies(equation):
            yield from consts_of(body.jaxpr)


# --- adapters ------------------------------------------------------------------------------------------------------


class _Known(NamedTuple):
    """Relation of a value to the step's arguments."""

    leaf: int | None = None
    """Argument of which the value is a copy, a cast or a part; for a product, that of the first factor."""
    inner: int | None = None
    """Size of the summed axes, for a product of two arguments."""


_MOVES = {"convert_element_type", "transpose", "squeeze", "reshape", "copy", "slice", "dynamic_slice", "neg", "mul"}
"""Operations whose result contains the data of one operand; ``mul`` counts as a product with a number."""


def multiplied_out(jaxpr: Any, owners: Owners) -> Iterator[Finding]:
    """Find sums of a weight and a product of two thin matrices, W + B A, if all three are arguments."""
    inner = jaxpr.jaxpr
    if len(inner.invars) != len(owners.leaves):
        return
    found: dict[int, Any] = {}

    def apply(eqn: Any, operands: list[_Known]) -> list[_Known]:
        name, shape = eqn.primitive.name, getattr(eqn.outvars[0].aval, "shape", ()) if eqn.outvars else ()
        if name == "dot_general" and all(known.leaf is not None and known.inner is None for known in operands):
            (of_left, _), _ = eqn.params["dimension_numbers"]
            summed = math.prod(eqn.invars[0].aval.shape[axis] for axis in of_left)
            return [_Known(operands[0].leaf, summed)]
        if name in ("add", "sub"):
            whole = next((known for known in operands if known.leaf is not None and known.inner is None), None)
            thin = next((known for known in operands if known.inner is not None), None)
            if whole and thin and thin.inner and len(shape) > 1 and 2 * thin.inner <= min(shape[-2:]):
                found.setdefault(whole.leaf or 0, eqn)
        if name in _MOVES:
            moved = [known for known in operands if known.leaf is not None]
            return [moved[0] if len(moved) == 1 else _Known()]
        kind, inside = kind_of(eqn), [_Known()] * len(eqn.outvars)
        for body in bodies(eqn):
            given = [_Known()] * len(opened(body.jaxpr).invars)
            if body.reads is not None:
                given = [
                    known if i not in body.carried else _Known()
                    for i, known in enumerate(map(operands.__getitem__, body.reads))
                ]
            results = fold(body.jaxpr, given, apply, lambda *_: _Known())
            inside = results if kind is not None and kind.only_groups else inside
        return inside

    fold(
        jaxpr,
        [_Known(at) if len(var.aval.shape) > 1 else _Known() for at, var in enumerate(inner.invars)],
        apply,
        lambda *_: _Known(),
    )
    for at, eqn in found.items():
        yield Finding(
            rule="adapter-multiplied-out",
            path=owners.leaves[at].path,
            num_bytes=leaf_bytes(eqn.outvars[0].aval),
            detail=f"{eqn.outvars[0].aval.str_short()} at {source_line(eqn) or 'an unknown line'}",
            remedy="multiply by one factor after the other, x W + (x A) B: lowtide.lora.add puts an adapter in the "
            "weight's place, and lowtide.adapted computes any function with it",
        )


# --- equal states --------------------------------------------------------------------------------------------------


def duplicated_averages(jaxpr: Any, owners: Owners) -> Iterator[Finding]:
    """Find states with equal update formulas that no pass reads, such as two averages of the same weights."""
    inner = jaxpr.jaxpr
    if len(inner.invars) != len(owners.leaves) or len(inner.outvars) != len(owners.outputs):
        return
    states = {
        at: owners.results[output]
        for output, at in owners.replaced.items()
        if not owners.dataflow.is_differentiated(at) and owners.dataflow.graph.is_floating(output)
    }
    formulas = _Formulas(inner, [inner.invars[at] for at in states])
    first: dict[int, int] = {}
    for at, output in sorted(states.items()):
        formula = formulas.of(inner.outvars[output])
        if formula is None:
            continue
        other = first.setdefault(formula, at)
        if other != at:
            yield of_leaf(
                "duplicated-average",
                owners.leaves[at],
                detail=f"as {owners.leaves[other].path}",
                remedy="keep one of the two, if they begin with the same values",
            )


class _Formulas:
    """Value numbering: variables with equal formulas have equal numbers.

    Args:
        jaxpr: the program; inner programs of loops and calls are compared as a whole.
        states: inputs that count as equal if their shapes and dtypes are equal.
    """

    def __init__(self, jaxpr: Any, states: list[Any]) -> None:
        self._numbers: dict[Any, int] = {var: hash(("state", str(var.aval))) for var in states}
        self._made = set(states)
        # In program order, so that even a long program needs no recursion.
        for equation in jaxpr.eqns:
            inputs = tuple(self._number(variable) for variable in equation.invars)
            params = tuple((key, _comparable(value)) for key, value in sorted(equation.params.items()))
            made = (equation.primitive.name, params, inputs)
            self._numbers.update({variable: hash((made, at)) for at, variable in enumerate(equation.outvars)})
            if any(not _is_literal(variable) and variable in self._made for variable in equation.invars):
                self._made.update(equation.outvars)

    def of(self, variable: Any) -> int | None:
        """Return the number of a variable's formula; None if the variable depends on no state."""
        return None if _is_literal(variable) or variable not in self._made else self._number(variable)

    def _number(self, variable: Any) -> int:
        if _is_literal(variable):
            return hash(("value", str(variable.val)))
        return self._numbers.get(variable, id(variable))


def _is_literal(variable: Any) -> bool:
    return hasattr(variable, "val")


def _comparable(value: Any) -> object:
    """Make a parameter of an operation comparable; inner programs by identity, since a jitted function has one."""
    if isinstance(value, (list, tuple)) and any(map(_is_program, value)):
        return tuple(map(id, value))
    return id(value) if _is_program(value) else str(value)


def _is_program(value: Any) -> bool:
    return hasattr(getattr(value, "jaxpr", value), "eqns")
