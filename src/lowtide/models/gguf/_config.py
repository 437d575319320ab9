"""Conversion of a GGUF file's metadata to the contents of a `config.json`, which are then read with all checks.

A key of the file's architecture that is switched on, but not read here, is an error: it may change what the model
computes. This module also sets values that llama.cpp hard-codes, such as the attention scale of Gemma.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...core import ModelFileError, check_choice, shortened, shown
from ._header import CONVERT_HINT, Header, Long, Place

_MODEL_TYPES: Mapping[str, str] = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
    "olmo2": "olmo2",
}
"""Architectures of GGUF files, with the `model_type` of Hugging Face; Mistral and Mixtral have architecture llama."""
_WINDOWED = ("llama", "phi3", "gemma2", "gemma3")
_WITH_BIASES = ("llama", "qwen3", "gemma2", "gemma3_text", "olmo2")
_HARMLESS = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned")
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "expert_gating_func": (0, 1),  # 0: not specified, 1: softmax
    "expert_weights_norm": (True,),  # llama.cpp ignores this key and always normalises, so false is ambiguous
    "expert_weights_scale": (0, 1),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "logit_scale": (0, 1),
    "rope.scaling.yarn_ext_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
}
"""Values without effect, by key (a scale of 0 means no scale). For all other keys: false, 0 and empty values."""
_WIDEST = {"gemma2": 46, "gemma3": 62}
"""Number of layers of the 27B model, by architecture. Its attention scale uses hidden size / heads, not `head_dim`."""
_ROPE = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
CONSTANTS = (_ROPE, _LONG, _SHORT)
"""Tensors with scaling factors of rotary frequencies."""
_WRONG_LOGITS = "choose another model; ignoring the key would give wrong logits, so nothing was loaded"


def config_of(header: Header) -> dict[str, Any]:
    """Return the contents of a `config.json`; a damaged file and an unsupported model raise ModelFileError."""
    architecture = _architecture(header)
    keys = _Keys(header, architecture)
    experts = keys.count("expert_count", 0)
    window = keys.count("attention.sliding_window", 0) if architecture in _WINDOWED else 0
    model_type = _MODEL_TYPES[architecture]
    if architecture == "llama" and (experts or window):
        model_type = "mixtral" if experts else "mistral"
    heads, hidden = keys.count("attention.head_count"), keys.count("embedding_length")
    embedding = header.places.get("token_embd.weight")
    if embedding is None:
        raise _error(header, "token_embd.weight", "the tensor of the embedding", None)
    if keys.get("attention.key_length") is None and heads > hidden:
        raise keys.error("attention.head_count", f"at most {hidden} (the width) without attention.key_length", heads)
    head_dim = keys.count("attention.key_length", hidden // heads)
    if (value_dim := keys.count("attention.value_length", head_dim)) != head_dim:
        raise keys.error("attention.value_length", f"{head_dim}, the length of keys", value_dim)
    raw = {
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": keys.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": keys.count("context_length"),
        "tie_word_embeddings": "output.weight" not in header.places,
        "bos_token_id": keys.token("bos"),
        "eos_token_id": keys.token("eos"),
    }
    if window:
        raw["sliding_window"] = window
    elif model_type in ("phi3", "mixtral"):  # their classes in transformers have a window by default
        raw["sliding_window"] = None
    if architecture.startswith("gemma"):
        raw |= _gemma(keys, raw)
    if experts:
        raw |= _experts(keys, model_type, experts)
    if model_type in _WITH_BIASES:
        raw["attention_bias"] = "blk.0.attn_q.bias" in header.places
    if model_type == "llama":
        raw["mlp_bias"] = "blk.0.ffn_gate.bias" in header.places
    raw |= _rope(keys, raw)
    keys.check_unread()
    return raw


class _Keys:
    """Metadata keys that begin with the architecture's name. Mutable: it records which keys were read."""

    def __init__(self, header: Header, architecture: str) -> None:
        self.header, self.prefix = header, f"{architecture}."
        self.read = {self.prefix + key for key in _HARMLESS}

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value; an array with the same value for every layer becomes that value."""
        name = self.prefix + key
        self.read.add(name)
        value = self.header.fields.get(name, default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):  # pyright: ignore
            return value[0]  # pyright: ignore[reportUnknownVariableType]
        return value

    def count(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if type(value) is not int or not (0 if default == 0 else 1) <= value < 2**40:
            raise self.error(key, "an integer, the same for all layers", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self.error(key, "a number", value)
        return value

    def token(self, name: str) -> int | None:
        """Return the id of a special token, or None if the file has none."""
        key = f"tokenizer.ggml.{name}_token_id"
        value = self.header.fields.get(key)
        if value is not None and type(value) is not int:
            raise _error(self.header, key, "a token id", value)
        return value

    def error(self, key: str, expected: str, got: Any) -> ModelFileError:
        return _error(self.header, self.prefix + key, expected, got)

    def check_unread(self) -> None:
        """Raise for keys that were not read and are switched on."""
        for name, value in self.header.fields.items():
            key = name.removeprefix(self.prefix)
            is_neutral = value in _NEUTRAL[key] if key in _NEUTRAL else not value
            if name.startswith(self.prefix) and name not in self.read and not is_neutral:
                problem = f"{self.header.file}: {shown(name)} = {shown(value)} is not supported for this architecture"
                expected = f"{' or '.join(map(str, _NEUTRAL.get(key, (False, 0))))}, or no such key"
                raise ModelFileError(problem, expected=expected, hint=_WRONG_LOGITS)


def _architecture(header: Header) -> str:
    fields = header.fields
    for key, valid, hint in (
        ("general.type", (None, "model"), "pass the file of a complete model; adapters are read from PEFT's format"),
        ("split.count", (None, 0, 1), "merge the parts: llama-gguf-split --merge FIRST_PART OUT"),
    ):
        if fields.get(key) not in valid:
            problem = f"{header.file}: {key} of a complete model must be {valid[-1]}, not {shown(fields.get(key))}"
            raise ModelFileError(problem, hint=hint)
    name = f"{header.file}: general.architecture"
    architecture: Any = fields.get("general.architecture")
    hint = "load the original safetensors, if Lowtide supports the family"
    check_choice(name, architecture, [*_MODEL_TYPES], hint=hint, error=ModelFileError)
    return architecture


def _gemma(keys: _Keys, raw: Mapping[str, Any]) -> dict[str, Any]:
    architecture, layers = keys.prefix[:-1], raw["num_hidden_layers"]
    is_wide = layers == _WIDEST[architecture]
    scalar = raw["hidden_size"] / raw["num_attention_heads"] if is_wide else raw["head_dim"]
    scale = keys.number("attention.scale", 0.0)
    if scale and not 1e-3 <= scale <= 1e3:
        raise keys.error("attention.scale", "0, or 1e-3 to 1e3", scale)
    config: dict[str, Any] = {"query_pre_attn_scalar": float(scale**-2 if scale else scalar)}
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if keys.get(key) is not None:
            config[key] = keys.number(key)
    if architecture == "gemma3":
        config["rope_local_base_freq"] = keys.number("rope.freq_base_swa", 10_000.0)
    pattern = keys.header.fields.get(keys.prefix + "attention.sliding_window_pattern")
    if pattern is not None:
        keys.get("attention.sliding_window_pattern")
        config["layer_types"] = _layer_types(keys, pattern, layers)
    return config


def _layer_types(keys: _Keys, pattern: Any, layers: int) -> list[str]:
    """Return the attention type of each layer, from booleans or from a period whose last layer has full attention."""
    if type(pattern) is int and pattern > 0 and layers <= len(keys.header.places):
        sliding_layers: Sequence[Any] = [layer % pattern < pattern - 1 for layer in range(layers)]
    elif isinstance(pattern, list) and all(type(is_sliding) is bool for is_sliding in pattern):  # pyright: ignore
        sliding_layers = pattern  # pyright: ignore[reportUnknownVariableType]
    else:
        raise keys.error("attention.sliding_window_pattern", "a number, or a boolean for each layer", pattern)
    return ["sliding_attention" if is_sliding else "full_attention" for is_sliding in sliding_layers]


def _experts(keys: _Keys, model_type: str, experts: int) -> dict[str, Any]:
    num_chosen = keys.count("expert_used_count")
    if model_type == "mixtral":
        return {"num_local_experts": experts, "num_experts_per_tok": num_chosen}
    return {
        "num_experts": experts,
        "num_experts_per_tok": num_chosen,
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "norm_topk_prob": True,  # not in the files; llama.cpp always normalises
    }


def _rope(keys: _Keys, raw: Mapping[str, Any]) -> dict[str, Any]:
    places = keys.header.places
    theta, rotary_dim = keys.number("rope.freq_base", 10_000.0), keys.count("rope.dimension_count", raw["head_dim"])
    if theta < 1:
        raise keys.error("rope.freq_base", "a number of at least 1", theta)
    if rotary_dim % 2:
        raise keys.error("rope.dimension_count", "an even number, since rotations take pairs", rotary_dim)
    config: dict[str, Any] = {"rope_theta": float(theta)}
    if rotary_dim != raw["head_dim"]:
        config["partial_rotary_factor"] = rotary_dim / raw["head_dim"]
    has_factor = any(keys.header.fields.get(keys.prefix + key) for key in ("rope.scaling.factor", "rope.scale_linear"))
    kind = keys.get("rope.scaling.type", "linear" if has_factor else "none")
    original = keys.count("rope.scaling.original_context_length", 0)
    tables = [name for name in CONSTANTS if name in places]
    kinds = ("none",) if tables == [_ROPE] else ("none", "longrope")
    if tables and (kind not in kinds or (_ROPE in tables) == (len(tables) > 1)):
        raise keys.error("rope.scaling.type", f"none, in addition to {', '.join(tables)}", kind)
    scaling: dict[str, Any] | None
    if tables == [_ROPE]:
        scaling = _scaling_from_factors(_read_factors(keys, places[_ROPE], rotary_dim), theta, rotary_dim)
    elif tables:
        factors = {
            f"{word}_factor": _read_factors(keys, places[name], rotary_dim)
            for word, name in (("short", _SHORT), ("long", _LONG))
            if name in places
        }
        scaling = {"rope_type": "longrope", **factors}
        if attention := keys.number("rope.scaling.attn_factor", 0.0):
            scaling["attention_factor"] = float(attention)
        config |= {"original_max_position_embeddings": original} if original else {}
    else:
        scaling = _scaling_from_metadata(keys, kind, original)
        if raw["model_type"] == "phi3" and original:
            config["original_max_position_embeddings"] = original
    return {**config, "rope_scaling": scaling}


def _scaling_from_metadata(keys: _Keys, kind: Any, original: int) -> dict[str, Any] | None:
    factor = keys.number("rope.scaling.factor", 0.0) or keys.number("rope.scale_linear", 1.0)
    attention = keys.number("rope.scaling.attn_factor", 0.0)
    if attention not in (0, 1):
        raise keys.error("rope.scaling.attn_factor", "1 without frequency factors", attention)
    if kind == "none" or (kind == "linear" and factor == 1):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(factor)}
    if kind != "yarn":
        raise keys.error("rope.scaling.type", "none, linear, yarn, or longrope with its factors", kind)
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": float(factor)}
    if original:
        scaling["original_max_position_embeddings"] = original
    for word in ("beta_fast", "beta_slow"):
        if keys.get(f"rope.scaling.yarn_{word}") is not None:
            scaling[word] = float(keys.number(f"rope.scaling.yarn_{word}"))
    return scaling


def _read_factors(keys: _Keys, place: Place, rotary_dim: int) -> list[float]:
    if place.kind.name != "F32" or place.shape != (rotary_dim // 2,):
        expected, got = f"F32 of shape {(rotary_dim // 2,)}", f"{place.kind.name} of {place.shape}"
        raise _error(keys.header, place.name, expected, got)
    values = np.fromfile(keys.header.file, np.float32, place.shape[0], offset=place.start)
    if not np.all((values > 0) & np.isfinite(values)):
        raise _error(keys.header, place.name, "factors above 0", "a factor that is not")
    return [float(str(value)) for value in values]


def _scaling_from_factors(factors: list[float], theta: float, rotary_dim: int) -> dict[str, Any] | None:
    """Return `rope_scaling`: a Llama 3 rule that gives these factors, else longrope; None if all factors are 1."""
    stored_factors, max_factor = np.asarray(factors), max(factors)
    if max_factor == 1 == min(factors):
        return None
    low, high = 1.0, 4.0
    turns = theta ** -(np.arange(0, rotary_dim, 2) / rotary_dim) / (2 * math.pi)
    # The file has only the resulting factors: try the rule for pretraining lengths of 512, 1,024, ... 262,144 tokens.
    for original in (2**power for power in range(9, 19)):
        unscaled = np.clip((original * turns - low) / (high - low), 0, 1)
        if np.allclose(1 / ((1 - unscaled) / max_factor + unscaled), stored_factors, rtol=1e-5, atol=0):
            lengths = {"low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": original}
            return {"rope_type": "llama3", "factor": max_factor, **lengths}
    both_factors = {"short_factor": factors, "long_factor": factors}
    return {"rope_type": "longrope", "factor": max_factor, "attention_factor": 1.0, **both_factors}


def _error(header: Header, name: str, expected: str, got: Any) -> ModelFileError:
    is_long = isinstance(got, Long)
    description = "no value" if got is None else f"{got.count} values" if is_long else shortened(shown(got), 80)
    problem = f"{header.file}: {shown(name)} is not valid"
    return ModelFileError(problem, expected=expected, got=description, hint=CONVERT_HINT)
