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
    layer_slot,
    linear,
    num_layers,
    recomputed_layer,
    rows,
)
from ..losses import chunked_cross_entropy, chunked_log_probs
from ..ops import AttentionMask, Implementation, attention, tiled_map
from ..ops._delta_rule import delta_span, scan_spans, short_convolution
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
        module, stride, offset = split_block(path, self.config)
        # The checkpoint of a multimodal model has another prefix than the family's names.
        name, prefix = family_of(self.config).names[module], self.config.module_prefix
        name = name.replace("{layer}", layer_slot(stride, offset))
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
        table = family_of(self.config).expert_parameters
        if len(self.config.pattern) == 1:
            return dict(table)
        count = len(self.config.pattern)
        return {
            name.replace("{layer}", layer_slot(count, index)): tuple(
                path.replace("layers/", f"layers/{block_name(index)}/", 1) for path in paths
            )
            for index in range(count)
            for name, paths in table.items()
        }

    @property
    def layer_strides(self) -> dict[str, tuple[int, int]]:
        """Stride and first index of the layers in each stack, by path, for models with several layers per group."""
        count = len(self.config.pattern)
        return {f"layers/{block_name(index)}": (count, index) for index in range(count)} if count > 1 else {}

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
        *_, parent, module, leaf = ("", *(entry.key for entry in path))
        if leaf == "bias":
            return jnp.zeros(shape, dtype)
        if module == "step_bias" or (parent, module) == ("delta", "norm"):
            return jnp.ones(shape, dtype)
        if module == "log_decay":
            return jnp.log(jax.random.uniform(key, shape, jnp.float32, 0.01, 16.0)).astype(dtype)
        if module.endswith("norm"):
            return jnp.full(shape, 1 - config.norm_offset, dtype)
        if module == "conv":
            bound = shape[-1] ** -0.5
            return jax.random.uniform(key, shape, jnp.float32, -bound, bound).astype(dtype)
        is_last = module in ("o_proj", "out_proj", "down_proj", "down")
        std = 0.02 / math.sqrt(2 * config.num_layers) if is_last else 0.02
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
    d = config.hidden_size
    outer: dict[str, Any] = {"embed": {"weight": _array(config.vocab_size, d)}, "norm": {"weight": _array(d)}}
    if not config.tie_embeddings:
        outer["lm_head"] = {"weight": _array(config.vocab_size, d)}
    return {"outer": outer, "layers": map_blocks(_layer_shapes, config)}


def _array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _layer_shapes(c: DecoderConfig) -> dict[str, Any]:
    n, d = c.num_layers, c.hidden_size

    def dense(out: int, inner: int, bias: bool = False) -> dict[str, jax.ShapeDtypeStruct]:
        return {"weight": _array(n, out, inner), **({"bias": _array(n, out)} if bias else {})}

    norms = ["attn_norm", "mlp_norm"] * c.pre_norm + ["attn_post_norm", "mlp_post_norm"] * c.post_norm
    mixer = {"delta": _delta_shapes(c, dense)} if c.is_delta_net else {"attn": _attention_shapes(c, dense)}
    return {**mixer, "mlp": _mlp_shapes(c, dense), **{name: {"weight": _array(n, d)} for name in norms}}


def _delta_shapes(c: DecoderConfig, dense: Callable[..., Any]) -> dict[str, Any]:
    net, n, d = c.delta_net, c.num_layers, c.hidden_size
    assert net is not None
    heads = net.num_value_heads
    sizes = {"qkv_proj": net.qkv_width, "z_proj": net.value_width, "b_proj": heads, "a_proj": heads}
    if net.fused:
        sizes = {"qkvz_proj": net.qkv_width + net.value_width, "ba_proj": 2 * heads}
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
    sizes = {"qkv_proj": q + 2 * kv} if c.fused_projections else {
        **{"q_proj": 2 * q if c.attention_gate else q, "k_proj": kv, "v_proj": kv}
    }
    attn: dict[str, Any] = {name: dense(size, d, c.attention_bias) for name, size in sizes.items()}
    attn["o_proj"] = dense(d, q, out_bias)
    if c.qk_norm != "none":
        widths = (c.head_dim, c.head_dim) if c.qk_norm == "head" else (q, kv)
        attn |= {f"{name}_norm": {"weight": _array(n, width)} for name, width in zip("qk", widths, strict=True)}
    if c.attention_sinks:
        attn["sinks"] = {"weight": _array(n, c.num_heads)}
    return attn


