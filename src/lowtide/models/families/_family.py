"""Description of a model family as data: parameter names, and fields of `config.json` with their types and meaning."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt, MaxLen

from .._config import DecoderConfig

# Types of fields of `config.json` with ranges, which pydantic checks. They use `annotated_types` instead of
# `pydantic.Field`, since pydantic takes a quarter of a second to import.
_MOST_LAYERS = 10_000
NumLayers = Annotated[int, Ge(1), Le(_MOST_LAYERS)]
LayerIndex = Annotated[int, Ge(0), Le(_MOST_LAYERS)]
Size = Annotated[int, Ge(1), Le(2**22)]
Length = Annotated[int, Ge(1), Le(2**40)]
Count = Annotated[int, Ge(1), Le(2**16)]
LayerTypes = Annotated[list[Literal["full_attention", "sliding_attention", "linear_attention"]], MaxLen(_MOST_LAYERS)]
Factor = Annotated[float, Ge(0), Le(1e6)]
Scale = Annotated[float, Ge(1e-3), Le(1e6)]
Multiplier = Annotated[float, Gt(0), Le(1e6)]
Fraction = Annotated[float, Gt(0), Le(1)]
Theta = Annotated[float, Ge(1), Le(1e15)]
Dropout = Annotated[float, Ge(0), Lt(1)]
"""Type of dropout rates. A rate in a file is not applied, and causes a warning."""

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
"""Fields of `config.json` that are read for every family, in addition to `COMMON`."""
ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
"""Activation functions of `DecoderConfig`, and their names in `config.json`."""
IMAGE_MODULES = ("vision_tower", "multi_modal_projector")
"""Modules of multimodal models that process images; loading skips them."""
PREFIXES = ("model.", "model.language_model.", "language_model.model.")
"""Module name prefixes of text models, and of multimodal models since `transformers` 4.52 and before that version."""
LAYER = "model.layers.{layer}"
ATTN, MLP = f"{LAYER}.self_attn", f"{LAYER}.mlp"
_NORMS: Mapping[str, str] = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


def names(
    *, attn: str = "q k v o", mlp: str = "gate up down", qk_norm: bool = False, norms: Mapping[str, str] = _NORMS
) -> dict[str, str]:
    """Return a table from module paths to Hugging Face names, with ``{layer}`` for the index of a layer.

    `attn` and `mlp` list projections, separated by blanks. `norms` maps our names of norms to Hugging Face's names.
    """
    return {
        **{"outer/embed": "model.embed_tokens", "outer/norm": "model.norm", "outer/lm_head": "lm_head"},
        **{f"layers/{norm}": f"model.layers.{{layer}}.{hf_name}" for norm, hf_name in norms.items()},
        **{f"layers/attn/{name}_proj": f"{ATTN}.{name}_proj" for name in attn.split()},
        **({f"layers/attn/{name}_norm": f"{ATTN}.{name}_norm" for name in "qk"} if qk_norm else {}),
        **{f"layers/mlp/{name}_proj": f"{MLP}.{name}_proj" for name in mlp.split()},
    }


def expert_parameters(gate_up: str = "gate up") -> dict[str, tuple[str, ...]]:
    """Return a table for `Family.expert_parameters`; `gate_up` lists our modules that ``gate_up_proj`` concatenates."""
    experts = {"gate_up_proj": gate_up, "down_proj": "down"}
    return {
        f"{MLP}.experts.{parameter}": tuple(f"layers/mlp/experts/{name}" for name in modules.split())
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
    """Table from paths of modules, or of single leaves, to their names in checkpoints."""
    expert_parameters: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict[str, tuple[str, ...]])
    """Table from the `transformers` parameters that hold all experts of a layer to the modules that each parameter
    concatenates. Parameters and modules are in the order of `transformers`."""
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    """Fields of `DecoderConfig` with one value for the whole family."""
    fields: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    """Fields of `DecoderConfig` that are copied in addition to `COMMON`, and their names in `config.json`."""
    field_types: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    """Types by field of `config.json`, for fields that `fields` copies or `read` handles; each may be missing or null.
    Families with the same field give it the same type. `read` gets a field ``_name`` under the name ``old_name``."""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    """Defaults for fields missing from `config.json`: the defaults of the family's class in `transformers`."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies if `config.json` has none."""
    rope_defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    """``rope_parameters`` for a `config.json` that has neither these nor ``rope_scaling``."""
    rope_aliases: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    """Older names of types of RoPE scaling in the family's files, with the present names."""
    rope_fields: Sequence[str] = ()
    """Rotary settings in `config.json` that only some families compute."""
    rope_ignored: Sequence[str] = ()
    """Rotary settings in `config.json` that have no effect on text."""
    has_local_rope: bool = False
    """Whether rotary settings in `config.json` can differ between sliding-window layers and other layers."""
    writes_local_rope: bool = False
    """Whether written files have ``rope_parameters`` with one entry per layer type."""
    writes_old_rope: bool = True
    """Whether written files have ``rope_theta`` and ``rope_scaling``, which transformers 4 reads."""
    neutral: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict[str, tuple[Any, ...]])
    """Allowed values by field of `config.json`, in addition to null; any other value is an error."""
    stored: Sequence[str] = ()
    """Fields of `field_types` that the class in `transformers` stores but never applies; Lowtide ignores them, too."""
    read: Callable[[Any], Mapping[str, Any]] = lambda file: {}
    """Function that computes fields of `DecoderConfig` where copying is not enough. Its argument is the validated
    `config.json`, a `ConfigFile` of `models/_schema.py` with the fields of all families."""
    write: Callable[[DecoderConfig], Mapping[str, Any]] = lambda config: {}
    """Function that computes fields of `config.json` from a `DecoderConfig` where copying is not enough."""
    layer_types: Sequence[str] = ("full_attention", "sliding_attention")
    """Values of ``layer_types`` in `config.json` that the family computes."""
    text_of: str | None = None
    """Architecture of a multimodal model whose text decoder belongs to this family."""
    skips_extra_layers: bool = False
    """Whether files hold layers after the last one, which predict later tokens; they are skipped."""
    ignored: tuple[str, ...] = ()
    """Beginnings of names, without `PREFIXES`, of tensors in checkpoints that are not part of the decoder."""

    @property
    def known(self) -> frozenset[str]:
        """Fields of `config.json` that are read for this family."""
        return frozenset([*COMMON.values(), *self.field_types, *_ALWAYS_READ])


