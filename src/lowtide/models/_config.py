"""Sizes of a Llama decoder, and their spelling in a Hugging Face `config.json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

from ..core import ConfigError, ModelFileError

ARCHITECTURES = ("LlamaForCausalLM",)


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
        ModelFileError: for an unknown architecture, activation or RoPE type, or a missing or impossible entry.
    """
    named: Any = raw.get("architectures") or []
    architectures: list[str] = [named] if isinstance(named, str) else [str(name) for name in named]
    known = [name for name in architectures if name in ARCHITECTURES]
    if not known and not (raw.get("model_type") == "llama" and not architectures):
        raise ModelFileError(
            f"{where}: unknown architecture {', '.join(architectures) or raw.get('model_type')!r}",
            expected=f"one of {', '.join(ARCHITECTURES)}",
            hint="Lowtide reads Llama decoders; check that --model names the right folder",
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelFileError(
            f"{where}: unknown activation {raw['hidden_act']!r}", expected="silu", hint="Llama's MLP is SwiGLU"
        )
    if raw.get("quantization_config"):
        raise ModelFileError(
            f"{where}: the checkpoint is quantised",
            got="quantization_config",
            hint="load the unquantised checkpoint; Lowtide reads float32, float16 and bfloat16 weights",
        )
    rope: Any = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ModelFileError(f"{where}: rope_scaling is not an object", got=repr(rope), hint="copy config.json again")
    try:
        ends: Any = _token_ids(raw, "eos_token_id")
        return LlamaConfig(
            vocab_size=int(raw["vocab_size"]),
            hidden_size=int(raw["hidden_size"]),
            intermediate_size=int(raw["intermediate_size"]),
            num_layers=int(raw["num_hidden_layers"]),
            num_heads=int(raw["num_attention_heads"]),
            num_kv_heads=int(raw.get("num_key_value_heads") or raw["num_attention_heads"]),
            head_dim=int(raw.get("head_dim") or int(raw["hidden_size"]) // int(raw["num_attention_heads"])),
            rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
            rope_scaling=_rope_scaling(cast("Mapping[str, Any]", rope), where),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
            attention_bias=bool(raw.get("attention_bias", False)),
            mlp_bias=bool(raw.get("mlp_bias", False)),
            max_position_embeddings=int(raw.get("max_position_embeddings", 2048)),
            bos_token_id=_token_ids(raw, "bos_token_id")[0],
            eos_token_id=ends if len(ends) > 1 else ends[0],
        )
    except KeyError as error:
        raise ModelFileError(
            f"{where}: {error.args[0]} is missing",
            hint="a Llama config.json has the sizes of the model; copy it from the model's source again",
        ) from error
    except ModelFileError:
        raise
    except ConfigError as error:
        raise ModelFileError(
            f"{where}: {error.message}", expected=error.expected, got=error.got, hint=error.hint
        ) from error
    except (TypeError, ValueError) as error:
        raise ModelFileError(
            f"{where}: an entry has an unusable value", got=str(error), hint="compare the file with the model's source"
        ) from error


def config_to_hf(config: LlamaConfig, dtype: str) -> dict[str, Any]:
    """The contents of a Hugging Face `config.json`, which `transformers` 4 and 5 read alike.

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


def _rope_scaling(rope: Mapping[str, Any], where: str) -> RopeScaling | None:
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type == "default":
        return None
    if rope_type not in ("linear", "llama3"):
        raise ModelFileError(
            f"{where}: unknown RoPE scaling {rope_type!r}",
            expected="default, linear or llama3",
            hint="computing with another frequency rule would give wrong logits, so nothing was loaded",
        )
    if "factor" not in rope:
        raise ModelFileError(f"{where}: rope_scaling has no factor", got=dict(rope), hint="copy config.json again")
    length = "original_max_position_embeddings"
    numbers = {name: float(rope[name]) for name in ("factor", "low_freq_factor", "high_freq_factor") if name in rope}
    return RopeScaling(rope_type=rope_type, **numbers, **({length: int(rope[length])} if length in rope else {}))


def _token_ids(raw: Mapping[str, Any], name: str) -> tuple[int | None, ...]:
    """The ids of a special token, which may be absent, a number or a list; each inside the vocabulary."""
    value: Any = raw.get(name)
    ids = [int(each) for each in (value if isinstance(value, (list, tuple)) else [] if value is None else [value])]
    for each in ids:
        if not 0 <= each < int(raw["vocab_size"]):
            size = raw["vocab_size"]
            raise ConfigError(f"{name} is no token", expected=f"0 to {size} - 1", got=each, hint="check config.json")
    return tuple(ids) or (None,)
