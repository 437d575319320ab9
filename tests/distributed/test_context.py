"""Tokens of rows on eight devices: losses and gradients beside one device's, collectives, bytes, mistakes."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P
from jax.sharding import AxisType

import lowtide as lt
from lowtide.core import ConfigError, DataError, SelectionError, activation_sharding, map_with_paths
from lowtide.losses import _cross_entropy
from lowtide.models import DecoderConfig, Experts
from lowtide.ops import AttentionMask, _blocks, _tiled_map, attention
from lowtide.train import ShardingRules, array_data, make_mesh

LENGTH, VOCABULARY = 176, 61  # of which no part is as large as a weight's axis
MESHES = [{"context": 8}, {"data": 2, "tensor": 2, "context": 2}]
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 2,
    "num_heads": 8,
    "num_kv_heads": 2,  # fewer than the devices of an axis
    "head_dim": 8,
}


ATTENTION: dict[str, Any] = {
    "sliding_window": 7,
    "sliding_layers": (True, False),
    "attention_sinks": True,
    "attention_soft_cap": 5,
}
EXPERTS = Experts(num_experts=4, num_experts_per_token=2, intermediate_size=12, router_loss_coef=1)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Several blocks, tiles and chunks of what a device has."""
    monkeypatch.setattr(_blocks, "_LEAST_ROWS", 1)
    monkeypatch.setattr(_blocks, "block_size", lambda *_: 48)
    monkeypatch.setattr(_tiled_map, "tile_size", lambda *_: 30)
    monkeypatch.setattr(_cross_entropy, "_MOST_CHUNK", 40)
    yield


def decoder(lora: bool = False, **changed: Any) -> Any:
    model = lt.models.init(DecoderConfig(**{**SIZES, **changed}), key=jax.random.key(0))
    if not lora:
        return model
    model = lt.lora.add(model, lt.lora.Config(rank=4), key=jax.random.key(1))
    return map_with_paths(lambda path, leaf: leaf + 0.02 if "lora_" in path else leaf, model)


def packed(num_rows: int = 4, length: int = LENGTH) -> dict[str, np.ndarray]:
    """Rows of documents that begin anywhere, with padding after them."""
    drawn = np.random.default_rng(0)
    tokens, labels = drawn.integers(0, VOCABULARY, (2, num_rows, length)).astype(np.int32)
    begins = drawn.random((num_rows, length)) < 0.06
    begins[:, 0] = True
    at = np.arange(length)
    positions = at - np.maximum.accumulate(np.where(begins, at, 0), axis=1)
    segments = np.cumsum(begins, axis=1) * (at < length - 9)
    labels[segments == 0] = -100
    return {
        "tokens": tokens,
        "labels": labels,
        "segment_ids": segments.astype(np.int32),
        "positions": positions.astype(np.int32),
    }


def divided(rules: ShardingRules) -> contextlib.AbstractContextManager[None]:
    """As the trainer traces a step."""
    mesh: Any = rules.mesh.abstract_mesh
    return activation_sharding(dataclasses.replace(rules, mesh=mesh).constrain, mesh)


def gradients(wrt: str, remat: bool) -> Any:
    return lt.value_and_grad(lambda model, batch: lt.models.loss(model, batch, remat=remat)[0], wrt=wrt)


def on_devices(fn: Any, sizes: dict[str, int], model: Any, batch: Any) -> tuple[Any, str]:
    """Return what a function of a model and a batch gives on a mesh, and its program."""
    rules = ShardingRules(mesh=make_mesh(**sizes), min_bytes=0)

    def run(model: Any, batch: Any) -> Any:
        with divided(rules):
            return fn(model, batch)

    arguments = rules.place(model), rules.batch(batch)
    compiled = jax.jit(run).lower(*arguments).compile()
    return compiled(*arguments), compiled.as_text()


