"""The decoder of many model families: pure functions over a pytree with stacked layers.

`DecoderConfig` has the switches between families. Matrices are [out, in], as in Hugging Face checkpoints (gpt-oss
experts: [in, out]). `lowtide.core.linear` multiplies by them, so an adapter or quantised weight can replace a matrix.

Shapes: B batch, T sequence, D model, V vocabulary, L layers, C classes, E experts.
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
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Float, Int

from ..core import (
    LayerStack,
    StructureError,
    Tree,
    check_choice,
    check_integer,
    layer_slot,
    linear,
    num_layers,
    recomputed,
    recomputed_layer,
    rows,
)
from ..losses import chunked_cross_entropy, chunked_log_probs
from ..ops import AttentionMask, Implementation
from ._config import DecoderConfig
from ._experts import balance_loss
from ._layers import layer_forward, rms_norm, scaled
from ._shapes import block_name, parameter_shapes, split_block, with_settings
from .families import family_of
from .families._family import PREFIXES


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
        return _head_input(h, self.outer, self.config, for_logits=True), _head_weight(self.outer)

    def scores(self, h: Any) -> Float[Array, "B T C"]:
        """Return the outputs of the head of `with_score_head` at every position, in float32; `h` as in `log_probs`."""
        return linear(_head_input(h, self.outer, self.config), self.outer["score"]["weight"]).astype(jnp.float32)

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
        """Hugging Face modules of the checkpoint that are not part of the decoder, such as an image encoder."""
        return family_of(self.config).ignored if self.config.module_prefix != PREFIXES[0] else ()

    @property
    def expert_parameters(self) -> dict[str, tuple[str, ...]]:
        """Hugging Face parameters that hold all experts of a layer, mapped to the paths of the modules in them.

        ``{layer}`` stands for the layer's index. If `external_name` of the modules contains ``{expert}``, the parameter
        has shape [experts, out, in] with the modules concatenated along ``out``, otherwise [experts, in, out].
        """
        table, first = family_of(self.config).expert_parameters, self.config.num_dense_layers
        count = len(self.config.pattern)
        if count == 1:
            return {name.replace("{layer}", layer_slot(1, first)): paths for name, paths in table.items()}
        return {
            name.replace("{layer}", layer_slot(count, first + index)): tuple(
                path.replace("layers/", f"layers/{block_name(index)}/", 1) for path in paths
            )
            for index in range(count)
            for name, paths in table.items()
        }

    @property
    def out_first_experts(self) -> bool:
        """Whether Hugging Face parameters of all experts of a layer have shape [experts, out, in]."""
        return self.config.experts is not None and not self.config.experts.clamped

    @property
    def layer_strides(self) -> dict[str, tuple[int, int]]:
        """Stride and first index of the layers in each stack, by path, unless one stack holds all layers."""
        count, first = len(self.config.pattern), self.config.num_dense_layers
        if count == 1:
            return {"layers": (1, first)} if first else {}
        return {f"layers/{block_name(index)}": (count, first + index) for index in range(count)}

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
    return _head_input(_hidden(model, tokens, segment_ids, positions), model.outer, model.config)


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
    return Decoder(params["outer"], with_settings(params["layers"], config), config, jnp.dtype(compute_dtype).name)


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
        h_BTD = embed(outer, batch["tokens"], config, dtype)
        for index, layer_config in enumerate(config.leading):
            # A model has few leading layers, so the backward pass always recomputes them.
            apply = jax.checkpoint(recomputed(functools.partial(apply_layer, layer_config)))
            h_BTD = apply(outer["layers"][str(index)], h_BTD, batch)
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
        if balanced_experts is None or not isinstance(h, Routed):
            return h_BTD
        assert routing is not None
        return _add_routing(h, h_BTD, routing, segments)

    def last(outer: Tree, h: Any, batch: Tree) -> tuple[Array, dict[str, Array]]:
        h_BTD = _head_input(h, outer, config, for_logits=True)
        value = chunked_cross_entropy(h_BTD, _head_weight(outer), batch["labels"], soft_cap=config.final_soft_cap)
        if balanced_experts is None:
            return value, {}
        segments = batch.get("segment_ids")
        is_token_BT = jnp.ones(batch["tokens"].shape, bool) if segments is None else segments > 0
        num_tokens_B = jnp.sum(is_token_BT, axis=1).astype(jnp.float32)
        router_loss = balance_loss(h.probs, h.counts, num_tokens_B, balanced_experts, config.num_layers)
        return value + balanced_experts.router_loss_coef * router_loss, {"router_loss": router_loss}

    return LayerStack(first, block, last, running=("embed/weight", "lm_head/weight"))


def embed(outer: Tree, tokens_BT: Array, config: DecoderConfig, dtype: Any) -> Array:
    """Return the scaled embeddings of tokens, [B, T, D]."""
    h_BTD = rows(outer["embed"]["weight"], tokens_BT, path="outer/embed").astype(dtype)
    if config.scale_embedding:  # Gemma rounds this factor to the dtype of the activations
        return h_BTD * jnp.asarray(config.embedding_scale, dtype)
    return scaled(h_BTD, config.embedding_scale)


def _add_routing(h: Routed, h_BTD: Array, routing: tuple[Array, Array], segments: Array | None) -> Routed:
    """Return the activations after a layer, with the sums of the router's outputs."""
    if segments is not None:  # padding also chooses experts, but must not count
        is_token = (segments > 0)[..., None]
        routing = (jnp.where(is_token, routing[0], 0.0), jnp.where(is_token, routing[1], 0.0))
    probs, counts = (jnp.sum(values, axis=1) for values in routing)
    return Routed(h_BTD, h.probs + probs, h.counts + counts)


def _head_input(h: Any, outer: Tree, config: DecoderConfig, *, for_logits: bool = False) -> Array:
    h_BTD = rms_norm(activations(h), outer["norm"]["weight"], config)
    # Logits are linear in the activations, so dividing the activations divides the logits.
    return scaled(h_BTD, 1 / config.logits_scaling) if for_logits else h_BTD


def _head_weight(outer: Tree) -> Any:
    return outer["lm_head" if "lm_head" in outer else "embed"]["weight"]
