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
_BY_LAYER = ("full_attention", "sliding_attention")
_DROPOUTS = ("attention_dropout", "resid_pdrop", "embd_pdrop")
_OF_THE_WHOLE = ("bos_token_id", "eos_token_id", "tie_word_embeddings", "quantization_config")
"""Fields that models of images and text store outside of their `text_config`."""
_AGAIN = "config.json has the sizes of the model; copy it from the model's source again"
_WRONG_LOGITS = "computing with another frequency rule would give wrong logits, so nothing was loaded"


def config_from_hf(raw: Mapping[str, Any], where: str) -> DecoderConfig:
    """Convert the contents of a Hugging Face `config.json`.

    Args:
        raw: the parsed file.
        where: the file's name, for messages.

    Returns:
        The configuration.

    Raises:
        ModelFileError: for an unknown architecture, activation or RoPE type, a missing or invalid field, or a field
            that switches on something that Lowtide does not compute.
    """
    from ._schema import NEUTRAL, ConfigFile, unhandled

    quantization_from_hf(raw, where)  # raises for formats that are not read
    outer = raw
    family, raw = _family(raw, where)
    file = validate(ConfigFile, {**family.defaults, **_flat(raw, family, where)}, where, hint=_AGAIN)
    rope = _rope(file, family, where)
    elsewhere = {name: values for name, values in NEUTRAL.items() if name not in family.known}
    unknown = unhandled(file, family.known, {**elsewhere, **family.neutral})
    if unknown:
        name = next(iter(unknown))
        raise ModelFileError(
            f"{where}: {shown(name)} is nothing that Lowtide computes",
            expected=f"the fields of a {family.architecture}; others have to be null, false or absent",
            got=shortened(", ".join(f"{name}={shown(value)}" for name, value in unknown.items())),
            hint=f"if {shortened(name, 80)} changes nothing that the model computes, remove it from the file",
        )
    for name in _DROPOUTS:
        if getattr(file, name):
            warnings.warn(
                f"{where}: {name} {getattr(file, name)} is not applied; training goes on without dropout", stacklevel=3
            )
    for name in family.stored:
        if getattr(file, name):
            warnings.warn(f"{where}: {name} is not applied, as transformers does not apply it", stacklevel=3)
    ends, begins = (_token_ids(file, name, where, is_given=name in raw) for name in ("eos_token_id", "bos_token_id"))
    try:
        return DecoderConfig(
            **_values(file, family, rope, where),
            bos_token_id=begins[0],
            eos_token_id=_one_or_all(ends),
            module_prefix=PREFIXES[raw is not outer],
        )
    except ConfigError as error:
        raise ModelFileError(
            f"{where}: {error.message}", expected=error.expected, got=error.got, hint=error.hint
        ) from error


def quantization_from_hf(raw: Mapping[str, Any], where: str) -> Scheme | None:
    """Return the quantisation scheme in a Hugging Face `config.json`.

    Args:
        raw: the parsed file.
        where: the file's name, for messages.

    Returns:
        The scheme, or None if the weights are not quantised.

    Raises:
        ModelFileError: for software or a format that is not read.
    """
    text = raw.get("text_config")
    inner: Any = text.get("quantization_config") if isinstance(text, Mapping) else None  # pyright: ignore
    return scheme_of(raw.get("quantization_config") or inner, where)


def _values(file: ConfigFile, family: Family, rope: RopeEntry, where: str) -> dict[str, Any]:
    """Return the fields of `DecoderConfig`, without special tokens."""
    copied = {ours: getattr(file, theirs) for ours, theirs in {**COMMON, **family.fields}.items()}
    heads = file.num_attention_heads
    fraction = rope.partial_rotary_factor or file.partial_rotary_factor
    return {
        **{name: value for name, value in copied.items() if value is not None},
        "num_kv_heads": file.num_key_value_heads or heads,
        "head_dim": file.head_dim or file.hidden_size // heads,
        "rope_theta": rope.rope_theta or file.rope_theta or family.rope_theta,
        "rope_scaling": _rope_scaling(rope, file, family, where),
        "rotary_fraction": 1.0 if fraction is None else fraction,
        "family": family.model_type,
        **family.fixed,
        **family.read(file),
    }


def _one_or_all(ends: tuple[int | None, ...]) -> Any:
    return next(iter(ends)) if len(ends) == 1 else ends


