"""Arrays that train as a whole in PEFT's files: `modules_to_save` and `bias`.

A module ``m`` of `modules_to_save` has its own tensors, ``base_model.model.m.weight`` and ``….bias``. A trained bias is
``base_model.model.m.bias``, or ``base_model.model.m.base_layer.bias`` if its module has an adapter. A name of
`modules_to_save` matches every module whose name ends with it, after a dot or not. It also matches if the name of a
parent ends with it (`utils.other._set_trainable` of PEFT 0.21).

If the embedding of a model is also its head, PEFT trains one of the two places, or both as one with
`ensure_weight_tying`. Here they are one array, so only two equal tensors are read and written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ...core import ModelFileError, StructureError, Tree
from ._modules_to_save import ArrayNames, named_arrays, parent, tied_names
from ._peft import LORA, PeftConfig, saved_names
from ._saved import SavedWeight, make_saved
from ._sites import Site, sites
from ._tensors import read_tensor

_PREFIX = "base_model.model."


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedModules:
    """The part of a directory that holds arrays which train as a whole."""

    tensors: Mapping[str, np.ndarray]
    """Tensors by their names in the file."""
    options: Mapping[str, Any]
    """Options of `adapter_config.json`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _SavedSelection:
    """The options for arrays that train as a whole, which need no values, and the modules that they name."""

    sites: Mapping[int, Site]
    module_paths: set[str]
    module_names: set[str]
    options: dict[str, Any]


def select_saved(model: Tree, adapted: Collection[str], kind: str) -> _SavedSelection:
    """Find PEFT's options for all nodes that train as a whole; shapes are enough.

    `adapted` are the names of modules with an adapter. A selection that PEFT's options cannot express is an error.
    """
    chosen = {site.index: site for site in sites(model) if isinstance(site.node, SavedWeight)}
    if not chosen:
        return _SavedSelection(sites={}, module_paths=set(), module_names=set(), options={})
    names = named_arrays(model)
    module_paths = _saved_module_paths(model, chosen)
    biases = {name for i in chosen if parent(chosen[i].path) not in module_paths for name in names[i].modules}
    module_names = {
        name for index, site in chosen.items() if parent(site.path) in module_paths for name in names[index].modules
    }
    options: dict[str, Any] = {"bias": _bias_option(names, biases, module_names, adapted)}
    if kind != LORA and options["bias"] != "none":
        raise StructureError(
            f"biases train in addition to {kind} adapters, which PEFT's format cannot express",
            expected="modules_to_save, which also trains biases",
            got=f"bias = {options['bias']!r}",
            hint="name the modules of the biases in modules_to_save, or leave bias out; a checkpoint stores any choice",
        )
    if any(module in module_names for module in tied_names(model)):
        options["ensure_weight_tying"] = True
    if module_names:
        options["modules_to_save"] = saved_names(
            module_names, {name for array in names.values() for name in array.modules}
        )
    return _SavedSelection(sites=chosen, module_paths=module_paths, module_names=module_names, options=options)


def saved_modules(model: Tree, adapted: Collection[str], kind: str) -> SavedModules:
    """Return the tensors and options of all nodes that train as a whole, as `select_saved` finds them."""
    selection, names = select_saved(model, adapted, kind), named_arrays(model)
    tensors: dict[str, np.ndarray] = {}
    for index, site in selection.sites.items():
        if isinstance(site.node.lora_saved, jax.ShapeDtypeStruct):
            raise StructureError(
                f"{site.path}: the trainable array has a shape but no values",
                expected="arrays",
                got="jax.ShapeDtypeStruct",
                hint="save the adapter of a model with arrays, not with shapes",
            )
        values, array = np.asarray(site.node.lora_saved, np.float32), names[index]
        is_bias = parent(site.path) not in selection.module_paths
        for layer, name in enumerate(array.modules):
            tensor = np.ascontiguousarray(values[layer] if array.is_stacked else values)
            tensors[_key(name, array.leaf, is_wrapped=is_bias and name in adapted)] = tensor
    for module, tied in tied_names(model).items():
        if module in selection.module_names:
            tensors[_key(tied, "weight")] = tensors[_key(module, "weight")].copy()
    return SavedModules(tensors=tensors, options=selection.options)


