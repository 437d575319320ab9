"""Train adapters in your own training loop: only their parameters have gradients and optimizer state.

For your model: any pytree whose weights are used as `x @ w.T`, `w @ x`, `x @ w` or `lt.core.linear(x, w)`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowtide as lt

rng = np.random.default_rng(0)
model = {
    f"layer_{index}": {
        "up": jnp.asarray(rng.normal(size=(256, 64)) / 8),
        "down": jnp.asarray(rng.normal(size=(64, 256)) / 16),
    }
    for index in range(4)
}


def forward(model, x):
    for layer in model.values():
        x = x + jax.nn.gelu(x @ layer["up"].T) @ layer["down"].T
    return x


def loss_fn(model, batch):
    return jnp.mean((forward(model, batch["x"]) - batch["y"]) ** 2)


model = lt.lora.add(model, lt.lora.Config(rank=4, targets="**/{up,down}"), key=jax.random.key(0))
trainable, frozen = lt.partition(model, "**/lora_*")
optimizer = optax.adamw(1e-2)
opt_state = optimizer.init(trainable)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def step(trainable, opt_state, frozen, batch):
    loss, grads = lt.value_and_grad(loss_fn, wrt="**/lora_*")(lt.combine(trainable, frozen), batch)
    updates, opt_state = optimizer.update(lt.partition(grads, "**/lora_*")[0], opt_state, trainable)
    return optax.apply_updates(trainable, updates), opt_state, loss


x = rng.normal(size=(512, 64)).astype(np.float32)
batch = {"x": x, "y": np.tanh(x @ rng.normal(size=(64, 64)) / 8).astype(np.float32)}
first = last = None
for _ in range(100):
    trainable, opt_state, last = step(trainable, opt_state, frozen, batch)
    first = last if first is None else first

num_bytes = {"adapters": trainable, "their optimizer state": opt_state, "frozen base": frozen}
for name, tree in num_bytes.items():
    print(f"{name}: {lt.core.format_bytes(lt.core.tree_bytes(tree))}")
print(f"loss {first:.4f} -> {last:.4f}")
assert last < first
