"""Programs whose plans the benchmarks check: three families of decoders, a mixture, an Equinox and an NNX stack."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

import lowtide as lt
from lowtide import models

ROWS, LENGTH = 8, 256
TPU_SCALE = 16
"""Factor of the rows for TPUs: values of six layers then exceed the 128 MiB of VMEM, where XLA keeps smaller ones."""
LORA, ALL = "**/lora_*", "**"


@dataclasses.dataclass(frozen=True)
class Program:
    """A step to plan."""

    model: Any
    """Shapes of the model."""
    loss: Callable[..., Any]
    batch: Any
    wrt: str
    tx: Any = dataclasses.field(default_factory=lambda: optax.adamw(1e-3))


def _decoder(wrt: str, scale: int = 1, **changes: Any) -> Program:
    sizes: dict[str, Any] = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 1024, "num_layers": 6}
    config = models.DecoderConfig(**sizes, num_heads=4, num_kv_heads=2, head_dim=64, tie_embeddings=True)
    config = dataclasses.replace(config, **changes)

    def make(key: Any) -> Any:
        model = models.init(config, key=key)
        return lt.lora.add(model, lt.lora.Config(rank=8, targets="layers/**/*_proj/weight"), key=key)

    build = make if wrt == LORA else lambda key: models.init(config, key=key)
    batch = {name: jax.ShapeDtypeStruct((scale * ROWS, LENGTH), jnp.int32) for name in ("tokens", "labels")}
    loss = lambda model, batch: model.stack.apply(model.outer, model.layers, batch)  # noqa: E731
    return Program(jax.eval_shape(build, jax.random.key(0)), loss, batch, wrt)


def decoder(wrt: str, scale: int = 1) -> Program:
    return _decoder(wrt, scale)


def gated(wrt: str, scale: int = 1) -> Program:
    """A block of five products, of which each costs and saves another number of bytes and FLOPs."""
    sizes = {"a": (256, 1024), "c": (1024, 512), "d": (512, 1024), "e": (1024, 768), "f": (768, 256)}

    def block(layer: Any, h: Any, _: Any) -> Any:
        product = lambda x, name: x @ layer[name] + x @ layer[f"{name}_lora_a"] @ layer[f"{name}_lora_b"]  # noqa: E731
        a = checkpoint_name(product(jnp.tanh(h), "a"), "a")
        c = checkpoint_name(product(jax.nn.silu(a), "c"), "c")
        d = checkpoint_name(product(jax.nn.gelu(c), "d"), "d")
        e = checkpoint_name(product(jnp.sin(d) * jax.nn.silu(a), "e"), "e")
        return h + jnp.tanh(checkpoint_name(product(jnp.cos(e), "f"), "f"))

    def shape(*axes: int) -> Any:
        return jax.ShapeDtypeStruct(axes, jnp.float32)

    layers = {name: shape(6, *size) for name, size in sizes.items()}
    layers |= {f"{name}_lora_a": shape(6, rows, 8) for name, (rows, _) in sizes.items()}
    layers |= {f"{name}_lora_b": shape(6, 8, columns) for name, (_, columns) in sizes.items()}
    stack = lt.LayerStack(
        first=lambda outer, batch: batch["x"] @ outer["in"],
        block=block,
        last=lambda outer, h, batch: (jnp.mean((h @ outer["out"] - batch["x"]) ** 2), {}),
    )
    model = {"outer": {"in": shape(64, 256), "out": shape(256, 64)}, "layers": layers}
    loss = lambda model, batch: stack.apply(model["outer"], model["layers"], batch)  # noqa: E731
    return Program(model, loss, {"x": shape(scale * 2048, 64)}, "layers/*_lora_*" if wrt == LORA else wrt)


def one_billion() -> Program:
    """LoRA on the shapes of Llama 3.2 1B, 8 x 2048 tokens in bfloat16."""
    sizes: dict[str, Any] = {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_layers": 16}
    heads: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 64, "rope_theta": 500000.0}
    config = models.DecoderConfig(**sizes, **heads, tie_embeddings=True)

    def make(key: Any) -> Any:
        model = models.init(config, key=key, dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16)
        return lt.lora.add(model, lt.lora.Config(rank=16, targets="layers/**/*_proj/weight"), key=key)

    batch = {name: jax.ShapeDtypeStruct((8, 2048), jnp.int32) for name in ("tokens", "labels")}
    loss = lambda model, batch: model.stack.apply(model.outer, model.layers, batch)  # noqa: E731
    return Program(jax.eval_shape(make, jax.random.key(0)), loss, batch, LORA, optax.adamw(1e-4))


def equinox_stack() -> Program:
    import equinox as eqx

    class Block(eqx.Module):
        norm: eqx.nn.LayerNorm
        mlp: eqx.nn.MLP

        def __call__(self, x: Any) -> Any:
            return x + self.mlp(self.norm(x))

    keys = jax.random.split(jax.random.key(0), 6)
    make = lambda key: Block(eqx.nn.LayerNorm(256), eqx.nn.MLP(256, 256, 1024, 2, key=key))  # noqa: E731
    layers, static = eqx.partition(eqx.filter_vmap(make)(keys), eqx.is_array)
    return _rows(layers, lambda layer, h: jax.vmap(eqx.combine(layer, static))(h))


def nnx_stack() -> Program:
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.norm = nnx.LayerNorm(256, rngs=rngs)
            self.up, self.down = nnx.Linear(256, 1024, rngs=rngs), nnx.Linear(1024, 256, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return x + self.down(nnx.gelu(self.up(self.norm(x))))

    make = nnx.vmap(lambda key: Block(nnx.Rngs(key)), in_axes=0, out_axes=0)
    graph, state = nnx.split(make(jax.random.split(jax.random.key(0), 6)))
    return _rows(nnx.to_pure_dict(state), lambda layer, h: nnx.merge(graph, nnx.State(layer))(h))


def _rows(layers: Any, block: Callable[..., Any]) -> Program:
    stack = lt.LayerStack(
        first=lambda outer, batch: batch["x"] @ outer["in"],
        block=lambda layer, h, batch: block(layer, h),
        last=lambda outer, h, batch: (jnp.mean((h - batch["x"] @ outer["in"]) ** 2), {}),
    )
    model = {"outer": {"in": jax.ShapeDtypeStruct((64, 256), jnp.float32)}, "layers": layers}
    loss = lambda model, batch: stack.apply(model["outer"], model["layers"], batch)  # noqa: E731
    return Program(model, loss, {"x": jax.ShapeDtypeStruct((2048, 64), jnp.float32)}, ALL)


def _mixture() -> Program:
    experts = models.Experts(num_experts=4, num_experts_per_token=2, intermediate_size=512)
    return _decoder(LORA, experts=experts)


MODELS: dict[str, Callable[[], Program]] = {
    "llama, LoRA": lambda: _decoder(LORA),
    "qwen 3, all weights": lambda: _decoder(ALL, family="qwen3", qk_norm="head"),
    "gemma 2, LoRA": lambda: _decoder(
        LORA,
        attention_soft_cap=50.0,
        final_soft_cap=30.0,
        sliding_window=128,
        sliding_layers=(True, False) * 3,
        post_norm=True,
        norm_offset=1.0,
        scale_embedding=True,
        activation="gelu_tanh",
    ),
    "mixture of experts, LoRA": _mixture,
    "Equinox": equinox_stack,
    "NNX": nnx_stack,
}
