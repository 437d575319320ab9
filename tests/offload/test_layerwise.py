from __future__ import annotations

import dataclasses
import functools
import operator
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowtide as lt
from lowtide.core import ConfigError, LayerStack, PlacementError, SelectionError, StructureError
from lowtide.models import DecoderConfig, init
from lowtide.offload import Clip, layerwise_step

CONFIG = DecoderConfig(
    vocab_size=48, hidden_size=16, intermediate_size=24, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=4
)
HOST = {"layers": "host", "outer": "host", "opt_state": "host", "inputs": "host"}
DEVICE = dict.fromkeys(HOST, "device")


@functools.cache
def decoder(tied: bool = False) -> Any:
    return jax.jit(functools.partial(init, dataclasses.replace(CONFIG, tie_embeddings=tied)))(key=jax.random.key(0))


def copy(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), tree)


def batches(count: int, size: int = 4, length: int = 8, seed: int = 0) -> list[dict[str, jax.Array]]:
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        tokens = rng.integers(0, CONFIG.vocab_size, (size, length + 1))
        labels = np.where(rng.random((size, length)) < 0.2, -100, tokens[:, 1:])
        made.append({"tokens": jnp.asarray(tokens[:, :-1], jnp.int32), "labels": jnp.asarray(labels, jnp.int32)})
    return made


def num_targets(batch: Any) -> Any:
    return jnp.sum(batch["labels"] != -100)


def plain(model: Any, tx: Any, data: list[Any]) -> tuple[Any, list[tuple[float, float]]]:
    """Training with all gradients, all state and one update a step."""

    @jax.jit
    def step(params: Any, opt: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: model.stack.apply(p["outer"], p["layers"], batch, remat=True)[0])(
            params
        )
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, loss, optax.tree.norm(grads)

    params = {"outer": copy(model.outer), "layers": copy(model.layers)}
    opt, seen = tx.init(params), []
    for batch in data:
        params, opt, loss, norm = step(params, opt, batch)
        seen.append((float(loss), float(norm)))
    return params, seen


def layerwise(model: Any, tx: Any, data: list[Any], **options: Any) -> tuple[Any, list[tuple[float, float]]]:
    step = layerwise_step(model.stack, tx, **options)
    state, frozen = step.init(copy(model.outer), copy(model.layers))
    jitted, seen = jax.jit(step, donate_argnums=0), []
    for batch in data:
        state, metrics = jitted(state, frozen, batch)
        seen.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    outer, layers = step.parameters(state, frozen)
    return {"outer": outer, "layers": layers}, seen


def assert_close(ours: Any, theirs: Any, atol: float = 1e-6) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=atol), ours, theirs)


@pytest.mark.slow
def test_twenty_steps_equal_plain_adam() -> None:
    ours, theirs = layerwise(decoder(True), optax.adam(1e-3), batches(20), place=HOST), plain_adam(True)
    assert_close(ours[0], theirs[0])
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-5)


@pytest.mark.parametrize(
    ("place", "tied"),
    [pytest.param(HOST, True, id="host"), pytest.param(DEVICE, False, id="device", marks=pytest.mark.slow)],
)
def test_microbatches_equal_the_whole_batch(place: dict[str, str], tied: bool) -> None:
    options: Any = {"place": place, "num_microbatches": 4, "weight": num_targets}
    ours, theirs = layerwise(decoder(tied), optax.adam(1e-3), batches(20), **options), plain_adam(tied)
    assert_close(ours[0], theirs[0])
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-5)


@functools.cache
def plain_adam(tied: bool) -> Any:
    """Twenty steps of plain training, which several tests compare with."""
    return plain(decoder(tied), optax.adam(1e-3), batches(20))


@pytest.mark.slow
def test_the_exact_norm_clips_like_optax() -> None:
    model, data = small(), batches(20)
    theirs = plain(model, optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-3)), data)
    ours = layerwise(model, optax.adam(1e-3), data, clip=Clip(max_norm=0.1))
    assert_close(ours[0], theirs[0])
    assert min(norm for _, norm in ours[1]) > 0.1  # so that every step was clipped


