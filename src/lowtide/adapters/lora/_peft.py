"""PEFT's adapter format: options of its configuration, names of its tensors, and the interface of a kind of adapter.

An adapter is a directory with `adapter_config.json` and `adapter_model.safetensors`. A module ``m`` has the tensors
``base_model.model.m.lora_A.weight`` [r, in] and ``base_model.model.m.lora_B.weight`` [out, r]. Module names in the
configuration are matched as PEFT 0.21 does (`tuners_utils.check_target_module_exists`, `other.get_pattern_key`). An
entry of a list matches a name that equals it, or ends with it after a dot. A text is a regular expression for the whole
name. Keys of `rank_pattern` and `alpha_pattern` are regular expressions for the end of a name; the first match decides.
"""

from __future__ import annotations

import dataclasses
import re
import time
import warnings
from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ...core import ModelFileError, StructureError, Tree, shortened, shown
from .._adapted import Use
from ._node import Variant, Variants
from ._sites import Site

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Beginning of the names of tensors, before the name of the module."""
LORA = "LORA"
"""PEFT's name of LoRA. Files without `peft_type` are of this kind."""
LORA_TENSORS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight"}
"""Ends of the names of LoRA's tensors, by leaf."""
BIASES = ("none", "lora_only", "all")
"""Values of LoRA's option `bias`: which biases train."""
MERGE_HINT = "merge this adapter with PEFT (merge_and_unload)"
MODEL_HINT = "load it into the model that it was made for"
WEIGHT_INITS = ("pissa", "olora")
"""Values of `Config.init` with which B A begins as a part of the weight."""
MOST_SECONDS = 10.0
"""Limit for all matches of one configuration together."""

_REGEX_ONLY = re.compile(r"\[\[:|(?<!\\)\{(?!\d*,?\d*\})")
"""Syntax of POSIX classes and fuzzy matches in the package `regex`. In `re`, it would match no module name."""
_DTYPES = ("F64", "F32", "F16", "BF16")


