"""The decoder of many model families: pure functions over a pytree with stacked layers.

`DecoderConfig` has the switches between families. Matrices are [out, in], as in Hugging Face checkpoints (gpt-oss
experts: [in, out]). `lowtide.core.linear` multiplies by them, so an adapter or quantised weight can replace a matrix.

Shapes: B batch, T sequence, D model, N query heads, K key/value heads, H head, F MLP, V vocabulary, L layers,
E experts. Sources: "Llama 2" (arXiv:2307.09288), "Gemma 2" (arXiv:2408.00118; soft caps, norms after attention and MLP,
sliding windows in every other layer), "Qwen3" (arXiv:2505.09388; norms of queries and keys).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Float, Int

from ..core import (
    INTERNAL_PREFIX,
    LAYER_NAMES,
    LayerStack,
    StructureError,
    Tree,
    check_choice,
    check_integer,
    is_recomputed,
    linear,
    num_layers,
    rows,
)
from ..losses import chunked_cross_entropy, chunked_log_probs
from ..ops import AttentionMask, Implementation, attention, tiled_map
from ._config import NO_WINDOW, DecoderConfig
from ._experts import balance_loss, mixture
from ._rope import document_lengths, rotary, rotate
from .families import family_of
from .families._registry import IMAGE_MODULES, PREFIXES

_SAVED_PRODUCTS = jax.checkpoint_policies.save_only_these_names(
    *(f"{INTERNAL_PREFIX}{name}" for name in "q_proj k_proj lora_low lora_scaled".split()), *LAYER_NAMES
)
"""Policy for layers that are not recomputed: it saves only results of matrix products."""

_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


class Routed(NamedTuple):
    """Activations between blocks, with sums of the router's outputs for the load-balancing loss."""

    h: Array
    """Residual stream, [B, T, D]."""
    probs: Array
    """Router probability of each expert, summed over tokens and over the layers so far, [B, E]."""
    counts: Array
    """Number of times that each expert was chosen, summed like `probs`, [B, E]."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Decoder:
    """A decoder: a pytree of two parameter trees, whose leaves may have any dtype, and a static description."""

    outer: Tree
    """``embed/weight`` [V, D], ``norm/weight`` [D] and, unless tied, ``lm_head/weight`` [V, D]."""
    layers: Tree
    """Parameters of the blocks. Every leaf has a leading axis of length L; after `unstack`, a tuple of L trees."""
    config: DecoderConfig = dataclasses.field(metadata={"static": True})
    """Sizes and switches (static)."""
    compute_dtype: str = dataclasses.field(default="float32", metadata={"static": True})
    """Dtype of activations and matrix products (static); norms, rotary angles, softmax and loss use float32."""
    attention: Implementation | None = dataclasses.field(default=None, metadata={"static": True})
    """Implementation of `lowtide.ops.attention` (static), not used in generation; None: selected for the target."""
    tile_tokens: int | None = dataclasses.field(default=None, metadata={"static": True})
    """Number of tokens per tile in recomputed layers, over all rows of a device (static). None: enough tokens to
    keep the target busy. Smaller tiles need fewer bytes and, on a GPU, more time."""

    @property
    def stack(self) -> LayerStack:
        """The decoder as a `LayerStack`: the embedding, one layer, and the loss. For batches, see `loss`.

        Raises:
            StructureError: when `layers` come from `unstack`.
            ConfigError: for an unknown `attention`, or a `tile_tokens` below 1.
        """
        if isinstance(self.layers, tuple):
            hint = "use the stacked decoder; only generate accepts the result of lowtide.models.unstack"
            raise StructureError("the decoder's layers are not stacked", hint=hint)
        hint = "leave it out to select it for the target"
        if self.attention is not None:
            check_choice("attention of a decoder", self.attention, typing.get_args(Implementation), hint=hint)
        if self.tile_tokens is not None:
            check_integer("tile_tokens of a decoder", self.tile_tokens, hint=hint)
        return stack_of(self.config, self.compute_dtype, self.attention, self.tile_tokens)

    def log_probs(self, h: Any, labels: Int[Array, "B T"]) -> Float[Array, "B T"]:
        """Return the log-probability of each label, and 0 for a label of -100, as `lowtide.losses.chunked_log_probs`.

        Args:
            h: the last layer's output, as `LayerStack.hidden` of `stack` returns it.
            labels: the token after each position.
        """
        return chunked_log_probs(*self.head_inputs(h), labels, soft_cap=self.config.final_soft_cap)

    def head_inputs(self, h: Any) -> tuple[Float[Array, "B T D"], Any]:
        """Return the activations that enter the head, from the last layer's output, and the head's weight [V, D]."""
        return rms_norm(activations(h), self.outer["norm"]["weight"], self.config), _head_weight(self.outer)

    def scores(self, h: Any) -> Float[Array, "B T C"]:
        """Return the outputs of the head of `with_score_head` at every position, in float32; `h` as in `log_probs`."""
        return linear(self.head_inputs(h)[0], self.outer["score"]["weight"]).astype(jnp.float32)

    def external_name(self, path: str) -> str:
        """Return the Hugging Face name of a module, with ``{layer}`` for the index of a stacked layer.

        For instance, the path ``layers/attn/q_proj`` has the name ``model.layers.{layer}.self_attn.q_proj``.

        Raises:
            KeyError: for a router, which is not a linear layer in `transformers`, and for a path without a module.
        """
        if path.endswith("/router"):
            raise KeyError(path)
        if path == "outer/score":
            return "score"
        # The checkpoint of a multimodal model has another prefix than the family's names.
        name, prefix = family_of(self.config).names[path], self.config.module_prefix
        if name == "lm_head" and prefix == PREFIXES[2]:
            return "language_model.lm_head"
        return prefix + name.removeprefix(PREFIXES[0]) if name.startswith(PREFIXES[0]) else name

    def named_as(self, names: Collection[str]) -> Decoder:
        """Return the same decoder with the `module_prefix` that occurs in `names`; without one, the decoder itself.

        `names` are names of modules or tensors, and may include unrelated names. With an adapter's names, the adapter
        of a multimodal model also fits its text decoder, and an adapter of the text decoder fits the multimodal model.
        """
        for prefix in reversed(PREFIXES):
            if any(prefix in name for name in names):
                return dataclasses.replace(self, config=dataclasses.replace(self.config, module_prefix=prefix))
        return self

    def with_vocabulary(self, size: int) -> Decoder:
        """Return the same decoder configured for another vocabulary size; its arrays do not change."""
        return dataclasses.replace(self, config=dataclasses.replace(self.config, vocab_size=size))

    @property
    def ignored_modules(self) -> tuple[str, ...]:
        """Hugging Face modules of the checkpoint that process images and are not part of the decoder."""
        return IMAGE_MODULES if self.config.module_prefix != PREFIXES[0] else ()

    @property
    def expert_parameters(self) -> dict[str, tuple[str, ...]]:
        """Hugging Face parameters that hold all experts of a layer, mapped to the paths of the modules in them.

        ``{layer}`` stands for the layer's index. If `external_name` of the modules contains ``{expert}``, the parameter
        has shape [experts, out, in] with the modules concatenated along ``out``, otherwise [experts, in, out].
        """
        return dict(family_of(self.config).expert_parameters)

    @property
    def table_names(self) -> frozenset[str]:
        """Hugging Face modules that are embedding lookups."""
        return frozenset({self.external_name("outer/embed")})

    @property
    def tied_names(self) -> dict[str, str]:
        """Dict from the embedding's Hugging Face name to the head's name if they share weights; otherwise empty."""
        table, head = map(self.external_name, ("outer/embed", "outer/lm_head"))
        return {table: head} if self.config.tie_embeddings else {}


def loss(
    model: Decoder, batch: Tree, *, remat: bool | Callable[..., bool] = False, layers_per_remat: int = 1
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Return the mean next-token cross-entropy, plus `Experts.router_loss_coef` times the load-balancing loss.

    Args:
        model: the decoder, with or without adapters.
        batch: ``tokens`` and ``labels``, integers [B, T]. ``labels[b, t]`` is the token after ``tokens[b, t]``,
            or -100 to ignore the position. Optional and of the same shape: ``segment_ids`` (tokens attend only to their
            own segment, 0 is padding) and ``positions`` in documents (default: 0 to T - 1).
        remat: as in `LayerStack.hidden`.
        layers_per_remat: as in `LayerStack.hidden`.

    Returns:
        The loss in nats per token, and metrics: ``router_loss`` if the load-balancing loss is computed, else no metric.

    Raises:
        StructureError, ConfigError: as in `Decoder.stack` and `LayerStack.hidden`.

    Memory:
        Never the logits of all tokens: see `lowtide.losses.chunked_cross_entropy`.
    """
    return model.stack.apply(model.outer, model.layers, batch, remat=remat, layers_per_remat=layers_per_remat)


