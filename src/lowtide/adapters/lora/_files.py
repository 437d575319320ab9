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

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_safetensors

from ...core import (
    LinearWeight,
    ModelFileError,
    StructureError,
    Tree,
    input_file,
    refuse_consumed,
    shortened,
    write_files,
)
from ._adapter import kind_of, shard_adapter
from ._config import WEIGHT_INITS
from ._experts import check_expert_file
from ._kernel import LoRAKernel
from ._kernel_files import adapted_kernels, kernel_name, kernel_tensors, read_kernel
from ._modules_to_save import adapter_modules
from ._names import common_peft_type
from ._parameters import adapted_parameters, parameter_patterns, parameter_tensors, read_parameter, written_parameters
from ._peft import (
    CONFIG_FILE,
    IA3,
    KERNELS,
    LORA,
    VERA,
    VERA_TENSORS,
    WEIGHTS_FILE,
    PeftConfig,
    describe,
    read_config,
    tensor_names,
)
from ._principal import principal_factors
from ._ranks import layer_entry, remove_padding, stack_scales, used_ranks
from ._saved import SavedWeight
from ._saved_files import expected_keys, read_saved_modules, saved_modules
from ._sites import Site, adapted_sites, layer_names, replace, sites
from ._tables import base_keys, check_base, check_tables, read_table, stored_tables, table_names
from ._tensors import read_tensor
from ._vectors import IA3Weight, VeRAWeight
from ._weight import LoRAWeight


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
    kind = common_peft_type(adapted)
    entries, tensors, written_indices = _parameter_entries(model)
    parameters, tables = [*entries], table_names(model)
    kernels: dict[str, list[int]] = {}
    for site in adapted:
        if site.index in written_indices:
            continue
        if isinstance(site.node, LoRAKernel):
            name = kernel_name(model, site)
            _refuse_duplicate(site, name, entries)
            entries[name] = _config_entry(site.node, 1.0)
            tensors |= kernel_tensors(site, name)
            kernels[name] = [site.node.num_rows, site.node.num_columns]
            continue
        leaves, scales = _host_leaves(site)
        is_stack = kind == LORA and len(site.weight.shape) == 3 and site.node.start_a is None
        ranks = used_ranks(leaves["lora_a"], leaves["lora_b"]) if is_stack else None
        for layer, name in enumerate(layer_names(model, site)):
            _refuse_duplicate(site, name, entries)
            if scales is not None and scales[layer] == 0:
                continue
            entries[name] = _config_entry(site.node, 1.0 if scales is None else float(scales[layer]))
            if ranks is not None and ranks[layer] != site.node.rank:
                entries[name] = layer_entry(entries[name], ranks[layer])
            options = {"dora": entries[name].get("dora", False), "table": name in tables}
            for leaf, key in tensor_names(name, kind, **options).items():
                values = leaves[leaf]
                if stacked := len(site.weight.shape) - 2:  # number of leading axes: layers, and experts of each
                    values = values.reshape(-1, *values.shape[stacked:])[layer]
                values = values if ranks is None else remove_padding(values, leaf, ranks[layer])
                values = values.T if name in tables else values
                tensors[key] = np.ascontiguousarray(_reshape_for_peft(values, site.node))
    if kind == VERA:
        tensors |= _collect_projections(adapted)
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
            _check_keys(path, keys, expected | {*(VERA_TENSORS if config.kind == VERA and expected else ())})
            projections = _read_projections(file, path, config) if config.kind == VERA else ()
            nodes = {
                index: _read_node(file, path, by_index[index], names[index], mask, config, projections)
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
    if len(row_counts := {table.shape[0] for table in resized.values()}) > 1:
        raise ModelFileError(
            f"{path}: its embedding and its head have different numbers of rows",
            expected="the same number of rows",
            got=", ".join(map(str, sorted(row_counts))),
            hint="resize both in transformers (resize_token_embeddings), and save the adapter again",
        )
    if any(table.shape != by_index[index].weight.shape for index, table in resized.items()):
        base = base.with_vocabulary(next(iter(resized.values())).shape[0])
    return replace(base, nodes | resized)


def check(directory: str | os.PathLike[str]) -> None:
    """Check from the configuration of an adapter alone whether `load` supports it.

    Args:
        directory: the folder with `adapter_config.json`.

    Raises:
        ModelFileError: when it is damaged, or has an unsupported option, as in `load`.
    """
    read_config(Path(directory))


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


def _parameter_entries(model: Tree) -> tuple[dict[str, dict[str, Any]], dict[str, np.ndarray], set[int]]:
    """Return configuration entries, tensors and site indices of experts that are written as one parameter."""
    entries: dict[str, dict[str, Any]] = {}
    tensors: dict[str, np.ndarray] = {}
    indices: set[int] = set()
    for parameter in written_parameters(model):
        (site,) = parameter.sites
        leaves, _ = _host_leaves(site)
        entries |= dict.fromkeys(parameter.names, _config_entry(site.node, 1.0))
        tensors |= parameter_tensors(parameter, leaves["lora_a"], leaves["lora_b"])
        indices.add(site.index)
    return entries, tensors, indices


def _config_entry(node: Any, layer_scale: float) -> dict[str, Any]:
    """Return the entries of `adapter_config.json` for one layer of a node."""
    if isinstance(node, IA3Weight):
        return {"feedforward": node.feedforward}
    if isinstance(node, VeRAWeight):
        return {"rank": node.rank}
    if isinstance(node, LoRAKernel):
        return {"rank": node.rank, "alpha": node.alpha, "rslora": None, "dora": False}
    dora, rank, alpha = node.lora_magnitude is not None, node.rank, node.alpha
    if node.start_a is not None:  # twice the rank, at the same scale
        rank, alpha = 2 * rank, alpha * (2**0.5 if node.rslora else 2)
    return {"rank": rank, "alpha": alpha * layer_scale, "rslora": node.rslora, "dora": dora}


def _reshape_for_peft(values: np.ndarray, node: Any) -> np.ndarray:
    """Give a leaf of one layer the shape that PEFT uses."""
    return values.reshape((1, -1) if node.feedforward else (-1, 1)) if isinstance(node, IA3Weight) else values


def _collect_projections(adapted: Sequence[Site]) -> dict[str, np.ndarray]:
    """Return the shared projections, of which every VeRA node has the first rows and columns."""
    trees = [_host_leaves(site)[0] for site in adapted]
    parts = [[leaves[name].reshape(-1, *leaves[name].shape[-2:]) for leaves in trees] for name in ("vera_a", "vera_b")]
    projections = [max(site_parts, key=lambda part: part.size // len(part))[0] for site_parts in parts]
    for projection, site_parts in zip(projections, parts, strict=True):
        for site, part in zip(adapted, site_parts, strict=True):
            block = projection[: part.shape[1], : part.shape[2]]
            if block.shape != part.shape[1:] or not (part == block[None]).all():
                raise StructureError(
                    f"{site.path}: its projections differ from those of {adapted[0].path}",
                    expected="the same projections for all weights, from one call of lt.lora.add",
                    hint="merge some of the adapters with lt.lora.merge; PEFT's VeRA has one pair of projections",
                )
    return dict(zip(VERA_TENSORS, (np.ascontiguousarray(projection) for projection in projections), strict=True))


def _host_leaves(site: Site) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
    """Return an adapter's leaves by name, and the scales of its layers."""
    leaves = {name: getattr(site.node, name) for name in site.node.AXES if getattr(site.node, name) is not None}
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves.values()):
        raise StructureError(
            f"{site.path}: the adapter has shapes but no values",
            expected="arrays",
            got="jax.ShapeDtypeStruct",
            hint="save the adapter of a model with arrays, not with shapes",
        )
    if "start_a" in leaves:
        factors = zip(("lora_a", "lora_b"), site.node.factors(), strict=True)
        leaves = {name: leaf for name, leaf in leaves.items() if not name.startswith("start_")} | dict(factors)
    arrays = {name: np.asarray(leaf, np.float32) for name, leaf in leaves.items()}
    return arrays, arrays.get("layer_scale")


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
    projections: Sequence[np.ndarray],
) -> Any:
    """Read the node of a weight; layers that the directory does not adapt get zeros, and a scale of zero."""
    adapted_names = [name for name, is_adapted in zip(names, mask, strict=True) if is_adapted]
    if site.is_experts:
        check_expert_file(path, site, config, len(adapted_names), len(names))
    is_table = adapted_names[0] in config.tables
    out, inner = site.weight.shape[-2:]
    may_differ = config.kind == LORA and len(site.weight.shape) == 3
    may_differ = may_differ and config.file.init_lora_weights not in WEIGHT_INITS
    scales = stack_scales(names, mask, config) if may_differ else None
    fields = _uniform_fields(path, site, adapted_names, config) if scales is None else scales.node_fields
    shapes: dict[str, tuple[int, ...]] = {"lora_magnitude": (out,), "lora_lambda_b": (out,)}
    if config.kind == IA3:
        shapes["lora_scale"] = (1, inner) if fields["feedforward"] else (out, 1)
    else:
        rank = fields.pop("rank")
        shapes |= {"lora_a": (rank, inner), "lora_b": (out, rank), "lora_lambda_d": (rank,)}
    leaves: dict[str, Any] = {}
    for leaf in config.tensors(adapted_names[0]):
        shape = shapes[leaf][::-1] if is_table else shapes[leaf]
        keys = {name: config.tensors(name)[leaf] for name in adapted_names}
        if scales is None:
            tensors = {name: read_tensor(file, path, key, shape) for name, key in keys.items()}
        else:
            tensors = scales.read(file, path, keys, leaf, shape)
        if is_table:
            tensors = {name: values.T for name, values in tensors.items()}
        layer_values = [tensors[name] if name in tensors else np.zeros(shapes[leaf], np.float32) for name in names]
        flat_values = [values.reshape(-1) if config.kind == IA3 else values for values in layer_values]
        stack = np.stack(flat_values) if len(site.weight.shape) > 2 else flat_values[0]
        leaves[leaf] = jnp.asarray(
            stack.reshape(*site.weight.shape[:2], *stack.shape[1:]) if site.is_experts else stack
        )
    scale = None if all(mask) else jnp.asarray(mask, jnp.float32)
    if scales is not None and scales.layer_scales is not None:
        scale = jnp.asarray(scales.layer_scales, jnp.float32)
    kind = {LORA: LoRAWeight, IA3: IA3Weight, VERA: VeRAWeight}[config.kind]
    if config.kind == VERA:
        full_a, full_b = projections
        _check_projections(path, site, projections)
        layers = site.weight.shape[:-2]
        leaves["vera_a"] = jnp.broadcast_to(jnp.asarray(full_a[:, :inner]), (*layers, full_a.shape[0], inner))
        leaves["vera_b"] = jnp.broadcast_to(jnp.asarray(full_b[:out]), (*layers, out, full_b.shape[1]))
    node: Any = kind(site.weight, **leaves, layer_scale=scale, **fields)
    if config.kind == LORA and config.file.init_lora_weights in WEIGHT_INITS:
        node = _subtract_start(path, site, node, config.file.init_lora_weights)
    return shard_adapter(node)


def _subtract_start(path: Path, site: Site, node: LoRAWeight, init: str) -> LoRAWeight:
    """Subtract the part that PEFT subtracted from the weight, computed again from the weight."""
    if isinstance(site.weight, LinearWeight):
        raise ModelFileError(
            f"{path}: the part that {init} subtracted from {site.path} is unknown for a quantised weight",
            expected="the base as it was when the adapter was made",
            got=type(site.weight).__name__,
            hint="convert it in PEFT: save_pretrained(..., path_initial_model_for_weight_conversion=...)",
        )
    if node.rank > min(site.weight.shape[-2:]):
        raise ModelFileError(
            f"{path}: the part that {init} subtracted from {site.path} cannot be computed",
            expected=f"a rank of at most {min(site.weight.shape[-2:])}",
            got=f"rank {node.rank}",
            hint="load it into the model that it was made for",
        )
    if isinstance(site.weight, jax.ShapeDtypeStruct):
        like = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
                for name, leaf in (("start_a", node.lora_a), ("start_b", node.lora_b))}  # fmt: skip
        return dataclasses.replace(node, **like)
    start_a, start_b = principal_factors(site.weight, node.rank, node.scaling, init)
    if node.layer_scale is not None:
        start_a, start_b = (leaf * node.layer_scale[:, None, None] for leaf in (start_a, start_b))
    return dataclasses.replace(node, start_a=start_a, start_b=start_b)


