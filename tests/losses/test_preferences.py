"""Losses of preferences: TRL's values and gradients, limits, and log-probabilities in chunks."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowtide as lt
from lowtide.core import ConfigError, StructureError
from lowtide.hlo import compile_program

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[1] / "golden/preferences.json").read_text())
PAIRS = ("chosen", "rejected", "reference_chosen", "reference_rejected")
NLL = jnp.float32(0.7)


def arrays(*names: str, divide: float = 1.0) -> list[Any]:
    return [jnp.asarray(GOLDEN[name], jnp.float32) / divide for name in names]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dpo", {"beta": 0.1}),
        ("dpo_smooth", {"beta": 0.3, "label_smoothing": 0.2}),
        ("hinge", {"beta": 0.1, "variant": "hinge"}),
        ("robust", {"beta": 0.1, "variant": "robust", "label_smoothing": 0.2}),
        ("ipo", {"beta": 0.5, "variant": "ipo", "lengths": (20, 20)}),
    ],
)
def test_dpo_equals_trl(name: str, options: dict[str, Any]) -> None:
    if name == "ipo":
        options = {**options, "lengths": (jnp.full(6, 20), jnp.full(6, 20))}
    fn = jax.jit(jax.value_and_grad(functools.partial(lt.losses.dpo, **options), (0, 1, 2, 3), has_aux=True))
    (loss, metrics), grads = fn(*arrays(*PAIRS))
    np.testing.assert_allclose(loss, GOLDEN[name]["loss"], rtol=1e-5)
    factor = 20 if name == "ipo" else 1  # TRL gets means of 20 tokens here
    for grad, wanted in zip(grads, GOLDEN[name]["grads"], strict=True):
        np.testing.assert_allclose(grad * factor, wanted, rtol=1e-5, atol=1e-7)
    rewards = [metrics["rewards/chosen"], metrics["rewards/rejected"]]
    np.testing.assert_allclose(rewards, np.array(GOLDEN[name]["rewards"]) * factor, rtol=1e-5)
    assert float(metrics["rewards/margins"]) == pytest.approx(float(rewards[0] - rewards[1]), rel=1e-4)
    assert 0 <= float(metrics["rewards/accuracies"]) <= 1


@pytest.mark.parametrize(
    ("name", "loss_fn", "of", "offset"),
    [
        ("cpo", functools.partial(lt.losses.cpo, nll=NLL, beta=0.1), "", 0.7),
        ("cpo_smooth", functools.partial(lt.losses.cpo, nll=NLL, beta=0.3, label_smoothing=0.1), "", 0.7),
        ("simpo", functools.partial(lt.losses.simpo, beta=2.0, margin=0.5), "_mean", 0.0),
        ("orpo", functools.partial(lt.losses.orpo, nll=NLL, beta=0.2), "_mean", 0.7),
    ],
)
def test_losses_without_a_reference_equal_trl(name: str, loss_fn: Any, of: str, offset: float) -> None:
    (loss, _), grads = jax.jit(jax.value_and_grad(loss_fn, (0, 1), has_aux=True))(
        *arrays(f"chosen{of}", f"rejected{of}")
    )
    sign = -1 if name == "orpo" else 1  # TRL subtracts its mean from the cross-entropy
    np.testing.assert_allclose(loss - offset, sign * GOLDEN[name]["loss"], rtol=1e-5, atol=1e-6)
    for grad, wanted in zip(grads, GOLDEN[name]["grads"], strict=True):
        np.testing.assert_allclose(grad, sign * np.array(wanted), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("kto", {}),
        ("kto_weighted", {"desirable_weight": 1.5, "undesirable_weight": 0.5}),
        ("kto", {"weights": jnp.full(6, 0.5)}),
    ],
)
def test_kto_equals_trl(name: str, weights: dict[str, Any]) -> None:
    chosen, rejected, *references = (array[:3] for array in arrays(*PAIRS))
    is_desirable = jnp.arange(6) < 3

    def loss_fn(chosen: Any, rejected: Any) -> Any:
        answers, reference = jnp.concatenate([chosen, rejected]), jnp.concatenate(references)
        return lt.losses.kto(answers, reference, is_desirable, GOLDEN["kl"], **weights)

    (loss, metrics), grads = jax.jit(jax.value_and_grad(loss_fn, (0, 1), has_aux=True))(chosen, rejected)
    np.testing.assert_allclose(loss, GOLDEN[name]["loss"], rtol=1e-5)
    for grad, wanted in zip(grads, GOLDEN[name]["grads"], strict=True):
        np.testing.assert_allclose(grad, wanted, rtol=1e-5, atol=1e-7)
    wanted = 0.1 * np.mean(np.array(GOLDEN["chosen"][:3]) - GOLDEN["reference_chosen"][:3])
    assert float(metrics["rewards/desirable"]) == pytest.approx(wanted, rel=1e-4)


def test_reward_loss() -> None:
    chosen, rejected = jnp.array([1.0, -2.0]), jnp.array([0.5, 3.0])
    loss, metrics = lt.losses.reward(chosen, rejected, margin=jnp.array([0.1, 0.2]), center_weight=0.01)
    difference = np.array([0.4, -5.2])
    wanted = np.mean(np.log1p(np.exp(-difference))) + 0.01 * np.mean(np.array([1.5, 1.0]) ** 2)
    assert float(loss) == pytest.approx(wanted, rel=1e-6)
    assert float(metrics["rewards/accuracies"]) == 0.5 and float(metrics["rewards/margins"]) == -2.25


def test_extreme_log_probabilities_are_finite() -> None:
    far = jnp.array([-1e4, 0.0, -1e-12]), jnp.array([0.0, -1e4, 0.0])
    functions = [
        lambda a, b: lt.losses.dpo(a, b, beta=5.0),
        lambda a, b: lt.losses.dpo(a, b, variant="robust", label_smoothing=0.1),
        lambda a, b: lt.losses.orpo(a, b, NLL),
        lambda a, b: lt.losses.simpo(a, b),
        lambda a, b: lt.losses.cpo(a, b, NLL),
        lambda a, b: lt.losses.kto(a, b, jnp.array([True, False, True]), -3.0),
        lambda a, b: lt.losses.reward(a, b),
    ]
    for fn in functions:
        (loss, metrics), grads = jax.value_and_grad(fn, (0, 1), has_aux=True)(*far)
        assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves((loss, metrics, grads)))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: lt.losses.dpo(x, x, beta=0), ConfigError, "beta must be a finite number above 0"),
        (lambda x: lt.losses.dpo(x, x, label_smoothing=0.5), ConfigError, "below 0.5(.|\n)*swap"),
        (
            lambda x: lt.losses.dpo(x, x, variant="hinge", label_smoothing=0.1),
            ConfigError,
            "'hinge' has no label_smooth",
        ),
        (lambda x: lt.losses.dpo(x, x, variant="apo"), ConfigError, "variant must be"),
        (lambda x: lt.losses.dpo(x, x, x), StructureError, "one reference of two is None"),
        (lambda x: lt.losses.dpo(x, x, variant="ipo"), StructureError, "needs the lengths"),
        (lambda x: lt.losses.dpo(x, x[:1]), StructureError, r"one shape \[B\], not chosen \[2\], rejected \[1\]"),
        (lambda x: lt.losses.simpo(x[None], x[None]), StructureError, r"one shape \[B\](.|\n)*sum the log-prob"),
        (lambda x: lt.losses.reward(x, x, center_weight=-1), ConfigError, "center_weight must be"),
    ],
)
def test_bad_input(call: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call(jnp.zeros(2))


# --- log-probabilities of tokens --------------------------------------------------------------------------------------


def dense_log_probs(h: Any, head: Any, labels: Any, soft_cap: float | None = None) -> Any:
    logits = jnp.einsum("btd,vd->btv", h, head)
    logits = logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)
    gold = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(labels, 0)[..., None], -1)[..., 0]
    return jnp.where(labels == -100, 0, gold)


@pytest.mark.parametrize(("chunk_size", "soft_cap"), [(None, None), (7, 2.0), (3, None)])
def test_log_probs_equal_those_of_all_logits(chunk_size: int | None, soft_cap: float | None) -> None:
    rng = np.random.default_rng(0)
    h, head, weights = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((3, 10, 8), (20, 8), (3, 10)))
    labels = jnp.asarray(rng.integers(0, 20, (3, 10), np.int32)).at[0, 3].set(-100).at[2, 7:].set(-100)

    def grads(fn: Any) -> Any:
        return jax.jit(jax.value_and_grad(lambda h, head: jnp.sum(fn(h, head) * weights), (0, 1)))(h, head)

    ours = functools.partial(lt.losses.chunked_log_probs, labels=labels, chunk_size=chunk_size, soft_cap=soft_cap)
    actual, wanted = grads(ours), grads(functools.partial(dense_log_probs, labels=labels, soft_cap=soft_cap))
    for leaf, reference in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(leaf, reference, rtol=1e-5, atol=1e-5)
    assert bool(jnp.isnan(ours(h, head, labels=labels.at[0, 0].set(20))[0, 0]))


@pytest.mark.tpu_aot
def test_only_the_logits_of_a_chunk_exist() -> None:
    h, head = jax.ShapeDtypeStruct((4, 2048, 1024), jnp.bfloat16), jax.ShapeDtypeStruct((65536, 1024), jnp.bfloat16)
    labels = jax.ShapeDtypeStruct((4, 2048), jnp.int32)

    def loss(h: Any, head: Any, labels: Any) -> Any:
        sums = jnp.sum(lt.losses.chunked_log_probs(h, head, labels, chunk_size=512), axis=-1)
        return lt.losses.dpo(sums[:2], sums[2:])[0]

    program = compile_program(jax.grad(loss), (h, head, labels), {}, "v5e", None, None).compiled
    logit_bytes = 4 * 512 * 65536
    # Inputs in chunks, their gradient, and a few arrays of the logits of one chunk, instead of 16 chunks.
    assert program.memory_analysis().temp_size_in_bytes < 3 * 2 * 4 * 2048 * 1024 + 2.5 * logit_bytes
