"""A trainer whose gradients come from a pipeline: the numbers of one that has none, and one order of layers outside."""

from __future__ import annotations

import dataclasses
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P

import lowtide as lt
from lowtide import models
from lowtide.adapters import lora
from lowtide.core import ConfigError, LayerStack, LowtideError, OutOfMemoryError, StructureError, tree_bytes
from lowtide.offload import layerwise_step
from lowtide.pipeline import Pipeline, schedule, value_and_grad
from lowtide.train import EarlyStopping, ShardingRules, Trainer, make_mesh

ROWS, LENGTH = 16, 6
Options = dict[str, Any]


def decoder(num_layers: int = 8, *, tied: bool = True) -> models.Decoder:
    config = models.DecoderConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_layers=num_layers,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        tie_embeddings=tied,
    )
    return models.init(config, key=jax.random.key(0))


def batches(number: int = 3, rows: int = ROWS) -> list[Any]:
    draw = np.random.default_rng(0).integers
    found = [
        {name: draw(0, 32, (rows, LENGTH)).astype(np.int32) for name in ("tokens", "labels")} for _ in range(number)
    ]
    for batch in found:
        batch["labels"][: rows // 3, 2:] = -100  # microbatches of different weight
    return found


def num_targets(batch: Any) -> Any:
    return jnp.sum(batch["labels"] != -100)


def sgd() -> Any:
    return optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9))


def pipelined(
    name: str = "1f1b", num_stages: int = 4, *, model: Any = None, tx: Any = None, fsdp: int = 2, **options: Any
) -> Trainer:
    made = schedule(name, num_stages=num_stages, num_microbatches=4)
    mesh = make_mesh(stage=made.num_ranks, fsdp=fsdp, devices=jax.devices()[: made.num_ranks * fsdp])
    given: Options = {"weight": num_targets, "sharding": ShardingRules(mesh=mesh, min_bytes=64), **options}
    return Trainer(decoder() if model is None else model, None, tx or sgd(), pipeline=made, **given)


def plain(model: Any = None, **options: Any) -> Trainer:
    return Trainer(decoder() if model is None else model, models.loss, sgd(), weight=num_targets, **options)


def written(trainer: Trainer) -> None:
    assert trainer.checkpoints is not None
    trainer.checkpoints.wait()


def save(trainer: Trainer) -> None:
    trainer.save()
    written(trainer)


def assert_near(tree: Any, other: Any, tolerance: float = 1e-5) -> None:
    for (path, a), b in zip(lt.core.leaves_with_paths(tree), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=path)


@pytest.mark.slow  # with adapters, and with a stack of one's own, below
def test_a_pipelined_trainer_trains_as_a_plain_one() -> None:
    """In uneven stages, two a rank, beside FSDP; test_executor compares all schedules."""
    trainer, other = pipelined("zb-v", 4, model=decoder(6), fsdp=4), plain(decoder(6))
    got, expected = (one.fit(batches(), num_steps=3, progress=False) for one in (trainer, other))
    for key in ("loss", "grad_norm"):
        assert [record[key] for record in got] == pytest.approx([record[key] for record in expected], rel=1e-5)
    assert_near(trainer.model, other.model)
    assert len(trainer._compiled._programs) == 1  # for all steps


@pytest.mark.slow
def test_a_pipelined_trainer_evaluates_and_predicts_as_a_plain_one() -> None:
    """Of rows that nothing divides; whole batches are evaluated below."""
    trainer, other, data = pipelined("zb-v", 4, model=decoder(6), fsdp=1), plain(decoder(6)), batches(2, rows=7)
    assert trainer.evaluate(data)["loss"] == pytest.approx(other.evaluate(data)["loss"], rel=1e-5)
    logits = [one.predict(data, lambda model, batch: models.logits(model, batch["tokens"])) for one in (trainer, other)]
    np.testing.assert_allclose(*logits, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_fit_says_what_each_rank_holds_and_each_device_holds_its_layers_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    mesh = make_mesh(stage=4, fsdp=2)
    pipeline = value_and_grad(DROPOUT, schedule("v-half", num_stages=8, num_microbatches=4), mesh=mesh)
    trainer = Trainer(
        own(8), None, optax.adam(1e-2), pipeline=pipeline, sharding=ShardingRules(mesh=mesh, min_bytes=64)
    )
    trainer.fit(keyed(), num_steps=1, callbacks=[EarlyStopping("loss")])
    for leaf in jax.tree.leaves((trainer.state.trainable["layers"], trainer.state.opt_state[0].mu["layers"])):
        assert leaf.sharding.spec[0] == "stage" and leaf.sharding.shard_shape(leaf.shape)[0] == 2
    whole = tree_bytes(trainer.state.trainable["layers"])
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(trainer.state.trainable["layers"]))
    assert held == whole // 8

    text = capsys.readouterr().err
    assert re.search(r"v-half, 4 microbatches: bytes of one device", text)
    assert re.search(r"0 +0, 7 +0, 7 ", text)
    report = trainer.stages
    assert report is not None and report.memory is not None
    assert report.memory.device_bytes == report.held_bytes + (report.other_bytes or 0)
    assert f"{report.memory.device_bytes / 2**10:.2f} KiB" in text