def _mlp_shapes(c: DecoderConfig, dense: Callable[..., Any]) -> dict[str, Any]:
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
        mlp = {"router": router, "experts": {name: {"weight": _array(n, e, *s)} for name, s in shapes.items()}}
        if shared := c.experts.shared_size:
            sizes = {"gate_proj": (shared, d), "up_proj": (shared, d), "down_proj": (d, shared)}
            mlp["shared"] = {name: dense(*size) for name, size in sizes.items()}
            mlp["shared"] |= {"gate": dense(1, d)} if c.experts.shared_gate else {}
        return mlp
    sizes = {"gate_up": (d, 2 * f), "down": (f, d)}
    projections = {name: {"weight": _array(n, e, *s), "bias": _array(n, e, s[1])} for name, s in sizes.items()}
    return {"router": router, "experts": projections}


def with_windows(layers: Tree, config: DecoderConfig) -> Tree:
    """Add the leaf ``attn/window`` with each layer's window, if only some of the layers of a stack have a window."""
    if len(config.pattern) > 1 or not isinstance(config.windows, tuple):  # each stack of a pattern has one window
        return layers
    windows = [NO_WINDOW if window is None else window for window in config.windows]
    return {**layers, "attn": {**layers["attn"], "window": jnp.asarray(np.asarray(windows, np.int32))}}


def without_windows(layers: Tree) -> Tree:
    """Remove the leaf ``attn/window``, which is not a parameter."""
    if "attn" not in layers:
        return layers
    return {**layers, "attn": {name: leaf for name, leaf in layers["attn"].items() if name != "window"}}


def block_name(index: int) -> str:
    """Return the name of a position in a group of layers, in paths such as ``layers/block0/attn``."""
    return f"block{index}"


def map_blocks(fn: Callable[..., Any], config: DecoderConfig, *layers: Tree) -> Tree:
    """Return ``fn(config, *layers)`` for the layers at each position of a group, as a tree with the model's layout."""
    if len(config.pattern) == 1:
        return fn(config.pattern[0], *layers)
    return {
        block_name(index): fn(block_config, *(tree[block_name(index)] for tree in layers))
        for index, block_config in enumerate(config.pattern)
    }


