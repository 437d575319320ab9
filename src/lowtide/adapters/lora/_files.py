"""Write adapters as PEFT does, and read what PEFT wrote."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_safetensors

from ...core import ModelFileError, StructureError, Tree, input_file, shortened, write_files
from ._kernel import LoRAKernel
from ._model import attach
from ._peft import CONFIG_FILE, WEIGHTS_FILE, PeftConfig, describe, read_config, tensor_names
from ._sites import Site, adapted_sites, layer_names, replace, sites
from ._weight import LoRAWeight

_DTYPES = ("F64", "F32", "F16", "BF16")


def save(
    model: Tree,
    directory: str | os.PathLike[str],
    *,
    base_model_name_or_path: str | None = None,
    task_type: str | None = "CAUSAL_LM",
) -> None:
    """Write the adapters, and only them, as `adapter_model.safetensors` and `adapter_config.json` in PEFT's format.

    Stacked adapters are written as one module a layer. Modules get the names that the model's ``external_name``
    gives (`lowtide.core.ExternalNames`), otherwise their tree path with dots. Ranks and alphas that differ between
    modules go into `rank_pattern` and `alpha_pattern`.

    Args:
        model: a model with adapters.
        directory: the folder to write into; older files of these two names are replaced.
        base_model_name_or_path: where the base model is, for readers that want to load it.
        task_type: PEFT's name of the kind of model; None makes it a plain `PeftModel`.

    Raises:
        StructureError: when there is no adapter, it is abstract, or two modules have one name.
        OutputError: when the folder cannot be written; nothing half-written remains.

    Memory:
        The adapters in float32 on the host, twice while they are written.

    Examples:
        >>> import tempfile
        >>> node = LoRAWeight(jnp.zeros((2, 2)), jnp.ones((1, 2)), jnp.ones((2, 1)), alpha=3.0)
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     save({"q_proj": {"weight": node}}, directory)
        ...     sorted(os.listdir(directory))
        ['adapter_config.json', 'adapter_model.safetensors']

    References:
        PEFT, "PEFT checkpoint format", https://huggingface.co/docs/peft/developer_guides/checkpoint.
    """
    adapted = adapted_sites(model)
    if not adapted:
        raise StructureError(
            "the model has no adapter to save",
            expected="at least one LoRAWeight",
            hint="add one with lt.lora.add; a merged model has none left",
        )
    for site in adapted:
        if isinstance(site.node, LoRAKernel):
            raise StructureError(
                f"{site.path}: PEFT's files have no place for the adapter of this kernel",
                expected="adapters of matrices",
                got=f"a LoRAKernel{list(site.node.shape)}",
                hint='fold it in with lt.lora.merge, or store lt.partition(model, "**/lora_*")[0], as checkpoints do',
            )
    ranks: dict[str, tuple[int, float]] = {}
    tensors: dict[str, np.ndarray] = {}
    for site in adapted:
        factors = _host_factors(site)
        for layer, name in enumerate(layer_names(model, site)):
            if name in ranks:
                raise StructureError(
                    f"{site.path}: another adapted module is called {name!r}, too",
                    hint="rename one of them, or give the model an external_name that tells them apart",
                )
            ranks[name] = (site.node.rank, site.node.alpha)
            for key, factor in zip(tensor_names(name), factors, strict=True):
                tensors[key] = np.ascontiguousarray(factor[layer] if factor.ndim == 3 else factor)
    modules = [name for names in _names_by_site(model).values() for name in names]
    config = describe(ranks, modules, base_model_name_or_path=base_model_name_or_path, task_type=task_type)
    contents = {
        WEIGHTS_FILE: to_safetensors(tensors, metadata={"format": "pt"}),
        CONFIG_FILE: (json.dumps(config, indent=2) + "\n").encode(),
    }
    write_files(directory, contents)


def load(model: Tree, directory: str | os.PathLike[str]) -> Tree:
    """Give a model the adapters of a directory that `save` or PEFT wrote.

    Rank-stabilised scales and rank and alpha patterns are read; alpha is stored so that ``alpha / rank`` is the
    file's scale. Loaded adapters train on from where they were.

    Args:
        model: the base model, or one that has adapters of the same shapes on the same modules, whose values are then
            replaced.
        directory: the folder with `adapter_config.json` and `adapter_model.safetensors`.

    Returns:
        The model with adapters, in float32 whatever the file's dtype.

    Raises:
        ModelFileError: when a file is missing or damaged; tensors are missing, unexpected or mis-shaped; or the
            configuration asks for what is not supported (DoRA, biases, fully trained modules, other PEFT methods).
            `lora_dropout` gives one warning: it has no effect on results, and is not applied in training.
        StructureError: when the model has other adapters.

    Memory:
        The adapters in float32, as in `add`; on the host, twice those of one weight.

    Examples:
        >>> import tempfile
        >>> node = LoRAWeight(jnp.zeros((2, 2)), jnp.ones((1, 2)), jnp.ones((2, 1)), alpha=3.0)
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     save({"q_proj": {"weight": node}}, directory)
        ...     model = load({"q_proj": {"weight": jnp.zeros((2, 2))}}, directory)
        >>> model["q_proj"]["weight"].scaling
        3.0
    """
    folder = Path(directory)
    config = read_config(folder)
    path = input_file(
        folder,
        WEIGHTS_FILE,
        expected=f"{CONFIG_FILE} and {WEIGHTS_FILE} in one directory",
        hint="save the adapter with safe_serialization=True (PEFT's default) or with lt.lora.save",
    )
    names = _names_by_site(model)
    by_index = {site.index: site for site in sites(model)}
    try:
        with safe_open(path, framework="numpy") as file:
            keys = set(file.keys())
            chosen = {index: names[index] for index in names if _is_chosen(names[index], config, keys, path)}
            _check_keys(path, keys, {key for group in chosen.values() for name in group for key in tensor_names(name)})
            nodes = {index: _read_node(file, path, by_index[index], chosen[index], config) for index in chosen}
    except (SafetensorError, OSError) as error:
        raise ModelFileError(
            f"{path}: truncated or no safetensors file", got=shortened(error), hint="copy or write the adapter again"
        ) from error
    _check_present(adapted_sites(model), nodes)
    return replace(model, nodes)


def check(directory: str | os.PathLike[str]) -> None:
    """Read the configuration of an adapter, and nothing else, to see whether `load` can handle it.

    Args:
        directory: the folder with `adapter_config.json`.

    Raises:
        ModelFileError: when it is damaged, or asks for what is not supported, as in `load`.
    """
    read_config(Path(directory))


def _host_factors(site: Site) -> tuple[np.ndarray, np.ndarray]:
    factors = (site.node.lora_a, site.node.lora_b)
    if any(isinstance(factor, jax.ShapeDtypeStruct) for factor in factors):
        raise StructureError(
            f"{site.path}: the adapter has shapes but no values",
            expected="arrays",
            got="jax.ShapeDtypeStruct",
            hint="save the adapter of a model that was run, not of one that was analysed",
        )
    lora_a, lora_b = (np.asarray(factor, np.float32) for factor in factors)
    return lora_a, lora_b


def _names_by_site(model: Tree) -> dict[int, list[str]]:
    """Name, one a layer, every site that can carry an adapter and is known to other software."""
    names: dict[int, list[str]] = {}
    for site in sites(model):
        if site.is_matrix:
            try:
                names[site.index] = layer_names(model, site)
            except StructureError:
                continue  # a stacked vector, or a leaf that other software does not know as a module
    return names


def _is_chosen(names: Sequence[str], config: PeftConfig, keys: set[str], path: Path) -> bool:
    """Whether the directory adapts a weight: all layers of it, or none."""
    if config.file.target_modules is None:
        hits = [name for name in names if keys.intersection(tensor_names(name))]
    else:
        hits = [name for name in names if config.targets(name)]
    if hits and len(hits) < len(names):
        raise ModelFileError(
            f"{path}: adapts {len(hits)} of {len(names)} layers of a stacked weight",
            expected=f"all of {names[0]} … {names[-1]}, or none",
            got=", ".join(hits[:6]),
            hint="add the missing layers in PEFT with lora_B = 0, which changes no result",
        )
    return bool(hits)


def _check_keys(path: Path, keys: set[str], expected: set[str]) -> None:
    missing, unexpected = sorted(expected - keys), sorted(keys - expected)
    if missing or unexpected or not expected:
        groups = (("missing", missing), ("unexpected", unexpected))
        found = [f"{len(group)} {word}: {_some(group)}" for word, group in groups if group]
        raise ModelFileError(
            f"{path}: its tensors are not those that {CONFIG_FILE} and the model ask for",
            expected=_some(sorted(expected)) or "tensors for at least one module of the model",
            got="; ".join(found) or "no tensor",
            hint="load it into the model that it was made for; only lora_A and lora_B of linear layers are read",
        )


def _read_node(file: Any, path: Path, site: Site, names: Sequence[str], config: PeftConfig) -> LoRAWeight:
    scales = {(config.rank_of(name), config.alpha_of(name)) for name in names}
    if len(scales) > 1:
        raise ModelFileError(
            f"{path}: the layers of {site.path} differ in rank or alpha",
            expected="one rank and alpha for all layers of a stacked weight",
            got=", ".join(f"rank {rank} alpha {alpha:g}" for rank, alpha in sorted(scales)),
            hint="pad the adapters in PEFT to one rank with rows and columns of zeros",
        )
    ((rank, alpha),) = scales
    out, inner = site.weight.shape[-2:]
    groups: list[list[np.ndarray]] = [[], []]
    for name in names:
        for group, key, shape in zip(groups, tensor_names(name), ((rank, inner), (out, rank)), strict=True):
            group.append(_read_tensor(file, path, key, shape))
    stacked = len(site.weight.shape) == 3
    lora_a, lora_b = (jnp.asarray(np.stack(group) if stacked else group[0]) for group in groups)
    return attach(site.weight, lora_a, lora_b, alpha)


def _read_tensor(file: Any, path: Path, key: str, shape: tuple[int, int]) -> np.ndarray:
    found = file.get_slice(key)
    if tuple(found.get_shape()) != shape or found.get_dtype() not in _DTYPES:
        raise ModelFileError(
            f"{path}: tensor {key} does not fit",
            expected=f"a floating-point tensor of shape {list(shape)}",
            got=f"{found.get_dtype()}{list(found.get_shape())}",
            hint="load it into the model that it was made for, with the configuration it was saved with",
        )
    with np.errstate(over="ignore"):  # float64 has larger numbers
        values = np.asarray(file.get_tensor(key), np.float32)
    if not np.isfinite(values).all():
        raise ModelFileError(
            f"{path}: tensor {key} has values that are no finite numbers",
            got=f"{np.count_nonzero(~np.isfinite(values))} of {values.size}",
            hint="the file is damaged, or the training that wrote it had diverged",
        )
    return values


def _check_present(present: Sequence[Site], nodes: Mapping[int, LoRAWeight]) -> None:
    """Adapters that the model has already may only be replaced by ones of the same shapes at the same places."""
    if not present:
        return
    ranks = {site.index: site.node.rank for site in present}
    if ranks != {index: node.rank for index, node in nodes.items()}:
        raise StructureError(
            f"{present[0].path}: the model has other adapters than the directory",
            expected="a model without adapters, or with the same ranks on the same modules",
            got=f"ranks {dict(Counter(ranks.values()))} in the model, "
            f"{dict(Counter(node.rank for node in nodes.values()))} in the directory (rank: number of weights)",
            hint="load into the base model, or fold the old adapters in first with lt.lora.merge",
        )


def _some(names: Sequence[str]) -> str:
    return shortened(", ".join(names[:4]), 500) + (f", … ({len(names) - 4} more)" if len(names) > 4 else "")
