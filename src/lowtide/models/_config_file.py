"""Conversion between `DecoderConfig` and `config.json` of a Hugging Face folder, by model family."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..core import ConfigError, ModelFileError, check_choice, check_integer, shortened, shown, validate
from ._config import ROPE_FIELDS, DecoderConfig, RopeScaling
from ._quantized import Scheme, scheme_of
from .families import FAMILIES, Family, family_of
from .families._family import ACTIVATIONS, COMMON, PREFIXES, Dropout

if TYPE_CHECKING:
    from ._schema import ConfigFile, RopeEntry

_FAMILY_ROPE_FIELDS = ("mscale", "mscale_all_dim", "llama_4_scaling_beta")
_SILU = ("silu", "swish")
_LAYER_TYPES = ("full_attention", "sliding_attention")
_MULTIMODAL_FIELDS = ("bos_token_id", "eos_token_id", "tie_word_embeddings", "quantization_config")
"""Fields that multimodal models may store outside of their `text_config`."""
_COPY_HINT = "copy the model's files from their source again"
_WRONG_LOGITS = "choose another model; another frequency rule would give wrong logits, so nothing was loaded"
_ARCHITECTURES = ", ".join(family.architecture for family in FAMILIES.values())
_FAMILIES_HINT = f"check that --model names the right folder; supported architectures: {_ARCHITECTURES}"


def config_from_hf(raw: Mapping[str, Any], filename: str) -> DecoderConfig:
    """Convert a parsed `config.json`; an unknown family, bad value or unsupported field raises ModelFileError."""
    from ._schema import NEUTRAL, config_schema, unhandled

    quantization_from_hf(raw, filename)  # raises for formats that are not read
    outer = raw
    family, raw = _find_family(raw, filename)
    if "activation" not in family.fixed and raw.get("hidden_act") is not None:
        hint = f"the MLP of {family.architecture} is SwiGLU"
        check_choice(f"{filename}: hidden_act", raw["hidden_act"], _SILU, hint=hint, error=ModelFileError)
    values = {**family.defaults, **_split_rope(raw, family, filename)}
    file = validate(config_schema(), values, filename, hint=_COPY_HINT)
    rope = _rope(file, family, filename)
    default_neutral = {name: values for name, values in NEUTRAL.items() if name not in family.known}
    if unknown := unhandled(file, family.known, {**default_neutral, **family.neutral}):
        name = next(iter(unknown))
        got = shortened(", ".join(f"{name}={shown(value)}" for name, value in unknown.items()))
        hint = f"remove {shortened(name, 80)} from the file if it does not change what {family.architecture} computes"
        raise ModelFileError(f"{filename}: {shown(name)} is not supported", got=got, hint=hint)
    dropouts = (name for name, field_type in family.field_types.items() if field_type is Dropout)
    for name in ("attention_dropout", *dropouts):
        if rate := getattr(file, name):
            warnings.warn(f"{filename}: {name} {rate} is not applied; training uses no dropout", stacklevel=3)
    for layer_type in getattr(file, "layer_types", None) or ():
        hint = f"{family.architecture} has no such layers"
        check_choice(f"{filename}: layer_types", layer_type, family.layer_types, hint=hint, error=ModelFileError)
    for name in family.stored:
        if getattr(file, name):
            warnings.warn(f"{filename}: {name} is not applied, as in transformers", stacklevel=3)
    eos_ids = _token_ids(file, "eos_token_id", filename, is_explicit="eos_token_id" in raw)
    bos_ids = _token_ids(file, "bos_token_id", filename, is_explicit="bos_token_id" in raw)
    try:
        return DecoderConfig(
            **_decoder_fields(file, family, rope, filename),
            bos_token_id=bos_ids[0],
            eos_token_id=eos_ids[0] if len(eos_ids) == 1 else eos_ids,
            module_prefix=PREFIXES[raw is not outer],
        )
    except ConfigError as error:
        raise ModelFileError(f"{filename}: {error.message}", hint=error.hint or _COPY_HINT) from error


def quantization_from_hf(raw: Mapping[str, Any], filename: str) -> Scheme | None:
    """Return the quantisation scheme in a parsed `config.json`, or None; raise ModelFileError if it is unsupported."""
    text = raw.get("text_config")
    inner: Any = text.get("quantization_config") if isinstance(text, Mapping) else None  # pyright: ignore
    return scheme_of(raw.get("quantization_config") or inner, filename)


def _decoder_fields(file: ConfigFile, family: Family, rope: RopeEntry, filename: str) -> dict[str, Any]:
    """Return the fields of `DecoderConfig` except special tokens and `module_prefix`."""
    copied = {field: getattr(file, hf_name) for field, hf_name in {**COMMON, **family.fields}.items()}
    heads = file.num_attention_heads
    return {
        **{name: value for name, value in copied.items() if value is not None},
        "num_kv_heads": file.num_key_value_heads or heads,
        "head_dim": file.head_dim or file.hidden_size // heads,
        "rope_theta": rope.rope_theta or file.rope_theta or family.rope_theta,
        "rope_scaling": _rope_scaling(rope, file, family, filename),
        "rotary_fraction": rope.partial_rotary_factor or file.partial_rotary_factor or 1.0,
        "family": family.model_type,
        **family.fixed,
        **family.read(file),
    }


def config_to_hf(config: DecoderConfig, dtype: str) -> dict[str, Any]:
    """Return the contents of a `config.json`, from which `transformers` 4 and 5 make the same model.

    `dtype` is the stored weights' dtype. A configuration that the family's files cannot express raises ConfigError.
    """
    family = family_of(config)
    file: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{hf_name: getattr(config, field) for field, hf_name in {**COMMON, **family.fields}.items()},
        "hidden_act": ACTIVATIONS[config.activation],
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else _rope_to_hf(config.rope_scaling),
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_id) if isinstance(config.eos_token_id, tuple) else config.eos_token_id,
        "torch_dtype": dtype,
        **family.write(config),
    }
    if family.writes_local_rope:
        scaled = file["rope_scaling"] or {"rope_type": "default"}
        local = {"rope_type": "default", "rope_theta": config.local_rope_theta}
        full = {**scaled, "rope_theta": config.rope_theta}
        file["rope_parameters"] = dict(zip(_LAYER_TYPES, (full, local), strict=True))
    if not family.writes_old_rope:
        del file["rope_theta"], file["rope_scaling"]
    # Read the result back: a switch that the family's files cannot express would be lost silently.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            reread = config_from_hf(file, "config.json")
        except ModelFileError as error:
            problem = f"a config.json of {family.architecture} cannot express this model: {error.message}"
            hint = "change the configuration, or its family"
            raise ConfigError(problem, expected=error.expected, got=error.got, hint=hint) from error
    if differences := _differences(config, reread):
        name, (value, got) = next(iter(differences.items()))
        names = shortened(", ".join(differences))
        problem = f"a config.json of {family.architecture} cannot express {name} = {shown(value)}, only {shown(got)}"
        hint = f"choose another family to save the model as; this one does not support this value of {names}"
        raise ConfigError(problem, hint=hint)
    return file


def _differences(config: DecoderConfig, reread: DecoderConfig) -> dict[str, tuple[Any, Any]]:
    """Return both values of each field that makes two configurations compute different results, by field."""

    # Different fields can mean the same computation, so defaults and windows are resolved before the comparison.
    def resolved_fields(decoder: DecoderConfig) -> dict[str, Any]:
        out_bias = decoder.attention_bias if decoder.attention_out_bias is None else decoder.attention_out_bias
        scale = decoder.head_dim**-0.5 if decoder.attention_scale is None else decoder.attention_scale
        fields = {field.name: getattr(decoder, field.name) for field in dataclasses.fields(decoder)}
        count = decoder.num_layers
        lists = {
            "delta_layers": decoder.delta_layers or (decoder.delta_net is not None,) * count,
            "rotary_layers": decoder.rotary_layers or (True,) * count,
            "global_head_dim": decoder.global_head_dim or decoder.head_dim,
        }
        resolved = {**lists, "attention_out_bias": out_bias, "attention_scale": round(scale, 12), "module_prefix": None}
        return fields | resolved | {"sliding_window": decoder.windows, "sliding_layers": None}

    values, other_values = resolved_fields(config), resolved_fields(reread)
    return {name: (values[name], other_values[name]) for name in values if values[name] != other_values[name]}


def _find_family(raw: Mapping[str, Any], filename: str) -> tuple[Family, Mapping[str, Any]]:
    """Return the family of a file, and the fields of its text decoder."""
    declared, model_type = raw.get("architectures") or [], raw.get("model_type")
    architectures: list[Any] = declared if isinstance(declared, list) else [declared]  # pyright: ignore[reportUnknownVariableType]
    matches = [family for family in FAMILIES.values() if family.architecture in architectures]
    text_config = raw.get("text_config")
    text_type: Any = text_config.get("model_type") if isinstance(text_config, Mapping) else None  # pyright: ignore
    multimodal = [
        family
        for family in FAMILIES.values()
        if family.text_of in architectures and text_type in (None, family.model_type)
    ]
    if not matches and not architectures and isinstance(model_type, str) and model_type in FAMILIES:
        matches = [FAMILIES[model_type]]
    if matches and model_type in (None, matches[0].model_type):
        return matches[0], raw
    if multimodal and isinstance(text_config, Mapping):
        warnings.warn(f"{filename}: the model is multimodal; only its text decoder is read", stacklevel=4)
        merged = {name: raw[name] for name in _MULTIMODAL_FIELDS if name in raw} | dict(text_config)  # pyright: ignore
        merged.pop("architectures", None)
        return multimodal[0], merged
    is_named = bool(matches) or not architectures
    names = [shown(model_type)] if is_named else [shown(name) for name in architectures]
    raise ModelFileError(f"{filename}: unknown architecture {shortened(', '.join(names))}", hint=_FAMILIES_HINT)


def _split_rope(raw: Mapping[str, Any], family: Family, filename: str) -> dict[str, Any]:
    """Return the file's fields, with `rope_parameters` split if that field has one entry for each layer type.

    The entry of full-attention layers becomes `rope_parameters`, the entry of sliding-window layers `local_rope`. If
    all layers have one type, transformers 5 adds ``rope_theta`` (null) and ``rope_type`` (default); both are ignored.
    """
    flat = dict(raw)
    if raw.get("rope_parameters") is None and raw.get("rope_scaling") is None and family.rope_defaults:
        flat["rope_parameters"] = dict(family.rope_defaults)
    entry: Any = flat.get("rope_parameters")
    rope: Mapping[str, Any] = entry if isinstance(entry, Mapping) else {}
    if family.has_local_rope and set(rope) & set(_LAYER_TYPES):
        extra = {name: value for name, value in rope.items() if name not in _LAYER_TYPES and value is not None}
        if extra.pop("rope_type", "default") != "default" or extra:
            problem = f"{filename}: rope_parameters has keys other than {' and '.join(_LAYER_TYPES)}"
            raise ModelFileError(problem, got=shortened(rope), hint=_WRONG_LOGITS)
        flat["rope_parameters"], flat["local_rope"] = (
            rope.get(name) or family.rope_defaults.get(name) for name in _LAYER_TYPES
        )
        if flat["local_rope"] is None:
            del flat["local_rope"]
    return flat


def _rope(file: ConfigFile, family: Family, filename: str) -> RopeEntry:
    """Return the file's rotary settings; unknown settings and contradictory values raise ModelFileError."""
    from ._schema import RopeEntry, unhandled

    stored = (file.rope_parameters, file.rope_scaling)
    entries = [entry for entry in stored if entry is not None and entry.model_fields_set] or [RopeEntry()]
    rope, duplicate = entries[0], entries[-1]
    for entry in (*entries, file.local_rope):
        unknown = {name: value for name, value in unhandled(entry).items() if name not in family.rope_ignored}
        fraction = entry.partial_rotary_factor
        if fraction not in (None, 1.0) and "partial_rotary_factor" not in family.known:
            unknown = {"partial_rotary_factor": fraction}
        for name in _FAMILY_ROPE_FIELDS:
            if getattr(entry, name) and name not in family.rope_fields:
                unknown = {name: getattr(entry, name)}
        if unknown:
            problem = f"{filename}: rope_scaling has {shown(next(iter(unknown)))}, which Lowtide does not compute"
            raise ModelFileError(problem, got=shortened(unknown), hint=_WRONG_LOGITS)
    excluded = {"rope_theta", "partial_rotary_factor"}
    theta = file.rope_theta
    pairs = {
        "rope_parameters and rope_scaling": (rope.model_dump(exclude=excluded), duplicate.model_dump(exclude=excluded)),
        "rope_type and type": (rope.rope_type or rope.type, rope.type or rope.rope_type),
        "rope_theta": (rope.rope_theta or theta, theta or rope.rope_theta),
    }
    for names, (first, second) in pairs.items():
        if first != second:
            got = shortened(f"{first} and {second}")
            hint = "keep the one that the model was trained with"
            raise ModelFileError(f"{filename}: it has two different values of {names}", got=got, hint=hint)
    return rope


