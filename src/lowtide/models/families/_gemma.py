"""Families of Gemma."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ...core import ConfigError
from .._config import DecoderConfig, Experts
from ._family import (
    IMAGE_MODULES,
    LAYER,
    Count,
    Factor,
    Family,
    Fraction,
    LayerTypes,
    NumLayers,
    Scale,
    Size,
    Theta,
    layer_types,
    names,
    sliding_by_type,
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


GEMMA2 = Family(
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


GEMMA3 = dataclasses.replace(
    GEMMA2,
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    names=names(qk_norm=True, norms=_GEMMA_NORMS),
    fixed={**GEMMA2.fixed, "qk_norm": "head"},
    field_types={
        **GEMMA2.field_types,
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
    ignored=IMAGE_MODULES,
)


# Gemma 4: heads of another width, and keys as values, in layers without a window; norms of values; experts beside the
# MLP. The small models (E2B, E4B) have embeddings per layer and layers that share keys, which are not supported.
def _read_gemma4(file: Any) -> dict[str, Any]:
    if file.rope_scaling is not None or not (file.local_rope.model_fields_set or file.rope_parameters is None):
        problem = "rope_parameters must have one entry for each of full_attention and sliding_attention"
        raise ConfigError(problem, hint="copy config.json again")
    layers = sliding_by_type(file, lambda index: (index + 1) % 6 != 0)
    layers["sliding_layers"] = (*layers["sliding_layers"][:-1], False)  # transformers forces the last layer, too
    experts = None
    if file.enable_moe_block:
        experts = Experts(
            num_experts=file.num_experts or 0,
            num_experts_per_token=file.top_k_experts or 0,
            intermediate_size=file.moe_intermediate_size or 0,
            beside_mlp=True,
        )
    return {
        **layers,
        **{"rotary_fraction": 1.0, "local_rope_theta": file.local_rope.rope_theta or 10_000.0, "experts": experts},
        **_read_global_heads(file, layers["sliding_layers"]),
    }


def _read_global_heads(file: Any, sliding_layers: Sequence[bool]) -> dict[str, int | None]:
    """Return the sizes of heads in layers without a window; transformers 5 writes them for each layer."""
    if file.per_layer_config is None:
        kv_heads = file.num_global_key_value_heads if file.attention_k_eq_v else None
        return {"global_head_dim": file.global_head_dim, "num_global_kv_heads": kv_heads}
    indices = [str(index) for index, is_sliding in enumerate(sliding_layers) if not is_sliding]
    sizes: dict[str, int] = file.per_layer_config.get(indices[0], {})
    if file.per_layer_config != dict.fromkeys(indices, sizes) or not {"head_dim", "num_key_value_heads"} >= {*sizes}:
        problem = "per_layer_config must give all layers without a window the same head_dim and num_key_value_heads"
        raise ConfigError(problem, hint="copy config.json again")
    return {"global_head_dim": sizes.get("head_dim"), "num_global_kv_heads": sizes.get("num_key_value_heads")}


def _write_gemma4(config: DecoderConfig) -> dict[str, Any]:
    experts = config.experts
    sizes = {"num_experts": "num_experts", "top_k_experts": "num_experts_per_token"}
    sizes |= {"moe_intermediate_size": "intermediate_size"}
    return {
        **{"sliding_window": config.sliding_window, "layer_types": layer_types(config)},
        **{"hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
        **{"global_head_dim": config.global_head_dim or config.head_dim},
        **{"num_global_key_value_heads": config.num_global_kv_heads, "enable_moe_block": experts is not None},
        **{name: getattr(experts, field, None) for name, field in sizes.items()},
    }


GEMMA4 = Family(
    model_type="gemma4_text",
    architecture="Gemma4ForCausalLM",
    names={
        **names(qk_norm=True, norms=_GEMMA_NORMS),
        "layers/mlp_inner_norm": f"{LAYER}.post_feedforward_layernorm_1",
        "layers/experts_norm": f"{LAYER}.pre_feedforward_layernorm_2",
        "layers/experts_post_norm": f"{LAYER}.post_feedforward_layernorm_2",
        "layers/layer_scalar/weight": f"{LAYER}.layer_scalar",
        "layers/mlp/router": f"{LAYER}.router.proj",
        "layers/mlp/router/scale": f"{LAYER}.router.scale",
        "layers/mlp/router/expert_scale": f"{LAYER}.router.per_expert_scale",
        "layers/mlp/experts/gate_up/weight": f"{LAYER}.experts.gate_up_proj",
        "layers/mlp/experts/down/weight": f"{LAYER}.experts.down_proj",
    },
    expert_parameters={f"{LAYER}.experts.{name}_proj": (f"layers/mlp/experts/{name}",) for name in ("gate_up", "down")},
    fixed={
        **{"post_norm": True, "scale_embedding": True, "activation": "gelu_tanh", "qk_norm": "head"},
        **{"value_norm": True, "layer_scale": True, "attention_scale": 1.0},
    },
    fields={
        **{"attention_bias": "attention_bias", "final_soft_cap": "final_logit_softcapping"},
        "keys_as_values": "attention_k_eq_v",
    },
    field_types={
        **{
            "attention_bias": bool,
            "sliding_window": Size,
            "layer_types": LayerTypes,
            "partial_rotary_factor": Fraction,
            "per_layer_config": dict[str, dict[str, Size]],
        },
        **{"final_logit_softcapping": Factor, "global_head_dim": Size, "num_global_key_value_heads": Size},
        **{"attention_k_eq_v": bool, "enable_moe_block": bool, "num_experts": Count, "top_k_experts": Count},
        **{"moe_intermediate_size": Size, "vocab_size_per_layer_input": Any},
    },
    defaults={
        **{"rms_norm_eps": 1e-6, "num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512},
        **{"tie_word_embeddings": True, "sliding_window": 512, "max_position_embeddings": 2**17},
        **{"bos_token_id": 2, "eos_token_id": 1, "hidden_size_per_layer_input": 256},
    },
    neutral={
        **{"hidden_activation": ("gelu_pytorch_tanh",), "hidden_act": ("gelu_pytorch_tanh",)},
        **{"use_bidirectional_attention": (False, "vision"), "partial_rotary_factor": (1.0,)},
        **{"hidden_size_per_layer_input": (0,), "num_kv_shared_layers": (0,)},
        "use_double_wide_mlp": (False,),
    },
    rope_theta=1e6,
    rope_defaults={
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    rope_fields=("proportional",),
    has_local_rope=True,
    writes_local_rope=True,
    writes_old_rope=False,
    read=_read_gemma4,
    write=_write_gemma4,
    text_of="Gemma4ForConditionalGeneration",
    ignored=(*IMAGE_MODULES, "embed_vision", "audio_tower", "embed_audio"),
)