def config_to_hf(config: DecoderConfig, dtype: str) -> dict[str, Any]:
    """Return the contents of a Hugging Face `config.json` with the same meaning in `transformers` 4 and 5.

    Args:
        config: the sizes and switches.
        dtype: the dtype of the stored weights, such as ``"bfloat16"``.

    Returns:
        A dictionary ready for JSON.

    Raises:
        ConfigError: when the configuration has switches that no model of its family has.
    """
    family = family_of(config)
    file = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{theirs: getattr(config, ours) for ours, theirs in {**COMMON, **family.fields}.items()},
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
            again = config_from_hf(file, "config.json")
        except ModelFileError as error:
            raise ConfigError(
                f"no config.json of {family.architecture} says what this model computes: {error.message}",
                expected=error.expected,
                got=error.got,
                hint="change the configuration, or its family",
            ) from error
    if different := _differences(config, again):
        name, (wanted, got) = next(iter(different.items()))
        raise ConfigError(
            f"no config.json of {family.architecture} says {name} = {shown(wanted)}",
            expected=shown(got),
            got=shortened(", ".join(different)),
            hint="the model computes something that its family does not; choose another family to save it as",
        )
    return file


def _differences(config: DecoderConfig, other: DecoderConfig) -> dict[str, tuple[Any, Any]]:
    """Return the fields in which two configurations compute different results, with both values."""

    # Different fields can mean the same computation, so defaults and windows are resolved before the comparison.
    def plain(one: DecoderConfig) -> dict[str, Any]:
        out_bias = one.attention_bias if one.attention_out_bias is None else one.attention_out_bias
        scale = one.head_dim**-0.5 if one.attention_scale is None else one.attention_scale
        windows = one.windows
        fields = {field.name: getattr(one, field.name) for field in dataclasses.fields(one)}
        told = {"attention_out_bias": out_bias, "attention_scale": round(scale, 12), "module_prefix": None}
        return fields | told | {"sliding_window": windows, "sliding_layers": None}

    ours, theirs = plain(config), plain(other)
    return {name: (ours[name], theirs[name]) for name in ours if ours[name] != theirs[name]}


def _family(raw: Mapping[str, Any], where: str) -> tuple[Family, Mapping[str, Any]]:
    """Return the family of a file, and the section of the file about the text decoder."""
    named, kind = raw.get("architectures") or [], raw.get("model_type")
    architectures: list[Any] = named if isinstance(named, list) else [named]  # pyright: ignore[reportUnknownVariableType]
    found = [family for family in FAMILIES.values() if family.architecture in architectures]
    whole = [family for family in FAMILIES.values() if family.text_of in architectures]
    if not found and not architectures and isinstance(kind, str) and kind in FAMILIES:
        found = [FAMILIES[kind]]
    if found and kind in (None, found[0].model_type):
        _refuse_unreadable(raw, where, found[0])
        return found[0], raw
    text = raw.get("text_config")
    if whole and isinstance(text, Mapping):
        warnings.warn(f"{where}: a model of images and text; only its text decoder is read", stacklevel=4)
        merged = {name: raw[name] for name in _OF_THE_WHOLE if name in raw} | dict(text)  # pyright: ignore
        merged.pop("architectures", None)
        _refuse_unreadable(merged, where, whole[0])
        return whole[0], merged
    is_named = bool(found) or not architectures
    names = [shown(kind)] if is_named else [shown(name) for name in architectures]
    raise ModelFileError(
        f"{where}: unknown architecture {shortened(', '.join(names))}",
        expected=f"one of {', '.join(ARCHITECTURES)}, with its model_type",
        hint="Lowtide reads decoders of these families; check that --model names the right folder",
    )


def _refuse_unreadable(raw: Mapping[str, Any], where: str, family: Family) -> None:
    if "activation" not in family.fixed and raw.get("hidden_act") not in (None, *_SILU):
        raise ModelFileError(
            f"{where}: unknown activation {shown(raw['hidden_act'])}",
            expected="silu",
            hint=f"the MLP of {family.architecture} is SwiGLU",
        )


def _flat(raw: Mapping[str, Any], family: Family, where: str) -> dict[str, Any]:
    """Split `rope_parameters` with one entry per layer type into `rope_parameters` and `local_rope`.

    If all layers have one type, transformers 5 adds ``rope_theta`` null and ``rope_type`` default to these entries.
    """
    flat = dict(raw)
    given: Any = raw.get("rope_parameters")
    rope: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    if "rope_local_base_freq" in family.known and set(rope) & set(_BY_LAYER):
        beside = {name: value for name, value in rope.items() if name not in _BY_LAYER and value is not None}
        if beside.pop("rope_type", "default") != "default" or beside:
            raise ModelFileError(
                f"{where}: rope_parameters says more than the kinds of layers",
                expected=" and ".join(_BY_LAYER),
                got=shortened(rope),
                hint=_WRONG_LOGITS,
            )
        flat["rope_parameters"], flat["local_rope"] = (rope.get(name) for name in _BY_LAYER)
        if flat["local_rope"] is None:
            del flat["local_rope"]
    return flat