def logits(
    model: Decoder,
    tokens: Int[Array, "B T"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    positions: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T V"]:
    """Return next-token logits at every position, in float32.

    Args:
        model: the decoder, with or without adapters.
        tokens: token ids, shape [B, T].
        segment_ids: document of each token; tokens attend only to their own document. None: one document per row.
        positions: position of each token in its document; None: 0 to T - 1.

    Raises:
        StructureError, ConfigError: as in `Decoder.stack`.

    Memory:
        ``B * T * V * 4`` bytes; training uses `loss`, which never holds all logits.
    """
    return head_logits(model, _hidden(model, tokens, segment_ids, positions))


def with_score_head(model: Decoder, num_labels: int, *, key: Array) -> Decoder:
    """Add a head ``outer/score/weight`` [C, D] for classes or, with one label, rewards.

    Its name and shape are those of the ``ForSequenceClassification`` models of `transformers`, and so is its random
    initialisation, with standard deviation 0.02. Train it with ``modules_to_save="outer/score"``.

    Args:
        model: the decoder; its leaves may be shapes.
        num_labels: number of classes, C; 1 for rewards.
        key: a JAX random key.
    """
    check_integer("num_labels", num_labels)
    make = functools.partial(jax.random.normal, shape=(num_labels, model.config.hidden_size))
    is_shape = isinstance(jax.tree.leaves(model)[0], jax.ShapeDtypeStruct)
    weight = jax.eval_shape(make, key) if is_shape else 0.02 * make(key)
    return dataclasses.replace(model, outer={**model.outer, "score": {"weight": weight}})


def hidden_states(
    model: Decoder,
    tokens: Int[Array, "B T"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    positions: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T D"]:
    """Return the activations after the last norm, in the model's `compute_dtype`; `transformers` returns the same.

    Args:
        model: the decoder, with or without adapters.
        tokens: token ids, shape [B, T].
        segment_ids: as in `logits`.
        positions: as in `logits`.

    Raises:
        StructureError, ConfigError: as in `Decoder.stack`.
    """
    return model.head_inputs(_hidden(model, tokens, segment_ids, positions))[0]


def _hidden(model: Decoder, tokens: Array, segment_ids: Array | None, positions: Array | None) -> Any:
    inputs = {"tokens": tokens, "segment_ids": segment_ids, "positions": positions}
    batch = {name: value for name, value in inputs.items() if value is not None}
    return model.stack.hidden(model.outer, model.layers, batch)


def activations(h: Any) -> Float[Array, "B T D"]:
    """Return the residual stream from the output of a block, which is [B, T, D] or `Routed`."""
    return h.h if isinstance(h, Routed) else h


def head_logits(model: Decoder, h: Any) -> Float[Array, "B T V"]:
    """Return logits [B, T, V] in float32 from the last block's output, which is [B, T, D] or `Routed`."""
    cap = model.config.final_soft_cap
    logits_BTV = linear(*model.head_inputs(h)).astype(jnp.float32)
    return logits_BTV if cap is None else cap * jnp.tanh(logits_BTV / cap)


def init(config: DecoderConfig, *, key: Array, dtype: Any = jnp.float32, compute_dtype: Any = jnp.float32) -> Decoder:
    """Create a decoder with normal random weights of standard deviation 0.02; norms scale by one, biases are zero.

    The standard deviation of projections into the residual stream is divided by sqrt(2 L), as in GPT-2.

    Args:
        config: the sizes.
        key: a JAX random key.
        dtype: dtype of the parameters.
        compute_dtype: dtype of activations and products.

    Returns:
        The decoder. Under `jax.eval_shape` it allocates nothing.

    Examples:
        >>> config = DecoderConfig(vocab_size=32, hidden_size=8, intermediate_size=16, num_layers=2, num_heads=2,
        ...                      num_kv_heads=1, head_dim=4)
        >>> init(config, key=jax.random.key(0)).layers["attn"]["q_proj"]["weight"].shape
        (2, 8, 8)
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(parameter_shapes(config))
    keys = jax.random.split(key, len(leaves))

    def make(path: Any, shape: tuple[int, ...], key: Array) -> Array:
        module = path[-2].key
        if path[-1].key == "bias":
            return jnp.zeros(shape, dtype)
        if module.endswith("norm"):
            return jnp.full(shape, 1 - config.norm_offset, dtype)
        std = 0.02 / math.sqrt(2 * config.num_layers) if module in ("o_proj", "down_proj", "down") else 0.02
        return (std * jax.random.normal(key, shape, jnp.float32)).astype(dtype)

    arrays = [make(path, leaf.shape, leaf_key) for (path, leaf), leaf_key in zip(leaves, keys, strict=True)]
    params = treedef.unflatten(arrays)
    return Decoder(params["outer"], with_windows(params["layers"], config), config, jnp.dtype(compute_dtype).name)


# Separate layers are for programs that read each layer once, such as a generation step. In a loop over stacked layers,
# XLA for GPUs copies most weights of a layer out of the stack before it multiplies by them. So each new token moves the
# model's bytes three times: read, write, read. On an H200 (Qwen3-8B's shapes, bfloat16, JAX 0.11.2) a token takes
# 11.9 ms with stacked layers and 5.2 ms with separate ones. Training multiplies each weight by thousands of rows, so
# the copies do not matter there.
_split_stack = jax.jit(tuple)
"""Split a stacked array along its first axis, in one compiled program."""


def unstack(model: Decoder, *, donate: bool = False) -> Decoder:
    """Split stacked layers into separate arrays, with which a GPU generates text about twice as fast.

    Args:
        model: the decoder, with or without adapters.
        donate: whether to delete each stacked array as soon as its layers are copied.

    Returns:
        The decoder, with `layers` a tuple of trees. `generate`, `generate_batch`, `stream` and `Conversation` accept
        it; training, saving and computing logits need stacked layers. An unstacked decoder is returned unchanged.

    Raises:
        StructureError: when the leaves of the layers have no common leading axis.

    Memory:
        A second copy of the layers. With `donate`, a second copy of the largest stacked array only; if that does not
        fit on the device, the host holds the array for a moment.

    Examples:
        >>> from lowtide.models import DecoderConfig, init
        >>> config = DecoderConfig(vocab_size=32, hidden_size=8, intermediate_size=16, num_layers=2, num_heads=2,
        ...                        num_kv_heads=1, head_dim=4)
        >>> model = unstack(init(config, key=jax.random.key(0)), donate=True)
        >>> len(model.layers), model.layers[0]["attn"]["q_proj"]["weight"].shape
        (2, (8, 8))
    """
    if isinstance(model.layers, tuple):
        return model
    count = num_layers(model.layers)
    leaves, treedef = jax.tree.flatten(model.layers)
    parts: dict[int, list[Any]] = {}  # by identity: one leaf may occur in several places
    for leaf in leaves:
        if id(leaf) not in parts:
            parts[id(leaf)] = _split_leaf(leaf, donate)
    layers = tuple(treedef.unflatten([parts[id(leaf)][index] for leaf in leaves]) for index in range(count))
    return dataclasses.replace(model, layers=layers)


def _split_leaf(leaf: Any, donate: bool) -> list[Any]:
    try:
        parts = jax.block_until_ready([*_split_stack(leaf)])
    except jax.errors.JaxRuntimeError as error:
        is_movable = donate and isinstance(leaf, jax.Array) and isinstance(leaf.sharding, SingleDeviceSharding)
        if not is_movable or "RESOURCE_EXHAUSTED" not in str(error):
            raise
        # The device cannot hold the stacked array twice: move it to the host, free it, and send the layers back.
        stacked, sharding = np.asarray(leaf), leaf.sharding
        leaf.delete()
        return [jax.device_put(part, sharding) for part in stacked]
    if donate and isinstance(leaf, jax.Array):
        leaf.delete()
    return parts


def parameter_shapes(config: DecoderConfig) -> dict[str, Any]:
    """Return the shapes of all parameters as a tree ``{"outer": ..., "layers": ...}``, in float32."""
    c, n = config, config.num_layers
    d, q, kv = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    out_bias = c.attention_bias if c.attention_out_bias is None else c.attention_out_bias

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def dense(out: int, inner: int, bias: bool) -> dict[str, jax.ShapeDtypeStruct]:
        return {"weight": array(n, out, inner), **({"bias": array(n, out)} if bias else {})}

    outer: dict[str, Any] = {"embed": {"weight": array(c.vocab_size, d)}, "norm": {"weight": array(d)}}
    if not c.tie_embeddings:
        outer["lm_head"] = {"weight": array(c.vocab_size, d)}
    sizes = {"qkv_proj": q + 2 * kv} if c.fused_projections else {"q_proj": q, "k_proj": kv, "v_proj": kv}
    attn: dict[str, Any] = {name: dense(size, d, c.attention_bias) for name, size in sizes.items()}
    attn["o_proj"] = dense(d, q, out_bias)
    if c.qk_norm != "none":
        widths = (c.head_dim, c.head_dim) if c.qk_norm == "head" else (q, kv)
        attn |= {f"{name}_norm": {"weight": array(n, width)} for name, width in zip("qk", widths, strict=True)}
    if c.attention_sinks:
        attn["sinks"] = {"weight": array(n, c.num_heads)}
    norms = ["attn_norm", "mlp_norm"] * c.pre_norm + ["attn_post_norm", "mlp_post_norm"] * c.post_norm
    layers = {"attn": attn, "mlp": _mlp_shapes(c, array, dense), **{name: {"weight": array(n, d)} for name in norms}}
    return {"outer": outer, "layers": layers}


def _mlp_shapes(c: DecoderConfig, array: Callable[..., Any], dense: Callable[..., Any]) -> dict[str, Any]:
    n, d = c.num_layers, c.hidden_size
    if c.experts is None:
        f = c.intermediate_size
        widths = {"gate_up_proj": 2 * f} if c.fused_projections else {"gate_proj": f, "up_proj": f}
        projections = {name: dense(size, d, c.mlp_bias) for name, size in widths.items()}
        return {**projections, "down_proj": dense(d, f, c.mlp_bias)}
    e, f = c.experts.num_experts, c.experts.intermediate_size
    router = dense(e, d, c.experts.clamped)
    if not c.experts.clamped:
        shapes = {"gate": (f, d), "up": (f, d), "down": (d, f)}
        return {"router": router, "experts": {name: {"weight": array(n, e, *s)} for name, s in shapes.items()}}
    sizes = {"gate_up": (d, 2 * f), "down": (f, d)}
    projections = {name: {"weight": array(n, e, *s), "bias": array(n, e, s[1])} for name, s in sizes.items()}
    return {"router": router, "experts": projections}


def with_windows(layers: Tree, config: DecoderConfig) -> Tree:
    """Add the leaf ``attn/window`` with each layer's window, if only some of the layers have a window."""
    if not isinstance(config.windows, tuple):
        return layers
    windows = [NO_WINDOW if window is None else window for window in config.windows]
    return {**layers, "attn": {**layers["attn"], "window": jnp.asarray(np.asarray(windows, np.int32))}}


def without_windows(layers: Tree) -> Tree:
    """Remove the leaf ``attn/window``, which is not a parameter."""
    return {**layers, "attn": {name: leaf for name, leaf in layers["attn"].items() if name != "window"}}


@functools.cache
def stack_of(
    config: DecoderConfig,
    compute_dtype: str,
    implementation: Implementation | None = None,
    tile_tokens: int | None = None,
) -> LayerStack:
    """Return the layer stack of decoders with this config; cached, so that equal arguments give the same functions."""
    dtype = jnp.dtype(compute_dtype)
    experts = config.experts
    balanced_experts = experts if experts is not None and experts.router_loss_coef > 0 else None

    def first(outer: Tree, batch: Tree) -> Any:
        h_BTD = rows(outer["embed"]["weight"], batch["tokens"], path="outer/embed").astype(dtype)
        if config.scale_embedding:
            h_BTD = h_BTD * jnp.asarray(math.sqrt(config.hidden_size), dtype)
        if balanced_experts is None:
            return h_BTD
        zeros = jnp.zeros((h_BTD.shape[0], balanced_experts.num_experts), jnp.float32)
        return Routed(h_BTD, zeros, zeros)

    def block(layer: Tree, h: Any, batch: Tree) -> Any:
        h_BTD = activations(h)
        positions, segments = batch.get("positions"), batch.get("segment_ids")
        if positions is None:
            positions = jnp.arange(h_BTD.shape[1])[None]
        mask = AttentionMask(segment_ids=segments)
        h_BTD, routing = layer_forward(
            layer, h_BTD, positions, mask, config, implementation=implementation, tile_tokens=tile_tokens
        )
        if balanced_experts is None:
            return h_BTD
        assert routing is not None
        probs_BTE, counts_BTE = routing
        if segments is not None:  # padding also chooses experts, but must not count
            is_token = (segments > 0)[..., None]
            probs_BTE, counts_BTE = (jnp.where(is_token, values, 0.0) for values in (probs_BTE, counts_BTE))
        return Routed(h_BTD, h.probs + jnp.sum(probs_BTE, axis=1), h.counts + jnp.sum(counts_BTE, axis=1))

    def last(outer: Tree, h: Any, batch: Tree) -> tuple[Array, dict[str, Array]]:
        h_BTD = rms_norm(activations(h), outer["norm"]["weight"], config)
        value = chunked_cross_entropy(h_BTD, _head_weight(outer), batch["labels"], soft_cap=config.final_soft_cap)
        if balanced_experts is None:
            return value, {}
        segments = batch.get("segment_ids")
        is_token_BT = jnp.ones(batch["tokens"].shape, bool) if segments is None else segments > 0
        num_tokens_B = jnp.sum(is_token_BT, axis=1).astype(jnp.float32)
        router_loss = balance_loss(h.probs, h.counts, num_tokens_B, balanced_experts, config.num_layers)
        return value + balanced_experts.router_loss_coef * router_loss, {"router_loss": router_loss}

    return LayerStack(first, block, last, running=("embed/weight", "lm_head/weight"))


def _head_weight(outer: Tree) -> Any:
    return outer["lm_head" if "lm_head" in outer else "embed"]["weight"]


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


def _norm(layer: Tree, name: str, x_BTD: Array, config: DecoderConfig) -> Array:
    """Apply the norm `name` of a layer; return `x_BTD` unchanged if the family has no such norm."""
    has_norm = config.post_norm if name.endswith("_post_norm") else config.pre_norm
    return rms_norm(x_BTD, layer[name]["weight"], config) if has_norm else x_BTD


def layer_forward(
    layer: Tree,
    h_BTD: Array,
    positions_BT: Array,
    mask: AttentionMask,
    config: DecoderConfig,
    store: Callable[[Array, Array], tuple[Array, Array]] = lambda k, v: (k, v),
    implementation: Implementation | None = None,
    tile_tokens: int | None = None,
) -> tuple[Array, tuple[Array, Array] | None]:
    """Apply one layer; return the residual stream, and the router's probabilities and choices (None without experts).

    `positions_BT` are positions in documents and may be [1, T]. `store` takes the new keys and values [B, T, K, H]. It
    returns the keys and values to attend to, [B, S, K, H], such as a cache that includes the new entries.
    """
    attn = layer["attn"]
    window = attn["window"] if isinstance(config.windows, tuple) else config.windows
    mask = dataclasses.replace(mask, window=window, windows=config.window_sizes)
    # Attention itself is not tiled. Each of the two tiled parts gets only the parameters that it reads.
    project_params = {name: part for name, part in layer.items() if name in ("attn", "attn_norm")}
    finish_params = {name: part for name, part in layer.items() if name not in ("attn", "attn_norm")}
    finish_params["attn"] = {"o_proj": attn["o_proj"]}
    project_params["attn"] = {name: part for name, part in attn.items() if name not in ("o_proj", "sinks")}
    tokens = (h_BTD, positions_BT, document_lengths(config, positions_BT, mask.segments and mask.segments[0]))
    project, finish = functools.partial(_project, config), functools.partial(_finish, config)
    if is_recomputed():
        # In tiles, norms, rotations and intermediate activations never exist for all tokens at once.
        # `widest`: the widest intermediate array per token; with experts, the hidden layers of all its chosen experts.
        experts, chosen, widest = config.experts, 1, config.intermediate_size
        if experts is not None:
            chosen, widest = experts.num_experts_per_token, experts.num_experts_per_token * experts.intermediate_size
        tiled = functools.partial(tiled_map, size=tile_tokens)
        project = functools.partial(tiled, project, width=config.num_heads * config.head_dim)
        finish = functools.partial(tiled, finish, width=widest, share=chosen / experts.num_experts if experts else 1)
    else:
        # Save only results of matrix products; norms, gates and rotations are recomputed. This saves memory traffic.
        project = jax.checkpoint(project, policy=_SAVED_PRODUCTS, prevent_cse=False)
        finish = finish if config.experts else jax.checkpoint(finish, policy=_SAVED_PRODUCTS, prevent_cse=False)
    names = ("attn_q", "attn_k", "attn_v")
    q_BTW, k_BTX, v_BTX = map(checkpoint_name, project(project_params, tokens), names)
    q_BTNH, k_BTKH, v_BTKH = (x.reshape(*x.shape[:2], -1, config.head_dim) for x in (q_BTW, k_BTX, v_BTX))
    keys, values = store(k_BTKH, v_BTKH)
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
    return finish(finish_params, (h_BTD, out_BTNH.reshape(q_BTW.shape)))


def _project(config: DecoderConfig, layer: Tree, tokens: tuple[Array, Array, Array | None]) -> tuple[Array, ...]:
    """Return rotated queries [B, T, W = N H], rotated keys [B, T, X = K H], and values [B, T, X]."""
    h_BTD, positions_BT, lengths_BT = tokens
    attn = layer["attn"]
    x_BTD = _norm(layer, "attn_norm", h_BTD, config)
    if config.fused_projections:
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        q_BTW, k_BTX, v_BTX = jnp.split(_dense(attn["qkv_proj"], x_BTD), (q, q + kv), axis=-1)
    else:
        q_BTW, k_BTX, v_BTX = (_dense(attn[f"{name}_proj"], x_BTD) for name in "qkv")
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
    return rotate(q_BTNH, cos, sin).reshape(q_BTW.shape), rotate(k_BTKH, cos, sin).reshape(k_BTX.shape), v_BTX


def _finish(
    config: DecoderConfig, layer: Tree, tokens: tuple[Array, Array]
) -> tuple[Array, tuple[Array, Array] | None]:
    """Add the attention output to the residual stream, then the output of the MLP or the mixture of experts."""
    h_BTD, out_BTW = tokens
    added_BTD = checkpoint_name(_dense(layer["attn"]["o_proj"], out_BTW), "attn_proj")
    h_BTD = h_BTD + _norm(layer, "attn_post_norm", added_BTD, config)
    out_BTD, routing = _mlp(layer["mlp"], _norm(layer, "mlp_norm", h_BTD, config), config)
    return h_BTD + _norm(layer, "mlp_post_norm", out_BTD, config), routing


def _mlp(mlp: Tree, x_BTD: Array, config: DecoderConfig) -> tuple[Array, tuple[Array, Array] | None]:
    activation = _ACTIVATIONS[config.activation]
    if config.experts is not None:
        out_BTD, probs_BTE, counts_BTE = mixture(mlp, x_BTD, config.experts, activation)
        return out_BTD, (probs_BTE, counts_BTE)
    if config.fused_projections:
        both_BTF = checkpoint_name(_dense(mlp["gate_up_proj"], x_BTD), "mlp_gate_up")
        gate_BTF, up_BTF = jnp.split(both_BTF, 2, axis=-1)
    else:
        gate_BTF = checkpoint_name(_dense(mlp["gate_proj"], x_BTD), "mlp_gate")
        up_BTF = checkpoint_name(_dense(mlp["up_proj"], x_BTD), "mlp_up")
    out_BTD = _dense(mlp["down_proj"], activation(gate_BTF) * up_BTF)
    return checkpoint_name(out_BTD, "mlp_out") if config.post_norm else out_BTD, None
