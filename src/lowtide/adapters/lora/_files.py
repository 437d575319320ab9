"""Write adapters in PEFT's format, and read adapters that PEFT wrote."""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_safetensors

from ...core import (
    ModelFileError,
    StructureError,
    Tree,
    input_file,
    refuse_consumed,
    shortened,
    write_files,
)
from ._embeddings import base_keys, check_base, check_tables, read_table, stored_tables
from ._experts import (
    adapted_parameters,
    check_expert_file,
    check_scales,
    expert_parameters,
    is_adapted,
    parameter_entries,
    parameter_patterns,
    read_parameter,
    written_parameters,
)
from ._kernel import KERNELS, LoRAKernel, adapted_kernels, kernel_entry, kernel_name, kernel_tensors, read_kernel
from ._kinds import common_kind, read_config
from ._lora import layer_entry, remove_padding
from ._node import shard_adapter
from ._peft import CONFIG_FILE, WEIGHTS_FILE, PeftConfig, describe, host_leaves, tensor_keys
from ._saved import SavedWeight, adapter_modules, expected_keys, read_saved_modules, saved_modules, select_saved
from ._sites import Site, adapted_sites, layer_names, replace, sites, table_names


def save(
    model: Tree,
    directory: str | os.PathLike[str],
    *,
    base_model_name_or_path: str | None = None,
    task_type: str | None = "CAUSAL_LM",
) -> None:
    """Write the adapters, and only them, as `adapter_model.safetensors` and `adapter_config.json` in PEFT's format.

    Stacked adapters are written as one module per layer. Module names come from the model's ``external_name``
    (`lowtide.core.ExternalNames`), otherwise from the tree path with dots. Ranks and alphas that differ between modules
    go into `rank_pattern` and `alpha_pattern`. Kernels in PyTorch's order are written as PEFT's convolutions. Other
    kernels are written as they are, and only `load` reads them. Experts that are one parameter elsewhere, without
    modules, are written as `target_parameters`.

    Args:
        model: a model with adapters.
        directory: the folder to write into; older files of these two names are replaced.
        base_model_name_or_path: where the base model is, for readers that want to load it.
        task_type: PEFT's name of the kind of model; None makes it a plain `PeftModel`.

    Raises:
        StructureError: when there is no adapter, it is abstract, two modules have one name, or adapters are of several
            kinds.
        OutputError: when the folder cannot be written; nothing half-written remains.

    Memory:
        The adapters in float32 on the host, twice while they are written.

    Examples:
        >>> import tempfile
        >>> import jax.numpy as jnp
        >>> from lowtide.adapters.lora import LoRAWeight
        >>> node = LoRAWeight(jnp.zeros((2, 2)), jnp.ones((1, 2)), jnp.ones((2, 1)), alpha=3.0)
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     save({"q_proj": {"weight": node}}, directory)
        ...     sorted(os.listdir(directory))
        ['adapter_config.json', 'adapter_model.safetensors']

    References:
        PEFT, "PEFT checkpoint format", https://huggingface.co/docs/peft/developer_guides/checkpoint.
    """
    adapted = [site for site in adapted_sites(model) if not isinstance(site.node, SavedWeight)]
    if not adapted:
        raise StructureError(
            "the model has no adapter to save",
            expected="at least one adapter, such as a LoRAWeight",
            hint="add one with lt.lora.add; a merged model has no adapter",
        )
    refuse_consumed(model)
    kind = common_kind(adapted)
    entries, tensors, written_indices = parameter_entries(model, kind)
    parameters, tables = [*entries], table_names(model)
    kernels: dict[str, list[int]] = {}
    for site in adapted:
        if site.index in written_indices:
            continue
        if isinstance(site.node, LoRAKernel):
            name = kernel_name(model, site)
            _refuse_duplicate(site, name, entries)
            entries[name] = kernel_entry(site.node)
            tensors |= kernel_tensors(site, name)
            kernels[name] = [site.node.num_rows, site.node.num_columns]
            continue
        leaves, scales = host_leaves(site)
        ranks = kind.layer_ranks(site, leaves)
        for layer, name in enumerate(layer_names(model, site)):
            _refuse_duplicate(site, name, entries)
            if scales is not None and scales[layer] == 0:
                continue
            entries[name] = kind.entry(site.node, 1.0 if scales is None else float(scales[layer]))
            if ranks is not None and ranks[layer] != site.node.rank:
                entries[name] = layer_entry(entries[name], ranks[layer])
            ends = kind.tensor_ends(dora=entries[name].get("dora", False), table=name in tables)
            for leaf, key in tensor_keys(name, ends).items():
                values = leaves[leaf]
                if stacked := len(site.weight.shape) - 2:  # number of leading axes: layers, and experts of each
                    values = values.reshape(-1, *values.shape[stacked:])[layer]
                values = values if ranks is None else remove_padding(values, leaf, ranks[layer])
                values = values.T if name in tables else values
                tensors[key] = np.ascontiguousarray(kind.to_file(values, site.node))
    tensors |= kind.write_shared(adapted)
    saved = saved_modules(model, adapter_modules(model, entries, {site.index for site in adapted}), kind)
    tensors |= saved.tensors
    modules = [name for names in _names_by_site(model).values() for name in names]
    names: dict[str, Any] = {"base_model_name_or_path": base_model_name_or_path, "task_type": task_type}
    extra_options = {**saved.options, **({KERNELS: kernels} if kernels else {})}
    config = describe(entries, modules, kind, **names, saved_options=extra_options, parameters=parameters)
    config |= parameter_patterns(model, config)
    if ignored := getattr(model, "ignored_modules", ()):
        config["exclude_modules"] = rf".*\b({'|'.join(ignored)})\b.*"
    contents = {
        WEIGHTS_FILE: to_safetensors(tensors, metadata={"format": "pt"}),
        CONFIG_FILE: (json.dumps(config, indent=2) + "\n").encode(),
    }
    write_files(directory, contents)


