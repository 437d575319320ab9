"""Names without editing: stable, readable, and nothing else about the function changes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from lowtide.core import LAYER_NAMES, SelectionError
from lowtide.memory import compile
from lowtide.models import Decoder, DecoderConfig, init
from lowtide.offload import checkpoint, names, tag

CONFIG = DecoderConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=4
)
LLAMA_NAMES = [
    *("attn/q_proj", "attn/k_proj", "attn/v_proj", "dot_product_attention/scores", "dot_product_attention"),
    *("attn/o_proj", "mlp/gate_proj", "mlp/up_proj", "mlp/down_proj"),
]
X = jnp.linspace(-1, 1, 12).reshape(3, 4)
W = jnp.linspace(-2, 1, 16).reshape(4, 4)


def names_of(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[str]:
    return [row.name for row in names(tag(fn), *args, **kwargs) if row.name not in LAYER_NAMES]


@functools.cache
def model(dtype: Any = jnp.float32) -> tuple[Decoder, dict[str, jax.Array]]:
    tokens = jnp.arange(16).reshape(2, 8)
    made = jax.jit(functools.partial(init, CONFIG, compute_dtype=dtype))(key=jax.random.key(0))
    return made, {"tokens": tokens, "labels": tokens + 1}


def with_block(llama: Decoder, change: Callable[..., Any]) -> Callable[..., jax.Array]:
    stack = dataclasses.replace(llama.stack, block=change(llama.stack.block))
    return lambda layers, batch: stack.apply(llama.outer, layers, batch)[0]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_names_of_a_llama_block(dtype: str) -> None:
    llama, batch = model(dtype)
    layer = jax.tree.map(lambda a: a[0], llama.layers)
    h = jnp.ones((2, 8, 16), dtype)
    assert names_of(llama.stack.block, layer, h, batch) == LLAMA_NAMES
    rows = names(tag(llama.stack.block), layer, h, batch)
    assert {row.dtype for row in rows if row.name != "dot_product_attention/scores"} == {dtype}
    assert {"attn_q", "attn_k", "attn_v", "attn_out", "attn_proj", "mlp_gate", "mlp_up"} <= {row.name for row in rows}


def test_the_names_of_a_whole_scanned_model() -> None:
    llama, batch = model()

    def loss(model: Decoder, batch: Any) -> Any:
        return model.stack.apply(model.outer, model.layers, batch)[0]

    expected = [*(f"layers/attn/{p}_proj" for p in "qkv"), "dot_product_attention/scores"]
    assert names_of(loss, llama, batch)[:4] == expected
    rows = names(tag(loss), llama, batch)
    assert rows["layers/mlp/up_proj"].count == CONFIG.num_layers


@pytest.mark.sentinel
@pytest.mark.slow
def test_values_and_gradients_of_a_llama_are_unchanged_bit_for_bit() -> None:
    llama, batch = model()
    of = jax.jit(jax.value_and_grad(with_block(llama, tag)))
    ref = jax.jit(jax.value_and_grad(with_block(llama, lambda block: block)))
    jax.tree.map(np.testing.assert_array_equal, of(llama.layers, batch), ref(llama.layers, batch))


@pytest.mark.slow
def test_a_tagged_block_can_be_checkpointed() -> None:
    llama, batch = model()
    change = functools.partial(checkpoint, offload=["mlp/gate_proj"], save=".*attention.*", prevent_cse=False)
    value, grads = jax.jit(jax.value_and_grad(with_block(llama, lambda b: change(tag(b)))))(llama.layers, batch)
    value_ref, grads_ref = jax.jit(jax.value_and_grad(with_block(llama, lambda b: b)))(llama.layers, batch)
    np.testing.assert_allclose(value, value_ref, rtol=1e-6)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), grads, grads_ref)


# --- what the names are --------------------------------------------------------------------------------------------


def mlp(params: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["up"]["kernel"]) @ params["down"]["kernel"]


def test_a_product_is_called_by_the_path_of_its_parameter() -> None:
    params = {"up": {"kernel": W}, "down": {"kernel": W}}
    assert names_of(mlp, params, X) == ["up", "down"]
    assert names_of(lambda x, *, params: mlp(params, x), X, params=params) == ["up", "down"]
    assert names_of(lambda p, x: x @ p["w"].T.astype(x.dtype) @ p["w"], {"w": W}, X) == ["w", "w_1"]
    assert names_of(lambda p, x: x @ (p["q"]["codes"] * p["q"]["scale"]), {"q": {"codes": W, "scale": W}}, X) == ["q"]
    assert names_of(lambda p, x: jnp.einsum("ij,jk->ik", x, p["a"]), {"a": W}, X) == ["a"]


def test_an_activation_with_a_parameter_in_it_has_no_path() -> None:
    assert names_of(lambda p, x: (x * p["norm"]) @ (x * p["norm"]).T, {"norm": jnp.ones((3, 4))}, X) == ["dot_0"]


def test_scopes_and_inner_jits_stand_before_the_counter() -> None:
    @jax.jit
    def inner(x: jax.Array) -> jax.Array:
        return x @ x.T

    def fn(x: jax.Array) -> jax.Array:
        with jax.named_scope("mlp"):
            y = jax.vmap(lambda r: jnp.tanh(x) @ r)(x) @ x
        return inner(y) @ inner(x)

    expected = ["mlp/dot_0", "mlp/dot_1", "inner/dot_0", "inner/dot_1", "dot_0"]
    assert names_of(fn, X) == expected
    with jax.named_scope("outer"):
        assert names_of(fn, X) == expected


def test_a_convolution() -> None:
    image, kernel = jnp.ones((1, 2, 5, 5)), jnp.ones((3, 2, 3, 3))
    assert names_of(lambda p, x: jax.lax.conv(x, p["k"], (1, 1), "SAME"), {"k": kernel}, image) == ["k"]
    assert names_of(lambda x: jax.lax.conv(x, kernel, (1, 1), "SAME"), image) == ["conv_0"]


def test_two_attentions() -> None:
    q = jnp.ones((2, 8, 4, 4))
    attend = jax.nn.dot_product_attention
    got = names_of(lambda q: attend(attend(q, q, q), q, q), q)
    base = "dot_product_attention"
    assert got == [f"{base}/scores", base, f"{base}/scores_1", f"{base}_1"]


def test_named_values_keep_their_names() -> None:
    assert names_of(lambda p, x: checkpoint_name(x @ p["w"], "mine") @ p["w"], {"w": W}, X) == ["mine", "w"]
    assert names_of(tag(mlp), {"up": {"kernel": W}, "down": {"kernel": W}}, X) == ["up", "down"]


def test_a_product_is_named_behind_a_cast_to_fewer_bytes() -> None:
    def narrow(x: jax.Array) -> jax.Array:
        return jnp.dot(x, x.T, preferred_element_type=jnp.float32).astype(jnp.bfloat16)

    def both(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = x @ x.T
        return y.astype(jnp.bfloat16), y

    assert [row.dtype for row in names(tag(narrow), X.astype(jnp.bfloat16))] == ["bfloat16"]
    assert [row.dtype for row in names(tag(both), X)] == ["float32"]


@jax.custom_vjp
def flash(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x @ x.T, x


flash.defvjp(lambda x: (flash(x), None), lambda _, ct: (jnp.full((3, 4), 7.0),))


def test_a_custom_rule_is_named_as_a_whole_and_stays() -> None:
    assert names_of(flash, X) == ["flash/0", "flash/1"]
    step = jax.grad(lambda x: jnp.sum(jnp.sin(checkpoint(tag(flash), save="flash.*")(x)[0])))
    np.testing.assert_array_equal(step(X), jnp.full((3, 4), 7.0))


def test_an_elementwise_custom_rule_gets_no_name() -> None:
    assert names_of(lambda x: jax.nn.relu(x @ x.T), X) == ["dot_0"]


def scanned(p: Any, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["w"])[0]


def branched(p: Any, x: jax.Array) -> jax.Array:
    return jax.lax.cond(x[0, 0] > 0, lambda w: x @ w, lambda w: x @ w.T, p["w"][0])


def rematted(p: Any, x: jax.Array) -> jax.Array:
    return jax.checkpoint(lambda w: jnp.sin(x @ w))(p["w"][0])


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("fn", "primitive", "expected"),
    [(scanned, "scan", ["w"]), (branched, "cond", ["w", "w_1"]), (rematted, "remat", ["w"])],
)
def test_nested_programs_stay_and_have_names_inside(fn: Any, primitive: str, expected: list[str]) -> None:
    params = {"w": jnp.stack([W, W + 1])}
    assert names_of(fn, params, X) == expected
    assert primitive in str(jax.make_jaxpr(tag(fn))(params, X))
    grads, grads_ref = (jax.grad(lambda p, f=f: jnp.sum(f(p, X)))(params) for f in (tag(fn), fn))
    np.testing.assert_array_equal(grads["w"], grads_ref["w"])


# --- nothing else changes ------------------------------------------------------------------------------------------


def test_results_keep_their_structure_dtypes_and_weak_types() -> None:
    def fn(x: jax.Array, scale: float, mode: str, flag: bool, *, key: jax.Array) -> dict[str, Any]:
        assert isinstance(scale, float) and mode == "m" and flag is True
        return {"a": (x @ x.T * scale, 2.0), "key": jax.random.split(key), "i": jnp.arange(3), "none": None}

    args, key = (X, 3.0, "m", True), jax.random.key(0)
    got, want = jax.eval_shape(lambda: tag(fn)(*args, key=key)), jax.eval_shape(lambda: fn(*args, key=key))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert [(a.shape, a.dtype, a.weak_type) for a in jax.tree.leaves(got)] == [
        (a.shape, a.dtype, a.weak_type) for a in jax.tree.leaves(want)
    ]


def test_effects_stay(capfd: pytest.CaptureFixture[str]) -> None:
    def fn(x: jax.Array) -> jax.Array:
        jax.debug.print("sum {}", x.sum())
        return x @ x.T

    jax.block_until_ready(jax.jit(tag(fn))(jnp.ones((2, 2))))
    jax.effects_barrier()
    assert "sum 4.0" in capfd.readouterr().out


def test_donation_stays() -> None:
    compiled = jax.jit(tag(lambda p, x: (p["w"] + 1, x @ p["w"])), donate_argnums=0).lower({"w": W}, X).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == W.nbytes


def test_vmap_and_a_closure_over_traced_values() -> None:
    def fn(w: jax.Array) -> jax.Array:
        return jnp.sum(jax.vmap(tag(lambda row: jnp.sin(row @ w)))(X))

    np.testing.assert_allclose(jax.grad(fn)(W), jax.grad(lambda w: jnp.sum(jnp.sin(X @ w)))(W), rtol=1e-5, atol=1e-6)


def test_a_second_call_compiles_nothing(compilations: Any) -> None:
    step = jax.jit(tag(mlp))
    params = {"up": {"kernel": W}, "down": {"kernel": W}}
    other = X + 1
    jax.block_until_ready(step(params, X))
    with compilations.none():
        jax.block_until_ready(step(params, other))


def test_a_function_without_products_is_an_error() -> None:
    with pytest.raises(SelectionError, match="(?s)computes nothing that tag can name.*hint: name values"):
        tag(jnp.sin)(X)


@pytest.mark.slow
@pytest.mark.tpu_aot
def test_one_name_of_a_llama_block_goes_to_the_host_of_a_tpu() -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_layers": 4, "num_heads": 4, "head_dim": 64}
    config = dataclasses.replace(CONFIG, **sizes)
    llama = jax.eval_shape(lambda: init(config, key=jax.random.key(0), compute_dtype=jnp.bfloat16))
    tokens = jax.ShapeDtypeStruct((1, 128), jnp.int32)

    def loss(llama: Decoder, batch: Any) -> jax.Array:
        change = functools.partial(checkpoint, offload=["mlp/gate_proj"], prevent_cse=False)
        return with_block(llama, lambda block: change(tag(block)))(llama.layers, batch)

    program = compile(jax.grad(loss), llama, {"tokens": tokens, "labels": tokens}, target="v5e")
    assert program.compiled.memory_analysis().host_temp_size_in_bytes == 4 * 128 * 1024 * 2
