"""One layer of a decoder: attention or a delta net, then an MLP or a mixture of experts.

Shapes: B batch, T sequence, D model, N query heads, K key/value heads, H head, W queries of all heads, X keys of all
heads, F MLP, E experts, S cached tokens. Sources: "Llama 2" (arXiv:2307.09288), "Gemma 2" (arXiv:2408.00118; soft caps,
norms after attention and MLP), "Qwen3" (arXiv:2505.09388; norms of queries and keys), "Gated Delta Networks"
(arXiv:2412.06464).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from ..core import INTERNAL_PREFIX, LAYER_NAMES, Tree, is_recomputed, linear
from ..ops import (
    AttentionMask,
    Documents,
    Implementation,
    attention,
    delta_span,
    scan_spans,
    short_convolution,
    tiled_map,
)
from ._config import NO_WINDOW, DecoderConfig
from ._experts import mixture
from ._rope import document_lengths, rotary, rotate

_SAVED_PRODUCTS = jax.checkpoint_policies.save_only_these_names(
    *(f"{INTERNAL_PREFIX}{name}" for name in "q_proj k_proj lora_low lora_scaled".split()), *LAYER_NAMES
)
"""Policy for layers that are not recomputed: it saves only results of matrix products."""

_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


def _dense(module: Tree, x: Array) -> Array:
    return linear(x, module["weight"], module.get("bias"))


def rms_norm(x: Array, weight_D: Array, config: DecoderConfig) -> Array:
    """Apply RMSNorm over the last axis: normalise in float32, return the dtype of `x`."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + config.rms_norm_eps)
    weight = jnp.expand_dims(weight_D, tuple(range(x.ndim - 1)))
    if config.norm_offset:  # such weights are near zero; rounding `1 + weight` to half precision would lose digits
        return (x32 * (config.norm_offset + weight.astype(jnp.float32))).astype(x.dtype)
    return x32.astype(x.dtype) * weight.astype(x.dtype)


def _unit_rms(x: Array, config: DecoderConfig) -> Array:
    """Apply RMSNorm without weights."""
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + config.rms_norm_eps)).astype(x.dtype)


def _norm(layer: Tree, name: str, x_BTD: Array, config: DecoderConfig) -> Array:
    """Apply the norm `name` of a layer; return `x_BTD` unchanged if the family has no such norm."""
    has_norm = config.post_norm if name.endswith("_post_norm") else config.pre_norm
    return rms_norm(x_BTD, layer[name]["weight"], config) if has_norm else x_BTD


_NOT_PROJECTED = frozenset({"sinks", "conv", "log_decay", "step_bias", "norm"})
"""Parameters of attention and of a delta net that no projection reads."""


class LayerCache:
    """Values of one layer that generation keeps between calls. This class keeps nothing, as in training."""

    def append(self, keys: Array, values: Array) -> tuple[Array, Array]:
        """Add keys and values [B, T, K, H]; return the keys and values to attend to, [B, S, K, H]."""
        return keys, values

    def state(self, empty: tuple[Array, ...]) -> tuple[Array, ...]:
        """Return the state before the tokens; `empty` is the state before the first token of a text."""
        return empty

    def replace(self, state: tuple[Array, ...]) -> None:
        """Keep the state after the tokens."""


def layer_forward(
    layer: Tree,
    h_BTD: Array,
    positions_BT: Array,
    mask: AttentionMask,
    config: DecoderConfig,
    cache: LayerCache | None = None,
    implementation: Implementation | None = None,
    tile_tokens: int | None = None,
) -> tuple[Array, tuple[Array, Array] | None]:
    """Apply one layer; return the residual stream, and the router's probabilities and choices (None without experts).

    `positions_BT` are positions in documents and may be [1, T].
    """
    cache = LayerCache() if cache is None else cache
    mixer, last = ("delta", "out_proj") if config.is_delta_net else ("attn", "o_proj")
    # The part between the projections is not tiled. Each of the two tiled parts gets only the parameters that it reads.
    project_params = {name: part for name, part in layer.items() if name in (mixer, "attn_norm")}
    finish_params = {name: part for name, part in layer.items() if name not in (mixer, "attn_norm")}
    project_params[mixer] = {name: part for name, part in layer[mixer].items() if name not in _NOT_PROJECTED}
    finish_params["last"] = project_params[mixer].pop(last)
    tiled = functools.partial(_tiled, config, tile_tokens)
    mix = _delta_net if config.is_delta_net else _attention
    out_BTW, gate_BTW = mix(config, layer, project_params, h_BTD, positions_BT, mask, cache, implementation, tiled)
    # The widest intermediate array per token; with experts, the hidden layers of all its chosen experts.
    experts, chosen, widest = config.experts, 1, config.intermediate_size
    if experts is not None:
        chosen, widest = experts.num_experts_per_token, experts.num_experts_per_token * experts.intermediate_size
    share = 1.0
    if experts is not None and experts.beside_mlp:
        widest += config.intermediate_size
    elif experts is not None:
        share = chosen / experts.num_experts
    return tiled(_finish, finish_params, (h_BTD, out_BTW, gate_BTW), width=widest, share=share)