def load(model: Tree, directory: str | os.PathLike[str]) -> Tree:
    """Give a model the adapters of a directory that `save` or PEFT wrote.

    It reads LoRA with its variants rsLoRA and DoRA, (IA)³ and VeRA, with rank and alpha patterns, and with layers that
    have no adapter. It reads LoRA of experts as modules and as one parameter (`target_parameters`). Training can
    continue from loaded adapters.

    Args:
        model: the base model, or one that has adapters of the same kinds and ranks on the same modules, whose values
            are then replaced.
        directory: the folder with `adapter_config.json` and `adapter_model.safetensors`.

    Returns:
        The model with adapters, in float32 whatever the file's dtype.

    Raises:
        ModelFileError: when a file is missing or damaged; when tensors are missing, unexpected or mis-shaped; or when
            the configuration has an unsupported option (other PEFT methods, parameters that are not experts, a head
            that is no longer tied). Dropout gives one warning: it has no effect on results, and training applies it
            only where `dropout` is called.
        StructureError: when the model has other adapters.

    Memory:
        The adapters in float32, as in `add`; on the host, twice those of one weight.

    Examples:
        >>> import tempfile
        >>> import jax.numpy as jnp
        >>> from lowtide.adapters.lora import LoRAWeight
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
    by_index = {site.index: site for site in sites(model)}
    base = model
    try:
        with safe_open(path, framework="numpy") as file:
            model, keys = _adopt_file_names(model, set(file.keys()), path)
            config = dataclasses.replace(config, tables=table_names(model))
            names = _names_by_site(model)
            kernels = adapted_kernels(model, config, keys)
            parameters = adapted_parameters(model, config)
            non_modules = {*kernels, *(site.index for item in parameters for site in item.sites)}
            masks = {
                index: _adapter_mask(names[index], config, keys, by_index[index])
                for index in names
                if index not in non_modules
            }
            chosen = {index: mask for index, mask in masks.items() if any(mask)}
            check_tables(path, model, [by_index[i] for i in chosen if names[i][0] in config.tables], config)
            expected = {
                key
                for index, mask in chosen.items()
                for name, is_adapted in zip(names[index], mask, strict=True)
                if is_adapted
                for key in config.tensors(name).values()
            }
            kernel_keys = {key for name, *_ in kernels.values() for key in config.tensors(name).values()}
            expected |= kernel_keys | {key for item in parameters for pair in item.keys for key in pair}
            adapted = {name for name, *_ in kernels.values()}
            adapted |= {
                name
                for i, mask in chosen.items()
                for name, is_adapted in zip(names[i], mask, strict=True)
                if is_adapted
            }
            saved_keys, site_keys = expected_keys(model, config, adapter_modules(model, adapted, {*chosen, *kernels}))
            expected |= saved_keys if expected else set()
            bases = base_keys([names[i][0] for i in chosen if len(by_index[i].weight.shape) == 2], keys)
            unadapted = [site for site in by_index.values() if site.index in names and site.index not in chosen]
            tables = stored_tables(model, {names[site.index][0]: site for site in unadapted}, keys - expected)
            expected |= {*bases, *tables}
            # Names are compared before any tensor is read. A tensor that nothing expects would otherwise be ignored
            # silently.
            _check_keys(path, keys, expected | {*(config.kind.shared_tensors if expected else ())})
            shared = config.kind.read_shared(file, path, config)
            nodes = {
                index: _read_node(file, path, by_index[index], names[index], mask, config, shared)
                for index, mask in chosen.items()
            }
            for index, kernel in kernels.items():
                nodes[index] = read_kernel(file, path, by_index[index], kernel, config)
            for parameter in parameters:
                nodes |= read_parameter(file, path, parameter, config)
            nodes |= read_saved_modules(file, path, model, site_keys)
            for key, name in bases.items():
                check_base(file, path, next(by_index[i] for i in chosen if name in names[i]), key)
            resized = {site.index: read_table(file, path, key, site) for key, site in tables.items() if site}
    except (SafetensorError, OSError) as error:
        raise ModelFileError(
            f"{path}: truncated, or not a safetensors file",
            got=shortened(error),
            hint="copy or write the adapter again",
        ) from error
    _check_same_adapters(adapted_sites(base), nodes)
    return replace(_resize_vocabulary(base, resized, by_index, path), nodes | resized)


def check(directory: str | os.PathLike[str]) -> None:
    """Check from the configuration of an adapter alone whether `load` supports it.

    Args:
        directory: the folder with `adapter_config.json`.

    Raises:
        ModelFileError: when it is damaged, or has an unsupported option, as in `load`.
    """
    read_config(Path(directory))


def check_names(model: Tree) -> None:
    """Check, before training, that `save` has a name for every adapter.

    Args:
        model: a model with adapters; shapes are enough.

    Raises:
        StructureError: for an adapter that PEFT's files have no place for.

    Memory:
        None.
    """
    adapted = [site for site in adapted_sites(model) if not isinstance(site.node, SavedWeight)]
    for parameter in expert_parameters(model):
        if is_adapted(parameter):
            check_scales(parameter)
    names: set[str] = {name for parameter in written_parameters(model) for name in parameter.names}
    parameter_indices = {site.index for parameter in written_parameters(model) for site in parameter.sites}
    for site in adapted:
        if site.index not in parameter_indices:
            is_kernel = isinstance(site.node, LoRAKernel)
            names |= {kernel_name(model, site)} if is_kernel else {*layer_names(model, site)}
    if adapted:
        select_saved(model, adapter_modules(model, names, {site.index for site in adapted}), common_kind(adapted))


def _adopt_file_names(model: Tree, keys: set[str], path: Path) -> tuple[Tree, set[str]]:
    """Return the model with the module names of a file, and the file's keys without modules that the model lacks."""
    if hasattr(model, "named_as"):
        model = model.named_as(keys)
    ignored = {key for key in keys if {*key.split(".")} & {*getattr(model, "ignored_modules", ())}}
    if ignored and ignored != keys:
        first = _join_names(sorted(ignored)[:1])
        warnings.warn(f"{path}: {len(ignored)} tensors of image modules are ignored, such as {first}", stacklevel=3)
        keys = keys - ignored
    return model, keys