def small(dtype: Any = jnp.float32) -> Any:
    """What costs less to compile than a decoder."""

    def last(outer: Any, h: Any, batch: Any) -> Any:
        logits = (h @ outer["head"]).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(batch["labels"], 0))
        return jnp.mean(losses, where=batch["labels"] != -100), {}

    stack = LayerStack(
        first=lambda outer, batch: outer["embed"][batch["tokens"]],
        block=lambda layer, h, batch: h + jnp.tanh(h @ layer["up"]) @ layer["down"],
        last=last,
    )
    rng = np.random.default_rng(0)
    shapes = {"embed": (48, 16), "head": (16, 48), "up": (3, 16, 24), "down": (3, 24, 16)}
    made = {name: jnp.asarray(0.3 * rng.normal(size=shape), dtype) for name, shape in shapes.items()}
    return types.SimpleNamespace(
        stack=stack,
        outer={name: made[name] for name in ("embed", "head")},
        layers={name: made[name] for name in ("up", "down")},
    )


def gradients(model: Any) -> Any:
    """Of its parameters, compiled once."""
    return jax.jit(jax.grad(lambda params, batch: model.stack.apply(params["outer"], params["layers"], batch)[0]))


@pytest.mark.slow
def test_the_previous_norm_clips_the_next_step() -> None:
    model, data = small(), batches(6)
    grads_of = gradients(model)
    ours, seen = layerwise(model, optax.sgd(0.1), data, clip=Clip(max_norm=0.1, mode="previous"))
    params, previous = {"outer": model.outer, "layers": model.layers}, 0.0

    @jax.jit
    def plain_step(params: Any, grads: Any, factor: Any) -> Any:
        return jax.tree.map(lambda p, g: p - 0.1 * factor * g, params, grads), optax.tree.norm(grads)

    for batch in data:
        factor = 0.1 / previous if previous > 0.1 else 1.0
        params, norm = plain_step(params, grads_of(params, batch), factor)
        previous = float(norm)
    assert_close(ours, params)
    assert seen[-1][1] == pytest.approx(previous, rel=1e-4)


@pytest.mark.slow
def test_each_layer_can_be_clipped_by_its_own_norm() -> None:
    model, data = small(), batches(2)
    grads_of = gradients(model)
    ours, _ = layerwise(model, optax.sgd(0.1), data, clip=Clip(max_norm=0.05, mode="layer"))
    params, clip = {"outer": model.outer, "layers": model.layers}, optax.clip_by_global_norm(0.05).update

    @jax.jit
    def plain_step(params: Any, grads: Any) -> Any:
        layers = [clip(jax.tree.map(lambda g, i=i: g[i], grads["layers"]), None)[0] for i in range(CONFIG.num_layers)]
        outer = jax.tree.map(lambda g: clip(g, None)[0], grads["outer"])
        clipped = {"outer": outer, "layers": jax.tree.map(lambda *x: jnp.stack(x), *layers)}
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, clipped)

    for batch in data:
        params = plain_step(params, grads_of(params, batch))
    assert_close(ours, params)


