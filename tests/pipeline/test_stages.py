"""What each rank is said to hold, beside what a compiler gives its program."""

from __future__ import annotations

import io
import json
import pickle
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console

from lowtide import models
from lowtide.core import ConfigError, LayerStack, ScheduleError
from lowtide.memory import MemoryReport, analyze, target
from lowtide.pipeline import SCHEDULES, Costs, Pipeline, StageReport, schedule, simulate, value_and_grad

from .test_executor import TWO_STAGES, offloading

SMALL = models.DecoderConfig(
    vocab_size=1024,
    hidden_size=512,
    intermediate_size=1536,
    num_layers=8,
    num_heads=8,
    num_kv_heads=8,
    head_dim=64,
    tie_embeddings=False,
)


def compiled(
    config: models.DecoderConfig, name: str, topology: str, *, num_ranks: int, length: int, remat: bool
) -> tuple[Pipeline, Any, StageReport, MemoryReport]:
    """A decoder's pipeline, its arguments, its report, and that of its program on a topology."""
    devices = np.array(target(topology).devices()).reshape(num_ranks, -1)
    mesh = Mesh(devices, ("stage", "fsdp"))
    num_stages = num_ranks * (2 if name.startswith(("v-", "zb-v")) else 1)
    made = schedule(name, num_stages=num_stages, num_microbatches=16)
    model = jax.eval_shape(lambda: models.init(config, key=jax.random.key(0), compute_dtype=jnp.bfloat16))
    pipeline = value_and_grad(model.stack, made, mesh=mesh, remat=remat, arranged=True)

    def place(leaf: Any, spec: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    outer = jax.tree.map(lambda leaf: place(leaf, PartitionSpec(*[None] * (leaf.ndim - 1), "fsdp")), model.outer)
    layers = jax.tree.map(
        lambda leaf: place(leaf, PartitionSpec("stage", *[None] * (leaf.ndim - 2), "fsdp")), model.layers
    )
    tokens = jax.ShapeDtypeStruct((16 * 2 * devices.shape[1], length), jnp.int32)
    batch = {"tokens": place(tokens, PartitionSpec("fsdp")), "labels": place(tokens, PartitionSpec("fsdp"))}
    memory = analyze(pipeline, outer, layers, batch, target=topology, roles={"weights": (0, 1)})
    return pipeline, (outer, layers, batch), pipeline.report(outer, layers, batch, memory=memory), memory


def assert_is_there(report: StageReport, memory: MemoryReport) -> None:
    """What the report counts is in the program, each buffer with its bytes to 2 % of what waits, and it is not all."""
    assert report.weight_bytes == pytest.approx(memory.by_role["weights"], rel=0.02)
    assert report.gradient_bytes == pytest.approx(memory.by_role["outputs"], rel=0.02)
    alive = [buffer.num_bytes for buffer in memory.peak if buffer.phase != "argument"]
    missing = 0
    for size in (*report.buffers.values(), report.message_bytes):
        near = [other for other in alive if abs(other - size) <= 0.02 * size]
        if near:
            alive.remove(near[0])
        else:
            missing += size
    assert missing <= 0.02 * report.waiting_bytes
    # What it uses of its room is what the fullest ranks use of each buffer.
    assert max(rank.waiting_bytes for rank in report.ranks) <= report.waiting_bytes
    assert report.waiting_bytes <= sum(rank.waiting_bytes for rank in report.ranks)
    assert report.other_bytes is not None and report.other_bytes > 0


def tiny(
    name: str = "zb-h1",
    num_stages: int = 4,
    num_layers: int = 6,
    num_classes: int = 97,
    num_microbatches: int = 8,
    **options: Any,
) -> StageReport:
    """Of a block with one weight, on devices of the CPU."""
    options.setdefault("mesh", Mesh(np.array(jax.devices()[:4]), ("stage",)))
    stack = LayerStack(
        first=lambda outer, batch: batch["x"],
        block=lambda layer, h, batch: jnp.tanh(checkpoint_name(h @ layer["w"], "product")),
        last=lambda outer, h, batch: (jnp.mean(jax.nn.logsumexp(h @ outer["head"], -1)), {}),
    )
    made = schedule(name, num_stages=num_stages, num_microbatches=num_microbatches)
    pipeline = value_and_grad(stack, made, **options)
    outer = {"head": jax.ShapeDtypeStruct((8, num_classes), jnp.bfloat16)}
    layers = {"w": jax.ShapeDtypeStruct((num_layers, 8, 8), jnp.bfloat16)}
    return pipeline.report(outer, layers, {"x": jax.ShapeDtypeStruct((2 * num_microbatches, 8), jnp.bfloat16)})


HEAD, LAYER = 8 * 97 * 2, 8 * 8 * 2


@pytest.mark.slow
def test_uneven_stages_have_the_room_of_the_longest() -> None:
    report = tiny()
    assert [rank.layers for rank in report.ranks] == [(0,), (1, 2), (3, 4), (5,)]
    assert [rank.weight_bytes for rank in report.ranks] == [HEAD + LAYER * n for n in (1, 2, 2, 1)]
    assert report.weight_bytes == HEAD + 2 * LAYER
    assert report.gradient_bytes == 2 * report.weight_bytes  # float32
    assert report.memory is None and report.other_bytes is None and report.host_bytes == 0
    assert report.num_padding_rows == 2 and "2 rows of padding" in text_of(report)
    assert "without a layer" not in text_of(report)
    assert tiny(num_layers=8).num_padding_rows == 0 and "padding" not in text_of(tiny(num_layers=8))


def test_ranks_without_a_layer_are_named() -> None:
    report = tiny(num_layers=3, layers_per_stage=[1, 0, 2, 0])
    assert [rank.layers for rank in report.ranks] == [(0,), (), (1, 2), ()]
    assert re.search(r"ranks without a layer +1, 3 *\n", text_of(report))
    assert "ranks without a layer" in text_of(tiny(num_layers=3))


def test_what_waits_is_what_the_schedule_has_in_use() -> None:
    few, many = tiny("1f1b", 4, 4), tiny("gpipe", 4, 4)
    # In 1F1B the first rank holds as many microbatches as there are ranks, in GPipe each rank holds all.
    assert [rank.waiting_bytes > 0 for rank in few.ranks] == [True] * 4
    assert few.ranks[0].waiting_bytes >= 2 * few.ranks[3].waiting_bytes
    kept = [sum(size for name, size in one.buffers.items() if name.startswith("forward/")) for one in (few, many)]
    assert kept[1] == 2 * kept[0]  # what I leaves to W waits within a tick
    for report in (few, many):
        assert max(rank.waiting_bytes for rank in report.ranks) <= report.waiting_bytes


@pytest.mark.slow_after(5)
@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in {"gpipe", "looped-bfs"}])
def test_what_waits_does_not_grow_with_microbatches(name: str) -> None:
    of: Any = {"num_stages": 8 if name in TWO_STAGES else 4, "num_layers": 8}
    few, many = (tiny(name, **of, num_microbatches=number) for number in (16, 64))
    assert many.buffers == few.buffers
    assert many.waiting_bytes == few.waiting_bytes > 0 and many.held_bytes == few.held_bytes


