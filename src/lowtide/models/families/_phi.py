"""Phi-3 and the smaller ones of Phi-4: Llama with fused projections, partial rotation, and LongRoPE."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._family import Family, names

if TYPE_CHECKING:
    from .._config import DecoderConfig


def _write(config: DecoderConfig) -> dict[str, Any]:
    scaling = config.rope_scaling
    original = scaling.original_max_position_embeddings if scaling is not None else config.max_position_embeddings
    return {
        "partial_rotary_factor": config.rotary_fraction,
        "original_max_position_embeddings": original,
        # transformers' default is outside of small vocabularies
        "pad_token_id": None,
    }


PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    names=names(attn="qkv o", mlp="gate_up down"),
    fixed={"fused_projections": True},
    fields={"sliding_window": "sliding_window"},
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 32000},
    also=("original_max_position_embeddings", "partial_rotary_factor", "resid_pdrop", "embd_pdrop"),
    neutral={
        "ignore_keys_at_rope_validation": (None,),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        # of Phi-4-mini, whose published file says them and whose model does not read them
        "full_attn_mod": (1,),
        "interpolate_factor": (1,),
    },
    write=_write,
)
