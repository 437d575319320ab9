"""A Llama of a few thousand parameters."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from lowtide.core import map_with_paths
from lowtide.models import DecoderConfig, init, logits, loss

CONFIG = DecoderConfig(
    vocab_size=50,
    hidden_size=16,
    intermediate_size=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
)
KEY = jax.random.key(0)


def make_batch(seed=0, shape=(2, 9)):
    tokens = np.random.default_rng(seed).integers(0, CONFIG.vocab_size, (shape[0], shape[1] + 1))
    return {"tokens": jnp.asarray(tokens[:, :-1], jnp.int32), "labels": jnp.asarray(tokens[:, 1:], jnp.int32)}


@functools.cache
def make_model(tie=False, dtype="float32"):
    """Weights as `init` draws them, without a program for each shape."""
    random = np.random.default_rng(0)

    def drawn(path, leaf):
        values = 1 + random.normal(size=leaf.shape) / 8 if "norm" in path else random.normal(size=leaf.shape) / 4
        return jnp.asarray(values.astype(leaf.dtype))

    config = dataclasses.replace(CONFIG, tie_embeddings=tie)
    return map_with_paths(drawn, jax.eval_shape(lambda: init(config, key=KEY, dtype=dtype)))


def loss_fn(model, batch):
    return loss(model, batch)[0]


LOGITS, LOSS = jax.jit(logits), jax.jit(loss_fn)
"""What several tests compute, compiled once."""
