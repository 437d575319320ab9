"""A trainer's pipeline keeps between passes what its device has room for: less where it must, more where it may."""

from __future__ import annotations

import functools
import io
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rich.console import Console

from lowtide.core import LayerStack, OutOfMemoryError, ScheduleError
from lowtide.memory import target
from lowtide.pipeline import schedule, value_and_grad
from lowtide.train import Trainer, make_mesh

ROWS, WIDTH = 32, 32
BATCH = {"x": np.random.default_rng(0).normal(size=(8 * ROWS, WIDTH)).astype(np.float32)}
STACK = LayerStack(
    first=lambda outer, batch: batch["x"] @ outer,
    block=lambda layer, h, batch: h + jnp.tanh(jnp.tanh(h @ layer["up"]) @ layer["down"]),
    last=lambda outer, h, batch: (jnp.mean((h @ outer.T - batch["x"]) ** 2), {}),
)


def trainer(
    *,
    name: str = "auto",
    remat: bool = False,
    stack: LayerStack = STACK,
    wrt: str = "**",
    memory_limit: Any = None,
    **options: Any,
) -> Trainer:
    keys = jax.random.split(jax.random.key(0), 3)
    model = {
        "outer": jax.random.normal(keys[0], (WIDTH, WIDTH)) / 8,
        "layers": {
            "up": jax.random.normal(keys[1], (8, WIDTH, 2 * WIDTH)) / 8,
            "down": jax.random.normal(keys[2], (8, 2 * WIDTH, WIDTH)) / 8,
        },
    }
    mesh = make_mesh(stage=4, devices=jax.devices()[:4])
    made = schedule(name, num_stages=4, num_microbatches=8)
    pipeline = value_and_grad(stack, made, mesh=mesh, remat=remat, wrt=wrt, memory_limit=memory_limit)
    return Trainer(model, None, optax.sgd(0.1), pipeline=pipeline, **options)


@functools.cache
def usual(remat: bool) -> tuple[int, int, float, list[float]]:
    """Of the default: bytes of the device, of what waits, time over the ideal, losses."""
    made = trainer(remat=remat)
    device_bytes = made.preflight(BATCH).device_bytes
    assert made.stages is not None and made.stages.limit_bytes is None
    return device_bytes, made.stages.waiting_bytes, made.stages.time_over_ideal, losses(made)


def losses(made: Trainer) -> list[float]:
    return [record["loss"] for record in made.fit([BATCH, BATCH], num_epochs=1, progress=False)]


@pytest.mark.slow
def test_less_waits_where_the_device_is_too_small_for_the_default() -> None:
    device_bytes, waiting_bytes, time, expected = usual(False)
    budget = int(0.75 * device_bytes)
    less = trainer(budget=budget)
    said = r"(?s)instead of .* KiB, for which the device has too little memory: .* times the ideal .* 1\.\d\d\nhint:"
    with pytest.warns(UserWarning, match=said):
        memory = less.preflight(BATCH)
    assert memory.device_bytes <= budget and less.stages is not None and less.stages.limit_bytes
    assert less.stages.waiting_bytes <= min(less.stages.limit_bytes, waiting_bytes - (device_bytes - budget))
    assert less.stages.time_over_ideal > time
    np.testing.assert_allclose(losses(less), expected, rtol=1e-6)
    console = Console(file=io.StringIO(), width=120)
    console.print(less.stages)
    assert "limit of waiting memory" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.slow
def test_more_waits_where_that_takes_less_time() -> None:
    """With recomputation what an input pass leaves to a weight pass is most of it."""
    device_bytes, waiting_bytes, time, expected = usual(True)
    roomy = trainer(remat=True, budget=2 * device_bytes)
    assert roomy.preflight(BATCH).device_bytes <= 2 * device_bytes and roomy.stages is not None
    assert roomy.stages.waiting_bytes > waiting_bytes and roomy.stages.time_over_ideal < 0.98 * time
    np.testing.assert_allclose(losses(roomy), expected, rtol=1e-6)
    # One that is made already, and one whose limit was said, stay as they are.
    named = trainer(name="1f1b", remat=True, budget=2 * device_bytes)
    named.preflight(BATCH)
    assert named.stages is not None and named.stages.limit_bytes is None and named.stages.name == "1f1b"


@pytest.mark.slow
def test_what_fits_in_no_schedule_is_an_error_as_without_a_choice() -> None:
    made = trainer(budget=usual(False)[0] // 8)
    with pytest.raises(OutOfMemoryError, match=r"(?s)out of memory before its first step.*hint:.*more microbatches"):
        made.preflight(BATCH)


@pytest.mark.slow
def test_another_budget_chooses_again() -> None:
    device_bytes = usual(False)[0]
    made = trainer()
    assert made.preflight(BATCH).device_bytes == device_bytes
    made.budget_bytes = int(0.75 * device_bytes)
    with pytest.warns(UserWarning, match="for which the device has too little memory"):
        assert made.preflight(BATCH).device_bytes <= made.budget_bytes
    made.budget_bytes = None
    assert made.preflight(BATCH).device_bytes == device_bytes and len(losses(made)) == 2


@pytest.mark.slow
def test_stages_that_leave_nothing_have_one_schedule() -> None:
    """Frozen linear blocks: in no schedule anything waits but messages, so there is nothing to choose among."""
    linear = LayerStack(STACK.first, lambda layer, h, batch: h + h @ layer["up"] @ layer["down"], STACK.last)
    device_bytes = trainer(stack=linear, wrt="outer").preflight(BATCH).device_bytes
    with pytest.raises(OutOfMemoryError, match="before its first step"):
        trainer(stack=linear, wrt="outer", budget=int(0.98 * device_bytes)).preflight(BATCH)
    with pytest.raises(ScheduleError, match="memory_limit is less than the waiting memory"):
        trainer(stack=linear, wrt="outer", memory_limit=1000).preflight(BATCH)


@pytest.mark.slow
@pytest.mark.tpu_aot
@pytest.mark.usefixtures("little_optimized")
def test_another_target_has_a_schedule_of_its_own() -> None:
    """What is compiled for it is what would run there."""
    batch = {"x": jax.ShapeDtypeStruct((8 * 2**13, WIDTH), jnp.float32)}
    made = trainer()
    device_bytes = made.memory(batch, target="v5e:2x2").device_bytes
    small = target("v5e:2x2", device_bytes=int(0.85 * device_bytes))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*for which the device has too little memory")
        assert made.memory(batch, target=small).device_bytes <= 0.85 * device_bytes
