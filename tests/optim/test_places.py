"""Where state in few bits meets the rest: layers updated in the backward pass, meshes, trainers, checkpoints."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowtide as lt
from lowtide.core import SelectionError
from lowtide.memory import compile
from lowtide.memory import target as chips
from lowtide.models import DecoderConfig, init, loss
from lowtide.optim import LowPrecisionState, PackedArray, converted, low_precision
from lowtide.train import ShardingRules, make_mesh

WIDTH = 256


def stack(num_layers: int = 3, dtype: Any = jnp.float32) -> tuple[lt.LayerStack, Any, Any]:
    rng = np.random.default_rng(0)
    layers = {
        "up": jnp.asarray(rng.normal(0, 0.1, (num_layers, WIDTH, WIDTH)), dtype),
        "down": jnp.asarray(rng.normal(0, 0.1, (num_layers, WIDTH, WIDTH)), dtype),
        "bias": jnp.zeros((num_layers, WIDTH), dtype),
    }

    def block(layer: Any, h: Any, batch: Any) -> Any:
        return h + jnp.tanh(h @ layer["up"] + layer["bias"][None]) @ layer["down"]

    def first(outer: Any, batch: Any) -> Any:
        return (batch["x"] @ outer["in"]).astype(dtype)

    def last(outer: Any, h: Any, batch: Any) -> Any:
        return jnp.mean((h.astype(jnp.float32) - batch["y"]) ** 2), {}

    return lt.LayerStack(first=first, block=block, last=last), {"in": jnp.eye(WIDTH, dtype=dtype)}, layers


def batches(number: int = 4) -> list[Any]:
    rng = np.random.default_rng(1)
    return [{name: jnp.asarray(rng.normal(size=(8, WIDTH)), jnp.float32) for name in "xy"} for _ in range(number)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "weights", "place"),
    [("8bit", None, "host"), ("8bit", "split", "device"), ("4bit", "kahan", "host"), (None, "split", "device")],
)
def test_a_layerwise_step_is_the_plain_one(form: Any, weights: Any, place: str) -> None:
    dtype = jnp.float32 if weights is None else jnp.bfloat16
    model, outer, layers = stack(dtype=dtype)
    tx = low_precision(optax.adamw(1e-2), form, weights=weights)
    params = {"outer": outer, "layers": layers}

    def loss_fn(params: Any, batch: Any) -> Any:
        return model.apply(params["outer"], params["layers"], batch)[0]

    @jax.jit
    def plain(params: Any, opt: Any, batch: Any) -> Any:
        updates, opt = tx.update(jax.grad(loss_fn)(params, batch), opt, params)
        return optax.apply_updates(params, updates), opt

    opt, begin = tx.init(params), np.asarray(layers["up"], np.float32)
    step = lt.offload.layerwise_step(model, tx, place=dict.fromkeys(("layers", "outer", "opt_state"), place))
    state, frozen = step.init(*jax.tree.map(jnp.array, (outer, layers)))
    moments = state.layers_opt.inner[0].mu["layers"]["up"]
    assert isinstance(moments, PackedArray) == (form is not None)
    jitted = jax.jit(step, donate_argnums=0)
    for batch in batches():
        params, opt = plain(params, opt, batch)
        state, _ = jitted(state, frozen, batch)
    ours = dict(zip(("outer", "layers"), step.parameters(state, frozen), strict=True))
    moved = np.abs(np.asarray(params["layers"]["up"], np.float32) - begin).mean()
    for mine, theirs in zip(*map(jax.tree.leaves, (ours, params)), strict=True):
        apart = np.abs(np.asarray(mine, np.float32) - np.asarray(theirs, np.float32)).mean()
        assert apart < (0.02 if form != "4bit" else 0.05) * moved, (apart, moved)


@pytest.mark.slow
def test_a_layerwise_step_takes_it_for_some_leaves() -> None:
    model, outer, layers = stack()
    layers = {**layers, **{name: layers[name].astype(jnp.bfloat16) for name in ("up", "down")}}
    tx = low_precision(optax.adamw(1e-2), weights="split", match=r".*/mu/layers/.*")
    step = lt.offload.layerwise_step(model, tx)
    state, frozen = step.init(outer, layers)
    assert isinstance(state.layers_opt.inner[0].mu["layers"]["up"], PackedArray)
    state, metrics = jax.jit(step, donate_argnums=0)(state, frozen, batches()[0])
    assert np.isfinite(metrics["loss"])
    nothing = lt.offload.layerwise_step(model, low_precision(optax.adamw(1e-2), match="mu"))
    with pytest.raises(SelectionError, match="selects nothing"):
        nothing.init(*stack()[1:])


@pytest.mark.slow
@pytest.mark.parametrize(
    "target", [pytest.param("v5e:1x1", marks=pytest.mark.tpu_aot), pytest.param("h100", marks=pytest.mark.gpu_aot)]
)
def test_a_whole_step_has_seven_bytes_a_parameter_and_a_layerwise_one_five(target: str) -> None:
    num_layers, width = 64, 4096
    device = jax.sharding.SingleDeviceSharding(chips(target).devices()[0])
    layers = {"w": jax.ShapeDtypeStruct((num_layers, width, width), jnp.bfloat16, sharding=device)}
    size = num_layers * width**2
    model = lt.LayerStack(
        first=lambda outer, batch: batch["x"],
        block=lambda layer, h, batch: h + jnp.tanh(h @ layer["w"]),
        last=lambda outer, h, batch: (jnp.mean(h.astype(jnp.float32) ** 2), {}),
    )
    batch = {"x": jax.ShapeDtypeStruct((16, width), jnp.bfloat16)}
    tx = low_precision(optax.adamw(1e-4), weights="split")

    def plain(params: Any, opt: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: model.apply({}, p, batch, remat=True)[0])(params)
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, loss

    opt = jax.eval_shape(tx.init, layers)
    whole = compile(plain, layers, opt, batch, target=target, donate_argnums=(0, 1)).report()
    assert whole.device_bytes / size <= 7.11
    places = dict.fromkeys(("layers", "outer", "opt_state", "inputs"), "device")
    step = lt.offload.layerwise_step(model, tx, place=places, chunk_bytes="8 MiB")
    state, frozen = step.init({}, layers)
    parts = compile(step, state, frozen, batch, target=target, donate_argnums=0).report()
    assert parts.device_bytes / size <= 5.2
    assert parts.device.temp_bytes <= 5 * size / num_layers  # gradient and slices of a layer, and blocks in float32


@pytest.mark.slow
@pytest.mark.gpu_aot
def test_a_step_of_a_decoder_has_seven_bytes_a_parameter_on_a_gpu() -> None:
    config = DecoderConfig(
        vocab_size=16384,
        hidden_size=1024,
        intermediate_size=4096,
        num_layers=16,
        num_heads=16,
        num_kv_heads=4,
        head_dim=64,
    )
    model = jax.eval_shape(
        lambda key: init(config, key=key, dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16), jax.random.key(0)
    )
    size = sum(leaf.size for leaf in jax.tree.leaves(model))
    tx = low_precision(optax.adamw(1e-4), weights="split")

    def step(model: Any, opt: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(lambda model: loss(model, batch, remat=True)[0])(model)
        updates, opt = tx.update(grads, opt, model)
        return optax.apply_updates(model, updates), opt, value

    batch = dict.fromkeys(("tokens", "labels"), jax.ShapeDtypeStruct((1, 128), jnp.int32))
    program = compile(step, model, jax.eval_shape(tx.init, model), batch, target="h100", donate_argnums=(0, 1))
    assert program.report().device_bytes / size <= 7.1


def loss_fn(model: Any, batch: Any) -> Any:
    return jnp.mean((jnp.tanh(batch["x"] @ model["up"]) @ model["down"] - batch["y"]) ** 2)


def small() -> Any:
    rng = np.random.default_rng(2)
    return {name: jnp.asarray(rng.normal(0, 0.1, (WIDTH, WIDTH)), jnp.float32) for name in ("up", "down")}


DATA = [jax.tree.map(np.asarray, batch) for batch in batches()]


@pytest.mark.slow
def test_a_trainer_on_a_mesh_says_itself_how_leaves_are_sharded() -> None:
    rules = ShardingRules(mesh=make_mesh(fsdp=4, tensor=2), min_bytes=0)  # without, an update warns
    tx = low_precision(optax.adamw(1e-2))
    ours = lt.Trainer(small(), loss_fn, tx, sharding=rules)
    assert str(ours.state.opt_state.inner[0].mu["up"].codes.sharding.spec) == str(ours.model["up"].sharding.spec)
    ours.fit(DATA, num_steps=4, progress=False)
    alone = lt.Trainer(small(), loss_fn, tx)
    alone.fit(DATA, num_steps=4, progress=False)
    for name in ("up", "down"):
        assert float(jnp.abs(ours.model[name] - alone.model[name]).mean()) < 1e-5


@pytest.mark.slow
def test_microbatches_and_skipped_steps_are_those_of_float32_state() -> None:
    tx = optax.MultiSteps(low_precision(optax.adamw(1e-2)), every_k_schedule=2).gradient_transformation()
    trainer = lt.Trainer(small(), loss_fn, tx, num_microbatches=2)
    trainer.fit(DATA, num_steps=4, progress=False)
    other = lt.Trainer(
        small(), loss_fn, optax.MultiSteps(optax.adamw(1e-2), every_k_schedule=2).gradient_transformation()
    )
    other.fit(DATA, num_steps=4, progress=False)
    for name in ("up", "down"):
        assert float(jnp.abs(trainer.model[name] - other.model[name]).mean()) < 2e-4


@pytest.mark.slow
def test_a_checkpoint_goes_on_in_another_format(tmp_path: Path) -> None:
    plain = optax.adamw(1e-2)
    lt.Trainer(small(), loss_fn, plain, checkpoint_dir=tmp_path).fit(
        DATA, num_steps=2, progress=False, checkpoint_every=2
    )
    old = lt.Trainer(small(), loss_fn, plain, checkpoint_dir=tmp_path)
    assert old.restore() == 2
    tx = low_precision(plain)
    new = lt.Trainer(jax.tree.map(jnp.array, old.model), loss_fn, tx)
    new.step = 2
    state = jax.tree.map(jnp.array, old.state.opt_state)
    new.state = dataclasses.replace(new.state, opt_state=converted(state, tx, old.model))
    assert isinstance(new.state.opt_state, LowPrecisionState)
    assert isinstance(new.state.opt_state.inner[0].mu["up"], PackedArray)
    new.fit(DATA, num_steps=4, progress=False)
    old.fit(DATA, num_steps=4, progress=False)
    assert float(jnp.abs(new.model["up"] - old.model["up"]).mean()) < 2e-4


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("weights", [None, "split"])
def test_an_optimizer_of_nnx_has_it(weights: Any) -> None:
    nnx = pytest.importorskip("flax.nnx")
    dtype = jnp.float32 if weights is None else jnp.bfloat16
    tx = low_precision(optax.adamw(1e-2), "8bit", weights=weights)
    model = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0), param_dtype=dtype)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    state = tx.init(params)

    @nnx.jit
    def step(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.update(model, nnx.grad(lambda model: jnp.mean((model(batch["x"]) - batch["y"]) ** 2))(model))

    @jax.jit
    def plain(params: Any, state: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> Any:
            return jnp.mean(
                (batch["x"] @ params["kernel"].astype(jnp.float32) + params["bias"][None] - batch["y"]) ** 2
            )

        updates, state = tx.update(jax.grad(loss_of)(params), state, params)
        return optax.apply_updates(params, updates), state

    for batch in batches():
        step(model, optimizer, batch)
        params, state = plain(params, state, batch)
    found = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True):
        assert one.dtype == dtype
        np.testing.assert_allclose(one.astype(jnp.float32), other.astype(jnp.float32), atol=2e-3)
    before = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0), param_dtype=dtype)
    assert float(jnp.abs(model.kernel[...] - before.kernel[...]).max()) > 0.02


@pytest.mark.slow
def test_a_pipeline_divides_it_and_trains_as_without() -> None:
    layer_stack, outer, layers = stack(4)
    tx, data = low_precision(optax.adamw(1e-2)), batches(3)
    mesh = make_mesh(stage=2, fsdp=2, devices=jax.devices()[:4])
    rules, schedule = ShardingRules(mesh=mesh, min_bytes=64), lt.pipeline.schedule(num_stages=2, num_microbatches=4)
    pipeline = lt.pipeline.value_and_grad(layer_stack, schedule, mesh=mesh)

    def plain_loss(model: Any, batch: Any) -> Any:
        return layer_stack.apply(model["outer"], model["layers"], batch)

    def made(loss: Any, **options: Any) -> lt.Trainer:
        return lt.Trainer(jax.tree.map(jnp.array, {"outer": outer, "layers": layers}), loss, tx, **options)

    trainer, other = made(None, sharding=rules, pipeline=pipeline), made(plain_loss)
    got, expected = (one.fit(data, num_steps=3, progress=False) for one in (trainer, other))
    assert [record["loss"] for record in got] == pytest.approx([record["loss"] for record in expected], rel=1e-3)
    for part in ("up", "down"):  # both have whole blocks on each device
        codes, scales = jax.tree.leaves(trainer.state.opt_state.inner[0].mu["layers"][part])
        assert (codes.dtype, codes.shape) == (jnp.uint8, (4, 256, 256))
        assert codes.addressable_shards[0].data.size * 4 == codes.size
        assert scales.sharding.spec[0] == codes.sharding.spec[0]
