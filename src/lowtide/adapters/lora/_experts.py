"""LoRA for the experts of an MoE, a pair of factors for each expert of each layer, and their format in PEFT's files.

The node is `LoRAWeight` with one more leading axis for the experts: W [L, E, out, in], A [L, E, r, in], B
[L, E, out, r]. The model sorts the rows of activations by expert. Its grouped product multiplies them by the factors as
by the weights, so W + B A is not materialised for any expert. For experts that are stored as [in, out], B multiplies
the inputs and A gives the outputs, as for other matrices in that layout.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...core import (
    ConfigError,
    LinearWeight,
    ModelFileError,
    StructureError,
    Tree,
    fill_layer,
    layer_indices,
    shortened,
    shown,
)
from ._kinds import AnyConfig
from ._lora import SUM_NAMES, VARIANTS, LoRAWeight, non_sum_kind
from ._node import Variants, shard_adapter
from ._peft import MERGE_HINT, MODEL_HINT, PREFIX, WEIGHT_INITS, AdapterKind, PeftConfig, TensorFile, host_leaves
from ._sites import EXPERT, Site, external_name, sites

# Other adapters are refused. DoRA would compute the norms of every expert in every product. No source defines (IA)³'s
# vectors or VeRA's projections for experts. As in PEFT, there is no dropout.


def check_experts(site: Site, config: AnyConfig) -> None:
    """Check experts as a target: they support only LoRA with random initial values, on all layers, unquantised."""
    init: Any = getattr(config, "init", None)
    kinds = (non_sum_kind(config), init if init in WEIGHT_INITS else "", "" if config.layers is None else "layers")
    if kind := next(filter(None, kinds), None):
        message = f"{site.path}: experts support only {SUM_NAMES}, on all layers, with random initial values"
        raise ConfigError(message, got=kind, hint=site.exclusion_hint)
    if isinstance(site.weight, LinearWeight):
        hint = "do not quantise the experts, or leave them out of the targets"
        raise StructureError(f"{site.path}: quantised experts do not support adapters", hint=hint)


def check_expert_file(path: Path, site: Site, config: PeftConfig, num_adapted: int, num_expected: int) -> None:
    """Check that a file's adapters of experts are LoRA of all experts of all layers, on unquantised weights."""
    kind = (config.variants.non_sums or "LoRA") if config.is_lora else config.kind.peft_type
    if (weight_init := getattr(config.file, "init_lora_weights", None)) in WEIGHT_INITS:  # of LoRA alone
        kind = str(weight_init)
    if kind != "LoRA" or num_adapted != num_expected or isinstance(site.weight, LinearWeight):
        message = f"{path}: {site.path} supports only LoRA of all {num_expected} experts, on unquantised weights"
        actual = f"{kind} of {num_adapted}, on a {type(site.weight).__name__}"
        raise ModelFileError(message, got=actual, hint="merge this adapter with the software that made it")


# Experts as one parameter (`target_parameters` in PEFT's files). Such a parameter holds all experts of a layer, as
# [E, out, in] or [E, in, out]. It may concatenate two weights of Lowtide along the outputs: ``gate_up_proj`` holds gate
# and up. PEFT wraps a module ``m`` once for each of its parameters that has an adapter, the first one innermost. With
# two, A of the first is ``m.base_layer.lora_A.weight``, and A of the second ``m.lora_A.weight``. A is [E r, in], expert
# by expert. B is [out, r E], where the index of the expert varies fastest (`ParamWrapper` of PEFT 0.21). An entry of
# the option matches a parameter whose name equals it, or ends with it after a dot. Patterns for ranks and alphas match
# this name, too. `layers_to_transform` and `exclude_modules` apply to modules only.
#
# The adapter of a parameter becomes one adapter for each of its weights, with the same A and a part of the rows of B.
# The values are exact, but there are two copies of A, which train separately.
#
# If older versions of Transformers have a module for each expert, files hold adapters of these modules. PEFT joins them
# into one adapter of the parameter: for gate and up, with the sum of their ranks. PEFT computes this sum from the
# common rank and alpha, and ignores `use_rslora`. `parameter_patterns` adds explicit entries, which PEFT reads first.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter of the external library that holds all experts of a layer, and the sites of its weights."""

    name: str
    """Its external name, with ``{layer}``."""
    sites: tuple[Site, ...]
    """Sites of its weights, in the order in which it concatenates their outputs."""
    is_transposed: bool
    """Whether the parameter and the weights at the sites store experts as [in, out]."""
    is_written: bool
    """Whether files hold adapters of the parameter, and not of modules for each expert."""
    wrappers: int = 0
    """Number of PEFT's wrappers around the wrapper of this parameter, each for another parameter of its module."""

    @property
    def names(self) -> list[str]:
        layers = layer_indices(self.name, self.sites[0].weight.shape[0])
        return [fill_layer(self.name, layer) for layer in layers or ()]

    @property
    def keys(self) -> list[tuple[str, str]]:
        """Names of the tensors A and B in files, one pair per layer."""
        prefix = "base_layer." * self.wrappers
        modules = [name.rpartition(".")[0] for name in self.names]
        return [(f"{PREFIX}{m}.{prefix}lora_A.weight", f"{PREFIX}{m}.{prefix}lora_B.weight") for m in modules]