def _rope_scaling(rope: RopeEntry, file: ConfigFile, family: Family, filename: str) -> RopeScaling | None:
    rope_type = rope.rope_type or rope.type or "default"
    rope_type = family.rope_aliases.get(rope_type, rope_type)
    local_type = file.local_rope.rope_type or file.local_rope.type or "default"
    check = functools.partial(check_choice, hint=_WRONG_LOGITS, error=ModelFileError)
    check(f"{filename}: rope_type", rope_type, ("default", *ROPE_FIELDS))
    if rope_type == "proportional" and "proportional" not in family.rope_fields:
        problem = f"{filename}: {family.architecture} has no rope_type 'proportional'"
        raise ModelFileError(problem, hint=_WRONG_LOGITS)
    check(f"{filename}: rope_type of sliding-window layers", local_type, ("default",))
    if rope_type != "yarn" and rope.llama_4_scaling_beta:
        problem = f"{filename}: llama_4_scaling_beta needs rope_type yarn, not {rope_type}"
        raise ModelFileError(problem, hint=_WRONG_LOGITS)
    if rope_type == "default":
        return None
    type_fields = {name for names in ROPE_FIELDS.values() for name in names}
    rope_values = rope.model_dump(exclude_none=True)  # also has unknown fields, all of which are off
    if rope_type != "proportional":  # elsewhere the fraction is that of the rotated dimensions
        rope_values.pop("partial_rotary_factor", None)
    arguments = {name: value for name, value in rope_values.items() if name in {"factor", *type_fields}}
    original = rope.original_max_position_embeddings or file.original_max_position_embeddings
    if rope_type == "proportional":
        arguments.setdefault("factor", 1.0)
    if rope_type in ("yarn", "longrope"):
        original = original or file.max_position_embeddings
        arguments.setdefault("factor", file.max_position_embeddings / original)
    if rope_type == "yarn" and rope.mscale and rope.mscale_all_dim:
        # DeepSeek's temperatures of attention; transformers divides one by the other.
        growth = 0.1 * math.log(max(arguments["factor"], 1))
        arguments.setdefault("attention_factor", (growth * rope.mscale + 1) / (growth * rope.mscale_all_dim + 1))
    if original is not None:
        arguments["original_max_position_embeddings"] = original
    if "factor" not in arguments:
        got = shortened(rope_values)
        raise ModelFileError(f"{filename}: rope_scaling has no factor", got=got, hint="copy config.json again")
    for name in arguments:
        if name in type_fields and name not in ROPE_FIELDS[rope_type]:
            problem = f"{filename}: rope_scaling has {shown(name)}, which {rope_type} does not use"
            raise ModelFileError(problem, hint=_WRONG_LOGITS)
    factors = {name: tuple(arguments.pop(name)) for name in ("short_factor", "long_factor") if name in arguments}
    return RopeScaling(rope_type=rope_type, **arguments, **factors)  # pyright: ignore[reportArgumentType]


