"""The first state: what Optax fills with a number is packed without an array of it, all else as it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lowtide.jaxprs import equations
from lowtide.memory import compile
from lowtide.optim import PackedArray, low_precision

FORMATS = ("8bit", "companded", "fp8", "4bit", "bfloat16")
PARAMS = {"w": jnp.ones((48, 256)), "k": jnp.ones((16, 40, 3, 3), jnp.bfloat16), "b": jnp.zeros((1, 256))}


def packed(state: Any) -> list[PackedArray]:
    leaves = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, PackedArray))
    return [leaf for leaf in leaves if isinstance(leaf, PackedArray)]


def made(jaxpr: Any) -> Iterator[Any]:
    for equation in equations(jaxpr):
        yield from (var.aval for var in equation.outvars)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("number", [0.0, 0.1, -3.0])
def test_a_number_is_packed_as_an_array_of_it(form: str, number: float) -> None:
    def first(params: Any) -> Any:
        return {"mu": jax.tree.map(lambda p: jnp.full_like(p, number), params)}

    tx = optax.GradientTransformation(first, lambda updates, state, params=None: (updates, state))
    got = low_precision(tx, form).init(PARAMS).inner["mu"]
    want = first(PARAMS)["mu"]
    assert got["b"] is not None and not isinstance(got["b"], PackedArray)
    for name in ("w", "k"):
        if form != "bfloat16":
            expected = PackedArray.of(want[name], form)
            assert jax.tree.structure(got[name]) == jax.tree.structure(expected)
            for one, other in zip(jax.tree.leaves(got[name]), jax.tree.leaves(expected), strict=True):
                assert (one.dtype, one.shape) == (other.dtype, other.shape)
                assert np.array_equal(one.astype(jnp.float32), other.astype(jnp.float32))
        np.testing.assert_allclose(got[name].dense().astype(jnp.float32), want[name].astype(jnp.float32), rtol=4e-3)


def test_a_number_is_converted_as_the_program_does() -> None:
    def first(params: Any) -> Any:
        return {"mu": jnp.full((48, 256), 2.7).astype(jnp.int32).astype(jnp.float32)}

    tx = optax.GradientTransformation(first, lambda updates, state, params=None: (updates, state))
    assert (low_precision(tx, match=".*").init(PARAMS).inner["mu"].dense() == 2).all()


def test_no_array_of_zeros_is_made() -> None:
    tx = low_precision(optax.adamw(1e-3))
    sizes = {aval.size for aval in made(jax.make_jaxpr(tx.init)(PARAMS).jaxpr) if aval.dtype == jnp.float32}
    assert sizes and max(sizes) < PARAMS["k"].size
    assert max(aval.size for aval in made(jax.make_jaxpr(optax.adamw(1e-3).init)(PARAMS).jaxpr)) == PARAMS["w"].size


@pytest.mark.tpu_aot
def test_a_jitted_init_holds_what_it_returns() -> None:
    shapes = {"w": jax.ShapeDtypeStruct((8, 4096, 4096), jnp.float32)}
    program = compile(low_precision(optax.adamw(1e-3)).init, shapes, target="v5e:1x1")
    assert program.report().device.temp_bytes < 2**16  # of a packed array of zeros it was 27 bytes a number


def test_state_that_is_made_of_parameters_is_packed_as_it_is() -> None:
    def first(params: Any) -> Any:
        return {"mu": params, "nu": jax.tree.map(lambda p: 2 * p, params), "count": jnp.zeros((), jnp.int32)}

    tx = optax.GradientTransformation(first, lambda updates, state, params=None: (updates, state))
    params = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(48, 256)).astype(np.float32))}
    for init in (low_precision(tx).init, jax.jit(low_precision(tx).init)):
        state = init(params).inner
        np.testing.assert_allclose(state["mu"]["w"].dense(), params["w"], atol=0.04)
        np.testing.assert_allclose(state["nu"]["w"].dense(), 2 * params["w"], atol=0.08)
        assert state["count"] == 0


def test_what_cannot_be_traced_is_called() -> None:
    def first(params: Any) -> Any:
        return {"mu": jax.tree.map(lambda p: jnp.zeros_like(p) + float(np.asarray(p).mean() > 0), params)}

    tx = optax.GradientTransformation(first, lambda updates, state, params=None: (updates, state))
    assert low_precision(tx).init(PARAMS).inner["mu"]["w"].dense().tolist() == jnp.ones((48, 256)).tolist()


def test_an_error_of_init_is_its_own() -> None:
    def first(params: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        low_precision(optax.GradientTransformation(first, lambda *given: given)).init(PARAMS)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("spec", [("x", None), (None, "x")])
def test_state_is_where_the_parameters_are(spec: Any) -> None:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    params = {"w": jax.device_put(jnp.ones((64, 4096)), jax.NamedSharding(mesh, jax.P(*spec)))}
    (mu, nu) = packed(low_precision(optax.adamw(1e-3)).init(params))
    for node in (mu, nu):
        assert tuple(node.codes.sharding.spec) == tuple(node.scales.sharding.spec) == spec
        assert node.codes.addressable_shards[0].data.size * 8 == node.codes.size
    other = jax.devices()[3]
    (mu, _) = packed(low_precision(optax.adamw(1e-3)).init({"w": jax.device_put(jnp.ones((64, 256)), other)}))
    assert mu.codes.devices() == mu.scales.devices() == {other}


def test_parameters_from_outside_of_a_jitted_function_are_no_exception() -> None:
    tx = low_precision(optax.adam(1e-2))

    @jax.jit
    def trained() -> Any:
        state, params = tx.init(PARAMS), PARAMS
        return tx.update(params, state, params)[0]

    for one, other in zip(jax.tree.leaves(trained()), jax.tree.leaves(PARAMS), strict=True):
        np.testing.assert_allclose(one.astype(jnp.float32), -0.01 * (other.astype(jnp.float32) != 0), rtol=0.01)
