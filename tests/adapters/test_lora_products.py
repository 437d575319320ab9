"""Models that multiply by weights without `lowtide.core.linear`, and models that do more with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import lowtide as lt
from lowtide.core import ConfigError, StructureError

KEY = jax.random.key(0)
X = jnp.asarray(np.random.default_rng(0).normal(size=(5, 8)), jnp.float32)
Built = tuple[Any, str, Callable[[Any], Any]]
"""A model, what is adapted of it, and a function of it."""


@pytest.fixture(autouse=True)
def rank_promotion() -> Any:
    """Flax adds its biases by rank promotion."""
    with jax.numpy_rank_promotion("allow"):
        yield


def mlp() -> Built:
    return eqx.nn.MLP(8, 4, 16, 2, key=KEY), "layers/*", lambda model: jax.vmap(model)(X)


def attention() -> Built:
    return eqx.nn.MultiheadAttention(2, 8, key=KEY), "*_proj", lambda model: model(X, X, X)


def recurrence() -> Built:
    cell = eqx.nn.GRUCell(8, 4, key=KEY)
    return cell, "weight_*", lambda model: jax.lax.scan(lambda h, x: (model(x, h),) * 2, jnp.ones(4), X)[1]


def embedding() -> Built:
    return eqx.nn.Embedding(8, 8, key=KEY), "weight", lambda model: model(3)


def dense_of_linen() -> Built:
    layer = linen.Dense(4)
    return layer.init(KEY, X), "params/kernel", lambda variables: layer.apply(variables, X)


def by_hand(product: Callable[[Any, Any], Any], shape: tuple[int, ...] = (8, 6)) -> Callable[[], Built]:
    weight = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    return lambda: ({"w": jnp.asarray(weight)}, "w", lambda model: product(X, model["w"]))


WORKING: dict[str, Callable[[], Built]] = {
    "an MLP of Equinox": mlp,
    "attention of Equinox": attention,
    "a recurrence of Equinox": recurrence,
    "x @ w": by_hand(lambda x, w: x @ w),
    "x @ w.T": by_hand(lambda x, w: x @ w.T, (6, 8)),
    "w @ x.T": by_hand(lambda x, w: w @ x.T, (6, 8)),
    "w.mT, stacked": by_hand(lambda x, w: x @ w.mT, (2, 6, 8)),
    "a vector @ w, stacked": by_hand(lambda x, w: x[0] @ w, (2, 8, 6)),
    "w @ a vector, stacked": by_hand(lambda x, w: w @ x[0], (2, 6, 8)),
    "vectors @ w, stacked, as experts": by_hand(lambda x, w: jax.vmap(lambda row: row @ w)(x), (3, 8, 6)),
    "NumPy on the left": by_hand(lambda x, w: np.ones((3, 8), np.float32) @ w),
    "x @ w in a scan": by_hand(lambda x, w: jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0], (3, 8, 8)),
    "bfloat16 @ float32": by_hand(lambda x, w: x.astype(jnp.bfloat16) @ w),
}


QUICK = {
    *("an MLP of Equinox", "a recurrence of Equinox", "x @ w", "w @ x.T", "NumPy on the left", "x @ w in a scan"),
    "vectors @ w, stacked, as experts",
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in WORKING]
)
def test_adapters_of_foreign_products_start_as_no_change_and_have_the_gradients_of_the_whole_weight(name: str) -> None:
    model, targets, run = WORKING[name]()
    adapted = lt.lora.add(model, lt.lora.Config(rank=2, targets=targets), key=KEY)
    before, after = run(model), run(adapted)
    assert after.dtype == before.dtype
    np.testing.assert_array_equal(after, before)
    factors, rest = lt.partition(adapted, "**/lora_*")
    random = np.random.default_rng(2)  # B other than zero
    factors = jax.tree.map(lambda leaf: jnp.asarray(0.1 * random.normal(size=leaf.shape), jnp.float32), factors)

    def found(prepare: Callable[[Any], Any]) -> Any:
        of_factors = lambda factors: jnp.sum(jnp.sin(run(prepare(lt.combine(factors, rest)))))  # noqa: E731
        return jax.jit(jax.value_and_grad(of_factors))(factors)

    def one(ours: Any, theirs: Any) -> None:
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4 * np.max(np.abs(theirs)))

    jax.tree.map(one, found(lambda model: model), found(multiplied_out))


def multiplied_out(model: Any) -> Any:
    def one(node: Any) -> Any:
        return node.weight + node.scaling * node.lora_b @ node.lora_a if is_adapted(node) else node

    return jax.tree.map(one, model, is_leaf=is_adapted)


def is_adapted(node: Any) -> bool:
    return type(node).__name__ == "LoRAWeight"


@pytest.mark.slow
def test_an_equinox_model_tunes_in_a_trainer() -> None:
    model = lt.lora.add(mlp()[0], lt.lora.Config(rank=2, targets="layers/*"), key=KEY)
    frozen = np.array(model.layers[0].weight.weight)
    trainer = lt.Trainer(
        model, lambda model, x: jnp.mean((jax.vmap(model)(x) - 1) ** 2), optax.adam(1e-2), wrt="**/lora_*"
    )
    records = trainer.fit([X] * 5, num_steps=5, progress=False)
    assert records[-1]["loss"] < 0.5 * records[0]["loss"]
    merged = lt.lora.merge(trainer.model)
    run = eqx.filter_jit(lambda model: jax.vmap(model)(X))
    np.testing.assert_allclose(run(merged), run(trainer.model), atol=1e-5)
    np.testing.assert_array_equal(trainer.model.layers[0].weight.weight, frozen)


REFUSED: dict[str, Callable[[], Built]] = {
    "jnp.dot": by_hand(jnp.dot),
    "einsum": by_hand(lambda x, w: jnp.einsum("bi,io->bo", x, w)),
    "lax": by_hand(lambda x, w: jax.lax.dot(x, w)),
    "elementwise": by_hand(lambda x, w: w * 2.0),
    "array first": by_hand(lambda x, w: x[0, 0] * w),
    "a method": by_hand(lambda x, w: x @ w.astype(jnp.bfloat16)),
    "indexing": by_hand(lambda x, w: w[3]),
    "a sum": by_hand(lambda x, w: x @ w + jnp.sum(w)),
    "Dense of Linen": dense_of_linen,
    "an embedding of Equinox": embedding,
}


@pytest.mark.slow_after(9)
@pytest.mark.parametrize("name", REFUSED)
def test_what_else_is_done_to_an_adapted_weight_is_said(name: str) -> None:
    model, targets, run = REFUSED[name]()
    adapted = lt.lora.add(model, lt.lora.Config(rank=2, targets=targets), key=KEY)
    said = r"(?s)is now a LoRAWeight, for instance at .*lowtide.core.linear\(x, weight\).*hint: .*narrow the targets"
    with pytest.raises(StructureError, match=said):
        lt.value_and_grad(lambda model: jnp.sum(run(model)), "**/lora_*")(adapted)
    trainer = lt.Trainer(adapted, lambda model, _: jnp.sum(run(model)), optax.sgd(0.1), wrt="**/lora_*")
    with pytest.raises(StructureError, match=said):
        trainer.fit([X], num_steps=1, progress=False)


@pytest.mark.slow
def test_a_layerwise_step_says_it_too() -> None:
    stack = lt.LayerStack(
        first=lambda outer, batch: batch,
        block=lambda layer, h, batch: jnp.dot(h, layer["w"]),
        last=lambda outer, h, batch: (jnp.sum(h), {}),
    )
    adapted = lt.lora.add({"w": jnp.ones((2, 8, 8))}, lt.lora.Config(rank=2, targets="w"), key=KEY)
    step = lt.offload.layerwise_step(stack, optax.sgd(0.1), wrt="**/lora_*")
    with pytest.raises(StructureError, match=r"(?s)is now a LoRAWeight, .* at 1/w.*hint: .*narrow the targets"):
        step(*step.init({}, adapted), jnp.ones((4, 8)))


def test_layers_are_not_transposed_with_their_weights() -> None:
    adapted = lt.lora.add({"w": jnp.ones((2, 8, 8))}, lt.lora.Config(rank=2, targets="w"), key=KEY)
    with pytest.raises(StructureError, match=r"(?s)transposes its layer axis.*hint: use weight.mT"):
        lt.value_and_grad(lambda model: jnp.sum(model["w"].T @ X.T), "**/lora_*")(adapted)


def test_an_error_of_the_model_itself_stays_as_it_is() -> None:
    adapted = lt.lora.add({"w": jnp.ones((8, 8))}, lt.lora.Config(rank=2, targets="w"), key=KEY)
    with pytest.raises(TypeError, match="unsupported operand"):
        lt.value_and_grad(lambda model: model["w"] @ X.T + {}, "**/lora_*")(adapted)


def test_modules_of_nnx_and_keras_are_refused_with_the_way_that_there_is() -> None:
    import keras

    config = lt.lora.Config(rank=2, targets="kernel")
    module, layer = nnx.Linear(8, 4, rngs=nnx.Rngs(0)), keras.layers.Dense(4)
    layer.build((8, 8))
    for model, hint in (
        (module, r"nnx.to_pure_dict\(nnx.state\(module\)\).*lt.adapted.*nnx.LoRALinear"),
        (nnx.state(module), r"nnx.to_pure_dict\(state\).*lt.adapted.*nnx.LoRALinear"),
        (layer, r"each.path: each.value.*lt.adapted.*stateless_call.*layer.enable_lora"),
    ):
        with pytest.raises(ConfigError, match=rf"(?s)supports no adapter.*hint: .*{hint}"):
            lt.lora.add(model, config, key=KEY)
    graph, state = nnx.split(module)

    def of_nnx(weights: Any) -> Any:
        nnx.replace_by_pure_dict(own := nnx.state(nnx.merge(graph, state)), weights)
        return nnx.merge(graph, own)(X)

    def of_keras(weights: Any) -> Any:
        return layer.stateless_call([weights[each.path] for each in layer.trainable_variables], [], X)[0]

    variables = {each.path: each.value for each in layer.trainable_variables}
    for fn, weights in ((of_nnx, nnx.to_pure_dict(state)), (of_keras, variables)):
        adapted = lt.lora.add(weights, lt.lora.Config(rank=2, targets="**/kernel"), key=KEY, fn=fn)
        full = jax.tree_util.tree_map_with_path(
            lambda path, leaf: jnp.ones_like(leaf) if path[-1] == jax.tree_util.GetAttrKey("lora_b") else leaf, adapted
        )
        np.testing.assert_allclose(lt.adapted(fn)(full), fn(lt.lora.merge(full)), rtol=1e-5, atol=1e-5)
        assert not np.allclose(fn(weights), lt.adapted(fn)(full))
