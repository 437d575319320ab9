"""Fine-tuning with its bytes on the host: the values of plain training, and the bytes of a compiled TPU program."""

import dataclasses
import functools
import shutil
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowtide as lt
from lowtide import models
from lowtide.core import ConfigError, NonFiniteError, StructureError, leaves_with_paths, tree_bytes
from lowtide.finetune import Finetune, FinetuneConfig, _job
from lowtide.finetune._job import full_step, is_hosted, objective_loss, optimizer
from lowtide.finetune.objectives._supervised import num_targets as _num_targets
from lowtide.models import DecoderConfig
from lowtide.offload import Clip, layerwise_step
from lowtide.optim import PackedArray, low_precision
from lowtide.train import Trainer, analyze_naive

ALL = ("optimizer", "activations", "parameters")
WRT = "**/lora_*"


@pytest.fixture
def finetune(tiny_model_dir, tmp_path):
    (tmp_path / "data.txt").write_text("the tide goes out and the tide comes in and the moon pulls the sea\n" * 40)

    def make(out="run", **settings):
        (tmp_path / out).mkdir(exist_ok=True)
        settings = {"rank": 2, **settings} if not settings.get("full") else settings
        config = FinetuneConfig(
            model=tiny_model_dir,
            data=str(tmp_path / "data.txt"),
            seq_len=8,
            batch_size=4,
            learning_rate=1e-2,
            **settings,
        )
        return Finetune(config, tmp_path / out)

    return make


class _Other:
    """The data of a job with another trainer."""

    def __init__(self, job, trainer):
        self.data, self.trainer = job.data, trainer


def _fit(job, num_steps=4):
    records = job.trainer.fit(job.data.train, num_steps=num_steps, eval_data=job.data.held_out)
    return [record.get("loss", record.get("eval_loss")) for record in records]


def _on_host(tree):
    return {path for path, leaf in leaves_with_paths(tree) if leaf.sharding.memory_kind == "pinned_host"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """What several tests compare with, made once."""
    return {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"offload": ("parameters",)},
        {"offload": ALL, "num_microbatches": 2},
    ],
    ids=lambda settings: "+".join(settings["offload"]),
)
def test_adapters_learn_the_same_wherever_the_bytes_are(finetune, shared, settings):
    if "plain" not in shared:
        shared["plain"] = _fit(finetune("plain"))
    job = finetune(**settings)
    np.testing.assert_allclose(_fit(job), shared["plain"], rtol=0, atol=1e-6)
    words = settings["offload"]
    moments = {path for path, _ in leaves_with_paths(job.trainer.state) if "/mu/" in path or "/nu/" in path}
    assert _on_host(job.trainer.state) == (moments if "optimizer" in words else set())
    stacks = {
        path for path, leaf in leaves_with_paths(job.trainer.frozen) if path.startswith("layers") and leaf.ndim > 2
    }
    assert _on_host(job.trainer.frozen) == (stacks if "parameters" in words else set())


@pytest.mark.slow
def test_full_tuning_in_five_bytes_learns_nearly_what_float32_does(finetune, monkeypatch):
    monkeypatch.setattr(_job, "low_precision", partial(low_precision, least_size=64))
    plain, job = _fit(finetune("wide", full=True)), finetune(full=True, state_dtype="8bit", param_dtype="bfloat16")
    state = job.trainer.state.opt_state["layers"]
    assert {leaf.codes.dtype.name for leaf in jax.tree.leaves(state, is_leaf=_is_packed) if _is_packed(leaf)} == {
        "uint8"
    }
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.residuals)} == {"int8", "float32"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(job.trainer.state.trainable)} == {"bfloat16"}
    np.testing.assert_allclose(_fit(job), plain, rtol=0.01)


def _is_packed(leaf):
    return isinstance(leaf, PackedArray)


def test_settings_store_the_state_of_adapters_in_few_bits():
    params = {"lora_a": jax.ShapeDtypeStruct((2, 64, 64), "float32")}
    for form in ("bfloat16", "8bit", "4bit"):
        tx = optimizer(FinetuneConfig(state_dtype=form), optax.constant_schedule(1e-3))
        state = jax.eval_shape(tx.init, params)
        formats = {leaf.format for leaf in jax.tree.leaves(state, is_leaf=_is_packed) if _is_packed(leaf)}
        assert formats == {form}


