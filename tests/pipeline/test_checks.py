"""What a pipeline cannot be made of is said before anything is traced."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from lowtide.core import ConfigError, LayerStack, ScheduleError, StructureError
from lowtide.pipeline import Pipeline, Schedule, schedule, value_and_grad

from .test_executor import mesh_of

STACK = LayerStack(
    first=lambda outer, batch: batch["x"],
    block=lambda layer, h, batch: jnp.tanh(h @ layer),
    last=lambda outer, h, batch: (jnp.mean(h**2), {}),
)


def pipeline_of(name: str, num_ranks: int, **options: Any) -> Pipeline:
    made = schedule(name, num_stages=num_ranks, num_microbatches=6)
    return value_and_grad(STACK, made, **{"mesh": mesh_of(num_ranks)} | options)


def test_a_mesh_that_does_not_fit_is_named() -> None:
    made = schedule("1f1b", num_stages=4, num_microbatches=6)
    with pytest.raises(ConfigError, match=r"(?s)mesh has no axis 'pipe'.*hint: pass axis='stage' or 'fsdp'"):
        value_and_grad(STACK, made, mesh=mesh_of(4), axis="pipe")
    with pytest.raises(ConfigError, match=r"(?s)for another number of devices.*4 devices along 'stage'.*got: 2.*hint:"):
        value_and_grad(STACK, made, mesh=mesh_of(2))
    with pytest.raises(StructureError, match=r"(?s)stack must be a lowtide.LayerStack, not <function.*hint:"):
        value_and_grad(lambda x: x, made, mesh=mesh_of(4))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"(?s)schedule must be a lowtide.pipeline.Schedule, not '1f1b'.*hint:"):
        value_and_grad(STACK, "1f1b", mesh=mesh_of(4))  # pyright: ignore[reportArgumentType]


WRONG = {
    "mesh": (None, "mesh must be a jax.sharding.Mesh, not None"),
    "weight": (3, "weight must be a function of a microbatch, or None, not 3"),
    "remat": ("full", "remat must be a boolean or a policy.*, not 'full'"),
    "layers_per_stage": ([2.0, 3.0], r"layers_per_stage must be a list with the number of layers.*, not \[2.0, 3.0\]"),
    "batch_axes": ("fsdp", r"batch_axes must be a list of names of axes, not 'fsdp'"),
    "batch_axes, a number": (2, r"batch_axes must be a list of names of axes, not 2"),
    "batch_axes, which can be read once": (
        iter(["fsdp"]),
        r"batch_axes must be a list of names of axes, not <list_iterator",
    ),
    "batch_axes, of lists": ([["fsdp"]], r"batch_axes must be a list of names of axes, not \[\['fsdp'\]\]"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_argument_of_another_type_is_named(case: str) -> None:
    (given, pattern), name = WRONG[case], case.partition(",")[0]
    with pytest.raises(ConfigError, match=rf"(?s){pattern}.*hint:"):
        pipeline_of("1f1b", 2, **{name: given})


def test_what_does_not_fit_the_schedule_or_the_mesh_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"(?s)layers_per_stage must have 4 numbers, one per stage, not 2"):
        pipeline_of("1f1b", 4, layers_per_stage=[3, 4])
    for axes in (["fdsp"], ["stage"]):
        with pytest.raises(ConfigError, match=rf"batch_axes must name 'fsdp', each at most once, not '{axes[0]}'"):
            pipeline_of("1f1b", 4, batch_axes=axes)
    with pytest.raises(ConfigError, match=r"(?s)batch_axes must name 'fsdp', .*, not 'fsdp', 'fsdp'.*hint:"):
        pipeline_of("1f1b", 4, batch_axes=["fsdp", "fsdp"])
    with pytest.raises(ConfigError, match=r"(?s)axis must be the name of one axis of the mesh, not \['stage'\].*hint:"):
        pipeline_of("1f1b", 4, axis=["stage"])
    explicit = jax.make_mesh((4,), ("stage",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:4])
    with pytest.raises(
        ConfigError, match=r"(?s)explicit or manual axes.*: AxisType.Explicit.*hint: use lowtide.train.make_mesh"
    ):
        pipeline_of("1f1b", 4, mesh=explicit)
    assert pipeline_of("1f1b", 4, batch_axes=[]).batch_axes == ()
    assert pipeline_of("1f1b", 4).batch_axes == ("fsdp",)


def test_a_schedule_whose_stages_are_no_neighbours_is_refused() -> None:
    far = Schedule.from_text("0F0 0B0\n2F0 2B0\n1F0 1B0\n3F0 3B0")
    assert far.placement == (0, 2, 1, 3)
    with pytest.raises(
        ScheduleError, match=r"(?s)stages 0 and 1 are on ranks 0 and 2, which are not neighbours.*hint:"
    ):
        value_and_grad(STACK, far, mesh=mesh_of(4))


def test_collectives_that_may_wait_for_ever_on_a_cpu_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    made = schedule("1f1b", num_stages=2, num_microbatches=2)
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    with pytest.warns(UserWarning, match=r"(?s)along 'stage'.*aborts.*hint: set XLA_FLAGS=--xla_cpu_enable.*=false"):
        value_and_grad(STACK, made, mesh=mesh_of(2))
    value_and_grad(STACK, made, mesh=mesh_of(2, 1))  # of one axis alone nothing is said: warnings are errors here
