"""The supported model families as data: parameter names, and fields of `config.json` with their types and meaning.

There is one table (`Family`) for each ``model_type``, such as ``llama``, ``qwen3`` and ``gpt_oss``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt, MaxLen

from ...core import ConfigError, check_choice, shown
from .._config import DecoderConfig, Experts

# Types of fields of `config.json` with ranges, which pydantic checks. They use `annotated_types` instead of
# `pydantic.Field`, since pydantic takes a quarter of a second to import.
_MOST_LAYERS = 10_000
NumLayers = Annotated[int, Ge(1), Le(_MOST_LAYERS)]
LayerIndex = Annotated[int, Ge(0), Le(_MOST_LAYERS)]
Size = Annotated[int, Ge(1), Le(2**22)]
Length = Annotated[int, Ge(1), Le(2**40)]
Count = Annotated[int, Ge(1), Le(2**16)]
LayerTypes = Annotated[list[Literal["full_attention", "sliding_attention"]], MaxLen(_MOST_LAYERS)]
Factor = Annotated[float, Ge(0), Le(1e6)]
Scale = Annotated[float, Ge(1e-3), Le(1e6)]
Fraction = Annotated[float, Gt(0), Le(1)]
Theta = Annotated[float, Ge(1), Le(1e15)]
Dropout = Annotated[float, Ge(0), Lt(1)]
"""Type of dropout rates. A rate in a file is not applied, and causes a warning."""

COMMON: Mapping[str, str] = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "max_position_embeddings": "max_position_embeddings",
}
"""Fields of `DecoderConfig` that every family has, and their names in `config.json`."""

_ALWAYS_READ = (
    "architectures model_type hidden_act rope_theta rope_scaling rope_parameters attention_dropout "
    "bos_token_id eos_token_id quantization_config"
).split()
"""Fields of `config.json` that are read for every family, in addition to `COMMON`."""
ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
"""Activation functions of `DecoderConfig`, and their names in `config.json`."""
IMAGE_MODULES = ("vision_tower", "multi_modal_projector")
"""Modules of multimodal models that process images; loading skips them."""
PREFIXES = ("model.", "model.language_model.", "language_model.model.")
"""Module name prefixes of text models, and of multimodal models since `transformers` 4.52 and before that version."""
_ATTN, _MLP = "model.layers.{layer}.self_attn", "model.layers.{layer}.mlp"
_NORMS: Mapping[str, str] = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


def names(
    *, attn: str = "q k v o", mlp: str = "gate up down", qk_norm: bool = False, norms: Mapping[str, str] = _NORMS
) -> dict[str, str]:
    """Return a table from module paths to Hugging Face names, with ``{layer}`` for the index of a layer.

    `attn` and `mlp` list projections, separated by blanks. `norms` maps our names of norms to Hugging Face's names.
    """
    return {
        **{"outer/embed": "model.embed_tokens", "outer/norm": "model.norm", "outer/lm_head": "lm_head"},
        **{f"layers/{norm}": f"model.layers.{{layer}}.{hf_name}" for norm, hf_name in norms.items()},
        **{f"layers/attn/{name}_proj": f"{_ATTN}.{name}_proj" for name in attn.split()},
        **({f"layers/attn/{name}_norm": f"{_ATTN}.{name}_norm" for name in "qk"} if qk_norm else {}),
        **{f"layers/mlp/{name}_proj": f"{_MLP}.{name}_proj" for name in mlp.split()},
    }


def expert_parameters(gate_up: str = "gate up") -> dict[str, tuple[str, ...]]:
    """Return a table for `Family.expert_parameters`; `gate_up` lists our modules that ``gate_up_proj`` concatenates."""
    experts = {"gate_up_proj": gate_up, "down_proj": "down"}
    return {
        f"{_MLP}.experts.{parameter}": tuple(f"layers/mlp/experts/{name}" for name in modules.split())
        for parameter, modules in experts.items()
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One family of Hugging Face models."""

    model_type: str
    """``model_type`` in `config.json`."""
    architecture: str
    """Name of the class in `transformers`."""
    names: Mapping[str, str]
    """Table from paths of modules, or of single leaves, to their names in checkpoints."""
    expert_parameters: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict[str, tuple[str, ...]])
    """Table from the `transformers` parameters that hold all experts of a layer to the modules that each parameter
    concatenates. Parameters and modules are in the order of `transformers`."""
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    """Fields of `DecoderConfig` with one value for the whole family."""
    fields: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    """Fields of `DecoderConfig` that are copied in addition to `COMMON`, and their names in `config.json`."""
    field_types: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    """Types by field of `config.json`, for fields that `fields` copies or `read` handles; each may be missing or null.
    Families with the same field give it the same type. `read` gets a field ``_name`` under the name ``old_name``."""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    """Defaults for fields missing from `config.json`: the defaults of the family's class in `transformers`."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies if `config.json` has none."""
    rope_aliases: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    """Older names of types of RoPE scaling in the family's files, with the present names."""
    has_local_rope: bool = False
    """Whether rotary settings in `config.json` can differ between sliding-window layers and other layers."""
    neutral: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict[str, tuple[Any, ...]])
    """Allowed values by field of `config.json`, in addition to null; any other value is an error."""
    stored: Sequence[str] = ()
    """Fields of `field_types` that the class in `transformers` stores but never applies; Lowtide ignores them, too."""
    read: Callable[[Any], Mapping[str, Any]] = lambda file: {}
    """Function that computes fields of `DecoderConfig` where copying is not enough. Its argument is the validated
    `config.json`, a `ConfigFile` of `models/_schema.py` with the fields of all families."""
    write: Callable[[DecoderConfig], Mapping[str, Any]] = lambda config: {}
    """Function that computes fields of `config.json` from a `DecoderConfig` where copying is not enough."""
    text_of: str | None = None
    """Architecture of a multimodal model whose text decoder belongs to this family."""

    @property
    def known(self) -> frozenset[str]:
        """Fields of `config.json` that are read for this family."""
        return frozenset([*COMMON.values(), *self.field_types, *_ALWAYS_READ])


