"""Products of weights and nodes, and the transposed product: values, derivatives, and what a CPU does not copy."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType

from lowtide.core import LinearWeight, RunningGradient, StructureError, linear, transposed_product
from lowtide.jaxprs import jaxpr_flops


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Factored:
    up: jax.Array
    down: jax.Array

    def linear(self, x: jax.Array) -> jax.Array:
        return linear(linear(x, self.down), self.up)


def test_an_array_multiplies_as_x_w_transposed() -> None:
    x, w = jax.random.normal(jax.random.key(0), (2, 5, 3)), jax.random.normal(jax.random.key(1), (4, 3))
    np.testing.assert_allclose(linear(x, w), np.asarray(x) @ np.asarray(w).T, rtol=1e-5, atol=1e-6)
    assert linear(x[0, 0], w).shape == (4,)


def test_a_stack_of_weights_is_refused_even_if_an_axis_fits() -> None:
    stack = jnp.ones((2, 3, 3))
    for weight in (stack, stack.astype(jnp.bfloat16), RunningGradient(stack, stack)):
        with pytest.raises(StructureError, match=r"(?s)one matrix \[out, in\].*got: shape \[2, 3, 3\].*hint: .*vmap"):
            linear(jnp.ones((5, 3)), weight)
    assert jax.vmap(linear, (None, 0))(jnp.ones((5, 3)), stack).shape == (2, 5, 3)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_the_activations_dtype_is_the_compute_dtype(dtype: jnp.dtype) -> None:
    assert linear(jnp.ones((2, 3), dtype), jnp.ones((4, 3), jnp.float32)).dtype == dtype
    assert linear(jnp.ones((2, 3), jnp.float32), jnp.ones((4, 3), dtype)).dtype == jnp.float32


def test_a_weight_that_multiplies_itself_replaces_an_array() -> None:
    weight = Factored(up=jnp.ones((4, 2)), down=jnp.ones((2, 3)))
    assert isinstance(weight, LinearWeight)
    assert not isinstance(jnp.ones((4, 3)), LinearWeight)
    np.testing.assert_array_equal(linear(jnp.ones((5, 3)), weight), np.full((5, 4), 6.0))


def test_the_backward_pass_builds_nothing_of_the_weight_s_size_when_it_is_frozen() -> None:
    w = jnp.ones((7, 11))
    jaxpr = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(linear(x, w) ** 2)))(jnp.ones((2, 11)))
    shapes = {var.aval.shape for eqn in jaxpr.jaxpr.eqns for var in eqn.outvars}
    assert shapes.isdisjoint({(7, 11), (11, 7)}), jaxpr


# --- Transposed product -----------------------------------------------------------------------------------------------


def plain(x: Any, factor: Any) -> Any:
    return x @ factor.T


def drawn(*shapes: tuple[int, ...]) -> list[Any]:
    return [jnp.asarray(np.random.default_rng(at).normal(size=shape), jnp.float32) for at, shape in enumerate(shapes)]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("leading", [(), (5,), (2, 5)])
def test_values_and_derivatives_are_those_of_the_product(leading: tuple[int, ...]) -> None:
    x, factor, dx, dfactor = drawn((*leading, 3), (7, 3), (*leading, 3), (7, 3))
    np.testing.assert_allclose(transposed_product(x, factor), plain(x, factor), rtol=1e-6)
    for one, other in zip(
        jax.jvp(transposed_product, (x, factor), (dx, dfactor)), jax.jvp(plain, (x, factor), (dx, dfactor)), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)

    def loss(product: Any) -> Any:
        return lambda x, factor: jnp.sum(jnp.sin(product(x, factor)))

    def curvature(product: Any) -> Any:
        gradient = jax.grad(loss(product), (0, 1))
        return jax.jvp(gradient, (x, factor), (dx, dfactor)), jax.jit(jax.hessian(loss(product), (0, 1)))(x, factor)

    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5),
        curvature(transposed_product),
        curvature(plain),
    )


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0), (1, 0)])
def test_it_is_mapped(axes: Any) -> None:
    x, factor = drawn((4, 4, 3) if axes[0] is not None else (4, 3), (4, 7, 3) if axes[1] is not None else (7, 3))
    np.testing.assert_allclose(
        jax.vmap(transposed_product, axes)(x, factor), jax.vmap(plain, axes)(x, factor), rtol=1e-5, atol=1e-6
    )


def test_devices_divide_it_as_they_do_any_product() -> None:
    x, factor = drawn((4, 6, 3), (8, 3))
    for kind in ("Auto", "Explicit"):
        mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType[kind],) * 2, devices=jax.devices()[:4])
        placed = (
            jax.device_put(x, jax.NamedSharding(mesh, P("a"))),
            jax.device_put(factor, jax.NamedSharding(mesh, P("b"))),
        )
        np.testing.assert_allclose(jax.jit(transposed_product)(*placed), plain(x, factor), rtol=1e-5, atol=1e-6)
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    by_hand = jax.shard_map(transposed_product, mesh=mesh, in_specs=(P("a"), P()), out_specs=P("a"))
    np.testing.assert_allclose(by_hand(x, factor), plain(x, factor), rtol=1e-5, atol=1e-6)


def test_the_wide_operand_is_not_stored_anew() -> None:
    x, factor = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 4), (96, 4)))

    def wide_first(product: Any) -> int:
        def gradient(x: Any, factor: Any) -> Any:
            return jax.grad(lambda factor: jnp.sum(jnp.sin(product(x, factor))))(factor)

        closed = jax.make_jaxpr(gradient)(x, factor)
        dots = [eqn for eqn in closed.eqns if eqn.primitive.name == "dot_general"]
        return sum(eqn.invars[0].aval.shape[-1] == 96 for eqn in dots if eqn.invars[0].aval.shape[0] == 64)

    assert wide_first(plain) == 1 and wide_first(transposed_product) == 0
    assert jaxpr_flops(jax.make_jaxpr(transposed_product)(x, factor)) == 2 * 64 * 96 * 4


def test_products_with_integers_are_what_they_are_without_a_cast() -> None:
    x, weight = drawn((5, 4), (3, 4))
    whole = jnp.round(weight).astype(jnp.int8)
    np.testing.assert_array_equal(linear(x, whole), x @ whole.T.astype(x.dtype))
    assert linear(jnp.ones((5, 4), jnp.int32), weight).shape == (5, 3)
