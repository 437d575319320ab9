"""The reference decoder: Llama as pure functions over a pytree with stacked layers.

RMSNorm, rotary positions with scaling, grouped-query attention, SwiGLU, tied or untied head. Every matrix is stored
as [out, in], the orientation of Hugging Face checkpoints, and multiplied through `lowtide.core.linear`, so an adapter
or a quantised weight can stand in its place. Attention is `jax.nn.dot_product_attention`: cuDNN's fused kernel on a
GPU in half precision, XLA elsewhere (which holds [B, N, T, T] scores for one layer; beyond 2048 tokens, of 1024
queries at a time).

Shapes: B batch, T sequence, D model, N query heads, K key/value heads, H head, F MLP, V vocabulary, L layers.

Source: Touvron et al., "Llama 2" (arXiv:2307.09288); the frequency rule of Llama 3.1 as in its reference code.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..core import LayerStack, LinearWeight, StructureError, Tree, linear
from ..core._compat import has_cudnn
from ..losses import chunked_cross_entropy
from ._config import LlamaConfig

# XLA's attention holds the scores of all queries that it is given: longer sequences take them in blocks.
_MAX_QUERIES = 2048
_QUERY_BLOCK = 1024

EXTERNAL = {
    "outer/embed": "model.embed_tokens",
    "outer/norm": "model.norm",
    "outer/lm_head": "lm_head",
    "layers/attn_norm": "model.layers.{layer}.input_layernorm",
    "layers/mlp_norm": "model.layers.{layer}.post_attention_layernorm",
    **{f"layers/attn/{p}_proj": f"model.layers.{{layer}}.self_attn.{p}_proj" for p in "qkvo"},
    **{f"layers/mlp/{p}_proj": f"model.layers.{{layer}}.mlp.{p}_proj" for p in ("gate", "up", "down")},
}


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["outer", "layers"],
    meta_fields=["config", "compute_dtype"],
)
@dataclasses.dataclass(frozen=True)
class Llama:
    """A Llama decoder: two parameter trees and its static description; itself a pytree.

    Parameters keep the dtype they are stored in; `compute_dtype` is chosen separately.
    """

    outer: Tree
    """``embed/weight`` [V, D], ``norm/weight`` [D] and, unless tied, ``lm_head/weight`` [V, D]."""
    layers: Tree
    """The blocks' parameters, every leaf with a leading axis of length L."""
    config: LlamaConfig
    """Sizes and constants (static)."""
    compute_dtype: str = "float32"
    """Dtype of activations and of products (static); norms, rotary angles, softmax and loss use float32."""

    @property
    def stack(self) -> LayerStack:
        """The decoder as ``first``, ``block``, ``last``; a batch has ``tokens`` and ``labels``, both [B, T]."""
        return _stack(self.config, self.compute_dtype)

    def external_name(self, path: str) -> str:
        """Return the Hugging Face module of a tree path, with the text ``{layer}`` for the index of a stacked layer.

        Args:
            path: a module's path, such as ``layers/attn/q_proj``.

        Returns:
            For instance ``model.layers.{layer}.self_attn.q_proj``.
        """
        return EXTERNAL[path]


