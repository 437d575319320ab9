"""Experts that are one parameter in PEFT's files: `target_parameters`.

Such a parameter holds all experts of a layer, as [E, out, in] or [E, in, out]. Often it holds two of our weights, one
after the other along the outputs: ``gate_up_proj`` is gate and up. PEFT wraps its module ``m`` once for each of its
parameters that has an adapter, the first one innermost. With two, the tensors of the first are
``m.base_layer.lora_A.weight`` and those of the second ``m.lora_A.weight``. A is [E r, in], expert by expert. B is
[out, r E]: for each of the r columns, those of all experts side by side (`ParamWrapper` of PEFT 0.21). An entry matches
a parameter whose name it equals, or ends after a dot. Patterns for ranks and alphas match that name, too.
`layers_to_transform` and `exclude_modules` apply to modules only.

The adapter of a parameter becomes one adapter for each of its weights, with the same A and a part of the rows of B. The
values are exact, but there are two copies of A, which train separately.

Where older versions of Transformers have modules for experts, adapters are written for those. PEFT joins them into one
adapter of the parameter: for gate and up, with the sum of their ranks. It derives that sum from the common rank and
alpha only, and ignores rank-stabilised scales. `patterns` therefore adds explicit entries, which PEFT reads first.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...core import ModelFileError, StructureError, Tree, shortened, shown
from ._adapter import placed
from ._experts import check_file_of_experts
from ._peft import PeftConfig
from ._sites import EXPERT, LAYER, Site, external_name, sites
from ._tensors import read_tensor
from ._weight import LoRAWeight

_PREFIX = "base_model.model."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter that holds all experts of a layer, and the weights here that it corresponds to."""

    name: str
    """Its name in other software, with ``{layer}``."""
    sites: tuple[Site, ...]
    """Sites of its weights, whose outputs it holds one after the other."""
    transposed: bool
    """Whether experts are stored as [in, out], there and here."""
    wrappers: int = 0
    """Number of wrappers of other parameters around its own."""

    @property
    def names(self) -> list[str]:
        """Its names, one per layer."""
        return [self.name.replace(LAYER, str(layer)) for layer in range(self.sites[0].weight.shape[0])]

    @property
    def keys(self) -> list[tuple[str, str]]:
        """The file's names of A and B, one pair per layer."""
        inside = "base_layer." * self.wrappers
        modules = [name.rpartition(".")[0] for name in self.names]
        return [(f"{_PREFIX}{m}.{inside}lora_A.weight", f"{_PREFIX}{m}.{inside}lora_B.weight") for m in modules]

    def sizes(self) -> tuple[int, int, list[int]]:
        """Return the number of experts, the width of their inputs, and the width of the outputs of each weight."""
        shapes = [site.weight.shape[:1:-1] if self.transposed else site.weight.shape[2:] for site in self.sites]
        return self.sites[0].weight.shape[1], shapes[0][1], [out for out, _ in shapes]


def expert_parameters(model: Tree) -> list[Parameter]:
    """List the experts that are one parameter elsewhere, from the model's ``expert_parameters``, in its order."""
    told: Mapping[str, Sequence[str]] = getattr(model, "expert_parameters", {})
    if not told:
        return []
    by_module = {site.module: site for site in sites(model) if site.is_experts}
    found: list[Parameter] = []
    for name, modules in told.items():
        if all(module in by_module for module in modules):
            held = tuple(by_module[module] for module in modules)
            has_modules = EXPERT in (external_name(model, held[0]) or "")
            found.append(Parameter(name=name, sites=held, transposed=not has_modules))
    return found


def nested(chosen: Sequence[Parameter]) -> list[Parameter]:
    """Set the number of wrappers around each parameter: one for each later parameter of the same module."""
    modules = [each.name.rpartition(".")[0] for each in chosen]
    return [
        dataclasses.replace(each, wrappers=modules[number + 1 :].count(modules[number]))
        for number, each in enumerate(chosen)
    ]


def written(model: Tree) -> list[Parameter]:
    """List the adapted parameters that are written as `target_parameters`: their experts are not modules elsewhere."""
    return nested([each for each in expert_parameters(model) if each.transposed and is_adapted(each)])


def parameter_tensors(parameter: Parameter, lora_a: np.ndarray, lora_b: np.ndarray) -> dict[str, np.ndarray]:
    """Return the adapter's tensors of a parameter that is one weight here, by the file's names.

    Args:
        parameter: from `written`.
        lora_a: the node's A, [L, E, r, in], or of transposed experts [L, E, r, out].
        lora_b: the node's B, [L, E, out, r], or of transposed experts [L, E, in, r].
    """
    if parameter.transposed:
        lora_a, lora_b = lora_b.swapaxes(-1, -2), lora_a.swapaxes(-1, -2)
    tensors: dict[str, np.ndarray] = {}
    for (key_a, key_b), a, b in zip(parameter.keys, lora_a, lora_b, strict=True):
        tensors[key_a] = np.ascontiguousarray(a.reshape(-1, a.shape[-1]))
        tensors[key_b] = np.ascontiguousarray(b.transpose(1, 2, 0).reshape(b.shape[1], -1))
    return tensors


