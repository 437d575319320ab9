"""Activations by name: JAX's gradients, and the bytes where they were said to be."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from lowtide.core import ConfigError, LayerStack, PlacementError, PlacementWarning, SelectionError
from lowtide.memory import compile
from lowtide.offload import checkpoint, verify

# Large enough that a v5e does not hold all layers' values in its on-chip memory.
LAYERS, ROWS, WIDTH = 32, 128, 1024
UP_BYTES = LAYERS * ROWS * 4 * WIDTH * 4


def block(layer: Any, h: jax.Array, batch: Any = None) -> jax.Array:
    up = checkpoint_name(h @ layer["up"], "up")
    down = checkpoint_name(jnp.tanh(up) @ layer["down"], "down")
    return h + jnp.tanh(down)


def weights(layers: int = 2, width: int = 4) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        "up": jax.random.normal(keys[0], (layers, width, 4 * width)) / width,
        "down": jax.random.normal(keys[1], (layers, 4 * width, width)) / width,
    }


def shapes() -> tuple[Any, Any]:
    layers = {
        "up": jax.ShapeDtypeStruct((LAYERS, WIDTH, 4 * WIDTH), jnp.float32),
        "down": jax.ShapeDtypeStruct((LAYERS, 4 * WIDTH, WIDTH), jnp.float32),
    }
    return layers, jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)


def loss_over(body: Callable[..., Any], layers: Any, x: jax.Array) -> jax.Array:
    stack = LayerStack(lambda outer, batch: batch, body, lambda outer, h, batch: (jnp.mean(h**2), {}))
    return stack.apply({}, layers, x)[0]


CLAIMS: dict[str, dict[str, Any]] = {
    "save": {"save": ["up"]},
    "offload": {"offload": ["up"]},
    "save and offload": {"save": ["down"], "offload": ["up"]},
    "regex": {"offload": "u.|down"},
    "recompute alone": {"recompute": ["up"]},
    "everything": {"recompute": ["up", "down"]},
    "empty list": {"save": []},
}


@functools.cache
def of_the_block() -> Any:
    """What every case is compared with, compiled once."""
    return jax.jit(jax.value_and_grad(functools.partial(loss_over, block)))


@pytest.mark.slow_after(4)
@pytest.mark.parametrize(("case", "jit"), [("save and offload", False), *((case, True) for case in CLAIMS)])
def test_gradients_are_those_of_the_function_itself(case: str, jit: bool) -> None:
    layers, x = weights(), jax.random.normal(jax.random.key(1), (3, 4))
    body = checkpoint(block, prevent_cse=False, **CLAIMS[case])
    of = jax.value_and_grad(functools.partial(loss_over, body))
    value, grads = (jax.jit(of) if jit else of)(layers, x)
    value_ref, grads_ref = of_the_block()(layers, x)
    np.testing.assert_allclose(value, value_ref, rtol=1e-6)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), grads, grads_ref)


def around_a_scan(layers: Any, x: jax.Array) -> jax.Array:
    return loss_over(block, layers, x)


def nested(layers: Any, x: jax.Array) -> jax.Array:
    return loss_over(jax.checkpoint(block), layers, x)


def jitted(layers: Any, x: jax.Array) -> jax.Array:
    return loss_over(jax.jit(block), layers, x)


def branches(layers: Any, x: jax.Array) -> jax.Array:
    def body(layer: Any, h: jax.Array, batch: Any) -> jax.Array:
        return jax.lax.cond(h[0, 0] > 0, block, lambda layer, h: h * 2, layer, h)

    return loss_over(body, layers, x)


def mapped(layers: Any, x: jax.Array) -> jax.Array:
    return loss_over(lambda layer, h, batch: jax.vmap(lambda row: block(layer, row))(h), layers, x)


def attention(layers: Any, x: jax.Array) -> jax.Array:
    q = checkpoint_name(x @ layers["up"][0], "up")[None, :, None]
    return jnp.sum(jax.nn.dot_product_attention(q, q, checkpoint_name(q * 2, "down")) ** 2)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("fn", [around_a_scan, nested, jitted, branches, mapped, attention], ids=lambda fn: fn.__name__)
def test_names_are_found_in_nested_programs(fn: Callable[..., Any]) -> None:
    layers, x = weights(), jax.random.normal(jax.random.key(1), (3, 4))
    step = jax.jit(jax.grad(checkpoint(fn, offload=["up"], recompute=["down"])))
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6),
        step(layers, x),
        jax.jit(jax.grad(fn))(layers, x),
    )
    assert "<host>" in str(jax.make_jaxpr(step)(layers, x))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_dtypes_survive(dtype: Any) -> None:
    layers = jax.tree.map(lambda a: np.asarray(a).astype(dtype), weights())
    step = jax.jit(jax.grad(functools.partial(loss_over, checkpoint(block, offload=["up"]))))
    grads = step(layers, np.ones((3, 4), dtype))
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype(dtype)}


@pytest.mark.slow
def test_a_second_call_compiles_nothing(compilations: Any) -> None:
    layer, x = jax.tree.map(lambda a: a[0], weights()), jnp.ones((3, 4))
    body = checkpoint(block, offload=["up"], save="d.*")
    of = jax.grad(lambda layer, x: jnp.sum(body(layer, x)))
    step = jax.jit(of)
    jax.block_until_ready((step(layer, x), of(layer, x)))
    other = x + 1
    with compilations.none():
        jax.block_until_ready((step(layer, other), of(layer, other)))


def test_the_function_is_traced_once(compilations: Any) -> None:
    traces: list[int] = []

    def counted(x: jax.Array) -> jax.Array:
        traces.append(1)
        return jnp.sin(checkpoint_name(jnp.sin(x), "a"))

    jax.jit(jax.grad(checkpoint(counted, save=["a"])))(1.0)
    assert len(traces) == 1


def test_static_arguments_and_keywords_pass_through() -> None:
    def fn(x: jax.Array, power: int, *, scale: float) -> jax.Array:
        y = checkpoint_name(x * x if power == 2 else x, "y")
        return jnp.sin(y) * scale

    ours = checkpoint(fn, save=["y"], static_argnums=1)
    assert ours.__name__ == "fn"
    np.testing.assert_allclose(jax.grad(ours)(3.0, 2, scale=2.0), jax.grad(fn)(3.0, 2, scale=2.0), rtol=1e-6)


def test_a_closure_over_traced_values() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return checkpoint(lambda x: jnp.sum(jnp.sin(checkpoint_name(w * x, "y"))), offload=["y"])(x)

    x = jnp.arange(3.0)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(2.0, x), jnp.sum(x * jnp.cos(2 * x)), rtol=1e-6)


# --- custom derivative rules ---------------------------------------------------------------------------------------


@jax.custom_vjp
def hidden_sin(x: jax.Array) -> jax.Array:
    return jnp.sin(checkpoint_name(x * x, "square"))


def _forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    square = checkpoint_name(x * x, "residual")
    return jnp.sin(square), checkpoint_name(jnp.cos(square) * x, "slope")


hidden_sin.defvjp(_forward, lambda slope, ct: (2 * slope * ct,))


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("claims", [{"offload": ["slope"]}, {"offload": "sl.*"}, {"save": ["result"]}])
def test_names_in_the_rule_of_a_custom_vjp_are_kept(claims: dict[str, Any]) -> None:
    def fn(x: jax.Array) -> jax.Array:
        return jnp.cos(checkpoint_name(hidden_sin(x), "result"))

    step = jax.grad(lambda x: jnp.sum(checkpoint(fn, **claims)(x)))
    for x in (jnp.array([0.5, 0.25]), jnp.float32(0.5)):  # a single number stays on the device
        np.testing.assert_allclose(step(x), jax.grad(lambda x: jnp.sum(fn(x)))(x), rtol=1e-6)
        assert ("<host>" in str(jax.make_jaxpr(step)(x))) == ("offload" in claims and x.ndim > 0)


@pytest.mark.parametrize("claims", [{"offload": ["square"]}, {"save": "squ.*"}])
def test_a_name_in_the_primal_of_a_custom_vjp_is_an_error(claims: dict[str, Any]) -> None:
    with pytest.raises(
        PlacementError, match="(?s)'square'.*inside a function with a custom_vjp.*hint: name a residual"
    ):
        jax.grad(checkpoint(hidden_sin, **claims))(0.5)


def test_a_pattern_that_matches_visible_and_hidden_names_warns() -> None:
    with pytest.warns(PlacementWarning, match="(?s)'square'.*hint: name a residual"):
        jax.grad(checkpoint(hidden_sin, offload="s.*"))(0.5)


def test_recomputing_what_a_custom_vjp_hides_is_no_error() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.grad(checkpoint(hidden_sin, recompute=".*"))(0.5)


# --- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("claims", "error", "text"),
    [
        ({}, ConfigError, "none of save=, offload= and recompute= selects values.*hint: .*jax.checkpoint"),
        ({"save": [1]}, ConfigError, r"save must be a list of names or a regular expression, not \[1\].*hint: "),
        ({"save": "("}, ConfigError, r"save='\(' is not a regular expression: .*hint: "),
        ({"save": ["up"], "offload": ["up"]}, ConfigError, "save and offload both select the value 'up'.*hint: "),
        ({"save": "u.*", "recompute": ["up"]}, ConfigError, "save and recompute both select the value 'up'.*hint: "),
        ({"offload": ["upp"]}, SelectionError, "'upp' matches no named value of block.*down, up.*near misses: up"),
        ({"offload": "x.*"}, SelectionError, "'x.*' matches no named value.*hint: list the names"),
    ],
)
def test_bad_claims(claims: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"(?s){text}"):
        checkpoint(block, **claims)(jax.tree.map(lambda a: a[0], weights()), jnp.ones((3, 4)))


def test_a_function_without_names() -> None:
    with pytest.raises(SelectionError, match=r"(?s)got: no name.*hint: name values with jax.ad_checkpoint"):
        checkpoint(jnp.sin, save=["y"])(1.0)


def test_a_name_with_special_characters_given_as_a_regex() -> None:
    with pytest.raises(SelectionError, match=re.escape("for exact names pass a list: ['a+b']")):
        checkpoint(lambda x: jnp.sin(checkpoint_name(x, "a+b")), save="a+b")(1.0)


def test_a_name_whose_result_is_not_used() -> None:
    def fn(x: jax.Array) -> jax.Array:
        y = jnp.sin(x)
        checkpoint_name(y, "y")
        return jnp.sin(y)

    with pytest.raises(
        PlacementError, match="(?s)'y'.*is dead code.*hint: use the value that checkpoint_name returned"
    ):
        checkpoint(fn, offload=["y"])(1.0)


def test_a_value_that_is_on_the_host_already() -> None:
    def fn(x: jax.Array) -> jax.Array:
        y = checkpoint_name(jax.device_put(jnp.sin(x), jax.memory.Space.Host), "y")
        return jnp.sin(jax.device_put(y, jax.memory.Space.Device))

    with pytest.raises(PlacementError, match="(?s)'y' .*is already on the host.*hint: leave it out"):
        jax.jit(checkpoint(fn, offload=["y"]))(1.0)


# --- bytes ---------------------------------------------------------------------------------------------------------


def temporaries(body: Callable[..., Any], target: str) -> tuple[int, int]:
    """Device and host temporaries of the gradient of a scanned stack."""
    stats = compile(jax.grad(functools.partial(loss_over, body)), *shapes(), target=target).compiled.memory_analysis()
    return stats.temp_size_in_bytes, stats.host_temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.tpu_aot
def test_bytes_on_a_tpu_are_where_they_were_said_to_be() -> None:
    make = functools.partial(checkpoint, block, prevent_cse=False)
    recomputed, no_host = temporaries(make(recompute=".*"), "v5e")
    saved, _ = temporaries(make(save=["up"]), "v5e")
    offloaded, host = temporaries(make(offload=["up"]), "v5e")
    assert no_host == 0
    assert host == UP_BYTES
    assert saved - recomputed == pytest.approx(UP_BYTES, rel=0.01)
    assert offloaded - recomputed < 1.1 * UP_BYTES / LAYERS  # the one layer that is on its way


@pytest.mark.slow
@pytest.mark.tpu_aot
@pytest.mark.usefixtures("little_optimized")
def test_one_number_a_layer_stays_on_a_tpu() -> None:
    """Its compiler has no slices of one number in host memory."""

    def body(h: jax.Array, w: jax.Array) -> jax.Array:
        rows = checkpoint_name(jnp.tanh(h @ w), "rows")
        return rows * jnp.sin(checkpoint_name(jnp.sum(rows**2), "norm"))

    def loss(w: jax.Array, h: jax.Array) -> jax.Array:
        run = checkpoint(body, offload=["rows", "norm"], prevent_cse=False)
        return jnp.sum(jax.lax.scan(lambda h, w: (run(h, w), None), h, w)[0])

    compiled = compile(jax.grad(loss), jnp.ones((4, 128, 128)), jnp.ones((64, 128)), target="v5e")
    verify(compiled, {}, host_temp_bytes=4 * 64 * 128 * 4)


def test_a_value_that_the_backward_pass_does_not_read_is_not_moved() -> None:
    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(checkpoint_name(x @ w, "sum") + x)

    assert "<host>" not in str(
        jax.make_jaxpr(jax.grad(checkpoint(fn, offload=["sum"])))(jnp.ones((4, 4)), jnp.ones((4, 4)))
    )


@pytest.mark.tpu_aot
@pytest.mark.slow
@pytest.mark.usefixtures("little_optimized")
def test_a_checkpoint_around_the_scan_offloads_every_layer() -> None:
    step = jax.grad(checkpoint(around_a_scan, offload=["up"]))
    found = verify(compile(step, *shapes(), target="v5e"), {}, host_temp_bytes=UP_BYTES)
    assert found.host_temp_bytes == UP_BYTES and found.num_moves


@pytest.mark.slow
@pytest.mark.gpu_aot
def test_bytes_on_a_gpu() -> None:
    assert temporaries(checkpoint(block, offload=["up"], prevent_cse=False), "h100")[1] == UP_BYTES
    assert temporaries(checkpoint(block, save=["up"], prevent_cse=False), "h100")[1] == 0


@pytest.mark.slow
def test_a_name_with_an_underscore_is_a_users() -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(checkpoint_name(x @ w, "_mine")))

    x, w = jnp.ones((3, 4)), jnp.ones((4, 5))
    kept = checkpoint(fn, save=["_mine"])
    np.testing.assert_allclose(jax.grad(kept)(x, w), jax.grad(fn)(x, w), rtol=1e-6)
