"""Families of Gemma."""

from __future__ import annotations

import dataclasses
from typing import Any

from ...core import ConfigError
from .._config import DecoderConfig
from ._family import (
    Factor,
    Family,
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
)
