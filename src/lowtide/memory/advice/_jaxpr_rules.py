"""Lint rules that read the traced function: checkpoint names, constants, offloading, adapters, equal averages."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from ...core import LAYER_NAMES, format_bytes, is_own_name, leaf_bytes
from ...jaxprs import bodies, consts_of, equations, fold, kind_of, opened, policy_names, saves_name, source_line, walk
from ._findings import Finding, Step, leaf_finding, rule


@rule(
    {
        "checkpoint-name-unmatched": "a checkpoint policy contains a name that no checkpoint_name defines",
        "checkpoint-name-unused": "no checkpoint policy contains a name, although a policy contains others, or "
        "jax.checkpoint recomputes its value",
    },
    needs=("jaxpr",),
)
def _checkpoint_names(step: Step) -> Iterator[Finding]:
    """Find names that occur only in policies or only in calls of `checkpoint_name`."""
    tags, policies = _tags_and_policies(step.jaxpr)
    mentioned_names = set[str]().union(*(names for _, names in policies))
    # Names in no policy: a policy that misspells a name has no effect on it.
    unmatched_tags = {name: size for name, size in tags.items() if name not in mentioned_names}
    for name in sorted(mentioned_names - set(tags)):
        listing = ", ".join(f"{tag} ({format_bytes(size)})" for tag, size in sorted(unmatched_tags.items())) or "none"
        yield Finding(
            rule="checkpoint-name-unmatched",
            path=name,
            num_bytes=sum(unmatched_tags.values()),
            detail=f"names outside all policies: {listing}",
            remedy="write the name as in jax.ad_checkpoint.checkpoint_name, or remove it from the policy",
        )
    saved_names = {name for _, names in policies for name, is_saved in names.items() if is_saved}
    # Values are recomputed if no policy mentions or saves their name.
    unused_tags = {tag for tag in unmatched_tags if not any(saves_name(policy, tag) for policy, _ in policies)}
    unused_tags -= set(LAYER_NAMES)
    if not saved_names:
        # Only names inside `jax.checkpoint` count, since libraries name values for optional policies.
        checkpoints = (equation for equation in equations(step.jaxpr) if "policy" in equation.params)
        inner = (e for checkpoint in checkpoints for body in bodies(checkpoint) for e in equations(body.jaxpr))
        unused_tags &= {e.params["name"] for e in inner if e.primitive.name == "name"}
    # If policies request only names that do not exist, the findings above suffice.
    if unused_tags and (not saved_names or saved_names & set(tags)):
        yield Finding(
            rule="checkpoint-name-unused",
            path=", ".join(sorted(unused_tags)),
            num_bytes=sum(tags[tag] for tag in unused_tags),
            detail=f"names in policies: {', '.join(sorted(saved_names)) or 'none'}; "
            "values of other names are recomputed",
            remedy="add it to the policy to keep or offload it, or leave it: recomputation costs time, not memory",
        )


def _tags_and_policies(jaxpr: Any) -> tuple[dict[str, int], list[tuple[Any, dict[str, bool]]]]:
    """Return a map from checkpoint names to bytes, and pairs of a policy and its `policy_names`."""
    tags, policies = dict[str, int](), dict[int, Any]()
    for equation, runs in _with_runs(jaxpr):
        if equation.primitive.name == "name" and not is_own_name(name := equation.params["name"]):
            tags[name] = max(tags.get(name, 0), runs * sum(leaf_bytes(v.aval) for v in equation.outvars))
        elif "policy" in equation.params and equation.params["policy"] is not None:
            policies[id(equation.params["policy"])] = equation.params["policy"]
    named_policies = [(policy, policy_names(policy)) for policy in policies.values()]
    # Policies of Lowtide's own layers contain an internal name; they also contain names that a layer may lack.
    return tags, [(policy, names) for policy, names in named_policies if not any(map(is_own_name, names))]


def _with_runs(jaxpr: Any) -> Iterator[tuple[Any, int]]:
    """Yield all equations of a jaxpr and of its inner jaxprs, each with the number of its runs."""
    return walk(jaxpr, 1, lambda _, body, runs: runs * body.times)


def dtypes(jaxpr: Any) -> set[str]:
    """Return XLA's names of the dtypes of the function's arguments, and of the dtypes to which it casts."""
    casts = {str(e.outvars[0].aval.dtype) for e in equations(jaxpr) if e.primitive.name == "convert_element_type"}
    arguments = {str(variable.aval.dtype) for variable in jaxpr.jaxpr.invars if hasattr(variable.aval, "dtype")}
    return {name.replace("bfloat", "bf").replace("float", "f").replace("_", "") for name in casts | arguments}


@rule({"large-constant": "the function closes over a large array, which becomes part of the program"}, needs=("jaxpr",))
def _constants(step: Step) -> Iterator[Finding]:
    """Find the arrays that the function closes over."""
    jaxprs = [step.jaxpr, *(body.jaxpr for equation in equations(step.jaxpr) for body in bodies(equation))]
    values = [value for closed in jaxprs for value in consts_of(closed)]
    arrays = {id(value): value for value in values if hasattr(value, "shape") and hasattr(value, "dtype")}
    for array in arrays.values():
        yield Finding(
            rule="large-constant",
            path=f"{array.dtype}{list(array.shape)}",
            num_bytes=leaf_bytes(array),
            remedy="pass it as an argument: the program holds its own copy, and so does every compilation",
        )


@rule({"offload-moved-nothing": "the step offloads values, but host memory holds none"}, needs=("jaxpr",))
def _unused_offload(step: Step) -> Iterator[Finding]:
    if step.report.host_bytes or step.report.target.platform == "cpu":
        return  # a CPU has one memory, so missing host bytes prove nothing
    offloaded_bytes = 0
    for equation, runs in _with_runs(step.jaxpr):
        if equation.primitive.name == "device_put":
            host_variables = [v for v in equation.outvars if "host" in str(getattr(v.aval, "memory_space", "")).lower()]
            offloaded_bytes += runs * sum(leaf_bytes(v.aval) for v in host_variables)
    if offloaded_bytes:
        yield Finding(
            rule="offload-moved-nothing",
            path="device_put to host memory",
            num_bytes=offloaded_bytes,
            detail="the compiled program uses no host memory",
            remedy="check the names in the offload policy, and check that the values are read again later",
        )


class _Origin(NamedTuple):
    """Relation of a value to the step's arguments."""

    leaf: int | None = None
    """Index of the argument that the value copies, casts or slices; for a product, the first factor's argument."""
    inner_dim: int | None = None
    """For a product of two arguments, the size of the summed axes; else None."""


