"""Adapters of weights that are no matrices: what a function's program says of them, and what is computed with them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import lowtide as lt
from lowtide.adapters.lora import LoRAKernel, LoRAWeight
from lowtide.core import ConfigError, StructureError, leaves_with_paths, map_with_paths
from lowtide.jaxprs import equations

KEY = jax.random.key(0)
IMAGES = jax.random.normal(KEY, (2, 6, 6, 3))
IDS = jnp.array([1, 2])


@pytest.fixture(autouse=True)
def rank_promotion() -> Any:
    """Flax adds its biases by rank promotion."""
    with jax.numpy_rank_promotion("allow"):
        yield


class Mixed(nnx.Module):
    """Convolutions of an image and of a sequence, attention, a table that is the head, too, and a dense layer."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.image = nnx.Conv(3, 8, (3, 3), strides=2, rngs=rngs)
        self.sequence = nnx.Conv(8, 8, (3,), rngs=rngs)
        self.attention = nnx.MultiHeadAttention(num_heads=2, in_features=8, decode=False, rngs=rngs)
        self.table = nnx.Embed(10, 8, rngs=rngs)
        self.dense = nnx.Linear(8, 4, rngs=rngs)
        self.depthwise = nnx.Conv(8, 8, (3,), feature_group_count=8, rngs=rngs)
        self.unused = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, images: Any, ids: Any) -> Any:
        h = self.image(images)
        h = self.sequence(h.reshape(h.shape[0], -1, 8))
        h = self.depthwise(self.attention(h) + self.table(ids)[:, None])
        return jnp.mean(jnp.sin(self.dense(h))) + jnp.mean(jnp.sin(self.table.attend(h)))


@functools.cache
def mixed() -> tuple[Any, Callable[..., Any]]:
    graph, state = nnx.split(Mixed(nnx.Rngs(0)))

    def fn(params: Any, images: Any, ids: Any) -> Any:
        own = nnx.state(nnx.merge(graph, state))
        nnx.replace_by_pure_dict(own, params)
        return nnx.merge(graph, own)(images, ids)

    return nnx.to_pure_dict(state), fn


def filled(model: Any) -> Any:
    """Give adapters values that are no zeros."""
    random = np.random.default_rng(0)
    draw = lambda leaf: jnp.asarray(0.2 * random.normal(size=leaf.shape), leaf.dtype)  # noqa: E731
    return map_with_paths(lambda path, leaf: draw(leaf) if "lora_" in path else leaf, model)


KERNELS = ["image/kernel", "sequence/kernel", "attention/*/kernel", "table/embedding", "dense/kernel"]