def sliding_by_type(file: Any, is_sliding: Callable[[int], bool]) -> dict[str, Any]:
    """Return `sliding_window` and `sliding_layers`, from ``layer_types`` or, if that is missing, from `is_sliding`."""
    sliding_layers = [is_sliding(index) for index in range(file.num_hidden_layers)]
    if file.layer_types:
        sliding_layers = [layer_type == "sliding_attention" for layer_type in file.layer_types]
    return {"sliding_window": file.sliding_window, "sliding_layers": tuple(sliding_layers)}


def layer_types(config: DecoderConfig) -> list[str]:
    """Return the attention type of each layer as `config.json` names it."""
    sliding_layers = config.sliding_layers or (config.sliding_window is not None,) * config.num_layers
    return ["sliding_attention" if is_sliding else "full_attention" for is_sliding in sliding_layers]


def router_loss(file: Any) -> float:
    """Return the coefficient of the load-balancing loss; 0 unless ``output_router_logits`` switches the loss on."""
    return (file.router_aux_loss_coef or 0.0) if file.output_router_logits else 0.0


def write_experts(config: DecoderConfig, **hf_names: str) -> dict[str, Any]:
    """Return `config.json` fields of the router loss, and the fields of `Experts` under their names in `hf_names`."""
    experts = config.experts
    assert experts is not None
    fields = {hf_name: getattr(experts, name) for name, hf_name in hf_names.items()}
    coef = experts.router_loss_coef
    return {**fields, "output_router_logits": coef > 0, **({"router_aux_loss_coef": coef} if coef else {})}


_EXPERT_TYPES: dict[str, Any] = {
    **{"num_local_experts": Count, "num_experts_per_tok": Count},
    **{"output_router_logits": bool, "router_aux_loss_coef": Factor},
}

_LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    names=names(),
    fields={"attention_bias": "attention_bias", "mlp_bias": "mlp_bias"},
    field_types={"attention_bias": bool, "mlp_bias": bool},
    defaults={"rms_norm_eps": 1e-6},
)

# Mistral: Llama with a sliding window.
_MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    names=names(),
    fields={"sliding_window": "sliding_window"},
    field_types={"sliding_window": Size},
    defaults={"rms_norm_eps": 1e-6, "sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 2**17},
)


# Mixtral: a mixture of experts replaces each MLP of Mistral.
def _read_mixtral(file: Any) -> dict[str, Any]:
    return {
        "experts": Experts(
            num_experts=file.num_local_experts or 8,
            num_experts_per_token=file.num_experts_per_tok or 2,
            intermediate_size=file.intermediate_size,
            router_loss_coef=router_loss(file),
        )
    }