@pytest.mark.slow
def test_a_rule_divides_the_rows_of_uneven_stages() -> None:
    rules = {"layers/.*q_proj/weight": P("stage", "fsdp")}
    sharding = ShardingRules(mesh=make_mesh(stage=4, fsdp=2), rules=rules)
    trainer = pipelined("1f1b", 4, model=decoder(6), sharding=sharding)
    (leaf,) = (x for path, x in lt.core.leaves_with_paths(trainer.state.trainable) if path.endswith("q_proj/weight"))
    assert leaf.shape[0] == 8 and leaf.sharding.spec[:2] == ("stage", "fsdp")


@pytest.mark.slow
def test_a_run_is_resumed_from_its_checkpoint(tmp_path: Path) -> None:
    data = keyed(4)
    through = own_trainer("v-half", 4, checkpoint_dir=tmp_path / "run")
    through.fit(data, num_steps=2, progress=False)
    written(through)
    shutil.copytree(tmp_path / "run", copied := tmp_path / "copied")
    through.fit(data, num_steps=4, progress=False)
    second = own_trainer("v-half", 4, model=jax.tree.map(jnp.zeros_like, own()), checkpoint_dir=copied)
    assert second.restore() == 2
    second.fit(data, num_steps=4, progress=False)
    assert_near(second.model, through.model, 0)


def adapted() -> Any:
    """Of seven layers, which only one rank or seven divide evenly."""
    return lora.add(decoder(7), lora.Config(rank=2, targets=("**/q_proj", "**/up_proj")), key=jax.random.key(1))


@pytest.mark.slow
def test_adapters_over_a_frozen_base_go_on_without_a_pipeline(tmp_path: Path) -> None:
    options: Options = {"wrt": "**/lora_*"}
    first = pipelined("zb-v", 4, model=adapted(), fsdp=1, checkpoint_dir=tmp_path / "run", **options)
    goes_on(tmp_path, first, lambda: plain(adapted(), checkpoint_dir=tmp_path / "copied", **options), batches())
    paths = [path for path, _ in lt.core.leaves_with_paths(first.state.trainable)]
    assert paths and all("lora_" in path for path in paths)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("written", "read"),
    [(("v-half", 8, 4), ("1f1b", 2, 2)), (None, ("interleaved", 4, 2))],
)
def test_a_run_goes_on_with_other_stages(tmp_path: Path, written: Any, read: Any) -> None:
    def trainer(stages: Any, directory: Path) -> Trainer:
        model, loss = jax.tree.map(lambda leaf: 0.3 * leaf, own(7)), SMOOTH.apply
        if stages is None:
            loss_fn = lambda model, batch: loss(model["outer"], model["layers"], batch)  # noqa: E731
            return Trainer(model, loss_fn, sgd(), checkpoint_dir=directory)
        name, num_stages, num_ranks = stages
        return own_trainer(name, num_stages, num_ranks=num_ranks, stack=SMOOTH, model=model, checkpoint_dir=directory)

    data = [{"x": batch["x"]} for batch in keyed()]
    goes_on(tmp_path, trainer(written, tmp_path / "run"), lambda: trainer(read, tmp_path / "copied"), data)


def goes_on(folder: Path, first: Trainer, other: Callable[[], Trainer], data: list[Any]) -> None:
    """What one has saved after a step of three the other goes on with as the one does."""
    first.fit(data, num_steps=1, progress=False)
    save(first)
    shutil.copytree(folder / "run", folder / "copied")
    wanted = list(first.fit(data, num_steps=3, progress=False))
    second = other()
    assert second.restore() == 1
    found = second.fit(data, num_steps=3, progress=False)
    assert [one["loss"] for one in found] == pytest.approx([one["loss"] for one in wanted], abs=1e-5)
    assert_near(second.model, first.model)


