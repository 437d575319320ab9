"""Checks of a pipeline's arguments and of the traced functions of its stack, with errors that state the remedy."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from ...core import BATCH_AXES, CONTEXT, ConfigError, LayerStack, StructureError, check_choice, is_count
from ...jaxprs import Kind, bodies, equations, kind_of, source_line, walk
from ..schedules import Schedule, tables

_PROGRAM_ORDER_FLAG = "xla_cpu_enable_concurrency_optimized_scheduler"
"""XLA flag that, when false, makes CPU devices run collectives in program order (jaxlib 0.10)."""


def refuse_other_mesh(schedule: Schedule, mesh: Mesh, axis: str, batch_axes: Sequence[str] | None) -> None:
    """Raise for a mesh that lacks an axis, or has axes of another size or type."""
    if axis not in mesh.shape:
        raise ConfigError(
            f"the mesh has no axis {axis!r}",
            expected=" or ".join(map(repr, mesh.shape)),
            got=repr(axis),
            hint=f'pass axis="{next(iter(mesh.shape), "stage")}", or another mesh',
        )
    if mesh.shape[axis] != schedule.num_ranks:
        raise ConfigError(
            f"{schedule.name}: the schedule is for another number of devices",
            expected=f"{schedule.num_ranks} devices along {axis!r}",
            got=mesh.shape[axis],
            hint="set num_stages of the schedule to ranks times stages per rank",
        )
    if mesh.shape.get(CONTEXT, 1) > 1:
        raise ConfigError(
            f"a pipeline cannot shard the tokens of a row along an axis {CONTEXT!r} yet",
            expected="other axes in addition to its own, such as fsdp and tensor",
            got=" × ".join(f"{name} {size}" for name, size in mesh.shape.items()),
            hint=f"for long rows use make_mesh({CONTEXT}=..., fsdp=...) without a pipeline; else drop axis {CONTEXT!r}",
        )
    if any(kind is not AxisType.Auto for kind in mesh.axis_types):
        raise ConfigError(
            "the mesh has explicit or manual axes",
            expected="axes along which the compiler shards arrays automatically (AxisType.Auto)",
            got=", ".join(map(str, mesh.axis_types)),
            hint="use lowtide.train.make_mesh(stage=...), or jax.sharding.Mesh(mesh.devices, mesh.axis_names)",
        )
    for index, batch_axis in enumerate(batch_axes or ()):
        if batch_axis not in mesh.shape or batch_axis == axis or batch_axis in list(batch_axes or ())[:index]:
            raise ConfigError(
                f"batch_axes: rows cannot be sharded along {batch_axis!r}",
                expected=" or ".join(repr(candidate) for candidate in mesh.shape if candidate != axis) or "no axis",
                got=", ".join(map(repr, batch_axes or ())),
                hint=f"leave it out to shard rows along {', '.join(BATCH_AXES[:-1])} and {BATCH_AXES[-1]}",
            )


def refuse_unused_limit(schedule: Schedule, memory_limit: int | None) -> None:
    """Raise for a memory limit of 0, or a limit for a schedule that is already made."""
    if memory_limit is None:
        return
    if memory_limit < 1:
        raise ConfigError(
            "memory_limit is less than 1 byte",
            expected="a positive number of bytes",
            got=memory_limit,
            hint='pass memory_limit="4 GiB", or None',
        )
    if schedule.remake is None or schedule.remake.memory_limit is not None:
        raise ConfigError(
            f"memory_limit cannot change {schedule.name}, which is already made",
            expected='lt.pipeline.schedule("auto", ...) without costs and without a memory_limit of its own',
            got=repr(schedule),
            hint="pass it here or to lt.pipeline.schedule, where its unit is one microbatch's residuals in a stage",
        )


def refuse_other_inputs(inputs: str, remat: Any) -> None:
    """Raise for an unknown memory of block inputs, or for inputs on the host without recomputation."""
    check_choice(
        f"unknown memory {inputs!r} for the inputs of blocks",
        inputs,
        ("device", "host"),
        'pass inputs="host" to keep them in host memory until the backward pass',
    )
    if inputs == "host" and remat is False:
        raise ConfigError(
            'inputs="host" contradicts remat=False, which keeps all residuals of blocks on the device',
            expected="blocks that are recomputed from their inputs",
            got="remat=False",
            hint="pass remat=True, or a policy of jax.checkpoint; values that it saves stay on the device",
        )


def refuse_other_stages(schedule: Schedule, layers_per_stage: Sequence[int] | None) -> None:
    """Raise for stages that one program cannot run."""
    if layers_per_stage is not None and len(layers_per_stage) != schedule.num_stages:
        raise ConfigError(
            "layers_per_stage does not fit the schedule",
            expected=f"{schedule.num_stages} numbers",
            got=f"{len(layers_per_stage)}",
            hint="leave it out to distribute the layers as evenly as possible",
        )
    if len({len(schedule.stages_of(rank)) for rank in range(schedule.num_ranks)}) > 1:
        raise ConfigError(
            f"{schedule.name}: ranks have different numbers of stages",
            expected=f"{schedule.stages_per_rank} on each rank",
            got=", ".join(str(len(schedule.stages_of(rank))) for rank in range(schedule.num_ranks)),
            hint="give every rank the same number of stages; with layers_per_stage a stage may have 0 layers",
        )
    tables(schedule, [1] * schedule.num_stages)  # raises for consecutive stages on ranks that are not neighbours


def refuse_undivided_calls(name: str, jaxpr: Any, platform: str) -> None:
    """Raise for calls that JAX cannot lower on a mesh with automatic axes; JAX's error has no source line."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = [axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind is AxisType.Auto]
    match = next(_undivided_calls(jaxpr, axes, platform), None)
    if match is None:
        return
    call_name, location, auto_axes = match
    raise StructureError(
        f"{name}: {call_name}{location and f' at {location}'} cannot run in a pipeline whose mesh has other axes",
        expected=f"a mesh with only the pipeline's axis, or a call in a jax.shard_map over {', '.join(auto_axes)}",
        got="a call whose arrays the compiler shards",
        hint="wrap the call: jax.shard_map(call, in_specs=P(), out_specs=P(), "
        f"axis_names={{{', '.join(map(repr, axes))}}})(x), with P({auto_axes[0]!r}) for sharded rows; for a call with "
        "a custom_vjp, wrap the function that has it",
    )


