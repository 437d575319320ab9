"""Train all parameters with one layer on the device at a time: the optimizer runs inside the backward pass.

For your model: write it as a `LayerStack` of three functions. `first` runs before the blocks, `block` is one block with
its slice of the stacked parameters, and `last` runs after the blocks.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowtide as lt

LAYERS, WIDTH, VOCAB = 6, 64, 128
rng = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-1]), jnp.float32)


def first(outer, batch):
    return outer["embed"][batch["tokens"]]


def block(layer, h, batch):
    return h + jax.nn.gelu(h @ layer["up"]) @ layer["down"]


def last(outer, h, batch):
    logits = h @ outer["embed"].T
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])), {}


stack = lt.LayerStack(first, block, last)
outer = {"embed": normal(VOCAB, WIDTH)}
layers = {"up": normal(LAYERS, WIDTH, 4 * WIDTH), "down": normal(LAYERS, 4 * WIDTH, WIDTH)}
tokens = jnp.asarray(rng.integers(0, VOCAB, size=(8, 33)))
batch = {"tokens": tokens[:, :-1], "labels": (7 * tokens[:, :-1] + 1) % VOCAB}

step = lt.offload.layerwise_step(stack, optax.adam(3e-3))  # layers and all optimizer state on the host
state, frozen = step.init(outer, layers)
jitted = jax.jit(step, donate_argnums=0)
losses = []
for _ in range(60):
    state, metrics = jitted(state, frozen, batch)
    losses.append(float(metrics["loss"]))
kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.layers)}
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; the layers live in {', '.join(kinds)} memory")
assert losses[-1] < losses[0] / 2
