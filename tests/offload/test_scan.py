"""Streaming layers: equal to `jax.lax.scan`, gradients where the parameters are, and no stack on the device."""

from __future__ import annotations

import functools
import gc
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lowtide.core import ConfigError, PlacementError, PlacementWarning, StructureError, memory_space, tree_bytes
from lowtide.memory import MemoryReport, analyze, compile
from lowtide.offload import scan, to_device, to_host, verify

LAYERS = 5


def layers(dtype: Any = jnp.float32) -> dict[str, jax.Array]:
    values, shapes = np.random.default_rng(0), {"up": (LAYERS, 8, 16), "down": (LAYERS, 16, 8)}
    return {name: jnp.asarray(0.3 * values.normal(size=shape), dtype) for name, shape in shapes.items()}


def loss(run: Callable[..., Any], xs: Any, x: jax.Array, scale: jax.Array) -> jax.Array:
    """Everything a body can have: a carry with integers and a key, an integer among xs, ys, and a closure."""

    def body(carry: Any, layer: Any) -> Any:
        h, count, key = carry
        key, use = jax.random.split(key)
        h = h + jnp.tanh((h + jax.random.uniform(use, h.shape, h.dtype)) @ layer["up"] * scale) @ layer["down"]
        return (h, count + 1, key), (jnp.sum(h), count * layer["at"])

    xs = {**xs, "at": jnp.arange(LAYERS)}
    (h, count, _), (sums, counts) = run(body, (x, 0, jax.random.key(3)), xs)
    return jnp.mean(h**2) + jnp.sum(sums * jnp.arange(LAYERS).astype(sums.dtype)) + jnp.sum(counts) + count


def arguments(dtype: Any = jnp.float32) -> tuple[Any, ...]:
    return layers(dtype), jnp.asarray(np.linspace(-1, 1, 24).reshape(3, 8), dtype), jnp.asarray(0.7, dtype)


@functools.cache
def of_jax() -> Any:
    """Value and gradients of JAX's own scan, compiled once."""
    return jax.jit(jax.value_and_grad(lambda *args: loss(jax.lax.scan, *args), argnums=(0, 1, 2)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inputs", "prefetch", "jit"),
    [("device", True, False), ("device", True, True), ("device", False, True), ("host", True, True)],
    ids=["eager", "jit", "alone", "inputs-on-host"],
)
def test_equals_jax(inputs: Any, prefetch: bool, jit: bool) -> None:
    def run(*args: Any) -> Any:
        return scan(*args, prefetch=prefetch, inputs=inputs)

    ours = jax.value_and_grad(lambda *args: loss(run, *args), argnums=(0, 1, 2))
    xs, x, scale = arguments()
    value, grads = (jax.jit(ours) if jit else ours)(to_host(xs), x, scale)
    value_ref, grads_ref = of_jax()(xs, x, scale)
    np.testing.assert_allclose(value, value_ref, rtol=1e-6)
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(grads_ref), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-6)
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(grads[0])} == {"pinned_host"}
    assert {leaf.sharding.memory_kind for leaf in grads[1:]} == {"device"}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_dtypes(dtype: Any) -> None:
    xs, x, scale = arguments(dtype)
    grads = jax.jit(jax.grad(lambda *args: loss(scan, *args)))(to_host(xs), x, scale)
    want = of_jax()(xs, x, scale)[1][0]
    tolerance = 4 * float(jnp.finfo(dtype).eps)
    for got, ref in zip(jax.tree.leaves(grads), jax.tree.leaves(want), strict=True):
        assert got.dtype == dtype
        ref = np.asarray(ref, np.float32)
        np.testing.assert_allclose(np.asarray(got, np.float32), ref, atol=tolerance * np.abs(ref).max())


def test_mixed_trees_keep_each_gradient_where_its_leaf_is() -> None:
    xs, x, scale = arguments()
    grads = jax.jit(jax.grad(lambda *args: loss(scan, *args)))(to_host(xs, "up"), x, scale)
    assert {path: leaf.sharding.memory_kind for path, leaf in grads.items()} == {"up": "pinned_host", "down": "device"}


