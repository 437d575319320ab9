"""OLMo 2: norms only after attention and MLP, and norms over all heads' queries and over all heads' keys."""

from __future__ import annotations

from ._family import Family, names

OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    names=names(
        qk_norm=True,
        norms={"attn_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"},
    ),
    fixed={"pre_norm": False, "post_norm": True, "qk_norm": "width"},
    fields={"attention_bias": "attention_bias"},
    defaults={"rms_norm_eps": 1e-5, "eos_token_id": 50279},
)