@pytest.mark.slow
def test_padding_in_other_rows_is_no_other_model(tmp_path: Path) -> None:
    """Padding is a copy of a layer: by the layer of every row alone, these stages are the same."""

    def trainer(layers_per_stage: tuple[int, ...], scale: float = 1) -> Trainer:
        mesh = make_mesh(stage=4, devices=jax.devices()[:4])
        model = {"outer": own()["outer"], "layers": jax.tree.map(lambda leaf: scale * leaf[:2], own()["layers"])}
        pipeline = own_pipeline(mesh, layers_per_stage=layers_per_stage)
        return Trainer(model, None, optax.sgd(0.1), pipeline=pipeline, checkpoint_dir=tmp_path)

    save(first := trainer((0, 1, 1, 0)))
    assert (second := trainer((1, 0, 1, 0), scale=0)).restore() == 0
    assert_near(second.model, first.model, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("written", "read"), [(("v-half", 8, 8), ("1f1b", 4, 12)), (("zb-v", 8, 8), ("zb-v", 8, 4))])
def test_a_checkpoint_of_another_number_of_layers_is_refused(tmp_path: Path, written: Any, read: Any) -> None:
    def trainer(name: str, num_stages: int, num_layers: int) -> Trainer:
        return pipelined(name, num_stages, model=decoder(num_layers), fsdp=1, checkpoint_dir=tmp_path)

    save(trainer(*written))
    other = trainer(*read)
    before = jax.tree.map(np.asarray, other.model)
    with pytest.raises(StructureError, match="the checkpoint has 8 layers, but the model has "):
        other.restore()
    assert_near(other.model, before, 0)


def test_an_optimizer_that_mixes_layers_is_refused_in_another_order(tmp_path: Path) -> None:
    tx = optax.flatten(optax.sgd(0.1, momentum=0.9))
    save(pipelined("zb-v", 8, tx=tx, fsdp=1, checkpoint_dir=tmp_path))
    with pytest.raises(StructureError, match="the optimizer mixes layers"):
        pipelined("1f1b", 4, tx=tx, fsdp=1, checkpoint_dir=tmp_path).restore()


@pytest.mark.slow
@pytest.mark.parametrize("wrt", ["**", "outer/**"])
def test_outer_leaves_stay_as_they_are_whatever_their_name_and_where_they_train_alone(tmp_path: Path, wrt: str) -> None:
    """Outer parameters called layers, of as many rows as there are layers, are none."""

    def trainer(stages: int, scale: float = 1) -> Trainer:
        outer = {**own()["outer"], "layers": jnp.arange(16.0).reshape(4, 4)}
        layers = own()["layers"] if wrt != "**" else jax.tree.map(lambda leaf: scale * leaf, own()["layers"])
        model = {"outer": jax.tree.map(lambda leaf: scale * leaf, outer), "layers": layers}
        mesh = make_mesh(stage=2, devices=jax.devices()[:2])
        made = schedule("zb-v" if stages == 4 else "1f1b", num_stages=stages, num_microbatches=4)
        pipeline = value_and_grad(DROPOUT, made, mesh=mesh, wrt=wrt)
        return Trainer(model, None, sgd(), pipeline=pipeline, checkpoint_dir=tmp_path)

    save(first := trainer(4))
    assert (second := trainer(2, scale=0)).restore() == 0
    assert_near(second.model, first.model, 0)


@pytest.mark.slow
def test_schedules_with_the_order_of_the_model_share_checkpoints_with_a_plain_trainer(tmp_path: Path) -> None:
    trainer = own_trainer("zb-h1", 2, checkpoint_dir=tmp_path)
    trainer.fit(keyed(), num_steps=1, progress=False)
    written(trainer)
    loss = lambda model, batch: DROPOUT.apply(model["outer"], model["layers"], batch)  # noqa: E731
    for other in (
        own_trainer("1f1b", 4, num_ranks=4, checkpoint_dir=tmp_path),
        Trainer(own(), loss, sgd(), checkpoint_dir=tmp_path),
    ):
        assert other.restore() == 1
        assert_near(other.model, trainer.model, 0)