def test_a_host_value_that_the_body_moves_itself_gets_its_gradient_on_the_host() -> None:
    xs, x, _ = arguments()
    shift = to_host(jnp.ones(8))

    def apply(run: Any, xs: Any, shift: Any) -> Any:
        return jnp.sum(run(lambda h, w: (jnp.tanh((h + to_device(shift)[None]) @ w["up"]) @ w["down"], None), x, xs)[0])

    got = jax.jit(jax.grad(lambda *args: apply(scan, *args), argnums=1))(to_host(xs), shift)
    # jax.lax.scan cannot differentiate a host value that its body closes over (jax 0.10.2).
    want = jax.jit(jax.grad(lambda *args: apply(jax.lax.scan, *args), argnums=1))(xs, jnp.ones(8))
    assert got.sharding.memory_kind == "pinned_host"
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)  # of sums of both signs


@pytest.mark.slow
def test_a_second_call_compiles_nothing(compilations: Any) -> None:
    xs, x, scale = arguments()
    xs, other = to_host(xs), x + 1
    step = jax.jit(jax.grad(lambda *args: loss(scan, *args)))
    jax.block_until_ready(step(xs, x, scale))
    with compilations.none():
        jax.block_until_ready(step(xs, other, scale))


def test_layers_on_a_mesh_equal_those_on_one_device() -> None:
    mesh = Mesh(np.array(jax.devices()), ("data",))
    xs, x, scale = arguments()
    want = jax.jit(jax.grad(lambda *args: loss(scan, *args)))(to_host(xs), x, scale)
    sharded = jax.device_put(xs, NamedSharding(mesh, PartitionSpec(None, "data")))
    got = jax.jit(jax.grad(lambda *args: loss(scan, *args)))(to_host(sharded), x, scale)
    for name in got:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-5)


# --- bytes ---------------------------------------------------------------------------------------------------------

DIM, ROWS = 1024, 128
LAYER_BYTES = 2 * DIM * 4 * DIM * 4
SLACK = 4 << 20


def on_v5e(num_layers: int, *, grad: bool = True, target: str = "v5e", **options: Any) -> MemoryReport:
    """A stack of two-matmul layers; a layer is 32 MiB, its residuals 1 MiB."""

    def apply(xs: Any, x: Any) -> Any:
        return jnp.sum(scan(lambda h, w: (jnp.tanh(h @ w["up"]) @ w["down"], None), x, xs, **options)[0])

    shapes = {"up": (num_layers, DIM, 4 * DIM), "down": (num_layers, 4 * DIM, DIM)}
    xs = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((ROWS, DIM), jnp.float32)
    return analyze(jax.grad(apply) if grad else apply, to_host(xs), x, target=target, roles={"layers": 0})


@pytest.mark.slow
@pytest.mark.tpu_aot
def test_without_prefetching_the_device_holds_two_layers(tpu_device: jax.Device) -> None:
    report = on_v5e(16, prefetch=False)
    assert report.device.temp_bytes <= 2 * LAYER_BYTES + 16 * ROWS * DIM * 4 + SLACK
    assert report.host.argument_bytes == report.host.output_bytes == 16 * LAYER_BYTES == report.host_by_role["layers"]
    assert report.host.temp_bytes == 0


@pytest.mark.slow
@pytest.mark.tpu_aot
@pytest.mark.usefixtures("little_optimized")
def test_the_device_holds_a_few_layers_whatever_their_number(tpu_device: jax.Device) -> None:
    few, many = on_v5e(8), on_v5e(16)
    # The carries of eight more layers, in bfloat16 or float32 as XLA likes.
    assert abs(many.device.temp_bytes - few.device.temp_bytes) <= 8 * ROWS * DIM * 4 + SLACK
    assert many.device.argument_bytes == few.device.argument_bytes == ROWS * DIM * 4
    assert many.device.output_bytes == 0 or many.device.output_bytes < SLACK
    assert many.device.temp_bytes <= 3 * LAYER_BYTES + 16 * ROWS * DIM * 4 + SLACK
    # Parameters and gradients, and no second copy of either.
    assert many.host.argument_bytes == many.host.output_bytes == 16 * LAYER_BYTES == many.host_by_role["layers"]
    assert many.host.temp_bytes == 0


