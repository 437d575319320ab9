"""What a pipeline cannot be made of is said before anything is traced."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from lowtide.core import ConfigError, LayerStack, ScheduleError, StructureError
from lowtide.pipeline import Pipeline, Schedule, schedule, value_and_grad

STACK = LayerStack(
    first=lambda outer, batch: batch["x"],
    block=lambda layer, h, batch: jnp.tanh(h @ layer),
    last=lambda outer, h, batch: (jnp.mean(h**2), {}),
)


def mesh_of(num_ranks: int, others: int | None = None) -> Mesh:
    others = 8 // num_ranks if others is None else others
    return Mesh(np.array(jax.devices()[: num_ranks * others]).reshape(num_ranks, others), ("stage", "fsdp"))


def pipeline_of(name: str, num_ranks: int, **options: Any) -> Pipeline:
    made = schedule(name, num_stages=num_ranks, num_microbatches=6)
    return value_and_grad(STACK, made, **{"mesh": mesh_of(num_ranks)} | options)


def test_a_mesh_that_does_not_fit_is_named() -> None:
    made = schedule("1f1b", num_stages=4, num_microbatches=6)
    with pytest.raises(ConfigError, match=r"(?s)mesh has no axis 'pipe'.*'stage' or 'fsdp'.*hint:"):
        value_and_grad(STACK, made, mesh=mesh_of(4), axis="pipe")
    with pytest.raises(ConfigError, match=r"(?s)for another number of devices.*4 devices along 'stage'.*got: 2.*hint:"):
        value_and_grad(STACK, made, mesh=mesh_of(2))
    with pytest.raises(StructureError, match=r"(?s)needs a model as a stack.*LayerStack.*hint:"):
        value_and_grad(lambda x: x, made, mesh=mesh_of(4))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"(?s)schedule is not a Schedule.*'1f1b'.*hint:"):
        value_and_grad(STACK, "1f1b", mesh=mesh_of(4))  # pyright: ignore[reportArgumentType]


WRONG = {
    "mesh": (None, "mesh is not a mesh.*jax.sharding.Mesh.*got: None"),
    "weight": (3, "weight is not a function.*got: 3"),
    "remat": ("full", "remat is neither a boolean nor a policy.*got: 'full'"),
    "layers_per_stage": ([2.0, 3.0], r"layers_per_stage is not a list of numbers.*got: \[2.0, 3.0\]"),
    "batch_axes": ("fsdp", r"batch_axes is not a list of names.*got: 'fsdp'"),
    "batch_axes, a number": (2, r"batch_axes is not a list of names.*got: 2"),
    "batch_axes, which can be read once": (iter(["fsdp"]), r"batch_axes is not a list of names.*got: <list_iterator"),
    "batch_axes, of lists": ([["fsdp"]], r"batch_axes is not a list of names.*got: \[\['fsdp'\]\]"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_argument_of_another_type_is_named(case: str) -> None:
    (given, pattern), name = WRONG[case], case.partition(",")[0]
    with pytest.raises(ConfigError, match=rf"(?s){pattern}.*hint:"):
        pipeline_of("1f1b", 2, **{name: given})


def test_what_does_not_fit_the_schedule_or_the_mesh_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"(?s)layers_per_stage does not fit the schedule.*4 numbers.*got: 2"):
        pipeline_of("1f1b", 4, layers_per_stage=[3, 4])
    for axes in (["fdsp"], ["stage"]):
        with pytest.raises(ConfigError, match=rf"(?s)cannot be sharded along '{axes[0]}'.*expected: 'fsdp'"):
            pipeline_of("1f1b", 4, batch_axes=axes)
    with pytest.raises(ConfigError, match=r"(?s)cannot be sharded along 'fsdp'.*got: 'fsdp', 'fsdp'.*hint:"):
        pipeline_of("1f1b", 4, batch_axes=["fsdp", "fsdp"])
    with pytest.raises(ConfigError, match=r"(?s)axis is not a name.*got: \['stage'\].*hint:"):
        pipeline_of("1f1b", 4, axis=["stage"])
    explicit = jax.make_mesh((4,), ("stage",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:4])
    with pytest.raises(
        ConfigError, match=r"(?s)explicit or manual axes.*got: AxisType.Explicit.*hint: use lowtide.train.make_mesh"
    ):
        pipeline_of("1f1b", 4, mesh=explicit)
    assert pipeline_of("1f1b", 4, batch_axes=[]).batch_axes == ()
    assert pipeline_of("1f1b", 4).batch_axes == ("fsdp",)


def test_a_schedule_whose_stages_are_no_neighbours_is_refused() -> None:
    far = Schedule.from_text("0F0 0B0\n2F0 2B0\n1F0 1B0\n3F0 3B0")
    assert far.placement == (0, 2, 1, 3)
    with pytest.raises(ScheduleError, match=r"(?s)stages 0 and 1 are on ranks that are not neighbours.*rank 2.*hint:"):
        value_and_grad(STACK, far, mesh=mesh_of(4))


def test_collectives_that_may_wait_for_ever_on_a_cpu_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    made = schedule("1f1b", num_stages=2, num_microbatches=2)
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    with pytest.warns(UserWarning, match=r"(?s)along 'stage'.*aborts.*hint: set XLA_FLAGS=--xla_cpu_enable.*=false"):
        value_and_grad(STACK, made, mesh=mesh_of(2))
    value_and_grad(STACK, made, mesh=mesh_of(2, 1))  # of one axis alone nothing is said: warnings are errors here
