"""Steps beyond one gradient of one stack of layers: nested gradients, pooling, graphs, adjoints of solvers.

As in `_programs.py`, each function returns the keyword arguments of `lowtide.memory.analyze`, and nothing runs. The
sizes compile in seconds on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _programs import I32, STEP_ROLES, shape, sized

Layers = list[tuple[Any, Any]]


def mlp_shapes(*widths: int) -> Layers:
    return [(shape(one, other), shape(other)) for one, other in zip(widths, widths[1:], strict=False)]


def mlp(params: Layers, x: Any) -> Any:
    for weight, bias in params[:-1]:
        x = jnp.tanh(x @ weight + bias)
    return x @ params[-1][0] + params[-1][1]


def stepped(loss_fn: Callable[..., Any], params: Any, batch: Any) -> dict[str, Any]:
    """Return an Adam step for a loss of parameters and batch; everything except the batch is donated."""
    tx = optax.adam(1e-3)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    args = (params, jax.eval_shape(tx.init, params), batch)
    return {"fn": step, "args": args, "roles": STEP_ROLES, "donate_argnums": (0, 1)}


# --- nested gradients ----------------------------------------------------------------------------------------------


def maml() -> dict[str, Any]:
    """Return MAML: two inner steps of gradient descent for each of several tasks, differentiated by the outer step."""
    (dim, wide, rows), tasks = sized(64, 512, 512), 8

    def mse(params: Layers, x: Any, y: Any) -> Any:
        return jnp.mean((mlp(params, x) - y) ** 2)

    def loss_fn(params: Layers, batch: Any) -> Any:
        def task(one: Any) -> Any:
            adapted = params
            for _ in range(2):
                grads = jax.grad(mse)(adapted, one["x"], one["y"])
                adapted = jax.tree.map(lambda leaf, grad: leaf - 0.1 * grad, adapted, grads)
            return mse(adapted, one["query"], one["target"])

        return jnp.mean(jax.vmap(task)(batch))

    batch = {name: shape(tasks, rows, dim) for name in ("x", "y", "query", "target")}
    return stepped(loss_fn, mlp_shapes(dim, wide, wide, dim), batch)


def pinn() -> dict[str, Any]:
    """Return a PINN: the residual of the heat equation, u_t - u_xx, with derivatives of a network by its inputs."""
    wide, points = sized(256, 8192)

    def loss_fn(params: Layers, batch: Any) -> Any:
        def u(x: Any, t: Any) -> Any:
            return mlp(params, jnp.stack([x, t]))[0]

        def residual(x: Any, t: Any) -> Any:
            return jax.grad(u, 1)(x, t) - jax.grad(jax.grad(u))(x, t)

        return jnp.mean(jax.vmap(residual)(batch["x"], batch["t"]) ** 2)

    return stepped(loss_fn, mlp_shapes(2, wide, wide, wide, 1), {name: shape(points) for name in ("x", "t")})


def gradient_penalty() -> dict[str, Any]:
    """Return a critic with the Wasserstein GAN penalty on the norm of its gradient with respect to its input."""
    dim, wide, rows = sized(784, 1024, 2048)

    def loss_fn(params: Layers, batch: Any) -> Any:
        def critic(x: Any) -> Any:
            return jnp.sum(mlp(params, x))

        norms = jnp.linalg.norm(jax.grad(critic)(0.5 * (batch["real"] + batch["fake"])), axis=-1)
        return (critic(batch["fake"]) - critic(batch["real"])) / rows + 10 * jnp.mean((norms - 1) ** 2)

    return stepped(loss_fn, mlp_shapes(dim, wide, wide, 1), {name: shape(rows, dim) for name in ("real", "fake")})


def hessian_vector() -> dict[str, Any]:
    """Return a forward-over-reverse Hessian-vector product; nothing differentiates the gradient in reverse."""
    dim, wide, rows = sized(256, 1024, 4096)

    def product(params: Layers, vector: Layers, batch: Any) -> Any:
        def loss_fn(params: Layers) -> Any:
            return jnp.mean(mlp(params, batch) ** 2)

        return jax.jvp(jax.grad(loss_fn), (params,), (vector,))[1]

    params = mlp_shapes(dim, wide, wide, dim)
    return {"fn": product, "args": (params, params, shape(rows, dim)), "roles": {"params": 0, "vector": 1, "batch": 2}}


# --- convolutions --------------------------------------------------------------------------------------------------


def conv(x: Any, weight: Any, stride: int = 1) -> Any:
    return jax.lax.conv_general_dilated(x, weight, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def max_pool(x: Any, window: int = 2, stride: int = 2) -> Any:
    sizes, strides = (1, window, window, 1), (1, stride, stride, 1)
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, sizes, strides, "SAME")


def normed(x: Any, scale: Any) -> Any:
    mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
    return (x - mean) * jax.lax.rsqrt(var + 1e-5) * scale


def two_pools() -> dict[str, Any]:
    """Return two convolutions, each followed by a max-pool."""
    rows, side = 16, sized(64)[0]

    def loss_fn(params: Any, batch: Any) -> Any:
        h = max_pool(jax.nn.relu(conv(batch["x"], params["one"])))
        h = max_pool(jax.nn.relu(conv(h, params["two"])))
        return jnp.mean((h - batch["y"]) ** 2)

    params = {"one": shape(3, 3, 3, 32), "two": shape(3, 3, 32, 32)}
    return stepped(loss_fn, params, {"x": shape(rows, side, side, 3), "y": shape(rows, side // 4, side // 4, 32)})


def resnet18() -> dict[str, Any]:
    """Return a ResNet-18 for small images, with a max-pool after the stem and one before the head."""
    rows, side, widths = 8, sized(64)[0], (32, 64, 128, 256)

    def block(params: Any, x: Any, stride: int) -> Any:
        h = jax.nn.relu(normed(conv(x, params["one"], stride), params["scale"]))
        h = normed(conv(h, params["two"]), params["scale"])
        return jax.nn.relu(h + (conv(x, params["skip"], stride) if "skip" in params else x))

    def loss_fn(params: Any, batch: Any) -> Any:
        h = max_pool(jax.nn.relu(normed(conv(batch["x"], params["stem"]), params["scale"])), 3)
        for at, one in enumerate(params["blocks"]):
            h = block(one, h, 2 if at in (2, 4, 6) else 1)
        logits = max_pool(h).mean((1, 2)) @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    blocks: list[dict[str, Any]] = []
    before = widths[0]
    for at in range(8):
        wide = widths[at // 2]
        one = {"one": shape(3, 3, before, wide), "two": shape(3, 3, wide, wide), "scale": shape(wide)}
        blocks.append({**one, "skip": shape(1, 1, before, wide)} if at in (2, 4, 6) else one)
        before = wide
    ends = {"stem": shape(7, 7, 3, widths[0]), "scale": shape(widths[0]), "head": shape(widths[-1], 1000)}
    batch = {"x": shape(rows, side, side, 3), "labels": shape(rows, dtype=I32)}
    return stepped(loss_fn, {**ends, "blocks": blocks}, batch)


def unet() -> dict[str, Any]:
    """Return a U-Net of three levels, whose skip connections live from the encoder to the decoder."""
    rows, side, widths = 4, sized(64)[0], (32, 64, 128)

    def double(params: Any, x: Any) -> Any:
        return jax.nn.silu(conv(jax.nn.silu(conv(x, params["one"])), params["two"]))

    def loss_fn(params: Any, batch: Any) -> Any:
        h, skips = batch["x"], list[Any]()
        for one in params["down"]:
            h = double(one, h)
            skips.append(h)
            h = max_pool(h)
        h = double(params["middle"], h)
        for one, skip in zip(params["up"], reversed(skips), strict=True):
            h = jax.image.resize(h, (*skip.shape[:3], h.shape[3]), "nearest")
            h = double(one, jnp.concatenate([h, skip], axis=-1))
        return jnp.mean((conv(h, params["last"]) - batch["y"]) ** 2)

    def pair(before: int, wide: int) -> dict[str, Any]:
        return {"one": shape(3, 3, before, wide), "two": shape(3, 3, wide, wide)}

    params = {
        "down": [pair(before, wide) for before, wide in zip((3, *widths), widths, strict=False)],
        "middle": pair(widths[-1], 2 * widths[-1]),
        "up": [pair(before + wide, wide) for before, wide in zip((256, 128, 64), reversed(widths), strict=True)],
        "last": shape(1, 1, widths[0], 3),
    }
    return stepped(loss_fn, params, {name: shape(rows, side, side, 3) for name in ("x", "y")})


# --- graphs and solvers --------------------------------------------------------------------------------------------


def gnn() -> dict[str, Any]:
    """Return a graph network: messages along edges are gathered, computed, and summed by segment, in three rounds."""
    (nodes, edges, dim), rounds = sized(4096, 32768, 128), 3

    def loss_fn(params: Any, batch: Any) -> Any:
        h = batch["nodes"]
        for one in params:
            pairs = jnp.concatenate([h[batch["senders"]], h[batch["receivers"]]], axis=-1)
            messages = jax.nn.relu(pairs @ one["message"]) @ one["out"]
            h = h + jnp.tanh(jax.ops.segment_sum(messages, batch["receivers"], nodes) @ one["update"])
        return jnp.mean((h - batch["y"]) ** 2)

    one = {"message": shape(2 * dim, dim), "out": shape(dim, dim), "update": shape(dim, dim)}
    ends = {name: shape(edges, dtype=I32) for name in ("senders", "receivers")}
    return stepped(loss_fn, [one] * rounds, {**ends, **{name: shape(nodes, dim) for name in ("nodes", "y")}})


def neural_ode_adjoint() -> dict[str, Any]:
    """Return a neural ODE per example, whose adjoint integrates the state and the gradients of all weights backward."""
    (dim, wide, rows), steps = sized(64, 128, 256), 8

    def field(params: Layers, y: Any) -> Any:
        return mlp(params, y)

    @jax.custom_vjp
    def solve(params: Layers, y: Any) -> Any:
        return jax.lax.fori_loop(0, steps, lambda _, y: y + field(params, y) / steps, y)

    def forward(params: Layers, y: Any) -> Any:
        y = solve(params, y)
        return y, (params, y)

    def backward(kept: Any, cotangent: Any) -> Any:
        params, y = kept

        def back(_: Any, state: Any) -> Any:
            y, adjoint, total = state
            slope, pull = jax.vjp(field, params, y)
            grads, more = pull(adjoint / steps)
            return y - slope / steps, adjoint + more, jax.tree.map(jnp.add, total, grads)

        _, adjoint, total = jax.lax.fori_loop(0, steps, back, (y, cotangent, jax.tree.map(jnp.zeros_like, params)))
        return total, adjoint

    solve.defvjp(forward, backward)

    def loss_fn(params: Layers, batch: Any) -> Any:
        out = jax.vmap(solve, (None, 0))(params, batch["x"])
        return jnp.mean((out - batch["y"]) ** 2)

    return stepped(loss_fn, mlp_shapes(dim, wide, wide, dim), {name: shape(rows, dim) for name in ("x", "y")})


# --- loops over time and state --------------------------------------------------------------------------------------


def selective_scan() -> dict[str, Any]:
    """Return a state-space model: a parallel scan over time in each of the stacked layers."""
    (dim, length), layers, states, rows = sized(128, 256), 4, 16, 4

    def layer(x: Any, one: Any) -> Any:
        step = jax.nn.softplus(x @ one["step"])
        decay = jnp.exp(-step[..., None] * jnp.exp(one["decay"]))
        inputs = (step * x)[..., None] * (x @ one["into"])[:, :, None, :]
        _, h = jax.lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (decay, inputs), axis=1)
        return x + jnp.einsum("bldn,bln->bld", h, x @ one["out"]), None

    def loss_fn(params: Any, batch: Any) -> Any:
        return jnp.mean((jax.lax.scan(layer, batch["x"], params)[0] - batch["y"]) ** 2)

    params = {name: shape(layers, dim, states) for name in ("decay", "into", "out")}
    params["step"] = shape(layers, dim, dim)
    return stepped(loss_fn, params, {name: shape(rows, length, dim) for name in ("x", "y")})


def cached_decoding() -> dict[str, Any]:
    """Return one decoding step through stacked layers whose caches are xs and ys of a scan, so the scan copies them."""
    (length, dim), layers, rows, heads = sized(1024, 256), 4, 4, 8

    def step(params: Any, cache: Any, x: Any, at: Any) -> Any:
        def layer(x: Any, one: Any) -> Any:
            weights, cache = one
            q, k, v = (jnp.reshape(x @ weights[name], (rows, heads, -1)) for name in "qkv")
            cache = {
                name: jax.lax.dynamic_update_slice(cache[name], new[:, None], (0, at, 0, 0))
                for name, new in (("k", k), ("v", v))
            }
            scores = jnp.where(jnp.arange(length) <= at, jnp.einsum("bhd,bthd->bht", q, cache["k"]), -1e9)
            out = jnp.einsum("bht,bthd->bhd", jax.nn.softmax(scores), cache["v"])
            return x + out.reshape(rows, dim) @ weights["o"], cache

        return jax.lax.scan(layer, x, (params, cache))

    cache = {name: shape(layers, rows, length, heads, dim // heads) for name in "kv"}
    args = ({name: shape(layers, dim, dim) for name in "qkvo"}, cache, shape(rows, dim), shape(dtype=I32))
    return {"fn": step, "args": args, "roles": {"params": 0, "cache": 1, "batch": 2}, "donate_argnums": 1}


NESTED: dict[str, Callable[..., dict[str, Any]]] = {
    f.__name__: f
    for f in (
        maml,
        pinn,
        gradient_penalty,
        hessian_vector,
        two_pools,
        resnet18,
        unet,
        gnn,
        neural_ode_adjoint,
        selective_scan,
        cached_decoding,
    )
}
