"""What enters each block, waiting in host memory: the values of a pipeline without, and where the bytes are."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lowtide.core import ConfigError, LayerStack, ScheduleError, StructureError
from lowtide.memory import MemoryReport, Program, compile, target
from lowtide.pipeline import Pipeline, StageReport, schedule, value_and_grad

from .test_executor import (
    NUM_LAYERS,
    TWO_STAGES,
    assert_close,
    make_batch,
    mesh_of,
    normal,
    of_plain_jax,
    offloading,
    parameters,
    pipeline_of,
    plain_pipeline,
    reference,
    sharded,
)

PLACES: Any = ("device", "host")


def assert_bitwise(found: Any, wanted: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [("v-min", 2), pytest.param("gpipe", 4, marks=pytest.mark.sentinel), ("1f1b", 4), ("auto", 4)],
)
def test_gradients_are_bit_for_bit_those_with_inputs_on_the_device(name: str, num_ranks: int) -> None:
    """Uneven layers, microbatches of different weights, one of none, scalars and integers beside activations, FSDP."""
    found: list[Any] = []
    for inputs in PLACES:
        pipeline = pipeline_of(name, num_ranks, remat=True, inputs=inputs)
        outer, layers = parameters(NUM_LAYERS[pipeline.schedule.num_stages])
        given = [sharded(tree, pipeline.mesh) for tree in (outer, layers, make_batch())]
        (loss, metrics), grads = jax.jit(pipeline)(*given)
        found.append(((loss, metrics["norm"]), grads))
    assert_bitwise(found[1], found[0])
    assert_close(found[1], reference(outer, layers, make_batch()))


def convolve(x: Any, kernel: Any) -> Any:
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


IMAGES = LayerStack(
    first=lambda outer, batch: convolve(batch["x"], outer["in"]),
    block=lambda layer, h, batch: h + convolve(jnp.tanh(convolve(h, layer["up"])), layer["down"]),
    last=lambda outer, h, batch: (
        jnp.sum(batch["counts"] * jnp.mean((h @ outer["out"] - batch["x"]) ** 2, (1, 2, 3)))
        / jnp.maximum(jnp.sum(batch["counts"]), 1),
        {},
    ),
)


@pytest.mark.slow
def test_convolutions_in_uneven_stages_and_microbatches() -> None:
    made = schedule("zb-h1", num_stages=2, num_microbatches=3)
    counts = jnp.asarray([1, 0, 1, 1, 0, 0.0])  # microbatches of one row that counts, of two, of none
    outer = {"in": 0.3 * normal(0, 3, 3, 2, 4), "out": normal(1, 4, 2)}
    layers = {"up": 0.3 * normal(2, 3, 3, 3, 4, 6), "down": 0.3 * normal(3, 3, 3, 3, 6, 4)}
    batch = {"x": normal(4, 6, 4, 4, 2), "counts": counts}
    pipeline = value_and_grad(
        IMAGES,
        made,
        mesh=mesh_of(2, 1),
        layers_per_stage=[1, 2],
        remat=True,
        inputs="host",
        weight=lambda batch: jnp.sum(batch["counts"]),
    )
    assert_close(jax.jit(pipeline)(outer, layers, batch), of_plain_jax(IMAGES, outer, layers, batch))
    assert list(hosted(pipeline.report(outer, layers, batch))) == ["forward/host/rows/float32/2x2x4x4x4"]


@pytest.mark.slow
def test_a_policy_decides_all_else() -> None:
    """What it saves stays on the device, what it offloads goes to the host, too."""

    def report(policy: Any) -> StageReport:
        return of_rows("zb-h1", remat=policy, inputs="host")[0]

    policies = jax.checkpoint_policies.save_only_these_names("inner"), offloading("inner")
    recomputed, saved, moved = map(report, (True, *policies))
    assert saved.host_bytes == recomputed.host_bytes and "forward/rows/bfloat16/4x32x64" in saved.buffers
    assert moved.host_bytes == 3 * recomputed.host_bytes  # twice as wide
    given = {}, {"up": 0.1 * normal(1, 16, 32, 64), "down": 0.1 * normal(2, 16, 64, 32)}, {"x": normal(3, 256, 32)}
    for policy in policies:
        kept, other = (jax.jit(of_rows("zb-h1", remat=policy, inputs=inputs)[1])(*given) for inputs in PLACES)
        assert_bitwise(other, kept)


# --- where the bytes are ---------------------------------------------------------------------------------------------

ROWS = LayerStack(
    first=lambda outer, batch: batch["x"].astype(jnp.bfloat16),
    block=lambda layer, h, batch: (
        h + checkpoint_name(jnp.tanh(h @ layer["up"].astype(h.dtype)), "inner") @ layer["down"].astype(h.dtype)
    ),
    last=lambda outer, h, batch: (jnp.mean((h - batch["x"].astype(h.dtype)) ** 2).astype(jnp.float32), {}),
)


def of_rows(
    name: str,
    *,
    devices: Any = None,
    width: int = 32,
    rows: int = 32,
    layers_per_stage: int = 4,
    num_microbatches: int = 8,
    **options: Any,
) -> tuple[StageReport, Pipeline, tuple[Any, ...]]:
    """A block whose weights are multiplied by its input itself, on four ranks: report, pipeline and arguments."""
    mesh = Mesh(np.array(jax.devices()[:4] if devices is None else devices).reshape(4, -1), ("stage", "fsdp"))
    num_stages = 4 * (2 if name in TWO_STAGES else 1)
    made = schedule(name, num_stages=num_stages, num_microbatches=num_microbatches)
    pipeline = value_and_grad(ROWS, made, mesh=mesh, **options)

    def shape(*dims: int, spec: Any) -> Any:
        return jax.ShapeDtypeStruct(dims, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    num = num_stages * layers_per_stage
    layers = {
        "up": shape(num, width, 2 * width, spec=("stage", None, "fsdp")),
        "down": shape(num, 2 * width, width, spec=("stage", "fsdp")),
    }
    batch = {"x": shape(num_microbatches * rows * mesh.shape["fsdp"], width, spec=("fsdp",))}
    arguments = {}, layers, batch
    return pipeline.report(*arguments), pipeline, arguments


def hosted(report: StageReport) -> dict[str, int]:
    return {name: size for name, size in report.buffers.items() if "/host/" in name}


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "v-min", "auto", "gpipe"])
def test_all_inputs_are_on_the_host_and_nowhere_else(name: str) -> None:
    """Between I and W, too, where weights are multiplied by the input; and `auto` keeps no more for it."""
    for number in (8, 32):
        kept, moved = (of_rows(name, num_microbatches=number, remat=True, inputs=inputs)[0] for inputs in PLACES)
        assert kept.host_bytes == 0 and list(hosted(moved)) == ["forward/host/rows/bfloat16/4x32x32"]
        assert moved.waiting_bytes == kept.waiting_bytes - moved.host_bytes
        assert moved.host_bytes == kept.buffers["forward/rows/bfloat16/4x32x32"]
        assert moved.time_over_ideal == kept.time_over_ideal
        for one, other in zip(moved.ranks, kept.ranks, strict=True):
            assert one.waiting_bytes < other.waiting_bytes


@pytest.mark.slow
def test_a_limit_of_memory_is_one_of_the_device() -> None:
    """Within it inputs on the host leave room for what makes a schedule faster, or for one at all."""
    of: Any = {"remat": True, "num_microbatches": 16}
    kept, moved = (of_rows("auto", inputs=inputs, memory_limit="100 KiB", **of)[0] for inputs in PLACES)
    assert max(kept.waiting_bytes, moved.waiting_bytes) <= 100 * 1024 and moved.host_bytes <= 100 * 1024
    assert moved.time_over_ideal < kept.time_over_ideal - 0.1
    with pytest.raises(ScheduleError, match=r'(?s)memory_limit is less than.*hint: .*inputs="host"'):
        of_rows("auto", memory_limit="45 KiB", **of)
    assert 0 < of_rows("auto", inputs="host", memory_limit="45 KiB", **of)[0].waiting_bytes <= 45 * 1024


TOKENS = 2048
"""Rows of a microbatch of a compiled program: what waits does not fit into a TPU's vector memory."""