def assert_same(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


def collectives(program: str) -> dict[str, list[list[int]]]:
    """Return the shapes of arrays of floating-point numbers that each kind of collective of a program moves."""
    found: dict[str, list[list[int]]] = {}
    for result, kind in re.findall(
        r"= (.*?) (all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute)(?:-start)?\(", program
    ):
        shapes = re.findall(r"(?:f|bf)\d+\[([\d,]*)\]", result)
        if shapes:
            found.setdefault(kind, []).extend([int(size) for size in shape.split(",") if size] for shape in shapes)
    return found


def assert_tokens_are_exchanged_for_heads(program: str, sizes: dict[str, int]) -> None:
    moved = collectives(program)
    # No tokens are gathered or sent to a neighbour; weights are, along other axes.
    tokens = {LENGTH // by for by in (1, 2, 4, 8)}
    assert moved["all-to-all"] and all(tokens & {*shape} for shape in moved["all-to-all"])
    sent = [shape for kind in ("all-gather", "collective-permute") for shape in moved.get(kind, [])]
    assert not any(tokens & {*shape} for shape in sent) and (not sent or len(sizes) > 1)
    # Of the loss and of trained weights, once; along tensor of activations, as without an axis of tokens.
    assert "tensor" in sizes or not any(tokens & {*shape} for shape in moved["all-reduce"])


# Tests of adapters and of other decoders have recomputation and FSDP.
@pytest.mark.slow_after(1)
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_a_decoder_has_the_loss_and_gradients_of_one_device(sizes: dict[str, int]) -> None:
    model, batch, fn = decoder(), packed(), gradients("**", remat=False)
    found, program = on_devices(fn, sizes, model, batch)
    assert_same(found, jax.jit(fn)(model, batch))
    assert_tokens_are_exchanged_for_heads(program, sizes)


@pytest.mark.slow
def test_adapters_train_as_on_one_device() -> None:
    """With recomputation on the mesh whose other axes divide rows and heads."""
    model, batch, fn = decoder(lora=True), packed(), gradients("**/lora_*", True)
    found, _ = on_devices(fn, MESHES[1], model, batch)
    assert_same(found, jax.jit(fn)(model, batch))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "remat"), [(ATTENTION, True), ({"experts": EXPERTS}, False)], ids=["windows and sinks", "experts"]
)
def test_other_decoders_are_those_of_one_device(changed: dict[str, Any], remat: bool) -> None:
    model, batch, fn = decoder(**changed), packed(), gradients("**/weight", remat)
    found, program = on_devices(fn, {"fsdp": 2, "context": 4}, model, batch)
    assert_same(found, jax.jit(fn)(model, batch))
    if "experts" in changed:
        assert not any(LENGTH in shape for shape in collectives(program).get("all-gather", []))
    else:
        assert_tokens_are_exchanged_for_heads(program, {"fsdp": 2, "context": 4})


@pytest.mark.slow
def test_rows_that_cannot_be_divided_are_on_every_device_with_their_tokens_divided() -> None:
    rules = ShardingRules(mesh=make_mesh(fsdp=2, context=4))
    model, batch = decoder(), packed(3)
    placed = rules.batch(batch, None)
    assert {leaf.sharding.spec for leaf in placed.values()} == {P(None, "context")}

    def run(model: Any, batch: Any) -> Any:
        with divided(rules):
            return lt.models.loss(model, batch)[0]

    found = jax.jit(run)(rules.place(model), placed)
    np.testing.assert_allclose(found, lt.models.loss(model, batch)[0], rtol=0, atol=1e-5)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("heads", "groups", "tensor", "told", "kind"),
    [
        (8, 8, 1, {"mask": AttentionMask(window=9)}, "Auto"),
        (4, 1, 1, {"mask": AttentionMask(causal=False)}, "Explicit"),
        (12, 6, 1, {"soft_cap": 2.0}, "Auto"),  # neither divides the other
        (8, 1, 2, {"sinks": np.linspace(-1, 1, 8, dtype=np.float32)}, "Explicit"),
        (24, 3, 2, {"mask": AttentionMask(segment_ids=packed(2, 40)["segment_ids"])}, "Auto"),
        (24, 3, 2, {"mask": AttentionMask(segment_ids=packed(2, 40)["segment_ids"])}, "Explicit"),
    ],
)
def test_attention_of_ones_own_exchanges_tokens_for_heads(
    heads: int, groups: int, tensor: int, told: dict[str, Any], kind: str
) -> None:
    drawn = np.random.default_rng(0)
    q, k, v = (jnp.asarray(drawn.normal(size=(2, 40, n, 8)), jnp.float32) for n in (heads, groups, groups))

    def fn(q: Any, k: Any, v: Any) -> Any:
        return jax.grad(lambda *given: jnp.mean(jnp.sin(attention(*given, **told))), (0, 1, 2))(q, k, v)

    expected = jax.jit(fn)(q, k, v)
    mesh = jax.make_mesh(
        (tensor, 4), ("tensor", "context"), axis_types=(AxisType[kind],) * 2, devices=jax.devices()[: 4 * tensor]
    )
    with jax.set_mesh(mesh):
        given = [jax.device_put(each, P(None, "context")) for each in (q, k, v)]
        compiled = jax.jit(fn).lower(*given).compile()
        found = compiled(*given)
    assert_same(found, expected)
    assert "all-to-all" in compiled.as_text()


