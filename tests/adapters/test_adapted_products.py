"""What a program asks of its products (a derivative, a precision, a division) holds with nodes in their place, too."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding

import lowtide as lt
from lowtide.adapters.lora import LoRAKernel
from lowtide.core import StructureError, map_with_paths
from lowtide.jaxprs import equations

KEY = jax.random.key(0)
HIGHEST = (jax.lax.Precision.HIGHEST,) * 2


def drawn(*shape: int, seed: int = 0) -> Any:
    return jax.random.normal(jax.random.key(seed), shape)


X = drawn(8, 64)


def filled(model: Any) -> Any:
    """Give adapters values that are no zeros, divided as they were."""

    def one(path: str, leaf: Any) -> Any:
        if "lora_" not in path:
            return leaf
        new = 0.1 * drawn(*leaf.shape, seed=len(path))
        return jax.device_put(new, leaf.sharding) if isinstance(leaf.sharding, NamedSharding) else new

    return map_with_paths(one, model)


def added(params: Any, fn: Callable[..., Any], *args: Any) -> Any:
    config = lt.lora.Config(rank=2, alpha=3.0, targets=list(params))
    return filled(lt.lora.add(params, config, key=KEY, fn=fn, args=args))


def of_kind(kind: str, fn: Callable[..., Any]) -> Any:
    if kind == "int8":
        return lt.quantize({"w": drawn(4, 64)}, "w", "int8")
    return added({"w": drawn(4, 64)}, fn, X)


@jax.custom_jvp
def scaled(x: Any, w: Any) -> Any:
    return x @ w.T


@scaled.defjvp
def _of_scaled(given: Any, tangents: Any) -> Any:
    return scaled(*given), 10 * (tangents[0] @ given[1].T + given[0] @ tangents[1].T)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", ["LoRAWeight", "QuantizedWeight"])
def test_a_product_with_a_rule_of_its_own_is_refused(kind: str) -> None:
    fn = lambda w, x: jnp.sum(scaled(x, w["w"]))  # noqa: E731
    model = of_kind("int8" if kind == "QuantizedWeight" else "LoRA", lambda w, x: x @ w["w"].T)
    with pytest.raises(StructureError, match=f"custom_jvp_call of a {kind}"):
        lt.adapted(fn)(model, X)
    with pytest.raises(StructureError, match="custom_jvp_call of a weight"):
        lt.lora.add({"w": drawn(4, 64)}, lt.lora.Config(rank=2, targets="w"), key=KEY, fn=fn, args=(X,))


@pytest.mark.slow
def test_numbers_of_python_stay_what_they_are() -> None:
    def loss(model: Any, batch: Any, *, key: Any = None, training: bool = False) -> Any:
        assert isinstance(training, bool)
        h = batch @ model["w"].T
        return jnp.mean((2 * h if training else h) ** 2)

    model = of_kind("LoRA", lambda w, x: x @ w["w"].T)
    found = lt.adapted(loss)(model, X, training=True)
    np.testing.assert_allclose(found, loss(lt.lora.merge(model), X, training=True), rtol=1e-5)
    trainer = lt.Trainer(model, lt.adapted(loss), optax.sgd(0.1), wrt="**/lora_*")
    np.testing.assert_allclose(trainer.fit([X], num_steps=1)[0]["loss"], found, rtol=1e-5)

    def several(model: Any, sizes: Any, name: str, nothing: None) -> Any:
        assert nothing is None and name == "mean"
        return jnp.zeros(sizes["n"]) + sizes["by"] * (X @ model["w"].T)[0], sizes["n"] + 1

    out, number = lt.adapted(several)(of_kind("LoRA", several_products), {"n": 4, "by": 0.5}, "mean", None)
    assert out.shape == (4,) and type(number) is int and number == 5


def several_products(w: Any, x: Any) -> Any:
    return x @ w["w"].T


LINE = several_products.__code__.co_firstlineno + 1


def in_context(w: Any, x: Any) -> Any:
    with jax.default_matmul_precision("highest"):
        return x @ w["w"].T


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("kind", ["LoRA", "int8", "kernel", "convolution"])
def test_products_have_the_precision_that_was_asked_for(kind: str) -> None:
    if kind == "kernel":
        fn = lambda w, x: jnp.einsum("bi,ihk->bhk", x, w["w"], precision="highest")  # noqa: E731
        model, count = added({"w": drawn(64, 2, 4)}, fn, X), 3
    elif kind == "convolution":
        fn = lambda w, x: jax.lax.conv(x[:, :, None], w["w"], (1,), "SAME", precision="highest")  # noqa: E731
        model, count = added({"w": drawn(4, 64, 1)}, fn, X), 3
    else:
        fn = in_context if kind == "LoRA" else lambda w, x: jnp.matmul(x, w["w"].T, precision="highest")
        model, count = of_kind(kind, fn), 3 if kind == "LoRA" else 1
    names = ("dot_general", "conv_general_dilated")
    forward = jax.make_jaxpr(lt.adapted(fn))(model, X)
    asked = [eqn.params["precision"] for eqn in equations(forward) if eqn.primitive.name in names]
    assert asked == [HIGHEST] * count
    back = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(lt.adapted(fn)(model, x) ** 2)))(X)
    assert all(eqn.params["precision"] == HIGHEST for eqn in equations(back) if eqn.primitive.name in names)


PRESETS = jax.lax.DotAlgorithmPreset


@pytest.mark.parametrize("preset", [PRESETS.BF16_BF16_F32, PRESETS.DEFAULT])
def test_an_algorithm_holds(preset: Any) -> None:
    fn = lambda w, x: jnp.matmul(x, w["w"].T, precision=preset)  # noqa: E731
    model = of_kind("LoRA", several_products)
    closed = jax.make_jaxpr(lt.adapted(fn))(model, X)
    asked = None if preset == PRESETS.DEFAULT else preset
    products = [eqn for eqn in equations(closed) if eqn.primitive.name in ("dot_general", "transposed_product")]
    assert [eqn.params.get("precision") for eqn in products] == [asked] * 3


REFUSED = [("highest", "default"), jax.lax.DotAlgorithm(np.float32, np.float32, np.float32)]


@pytest.mark.parametrize("precision", REFUSED, ids=["two", "an algorithm"])
def test_what_no_context_can_ask_for_is_refused_at_once(precision: Any) -> None:
    said = r"w: factors do not support a product with precision=.*, at (.|\n)*hint:"
    config = lt.lora.Config(rank=2, targets="w")
    products: dict[str, Any] = {
        "matrix": lambda w, x: jnp.matmul(x, w["w"].T, precision=precision),
        "kernel": lambda w, x: jnp.einsum("bi,ihk->bhk", x, w["w"], precision=precision),
    }
    for shape, fn in {(4, 64): products["matrix"], (64, 2, 4): products["kernel"]}.items():
        with pytest.raises(StructureError, match=said):
            lt.lora.add({"w": drawn(*shape)}, config, key=KEY, fn=fn, args=(X,))
    with pytest.raises(StructureError, match=said):
        jax.eval_shape(lt.adapted(products["matrix"]), of_kind("LoRA", several_products), X)


@pytest.fixture
def explicit() -> Any:
    mesh = jax.make_mesh((4, 2), ("f", "t"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        yield lambda array, *axes: jax.device_put(array, NamedSharding(mesh, jax.P(*axes)))


DIVIDED: dict[str, tuple[tuple[int, ...], Any, Any, Any, Callable[[Any, Any], Any]]] = {
    "outputs": ((16, 64), (), ("f",), jax.P(None, "t"), lambda p, x: jnp.matmul(x, p["w"].T, out_sharding=p["to"])),
    "what is summed over": (
        *((16, 64), (None, "t"), ("f", "t"), jax.P("f", None)),
        lambda p, x: jnp.einsum("bd,od->bo", x, p["w"], out_sharding=p["to"]),
    ),
    "heads that are summed over": (
        *((4, 16, 16), ("t",), ("f", "t"), jax.P("f", None)),
        lambda p, x: jnp.einsum("bhk,hko->bo", x.reshape(8, 4, 16), p["w"], out_sharding=p["to"]),
    ),
    "a stack": (
        *((2, 16, 64), (None, None, "t"), ("f", "t"), jax.P("f", None)),
        lambda p, x: jax.lax.scan(
            lambda h, w: (h + jnp.einsum("bd,od->bo", x, w, out_sharding=p["to"]), None),
            jnp.zeros((8, 16), out_sharding=p["to"]),
            p["w"],
        )[0],
    ),
}


def with_gradients(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The result, and the gradients of A and B."""

    def loss(model: Any, x: Any) -> Any:
        result = fn(model, x)
        return jnp.sum(jnp.sin(result)), result

    return jax.jit(lt.value_and_grad(loss, "**/lora_*", has_aux=True))


