"""Qwen 2, 2.5 and 3, dense and with a mixture of experts.

Qwen2 has biases on query, key and value. Qwen3 normalises each head's query and key. Published models switch sliding
windows off. If a config switches them on, layers from ``max_window_layers`` on have a window.
"""

from __future__ import annotations

import dataclasses
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

_WINDOW = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
_DEFAULTS = {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}


def _read_window(file: ConfigFile) -> dict[str, Any]:
    if not file.use_sliding_window:
        return {"sliding_window": None, "sliding_layers": None}
    return sliding_by_type(file, lambda index: index >= (file.max_window_layers or 0))


def _write_window(config: DecoderConfig) -> dict[str, Any]:
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


QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    names=names(),
    fixed={"attention_bias": True, "attention_out_bias": False},
    defaults={**_DEFAULTS, "num_key_value_heads": 32},
    also=_WINDOW,
    read=_read_window,
    write=_write_window,
)

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    names=names(qk_norm=True),
    fixed={"qk_norm": "head"},
    fields={"attention_bias": "attention_bias"},
    defaults={**_DEFAULTS, "num_key_value_heads": 32, "head_dim": 128},
    also=_WINDOW,
    read=_read_window,
    write=_write_window,
)


def _read_experts(file: ConfigFile) -> dict[str, Any]:
    window = file.sliding_window if file.use_sliding_window else None
    return {
        "sliding_window": window,
        "experts": Experts(
            # transformers 5.1 and newer write only the second name
            num_experts=file.num_experts or file.num_local_experts or 128,
            num_experts_per_token=file.num_experts_per_tok or 8,
            intermediate_size=file.moe_intermediate_size or 768,
            normalize=bool(file.norm_topk_prob),
            router_loss_coef=router_loss(file),
        ),
    }


def _write_experts(config: DecoderConfig) -> dict[str, Any]:
    experts = config.experts
    assert experts is not None
    return {
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_experts_per_token,
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.normalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        **write_router_loss(experts),
    }


_EXPERT = "model.layers.{layer}.mlp.experts.{expert}"

QWEN3_MOE = dataclasses.replace(
    QWEN3,
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    names={
        **names(qk_norm=True, mlp=""),
        "layers/mlp/router": "model.layers.{layer}.mlp.gate",
        **{f"layers/mlp/experts/{name}": f"{_EXPERT}.{name}_proj" for name in ("gate", "up", "down")},
    },
    expert_parameters=expert_parameters(),
    defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "num_key_value_heads": 4, "sliding_window": 4096},
    also=(
        "use_sliding_window sliding_window max_window_layers num_experts num_local_experts num_experts_per_tok "
        "moe_intermediate_size norm_topk_prob output_router_logits router_aux_loss_coef"
    ).split(),
    neutral={"decoder_sparse_step": (1,), "mlp_only_layers": ([],)},
    read=_read_experts,
    write=_write_experts,
)