_COLLECTIVES = {
    *("psum", "psum_invariant", "psum_start", "psum_invariant_start", "unreduced_psum", "unreduced_psum_start"),
    *("pmax", "pmin", "ppermute", "ppermute_start", "psend", "precv", "pbroadcast", "pbroadcast_start", "pgather"),
    *("all_gather", "all_gather_start", "all_gather_invariant", "all_gather_reduced", "all_gather_reduced_start"),
    *("reduce_scatter", "reduce_scatter_start", "unreduced_reduce_scatter", "all_to_all", "all_to_all_start"),
    "ragged_all_to_all",
}


def refuse_collectives(name: str, jaxpr: Any, axis: str) -> None:
    """Raise for collectives along the pipeline's axis, or that some devices do not reach: others would wait forever.

    `name` is the name of the function of the stack.
    """
    for eqn, location in _with_source_lines(jaxpr):
        collective = eqn.primitive.name
        if kind_of(eqn) is Kind.SHARD_MAP:
            specs = (*eqn.params["in_specs"], *eqn.params["out_specs"])
            if any(axis in (entry if isinstance(entry, tuple) else (entry,)) for spec in specs for entry in spec):
                raise _spec_error(axis, location, f"one of {', '.join(map(str, specs))}")
        if axis in _collective_axes(eqn):
            raise StructureError(
                f"{name}: {collective} runs along {axis!r}{location and f' at {location}'}, the axis of the pipeline",
                expected="collectives along other axes of the mesh",
                got="a collective that would wait for ranks that run other passes, or none, in the same tick",
                hint="pass values between stages as leaves of h; for a sum over layers, let blocks add to a leaf of h",
            )
    for operation, axes, location in _divergent_branches(jaxpr):
        raise StructureError(
            f"{name}: {operation}{location and f' at {location}'} is decided separately by each device "
            f"along {', '.join(axes)}, and contains collectives along it",
            expected="one decision for all devices that wait for each other",
            got="a predicate that varies along the axis of a collective inside of it, or inside of its gradient",
            hint=f"decide for all devices, for instance by jax.lax.psum(score, {axes[0]!r}) > 0; or pass replicated "
            f"weights as jax.lax.pcast(w, {axes[0]!r}, to='varying'), whose gradients are summed outside",
        )


