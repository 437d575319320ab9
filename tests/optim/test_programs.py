"""Programs around `low_precision` that are not a dictionary of large arrays on one device."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import lowtide as lt
from lowtide.core import ConfigError, PlacementError, PlacementWarning, StructureError, leaves_with_paths
from lowtide.optim import PackedArray, low_precision
from lowtide.train import ShardingRules, make_mesh

PARAMS = {"w": jnp.linspace(-1, 1, 64 * 128).reshape(64, 128)}


def same(found: Any, wanted: Any, rtol: float) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol)


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", [low_precision, lt.offload.optimizer])
def test_parameters_may_be_a_module_with_functions_among_its_leaves(wrapped: Any) -> None:
    module = eqx.nn.MLP(64, 64, 128, 1, key=jax.random.key(0))
    grads = eqx.filter(module, eqx.is_inexact_array)
    plain, tx = optax.adamw(1e-2), wrapped(optax.adamw(1e-2))
    wanted, _ = plain.update(grads, plain.init(grads), module)  # pyright: ignore[reportArgumentType]
    found, state = tx.update(grads, tx.init(grads), module)
    same(found, wanted, 1e-3)
    found, _ = eqx.filter_jit(tx.update)(grads, state, module)
    assert jax.tree.structure(found) == jax.tree.structure(grads)


@pytest.mark.slow
def test_numbers_of_python_are_numbers_as_optax_takes_them() -> None:
    params, plain = {**PARAMS, "s": 1.0}, optax.adam(1e-2)
    tx = low_precision(plain)
    found, state = tx.update(params, tx.init(params), params)
    same(found, plain.update(params, plain.init(params), params)[0], 1e-3)
    jax.jit(tx.update)(params, state, params)

    def counted(updates: Any, state: Any, params: Any = None) -> Any:
        return updates, {**state, "count": state["count"] + 1}

    mine = optax.GradientTransformation(lambda p: {"mu": jax.tree.map(lambda x: 2.0 * x, p), "count": 3}, counted)
    state = low_precision(mine).init(PARAMS)
    assert isinstance(state.inner["mu"]["w"], PackedArray)
    assert low_precision(mine).update(PARAMS, state, PARAMS)[1].inner["count"] == 4


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_below_a_mesh_that_is_set_parameters_may_be_on_one_device(kind: AxisType) -> None:
    params = jax.device_put(PARAMS, jax.devices()[0])
    with jax.set_mesh(jax.make_mesh((8,), ("x",), axis_types=(kind,))):
        state = low_precision(optax.adam(1e-2)).init(params)
        plain = optax.adam(1e-2).init(params)
    assert {leaf.devices() == plain[0].count.devices() for leaf in jax.tree.leaves(state)} == {True}  # pyright: ignore


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("weights", ["split", "kahan", "stochastic"])
def test_derivatives_by_what_is_not_stored_pass_through_weights(weights: str) -> None:
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), PARAMS)

    def after(factor: Any) -> Any:
        tx = low_precision(optax.sgd(0.1), None, weights=weights)
        here, state = params, tx.init(params)
        for _ in range(2):
            updates, state = tx.update({"w": factor * jnp.ones((64, 128))}, state, here)
            here = optax.apply_updates(here, updates)
        return jnp.sum(here["w"].astype(jnp.float32))

    assert float(jax.grad(after)(1.0)) == pytest.approx(-0.2 * 64 * 128, rel=1e-4)


def test_one_array_of_zeros_may_be_two_parts_of_a_state_of_which_one_is_selected() -> None:
    def init(params: Any) -> Any:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return {"mu": zeros, "ema": zeros}

    mine = optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))
    for made in (low_precision(mine).init, jax.jit(low_precision(mine).init)):
        inner = made(PARAMS).inner
        assert isinstance(inner["mu"]["w"], PackedArray)
        assert isinstance(inner["ema"]["w"], jax.Array) and not inner["ema"]["w"].any()


@pytest.mark.slow
def test_a_learned_decay_reaches_what_is_stored_and_is_refused() -> None:
    def after(decay: Any) -> Any:
        tx = low_precision(optax.adam(1e-2, b1=decay))
        _, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
        return jnp.sum(tx.update(PARAMS, state, PARAMS)[0]["w"])

    with pytest.raises(
        StructureError, match=r"(?s)a derivative goes through .*, and would be lost.*hint: .*parameters and decays"
    ):
        jax.grad(after)(0.9)


MASKED = {"inner_state/0/mu", "inner_state/0/nu"}
VAE = {"dec": jnp.ones((64, 128)), "mu": {"kernel": jnp.ones((64, 128))}, "trace": jnp.ones((64, 128))}


@pytest.mark.slow_after(9)
@pytest.mark.parametrize(
    ("tx", "parts"),
    [
        (optax.adamw(1e-3), {"0/mu", "0/nu"}),
        (optax.contrib.schedule_free_adamw(1e-3), {"base_optimizer_state/0/nu"}),
        (optax.contrib.prodigy(), {"exp_avg", "exp_avg_sq"}),
        (optax.MultiSteps(optax.sgd(1e-3, momentum=0.9), 2).gradient_transformation(), {"inner_opt_state/0/trace"}),
        (optax.masked(optax.adam(1e-3), {"dec": True, "mu": False, "trace": False}), MASKED),
        (lt.train.ema(optax.adam(1e-3), 0.9), {"inner/0/mu", "inner/0/nu"}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_parameters_are_called_selects_nothing(tx: Any, parts: set[str], dtype: Any) -> None:
    """Heads of variational models are called mu: of copies of parameters and sums of gradients these are no moments."""
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), VAE)
    state = low_precision(tx).init(params)
    nodes = leaves_with_paths(state.inner, is_leaf=lambda node: isinstance(node, PackedArray))
    paths = [path for path, node in nodes if isinstance(node, PackedArray)]
    names = ["dec"] if parts is MASKED else ["dec", "mu/kernel", "trace"]
    assert sorted(paths) == sorted(f"{part}/{name}" for part in parts for name in names)


def test_that_a_copy_of_parameters_is_selected_is_said() -> None:
    tx = optax.contrib.schedule_free_adamw(1e-3)
    with pytest.warns(PlacementWarning, match=r"(?s)z/dec begins as a copy of parameters.*hint: exclude it"):
        low_precision(tx, match=".*").init(VAE)
    with pytest.raises(ConfigError, match=r"(?s)average/dec cannot be stored as 8bit.*its average.*expected: float32"):
        low_precision(lt.train.ema(optax.adam(1e-3), 0.9), match=".*").init(VAE)


def test_a_state_on_the_host_is_for_the_update_that_put_it_there() -> None:
    tx = low_precision(optax.adam(1e-2))
    state = lt.offload.optimizer(tx, match=r".*/codes").init(PARAMS)
    with pytest.raises(PlacementError, match=r"(?s)inner/0/mu/w/codes: the state is in host memory.*hint: call lt.off"):
        tx.update(PARAMS, state, PARAMS)


def test_the_trainer_tells_what_ema_is_around_how_parameters_are_divided() -> None:
    rules = ShardingRules(mesh=make_mesh(fsdp=8), min_bytes=0)
    tx = lt.train.ema(low_precision(optax.adamw(1e-2)), 0.9)
    batch = {"x": jnp.ones((8, 64)), "y": jnp.ones((8, 256))}
    params = {"w": jnp.zeros((64, 256))}
    trainer = lt.Trainer(params, lambda p, b: jnp.mean((b["x"] @ p["w"] - b["y"]) ** 2), tx, sharding=rules)
    trainer.fit([batch, batch], num_steps=2)
    with trainer.averaged():
        assert float(trainer.model["w"].max()) > 0
