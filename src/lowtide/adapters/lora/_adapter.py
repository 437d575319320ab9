"""The kinds of adapter nodes, and functions that take any of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeGuard

import jax
import jax.core

from ...core import put
from ._kernel import LoRAKernel
from ._saved import SavedWeight
from ._vectors import IA3Weight, VeRAWeight
from ._weight import LoRAWeight

Adapter = LoRAWeight | LoRAKernel | IA3Weight | VeRAWeight | SavedWeight
KINDS: Mapping[type, str] = {
    LoRAWeight: "LoRA",
    LoRAKernel: "LoRA of a kernel",
    IA3Weight: "(IA)³",
    VeRAWeight: "VeRA",
    SavedWeight: "trained whole",
}

TRAINABLE = "**/lora_*"
"""A glob that selects the trainable leaves of every kind of adapter, and nothing else."""

REQUIRED_LEAVES: Mapping[type, tuple[str, ...]] = {
    LoRAWeight: ("weight", "lora_a", "lora_b"),
    LoRAKernel: ("weight", "lora_a", "lora_b"),
    IA3Weight: ("weight", "lora_scale"),
    VeRAWeight: ("weight", "vera_a", "vera_b", "lora_lambda_d", "lora_lambda_b"),
    SavedWeight: ("weight", "lora_saved"),
}
"""Leaves of a complete node, by kind. One half of a partition lacks some of them."""


def is_adapter(node: Any) -> TypeGuard[Adapter]:
    """Return whether a node is a weight with an adapter."""
    return isinstance(node, (LoRAWeight, LoRAKernel, IA3Weight, VeRAWeight, SavedWeight))


def kind_of(node: Adapter) -> str:
    """Return the name of an adapter's kind, as its authors write it."""
    if isinstance(node, LoRAWeight):
        stabilised = "rsLoRA" if node.rslora else "LoRA"
        return stabilised if node.lora_magnitude is None else f"{stabilised} with DoRA" if node.rslora else "DoRA"
    return KINDS[type(node)]


def shard_adapter(node: Any) -> Any:
    """Shard the leaves of an adapter like its weight, along the axes they share."""
    sharding = named_sharding(node.weight)
    if sharding is None or isinstance(node, (LoRAKernel, SavedWeight)):  # these are placed when they are made
        return node
    *layers, out, inner = (*sharding.spec, *(None,) * (len(node.weight.shape) - len(sharding.spec)))
    mesh_axes = {"out": out, "in": inner, "rank": None}
    sharded: dict[str, Any] = {}
    for name, axes in node.AXES.items():
        leaf = getattr(node, name)
        if leaf is not None:
            sharded[name] = _shard_leaf(
                leaf, jax.sharding.NamedSharding(sharding.mesh, jax.P(*layers, *(mesh_axes[axis] for axis in axes)))
            )
    return dataclasses.replace(node, **sharded)


def named_sharding(weight: Any) -> jax.sharding.NamedSharding | None:
    """Return the `NamedSharding` of an array, or None where it has none."""
    sharding = None if isinstance(weight, jax.core.Tracer) else getattr(weight, "sharding", None)
    return sharding if isinstance(sharding, jax.sharding.NamedSharding) else None


def _shard_leaf(leaf: Any, sharding: jax.sharding.NamedSharding) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return put(leaf, sharding)