def expert_parameters(model: Tree) -> list[Parameter]:
    """Return the parameters that a model declares in its attribute ``expert_parameters``, in the same order."""
    module_lists: Mapping[str, Sequence[str]] = getattr(model, "expert_parameters", {})
    by_module = {site.module: site for site in sites(model) if site.is_experts}
    parameters: list[Parameter] = []
    for name, modules in module_lists.items():
        if by_module.keys() >= {*modules}:
            parameter_sites = tuple(by_module[module] for module in modules)
            has_modules = EXPERT in (external_name(model, parameter_sites[0]) or "")
            is_transposed = not has_modules and not getattr(model, "out_first_experts", False)
            parameters.append(
                Parameter(name=name, sites=parameter_sites, is_transposed=is_transposed, is_written=not has_modules)
            )
    return parameters


def _set_wrappers(chosen: Sequence[Parameter]) -> list[Parameter]:
    """Set the number of wrappers around each parameter: one for each later parameter of the same module."""
    modules = [parameter.name.rpartition(".")[0] for parameter in chosen]
    return [
        dataclasses.replace(parameter, wrappers=modules[index + 1 :].count(modules[index]))
        for index, parameter in enumerate(chosen)
    ]


def written_parameters(model: Tree) -> list[Parameter]:
    """Return the adapted parameters that are written as `target_parameters`: their experts are not external modules."""
    return _set_wrappers([item for item in expert_parameters(model) if item.is_written and is_adapted(item)])


def parameter_entries(model: Tree, kind: AdapterKind) -> tuple[dict[str, Any], dict[str, np.ndarray], set[int]]:
    """Return, for experts that are written as one parameter: entries for `describe`, tensors by name, site indices."""
    entries: dict[str, Any] = {}
    tensors: dict[str, np.ndarray] = {}
    indices: set[int] = set()
    for parameter in written_parameters(model):
        (site,) = parameter.sites
        leaves, _ = host_leaves(site)
        entries |= dict.fromkeys(parameter.names, kind.entry(site.node, 1.0))
        stack_a, stack_b = leaves["lora_a"], leaves["lora_b"]
        if parameter.is_transposed:  # for experts stored as [in, out], PEFT's A is our Bᵀ, and PEFT's B is our Aᵀ
            stack_a, stack_b = stack_b.swapaxes(-1, -2), stack_a.swapaxes(-1, -2)
        for (key_a, key_b), a, b in zip(parameter.keys, stack_a, stack_b, strict=True):
            tensors[key_a] = np.ascontiguousarray(a.reshape(-1, a.shape[-1]))
            tensors[key_b] = np.ascontiguousarray(b.transpose(1, 2, 0).reshape(b.shape[1], -1))
        indices.add(site.index)
    return entries, tensors, indices


