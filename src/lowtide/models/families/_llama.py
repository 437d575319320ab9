"""Llama 2 and 3."""

from __future__ import annotations

from ._family import Family, names

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    names=names(),
    fields={"attention_bias": "attention_bias", "mlp_bias": "mlp_bias"},
    defaults={"rms_norm_eps": 1e-6},
)