def translate_error(error: Exception, mesh: Any, axis: str) -> StructureError | None:
    """Translate JAX's error about a `shard_map` or a collective in a function of the stack; None if not recognised.

    JAX's messages are recognised by their wording in 0.10.2 and 0.12.0.
    """
    text = str(error)
    other_axes = [name for name in mesh.axis_names if name != axis]
    available = ", ".join(map(repr, other_axes)) or "none"
    unbound = re.search(r"unbound axis name: (\w+)", text) if isinstance(error, NameError) else None
    if unbound and unbound[1] in other_axes:
        return StructureError(
            f"a function of the stack has a collective along {unbound[1]!r} outside of a shard_map over it",
            expected="jax.shard_map around it, because the compiler shards arrays along all axes but the pipeline's",
            got=text,
            hint=f"call jax.shard_map(part, in_specs=..., out_specs=..., axis_names={{{unbound[1]!r}}})(h, weights)",
        )
    axis_match = re.search(r"refers to '(\w+)'", text) or re.search(r"axis_names=frozenset\(\{(.*?)\}\) to be", text)
    is_shard_map_error = isinstance(error, ValueError) and "shard_map" in text
    names = [unbound[1]] if unbound else re.findall(r"\w+", axis_match[1]) if axis_match and is_shard_map_error else []
    if axis in names:
        return _spec_error(axis, "", text.splitlines()[0])
    missing = [name for name in names if name not in other_axes]
    if missing:
        return StructureError(
            f"a function of the stack names an axis that the mesh does not have: {', '.join(missing)}",
            expected=f"axes of the mesh other than {axis!r}: {available}",
            got=text.splitlines()[0],
            hint=f"use make_mesh({axis}=..., {missing[0]}=...), or another name in the function"
            if missing[0] in ("data", "fsdp", "expert", "tensor")
            else "name an axis of the mesh, or add the axis: jax.sharding.Mesh(devices, axis_names)",
        )
    if isinstance(error, ValueError) and "should match the mesh passed to shard_map" in text:
        return StructureError(
            "a function of the stack passes its own mesh to jax.shard_map",
            expected=f"no mesh: the pipeline traces the function in a shard_map over {axis!r}, whose mesh it uses",
            got=text,
            hint="leave mesh= out: jax.shard_map(part, in_specs=..., out_specs=..., axis_names=...); without a "
            "pipeline, call the function under jax.set_mesh(mesh)",
        )
    if isinstance(error, TypeError) and re.search(rf"V:[^}}]*\b{re.escape(axis)}\b", text):
        return _spec_error(axis, "", text.splitlines()[0])
    return None


def _spec_error(axis: str, location: str, got: str) -> StructureError:
    return StructureError(
        f"a jax.shard_map{location and f' at {location}'} shards an array along {axis!r}, the axis of the pipeline",
        expected="in_specs and out_specs with other axes of the mesh",
        got=got,
        hint=f"leave {axis!r} out of them: a block receives only the arrays of its own stage",
    )


def _with_source_lines(jaxpr: Any) -> Iterator[tuple[Any, str]]:
    """Yield all operations with their source lines; one without a line gets that of the enclosing operation."""
    for eqn, enclosing_line in walk(jaxpr, "", lambda eqn, _, enclosing_line: source_line(eqn) or enclosing_line):
        yield eqn, source_line(eqn) or enclosing_line


def _collective_axes(eqn: Any) -> tuple[Any, ...]:
    """Return the axes of a collective; empty for other operations."""
    if eqn.primitive.name not in _COLLECTIVES:
        return ()
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return axes if isinstance(axes, tuple) else (axes,)


def _divergent_branches(jaxpr: Any) -> Iterator[tuple[str, list[str], str]]:
    """Yield branches and loops whose predicate varies along an axis of a collective inside them."""
    for eqn, location in _with_source_lines(jaxpr):
        kind = kind_of(eqn)
        if kind in (Kind.BRANCH, Kind.WHILE):
            predicate = eqn.invars[0] if kind is Kind.BRANCH else eqn.params["cond_jaxpr"].jaxpr.outvars[0]
            varying = predicate.aval.manual_axis_type.varying
            axes = {axis for body in bodies(eqn) for inner in equations(body.jaxpr) for axis in _collective_axes(inner)}
            if varying & axes:
                yield eqn.primitive.name, sorted(varying & axes), location


