"""PEFT's adapter format: the options of its configuration, and the names of its tensors.

An adapter is a directory with `adapter_config.json` and `adapter_model.safetensors`. A module ``m`` has the tensors
``base_model.model.m.lora_A.weight`` [r, in] and ``base_model.model.m.lora_B.weight`` [out, r]. Module names in the
configuration are matched as PEFT 0.21 does (`tuners_utils.check_target_module_exists`, `other.get_pattern_key`). An
entry of a list equals a name, or ends it after a dot. A text is a regular expression for the whole name. The keys of
`rank_pattern` and `alpha_pattern` are regular expressions for the end of a name; the first match decides.
"""

from __future__ import annotations

import dataclasses
import math
import re
import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core import ModelFileError, StructureError, input_file, parse_json, read_input, shortened, shown, validate
from ._config import BIASES, WEIGHT_INITS
from ._patterns import Matcher

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_MAX_CONFIG_BYTES = 16 * 1024**2

KERNELS = "lowtide_kernels"
"""Our own key of the configuration, which PEFT ignores."""
LORA, IA3, VERA = "LORA", "IA3", "VERA"

# Options that have no effect on the values a loaded adapter computes.
_IGNORED_OPTIONS = frozenset(
    "auto_mapping base_model_name_or_path corda_config d_initial eva_config inference_mode init_ia3_weights "
    "init_weights loftq_config lora_ga_config megatron_core peft_version projection_prng_key qalora_group_size "
    "revision runtime_config task_type".split()
)
_COMMON_OPTIONS = (
    "ensure_weight_tying exclude_modules layers_pattern layers_to_transform modules_to_save peft_type target_modules"
)
_OPTIONS_BY_KIND = {
    LORA: "alpha_pattern bias init_lora_weights lora_alpha lora_dropout r rank_pattern use_dora "
    "target_parameters use_rslora lowtide_kernels",
    IA3: "feedforward_modules",
    VERA: "bias r save_projection vera_dropout",
}
# Initialisations that leave the base weights unchanged, and those whose subtracted part can be computed from the base
# weights. The others (PiSSA with random projections, CorDA, LoftQ, LoRA-GA) change the base in ways that no file
# records.
_SUPPORTED_INITS = (None, True, False, "gaussian", "eva", "orthogonal", *WEIGHT_INITS)


VERA_TENSORS = ("base_model.vera_A", "base_model.vera_B")
"""The projections of VeRA, which all modules share."""