def split_block(path: str, config: DecoderConfig) -> tuple[str, int, int]:
    """Return a path without the position in the group, and the stride and first index of the stack's layers."""
    root, _, rest = path.partition("/")
    name, _, module = rest.partition("/")
    if len(config.pattern) == 1 or root != "layers":
        return path, 1, 0
    return f"layers/{module}", len(config.pattern), int(name.removeprefix("block"))


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
        if len(config.pattern) == 1:
            return apply_layer(config.pattern[0], layer, h, batch)
        for index, layer_config in enumerate(config.pattern):
            apply = recomputed_layer(functools.partial(apply_layer, layer_config))
            h = apply(layer[block_name(index)], h, batch)
        return h

    def apply_layer(layer_config: DecoderConfig, layer: Tree, h: Any, batch: Tree) -> Any:
        h_BTD = activations(h)
        positions, segments = batch.get("positions"), batch.get("segment_ids")
        if positions is None:
            positions = jnp.arange(h_BTD.shape[1])[None]
        mask = AttentionMask(segment_ids=segments)
        h_BTD, routing = layer_forward(
            layer, h_BTD, positions, mask, layer_config, implementation=implementation, tile_tokens=tile_tokens
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
    project_params[mixer] = {name: part for name, part in layer[mixer].items() if name.endswith(("_proj", "_norm"))}
    finish_params["last"] = project_params[mixer].pop(last)
    if "window" in layer[mixer]:
        project_params[mixer]["window"] = layer[mixer]["window"]
    tiled = functools.partial(_tiled, config, tile_tokens)
    mix = _delta_net if config.is_delta_net else _attention
    out_BTW, gate_BTW = mix(config, layer, project_params, h_BTD, positions_BT, mask, cache, implementation, tiled)
    # The widest intermediate array per token; with experts, the hidden layers of all its chosen experts.
    experts, chosen, widest = config.experts, 1, config.intermediate_size
    if experts is not None:
        chosen, widest = experts.num_experts_per_token, experts.num_experts_per_token * experts.intermediate_size
    share = chosen / experts.num_experts if experts else 1
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
    """Return rotated queries [B, T, W = N H], rotated keys [B, T, X = K H], values [B, T, X], and the gate [B, T, W]."""
    h_BTD, positions_BT, lengths_BT = tokens
    attn, gate = layer["attn"], ()
    x_BTD = _norm(layer, "attn_norm", h_BTD, config)
    if config.fused_projections:
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        q_BTW, k_BTX, v_BTX = jnp.split(_dense(attn["qkv_proj"], x_BTD), (q, q + kv), axis=-1)
    else:
        q_BTW, k_BTX, v_BTX = (_dense(attn[f"{name}_proj"], x_BTD) for name in "qkv")
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
    rates_H = -jnp.exp(delta["log_decay"]["weight"].astype(jnp.float32))
    step_bias_H = delta["step_bias"]["weight"].astype(jnp.float32)
    key_width = net.num_key_heads * net.key_dim

    def mix(carry: Any, tokens: Tree) -> tuple[Any, Array]:
        ((inputs, state), last_document), documents = carry, tokens.get("documents")
        x_BTW, inputs = short_convolution(
            tokens["qkv"], delta["conv"]["weight"][:, 0], inputs, documents, last_document
        )
        q, k, v = jnp.split(jax.nn.silu(x_BTW), (key_width, 2 * key_width), axis=-1)
        q, k = (x.reshape(*x.shape[:2], net.num_key_heads, net.key_dim) for x in (q, k))
        out, state = delta_span(
            q,
            k,
            v.reshape(*v.shape[:2], net.num_value_heads, net.value_dim),
            rates_H * jax.nn.softplus(tokens["step"].astype(jnp.float32) + step_bias_H),
            jax.nn.sigmoid(tokens["beta"]),
            documents,
            last_document,
            state,
            normalize=True,
        )
        gate = tokens["gate"].reshape(out.shape).astype(jnp.float32)
        out = rms_norm(out, delta["norm"]["weight"], plain) * jax.nn.silu(gate)
        last_document = None if documents is None else documents[:, -1]
        return ((inputs, state), last_document), out.reshape(*out.shape[:2], -1).astype(h_BTD.dtype)

    plain = dataclasses.replace(config, norm_offset=0.0)
    rows = h_BTD.shape[0]
    empty = (
        jnp.zeros((rows, net.conv_size - 1, net.qkv_width), h_BTD.dtype),
        jnp.zeros((rows, net.num_value_heads, net.key_dim, net.value_dim), jnp.float32),
    )
    (state, _), out = scan_spans(mix, cache.state(empty), tokens, mask.segments and mask.segments[0])
    cache.replace(state)
    return checkpoint_name(out, "attn_out"), None


def _project_delta(config: DecoderConfig, layer: Tree, h_BTD: Array) -> tuple[Array, ...]:
    """Return queries, keys and values side by side, the gate of the output, and the logits of beta and of the decay."""
    net, delta = config.delta_net, layer["delta"]
    assert net is not None
    x_BTD = _norm(layer, "attn_norm", h_BTD, config)
    if not net.fused:
        qkv, z, b, a = (_dense(delta[f"{name}_proj"], x_BTD) for name in ("qkv", "z", "b", "a"))
        return qkv, z, b, a
    per_key = net.num_value_heads // net.num_key_heads
    shape = (*x_BTD.shape[:2], net.num_key_heads, -1)
    sizes = np.cumsum([net.key_dim, net.key_dim, per_key * net.value_dim])
    q, k, v, z = jnp.split(_dense(delta["qkvz_proj"], x_BTD).reshape(shape), sizes, axis=-1)
    b, a = jnp.split(_dense(delta["ba_proj"], x_BTD).reshape(shape), 2, axis=-1)
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
    h_BTD = h_BTD + _norm(layer, "attn_post_norm", added_BTD, config)
    out_BTD, routing = _mlp(layer["mlp"], _norm(layer, "mlp_norm", h_BTD, config), config)
    return h_BTD + _norm(layer, "mlp_post_norm", out_BTD, config), routing


def _mlp(mlp: Tree, x_BTD: Array, config: DecoderConfig) -> tuple[Array, tuple[Array, Array] | None]:
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