def loss(
    model: Llama, batch: Tree, *, remat: bool | Callable[..., bool] = False
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Mean next-token cross-entropy of a batch.

    Args:
        model: the decoder, with or without adapters.
        batch: ``tokens`` and ``labels``, integers of shape [B, T]; the label -100 is ignored.
        remat: as in `LayerStack.hidden`.

    Returns:
        The loss in nats per token, and no metrics.

    Memory:
        Never logits of all tokens: see `lowtide.losses.chunked_cross_entropy`.
    """
    return model.stack.apply(model.outer, model.layers, batch, remat=remat)


def logits(model: Llama, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
    """Next-token logits at every position, in float32.

    Args:
        model: the decoder, with or without adapters.
        tokens: token ids, shape [B, T].

    Returns:
        Shape [B, T, V].

    Memory:
        ``B * T * V * 4`` bytes; training uses `loss`, which never holds them all.
    """
    return head_logits(model, model.stack.hidden(model.outer, model.layers, {"tokens": tokens}))


def head_logits(model: Llama, h_BTD: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
    """Logits of activations that leave the last block, in float32; shapes [B, T, D] to [B, T, V]."""
    h_BTD = _rms_norm(h_BTD, model.outer["norm"]["weight"], model.config.rms_norm_eps)
    return linear(h_BTD, _head(model.outer)).astype(jnp.float32)


def init(config: LlamaConfig, *, key: Array, dtype: Any = jnp.float32, compute_dtype: Any = jnp.float32) -> Llama:
    """Make a decoder with random weights: normal with standard deviation 0.02, norms at one.

    Projections that write into the residual stream are scaled down by sqrt(2 L), as in GPT-2.

    Args:
        config: the sizes.
        key: a JAX random key.
        dtype: dtype of the parameters.
        compute_dtype: dtype of activations and products.

    Returns:
        The decoder. Under `jax.eval_shape` it allocates nothing.

    Examples:
        >>> config = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=16, num_layers=2, num_heads=2,
        ...                      num_kv_heads=1, head_dim=4)
        >>> init(config, key=jax.random.key(0)).layers["attn"]["q_proj"]["weight"].shape
        (2, 8, 8)
    """
    shapes = parameter_shapes(config)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(shapes)
    keys = jax.random.split(key, len(leaves))

    def make(path: Any, shape: tuple[int, ...], key: Array) -> Array:
        module = path[-2].key
        if path[-1].key == "bias":
            return jnp.zeros(shape, dtype)
        if module.endswith("norm"):
            return jnp.ones(shape, dtype)
        std = 0.02 / math.sqrt(2 * config.num_layers) if module in ("o_proj", "down_proj") else 0.02
        return (std * jax.random.normal(key, shape, jnp.float32)).astype(dtype)

    params = treedef.unflatten([make(path, leaf.shape, k) for (path, leaf), k in zip(leaves, keys, strict=True)])
    return Llama(params["outer"], params["layers"], config, jnp.dtype(compute_dtype).name)


def parameter_shapes(config: LlamaConfig) -> dict[str, Any]:
    """Shapes of all parameters as a tree ``{"outer": ..., "layers": ...}``, in float32."""
    c, n = config, config.num_layers
    d, f, q, kv = c.hidden_size, c.intermediate_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def dense(out: int, inner: int, bias: bool) -> dict[str, jax.ShapeDtypeStruct]:
        return {"weight": array(n, out, inner), **({"bias": array(n, out)} if bias else {})}

    outer: dict[str, Any] = {"embed": {"weight": array(c.vocab_size, d)}, "norm": {"weight": array(d)}}
    if not c.tie_embeddings:
        outer["lm_head"] = {"weight": array(c.vocab_size, d)}
    return {
        "outer": outer,
        "layers": {
            "attn": {
                "q_proj": dense(q, d, c.attention_bias),
                "k_proj": dense(kv, d, c.attention_bias),
                "v_proj": dense(kv, d, c.attention_bias),
                "o_proj": dense(d, q, c.attention_bias),
            },
            "attn_norm": {"weight": array(n, d)},
            "mlp": {
                "gate_proj": dense(f, d, c.mlp_bias),
                "up_proj": dense(f, d, c.mlp_bias),
                "down_proj": dense(d, f, c.mlp_bias),
            },
            "mlp_norm": {"weight": array(n, d)},
        },
    }


@functools.cache
def _stack(config: LlamaConfig, compute_dtype: str) -> LayerStack:
    dtype = jnp.dtype(compute_dtype)

    def first(outer: Tree, batch: Tree) -> Array:
        table = outer["embed"]["weight"]
        if isinstance(table, LinearWeight):
            raise StructureError(
                "outer/embed: an embedding looks rows up, and cannot be adapted or factored like a matrix",
                expected="an array [vocabulary, model]",
                got=type(table).__name__,
                hint='leave it out of the targets, for instance with the pattern "!outer/embed"',
            )
        return jnp.take(table, batch["tokens"], axis=0).astype(dtype)

    def block(layer: Tree, h_BTD: Array, batch: Tree) -> Array:
        h_BTD = h_BTD + _attention(layer["attn"], _rms_norm(h_BTD, layer["attn_norm"]["weight"], eps), config)
        return h_BTD + _mlp(layer["mlp"], _rms_norm(h_BTD, layer["mlp_norm"]["weight"], eps))

    def last(outer: Tree, h_BTD: Array, batch: Tree) -> tuple[Array, dict[str, Array]]:
        h_BTD = _rms_norm(h_BTD, outer["norm"]["weight"], eps)
        return chunked_cross_entropy(h_BTD, _head(outer), batch["labels"]), {}

    eps = config.rms_norm_eps
    return LayerStack(first, block, last, running=("embed/weight", "lm_head/weight"))


def _head(outer: Tree) -> Any:
    return outer["lm_head" if "lm_head" in outer else "embed"]["weight"]


def _dense(module: Tree, x: Array) -> Array:
    y = linear(x, module["weight"])
    if "bias" not in module:
        return y
    bias = module["bias"].astype(y.dtype)
    return y + jnp.expand_dims(bias, tuple(range(y.ndim - 1)))


def _rms_norm(x_BTD: Array, weight_D: Array, eps: float) -> Array:
    x32 = x_BTD.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return x32.astype(x_BTD.dtype) * weight_D.astype(x_BTD.dtype)[None, None]


def _attention(attn: Tree, x_BTD: Array, config: LlamaConfig) -> Array:
    batch, length, _ = x_BTD.shape
    q_BTNH = _dense(attn["q_proj"], x_BTD).reshape(batch, length, config.num_heads, config.head_dim)
    k_BTKH = _dense(attn["k_proj"], x_BTD).reshape(batch, length, config.num_kv_heads, config.head_dim)
    v_BTKH = _dense(attn["v_proj"], x_BTD).reshape(batch, length, config.num_kv_heads, config.head_dim)
    angles_TH = jnp.arange(length, dtype=jnp.float32)[:, None] * _frequencies(config)[None]
    cos, sin = (fn(angles_TH)[None, :, None] for fn in (jnp.cos, jnp.sin))
    implementation = _attention_implementation(x_BTD.dtype, config.head_dim)
    attend = _attend_in_blocks if implementation == "xla" and length > _MAX_QUERIES else _attend
    out_BTNH = attend(_rotate(q_BTNH, cos, sin), _rotate(k_BTKH, cos, sin), v_BTKH, implementation)
    return _dense(attn["o_proj"], out_BTNH.reshape(batch, length, config.num_heads * config.head_dim))


def _attend(q_BTNH: Array, k_BTKH: Array, v_BTKH: Array, implementation: Literal["cudnn", "xla"]) -> Array:
    return jax.nn.dot_product_attention(q_BTNH, k_BTKH, v_BTKH, is_causal=True, implementation=implementation)


def _attend_in_blocks(q_BTNH: Array, k_BTKH: Array, v_BTKH: Array, implementation: Literal["cudnn", "xla"]) -> Array:
    """Attend with scores of one block of queries at a time, forward and backward."""
    batch, length, heads, dim = q_BTNH.shape
    num_blocks = -(-length // _QUERY_BLOCK)
    padding = ((0, 0), (0, num_blocks * _QUERY_BLOCK - length), (0, 0), (0, 0))
    blocks = jnp.moveaxis(jnp.pad(q_BTNH, padding).reshape(batch, num_blocks, _QUERY_BLOCK, heads, dim), 1, 0)

    def attend(block: tuple[Array, Array]) -> Array:
        start, q_BCNH = block
        queries_C, keys_T = start + jnp.arange(_QUERY_BLOCK), jnp.arange(length)
        mask_CT = queries_C[:, None] >= keys_T[None]
        return jax.nn.dot_product_attention(
            q_BCNH, k_BTKH, v_BTKH, mask=mask_CT[None, None], implementation=implementation
        )

    starts = _QUERY_BLOCK * jnp.arange(num_blocks)
    out = jax.lax.map(jax.checkpoint(attend, prevent_cse=False), (starts, blocks))
    return jnp.moveaxis(out, 0, 1).reshape(batch, num_blocks * _QUERY_BLOCK, heads, dim)[:, :length]


def _attention_implementation(dtype: Any, head_dim: int) -> Literal["cudnn", "xla"]:
    """cuDNN's kernel, where it is: for half precision, heads up to 128 in multiples of 8, NVIDIA from Ampere on."""
    # `jax.default_device` says for what the program is traced where that is not the default backend, as in a memory
    # report for a TPU on a machine with a GPU. It is a device, the name of a platform, or None.
    config: Any = jax.config
    chosen = config.jax_default_device
    device: Any = chosen if hasattr(chosen, "platform") else jax.devices(chosen)[0]
    capability = re.fullmatch(r"(\d+)\.\d+", str(getattr(device, "compute_capability", "")))
    modern = device.platform == "gpu" and capability is not None and int(capability[1]) >= 8
    half = dtype in (jnp.bfloat16, jnp.float16)
    takes = modern and half and head_dim <= 128 and head_dim % 8 == 0
    # Without the library (a GPU that is not here, compiled for without cuDNN) XLA's own operations stand in; they keep
    # the scores of a layer, so a report counts more bytes for attention than cuDNN needs.
    return "cudnn" if takes and has_cudnn() else "xla"


def _frequencies(config: LlamaConfig) -> Float[Array, "H/2"]:
    """Rotary frequencies of one head, stretched as the configuration says."""
    freq = config.rope_theta ** -(jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return freq
    if scaling.rope_type == "linear":
        return freq / scaling.factor
    turns = scaling.original_max_position_embeddings * freq / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - smooth) * freq / scaling.factor + smooth * freq


def _rotate(x_BTNH: Array, cos: Array, sin: Array) -> Array:
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BTNH.dtype)


def _mlp(mlp: Tree, x_BTD: Array) -> Array:
    return _dense(mlp["down_proj"], jax.nn.silu(_dense(mlp["gate_proj"], x_BTD)) * _dense(mlp["up_proj"], x_BTD))