@pytest.mark.slow
def test_a_trainer_fits_and_evaluates_as_on_one_device() -> None:
    batch = packed(18)
    data = array_data(batch, 8, drop_remainder=False)

    def fitted(**options: Any) -> tuple[list[float], float]:
        trainer = lt.Trainer(decoder(), lt.models.loss, optax.adamw(1e-2), num_microbatches=2, **options)
        records = trainer.fit(data, num_steps=2, progress=False)
        return [each["loss"] for each in records if "loss" in each], trainer.evaluate(data)["loss"]

    expected = fitted()
    found = fitted(sharding=ShardingRules(mesh=make_mesh(fsdp=2, context=4), min_bytes=0))
    assert len(expected[0]) == 2
    np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=1e-5)
    np.testing.assert_allclose(found[1], expected[1], rtol=0, atol=1e-5)


def test_where_arrays_are() -> None:
    assert dict(make_mesh(context=4).shape) == {"data": 1, "fsdp": 2, "context": 4, "tensor": 1}
    assert dict(make_mesh(context=-1, data=2).shape) == {"data": 2, "fsdp": 1, "context": 4, "tensor": 1}
    rules = ShardingRules(mesh=make_mesh(fsdp=2, context=4))
    batch = {"tokens": np.zeros((4, 16), np.int32), "image": np.zeros((4, 3), np.float32), "weight": np.ones(4)}
    with pytest.raises(DataError, match=r"(?s)batch leaf image: its tokens.*multiple of 4 \(context 4\).*got: 3 tok"):
        rules.batch(batch)
    with pytest.raises(DataError, match=r"(?s)its tokens cannot be sharded.*hint: pad the rows.*context_leaves="):
        rules.batch_shapes({"tokens": np.zeros((4, 18), np.int32)})
    placed = dataclasses.replace(rules, context_leaves="tokens").batch(batch)
    specs = {name: leaf.sharding.spec for name, leaf in placed.items()}
    rows = ("data", "fsdp")
    assert specs == {"tokens": P(rows, "context"), "image": P(rows), "weight": P(rows)}
    alone = jax.make_mesh((8,), ("context",), axis_types=(AxisType.Auto,))
    assert ShardingRules(mesh=alone).batch(batch["tokens"]).sharding.spec == P((), "context")


