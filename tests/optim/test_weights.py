"""Weights in bfloat16 that are updated as if they were wider: against float32, in edge cases, and where it stands."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lowtide.core import ConfigError, StructureError, tree_bytes
from lowtide.optim import LowPrecisionState, PackedArray, _low_precision, converted, low_precision
from lowtide.optim._weights import WEIGHTS, init_residuals, narrow_updates, widen

KEY = jnp.uint32(7)
MOST_ERROR = {"split": 2.0**-8 / 127, "kahan": 2.0**-17, "stochastic": 2.0**-7}
"""Of what a weight stands for, as a part of it."""


def spread(seed: int, *shape: int) -> jax.Array:
    """Numbers of many magnitudes."""
    rng = np.random.default_rng(seed)
    return jnp.asarray((rng.choice([-1, 1], shape) * 10 ** rng.uniform(-6, 2, shape)).astype(np.float32))


def applied(tx: Any, steps: int, params: Any, grads: Any) -> tuple[Any, Any]:
    state = tx.init(params)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(steps):
        params, state = step(params, state)
    return params, state


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("kind", WEIGHTS)
def test_what_is_kept_of_a_weight_is_near_what_it_stands_for(kind: str) -> None:
    params = spread(0, 64, 128).astype(jnp.bfloat16)
    residuals = init_residuals(kind, params, 1)
    wide = widen(params, residuals)
    moved = wide * spread(1, 64, 128) / 10
    updates, residuals = narrow_updates(params, wide, residuals, moved - wide, [KEY])
    new = optax.apply_updates(params, updates)
    assert updates.dtype == new.dtype == jnp.bfloat16
    change = np.asarray(moved - wide, np.float64)
    goal = np.asarray(wide, np.float64) + change
    error = np.abs(np.asarray(widen(new, residuals), np.float64) - goal)
    # An update by more than the half of a weight is itself rounded.
    large = np.abs(change) > np.abs(np.asarray(wide)) / 2
    bound = MOST_ERROR[kind] * np.abs(goal) + large * np.abs(change) * 2.0**-7 + np.abs(goal) * 2.0**-24
    assert (error <= 1.01 * bound).all(), (error / np.abs(goal)).max()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", WEIGHTS)
def test_many_small_updates_arrive(kind: str) -> None:
    # By each of them a weight in bfloat16 alone would not change.
    params = {
        "w": jnp.linspace(1, 1.9, 64 * 128).reshape(64, 128).astype(jnp.bfloat16),
        "small": jnp.ones(3, jnp.bfloat16),
    }
    grads = jax.tree.map(lambda p: jnp.full(p.shape, 2.0**-12, jnp.bfloat16), params)
    alone, _ = applied(optax.sgd(1.0), 64, params, grads)
    assert np.array_equal(alone["w"], params["w"])
    new, state = applied(low_precision(optax.sgd(1.0), None, weights=kind), 64, params, grads)
    got = widen(new, state.residuals)
    moved = np.asarray(got["w"], np.float64) - np.asarray(params["w"], np.float64)
    assert moved.mean() == pytest.approx(-(2.0**-6), abs=1e-3 if kind == "stochastic" else 2e-5)
    assert kind == "stochastic" or np.array_equal(got["small"], jnp.full(3, 1 - 2.0**-6))


def test_small_leaves_are_those_of_float32_bit_for_bit() -> None:
    params = {"w": spread(3, 30, 40).astype(jnp.bfloat16)}
    grads = {"w": spread(4, 30, 40).astype(jnp.bfloat16)}
    new, state = applied(low_precision(optax.sgd(1e-3), None, weights="split"), 20, params, grads)
    wide, _ = applied(optax.sgd(1e-3), 20, *jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (params, grads)))
    assert state.residuals["w"].dtype == jnp.float32
    assert np.array_equal(widen(new, state.residuals)["w"], wide["w"])


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("form", ["8bit", "companded"])
def test_a_training_in_five_bytes_is_that_of_float32(form: str) -> None:
    # FlashOptim asks for a cosine above 0.975 of what bfloat16 weights have changed by after 10 steps.
    params = {"w": jnp.asarray(np.random.default_rng(5).normal(size=(64, 256)) / 8, jnp.bfloat16)}
    x = jnp.asarray(np.random.default_rng(6).normal(size=(50, 32, 64)).astype(np.float32))
    goal = jnp.asarray(np.random.default_rng(7).normal(size=(64, 256)).astype(np.float32) / 8)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ params["w"].astype(jnp.float32)) - jnp.tanh(x @ goal)) ** 2)

    def trained(tx: Any, params: Any) -> tuple[Any, Any]:
        state = tx.init(params)

        @jax.jit
        def step(params: Any, state: Any, x: jax.Array) -> Any:
            updates, state = tx.update(jax.grad(loss)(params, x), state, params)
            return optax.apply_updates(params, updates), state

        for batch in x:
            params, state = step(params, state, batch)
        return params, state

    adamw = optax.adamw(1e-3)
    wide, _ = trained(adamw, {"w": params["w"].astype(jnp.float32)})
    new, state = trained(low_precision(adamw, form, weights="split"), params)
    plain, _ = trained(adamw, params)
    moved = np.asarray(wide["w"] - params["w"], np.float64)

    def error(w: Any) -> tuple[float, float]:
        got = np.asarray(w, np.float64) - np.asarray(params["w"], np.float64)
        cosine = (got * moved).sum() / np.sqrt((got**2).sum() * (moved**2).sum())
        whole = np.asarray(w, np.float64) - np.asarray(wide["w"], np.float64)
        return float(cosine), float((whole**2).sum() / (np.asarray(wide["w"], np.float64) ** 2).sum())

    cosine, squared = error(widen(new, state.residuals)["w"])
    assert cosine > 0.9995 and squared < 1e-4, (cosine, squared)
    assert error(plain["w"])[0] < cosine


@pytest.mark.slow
def test_zeros_leave_zero_and_what_is_not_finite_comes_through() -> None:
    params = jnp.array([0.0, 0.0, 1.0, 1.0, 1.0, -2.0], jnp.bfloat16)
    updates = jnp.array([1e-30, 0.0, np.nan, np.inf, -1.0, 2.0**-130], jnp.float32)
    for kind in WEIGHTS:
        residuals = init_residuals(kind, params, 1)
        step, residuals = narrow_updates(params, widen(params, residuals), residuals, updates, [KEY])
        new = np.asarray(optax.apply_updates(params, step), np.float32)
        got = np.asarray(widen(jnp.asarray(new, jnp.bfloat16), residuals))
        np.testing.assert_allclose(got, [1e-30, 0, np.nan, np.inf, 0, -2], rtol=2.0**-7)


@pytest.mark.slow
def test_rests_are_rounded_without_bias() -> None:
    params = jnp.full((1024,), 1.5, jnp.bfloat16)
    residuals = init_residuals("split", params, 1)
    wide, update = widen(params, residuals), jnp.linspace(1e-6, 3e-3, 1024, dtype=jnp.float32)
    keys = jax.random.bits(jax.random.key(0), (1000,), jnp.uint32)

    def draw(key: Any) -> Any:
        updates, after = narrow_updates(params, wide, residuals, update, [key])
        return widen(optax.apply_updates(params, updates), after)

    drawn = np.asarray(jax.jit(jax.vmap(draw))(keys), np.float64).mean(0)
    assert np.abs(drawn - np.asarray(wide + update)).max() < 3e-5 / 15
    assert np.abs((drawn - np.asarray(wide + update)).mean()) < 1e-7


@pytest.mark.slow
def test_leaves_of_other_dtypes_are_left_alone() -> None:
    params = {"half": spread(8, 64, 128).astype(jnp.bfloat16), "single": spread(9, 64, 128)}
    grads = jax.tree.map(lambda p: p / 100, params)
    tx = low_precision(optax.adamw(1e-2), weights="split")
    new, state = applied(tx, 3, params, grads)
    alone, _ = applied(low_precision(optax.adamw(1e-2)), 3, params, grads)
    assert state.residuals["single"] is None and state.residuals["half"].dtype == jnp.int8
    assert np.array_equal(new["single"], alone["single"])
    assert new["half"].dtype == jnp.bfloat16 and state.inner[0].mu["half"].dtype == "float32"


@pytest.mark.slow
@pytest.mark.parametrize("kind", WEIGHTS)
def test_in_blocks_weights_are_those_of_the_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params = {"w": spread(10, 48, 512).astype(jnp.bfloat16)}
    grads = {"w": spread(11, 48, 512).astype(jnp.bfloat16)}
    tx = low_precision(optax.adamw(1e-2), weights=kind)
    whole = applied(tx, 4, params, grads)
    monkeypatch.setattr(_low_precision, "_BLOCK_BYTES", 2**15)
    blocks = applied(low_precision(optax.adamw(1e-2), weights=kind), 4, params, grads)
    again = applied(low_precision(optax.adamw(1e-2), weights=kind, seed=1), 4, params, grads)
    # What a compiler rounds otherwise in a loop is rounded at random otherwise, too.
    near, far = (np.asarray(widen(new, state.residuals)["w"]) for new, state in (whole, blocks))
    assert np.isclose(near, far, rtol=2.1 * MOST_ERROR[kind], atol=1e-6).mean() > 0.99
    assert (near == far).mean() > 0.9
    assert any(not np.array_equal(*pair) for pair in zip(*map(jax.tree.leaves, (whole, again)), strict=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weights": "float32"}, r"weights must be \"split\", \"kahan\" or \"stochastic\", not 'float32'\nhint: "),
        ({"format": None}, r"(?s)neither a format nor weights.*hint:"),
        ({"format": {}}, r"(?s)neither a format nor weights.*hint:"),
    ],
)
def test_arguments_that_cannot_be_used_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        low_precision(optax.adamw(1e-2), **arguments)


def test_weights_need_parameters_in_bfloat16_at_init_and_at_all_in_an_update() -> None:
    params = {"w": jnp.ones((64, 128), jnp.bfloat16)}
    tx = low_precision(optax.adamw(1e-2), weights="split")
    with pytest.raises(ConfigError, match=r'(?s)weights="split" needs parameters in bfloat16, not in float32'):
        tx.init({"w": jnp.ones((64, 128))})
    with pytest.raises(ConfigError, match=r"(?s)needs the parameters.*hint:"):
        tx.update(params, tx.init(params))
    with pytest.raises(
        StructureError, match=r"(?s)does not belong to this.*residuals in int8.*got: no residuals.*lt\.optim\.converted"
    ):
        tx.update(params, low_precision(optax.adamw(1e-2)).init(params), params)


# From one format to another.


def dense(state: Any) -> list[Any]:
    def opened(leaf: Any) -> Any:
        return leaf.dense() if isinstance(leaf, PackedArray) else leaf

    return jax.tree.leaves(jax.tree.map(opened, state, is_leaf=lambda leaf: isinstance(leaf, PackedArray)))


@pytest.mark.slow
def test_a_state_goes_on_in_another_format() -> None:
    params = {"w": spread(12, 64, 256).astype(jnp.bfloat16), "b": jnp.zeros(256, jnp.bfloat16)}
    grads = jax.tree.map(lambda p: (p + 1).astype(jnp.bfloat16), params)
    tx = optax.chain(optax.clip_by_global_norm(1.0), low_precision(optax.adamw(1e-3), weights="split"))
    new, state = applied(tx, 5, params, grads)
    wide = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    plain = converted(state, wide, jax.tree.map(lambda p: p.astype(jnp.float32), new))
    assert jax.tree.structure(plain) == jax.tree.structure(wide.init(new))
    assert all(np.array_equal(*pair) for pair in zip(dense(state[1].inner), dense(plain[1]), strict=True))
    back = converted(plain, tx, new)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    assert all(np.array_equal(*pair) for pair in zip(dense(state[1].inner), dense(back[1].inner), strict=True))
    other = optax.chain(optax.clip_by_global_norm(1.0), low_precision(optax.adamw(1e-3), "companded", weights="kahan"))
    moved = converted(state, other, new)
    assert isinstance(moved[1], LowPrecisionState) and moved[1].step == 5
    assert moved[1].inner[0].mu["w"].format == "companded" and moved[1].residuals["w"].dtype == jnp.bfloat16
    for ours, theirs in zip(*(jax.tree.leaves(widen(new, s[1].residuals)) for s in (state, moved)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2.0**-16)
    assert tree_bytes(
        converted(state, optax.chain(optax.identity(), low_precision(optax.adamw(1e-3), "4bit")), new)
    ) < (tree_bytes(state) / 2)


def test_a_state_of_another_optimizer_is_refused() -> None:
    params = {"w": spread(13, 64, 256)}
    with pytest.raises(StructureError, match=r"(?s)belongs to another optimizer.*hint:"):
        converted(optax.adamw(1e-3).init(params), low_precision(optax.sgd(1e-3, momentum=0.9)), params)
    with pytest.raises(StructureError, match=r"(?s)or to other parameters.*hint:"):
        converted(optax.adamw(1e-3).init({"w": spread(13, 64, 128)}), low_precision(optax.adamw(1e-3)), params)
