"""Gemma 2 and 3: norms before and after attention and MLP, norm weights around zero, scaled embeddings, sliding layers.

Gemma 2 has soft caps on scores and logits. Gemma 3 normalises queries and keys, and its sliding-window layers use a
separate rotary base. From a Gemma 3 with images only the text decoder is read.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from ...core import ConfigError
from ._family import Family, layer_types, names, sliding_by_type

if TYPE_CHECKING:
    from .._config import DecoderConfig
    from .._schema import ConfigFile

_NORMS = {
    "attn_norm": "input_layernorm",
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
_FIXED = {"post_norm": True, "norm_offset": 1.0, "scale_embedding": True, "activation": "gelu_tanh"}
_DEFAULTS = {
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


def _read_gemma2(file: ConfigFile) -> dict[str, Any]:
    if file.query_pre_attn_scalar is None:
        raise ConfigError(
            "query_pre_attn_scalar is null",
            expected="a number",
            hint="copy config.json again, since scores have no scale without it",
        )
    return {
        "attention_scale": file.query_pre_attn_scalar**-0.5,
        "attention_soft_cap": file.attn_logit_softcapping or None,
        "final_soft_cap": file.final_logit_softcapping or None,
        **sliding_by_type(file, lambda index: index % 2 == 0),
    }


def _write_gemma2(config: DecoderConfig) -> dict[str, Any]:
    scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
    scalar = scale**-2
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
    names=names(norms=_NORMS),
    fixed=_FIXED,
    fields={"attention_bias": "attention_bias"},
    defaults={
        **_DEFAULTS,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "max_position_embeddings": 8192,
    },
    also=(
        "query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping sliding_window layer_types "
        "cache_implementation sliding_window_size"
    ).split(),
    neutral={
        "hidden_activation": ("gelu_pytorch_tanh", "gelu_new"),
        "hidden_act": ("gelu_pytorch_tanh", "gelu_new"),
        "use_bidirectional_attention": (False,),
    },
    read=_read_gemma2,
    write=_write_gemma2,
)


def _read_gemma3(file: ConfigFile) -> dict[str, Any]:
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
    names=names(qk_norm=True, norms=_NORMS),
    fixed={**_FIXED, "qk_norm": "head"},
    defaults={**_DEFAULTS, "max_position_embeddings": 2**17, "vocab_size": 262_208},
    also=(
        *GEMMA2.also,
        "sliding_window_pattern",
        "_sliding_window_pattern",
        "rope_local_base_freq",
    ),
    stored=("attn_logit_softcapping",),
    read=_read_gemma3,
    write=_write_gemma3,
    rope_theta=1e6,
    text_of="Gemma3ForConditionalGeneration",
)