_MOVES = {"convert_element_type", "transpose", "squeeze", "reshape", "copy", "slice", "dynamic_slice", "neg", "mul"}
"""Operations whose result contains the data of one operand; ``mul`` is assumed to multiply by a number."""


@rule(
    {"adapter-multiplied-out": "a low-rank correction is added to its weight, so a second copy of the weight exists"},
    needs=("jaxpr", "owners"),
)
def _multiplied_out(step: Step) -> Iterator[Finding]:
    """Find sums of a weight and a product of two thin matrices, W + B A, if all three are arguments."""
    open_jaxpr, owners = step.jaxpr.jaxpr, step.owners
    if len(open_jaxpr.invars) != len(owners.leaves):
        return
    equations_by_leaf: dict[int, Any] = {}

    def apply(eqn: Any, operands: list[_Origin]) -> list[_Origin]:
        name, shape = eqn.primitive.name, getattr(eqn.outvars[0].aval, "shape", ()) if eqn.outvars else ()
        if name == "dot_general" and all(origin.leaf is not None and origin.inner_dim is None for origin in operands):
            (left_axes, _), _ = eqn.params["dimension_numbers"]
            inner_dim = math.prod(eqn.invars[0].aval.shape[axis] for axis in left_axes)
            return [_Origin(operands[0].leaf, inner_dim)]
        if name in ("add", "sub"):
            weight = next((origin for origin in operands if origin.leaf is not None and origin.inner_dim is None), None)
            product = next((origin for origin in operands if origin.inner_dim is not None), None)
            if weight and product and product.inner_dim and len(shape) > 1 and 2 * product.inner_dim <= min(shape[-2:]):
                equations_by_leaf.setdefault(weight.leaf or 0, eqn)
        if name in _MOVES:
            moved_origins = [origin for origin in operands if origin.leaf is not None]
            return [moved_origins[0] if len(moved_origins) == 1 else _Origin()]
        kind, outputs = kind_of(eqn), [_Origin()] * len(eqn.outvars)
        for body in bodies(eqn):
            if body.reads is None:
                inputs = [_Origin()] * len(opened(body.jaxpr).invars)
            else:
                inputs = [_Origin() if i in body.carried else operands[read] for i, read in enumerate(body.reads)]
            results = fold(body.jaxpr, inputs, apply, lambda *_: _Origin())
            outputs = results if kind is not None and kind.only_groups else outputs
        return outputs

    inputs = [_Origin(index) if len(var.aval.shape) > 1 else _Origin() for index, var in enumerate(open_jaxpr.invars)]
    fold(step.jaxpr, inputs, apply, lambda *_: _Origin())
    for index, eqn in equations_by_leaf.items():
        yield Finding(
            rule="adapter-multiplied-out",
            path=owners.leaves[index].path,
            num_bytes=leaf_bytes(eqn.outvars[0].aval),
            detail=f"{eqn.outvars[0].aval.str_short()} at {source_line(eqn) or 'an unknown line'}",
            remedy="multiply by one factor after the other, x W + (x A) B: lowtide.lora.add replaces the weight with "
            "an adapter, and lowtide.adapted computes any function with it",
        )


