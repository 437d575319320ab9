"""The wrapper: every optimizer of Optax, the places where it may stand, leaves of every kind, meshes and the host."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lowtide import offload
from lowtide.core import ConfigError, PlacementWarning, SelectionError, StructureError
from lowtide.optim import PackedArray, _low_precision, converted, low_precision

SCRIPT = Path(__file__).parents[2] / "scripts" / "optimizer_table.py"
_spec = importlib.util.spec_from_file_location("optimizer_table", SCRIPT)
assert _spec is not None and _spec.loader is not None
optimizer_table = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(optimizer_table)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:optax")
FORMATS = ("8bit", "companded", "fp8", "4bit", "bfloat16")
UNSELECTED = {
    "adadelta",
    "adafactor",
    "adafactor (momentum)",
    "adagrad",
    "adan",
    "fromage",
    "lbfgs",
    "noisy_sgd",
    "optimistic_gradient_descent",
    "polyak_sgd",
    "rprop",
    "sgd",
    "sign_sgd",
    "signum",
    "contrib.cocob",
    "contrib.madgrad",
    "contrib.simplified_ademamix",
}
"""Optimizers whose state has no moments by the default names, or that have no state."""


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def loss(params: Any) -> jax.Array:
    w = params["w"].astype(jnp.float32)
    return jnp.mean((jnp.tanh(normal(1, 32, 24) @ w + params["b"]) - jnp.tanh(normal(2, 32, 200))) ** 2)


PARAMS = {"w": normal(0, 24, 200) / 5, "b": jnp.zeros((1, 200))}


def trained(tx: Any, steps: int = 30, params: Any = PARAMS, **extra: Any) -> tuple[float, Any, Any]:
    tx = optax.with_extra_args_support(tx)
    state = tx.init(params)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        updates, state = tx.update(jax.grad(loss)(params), state, params, **extra)
        return optax.apply_updates(params, updates), state

    for _ in range(steps):
        params, state = step(params, state)
    return float(loss(params)), params, state


def packed(state: Any) -> list[PackedArray]:
    def is_packed(leaf: Any) -> bool:
        return isinstance(leaf, PackedArray)

    return [leaf for leaf in jax.tree.leaves(state, is_leaf=is_packed) if is_packed(leaf)]


def same(a: Any, b: Any) -> bool:
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


# Optimizers.


def test_an_optimizer_without_moments_is_refused() -> None:
    for name in UNSELECTED:
        with pytest.raises(SelectionError, match=r"(?s)low_precision selects nothing.*hint: write match as a regular"):
            low_precision(optimizer_table.OPTIMIZERS[name](), least_size=1).init(PARAMS)


def test_a_difference_of_two_moments_is_refused() -> None:
    tx = optimizer_table.OPTIMIZERS["rmsprop (momentum, centered)"]()
    with pytest.raises(ConfigError, match=r"(?s)difference of two moments.*hint: leave out centered"):
        low_precision(tx, least_size=1).init(PARAMS)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", sorted({*optimizer_table.KINDS} - UNSELECTED - {"rmsprop (momentum, centered)"}))
def test_an_optimizer_of_each_kind_trains_as_in_float32(name: str) -> None:
    tx, extra = optimizer_table.OPTIMIZERS[name](), optimizer_table.extra_arguments(name)
    wrapped = low_precision(tx, least_size=1)
    before = float(loss(PARAMS))
    want, _, _ = trained(tx, 10, **extra)
    got, _, state = trained(wrapped, 10, **extra)
    assert packed(state)
    assert abs(got - want) < 0.05 * abs(before - want) + 1e-3, (before, want, got)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("form", FORMATS)
def test_every_format_trains(form: str) -> None:
    want, _, _ = trained(optax.adamw(1e-2))
    got, _, state = trained(low_precision(optax.adamw(1e-2), form))
    assert {leaf.format for leaf in packed(state)} == {form}
    part = 0.25 if form == "4bit" else 0.05
    assert abs(got - want) < part * abs(float(loss(PARAMS)) - want)


@pytest.mark.slow
def test_signs_are_kept_where_numbers_may_be_negative() -> None:
    """SM3 calls its momentum nu; of types that are not Optax's nothing is known."""

    class Own(NamedTuple):
        nu: Any

    own = optax.GradientTransformation(
        lambda params: Own(jax.tree.map(jnp.zeros_like, params)), lambda grads, state, params=None: (grads, Own(grads))
    )
    grads = {"w": normal(5, 24, 200)}
    for tx in (optax.sm3(1e-2), own):
        wrapped = low_precision(tx, least_size=1)
        _, state = wrapped.update(grads, wrapped.init(grads), grads)
        nu = packed(state.inner)[-1]
        assert not nu.is_positive
        assert float(nu.dense().min()) < 0
    adam = low_precision(optax.adam(1e-2)).init(PARAMS).inner[0]
    assert (adam.mu["w"].is_positive, adam.nu["w"].is_positive) == (False, True)