_MIXTRAL_MOE = "model.layers.{layer}.block_sparse_moe"
_MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    names={
        **names(mlp=""),
        "layers/mlp/router": f"{_MIXTRAL_MOE}.gate",
        "layers/mlp/experts/gate": f"{_MIXTRAL_MOE}.experts.{{expert}}.w1",
        "layers/mlp/experts/up": f"{_MIXTRAL_MOE}.experts.{{expert}}.w3",
        "layers/mlp/experts/down": f"{_MIXTRAL_MOE}.experts.{{expert}}.w2",
    },
    expert_parameters=expert_parameters(),
    fields={"sliding_window": "sliding_window"},
    field_types={"sliding_window": Size, **_EXPERT_TYPES},
    defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "max_position_embeddings": 2**17},
    rope_theta=1e6,
    neutral={"router_jitter_noise": (0.0,)},
    read=_read_mixtral,
    write=lambda config: write_experts(
        config, num_experts="num_local_experts", num_experts_per_token="num_experts_per_tok"
    ),
)

# OLMo 2: norms only after attention and MLP, and norms of queries and keys over all heads together.
_OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    names=names(
        qk_norm=True,
        norms={"attn_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"},
    ),
    fixed={"pre_norm": False, "post_norm": True, "qk_norm": "width"},
    fields={"attention_bias": "attention_bias"},
    field_types={"attention_bias": bool},
    defaults={"rms_norm_eps": 1e-5, "eos_token_id": 50279},
)

# Phi-3 and the smaller Phi-4 models: Llama with fused projections, partial rotation, and LongRoPE.
_PHI3_CODE = ("configuration_phi3.Phi3Config", "modeling_phi3.Phi3ForCausalLM")
"""Remote code of checkpoints that are older than the class in transformers; it computes the same as the class."""


def _read_phi3(file: Any) -> dict[str, Any]:
    auto_map = file.auto_map or {}
    code: Any = auto_map if isinstance(auto_map, dict) else {"auto_map": auto_map}
    for name, value in code.items():
        if name != "AutoTokenizer" and not str(value).endswith(_PHI3_CODE):
            hint = "remove auto_map if its code computes the same as transformers' Phi3; Lowtide does not run it"
            raise ConfigError(f"auto_map names custom code of the model, {shown(value)}", hint=hint)
    return {}


def _write_phi3(config: DecoderConfig) -> dict[str, Any]:
    scaling = config.rope_scaling
    original = scaling.original_max_position_embeddings if scaling is not None else config.max_position_embeddings
    return {
        "partial_rotary_factor": config.rotary_fraction,
        "original_max_position_embeddings": original,
        "pad_token_id": None,  # transformers' default pad token is out of range for small vocabularies
    }


_PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    names=names(attn="qkv o", mlp="gate_up down"),
    fixed={"fused_projections": True},
    fields={"sliding_window": "sliding_window"},
    field_types={
        **{"sliding_window": Size, "original_max_position_embeddings": Length, "partial_rotary_factor": Fraction},
        **{"resid_pdrop": Dropout, "embd_pdrop": Dropout, "auto_map": Any},
    },
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 32000},
    rope_aliases={"su": "longrope", "yarn": "longrope"},
    neutral={
        "ignore_keys_at_rope_validation": (None,),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        # Phi-4-mini: its published config has these fields, its model does not read them
        "full_attn_mod": (1,),
        "interpolate_factor": (1,),
    },
    read=_read_phi3,
    write=_write_phi3,
)


# Qwen 2, 2.5 and 3, dense and with a mixture of experts. Qwen2 has biases on query, key and value. Qwen3 normalises
# each head's query and key. Published models switch sliding windows off. If a config switches them on, layers from
# `max_window_layers` on have a window.
def _read_qwen(file: Any) -> dict[str, Any]:
    if not file.use_sliding_window:
        return {"sliding_window": None, "sliding_layers": None}
    return sliding_by_type(file, lambda index: index >= (file.max_window_layers or 0))


def _write_qwen(config: DecoderConfig) -> dict[str, Any]:
    if config.sliding_window is None:
        return {"use_sliding_window": False}
    types = layer_types(config)
    first = types.index("sliding_attention") if "sliding_attention" in types else len(types)
    return {
        "use_sliding_window": True,
        "sliding_window": config.sliding_window,
        "max_window_layers": first,
        "layer_types": types,
    }


