"""Checks of the arguments of a pipeline, with errors that state the remedy."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh

from ...core import BATCH_AXES, CONTEXT, ConfigError, LayerStack, StructureError, check_choice, is_count
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