@pytest.mark.tpu_aot
def test_layers_and_their_gradients_are_on_the_host(tpu_device: jax.Device) -> None:
    def apply(layers: Any, x: Any) -> Any:
        return jnp.sum(scan(lambda h, w: (jnp.tanh(h @ w), None), x, layers, inputs="host")[0])

    layers, x = jax.ShapeDtypeStruct((8, 256, 256), jnp.float32), jax.ShapeDtypeStruct((128, 256), jnp.float32)
    program = compile(jax.grad(apply), to_host(layers), x, target="v5e")
    verify(program, {"0": "host", "1": "device"}, outputs={"**": "host"}, host_temp_bytes=8 * 128 * 256 * 2)


@pytest.mark.sentinel
@pytest.mark.slow
@pytest.mark.tpu_aot
def test_layer_inputs_wait_on_the_host(tpu_device: jax.Device) -> None:
    few, many = on_v5e(8, inputs="host"), on_v5e(16, inputs="host")
    assert abs(many.device.temp_bytes - few.device.temp_bytes) <= SLACK
    assert many.host.temp_bytes == 2 * few.host.temp_bytes == pytest.approx(16 * ROWS * DIM * 4, rel=0.51)


@pytest.mark.slow
@pytest.mark.tpu_aot
def test_the_forward_pass_alone_holds_two_layers(tpu_device: jax.Device) -> None:
    report = on_v5e(8, grad=False)
    assert report.device.temp_bytes <= 2 * LAYER_BYTES + SLACK
    assert report.host_bytes == 8 * LAYER_BYTES


@pytest.mark.slow
@pytest.mark.tpu_aot
def test_no_gradient_is_written_for_layers_that_do_not_train(tpu_device: jax.Device) -> None:
    def apply(up: Any, down: Any, x: Any) -> Any:
        body = lambda h, w: (jnp.tanh(h @ w["up"]) @ w["down"], None)  # noqa: E731
        return jnp.sum(scan(body, x, {"up": up, "down": down})[0])

    up = to_host(jax.ShapeDtypeStruct((8, 256, 1024), jnp.float32))
    down = to_host(jax.ShapeDtypeStruct((8, 1024, 256), jnp.float32))
    report = analyze(jax.grad(apply), up, down, jax.ShapeDtypeStruct((128, 256), jnp.float32), target="v5e")
    assert report.host.output_bytes == tree_bytes(up)
    assert report.host.temp_bytes == 0


@pytest.mark.slow
@pytest.mark.gpu_aot
def test_a_device_without_host_memory_warns_and_compiles() -> None:
    with pytest.warns(PlacementWarning, match=r"has no host memory(.|\n)*hint: use lowtide.memory.analyze"):
        report = on_v5e(2, target="h100")
    assert report.host_by_role["layers"] == 2 * LAYER_BYTES


# --- bad input -----------------------------------------------------------------------------------------------------


def body(h: Any, w: Any) -> Any:
    return h @ w["up"] @ w["down"], None


def test_layers_on_the_device_are_refused() -> None:
    xs, x, _ = arguments()
    with pytest.raises(PlacementError, match="down: no leaf of xs is in host memory") as raised:
        scan(body, x, xs)
    assert "2 leaves in device memory: down, up" in str(raised.value)
    assert "hint: place them with lt.offload.to_host" in str(raised.value)


def test_different_leading_axes_are_refused() -> None:
    xs, x, _ = arguments()
    with pytest.raises(StructureError, match=re.escape("down: 5, up: 4")) as raised:
        scan(body, x, to_host({**xs, "up": xs["up"][:4]}))
    assert "hint: stack the layers" in str(raised.value)


