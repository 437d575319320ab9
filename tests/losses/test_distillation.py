"""Divergences between two models' next-token distributions, beside a direct computation from all logits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowtide import losses
from lowtide.core import ConfigError, LowtideError, StructureError
from lowtide.memory import analyze

B, T, D, E, V = 2, 13, 8, 6, 32


def arrays(scale: float = 1.0) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = ((B, T, D), (V, D), (B, T, E), (V, E))
    labels = jax.random.randint(keys[4], (B, T), 0, V).at[0, 3:7].set(-100)
    return *(scale * jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=False)), labels


def direct(h: Any, head: Any, teacher_h: Any, teacher_head: Any, labels: Any, **options: Any) -> Any:
    def log_softmax(logits: Any, cap: Any) -> Any:
        logits = logits if cap is None else cap * jnp.tanh(logits / cap)
        return jax.nn.log_softmax(logits / options.get("temperature", 1.0))

    student = log_softmax(h @ head.T, options.get("soft_cap"))
    teacher = log_softmax(teacher_h @ teacher_head.T, options.get("teacher_soft_cap"))
    first, second = (teacher, student) if options.get("direction") != "reverse" else (student, teacher)
    return jnp.where(labels == -100, 0, jnp.sum(jnp.exp(first) * (first - second), -1))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"direction": "reverse"},
        {"temperature": 2.5, "soft_cap": 3.0},
        {"direction": "reverse", "temperature": 0.5, "teacher_soft_cap": 2.0},
    ],
)
@pytest.mark.parametrize("chunk_size", [None, 5])
def test_values_and_gradients_equal_those_of_all_logits(options: dict[str, Any], chunk_size: int | None) -> None:
    args = arrays()
    weights = jax.random.normal(jax.random.key(9), (B, T))

    def total(fn: Any, h: Any, head: Any, **more: Any) -> Any:
        return jnp.sum(weights * fn(h, head, *args[2:], **options, **more))

    values = losses.distillation(*args, **options, chunk_size=chunk_size)
    np.testing.assert_allclose(values, direct(*args, **options), rtol=1e-5, atol=1e-5)
    chunked = jax.grad(lambda *xs: total(losses.distillation, *xs, chunk_size=chunk_size), (0, 1))(*args[:2])
    for grad, wanted in zip(chunked, jax.grad(lambda *xs: total(direct, *xs), (0, 1))(*args[:2]), strict=True):
        np.testing.assert_allclose(grad, wanted, rtol=1e-5, atol=1e-5)
    teacher = jax.grad(lambda h: jnp.sum(losses.distillation(*args[:2], h, *args[3:])))(args[2])
    assert not np.any(teacher)


def test_all_classes_of_the_teacher_equal_the_whole_divergence() -> None:
    h, head, teacher_h, teacher_head, labels = arrays()
    classes = losses.top_log_probs(teacher_h, teacher_head, V, chunk_size=4)
    whole = losses.distillation(h, head, teacher_h, teacher_head, labels, temperature=2.0)
    top = losses.distillation_top_k(h, head, *classes, labels, temperature=2.0, chunk_size=4)
    np.testing.assert_allclose(top, whole, rtol=1e-5, atol=1e-5)
    ids, log_probs = losses.top_log_probs(teacher_h, teacher_head, 3, vocab_size=20)
    assert ids.shape == log_probs.shape == (B, T, 3) and int(ids.max()) < 20
    wanted = jax.lax.top_k(jax.nn.log_softmax((teacher_h @ teacher_head.T)[..., :20]), 3)
    np.testing.assert_allclose(log_probs, wanted[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(ids, wanted[1])
    teacher = jax.nn.softmax(log_probs)
    student = jnp.take_along_axis(jax.nn.log_softmax(h @ head.T), ids, -1)
    kept = jnp.where(labels == -100, 0, jnp.sum(teacher * (jnp.log(teacher) - student), -1))
    np.testing.assert_allclose(losses.distillation_top_k(h, head, ids, log_probs, labels), kept, rtol=1e-5, atol=1e-5)


def test_large_logits_give_finite_values_and_gradients() -> None:
    args = arrays(scale=1e3)
    for direction in ("forward", "reverse"):

        def total(h: Any, direction: Any = direction) -> Any:
            return jnp.sum(losses.distillation(h, *args[1:], direction=direction))

        value, grad = jax.value_and_grad(total)(args[0])
        assert np.isfinite(value) and np.isfinite(grad).all()


@pytest.mark.gpu_aot
def test_no_logits_of_all_tokens_exist() -> None:
    tokens, width, vocabulary = 8192, 1024, 65536
    shapes = [(1, tokens, width), (vocabulary, width)] * 2
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    labels = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    step = jax.grad(lambda *args: jnp.sum(losses.distillation(*args)), (0, 1))
    report = analyze(step, *args, labels, target="h100")
    assert report.device.temp_bytes < 0.5 * 4 * tokens * vocabulary


@pytest.mark.parametrize(
    ("changes", "options", "error", "message"),
    [
        ({3: (V + 1, E)}, {}, StructureError, "different vocabularies"),
        ({2: (B, T + 1, E)}, {}, StructureError, "must have shapes"),
        ({}, {"direction": "sideways"}, ConfigError, "direction"),
        ({}, {"temperature": 0.0}, ConfigError, "temperature"),
        ({}, {"chunk_size": 0}, ConfigError, "chunk_size"),
        ({}, {"teacher_soft_cap": -1.0}, ConfigError, "teacher_soft_cap"),
    ],
)
def test_wrong_arguments(
    changes: dict[int, Any], options: dict[str, Any], error: type[LowtideError], message: str
) -> None:
    args = [jnp.ones(changes[index]) if index in changes else leaf for index, leaf in enumerate(arrays())]
    with pytest.raises(error, match=message):
        losses.distillation(*args, **options)
    with pytest.raises(ConfigError, match="k is out of range|k must"):
        losses.top_log_probs(args[0], args[1], V + 1)