@pytest.mark.slow
def test_adapters_alone_train_and_the_base_is_only_read() -> None:
    base = decoder()
    model = lt.lora.add(base, lt.lora.Config(rank=2, targets="layers/**/*_proj"), key=jax.random.key(1))
    data, tx = batches(5), optax.adam(1e-3)
    step = layerwise_step(
        model.stack, tx, wrt="**/lora_*", num_microbatches=2, weight=num_targets, clip=Clip(max_norm=0.1)
    )
    state, frozen = step.init(model.outer, copy(model.layers))
    assert not jax.tree.leaves(state.outer) and lt.core.tree_bytes(state.layers) < lt.core.tree_bytes(frozen["layers"])
    jitted = jax.jit(step, donate_argnums=0)

    params = {"outer": model.outer, "layers": model.layers}
    trainable, rest = lt.partition(params, "**/lora_*")
    chain = optax.chain(optax.clip_by_global_norm(0.1), tx)
    opt = chain.init(trainable)

    @jax.jit
    def plain_step(trainable: Any, opt: Any, batch: Any) -> Any:
        def loss_fn(trainable: Any) -> Any:
            whole = lt.combine(trainable, rest)
            return model.stack.apply(whole["outer"], whole["layers"], batch)[0]

        updates, opt = chain.update(jax.grad(loss_fn)(trainable), opt, trainable)
        return optax.apply_updates(trainable, updates), opt

    for batch in data:
        state, _ = jitted(state, frozen, batch)
        trainable, opt = plain_step(trainable, opt, batch)
    outer, layers = step.parameters(state, frozen)
    assert_close({"outer": outer, "layers": layers}, lt.combine(trainable, rest))


@pytest.mark.slow
def test_a_second_step_compiles_nothing(compilations: Any) -> None:
    model, data = small(), batches(3)
    step = layerwise_step(model.stack, optax.adamw(1e-3), clip=Clip(max_norm=1.0), num_microbatches=2)
    state, frozen = step.init(copy(model.outer), copy(model.layers))
    jitted = jax.jit(step, donate_argnums=0)
    state, _ = jitted(state, frozen, data[0])
    with compilations.none():
        for batch in data[1:]:
            state, _ = jitted(state, frozen, batch)
    assert int(state.step) == 3


@pytest.mark.slow
def test_state_is_where_it_was_placed() -> None:
    model = decoder()
    step = layerwise_step(model.stack, optax.adam(1e-3), place=HOST)
    state, _ = step.init(model.outer, model.layers)
    kinds = {path: leaf.sharding.memory_kind for path, leaf in lt.core.leaves_with_paths(state)}
    on_device = {path for path, kind in kinds.items() if kind == "device"}
    assert "layers_opt/0/mu/layers/attn/q_proj/weight" not in on_device
    assert all("norm" in path or path.endswith("count") or path == "step" for path in on_device), on_device


@pytest.mark.slow
def test_a_tree_of_half_precision_masters_keeps_its_dtype() -> None:
    model, data = small(jnp.bfloat16), batches(6)
    ours, seen = layerwise(model, optax.adam(1e-3), data, num_microbatches=2)
    theirs, want = plain(model, optax.adam(1e-3), data)
    assert {leaf.dtype for leaf in jax.tree.leaves(ours)} == {jnp.dtype("bfloat16")}
    np.testing.assert_allclose([loss for loss, _ in seen], [loss for loss, _ in want], rtol=0.01)
    assert_close(*(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree) for tree in (ours, theirs)), atol=0.03)


# --- bytes ---------------------------------------------------------------------------------------------------------


ROWS = 128
"""Of a microbatch: more take the compiler longer."""


def stack_report(
    place: dict[str, str],
    *,
    num_layers: int = 4,
    num_microbatches: int = 1,
    target: str = "v5e",
    tx: Any = None,
    width: int = 1024,
    **options: Any,
) -> Any:
    """An MLP stack with Adam, compiled for some hardware."""
    stack = lt.LayerStack(
        first=lambda outer, batch: batch["x"],
        block=lambda layer, h, batch: h + jax.nn.gelu(h @ layer["up"]) @ layer["down"],
        last=lambda outer, h, batch: (jnp.mean((h - batch["y"]) ** 2), {}),
    )
    layers = {
        "up": jax.ShapeDtypeStruct((num_layers, width, 4 * width), jnp.float32),
        "down": jax.ShapeDtypeStruct((num_layers, 4 * width, width), jnp.float32),
    }
    batch = {name: jax.ShapeDtypeStruct((ROWS * num_microbatches, width), jnp.float32) for name in ("x", "y")}
    step = layerwise_step(stack, tx or optax.adam(1e-3), place=place, num_microbatches=num_microbatches, **options)
    state, frozen = step.init({}, layers)
    program = lt.memory.compile(step, state, frozen, batch, target=target, donate_argnums=0)
    if "host" in (place["layers"], place["opt_state"]):
        trees = {"layers": ("layers",), "opt_state": ("layers_opt",)}
        hosted = [name for key, names in trees.items() if place[key] == "host" for name in names]
        lt.offload.verify(program, {f"0/{name}/**/{{up,down}}": "host" for name in hosted})
    return program.report(roles={"batch": 2})


