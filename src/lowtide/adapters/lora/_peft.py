"""PEFT's adapter format: what its configuration says, and which names its tensors have.

An adapter is a directory with `adapter_config.json` and `adapter_model.safetensors`. A module ``m`` has the tensors
``base_model.model.m.lora_A.weight`` [r, in] and ``base_model.model.m.lora_B.weight`` [out, r]. Module names in the
configuration are matched as PEFT 0.21 does (`tuners_utils.check_target_module_exists`, `other.get_pattern_key`):
entries of a list equal a name or end it after a dot, a text is a regular expression for the whole name, and the keys
of `rank_pattern` and `alpha_pattern` are regular expressions for the end of a name, the first that fits deciding.
"""

from __future__ import annotations

import dataclasses
import math
import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core import ModelFileError, input_file, parse_json, read_input, shortened, shown, validate
from ._patterns import Matcher

if TYPE_CHECKING:
    from ._schema import AdapterFile

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_MOST_BYTES = 16 * 1024**2

# Options that say nothing about the values a loaded adapter computes with.
_NO_EFFECT = frozenset(
    "auto_mapping base_model_name_or_path corda_config eva_config inference_mode layers_pattern loftq_config "
    "lora_ga_config megatron_core peft_version qalora_group_size revision runtime_config task_type".split()
)
_READ = frozenset(
    "alpha_pattern bias exclude_modules init_lora_weights lora_alpha lora_dropout peft_type r rank_pattern "
    "target_modules use_rslora".split()
)
# Initialisations that leave the base weights alone; the others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) change them.
_PURE_INITS = (None, True, False, "gaussian", "eva", "orthogonal")


def tensor_names(module: str) -> tuple[str, str]:
    """Return the names of a module's A and B in the file."""
    return f"base_model.model.{module}.lora_A.weight", f"base_model.model.{module}.lora_B.weight"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeftConfig:
    """What `adapter_config.json` says about the adapted modules."""

    file: AdapterFile
    """The file."""
    matcher: Matcher
    """What matches its patterns."""

    def check_patterns(self) -> None:
        """Raise for what is no regular expression, whether or not a module is looked for with it."""
        texts = [text for text in (self.file.target_modules, self.file.exclude_modules) if isinstance(text, str)]
        ends = [*(self.file.rank_pattern or ()), *(self.file.alpha_pattern or ())]
        for pattern in (*texts, *map(_end_of, ends)):
            self.matcher.matches(pattern, "")

    def rank_of(self, module: str) -> int:
        """Return the rank of a module."""
        return _by_pattern(self.file.rank_pattern, module, self.matcher, self.file.r)

    def alpha_of(self, module: str) -> float:
        """Return the alpha with which ``alpha / rank`` is the scale that the file asks for."""
        alpha = _by_pattern(self.file.alpha_pattern, module, self.matcher, self.file.lora_alpha)
        return float(alpha * math.sqrt(self.rank_of(module))) if self.file.use_rslora else float(alpha)

    def targets(self, module: str) -> bool:
        """Whether a module has an adapter; True when the file does not say."""
        named, excluded = self.file.target_modules, self.file.exclude_modules
        if excluded and _matches(excluded, module, self.matcher):
            return False
        return named is None or _matches(named, module, self.matcher)


def describe(
    adapted: Mapping[str, tuple[int, float]],
    modules: Sequence[str],
    *,
    base_model_name_or_path: str | None,
    task_type: str | None,
) -> dict[str, Any]:
    """Return the contents of `adapter_config.json`.

    Args:
        adapted: rank and alpha of every adapted module.
        modules: the names of all modules of the model that could be adapted.
        base_model_name_or_path: where the base model is.
        task_type: PEFT's name of the kind of model.

    Returns:
        A dictionary with the keys PEFT writes.
    """
    rank, rank_pattern = _default_and_pattern({name: rank for name, (rank, _) in adapted.items()})
    alpha, alpha_pattern = _default_and_pattern({name: _integral(alpha) for name, (_, alpha) in adapted.items()})
    return {
        "alpha_pattern": alpha_pattern,
        "auto_mapping": None,
        "base_model_name_or_path": base_model_name_or_path,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_pattern": None,
        "layers_to_transform": None,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "rank_pattern": rank_pattern,
        "revision": None,
        "target_modules": _target_modules(list(adapted), modules),
        "task_type": task_type,
        "use_dora": False,
        "use_rslora": False,
    }