def _uniform_fields(path: Path, site: Site, names: Sequence[str], config: PeftConfig) -> dict[str, Any]:
    """Return the configuration's values for a weight, which must be the same for all its layers."""
    if config.kind == VERA:
        return {"rank": config.file.r}
    if config.kind == IA3:
        flags = {config.is_feedforward(name) for name in names}
        if len(flags) > 1:
            raise ModelFileError(
                f"{path}: only some layers of {site.path} are feedforward modules",
                expected="all layers, or none",
                got=f"{len(names)} layers of both kinds",
                hint="name all of them in feedforward_modules, and train the adapter again",
            )
        return {"feedforward": flags.pop()}
    rank, alpha = config.scale_of(names, site.path)
    return {"rank": rank, "alpha": alpha, "rslora": bool(config.file.use_rslora)}


def _read_projections(file: Any, path: Path, config: PeftConfig) -> list[np.ndarray]:
    projections: list[np.ndarray] = []
    for key, axis in zip(VERA_TENSORS, (0, 1), strict=True):
        shape = tuple(file.get_slice(key).get_shape())
        expected_shape = [*shape] if len(shape) == 2 else [1, 1]
        expected_shape[axis] = config.file.r
        projections.append(read_tensor(file, path, key, tuple(expected_shape)))
    return projections


def _check_projections(path: Path, site: Site, projections: Sequence[np.ndarray]) -> None:
    out, inner = site.weight.shape[-2:]
    if projections[0].shape[1] < inner or projections[1].shape[0] < out:
        raise ModelFileError(
            f"{path}: the projections are too small for {site.path}",
            expected=f"at least {inner} columns of {VERA_TENSORS[0]} and {out} rows of {VERA_TENSORS[1]}",
            got=f"{list(projections[0].shape)} and {list(projections[1].shape)}",
            hint="load it into the model that it was made for",
        )


def _check_same_adapters(existing: Sequence[Site], nodes: Mapping[int, Any]) -> None:
    """Check that the model's own adapters are replaced by ones of the same kinds and ranks at the same places."""
    if not existing:
        return
    expected = {site.index: _describe(site.node) for site in existing}
    loaded = {index: _describe(node) for index, node in nodes.items()}
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


def _describe(node: Any) -> str:
    if isinstance(node, SavedWeight):
        return kind_of(node)
    if isinstance(node, IA3Weight):
        return f"(IA)³ on {'inputs' if node.feedforward else 'outputs'}"
    return f"{kind_of(node)} of rank {node.rank}"
