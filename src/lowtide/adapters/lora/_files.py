"""Write adapters in PEFT's format, and read adapters that PEFT wrote.

An adapter of an embedding [V, D], whose rows are looked up, is a `LoRAWeight` with A [r, D] and B [V, r]. PEFT calls Bᵀ
``lora_embedding_A`` [r, V] and Aᵀ ``lora_embedding_B`` [D, r]. If an embedding or a head has an adapter, PEFT also
writes its frozen weight to the file. `load` checks that this weight equals the weight of the model.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.core
import numpy as np

from ...core import (
    LinearWeight,
    ModelFileError,
    StructureError,
    Tree,
    input_file,
    refuse_consumed,
    require_extra,
    shortened,
    write_files,
)
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
from ._kernel import KERNELS, LoRAKernel, adapted_kernels, kernel_name, kernel_tensors, read_kernel
from ._kinds import common_kind, read_config
from ._lora import SUM_NAMES
from ._node import shard_adapter
from ._peft import (
    CONFIG_FILE,
    MERGE_HINT,
    MODEL_HINT,
    PREFIX,
    WEIGHT_INITS,
    WEIGHTS_FILE,
    PeftConfig,
    TensorFile,
    describe,
    host_leaves,
    tensor_keys,
)
from ._saved import SavedWeight, adapter_modules, expected_keys, read_saved_modules, saved_modules, select_saved
from ._sites import (
    TIED_HINT,
    TIED_MESSAGE,
    Site,
    adapted_sites,
    external_name,
    layer_names,
    replace,
    require_adapters,
    sites,
    table_names,
    tied_names,
)

_CHUNK_SIZE = 2**22
"""Elements of a frozen weight that are compared at once."""


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
    kernels are written as they are, and only `load` reads them. Experts that are one parameter in the external library
    are written as `target_parameters`.

    Args:
        model: a model with adapters.
        directory: the folder to write into; older files of these two names are replaced.
        base_model_name_or_path: where the base model is, for readers that want to load it.
        task_type: PEFT's name of the kind of model; with None, PEFT loads a plain `PeftModel`.

    Raises:
        StructureError: when there is no adapter, an adapter has shapes without values, two modules have the same name,
            or adapters are of several kinds.
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
    require_extra("finetune")
    from safetensors.numpy import save as to_safetensors

    adapted = [site for site in adapted_sites(model) if not isinstance(site.node, SavedWeight)]
    require_adapters(adapted, "save", "add one with lt.lora.add; a merged model has no adapter")
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
            entries[name] = {"rank": site.node.rank, "alpha": site.node.alpha, "variants": None}
            tensors |= kernel_tensors(site, name)
            kernels[name] = [site.node.num_rows, site.node.num_columns]
            continue
        leaves, scales = host_leaves(site)
        ranks = kind.layer_ranks(site, leaves)
        for layer, name in enumerate(layer_names(model, site)):
            _refuse_duplicate(site, name, entries)
            if scales is not None and scales[layer] == 0:
                continue
            rank = None if ranks is None else ranks[layer]
            entries[name] = kind.entry(site.node, 1.0 if scales is None else float(scales[layer]), rank)
            ends = kind.tensor_suffixes(site.node.variants, table=name in tables)
            for leaf, key in tensor_keys(name, ends).items():
                values = leaves[leaf]
                if stacked := len(site.weight.shape) - 2:  # number of leading axes: layers and experts
                    values = values.reshape(-1, *values.shape[stacked:])[layer]
                values = values[tuple(slice(rank if axis == "rank" else None) for axis in site.node.AXES[leaf])]
                values = values.T if name in tables else values
                tensors[key] = np.ascontiguousarray(kind.to_file(values, site.node))
    tensors |= kind.write_shared(adapted)
    saved, options = saved_modules(model, adapter_modules(model, entries, {site.index for site in adapted}), kind)
    tensors |= saved
    modules = [name for names in _names_by_site(model).values() for name in names]
    options |= {KERNELS: kernels} if kernels else {}
    options |= {"base_model_name_or_path": base_model_name_or_path, "task_type": task_type}
    config = describe(entries, modules, kind, options, parameters)
    config |= parameter_patterns(model, config)
    if ignored := "|".join(getattr(model, "ignored_modules", ())):
        if kind.peft_type == "VERA":  # PEFT 0.21 ignores its `exclude_modules`, so an expression excludes modules
            names = config["target_modules"]
            names = names if isinstance(names, str) else rf"(.*\.)?({'|'.join(map(re.escape, names))})"
            config["target_modules"] = rf"(?!.*\b({ignored})\b)({names})"
        else:
            config["exclude_modules"] = rf".*\b({ignored})\b.*"
    contents = {
        WEIGHTS_FILE: to_safetensors(tensors, metadata={"format": "pt"}),
        CONFIG_FILE: (json.dumps(config, indent=2) + "\n").encode(),
    }
    write_files(directory, contents)


def load(model: Tree, directory: str | os.PathLike[str]) -> Tree:
    """Give a model the adapters of a directory that `save` or PEFT wrote.

    It reads LoRA with its variants, (IA)³ and VeRA. Ranks and alphas may differ, and layers may lack an adapter. It
    reads LoRA of experts as modules and as one parameter (`target_parameters`). It also reads arrays that trained as a
    whole (`modules_to_save`, biases), and embeddings that PEFT resized. Loaded adapters can train further.

    Args:
        model: the base model. It may already have adapters of the same kinds and ranks on the same modules; then their
            values are replaced.
        directory: the folder with `adapter_config.json` and `adapter_model.safetensors`.

    Returns:
        The model with adapters, in float32 whatever the file's dtype.

    Raises:
        ModelFileError: when a file is missing or damaged; when tensors are missing, unexpected or mis-shaped; or when
            the configuration has an unsupported option (other PEFT methods, parameters that are not experts, a head
            that is no longer tied).
        StructureError: when the model has other adapters.

    Warns:
        UserWarning: when the configuration has dropout, which training applies only where `dropout` is called. Also
            when tensors of image modules, which the model lacks, are ignored.

    Memory:
        The adapters in float32, as in `add`; on the host, two copies of one weight's adapter.

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
    require_extra("finetune")
    from safetensors import SafetensorError, safe_open

    folder = Path(directory)
    config = read_config(folder)
    expected_files = f"{CONFIG_FILE} and {WEIGHTS_FILE} in one directory"
    hint = "save the adapter with safe_serialization=True (PEFT's default) or with lt.lora.save"
    path = input_file(folder, WEIGHTS_FILE, expected=expected_files, hint=hint)
    by_index = {site.index: site for site in sites(model)}
    base = model
    try:
        with safe_open(path, framework="numpy") as handle:
            file = TensorFile(path, handle)
            model, keys = _adopt_file_names(model, set(handle.keys()), path)
            config = dataclasses.replace(config, tables=table_names(model))
            names = _names_by_site(model)
            kernels = adapted_kernels(model, config, keys)
            parameters = adapted_parameters(model, config)
            non_modules = {*kernels, *(site.index for item in parameters for site in item.sites)}
            masks = {i: _adapter_mask(names[i], config, keys, by_index[i]) for i in names if i not in non_modules}
            chosen = {index: mask for index, mask in masks.items() if any(mask)}
            _check_tables(path, model, [by_index[i] for i in chosen if names[i][0] in config.tables], config)
            adapted = {name for index, mask in chosen.items() for name in itertools.compress(names[index], mask)}
            adapted |= {name for name, *_ in kernels.values()}
            expected = {key for name in adapted for key in config.tensors(name).values()}
            expected |= {key for item in parameters for pair in item.keys for key in pair}
            saved_keys, site_keys = expected_keys(model, config, adapter_modules(model, adapted, {*chosen, *kernels}))
            expected |= saved_keys if expected else set()
            # The frozen weights of adapted embeddings and heads, with the names of their modules.
            matrices = [names[i][0] for i in chosen if len(by_index[i].weight.shape) == 2]
            bases = {key: name for name in matrices if (key := f"{PREFIX}{name}.base_layer.weight") in keys}
            unadapted = [site for site in by_index.values() if site.index in names and site.index not in chosen]
            tables = _stored_tables(model, {names[site.index][0]: site for site in unadapted}, keys - expected)
            expected |= {*bases, *tables}
            # Compare names before reading tensors: a tensor that nothing expects would be ignored silently.
            _check_keys(path, keys, expected | {*(config.kind.shared_tensors if expected else ())})
            shared = config.kind.read_shared(file, config)
            nodes: dict[int, Any] = {}
            for index, mask in chosen.items():
                if by_index[index].is_experts:
                    check_expert_file(path, by_index[index], config, sum(mask), len(mask))
                node = config.kind.read(file, by_index[index], names[index], mask, config, shared)
                nodes[index] = shard_adapter(node)
            for index, kernel in kernels.items():
                nodes[index] = read_kernel(file, by_index[index], kernel, config)
            for parameter in parameters:
                nodes |= read_parameter(file, parameter, config)
            nodes |= read_saved_modules(file, model, site_keys)
            for key, name in bases.items():
                _check_base(file, next(by_index[i] for i in chosen if name in names[i]), key)
            resized = {site.index: _read_table(file, key, site) for key, site in tables.items() if site}
    except (SafetensorError, OSError) as error:
        message = f"{path}: truncated, or not a safetensors file"
        raise ModelFileError(message, got=shortened(error), hint="copy or write the adapter again") from error
    _check_same_adapters(adapted_sites(base), nodes)
    return replace(_resize_vocabulary(base, resized, by_index, path), nodes | resized)


