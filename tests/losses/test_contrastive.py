"""The contrastive loss beside NumPy, and embeddings in chunks beside those of the whole batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowtide as lt
from lowtide.core import ConfigError, StructureError
from lowtide.hlo import compile_program


@pytest.mark.parametrize("is_symmetric", [False, True])
def test_info_nce(is_symmetric: bool) -> None:
    rng = np.random.default_rng(0)
    queries, documents = rng.normal(size=(5, 8)), rng.normal(size=(7, 8))
    units = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in (queries, documents)]
    logits = units[0] @ units[1].T / 0.1
    wanted = np.mean(np.log(np.exp(logits).sum(1)) - np.diag(logits))
    if is_symmetric:
        wanted = (wanted + np.mean(np.log(np.exp(logits[:, :5]).sum(0)) - np.diag(logits))) / 2
    arrays = jnp.asarray(queries, jnp.float32), jnp.asarray(documents, jnp.float32)
    loss, metrics = lt.losses.info_nce(*arrays, temperature=0.1, is_symmetric=is_symmetric)
    assert float(loss) == pytest.approx(wanted, rel=1e-5)
    assert float(metrics["accuracy"]) == pytest.approx(np.mean(logits.argmax(1) == np.arange(5)))
    grads = jax.grad(lambda q: lt.losses.info_nce(q, arrays[1])[0])(jnp.zeros((5, 8)))
    assert bool(jnp.isfinite(grads).all())


def embed(params: Any, tokens: Any) -> Any:
    h = params["embed"][tokens]
    for _ in range(4):
        h = h + jnp.tanh(h @ params["up"]) @ params["down"]
    return jnp.mean(h, axis=1)


def loss_fn(params: Any, batch: Any, chunk_size: int) -> Any:
    embeddings = [lt.losses.embed_in_chunks(embed, params, batch[name], chunk_size) for name in ("q", "d")]
    return lt.losses.info_nce(*embeddings)[0]


def test_chunks_give_the_gradients_of_the_whole_batch() -> None:
    rng = np.random.default_rng(0)
    shapes = {"embed": (20, 8), "up": (8, 16), "down": (16, 8)}
    params = {name: jnp.asarray(rng.normal(size=shape) / 3, jnp.float32) for name, shape in shapes.items()}
    batch = {name: jnp.asarray(rng.integers(0, 20, (12, 5))) for name in ("q", "d")}

    def whole(params: Any) -> Any:
        return lt.losses.info_nce(embed(params, batch["q"]), embed(params, batch["d"]))[0]

    actual = jax.jit(jax.value_and_grad(lambda params: loss_fn(params, batch, 4)))(params)
    for leaf, reference in zip(
        jax.tree.leaves(actual), jax.tree.leaves(jax.value_and_grad(whole)(params)), strict=True
    ):
        np.testing.assert_allclose(leaf, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu_aot
def test_a_batch_of_4096_has_the_peak_of_64() -> None:
    shapes = {"embed": (8192, 512), "up": (512, 2048), "down": (2048, 512)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}

    def temporary_bytes(rows: int) -> int:
        batch = {name: jax.ShapeDtypeStruct((rows, 128), jnp.int32) for name in ("q", "d")}
        grad = jax.grad(lambda params, batch: loss_fn(params, batch, 64))
        program = compile_program(grad, (params, batch), {}, "h100", None, None)
        return program.compiled.memory_analysis().temp_size_in_bytes

    # The similarities of 4,096 queries and documents, 64 MiB each in a few arrays, come in addition.
    assert temporary_bytes(4096) < temporary_bytes(64) + 4 * 64 * 2**20


def test_bad_input() -> None:
    x = jnp.ones((4, 2))
    for call, error, message in (
        (lambda: lt.losses.info_nce(x, x[:3]), StructureError, "4 queries need as many documents"),
        (lambda: lt.losses.info_nce(x, x[:, :1]), StructureError, "must be"),
        (lambda: lt.losses.info_nce(x, x, temperature=0), ConfigError, "temperature"),
        (lambda: lt.losses.embed_in_chunks(embed, {}, {"a": x, "b": x[:2]}, 2), StructureError, "one number of rows"),
        (lambda: lt.losses.embed_in_chunks(embed, {}, {"a": x}, 3), StructureError, "a multiple of 3"),
    ):
        with pytest.raises(error, match=message):
            call()