def test_a_carry_on_the_host_is_named() -> None:
    xs, x, _ = arguments()
    with pytest.raises(PlacementError, match="init/h: the body of scan computes with a value in host memory") as raised:
        scan(lambda h, w: ({"h": body(h["h"], w)[0]}, None), to_host({"h": x}), to_host(xs))
    assert "hint: move it with lt.offload.to_device" in str(raised.value)


def test_other_errors_of_the_body_pass_unchanged() -> None:
    def wrong(h: Any, w: Any) -> Any:
        raise ValueError("another")

    xs, x, _ = arguments()
    with pytest.raises(ValueError, match="^another"):
        scan(wrong, x, to_host(xs))


def test_an_unknown_place_is_refused() -> None:
    xs, x, _ = arguments()
    with pytest.raises(ConfigError, match='inputs must be "device" or "host", not \'disk\'\nhint: pass inputs='):
        scan(body, x, to_host(xs), inputs="disk")  # pyright: ignore[reportArgumentType]


def test_the_body_gets_slices_on_the_device() -> None:
    seen: list[Any] = []
    xs, x, _ = arguments()
    scan(lambda h, w: (seen.append(memory_space(w["up"])), body(h, w))[1], x, to_host(xs))
    assert set(seen) == {jax.memory.Space.Device}


def test_a_captured_host_value_is_named() -> None:
    xs, weight = to_host({"w": jnp.ones((2, 8, 8))}), to_host(jnp.ones((8,)))
    with pytest.raises(PlacementError, match=r"(?s)a captured value: the body of scan computes.*hint: .*to_device"):
        jax.jit(lambda xs, weight, h: scan(lambda h, x: (h @ x["w"] * weight, None), h, xs)[0])(xs, weight, jnp.ones(8))


def test_no_layers_are_refused() -> None:
    with pytest.raises(StructureError, match=r"(?s)scan has no layers.*hint:"):
        scan(lambda h, x: (h, None), jnp.ones(8), to_host({"w": jnp.ones((0, 8, 8))}))


@pytest.mark.slow
def test_integers_may_be_closed_over_by_any_program_and_nothing_of_it_stays() -> None:
    xs = to_host({"w": jnp.full((4, 8, 8), 0.1)})

    def loss(xs: Any, ids: Any) -> Any:
        def body(h: Any, layer: Any) -> Any:
            return jnp.tanh(h @ layer["w"]) + ids[:, None] * 0.1, None

        return jnp.sum(scan(body, jnp.ones((4, 8)), xs)[0] ** 2)

    def once() -> Any:
        ids = jnp.arange(4)
        plain = jax.grad(lambda w: loss_plain(w, ids))(jnp.full((4, 8, 8), 0.1))
        for around in (jax.jit, lambda fn: fn):
            found = jax.grad(around(loss))(xs, ids)["w"]
            np.testing.assert_allclose(np.asarray(found), plain, rtol=1e-5)

    def loss_plain(w: Any, ids: Any) -> Any:
        h = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w) + ids[:, None] * 0.1, None), jnp.ones((4, 8)), w)[0]
        return jnp.sum(h**2)

    once()
    gc.collect()
    before = len(jax.live_arrays())
    once()
    gc.collect()
    assert len(jax.live_arrays()) <= before


@pytest.mark.slow
@pytest.mark.tpu_aot
def test_one_number_a_layer_is_on_the_device_before_the_loop() -> None:
    layers = to_host({"w": jnp.ones((4, 64, 64)), "scale": jnp.arange(1.0, 5.0)})

    def step(layers: Any, x: jax.Array) -> Any:
        body = lambda h, layer: (jnp.tanh(h @ layer["w"]) * layer["scale"], None)  # noqa: E731
        return jax.grad(lambda layers: jnp.sum(scan(body, x, layers)[0]))(layers)

    assert analyze(step, layers, jnp.ones((8, 64)), target="v5e:1x1").host_bytes >= 2 * 4 * 64 * 64 * 4
    grads = jax.jit(step)(layers, jnp.ones((8, 64)))
    assert {memory_space(leaf) for leaf in jax.tree.leaves(grads)} == {jax.memory.Space.Host}