def check(directory: str | os.PathLike[str]) -> None:
    """Check whether `load` supports an adapter, from its configuration alone.

    Args:
        directory: the folder with `adapter_config.json`.

    Raises:
        ModelFileError: when the file is damaged, or has an unsupported option, as in `load`.
    """
    require_extra("finetune")
    read_config(Path(directory))


def check_names(model: Tree) -> None:
    """Check, before training, that `save` has a name for every adapter.

    Args:
        model: a model with adapters; its leaves may be shapes.

    Raises:
        StructureError: for an adapter that PEFT's format cannot store.
    """
    adapted = [site for site in adapted_sites(model) if not isinstance(site.node, SavedWeight)]
    for parameter in expert_parameters(model):
        if is_adapted(parameter):
            check_scales(parameter)
    names: set[str] = {name for parameter in written_parameters(model) for name in parameter.names}
    parameter_indices = {site.index for parameter in written_parameters(model) for site in parameter.sites}
    for site in adapted:
        if site.index not in parameter_indices:
            names |= {kernel_name(model, site)} if isinstance(site.node, LoRAKernel) else {*layer_names(model, site)}
    if adapted:
        select_saved(model, adapter_modules(model, names, {site.index for site in adapted}), common_kind(adapted))


def _adopt_file_names(model: Tree, keys: set[str], path: Path) -> tuple[Tree, set[str]]:
    """Return the model with the file's module names, and the file's keys, except for image modules that it lacks."""
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
        hint = "rename one of them, or give the model an external_name with distinct names"
        raise StructureError(f"{site.path}: another adapted module has the name {name!r}, too", hint=hint)


