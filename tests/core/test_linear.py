from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowtide.core import LinearWeight, linear


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