def parameter_patterns(model: Tree, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return ``rank_pattern`` and ``alpha_pattern`` with entries for parameters in which PEFT joins experts' modules.

    `config` holds the contents of `adapter_config.json` for modules. New entries come first. A parameter gets an entry
    only if PEFT would derive a wrong rank or alpha. The result is empty for kinds other than LoRA.
    """
    if "rank_pattern" not in config:
        return {}
    ranks: dict[str, Any] = {}
    alphas: dict[str, Any] = {}
    variants = Variants(variant for variant in VARIANTS if config[variant.option])
    for parameter in expert_parameters(model):
        if parameter.is_written or not is_adapted(parameter):
            continue
        check_scales(parameter)
        nodes: list[Any] = [site.node for site in parameter.sites]
        rank, num_weights = sum(node.rank for node in nodes), len(nodes)
        alpha = round(nodes[0].scaling * rank**variants.power, 12)
        # PEFT multiplies the common rank and alpha by the number of weights. Where that is right, no entry is needed.
        if (rank, alpha) != (config["r"] * num_weights, config["lora_alpha"] * num_weights):
            entry = ".".join(parameter.name.split(".")[-2:])
            ranks[entry], alphas[entry] = rank, alpha
    return {"rank_pattern": ranks | config["rank_pattern"], "alpha_pattern": alphas | config["alpha_pattern"]}


def check_scales(parameter: Parameter) -> None:
    """Check that the adapters of a parameter's weights, which PEFT joins into one, have the same scale."""
    scales = {site.path: site.node.scaling for site in parameter.sites}
    if not math.isclose(min(scales.values()), max(scales.values())):
        message = f"{', '.join(scales)}: PEFT reads these adapters as one adapter of {parameter.name}, with one scale"
        values = ", ".join(f"{scale:g}" for scale in scales.values())
        hint = "give them one rank and one alpha, or merge them with lt.lora.merge"
        raise StructureError(message, got=values, hint=hint)


def is_adapted(parameter: Parameter) -> bool:
    """Return whether all weights of a parameter have an adapter."""
    return all(isinstance(site.node, LoRAWeight) for site in parameter.sites)


def adapted_parameters(model: Tree, config: PeftConfig) -> list[Parameter]:
    """Return the parameters that `target_parameters` names, in all layers; `modules_to_save` must name none of them."""
    entries: Sequence[str] = config.file.target_parameters or () if config.is_lora else ()
    parameters = expert_parameters(model)
    all_names = [name for parameter in parameters for name in parameter.names]
    option = f"{config.source}: option 'target_parameters'"
    for entry in entries:
        if not any(config.matcher.selects([entry], name) for name in all_names):
            message = f"{option} names {shown(entry)}, which is not an expert parameter"
            known = shortened(", ".join(parameter.name for parameter in parameters))
            expected = known or "none: this model has no experts in one parameter"
            hint = f"{MODEL_HINT}; merge adapters of other parameters, such as routers, with PEFT"
            raise ModelFileError(message, expected=expected, hint=hint)
    chosen: list[Parameter] = []
    for parameter in parameters:
        mask = [config.matcher.selects(entries, name) for name in parameter.names]
        if not any(mask):
            continue
        if not all(mask):
            message = f"{option} names {parameter.name} of only {sum(mask)} of {len(mask)} layers"
            raise ModelFileError(message, hint=MERGE_HINT)
        if any(config.saves(name.rpartition(".")[0]) for name in parameter.names):
            message = f"{option} names {parameter.name}, and 'modules_to_save' names the same experts"
            raise ModelFileError(message, hint=MERGE_HINT)
        chosen.append(parameter)
    return _set_wrappers(chosen)


def read_parameter(file: TensorFile, parameter: Parameter, config: PeftConfig) -> dict[int, LoRAWeight]:
    """Read the nodes of a parameter's weights, by `Site.index`; all layers must have the same rank and alpha."""
    weights, names = [site.weight for site in parameter.sites], parameter.names
    shapes = [weight.shape[:1:-1] if parameter.is_transposed else weight.shape[2:] for weight in weights]
    num_experts, inner, outs = weights[0].shape[1], shapes[0][1], [out for out, _ in shapes]
    for site in parameter.sites:
        check_expert_file(file.path, site, config, num_experts * len(names), num_experts * len(names))
    rank, alpha = config.scale_of(names, parameter.sites[0].path)
    layers_a: list[np.ndarray] = []
    layers_b: list[np.ndarray] = []
    for key_a, key_b in parameter.keys:
        # PEFT's layouts: A [E r, in], expert by expert; B [out, r E], where the index of the expert varies fastest.
        layers_a.append(file.read(key_a, (num_experts * rank, inner)).reshape(num_experts, rank, inner))
        lora_b = file.read(key_b, (sum(outs), rank * num_experts))
        layers_b.append(lora_b.reshape(sum(outs), rank, num_experts).transpose(2, 0, 1))
    lora_a, lora_b = np.stack(layers_a), np.stack(layers_b)  # [L, E, r, in], [L, E, out, r]
    nodes: dict[int, LoRAWeight] = {}
    ends = np.cumsum([0, *outs])
    for site, start, end in zip(parameter.sites, ends[:-1], ends[1:], strict=True):
        a, b = lora_a, lora_b[:, :, start:end]
        if parameter.is_transposed:  # B multiplies the inputs, and A gives the outputs
            a, b = b.swapaxes(-1, -2), a.swapaxes(-1, -2)
        node = LoRAWeight(site.weight, jnp.array(a), jnp.array(b), alpha, **config.variants.static_fields)
        nodes[site.index] = shard_adapter(node)
    return nodes