@pytest.mark.slow
def test_values_and_gradients_are_those_of_the_merged_model() -> None:
    params, fn = mixed()
    model = lt.lora.add(params, lt.lora.Config(rank=2, alpha=1.0, targets=KERNELS), key=KEY, fn=fn, args=(IMAGES, IDS))
    started = jax.jit(lt.adapted(fn))(model, IMAGES, IDS)
    assert float(started) == pytest.approx(float(jax.jit(fn)(params, IMAGES, IDS)), rel=1e-5)
    model = filled(model)
    is_node = lambda node: isinstance(node, (LoRAKernel, LoRAWeight))  # noqa: E731
    kinds = {path: type(node) for path, node in leaves_with_paths(model, is_leaf=is_node) if is_node(node)}
    assert [path for path, kind in kinds.items() if kind is LoRAWeight] == ["dense/kernel"] and len(kinds) == 8

    def of_merged(model: Any) -> Any:
        return fn(lt.lora.merge(model), IMAGES, IDS)

    expected = jax.jit(lt.value_and_grad(of_merged, "**/lora_*"))(model)
    found = jax.jit(lt.value_and_grad(lt.adapted(fn), "**/lora_*"))(model, IMAGES, IDS)
    for (path, one), (_, other) in zip(leaves_with_paths(found), leaves_with_paths(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6, err_msg=path)
        assert np.abs(one).max() > 0, path


def test_a_kernel_of_pytorchs_layout_is_that_of_peft() -> None:
    conv = eqx.nn.Conv2d(3, 5, 3, key=KEY)
    fn = lambda conv, x: jnp.sum(conv(x) ** 2)  # noqa: E731
    x = jnp.asarray(np.random.default_rng(1).normal(size=(3, 8, 8)), jnp.float32)
    model = filled(lt.lora.add(conv, lt.lora.Config(rank=2, targets="weight"), key=KEY, fn=fn, args=(x,)))
    assert model.weight.lora_a.shape == (2, 3, 3, 3) and model.weight.lora_b.shape == (5, 2)
    np.testing.assert_allclose(jax.jit(lt.adapted(fn))(model, x), jax.jit(fn)(lt.lora.merge(model), x), rtol=1e-5)


def test_a_stack_of_kernels_is_scanned_over() -> None:
    def fn(w: Any, x: Any) -> Any:
        return jnp.sum(jax.lax.scan(lambda h, w: (jnp.einsum("bi,ihd->bhd", h, w).sum(1), None), x, w["w"])[0])

    x, config = jnp.ones((2, 4)), lt.lora.Config(rank=2, targets="w")
    model = filled(lt.lora.add({"w": jnp.ones((3, 4, 2, 4))}, config, key=KEY, fn=fn, args=(x,)))
    assert model["w"].lora_a.shape == (3, 2, 2, 4) and model["w"].lora_b.shape == (3, 4, 2)
    np.testing.assert_allclose(jax.jit(lt.adapted(fn))(model, x), jax.jit(fn)(lt.lora.merge(model), x), rtol=1e-5)


def test_experts_that_are_indexed_are_a_stack() -> None:
    fn = lambda w, x: jnp.sum(jnp.einsum("bi,eio->ebo", x, w["w"]) ** 2)  # noqa: E731
    x, config = jnp.ones((2, 4)), lt.lora.Config(rank=2, targets="w")
    model = lt.lora.add({"w": jnp.ones((3, 4, 5))}, config, key=KEY, fn=fn, args=(x,))
    assert isinstance(model["w"], LoRAWeight) and model["w"].lora_a.shape == (3, 2, 5)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("depthwise/kernel", "depthwise/kernel: the model does more .*\n.*\n.*conv_general_dilated of a"),
        ("unused/kernel", "unused/kernel: the function does not multiply by this weight"),
        ("dense/bias", "dense/bias: is not a weight matrix"),
    ],
)
def test_what_takes_no_adapter_is_refused_at_once_and_by_path(target: str, said: str) -> None:
    params, fn = mixed()
    with pytest.raises(StructureError, match=said):
        lt.lora.add(params, lt.lora.Config(rank=2, targets=target), key=KEY, fn=fn, args=(IMAGES, IDS))


LISTED: dict[str, tuple[tuple[int, ...], Callable[[Any, Any], Any]]] = {
    "ragged_dot": ((2, 4, 5), lambda w, x: jax.lax.ragged_dot(x, w["w"], jnp.array([1, 1]))),
    "reshape": ((4, 2, 3), lambda w, x: x @ w["w"].reshape(4, 6)),
    "split": ((4, 6), lambda w, x: sum(x @ part for part in jnp.split(w["w"], 3, axis=1))),
    "mul": ((4, 6), lambda w, x: x @ (w["w"] * 0.5)),
    "dot_general": ((2, 5, 4), lambda w, x: jnp.einsum("ij,ioj->o", x, w["w"])),
}
"""What the guide says that `add` refuses, by the operation that the message names."""


