"""Adapters of kernels in files: PEFT's form where it has one, and otherwise the factors as they are.

A module ``m`` has the tensors ``base_model.model.m.lora_A.weight`` and ``….lora_B.weight``. For a kernel in PyTorch's
order, [out, in, *window], they are those of PEFT's convolutions, [r, in, *window] and [out, r, 1, ...]. For all other
kernels they are `LoRAKernel.lora_a` and `LoRAKernel.lora_b`, which no other library reads. The shape of a kernel does
not determine how many of its axes are rows and columns. Our key ``lowtide_kernels`` of the configuration records it. A
directory without that key was written by PEFT, and its kernels are convolutions.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...core import ExternalNames, ModelFileError, StructureError, Tree
from ._config import WEIGHT_INITS
from ._kernel import LoRAKernel, make_kernel
from ._peft import KERNELS, LORA, PeftConfig, tensor_names
from ._sites import Site, sites
from ._tensors import read_tensor


def kernel_name(model: Tree, site: Site) -> str:
    """Return the name of a kernel: its path with dots. With `ExternalNames` it raises `StructureError`."""
    if isinstance(model, ExternalNames):
        raise StructureError(
            f"{site.path}: PEFT's format cannot store the adapter of this kernel",
            expected="adapters of matrices, in a model with external names",
            got=f"a {type(site.node).__name__}{list(site.weight.shape)}",
            hint='merge it with lt.lora.merge, or store lt.partition(model, "**/lora_*")[0], as checkpoints do',
        )
    return site.module.replace("/", ".")


def kernel_tensors(site: Site, name: str) -> dict[str, np.ndarray]:
    """Return the tensors of a kernel's adapter, by the file's names."""
    node = site.node
    if isinstance(node.lora_a, jax.ShapeDtypeStruct):
        raise StructureError(
            f"{site.path}: the adapter has shapes but no values",
            expected="arrays",
            got="jax.ShapeDtypeStruct",
            hint="save the adapter of a model with arrays, not with shapes",
        )
    shapes = _shapes(tuple(node.shape), node.rank, node.num_rows, node.num_columns)
    keys = tensor_names(name, LORA)
    tensors = {leaf: np.asarray(getattr(node, leaf), np.float32).reshape(shapes[leaf]) for leaf in shapes}
    return {keys[leaf]: np.ascontiguousarray(values) for leaf, values in tensors.items()}


def adapted_kernels(model: Tree, config: PeftConfig, keys: set[str]) -> dict[int, tuple[str, int, int]]:
    """Return the kernels that a directory adapts: by `Site.index` the name, and the numbers of row and column axes."""
    axis_counts: Mapping[str, Any] = (config.file.lowtide_kernels or {}) if config.kind == LORA else {}
    kernels: dict[int, tuple[str, int, int]] = {}
    for site in () if isinstance(model, ExternalNames) or config.kind != LORA else sites(model):
        if not site.is_floating or len(site.weight.shape) < 2:
            continue
        name, ndim = site.module.replace("/", "."), len(site.weight.shape)
        if name in axis_counts and sum(axis_counts[name]) <= ndim:
            kernels[site.index] = (name, *axis_counts[name])
        elif (
            name not in axis_counts and ndim > 2 and config.targets(name) and tensor_names(name, LORA)["lora_a"] in keys
        ):
            kernels[site.index] = (name, 1, ndim - 1)
    if absent := sorted({*axis_counts} - {name for name, _, _ in kernels.values()}):
        raise ModelFileError(
            f"{config.source}: {KERNELS} names a kernel that the model lacks, or that has fewer axes there",
            expected="kernels of the model",
            got=f"{absent[0]!r}: {axis_counts[absent[0]]}",
            hint="load it into the model that it was made for",
        )
    if kernels and (config.dora or config.file.init_lora_weights in WEIGHT_INITS):
        raise ModelFileError(
            f"{config.source}: only plain LoRA is supported for a kernel",
            expected="use_dora = false, and initial values that are not a part of the weight",
            got=f"use_dora={config.dora}, init_lora_weights={config.file.init_lora_weights!r}",
            hint="merge this adapter with PEFT (merge_and_unload), or convert it to plain LoRA there",
        )
    return kernels


def read_kernel(file: Any, path: Path, site: Site, kernel: tuple[str, int, int], config: PeftConfig) -> LoRAKernel:
    """Read the node of a kernel that `adapted_kernels` found."""
    name, num_rows, num_columns = kernel
    if not isinstance(site.weight, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
        raise ModelFileError(
            f"{path}: {site.path} has a kernel adapter, but is quantised in this model",
            expected="an array of floating-point numbers",
            got=type(site.weight).__name__,
            hint="do not quantise it",
        )
    shape, rank = tuple(site.weight.shape), config.rank_of(name)
    shapes = _shapes(shape, rank, num_rows, num_columns)
    tensors = {leaf: read_tensor(file, path, tensor_names(name, LORA)[leaf], shapes[leaf]) for leaf in shapes}
    split = len(shape) - num_columns
    lora_a, lora_b = jnp.asarray(tensors["lora_a"]), jnp.asarray(tensors["lora_b"].reshape(*shape[:split], rank))
    alpha = config.alpha_of(name) * (rank**0.5 if config.file.use_rslora else 1)
    return make_kernel(site.weight, lora_a, lora_b, alpha, num_rows, num_columns)


def _shapes(shape: tuple[int, ...], rank: int, num_rows: int, num_columns: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors; in PEFT's form of a convolution, B ends with axes of length 1."""
    split = len(shape) - num_columns
    stack = split - num_rows
    ones = (1,) * (num_columns - 1) if stack == 0 and num_rows == 1 else ()
    return {"lora_a": (*shape[:stack], rank, *shape[split:]), "lora_b": (*shape[:split], rank, *ones)}
