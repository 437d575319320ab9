"""Arrays that train as a whole in addition to adapters, and their names in PEFT.

A module is the node that holds a leaf: ``outer/lm_head`` for ``outer/lm_head/weight``. In a model with external names
(`lowtide.core.ExternalNames`) a module trains with all its leaves, because PEFT's files hold whole modules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax

from ...core import ConfigError, ExternalNames, LinearWeight, SelectionError, StructureError, Tree, match_names
from ...core import memory_space as space_of
from ._adapter import is_adapter, kind_of
from ._config import Config
from ._sites import LAYER, Site, sites


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayNames:
    """Names of an array in other software."""

    modules: Sequence[str]
    """Name of the module; in a stack one per layer."""
    leaf: str
    """Name of the leaf, such as ``weight`` or ``bias``."""
    is_stacked: bool
    """Whether the array's first axis is that of layers."""


def parent(path: str) -> str:
    """Return the path of the module that holds a leaf; a leaf without a module has its own path."""
    return path.rpartition("/")[0] or path


def array_names(model: Tree, site: Site) -> ArrayNames | None:
    """Return the external names of an array; None if it is not a leaf of a module there."""
    module, _, leaf = site.path.rpartition("/")
    if not isinstance(model, ExternalNames):
        return ArrayNames(
            modules=[(module or site.path).replace("/", ".")], leaf=leaf if module else "weight", is_stacked=False
        )
    try:
        name = model.external_name(module)
    except KeyError:
        return None
    if name.count("{") > (LAYER in name) or leaf not in ("weight", "bias"):
        return None
    layers = range(site.weight.shape[0]) if LAYER in name else None
    modules = [name] if layers is None else [name.replace(LAYER, str(layer)) for layer in layers]
    return ArrayNames(modules=modules, leaf=leaf, is_stacked=layers is not None)


def adapter_modules(model: Tree, adapted: Collection[str], indices: Collection[int]) -> set[str]:
    """Return the names of the modules that hold weights with adapters, in the form used for biases.

    With external names these are `adapted`. For any other model they follow from `indices`, the weights' `Site.index`.
    """
    if isinstance(model, ExternalNames):
        return {*adapted}
    arrays = [array_names(model, site) for site in sites(model) if site.index in indices]
    return {module for names in arrays if names is not None for module in names.modules}


def named_arrays(model: Tree) -> dict[int, ArrayNames]:
    """Return the external names of every floating-point array that could train as a whole, by `Site.index`."""
    names_by_index = {site.index: array_names(model, site) for site in sites(model) if site.is_floating}
    return {index: names for index, names in names_by_index.items() if names is not None}


def tied_names(model: Tree) -> Mapping[str, str]:
    """Return the modules that a model uses in a second place, with the external name of that place."""
    return getattr(model, "tied_names", {})


def saved_sites(model: Tree, config: Any, targets: Sequence[Site]) -> list[Site]:
    """Return the sites of arrays that train as a whole: `modules_to_save`, and biases.

    Each must be a floating-point array in device memory without an adapter, in a module with a name elsewhere.
    """
    chosen = {site.index: site for site in _match_saved(model, config.modules_to_save)}
    if isinstance(config, Config) and config.bias != "none":
        chosen |= {site.index: site for site in _bias_sites(model, config, targets)}
    for site in chosen.values():
        _check_trainable(model, site)
    return [chosen[index] for index in sorted(chosen)]


def exclude_saved(model: Tree, config: Any, targets: Sequence[Site]) -> list[Site]:
    """Remove the targets that train as a whole, as PEFT does."""
    modules = {parent(site.path) for site in _match_saved(model, config.modules_to_save)}
    remaining = [site for site in targets if parent(site.path) not in modules]
    if targets and not remaining:
        raise SelectionError(
            "modules_to_save leaves no target for an adapter",
            expected="at least one target that does not train as a whole",
            got=f"{len(targets)} targets, all of them in modules_to_save",
            hint="leave some of them out of modules_to_save",
        )
    return remaining


def _array_sites(model: Tree) -> list[Site]:
    return [site for site in sites(model) if hasattr(site.node, "shape")]


def _match_saved(model: Tree, patterns: Any) -> list[Site]:
    if not patterns:
        return []
    by_name: dict[str, list[Site]] = {}
    for site in _array_sites(model):
        for name in {parent(site.path), site.path}:
            by_name.setdefault(name, []).append(site)
    try:
        matched = match_names(list(by_name), patterns)
    except SelectionError as error:
        raise SelectionError(
            f"modules_to_save: {error.message}", expected=error.expected, got=error.got, hint=error.hint
        ) from error
    # PEFT's files hold whole modules, so with external names one matched leaf selects its module.
    modules = {parent(site.path) for name in matched for site in by_name[name]}
    if isinstance(model, ExternalNames):
        matches = [site for module in modules for site in by_name[module] if parent(site.path) == module]
    else:
        matches = [site for name in matched for site in by_name[name]]
    # Arrays of a module that are not floating-point, such as the size of a layer's attention window, are not
    # parameters.
    return [site for site in matches if site.is_floating or isinstance(site.node, LinearWeight) or site.path in matched]


def _bias_sites(model: Tree, config: Config, targets: Sequence[Site]) -> list[Site]:
    biases_by_path = {site.path: site for site in _array_sites(model) if site.path.rpartition("/")[2] == "bias"}
    modules = [site.path.rpartition("/")[0] for site in targets]
    target_biases = [f"{module}/bias" if module else "bias" for module in modules]
    paths = target_biases if config.bias == "lora_only" else list(biases_by_path)
    biases = [biases_by_path[path] for path in paths if path in biases_by_path]
    if not biases:
        raise StructureError(
            f"bias: {config.bias!r} does not select any bias",
            expected="leaves named bias" + (" in the modules of the targets" if config.bias == "lora_only" else ""),
            got=f"{len(biases_by_path)} biases in the model",
            hint='leave bias out, or use bias="all"' if biases_by_path else "leave bias out",
        )
    return biases


def _check_trainable(model: Tree, site: Site) -> None:
    if is_adapter(site.node):
        raise StructureError(
            f"{site.path}: already has an adapter ({kind_of(site.node)}), and cannot also train as a whole",
            expected="a plain array",
            hint="merge the old adapter with lt.lora.merge, or leave it out of modules_to_save",
        )
    if isinstance(site.node, LinearWeight):
        kind = type(site.node).__name__
        raise StructureError(
            f"{site.path}: a quantised weight cannot train as a whole",
            expected="an array of floating-point numbers",
            got=f"a {kind}{list(site.weight.shape)}",
            hint="add an adapter to it, or do not quantise it",
        )
    if not site.is_floating:
        raise StructureError(
            f"{site.path}: is not a floating-point array, and cannot train",
            expected="an array of floating-point numbers",
            got=f"{site.weight.dtype}{list(site.weight.shape)}",
            hint="leave it out of modules_to_save",
        )
    if isinstance(model, ExternalNames) and array_names(model, site) is None:
        raise StructureError(
            f"{site.path}: the external library has no module with this leaf",
            expected="a linear layer, an embedding or a norm",
            hint="leave it out of modules_to_save and bias: PEFT's format cannot store it",
        )
    if isinstance(site.node, jax.Array) and space_of(site.node) == jax.memory.Space.Host:
        raise ConfigError(
            f"{site.path}: trains as a whole, but is in host memory",
            expected="an array on the device",
            hint="leave it out of modules_to_save, or do not offload it",
        )
