"""Phi-3 and the smaller Phi-4 models: Llama with fused projections, partial rotation, and LongRoPE."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...core import ConfigError, shown
from ._family import Family, names

if TYPE_CHECKING:
    from .._config import DecoderConfig
    from .._schema import ConfigFile

_CODE = ("configuration_phi3.Phi3Config", "modeling_phi3.Phi3ForCausalLM")
"""Remote code in checkpoints from before transformers had the class; it computes the same as the class."""


def _read(file: ConfigFile) -> dict[str, Any]:
    auto_map = (file.model_extra or {}).get("auto_map") or {}
    code: Any = auto_map if isinstance(auto_map, dict) else {"auto_map": auto_map}
    for name, value in code.items():
        if name != "AutoTokenizer" and not str(value).endswith(_CODE):
            raise ConfigError(
                "auto_map names custom code of the model",
                expected=" and ".join(_CODE),
                got=shown(value),
                hint="remove auto_map if its code computes the same as transformers' Phi3; Lowtide does not run it",
            )
    return {}


def _write(config: DecoderConfig) -> dict[str, Any]:
    scaling = config.rope_scaling
    original = scaling.original_max_position_embeddings if scaling is not None else config.max_position_embeddings
    return {
        "partial_rotary_factor": config.rotary_fraction,
        "original_max_position_embeddings": original,
        # transformers' default pad token is out of range for small vocabularies
        "pad_token_id": None,
    }


PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    names=names(attn="qkv o", mlp="gate_up down"),
    fixed={"fused_projections": True},
    fields={"sliding_window": "sliding_window"},
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 32000},
    also=("original_max_position_embeddings", "partial_rotary_factor", "resid_pdrop", "embd_pdrop", "auto_map"),
    neutral={
        "ignore_keys_at_rope_validation": (None,),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        # Phi-4-mini: its published config has these fields, its model does not read them
        "full_attn_mod": (1,),
        "interpolate_factor": (1,),
    },
    read=_read,
    write=_write,
)