def _rope_to_hf(scaling: RopeScaling) -> dict[str, Any]:
    rope_type = scaling.rope_type
    file: dict[str, Any] = {"rope_type": rope_type, "factor": scaling.factor}
    for name in ROPE_FIELDS[rope_type]:
        value = getattr(scaling, name)
        if value is not None:
            file[name] = [*value] if isinstance(value, tuple) else value
    if rope_type in ("llama3", "yarn", "longrope"):
        file["original_max_position_embeddings"] = scaling.original_max_position_embeddings
    return file


def _token_ids(file: ConfigFile, name: str, filename: str, *, is_explicit: bool) -> tuple[Any, ...]:
    """Return the ids of a special token, which the file gives as a number, a list or null; ``(None,)`` without ids.

    An id outside of the vocabulary raises ModelFileError if `is_explicit`, that is, if the file has the field. Without
    the field, the ids are the family's defaults, and an id outside of the vocabulary is left out.
    """
    value: Any = getattr(file, name)
    ids: list[int] = value if isinstance(value, list) else [] if value is None else [value]
    if is_explicit:
        for token in ids:
            check_integer(f"{filename}: {name}", token, 0, file.vocab_size - 1, hint=_COPY_HINT, error=ModelFileError)
    return tuple(token for token in ids if token < file.vocab_size) or (None,)