def _names_by_site(model: Tree) -> dict[int, list[str]]:
    """Map `Site.index` to the result of `layer_names`, for sites that have names and can have an adapter."""
    names: dict[int, list[str]] = {}
    for site in sites(model):
        if site.is_matrix or site.is_experts:
            try:
                names[site.index] = layer_names(model, site)
            except StructureError:
                continue  # a stacked vector, or a leaf without a module in other software
    return names


def _adapter_mask(names: Sequence[str], config: PeftConfig, keys: set[str], site: Site) -> list[bool]:
    """Return whether files have an adapter for each layer of a weight, or for each expert of each layer."""
    mask = [bool(keys.intersection(config.tensors(name).values())) and not config.saves(name) for name in names]
    # Experts that are one parameter in PEFT are no modules there, but `target_modules` may match their names.
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
            hint=f"{MODEL_HINT}; only PEFT reads anything else that it trains",
        )


def _check_tables(path: Path, model: Tree, tables: Sequence[Site], config: PeftConfig) -> None:
    """Check that embeddings are not tied, and that their adapters are W + s B A with random initial values."""
    name = config.variants.non_sums
    for site in tables:
        if not config.is_lora or name or config.file.init_lora_weights in WEIGHT_INITS:
            kind = config.file.init_lora_weights if config.is_lora else config.kind.peft_type
            message = f"{path}: the embedding {site.path} supports only {SUM_NAMES} with random initial values"
            raise ModelFileError(message, got=name or kind, hint=MERGE_HINT)
        if external_name(model, site) in tied_names(model):
            raise ModelFileError(f"{path}: {site.path} {TIED_MESSAGE}", hint=TIED_HINT)