@pytest.mark.slow
def test_other_weights_are_put_into_the_order_of_ranks() -> None:
    trainer = pipelined("v-half", 4)
    doubled = jax.tree.map(lambda leaf: 2 * leaf, decoder())
    trainer.update(jax.tree.map(np.asarray, doubled))
    assert_near(trainer.model, doubled, 0)
    assert trainer.evaluate(batches())["loss"] == pytest.approx(plain(doubled).evaluate(batches())["loss"], rel=1e-5)
    with pytest.raises(StructureError, match="the model has 4 layers, but the pipeline has 8"):
        trainer.update(decoder(4))


def test_weights_of_numpy_may_be_written_over_later() -> None:
    """On a CPU a placed array would share NumPy's buffer."""

    def aligned(leaf: Any) -> np.ndarray:
        memory = np.zeros(leaf.nbytes + 64, np.uint8)
        found = memory[-memory.ctypes.data % 64 :][: leaf.nbytes].view(leaf.dtype).reshape(leaf.shape)
        found[:] = leaf
        return found

    model = jax.tree.map(aligned, own())
    trainer = Trainer(model, None, sgd(), pipeline=own_pipeline())
    for _ in range(2):  # those of the construction, those of an update
        for leaf in jax.tree.leaves(model):
            leaf[:] = 0
        assert_near(trainer.model, own(), 0)
        model = jax.tree.map(aligned, own())
        trainer.update(model)


@pytest.mark.slow
def test_a_step_with_a_loss_that_is_no_number_is_left_out() -> None:
    trainer = own_trainer("v-half", 4, on_nan="skip")
    before = jax.tree.map(np.asarray, trainer.model)
    trainer.update({**before, "layers": jax.tree.map(lambda leaf: leaf * np.nan, before["layers"])})
    (record,) = trainer.fit(keyed(), num_steps=1, progress=False)
    assert not math.isfinite(record["loss"])
    assert_near(trainer.model["outer"], before["outer"], 0)


# --- a model of one's own --------------------------------------------------------------------------------------------

DROPOUT = LayerStack(
    first=lambda outer, batch: batch["x"] @ outer["in"],
    block=lambda layer, h, batch: h + jnp.tanh(h @ layer["w"]) * jax.random.bernoulli(batch["key"], 0.5, h.shape),
    last=lambda outer, h, batch: (jnp.mean((h - batch["x"]) ** 2), {"largest": jnp.max(h)}),
)


SMOOTH = LayerStack(
    first=DROPOUT.first,
    block=lambda layer, h, batch: h + jnp.tanh(h @ layer["w"]),
    last=lambda outer, h, batch: (jnp.mean((h - batch["x"]) ** 2), {}),
)


def own(num_layers: int = 4) -> Any:
    draw = np.random.default_rng(0).normal
    return {
        "outer": {"in": jnp.asarray(draw(size=(4, 4)), jnp.float32)},
        "layers": {"w": jnp.asarray(draw(size=(num_layers, 4, 4)), jnp.float32)},
    }


def keyed(number: int = 3) -> list[Any]:
    draw = np.random.default_rng(0).normal
    return [{"x": draw(size=(8, 4)).astype(np.float32), "key": jax.random.key(i)} for i in range(number)]


def own_pipeline(mesh: Any = None, axis: str = "stage", **options: Any) -> Pipeline:
    mesh = mesh or make_mesh(stage=2, devices=jax.devices()[:2])
    made = schedule("zb-h1", num_stages=mesh.shape[axis], num_microbatches=4)
    return value_and_grad(DROPOUT, made, mesh=mesh, axis=axis, **options)


def own_trainer(
    name: str, num_stages: int, *, num_ranks: int = 2, stack: LayerStack = DROPOUT, model: Any = None, **options: Any
) -> Trainer:
    made = schedule(name, num_stages=num_stages, num_microbatches=4)
    mesh = make_mesh(stage=num_ranks, devices=jax.devices()[:num_ranks])
    pipeline = value_and_grad(stack, made, mesh=mesh)
    return Trainer(own() if model is None else model, None, sgd(), pipeline=pipeline, **options)


