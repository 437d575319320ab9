"""Accumulated gradients: equal to the full batch's, in one accumulator however many microbatches."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowtide.core import StructureError, accumulate, tree_bytes, value_and_grad

DIM, BATCH, LENGTH = 16, 8, 6


def data(dtype: Any = jnp.float32) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    random = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(random.normal(size=shape), dtype)  # noqa: E731
    model = {"base": draw(DIM, DIM), "lora_a": draw(DIM, 2), "lora_b": draw(2, DIM)}
    batch = {
        "x": draw(BATCH, LENGTH, DIM),
        # Rows hold between none and all of their tokens; the last two rows hold none at all.
        "mask": jnp.asarray(np.arange(LENGTH)[None] < np.array([6, 1, 3, 2, 5, 4, 0, 0])[:, None]),
    }
    return model, batch


def token_mean(model: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
    """A mean over tokens that is 0/0 for a batch without tokens, as such means are."""
    h = batch["x"] @ (model["base"]) + batch["x"] @ model["lora_a"] @ model["lora_b"]
    return jnp.sum(jnp.mean(jnp.tanh(h) ** 2, -1) * batch["mask"]) / jnp.sum(batch["mask"])


def num_tokens(batch: dict[str, jax.Array]) -> jax.Array:
    return jnp.sum(batch["mask"])


GRAD_FN = value_and_grad(token_mean, "lora_*")
WHOLE = jax.jit(GRAD_FN)
IN_FOUR = jax.jit(accumulate(GRAD_FN, 4, weight=num_tokens))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("num_microbatches", "jit"), [(2, False), (1, True), (8, True)])
def test_a_mean_weighted_by_tokens_equals_the_full_batch(num_microbatches: int, jit: bool) -> None:
    model, batch = data()
    step = accumulate(GRAD_FN, num_microbatches, weight=num_tokens)
    loss, grads = (jax.jit(step) if jit else step)(model, batch)
    loss_ref, grads_ref = WHOLE(model, batch)
    np.testing.assert_allclose(loss, loss_ref, rtol=1e-6)
    assert grads["base"] is None
    for name in ("lora_a", "lora_b"):
        np.testing.assert_allclose(grads[name], grads_ref[name], rtol=1e-5, atol=1e-7, err_msg=name)


def test_without_weights_all_microbatches_weigh_the_same() -> None:
    model, batch = data()
    batch = {**batch, "mask": jnp.ones_like(batch["mask"])}
    _, grads = jax.jit(accumulate(GRAD_FN, 4))(model, batch)
    _, grads_ref = WHOLE(model, batch)
    np.testing.assert_allclose(grads["lora_a"], grads_ref["lora_a"], rtol=1e-5, atol=1e-7)


def test_a_batch_without_any_token_gives_zeros_not_nan() -> None:
    model, batch = data()
    batch = {**batch, "mask": jnp.zeros_like(batch["mask"])}
    loss, grads = IN_FOUR(model, batch)
    assert float(loss) == 0.0
    assert not np.any(grads["lora_a"])


def test_nan_of_a_microbatch_that_counts_is_kept() -> None:
    model, batch = data()
    x = np.array(batch["x"])
    x[0] = np.nan
    batch = {**batch, "x": x}
    loss, grads = IN_FOUR(model, batch)
    assert np.isnan(loss) and np.isnan(grads["lora_a"]).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_gradients_add_up_in_float32(dtype: Any) -> None:
    # Every microbatch's gradient is 1 + 2⁻⁷ or 1: adding 256 of them in bfloat16 would stop growing at 256.
    model = {"w": jnp.ones((), dtype)}
    x = jnp.where(jnp.arange(512) % 2 == 0, 1.0, 1.0 + 2**-7).astype(dtype)
    loss, grads = jax.jit(accumulate(value_and_grad(lambda m, x: m["w"] * jnp.sum(x)), 512))(model, x)
    assert loss.dtype == grads["w"].dtype == dtype
    assert grads["w"] == jnp.asarray(1 + 2**-8, jnp.float32).astype(dtype)


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_auxiliary_values_come_stacked(num_microbatches: int) -> None:
    def loss(model: Any, batch: Any, scale: float, *, shift: float) -> Any:
        return jnp.mean(model["w"] * batch) * scale + shift, {"first": batch[0], "constant": 1.0}

    step = accumulate(value_and_grad(loss, has_aux=True), num_microbatches, has_aux=True)
    (value, aux), grads = step({"w": jnp.float32(2)}, jnp.arange(4.0), 10.0, shift=1.0)
    assert (float(value), float(grads["w"])) == (31.0, 15.0)
    np.testing.assert_array_equal(aux["first"], [0.0] if num_microbatches == 1 else [0.0, 2.0])
    np.testing.assert_array_equal(aux["constant"], [1.0] * num_microbatches)


def test_random_keys_split_like_any_batch() -> None:
    loss = lambda model, batch: jnp.mean(model["w"] * jax.vmap(jax.random.uniform)(batch))  # noqa: E731
    keys = jax.random.split(jax.random.key(0), 6)
    _, grads = accumulate(value_and_grad(loss), 3)({"w": jnp.float32(1)}, keys)
    np.testing.assert_allclose(grads["w"], jnp.mean(jax.vmap(jax.random.uniform)(keys)), rtol=1e-6)


def test_a_second_call_compiles_nothing(compilations: Any) -> None:
    model, batch = data()
    jax.block_until_ready(IN_FOUR(model, batch))
    with compilations.none():
        jax.block_until_ready(IN_FOUR(model, batch))


# --- bytes ---------------------------------------------------------------------------------------------------------

WIDE = 512


def temporaries(num_microbatches: int, device: jax.Device, dtype: Any = jnp.float32) -> int:
    """Compiled temporary bytes of a step whose microbatches all have the same shape."""
    place = jax.sharding.SingleDeviceSharding(device)
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, dtype, sharding=place)  # noqa: E731
    model = {"base": shape(WIDE, WIDE), "adapter": shape(WIDE, WIDE)}
    step = accumulate(
        value_and_grad(lambda m, x: jnp.mean(jnp.tanh(x @ m["base"]) @ m["adapter"]), "adapter"), num_microbatches
    )
    lowered = jax.jit(step).trace(model, shape(num_microbatches * 8, WIDE)).lower(lowering_platforms=(device.platform,))
    stats = lowered.compile().memory_analysis()
    assert stats.output_size_in_bytes <= tree_bytes(model["adapter"]) + 65536
    return stats.temp_size_in_bytes


def assert_one_accumulator(device: jax.Device) -> None:
    gradient_bytes = WIDE * WIDE * 4
    few, many = temporaries(2, device), temporaries(64, device)
    # The accumulator lives in the output; beside it stands at most one microbatch's gradient.
    assert max(few, many) <= 1.25 * gradient_bytes
    # 62 more activations of 16 KiB, or one more gradient, would show; a TPU's prefetch varies by some 128 KiB.
    assert abs(many - few) < gradient_bytes / 4


def test_temporaries_do_not_grow_with_the_microbatches_on_cpu() -> None:
    assert_one_accumulator(jax.devices()[0])


@pytest.mark.tpu_aot
def test_temporaries_do_not_grow_with_the_microbatches_on_tpu(tpu_device: jax.Device) -> None:
    assert_one_accumulator(tpu_device)


# --- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "text", "got"),
    [
        ({"x": np.ones((6, 2))}, "batch leaf x: the leading axis does not split", "got: shape (6, 2)"),
        (np.ones(7), "batch leaf (root): the leading axis does not split", "got: shape (7,)"),
        ({"x": np.ones(8), "step": 3}, "batch leaf step: the leading axis does not split", "got: shape ()"),
    ],
)
def test_a_batch_that_does_not_split_is_named(batch: Any, text: str, got: str) -> None:
    with pytest.raises(StructureError, match=re.escape(text)) as error:
        accumulate(GRAD_FN, 4)({}, batch)
    assert got in str(error.value)
    assert "expected: a leading axis that is a multiple of 4" in str(error.value)
    hint = "repeat it for every row" if got == "got: shape ()" else "change num_microbatches or the batch size"
    assert f"hint: {hint}" in str(error.value)


@pytest.mark.parametrize("num_microbatches", [0, -2, 2.0, "2"])
def test_less_than_one_microbatch_is_refused(num_microbatches: Any) -> None:
    with pytest.raises(StructureError, match="num_microbatches must be an integer of at least 1") as error:
        accumulate(GRAD_FN, num_microbatches)
    assert f", not {num_microbatches!r}\n" in str(error.value)
    assert "hint: use 1 for no accumulation" in str(error.value)


@pytest.mark.slow
def test_float64_keeps_its_digits() -> None:
    with jax.enable_x64(True):
        model, x = {"w": jnp.float64(1)}, jnp.arange(9.0) / 7
        grad_fn = value_and_grad(lambda model, x: jnp.mean(model["w"] * x))
        want, got = grad_fn(model, x), accumulate(grad_fn, 3)(model, x)
        np.testing.assert_allclose((got[0], got[1]["w"]), (want[0], want[1]["w"]), rtol=1e-15)
        got = accumulate(grad_fn, 3, weight=lambda x: jnp.sum(x) / 7)(model, x)
        parts = x.reshape(3, 3)
        want = jnp.sum(parts.mean(1) * parts.sum(1)) / jnp.sum(parts)
        np.testing.assert_allclose((got[0], got[1]["w"]), (want, want), rtol=1e-14)


def test_a_batch_without_leaves_is_the_same_in_every_part() -> None:
    _, grads = accumulate(value_and_grad(lambda model, batch: model["w"] ** 2), 3)({"w": jnp.float32(2)}, {})
    np.testing.assert_allclose(grads["w"], 4)


@pytest.mark.parametrize("weight", [lambda x: x[:2], lambda x: None])
def test_a_weight_that_is_no_number_is_refused(weight: Any) -> None:
    with pytest.raises(StructureError, match=r"(?s)weight of a microbatch is not a number.*hint: sum it"):
        accumulate(value_and_grad(lambda model, x: jnp.mean(model["w"] * x)), 2, weight=weight)(
            {"w": jnp.float32(1)}, jnp.ones(6)
        )


@pytest.mark.parametrize("has_aux", [False, True])
def test_another_has_aux_than_the_functions_is_refused(has_aux: bool) -> None:
    loss = lambda model, x: (jnp.mean(model * x), {}) if not has_aux else jnp.mean(model * x)  # noqa: E731
    step = accumulate(value_and_grad(loss, has_aux=not has_aux), 2, has_aux=has_aux)
    with pytest.raises(StructureError, match=rf"(?s)auxiliary values.*hint: .*has_aux: {not has_aux}"):
        step(jnp.array(2.0), jnp.arange(4.0))
