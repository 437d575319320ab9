"""What is compiled: bytes of the state, of temporaries and of what is moved, for chips that need not be here."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lowtide.core import tree_bytes
from lowtide.memory import compile
from lowtide.memory import target as chips
from lowtide.offload import state_shardings
from lowtide.optim import low_precision

SHAPE = (8, 2048, 2048)
pytestmark = pytest.mark.filterwarnings("ignore:Some donated buffers")  # gradients: their place is for the updates
PARAMS = {"w": jax.ShapeDtypeStruct(SHAPE, jnp.float32)}
NUM = 8 * 2048 * 2048


def measured(form: str, target: str, params: Any = PARAMS, **options: Any) -> tuple[float, float, float]:
    """Bytes a parameter of AdamW's state, and of its step's temporaries and traffic."""
    tx = low_precision(optax.adamw(1e-2), form, **options)
    state = jax.eval_shape(tx.init, params)
    if options:
        state = jax.tree.map(
            lambda leaf, of: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=of),
            state,
            state_shardings(tx, params),
        )

    def step(grads: Any, state: Any, params: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    made = compile(step, params, state, params, target=target, donate_argnums=(0, 1, 2))
    return tree_bytes(state) / NUM, made.report().device.temp_bytes / NUM, made.bytes_accessed / NUM


@pytest.mark.parametrize(
    ("form", "num_bytes"), [("8bit", 2 * 260 / 256), ("companded", 2 * 132 / 128), ("bfloat16", 4)]
)
def test_a_state_has_the_bytes_that_are_documented(form: str, num_bytes: float) -> None:
    state = jax.eval_shape(low_precision(optax.adamw(1e-2), form).init, PARAMS)
    assert tree_bytes(state) / NUM == pytest.approx(num_bytes, abs=1e-5)


@pytest.mark.slow
@pytest.mark.tpu_aot
@pytest.mark.parametrize("form", [pytest.param("8bit", marks=pytest.mark.sentinel), "companded", "bfloat16"])
def test_on_a_tpu_no_float32_state_exists(form: str) -> None:
    _, temporaries, moved = measured(form, "v5e:1x1")
    assert temporaries < 0.2
    assert moved < 28.5  # that of float32 AdamW is 28


@pytest.mark.slow
@pytest.mark.tpu_aot
@pytest.mark.parametrize(
    ("shape", "form"),
    [
        ((16403, 1024), "8bit"),
        ((20000, 768), "4bit"),
        ((32, 4096, 16), "8bit"),  # LoRA's second factor: such axes are not the innermost ones
        ((32, 4096, 16), "bfloat16"),
        ((12, 768, 12, 64), "8bit"),
    ],
)
def test_odd_shapes_are_updated_without_temporaries_too(shape: tuple[int, ...], form: str) -> None:
    tx, params = low_precision(optax.adamw(1e-3), form), {"w": jax.ShapeDtypeStruct(shape, jnp.float32)}

    def step(grads: Any, state: Any, params: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state, size = jax.eval_shape(tx.init, params), math.prod(shape)
    made = compile(step, params, state, params, target="v5e:1x1", donate_argnums=(0, 1, 2))
    assert made.report().device.temp_bytes < 0.1 * size  # of all in float32 it was 32, of three scales a row 13
    assert made.bytes_accessed < 33 * size  # in blocks of half a tile all codes were laid out anew for each


@pytest.mark.slow
@pytest.mark.gpu_aot
@pytest.mark.parametrize("form", ["8bit", "companded", "bfloat16"])
def test_on_a_gpu_no_float32_state_exists(form: str) -> None:
    _, temporaries, moved = measured(form, "h100")
    assert temporaries < 0.2
    assert moved < 28.5


@pytest.mark.slow
@pytest.mark.tpu_aot
def test_on_a_mesh_no_float32_state_exists_either() -> None:
    mesh = jax.sharding.Mesh(np.array(chips("v5e:2x2").devices()), ("x",))
    place = jax.sharding.NamedSharding(mesh, jax.P(None, None, "x"))  # cuts the axis of the blocks
    params = {"w": jax.ShapeDtypeStruct(SHAPE, jnp.float32, sharding=place)}
    _, temporaries, moved = measured("8bit", "v5e:2x2", params, shardings={"w": place})
    assert 4 * temporaries < 0.2
    assert 4 * moved < 33
