"""Conversion between `DecoderConfig` and `config.json` of a Hugging Face folder, by model family."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..core import ConfigError, ModelFileError, shortened, shown, validate
from ._config import DecoderConfig, RopeScaling
from .families import FAMILIES, Family, family_of
from .families._family import COMMON, PREFIXES
from .packed import Scheme, scheme_of

if TYPE_CHECKING:
    from ._schema import ConfigFile, RopeEntry

ARCHITECTURES = tuple(family.architecture for family in FAMILIES.values())
_SILU = ("silu", "swish")
_LAYER_TYPES = ("full_attention", "sliding_attention")
_DROPOUTS = ("attention_dropout", "resid_pdrop", "embd_pdrop")
_MULTIMODAL_FIELDS = ("bos_token_id", "eos_token_id", "tie_word_embeddings", "quantization_config")
"""Fields that models of images and text store outside of their `text_config`."""
_COPY_HINT = "copy config.json, which has the sizes of the model, from the model's source again"
_WRONG_LOGITS = "choose another model; another frequency rule would give wrong logits, so nothing was loaded"


def config_from_hf(raw: Mapping[str, Any], filename: str) -> DecoderConfig:
    """Convert a parsed `config.json`; a field that switches on what Lowtide does not compute raises ModelFileError."""
    from ._schema import NEUTRAL, ConfigFile, unhandled

    quantization_from_hf(raw, filename)  # raises for formats that are not read
    outer = raw
    family, raw = _find_family(raw, filename)
    file = validate(ConfigFile, {**family.defaults, **_split_rope(raw, family, filename)}, filename, hint=_COPY_HINT)
    rope = _rope(file, family, filename)
    default_neutral = {name: values for name, values in NEUTRAL.items() if name not in family.known}
    unknown = unhandled(file, family.known, {**default_neutral, **family.neutral})
    if unknown:
        name = next(iter(unknown))
        raise ModelFileError(
            f"{filename}: {shown(name)} is not supported",
            expected=f"the fields of a {family.architecture}; others have to be null, false or absent",
            got=shortened(", ".join(f"{name}={shown(value)}" for name, value in unknown.items())),
            hint=f"remove {shortened(name, 80)} from the file if it does not change what the model computes",
        )
    for name in _DROPOUTS:
        if getattr(file, name):
            warnings.warn(
                f"{filename}: {name} {getattr(file, name)} is not applied; training uses no dropout",
                stacklevel=3,
            )
    for name in family.stored:
        if getattr(file, name):
            warnings.warn(f"{filename}: {name} is not applied, as in transformers", stacklevel=3)
    eos_ids, bos_ids = (
        _token_ids(file, name, filename, is_explicit=name in raw) for name in ("eos_token_id", "bos_token_id")
    )
    try:
        return DecoderConfig(
            **_decoder_fields(file, family, rope, filename),
            bos_token_id=bos_ids[0],
            eos_token_id=_single_or_tuple(eos_ids),
            module_prefix=PREFIXES[raw is not outer],
        )
    except ConfigError as error:
        raise ModelFileError(
            f"{filename}: {error.message}", expected=error.expected, got=error.got, hint=error.hint
        ) from error


def quantization_from_hf(raw: Mapping[str, Any], filename: str) -> Scheme | None:
    """Return the quantisation scheme in a parsed `config.json`, or None; ModelFileError if it is not supported."""
    text = raw.get("text_config")
    inner: Any = text.get("quantization_config") if isinstance(text, Mapping) else None  # pyright: ignore
    return scheme_of(raw.get("quantization_config") or inner, filename)


def _decoder_fields(file: ConfigFile, family: Family, rope: RopeEntry, filename: str) -> dict[str, Any]:
    """Return the fields of `DecoderConfig`, without special tokens."""
    copied = {field: getattr(file, hf_name) for field, hf_name in {**COMMON, **family.fields}.items()}
    heads = file.num_attention_heads
    fraction = rope.partial_rotary_factor or file.partial_rotary_factor
    return {
        **{name: value for name, value in copied.items() if value is not None},
        "num_kv_heads": file.num_key_value_heads or heads,
        "head_dim": file.head_dim or file.hidden_size // heads,
        "rope_theta": rope.rope_theta or file.rope_theta or family.rope_theta,
        "rope_scaling": _rope_scaling(rope, file, family, filename),
        "rotary_fraction": 1.0 if fraction is None else fraction,
        "family": family.model_type,
        **family.fixed,
        **family.read(file),
    }


def _single_or_tuple(ids: tuple[int | None, ...]) -> Any:
    return next(iter(ids)) if len(ids) == 1 else ids


def config_to_hf(config: DecoderConfig, dtype: str) -> dict[str, Any]:
    """Return a Hugging Face `config.json` with the same meaning in `transformers` 4 and 5, ready for JSON.

    `dtype` is that of the stored weights. A switch that no model of the family has raises ConfigError.
    """
    family = family_of(config)
    file = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{hf_name: getattr(config, field) for field, hf_name in {**COMMON, **family.fields}.items()},
        "hidden_act": {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}[config.activation],
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else _rope_to_hf(config.rope_scaling),
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_id) if isinstance(config.eos_token_id, tuple) else config.eos_token_id,
        "torch_dtype": dtype,
        **family.write(config),
    }
    # Read the result back: a switch that the family's files cannot express would be lost silently.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            reread = config_from_hf(file, "config.json")
        except ModelFileError as error:
            raise ConfigError(
                f"a config.json of {family.architecture} cannot express this model: {error.message}",
                expected=error.expected,
                got=error.got,
                hint="change the configuration, or its family",
            ) from error
    if differences := _differences(config, reread):
        name, (value, got) = next(iter(differences.items()))
        raise ConfigError(
            f"a config.json of {family.architecture} cannot express {name} = {shown(value)}",
            expected=shown(got),
            got=shortened(", ".join(differences)),
            hint="choose another family to save the model as; this family does not support the setting",
        )
    return file


def _differences(config: DecoderConfig, reread: DecoderConfig) -> dict[str, tuple[Any, Any]]:
    """Return the fields in which two configurations compute different results, with both values."""

    # Different fields can mean the same computation, so defaults and windows are resolved before the comparison.
    def resolved_fields(decoder: DecoderConfig) -> dict[str, Any]:
        out_bias = decoder.attention_bias if decoder.attention_out_bias is None else decoder.attention_out_bias
        scale = decoder.head_dim**-0.5 if decoder.attention_scale is None else decoder.attention_scale
        windows = decoder.windows
        fields = {field.name: getattr(decoder, field.name) for field in dataclasses.fields(decoder)}
        resolved = {"attention_out_bias": out_bias, "attention_scale": round(scale, 12), "module_prefix": None}
        return fields | resolved | {"sliding_window": windows, "sliding_layers": None}

    values, other_values = resolved_fields(config), resolved_fields(reread)
    return {name: (values[name], other_values[name]) for name in values if values[name] != other_values[name]}


def _find_family(raw: Mapping[str, Any], filename: str) -> tuple[Family, Mapping[str, Any]]:
    """Return the family of a file, and the section of the file about the text decoder."""
    declared, model_type = raw.get("architectures") or [], raw.get("model_type")
    architectures: list[Any] = declared if isinstance(declared, list) else [declared]  # pyright: ignore[reportUnknownVariableType]
    matches = [family for family in FAMILIES.values() if family.architecture in architectures]
    multimodal = [family for family in FAMILIES.values() if family.text_of in architectures]
    if not matches and not architectures and isinstance(model_type, str) and model_type in FAMILIES:
        matches = [FAMILIES[model_type]]
    if matches and model_type in (None, matches[0].model_type):
        _check_activation(raw, filename, matches[0])
        return matches[0], raw
    text_config = raw.get("text_config")
    if multimodal and isinstance(text_config, Mapping):
        warnings.warn(f"{filename}: the model is multimodal; only its text decoder is read", stacklevel=4)
        merged = {name: raw[name] for name in _MULTIMODAL_FIELDS if name in raw} | dict(text_config)  # pyright: ignore
        merged.pop("architectures", None)
        _check_activation(merged, filename, multimodal[0])
        return multimodal[0], merged
    is_named = bool(matches) or not architectures
    names = [shown(model_type)] if is_named else [shown(name) for name in architectures]
    raise ModelFileError(
        f"{filename}: unknown architecture {shortened(', '.join(names))}",
        expected=f"one of {', '.join(ARCHITECTURES)}, with its model_type",
        hint="check that --model names the right folder; Lowtide reads decoders of these families",
    )


def _check_activation(raw: Mapping[str, Any], filename: str, family: Family) -> None:
    if "activation" not in family.fixed and raw.get("hidden_act") not in (None, *_SILU):
        raise ModelFileError(
            f"{filename}: unknown activation {shown(raw['hidden_act'])}",
            expected="silu",
            hint=f"check hidden_act: the MLP of {family.architecture} is SwiGLU",
        )


def _split_rope(raw: Mapping[str, Any], family: Family, filename: str) -> dict[str, Any]:
    """Split `rope_parameters` with one entry per layer type into `rope_parameters` and `local_rope`.

    If all layers have one type, transformers 5 adds ``rope_theta`` null and ``rope_type`` default to these entries.
    """
    flat = dict(raw)
    entry: Any = raw.get("rope_parameters")
    rope: Mapping[str, Any] = entry if isinstance(entry, Mapping) else {}
    if "rope_local_base_freq" in family.known and set(rope) & set(_LAYER_TYPES):
        extra = {name: value for name, value in rope.items() if name not in _LAYER_TYPES and value is not None}
        if extra.pop("rope_type", "default") != "default" or extra:
            raise ModelFileError(
                f"{filename}: rope_parameters has keys other than the layer types",
                expected=" and ".join(_LAYER_TYPES),
                got=shortened(rope),
                hint=_WRONG_LOGITS,
            )
        flat["rope_parameters"], flat["local_rope"] = (rope.get(name) for name in _LAYER_TYPES)
        if flat["local_rope"] is None:
            del flat["local_rope"]
    return flat


def _rope(file: ConfigFile, family: Family, filename: str) -> RopeEntry:
    """Return the rotary settings of the file, which may be in two places and two spellings."""
    from ._schema import RopeEntry, unhandled

    entries = [
        entry for entry in (file.rope_parameters, file.rope_scaling) if entry is not None and entry.model_fields_set
    ]
    rope = entries[0] if entries else RopeEntry()
    duplicate = entries[-1] if entries else rope
    for entry in (*entries, file.local_rope):
        unknown = unhandled(entry)
        fraction = entry.partial_rotary_factor
        if fraction not in (None, 1.0) and "partial_rotary_factor" not in family.also:
            unknown = {"partial_rotary_factor": fraction}
        if unknown:
            raise ModelFileError(
                f"{filename}: rope_scaling has {shown(next(iter(unknown)))}, which Lowtide does not compute",
                got=shortened(unknown),
                hint=_WRONG_LOGITS,
            )
    excluded = {"rope_theta", "partial_rotary_factor"}
    theta = file.rope_theta
    pairs = {
        "rope_parameters and rope_scaling": (rope.model_dump(exclude=excluded), duplicate.model_dump(exclude=excluded)),
        "rope_type and type": (rope.rope_type or rope.type, rope.type or rope.rope_type),
        "rope_theta": (rope.rope_theta or theta, theta or rope.rope_theta),
    }
    for names, (first, second) in pairs.items():
        if first != second:
            raise ModelFileError(
                f"{filename}: it has two different values of {names}",
                got=shortened(f"{first} and {second}"),
                hint="keep the one that the model was trained with",
            )
    return rope


def _rope_scaling(rope: RopeEntry, file: ConfigFile, family: Family, filename: str) -> RopeScaling | None:
    rope_type = rope.rope_type or rope.type or "default"
    if family.model_type == "phi3" and rope_type in ("su", "yarn"):  # older names of longrope in Phi-3
        rope_type = "longrope"
    local_type = file.local_rope.rope_type or file.local_rope.type or "default"
    rope_types = ("linear", "dynamic", "llama3", "yarn", "longrope")
    if rope_type not in ("default", *rope_types) or local_type != "default":
        raise ModelFileError(
            f"{filename}: unknown RoPE scaling {shown(rope_type if local_type == 'default' else local_type)}",
            expected=f"default, {', '.join(rope_types[:-1])} or {rope_types[-1]}"
            if local_type == "default"
            else "default",
            hint=_WRONG_LOGITS,
        )
    if rope_type == "default":
        return None
    type_fields = {name for names in _FIELDS_OF_TYPE.values() for name in names}
    rope_values = rope.model_dump(exclude_none=True)  # also has unknown fields, all of which are off
    arguments = {name: value for name, value in rope_values.items() if name in {"factor", *type_fields}}
    original = rope.original_max_position_embeddings or file.original_max_position_embeddings
    if rope_type in ("yarn", "longrope"):
        original = original or file.max_position_embeddings
        arguments.setdefault("factor", file.max_position_embeddings / original)
    if original is not None:
        arguments["original_max_position_embeddings"] = original
    if "factor" not in arguments:
        got = shortened(rope.model_dump(exclude_none=True))
        raise ModelFileError(f"{filename}: rope_scaling has no factor", got=got, hint="copy config.json again")
    for name in arguments:
        if name in type_fields and name not in _FIELDS_OF_TYPE[rope_type]:
            raise ModelFileError(
                f"{filename}: rope_scaling has {shown(name)}, which {rope_type} does not use",
                got=shortened(arguments),
                hint=_WRONG_LOGITS,
            )
    factors = {name: tuple(arguments.pop(name)) for name in ("short_factor", "long_factor") if name in arguments}
    return RopeScaling(rope_type=rope_type, **arguments, **factors)  # pyright: ignore[reportArgumentType]


_FIELDS_OF_TYPE: Mapping[str, tuple[str, ...]] = {
    "linear": (),
    "dynamic": (),
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": ("beta_fast", "beta_slow", "truncate", "attention_factor"),
    "longrope": ("short_factor", "long_factor", "attention_factor"),
}
"""Fields of each RoPE scaling type, in addition to the factor and the length of pretraining."""


def _rope_to_hf(scaling: RopeScaling) -> dict[str, Any]:
    rope_type = scaling.rope_type
    values = {name: getattr(scaling, name) for name in _FIELDS_OF_TYPE[rope_type]}
    if rope_type in ("llama3", "yarn", "longrope"):
        values["original_max_position_embeddings"] = scaling.original_max_position_embeddings
    written = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}  # pyright: ignore
    return {
        "rope_type": rope_type,
        "factor": scaling.factor,
        **{name: value for name, value in written.items() if value is not None},
    }


def _token_ids(file: ConfigFile, name: str, filename: str, *, is_explicit: bool) -> tuple[int | None, ...]:
    """Return the ids of a special token, which may be absent, a number or a list; each must be in the vocabulary.

    A default of the family's class may be outside this vocabulary. It is then dropped, unless the file repeats it.
    """
    value: Any = getattr(file, name)
    ids: list[int] = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if token >= file.vocab_size and is_explicit:
            raise ModelFileError(
                f"{filename}: {name} is not a token id",
                expected=f"0 to {file.vocab_size - 1}",
                got=token,
                hint="copy the file from the model's source again",
            )
    return tuple(token for token in ids if token < file.vocab_size) or (None,)