class AdapterKind(Protocol):
    """Interface of a kind of adapter: how its configuration makes nodes, and how PEFT's files hold them.

    Each kind is one Python module with a configuration, a node (`AdapterWeight`) and a class of this protocol.
    `_kinds.py` lists the instances.
    """

    name: ClassVar[str]
    """Name of the kind, as its authors write it."""
    peft_type: ClassVar[str]
    """PEFT's name of the kind."""
    config_type: ClassVar[type[Any]]
    schema: ClassVar[str]
    """Name of the class in `_schema.py` with the options of its `adapter_config.json`."""
    needs_key: ClassVar[bool] = True
    """Whether its initial values are random."""
    default_options: ClassVar[Mapping[str, Any]] = {"bias": "none", "layers_pattern": None, "layers_to_transform": None}
    """Default values of options in its files, which arrays that train as a whole may change."""
    biases: ClassVar[tuple[str, ...]] = ("none",)
    """Supported values of the option `bias`."""
    variants: ClassVar[tuple[Variant, ...]] = ()
    """Its variants, which options in its files select."""
    dropout_option: ClassVar[str | None] = None
    """Option in its files for the rate of dropout; None for a kind without dropout."""
    shared_tensors: ClassVar[tuple[str, ...]] = ()
    """Names of tensors that all modules of a file share."""

    @abstractmethod
    def init(
        self, model: Tree, chosen: Sequence[Site], config: Any, key: Array | None, kernels: Mapping[int, Use]
    ) -> dict[int, Any]:
        """Make nodes by `Site.index`; `kernels` holds the uses of weights that are not matrices, also by index."""
        ...

    def check_file(self, path: Path, file: Any) -> None:
        """Check values of options that the schema does not check."""
        return

    def patterns(self, file: Any) -> list[str]:
        """Return the regular expressions in the options that only this kind has."""
        return []

    @abstractmethod
    def tensor_suffixes(self, variants: Sequence[Variant] = (), *, table: bool = False) -> dict[str, str]:
        """Return the ends of tensor names in files, by leaf; with `table`, for an embedding, which is transposed."""
        ...

    @abstractmethod
    def entry(self, node: Any, scale: float, rank: int | None = None) -> dict[str, Any]:
        """Return one layer's values for `describe`; `scale` is its `layer_scale`, `rank` its rank without padding."""
        ...

    @abstractmethod
    def describe(self, adapted: Mapping[str, Mapping[str, Any]], modules: Sequence[str]) -> dict[str, Any]:
        """Return the options in files that only this kind has; the arguments are those of the function `describe`."""
        ...

    def layer_ranks(self, site: Site, leaves: Mapping[str, np.ndarray]) -> list[int] | None:
        """Return the rank without padding of each layer of a stack; None if no layer can have padding."""
        return None

    def to_file(self, values: np.ndarray, node: Any) -> np.ndarray:
        """Reshape a leaf of one layer to its shape in files."""
        return values

    def write_shared(self, adapted: Sequence[Site]) -> dict[str, np.ndarray]:
        """Return the shared tensors, by name."""
        return {}

    def read_shared(self, file: TensorFile, config: PeftConfig) -> Any:
        """Read the shared tensors, for `read`."""
        return None

    @abstractmethod
    def read(
        self, file: TensorFile, site: Site, names: Sequence[str], mask: Sequence[bool], config: PeftConfig, shared: Any
    ) -> Any:
        """Read the node of a weight; layers that are False in `mask` get zeros, and 0 in `layer_scale`."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeftConfig:
    """The contents of `adapter_config.json`, and what its options say about a module."""

    file: Any
    """The file's contents, in the schema of its kind."""
    kind: AdapterKind
    matcher: Matcher
    source: str
    """Path of the file, for messages."""
    tables: frozenset[str] = frozenset()
    """Names of embeddings (modules whose rows are looked up)."""

    @property
    def is_lora(self) -> bool:
        """Whether the kind is LoRA, with or without variants."""
        return self.kind.peft_type == LORA

    @property
    def variants(self) -> Variants:
        return Variants(variant for variant in self.kind.variants if getattr(self.file, variant.option))

    def rank_of(self, module: str) -> int:
        return value_by_pattern(self.file.rank_pattern, module, self.matcher, self.file.r)

    def alpha_of(self, module: str) -> float:
        return float(value_by_pattern(self.file.alpha_pattern, module, self.matcher, self.file.lora_alpha))

    def scale_of(self, names: Sequence[str], path: str) -> tuple[int, float]:
        """Return the rank and alpha that the layers of the stack `path` share; raise ModelFileError if they differ."""
        scales = {(self.rank_of(name), self.alpha_of(name)) for name in names}
        if len(scales) > 1:
            pairs = shortened(", ".join(f"rank {rank} alpha {alpha:g}" for rank, alpha in sorted(scales)))
            hint = "pad the adapters in PEFT to one rank with rows and columns of zeros"
            raise ModelFileError(f"{self.source}: the layers of {path} differ in rank or alpha", got=pairs, hint=hint)
        return scales.pop()

    def tensors(self, module: str) -> dict[str, str]:
        """Return the names of a module's tensors in the file, by leaf of its node."""
        return tensor_keys(module, self.kind.tensor_suffixes(self.variants, table=module in self.tables))

    def targets(self, module: str) -> bool:
        """Return whether the options select a module for an adapter; `target_modules` of None selects all modules."""
        target_modules, exclude_modules = self.file.target_modules, self.file.exclude_modules
        if self.saves(module) or (exclude_modules and self.matcher.selects(exclude_modules, module)):
            return False
        return (target_modules is None or self.matcher.selects(target_modules, module)) and self._has_layer(module)

    def saves(self, module: str) -> bool:
        """Return whether a module trains as a whole (`modules_to_save`)."""
        return is_saved(self.file.modules_to_save or (), module)

    def trains_bias(self, module: str, is_adapted: bool) -> bool:
        option = self.file.bias if self.is_lora else "none"
        return option == "all" or (option == "lora_only" and is_adapted)

    def _has_layer(self, module: str) -> bool:
        """Return whether `layers_to_transform` contains the layer of a module, or is not set."""
        layers, pattern = self.file.layers_to_transform, self.file.layers_pattern
        if layers is None:
            return True
        segments = [pattern] if isinstance(pattern, str) and pattern else pattern or ["[^.]*"]
        matches = (re.match(rf".*\.{segment}\.(\d+)\.", module) for segment in segments)
        index = next((int(match[1]) for match in matches if match), None)
        return index is not None and index in ([layers] if isinstance(layers, int) else layers)


def tensor_keys(module: str, ends: Mapping[str, str]) -> dict[str, str]:
    """Return the names of a module's tensors in the file, by leaf of its node."""
    return {leaf: f"{PREFIX}{module}.{end}" for leaf, end in ends.items()}