def test_a_parameter_of_a_tuple_with_names_is_part_of_what_it_is_of() -> None:
    class Layer(NamedTuple):
        mu: Any
        nu: Any

    state = low_precision(optax.adam(1e-2)).init(Layer(jnp.ones((64, 64)), jnp.ones((64, 64))))
    assert [leaf.is_positive for leaf in packed(state)] == [False, False, True, True]


# Where it may stand.


def outside(kind: str, tx: Any) -> Any:
    return {
        "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), tx),
        "MultiSteps": lambda: optax.MultiSteps(tx, 2).gradient_transformation(),
        "apply_if_finite": lambda: optax.apply_if_finite(tx, 3),
        "masked": lambda: optax.masked(tx, {"w": True, "b": False}),
        "partition": lambda: optax.partition({"a": tx, "b": optax.set_to_zero()}, {"w": "a", "b": "b"}),
    }[kind]()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", ["chain", "MultiSteps", "apply_if_finite", "masked", "partition"])
def test_other_transformations_may_be_around_it_or_inside(kind: str) -> None:
    want, _, _ = trained(outside(kind, optax.adamw(1e-2)), 12)
    around, _, state = trained(outside(kind, low_precision(optax.adamw(1e-2))), 12)
    inside, _, other = trained(low_precision(outside(kind, optax.adamw(1e-2))), 12)
    assert len(packed(state)) == len(packed(other)) == 2
    assert abs(around - want) < 2e-3
    assert abs(inside - want) < 2e-3


@pytest.mark.slow
def test_hyperparameters_may_be_injected() -> None:
    tx = optax.inject_hyperparams(lambda learning_rate: low_precision(optax.adamw(learning_rate)))(1e-2)
    want, _, _ = trained(optax.adamw(1e-2), 12)
    got, _, state = trained(tx, 12)
    assert abs(got - want) < 2e-3
    assert float(state.hyperparams["learning_rate"]) == pytest.approx(1e-2)


