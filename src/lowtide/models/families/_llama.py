"""Llama and families that differ from it by switches, such as Mistral, OLMo, Phi, SmolLM3, Granite and gpt-oss."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from annotated_types import MaxLen

from ...core import ConfigError, shown
from .._config import DecoderConfig, Experts
from ._family import (
    ATTN,
    EXPERT_TYPES,
    IMAGE_MODULES,
    MLP,
    Count,
    Dropout,
    Family,
    Fraction,
    LayerIndex,
    LayerTypes,
    Length,
    Multiplier,
    NumLayers,
    Size,
    expert_parameters,
    layer_types,
    names,
    router_loss,
    sliding_by_type,
    write_experts,
)

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    names=names(),
    fields={"attention_bias": "attention_bias", "mlp_bias": "mlp_bias"},
    field_types={"attention_bias": bool, "mlp_bias": bool},
    defaults={"rms_norm_eps": 1e-6},
)

# Mistral: Llama with a sliding window.
MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    names=names(),
    fields={"sliding_window": "sliding_window"},
    field_types={"sliding_window": Size},
    defaults={"rms_norm_eps": 1e-6, "sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 2**17},
    text_of="Mistral3ForConditionalGeneration",
    ignored=IMAGE_MODULES,
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
MIXTRAL = Family(
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
    field_types={"sliding_window": Size, **EXPERT_TYPES},
    defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "max_position_embeddings": 2**17},
    rope_theta=1e6,
    neutral={"router_jitter_noise": (0.0,)},
    read=_read_mixtral,
    write=lambda config: write_experts(
        config, num_experts="num_local_experts", num_experts_per_token="num_experts_per_tok"
    ),
)

# OLMo 2: norms only after attention and MLP, and norms of queries and keys over all heads together.
OLMO2 = Family(
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


# OLMo 3: OLMo 2 with windows in three of four layers; only full-attention layers scale their rotary frequencies.
def _write_olmo3(config: DecoderConfig) -> dict[str, Any]:
    return {"sliding_window": config.sliding_window, "layer_types": layer_types(config)}


def _read_olmo3(file: Any) -> dict[str, Any]:
    local = file.local_rope.rope_theta
    theta = file.rope_theta or (file.rope_parameters and file.rope_parameters.rope_theta) or OLMO3.rope_theta
    return {
        **sliding_by_type(file, lambda index: (index + 1) % 4 != 0),
        "local_rope_theta": local or theta,
    }


OLMO3 = dataclasses.replace(
    OLMO2,
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    field_types={**OLMO2.field_types, "sliding_window": Size, "layer_types": LayerTypes},
    defaults={**OLMO2.defaults, "sliding_window": 4096},
    rope_theta=500_000.0,
    has_local_rope=True,
    writes_local_rope=True,
    read=_read_olmo3,
    write=_write_olmo3,
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


PHI3 = Family(
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


GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    names={
        **names(mlp=""),
        "layers/attn/sinks/weight": f"{ATTN}.sinks",
        "layers/mlp/router": f"{MLP}.router",
        **{
            f"layers/mlp/experts/{name}/{leaf}": f"{MLP}.experts.{name}_proj{suffix}"
            for name in ("gate_up", "down")
            for leaf, suffix in (("weight", ""), ("bias", "_bias"))
        },
    },
    expert_parameters=expert_parameters("gate_up"),
    fixed={"attention_bias": True, "attention_sinks": True},
    field_types={
        **EXPERT_TYPES,
        **{"sliding_window": Size, "layer_types": LayerTypes, "experts_per_token": Count},
        **{"swiglu_limit": Multiplier, "initial_context_length": Any},
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


# SmolLM3: every fourth layer has no rotary positions. With `use_sliding_window`, these layers have the window.
def _read_smollm3(file: Any) -> dict[str, Any]:
    interval = file.no_rope_layer_interval or 4
    rotates = file.no_rope_layers
    if rotates is None:
        rotates = [(index + 1) % interval != 0 for index in range(file.num_hidden_layers)]
    windows = {"sliding_window": None, "sliding_layers": None}
    if not file.use_sliding_window and "sliding_attention" in (file.layer_types or ()):
        raise ConfigError("layer_types has sliding_attention, but use_sliding_window is off", hint="set it to true")
    if file.use_sliding_window:
        windows = sliding_by_type(file, lambda index: not rotates[index])
    return {**windows, "rotary_layers": tuple(map(bool, rotates[: file.num_hidden_layers]))}


def _write_smollm3(config: DecoderConfig) -> dict[str, Any]:
    windows = {"sliding_window": config.sliding_window, "layer_types": layer_types(config)}
    rotates = config.rotary_layers or (True,) * config.num_layers
    return {
        **({} if config.sliding_window is None else windows),
        **{"use_sliding_window": config.sliding_window is not None, "pad_token_id": None},
        "no_rope_layers": [int(layer) for layer in rotates],
    }


SMOLLM3 = dataclasses.replace(
    LLAMA,
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    field_types={
        **{**LLAMA.field_types, "sliding_window": Size, "layer_types": LayerTypes, "use_sliding_window": bool},
        **{"no_rope_layers": Annotated[list[Literal[0, 1]], MaxLen(10_000)], "no_rope_layer_interval": NumLayers},
        "max_window_layers": LayerIndex,
    },
    defaults={"rms_norm_eps": 1e-6, "num_key_value_heads": 4, "tie_word_embeddings": True},
    rope_theta=2e6,
    stored=(),
    read=_read_smollm3,
    write=_write_smollm3,
)

# Ministral 3: Mistral with YaRN, and queries that grow with the position.
MINISTRAL3 = dataclasses.replace(
    MISTRAL,
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "max_position_embeddings": 2**18, "head_dim": 128},
    rope_theta=1e6,
    rope_defaults={
        **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384},
        **{"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
    },
    rope_fields=("mscale", "mscale_all_dim", "llama_4_scaling_beta"),
    rope_ignored=("max_position_embeddings",),
)

# Granite: Llama with four multipliers.
_GRANITE_FIELDS = {
    **{"embedding_multiplier": "embedding_multiplier", "residual_multiplier": "residual_multiplier"},
    **{"logits_scaling": "logits_scaling", "attention_scale": "attention_multiplier"},
}
GRANITE = dataclasses.replace(
    LLAMA,
    model_type="granite",
    architecture="GraniteForCausalLM",
    fields={**LLAMA.fields, **_GRANITE_FIELDS},
    field_types={**LLAMA.field_types, **dict.fromkeys(_GRANITE_FIELDS.values(), Multiplier)},
    defaults={"rms_norm_eps": 1e-6, **dict.fromkeys(_GRANITE_FIELDS.values(), 1.0)},
    write=lambda config: {
        "attention_multiplier": config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
    },
)

# Seed-OSS: Llama with wide heads, and biases on query, key and value only.
SEED_OSS = dataclasses.replace(
    LLAMA,
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    fields={**LLAMA.fields, "attention_out_bias": "attention_out_bias"},
    field_types={**LLAMA.field_types, "attention_out_bias": bool, "residual_dropout": Dropout},
    defaults={
        **{"rms_norm_eps": 1e-6, "num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
        "attention_out_bias": False,
    },
    write=lambda config: {"attention_dropout": 0.0, "residual_dropout": 0.0},
)

# GLM-4.5: experts with sigmoid scores and a shared expert, after leading layers with an MLP; half of each head rotates.
# Files hold one layer more, which predicts a later token.
_GLM_EXPERTS = {
    **{"num_experts": "n_routed_experts", "num_experts_per_token": "num_experts_per_tok"},
    **{"intermediate_size": "moe_intermediate_size", "normalize": "norm_topk_prob"},
    **{"routed_scale": "routed_scaling_factor", "num_groups": "n_group", "num_chosen_groups": "topk_group"},
}


def _read_glm4_moe(file: Any) -> dict[str, Any]:
    sizes = {field: getattr(file, name) for field, name in _GLM_EXPERTS.items()}
    shared_size = file.moe_intermediate_size * file.n_shared_experts
    return {
        "experts": Experts(**sizes, shared_size=shared_size, sigmoid=True),
        "qk_norm": "head" if file.use_qk_norm else "none",
    }


def _write_glm4_moe(config: DecoderConfig) -> dict[str, Any]:
    experts = config.experts
    assert experts is not None
    return {
        **{name: getattr(experts, field) for field, name in _GLM_EXPERTS.items()},
        **{"n_shared_experts": experts.shared_size // experts.intermediate_size},
        **{"use_qk_norm": config.qk_norm == "head", "partial_rotary_factor": config.rotary_fraction},
    }


GLM4_MOE = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    names={
        **names(qk_norm=True),
        "layers/mlp/router": f"{MLP}.gate",
        "layers/mlp/router/correction": f"{MLP}.gate.e_score_correction_bias",
        **{f"layers/mlp/experts/{name}": f"{MLP}.experts.{{expert}}.{name}_proj" for name in ("gate", "up", "down")},
        **{f"layers/mlp/shared/{name}_proj": f"{MLP}.shared_experts.{name}_proj" for name in ("gate", "up", "down")},
    },
    expert_parameters=expert_parameters(),
    fixed={"attention_out_bias": False},
    fields={"attention_bias": "attention_bias", "num_dense_layers": "first_k_dense_replace"},
    field_types={
        **{"attention_bias": bool, "use_qk_norm": bool, "norm_topk_prob": bool, "partial_rotary_factor": Fraction},
        **{"n_routed_experts": Count, "num_experts_per_tok": Count, "moe_intermediate_size": Size},
        **{"n_shared_experts": Count, "n_group": Count, "topk_group": Count, "routed_scaling_factor": Multiplier},
        **{"first_k_dense_replace": LayerIndex, "num_nextn_predict_layers": Any, "num_mtp_layers": Any},
    },
    defaults={
        **{"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "partial_rotary_factor": 0.5, "first_k_dense_replace": 1},
        **{"n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_shared_experts": 1},
        **{"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True},
    },
    skips_extra_layers=True,
    read=_read_glm4_moe,
    write=_write_glm4_moe,
)