def _undivided_calls(jaxpr: Any, axes: Sequence[str], platform: str) -> Iterator[tuple[str, str, Sequence[str]]]:
    """Yield calls of foreign code, their lines, and the automatic axes of the mesh around them."""

    def enter(eqn: Any, _: Any, context: tuple[Sequence[str], str]) -> tuple[Sequence[str], str]:
        axes, location = context
        manual_axes = eqn.params["newly_manual_axes"] if kind_of(eqn) is Kind.SHARD_MAP else ()
        is_kernel_body = kind_of(eqn) is Kind.KERNEL
        remaining_axes = () if is_kernel_body else [axis for axis in axes if axis not in manual_axes]
        return remaining_axes, source_line(eqn) or location

    for eqn, (remaining_axes, context) in walk(jaxpr, (axes, ""), enter):
        is_kernel = kind_of(eqn) is Kind.KERNEL and platform == "tpu" and not eqn.params["interpret"]
        if remaining_axes and (is_kernel or eqn.primitive.name == "pure_callback"):
            call_name = "pallas_call" if is_kernel else "jax.pure_callback"
            yield call_name, source_line(eqn) or context, remaining_axes


def warn_of_deadlock(mesh: Mesh, axis: str) -> None:
    """Warn that XLA's CPU client may start collectives of several axes in different orders and abort the process."""
    is_exposed = mesh.size > mesh.shape[axis] > 1 and mesh.devices.flat[0].platform == "cpu"
    if is_exposed and _PROGRAM_ORDER_FLAG not in os.environ.get("XLA_FLAGS", ""):
        warnings.warn(
            f"collectives of a pipeline along {axis!r} and along other axes of the mesh may deadlock on a CPU, "
            f"until XLA aborts the process\nhint: set XLA_FLAGS=--{_PROGRAM_ORDER_FLAG}=false before JAX starts",
            stacklevel=3,
        )


def refuse_wrong_types(
    stack: Any,
    schedule: Any,
    mesh: Any,
    axis: Any,
    weight: Any,
    remat: Any,
    layers_per_stage: Any,
    batch_axes: Any,
    memory_limit: Any,
) -> None:
    """Raise for arguments of `value_and_grad` of the wrong type."""
    if not isinstance(stack, LayerStack):
        raise StructureError(
            "a pipeline needs a model as a stack of equal blocks",
            expected="a lowtide.LayerStack",
            got=type(stack).__name__,
            hint="make one from three functions: LayerStack(first, block, last)",
        )

    def is_numbers(value: Any) -> bool:
        return isinstance(value, Sequence | np.ndarray) and all(isinstance(item, int | np.integer) for item in value)

    def is_names(value: Any) -> bool:
        return (
            isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(item, str) for item in value)
        )

    checks = [
        (
            isinstance(schedule, Schedule),
            ("schedule is not a Schedule", "a lowtide.pipeline.Schedule", schedule),
            'make one with lt.pipeline.schedule("zb-h1", num_stages=4, num_microbatches=16)',
        ),
        (
            isinstance(mesh, Mesh),
            ("mesh is not a mesh of devices", "a jax.sharding.Mesh", mesh),
            "make one with lowtide.train.make_mesh(stage=4)",
        ),
        (
            isinstance(axis, str),
            ("axis is not a name", "the name of one axis of the mesh", axis),
            'pass axis="stage"',
        ),
        (
            weight is None or callable(weight),
            ("weight is not a function", "a function of a microbatch, or None", weight),
            'pass weight=lambda batch: jnp.sum(batch["labels"] >= 0)',
        ),
        (
            isinstance(remat, bool) or callable(remat),
            ("remat is neither a boolean nor a policy", "a boolean or a policy of jax.checkpoint", remat),
            "pass remat=jax.checkpoint_policies.dots_saveable",
        ),
        (
            layers_per_stage is None or is_numbers(layers_per_stage),
            ("layers_per_stage is not a list of numbers", "a number of layers for every stage", layers_per_stage),
            "leave it out to distribute the layers as evenly as possible",
        ),
        (
            batch_axes is None or is_names(batch_axes),
            ("batch_axes is not a list of names", "names of axes", batch_axes),
            f"pass batch_axes=[{batch_axes!r}]" if isinstance(batch_axes, str) else 'pass batch_axes=["fsdp"]',
        ),
        (
            memory_limit is None or isinstance(memory_limit, str) or is_count(memory_limit, 0),
            ("memory_limit is not a size", "a whole number of bytes, or text", memory_limit),
            'pass memory_limit="4 GiB", or None',
        ),
    ]
    for is_right, (message, expected, got), hint in checks:
        if not is_right:
            raise ConfigError(message, expected=expected, got=repr(got), hint=hint)