@pytest.mark.slow
def test_eagerly_donated_and_in_a_branch_values_are_the_same() -> None:
    tx = low_precision(optax.adamw(1e-2))
    state, grads = tx.init(PARAMS), jax.grad(loss)(PARAMS)
    want = jax.jit(tx.update)(grads, state, PARAMS)
    branch = jax.jit(
        lambda go, g, s, p: jax.lax.cond(go, lambda: tx.update(g, s, p), lambda: (jax.tree.map(jnp.zeros_like, g), s))
    )
    for got in (tx.update(grads, state, PARAMS), branch(True, grads, state, PARAMS)):
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), rtol=1e-5, atol=1)
    assert same(branch(False, grads, state, PARAMS)[1], state)
    donated = jax.jit(tx.update, donate_argnums=(0, 1))(grads, state, PARAMS)
    assert all(leaf.codes.is_deleted() for leaf in packed(state))
    assert same(donated, want)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("form", "wrapped"), [*((form, jax.jit) for form in FORMATS), pytest.param("8bit", lambda fn: fn, id="8bit-eager")]
)
def test_a_derivative_that_the_state_would_lose_is_refused(form: str, wrapped: Any) -> None:
    def moved(tx: Any, factor: Any) -> Any:
        grads, state = jax.tree.map(lambda leaf: factor * leaf, PARAMS), tx.init(PARAMS)
        updates, _ = tx.update(grads, state, PARAMS)
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(updates))

    # A learning rate is no part of what is stored.
    total = sum(float(jnp.sum(leaf)) for leaf in jax.tree.leaves(PARAMS))
    rate = jax.grad(wrapped(lambda rate: moved(low_precision(optax.sgd(rate, momentum=0.9), form), 1.0)))(0.1)
    assert float(rate) == pytest.approx(-total, rel=1e-5)
    tx = low_precision(optax.sgd(0.1, momentum=0.9), form)
    for derivative in (jax.grad, jax.jacfwd):
        with pytest.raises(
            StructureError,
            match=r"(?s)derivative goes through the quantised state .*hint: .*stop_gradient",
        ):
            derivative(wrapped(lambda factor: moved(tx, factor)))(1.0)
    assert float(jax.grad(wrapped(lambda factor: moved(tx, jax.lax.stop_gradient(factor))))(1.0)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("form", ["8bit", "bfloat16"])
def test_state_keeps_its_dtype_where_an_optimizer_widens_it(form: str) -> None:
    """Optax's moments of parameters in bfloat16 are float32 after a step with hyperparameters in float32."""
    inner = optax.inject_hyperparams(optax.adamw, hyperparam_dtype=jnp.float32)(learning_rate=1e-2)
    tx, params = low_precision(inner, form), {"w": PARAMS["w"].astype(jnp.bfloat16)}
    state, step = tx.init(params), jax.jit(tx.update)
    for _ in range(2):
        updates, state = step(params, state, params)
    assert step._cache_size() == 1 and {leaf.dtype for leaf in packed(state)} == {"bfloat16"}
    expected = params
    want, plain = inner.init(params), jax.jit(inner.update)
    for _ in range(2):
        expected, want = plain(params, want, params)
    apart = np.abs(np.asarray(updates["w"]) - np.asarray(expected["w"]))
    assert 0 < apart.mean() < 0.02 * np.abs(expected["w"]).mean()


def test_what_is_widened_is_rounded_at_random_once() -> None:
    """Rounded to the nearest bfloat16 before, means with a decay of 0.999 would stay at a quarter."""
    inner = optax.inject_hyperparams(optax.adam, hyperparam_dtype=jnp.float32)(learning_rate=1e-2, b1=0.999)
    tx, params = low_precision(inner, "bfloat16"), {"w": jnp.ones((64, 128), jnp.bfloat16)}
    state = jax.lax.fori_loop(0, 1000, lambda _, state: tx.update(params, state, params)[1], tx.init(params))
    assert float(packed(state)[0].dense().mean(dtype=jnp.float32)) == pytest.approx(1 - 0.999**1000, abs=0.02)


@pytest.mark.slow
def test_under_vmap_each_has_its_own_state() -> None:
    tx = low_precision(optax.adamw(1e-2))
    params = jax.tree.map(lambda p: jnp.stack([p, 2 * p, -p]), PARAMS)
    states = jax.vmap(tx.init)(params)
    got, _ = jax.jit(jax.vmap(tx.update))(params, states, params)
    for at in range(3):
        one = jax.tree.map(lambda p: p[at], params)  # noqa: B023
        want, _ = jax.jit(tx.update)(one, tx.init(one), one)
        np.testing.assert_allclose(got["w"][at], want["w"], rtol=1e-5)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("form", ["8bit", "bfloat16"])
def test_steps_are_the_same_again_and_after_going_on(form: str) -> None:
    tx = low_precision(optax.adamw(1e-2), form)
    _, params, state = trained(tx, 6)
    _, again, other = trained(tx, 6)
    assert same((params, state), (again, other))
    step = jax.jit(lambda g, s, p: tx.update(g, s, p))
    held = jax.tree.map(np.asarray, state)
    assert same(step(PARAMS, state, params), step(PARAMS, jax.tree.map(jnp.asarray, held), params))


# Leaves.


@pytest.mark.slow
def test_leaves_of_every_kind() -> None:
    params = {
        "bf16": normal(0, 32, 256).astype(jnp.bfloat16),
        "vector": normal(1, 5000),
        "odd": normal(2, 7, 900),
        "scalar": jnp.float32(0.5),
        "empty": jnp.zeros((0, 512)),
        "small": normal(3, 8),
    }
    tx, plain = low_precision(optax.adamw(1e-2)), optax.adamw(1e-2)
    grads = jax.tree.map(lambda p: jnp.sin(3 * p), params)
    state, other = tx.init(params), plain.init(params)
    assert {leaf.shape for leaf in packed(state)} == {(32, 256), (5000,), (7, 900)}
    for _ in range(3):
        updates, state = jax.jit(tx.update)(grads, state, params)
        want, other = jax.jit(plain.update)(grads, other, params)
    assert jax.tree.map(lambda u: (u.shape, u.dtype), updates) == jax.tree.map(lambda u: (u.shape, u.dtype), want)
    assert state.inner[0].mu["bf16"].dense().dtype == jnp.bfloat16
    for path, got in updates.items():
        if got.size:
            error = jnp.abs(got.astype(jnp.float32) - want[path].astype(jnp.float32))
            assert float(error.mean()) < 5e-4, path
    assert float(jnp.abs(updates["small"] - want["small"]).max()) == 0


@pytest.mark.slow
def test_integers_of_a_state_stay() -> None:
    tx = optax.GradientTransformation(
        lambda params: {"mu": {"w": jnp.zeros((64, 64), jnp.int32), "x": jnp.zeros((64, 64))}},
        lambda grads, state, params=None: (grads, jax.tree.map(lambda leaf: leaf + 1, state)),
    )
    wrapped = low_precision(tx)
    _, state = wrapped.update({"w": jnp.ones(3)}, wrapped.init({"w": jnp.ones(3)}))
    assert state.inner["mu"]["w"].dtype == jnp.int32
    assert isinstance(state.inner["mu"]["x"], PackedArray)


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_spoils_its_block_alone() -> None:
    tx = low_precision(optax.adam(1e-2))
    params = {"w": normal(0, 16, 512)}
    grads = {"w": params["w"].at[3, 300].set(jnp.nan)}
    _, state = jax.jit(tx.update)(grads, tx.init(params), params)
    for leaf in packed(state):
        is_nan = np.isnan(leaf.dense())
        assert is_nan[3, 256:].all()
        assert is_nan.sum() == 256


def test_paths_choose_formats() -> None:
    tx = low_precision(optax.adam(1e-2), {r".*/mu/.*": "bfloat16", r".*/nu/.*": "8bit"})
    state = tx.init(PARAMS)
    assert state.inner[0].mu["w"].format == "bfloat16"
    assert state.inner[0].nu["w"].format == "8bit"


# In blocks, on a mesh, and on the host.


@pytest.mark.slow
def test_in_blocks_the_state_is_that_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter for each format, and one of three axes."""
    params = {form: normal(seed, 128, 1024) for seed, form in enumerate(FORMATS)} | {"v": normal(9, 3, 64, 256)}
    tx = low_precision(optax.adamw(1e-2), {**{f".*/{form}": form for form in FORMATS}, ".*/v": "8bit"})
    state = tx.init(params)
    _, state = jax.jit(tx.update)(params, state, params)
    grads = jax.tree.map(jnp.sin, params)
    monkeypatch.setattr(_low_precision, "_BLOCK_BYTES", 64 * 1024)
    update = jax.jit(lambda *args: tx.update(*args))
    in_blocks = update(grads, state, params)
    for form in set(FORMATS) - {"bfloat16"}:
        alone, leaf = low_precision(optax.adamw(1e-2), form), {"w": params[form]}
        assert "while" in jax.jit(alone.update).lower(leaf, alone.init(leaf), leaf).as_text()
    transformation = _low_precision._LowPrecision
    monkeypatch.setattr(transformation, "_update_in_blocks", transformation._update_whole)
    whole = jax.jit(lambda *args: tx.update(*args))(grads, state, params)
    assert jax.tree.structure(in_blocks) == jax.tree.structure(whole)
    for name in FORMATS:
        np.testing.assert_allclose(in_blocks[0][name], whole[0][name], rtol=2e-6)
    for a, b in zip(packed(in_blocks[1]), packed(whole[1]), strict=True):
        # The compiler may round a product otherwise in a loop: a number between two codes gets the other one then.
        assert float(jnp.mean(a.codes.astype(jnp.float32) == b.codes.astype(jnp.float32))) > 0.999


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("spec", "form"), [(("x", None), "8bit"), ((None, "x"), "4bit")])
def test_on_a_mesh_values_are_those_of_one_device(spec: tuple[Any, ...], form: str) -> None:
    params = {"w": normal(0, 64, 2048), "b": normal(1, 8)}
    grads = jax.tree.map(jnp.sin, params)
    plain = low_precision(optax.adamw(1e-2), form)
    want = jax.jit(plain.update)(grads, plain.init(params), params)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    places = {
        "w": jax.sharding.NamedSharding(mesh, jax.P(*spec)),
        "b": jax.sharding.NamedSharding(mesh, jax.P()),
    }
    grads, params = jax.device_put((grads, params), (places, places))
    tx = low_precision(optax.adamw(1e-2), form, shardings=places)
    of_state = offload.state_shardings(tx, params)
    mu = of_state.inner[0].mu["w"]
    assert mu.codes.spec == jax.P(*spec)
    assert mu.scales.spec == jax.P(*spec)  # every device has whole blocks
    state = jax.jit(tx.init, out_shardings=of_state)(params)
    with pytest.warns(PlacementWarning, match=r"(?s)runs as a whole.*hint: pass low_precision\(tx, shardings="):
        as_a_whole = jax.jit(plain.update)(grads, state, params)
    np.testing.assert_allclose(as_a_whole[0]["w"], want[0]["w"], rtol=2e-6)
    got = jax.jit(tx.update, out_shardings=(places, of_state))(grads, state, params)
    np.testing.assert_allclose(got[0]["w"], want[0]["w"], rtol=2e-6)
    for a, b in zip(packed(got[1]), packed(want[1]), strict=True):
        assert float(jnp.mean(np.asarray(a.codes) == np.asarray(b.codes))) > 0.999
        np.testing.assert_allclose(a.scales, b.scales, rtol=1e-6)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("form", "mode"), [("8bit", "streamed"), ("bfloat16", "whole")])
def test_what_is_packed_may_wait_on_the_host(form: str, mode: str) -> None:
    params = {"w": normal(0, 512, 2048)}
    inner = low_precision(optax.adamw(1e-2), form)
    tx = offload.optimizer(inner, match=r".*/codes", mode=mode, chunk_bytes=512 * 1024)
    grads = jax.tree.map(jnp.sin, params)
    state, want = tx.init(params), inner.init(params)
    assert {leaf.codes.sharding.memory_kind for leaf in packed(state)} == {"pinned_host"}
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlacementWarning)
        for _ in range(2):
            updates, state = jax.jit(tx.update, donate_argnums=1)(grads, state, params)
            expected, want = jax.jit(inner.update)(grads, want, params)
    np.testing.assert_allclose(updates["w"], expected["w"], rtol=1e-4, atol=1e-6)
    assert {leaf.codes.sharding.memory_kind for leaf in packed(state)} == {"pinned_host"}
    for a, b in zip(packed(state), packed(want), strict=True):
        assert float(jnp.mean(np.asarray(a.codes) == np.asarray(b.codes))) > 0.999


@pytest.mark.slow
def test_a_mesh_with_explicit_axes_says_itself_how_leaves_are_sharded() -> None:
    # Of the second and the third no device has whole blocks, as their last axis is divided.
    spec = (None, "x")
    params = {"w": normal(0, 64, 2048), "odd": normal(1, 64, 384), "rows": normal(2, 64, 192).reshape(64, 3, 64)}
    tx = low_precision(optax.adamw(1e-2))
    want = jax.jit(tx.update)(params, tx.init(params), params)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        specs = {"w": spec, "odd": spec, "rows": (spec[0], None, spec[1])}
        places = {name: jax.sharding.NamedSharding(mesh, jax.P(*axes)) for name, axes in specs.items()}
        placed = jax.device_put(params, places)
        state = jax.jit(tx.init)(placed)
        updates, state = jax.jit(tx.update)(placed, state, placed)
    for name in params:
        np.testing.assert_allclose(updates[name], want[0][name], rtol=2e-6)
    for a, b in zip(packed(state), packed(want[1]), strict=True):
        assert tuple(a.codes.sharding.spec) == (spec if a.codes.ndim == 2 else specs["rows"])
        assert float(jnp.mean(np.asarray(a.codes) == np.asarray(b.codes))) > 0.999


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("form", FORMATS)
def test_a_second_moment_of_contrib_is_never_zero(form: str) -> None:
    tx, params = optax.contrib.ademamix(1e-3), {"w": normal(0, 64, 256) / 10}
    packed_tx = low_precision(tx, form)
    assert form == "bfloat16" or packed_tx.init(params).inner[0].nu["w"].is_positive
    scale = 10.0 ** (-4 * jnp.arange(256) / 256)
    begin, state, step = params, packed_tx.init(params), jax.jit(packed_tx.update)
    for at in range(5):
        grads = {"w": normal(10 + at, 64, 256) * scale[None] * (1.0 if at < 3 else 0.1)}
        updates, state = step(grads, state, params)
        params = optax.apply_updates(params, updates)
    assert float(jnp.abs(params["w"] - begin["w"]).max()) < 0.02  # 0.005 in float32


@pytest.mark.slow
def test_a_step_without_gradients_after_small_ones_is_small() -> None:
    # Of a block with a large second moment a small one would be stored as 0, and divide what is left of the mean.
    params = {"w": jnp.zeros((16, 256))}
    first = {"w": jnp.ones((16, 256)).at[:, ::8].set(2e-4)}
    for form in FORMATS:
        tx = low_precision(optax.adam(1e-3), form)
        _, state = jax.jit(tx.update)(first, tx.init(params), params)
        updates, _ = jax.jit(tx.update)(jax.tree.map(jnp.zeros_like, first), state, params)
        assert float(jnp.abs(updates["w"]).max()) < 2e-3, form


@pytest.mark.slow
def test_a_state_in_another_format_is_refused_and_names_the_way() -> None:
    params = {"w": normal(0, 64, 256).astype(jnp.bfloat16)}

    def tx(form: Any, weights: Any = None) -> Any:
        return low_precision(optax.adam(1e-3), form, weights=weights)

    for old, new in (
        (tx("4bit"), tx("8bit")),
        (tx("8bit", "split"), tx("8bit")),
        (tx("8bit", "split"), tx("8bit", "stochastic")),
        (tx("8bit", "kahan"), tx("8bit", "split")),
        (tx("8bit", "stochastic"), tx("8bit", "split")),
    ):
        with pytest.raises(
            StructureError, match=r"(?s)does not belong to this lt\.optim\.low_precision.*lt\.optim\.converted"
        ):
            new.update(params, old.init(params), params)
        new.update(params, converted(old.init(params), new, params), params)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("weights", ["split", "kahan", "stochastic"])
def test_one_array_may_be_all_parameters(weights: str) -> None:
    params = normal(0, 64, 256).astype(jnp.bfloat16)
    tx = low_precision(optax.adam(1e-2), "8bit", weights=weights, match=".*")
    state = tx.init(params)
    updates, state = jax.jit(tx.update)(params, state, params)
    assert converted(state, tx, params).has_residuals
    assert float(jnp.abs(updates.astype(jnp.float32)).max()) > 0


@pytest.mark.slow
def test_masked_and_in_parts_a_state_is_converted_by_place() -> None:
    params = {"a": normal(0, 64, 256).astype(jnp.bfloat16), "b": normal(1, 64, 256).astype(jnp.bfloat16)}

    def tx(form: str) -> Any:
        parts = {name: low_precision(optax.adam(1e-2), form, weights="split") for name in "ab"}
        return optax.partition(parts, {"a": "a", "b": "b"})

    state = tx("8bit").init(params)
    for _ in range(3):
        _, state = jax.jit(tx("8bit").update)(params, state, params)
    new = converted(state, tx("companded"), params)
    assert {leaf.format for leaf in packed(new)} == {"companded"} and len(packed(new)) == 4
    jax.jit(tx("companded").update)(params, new, params)
    masked = optax.masked(low_precision(optax.adam(1e-2), weights="split"), {"a": True, "b": False})
    assert same(converted(masked.init(params), masked, params), masked.init(params))


@pytest.mark.slow
def test_inside_of_a_shard_map_it_updates_shards() -> None:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    params = normal(0, 64, 512)
    tx = low_precision(optax.adam(1e-2), match=".*")

    def update(params: Any) -> Any:
        return tx.update(jnp.sin(params), tx.init(params), params)[0]

    got = jax.jit(jax.shard_map(update, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x")))(params)
    np.testing.assert_allclose(got, update(params), rtol=1e-5)


def test_an_optimizer_whose_state_is_on_the_host_already_is_refused() -> None:
    tx = low_precision(offload.optimizer(optax.adamw(1e-3), match=r".*/(mu|nu)/.*"))
    with pytest.raises(
        ConfigError, match=r"keeps 0/mu/w in host memory, where it cannot be packed\nhint: wrap in the other order"
    ):
        tx.init({"w": jnp.ones((64, 128))})
