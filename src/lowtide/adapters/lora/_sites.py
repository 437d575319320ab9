"""Where adapters can stand in a tree, what those places are called, and how one is put there."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ...core import ExternalNames, LinearWeight, StructureError, Tree, leaves_with_paths, match_names
from ._weight import LoRAWeight

LAYER = "{layer}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Site:
    """A place that holds a weight, with or without an adapter."""

    index: int
    """Position in the flattening order of `sites`."""
    path: str
    """Tree path of the weight."""
    node: Any
    """What stands there: an array (or its shape), or a `LoRAWeight`."""

    @property
    def module(self) -> str:
        """Path of the module that holds the weight; the weight's own path when it is not named ``weight``."""
        return self.path.removesuffix("/weight")

    @property
    def weight(self) -> Any:
        """The base weight."""
        return self.node.weight if isinstance(self.node, LoRAWeight) else self.node

    @property
    def is_matrix(self) -> bool:
        """Whether the base weight is one floating-point matrix, or a stack of them."""
        dtype = getattr(self.weight, "dtype", None)
        floating = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
        return floating and len(self.weight.shape) in (2, 3)


def sites(model: Tree) -> list[Site]:
    """Every leaf, and every adapted weight as one, in flattening order."""
    leaves = leaves_with_paths(model, is_leaf=_is_adapted)
    return [Site(index=index, path=path, node=node) for index, (path, node) in enumerate(leaves)]


def adapted_sites(model: Tree) -> list[Site]:
    """Return the sites that carry an adapter, all three leaves present.

    Raises:
        StructureError: when a leaf is missing, as in one half of a partition.
    """
    adapted = [site for site in sites(model) if isinstance(site.node, LoRAWeight)]
    for site in adapted:
        missing = [name for name in ("weight", "lora_a", "lora_b") if getattr(site.node, name) is None]
        if missing:
            raise StructureError(
                f"{site.path}: the adapter has no {' and no '.join(missing)}",
                expected="weight, lora_a and lora_b",
                got="one half of a partition",
                hint="put the halves together first: lt.combine(trainable, frozen)",
            )
    return adapted


def select_sites(model: Tree, targets: str | Sequence[str]) -> list[Site]:
    """Select the sites whose module or own path the patterns match; errors as in `lowtide.core.match_names`."""
    by_name: dict[str, list[Site]] = {}
    for site in sites(model):
        if isinstance(site.node, LoRAWeight) or hasattr(site.node, "shape"):
            for name in {site.module, site.path}:
                by_name.setdefault(name, []).append(site)
    # Modules come first, so that a message about what there is shows the names one would write.
    names = sorted(by_name, key=lambda name: not any(name == site.module != site.path for site in by_name[name]))
    chosen = {site.index: site for name in match_names(names, targets) for site in by_name[name]}
    return [chosen[index] for index in sorted(chosen)]


def replace(model: Tree, nodes: Mapping[int, Any]) -> Tree:
    """Put other nodes at some sites of the model, keyed by `Site.index`."""
    leaves, treedef = jax.tree.flatten(model, is_leaf=_is_adapted)
    return treedef.unflatten([nodes.get(index, leaf) for index, leaf in enumerate(leaves)])


def external_name(model: Tree, site: Site) -> str | None:
    """Name a module as other software does, with ``{layer}`` where the weight is stacked; None when it has no name.

    A model that implements `lowtide.core.ExternalNames` decides. Otherwise it is the tree path with dots, the index
    of a layer after the first segment ``layers``, or at the end.
    """
    if isinstance(model, ExternalNames):
        try:
            return model.external_name(site.module)
        except KeyError:
            return None
    segments = site.module.split("/")
    if len(site.weight.shape) == 3:
        segments.insert(segments.index("layers") + 1 if "layers" in segments else len(segments), LAYER)
    return ".".join(segments)


def layer_names(model: Tree, site: Site) -> list[str]:
    """Return the names of `external_name`, one for each layer of a stacked weight.

    Raises:
        StructureError: when the name and the weight's shape disagree on whether there are layers.
    """
    name = external_name(model, site)
    shape = tuple(site.weight.shape)
    if name is None:
        raise StructureError(
            f"{site.path}: the model has no external name for {site.module!r}",
            expected="a module that the model's external_name knows",
            hint="target another module, or extend external_name",
        )
    if (LAYER in name) != (len(shape) == 3):
        raise StructureError(
            f"{site.path}: the name {name!r} does not fit a weight of shape {shape}",
            expected=f"{LAYER} in the name exactly when the weight is stacked [num_layers, out, in]",
            got=f"shape {shape}",
            hint="vectors of stacked layers (norms, biases) are [num_layers, dim] and take no adapter",
        )
    return [name.replace(LAYER, str(layer)) for layer in range(shape[0])] if LAYER in name else [name]


def _is_adapted(node: Any) -> bool:
    return isinstance(node, LinearWeight)  # a quantised weight is one, too, and no place for three adapters