def multiplied_out(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of arrays of a model with adapters, by W + s B A."""

    def run(model: Any, x: Any) -> Any:
        node = model["w"]
        stack = getattr(node, "num_stacked", node.ndim - 2)
        product = functools.partial(jnp.tensordot, axes=1)
        for _ in range(stack):
            product = jax.vmap(product)
        return fn({"w": node.weight + node.scaling * product(node.lora_b, node.lora_a)}, x)

    return run


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("case", DIVIDED)
def test_results_are_divided_as_a_product_says(explicit: Any, case: str) -> None:
    shape, of_w, of_x, to, program = DIVIDED[case]
    fn = lambda p, x: program({**p, "to": to}, x)  # noqa: E731
    w, x = explicit(drawn(*shape) / 8, *of_w), explicit(X, *of_x)
    model = added({"w": w}, fn, x)
    assert isinstance(model["w"], LoRAKernel) == case.startswith("heads")
    (_, found), grads = with_gradients(lt.adapted(fn))(model, x)
    assert found.sharding.spec == jax.jit(fn)({"w": w}, x).sharding.spec == to
    assert grads["w"].lora_a.sharding == model["w"].lora_a.sharding
    plain = jax.tree.map(np.asarray, model)
    whole = multiplied_out(lambda p, x: program({**p, "to": None}, x))
    (_, expected), wanted = with_gradients(whole)(plain, np.asarray(X))
    for one, other in zip(jax.tree.leaves((found, grads)), jax.tree.leaves((expected, wanted)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("form", ["nf4", "int8"])
def test_so_are_those_of_few_bits(explicit: Any, form: str) -> None:
    _, of_w, of_x, to, program = DIVIDED["what is summed over"]
    fn = lambda p, x: program({**p, "to": to}, x)  # noqa: E731
    model = lt.quantize({"w": explicit(drawn(16, 256), *of_w)}, "w", form)
    x = drawn(8, 256)
    found = jax.jit(lt.adapted(fn))(model, explicit(x, *of_x))
    assert found.sharding.spec == to
    np.testing.assert_allclose(found, x @ np.asarray(lt.dequantize(model)["w"]).T, rtol=1e-4, atol=1e-4)


def test_a_sum_that_is_left_to_others_is_refused(explicit: Any) -> None:
    to = jax.P("f", None, unreduced={"t"})
    fn = lambda p, x: jnp.einsum("bd,od->bo", x, p["w"], out_sharding=to)  # noqa: E731
    x, w = explicit(X, "f", "t"), explicit(drawn(16, 64), None, "t")
    model = lt.lora.add({"w": w}, lt.lora.Config(rank=2, targets="w"), key=KEY)
    said = r"w: factors do not support a product with out_sharding="
    with pytest.raises(StructureError, match=said):
        jax.jit(lt.adapted(fn))(model, x)
    with pytest.raises(StructureError, match=said):
        lt.lora.add({"w": w}, lt.lora.Config(rank=2, targets="w"), key=KEY, fn=fn, args=(x,))


@pytest.mark.parametrize("kind", ["LoRA", "int8", "kernel"])
def test_weights_vary_where_activations_do(kind: str) -> None:
    """Inside of `jax.shard_map` JAX lets a weight vary along the axes of what it multiplies (`pvary`)."""
    mesh = jax.make_mesh((4, 2), ("d", "t"), axis_types=(AxisType.Auto,) * 2)
    fn = (lambda p, x: jnp.einsum("bi,ihk->bhk", x, p["w"])) if kind == "kernel" else several_products
    model = added({"w": drawn(64, 2, 4)}, fn, X) if kind == "kernel" else of_kind(kind, fn)
    divided = lambda fn: jax.shard_map(fn, mesh=mesh, in_specs=(jax.P(), jax.P("d")), out_specs=jax.P("d"))  # noqa: E731
    if kind == "int8":
        found = jax.jit(divided(lt.adapted(fn)))(model, X)
        np.testing.assert_allclose(found, X @ lt.dequantize(model)["w"].T, rtol=1e-4)
        return
    found = with_gradients(divided(lt.adapted(fn)))(model, X)
    expected = with_gradients(multiplied_out(fn))(model, X)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_a_shard_map_inside_is_refused_with_the_line_of_its_function() -> None:
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    fn = jax.shard_map(several_products, mesh=mesh, in_specs=(jax.P(), jax.P("d")), out_specs=jax.P("d"))
    said = rf"shard_map of a LoRAWeight.* at \S*test_adapted_products.py:{LINE}\n.*jax.shard_map\(lt.adapted\(fn\)"
    with pytest.raises(StructureError, match=said):
        lt.adapted(fn)(of_kind("LoRA", several_products), X)


def test_weights_that_are_divided_themselves_in_a_shard_map() -> None:
    mesh = jax.make_mesh((4, 2), ("d", "t"), axis_types=(AxisType.Auto,) * 2)
    fn = lambda p, x: jax.lax.psum(jnp.einsum("bi,oi->bo", x, p["w"]), "t")  # noqa: E731
    model = of_kind("LoRA", several_products)
    places = map_with_paths(lambda path, _: jax.P() if path.endswith("lora_b") else jax.P(None, "t"), model)
    run = jax.shard_map(lt.adapted(fn), mesh=mesh, in_specs=(places, jax.P("d", "t")), out_specs=jax.P("d"))
    np.testing.assert_allclose(jax.jit(run)(model, X), X @ lt.lora.merge(model)["w"].T, rtol=1e-4, atol=1e-5)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", ["LoRA", "int8"])
def test_a_rounding_that_is_cast_back_is_not_left_out(kind: str) -> None:
    model = of_kind(kind, several_products)
    fn = lambda p, x: x @ p["w"].astype(jnp.bfloat16).astype(jnp.float32).T  # noqa: E731
    with pytest.raises(StructureError, match="convert_element_type of a"):
        lt.adapted(fn)(model, X)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16) if leaf.dtype == jnp.float32 else leaf, model)
    if kind == "LoRA":  # nothing is rounded
        wider = lambda p, x: x @ p["w"].astype(jnp.float32).astype(jnp.bfloat16).astype(jnp.float32).T  # noqa: E731
        np.testing.assert_allclose(lt.adapted(wider)(half, X), several_products(half, X), rtol=1e-4, atol=1e-4)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["weight"], meta_fields=["kind"])
@dataclasses.dataclass(frozen=True)
class Own:
    """Somebody's node of a weight [4, 64], which holds it transposed, or in other words."""

    weight: Any
    kind: str
    shape: ClassVar[Any] = (4, 64)
    ndim: ClassVar[int] = 2
    dtype: ClassVar[Any] = jnp.dtype("float32")

    def dense(self, dtype: Any) -> Any:
        return (self.weight.T if self.kind == "transposed" else 0.5 * self.weight).astype(dtype)

    def linear(self, x: Any) -> Any:
        return x @ self.dense(x.dtype).T


@pytest.mark.parametrize("kind", ["transposed", "codes"])
def test_a_node_of_somebodys_has_the_shape_and_dtype_that_it_says(kind: str) -> None:
    weight = drawn(64, 4) if kind == "transposed" else jnp.arange(256, dtype=jnp.int8).reshape(4, 64)
    node = Own(weight, kind)
    fn = lambda w, x: (several_products(w, x), w["w"].dtype)  # noqa: E731
    found, dtype = lt.adapted(fn)({"w": node}, X)
    np.testing.assert_allclose(found, X @ node.dense(jnp.float32).T, rtol=1e-5)
    assert dtype == jnp.float32
    rounded = lambda w, x: x @ w["w"].astype(jnp.bfloat16).T  # noqa: E731
    with pytest.raises(StructureError, match=r"w: the model rounds this weight(.|\n)*a Own, at \S*test_adapted_prod"):
        lt.adapted(rounded)({"w": node}, X)


def test_a_node_without_a_shape_is_refused() -> None:
    class Nothing:
        def linear(self, x: Any) -> Any:
            return x

    with pytest.raises(StructureError, match="a Nothing stands for a weight, and has no shape or no dtype"):
        lt.adapted(several_products)({"w": Nothing()}, X)


def test_half_a_model_is_refused() -> None:
    model = lt.lora.add({"w": drawn(16, 64)}, lt.lora.Config(rank=2, targets="w"), key=jax.random.key(0))
    for half in lt.partition(model, "**/lora_*"):
        with pytest.raises(StructureError, match=r"a LoRAWeight has no weight, or no factors(.|\n)*lt.combine"):
            lt.adapted(lambda p, x: x @ p["w"].T)(half, X)
    base = lt.quantize({"w": drawn(16, 64)}, "w", "int8")
    quantized = lt.lora.add(base, lt.lora.Config(rank=2, targets="w"), key=jax.random.key(0))
    with pytest.raises(StructureError, match="combine the halves"):
        lt.adapted(several_products)(lt.partition(quantized, "**/lora_*")[0], X)


def test_dtypes_without_a_wider_one_are_refused() -> None:
    def fn(params: Any, x: Any) -> Any:
        product = jax.lax.dot_general
        return product(x, params["w"], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)

    w, x = drawn(16, 64).astype(jnp.bfloat16), X.astype(jnp.float8_e4m3fn)
    model = lt.lora.add({"w": w}, lt.lora.Config(rank=2, targets="w"), key=jax.random.key(0))
    with pytest.raises(
        StructureError, match=r"w: (.|\n)*no common wider dtype(.|\n)*float8_e4m3fn, bfloat16 and float32"
    ):
        lt.adapted(fn)(model, x)