def _rope(file: ConfigFile, family: Family, where: str) -> RopeEntry:
    """Return the rotary settings of the file, which may be in two places and two spellings."""
    from ._schema import RopeEntry, unhandled

    given = [
        entry for entry in (file.rope_parameters, file.rope_scaling) if entry is not None and entry.model_fields_set
    ]
    rope = given[0] if given else RopeEntry()
    other = given[-1] if given else rope
    for entry in (*given, file.local_rope):
        rest = unhandled(entry)
        fraction = entry.partial_rotary_factor
        if fraction not in (None, 1.0) and "partial_rotary_factor" not in family.also:
            rest = {"partial_rotary_factor": fraction}
        if rest:
            raise ModelFileError(
                f"{where}: rope_scaling has {shown(next(iter(rest)))}, which Lowtide does not compute",
                got=shortened(rest),
                hint=_WRONG_LOGITS,
            )
    elsewhere = {"rope_theta", "partial_rotary_factor"}
    theta = file.rope_theta
    said = {
        "rope_parameters and rope_scaling": (rope.model_dump(exclude=elsewhere), other.model_dump(exclude=elsewhere)),
        "rope_type and type": (rope.rope_type or rope.type, rope.type or rope.rope_type),
        "rope_theta": (rope.rope_theta or theta, theta or rope.rope_theta),
    }
    for what, (one, two) in said.items():
        if one != two:
            raise ModelFileError(
                f"{where}: it says two things about {what}",
                got=shortened(f"{one} and {two}"),
                hint="keep the one that the model was trained with",
            )
    return rope


def _rope_scaling(rope: RopeEntry, file: ConfigFile, family: Family, where: str) -> RopeScaling | None:
    rope_type = rope.rope_type or rope.type or "default"
    if family.model_type == "phi3" and rope_type in ("su", "yarn"):  # older names of longrope in Phi-3
        rope_type = "longrope"
    local = file.local_rope.rope_type or file.local_rope.type or "default"
    known = ("linear", "dynamic", "llama3", "yarn", "longrope")
    if rope_type not in ("default", *known) or local != "default":
        raise ModelFileError(
            f"{where}: unknown RoPE scaling {shown(rope_type if local == 'default' else local)}",
            expected=f"default, {', '.join(known[:-1])} or {known[-1]}" if local == "default" else "default",
            hint=_WRONG_LOGITS,
        )
    if rope_type == "default":
        return None
    allowed = {name for names in _OF_TYPE.values() for name in names}
    said = rope.model_dump(exclude_none=True)  # also has unknown fields, all of which are off
    given = {name: value for name, value in said.items() if name in {"factor", *allowed}}
    original = rope.original_max_position_embeddings or file.original_max_position_embeddings
    if rope_type in ("yarn", "longrope"):
        original = original or file.max_position_embeddings
        given.setdefault("factor", file.max_position_embeddings / original)
    if original is not None:
        given["original_max_position_embeddings"] = original
    if "factor" not in given:
        got = shortened(rope.model_dump(exclude_none=True))
        raise ModelFileError(f"{where}: rope_scaling has no factor", got=got, hint="copy config.json again")
    for name in given:
        if name in allowed and name not in _OF_TYPE[rope_type]:
            raise ModelFileError(
                f"{where}: rope_scaling has {shown(name)}, which means nothing for {rope_type}",
                got=shortened(given),
                hint=_WRONG_LOGITS,
            )
    factors = {name: tuple(given.pop(name)) for name in ("short_factor", "long_factor") if name in given}
    return RopeScaling(rope_type=rope_type, **given, **factors)  # pyright: ignore[reportArgumentType]


_OF_TYPE: Mapping[str, tuple[str, ...]] = {
    "linear": (),
    "dynamic": (),
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": ("beta_fast", "beta_slow", "truncate", "attention_factor"),
    "longrope": ("short_factor", "long_factor", "attention_factor"),
}
"""Fields of each RoPE scaling type, in addition to the factor and the length of pretraining."""


def _rope_to_hf(scaling: RopeScaling) -> dict[str, Any]:
    kind = scaling.rope_type
    values = {name: getattr(scaling, name) for name in _OF_TYPE[kind]}
    if kind in ("llama3", "yarn", "longrope"):
        values["original_max_position_embeddings"] = scaling.original_max_position_embeddings
    written = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}  # pyright: ignore
    return {"rope_type": kind, "factor": scaling.factor, **{k: v for k, v in written.items() if v is not None}}


def _token_ids(file: ConfigFile, name: str, where: str, *, is_given: bool) -> tuple[int | None, ...]:
    """Return the ids of a special token, which may be absent, a number or a list; each must be in the vocabulary.

    A default of the family's class may be outside this vocabulary. It is then dropped, unless the file repeats it.
    """
    value: Any = getattr(file, name)
    ids: list[int] = value if isinstance(value, list) else [] if value is None else [value]
    for each in ids:
        if each >= file.vocab_size and is_given:
            raise ModelFileError(
                f"{where}: {name} is no token",
                expected=f"0 to {file.vocab_size - 1}",
                got=each,
                hint="copy the file from the model's source again",
            )
    return tuple(each for each in ids if each < file.vocab_size) or (None,)
