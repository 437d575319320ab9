"""What sets a family of models apart, as data: names, fields of `config.json`, and what they mean."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .._config import DecoderConfig
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
"""Fields of `DecoderConfig` that every family has, and what `config.json` calls them."""

_OUTER = {"outer/embed": "model.embed_tokens", "outer/norm": "model.norm", "outer/lm_head": "lm_head"}
IMAGES = ("vision_tower", "multi_modal_projector")
"""Modules of a model of images and text that are not read."""
PREFIXES = ("model.", "model.language_model.", "language_model.model.")
"""What the names of a decoder's modules begin with: in a model of text, and in one of images and text in `transformers`
since 4.52 and before it."""
_ATTN, _MLP = "model.layers.{layer}.self_attn", "model.layers.{layer}.mlp"


_NORMS: Mapping[str, str] = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


def names(
    *, attn: str = "q k v o", mlp: str = "gate up down", qk_norm: bool = False, norms: Mapping[str, str] = _NORMS
) -> dict[str, str]:
    """Table of module paths and Hugging Face's names, with ``{layer}`` and ``{expert}`` for indices.

    Args:
        attn: projections of the attention.
        mlp: projections of the MLP.
        qk_norm: whether queries and keys are normed.
        norms: our norms and theirs; Llama's by default.
    """
    return {
        **_OUTER,
        **{f"layers/{ours}": f"model.layers.{{layer}}.{theirs}" for ours, theirs in norms.items()},
        **{f"layers/attn/{name}_proj": f"{_ATTN}.{name}_proj" for name in attn.split()},
        **({f"layers/attn/{name}_norm": f"{_ATTN}.{name}_norm" for name in "qk"} if qk_norm else {}),
        **{f"layers/mlp/{name}_proj": f"{_MLP}.{name}_proj" for name in mlp.split()},
    }


def expert_parameters(gate_up: str = "gate up") -> dict[str, tuple[str, ...]]:
    """Table of what is one parameter of all experts in `transformers`, and of our modules that it holds.

    Args:
        gate_up: our modules for what is one matrix there.
    """
    experts = {"gate_up_proj": gate_up, "down_proj": "down"}
    return {
        f"{_MLP}.experts.{theirs}": tuple(f"layers/mlp/experts/{name}" for name in ours.split())
        for theirs, ours in experts.items()
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One family of Hugging Face models."""

    model_type: str
    """What `config.json` calls it."""
    architecture: str
    """The class that `transformers` loads it with."""
    names: Mapping[str, str]
    """Module paths, or paths of single leaves, to their names in the weights."""
    expert_parameters: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict[str, tuple[str, ...]])
    """Parameters of all experts of a layer in `transformers`, in its order: the modules whose outputs each has, one
    after the other."""
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    """Switches of `DecoderConfig` that are the family's."""
    fields: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    """Further fields of `DecoderConfig` that `config.json` says as they are."""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    """What `config.json` means where it says nothing: the defaults of the family's class in `transformers`."""
    rope_theta: float = 10_000.0
    """The base of rotary frequencies where `config.json` says none."""
    also: Sequence[str] = ()
    """Further fields of `config.json` that `read` handles."""
    neutral: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict[str, tuple[Any, ...]])
    """Fields that may only have one of these values."""
    stored: Sequence[str] = ()
    """Fields of ``also`` that the family's class in `transformers` stores and never applies, nor do we."""
    read: Callable[[ConfigFile], Mapping[str, Any]] = lambda file: {}
    """Fields of `DecoderConfig` that are no copies."""
    write: Callable[[DecoderConfig], Mapping[str, Any]] = lambda config: {}
    """Fields of `config.json` that are no copies."""
    text_of: str | None = None
    """Architecture of a model of images and text whose text decoder is read, too."""

    @property
    def known(self) -> frozenset[str]:
        """Fields of `config.json` that are read."""
        return frozenset([*COMMON.values(), *self.fields.values(), *self.also, *ALWAYS])


ALWAYS = (
    "architectures model_type hidden_act rope_theta rope_scaling rope_parameters attention_dropout "
    "bos_token_id eos_token_id quantization_config"
).split()
"""Fields that are read of every family."""


def sliding_by_type(file: ConfigFile, otherwise: Callable[[int], bool]) -> dict[str, Any]:
    """Which layers slide: as ``layer_types`` says, or by their index.

    Args:
        file: of which ``layer_types`` and ``sliding_window`` are read.
        otherwise: whether the layer of an index does, where ``layer_types`` says nothing.
    """
    count = file.num_hidden_layers
    types = file.layer_types or [
        "sliding_attention" if otherwise(index) else "full_attention" for index in range(count)
    ]
    slides = tuple(each == "sliding_attention" for each in types)
    return {"sliding_window": file.sliding_window, "sliding_layers": slides}


def layer_types(config: DecoderConfig) -> list[str]:
    """Write which layers slide, as `config.json` does."""
    slides = config.sliding_layers or (config.sliding_window is not None,) * config.num_layers
    return ["sliding_attention" if each else "full_attention" for each in slides]