def compiled(name: str, topology: str, inputs: str, *, num_devices: int) -> tuple[StageReport, MemoryReport, str]:
    """Report, bytes, and program of a TPU's compiler."""
    _, pipeline, arguments = of_rows(
        name,
        devices=target(topology).devices()[:num_devices],
        width=512,
        rows=TOKENS,
        layers_per_stage=16 if name in TWO_STAGES else 32,
        remat=True,
        arranged=True,
        inputs=inputs,
    )
    program: Program = compile(pipeline, *arguments, target=topology)
    memory = program.report()
    return pipeline.report(*arguments, memory=memory), memory, program.compiled.as_text()


@pytest.mark.slow
@pytest.mark.tpu_aot
@pytest.mark.parametrize(
    ("name", "topology", "num_devices"),
    [("zb-h1", "v5e:2x2", 4), ("v-min", "v5p:2x2x1", 4), ("1f1b", "v5p:2x2x2", 8)],
)
@pytest.mark.usefixtures("little_optimized")
def test_the_device_has_as_much_less(name: str, topology: str, num_devices: int) -> None:
    (kept, before, _), (moved, after, program) = (
        compiled(name, topology, inputs, num_devices=num_devices) for inputs in PLACES
    )
    waiting = moved.host_bytes
    assert waiting == kept.waiting_bytes - moved.waiting_bytes == (2 if name == "v-min" else 4) * 32 * TOKENS * 512 * 2
    assert before.host.temp_bytes == 0 and after.host.temp_bytes == waiting
    in_host_memory = r"{[^}]*S\(5\)}"
    assert re.search(rf"bf16\[{waiting // (TOKENS * 512 * 2)},{TOKENS},512\]{in_host_memory}", program)
    # What a pass has while it runs differs, as transfers go on meanwhile: by less than a layer's activations.
    fell = before.device.temp_bytes - after.device.temp_bytes
    assert fell == pytest.approx(waiting, abs=6 * TOKENS * 512 * 2)


# --- what cannot be --------------------------------------------------------------------------------------------------


def test_other_places_and_blocks_that_keep_everything_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"(?s)inputs must be \"device\" or \"host\", not 'disk'.*hint: pass inputs="):
        plain_pipeline("1f1b", remat=True, inputs="disk")
    with pytest.raises(ConfigError, match=r"(?s)inputs=\"host\" contradicts remat=False.*hint: pass remat=True, or a"):
        plain_pipeline("1f1b", inputs="host")


def test_activations_of_which_nothing_can_move_are_refused() -> None:
    stack = LayerStack(
        first=lambda outer, batch: batch,
        block=lambda layer, h, batch: h * layer,
        last=lambda outer, h, batch: (jnp.mean(h**2), {}),
    )
    made = schedule("1f1b", num_stages=2, num_microbatches=2)
    pipeline = value_and_grad(stack, made, mesh=mesh_of(2, 1), remat=True, inputs="host")
    with pytest.raises(
        StructureError,
        match=r"(?s)needs a floating-point array with at least two axes.*, not float32\[2\].*hint: pass inputs=\"dev",
    ):
        pipeline.report({}, jnp.ones(2), jnp.ones(4))
