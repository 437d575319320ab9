"""Mistral, which is Llama with a sliding window, and Mixtral, in which a mixture of experts replaces each MLP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._config import Experts
from ._family import Family, expert_parameters, names, router_loss, write_router_loss

if TYPE_CHECKING:
    from .._config import DecoderConfig
    from .._schema import ConfigFile

MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    names=names(),
    fields={"sliding_window": "sliding_window"},
    defaults={"rms_norm_eps": 1e-6, "sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 2**17},
)


def _read_experts(file: ConfigFile) -> dict[str, Any]:
    return {
        "experts": Experts(
            num_experts=file.num_local_experts or 8,
            num_experts_per_token=file.num_experts_per_tok or 2,
            intermediate_size=file.intermediate_size,
            router_loss_coef=router_loss(file),
        )
    }


def _write_experts(config: DecoderConfig) -> dict[str, Any]:
    experts = config.experts
    assert experts is not None
    return {
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_experts_per_token,
        **write_router_loss(experts),
    }


_MOE = "model.layers.{layer}.block_sparse_moe"

MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    names={
        **names(mlp=""),
        "layers/mlp/router": f"{_MOE}.gate",
        "layers/mlp/experts/gate": f"{_MOE}.experts.{{expert}}.w1",
        "layers/mlp/experts/up": f"{_MOE}.experts.{{expert}}.w3",
        "layers/mlp/experts/down": f"{_MOE}.experts.{{expert}}.w2",
    },
    expert_parameters=expert_parameters(),
    fields={"sliding_window": "sliding_window"},
    defaults={
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "max_position_embeddings": 2**17,
    },
    rope_theta=1e6,
    also=("num_local_experts", "num_experts_per_tok", "output_router_logits", "router_aux_loss_coef"),
    neutral={"router_jitter_noise": (0.0,)},
    read=_read_experts,
    write=_write_experts,
)