def sliding_by_type(file: Any, is_sliding: Callable[[int], bool]) -> dict[str, Any]:
    """Return `sliding_window` and `sliding_layers`, from ``layer_types`` or, if that is missing, from `is_sliding`."""
    sliding_layers = [is_sliding(index) for index in range(file.num_hidden_layers)]
    if file.layer_types:
        sliding_layers = [layer_type == "sliding_attention" for layer_type in file.layer_types]
    return {"sliding_window": file.sliding_window, "sliding_layers": tuple(sliding_layers)}


def layer_types(config: DecoderConfig) -> list[str]:
    """Return the attention type of each layer as `config.json` names it."""
    sliding_layers = config.sliding_layers or (config.sliding_window is not None,) * config.num_layers
    return ["sliding_attention" if is_sliding else "full_attention" for is_sliding in sliding_layers]


def router_loss(file: Any) -> float:
    """Return the coefficient of the load-balancing loss; 0 unless ``output_router_logits`` switches the loss on."""
    return (file.router_aux_loss_coef or 0.0) if file.output_router_logits else 0.0


def write_experts(config: DecoderConfig, **hf_names: str) -> dict[str, Any]:
    """Return `config.json` fields of the router loss, and the fields of `Experts` under their names in `hf_names`."""
    experts = config.experts
    assert experts is not None
    fields = {hf_name: getattr(experts, name) for name, hf_name in hf_names.items()}
    coef = experts.router_loss_coef
    return {**fields, "output_router_logits": coef > 0, **({"router_aux_loss_coef": coef} if coef else {})}


EXPERT_TYPES: dict[str, Any] = {
    **{"num_local_experts": Count, "num_experts_per_tok": Count},
    **{"output_router_logits": bool, "router_aux_loss_coef": Factor},
}