def test_no_logits_wait() -> None:
    assert not any("97" in name for name in tiny().buffers)


def test_what_is_offloaded_is_counted_apart() -> None:
    offloaded, kept = tiny(remat=offloading("product")), tiny()
    assert offloaded.host_bytes > 0 and offloaded.waiting_bytes < kept.waiting_bytes
    assert "on the host" in text_of(offloaded) and "on the host" not in text_of(kept)


def text_of(report: StageReport) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(report)
    return console.export_text()


def test_the_table_and_plain_data_say_the_same() -> None:
    report = tiny("v-min", 8, 8)
    text = text_of(report)
    assert "v-min, 8 microbatches: bytes of one device" in text
    assert [line.split()[:3] for line in text.splitlines()[2:6]] == [
        ["0", "0,", "7"], ["1", "1,", "6"], ["2", "2,", "5"], ["3", "3-4", "3-4"]
    ]  # fmt: skip
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["held_bytes"] == report.held_bytes and plain["device_bytes"] is None
    assert plain["ranks"][3]["stages"] == [3, 4]


def test_a_schedule_without_costs_is_made_for_those_of_the_stack() -> None:
    """Recomputing, a stage leaves little before its input pass and much after it, which takes twice as long as F."""
    of: Any = {"num_layers": 32, "num_classes": 2, "remat": True}
    named, best, roomy = tiny("zb-h1", **of), tiny("auto", **of), tiny("auto", **of, memory_limit="1 MiB")
    assert best.time_over_ideal <= best.scan_over_ideal == (8 + 4 - 1) / 8 < named.time_over_ideal
    assert f"{best.time_over_ideal:.2f}" in text_of(best) and "1.38" in text_of(best)
    # With room for it weight passes wait until there is time for them.
    assert roomy.time_over_ideal < best.time_over_ideal - 0.05
    assert best.waiting_bytes < roomy.waiting_bytes