@pytest.mark.parametrize(
    ("offload", "hosted"),
    [
        pytest.param(None, {"trainable/layers", "opt_state/layers", "opt_state/outer"}, marks=pytest.mark.slow),
        pytest.param((), set(), marks=pytest.mark.slow),
        pytest.param(
            ALL, {"trainable/layers", "trainable/outer", "opt_state/layers", "opt_state/outer"}, marks=pytest.mark.slow
        ),
    ],
)
def test_full_tuning_learns_what_plain_adamw_learns(finetune, shared, compilations, offload, hosted):
    job = finetune(full=True, offload=offload, num_microbatches=2)
    if "full" not in shared:
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(job.schedule, weight_decay=0.0))
        base = models.load(job.directory)
        shared["full"] = _fit(_Other(job, Trainer(base, models.loss, tx, weight=_num_targets)))
    np.testing.assert_allclose(_fit(job), shared["full"], rtol=0, atol=1e-6)
    with compilations.none():
        job.trainer.fit(job.data.train, num_steps=6)
    assert {"/".join(path.split("/")[:2]) for path in _on_host(job.trainer.state)} == hosted


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"offload": ("optimizer", "parameters")},
        pytest.param({"full": True, "state_dtype": "8bit", "param_dtype": "bfloat16"}, marks=pytest.mark.slow),
    ],
    ids=["adapters", "few-bits"],
)
def test_a_restored_state_is_where_it_was_and_goes_on_bit_for_bit(finetune, tmp_path, settings, monkeypatch):
    # Most leaves of the small model have fewer numbers than `low_precision` packs.
    monkeypatch.setattr(_job, "low_precision", partial(low_precision, least_size=64))
    whole = finetune("whole", **settings)
    losses = _fit(whole, 2)
    whole.trainer.checkpoints.wait()
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    losses += _fit(whole, 4)
    resumed = finetune("parts", **settings)
    assert resumed.resumed_at == 2
    assert _on_host(resumed.trainer.state) == _on_host(whole.trainer.state) != set()
    assert _fit(resumed, 4) == losses[-3:]
    jax.tree.map(np.testing.assert_array_equal, resumed.trainer.state, whole.trainer.state)


def _alive_bytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree) if not leaf.is_deleted())


@pytest.mark.slow
def test_a_run_of_the_whole_model_holds_it_once(finetune):
    job = finetune(full=True)
    untrained, base = job.trainer.state, job.base
    _fit(job, 1)
    counter = 4  # bytes of the number of the step, which JAX 0.11 may copy and keep
    assert _alive_bytes((untrained, base)) <= counter
    first = job.trainer.state
    job.trainer.restore()
    assert _alive_bytes(first) <= counter
    assert finetune(full=True).sample_before() is None


@pytest.mark.slow
def test_samples_stream_what_is_on_the_host(finetune):
    plain, hosted, full = finetune("a"), finetune("b", offload=("parameters",)), finetune("c", full=True, offload=ALL)
    assert plain.sample(plain.base) == hosted.sample(hosted.trainer.model) == full.sample_before()


@pytest.mark.slow
def test_the_table_counts_host_bytes_and_gradients_of_one_layer(finetune):
    job = finetune(full=True)
    content = job.compare(job.memory()).to_dict()
    layers, outer = job.base.layers, job.base.outer
    assert content["trainable_bytes"] == tree_bytes(job.base)
    assert content["frozen_bytes"] == 0
    assert content["gradient_bytes"] == tree_bytes(layers) // 2 + tree_bytes(outer["embed"])
    assert content["naive_gradient_bytes"] == tree_bytes(job.base)
    assert content["host_bytes"] == sum(content["host_by_role"].values())
    assert content["host_by_role"]["trainable"] == tree_bytes([x for x in jax.tree.leaves(layers) if x.ndim > 2])


def test_a_layerwise_step_says_what_trains_by_itself():
    stack = lt.LayerStack(
        lambda outer, x: x * outer["s"],
        lambda w, h, x: jnp.tanh(h * w["w"][None]),
        lambda outer, h, x: (jnp.mean(h**2), {}),
    )
    step = layerwise_step(stack, optax.sgd(0.1), clip=Clip(max_norm=1.0))
    model = {"outer": {"s": jnp.ones(())}, "layers": {"w": jnp.ones((2, 3))}}
    loss_fn = lambda m, x: stack.apply(m["outer"], m["layers"], x)  # noqa: E731
    records = Trainer(model, loss_fn, step).fit([jnp.ones((4, 3))] * 3, num_steps=3)
    assert records[2]["loss"] < records[0]["loss"]
    with pytest.raises(
        ConfigError, match=r"cannot be combined with wrt(.|\n)*hint: pass wrt to lt.offload.layerwise_step"
    ):
        Trainer(model, loss_fn, step, wrt="layers/**")
    with pytest.raises(StructureError, match=r"made of outer and layers, not a list(.|\n)*hint:"):
        Trainer([model], loss_fn, step)


