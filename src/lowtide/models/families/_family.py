"""The differences between model families as data: parameter names, fields of `config.json`, and their meaning."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .._config import DecoderConfig, Experts
    from .._schema import ConfigFile

COMMON: Mapping[str, str] = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "max_position_embeddings": "max_position_embeddings",
}
"""Fields of `DecoderConfig` that every family has, and their names in `config.json`."""

_ALWAYS_READ = (
    "architectures model_type hidden_act rope_theta rope_scaling rope_parameters attention_dropout "
    "bos_token_id eos_token_id quantization_config"
).split()
"""Further fields of `config.json` that are read for every family."""
_OUTER = {"outer/embed": "model.embed_tokens", "outer/norm": "model.norm", "outer/lm_head": "lm_head"}
IMAGE_MODULES = ("vision_tower", "multi_modal_projector")
"""Modules of models of images and text that are not read."""
PREFIXES = ("model.", "model.language_model.", "language_model.model.")
"""Prefixes of a decoder's module names: in a text model, and in models of images and text of `transformers` since 4.52
and before 4.52."""
_ATTN, _MLP = "model.layers.{layer}.self_attn", "model.layers.{layer}.mlp"
_NORMS: Mapping[str, str] = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


def names(
    *, attn: str = "q k v o", mlp: str = "gate up down", qk_norm: bool = False, norms: Mapping[str, str] = _NORMS
) -> dict[str, str]:
    """Return a table from module paths to Hugging Face names, with ``{layer}`` and ``{expert}`` for indices.

    `norms` maps our names of norms to those of Hugging Face.
    """
    return {
        **_OUTER,
        **{f"layers/{norm}": f"model.layers.{{layer}}.{hf_name}" for norm, hf_name in norms.items()},
        **{f"layers/attn/{name}_proj": f"{_ATTN}.{name}_proj" for name in attn.split()},
        **({f"layers/attn/{name}_norm": f"{_ATTN}.{name}_norm" for name in "qk"} if qk_norm else {}),
        **{f"layers/mlp/{name}_proj": f"{_MLP}.{name}_proj" for name in mlp.split()},
    }


def expert_parameters(gate_up: str = "gate up") -> dict[str, tuple[str, ...]]:
    """Map the `transformers` parameters of all experts to our modules in them, of which `gate_up` form one matrix."""
    experts = {"gate_up_proj": gate_up, "down_proj": "down"}
    return {
        f"{_MLP}.experts.{parameter}": tuple(f"layers/mlp/experts/{name}" for name in modules.split())
        for parameter, modules in experts.items()
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One family of Hugging Face models."""

    model_type: str
    """``model_type`` in `config.json`."""
    architecture: str
    """Name of the class in `transformers`."""
    names: Mapping[str, str]
    """Table from paths of modules or single leaves to tensor names in checkpoints."""
    expert_parameters: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict[str, tuple[str, ...]])
    """Table from the `transformers` parameters that hold all experts of a layer, in its order, to the modules whose
    outputs they concatenate."""
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    """Fields of `DecoderConfig` with one value for the whole family."""
    fields: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    """Further fields of `DecoderConfig`, and the names in `config.json` that they are copied from."""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    """Defaults for fields missing from `config.json`: those of the family's class in `transformers`."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies if `config.json` has none."""
    also: Sequence[str] = ()
    """Further fields of `config.json` that `read` handles."""
    neutral: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict[str, tuple[Any, ...]])
    """Fields that may only have one of these values."""
    stored: Sequence[str] = ()
    """Fields of ``also`` that the family's class in `transformers` stores but never applies; we ignore them, too."""
    read: Callable[[ConfigFile], Mapping[str, Any]] = lambda file: {}
    """Function that returns the fields of `DecoderConfig` that are not copied unchanged."""
    write: Callable[[DecoderConfig], Mapping[str, Any]] = lambda config: {}
    """Function that returns the fields of `config.json` that are not copied unchanged."""
    text_of: str | None = None
    """Architecture of a model of images and text whose text decoder is also read."""

    @property
    def known(self) -> frozenset[str]:
        """Fields of `config.json` that are read."""
        return frozenset([*COMMON.values(), *self.fields.values(), *self.also, *_ALWAYS_READ])


def sliding_by_type(file: ConfigFile, is_sliding: Callable[[int], bool]) -> dict[str, Any]:
    """Return which layers have sliding-window attention: from ``layer_types``, or by layer index if it is missing."""
    count = file.num_hidden_layers
    types = file.layer_types or [
        "sliding_attention" if is_sliding(index) else "full_attention" for index in range(count)
    ]
    sliding_layers = tuple(layer_type == "sliding_attention" for layer_type in types)
    return {"sliding_window": file.sliding_window, "sliding_layers": sliding_layers}


def layer_types(config: DecoderConfig) -> list[str]:
    """Return the attention type of each layer as `config.json` names it."""
    sliding_layers = config.sliding_layers or (config.sliding_window is not None,) * config.num_layers
    return ["sliding_attention" if is_sliding else "full_attention" for is_sliding in sliding_layers]


def router_loss(file: ConfigFile) -> float:
    """Return the coefficient of the load-balancing loss, which ``output_router_logits`` switches on."""
    return (file.router_aux_loss_coef or 0.0) if file.output_router_logits else 0.0


def write_router_loss(experts: Experts) -> dict[str, Any]:
    """Return the fields of `config.json` for the load-balancing loss."""
    coef = experts.router_loss_coef
    return {"output_router_logits": coef > 0, **({"router_aux_loss_coef": coef} if coef else {})}
