"""Functions that know nothing of adapters are computed with them, whatever library wrote them."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import lowtide as lt
from lowtide.adapters.lora import LoRAWeight
from lowtide.core import StructureError, leaves_with_paths, map_with_paths

KEY = jax.random.key(0)
RANDOM = np.random.default_rng(0)


def drawn(*shape: int) -> Any:
    return jnp.asarray(RANDOM.normal(size=shape), jnp.float32)


X = drawn(5, 4)
W = {"w": drawn(4, 6) / 3, "stack": drawn(3, 4, 4) / 2, "other": jnp.ones((4,))}


@pytest.fixture(autouse=True)
def rank_promotion() -> Any:
    """Flax and Keras add their biases by rank promotion."""
    with jax.numpy_rank_promotion("allow"):
        yield


def with_adapters(model: Any, targets: Any = ("w", "stack")) -> Any:
    """Adapters that are no zero."""
    config = lt.lora.Config(rank=2, targets=targets)
    model = lt.lora.add(model, config, key=KEY)

    def filled(path: str, leaf: Any) -> Any:
        return 0.1 * drawn(*leaf.shape) if "lora_" in path else leaf

    return map_with_paths(filled, model)


@functools.cache
def of_arrays() -> Any:
    return with_adapters(W)


def materialised(model: Any) -> Any:
    def one(node: Any) -> Any:
        return node.weight + node.scaling * node.lora_b @ node.lora_a if isinstance(node, LoRAWeight) else node

    return jax.tree.map(one, model, is_leaf=lambda node: isinstance(node, LoRAWeight))


def assert_same(fn: Callable[..., Any], model: Any, *args: Any, is_eager_too: bool = False) -> Any:
    """Values and gradients equal those over W + BA."""
    wanted = lt.value_and_grad(lambda model, *args: fn(materialised(model), *args), "**/lora_*")
    expected, ours = jax.jit(wanted)(model, *args), lt.value_and_grad(lt.adapted(fn), "**/lora_*")
    for run in (jax.jit(ours), *([ours] if is_eager_too else ())):
        found = run(model, *args)
        for (path, one), (_, other) in zip(leaves_with_paths(found), leaves_with_paths(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6, err_msg=path)
    return expected[1]


def scanned(w: Any, x: Any) -> Any:
    def layer(h: Any, one: Any) -> Any:
        return jnp.tanh(h @ one), jnp.sum(h)

    h, sums = jax.lax.scan(jax.checkpoint(layer), x, w["stack"], reverse=True)
    return jnp.sum(h**2) + jnp.sum(sums)


@jax.custom_jvp
def squared(x: Any) -> Any:
    return x * x


squared.defjvp(lambda given, tangents: (squared(given[0]), 2 * given[0] * tangents[0]))

PROGRAMS: dict[str, Callable[[Any, Any], Any]] = {
    "x @ w": lambda w, x: jnp.sum(jnp.sin(x @ w["w"])),
    "w.T @ x.T": lambda w, x: jnp.sum(jnp.sin(w["w"].T @ x.T)),
    "einsum": lambda w, x: jnp.sum(jnp.sin(jnp.einsum("bi,io->ob", x, w["w"]))),
    "einsum, the weight first": lambda w, x: jnp.sum(jnp.sin(jnp.einsum("io,bi->bo", w["w"], x))),
    "einsum, back": lambda w, x: jnp.sum(jnp.sin(jnp.einsum("bo,io->bi", jnp.einsum("bi,io->bo", x, w["w"]), w["w"]))),
    "a stack with rows of its own": lambda w, x: jnp.sum(
        jnp.einsum("sbi,sio->bso", jnp.stack([x] * 3), w["stack"]) ** 2
    ),
    "a stack, last": lambda w, x: jnp.sum(jnp.einsum("sio,bis->bso", w["stack"], jnp.stack([x, x, x], -1)) ** 2),
    "a stack for each row": lambda w, x: jnp.sum(jnp.einsum("bi,sio->bso", x, w["stack"]) ** 2),
    "a stack for each row, first": lambda w, x: jnp.sum(jnp.einsum("soi,bi->sob", w["stack"], x) ** 2),
    "tensordot": lambda w, x: jnp.sum(jnp.tensordot(x, w["w"], 1) ** 2),
    "a vector": lambda w, x: jnp.sum(jnp.sin(x[0] @ w["w"])),
    "a wider result": lambda w, x: jnp.sum(jnp.matmul(x, w["w"], preferred_element_type=jnp.float32)),
    "jit": lambda w, x: jnp.sum(jax.jit(lambda w, x: jnp.sin(x @ w), inline=False)(w["w"], x)),
    "vmap": lambda w, x: jnp.sum(jax.vmap(lambda row: jnp.sin(row @ w["w"]))(x)),
    "vmap over a stack": lambda w, x: jnp.sum(jax.vmap(lambda one: jnp.sin(x @ one))(w["stack"])),
    "scan over layers": scanned,
    "fori_loop": lambda w, x: jnp.sum(jax.lax.fori_loop(0, 3, lambda i, h: jnp.sin(h @ w["stack"][i]), x)),
    "a loop of Python": lambda w, x: jnp.sum(x @ w["stack"][0] @ w["stack"][-1].T @ w["stack"][1:2][0]),
    "cond": lambda w, x: jax.lax.cond(x[0, 0] > 0, lambda w: jnp.sum(x @ w), lambda w: -jnp.sum(x @ w), w["w"]),
    "switch": lambda w, x: jax.lax.switch(2, [lambda w, i=i: jnp.sum(x @ w) * i for i in range(3)], w["w"]),
    "checkpoint": lambda w, x: jax.checkpoint(lambda w, x: jnp.sum(jnp.sin(x @ w)))(w["w"], x),
    "custom_jvp": lambda w, x: jnp.sum(squared(x @ w["w"])),
    "a gradient inside": lambda w, x: jnp.sum(jax.grad(lambda x: jnp.sum(jnp.sin(x @ w["w"])))(x) ** 2),
    "lowtide.core.linear": lambda w, x: jnp.sum(jnp.sin(lt.core.linear(x, w["w"].T))),
}


EAGER = ("x @ w", "scan over layers", "cond")
"""Also without jit."""


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_is_that_of_the_merged_weight(program: str) -> None:
    grads = assert_same(PROGRAMS[program], of_arrays(), X, is_eager_too=program in EAGER)
    used = "stack" if "stack" in program or "loop" in program or "layers" in program else "w"
    assert all(np.abs(leaf).max() > 0 for path, leaf in leaves_with_paths(grads) if path.startswith(f"{used}/"))


def test_a_loop_that_ends_by_itself() -> None:
    """Without a derivative for weights, which JAX does not have either."""

    def fn(w: Any, x: Any) -> Any:
        return jax.lax.while_loop(lambda h: jnp.sum(h @ w["w"]) < 9, lambda h: 1.1 * h + 0 * (h @ w["w"] @ w["w"].T), x)

    found = jax.jit(lambda model: (lt.adapted(fn)(model, X), fn(materialised(model), X)))(of_arrays())
    np.testing.assert_allclose(*found, rtol=1e-5)


def test_several_adapters_at_once() -> None:
    one = of_arrays()
    axes = map_with_paths(lambda path, leaf: 0 if "lora_" in path else None, one)
    two = lambda leaf: np.stack([np.asarray(leaf), 2 * np.asarray(leaf)])  # noqa: E731
    batched = map_with_paths(lambda path, leaf: two(leaf) if "lora_" in path else leaf, one)
    found = jax.jit(jax.vmap(lt.adapted(scanned), in_axes=(axes, None)))(batched, X)
    plain = jax.jit(lambda model: scanned(materialised(model), X))
    for i, each in enumerate(np.asarray(found)):
        model = map_with_paths(lambda path, leaf, i=i: leaf[i] if "lora_" in path else leaf, batched)
        np.testing.assert_allclose(each, plain(model), rtol=1e-5)


def of_nnx() -> tuple[Any, Any, Callable[..., Any]]:
    rngs = nnx.Rngs(0)
    layers = [nnx.Linear(4, 8, rngs=rngs), nnx.LayerNorm(8, rngs=rngs), nnx.relu, nnx.Linear(8, 2, rngs=rngs)]
    graph, state = nnx.split(nnx.Sequential(*layers))

    def loss(params: Any, x: Any) -> Any:
        model = nnx.merge(graph, state)
        own = nnx.state(model)
        nnx.replace_by_pure_dict(own, params)
        return jnp.mean(nnx.merge(graph, own)(x) ** 2)

    return nnx.to_pure_dict(state), "**/kernel", loss


def of_a_recurrence_of_nnx() -> tuple[Any, Any, Callable[..., Any]]:
    graph, state = nnx.split(nnx.RNN(nnx.OptimizedLSTMCell(4, 6, rngs=nnx.Rngs(0))))

    def loss(params: Any, x: Any) -> Any:
        own = nnx.state(nnx.merge(graph, state))
        nnx.replace_by_pure_dict(own, params)
        return jnp.mean(nnx.merge(graph, own)(x[None]) ** 2)

    return nnx.to_pure_dict(state), "**/kernel", loss


def of_keras() -> tuple[Any, Any, Callable[..., Any]]:
    import keras

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="gelu"), keras.layers.Dense(2)])
    fixed = [variable.value for variable in model.non_trainable_variables]

    def loss(variables: Any, x: Any) -> Any:
        return jnp.mean(model.stateless_call(variables, fixed, x)[0] ** 2)

    return [variable.value for variable in model.trainable_variables], ["0", "2"], loss


def of_equinox() -> tuple[Any, Any, Callable[..., Any]]:
    arrays, static = eqx.partition(eqx.nn.MLP(4, 2, 8, 2, key=KEY), eqx.is_array)
    return arrays, "**/weight", lambda arrays, x: jnp.mean(jax.vmap(eqx.combine(arrays, static))(x) ** 2)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("library", [of_nnx, of_a_recurrence_of_nnx, of_keras, of_equinox])
def test_models_of_other_libraries_as_they_are(library: Any) -> None:
    params, targets, loss = library()
    grads = assert_same(loss, with_adapters(params, targets), X)
    assert all(np.abs(leaf).max() > 0 for _, leaf in leaves_with_paths(grads))


class Model(eqx.Module):
    """A module that has a field `linear`, as a weight has a method."""

    linear: eqx.nn.Linear
    scale: Any


@pytest.mark.slow
def test_a_module_with_a_field_named_linear_is_not_a_weight() -> None:
    model, x = Model(eqx.nn.Linear(4, 6, key=KEY), jnp.ones((6,))), drawn(5, 4)
    fn = lambda model, x: jnp.sum(jnp.sin(jax.vmap(model.linear)(x) * model.scale))  # noqa: E731
    np.testing.assert_array_equal(lt.adapted(fn)(model, x), fn(model, x))
    config = lt.lora.Config(rank=2, targets="linear")
    assert isinstance(lt.lora.add(model, config, key=KEY, fn=fn, args=(x,)).linear.weight, LoRAWeight)
    assert_same(fn, with_adapters(model, "linear"), x)


@pytest.mark.slow
def test_no_product_of_factors_is_ever_made() -> None:
    """Of the shape of a weight there are the weights, their transposes and slices: nothing is added to one."""
    model = with_adapters({"w": jnp.ones((40, 60)), "stack": jnp.ones((3, 40, 40))})
    x = jnp.ones((5, 40))
    fn = lambda w, x: jnp.sum(x @ w["w"]) + scanned(w, x)  # noqa: E731
    closed = jax.make_jaxpr(lt.value_and_grad(lt.adapted(fn), "**/lora_*"))(model, x)
    large = {(40, 60), (60, 40), (40, 40), (3, 40, 40)}
    made = [
        eqn
        for eqn in lt.jaxprs.equations(closed)
        if any(getattr(var.aval, "shape", ()) in large for var in eqn.outvars)
    ]
    assert {eqn.primitive.name for eqn in made} <= {"transpose", "squeeze", "jit", "pjit", "copy"}, made


REFUSED: dict[str, Callable[[Any, Any], Any]] = {
    "integer_pow": lambda w, x: jnp.sum(w["w"] ** 2),
    "add": lambda w, x: jnp.sum(x @ (w["w"] + 1)),
    "reshape": lambda w, x: jnp.sum(x @ w["w"].reshape(4, 6, 1)[..., 0]),
    "scan": lambda w, x: jax.lax.scan(lambda h, row: (h + jnp.sum(row), None), 0.0, w["w"])[0],
    "while": lambda w, x: (
        jax.lax.while_loop(lambda s: s[1] < 3, lambda s: (s[0][::-1], s[1] + 1), (w["stack"], 0))[1] + 0.0
    ),
    "dot_general": lambda w, x: jnp.sum(w["w"].T @ w["w"]),
    "gather": lambda w, x: jnp.sum(w["w"][jnp.array([1, 2])]),
}


@pytest.mark.parametrize("operation", REFUSED)
def test_what_is_no_product_is_refused_with_its_line(operation: str) -> None:
    with pytest.raises(StructureError, match=rf"(w|stack): the model does more.*\n.*\n.*{operation}.* of a") as raised:
        lt.adapted(REFUSED[operation])(of_arrays(), X)
    assert "test_adapted.py:" in str(raised.value) and 'with the pattern "!' in str(raised.value)


def test_a_product_with_a_derivative_of_its_own_is_refused() -> None:
    @jax.custom_vjp
    def product(x: Any, w: Any) -> Any:
        return x @ w

    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))
    with pytest.raises(StructureError, match="custom_vjp_call of a LoRAWeight"):
        lt.adapted(lambda w, x: jnp.sum(product(x, w["w"])))(of_arrays(), X)


def test_a_weight_that_a_loop_gives_out_is_refused() -> None:
    with pytest.raises(StructureError, match="w: a loop or a branch of the model returns this weight"):
        lt.adapted(lambda w, x: jax.lax.cond(x[0, 0] > 0, lambda a: a, lambda a: a.T.T, w["w"]))(of_arrays(), X)


def test_what_is_no_array_goes_in_and_comes_out() -> None:
    def fn(w: Any, x: Any, *, times: int, name: str) -> Any:
        return {"name": name, "y": x @ w["w"] * times, "w": w["w"], "n": None}

    model = of_arrays()
    found = lt.adapted(fn)(model, X, times=2, name="text")
    assert found["name"] == "text" and found["w"] is model["w"] and found["n"] is None
    np.testing.assert_allclose(found["y"], 2 * X @ materialised(model)["w"], rtol=1e-5)
    assert lt.adapted(fn)(W, X, times=2, name="text")["w"] is W["w"]  # nothing is adapted, and nothing is traced


@pytest.mark.slow
def test_a_trainer_trains_it() -> None:
    model = jax.tree.map(jnp.array, of_arrays())
    trainer = lt.Trainer(model, lt.adapted(scanned), optax.adam(1e-2), wrt="**/lora_*")
    history = trainer.fit([X] * 5, num_steps=5)
    assert history[4]["loss"] < history[0]["loss"]
    np.testing.assert_array_equal(trainer.model["w"].weight, W["w"])


@pytest.mark.slow
def test_weights_that_are_divided() -> None:
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    placed = jax.tree.map(lambda leaf: jax.device_put(leaf, jax.NamedSharding(mesh, jax.P())), of_arrays())
    x = jax.device_put(np.tile(X, (8, 1))[:8], jax.NamedSharding(mesh, jax.P("a")))
    assert_same(scanned, placed, x)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["nf4", "int8"])
def test_adapters_of_quantised_weights(form: str) -> None:
    base, x = {"w": drawn(64, 64), "stack": drawn(3, 64, 64) / 8}, drawn(5, 64)

    def fn(params: Any, x: Any) -> Any:
        return jnp.mean(scanned(params, jnp.einsum("bi,oi->bo", x, params["w"])))

    quantised = lt.quantize(base, "**", form)
    whole, run = lt.dequantize(quantised), jax.jit(fn)
    np.testing.assert_allclose(jax.jit(lt.adapted(fn))(quantised, x), run(whole, x), rtol=1e-5)
    config = lt.lora.Config(rank=2, targets=["w", "stack"])
    model = lt.lora.add(quantised, config, key=KEY, fn=fn, args=(x,))
    dense = lt.lora.add(whole, config, key=KEY, fn=fn, args=(x,))
    found, expected = (jax.jit(lt.value_and_grad(lt.adapted(fn), "**/lora_*"))(each, x) for each in (model, dense))
    pairs = zip(leaves_with_paths(found), leaves_with_paths(expected), strict=True)
    for (path, one), (_, other) in pairs:
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * float(np.abs(other).max() + 1e-9), err_msg=path)
    merged = lt.lora.merge(lt.dequantize(model))
    np.testing.assert_allclose(run(merged, x), found[0], rtol=1e-4)


@pytest.mark.parametrize("kind", ["DoRA", "(IA)³", "VeRA"])
def test_what_scales_outputs_is_refused_where_weights_are_stored_the_other_way(kind: str) -> None:
    configs = {
        "DoRA": lt.lora.Config(rank=2, targets="w", dora=True),
        "(IA)³": lt.lora.IA3Config(targets="w", feedforward=()),
        "VeRA": lt.lora.VeRAConfig(rank=2, targets="w"),
    }
    model = lt.lora.add(W, configs[kind], key=KEY)
    right = jnp.ones((2, 6))
    found = jax.jit(lt.adapted(lambda w: right @ w["w"].T))(model)
    np.testing.assert_allclose(found, np.asarray(right) @ np.asarray(W["w"]).T, rtol=1e-5)
    with pytest.raises(StructureError, match=r"w: the model multiplies by this weight as \[in, out\](.|\n)*hint:"):
        lt.adapted(lambda w: X @ w["w"])(model)


def test_a_rounding_to_eight_bits_is_not_left_out() -> None:
    with pytest.raises(StructureError, match="convert_element_type of a LoRAWeight"):
        lt.adapted(lambda w, x: x @ w["w"].astype(jnp.float8_e4m3fn).astype(x.dtype))(of_arrays(), X)
