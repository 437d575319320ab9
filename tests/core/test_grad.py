"""Gradients of what trains: equal to JAX's, and nothing of a frozen leaf's size is ever built."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lowtide.core import SelectionError, combine, leaves_with_paths, partition, select, tree_bytes, value_and_grad

X = jnp.asarray(np.random.default_rng(7).normal(size=(5, 3)), jnp.float32)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(3, 8, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
        self.last = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jax.nn.relu(self.first(x))
        for block in self.blocks:
            x = jnp.tanh(block(x))
        return self.last(x)


def plain() -> tuple[Any, Callable[..., jax.Array], str]:
    random = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(random.normal(size=shape), jnp.float32)  # noqa: E731
    model = {
        "base": draw(3, 8),
        "blocks": [{"lora_a": draw(8, 2), "lora_b": jnp.ones((2, 8))} for _ in range(2)],
        "head": (draw(8),),
    }

    def loss(model: Any, x: jax.Array) -> jax.Array:
        h = jnp.tanh(x @ model["base"])
        for block in model["blocks"]:
            h = h + h @ block["lora_a"] @ block["lora_b"]
        return jnp.mean((h @ model["head"][0]) ** 2)

    return model, loss, "**/lora_*"


def equinox_mlp() -> tuple[Any, Callable[..., jax.Array], str]:
    mlp = eqx.nn.MLP(3, 2, 8, 3, key=jax.random.key(1))
    arrays, static = eqx.partition(mlp, eqx.is_array)
    return arrays, lambda m, x: jnp.mean(jax.vmap(eqx.combine(m, static))(x) ** 2), "layers/{1,3}/*"


def nnx_state() -> tuple[Any, Callable[..., jax.Array], str]:
    graph, state = nnx.split(Net(nnx.Rngs(0)))
    return state, lambda s, x: jnp.mean(nnx.merge(graph, s)(x) ** 2), "blocks/**"


def nnx_module() -> tuple[Any, Callable[..., jax.Array], str]:
    return Net(nnx.Rngs(0)), lambda m, x: jnp.mean(m(x) ** 2), "blocks/0/kernel/*"


MODELS = [plain, equinox_mlp, nnx_state, nnx_module]


@functools.cache
def made(make: Callable[..., Any]) -> tuple[Any, Callable[..., jax.Array], str, Callable[..., Any]]:
    """A model, its loss, what trains of it, and the compiled gradient of that."""
    model, loss, where = make()
    return model, loss, where, jax.jit(value_and_grad(loss, where))


def jax_gradients_of(loss: Callable[..., Any], model: Any, where: Any) -> Callable[..., Any]:
    """`jax.value_and_grad` restricted to the selection: the selected leaves are its argument."""
    treedef, mask = jax.tree.structure(model), select(model, where)

    def of_selected(selected: list[Any], leaves: list[Any], x: Any) -> Any:
        chosen = iter(selected)
        return loss(treedef.unflatten([next(chosen) if m else leaf for m, leaf in zip(mask, leaves, strict=True)]), x)

    def call(model: Any, x: Any) -> tuple[Any, list[Any]]:
        leaves = jax.tree.leaves(model)
        return jax.value_and_grad(of_selected)([a for a, m in zip(leaves, mask, strict=True) if m], leaves, x)

    return call


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("make", "jit"), [(plain, False), (nnx_module, False), *((make, True) for make in MODELS)])
def test_equals_jax_restricted_to_the_selection_bit_for_bit(make: Callable[..., Any], jit: bool) -> None:
    model, loss, where, compiled_once = made(make)
    ours, theirs = value_and_grad(loss, where), jax_gradients_of(loss, model, where)
    if jit:
        ours, theirs = compiled_once, jax.jit(theirs)
    value, grads = ours(model, X)
    value_ref, grads_ref = theirs(model, X)
    np.testing.assert_array_equal(value, value_ref)
    assert len(jax.tree.leaves(grads)) == len(grads_ref) > 0
    for got, want in zip(jax.tree.leaves(grads), grads_ref, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("make", [plain, nnx_module])
def test_equals_the_gradient_of_the_whole_model_at_the_selected_leaves(make: Callable[..., Any]) -> None:
    model, loss, where = make()
    _, grads = value_and_grad(loss, where)(model, X)
    whole = dict(leaves_with_paths(jax.grad(loss)(model, X)))
    for path, got in leaves_with_paths(grads):
        np.testing.assert_array_equal(got, whole[path], err_msg=path)


@pytest.mark.parametrize("make", MODELS)
def test_gradients_have_the_structure_of_the_model(make: Callable[..., Any]) -> None:
    model, loss, where, step = made(make)
    _, grads = step(model, X)
    trainable, frozen = partition(model, where)
    assert jax.tree.structure(grads) == jax.tree.structure(trainable)
    assert tree_bytes(grads) == tree_bytes(trainable)
    stepped = combine(jax.tree.map(lambda p, g: p - 1e-3 * g, trainable, grads), frozen)
    assert jax.tree.structure(stepped) == jax.tree.structure(model)
    loss = jax.jit(loss)
    assert loss(stepped, X) < loss(model, X)


@pytest.mark.parametrize("make", MODELS)
def test_a_second_call_compiles_nothing(make: Callable[..., Any], compilations: Any) -> None:
    model, _, _, step = made(make)
    jax.block_until_ready(step(model, X))
    other = X + 1
    with compilations.none():
        jax.block_until_ready(step(model, X))
        jax.block_until_ready(step(model, other))


def test_a_second_eager_call_compiles_nothing(compilations: Any) -> None:
    model, loss, where = plain()
    jax.block_until_ready(value_and_grad(loss, where)(model, X))
    with compilations.none():
        jax.block_until_ready(value_and_grad(loss, where)(model, X))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_gradients_have_the_dtype_of_their_leaves(dtype: Any) -> None:
    model, loss, where = plain()
    model = jax.tree.map(lambda a: a.astype(dtype), model)
    _, grads = jax.eval_shape(value_and_grad(loss, where), model, X.astype(dtype))
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype(dtype)}


def test_auxiliary_values_keywords_and_scalars_pass_through() -> None:
    def loss(model: Any, x: Any, *, power: int) -> tuple[Any, dict[str, Any]]:
        return model["a"] * x**power, {"x": x}

    (value, aux), grads = value_and_grad(loss, "a", has_aux=True)({"a": 2.0, "b": 1}, 3.0, power=2)
    assert (float(value), aux, float(grads["a"]), grads["b"]) == (18.0, {"x": 3.0}, 9.0, None)


def test_the_default_selects_everything_and_the_root_may_be_an_array() -> None:
    assert float(value_and_grad(lambda w: w**2)(jnp.float32(3))[1]) == 6.0


def test_a_predicate_selects() -> None:
    model, loss, _ = plain()
    _, grads = value_and_grad(loss, lambda path, leaf: leaf.ndim == 1)(model, X)
    assert [path for path, _ in leaves_with_paths(grads)] == ["head/0"]


# --- nothing of a frozen leaf's size -------------------------------------------------------------------------------

FROZEN_SHAPE = (1021, 509)


def frozen_and_lora() -> tuple[dict[str, jax.Array], Callable[..., jax.Array], jax.Array]:
    rows, columns = FROZEN_SHAPE
    model = {
        "base": jnp.full(FROZEN_SHAPE, 0.01),
        "lora_a": jnp.full((rows, 2), 0.01),
        "lora_b": jnp.full((2, columns), 0.01),
        "unused": jnp.ones((1019, 503)),
    }
    return model, lambda m, x: jnp.mean((x @ m["base"] + x @ m["lora_a"] @ m["lora_b"]) ** 2), jnp.ones((3, rows))


def shapes_built_by(fn: Callable[..., Any], *args: Any) -> set[tuple[int, ...]]:
    """Shapes of everything an operation of `fn` writes, nested programs included."""

    def walk(jaxpr: Any) -> set[tuple[int, ...]]:
        shapes = set[tuple[int, ...]]()
        for eqn in jaxpr.eqns:
            shapes |= {var.aval.shape for var in eqn.outvars}
            for value in jax.tree.leaves(tuple(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
                inner = getattr(value, "jaxpr", value)
                shapes |= walk(inner) if hasattr(inner, "eqns") else set()
        return shapes

    return walk(jax.make_jaxpr(fn)(*args).jaxpr)


def test_no_operation_writes_an_array_of_a_frozen_leaf_s_shape() -> None:
    model, loss, x = frozen_and_lora()
    forbidden = {FROZEN_SHAPE, FROZEN_SHAPE[::-1], (1019, 503), (503, 1019)}
    assert shapes_built_by(value_and_grad(loss, "lora_*"), model, x).isdisjoint(forbidden)
    # The check sees what it has to see: the whole model's gradient does write them.
    assert shapes_built_by(jax.value_and_grad(loss), model, x) >= {FROZEN_SHAPE, (1019, 503)}


def test_eagerly_no_array_of_a_frozen_leaf_s_shape_appears() -> None:
    model, loss, x = frozen_and_lora()

    def count() -> int:
        return sum(array.shape in (FROZEN_SHAPE, (1019, 503)) for array in jax.live_arrays())

    before = count()
    value, grads = value_and_grad(loss, "lora_*")(model, x)
    assert count() == before
    naive = jax.value_and_grad(loss)(model, x)
    assert count() == before + 2
    del value, grads, naive


def compiled(fn: Callable[..., Any], *args: Any, device: jax.Device | None = None) -> Any:
    device = device or jax.devices()[0]
    place = jax.sharding.SingleDeviceSharding(device)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), args)
    return jax.jit(fn).trace(*shapes).lower(lowering_platforms=(device.platform,)).compile()


def assert_gradients_cost_what_trains(device: jax.Device | None) -> None:
    model, loss, x = frozen_and_lora()
    frozen_bytes, trainable_bytes = tree_bytes(model["base"]), tree_bytes([model["lora_a"], model["lora_b"]])
    ours = compiled(value_and_grad(loss, "lora_*"), model, x, device=device)
    assert [out.shape for out in jax.tree.leaves(ours.out_info)] == [(), (1021, 2), (2, 509)]
    stats, naive = ours.memory_analysis(), compiled(jax.value_and_grad(loss), model, x, device=device).memory_analysis()
    # Outputs are padded on a TPU: a row of 2 takes a lane of 128 (or 4 after transposition); the base's gradient
    # could not hide in this bound.
    assert trainable_bytes <= stats.output_size_in_bytes < frozen_bytes / 2
    assert stats.temp_size_in_bytes < frozen_bytes / 2
    assert naive.output_size_in_bytes > 2 * frozen_bytes * 0.9


def test_the_compiled_program_has_no_output_or_temporary_of_a_frozen_leaf_on_cpu() -> None:
    assert_gradients_cost_what_trains(None)


@pytest.mark.tpu_aot
def test_the_compiled_program_has_no_output_or_temporary_of_a_frozen_leaf_on_tpu(tpu_device: jax.Device) -> None:
    assert_gradients_cost_what_trains(tpu_device)


# --- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "where", "text", "hint"),
    [
        ({"w": 1.0}, "**/lora_*", "pattern '**/lora_*' matches nothing", "paths look like: w"),
        ({"w": 1.0, "lora_aa": 1.0}, "lora_a", "pattern 'lora_a' matches nothing", "near misses: lora_aa"),
        ({"w": 1.0, "step": 3}, "**", "step: a leaf of type int32 cannot be differentiated", 'the pattern "!step"'),
        (
            {"w": jnp.ones(2), "mask": jnp.ones(2, bool)},
            "*",
            "mask: a leaf of type bool cannot be differentiated",
            'leave it out of the selection, for instance with the pattern "!mask"',
        ),
        ({"key": jax.random.key(0)}, "key", "key: a leaf of type key<fry> cannot be differentiated", '"!key"'),
        ({"w": 1.0, "act": jnp.tanh}, lambda p, leaf: True, "act: a leaf of type", 'the pattern "!act"'),
        ({"w": 1.0}, lambda p, leaf: False, "selects no leaf", "it receives (path, leaf)"),
        ({"w": 1.0}, [], "no pattern without a leading '!'", "give at least one glob"),
        ({"w": 1.0}, ["w", "!w"], "the exclusions leave nothing selected", "narrow the patterns"),
    ],
)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_what_cannot_train_is_named(model: Any, where: Any, text: str, hint: str, jit: bool) -> None:
    def call(model: Any) -> Any:
        return value_and_grad(lambda model: jnp.float32(0), where)(model)

    if jit and not callable(model.get("act")):
        call = jax.jit(call)
    with pytest.raises(SelectionError, match=re.escape(text)) as error:
        call(model)
    assert f"hint: {hint}" in str(error.value) or hint in str(error.value).split("hint: ")[1]


def test_an_integer_leaf_that_stays_frozen_is_no_matter() -> None:
    loss = lambda m: m["w"] * m["step"]  # noqa: E731
    value, grads = value_and_grad(loss, "w")({"w": 2.0, "step": jnp.int32(3)})
    assert (float(value), float(grads["w"]), grads["step"]) == (6.0, 3.0, None)


def test_half_of_a_shared_array_is_refused() -> None:
    tied = jnp.ones(3)
    loss = lambda m: jnp.sum(m["embed"] * m["head"])  # noqa: E731
    with pytest.raises(SelectionError, match="embed is selected but the same array at head is not"):
        value_and_grad(loss, "embed")({"embed": tied, "head": tied})