@functools.cache
def four_layers() -> Any:
    """What the tests of bytes on a TPU compare with."""
    return stack_report(HOST)


@pytest.mark.slow
@pytest.mark.tpu_aot
def test_device_bytes_do_not_grow_with_the_layers() -> None:
    four, eight = four_layers(), stack_report(HOST, num_layers=8)
    assert eight.device_bytes < 1.01 * four.device_bytes
    layer = 2 * 4 * 1024 * 1024 * 4
    assert eight.host.argument_bytes == 3 * 8 * layer == eight.host.alias_bytes
    assert eight.host.temp_bytes == 9 * ROWS * 1024 * 4  # what enters each block, and what leaves the last


@pytest.mark.slow
@pytest.mark.tpu_aot
def test_device_bytes_do_not_grow_with_the_microbatches() -> None:
    two, eight = (stack_report(HOST, num_microbatches=n, width=256) for n in (2, 8))
    assert eight.device.temp_bytes < 1.03 * two.device.temp_bytes


@pytest.mark.slow
@pytest.mark.tpu_aot
@pytest.mark.parametrize("mode", ["exact", "layer"])  # the former scales as "previous" does, too
def test_clipping_costs_no_memory(mode: Any) -> None:
    plain, clipped = four_layers(), stack_report(HOST, clip=Clip(max_norm=1.0, mode=mode))
    assert clipped.device_bytes < 1.15 * plain.device_bytes  # code, and holes in the heap
    assert clipped.host_bytes == plain.host_bytes


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("tx", "num_microbatches"), [(optax.adamw(1e-3), 1), (optax.adafactor(1e-3), 2)])
def test_a_cpu_copies_no_stack(tx: Any, num_microbatches: int) -> None:
    """A copy of each stack at each layer took twice the time of the layers."""
    options = {"target": "cpu", "num_microbatches": num_microbatches, "tx": tx}
    four, twelve = (stack_report(DEVICE, num_layers=n, **options) for n in (4, 12))
    inputs = 8 * num_microbatches * ROWS * 1024 * 4  # what enters eight more blocks
    assert twelve.device.temp_bytes - four.device.temp_bytes < inputs + 2**20


# --- bad input -----------------------------------------------------------------------------------------------------


def noisy_stack() -> Any:
    def block(layer: Any, h: Any, batch: Any) -> Any:
        keep = jax.random.bernoulli(h["key"], 0.8, h["x"].shape)
        return {"x": h["x"] * keep + jnp.tanh(h["x"] @ layer["w"]), "key": jax.random.split(h["key"])[0]}

    return LayerStack(
        first=lambda outer, batch: {"x": batch["x"] * outer["scale"], "key": batch["key"][0]},
        block=block,
        last=lambda outer, h, batch: (jnp.mean(h["x"] ** 2), {}),
    )


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_random_keys_travel_with_the_activations_and_64_bits_keep_their_digits(num_microbatches: int) -> None:
    stack, tx = noisy_stack(), optax.chain(optax.clip_by_global_norm(1e-3), optax.sgd(1.0))
    with jax.enable_x64(True):
        outer, layers = {"scale": jnp.float64(1.5)}, {"w": jnp.linspace(-1, 1, 48).reshape(3, 4, 4)}
        batch = {"x": jnp.sin(jnp.arange(24.0)).reshape(6, 4), "key": jax.random.split(jax.random.key(0), 6)}

        def loss(params: Any) -> Any:
            split = jax.tree.map(lambda x: x.reshape(num_microbatches, -1, *x.shape[1:]), batch)
            parts = [jax.tree.map(operator.itemgetter(m), split) for m in at]
            losses = [stack.apply(*params, part)[0] for part in parts]
            return sum(weight * of_part for weight, of_part in zip(weights, losses, strict=True)) / sum(weights)

        at, weights = range(num_microbatches), (1 / 3, 1 / 7)[:num_microbatches]

        @jax.jit
        def plain_step(params: Any) -> Any:
            return optax.apply_updates(params, tx.update(jax.grad(loss)(params), tx.init(params))[0])

        step = layerwise_step(
            stack,
            optax.sgd(1.0),
            clip=Clip(max_norm=1e-3),
            num_microbatches=num_microbatches,
            weight=lambda part: jnp.where(jnp.all(part["x"] == batch["x"][:3]), 1 / 3, 1 / 7),
        )
        state, frozen = step.init(outer, layers)
        state, _ = jax.jit(step)(state, frozen, batch)
        theirs = plain_step((outer, layers))
        for a, b in zip(*map(jax.tree.leaves, (step.parameters(state, frozen), theirs)), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=1e-13)