def patterns(model: Tree, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the patterns of a configuration, with entries for parameters that PEFT makes of experts' modules.

    Args:
        model: the model with adapters.
        config: the contents of `adapter_config.json` for modules.

    Returns:
        ``rank_pattern`` and ``alpha_pattern``. New entries come first, and only where PEFT would derive another rank or
        alpha. Empty for kinds other than LoRA.
    """
    if "rank_pattern" not in config:
        return {}
    ranks: dict[str, Any] = {}
    alphas: dict[str, Any] = {}
    for each in expert_parameters(model):
        if each.transposed or not is_adapted(each):
            continue
        check_scales(each)
        nodes: list[Any] = [site.node for site in each.sites]
        rank, number = sum(node.rank for node in nodes), len(nodes)
        alpha = round(nodes[0].scaling * (math.sqrt(rank) if config["use_rslora"] else rank), 12)
        # PEFT multiplies the common rank and alpha by the number of weights. Where that is right, no entry is needed.
        if (rank, alpha) != (config["r"] * number, config["lora_alpha"] * number):
            entry = ".".join(each.name.split(".")[-2:])
            ranks[entry], alphas[entry] = rank, alpha
    return {
        "rank_pattern": {**ranks, **config["rank_pattern"]},
        "alpha_pattern": {**alphas, **config["alpha_pattern"]},
    }


def check_scales(parameter: Parameter) -> None:
    """Check that adapters which PEFT joins into one have the same scale.

    Raises:
        StructureError: when their scales differ.
    """
    scales = {site.path: site.node.scaling for site in parameter.sites}
    if not math.isclose(min(scales.values()), max(scales.values())):
        raise StructureError(
            f"{', '.join(scales)}: PEFT reads these adapters as one of {parameter.name}, of one scale",
            expected="the same alpha / rank for all of them",
            got=", ".join(f"{scale:g}" for scale in scales.values()),
            hint="give them one rank and one alpha, or fold them in with lt.lora.merge",
        )


def is_adapted(parameter: Parameter) -> bool:
    """Return whether all weights of a parameter have an adapter."""
    return all(isinstance(site.node, LoRAWeight) for site in parameter.sites)


def parameters_in(model: Tree, config: PeftConfig) -> list[Parameter]:
    """Return the parameters that a directory adapts.

    Args:
        model: the model.
        config: the directory's configuration.

    Raises:
        ModelFileError: for a name that is not a parameter of experts here, for some layers only, and where the experts
            also train as a whole.
    """
    named = config.target_parameters
    if not named:
        return []
    there = expert_parameters(model)
    layers = {each.name: each.names for each in there}
    every = [name for names in layers.values() for name in names]
    for entry in named:
        if not any(_is(name, entry) for name in every):
            raise ModelFileError(
                f"{config.where}: option 'target_parameters' names {shown(entry)}, no parameter of experts here",
                expected=shortened(", ".join(layers)) or "none: this model has no experts that are one parameter",
                got=shortened(f"target_parameters = {shown(list(named))}"),
                hint="load it into the model that it was made for; adapters of other parameters, such as routers, are "
                "read by PEFT alone: merge it there",
            )
    chosen: list[Parameter] = []
    for each in there:
        on = [any(_is(name, entry) for entry in named) for name in layers[each.name]]
        if not any(on):
            continue
        if not all(on):
            raise ModelFileError(
                f"{config.where}: option 'target_parameters' names {each.name} of some layers and not of others",
                expected=f"all {len(on)} layers, as with {'.'.join(each.name.split('.')[-2:])!r}",
                got=f"{sum(on)} of {len(on)}",
                hint="merge this adapter with PEFT (merge_and_unload)",
            )
        if any(config.saves(name.rpartition(".")[0]) for name in layers[each.name]):
            raise ModelFileError(
                f"{config.where}: option 'modules_to_save' names the experts that target_parameters adapts",
                expected="experts with an adapter, or experts that train as a whole",
                got=f"{each.name} in both",
                hint="merge this adapter with PEFT (merge_and_unload)",
            )
        chosen.append(each)
    return nested(chosen)


def read_parameter(file: Any, path: Path, parameter: Parameter, config: PeftConfig) -> dict[int, LoRAWeight]:
    """Read the nodes of a parameter's weights, by `Site.index`.

    Args:
        file: an open safetensors file.
        path: the file's path, for messages.
        parameter: from `parameters_in`.
        config: the directory's configuration.

    Raises:
        ModelFileError: for an adapter other than LoRA, for ranks or alphas that differ between layers, and for tensors
            that do not fit.
    """
    num_experts, inner, outs = parameter.sizes()
    names = parameter.names
    for site in parameter.sites:
        check_file_of_experts(path, site, config, num_experts * len(names), num_experts * len(names))
    rank, alpha = config.scale_of(names, parameter.sites[0].path)
    of_a: list[np.ndarray] = []
    of_b: list[np.ndarray] = []
    for key_a, key_b in parameter.keys:
        # PEFT's layouts: A [E r, in], expert by expert; B [out, r E], where the index of the expert varies fastest.
        lora_a = read_tensor(file, path, key_a, (num_experts * rank, inner))
        lora_b = read_tensor(file, path, key_b, (sum(outs), rank * num_experts))
        of_a.append(lora_a.reshape(num_experts, rank, inner))
        of_b.append(lora_b.reshape(sum(outs), rank, num_experts).transpose(2, 0, 1))
    lora_a, lora_b = np.stack(of_a), np.stack(of_b)  # [L, E, r, in], [L, E, out, r]
    nodes: dict[int, LoRAWeight] = {}
    ends = np.cumsum([0, *outs])
    for site, start, end in zip(parameter.sites, ends[:-1], ends[1:], strict=True):
        a, b = lora_a, lora_b[:, :, start:end]
        if parameter.transposed:  # here B reads the inputs, and A writes the outputs
            a, b = b.swapaxes(-1, -2), a.swapaxes(-1, -2)
        said: dict[str, Any] = {"alpha": alpha, "rslora": bool(config.file.use_rslora)}
        nodes[site.index] = placed(LoRAWeight(site.weight, jnp.array(a), jnp.array(b), **said))
    return nodes


def _is(name: str, entry: str) -> bool:
    return name == entry or name.endswith(f".{entry}")