@pytest.mark.slow
def test_a_trainer_skips_with_a_layerwise_step_and_counts():
    stack = lt.LayerStack(
        lambda outer, x: x * outer["s"],
        lambda w, h, x: jnp.tanh(h * w["w"][None]),
        lambda outer, h, x: (jnp.mean(h**2), {}),
    )

    def trainer(on_nan):
        model = {"outer": {"s": jnp.ones(())}, "layers": {"w": jnp.ones((2, 3))}}
        loss_fn = lambda m, x: stack.apply(m["outer"], m["layers"], x)  # noqa: E731
        return Trainer(model, loss_fn, layerwise_step(stack, optax.adam(0.1)), on_nan=on_nan)

    good, bad = [jnp.full((4, 3), 1.0 + step) for step in range(4)], jnp.full((4, 3), jnp.nan)
    ours, theirs = trainer("skip"), trainer("abort")
    records = ours.fit([*good[:2], bad, *good[2:]], num_steps=5, progress=False)
    theirs.fit(good, num_steps=4, progress=False)
    assert [np.isfinite(record["loss"]) for record in records] == [True, True, False, True, True]
    # Two programs, of which JAX 0.12's compiler rounds one otherwise where LLVM's optimisations are off.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), ours.model, theirs.model)
    with pytest.raises(NonFiniteError, match="and was not finite in the 99 steps before"):
        trainer("skip").fit([bad] * 120, num_steps=120, progress=False)
    with pytest.raises(NonFiniteError):
        theirs.fit([*good, bad], num_steps=5, progress=False)


def test_leaves_loaded_onto_the_host_are_never_on_the_device(tiny_model_dir):
    before = {id(array) for array in jax.live_arrays()}
    model = models.load(tiny_model_dir, host="layers/**")
    made = [array for array in jax.live_arrays() if id(array) not in before]
    shapes = {leaf.shape for leaf in jax.tree.leaves(model.layers)}
    assert len(_on_host(model.layers)) == len(jax.tree.leaves(model.layers))
    assert not _on_host(model.outer)
    assert all(array.sharding.memory_kind == "pinned_host" for array in made if array.shape in shapes)
    plain = models.load(tiny_model_dir)
    jax.tree.map(np.testing.assert_array_equal, model, plain)
    with pytest.raises(lt.core.SelectionError, match=r"'\*\*/embedding' matches nothing(.|\n)*hint:"):
        models.load(tiny_model_dir, host="**/embedding")


@pytest.mark.slow
def test_a_model_on_the_host_is_saved_as_one_on_the_device(tiny_model_dir, tmp_path):
    models.save(models.load(tiny_model_dir, host="**/weight"), tmp_path / "host")
    models.save(models.load(tiny_model_dir), tmp_path / "device")
    name = "model.safetensors"
    assert (tmp_path / "host" / name).read_bytes() == (tmp_path / "device" / name).read_bytes()


# --- bytes ---------------------------------------------------------------------------------------------------------

CONFIG = DecoderConfig(
    vocab_size=512, hidden_size=256, intermediate_size=1024, num_layers=8, num_heads=2, num_kv_heads=2, head_dim=128
)
BATCH = {name: jax.ShapeDtypeStruct((4, 128), jnp.int32) for name in ("tokens", "labels")}


@functools.cache
def base(dtype):
    return models.init(CONFIG, key=jax.random.key(0), dtype=dtype, compute_dtype=jnp.bfloat16)