def tensor_names(module: str, kind: str, *, dora: bool = False, table: bool = False) -> dict[str, str]:
    """Return the file's names of the leaves of a module's node, by leaf; those of a table are transposed there."""
    leaves = {
        LORA: {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight"},
        IA3: {"lora_scale": "ia3_l"},
        VERA: {"lora_lambda_d": "vera_lambda_d", "lora_lambda_b": "vera_lambda_b"},
    }[kind]
    if kind == LORA and table:
        leaves = {"lora_a": "lora_embedding_B", "lora_b": "lora_embedding_A"}
    if dora:
        leaves = {**leaves, "lora_magnitude": "lora_magnitude_vector"}
    return {leaf: f"base_model.model.{module}.{name}" for leaf, name in leaves.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeftConfig:
    """The contents of `adapter_config.json` about the adapted modules."""

    file: Any
    """The file's contents, in the schema of its kind."""
    kind: str = LORA
    """PEFT's name of the kind of adapter."""
    matcher: Matcher
    """Matcher of the file's patterns."""
    source: str
    """The file, for messages."""
    tables: frozenset[str] = frozenset()
    """Names of modules whose rows are looked up."""

    def check_patterns(self) -> None:
        """Raise for an invalid regular expression, whether or not a module is matched against it."""
        texts = [text for text in (self.file.target_modules, self.file.exclude_modules) if isinstance(text, str)]
        if self.kind == IA3 and isinstance(self.file.feedforward_modules, str):
            texts.append(self.file.feedforward_modules)
        ends = [*(self.file.rank_pattern or ()), *(self.file.alpha_pattern or ())] if self.kind == LORA else []
        for pattern in (*texts, *map(_suffix_pattern, ends)):
            self.matcher.matches(pattern, "")

    def rank_of(self, module: str) -> int:
        """Return the rank of a module."""
        return _value_by_pattern(self.file.rank_pattern, module, self.matcher, self.file.r)

    def alpha_of(self, module: str) -> float:
        """Return the alpha of a module."""
        return float(_value_by_pattern(self.file.alpha_pattern, module, self.matcher, self.file.lora_alpha))

    def scale_of(self, names: Sequence[str], path: str) -> tuple[int, float]:
        """Return the one rank and alpha of a stack, from the names of its layers and its path here."""
        scales = {(self.rank_of(name), self.alpha_of(name)) for name in names}
        if len(scales) > 1:
            raise ModelFileError(
                f"{self.source}: the layers of {path} differ in rank or alpha",
                expected="one rank and alpha for all layers of a stacked weight",
                got=shortened(", ".join(f"rank {rank} alpha {alpha:g}" for rank, alpha in sorted(scales))),
                hint="pad the adapters in PEFT to one rank with rows and columns of zeros",
            )
        return scales.pop()

    @property
    def target_parameters(self) -> list[str]:
        """Names of parameters that have an adapter."""
        return list(self.file.target_parameters or ()) if self.kind == LORA else []

    def is_feedforward(self, module: str) -> bool:
        """Return whether (IA)³ scales a module's inputs."""
        names = self.file.feedforward_modules
        if isinstance(names, str):
            return self.matcher.matches(names, module)
        return any(module.endswith(name) for name in names or ())

    @property
    def dora(self) -> bool:
        """Whether the adapter has magnitudes."""
        return self.kind == LORA and bool(self.file.use_dora)

    @property
    def tensors(self) -> Any:
        """`tensor_names` for this configuration, as a function of the module's name."""
        return lambda module: tensor_names(module, self.kind, dora=self.dora, table=module in self.tables)

    def targets(self, module: str) -> bool:
        """Return whether a module has an adapter; True when the file does not say."""
        if self.saves(module):
            return False
        target_modules, exclude_modules = self.file.target_modules, self.file.exclude_modules
        if exclude_modules and _matches(exclude_modules, module, self.matcher):
            return False
        return (target_modules is None or _matches(target_modules, module, self.matcher)) and self._has_layer(module)

    def saves(self, module: str) -> bool:
        """Return whether a module trains as a whole."""
        return _is_saved(self.file.modules_to_save or (), module)

    def trains_bias(self, module: str, is_adapted: bool) -> bool:
        """Return whether the bias of a module trains."""
        option = self.file.bias if self.kind == LORA else "none"
        return option == "all" or (option == "lora_only" and is_adapted)

    def _has_layer(self, module: str) -> bool:
        """Return whether a module is in a layer that has adapters."""
        layers, pattern = self.file.layers_to_transform, self.file.layers_pattern
        if layers is None:
            return True
        segments = [pattern] if isinstance(pattern, str) and pattern else pattern or ["[^.]*"]
        matches = (re.match(rf".*\.{segment}\.(\d+)\.", module) for segment in segments)
        index = next((int(match[1]) for match in matches if match), None)
        return index is not None and index in ([layers] if isinstance(layers, int) else layers)


def describe(
    adapted: Mapping[str, Mapping[str, Any]],
    modules: Sequence[str],
    kind: str,
    *,
    base_model_name_or_path: str | None,
    task_type: str | None,
    saved_options: Mapping[str, Any],
    parameters: Collection[str] = (),
) -> dict[str, Any]:
    """Return the contents of `adapter_config.json`, with the keys that PEFT writes.

    `adapted` holds ``rank``, ``alpha``, ``rslora`` (None for a kernel, whose scale is always alpha / rank), ``dora``
    and ``feedforward`` by name. `modules` are all names that could be adapted, `saved_options` the options of arrays
    that train as a whole, and `parameters` the names in `adapted` that are parameters of experts instead of modules.
    """
    common = {
        "auto_mapping": None,
        "base_model_name_or_path": base_model_name_or_path,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
        "peft_type": kind,
        "revision": None,
        "target_modules": _target_modules([name for name in adapted if name not in parameters], modules),
        "task_type": task_type,
    }
    if kind == IA3:
        scaled = [name for name, node in adapted.items() if node["feedforward"]]
        options = {name: value for name, value in saved_options.items() if name != "bias"}
        return {**common, **options, "feedforward_modules": _target_modules(scaled, modules) if scaled else []}
    common = {**common, "bias": "none", "layers_pattern": None, "layers_to_transform": None, **saved_options}
    first = next(iter(adapted.values()))
    if kind == VERA:
        return {**common, "r": first["rank"], "projection_prng_key": 0, "save_projection": True, "vera_dropout": 0.0}
    kinds = {node["rslora"] for node in adapted.values()} - {None}
    rslora = kinds == {True}
    # `use_rslora` holds for the whole file. Where nodes of both kinds occur, alphas are converted to give the same
    # scale.
    alphas = {name: _convert_alpha(node, rslora) for name, node in adapted.items()}
    rank, rank_pattern = _default_and_pattern({name: node["rank"] for name, node in adapted.items()})
    alpha, alpha_pattern = _default_and_pattern({name: _int_if_whole(alpha) for name, alpha in alphas.items()})
    return {
        **common,
        "alpha_pattern": alpha_pattern,
        "init_lora_weights": True,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "r": rank,
        "rank_pattern": rank_pattern,
        "target_parameters": sorted({".".join(name.split(".")[-2:]) for name in parameters}) or None,
        "use_dora": first["dora"],
        "use_rslora": rslora,
    }


def read_config(directory: Path) -> PeftConfig:
    """Read and check `adapter_config.json`; an unsupported option that would change the result is an error."""
    from ._schema import AdapterFile, IA3File, VeraFile

    path = input_file(
        directory,
        CONFIG_FILE,
        expected=f"a directory with {CONFIG_FILE} and {WEIGHTS_FILE}",
        hint="give the directory that PEFT's save_pretrained or lt.lora.save wrote",
    )
    raw = parse_json(read_input(path, most_bytes=_MAX_CONFIG_BYTES), str(path))
    kind = _refuse_unsupported(path, raw)
    schema = {LORA: AdapterFile, IA3: IA3File, VERA: VeraFile}[kind]
    names = {LORA: "LoRA", IA3: "(IA)³", VERA: "VeRA"}
    file: Any = validate(
        schema, raw, f"{path}: not a {names[kind]} configuration", hint="write it again with PEFT or with lt.lora.save"
    )
    config = PeftConfig(file=file, kind=kind, matcher=Matcher(str(path)), source=str(path))
    config.check_patterns()
    if kind == LORA:
        _check_alphas(path, file)
    if kind == VERA and not file.save_projection:
        raise ModelFileError(
            f"{path}: option 'save_projection' is false: the projections are not in the file",
            expected="save_projection = true, PEFT's default",
            got="projections that only one version of PyTorch can draw again",
            hint="load it with PEFT, set save_projection there, and save it again",
        )
    option = {LORA: "lora_dropout", VERA: "vera_dropout"}.get(kind)
    if option is not None and (rate := getattr(file, option)):
        warnings.warn(
            f"{path}: {option} {rate} is not applied; results match PEFT's eval mode, and training uses no dropout "
            f"unless lowtide finetune has --lora-dropout {rate}, or your loss function calls lt.lora.dropout",
            stacklevel=3,
        )
    return config


def _check_alphas(path: Path, file: Any) -> None:
    """Refuse, as `Config` does, an alpha of zero or less: the adapter would train nothing, or be subtracted."""
    alphas = {"lora_alpha": file.lora_alpha} | {
        f"alpha_pattern[{shown(name)}]": alpha for name, alpha in (file.alpha_pattern or {}).items()
    }
    for name, alpha in alphas.items():
        if alpha <= 0:
            raise ModelFileError(
                f"{path}: {name} = {alpha:g} is not a valid scale",
                expected="a number above 0 (with 0 the adapter would have no effect and no gradient)",
                got=f"{alpha:g}",
                hint="train it again with an alpha such as twice the rank; list modules without an adapter in "
                "exclude_modules",
            )


def _refuse_unsupported(path: Path, raw: Mapping[str, Any]) -> str:
    """Return the kind of adapter; refuse every option, known or not, that is on and would change the result."""
    kind: Any = raw.get("peft_type", LORA)
    unsupported: dict[str, Any] = {}
    if not isinstance(kind, str) or kind not in _OPTIONS_BY_KIND:
        unsupported, kind = {"peft_type": kind}, LORA
    if raw.get("bias", "none") not in (BIASES if kind == LORA else ("none",)):
        unsupported["bias"] = raw["bias"]
    is_weight_init = raw.get("init_lora_weights") in WEIGHT_INITS
    if raw.get("init_lora_weights") not in _SUPPORTED_INITS or (is_weight_init and raw.get("use_dora")):
        unsupported["init_lora_weights"] = raw["init_lora_weights"]
    known_options = {*_IGNORED_OPTIONS, *_COMMON_OPTIONS.split(), *_OPTIONS_BY_KIND[kind].split()}
    unsupported |= {name: value for name, value in raw.items() if value and name not in known_options}
    if unsupported:
        raise ModelFileError(
            f"{path}: option {shown(next(iter(unsupported)))} is not supported",
            expected="a LoRA, rank-stabilised LoRA, DoRA, (IA)³ or VeRA adapter",
            got=shortened(", ".join(f"{name}={shown(value)}" for name, value in unsupported.items())),
            hint="merge this adapter with PEFT (merge_and_unload), or convert it to plain LoRA there",
        )
    return kind


def saved_names(chosen: Collection[str], modules: Collection[str]) -> list[str]:
    """Return entries of `modules_to_save` for the chosen modules and no other; none exist if one name ends another."""
    selected, all_names = {*chosen}, {*chosen, *modules}
    # Prefer the last segment; use the full name where that segment also ends other modules.
    segments = {name: name.rpartition(".")[2] for name in chosen}
    is_exact = {
        end: all(name in selected for name in all_names if _is_saved([end], name)) for end in {*segments.values()}
    }
    names = sorted({end if is_exact[end] else name for name, end in segments.items()})
    if {name for name in all_names if _is_saved(names, name)} == selected:
        return names
    raise StructureError(
        "PEFT's modules_to_save cannot distinguish these modules from others whose names have the same end",
        expected="names that no other module's name ends with",
        got=shortened(", ".join(sorted(chosen))),
        hint="also save the other modules, or rename some",
    )


def _is_saved(names: Sequence[str], module: str) -> bool:
    """Return whether the name of a module, or of one of its parents, ends with one of these."""
    parts = module.split(".")
    return any(".".join(parts[: end + 1]).endswith(tuple(names)) for end in range(len(parts)))


def _matches(patterns: str | Sequence[str], module: str, matcher: Matcher) -> bool:
    if isinstance(patterns, str):
        return matcher.matches(patterns, module)
    return any(module == name or module.endswith(f".{name}") for name in patterns)


def _value_by_pattern(patterns: Mapping[str, Any] | None, module: str, matcher: Matcher, default: Any) -> Any:
    """Return the value of the first pattern that matches a module, or the default."""
    patterns = patterns or {}
    key = next((key for key in patterns if matcher.matches(_suffix_pattern(key), module, is_full=False)), module)
    return patterns.get(key, default)


def _convert_alpha(node: Mapping[str, Any], rslora: bool) -> float:
    """Return the alpha that gives a node's scale in a file whose `use_rslora` is `rslora`."""
    root = math.sqrt(node["rank"])
    if rslora and not node["rslora"]:
        return round(node["alpha"] / root, 12)
    return node["alpha"] * (root if node["rslora"] and not rslora else 1)


def _suffix_pattern(key: str) -> str:
    return rf"(.*\.)?({key})$"


def _int_if_whole(number: float) -> float:
    return int(number) if float(number).is_integer() else number


def _short_names(chosen: Sequence[str], modules: Sequence[str]) -> list[str]:
    """Return names that stand for `chosen` among `modules`: the last segment if all that share it are chosen."""
    selected = set(chosen)
    segments = {name: name.rpartition(".")[2] for name in {*chosen, *modules}}
    ambiguous = {segments[name] for name in segments if name not in selected}
    return sorted({name if segments[name] in ambiguous else segments[name] for name in chosen})


def _target_modules(adapted: Sequence[str], modules: Sequence[str]) -> list[str] | str:
    names, matcher = _short_names(adapted, modules), Matcher(CONFIG_FILE, is_trusted=True)
    if {name for name in (*adapted, *modules) if _matches(names, name, matcher)} == set(adapted):
        return names
    # One full name ends another: only a regular expression can separate them.
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
    if all(_value_by_pattern(pattern, name, matcher, default) == value for name, value in values.items()):
        return default, pattern
    return default, {name: values[name] for name in sorted(values, key=lambda name: (-len(name), name))}
