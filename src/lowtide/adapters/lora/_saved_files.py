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
from ._peft import LORA, PeftConfig, saved_names
from ._saved import SavedWeight, saved
from ._sites import Site, sites
from ._tensors import read_tensor
from ._whole import Names, named_arrays, parent, tied_names

_PREFIX = "base_model.model."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Whole:
    """The part of a directory that holds arrays which train as a whole."""

    tensors: Mapping[str, np.ndarray]
    """Tensors by their names in the file."""
    options: Mapping[str, Any]
    """Options of `adapter_config.json`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Said:
    """The options for arrays that train as a whole, which need no values, and the modules that they name."""

    found: Mapping[int, Site]
    modules: set[str]
    listed: set[str]
    options: dict[str, Any]


def check_whole(model: Tree, adapted: Collection[str], kind: str) -> _Said:
    """Find PEFT's options for all nodes that train as a whole; shapes are enough.

    Args:
        model: the model.
        adapted: names of the modules that have an adapter.
        kind: PEFT's name of the kind of the adapters.

    Raises:
        StructureError: for a selection that PEFT's configuration cannot express.
    """
    found = {site.index: site for site in sites(model) if isinstance(site.node, SavedWeight)}
    if not found:
        return _Said(found={}, modules=set(), listed=set(), options={})
    names = named_arrays(model)
    modules = _saved_modules(model, found)
    biases = {n for i in found if parent(found[i].path) not in modules for n in names[i].modules}
    listed = {name for index, site in found.items() if parent(site.path) in modules for name in names[index].modules}
    options: dict[str, Any] = {"bias": _bias_word(names, biases, listed, adapted)}
    if kind != LORA and options["bias"] != "none":
        raise StructureError(
            f"biases train beside {kind} adapters, and PEFT's files of that kind have no word for it",
            expected="modules_to_save, which a bias trains with",
            got=f"bias = {options['bias']!r}",
            hint="name the modules of the biases in modules_to_save, or leave bias out; a checkpoint keeps anything",
        )
    if any(first in listed for first in tied_names(model)):
        options["ensure_weight_tying"] = True
    if listed:
        options["modules_to_save"] = saved_names(listed, {name for each in names.values() for name in each.modules})
    return _Said(found=found, modules=modules, listed=listed, options=options)


def whole_of(model: Tree, adapted: Collection[str], kind: str) -> Whole:
    """Return the tensors and options of all nodes that train as a whole; arguments and errors of `check_whole`."""
    said, names = check_whole(model, adapted, kind), named_arrays(model)
    tensors: dict[str, np.ndarray] = {}
    for index, site in said.found.items():
        if isinstance(site.node.lora_saved, jax.ShapeDtypeStruct):
            raise StructureError(
                f"{site.path}: what trains has shapes but no values",
                expected="arrays",
                got="jax.ShapeDtypeStruct",
                hint="save the adapter of a model that was run, not of one that was analysed",
            )
        values, of = np.asarray(site.node.lora_saved, np.float32), names[index]
        is_bias = parent(site.path) not in said.modules
        for layer, name in enumerate(of.modules):
            one = np.ascontiguousarray(values[layer] if of.is_stacked else values)
            tensors[_key(name, of.leaf, beside=is_bias and name in adapted)] = one
    for first, second in tied_names(model).items():
        if first in said.listed:
            tensors[_key(second, "weight")] = tensors[_key(first, "weight")].copy()
    return Whole(tensors=tensors, options=said.options)


def asked_for(model: Tree, config: PeftConfig, adapted: Collection[str]) -> tuple[set[str], dict[int, list[str]]]:
    """Return the names of the tensors that a directory must have for arrays that train as a whole.

    Args:
        model: the model.
        config: the directory's configuration.
        adapted: names of the modules that have an adapter.

    Returns:
        All names of tensors, and by `Site.index` those of each array, one per layer.

    Raises:
        ModelFileError: when only some layers of a stack, or only one of two tied places, train.
    """
    keys: dict[int, list[str]] = {}
    by_index = {site.index: site for site in sites(model)}
    for index, names in named_arrays(model).items():
        whole = [config.saves(name) for name in names.modules]
        biased = [names.leaf == "bias" and config.trains_bias(name, name in adapted) for name in names.modules]
        on = [either or other for either, other in zip(whole, biased, strict=True)]
        if not any(on):
            continue
        if not all(on):
            raise ModelFileError(
                f"{config.where}: of the layers of {by_index[index].path} some train as a whole and some do not",
                expected="all layers of a stack, or none",
                got=f"{sum(on)} of {len(on)}",
                hint="name the module of every layer in modules_to_save, and train the adapter again",
            )
        keys[index] = [
            _key(name, names.leaf, beside=not is_whole and name in adapted)
            for name, is_whole in zip(names.modules, whole, strict=True)
        ]
    every = {key for of_array in keys.values() for key in of_array}
    for first, second in tied_names(model).items():
        if config.saves(second) or config.saves(first):
            both = config.saves(first) and (config.saves(second) or config.file.ensure_weight_tying)
            if not both:
                raise ModelFileError(
                    f"{config.where}: option 'modules_to_save' unties {second} from {first}, which are one array here",
                    expected="ensure_weight_tying = true, with both in the file",
                    got=f"modules_to_save = {config.file.modules_to_save}",
                    hint="train it with ensure_weight_tying=True in PEFT, or merge it there",
                )
            every.add(_key(second, "weight"))
    return every, keys


def read_whole(file: Any, path: Path, model: Tree, keys: Mapping[int, list[str]]) -> dict[int, Any]:
    """Read the nodes of the arrays that train as a whole.

    Args:
        file: an open safetensors file.
        path: the file's path, for messages.
        model: the model.
        keys: from `asked_for`.

    Raises:
        ModelFileError: for a tensor that does not fit, for two tied tensors that differ, and for a quantised weight.
    """
    by_index, names = {site.index: site for site in sites(model)}, named_arrays(model)
    nodes: dict[int, Any] = {}
    for index, of_array in keys.items():
        site, shape = by_index[index], tuple(by_index[index].weight.shape)
        _refuse_few_bits(path, site)
        one = shape[1:] if names[index].is_stacked else shape
        read = [read_tensor(file, path, key, one) for key in of_array]
        nodes[index] = saved(site.weight, np.stack(read) if names[index].is_stacked else read[0])
        second = tied_names(model).get(names[index].modules[0])
        if second is not None and not np.array_equal(read[0], read_tensor(file, path, _key(second, "weight"), one)):
            raise ModelFileError(
                f"{path}: {second} and {names[index].modules[0]} differ, which are one array here",
                expected="equal tensors, as PEFT writes with ensure_weight_tying",
                hint="train it with ensure_weight_tying=True in PEFT, or merge it there",
            )
    return nodes


def _key(module: str, leaf: str, *, beside: bool = False) -> str:
    return f"{_PREFIX}{module}.{'base_layer.' if beside else ''}{leaf}"


def _saved_modules(model: Tree, found: Mapping[int, Site]) -> set[str]:
    """Return the paths of modules in which more than a bias trains."""
    modules = {parent(site.path) for site in found.values() if not site.path.endswith("/bias")}
    named = named_arrays(model)
    for site in sites(model):
        if site.index in named and parent(site.path) in modules and "/" in site.path and site.index not in found:
            if named[site.index].leaf == "bias":
                raise StructureError(
                    f"{site.path}: its module trains as a whole but for this leaf, which PEFT's files cannot say",
                    expected="all leaves of the module, or none",
                    hint="name the module in modules_to_save, and not its weight",
                )
    return modules


def _bias_word(names: Mapping[int, Names], biases: set[str], listed: set[str], adapted: Collection[str]) -> str:
    """Return PEFT's word for the biases that train."""
    if not biases:
        return "none"
    every = {name for each in names.values() if each.leaf == "bias" for name in each.modules}
    if biases == every & {*adapted}:
        return "lora_only"
    # Biases of modules in modules_to_save train with their module, so "all" covers the others.
    if biases == every - listed:
        return "all"
    raise StructureError(
        "PEFT's files have no word for the biases that train",
        expected="those of all modules, or of those with an adapter",
        got=f"{len(biases)} of {len(every)}",
        hint='add the adapters with bias="all" or bias="lora_only"',
    )


def _refuse_few_bits(path: Path, site: Site) -> None:
    if not isinstance(site.weight, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
        raise ModelFileError(
            f"{path}: {site.path} trains as a whole, and is stored in few bits here",
            expected="an array of floating-point numbers",
            got=f"a {type(site.weight).__name__}{list(site.weight.shape)}",
            hint="leave it out of what is quantised",
        )
