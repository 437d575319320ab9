"""A small configuration of every family, with what makes it differ switched on."""

from __future__ import annotations

import dataclasses
from typing import Any

from lowtide.models import DecoderConfig, DeltaNet, Experts, RopeScaling

_SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
_EVERY_OTHER = (True, False, True, False)
_GEMMA: dict[str, Any] = {
    "post_norm": True,
    "norm_offset": 1.0,
    "scale_embedding": True,
    "activation": "gelu_tanh",
    "attention_scale": 24**-0.5,
    "sliding_window": 8,
    "tie_embeddings": True,
}
_LONG = RopeScaling(
    rope_type="longrope",
    factor=2.0,
    original_max_position_embeddings=32,
    short_factor=tuple(1.0 + i / 8 for i in range(3)),
    long_factor=tuple(2.0 + i / 2 for i in range(3)),
)
_YARN = RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, truncate=False)
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_token": 2}

_SHARED = Experts(intermediate_size=24, shared_size=40, shared_gate=True, **_EXPERTS)
_HYBRID: dict[str, Any] = {
    "qk_norm": "head",
    "norm_offset": 1.0,
    "attention_gate": True,
    "rotary_fraction": 0.25,
    "delta_net": DeltaNet(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=12),
    "delta_layers": (True, False, True, False),
}

_GEMMA4: dict[str, Any] = {
    **{"post_norm": True, "scale_embedding": True, "activation": "gelu_tanh", "tie_embeddings": True},
    **{"qk_norm": "head", "value_norm": True, "layer_scale": True, "attention_scale": 1.0, "final_soft_cap": 3.0},
    **{"sliding_window": 8, "sliding_layers": (True, False, True, False), "local_rope_theta": 1e4, "rope_theta": 1e6},
    **{"global_head_dim": 32, "num_global_kv_heads": 1, "keys_as_values": True},
    "rope_scaling": RopeScaling(rope_type="proportional", factor=1.0, partial_rotary_factor=0.5),
}

KINDS: dict[str, DecoderConfig] = {
    name: DecoderConfig(**{**_SIZES, "family": name.partition(" ")[0], **switches})
    for name, switches in {
        "llama": {"attention_bias": True, "mlp_bias": True},
        "mistral": {"sliding_window": 8},
        "qwen2": {"attention_bias": True, "attention_out_bias": False, "head_dim": 8},
        "qwen3": {"qk_norm": "head", "sliding_window": 8, "sliding_layers": (False, True, True, True)},
        "qwen3 yarn": {"qk_norm": "head", "rope_scaling": _YARN},
        "llama dynamic": {"rope_scaling": RopeScaling(rope_type="dynamic", factor=2.0), "max_position_embeddings": 32},
        "gemma2": {
            **_GEMMA,
            "sliding_layers": _EVERY_OTHER,
            "attention_soft_cap": 5.0,
            "final_soft_cap": 3.0,
        },
        "gemma3_text": {
            **_GEMMA,
            "sliding_layers": (True, True, False, True),
            "qk_norm": "head",
            "rope_theta": 1e6,
            "local_rope_theta": 1e4,
            "rope_scaling": RopeScaling(rope_type="linear", factor=8.0),
        },
        "smollm3": {"rotary_layers": (True, False, True, True), "tie_embeddings": True},
        "ministral3": {"rope_scaling": dataclasses.replace(_YARN, llama_4_scaling_beta=0.3, attention_factor=1.0)},
        "granite": {
            **{
                "embedding_multiplier": 12.0,
                "residual_multiplier": 0.22,
                "logits_scaling": 8.0,
                "attention_scale": 0.3,
            },
            "head_dim": 8,
        },
        "seed_oss": {"attention_bias": True, "attention_out_bias": False, "head_dim": 16},
        "olmo3": {
            **{"pre_norm": False, "post_norm": True, "qk_norm": "width", "head_dim": 8, "rope_scaling": _YARN},
            **{"sliding_window": 8, "sliding_layers": (True, True, False, True), "local_rope_theta": 1e4},
        },
        "gemma4_text": _GEMMA4,
        "gemma4_text experts": {
            **_GEMMA4,
            "experts": Experts(intermediate_size=24, beside_mlp=True, **_EXPERTS),
            "num_global_kv_heads": None,
            "keys_as_values": False,
        },
        "glm4_moe": {
            **{"qk_norm": "head", "rotary_fraction": 0.5, "attention_bias": True, "attention_out_bias": False},
            **{"num_layers": 5, "num_dense_layers": 2},
            "experts": Experts(
                **{"num_experts": 8, "num_experts_per_token": 3, "intermediate_size": 24, "shared_size": 48},
                **{"sigmoid": True, "routed_scale": 2.5, "num_groups": 4, "num_chosen_groups": 2},
            ),
        },
        "phi3": {"head_dim": 8, "fused_projections": True, "rotary_fraction": 0.75, "rope_scaling": _LONG},
        "olmo2": {"pre_norm": False, "post_norm": True, "qk_norm": "width"},
        "mixtral": {"experts": Experts(intermediate_size=48, **_EXPERTS)},
        "qwen3_moe": {"qk_norm": "head", "experts": Experts(intermediate_size=24, normalize=False, **_EXPERTS)},
        "qwen3_5_text": _HYBRID,
        "qwen3_5_moe_text": {**_HYBRID, "intermediate_size": 512, "experts": _SHARED},
        "qwen3_next": {
            **_HYBRID,
            "delta_net": DeltaNet(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=12, fused=True),
            "experts": dataclasses.replace(_SHARED, normalize=False),
        },
        "gpt_oss": {
            "attention_bias": True,
            "attention_sinks": True,
            "sliding_window": 8,
            "sliding_layers": _EVERY_OTHER,
            "rope_theta": 150_000.0,
            "rope_scaling": _YARN,
            "experts": Experts(intermediate_size=48, clamped=True, **_EXPERTS),
        },
    }.items()
}
