"""The kinds of adapters, and the lookup of a kind by configuration, nodes (`_node.py`) or `adapter_config.json`.

The variants of LoRA, such as DoRA, are in the table `VARIANTS` of `_lora.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core import (
    ModelFileError,
    StructureError,
    check_type,
    input_file,
    parse_json,
    read_input,
    shortened,
    shown,
    validate,
)
from ._ia3 import IA3_KIND, IA3Config
from ._lora import LORA_KIND, VARIANTS, Config
from ._peft import CONFIG_FILE, LORA, MERGE_HINT, WEIGHT_INITS, WEIGHTS_FILE, AdapterKind, Matcher, PeftConfig
from ._sites import Site
from ._vera import VERA_KIND, VeRAConfig

AnyConfig = Config | IA3Config | VeRAConfig
KINDS: tuple[AdapterKind, ...] = (LORA_KIND, IA3_KIND, VERA_KIND)
_KINDS_BY_PEFT_TYPE = {kind.peft_type: kind for kind in KINDS}

_MAX_CONFIG_BYTES = 16 * 1024**2
# Options that do not affect the outputs of a loaded adapter.
_IGNORED_OPTIONS = frozenset(
    "auto_mapping base_model_name_or_path corda_config d_initial eva_config inference_mode init_ia3_weights "
    "init_weights loftq_config lora_ga_config megatron_core peft_version projection_prng_key qalora_group_size "
    "revision runtime_config task_type".split()
)
# Initialisations that leave the base weights unchanged, and PiSSA and OLoRA: the part that they subtract from the base
# weights can be computed again. Others (PiSSA with random projections, CorDA, LoftQ, LoRA-GA) change the base weights
# in ways that no file records.
_SUPPORTED_INITS = (None, True, False, "gaussian", "eva", "orthogonal", *WEIGHT_INITS)


def kind_of_config(config: AnyConfig) -> AdapterKind:
    types, hint = tuple(kind.config_type for kind in KINDS), "pass for instance lt.lora.Config(rank=16)"
    check_type("config", config, types, "a Config, IA3Config or VeRAConfig", hint=hint)
    return next(kind for kind in KINDS if isinstance(config, kind.config_type))


def common_kind(adapted: Sequence[Site]) -> AdapterKind:
    kinds = {(site.node.PEFT_TYPE, site.node.variants.non_sums) for site in adapted}
    if len(kinds) > 1:
        message = "the model has adapters of several kinds, but a PEFT directory stores one kind"
        names = " and ".join(sorted({site.node.kind for site in adapted}))
        raise StructureError(message, got=names, hint="merge some of them with lt.lora.merge")
    return _KINDS_BY_PEFT_TYPE[next(iter(kinds))[0]]


def read_config(directory: Path) -> PeftConfig:
    """Read and check `adapter_config.json`; raise for an unsupported option that would change the outputs."""
    expected = f"a directory with {CONFIG_FILE} and {WEIGHTS_FILE}"
    hint = "give the directory that PEFT's save_pretrained or lt.lora.save wrote"
    path = input_file(directory, CONFIG_FILE, expected=expected, hint=hint)
    raw = parse_json(read_input(path, most_bytes=_MAX_CONFIG_BYTES), str(path))
    kind, schema = _refuse_unsupported(path, raw)
    hint = "write it again with PEFT or with lt.lora.save"
    file: Any = validate(schema, raw, f"{path}: not a {kind.name} configuration", hint=hint)
    config = PeftConfig(file=file, kind=kind, matcher=Matcher(str(path)), source=str(path))
    # Match each regular expression once, so that an invalid one raises even if no module is matched against it.
    texts = [text for text in (file.target_modules, file.exclude_modules) if isinstance(text, str)]
    for pattern in (*texts, *kind.patterns(file)):
        config.matcher.matches(pattern, "")
    kind.check_file(path, file)
    if (option := kind.dropout_option) is not None and (rate := getattr(file, option)):
        note = f"{path}: {option} {rate} is not applied; results match PEFT's eval mode, and training uses no dropout "
        note += f"unless lowtide finetune has --lora-dropout {rate}, or your loss function calls lt.lora.dropout"
        warnings.warn(note, stacklevel=3)
    return config


def _refuse_unsupported(path: Path, raw: Mapping[str, Any]) -> tuple[AdapterKind, Any]:
    """Return the kind and its schema; raise for unsupported options that would change the adapter's outputs."""
    from . import _schema  # it imports pydantic

    peft_type: Any = raw.get("peft_type", LORA)
    unsupported: dict[str, Any] = {}
    if not isinstance(peft_type, str) or peft_type not in _KINDS_BY_PEFT_TYPE:
        unsupported, peft_type = {"peft_type": peft_type}, LORA
    kind = _KINDS_BY_PEFT_TYPE[peft_type]
    schema = getattr(_schema, kind.schema)
    if (bias := raw.get("bias") or "none") not in kind.biases:
        unsupported["bias"] = bias
    is_weight_init = raw.get("init_lora_weights") in WEIGHT_INITS
    is_sum = all(variant.is_sum for variant in VARIANTS if raw.get(variant.option))
    if raw.get("init_lora_weights") not in _SUPPORTED_INITS or (is_weight_init and not is_sum):
        unsupported["init_lora_weights"] = raw["init_lora_weights"]
    known_options = {*_IGNORED_OPTIONS, *schema.model_fields}
    unsupported |= {name: value for name, value in raw.items() if value and name not in known_options}
    if unsupported:
        message = f"{path}: option {shown(next(iter(unsupported)))} is not supported"
        options = shortened(", ".join(f"{name}={shown(value)}" for name, value in unsupported.items()))
        raise ModelFileError(message, got=options, hint=f"{MERGE_HINT}, or convert it to plain LoRA there")
    return kind, schema
