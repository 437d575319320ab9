"""Training steps in the styles that people use, for `benchmarks/attribution.py` and its tests.

Every function returns the keyword arguments of `lowtide.memory.analyze`, which `lowtide explain
benchmarks/_programs.py:NAME` accepts. Arguments are shapes wherever the library allows it; nothing runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

F32, BF16, I32 = jnp.float32, jnp.bfloat16, jnp.int32
STEP_ROLES = {"params": 0, "opt_state": 1, "batch": 2}
scale = 1
"""Divisor of widths and lengths; a rehearsal sets a larger one and runs the same programs."""


def shape(*dims: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def sized(*sizes: int) -> tuple[int, ...]:
    """Return widths and lengths divided by `scale`."""
    return tuple(max(size // scale, 1) for size in sizes)


def tokens(batch: int, length: int) -> dict[str, Any]:
    return {name: shape(batch, length, dtype=I32) for name in ("tokens", "labels")}


def cross_entropy(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(F32), labels).mean()


# --- Equinox -------------------------------------------------------------------------------------------------------


def equinox_mlp() -> dict[str, Any]:
    """Return an eqx.nn.MLP with vmap and AdamW; everything except the batch is donated."""
    import equinox as eqx

    tx = optax.adamw(1e-3)

    def loss_fn(model: Any, x: Any, y: Any) -> Any:
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    def step(model: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, *batch)
        updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.filter(eqx.apply_updates(model, updates), eqx.is_array), opt_state, loss

    dim, wide, rows = sized(1024, 4096, 2048)
    model = eqx.filter_eval_shape(lambda key: eqx.nn.MLP(dim, dim, wide, 4, key=key), jax.random.key(0))
    opt_state = jax.eval_shape(tx.init, eqx.filter(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)))
    batch = (shape(rows, dim), shape(rows, dim))
    return {"fn": step, "args": (model, opt_state, batch), "roles": STEP_ROLES, "donate_argnums": (0, 1)}


def equinox_transformer() -> dict[str, Any]:
    """Return blocks of eqx.nn attention and MLP in a Python loop, SGD with momentum, nothing donated."""
    import equinox as eqx

    heads, layers, (dim, length, vocabulary) = 8, 4, sized(512, 512, 8192)

    class Block(eqx.Module):
        attention: Any
        mlp: Any
        norms: list[Any]

        def __init__(self, key: Any) -> None:
            keys = jax.random.split(key)
            self.attention = eqx.nn.MultiheadAttention(heads, dim, key=keys[0])
            self.mlp = eqx.nn.MLP(dim, dim, 4 * dim, 1, activation=jax.nn.gelu, key=keys[1])
            self.norms = [eqx.nn.LayerNorm(dim), eqx.nn.LayerNorm(dim)]

        def __call__(self, h: Any) -> Any:
            normed = jax.vmap(self.norms[0])(h)
            h = h + self.attention(normed, normed, normed, mask=jnp.tril(jnp.ones((length, length), bool)))
            return h + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(h))

    class Model(eqx.Module):
        embedding: Any
        blocks: list[Any]
        head: Any

        def __init__(self, key: Any) -> None:
            keys = jax.random.split(key, layers + 2)
            self.embedding = eqx.nn.Embedding(vocabulary, dim, key=keys[0])
            self.blocks = [Block(k) for k in keys[2:]]
            self.head = eqx.nn.Linear(dim, vocabulary, use_bias=False, key=keys[1])

        def __call__(self, ids: Any) -> Any:
            h = jax.vmap(self.embedding)(ids)
            for block in self.blocks:
                h = block(h)
            return jax.vmap(self.head)(h)

    tx = optax.sgd(1e-2, momentum=0.9)

    def step(model: Any, opt_state: Any, batch: Any) -> Any:
        def loss_fn(model: Any) -> Any:
            return cross_entropy(jax.vmap(model)(batch["tokens"]), batch["labels"])

        loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
        updates, opt_state = tx.update(grads, opt_state)
        return eqx.filter(eqx.apply_updates(model, updates), eqx.is_array), opt_state, loss

    model = eqx.filter_eval_shape(Model, jax.random.key(0))
    opt_state = jax.eval_shape(tx.init, eqx.filter(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)))
    return {"fn": step, "args": (model, opt_state, tokens(8, length)), "roles": STEP_ROLES}


# --- Flax NNX and Keras --------------------------------------------------------------------------------------------


def nnx_transformer() -> dict[str, Any]:
    """Return a Flax NNX transformer, split into graph and state around a jitted step, nnx.Optimizer with AdamW."""
    from flax import nnx

    heads, layers, (dim, length, vocabulary) = 8, 4, sized(512, 512, 8192)

    class Block(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.norm1, self.norm2 = nnx.LayerNorm(dim, rngs=rngs), nnx.LayerNorm(dim, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(heads, dim, decode=False, rngs=rngs)
            self.up, self.down = nnx.Linear(dim, 4 * dim, rngs=rngs), nnx.Linear(4 * dim, dim, rngs=rngs)

        def __call__(self, h: Any) -> Any:
            h = h + self.attention(self.norm1(h), mask=nnx.make_causal_mask(h[..., 0]))
            return h + self.down(nnx.gelu(self.up(self.norm2(h))))

    class Model(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.embedding = nnx.Embed(vocabulary, dim, rngs=rngs)
            self.blocks = nnx.List([Block(rngs) for _ in range(layers)])
            self.head = nnx.Linear(dim, vocabulary, use_bias=False, rngs=rngs)

        def __call__(self, ids: Any) -> Any:
            h = self.embedding(ids)
            for block in self.blocks:
                h = block(h)
            return self.head(h)

    def make() -> Any:
        model = Model(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    graph, state = nnx.split(nnx.eval_shape(make))
    model_state, optimizer_state = state[0], state[1]

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        model, optimizer = nnx.merge(graph, nnx.State({0: params, 1: opt_state}))

        def loss_fn(model: Any) -> Any:
            return cross_entropy(model(batch["tokens"]), batch["labels"])

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        new = nnx.state((model, optimizer))
        return new[0], new[1], loss

    arguments = (nnx.pure(model_state), nnx.pure(optimizer_state), tokens(8, length))
    return {"fn": step, "args": arguments, "roles": STEP_ROLES, "donate_argnums": (0, 1)}


def keras_model() -> dict[str, Any]:
    """Return a functional Keras 3 transformer that uses stateless_call and the optimizer's stateless_apply."""
    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    dim, length, vocabulary = sized(256, 256, 8192)
    ids = keras.Input((length,), dtype="int32")
    h = keras.layers.Embedding(vocabulary, dim)(ids)
    for _ in range(2):
        normed = keras.layers.LayerNormalization()(h)
        h = h + keras.layers.MultiHeadAttention(4, dim // 4)(normed, normed, use_causal_mask=True)
        h = h + keras.layers.Dense(dim)(keras.layers.Dense(4 * dim, activation="gelu")(h))
    model = keras.Model(ids, keras.layers.Dense(vocabulary)(h))
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(params: Any, opt_state: Any, non_trainable: Any, batch: Any) -> Any:
        def objective(params: Any) -> Any:
            out, new = model.stateless_call(params, non_trainable, batch["tokens"], training=True)
            return loss_fn(batch["labels"], out), new

        (loss, non_trainable_), grads = jax.value_and_grad(objective, has_aux=True)(params)
        params, opt_state = optimizer.stateless_apply(opt_state, grads, params)
        return params, opt_state, non_trainable_, loss

    values = [
        [shape(*v.shape, dtype=v.dtype) for v in variables]
        for variables in (model.trainable_variables, optimizer.variables, model.non_trainable_variables)
    ]
    roles = {"params": 0, "opt_state": 1, "batch": 3}
    return {"fn": step, "args": (*values, tokens(16, length)), "roles": roles, "donate_argnums": (0, 1, 2)}


# --- plain JAX -----------------------------------------------------------------------------------------------------


def _mlp_params(width: int, depth: int) -> list[dict[str, Any]]:
    return [{"w": shape(width, width), "b": shape(width)} for _ in range(depth)]


def _mlp(params: Any, x: Any) -> Any:
    for layer in params:
        x = jnp.tanh(x @ layer["w"] + layer["b"][None])
    return x


def adam_loop() -> dict[str, Any]:
    """Return an epoch as one program: lax.scan of Adam steps over stacked batches, clipped by the global norm."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))

    def epoch(params: Any, opt_state: Any, batches: Any) -> Any:
        def step(carry: Any, batch: Any) -> Any:
            params, opt_state = carry
            loss, grads = jax.value_and_grad(lambda p: jnp.mean((_mlp(p, batch["x"]) - batch["y"]) ** 2))(params)
            updates, opt_state = tx.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), loss

        return jax.lax.scan(step, (params, opt_state), batches)

    width, rows = sized(2048, 1024)
    params = _mlp_params(width, 4)
    batches = {name: shape(16, rows, width) for name in ("x", "y")}
    arguments = (params, jax.eval_shape(tx.init, params), batches)
    return {"fn": epoch, "args": arguments, "roles": STEP_ROLES, "donate_argnums": (0, 1)}


def _scan_layers(policy: Any) -> dict[str, Any]:
    layers, (dim, length) = 8, sized(1024, 1024)

    def block(h: Any, layer: Any) -> Any:
        q, k, v = jnp.split(h @ layer["qkv"].astype(BF16), 3, axis=-1)
        scores = jax.nn.softmax(jnp.einsum("bsd,btd->bst", q, k).astype(F32), axis=-1).astype(BF16)
        h = h + checkpoint_name(jnp.einsum("bst,btd->bsd", scores, v), "attn_out")
        up = checkpoint_name(h @ layer["up"].astype(BF16), "mlp_in")
        return h + jax.nn.gelu(up) @ layer["down"].astype(BF16), None

    tx = optax.adamw(1e-3)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            body = jax.checkpoint(block, policy=policy, prevent_cse=False)
            h, _ = jax.lax.scan(body, batch["x"].astype(BF16), params)
            return jnp.mean((h.astype(F32) - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params = {
        "qkv": shape(layers, dim, 3 * dim),
        "up": shape(layers, dim, 4 * dim),
        "down": shape(layers, 4 * dim, dim),
    }
    batch = {name: shape(4, length, dim) for name in ("x", "y")}
    arguments = (params, jax.eval_shape(tx.init, params), batch)
    return {"fn": step, "args": arguments, "roles": STEP_ROLES, "donate_argnums": (0, 1)}


def scan_remat_everything() -> dict[str, Any]:
    """Return a lax.scan over layers, each recomputed as a whole."""
    return _scan_layers(jax.checkpoint_policies.nothing_saveable)


def scan_remat_dots() -> dict[str, Any]:
    """Return a lax.scan over layers that keep their matrix products."""
    return _scan_layers(jax.checkpoint_policies.dots_with_no_batch_dims_saveable)


def scan_remat_names() -> dict[str, Any]:
    """Return a lax.scan over layers that keep two named values."""
    return _scan_layers(jax.checkpoint_policies.save_only_these_names("attn_out", "mlp_in"))


def lora(config: Any, rows: int, length: int) -> dict[str, Any]:
    """Return a LoRA step of Lowtide's decoder over a bfloat16 base, layers recomputed."""
    import lowtide as lt
    from lowtide.models import init, loss

    base = jax.eval_shape(lambda key: init(config, key=key, dtype=BF16, compute_dtype=BF16), jax.random.key(0))
    model = lt.lora.add(base, lt.lora.Config(rank=16, targets="layers/**/*_proj"), key=jax.random.key(1))
    trainable, frozen = lt.partition(model, "**/lora_*")
    tx = optax.adamw(1e-4)

    def step(trainable: Any, opt_state: Any, frozen: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(lambda t: loss(lt.combine(t, frozen), batch, remat=True)[0])(trainable)
        updates, opt_state = tx.update(grads, opt_state, trainable)
        return optax.apply_updates(trainable, updates), opt_state, value

    roles = {"trainable": 0, "opt_state": 1, "frozen": 2, "batch": 3}
    arguments = (trainable, jax.eval_shape(tx.init, trainable), frozen, tokens(rows, length))
    return {"fn": step, "args": arguments, "roles": roles, "donate_argnums": (0, 1)}


def lora_8b() -> dict[str, Any]:
    """Return a LoRA step on Llama 8B shapes: Lowtide's decoder, bfloat16 base, 1 x 2048 tokens, layers recomputed."""
    from lowtide.models import DecoderConfig

    vocabulary, hidden, intermediate, head, length, layers = sized(128256, 4096, 14336, 128, 2048, 32)
    config = DecoderConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=32,
        num_kv_heads=8,
        head_dim=head,
        rope_theta=500000.0,
    )
    return lora(config, 1, length)


def fsdp(target: Any) -> dict[str, Any]:
    """Return a fully sharded step over eight devices: parameters and Adam state are gathered where they are used."""
    devices = target.devices()[:8]
    mesh = Mesh(np.array(devices), ("data",))
    tx = optax.adam(1e-3)
    params = [{"up": shape(1024, 4096), "down": shape(4096, 1024)} for _ in range(6)]

    def place(leaf: Any, spec: P) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    def sharded(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: place(leaf, P("data") if leaf.ndim else P()), tree)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            h = batch["x"]
            for layer in params:
                h = h + jax.nn.gelu(h @ layer["up"]) @ layer["down"]
            return jnp.mean((h - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        grads = jax.lax.with_sharding_constraint(grads, jax.tree.map(lambda g: NamedSharding(mesh, P("data")), grads))
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    batch = {name: place(shape(4096, 1024), P("data")) for name in ("x", "y")}
    arguments = (sharded(params), sharded(jax.eval_shape(tx.init, params)), batch)
    return {"fn": step, "args": arguments, "roles": STEP_ROLES, "donate_argnums": (0, 1)}


# --- the host-offloading tutorial of JAX's documentation -----------------------------------------------------------


def _tutorial(policy: Any, params_on_host: bool, target: Any) -> dict[str, Any]:
    device = target.devices()[0]
    kinds = {memory.kind for memory in device.addressable_memories()}
    kind = "pinned_host" if params_on_host and "pinned_host" in kinds else None
    host = SingleDeviceSharding(jax.devices("cpu")[0], memory_kind="pinned_host" if params_on_host else None)
    del kind

    def layer(x: Any, w: Any) -> Any:
        w1, w2 = (jax.device_put(w, jax.memory.Space.Device) if params_on_host else w for w in w)
        x = checkpoint_name(x, "x")
        return checkpoint_name(x @ w1, "y") @ w2

    def scanned(params: Any, x: Any) -> Any:
        body = jax.checkpoint(lambda x, w: (layer(x, w), None), policy=policy) if policy else None
        return jnp.sum(jax.lax.scan(body or (lambda x, w: (layer(x, w), None)), x, params)[0])

    def place(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=host) if params_on_host else leaf

    dim, wide, rows = sized(1024, 4096, 2048)
    params = jax.tree.map(place, (shape(10, dim, wide), shape(10, wide, dim)))
    return {"fn": jax.grad(scanned), "args": (params, shape(rows, dim)), "roles": {"params": 0, "batch": 1}}


def offload_base(target: Any) -> dict[str, Any]:
    """Return the program with everything on the device."""
    return _tutorial(None, False, target)


def offload_activations(target: Any) -> dict[str, Any]:
    """Return the program with the named activations of every layer offloaded to pinned host memory."""
    return _tutorial(_offload_policy(), False, target)


def offload_parameters(target: Any) -> dict[str, Any]:
    """Return the same with the parameters on the host as well."""
    return _tutorial(_offload_policy(), True, target)


def _offload_policy() -> Any:
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["x"],
        offload_src="device",
        offload_dst="pinned_host",
    )


PROGRAMS: dict[str, Callable[..., dict[str, Any]]] = {
    f.__name__: f
    for f in (
        equinox_mlp,
        equinox_transformer,
        nnx_transformer,
        keras_model,
        adam_loop,
        scan_remat_everything,
        scan_remat_dots,
        scan_remat_names,
        lora_8b,
        fsdp,
        offload_base,
        offload_activations,
        offload_parameters,
    )
}