@pytest.mark.parametrize("operation", LISTED)
def test_what_the_guide_lists_is_refused_at_once(operation: str) -> None:
    shape, fn = LISTED[operation]
    config = lt.lora.Config(rank=2, targets="w")
    with pytest.raises(StructureError, match=rf"w: the model does more.*\n.*\n.*{operation}.* of a weight"):
        lt.lora.add({"w": jnp.ones(shape)}, config, key=KEY, fn=fn, args=(jnp.ones((2, 4)),))


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("fill", [None, 0.0, 1.0])
def test_rows_out_of_range_are_zero_or_nan_or_refused(fill: float | None) -> None:
    fn = lambda w, ids: w["t"].at[ids].get(mode="fill", fill_value=fill)  # noqa: E731
    add = lambda: lt.lora.add({"t": jnp.ones((9, 4))}, lt.lora.Config(rank=2, targets="t"), key=KEY, fn=fn, args=(IDS,))  # noqa: E731
    if fill == 1.0:
        with pytest.raises(StructureError, match="gather of a weight"):
            add()
        return
    model = map_with_paths(lambda path, leaf: leaf + 1.0 if path.endswith("lora_b") else leaf, add())
    ids = jnp.array([1, 20])
    np.testing.assert_allclose(lt.adapted(fn)(model, ids), fn(lt.lora.merge(model), ids), rtol=1e-5)


def test_a_weight_that_is_used_in_two_ways_is_refused() -> None:
    fn = lambda w, x: jnp.sum(jnp.tensordot(x, w["w"], 1)) + jnp.sum(jnp.einsum("ab,abc->c", x[:, :3], w["w"]))  # noqa: E731
    with pytest.raises(StructureError, match="w: the function uses this weight in several ways"):
        config = lt.lora.Config(rank=2, targets="w")
        lt.lora.add({"w": jnp.ones((4, 3, 2))}, config, key=KEY, fn=fn, args=(jnp.ones((4, 4)),))


def test_a_rank_above_what_a_kernel_has_is_refused() -> None:
    params, fn = mixed()
    with pytest.raises(ConfigError, match="rank of image/kernel must be an integer from 1 to 8, not 9"):
        lt.lora.add(params, lt.lora.Config(rank=9, targets="image/kernel"), key=KEY, fn=fn, args=(IMAGES, IDS))


def test_shapes_are_enough() -> None:
    params, fn = mixed()
    shapes = jax.eval_shape(lambda: (params, IMAGES, IDS))
    config = lt.lora.Config(rank=2, alpha=1.0, targets=KERNELS)
    model = lt.lora.add(shapes[0], config, key=KEY, fn=fn, args=shapes[1:])
    concrete = lt.lora.add(params, config, key=KEY, fn=fn, args=(IMAGES, IDS))
    assert jax.tree.map(lambda leaf: leaf.shape, model) == jax.tree.map(lambda leaf: leaf.shape, concrete)