def _refuse_duplicate(site: Site, name: str, entries: Mapping[str, Any]) -> None:
    if name in entries:
        raise StructureError(
            f"{site.path}: another adapted module has the name {name!r}, too",
            hint="rename one of them, or give the model an external_name with distinct names",
        )


def _names_by_site(model: Tree) -> dict[int, list[str]]:
    """Return the external names, one per layer, of every site that can have an adapter and has such names."""
    names: dict[int, list[str]] = {}
    for site in sites(model):
        if site.is_matrix or site.is_experts:
            try:
                names[site.index] = layer_names(model, site)
            except StructureError:
                continue  # a stacked vector, or a leaf without a module in other software
    return names


def _adapter_mask(names: Sequence[str], config: PeftConfig, keys: set[str], site: Site) -> list[bool]:
    """Return, for each layer of a weight and each expert of a layer, whether the directory adapts it."""
    mask = [bool(keys.intersection(config.tensors(name).values())) and not config.saves(name) for name in names]
    # Experts that are one parameter in PEFT have no modules, but a list of names may match theirs.
    if config.file.target_modules is None or (site.is_experts and not any(mask)):
        return mask
    return [config.targets(name) for name in names]


def _check_keys(path: Path, keys: set[str], expected: set[str]) -> None:
    missing, unexpected = sorted(expected - keys), sorted(keys - expected)
    if missing or unexpected or not expected:
        groups = (("missing", missing), ("unexpected", unexpected))
        differences = [f"{len(group)} {label}: {_join_names(group)}" for label, group in groups if group]
        description = f"{len(expected)} tensors" + ("" if missing else f", such as {_join_names(sorted(expected)[:1])}")
        raise ModelFileError(
            f"{path}: its tensors do not match {CONFIG_FILE} and the model",
            expected=description if expected else "tensors for at least one module of the model",
            got="; ".join(differences) or "no tensor",
            hint="load it into the model that it was made for; only PEFT reads anything else that it trains",
        )


