"""gpt-oss: experts with biases and clamped gates, attention sinks, and a sliding window in every other layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._config import Experts
from ._family import (
    Family,
    expert_parameters,
    layer_types,
    names,
    router_loss,
    sliding_by_type,
    write_router_loss,
)

if TYPE_CHECKING:
    from .._config import DecoderConfig
    from .._schema import ConfigFile


def _read(file: ConfigFile) -> dict[str, Any]:
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


def _write(config: DecoderConfig) -> dict[str, Any]:
    experts = config.experts
    assert experts is not None
    return {
        "attention_bias": True,
        "sliding_window": config.sliding_window,
        "layer_types": layer_types(config),
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_experts_per_token,
        "swiglu_limit": experts.limit,
        **write_router_loss(experts),
    }


_MOE = "model.layers.{layer}.mlp"

GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    names={
        **names(mlp=""),
        "layers/attn/sinks/weight": "model.layers.{layer}.self_attn.sinks",
        "layers/mlp/router": f"{_MOE}.router",
        **{
            f"layers/mlp/experts/{name}/{leaf}": f"{_MOE}.experts.{name}_proj{suffix}"
            for name in ("gate_up", "down")
            for leaf, suffix in (("weight", ""), ("bias", "_bias"))
        },
    },
    expert_parameters=expert_parameters("gate_up"),
    fixed={"attention_bias": True, "attention_sinks": True},
    defaults={
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "max_position_embeddings": 2**17,
    },
    rope_theta=150_000.0,
    also=(
        "sliding_window layer_types num_local_experts num_experts_per_tok experts_per_token swiglu_limit "
        "output_router_logits router_aux_loss_coef initial_context_length"
    ).split(),
    neutral={"attention_bias": (True,)},
    read=_read,
    write=_write,
)