@pytest.mark.slow
def test_a_convolutional_net_trains_and_no_kernel_is_ever_made() -> None:
    params, fn = mixed()
    model = lt.lora.add(params, lt.lora.Config(rank=2, alpha=1.0, targets=KERNELS), key=KEY, fn=fn, args=(IMAGES, IDS))
    loss = lambda model, batch: lt.adapted(fn)(model, *batch)  # noqa: E731
    trainer = lt.Trainer(model, loss, optax.adam(1e-2), wrt="**/lora_*")
    history = trainer.fit([(IMAGES, IDS)] * 8, num_steps=8)
    assert history[7]["loss"] < history[0]["loss"]
    closed = jax.make_jaxpr(lt.value_and_grad(loss, "**/lora_*"))(model, (IMAGES, IDS))
    made = [
        eqn.primitive.name
        for eqn in lt.jaxprs.equations(closed)
        if any(getattr(var.aval, "shape", ()) == (3, 3, 3, 8) for var in eqn.outvars)
    ]
    assert set(made) <= {"rev", "transpose", "jit", "pjit"}, made


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("form", "quantised"),
    [*((form, False) for form in ("x @ w", "x @ w.T", "einsum", "convolution", "rows")), ("x @ w", True)],
)
def test_a_program_that_casts_its_weights_multiplies_in_the_dtype_that_it_asks_for(form: str, quantised: bool) -> None:
    half = jnp.bfloat16
    shape = {"einsum": (8, 2, 16), "convolution": (3, 3, 8, 32), "rows": (10, 32)}.get(form, (32, 32))
    params = {"w": jax.random.normal(KEY, shape)}
    images, x = (jax.random.normal(KEY, each) for each in ((2, 5, 5, 8), (4, 32)))

    def fn(params: Any, x: Any) -> Any:
        w, x = params["w"].astype(half), x.astype(half)
        if form == "convolution":
            return jax.lax.conv_general_dilated(
                images.astype(half), w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
        if form == "rows":
            return w[IDS]
        return jnp.einsum("bi,ihd->bhd", x[:, :8], w) if form == "einsum" else x @ (w.T if form == "x @ w.T" else w)

    base = lt.quantize(params, "w", "int8") if quantised else params
    want = fn(lt.dequantize(base) if quantised else params, x)
    where: dict[str, Any] = {} if quantised else {"fn": fn, "args": (x,)}
    model = lt.lora.add(base, lt.lora.Config(rank=2, targets="w"), key=KEY, **where)
    got = lt.adapted(fn)(model, x)
    assert got.dtype == half
    want = np.asarray(want, np.float32)
    np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=0, atol=float(np.abs(want).max()) / 128)
    products = [
        eqn
        for eqn in equations(jax.make_jaxpr(lt.adapted(fn))(model, x))
        if eqn.primitive.name in ("dot_general", "conv_general_dilated", "gather")
    ]
    assert products
    assert {var.aval.dtype for eqn in products for var in eqn.invars if var.aval.dtype != jnp.int32} == {
        jnp.dtype(half)
    }


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", ["dora", "ia3", "vera"])
def test_what_scales_inputs_or_outputs_is_refused_for_a_weight_in_by_out_when_it_is_added(kind: str) -> None:
    configs = {
        "dora": lt.lora.Config(rank=2, targets="w", dora=True),
        "ia3": lt.lora.IA3Config(targets="w", feedforward=()),
        "vera": lt.lora.VeRAConfig(rank=2, targets="w"),
    }
    params, x = {"w": jnp.ones((8, 6))}, jnp.ones((2, 8))
    with pytest.raises(ConfigError, match=r"w: the function multiplies by this weight as \[in, out\](.|\n)*hint:"):
        lt.lora.add(params, configs[kind], key=KEY, fn=lambda p, x: x @ p["w"], args=(x,))
    turned = lt.lora.add(params, configs[kind], key=KEY, fn=lambda p, x: x @ p["w"].T, args=(jnp.ones((2, 6)),))
    assert lt.adapted(lambda p, x: x @ p["w"].T)(turned, jnp.ones((2, 6))).shape == (2, 8)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("mapped", [False, True])
def test_an_embedding_of_equinox_takes_an_adapter(mapped: bool) -> None:
    embedding = eqx.nn.Embedding(11, 8, key=KEY)
    ids = jnp.array([3, 10, 0]) if mapped else jnp.array(3)

    def fn(embedding: Any, ids: Any) -> Any:
        return jax.vmap(embedding)(ids) if mapped else embedding(ids)

    model = filled(lt.lora.add(embedding, lt.lora.Config(rank=2, targets="weight"), key=KEY, fn=fn, args=(ids,)))
    assert isinstance(model.weight, LoRAKernel)
    want = fn(lt.lora.merge(model), ids)
    np.testing.assert_allclose(lt.adapted(fn)(model, ids), want, rtol=0, atol=1e-5)
    grads = lt.value_and_grad(lambda m: jnp.sum(jnp.sin(lt.adapted(fn)(m, ids))), wrt="**/lora_*")(model)[1]
    assert all(np.abs(leaf).max() > 1e-3 for leaf in jax.tree.leaves(grads))