def test_a_stack_without_layers_is_refused() -> None:
    with pytest.raises(StructureError, match=r"(?s)no layers.*hint: use lt.value_and_grad"):
        layerwise_step(noisy_stack(), optax.sgd(1.0)).init({"scale": jnp.ones(())}, {"w": jnp.zeros((0, 4, 4))})


def test_what_is_no_stack_is_refused() -> None:
    with pytest.raises(
        StructureError, match=r"stack must be a lowtide\.LayerStack, not <function.*\nhint: .*offload\.optimizer"
    ):
        layerwise_step(lambda x: x, optax.adam(1e-3))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ({"layer": "host"}, r"a key of place must be \"layers\", .*, not 'layer'\nhint: did you mean \"layers\""),
        ({"layers": "disk"}, r"place of layers must be \"host\" or \"device\", not 'disk'\nhint: leave it out"),
    ],
)
def test_unknown_places_are_refused(place: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        layerwise_step(decoder().stack, optax.adam(1e-3), place=place)


@pytest.mark.parametrize("options", [{"num_microbatches": 0}, {"chunk_bytes": 0}])
def test_numbers_out_of_range_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"must be an integer of at least 1, not 0\nhint:"):
        layerwise_step(decoder().stack, optax.adam(1e-3), **options)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("max_norm", "mode"), [(0, "exact"), (float("nan"), "exact"), (1.0, "global")])
def test_a_clip_that_cannot_be_is_refused(max_norm: float, mode: Any) -> None:
    with pytest.raises(ConfigError, match=r"(?s)hint:"):
        Clip(max_norm=max_norm, mode=mode)


def test_an_optimizer_that_mixes_leaves_is_refused() -> None:
    model = decoder()
    step = layerwise_step(model.stack, optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)))
    with pytest.raises(
        StructureError, match=r"(?s)update of layer 0: attn/.* depends on the gradient of .*hint: remove clipping"
    ):
        step.init(model.outer, model.layers)


def test_a_selection_without_stacked_leaves_is_refused() -> None:
    model = decoder()
    with pytest.raises(StructureError, match=r"(?s)no stacked leaf, below 'layers', is selected.*outer/embed.*hint:"):
        layerwise_step(model.stack, optax.adam(1e-3), wrt="outer/**").init(model.outer, model.layers)
    with pytest.raises(SelectionError, match="matches nothing"):
        layerwise_step(model.stack, optax.adam(1e-3), wrt="lora_*").init(model.outer, model.layers)


def test_an_outer_leaf_that_nothing_reads_is_refused() -> None:
    model = decoder()
    step = layerwise_step(model.stack, optax.adam(1e-3))
    state, frozen = step.init({**model.outer, "spare": jnp.ones((2, 2))}, model.layers)
    with pytest.raises(StructureError, match=r"(?s)outer/spare cannot train.*hint: .*!outer/spare"):
        jax.jit(step)(state, frozen, batches(1)[0])