def describe(
    adapted: Mapping[str, Mapping[str, Any]],
    modules: Sequence[str],
    kind: AdapterKind,
    options: Mapping[str, Any],
    parameters: Collection[str],
) -> dict[str, Any]:
    """Return the contents of `adapter_config.json`, with the keys that PEFT writes.

    `adapted` maps names to the results of `AdapterKind.entry`. A kernel has None as ``variants``; its scale is
    alpha / rank. `modules` holds the names of all modules that could have an adapter. `options` holds options that do
    not depend on the kind. `parameters` holds the names in `adapted` that are parameters of experts, not modules.
    """
    config: dict[str, Any] = {
        "auto_mapping": None,
        "base_model_name_or_path": None,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
        "peft_type": kind.peft_type,
        "revision": None,
        "target_modules": target_modules([name for name in adapted if name not in parameters], modules),
        "task_type": None,
    }
    config |= {**kind.default_options, **options, **kind.describe(adapted, modules)}
    if parameters:  # only LoRA supports them
        config["target_parameters"] = sorted({".".join(name.split(".")[-2:]) for name in parameters})
    return config


def is_saved(names: Sequence[str], module: str) -> bool:
    """Return whether the name of a module, or of one of its parents, ends with one of `names`."""
    parts = module.split(".")
    return any(".".join(parts[: end + 1]).endswith(tuple(names)) for end in range(len(parts)))


def value_by_pattern(patterns: Mapping[str, Any] | None, module: str, matcher: Matcher, default: Any) -> Any:
    """Return the value of the first pattern that matches a module, or the default."""
    patterns = patterns or {}
    key = next((key for key in patterns if matcher.matches(suffix_pattern(key), module, is_full=False)), module)
    return patterns.get(key, default)


def suffix_pattern(key: str) -> str:
    """Return the regular expression for names that end with a key of `rank_pattern` or `alpha_pattern`."""
    return rf"(.*\.)?({key})$"


def short_names(chosen: Sequence[str], modules: Sequence[str]) -> list[str]:
    """Shorten each name in `chosen` to its last segment, if all of `modules` with this segment are chosen."""
    selected = set(chosen)
    segments = {name: name.rpartition(".")[2] for name in {*chosen, *modules}}
    ambiguous = {segments[name] for name in segments if name not in selected}
    return sorted({name if segments[name] in ambiguous else segments[name] for name in chosen})


def target_modules(adapted: Sequence[str], modules: Sequence[str]) -> list[str] | str:
    """Return the value of `target_modules` that selects `adapted`, and no other of `modules`."""
    names, matcher = short_names(adapted, modules), Matcher(CONFIG_FILE, is_trusted=True)
    if {name for name in (*adapted, *modules) if matcher.selects(names, name)} == set(adapted):
        return names
    # One full name ends another: only a regular expression can separate them.
    return "|".join(re.escape(name) for name in sorted(adapted))


# Regular expressions of a file are matched with the rules of Python's `re` and a time limit. `re` has no time limit:
# ``(a+)+$`` takes years on a name of forty letters, and no signal interrupts it. The `regex` package has the same rules
# (its version 0 behaviour) and a timeout. A pattern that only one of the two accepts is refused.


class Matcher:
    """Matcher of the patterns of one file. Mutable: `matches` reduces the time that is left.

    `source` names the file in messages. With `is_trusted`, Lowtide wrote the patterns, and there is no time limit.
    """

    def __init__(self, source: str, *, is_trusted: bool = False) -> None:
        self._source, self._time_left = source, None if is_trusted else MOST_SECONDS
        self._compiled: dict[str, Any] = {}

    def matches(self, pattern: str, name: str, *, is_full: bool = True) -> bool:
        """Return whether a pattern matches a whole name, or with ``is_full=False`` its beginning."""
        start = time.monotonic()
        if pattern not in self._compiled:
            self._compiled[pattern] = self._compile(pattern)
        compiled = self._compiled[pattern]
        try:
            timeout = None if self._time_left is None else max(self._time_left - (time.monotonic() - start), 1e-3)
            match = (compiled.fullmatch if is_full else compiled.match)(name, timeout=timeout)
        except TimeoutError as error:
            message = f"{self._source}: a regular expression takes too long on {shown(name)}: {shown(pattern)}"
            hint = "list the modules by name, or avoid nested repetitions such as (a+)+"
            limit = f"at most {MOST_SECONDS:g} s for all of them"
            raise ModelFileError(message, expected=limit, hint=hint) from error
        if self._time_left is not None:
            self._time_left -= time.monotonic() - start
        return match is not None

    def selects(self, patterns: str | Sequence[str], module: str) -> bool:
        """Return whether a regular expression matches a name, or a list holds the name or its end after a dot."""
        if isinstance(patterns, str):
            return self.matches(patterns, module)
        return any(module == name or module.endswith(f".{name}") for name in patterns)

    def _compile(self, pattern: str) -> Any:
        import regex

        try:
            if _REGEX_ONLY.search(pattern):
                raise ValueError("a brace that is not a count, or a class in [: :]")
            with warnings.catch_warnings():  # about syntax that a later Python may read differently
                warnings.simplefilter("ignore")
                re.compile(pattern)
                return regex.compile(pattern, flags=regex.VERSION0)
        except (re.error, regex.error, ValueError, OverflowError, RecursionError, MemoryError) as error:
            raise ModelFileError(
                f"{self._source}: not a LoRA configuration",
                expected="regular expressions in the syntax of Python's re",
                got=f"{shown(pattern)}: {type(error).__name__}: {error}",
                hint="write the adapter again with PEFT's save_pretrained or with lt.lora.save",
            ) from error


