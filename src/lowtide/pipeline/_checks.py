"""What a pipeline is not made of."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh

from ..core import ConfigError, LayerStack, StructureError
from ._schedule import Schedule
from ._tables import tables

_ONE_ORDER = "xla_cpu_enable_concurrency_optimized_scheduler"
"""XLA's flag that, when false, has CPU devices run collectives in the program's order (jaxlib 0.10)."""


def refuse_other_mesh(schedule: Schedule, mesh: Mesh, axis: str, batch_axes: Sequence[str] | None) -> None:
    """Raise for a mesh without the axes, or of other sizes or kinds."""
    if axis not in mesh.shape:
        raise ConfigError(
            f"the mesh has no axis {axis!r}",
            expected=" or ".join(map(repr, mesh.shape)),
            got=repr(axis),
            hint=f'axis="{next(iter(mesh.shape), "stage")}", or another mesh',
        )
    if mesh.shape[axis] != schedule.num_ranks:
        raise ConfigError(
            f"{schedule.name}: the schedule is for another mesh",
            expected=f"{schedule.num_ranks} devices along {axis!r}",
            got=mesh.shape[axis],
            hint="num_stages of a schedule is ranks times stages a rank",
        )
    if any(kind is not AxisType.Auto for kind in mesh.axis_types):
        raise ConfigError(
            "the mesh has explicit or manual axes",
            expected="axes along which the compiler divides arrays by itself (AxisType.Auto)",
            got=", ".join(map(str, mesh.axis_types)),
            hint="lowtide.train.make_mesh(stage=...), or jax.sharding.Mesh(mesh.devices, mesh.axis_names)",
        )
    for number, one in enumerate(batch_axes or ()):
        if one not in mesh.shape or one == axis or one in list(batch_axes or ())[:number]:
            raise ConfigError(
                f"batch_axes: rows cannot be divided along {one!r}",
                expected=" or ".join(repr(other) for other in mesh.shape if other != axis) or "no axis",
                got=", ".join(map(repr, batch_axes or ())),
                hint="leave it out to divide them along data and fsdp",
            )


def refuse_other_stages(schedule: Schedule, layers_per_stage: Sequence[int] | None) -> None:
    """Raise for stages that one program cannot have."""
    if layers_per_stage is not None and len(layers_per_stage) != schedule.num_stages:
        raise ConfigError(
            "layers_per_stage is not of this schedule",
            expected=f"{schedule.num_stages} numbers",
            got=f"{len(layers_per_stage)}",
            hint="leave it out to divide the layers as evenly as can be",
        )
    if len({len(schedule.stages_of(rank)) for rank in range(schedule.num_ranks)}) > 1:
        raise ConfigError(
            f"{schedule.name}: ranks have different numbers of stages",
            expected=f"{schedule.stages_per_rank} each",
            got=", ".join(str(len(schedule.stages_of(rank))) for rank in range(schedule.num_ranks)),
            hint="one program gives every rank room for as many layers; a stage may have none: layers_per_stage",
        )
    tables(schedule, [1] * schedule.num_stages)  # refuses stages that are no neighbours


def warn_of_waiting_forever(mesh: Mesh, axis: str) -> None:
    """XLA's CPU client may start collectives of several axes in another order on each device, and abort the process."""
    is_exposed = mesh.size > mesh.shape[axis] > 1 and mesh.devices.flat[0].platform == "cpu"
    if is_exposed and _ONE_ORDER not in os.environ.get("XLA_FLAGS", ""):
        warnings.warn(
            f"collectives of a pipeline along {axis!r} and of the mesh's other axes may wait for one another on a CPU, "
            f"until XLA aborts the process\nhint: XLA_FLAGS=--{_ONE_ORDER}=false, set before JAX starts",
            stacklevel=3,
        )


def refuse_wrong_types(
    stack: Any, schedule: Any, mesh: Any, axis: Any, weight: Any, remat: Any, layers_per_stage: Any, batch_axes: Any
) -> None:
    """Raise for arguments of `value_and_grad` of another type."""
    if not isinstance(stack, LayerStack):
        raise StructureError(
            "a pipeline needs a model as a stack of equal blocks",
            expected="a lowtide.LayerStack",
            got=type(stack).__name__,
            hint="make one from three functions: LayerStack(first, block, last)",
        )

    def is_numbers(given: Any) -> bool:
        return isinstance(given, Sequence | np.ndarray) and all(isinstance(one, int | np.integer) for one in given)

    checks = [
        (
            isinstance(schedule, Schedule),
            ("schedule is no schedule", "a lowtide.pipeline.Schedule", schedule),
            'lt.pipeline.schedule("zb-h1", num_stages=4, num_microbatches=16)',
        ),
        (
            isinstance(mesh, Mesh),
            ("mesh is no mesh of devices", "a jax.sharding.Mesh", mesh),
            "lowtide.train.make_mesh(stage=4)",
        ),
        (
            isinstance(axis, str),
            ("axis is no name", "the name of one axis of the mesh", axis),
            'axis="stage"',
        ),
        (
            weight is None or callable(weight),
            ("weight is no function", "a function of a microbatch, or None", weight),
            'weight=lambda batch: jnp.sum(batch["labels"] >= 0)',
        ),
        (
            isinstance(remat, bool) or callable(remat),
            ("remat is no policy", "a boolean or a policy of jax.checkpoint", remat),
            "remat=jax.checkpoint_policies.dots_saveable",
        ),
        (
            layers_per_stage is None or is_numbers(layers_per_stage),
            ("layers_per_stage is no list of numbers", "a number of layers for every stage", layers_per_stage),
            "leave it out to divide the layers as evenly as can be",
        ),
        (
            not isinstance(batch_axes, str),
            ("batch_axes is no list of names", "names of axes", batch_axes),
            f"batch_axes=[{batch_axes!r}]",
        ),
    ]
    for is_right, (message, expected, got), hint in checks:
        if not is_right:
            raise ConfigError(message, expected=expected, got=repr(got), hint=hint)
