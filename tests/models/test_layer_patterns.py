"""Models with layers of different kinds: every way to train them has the values of plain JAX."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowtide as lt
from lowtide import models
from lowtide.core import ConfigError
from lowtide.distributed import ShardingRules, make_mesh
from lowtide.models._generation import empty_cache
from lowtide.offload import layerwise_step

from .kinds import KINDS

TX = optax.sgd(0.3)


@functools.cache
def setup() -> tuple[models.Decoder, list[Any]]:
    """Return a model of four groups (delta net, attention) and three packed batches."""
    config = dataclasses.replace(KINDS["qwen3_5_text"], num_layers=8, delta_layers=(True, False) * 4)
    model = models.init(config, key=jax.random.key(0))
    rng = np.random.default_rng(0)
    segments = np.repeat([[1, 2, 0]], [20, 21, 3], axis=1).repeat(4, axis=0)
    positions = np.concatenate([np.arange(20), np.arange(24)])[None].repeat(4, axis=0)
    batches = [
        {
            "tokens": (tokens := rng.integers(1, 96, (4, 44))),
            "labels": np.where(segments > 0, np.roll(tokens, -1, axis=1), -100),
            "segment_ids": segments,
            "positions": positions,
        }
        for _ in range(3)
    ]
    return model, jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.int32), batches)


def loss(model: models.Decoder, batch: Any) -> Any:
    return models.loss(model, batch)


@functools.cache
def reference() -> tuple[list[float], Any]:
    """Losses and weights of three plain JAX steps."""
    model, batches = setup()
    losses: list[float] = []
    for batch in batches:
        value, grads = jax.jit(jax.value_and_grad(lambda model, batch: loss(model, batch)[0]))(model, batch)
        updates, _ = TX.update(grads, TX.init(model), model)
        model = optax.apply_updates(model, updates)
        losses.append(float(value))
    return losses, model


def copied() -> models.Decoder:
    return jax.tree.map(jnp.array, setup()[0])


def check(losses: Any, model: Any) -> None:
    want_losses, want = reference()
    np.testing.assert_allclose(losses, want_losses, rtol=2e-5)
    for ours, theirs in zip(*map(jax.tree.leaves, (model, want)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5)


def test_each_position_of_a_group_has_a_stack() -> None:
    model, _ = setup()
    assert {name: set(block) & {"delta", "attn"} for name, block in model.layers.items()} == {
        "block0": {"delta"},
        "block1": {"attn"},
    }
    assert {leaf.shape[0] for leaf in jax.tree.leaves(model.layers)} == {model.config.num_groups} == {4}
    assert model.external_name("layers/block1/attn/q_proj") == "model.layers.{layer:2+1}.self_attn.q_proj"


@pytest.mark.slow_after(4)
@pytest.mark.parametrize(
    "options", [{"remat": True}, {"remat": True, "layers_per_remat": 2}, {"save": ["delta_qkv", "attn_out"]}], ids=str
)
def test_recomputation_has_the_same_gradients(options: dict[str, Any]) -> None:
    model, batches = setup()
    names = options.get("save")

    def value(model: models.Decoder) -> Any:
        if names is None:
            return models.loss(model, batches[0], **options)[0]
        stack = model.stack
        block = lt.offload.checkpoint(stack.block, save=names, prevent_cse=False)
        return dataclasses.replace(stack, block=block).apply(model.outer, model.layers, batches[0])[0]

    want = jax.jit(jax.grad(lambda model: loss(model, batches[0])[0]))(model)
    got = jax.jit(jax.grad(value))(model)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), got, want)


@pytest.mark.slow
def test_remat_keeps_the_inputs_of_layers_and_recomputes_one_layer_at_a_time() -> None:
    model, batches = setup()

    def residuals(remat: bool) -> list[tuple[int, ...]]:
        def fn(model: models.Decoder) -> Any:
            return models.loss(model, batches[0], remat=remat)[0]

        pulled = jax.eval_shape(lambda model: jax.vjp(fn, model)[1], model)
        return [leaf.shape for leaf in jax.tree.leaves(pulled)]

    assert residuals(True).count((4, 4, 44, 32)) == 2  # [groups, rows, tokens, width], for each layer of a group
    assert sum(map(np.prod, residuals(True))) < 0.7 * sum(map(np.prod, residuals(False)))


@pytest.mark.slow
@pytest.mark.parametrize("place", ["device", "host"])
def test_layerwise_steps(place: str) -> None:
    model, batches = copied(), setup()[1]
    step = layerwise_step(model.stack, TX, place=dict.fromkeys(("layers", "outer", "opt_state", "inputs"), place))
    state, frozen = step.init(model.outer, model.layers)
    losses: list[float] = []
    for batch in batches:
        state, metrics = jax.jit(step, donate_argnums=0)(state, frozen, batch)
        losses.append(float(metrics["loss"]))
    outer, layers = step.parameters(state, frozen)
    check(losses, dataclasses.replace(model, outer=outer, layers=layers))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_pipelines_of_two_stages(name: str) -> None:
    model, batches = copied(), setup()[1]
    mesh = make_mesh(stage=2, devices=jax.devices()[:2])
    schedule = lt.pipeline.schedule(name, num_stages=2, num_microbatches=4)
    pipeline = lt.pipeline.value_and_grad(model.stack, schedule, mesh=mesh)
    trainer = lt.Trainer(model, None, TX, sharding=ShardingRules(mesh=mesh), pipeline=pipeline, wrt="**")
    records = trainer.fit(batches, num_steps=3, progress=False)
    check([record["loss"] for record in records], trainer.model)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"fsdp": 2, "tensor": 2}, {"data": 2}, {"context": 2}], ids=str)
def test_trainers_on_meshes(mesh: dict[str, int]) -> None:
    batches = setup()[1]
    devices = jax.devices()[: int(np.prod([*mesh.values()]))]
    rules = ShardingRules(mesh=make_mesh(**mesh, devices=devices))
    trainer = lt.Trainer(
        copied(), lambda model, batch: models.loss(model, batch, remat=True), TX, wrt="**", sharding=rules
    )
    records = trainer.fit(batches, num_steps=3, progress=False)
    check([record["loss"] for record in records], trainer.model)


@pytest.mark.slow
def test_plans() -> None:
    model, batches = copied(), setup()[1]
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), model)
    plan = lt.plan(shapes, batches[0], TX, loss_fn=loss, wrt="**", budget="40 MiB", target="cpu")
    names = {name for decision in plan.decisions for name in decision.names}
    assert {"delta_qkv", "attn_out", "mlp_gate"} <= names
    trainer = lt.Trainer(model, loss, TX, wrt="**", plan=plan)
    records = trainer.fit(batches, num_steps=3, progress=False)
    check([record["loss"] for record in records], trainer.model)


@pytest.mark.slow
def test_parameters_on_the_host() -> None:
    model, batches = setup()

    def value(layers: Any) -> Any:
        return lt.offload.scan(body, stack.first(model.outer, batches[0]), layers)[0]

    stack = model.stack

    def body(h: Any, layer: Any) -> Any:
        return stack.block(layer, h, batches[0]), None

    hosted = lt.offload.to_host(model.layers, "**")

    @jax.jit
    def gradients(layers: Any) -> Any:
        return jax.grad(lambda layers: stack.last(model.outer, value(layers), batches[0])[0])(layers)

    want = jax.jit(jax.grad(lambda model: loss(model, batches[0])[0]))(model).layers
    got = gradients(hosted)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), got, want)


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("kind", ["qwen3_5_text", "glm4_moe"])
def test_conversations_continue_and_go_back(kind: str) -> None:
    model = models.init(KINDS[kind], key=jax.random.key(1))
    options: dict[str, Any] = {"key": jax.random.key(0), "sampling": models.Sampling(temperature=0)}
    prompt = [5, 9, 13, 17, 3]
    want = [*models.stream(model, prompt, 9, **options)]
    conversation = models.Conversation(model)
    first = [*conversation.stream(prompt, 4, **options)]
    assert first + [*conversation.stream(prompt + first, 5, **options)] == want
    # A state cannot go back to an earlier token, so the text is processed again.
    assert [*conversation.stream(prompt, 3, **options)] == want[:3]
    assert models.cache_bytes(model.config, 1, 64) == sum(
        leaf.nbytes for leaf in jax.tree.leaves(empty_cache(model, jnp.ones((1, 64), jnp.int32))) if leaf.ndim > 2
    )


@pytest.mark.slow_after(2)
def test_layers_of_full_attention_alone_need_no_state() -> None:
    config = dataclasses.replace(KINDS["qwen3_5_text"], delta_layers=(False,) * 4)
    model = models.init(config, key=jax.random.key(0))
    assert "attn" in model.layers and not config.has_state
    assert len([*models.stream(model, [3, 4], 3, key=jax.random.key(0))]) == 3


def test_adapters_of_some_layers_leave_other_stacks_alone() -> None:
    model, _ = setup()
    config = lt.lora.Config(rank=2, targets="**/*_proj", layers=[1, 3])
    adapted = lt.lora.add(model, config, key=jax.random.key(0))
    paths = {match.path for match in lt.lora.report(adapted).matched}
    assert paths and all(path.startswith("layers/block1/") for path in paths)
    scale = adapted.layers["block1"]["attn"]["q_proj"]["weight"].layer_scale
    np.testing.assert_array_equal(scale, [1, 1, 0, 0])
    with pytest.raises(ConfigError, match=r"0 is not a layer (.|\n)*hint: the targets are in layers \[1, 3, 5, 7\]"):
        lt.lora.add(model, lt.lora.Config(rank=2, targets="**/q_proj", layers=[0]), key=jax.random.key(0))


def test_hidden_states_are_not_divided_as_logits() -> None:
    model = models.init(KINDS["granite"], key=jax.random.key(0))
    tokens = jnp.arange(6)[None]
    hidden = models.hidden_states(model, tokens)
    want = jnp.einsum("btd,vd->btv", hidden, model.outer["lm_head"]["weight"]) / 8
    np.testing.assert_allclose(models.logits(model, tokens), want, atol=1e-6)


@pytest.mark.slow
@pytest.mark.gpu_aot
def test_delta_nets_need_as_many_bytes_as_attention_and_grow_linearly() -> None:
    """Qwen3.5-9B's shapes on an H100; `benchmarks/families.py` has the same figures for a TPU v5e."""
    published = models.DecoderConfig(
        **{"vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 12288, "num_layers": 2, "num_heads": 16},
        **{"num_kv_heads": 4, "head_dim": 256, "rotary_fraction": 0.25, "qk_norm": "head", "norm_offset": 1.0},
        **{"attention_gate": True, "family": "qwen3_5_text"},
    )
    delta_net = models.DeltaNet(num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128)

    def temporaries(config: models.DecoderConfig, length: int) -> int:
        def make() -> models.Decoder:
            return models.init(config, key=jax.random.key(0), dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16)

        lora = lt.lora.Config(rank=16, alpha=32, targets="**/*_proj")
        model = lt.lora.add(jax.eval_shape(make), lora, key=jax.random.key(0))
        names = ("tokens", "labels", "segment_ids", "positions")
        batch = {name: jax.ShapeDtypeStruct((1, length), jnp.int32) for name in names}
        step = lt.value_and_grad(lambda model, batch: models.loss(model, batch, remat=True)[0], wrt="**/lora_*")
        return lt.memory.analyze(step, model, batch, target="h100").device.temp_bytes

    deltas = dataclasses.replace(published, delta_net=delta_net)
    short, long = temporaries(deltas, 4096), temporaries(deltas, 8192)
    assert short < 1.3 * temporaries(published, 4096)
    assert long < 2.1 * short