def read_config(directory: Path) -> PeftConfig:
    """Read and check `adapter_config.json`.

    Raises:
        ModelFileError: when it is missing, no JSON object, lacks or garbles a value, or asks for something that would
            change the result and is not supported.
    """
    from ._schema import AdapterFile

    path = input_file(
        directory,
        CONFIG_FILE,
        expected=f"a directory with {CONFIG_FILE} and {WEIGHTS_FILE}",
        hint="give the directory that PEFT's save_pretrained or lt.lora.save wrote",
    )
    raw = parse_json(read_input(path, most_bytes=_MOST_BYTES), str(path))
    _refuse_unsupported(path, raw)
    file = validate(
        AdapterFile, raw, f"{path}: not a LoRA configuration", hint="write it again with PEFT or with lt.lora.save"
    )
    config = PeftConfig(file=file, matcher=Matcher(str(path)))
    config.check_patterns()
    if file.lora_dropout:
        warnings.warn(
            f"{path}: lora_dropout {file.lora_dropout} is not applied; results are those of PEFT's eval mode, and "
            "training goes on without dropout",
            stacklevel=3,
        )
    return config


def _refuse_unsupported(path: Path, raw: Mapping[str, Any]) -> None:
    """Refuse every option, known or not, that is switched on and would change what the adapter computes."""
    wrong = {
        name: raw.get(name, default)
        for name, default in (("peft_type", "LORA"), ("bias", "none"))
        if raw.get(name, default) != default
    }
    if raw.get("init_lora_weights") not in _PURE_INITS:
        wrong["init_lora_weights"] = raw["init_lora_weights"]
    wrong |= {name: value for name, value in raw.items() if value and name not in _NO_EFFECT | _READ}
    if raw.get("layers_to_transform") == 0:  # the first layer alone, which is no "off"
        wrong["layers_to_transform"] = 0
    if wrong:
        raise ModelFileError(
            f"{path}: option {shown(next(iter(wrong)))} is not supported",
            expected="a plain or rank-stabilised LoRA adapter without biases",
            got=shortened(", ".join(f"{name}={shown(value)}" for name, value in wrong.items())),
            hint="merge this adapter with PEFT (merge_and_unload), or convert it to plain LoRA there",
        )


def _matches(patterns: str | Sequence[str], module: str, matcher: Matcher) -> bool:
    if isinstance(patterns, str):
        return matcher.matches(patterns, module)
    return any(module == name or module.endswith(f".{name}") for name in patterns)


def _by_pattern(patterns: Mapping[str, Any] | None, module: str, matcher: Matcher, default: Any) -> Any:
    """Return what the first pattern that fits a module says of it."""
    patterns = patterns or {}
    key = next((key for key in patterns if matcher.matches(_end_of(key), module, whole=False)), module)
    return patterns.get(key, default)


def _end_of(key: str) -> str:
    return rf"(.*\.)?({key})$"


def _integral(number: float) -> float:
    return int(number) if float(number).is_integer() else number


def _short_names(chosen: Sequence[str], modules: Sequence[str]) -> list[str]:
    """Names that stand for `chosen` among `modules`: the last segment where all that share it are chosen."""
    wanted = set(chosen)
    last = {name: name.rpartition(".")[2] for name in {*chosen, *modules}}
    partly = {last[name] for name in last if name not in wanted}
    return sorted({name if last[name] in partly else last[name] for name in chosen})


def _target_modules(adapted: Sequence[str], modules: Sequence[str]) -> list[str] | str:
    names, matcher = _short_names(adapted, modules), Matcher(CONFIG_FILE, is_trusted=True)
    if {name for name in (*adapted, *modules) if _matches(names, name, matcher)} == set(adapted):
        return names
    # A full name that is the end of another one: only a regular expression tells the two apart.
    return "|".join(re.escape(name) for name in sorted(adapted))


def _default_and_pattern(values: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the most common value, and a pattern for the modules that differ, longest names first."""
    default = Counter(values.values()).most_common(1)[0][0]
    pattern: dict[str, Any] = {}
    for value in dict.fromkeys(values.values()):
        if value != default:
            names = _short_names([name for name in values if values[name] == value], list(values))
            pattern |= dict.fromkeys(names, value)
    pattern = {name: pattern[name] for name in sorted(pattern, key=lambda name: (-len(name), name))}
    matcher = Matcher(CONFIG_FILE, is_trusted=True)
    if all(_by_pattern(pattern, name, matcher, default) == value for name, value in values.items()):
        return default, pattern
    return default, {name: values[name] for name in sorted(values, key=lambda name: (-len(name), name))}