def test_a_schedule_for_given_costs_stays() -> None:
    made = schedule(num_stages=2, num_microbatches=4, costs=Costs(weight=3))
    assert made.name == "auto" and made.fitted(Costs()) is made
    without = schedule(num_stages=2, num_microbatches=4)
    assert without.fitted(Costs(weight=3)) == made and without.truncated(2).fitted(Costs()).num_microbatches == 2
    assert pickle.loads(pickle.dumps(without)).fitted(Costs(weight=np.array([3, 3]))) == made
    # Stages stay where layers are already; a limit that was said stays, too.
    for costs in (Costs(input=2), Costs(weight=[3, 1, 2, 1], communication=0.2)):
        two = schedule(num_stages=4, num_microbatches=8, stages_per_rank=2, memory_limit=[3, 4])
        assert two.fitted(costs, 100).placement == two.placement
        assert two.fitted(costs, np.array([100.0, 100.0])) == two.fitted(costs, (100.0, 100.0))
        assert [peak <= limit for peak, limit in zip(simulate(two.fitted(costs, 100)).peaks, (3, 4), strict=True)]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("remat", [False, True])
def test_what_waits_keeps_within_the_limit_in_every_slot(remat: bool) -> None:
    of: Any = {"num_layers": 32, "num_classes": 2, "remat": remat}
    usual = tiny("auto", **of).waiting_bytes
    sizes = [int(usual * part) for part in (3, 1, 0.8, 0.6)]
    found = [tiny("auto", **of, memory_limit=size) for size in sizes]
    assert [report.waiting_bytes <= size for report, size in zip(found, sizes, strict=True)] == [True] * 4
    assert [report.limit_bytes for report in found] == sizes
    assert found[0].time_over_ideal <= found[-1].time_over_ideal
    with pytest.raises(ScheduleError, match=r"(?s)less than the waiting memory.*about \d.* B.*hint: raise"):
        tiny("auto", **of, memory_limit=usual // 10)


def test_a_limit_that_is_too_small_is_compared_for_one_device() -> None:
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("stage", "fsdp"))
    with pytest.raises(ScheduleError, match=r"on each device, (.|\n)*about 114 B\n *got: 1 B\n"):  # 228 B of a rank
        tiny("auto", num_microbatches=4, mesh=mesh, memory_limit=1)