@pytest.mark.slow
def test_a_stack_of_ones_own_trains_with_keys_of_the_batch() -> None:
    trainer = Trainer(own(), None, optax.sgd(0.1), pipeline=own_pipeline(remat=True))
    records = trainer.fit(keyed(), num_steps=3, progress=False)

    def loss_fn(model: Any, batch: Any) -> Any:
        losses = []
        for i in range(4):
            part = {"x": batch["x"][2 * i : 2 * i + 2], "key": jax.random.fold_in(batch["key"], i)}
            losses.append(DROPOUT.apply(model["outer"], model["layers"], part))
        return jnp.mean(jnp.stack([loss for loss, _ in losses])), jnp.mean(
            jnp.stack([metrics["largest"] for _, metrics in losses])
        )

    model, gradients = own(), jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
    for number, batch in enumerate(keyed()):
        (loss, largest), grads = gradients(model, batch)
        assert records[number]["loss"] == pytest.approx(float(loss), rel=1e-5)
        assert records[number]["largest"] == pytest.approx(float(largest), rel=1e-5)
        model = jax.tree.map(lambda leaf, g: leaf - 0.1 * g, model, grads)
    assert_near(trainer.model, model)
    assert math.isfinite(trainer.evaluate(keyed())["largest"])


@pytest.mark.slow
def test_what_trains_and_what_counts_may_be_said_to_the_trainer() -> None:
    def weight(batch: Any) -> Any:
        return jnp.sum(jnp.abs(batch["x"]))

    own_one = Trainer(own(), None, optax.sgd(0.1), pipeline=own_pipeline(wrt="layers/**", weight=weight))
    given = Trainer(own(), None, optax.sgd(0.1), pipeline=own_pipeline(), wrt="layers/**", weight=weight)
    for trainer in (own_one, given):
        trainer.fit(keyed(), num_steps=2, progress=False)
    assert_near(given.model, own_one.model, 0)
    assert_near(given.model["outer"], own()["outer"], 0)
    assert jax.tree.leaves(given.state.trainable["outer"]) == []


# --- before the run --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_step_that_is_refused_says_what_each_rank_would_hold() -> None:
    trainer = Trainer(own(), None, sgd(), pipeline=own_pipeline(), budget="1 KiB")
    with pytest.raises(OutOfMemoryError, match=r"(?s)1.00 KiB usable.*hint: a schedule of more.*remat"):
        trainer.fit(keyed(), num_steps=1, progress=False)
    assert trainer.stages is not None and trainer.stages.ranks[0].waiting_bytes > 0


@pytest.mark.slow
@pytest.mark.tpu_aot
@pytest.mark.usefixtures("little_optimized")
def test_the_step_compiles_for_a_pod_that_is_not_there() -> None:
    trainer = pipelined("zb-v", 8, tx=optax.adamw(1e-3))
    report = trainer.memory(batches(1)[0], target="v5p:2x2x2")
    of_state = tree_bytes((trainer.state.trainable, trainer.state.opt_state))
    assert report.target.chip == "v5p"
    assert of_state / 8 < report.by_role["trainable"] + report.by_role["optimizer"] < of_state
    assert report.by_role["outputs"] < 8192  # the state is donated: metrics, no weights


# --- bad input -------------------------------------------------------------------------------------------------------