def _read_node(
    file: Any,
    path: Path,
    site: Site,
    names: Sequence[str],
    mask: Sequence[bool],
    config: PeftConfig,
    shared: Any,
) -> Any:
    if site.is_experts:
        check_expert_file(path, site, config, sum(mask), len(names))
    return shard_adapter(config.kind.read(file, path, site, names, mask, config, shared))


def _resize_vocabulary(model: Tree, tables: Mapping[int, Any], by_index: Mapping[int, Site], path: Path) -> Tree:
    """Give a model the vocabulary size of a file's tables, and raise if they have different numbers of rows."""
    if len(row_counts := {table.shape[0] for table in tables.values()}) > 1:
        raise ModelFileError(
            f"{path}: its embedding and its head have different numbers of rows",
            expected="the same number of rows",
            got=", ".join(map(str, sorted(row_counts))),
            hint="resize both in transformers (resize_token_embeddings), and save the adapter again",
        )
    if all(table.shape == by_index[index].weight.shape for index, table in tables.items()):
        return model
    return model.with_vocabulary(next(iter(row_counts)))


def _check_same_adapters(existing: Sequence[Site], nodes: Mapping[int, Any]) -> None:
    """Check that the model's own adapters are replaced by ones of the same kinds and ranks at the same places."""
    if not existing:
        return
    expected = {site.index: site.node.summary for site in existing}
    loaded = {index: node.summary for index, node in nodes.items()}
    if expected != loaded:
        raise StructureError(
            f"{existing[0].path}: the adapters of the model differ from those of the directory",
            expected="a model without adapters, or with the same ranks on the same modules",
            got=f"{dict(Counter(expected.values()))} in the model, {dict(Counter(loaded.values()))} in the directory "
            "(adapter: number of weights)",
            hint="load into the base model, or merge the old adapters first with lt.lora.merge",
        )


def _join_names(names: Sequence[str]) -> str:
    suffix = [f"… ({len(names) - 6} more)"] if len(names) > 6 else []
    return ", ".join([*(shortened(name, 120) for name in names[:6]), *suffix])
