"""More programs for `benchmarks/measured_peak.py`, of kinds that `_programs.py` does not contain.

As there, each function returns the keyword arguments of `lowtide.memory.analyze`, at the scale of `_programs.scale`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _decoders import LLAMA_1B
from _programs import BF16, F32, I32, STEP_ROLES, lora, shape, sized
from jax import lax
from jax.sharding import Mesh

import lowtide as lt
from lowtide.pipeline import schedule, value_and_grad


def _step(loss_fn: Callable[..., Any], tx: optax.GradientTransformation, params: Any, batch: Any) -> dict[str, Any]:
    """Return a training step of a loss; parameters and optimizer state are donated."""

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    arguments = (params, jax.eval_shape(tx.init, params), batch)
    return {"fn": step, "args": arguments, "roles": STEP_ROLES, "donate_argnums": (0, 1)}


def attention(length: int) -> dict[str, Any]:
    """Return the gradients of causal attention with 16 heads of 64."""

    def loss(q: Any, k: Any, v: Any) -> Any:
        return jnp.sum(jax.nn.dot_product_attention(q, k, v, is_causal=True).astype(F32))

    heads = [shape(1, *sized(length), 16, 64, dtype=BF16) for _ in range(3)]
    return {"fn": jax.grad(loss, argnums=(0, 1, 2)), "args": tuple(heads), "roles": {"heads": (0, 1, 2)}}


def convnet() -> dict[str, Any]:
    """Return residual 3 x 3 convolutions in four stages, for images of 224 x 224, with SGD and momentum."""
    (side,), channels, rows = sized(224), (64, 128, 256, 512), 32

    def conv(x: Any, kernel: Any, stride: int = 1) -> Any:
        return lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def loss_fn(params: Any, batch: Any) -> Any:
        h = batch["x"]
        for stage in params["stages"]:
            h = jax.nn.relu(conv(h, stage["down"], 2))
            for kernel in stage["blocks"]:
                h = h + jax.nn.relu(conv(h, kernel)) * 0.1
        logits = h.mean((1, 2)) @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    stages = [
        {"down": shape(3, 3, before, after), "blocks": [shape(3, 3, after, after) for _ in range(3)]}
        for before, after in zip((3, *channels), channels, strict=False)
    ]
    params = {"stages": stages, "head": shape(channels[-1], 1000)}
    batch = {"x": shape(rows, side, side, 3), "labels": shape(rows, dtype=I32)}
    return _step(loss_fn, optax.sgd(1e-2, momentum=0.9), params, batch)


def lstm() -> dict[str, Any]:
    """Return two LSTM layers in a scan over 512 steps, with Adam."""
    dim, length = sized(1024, 512)
    rows = 64

    def cell(params: Any, carry: Any, x: Any) -> Any:
        h, c = carry
        i, f, g, o = jnp.split(x @ params["x"] + h @ params["h"], 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    def loss_fn(params: Any, batch: Any) -> Any:
        h = batch["x"]
        for layer in params:
            zeros = jnp.zeros(h.shape[1:], h.dtype)
            _, h = lax.scan(partial(cell, layer), (zeros, zeros), h)
        return jnp.mean((h - batch["y"]) ** 2)

    params = [{name: shape(dim, 4 * dim) for name in ("x", "h")} for _ in range(2)]
    return _step(loss_fn, optax.adam(1e-3), params, {name: shape(length, rows, dim) for name in ("x", "y")})


def mixture_of_experts() -> dict[str, Any]:
    """Return eight experts with two per token, up to a capacity, with AdamW."""
    dim, wide, rows = sized(1024, 4096, 8192)
    experts, chosen = 8, 2
    capacity = max(rows * chosen // experts, 1)

    def loss_fn(params: Any, batch: Any) -> Any:
        x = batch["x"]
        weights, index = lax.top_k(jax.nn.softmax(x @ params["router"]), chosen)
        mask = jax.nn.one_hot(index.ravel(), experts, dtype=I32)  # token and choice, expert
        place = jnp.sum((jnp.cumsum(mask, axis=0) - 1) * mask, axis=-1)
        kept = place < capacity
        at = jnp.where(kept, index.ravel() * capacity + place, experts * capacity)
        sent = jnp.zeros((experts * capacity + 1, dim), x.dtype).at[at].add(jnp.repeat(x, chosen, axis=0))
        h = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", sent[:-1].reshape(experts, capacity, dim), params["up"]))
        out = jnp.einsum("ecf,efd->ecd", h, params["down"]).reshape(experts * capacity, dim)
        back = jnp.where(kept[:, None], out[jnp.minimum(at, experts * capacity - 1)], 0)
        y = jnp.einsum("tkd,tk->td", back.reshape(rows, chosen, dim), weights)
        return jnp.mean((x + y - batch["y"]) ** 2)

    params = {
        "router": shape(dim, experts),
        "up": shape(experts, dim, wide),
        "down": shape(experts, wide, dim),
    }
    return _step(loss_fn, optax.adamw(1e-3), params, {name: shape(rows, dim) for name in ("x", "y")})


def gradient_penalty() -> dict[str, Any]:
    """Return a gradient inside a gradient: a critic whose slope is kept near one, with Adam."""
    dim, rows = sized(2048, 4096)

    def critic(params: Any, x: Any) -> Any:
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    def loss_fn(params: Any, batch: Any) -> Any:
        slope = jax.grad(critic, argnums=1)(params, batch["x"])
        norm = jnp.sqrt(jnp.sum(slope**2, axis=-1) + 1e-12)
        return critic(params, batch["x"]) / rows + 10 * jnp.mean((norm - 1) ** 2)

    return _step(loss_fn, optax.adam(1e-3), [shape(dim, dim) for _ in range(4)], {"x": shape(rows, dim)})


def while_loop() -> dict[str, Any]:
    """Return conjugate gradients until the residual is small: a loop whose length depends on values."""
    (dim,) = sized(16384)

    def solve(a: Any, b: Any) -> Any:
        def apply(x: Any) -> Any:
            return a.T @ (a @ x) + x

        def body(carry: Any) -> Any:
            x, r, p, count = carry
            ap = apply(p)
            alpha = jnp.sum(r * r) / jnp.sum(p * ap)
            new = r - alpha * ap
            return x + alpha * p, new, new + p * jnp.sum(new * new) / jnp.sum(r * r), count + 1

        def unfinished(carry: Any) -> Any:
            return (jnp.sum(carry[1] ** 2) > 1e-8 * jnp.sum(b * b)) & (carry[3] < 50)

        x = jnp.zeros_like(b)
        return lax.while_loop(unfinished, body, (x, b, b, 0))

    return {"fn": solve, "args": (shape(dim, dim), shape(dim, 16)), "roles": {"matrix": 0, "right side": 1}}


def fourier() -> dict[str, Any]:
    """Return a filter in frequency space and its gradient; the FFT library's work space is unknown to the compiler."""
    (side,) = sized(4096)

    def loss(weights: Any, x: Any) -> Any:
        return jnp.mean(jnp.fft.irfft2(jnp.fft.rfft2(x) * weights) ** 2)

    args = (shape(side, side // 2 + 1), shape(8, side, side))
    return {"fn": jax.grad(loss), "args": args, "roles": {"params": 0, "batch": 1}}


def factorisation() -> dict[str, Any]:
    """Return the gradient of a Gaussian process's likelihood, with a Cholesky factorisation and a triangular solve."""
    (dim,) = sized(8192)

    def likelihood(x: Any, y: Any) -> Any:
        distance = jnp.sum(x**2, 1)[:, None] + jnp.sum(x**2, 1)[None] - 2 * x @ x.T
        factor = jnp.linalg.cholesky(jnp.exp(-0.5 * distance) + 2.0 * jnp.eye(dim))
        solved = jax.scipy.linalg.solve_triangular(factor, y, lower=True)
        return jnp.sum(solved**2) + 2 * jnp.sum(jnp.log(jnp.diag(factor)))

    return {"fn": jax.grad(likelihood), "args": (shape(dim, 16), shape(dim, 1)), "roles": {"params": 0, "batch": 1}}


def _mlp_stack() -> lt.LayerStack:
    return lt.LayerStack(
        first=lambda outer, batch: batch["x"],
        block=lambda layer, h, batch: h + jax.nn.gelu(h @ layer["up"]) @ layer["down"],
        last=lambda outer, h, batch: (jnp.mean((h - batch["y"]) ** 2), {}),
    )


def _mlp_shapes() -> tuple[Any, Any]:
    dim, wide, rows = sized(2048, 8192, 4096)
    layers = {"up": shape(12, dim, wide), "down": shape(12, wide, dim)}
    return layers, {name: shape(rows, dim) for name in ("x", "y")}


def pipeline_of_one_stage(target: Any) -> dict[str, Any]:
    """Return a pipelined step with eight microbatches on one device, with Adam."""
    mesh = Mesh(target.devices()[:1], ("stage",))
    layers, batch = _mlp_shapes()
    made = schedule("1f1b", num_stages=1, num_microbatches=8)
    pipeline, tx = value_and_grad(_mlp_stack(), made, mesh=mesh), optax.adam(1e-3)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        (loss, _), (_, grads) = pipeline({}, params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    arguments = (layers, jax.eval_shape(tx.init, layers), batch)
    return {"fn": step, "args": arguments, "roles": STEP_ROLES, "donate_argnums": (0, 1)}


def _layerwise(where: str) -> dict[str, Any]:
    place = dict.fromkeys(("layers", "outer", "opt_state", "inputs"), where)
    step = lt.offload.layerwise_step(_mlp_stack(), optax.adam(1e-3), place=place)
    layers, batch = _mlp_shapes()
    state, frozen = step.init({}, layers)
    roles = {"state": 0, "frozen": 1, "batch": 2}
    return {"fn": step, "args": (state, frozen, batch), "roles": roles, "donate_argnums": (0,)}


def layerwise_device() -> dict[str, Any]:
    """Return Adam inside the backward pass, with everything on the device."""
    return _layerwise("device")


def layerwise_host() -> dict[str, Any]:
    """Return Adam inside the backward pass, with everything on the host."""
    return _layerwise("host")


def lora_1b() -> dict[str, Any]:
    """Return a LoRA step on Llama 1B shapes, 8 x 2048 tokens, layers recomputed."""
    vocabulary, hidden, intermediate, head, length, layers = sized(128256, 2048, 8192, 64, 2048, 16)
    config = dataclasses.replace(
        LLAMA_1B,
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        head_dim=head,
        num_layers=layers,
    )
    return lora(config, 8, length)


def attention_2048() -> dict[str, Any]:
    """Return the gradients of causal attention over 2048 positions."""
    return attention(2048)


def attention_8192() -> dict[str, Any]:
    """Return the gradients of causal attention over 8192 positions."""
    return attention(8192)


MORE: dict[str, Callable[..., dict[str, Any]]] = {
    f.__name__: f
    for f in (
        attention_2048,
        attention_8192,
        convnet,
        lstm,
        mixture_of_experts,
        gradient_penalty,
        while_loop,
        fourier,
        factorisation,
        pipeline_of_one_stage,
        layerwise_device,
        layerwise_host,
        lora_1b,
    )
}