WRONG: dict[str, tuple[Any, Options, str]] = {
    "no schedule": (decoder, {"pipeline": "zb-h1"}, "pipeline must be a Schedule or a Pipeline, not 'zb-h1'"),
    "a loss": (decoder, {"loss_fn": models.loss}, "with loss_fn"),
    "microbatches": (decoder, {"num_microbatches": 2}, "with num_microbatches"),
    "mutable": (decoder, {"mutable": "layers/**"}, "with mutable"),
    "dtype": (decoder, {"compute_dtype": "bfloat16"}, "with compute_dtype"),
    "seed": (decoder, {"seed": 1}, "with seed"),
    "layerwise": (decoder, {"tx": layerwise_step(decoder().stack, optax.sgd(0.1))}, "with a layerwise step"),
    "no stack": (own, {}, "a schedule needs a model with a stack"),
    "no layers": (lambda: {"w": jnp.ones(2)}, {"pipeline": own_pipeline()}, "made of outer and layers"),
    "other mesh": (decoder, {"sharding": ShardingRules(mesh=make_mesh(stage=2))}, "for another number of devices"),
    "no axis": (decoder, {"sharding": ShardingRules(mesh=make_mesh())}, "the mesh has no axis 'stage'"),
    "two meshes": (
        own,
        {"pipeline": own_pipeline(), "sharding": ShardingRules(mesh=make_mesh(stage=2))},
        "sharding has the mesh .*, but the pipeline ",
    ),
    "rows by stage": (
        decoder,
        {"sharding": ShardingRules(mesh=make_mesh(stage=4), batch_axes=("stage", "fsdp"))},
        "batch_axes must not include 'stage'",
    ),
    "two divisions of batches": (
        own,
        {
            "pipeline": own_pipeline(),
            "sharding": ShardingRules(mesh=make_mesh(stage=2, devices=jax.devices()[:2]), batch_axes="data"),
        },
        "sharding has the batch_axes .*, but the pipeline ",
    ),
    "axis": (
        own,
        {"pipeline": own_pipeline(jax.sharding.Mesh(jax.devices()[:2], ("fsdp",)), "fsdp")},
        "must be named 'stage', not 'fsdp'",
    ),
    "axis of another name": (
        own,
        {"pipeline": own_pipeline(jax.sharding.Mesh(jax.devices()[:2], ("pipe",)), "pipe")},
        "must be named 'stage', not 'pipe'",
    ),
    "twice": (own, {"pipeline": own_pipeline(wrt="outer/**"), "wrt": "layers/**"}, "wrt is set twice"),
    "rule": (
        decoder,
        {"sharding": ShardingRules(mesh=make_mesh(stage=4), rules={"layers/.*q_proj/weight": P(None, "fsdp")})},
        "must be sharded along 'stage' first, not as ",
    ),
    "nothing": (decoder, {"wrt": "layers/nothing"}, "matches no|selects no|nothing"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_a_pipeline_cannot_be_made_of_is_refused(case: str) -> None:
    make, options, message = WRONG[case]
    given: Options = {"loss_fn": None, "tx": sgd(), "pipeline": schedule("1f1b", num_stages=4, num_microbatches=4)}
    with pytest.raises(LowtideError, match=message):
        Trainer(make(), **{**given, **options})


@pytest.mark.slow
def test_batches_that_do_not_divide_are_refused() -> None:
    trainer = pipelined()
    with pytest.raises(LowtideError, match="cannot be sharded evenly over the devices"):
        trainer.fit(batches(1, rows=12), num_steps=1, progress=False)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Model:
    """With an array that is neither."""

    outer: Any
    layers: Any
    scale: Any


def test_a_model_with_arrays_elsewhere_is_refused() -> None:
    with pytest.raises(StructureError, match="scale: no part of the pipeline reads it"):
        Trainer(Model(**own(), scale=jnp.ones(2)), None, sgd(), pipeline=own_pipeline())


@pytest.mark.parametrize(("name", "num_stages"), [("1f1b", 2), ("zb-v", 4)])
def test_one_array_at_two_paths_of_the_layers_is_refused(name: str, num_stages: int) -> None:
    model = own()
    model["layers"]["v"] = model["layers"]["w"]
    mesh = make_mesh(stage=2, devices=jax.devices()[:2])
    made = schedule(name, num_stages=num_stages, num_microbatches=4)
    with pytest.raises(LowtideError, match="layers/v and layers/w are the same array, and both are trainable"):
        Trainer(model, None, sgd(), pipeline=value_and_grad(DROPOUT, made, mesh=mesh))


def test_a_leaf_that_is_no_array_is_named() -> None:
    model = own()
    model["outer"]["activation"] = jnp.tanh
    trainer = Trainer(model, None, sgd(), pipeline=own_pipeline())
    with pytest.raises(StructureError, match="outer/activation is not an array"):
        trainer.fit(keyed(), num_steps=1, progress=False)


@pytest.mark.slow
def test_without_rules_batches_are_divided_as_the_pipeline_says() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("stage", "rows"))
    trainer = Trainer(own(), None, sgd(), pipeline=own_pipeline(mesh, batch_axes=("rows",)))
    assert trainer.sharding is not None and trainer.sharding.batch_axes == ("rows",)
    trainer.fit(keyed(), num_steps=1, progress=False)


def test_layers_in_host_memory_are_refused() -> None:
    model = decoder()
    hosted = dataclasses.replace(model, layers=lt.offload.to_host(model.layers))
    with pytest.raises(ConfigError, match=r"(?s)layers/.* is in host memory.*hint: lt.offload.to_device"):
        pipelined(model=hosted)


def test_without_rules_the_devices_that_are_left_divide_weights() -> None:
    trainer = Trainer(decoder(), None, sgd(), pipeline=schedule("1f1b", num_stages=4, num_microbatches=4))
    assert trainer.sharding is not None
    assert dict(trainer.sharding.mesh.shape) == {"stage": 4, "data": 1, "fsdp": 2, "tensor": 1}
    with pytest.raises(ConfigError, match="8 devices cannot be divided evenly among 3 ranks"):
        Trainer(decoder(), None, sgd(), pipeline=schedule("1f1b", num_stages=3, num_microbatches=4))