@pytest.fixture(scope="module")
def report(shared):
    """Bytes of the fine-tuning step on a v5e, by what is on the host."""

    def compiled(**settings):
        key = tuple(settings.items())
        if key not in shared:
            config = FinetuneConfig(num_microbatches=settings.pop("num_microbatches", 1), **settings)
            model = base(jnp.float32 if config.full else jnp.bfloat16)
            where = is_hosted(config)
            params = {"outer": model.outer, "layers": model.layers}
            if where is not None:
                model = dataclasses.replace(model, **lt.offload.to_host(params, where))
            schedule = optax.constant_schedule(1e-4)
            loss_fn = objective_loss(config)
            if config.full:
                step = full_step(config, model.stack, schedule)
                trainer = Trainer(model, loss_fn, step)
            else:
                model = lt.lora.add(
                    model, lt.lora.Config(rank=64, targets="layers/**/down_proj"), key=jax.random.key(1)
                )
                trainer = Trainer(model, loss_fn, optimizer(config, schedule), wrt=WRT)
            shared[key] = trainer.memory(BATCH, target="v5e"), trainer
        return shared[key]

    return compiled


@pytest.mark.slow
@pytest.mark.tpu_aot
@pytest.mark.usefixtures("little_optimized")
def test_each_word_takes_its_bytes_off_the_device(report):
    plain, trainer = report()
    assert plain.host_bytes == 0
    moments = 2 * tree_bytes(trainer.state.trainable)

    moved, trainer = report(offload=("optimizer", "parameters"))
    stacks = tree_bytes([leaf for leaf in jax.tree.leaves(trainer.frozen.layers) if leaf.ndim > 2])
    assert moved.host_by_role["optimizer"] >= moments
    assert moved.by_role["optimizer"] < moments / 100
    # Updated in place: the moments are donated, and there is no second host copy.
    assert moved.host.alias_bytes == moved.host.output_bytes >= moments
    assert moved.host.temp_bytes == 0
    assert moved.host_by_role["frozen"] >= stacks
    assert moved.host_by_role["frozen"] + moved.host_by_role["optimizer"] == moved.host_bytes
    # Two layers and what is cut out of them take the place of eight; no gradient of the frozen stack.
    assert moved.device_bytes < plain.device_bytes - 0.5 * (moments + stacks)

    moved, _ = report(offload=("activations",))
    inputs = CONFIG.num_layers * 4 * 128 * CONFIG.hidden_size * 2
    assert moved.host.temp_bytes >= inputs
    # Without the word XLA keeps so small a stack in a TPU's vector memory: there are no device bytes to compare.


@pytest.mark.slow
@pytest.mark.tpu_aot
@pytest.mark.usefixtures("little_optimized")
def test_full_tuning_leaves_a_layer_on_the_device(report):
    moved, trainer = report(full=True)
    layers = tree_bytes([leaf for leaf in jax.tree.leaves(trainer.state.trainable["layers"]) if leaf.ndim > 2])
    assert moved.host_by_role["trainable"] >= layers
    assert moved.host_by_role["optimizer"] >= 2 * layers
    assert moved.host.alias_bytes == moved.host.output_bytes >= 3 * layers
    # In plain AdamW the weights, two moments and the gradients are on the device: four times as much.
    assert moved.device_bytes < 1.3 * tree_bytes(trainer.model)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "target",
    [pytest.param("h100", marks=pytest.mark.gpu_aot), pytest.param("v5e:2x2", marks=pytest.mark.tpu_aot)],
)
def test_a_naive_step_has_nothing_on_the_host(target):
    model = lt.offload.to_host({"w": jnp.ones((256, 256))})
    loss_fn = lambda model, x: (jnp.mean((x @ model["w"]) ** 2), {})  # noqa: E731
    batch = jax.ShapeDtypeStruct((8, 256), jnp.float32)
    assert analyze_naive(model, loss_fn, optax.adamw(1e-4), "**", batch, target=target).host_bytes == 0


def test_a_layerwise_trainer_evaluates_and_predicts_with_layers_on_the_host():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(0.2 * rng.normal(size=shape), jnp.float32)  # noqa: E731
    stack = lt.LayerStack(
        first=lambda outer, batch: batch @ outer["in"],
        block=lambda layer, h, batch: h + jnp.tanh(h @ layer["w"]),
        last=lambda outer, h, batch: (jnp.mean(h**2), {}),
    )
    model = {"outer": {"in": draw(4, 8)}, "layers": {"w": draw(3, 8, 8)}}
    apply = lambda model, batch: stack.apply(model["outer"], model["layers"], batch)  # noqa: E731
    batch = draw(5, 4)
    want = float(apply(model, batch)[0])
    ours = Trainer(model, apply, layerwise_step(stack, optax.adam(1e-2)))
    assert ours.evaluate([batch])["loss"] == pytest.approx(want)
    (predicted,) = ours.predict([batch], lambda model, batch: apply(model, batch)[0])
    assert float(predicted) == pytest.approx(want)