@rule(
    {"duplicated-average": "two states of the step are updated in the same way from the same values"},
    needs=("jaxpr", "owners"),
)
def _duplicated_averages(step: Step) -> Iterator[Finding]:
    """Find states with equal update formulas that no gradient reads, such as two averages of the same weights."""
    open_jaxpr, owners = step.jaxpr.jaxpr, step.owners
    if len(open_jaxpr.invars) != len(owners.leaves) or len(open_jaxpr.outvars) != len(owners.outputs):
        return
    states = {
        index: owners.results[output]
        for output, index in owners.replaced.items()
        if not owners.dataflow.is_differentiated(index) and owners.dataflow.graph.is_floating(output)
    }
    formulas = _Formulas(open_jaxpr, [open_jaxpr.invars[index] for index in states])
    first_leaves: dict[int, int] = {}
    for index, output in sorted(states.items()):
        formula = formulas.number_of(open_jaxpr.outvars[output])
        first_index = index if formula is None else first_leaves.setdefault(formula, index)
        if first_index != index:
            yield leaf_finding(
                "duplicated-average",
                owners.leaves[index],
                detail=f"same update as {owners.leaves[first_index].path}",
                remedy="keep one of the two if both start with the same values",
            )


class _Formulas:
    """Value numbering: variables with equal formulas have equal numbers; `states` of one type count as equal."""

    def __init__(self, jaxpr: Any, states: list[Any]) -> None:
        self._numbers: dict[Any, int] = {var: hash(("state", str(var.aval))) for var in states}
        self._dependents = set(states)
        # Go through equations in program order: recursion would be too deep for a long program.
        for equation in jaxpr.eqns:
            inputs = tuple(self._number(variable) for variable in equation.invars)
            params = tuple((key, _comparable(value)) for key, value in sorted(equation.params.items()))
            formula = (equation.primitive.name, params, inputs)
            self._numbers.update({variable: hash((formula, index)) for index, variable in enumerate(equation.outvars)})
            if any(not _is_literal(variable) and variable in self._dependents for variable in equation.invars):
                self._dependents.update(equation.outvars)

    def number_of(self, variable: Any) -> int | None:
        """Return the number of a variable's formula; None if the variable depends on no state."""
        return None if _is_literal(variable) or variable not in self._dependents else self._number(variable)

    def _number(self, variable: Any) -> int:
        if _is_literal(variable):
            return hash(("value", str(variable.val)))
        return self._numbers.get(variable, id(variable))


def _is_literal(variable: Any) -> bool:
    return hasattr(variable, "val")


def _comparable(value: Any) -> object:
    """Make an operation's parameter comparable: a jaxpr becomes its id, since each jitted function has one jaxpr."""
    if isinstance(value, (list, tuple)) and any(map(_is_program, value)):
        return tuple(map(id, value))
    return id(value) if _is_program(value) else str(value)


def _is_program(value: Any) -> bool:
    return hasattr(getattr(value, "jaxpr", value), "eqns")