@pytest.mark.parametrize(
    ("name", "said", "words"),
    [
        ("gpipe", "1 GiB", "gpipe, which is already made"),
        ("auto", 0, "memory_limit in bytes must be an integer of at least 1, not 0"),
        ("auto", "1 byte", "is not a size"),
        *(
            ("auto", one, r"(?s)memory_limit must be a whole number of bytes, or text, not .*hint: pass memory_limit=")
            for one in (1.5, 2.0, float("nan"), True)
        ),
    ],
)
def test_a_limit_that_chooses_nothing_is_refused(name: str, said: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tiny(name, memory_limit=said)


@pytest.mark.slow
@pytest.mark.tpu_aot
@pytest.mark.usefixtures("little_optimized")
def test_what_is_held_is_what_is_compiled_with_fsdp() -> None:
    """A program without it, of one stage a rank, that recomputes, is below."""
    _, _, report, memory = compiled(SMALL, "v-min", "v5p:2x2x2", num_ranks=4, length=512, remat=False)
    assert_is_there(report, memory)
    assert report.other_bytes is not None and report.other_bytes < 64 * 2**20  # code, and one layer


@pytest.mark.slow
@pytest.mark.tpu_aot
def test_what_is_made_of_divided_weights_is_divided() -> None:
    mesh = Mesh(np.array(target("v5p:2x2x2").devices()).reshape(2, 4), ("stage", "fsdp"))
    stack = LayerStack(
        first=lambda outer, batch: batch["x"],
        block=lambda layer, h, batch: h + jnp.tanh(h @ layer["w"].astype(jnp.bfloat16)),
        last=lambda outer, h, batch: (jnp.mean(h.astype(jnp.float32) ** 2), {}),
    )
    pipeline = value_and_grad(stack, schedule("1f1b", num_stages=2, num_microbatches=4), mesh=mesh)

    def struct(shape: tuple[int, ...], dtype: Any, *spec: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    layers = {"w": struct((16, 512, 512), jnp.float32, "stage", None, "fsdp")}
    batch = {"x": struct((64, 512), jnp.bfloat16, "fsdp")}
    memory = analyze(pipeline, {}, layers, batch, target="v5p:2x2x2")
    report = pipeline.report({}, layers, batch, memory=memory)
    assert report.hoisted_bytes == 8 * 512 * 512 * 2 // 4
    assert report.hoisted_bytes in [buffer.num_bytes for buffer in memory.peak if buffer.dtype == "bf16"]


@pytest.mark.slow
@pytest.mark.tpu_aot
@pytest.mark.parametrize("is_tensor", [True, False])
def test_what_the_compiler_divides_by_itself_is_counted_in_part(is_tensor: bool) -> None:
    """Activations between two projections along ``tensor``; rows and positions that a block joins."""

    def block(layer: Any, h: Any, batch: Any) -> Any:
        rows = h if is_tensor else h.reshape(-1, 512)
        return h + (jnp.tanh(rows @ layer["up"]) @ layer["down"]).reshape(h.shape)

    mesh = Mesh(np.array(target("v5p:2x2x2").devices()).reshape(2, 4), ("stage", "tensor" if is_tensor else "fsdp"))
    stack = LayerStack(
        first=lambda outer, batch: batch["x"],
        block=block,
        last=lambda outer, h, batch: (jnp.mean(h.astype(jnp.float32) ** 2), {}),
    )
    pipeline = value_and_grad(stack, schedule("zb-h1", num_stages=2, num_microbatches=4), mesh=mesh)

    def struct(shape: tuple[int, ...], *spec: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    inner = "tensor" if is_tensor else None
    layers = {"up": struct((8, 512, 2048), "stage", None, inner), "down": struct((8, 2048, 512), "stage", inner)}
    batch = {"x": struct((64, 64, 512), None if is_tensor else "fsdp")}
    memory = analyze(pipeline, {}, layers, batch, target="v5p:2x2x2")
    report = pipeline.report({}, layers, batch, memory=memory)
    wide, narrow = (2 * 8 * 16 * 64 * width * 2 for width in (2048, 512))  # two buffers of eight layers' activations
    waiting = report.waiting_bytes - report.message_bytes
    assert waiting == wide // 4 + (narrow if is_tensor else narrow // 4)
    assert report.other_bytes is not None and report.other_bytes > 0


@pytest.mark.slow
@pytest.mark.tpu_aot
@pytest.mark.usefixtures("little_optimized")
def test_what_is_held_is_what_is_compiled_where_each_device_is_a_stage_that_recomputes() -> None:
    """`benchmarks/pipeline_memory.py --large` compiles a model of 8 billion parameters: that takes minutes."""
    _, _, report, memory = compiled(SMALL, "zb-h1", "v5p:2x2x2", num_ranks=8, length=512, remat=True)
    assert_is_there(report, memory)
