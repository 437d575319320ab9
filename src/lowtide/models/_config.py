"""Configuration of a decoder: sizes, and switches for the differences between model families."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal, get_args

from ..core import ConfigError, check_choice, check_integer, check_number

Activation = Literal["silu", "gelu", "gelu_tanh"]
QkNorm = Literal["none", "head", "width"]
RopeType = Literal["linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]
ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "linear": (),
    "dynamic": (),
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": ("beta_fast", "beta_slow", "truncate", "attention_factor", "llama_4_scaling_beta"),
    "longrope": ("short_factor", "long_factor", "attention_factor"),
    "proportional": ("partial_rotary_factor",),
}
"""Names of the `RopeScaling` fields that a type uses, by type; factor and pretraining length are not listed."""

NO_WINDOW = 2**30
"""Value of the integer leaf ``layers/attn/window`` for a layer without a window. Only models with windows in some of
their layers have this leaf, and those without rotation in some layers a leaf ``layers/attn/rotates`` of zeros and ones.
No file contains these leaves."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Scaling of rotary frequencies, for sequences longer than those of pretraining.

    Raises:
        ConfigError: for an unknown type, or a factor or a length out of range.
    """

    rope_type: RopeType
    """``"linear"``, ``"dynamic"`` (NTK for the current length), ``"llama3"``, ``"yarn"``, ``"longrope"`` or
    ``"proportional"``."""
    factor: float
    """Ratio of the supported length to the length of pretraining; linear, llama3 and yarn divide frequencies by it."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths longer than ``original_max_position_embeddings / low_freq_factor`` are fully scaled."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths shorter than ``original_max_position_embeddings / high_freq_factor`` are not scaled."""
    original_max_position_embeddings: int = 8192
    """llama3, yarn, longrope: the length of pretraining, in tokens."""
    beta_fast: float = 32.0
    """yarn: frequencies with more rotations than this over the length of pretraining are not scaled."""
    beta_slow: float = 1.0
    """yarn: frequencies with fewer rotations than this are fully scaled."""
    truncate: bool = True
    """yarn: whether the frequency indices that follow from `beta_fast` and `beta_slow` are rounded to integers."""
    attention_factor: float | None = None
    """yarn, longrope: factor of the rotated queries and keys; None: computed from `factor`."""
    llama_4_scaling_beta: float | None = None
    """yarn: queries at position p are multiplied by ``1 + beta * log(1 + floor(p / original))`` (Ministral 3)."""
    partial_rotary_factor: float = 1.0
    """proportional: fraction of the frequencies that rotate; the others are zero (Gemma 4)."""
    short_factor: tuple[float, ...] = ()
    """longrope: divisor of each frequency, for sequences up to the length of pretraining."""
    long_factor: tuple[float, ...] = ()
    """longrope: divisor of each frequency, for longer sequences."""

    def __post_init__(self) -> None:
        check_choice("rope_type of RoPE scaling", self.rope_type, [*ROPE_FIELDS])
        check_number("factor of RoPE scaling", self.factor, above=0)
        if self.rope_type == "dynamic":
            check_number("factor of dynamic RoPE scaling", self.factor, least=1)
        check_number("low_freq_factor", self.low_freq_factor, above=0)
        hint = "it must be greater than low_freq_factor"
        check_number("high_freq_factor", self.high_freq_factor, above=self.low_freq_factor, hint=hint)
        check_number("beta_slow", self.beta_slow, above=0)
        check_number("beta_fast", self.beta_fast, least=self.beta_slow, hint="it must not be less than beta_slow")
        check_integer("original_max_position_embeddings", self.original_max_position_embeddings, 2)
        if self.llama_4_scaling_beta is not None:
            check_number("llama_4_scaling_beta", self.llama_4_scaling_beta, least=0)
        for factor in (*self.short_factor, *self.long_factor):
            check_number("each factor of longrope", factor, above=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """Mixture of experts (MoE) that replaces the MLP of every block.

    Raises:
        ConfigError: for a number or size below 1, a coefficient below 0, or more experts per token than experts.
    """

    num_experts: int
    """Number of experts per layer, E."""
    num_experts_per_token: int
    """Number of experts per token."""
    intermediate_size: int
    """Width of the hidden layer of one expert, F."""
    normalize: bool = True
    """Whether the weights of a token's chosen experts are normalised to sum to one (``norm_topk_prob``)."""
    clamped: bool = False
    """Whether experts are those of gpt-oss: interleaved gate and up, biases, clamping, and a scaled sigmoid gate."""
    limit: float = 7.0
    """gpt-oss: upper bound of the gate outputs, and bound of the up outputs' absolute values (``swiglu_limit``)."""
    router_loss_coef: float = 0.0
    """Factor of the load-balancing loss (Switch Transformer, arXiv:2101.03961); 0: it is not computed."""
    shared_size: int = 0
    """Width of the hidden layer of the shared expert, which computes every token; 0: no shared expert."""
    shared_gate: bool = False
    """Whether the output of the shared expert is multiplied by a sigmoid gate."""
    sigmoid: bool = False
    """Whether scores are sigmoids, and a stored correction changes which experts are chosen (DeepSeek V3, GLM-4.5)."""
    routed_scale: float = 1.0
    """Factor of the weights of the chosen experts."""
    num_groups: int = 1
    """Number of groups of experts; with several groups, a token chooses experts of `num_chosen_groups` groups."""
    num_chosen_groups: int = 1
    """Number of groups from which a token chooses experts."""
    beside_mlp: bool = False
    """Whether the experts are added to the MLP, with separate norms and a scaled router (Gemma 4)."""

    def __post_init__(self) -> None:
        check_integer("shared_size", self.shared_size, 0)
        check_number("routed_scale", self.routed_scale, above=0)
        check_integer("number of groups of experts", self.num_groups)
        check_integer("number of chosen groups of experts", self.num_chosen_groups, 1, self.num_groups)
        if self.num_experts % self.num_groups or self.num_experts // self.num_groups < 2 * (self.num_groups > 1):
            problem = f"{self.num_experts} experts cannot be divided into {self.num_groups} groups of two or more"
            raise ConfigError(problem)
        check_integer("num_experts", self.num_experts)
        hint = "it must not be greater than num_experts"
        check_integer("num_experts_per_token", self.num_experts_per_token, 1, self.num_experts, hint=hint)
        check_integer("intermediate_size of an expert", self.intermediate_size)
        check_number("router_loss_coef", self.router_loss_coef, least=0)
        check_number("limit of experts", self.limit, above=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaNet:
    """Gated delta net (arXiv:2412.06464), which replaces attention in some layers; see `lowtide.ops.gated_delta_rule`.

    Raises:
        ConfigError: for a number or size below 1, or a number of value heads that is no multiple of the key heads.
    """

    num_key_heads: int
    """Number of query and key heads."""
    num_value_heads: int
    """Number of value heads; a multiple of `num_key_heads`."""
    key_dim: int
    """Width of a query or key head."""
    value_dim: int
    """Width of a value head."""
    conv_size: int = 4
    """Number of tokens that the short convolution reads."""
    fused: bool = False
    """Whether the projections are two matrices, with the outputs of each key head side by side (Qwen3-Next)."""

    def __post_init__(self) -> None:
        for name in ("num_key_heads", "num_value_heads", "key_dim", "value_dim", "conv_size"):
            check_integer(f"{name} of a delta net", getattr(self, name))
        if self.num_value_heads % self.num_key_heads:
            raise ConfigError(f"{self.num_value_heads} value heads are no multiple of {self.num_key_heads} key heads")

    @property
    def qkv_width(self) -> int:
        """Width of queries, keys and values together."""
        return 2 * self.num_key_heads * self.key_dim + self.value_width

    @property
    def value_width(self) -> int:
        """Width of the values of all heads."""
        return self.num_value_heads * self.value_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes and switches of a decoder; names as in Hugging Face where possible. The defaults are Llama's.

    Raises:
        ConfigError: for a value out of range, an unknown `activation` or `qk_norm`, or fields that do not match.
    """

    vocab_size: int
    """Number of rows of the embedding, V."""
    hidden_size: int
    """Width of the residual stream, D."""
    intermediate_size: int
    """Width of the gated hidden layer, F."""
    num_layers: int
    """Number of blocks (``num_hidden_layers``), L."""
    num_heads: int
    """Number of query heads (``num_attention_heads``), N."""
    num_kv_heads: int
    """Number of key and value heads (``num_key_value_heads``), K; divides `num_heads`."""
    head_dim: int
    """Width of one head, H."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies, or None."""
    rms_norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    tie_embeddings: bool = False
    """Whether the head shares the embedding's weights (``tie_word_embeddings``)."""
    attention_bias: bool = False
    """Whether the query, key and value projections have a bias."""
    mlp_bias: bool = False
    """Whether the MLP projections have a bias."""
    max_position_embeddings: int = 2048
    """Longest sequence that the model supports, in tokens; with dynamic RoPE scaling, the length of pretraining."""
    bos_token_id: int | None = None
    """Token that begins a document, or None."""
    eos_token_id: int | tuple[int, ...] | None = None
    """Token or tokens that end a document, or None."""
    family: str = "llama"
    """``model_type`` of the Hugging Face family that defines module names and files."""
    attention_out_bias: bool | None = None
    """Whether the output projection has a bias; None: like `attention_bias`."""
    activation: Activation = "silu"
    """Activation function of the gate."""
    qk_norm: QkNorm = "none"
    """RMSNorm of queries and keys before the rotation: ``"head"`` per head, ``"width"`` over all heads together."""
    pre_norm: bool = True
    """Whether attention and MLP read a normalised residual stream."""
    post_norm: bool = False
    """Whether outputs of attention and MLP are normalised before the residual addition."""
    norm_offset: float = 0.0
    """Added to the weights of all norms (Gemma: 1)."""
    scale_embedding: bool = False
    """Whether embeddings are multiplied by ``sqrt(hidden_size)``."""
    embedding_multiplier: float = 1.0
    """Factor of the embeddings."""
    residual_multiplier: float = 1.0
    """Factor of the outputs of attention and MLP, before the residual addition."""
    logits_scaling: float = 1.0
    """Divisor of the logits."""
    attention_scale: float | None = None
    """Factor of attention scores; None: ``head_dim ** -0.5``."""
    rotary_fraction: float = 1.0
    """Fraction of each head that is rotated (``partial_rotary_factor``)."""
    rotary_layers: tuple[bool, ...] | None = None
    """Which layers rotate queries and keys; None: all layers."""
    sliding_window: int | None = None
    """Number of tokens that a query attends to in sliding-window layers, including itself; None: no window."""
    sliding_layers: tuple[bool, ...] | None = None
    """Which layers have sliding-window attention; None: all layers, if there is a window."""
    local_rope_theta: float | None = None
    """Base of the unscaled rotary frequencies of sliding-window layers; None: frequencies as in the other layers."""
    attention_soft_cap: float | None = None
    """Soft cap of attention scores, ``cap * tanh(scores / cap)``; None: no cap."""
    final_soft_cap: float | None = None
    """Soft cap of logits, ``cap * tanh(logits / cap)``; None: no cap."""
    attention_sinks: bool = False
    """Whether each head has an attention sink: a learned score in the softmax that belongs to no key."""
    attention_gate: bool = False
    """Whether the query projection also computes a sigmoid gate of the output of attention."""
    global_head_dim: int | None = None
    """Width of a head in layers without a window; None: `head_dim`."""
    num_global_kv_heads: int | None = None
    """Number of key and value heads in layers without a window; None: `num_kv_heads`."""
    keys_as_values: bool = False
    """Whether layers without a window use their keys, before norm and rotation, as values."""
    value_norm: bool = False
    """Whether the values of each head are normalised, without weights."""
    layer_scale: bool = False
    """Whether the output of each layer is multiplied by a stored number, which gets no gradient."""
    delta_net: DeltaNet | None = None
    """Gated delta net that replaces attention, or None."""
    delta_layers: tuple[bool, ...] | None = None
    """Which layers have the delta net in place of attention; None: all layers, if there is a delta net."""
    fused_projections: bool = False
    """Whether query, key and value projections are one matrix, and gate and up projections another matrix (Phi-3)."""
    experts: Experts | None = None
    """Mixture of experts that replaces the MLPs, or None."""
    num_dense_layers: int = 0
    """Number of leading layers that have an MLP in place of experts; their weights are in ``outer/layers``."""
    module_prefix: str = "model."
    """Prefix of the decoder's module names in Hugging Face checkpoints and in adapters; longer in multimodal models."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            check_integer(name, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            problem = f"num_kv_heads must be a divisor of num_heads = {self.num_heads}, not {self.num_kv_heads}"
            raise ConfigError(problem)
        check_number("rms_norm_eps", self.rms_norm_eps, least=0)
        check_number("norm_offset", self.norm_offset)
        for name in ("rope_theta", "local_rope_theta", "attention_scale", "attention_soft_cap", "final_soft_cap"):
            if name == "rope_theta" or getattr(self, name) is not None:
                check_number(name, getattr(self, name), above=0)
        check_choice("activation", self.activation, get_args(Activation))
        check_choice("qk_norm", self.qk_norm, get_args(QkNorm))
        check_integer("head_dim", self.head_dim, 2)
        check_number("rotary_fraction", self.rotary_fraction, above=0, most=1)
        if self.head_dim % 2 or self.rotary_dim < 2 or self.rotary_dim % 2:
            problem = f"head_dim and its rotated part must be even, not {self.head_dim} and {self.rotary_dim}"
            hint = "change head_dim or rotary_fraction, which is partial_rotary_factor in config.json"
            raise ConfigError(problem, hint=hint)
        self._check_rope()
        if self.sliding_window is not None:
            check_integer("sliding_window", self.sliding_window)
        for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling"):
            check_number(name, getattr(self, name), above=0)
        self._check_layers()

    def _check_layers(self) -> None:
        check_integer("num_dense_layers", self.num_dense_layers, 0, self.num_layers - 1)
        for name in ("sliding_layers", "delta_layers", "rotary_layers"):
            layers = getattr(self, name)
            if layers is not None and len(layers) != self.num_layers:
                problem = f"{name} must have {self.num_layers} values, one for each layer, not {len(layers)}"
                raise ConfigError(problem, hint="in config.json, layer_types lists the layers")
        if self.sliding_layers is not None and any(self.sliding_layers) and self.sliding_window is None:
            raise ConfigError("layers with sliding attention need a sliding_window")
        if self.delta_layers is not None and any(self.delta_layers) and self.delta_net is None:
            raise ConfigError("layers with a delta net need the sizes of a delta net")
        if self.delta_net is not None and self.rope_scaling and self.rope_scaling.rope_type in ("dynamic", "longrope"):
            problem = f"a model with a delta net cannot have the RoPE type {self.rope_scaling.rope_type}"
            hint = "use yarn; with this type, longer texts would need other states of the delta nets"
            raise ConfigError(problem, hint=hint)
        if self.attention_gate and self.fused_projections:
            raise ConfigError("attention_gate needs separate projections", hint="set fused_projections to False")
        if self.num_global_kv_heads is not None and self.num_heads % self.num_global_kv_heads:
            problem = f"num_global_kv_heads must be a divisor of num_heads = {self.num_heads}"
            raise ConfigError(f"{problem}, not {self.num_global_kv_heads}")
        if self.global_head_dim is not None and (self.global_head_dim < 2 or self.global_head_dim % 2):
            raise ConfigError(f"global_head_dim must be even, not {self.global_head_dim}")
        if self.rotary_layers is not None and len(self.pattern) > 1:
            raise ConfigError("rotary_layers needs layers with equal parameters", hint="leave rotary_layers out")

    @property
    def embedding_scale(self) -> float:
        """Factor of the embeddings, from `scale_embedding` and `embedding_multiplier`."""
        return self.embedding_multiplier * (math.sqrt(self.hidden_size) if self.scale_embedding else 1.0)

    @property
    def rotary_dim(self) -> int:
        """Number of rotated dimensions of each head."""
        return int(self.head_dim * self.rotary_fraction)

    @property
    def is_delta_net(self) -> bool:
        """Whether all layers have a delta net in place of attention."""
        return self.delta_net is not None and (self.delta_layers is None or all(self.delta_layers))

    @property
    def has_state(self) -> bool:
        """Whether some layers have a delta net, which keeps a state and not its past inputs."""
        return any(config.is_delta_net for config in (*self.leading, *self.pattern))

    @property
    def pattern(self) -> tuple[DecoderConfig, ...]:
        """Configurations of the layers of one group; the model repeats the group.

        Layers with different parameters cannot be slices of one stack. So each position in the group has its own
        stack, with one layer of each group. Models of equal layers have groups of one layer. Layers that differ only in
        their windows are equal.
        """
        return _pattern(self)

    @property
    def leading(self) -> tuple[DecoderConfig, ...]:
        """Configurations of the leading layers, whose parameters differ from those of all other layers."""
        kinds = _kinds(self)[: self.num_dense_layers]
        dense = dataclasses.replace(self, experts=None, num_dense_layers=0) if kinds else self
        return tuple(_layer_config(dense, 1, *kind) for kind in kinds)

    @property
    def projections(self) -> tuple[str, ...]:
        """Globs that select the projections of all layers, which `quantize` and adapters select by default."""
        return ("layers/**/*_proj", "outer/layers/**/*_proj")[: 1 + (self.num_dense_layers > 0)]

    @property
    def num_groups(self) -> int:
        """Number of groups of layers (see `pattern`); the length of the stacks, and of `lowtide.LayerStack`."""
        return self.pattern[0].num_layers

    @property
    def windows(self) -> int | tuple[int | None, ...] | None:
        """Window of all layers, or a tuple with one entry per layer if layers differ; None: no window."""
        if self.sliding_window is None or self.sliding_layers is None or all(self.sliding_layers):
            return self.sliding_window
        if not any(self.sliding_layers):
            return None
        return tuple(self.sliding_window if is_sliding else None for is_sliding in self.sliding_layers)

    @property
    def window_sizes(self) -> tuple[int, ...] | None:
        """Values of the leaf ``layers/attn/window``; None for models without this leaf."""
        windows = self.windows
        return tuple(sorted({window or NO_WINDOW for window in windows})) if isinstance(windows, tuple) else None

    def _check_rope(self) -> None:
        scaling = self.rope_scaling
        if scaling is None:
            return
        if scaling.rope_type == "yarn":
            check_number("rope_theta of a model with yarn", self.rope_theta, above=1)
        elif scaling.rope_type == "dynamic":
            check_integer("the number of rotated dimensions with dynamic RoPE scaling", self.rotary_dim, 4)
        elif scaling.rope_type == "longrope":
            count = self.rotary_dim // 2
            for name in ("short_factor", "long_factor"):
                if (size := len(getattr(scaling, name))) != count:
                    raise ConfigError(f"{name} must have {count} values, one for each frequency, not {size}")


def _kinds(config: DecoderConfig) -> list[tuple[bool, bool]]:
    """Return for each layer whether it has a delta net, and whether it has a window."""
    delta_layers = config.delta_layers or (config.delta_net is not None,) * config.num_layers
    sliding_layers = config.sliding_layers or (config.sliding_window is not None,) * config.num_layers
    return [*zip(delta_layers, sliding_layers, strict=True)]


@functools.lru_cache
def _pattern(config: DecoderConfig) -> tuple[DecoderConfig, ...]:
    if count := config.num_dense_layers:
        layers: dict[str, Any] = {
            name: None if values is None else values[count:]
            for name in ("sliding_layers", "delta_layers", "rotary_layers")
            for values in (getattr(config, name),)
        }
        return _pattern(dataclasses.replace(config, num_layers=config.num_layers - count, num_dense_layers=0, **layers))
    is_global = (config.global_head_dim, config.num_global_kv_heads, config.keys_as_values) != (None, None, False)
    kinds = _kinds(config)
    if not is_global and len({is_delta for is_delta, _ in kinds}) == 1:
        return (
            (config,)
            if kinds[0][0] or config.delta_net is None
            else (dataclasses.replace(config, delta_net=None, delta_layers=None),)
        )
    divisors = (size for size in range(1, config.num_layers + 1) if config.num_layers % size == 0)
    size = next(size for size in divisors if kinds == kinds[:size] * (config.num_layers // size))
    return tuple(_layer_config(config, config.num_layers // size, *kind) for kind in kinds[:size])


def _layer_config(config: DecoderConfig, num_layers: int, is_delta: bool, is_sliding: bool) -> DecoderConfig:
    """Return the configuration of equal layers, which are `num_layers` layers of a model."""
    kind: dict[str, Any] = {"num_layers": num_layers, "sliding_layers": None, "delta_layers": None}
    kind |= {} if is_delta else {"delta_net": None}
    kind |= {"global_head_dim": None, "num_global_kv_heads": None, "local_rope_theta": None}
    if is_sliding:
        local = {} if config.local_rope_theta is None else {"rope_theta": config.local_rope_theta, "rope_scaling": None}
        return dataclasses.replace(config, **kind, **local, keys_as_values=False)
    head_dim, num_kv_heads = config.global_head_dim, config.num_global_kv_heads
    kind |= {"head_dim": head_dim or config.head_dim, "num_kv_heads": num_kv_heads or config.num_kv_heads}
    return dataclasses.replace(config, **kind, sliding_window=None)
