"""Sizes of a Llama decoder, and their spelling in a Hugging Face `config.json`."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..core import ConfigError, ModelFileError, shortened, shown, validate

if TYPE_CHECKING:
    from ._schema import ConfigFile, RopeEntry

ARCHITECTURES = ("LlamaForCausalLM",)
_SILU = ("silu", "swish")
_AGAIN = "a Llama config.json has the sizes of the model; copy it from the model's source again"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the length a model was pretrained on."""

    rope_type: str
    """``"linear"`` or ``"llama3"``."""
    factor: float
    """How many times longer than pretraining."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths longer than ``original_max_position_embeddings / low_freq_factor`` are fully stretched."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths shorter than ``original_max_position_embeddings / high_freq_factor`` are kept."""
    original_max_position_embeddings: int = 8192
    """llama3: the length of pretraining, in tokens."""

    def __post_init__(self) -> None:
        if not self.factor > 0 or not self.high_freq_factor > self.low_freq_factor > 0:
            raise ConfigError(
                "RoPE scaling is out of range",
                expected="factor > 0, high_freq_factor > low_freq_factor > 0",
                got=f"{self.factor}, {self.high_freq_factor}, {self.low_freq_factor}",
                hint="copy the values of config.json's rope_scaling",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes and constants of a Llama decoder; names as in Hugging Face where it has one."""

    vocab_size: int
    """Rows of the embedding."""
    hidden_size: int
    """Width of the residual stream, D."""
    intermediate_size: int
    """Width of the SwiGLU hidden layer, F."""
    num_layers: int
    """Blocks (``num_hidden_layers``)."""
    num_heads: int
    """Query heads (``num_attention_heads``), N."""
    num_kv_heads: int
    """Key and value heads (``num_key_value_heads``), K; divides `num_heads`."""
    head_dim: int
    """Width of one head, H."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Stretching of the rotary frequencies, or None."""
    rms_norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    tie_embeddings: bool = False
    """Whether the head is the embedding (``tie_word_embeddings``)."""
    attention_bias: bool = False
    """Whether the attention projections have a bias."""
    mlp_bias: bool = False
    """Whether the MLP projections have a bias."""
    max_position_embeddings: int = 2048
    """The longest sequence the model is meant for, in tokens."""
    bos_token_id: int | None = None
    """Token that begins a document, if any."""
    eos_token_id: int | tuple[int, ...] | None = None
    """Token or tokens that end a document, if any."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} has to be at least 1", got=getattr(self, name), hint="check config.json")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                "num_kv_heads has to divide num_heads",
                got=f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}",
                hint="each key/value head serves the same number of query heads",
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ConfigError(
                "head_dim has to be even", got=self.head_dim, hint="rotary embeddings turn pairs of dimensions"
            )


def config_from_hf(raw: Mapping[str, Any], where: str) -> LlamaConfig:
    """Read the contents of a Hugging Face `config.json`.

    Args:
        raw: the parsed file.
        where: the file's name, for messages.

    Returns:
        The configuration.

    Raises:
        ModelFileError: for an unknown architecture, activation or RoPE type, a missing or impossible entry, or a
            field that asks for what Lowtide does not compute.
    """
    from ._schema import ConfigFile, unhandled

    _refuse_other_models(raw, where)
    file = validate(ConfigFile, raw, where, hint=_AGAIN)
    rope = _rope(file, where)
    unknown = unhandled(file)
    if unknown:
        name = next(iter(unknown))
        raise ModelFileError(
            f"{where}: {shown(name)} is nothing that Lowtide computes",
            expected="the fields of a Llama model; others have to be null, false or absent",
            got=shortened(", ".join(f"{name}={shown(value)}" for name, value in unknown.items())),
            hint=f"if {shortened(name, 80)} changes nothing that the model computes, remove it from the file",
        )
    if file.attention_dropout:
        warnings.warn(
            f"{where}: attention_dropout {file.attention_dropout} is not applied; training goes on without dropout",
            stacklevel=3,
        )
    heads = file.num_attention_heads
    ends = _token_ids(file, "eos_token_id", where)
    try:
        return LlamaConfig(
            vocab_size=file.vocab_size,
            hidden_size=file.hidden_size,
            intermediate_size=file.intermediate_size,
            num_layers=file.num_hidden_layers,
            num_heads=heads,
            num_kv_heads=file.num_key_value_heads or heads,
            head_dim=file.head_dim or file.hidden_size // heads,
            rope_theta=rope.rope_theta or file.rope_theta or 10000.0,
            rope_scaling=_rope_scaling(rope, where),
            rms_norm_eps=file.rms_norm_eps,
            tie_embeddings=bool(file.tie_word_embeddings),
            attention_bias=bool(file.attention_bias),
            mlp_bias=bool(file.mlp_bias),
            max_position_embeddings=file.max_position_embeddings,
            bos_token_id=_token_ids(file, "bos_token_id", where)[0],
            eos_token_id=ends if len(ends) > 1 else next(iter(ends)),  # pyright: ignore[reportArgumentType]
        )
    except ConfigError as error:
        raise ModelFileError(
            f"{where}: {error.message}", expected=error.expected, got=error.got, hint=error.hint
        ) from error


def config_to_hf(config: LlamaConfig, dtype: str) -> dict[str, Any]:
    """Return the contents of a Hugging Face `config.json`, which `transformers` 4 and 5 read alike.

    Args:
        config: the sizes.
        dtype: the dtype of the stored weights, such as ``"bfloat16"``.

    Returns:
        A dictionary ready for JSON.
    """
    scaling = config.rope_scaling
    rope: dict[str, Any] | None = None
    if scaling is not None:
        rope = {"rope_type": scaling.rope_type, "factor": scaling.factor}
        if scaling.rope_type == "llama3":
            rope |= {k: v for k, v in dataclasses.asdict(scaling).items() if k not in rope}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rope_theta": config.rope_theta,
        "rope_scaling": rope,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "max_position_embeddings": config.max_position_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_id) if isinstance(config.eos_token_id, tuple) else config.eos_token_id,
        "torch_dtype": dtype,
    }


def _refuse_other_models(raw: Mapping[str, Any], where: str) -> None:
    """Say of another model that it is one, not which of its fields are strange."""
    named, kind = raw.get("architectures") or [], raw.get("model_type")
    architectures: list[Any] = named if isinstance(named, list) else [named]  # pyright: ignore[reportUnknownVariableType]
    known = any(name in ARCHITECTURES for name in architectures)
    if kind not in (None, "llama") or not (known or (kind and not architectures)):
        names = [shown(kind)] if known or not architectures else [shown(name) for name in architectures]
        raise ModelFileError(
            f"{where}: unknown architecture {shortened(', '.join(names))}",
            expected=f"one of {', '.join(ARCHITECTURES)}, with model_type 'llama'",
            hint="Lowtide reads Llama decoders; check that --model names the right folder",
        )
    if raw.get("hidden_act") not in (None, *_SILU):
        raise ModelFileError(
            f"{where}: unknown activation {shown(raw['hidden_act'])}", expected="silu", hint="Llama's MLP is SwiGLU"
        )
    if raw.get("quantization_config"):
        raise ModelFileError(
            f"{where}: the checkpoint is quantised",
            got=f"quantization_config={shown(raw['quantization_config'])}",
            hint="load the unquantised checkpoint; Lowtide reads float32, float16 and bfloat16 weights",
        )


def _rope(file: ConfigFile, where: str) -> RopeEntry:
    """Read what the file says about rotary embeddings, which it may say in two places and two spellings."""
    from ._schema import RopeEntry, unhandled

    given = [
        entry for entry in (file.rope_parameters, file.rope_scaling) if entry is not None and entry.model_fields_set
    ]
    rope = given[0] if given else RopeEntry()
    other = given[-1] if given else rope
    for entry in given:
        rest = unhandled(entry)
        if rest:
            raise ModelFileError(
                f"{where}: rope_scaling has {shown(next(iter(rest)))}, which Lowtide does not compute",
                got=shortened(rest),
                hint="computing with another frequency rule would give wrong logits, so nothing was loaded",
            )
    said = {
        "rope_parameters and rope_scaling": (
            rope.model_dump(exclude={"rope_theta"}),
            other.model_dump(exclude={"rope_theta"}),
        ),
        "rope_type and type": (rope.rope_type or rope.type, rope.type or rope.rope_type),
        "rope_theta": (rope.rope_theta or file.rope_theta, file.rope_theta or rope.rope_theta),
    }
    for what, (one, two) in said.items():
        if one != two:
            raise ModelFileError(
                f"{where}: it says two things about {what}",
                got=shortened(f"{one} and {two}"),
                hint="keep the one that the model was trained with",
            )
    return rope


def _rope_scaling(rope: RopeEntry, where: str) -> RopeScaling | None:
    rope_type = rope.rope_type or rope.type or "default"
    if rope_type == "default":
        return None
    if rope_type not in ("linear", "llama3"):
        raise ModelFileError(
            f"{where}: unknown RoPE scaling {shown(rope_type)}",
            expected="default, linear or llama3",
            hint="computing with another frequency rule would give wrong logits, so nothing was loaded",
        )
    if rope.factor is None:
        got = shortened(rope.model_dump(exclude_none=True))
        raise ModelFileError(f"{where}: rope_scaling has no factor", got=got, hint="copy config.json again")
    names = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    rest = {name: getattr(rope, name) for name in names if getattr(rope, name) is not None}
    return RopeScaling(rope_type=rope_type, factor=rope.factor, **rest)


def _token_ids(file: ConfigFile, name: str, where: str) -> tuple[int | None, ...]:
    """Read the ids of a special token, which may be absent, a number or a list; each inside the vocabulary."""
    value: Any = getattr(file, name)
    ids: list[int] = value if isinstance(value, list) else [] if value is None else [value]
    for each in ids:
        if each >= file.vocab_size:
            raise ModelFileError(
                f"{where}: {name} is no token",
                expected=f"0 to {file.vocab_size - 1}",
                got=each,
                hint="check config.json",
            )
    return tuple(ids) or (None,)
