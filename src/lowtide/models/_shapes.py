"""Shapes of a decoder's parameters, and the layout of its layers: one stack, or one for each position in a group."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core import Tree
from ._config import NO_WINDOW, DecoderConfig


def parameter_shapes(config: DecoderConfig) -> dict[str, Any]:
    """Return the shapes of all parameters as a tree ``{"outer": ..., "layers": ...}``, in float32."""
    d = config.hidden_size
    outer: dict[str, Any] = {"embed": {"weight": _array(config.vocab_size, d)}, "norm": {"weight": _array(d)}}
    if not config.tie_embeddings:
        outer["lm_head"] = {"weight": _array(config.vocab_size, d)}
    if config.leading:
        unstack = functools.partial(jax.tree.map, lambda leaf: _array(*leaf.shape[1:]))
        outer["layers"] = {str(index): unstack(_layer_shapes(c)) for index, c in enumerate(config.leading)}
    return {"outer": outer, "layers": map_blocks(_layer_shapes, config)}


def _array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _layer_shapes(c: DecoderConfig) -> dict[str, Any]:
    n, d = c.num_layers, c.hidden_size

    def dense(out: int, inner: int, bias: bool = False) -> dict[str, jax.ShapeDtypeStruct]:
        return {"weight": _array(n, out, inner), **({"bias": _array(n, out)} if bias else {})}

    norms = ["attn_norm", "mlp_norm"] * c.pre_norm + ["attn_post_norm", "mlp_post_norm"] * c.post_norm
    mixer = {"delta": _delta_shapes(c, dense)} if c.is_delta_net else {"attn": _attention_shapes(c, dense)}
    if c.experts is not None and c.experts.beside_mlp:
        norms += ["mlp_inner_norm", "experts_norm", "experts_post_norm"]
    scale = {"layer_scalar": {"weight": _array(n, 1)}} if c.layer_scale else {}
    return {**mixer, "mlp": _mlp_shapes(c, dense), **{name: {"weight": _array(n, d)} for name in norms}, **scale}


def _delta_shapes(c: DecoderConfig, dense: Callable[..., Any]) -> dict[str, Any]:
    net, n, d = c.delta_net, c.num_layers, c.hidden_size
    assert net is not None
    heads = net.num_value_heads
    sizes = {"qkv_proj": net.qkv_width, "z_proj": net.value_width, "beta": heads, "step": heads}
    if net.fused:
        sizes = {"qkvz_proj": net.qkv_width + net.value_width, "beta_step": 2 * heads}
    return {
        **{name: dense(size, d) for name, size in sizes.items()},
        "conv": {"weight": _array(n, net.qkv_width, 1, net.conv_size)},
        "log_decay": {"weight": _array(n, heads)},
        "step_bias": {"weight": _array(n, heads)},
        "norm": {"weight": _array(n, net.value_dim)},
        "out_proj": dense(d, net.value_width),
    }


def _attention_shapes(c: DecoderConfig, dense: Callable[..., Any]) -> dict[str, Any]:
    n, d, q, kv = c.num_layers, c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    out_bias = c.attention_bias if c.attention_out_bias is None else c.attention_out_bias
    sizes = (
        {"qkv_proj": q + 2 * kv}
        if c.fused_projections
        else {**{"q_proj": 2 * q if c.attention_gate else q, "k_proj": kv, "v_proj": kv}}
    )
    attn: dict[str, Any] = {name: dense(size, d, c.attention_bias) for name, size in sizes.items()}
    attn["o_proj"] = dense(d, q, out_bias)
    if c.keys_as_values:
        del attn["v_proj"]
    if c.qk_norm != "none":
        widths = (c.head_dim, c.head_dim) if c.qk_norm == "head" else (q, kv)
        attn |= {f"{name}_norm": {"weight": _array(n, width)} for name, width in zip("qk", widths, strict=True)}
    if c.attention_sinks:
        attn["sinks"] = {"weight": _array(n, c.num_heads)}
    return attn


def _mlp_shapes(c: DecoderConfig, dense: Callable[..., Any]) -> dict[str, Any]:
    n, d = c.num_layers, c.hidden_size
    if c.experts is not None and c.experts.beside_mlp:
        e, f = c.experts.num_experts, c.experts.intermediate_size
        router = {**dense(e, d), "scale": _array(n, d), "expert_scale": _array(n, e)}
        experts = {"gate_up": {"weight": _array(n, e, 2 * f, d)}, "down": {"weight": _array(n, e, d, f)}}
        return {**_mlp_shapes(dataclasses.replace(c, experts=None), dense), "router": router, "experts": experts}
    if c.experts is None:
        f = c.intermediate_size
        widths = {"gate_up_proj": 2 * f} if c.fused_projections else {"gate_proj": f, "up_proj": f}
        projections = {name: dense(size, d, c.mlp_bias) for name, size in widths.items()}
        return {**projections, "down_proj": dense(d, f, c.mlp_bias)}
    e, f = c.experts.num_experts, c.experts.intermediate_size
    router = dense(e, d, c.experts.clamped)
    if not c.experts.clamped:
        shapes = {"gate": (f, d), "up": (f, d), "down": (d, f)}
        mlp = {"router": router, "experts": {name: {"weight": _array(n, e, *s)} for name, s in shapes.items()}}
        if shared := c.experts.shared_size:
            sizes = {"gate_proj": (shared, d), "up_proj": (shared, d), "down_proj": (d, shared)}
            mlp["shared"] = {name: dense(*size) for name, size in sizes.items()}
            mlp["shared"] |= {"gate": dense(1, d)} if c.experts.shared_gate else {}
        mlp["router"] |= {"correction": _array(n, e)} if c.experts.sigmoid else {}
        return mlp
    sizes = {"gate_up": (d, 2 * f), "down": (f, d)}
    projections = {name: {"weight": _array(n, e, *s), "bias": _array(n, e, s[1])} for name, s in sizes.items()}
    return {"router": router, "experts": projections}


LAYER_SETTINGS = ("window", "rotates")
"""Integer leaves of ``attn`` with settings that differ between the layers of a stack."""


def with_settings(layers: Tree, config: DecoderConfig) -> Tree:
    """Add the leaves `LAYER_SETTINGS` that the layers need; they are not parameters."""
    settings: dict[str, Any] = {}
    config = config.pattern[0] if len(config.pattern) == 1 else config
    if len(config.pattern) == 1 and isinstance(config.windows, tuple):  # each stack of a pattern has one window
        settings["window"] = [NO_WINDOW if window is None else window for window in config.windows]
    if config.rotary_layers is not None and not all(config.rotary_layers):
        settings["rotates"] = config.rotary_layers
    if not settings:
        return layers
    arrays = {name: jnp.asarray(np.asarray(values, np.int32)) for name, values in settings.items()}
    return {**layers, "attn": {**layers["attn"], **arrays}}


def without_settings(layers: Tree) -> Tree:
    """Remove the leaves `LAYER_SETTINGS`."""
    if "attn" not in layers:
        return layers
    return {**layers, "attn": {name: leaf for name, leaf in layers["attn"].items() if name not in LAYER_SETTINGS}}


def block_name(index: int) -> str:
    """Return the name of a position in a group of layers, in paths such as ``layers/block0/attn``."""
    return f"block{index}"


def map_blocks(fn: Callable[..., Any], config: DecoderConfig, *layers: Tree) -> Any:
    """Return ``fn(config, *layers)`` for the layers at each position of a group, as a tree with the model's layout."""
    if len(config.pattern) == 1:
        return fn(config.pattern[0], *layers)
    return {
        block_name(index): fn(block_config, *(tree[block_name(index)] for tree in layers))
        for index, block_config in enumerate(config.pattern)
    }


def split_block(path: str, config: DecoderConfig) -> tuple[str, int, int]:
    """Return a path without the position in the group, and the stride and first index of the stack's layers.

    The stride of a leading layer, which is not stacked, is 0.
    """
    first, _, rest = path.partition("/")
    if path.startswith("outer/layers/"):
        index, _, module = rest.removeprefix("layers/").partition("/")
        return f"layers/{module}", 0, int(index)
    if len(config.pattern) == 1 or first != "layers":
        return path, 1, config.num_dense_layers if first == "layers" else 0
    name, _, module = rest.partition("/")
    return f"layers/{module}", len(config.pattern), config.num_dense_layers + int(name.removeprefix("block"))