def _tiled(
    config: DecoderConfig, tile_tokens: int | None, fn: Callable[..., Any], params: Tree, tokens: Any, **sizes: Any
) -> Any:
    """Apply ``fn(config, params, tokens)`` in tiles, if the backward pass recomputes the layer."""
    fn = functools.partial(fn, config)
    if is_recomputed():
        # In tiles, norms, rotations and intermediate activations never exist for all tokens at once.
        return tiled_map(fn, params, tokens, size=tile_tokens, **sizes)
    if config.experts is None or fn.func is not _finish:
        # Save only results of matrix products; norms, gates and rotations are recomputed. This saves memory traffic.
        fn = jax.checkpoint(fn, policy=_SAVED_PRODUCTS, prevent_cse=False)
    return fn(params, tokens)


def _attention(
    config: DecoderConfig,
    layer: Tree,
    params: Tree,
    h_BTD: Array,
    positions_BT: Array,
    mask: AttentionMask,
    cache: LayerCache,
    implementation: Implementation | None,
    tiled: Callable[..., Any],
) -> tuple[Array, Array | None]:
    """Return the output of attention before its gate, [B, T, N H], and the gate's logits, or None."""
    attn = layer["attn"]
    window = attn["window"] if isinstance(config.windows, tuple) else config.windows
    mask = dataclasses.replace(mask, window=window, windows=config.window_sizes)
    tokens = (h_BTD, positions_BT, document_lengths(config, positions_BT, mask.segments and mask.segments[0]))
    names = ("attn_q", "attn_k", "attn_v", "attn_gate")
    projected = tiled(_project, params, tokens, width=config.num_heads * config.head_dim)
    q_BTW, k_BTX, v_BTX, *gate = map(checkpoint_name, projected, names[: len(projected)])
    q_BTNH, k_BTKH, v_BTKH = (x.reshape(*x.shape[:2], -1, config.head_dim) for x in (q_BTW, k_BTX, v_BTX))
    keys, values = cache.append(k_BTKH, v_BTKH)
    out_BTNH = attention(
        q_BTNH,
        keys,
        values,
        mask=mask,
        scale=config.attention_scale,
        soft_cap=config.attention_soft_cap,
        sinks=attn["sinks"]["weight"] if config.attention_sinks else None,
        implementation=implementation,
    )
    return out_BTNH.reshape(q_BTW.shape), gate[0] if gate else None


def _project(config: DecoderConfig, layer: Tree, tokens: tuple[Array, Array, Array | None]) -> tuple[Array, ...]:
    """Return rotated queries [B, T, W], rotated keys [B, T, X], values [B, T, X] and, if any, the gate [B, T, W]."""
    h_BTD, positions_BT, lengths_BT = tokens
    attn, gate = layer["attn"], ()
    x_BTD = _norm(layer, "attn_norm", h_BTD, config)
    if config.fused_projections:
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        q_BTW, k_BTX, v_BTX = jnp.split(_dense(attn["qkv_proj"], x_BTD), (q, q + kv), axis=-1)
    else:
        q_BTW, k_BTX = (_dense(attn[f"{name}_proj"], x_BTD) for name in "qk")
        v_BTX = k_BTX if config.keys_as_values else _dense(attn["v_proj"], x_BTD)
    if config.value_norm:
        v_BTX = _unit_rms(v_BTX.reshape(*v_BTX.shape[:2], -1, config.head_dim), config).reshape(v_BTX.shape)
    if config.attention_gate:  # the query and the gate of a head are side by side
        both = q_BTW.reshape(*q_BTW.shape[:2], config.num_heads, 2, config.head_dim)
        q_BTW, gate_BTW = (both[..., index, :].reshape(*q_BTW.shape[:2], -1) for index in range(2))
        gate = (gate_BTW,)
    if config.qk_norm != "none":
        q_BTW = checkpoint_name(q_BTW, f"{INTERNAL_PREFIX}q_proj")
        k_BTX = checkpoint_name(k_BTX, f"{INTERNAL_PREFIX}k_proj")
    if config.qk_norm == "width":
        q_BTW, k_BTX = (rms_norm(x, attn[f"{n}_norm"]["weight"], config) for x, n in ((q_BTW, "q"), (k_BTX, "k")))
    q_BTNH, k_BTKH = (x.reshape(*x.shape[:2], -1, config.head_dim) for x in (q_BTW, k_BTX))
    if config.qk_norm == "head":
        q_BTNH, k_BTKH = (rms_norm(x, attn[f"{n}_norm"]["weight"], config) for x, n in ((q_BTNH, "q"), (k_BTKH, "k")))
    is_sliding = attn["window"] < NO_WINDOW if "window" in attn else config.windows is not None
    cos, sin = rotary(config, positions_BT, is_sliding, lengths_BT)
    if "rotates" in attn:
        cos, sin = jnp.where(attn["rotates"] > 0, cos, 1.0), jnp.where(attn["rotates"] > 0, sin, 0.0)
    if config.rope_scaling is not None and (beta := config.rope_scaling.llama_4_scaling_beta):
        periods = jnp.floor(positions_BT / config.rope_scaling.original_max_position_embeddings)
        q_BTNH = q_BTNH * (1 + beta * jnp.log1p(periods)).astype(q_BTNH.dtype)[..., None, None]
    return rotate(q_BTNH, cos, sin).reshape(q_BTW.shape), rotate(k_BTKH, cos, sin).reshape(k_BTX.shape), v_BTX, *gate