def expected_keys(model: Tree, config: PeftConfig, adapted: Collection[str]) -> tuple[set[str], dict[int, list[str]]]:
    """Return the names of the tensors that a directory must have for arrays that train as a whole.

    The result is the set of all names, and by `Site.index` those of each array, one per layer. All layers of a stack,
    and both of two tied modules, must train together. `adapted` are the names of modules with an adapter.
    """
    keys: dict[int, list[str]] = {}
    by_index = {site.index: site for site in sites(model)}
    for index, names in named_arrays(model).items():
        saved_mask = [config.saves(name) for name in names.modules]
        bias_mask = [names.leaf == "bias" and config.trains_bias(name, name in adapted) for name in names.modules]
        mask = [is_saved or trains_bias for is_saved, trains_bias in zip(saved_mask, bias_mask, strict=True)]
        if not any(mask):
            continue
        if not all(mask):
            raise ModelFileError(
                f"{config.source}: only some layers of {by_index[index].path} train as a whole",
                expected="all layers of a stack, or none",
                got=f"{sum(mask)} of {len(mask)}",
                hint="name the module of every layer in modules_to_save, and train the adapter again",
            )
        keys[index] = [
            _key(name, names.leaf, is_wrapped=not is_saved and name in adapted)
            for name, is_saved in zip(names.modules, saved_mask, strict=True)
        ]
    all_keys = {key for array_keys in keys.values() for key in array_keys}
    for module, tied in tied_names(model).items():
        if config.saves(tied) or config.saves(module):
            has_both = config.saves(module) and (config.saves(tied) or config.file.ensure_weight_tying)
            if not has_both:
                raise ModelFileError(
                    f"{config.source}: option 'modules_to_save' unties {tied} from {module}, but both are one array",
                    expected="ensure_weight_tying = true, with both in the file",
                    got=f"modules_to_save = {config.file.modules_to_save}",
                    hint="train it with ensure_weight_tying=True in PEFT, or merge it there",
                )
            all_keys.add(_key(tied, "weight"))
    return all_keys, keys


def read_saved_modules(file: Any, path: Path, model: Tree, keys: Mapping[int, list[str]]) -> dict[int, Any]:
    """Read the nodes of the arrays that train as a whole; `keys` come from `expected_keys`. Tied tensors must agree."""
    by_index, names = {site.index: site for site in sites(model)}, named_arrays(model)
    nodes: dict[int, Any] = {}
    for index, array_keys in keys.items():
        site, shape = by_index[index], tuple(by_index[index].weight.shape)
        _refuse_quantized(path, site)
        layer_shape = shape[1:] if names[index].is_stacked else shape
        tensors = [read_tensor(file, path, key, layer_shape) for key in array_keys]
        nodes[index] = make_saved(site.weight, np.stack(tensors) if names[index].is_stacked else tensors[0])
        tied = tied_names(model).get(names[index].modules[0])
        if tied is not None and not np.array_equal(
            tensors[0], read_tensor(file, path, _key(tied, "weight"), layer_shape)
        ):
            raise ModelFileError(
                f"{path}: {tied} and {names[index].modules[0]} differ, but both are one array in the model",
                expected="equal tensors, as PEFT writes with ensure_weight_tying",
                hint="train it with ensure_weight_tying=True in PEFT, or merge it there",
            )
    return nodes


def _key(module: str, leaf: str, *, is_wrapped: bool = False) -> str:
    return f"{_PREFIX}{module}.{'base_layer.' if is_wrapped else ''}{leaf}"


def _saved_module_paths(model: Tree, chosen: Mapping[int, Site]) -> set[str]:
    """Return the paths of modules in which more than a bias trains."""
    modules = {parent(site.path) for site in chosen.values() if not site.path.endswith("/bias")}
    arrays = named_arrays(model)
    for site in sites(model):
        if site.index in arrays and parent(site.path) in modules and "/" in site.path and site.index not in chosen:
            if arrays[site.index].leaf == "bias":
                raise StructureError(
                    f"{site.path}: its module trains as a whole except for this leaf, which PEFT cannot express",
                    expected="all leaves of the module, or none",
                    hint="name the module, not its weight, in modules_to_save",
                )
    return modules


def _bias_option(names: Mapping[int, ArrayNames], biases: set[str], saved: set[str], adapted: Collection[str]) -> str:
    """Return PEFT's word for the biases that train."""
    if not biases:
        return "none"
    all_biases = {name for array in names.values() if array.leaf == "bias" for name in array.modules}
    if biases == all_biases & {*adapted}:
        return "lora_only"
    # Biases of modules in modules_to_save train with their module, so "all" covers the others.
    if biases == all_biases - saved:
        return "all"
    raise StructureError(
        "PEFT's format cannot express this choice of biases",
        expected="the biases of all modules, or of all modules with an adapter",
        got=f"{len(biases)} of {len(all_biases)} biases",
        hint='add the adapters with bias="all" or bias="lora_only"',
    )


def _refuse_quantized(path: Path, site: Site) -> None:
    if not isinstance(site.weight, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
        raise ModelFileError(
            f"{path}: {site.path} trains as a whole, but is quantised in this model",
            expected="an array of floating-point numbers",
            got=f"a {type(site.weight).__name__}{list(site.weight.shape)}",
            hint="do not quantise it",
        )
