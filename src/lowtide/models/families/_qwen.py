"""Families of Qwen: 2, 2.5 and 3, with MLPs or experts; Next and 3.5, with delta nets in most layers."""

from __future__ import annotations

import dataclasses
from typing import Any

from .._config import DecoderConfig, DeltaNet, Experts
from ._family import (
    EXPERT_TYPES,
    MLP,
    Count,
    Family,
    Fraction,
    LayerIndex,
    LayerTypes,
    NumLayers,
    Size,
    expert_parameters,
    layer_types,
    names,
    router_loss,
    sliding_by_type,
    write_experts,
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
QWEN2 = Family(
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

QWEN3 = dataclasses.replace(
    QWEN2,
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    names=names(qk_norm=True),
    fixed={"qk_norm": "head"},
    fields={"attention_bias": "attention_bias"},
    field_types={**QWEN2.field_types, "attention_bias": bool},
    defaults={**QWEN2.defaults, "head_dim": 128},
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


QWEN3_MOE = dataclasses.replace(
    QWEN3,
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    names={
        **names(qk_norm=True, mlp=""),
        "layers/mlp/router": f"{MLP}.gate",
        **{f"layers/mlp/experts/{name}": f"{MLP}.experts.{{expert}}.{name}_proj" for name in ("gate", "up", "down")},
    },
    expert_parameters=expert_parameters(),
    field_types=EXPERT_TYPES
    | _QWEN_WINDOWS
    | {"attention_bias": bool, "num_experts": Count, "moe_intermediate_size": Size, "norm_topk_prob": bool},
    defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "num_key_value_heads": 4, "sliding_window": 4096},
    neutral={"decoder_sparse_step": (1,), "mlp_only_layers": ([],)},
    read=_read_qwen3_moe,
    write=_write_qwen3_moe,
)


# Qwen3-Next and Qwen3.5: gated delta nets in three of four layers, gated attention with partial rotation in the others.
# Files of Qwen3.5 also hold an image encoder, and layers that predict several tokens (``mtp``); both are skipped. For
# text, the three rotary grids of its images have equal positions, so ``mrope_section`` has no effect.
_DELTA = "model.layers.{layer}.linear_attn"
_DELTA_PARTS = {
    "layers/delta/conv": f"{_DELTA}.conv1d",
    "layers/delta/log_decay/weight": f"{_DELTA}.A_log",
    "layers/delta/step_bias/weight": f"{_DELTA}.dt_bias",
    "layers/delta/norm": f"{_DELTA}.norm",
    "layers/delta/out_proj": f"{_DELTA}.out_proj",
}


# The names of the two small matrices do not end with ``_proj``, so that defaults neither adapt nor quantise them.
_DELTA_NAMES = {
    **{f"layers/delta/{name}_proj": f"{_DELTA}.in_proj_{name}" for name in ("qkv", "z")},
    **{"layers/delta/beta": f"{_DELTA}.in_proj_b", "layers/delta/step": f"{_DELTA}.in_proj_a", **_DELTA_PARTS},
}


_SHARED_NAMES = {
    **{f"layers/mlp/shared/{name}_proj": f"{MLP}.shared_expert.{name}_proj" for name in ("gate", "up", "down")},
    "layers/mlp/shared/gate": f"{MLP}.shared_expert_gate",
}
_DELTA_SIZES = {
    "num_key_heads": "linear_num_key_heads",
    "num_value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "conv_size": "linear_conv_kernel_dim",
}


def _read_delta(file: Any, *, fused: bool = False) -> dict[str, Any]:
    interval = file.full_attention_interval or 4
    types = file.layer_types or [
        "linear_attention" if (index + 1) % interval else "full_attention" for index in range(file.num_hidden_layers)
    ]
    sizes = {field: getattr(file, name) for field, name in _DELTA_SIZES.items()}
    return {
        "delta_net": DeltaNet(**sizes, fused=fused),
        "delta_layers": tuple(layer_type == "linear_attention" for layer_type in types),
    }


def _write_delta(config: DecoderConfig) -> dict[str, Any]:
    net = config.delta_net
    sizes = {} if net is None else {name: getattr(net, field) for field, name in _DELTA_SIZES.items()}
    layers = config.delta_layers or (net is not None,) * config.num_layers
    types = ["linear_attention" if is_delta else "full_attention" for is_delta in layers]
    return {**sizes, "layer_types": types, "partial_rotary_factor": config.rotary_fraction}


def _read_shared(file: Any, **options: Any) -> Experts:
    return Experts(
        num_experts=file.num_experts,
        num_experts_per_token=file.num_experts_per_tok,
        intermediate_size=file.moe_intermediate_size,
        shared_size=file.shared_expert_intermediate_size,
        shared_gate=True,
        router_loss_coef=router_loss(file),
        **options,
    )


def _write_shared(config: DecoderConfig, **fields: str) -> dict[str, Any]:
    names = {"num_experts": "num_experts", "num_experts_per_token": "num_experts_per_tok"}
    sizes = {"intermediate_size": "moe_intermediate_size", "shared_size": "shared_expert_intermediate_size"}
    return {**_write_delta(config), **write_experts(config, **names, **sizes, **fields)}


QWEN3_5 = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    names={**names(qk_norm=True), **_DELTA_NAMES},
    fixed={"qk_norm": "head", "norm_offset": 1.0, "attention_gate": True},
    fields={"attention_bias": "attention_bias"},
    field_types={
        **dict.fromkeys(_DELTA_SIZES.values(), Count),
        **{"attention_bias": bool, "layer_types": LayerTypes, "full_attention_interval": NumLayers},
        **{"partial_rotary_factor": Fraction, "attn_output_gate": bool, "mlp_only_layers": list[LayerIndex]},
        **{"mamba_ssm_dtype": Any, "mtp_num_hidden_layers": Any, "mtp_use_dedicated_embeddings": Any},
    },
    defaults={
        **{"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "num_key_value_heads": 4, "head_dim": 256},
        **{"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_conv_kernel_dim": 4},
        **{"linear_key_head_dim": 128, "linear_value_head_dim": 128, "partial_rotary_factor": 0.25},
    },
    rope_ignored=("mrope_section", "mrope_interleaved"),
    neutral={"attn_output_gate": (True,), "mlp_only_layers": ([],)},
    layer_types=("full_attention", "linear_attention"),
    read=_read_delta,
    write=_write_delta,
    text_of="Qwen3_5ForConditionalGeneration",
    ignored=("visual", "mtp"),
)
_MOE_DEFAULTS = {
    **QWEN3_5.defaults,
    **{"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_key_value_heads": 2},
}
QWEN3_5_MOE = dataclasses.replace(
    QWEN3_5,
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    names={**QWEN3_MOE.names, **_DELTA_NAMES, **_SHARED_NAMES},
    expert_parameters=expert_parameters(),
    field_types={
        **{**QWEN3_5.field_types, **EXPERT_TYPES, "num_experts": Count},
        **{"moe_intermediate_size": Size, "shared_expert_intermediate_size": Size},
    },
    defaults={**_MOE_DEFAULTS, "num_experts": 256, "num_experts_per_tok": 8, "intermediate_size": 512},
    neutral={**QWEN3_5.neutral, "norm_topk_prob": (True,)},
    read=lambda file: {**_read_delta(file), "experts": _read_shared(file)},
    write=_write_shared,
    text_of="Qwen3_5MoeForConditionalGeneration",
)
QWEN3_NEXT = dataclasses.replace(
    QWEN3_5_MOE,
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    names={
        **{**QWEN3_MOE.names, **_DELTA_PARTS, **_SHARED_NAMES},
        **{"layers/delta/qkvz_proj": f"{_DELTA}.in_proj_qkvz", "layers/delta/beta_step": f"{_DELTA}.in_proj_ba"},
    },
    field_types={**QWEN3_5_MOE.field_types, "norm_topk_prob": bool},
    defaults={
        **{**_MOE_DEFAULTS, "num_experts": 512, "num_experts_per_tok": 10, "intermediate_size": 5632},
        "norm_topk_prob": True,
    },
    neutral={**QWEN3_5.neutral, "decoder_sparse_step": (1,)},
    read=lambda file: {
        **_read_delta(file, fused=True),
        "experts": _read_shared(file, normalize=bool(file.norm_topk_prob)),
    },
    write=lambda config: {**_write_shared(config, normalize="norm_topk_prob"), "decoder_sparse_step": 1},
    text_of=None,
)