def test_state_that_was_moved_is_refused() -> None:
    model = decoder()
    step = layerwise_step(model.stack, optax.adam(1e-3))
    state, frozen = step.init(model.outer, model.layers)
    with pytest.raises(
        PlacementError, match=r"layers/attn/.* is not in host memory, where place= puts it\nhint: .*to_host"
    ):
        jax.jit(step)(lt.offload.to_device(state), frozen, batches(1)[0])


def test_a_batch_that_does_not_split_is_refused() -> None:
    model = decoder()
    step = layerwise_step(model.stack, optax.adam(1e-3), num_microbatches=3)
    state, frozen = step.init(model.outer, model.layers)
    with pytest.raises(StructureError, match=r"(?s)batch leaf .*multiple of 3.*hint:"):
        jax.jit(step)(state, frozen, batches(1)[0])


# --- meshes, and other backends ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_sharded_layers_equal_one_device() -> None:
    """One leaf along its rows, the other along its columns."""
    model, data = small(), batches(3, size=8)
    devices = jax.devices()[:2]
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices)

    def place(path: Any, leaf: Any) -> Any:
        spec = [None] * leaf.ndim
        if leaf.ndim == 3:
            spec[1 if "up" in jax.tree_util.keystr(path) else 2] = "fsdp"
        return jax.device_put(leaf, jax.NamedSharding(mesh, jax.P(*spec)))

    step = layerwise_step(model.stack, optax.adam(1e-3), place=HOST, num_microbatches=2)
    state, frozen = step.init(*(jax.tree.map_with_path(place, copy(tree)) for tree in (model.outer, model.layers)))
    jitted = jax.jit(step, donate_argnums=0)
    for batch in data:
        batch = jax.device_put(batch, jax.NamedSharding(mesh, jax.P()))
        state, _ = jitted(state, frozen, batch)
    mu = state.layers_opt[0].mu["layers"]
    for axis, leaf in ((1, mu["up"]), (2, mu["down"])):
        assert leaf.sharding.spec[axis] == "fsdp" and leaf.sharding.memory_kind == "pinned_host"
    outer, layers = step.parameters(state, frozen)
    theirs, _ = layerwise(model, optax.adam(1e-3), data, place=DEVICE, num_microbatches=2)
    assert_close({"outer": outer, "layers": layers}, theirs, atol=1e-5)


@pytest.mark.slow
@pytest.mark.gpu_aot
def test_a_gpu_takes_stacked_state_in_host_memory() -> None:
    """Compile-only GPUs know no host arguments, so the state goes to the host and comes back inside the program.

    It is computed first: from JAX 0.11 on, XLA refuses to update what it has moved from an argument to the host.
    """
    stack = lt.LayerStack(
        first=lambda outer, batch: batch["x"],
        block=lambda layer, h, batch: h + jnp.tanh(h @ layer["w"]),
        last=lambda outer, h, batch: (jnp.mean(h**2), {}),
    )
    layers = {"w": jax.ShapeDtypeStruct((4, 1024, 1024), jnp.float32)}
    batch = {"x": jax.ShapeDtypeStruct((2048, 1024), jnp.float32)}
    step = layerwise_step(stack, optax.adam(1e-3), place=HOST, num_microbatches=2)
    state, frozen = layerwise_step(stack, optax.adam(1e-3), place=DEVICE).init({}, layers)

    def moved(state: Any, batch: Any) -> Any:
        hosted = jax.tree.map(lambda x: lt.offload.to_host(2 * x) if x.ndim > 1 else x, state)
        state, metrics = step(hosted, frozen, batch)
        return lt.offload.to_device(state), metrics

    report = lt.memory.analyze(moved, state, batch, target="h100", donate_argnums=0)
    leaf, h = 4 * 1024 * 1024 * 4, 1024 * 1024 * 4
    assert report.host.temp_bytes >= 3 * leaf + 2 * 5 * h
