"""Llama 2 and 3, and Mistral, which is Llama with a sliding window."""

from __future__ import annotations

from ._family import Family, names

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    names=names(),
    fields={"attention_bias": "attention_bias", "mlp_bias": "mlp_bias"},
    defaults={"rms_norm_eps": 1e-6},
)

MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    names=names(),
    fields={"sliding_window": "sliding_window"},
    defaults={"rms_norm_eps": 1e-6, "sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 2**17},
)
