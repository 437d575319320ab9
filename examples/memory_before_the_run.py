"""Report the memory of a step on a chip that is not attached: its bytes, their owners, and changes that save memory.

For your model: pass your own step and the shapes of its arguments; nothing is allocated. Without libtpu (the extra
`tpu-aot`) the step is compiled for the CPU.
"""

import importlib.util
import sys

import jax
import jax.numpy as jnp
import optax

import lowtide as lt

TARGET = sys.argv[1] if len(sys.argv) > 1 else "v5e" if importlib.util.find_spec("libtpu") else "cpu"
LAYERS, WIDTH, BATCH = 8, 256, 1024
optimizer = optax.adamw(1e-3)


def forward(params, x):
    def block(x, layer):
        return x + jax.nn.gelu(x @ layer["up"]) @ layer["down"], None

    return jax.lax.scan(block, x, params)[0]


def step(params, opt_state, x):
    loss, grads = jax.value_and_grad(lambda p: jnp.mean(forward(p, x) ** 2))(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


params = {"up": shape(LAYERS, WIDTH, 4 * WIDTH), "down": shape(LAYERS, 4 * WIDTH, WIDTH)}
args = params, jax.eval_shape(optimizer.init, params), shape(BATCH, WIDTH)
roles = {"params": 0, "opt_state": 1, "batch": 2}

report = lt.memory.analyze(step, *args, target=TARGET, roles=roles)
report.print(top=6)
print("\nWhat would help")
for remedy in lt.memory.remedies(step, *args, target=TARGET, roles=roles)[:4]:
    print(" ", remedy)

donated = lt.memory.analyze(step, *args, target=TARGET, roles=roles, donate_argnums=(0, 1))
print(f"\nwith params and optimizer state donated: {lt.memory.diff(report, donated)}")
assert donated.device_bytes < report.device_bytes