def test_mistakes_have_errors_of_their_own() -> None:
    mesh = make_mesh(context=8)
    rules = ShardingRules(mesh=mesh, min_bytes=0)
    with pytest.raises(ConfigError, match=r"(?s)batch_axes: 'context' shards the tokens.*hint:"):
        ShardingRules(mesh=mesh, batch_axes="context")
    with pytest.raises(ConfigError, match=r"(?s)context_leaves '\*x' is not a regular expression.*hint:"):
        ShardingRules(mesh=mesh, context_leaves="*x")
    few = decoder(num_heads=4, num_kv_heads=2)
    trainer = lt.Trainer(few, lt.models.loss, optax.sgd(0.1), sharding=rules)
    with pytest.raises(ConfigError, match=r"(?s)4 query heads cannot.*over 8 devices \(context 8\).*hint: .*divides 4"):
        trainer.fit([packed(4)], num_steps=1, progress=False)
    with pytest.raises(DataError, match=r"(?s)batch leaf \w+: its tokens.*a multiple of 8.*got: 45 tokens per row"):
        trainer.fit([packed(4, 45)], num_steps=1, progress=False)
    q = jnp.ones((1, 20, 8, 4))
    with jax.set_mesh(mesh), pytest.raises(ConfigError, match=r"(?s)20 tokens cannot be sharded.*a multiple of 8"):
        jax.jit(attention)(q, q, q)
    both = make_mesh(tensor=2, context=4)
    with (
        jax.set_mesh(both),
        pytest.raises(ConfigError, match=r"(?s)12 query heads.*\(context 4 × tensor 2\).*divides 6"),
    ):
        jax.jit(attention)(*(jnp.ones((1, 16, 12, 4)),) * 3)
    schedule = lt.pipeline.schedule("1f1b", num_stages=2, num_microbatches=2)
    staged = ShardingRules(mesh=make_mesh(stage=2, context=4))
    with pytest.raises(ConfigError, match=r"(?s)pipeline cannot shard the tokens.*'context'.*hint: .*fsdp"):
        lt.Trainer(decoder(), None, optax.sgd(0.1), sharding=staged, pipeline=schedule)
    step = lt.offload.layerwise_step(decoder().stack, optax.sgd(0.1))
    with pytest.raises(ConfigError, match=r"(?s)layerwise step cannot be combined with an axis context.*hint:"):
        lt.Trainer(decoder(), lt.models.loss, step, sharding=rules)


def test_leaves_and_sizes_that_divide_nothing_are_refused() -> None:
    rules = ShardingRules(mesh=make_mesh(context=8), context_leaves="words")
    for place in (rules.batch, rules.batch_shapes):
        with pytest.raises(SelectionError, match=r"context_leaves 'words' selects no leaf(.|\n)*tokens(.|\n)*hint:"):
            place({"tokens": np.zeros((2, 16), np.int32)})
        with pytest.raises(DataError, match=r"batch leaf words holds no numbers"):
            place({"words": np.full((2, 16), "a")})
    with pytest.raises(
        ConfigError, match=r"make_mesh: context must be an integer .*, not '4'\nhint: use 1 or more, or -1"
    ):
        make_mesh(context="4")  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
@pytest.mark.tpu_aot
@pytest.mark.usefixtures("little_optimized")
def test_activations_of_a_device_are_an_eighth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled for one chip and for eight: sequences of 65,536 tokens, whose arrays do not fit into a chip's cache."""
    monkeypatch.undo()
    # Of two heads a device the kernel's sums and segments, which have 128 columns, are a few hundredths at this width.
    wide = {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 8192, "num_layers": 4}
    config = DecoderConfig(**{**SIZES, **wide, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128})
    options: dict[str, Any] = {"dtype": jnp.bfloat16, "compute_dtype": jnp.bfloat16, "key": jax.random.key(0)}

    def made() -> Any:
        return lt.lora.add(lt.models.init(config, **options), lt.lora.Config(rank=8), key=jax.random.key(1))

    model, fn = jax.eval_shape(made), gradients("**/lora_*", True)
    batch = {name: jax.ShapeDtypeStruct((1, 65536), jnp.int32) for name in packed()}
    rules = ShardingRules(mesh=make_mesh(context=8))

    def run(model: Any, batch: Any) -> Any:
        with divided(rules):
            return fn(model, batch)

    def place(path: str, leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=rules.of(path, leaf))

    roles = {"model": 0, "batch": 1}
    alone = lt.memory.analyze(fn, model, batch, target="v5e:2x4", roles=roles)
    shared = lt.memory.analyze(
        run, map_with_paths(place, model), rules.batch_shapes(batch), target="v5e:2x4", roles=roles
    )
    assert shared.by_role["batch"] * 8 == alone.by_role["batch"]
    assert math.isclose(shared.by_role["temporaries"] * 8, alone.by_role["temporaries"], rel_tol=0.1)