def _delta_net(
    config: DecoderConfig,
    layer: Tree,
    params: Tree,
    h_BTD: Array,
    positions_BT: Array,
    mask: AttentionMask,
    cache: LayerCache,
    implementation: Implementation | None,
    tiled: Callable[..., Any],
) -> tuple[Array, None]:
    """Return the gated output of a delta net, [B, T, value_width]."""
    del positions_BT, implementation  # a delta net knows the order of the tokens from its convolution and its state
    net, delta = config.delta_net, layer["delta"]
    assert net is not None
    qkv, gate, beta, step = tiled(_project_delta, params, h_BTD, width=net.qkv_width + net.value_width)
    qkv, gate = checkpoint_name(qkv, "delta_qkv"), checkpoint_name(gate, "attn_gate")
    tokens = {"qkv": qkv, "gate": gate, "beta": beta, "step": step}
    rates_H = jnp.exp(delta["log_decay"]["weight"].astype(jnp.float32))[None, None]
    step_bias_H = delta["step_bias"]["weight"].astype(jnp.float32)[None, None]
    key_width = net.num_key_heads * net.key_dim

    def mix(states: Any, tokens: Tree, documents: Documents | None) -> tuple[Any, Array]:
        inputs, state = states
        x_BTW, inputs = short_convolution(tokens["qkv"], delta["conv"]["weight"][:, 0], inputs, documents)
        q, k, v = jnp.split(jax.nn.silu(x_BTW), (key_width, 2 * key_width), axis=-1)
        q, k = (x.reshape(*x.shape[:2], net.num_key_heads, net.key_dim) for x in (q, k))
        out, state = delta_span(
            q,
            k,
            v.reshape(*v.shape[:2], net.num_value_heads, net.value_dim),
            -rates_H * jax.nn.softplus(tokens["step"].astype(jnp.float32) + step_bias_H),
            jax.nn.sigmoid(tokens["beta"]),
            documents,
            state,
            normalize=True,
        )
        gate = tokens["gate"].reshape(out.shape).astype(jnp.float32)
        out = rms_norm(out, delta["norm"]["weight"], plain) * jax.nn.silu(gate)
        return (inputs, state), out.reshape(*out.shape[:2], -1).astype(h_BTD.dtype)

    plain = dataclasses.replace(config, norm_offset=0.0)
    rows = h_BTD.shape[0]
    empty = (
        jnp.zeros((rows, net.conv_size - 1, net.qkv_width), h_BTD.dtype),
        jnp.zeros((rows, net.num_value_heads, net.key_dim, net.value_dim), jnp.float32),
    )
    state, out = scan_spans(mix, cache.state(empty), tokens, mask.segments and mask.segments[0])
    cache.replace(state)
    return checkpoint_name(out, "attn_out"), None


def _project_delta(config: DecoderConfig, layer: Tree, h_BTD: Array) -> tuple[Array, ...]:
    """Return queries, keys and values side by side, the gate of the output, and the logits of beta and of the decay."""
    net, delta = config.delta_net, layer["delta"]
    assert net is not None
    x_BTD = _norm(layer, "attn_norm", h_BTD, config)
    if not net.fused:
        qkv, z, b, a = (_dense(delta[name], x_BTD) for name in ("qkv_proj", "z_proj", "beta", "step"))
        return qkv, z, b, a
    per_key = net.num_value_heads // net.num_key_heads
    shape = (*x_BTD.shape[:2], net.num_key_heads, -1)
    sizes = np.cumsum([net.key_dim, net.key_dim, per_key * net.value_dim])
    q, k, v, z = jnp.split(_dense(delta["qkvz_proj"], x_BTD).reshape(shape), sizes, axis=-1)
    b, a = jnp.split(_dense(delta["beta_step"], x_BTD).reshape(shape), 2, axis=-1)
    q, k, v, z, b, a = (x.reshape(*x_BTD.shape[:2], -1) for x in (q, k, v, z, b, a))
    return jnp.concatenate([q, k, v], axis=-1), z, b, a