def _stored_tables(model: Tree, tables: Mapping[str, Site], keys: Collection[str]) -> dict[str, Site | None]:
    """Map names of tensors to sites, for embeddings and heads without an adapter; PEFT writes them after a resize.

    Each name maps to its site in `tables`, or to None for the second use of a tied embedding. The result is empty for a
    model without the method ``with_vocabulary``, which changes the number of rows.
    """
    if not hasattr(model, "with_vocabulary"):
        return {}
    tied_sites = {tied: None for module, tied in tied_names(model).items() if module in tables}
    by_key = {f"{PREFIX}{name}.weight": site for name, site in {**tables, **tied_sites}.items()}
    return {key: site for key, site in by_key.items() if key in keys and (site is None or len(site.weight.shape) == 2)}


def _read_table(file: TensorFile, key: str, site: Site) -> Any:
    """Read an embedding or a head with any number of rows, in the dtype of the weight that it replaces."""
    weight: Any = site.weight
    shape = (file.shape(key)[0], weight.shape[1])
    values = file.read(key, shape)
    dtype = values.dtype if isinstance(weight, LinearWeight) else weight.dtype
    if isinstance(weight, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, dtype)
    sharding = weight.sharding if isinstance(weight, jax.Array) and shape == weight.shape else None
    return jax.device_put(values.astype(dtype), sharding)


def _check_base(file: TensorFile, site: Site, key: str) -> None:
    """Check that a frozen weight in a file equals the weight of the model.

    Quantised weights, shapes without values, and weights that other processes hold in part are not compared.
    """
    shape, weight = tuple(site.weight.shape), site.weight
    file.check(key, shape)
    is_array = isinstance(weight, (jax.Array, np.ndarray)) and not isinstance(weight, jax.core.Tracer)
    if not is_array or not getattr(weight, "is_fully_addressable", True):
        return
    tensor = file.handle.get_slice(key)
    # Compare some rows at a time, because an embedding may be large.
    num_rows = max(1, _CHUNK_SIZE // max(shape[1], 1))
    for start in range(0, shape[0], num_rows):
        stored = tensor[start : min(start + num_rows, shape[0])]
        base = np.asarray(weight[start : start + num_rows])
        # Either may have been rounded to the dtype of the other.
        if not any(np.array_equal(base.astype(dtype), stored.astype(dtype)) for dtype in (base.dtype, stored.dtype)):
            difference = np.abs(base.astype(np.float32) - stored.astype(np.float32)).max()
            message = f"{file.path}: its {key} differs from {site.path} of the model"
            actual = f"a difference of {float(difference):.3g}, and maybe more, from row {start} on"
            hint = f"{MODEL_HINT}; list an embedding that was trained or resized in modules_to_save"
            raise ModelFileError(message, got=actual, hint=hint)


def _resize_vocabulary(model: Tree, tables: Mapping[int, Any], by_index: Mapping[int, Site], path: Path) -> Tree:
    """Give a model the vocabulary size of a file's tables, and raise if they have different numbers of rows."""
    if len(row_counts := {table.shape[0] for table in tables.values()}) > 1:
        counts = " and ".join(map(str, sorted(row_counts)))
        hint = "resize both in transformers (resize_token_embeddings), and save the adapter again"
        raise ModelFileError(f"{path}: its embedding and its head have different numbers of rows: {counts}", hint=hint)
    if all(table.shape == by_index[index].weight.shape for index, table in tables.items()):
        return model
    return model.with_vocabulary(next(iter(row_counts)))


def _check_same_adapters(existing: Sequence[Site], nodes: Mapping[int, Any]) -> None:
    """Check that the model's adapters, if any, have the kinds, ranks and places of the loaded `nodes`."""
    expected = {site.index: site.node.summary for site in existing}
    loaded = {index: node.summary for index, node in nodes.items()}
    if existing and expected != loaded:
        message = f"{existing[0].path}: the adapters of the model differ from those of the directory"
        counts = [dict(Counter(summaries.values())) for summaries in (expected, loaded)]
        difference = f"{counts[0]} in the model, {counts[1]} in the directory (adapter: number of weights)"
        hint = "load into the base model, or merge the old adapters first with lt.lora.merge"
        raise StructureError(message, got=difference, hint=hint)


def _join_names(names: Sequence[str]) -> str:
    suffix = [f"… ({len(names) - 6} more)"] if len(names) > 6 else []
    return ", ".join([*(shortened(name, 120) for name in names[:6]), *suffix])
