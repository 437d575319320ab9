"""Run a stack of layers on four devices in a zero-bubble pipeline, and compare its values with those of plain JAX.

For your model: write a `LayerStack` (see `layerwise_full_tuning.py`). On real devices, remove the lines that change
`os.environ`.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

import lowtide as lt

LAYERS, WIDTH, MICROBATCHES = 8, 32, 8
rng = np.random.default_rng(0)


def block(layer, h, batch):
    return h + jnp.tanh(h @ layer["w"])


stack = lt.LayerStack(
    lambda outer, batch: batch["x"] @ outer["in"],
    block,
    lambda outer, h, batch: (jnp.mean((h @ outer["out"] - batch["y"]) ** 2), {}),
)
outer = {"in": jnp.asarray(rng.normal(size=(16, WIDTH)) / 4), "out": jnp.asarray(rng.normal(size=(WIDTH, 4)) / 6)}
layers = {"w": jnp.asarray(rng.normal(size=(LAYERS, WIDTH, WIDTH)) / 12)}
batch = {"x": jnp.asarray(rng.normal(size=(32, 16))), "y": jnp.asarray(rng.normal(size=(32, 4)))}

schedule = lt.pipeline.schedule("zb-h1", num_stages=4, num_microbatches=MICROBATCHES)
simulation = lt.pipeline.simulate(schedule)
print(f"{schedule.name}: bubble {simulation.bubble:g} of {simulation.makespan:g}")

pipeline = lt.pipeline.value_and_grad(stack, schedule, mesh=lt.train.make_mesh(stage=4))
(loss, _), (outer_grads, layer_grads) = jax.jit(pipeline)(outer, layers, batch)


def plain(outer, layers):
    h, _ = jax.lax.scan(lambda h, layer: (block(layer, h, batch), None), stack.first(outer, batch), layers)
    return stack.last(outer, h, batch)[0]


want, (_, want_grads) = jax.jit(jax.value_and_grad(plain, argnums=(0, 1)))(outer, layers)
difference = float(jnp.max(jnp.abs(layer_grads["w"] - want_grads["w"])))
print(f"loss {loss:.6f}, of plain JAX {want:.6f}; gradients differ by at most {difference:.1e}")
assert difference < 1e-5