@dataclasses.dataclass(frozen=True)
class TensorFile:
    """The open safetensors file of an adapter, whose tensors are checked against the model and the configuration."""

    path: Path
    handle: Any
    """The result of `safetensors.safe_open`."""

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self.handle.get_slice(key).get_shape())

    def read(self, key: str, shape: tuple[int, ...]) -> np.ndarray:
        """Read a tensor in float32; another shape, or values that are not finite, raise ModelFileError."""
        self.check(key, shape)
        with np.errstate(over="ignore"):  # a float64 value may overflow to infinity
            values = np.asarray(self.handle.get_tensor(key), np.float32)
        if not np.isfinite(values).all():
            number = f"{np.count_nonzero(~np.isfinite(values))} of {values.size}"
            hint = "save the adapter again: the file is damaged, or its training diverged"
            raise ModelFileError(f"{self.path}: tensor {key} has values that are not finite", got=number, hint=hint)
        return values

    def check(self, key: str, shape: tuple[int, ...]) -> None:
        """Check without reading values that a tensor has this shape and a floating-point dtype."""
        dtype = self.handle.get_slice(key).get_dtype()
        if self.shape(key) != shape or dtype not in _DTYPES:
            expected = f"a floating-point tensor of shape {list(shape)}"
            actual = f"{dtype}{list(self.shape(key))}"
            hint = f"{MODEL_HINT}, with the configuration it was saved with"
            raise ModelFileError(f"{self.path}: tensor {key} does not fit", expected=expected, got=actual, hint=hint)


def check_array(path: Path, site: Site, role: str) -> None:
    """Raise if a weight is quantised; `role` is a verb phrase for the message, such as "trains as a whole"."""
    if not isinstance(site.weight, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
        message = f"{path}: {site.path} {role}, but is quantised in this model"
        raise ModelFileError(message, got=f"a {type(site.weight).__name__}", hint="do not quantise it")


def check_values(path: str, leaves: Iterable[Any]) -> None:
    """Raise if a leaf of an adapter is a shape without values, which no file can store."""
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        hint = "save the adapter of a model with arrays, not with shapes"
        raise StructureError(f"{path}: the adapter has shapes but no values", hint=hint)


def stack_layers(site: Site, names: Sequence[str], tensors: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> Any:
    """Stack the tensors of the layers `names`, in this order; a layer without an entry in `tensors` gets zeros."""
    layer_values = [tensors[name] if name in tensors else np.zeros(shape, np.float32) for name in names]
    stack = np.stack(layer_values) if len(site.weight.shape) > 2 else layer_values[0]
    return jnp.asarray(stack.reshape(*site.weight.shape[:2], *stack.shape[1:]) if site.is_experts else stack)


def mask_scale(mask: Sequence[bool]) -> Array | None:
    """Return the `layer_scale` of a node: 1 for layers with an adapter, 0 for others; None if `mask` is all True."""
    return None if all(mask) else jnp.asarray(mask, jnp.float32)


def host_leaves(site: Site) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
    """Return an adapter's leaves by name, as float32 NumPy arrays, and its `layer_scale` or None."""
    leaves = {name: getattr(site.node, name) for name in site.node.AXES if getattr(site.node, name) is not None}
    check_values(site.path, leaves.values())
    if "start_a" in leaves:
        factors = zip(("lora_a", "lora_b"), site.node.factors(), strict=True)
        leaves = {name: leaf for name, leaf in leaves.items() if not name.startswith("start_")} | dict(factors)
    arrays = {name: np.asarray(leaf, np.float32) for name, leaf in leaves.items()}
    return arrays, arrays.get("layer_scale")
