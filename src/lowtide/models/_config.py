"""What a decoder computes: sizes, and switches for what families of models do differently."""

from __future__ import annotations

import dataclasses
from typing import Literal

from ..core import ConfigError

RopeType = Literal["linear", "dynamic", "llama3", "yarn", "longrope"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the length a model was pretrained on."""

    rope_type: RopeType
    """``"linear"``, ``"dynamic"`` (NTK by the length at hand), ``"llama3"``, ``"yarn"`` or ``"longrope"``."""
    factor: float
    """How many times longer than pretraining."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths longer than ``original_max_position_embeddings / low_freq_factor`` are fully stretched."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths shorter than ``original_max_position_embeddings / high_freq_factor`` are kept."""
    original_max_position_embeddings: int = 8192
    """llama3, yarn, longrope: the length of pretraining, in tokens."""
    beta_fast: float = 32.0
    """yarn: frequencies that turn more often than this over the length of pretraining are kept."""
    beta_slow: float = 1.0
    """yarn: frequencies that turn less often than this are fully stretched."""
    truncate: bool = True
    """yarn: whether the bounds between are rounded to whole dimensions."""
    attention_factor: float | None = None
    """yarn, longrope: what queries and keys are multiplied by; None for what the rule says."""
    short_factor: tuple[float, ...] = ()
    """longrope: of each frequency, for sequences up to the length of pretraining."""
    long_factor: tuple[float, ...] = ()
    """longrope: of each frequency, for longer sequences."""

    def __post_init__(self) -> None:
        for good, expected, got in (
            (self.factor > 0, "factor > 0", self.factor),
            (
                self.high_freq_factor > self.low_freq_factor > 0,
                "high_freq_factor > low_freq_factor > 0",
                (self.high_freq_factor, self.low_freq_factor),
            ),
            (self.beta_fast >= self.beta_slow > 0, "beta_fast >= beta_slow > 0", (self.beta_fast, self.beta_slow)),
            (self.rope_type != "dynamic" or self.factor >= 1, "factor >= 1", self.factor),
            (self.original_max_position_embeddings > 1, "more than 1 token", self.original_max_position_embeddings),
            (all(x > 0 for x in (*self.short_factor, *self.long_factor)), "factors > 0", "one that is not"),
        ):
            if not good:
                raise ConfigError(
                    "RoPE scaling is out of range",
                    expected=expected,
                    got=got,
                    hint="copy the values of config.json's rope_scaling",
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts in place of the MLP of every block."""

    num_experts: int
    """Experts of a layer, E."""
    num_experts_per_token: int
    """Experts that compute each token."""
    intermediate_size: int
    """Width of the hidden layer of one expert, F."""
    normalize: bool = True
    """Whether the chosen experts' shares are made to add up to one (``norm_topk_prob``)."""
    clamped: bool = False
    """gpt-oss: gate and up in one interleaved matrix, all with biases, clamped, a sigmoid of its own."""
    limit: float = 7.0
    """gpt-oss: what gate and up are clamped to (``swiglu_limit``)."""
    router_loss_coef: float = 0.0
    """What the load-balancing loss (of Switch Transformer, arXiv:2101.03961) is multiplied by; 0 computes none."""

    def __post_init__(self) -> None:
        for name in ("num_experts", "num_experts_per_token", "intermediate_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} has to be at least 1", got=getattr(self, name), hint="check config.json")
        if self.num_experts_per_token > self.num_experts:
            raise ConfigError(
                "a token cannot choose more experts than there are",
                got=f"num_experts={self.num_experts}, num_experts_per_token={self.num_experts_per_token}",
                hint="check config.json",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes and switches of a decoder; names as in Hugging Face where it has one. The defaults are Llama's."""

    vocab_size: int
    """Rows of the embedding."""
    hidden_size: int
    """Width of the residual stream, D."""
    intermediate_size: int
    """Width of the gated hidden layer, F."""
    num_layers: int
    """Blocks (``num_hidden_layers``)."""
    num_heads: int
    """Query heads (``num_attention_heads``), N."""
    num_kv_heads: int
    """Key and value heads (``num_key_value_heads``), K; divides `num_heads`."""
    head_dim: int
    """Width of one head, H."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Stretching of the rotary frequencies, or None."""
    rms_norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    tie_embeddings: bool = False
    """Whether the head is the embedding (``tie_word_embeddings``)."""
    attention_bias: bool = False
    """Whether the query, key and value projections have a bias."""
    mlp_bias: bool = False
    """Whether the MLP projections have a bias."""
    max_position_embeddings: int = 2048
    """The longest sequence the model is meant for, in tokens."""
    bos_token_id: int | None = None
    """Token that begins a document, if any."""
    eos_token_id: int | tuple[int, ...] | None = None
    """Token or tokens that end a document, if any."""
    family: str = "llama"
    """``model_type`` of the Hugging Face family whose names and files these are."""
    attention_out_bias: bool | None = None
    """Whether the output projection has a bias; None: as `attention_bias` says."""
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    """Of the gate."""
    qk_norm: Literal["none", "head", "width"] = "none"
    """RMSNorm of queries and keys before rotation: of each head, or of all heads together."""
    pre_norm: bool = True
    """Whether attention and MLP read a normed residual stream."""
    post_norm: bool = False
    """Whether what attention and MLP return is normed before it is added."""
    norm_offset: float = 0.0
    """Added to the weights of all norms (Gemma: 1)."""
    scale_embedding: bool = False
    """Whether embeddings are multiplied by ``sqrt(hidden_size)``."""
    attention_scale: float | None = None
    """What scores are multiplied by; None: ``head_dim ** -0.5``."""
    rotary_fraction: float = 1.0
    """Part of each head that is rotated (``partial_rotary_factor``)."""
    sliding_window: int | None = None
    """Tokens that a query sees in layers with sliding attention, itself included; None: all before it."""
    sliding_layers: tuple[bool, ...] | None = None
    """Which layers have sliding attention; None: all, if there is a window."""
    local_rope_theta: float | None = None
    """Base of the rotary frequencies of layers with sliding attention, unscaled; None: as all others."""
    attention_soft_cap: float | None = None
    """Scores are squashed into this range by tanh, or None."""
    final_soft_cap: float | None = None
    """Logits are squashed into this range by tanh, or None."""
    attention_sinks: bool = False
    """Whether each head has a score that takes part in the softmax without a key."""
    fused_projections: bool = False
    """Whether query, key and value are one matrix, and gate and up another one (Phi-3)."""
    experts: Experts | None = None
    """A mixture of experts in place of the MLPs, or None."""
    module_prefix: str = "model."
    """What Hugging Face's names of the decoder's modules begin with. It is longer where a model of images and text
    holds the decoder. Adapters are saved under these names."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} has to be at least 1", got=getattr(self, name), hint="check config.json")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                "num_kv_heads has to divide num_heads",
                got=f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}",
                hint="each key/value head serves the same number of query heads",
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ConfigError(
                "head_dim has to be even", got=self.head_dim, hint="rotary embeddings turn pairs of dimensions"
            )
        if not 0 < self.rotary_fraction <= 1 or self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ConfigError(
                "the rotated part of a head has to be even",
                got=f"{self.rotary_dim} of {self.head_dim} dimensions",
                hint="rotary embeddings turn pairs of dimensions; check partial_rotary_factor",
            )
        self._check_rope()
        self._check_windows()

    @property
    def rotary_dim(self) -> int:
        """Dimensions of each head that are rotated."""
        return int(self.head_dim * self.rotary_fraction)

    @property
    def windows(self) -> int | tuple[int | None, ...] | None:
        """The window of all layers, or where they differ that of each; None is no window."""
        if self.sliding_window is None or self.sliding_layers is None or all(self.sliding_layers):
            return self.sliding_window
        if not any(self.sliding_layers):
            return None
        return tuple(self.sliding_window if slides else None for slides in self.sliding_layers)

    def _check_rope(self) -> None:
        scaling = self.rope_scaling
        if scaling is None:
            return
        if (
            self.rope_theta <= 1
            and scaling.rope_type == "yarn"
            or self.rotary_dim <= 2
            and scaling.rope_type == "dynamic"
        ):
            raise ConfigError(
                f"{scaling.rope_type} has no frequencies to stretch",
                expected="rope_theta above 1, and more than 2 dimensions that are rotated",
                got=f"{self.rope_theta} and {self.rotary_dim}",
                hint="check config.json",
            )
        if scaling.rope_type != "longrope":
            return
        sizes = (len(scaling.short_factor), len(scaling.long_factor))
        if sizes != (self.rotary_dim // 2,) * 2:
            raise ConfigError(
                "longrope has another number of factors than there are frequencies",
                expected=f"{self.rotary_dim // 2} in short_factor and long_factor",
                got=f"{sizes[0]} and {sizes[1]}",
                hint="copy config.json again",
            )

    def _check_windows(self) -> None:
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ConfigError("sliding_window has to be at least 1", got=self.sliding_window, hint="check config.json")
        layers = self.sliding_layers
        if layers is None:
            return
        if len(layers) != self.num_layers:
            raise ConfigError(
                "layer_types says another number of layers",
                expected=self.num_layers,
                got=len(layers),
                hint="check config.json",
            )
        if any(layers) and self.sliding_window is None:
            raise ConfigError(
                "layers with sliding attention need a sliding_window", got="none", hint="check config.json"
            )


LlamaConfig = DecoderConfig
"""The former name of `DecoderConfig`."""