def _finish(
    config: DecoderConfig, layer: Tree, tokens: tuple[Array, Array, Array | None]
) -> tuple[Array, tuple[Array, Array] | None]:
    """Add the mixer's output to the residual stream, then the output of the MLP or the mixture of experts."""
    h_BTD, out_BTW, gate_BTW = tokens
    if gate_BTW is not None:
        out_BTW = out_BTW * jax.nn.sigmoid(gate_BTW)
    added_BTD = checkpoint_name(_dense(layer["last"], out_BTW), "attn_proj")
    h_BTD = h_BTD + scaled(_norm(layer, "attn_post_norm", added_BTD, config), config.residual_multiplier)
    mlp = _mlp_and_experts if config.experts is not None and config.experts.beside_mlp else _mlp
    out_BTD, routing = mlp(layer, h_BTD, config)
    h_BTD = h_BTD + scaled(_norm(layer, "mlp_post_norm", out_BTD, config), config.residual_multiplier)
    if config.layer_scale:
        h_BTD = h_BTD * jax.lax.stop_gradient(layer["layer_scalar"]["weight"])[None, None].astype(h_BTD.dtype)
    return h_BTD, routing


def scaled(x: Array, factor: float) -> Array:
    """Multiply by a factor that is not rounded to the dtype of `x`, as PyTorch does."""
    return x if factor == 1 else (x.astype(jnp.float32) * factor).astype(x.dtype)


def _mlp_and_experts(layer: Tree, h_BTD: Array, config: DecoderConfig) -> tuple[Array, tuple[Array, Array]]:
    """Return the sum of the MLP and of the experts, each with its own norms (Gemma 4)."""
    experts, mlp, activation = config.experts, layer["mlp"], _ACTIVATIONS[config.activation]
    assert experts is not None
    mlp_BTD = _gated_mlp(mlp, _norm(layer, "mlp_norm", h_BTD, config), activation)
    routed = {name: mlp[name] for name in ("router", "experts")}
    router_BTD = _unit_rms(h_BTD, config) * mlp["router"]["scale"].astype(h_BTD.dtype)[None, None]
    router_BTD = scaled(router_BTD, config.hidden_size**-0.5)
    inputs = rms_norm(h_BTD, layer["experts_norm"]["weight"], config)
    out_BTD, *routing = mixture(routed, inputs, experts, activation, router_BTD)
    mlp_BTD = rms_norm(mlp_BTD, layer["mlp_inner_norm"]["weight"], config)
    return mlp_BTD + rms_norm(out_BTD, layer["experts_post_norm"]["weight"], config), (routing[0], routing[1])


def _mlp(layer: Tree, h_BTD: Array, config: DecoderConfig) -> tuple[Array, tuple[Array, Array] | None]:
    mlp, x_BTD = layer["mlp"], _norm(layer, "mlp_norm", h_BTD, config)
    activation = _ACTIVATIONS[config.activation]
    if config.experts is not None:
        routed = {name: part for name, part in mlp.items() if name != "shared"}
        out_BTD, probs_BTE, counts_BTE = mixture(routed, x_BTD, config.experts, activation)
        if config.experts.shared_size:
            shared = mlp["shared"]
            shared_BTD = _gated_mlp(shared, x_BTD, activation)
            if config.experts.shared_gate:
                shared_BTD = shared_BTD * jax.nn.sigmoid(_dense(shared["gate"], x_BTD))
            out_BTD = out_BTD + shared_BTD
        return out_BTD, (probs_BTE, counts_BTE)
    if config.fused_projections:
        both_BTF = checkpoint_name(_dense(mlp["gate_up_proj"], x_BTD), "mlp_gate_up")
        gate_BTF, up_BTF = jnp.split(both_BTF, 2, axis=-1)
        out_BTD = _dense(mlp["down_proj"], activation(gate_BTF) * up_BTF)
    else:
        out_BTD = _gated_mlp(mlp, x_BTD, activation)
    return checkpoint_name(out_BTD, "mlp_out") if config.post_norm else out_BTD, None


def _gated_mlp(mlp: Tree, x_BTD: Array, activation: Callable[[Array], Array]) -> Array:
    gate_BTF = checkpoint_name(_dense(mlp["gate_proj"], x_BTD), "mlp_gate")
    up_BTF = checkpoint_name(_dense(mlp["up_proj"], x_BTD), "mlp_up")
    return _dense(mlp["down_proj"], activation(gate_BTF) * up_BTF)