_QWEN_WINDOWS = {"use_sliding_window": bool, "sliding_window": Size, "max_window_layers": LayerIndex}
_QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    names=names(),
    fixed={"attention_bias": True, "attention_out_bias": False},
    field_types={**_QWEN_WINDOWS, "layer_types": LayerTypes},
    defaults={
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "num_key_value_heads": 32,
    },
    read=_read_qwen,
    write=_write_qwen,
)

_QWEN3 = dataclasses.replace(
    _QWEN2,
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    names=names(qk_norm=True),
    fixed={"qk_norm": "head"},
    fields={"attention_bias": "attention_bias"},
    field_types={**_QWEN2.field_types, "attention_bias": bool},
    defaults={**_QWEN2.defaults, "head_dim": 128},
)


def _read_qwen3_moe(file: Any) -> dict[str, Any]:
    return {
        "sliding_window": file.sliding_window if file.use_sliding_window else None,
        "experts": Experts(
            # transformers 5.1 and newer write only the second name
            num_experts=file.num_experts or file.num_local_experts or 128,
            num_experts_per_token=file.num_experts_per_tok or 8,
            intermediate_size=file.moe_intermediate_size or 768,
            normalize=bool(file.norm_topk_prob),
            router_loss_coef=router_loss(file),
        ),
    }


def _write_qwen3_moe(config: DecoderConfig) -> dict[str, Any]:
    fields = {"intermediate_size": "moe_intermediate_size", "normalize": "norm_topk_prob"}
    return {
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        **write_experts(config, num_experts="num_experts", num_experts_per_token="num_experts_per_tok", **fields),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


_QWEN3_MOE = dataclasses.replace(
    _QWEN3,
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    names={
        **names(qk_norm=True, mlp=""),
        "layers/mlp/router": f"{_MLP}.gate",
        **{f"layers/mlp/experts/{name}": f"{_MLP}.experts.{{expert}}.{name}_proj" for name in ("gate", "up", "down")},
    },
    expert_parameters=expert_parameters(),
    field_types=_EXPERT_TYPES
    | _QWEN_WINDOWS
    | {"attention_bias": bool, "num_experts": Count, "moe_intermediate_size": Size, "norm_topk_prob": bool},
    defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "num_key_value_heads": 4, "sliding_window": 4096},
    neutral={"decoder_sparse_step": (1,), "mlp_only_layers": ([],)},
    read=_read_qwen3_moe,
    write=_write_qwen3_moe,
)

# Gemma 2 and 3: norms before and after attention and MLP, norm weights stored minus 1, scaled embeddings, windows.
# Gemma 2 has soft caps on scores and logits. Gemma 3 normalises queries and keys, and its sliding-window layers use a
# separate rotary base. If a Gemma 3 model also reads images, only its text decoder is loaded.
_GEMMA_NORMS = {
    "attn_norm": "input_layernorm",
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
_GEMMA_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "hidden_activation": "gelu_pytorch_tanh",
    "bos_token_id": 2,
    "eos_token_id": 1,
}


def _read_gemma2(file: Any) -> dict[str, Any]:
    if file.query_pre_attn_scalar is None:
        raise ConfigError("query_pre_attn_scalar must be a number, not null: attention scores have no scale without it")
    return {
        "attention_scale": file.query_pre_attn_scalar**-0.5,
        "attention_soft_cap": file.attn_logit_softcapping or None,
        "final_soft_cap": file.final_logit_softcapping or None,
        **sliding_by_type(file, lambda index: index % 2 == 0),
    }


def _write_gemma2(config: DecoderConfig) -> dict[str, Any]:
    scalar = (config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale) ** -2
    return {
        "attn_logit_softcapping": config.attention_soft_cap,
        "final_logit_softcapping": config.final_soft_cap,
        "query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-6 * scalar else scalar,
        "sliding_window": config.sliding_window,
        "layer_types": layer_types(config),
        "hidden_activation": "gelu_pytorch_tanh",
        "use_bidirectional_attention": False,
    }


_GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    names=names(norms=_GEMMA_NORMS),
    fixed={"post_norm": True, "norm_offset": 1.0, "scale_embedding": True, "activation": "gelu_tanh"},
    fields={"attention_bias": "attention_bias"},
    field_types={
        **{"attention_bias": bool, "sliding_window": Size, "layer_types": LayerTypes},
        **{"query_pre_attn_scalar": Scale, "attn_logit_softcapping": Factor, "final_logit_softcapping": Factor},
        **{"cache_implementation": Any, "sliding_window_size": Any},
    },
    defaults={
        **_GEMMA_DEFAULTS,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "max_position_embeddings": 8192,
    },
    neutral={
        "hidden_activation": ("gelu_pytorch_tanh", "gelu_new"),
        "hidden_act": ("gelu_pytorch_tanh", "gelu_new"),
        "use_bidirectional_attention": (False,),
    },
    read=_read_gemma2,
    write=_write_gemma2,
)


def _read_gemma3(file: Any) -> dict[str, Any]:
    period = file.sliding_window_pattern or file.old_sliding_window_pattern or 6
    return {
        **_read_gemma2(file),
        "attention_soft_cap": None,
        **sliding_by_type(file, lambda index: (index + 1) % period != 0),
        "local_rope_theta": file.local_rope.rope_theta or file.rope_local_base_freq or 10_000.0,
    }


def _write_gemma3(config: DecoderConfig) -> dict[str, Any]:
    return {**_write_gemma2(config), "rope_local_base_freq": config.local_rope_theta}


_GEMMA3 = dataclasses.replace(
    _GEMMA2,
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    names=names(qk_norm=True, norms=_GEMMA_NORMS),
    fixed={**_GEMMA2.fixed, "qk_norm": "head"},
    field_types={
        **_GEMMA2.field_types,
        "sliding_window_pattern": NumLayers,
        "_sliding_window_pattern": NumLayers,
        "rope_local_base_freq": Theta,
    },
    defaults={**_GEMMA_DEFAULTS, "max_position_embeddings": 2**17, "vocab_size": 262_208},
    has_local_rope=True,
    stored=("attn_logit_softcapping",),
    read=_read_gemma3,
    write=_write_gemma3,
    rope_theta=1e6,
    text_of="Gemma3ForConditionalGeneration",
)


# gpt-oss: experts with biases and clamped gates, attention sinks, and a sliding window in every other layer.
def _read_gpt_oss(file: Any) -> dict[str, Any]:
    return {
        **sliding_by_type(file, lambda index: index % 2 == 0),
        "experts": Experts(
            num_experts=file.num_local_experts or 128,
            num_experts_per_token=file.num_experts_per_tok or file.experts_per_token or 4,
            intermediate_size=file.intermediate_size,
            clamped=True,
            limit=7.0 if file.swiglu_limit is None else file.swiglu_limit,
            router_loss_coef=router_loss(file),
        ),
    }


def _write_gpt_oss(config: DecoderConfig) -> dict[str, Any]:
    fields = {"num_experts": "num_local_experts", "num_experts_per_token": "num_experts_per_tok"}
    return {
        "attention_bias": True,
        "sliding_window": config.sliding_window,
        "layer_types": layer_types(config),
        **write_experts(config, **fields, limit="swiglu_limit"),
    }


_GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    names={
        **names(mlp=""),
        "layers/attn/sinks/weight": f"{_ATTN}.sinks",
        "layers/mlp/router": f"{_MLP}.router",
        **{
            f"layers/mlp/experts/{name}/{leaf}": f"{_MLP}.experts.{name}_proj{suffix}"
            for name in ("gate_up", "down")
            for leaf, suffix in (("weight", ""), ("bias", "_bias"))
        },
    },
    expert_parameters=expert_parameters("gate_up"),
    fixed={"attention_bias": True, "attention_sinks": True},
    field_types={
        **_EXPERT_TYPES,
        **{"sliding_window": Size, "layer_types": LayerTypes, "experts_per_token": Count},
        **{"swiglu_limit": Annotated[float, Gt(0), Le(1e6)], "initial_context_length": Any},
    },
    defaults={
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "max_position_embeddings": 2**17,
    },
    rope_theta=150_000.0,
    neutral={"attention_bias": (True,)},
    read=_read_gpt_oss,
    write=_write_gpt_oss,
)

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (_LLAMA, _MISTRAL, _QWEN2, _QWEN3, _GEMMA2, _GEMMA3, _PHI3, _OLMO2, _MIXTRAL, _QWEN3_MOE, _GPT_OSS)
}
"""Families by `model_type`."""


def family_of(config: DecoderConfig) -> Family:
    """Return the family that defines the names and files of a config's model; an unknown family raises ConfigError."""
    check_choice("family", config.family, [*FAMILIES])
    return FAMILIES[config.family]
