"""Places of weights in a tree: their names here and in other software, their selection, and their replacement."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ...core import (
    ConfigError,
    ExternalNames,
    LinearWeight,
    Pattern,
    SelectionError,
    StructureError,
    Tree,
    is_pattern,
    leaves_with_paths,
    match_names,
)
from ._adapter import REQUIRED_LEAVES, is_adapter
from ._config import ALL_LINEAR

LAYER, EXPERT = "{layer}", "{expert}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Site:
    """A place of a weight in a tree, with or without an adapter."""

    index: int
    """Position in the flattening order of `sites`."""
    path: str
    """Tree path of the weight."""
    node: Any
    """The node at this place: an array (or its shape), another `lowtide.core.LinearWeight`, or an adapter."""

    @property
    def module(self) -> str:
        """Path of the module that holds the weight; the weight's own path when it is not named ``weight``."""
        return self.path.removesuffix("/weight")

    @property
    def weight(self) -> Any:
        """The base weight."""
        return self.node.weight if is_adapter(self.node) else self.node

    @property
    def is_floating(self) -> bool:
        """Whether the base weight is an array of floating-point numbers."""
        dtype = getattr(self.weight, "dtype", None)
        return dtype is not None and jnp.issubdtype(dtype, jnp.floating)

    @property
    def is_experts(self) -> bool:
        """Whether the base weight has the axes of experts in an MoE, [num_layers, num_experts, out, in]."""
        return self.is_floating and len(self.weight.shape) == 4

    @property
    def is_matrix(self) -> bool:
        """Whether the base weight is one floating-point matrix, or a stack of them."""
        return self.is_floating and len(self.weight.shape) in (2, 3)


def sites(model: Tree) -> list[Site]:
    """Return a site for every leaf, in flattening order; an adapted weight is one site."""
    leaves = leaves_with_paths(model, is_leaf=is_weight)
    return [Site(index=index, path=path, node=node) for index, (path, node) in enumerate(leaves)]


def adapted_sites(model: Tree) -> list[Site]:
    """Return the sites that have an adapter; a missing leaf, as in one half of a partition, is an error."""
    adapted = [site for site in sites(model) if is_adapter(site.node)]
    for site in adapted:
        check_complete(site.path, site.node, REQUIRED_LEAVES[type(site.node)])
    return adapted


def check_complete(path: str, node: Any, required: Sequence[str]) -> None:
    """Raise if an adapter lacks one of the needed leaves, as one half of a partition does."""
    missing = [name for name in required if getattr(node, name) is None]
    if missing:
        raise StructureError(
            f"{path}: the adapter has no {' and no '.join(missing)}",
            expected=f"{', '.join(required[:-1])} and {required[-1]}" if required[1:] else required[0],
            got="one half of a partition",
            hint="combine the halves first: lt.combine(trainable, frozen)",
        )


def select_sites(
    model: Tree, targets: Pattern | Sequence[Pattern], exclude: Pattern | Sequence[Pattern] = ()
) -> list[Site]:
    """Return the sites whose module or own path matches the patterns; errors as in `lowtide.core.match_names`."""
    by_name: dict[str, list[Site]] = {}
    for site in sites(model):
        if is_adapter(site.node) or hasattr(site.node, "shape"):
            for name in {site.module, site.path}:
                by_name.setdefault(name, []).append(site)
    # Module paths come first, so that error messages list the names that a user would write.
    names = sorted(by_name, key=lambda name: not any(name == site.module != site.path for site in by_name[name]))
    selection: Any = targets
    selected_patterns: list[Any] = [selection] if is_pattern(selection) else [*selection]
    patterns = [pattern for pattern in selected_patterns if pattern != ALL_LINEAR]
    if len(patterns) < len(selected_patterns):
        patterns = [*_all_linear(model), *patterns]
    chosen = {site.index: site for name in match_names(names, patterns) for site in by_name[name]}
    if exclude:
        # Exclude by site, not by name: a site that was chosen by its own path may be excluded by its module's path.
        for name in match_names(names, exclude):
            for site in by_name[name]:
                chosen.pop(site.index, None)
        if not chosen:
            raise SelectionError(
                "the exclusions leave nothing selected", got=repr(exclude), hint="narrow the patterns of exclude"
            )
    return [chosen[index] for index in sorted(chosen)]


def _all_linear(model: Tree) -> list[str]:
    """Return the paths of all stacked matrices whose external name is one module in each layer."""
    paths: list[str] = []
    for site in sites(model) if isinstance(model, ExternalNames) else ():
        name = external_name(model, site)
        if site.is_matrix and len(site.weight.shape) == 3 and name is not None and name.count("{") == 1:
            paths.append(site.path)
    if not paths:
        raise ConfigError(
            f'targets: "{ALL_LINEAR}" needs a model that declares which weights are linear layers',
            expected="a decoder of Lowtide, or a model with stacked layers and an external_name",
            got=type(model).__name__,
            hint='select them with globs, for instance "**/*_proj"',
        )
    return paths


def replace(model: Tree, nodes: Mapping[int, Any]) -> Tree:
    """Replace the nodes at some sites of the model, keyed by `Site.index`."""
    leaves, treedef = jax.tree.flatten(model, is_leaf=is_weight)
    return treedef.unflatten([nodes.get(index, leaf) for index, leaf in enumerate(leaves)])


def external_name(model: Tree, site: Site) -> str | None:
    """Return the name of a module in other software, with ``{layer}`` where the weight is stacked, or None.

    Without `lowtide.core.ExternalNames` it is the tree path with dots. The index of a layer then follows the first
    segment ``layers``, or comes last.
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
    """Return the names of `external_name`, one for each layer of a stacked weight, and for each expert of a layer.

    Raises `StructureError` without such a name, and if name and shape disagree on whether there are layers.
    """
    name = external_name(model, site)
    shape = tuple(site.weight.shape)
    if site.is_experts:
        if name is None or LAYER not in name or EXPERT not in name:
            raise StructureError(
                f"{site.path}: the external name has no module for each of these experts",
                expected=f"a name with {LAYER} and {EXPERT}",
                got=repr(name),
                hint="merge the adapters with lt.lora.merge",
            )
        indices = itertools.product(range(shape[0]), range(shape[1]))
        return [name.replace(LAYER, str(layer)).replace(EXPERT, str(expert)) for layer, expert in indices]
    if name is None:
        raise StructureError(
            f"{site.path}: the model has no external name for {site.module!r}",
            expected="a module that the model's external_name supports",
            hint="target another module, or extend external_name",
        )
    if (LAYER in name) != (len(shape) == 3):
        raise StructureError(
            f"{site.path}: the name {name!r} does not fit a weight of shape {shape}",
            expected=f"{LAYER} in the name exactly when the weight is stacked [num_layers, out, in]",
            got=f"shape {shape}",
            hint="leave out vectors of stacked layers (norms, biases) [num_layers, dim], which support no adapter",
        )
    return [name.replace(LAYER, str(layer)) for layer in range(shape[0])] if LAYER in name else [name]


def is_weight(node: Any) -> bool:
    """Return whether a node stands for one weight.

    A `LinearWeight` must also have a shape and a dtype, because a user's module may have a field named ``linear``.
    """
    return is_adapter(node) or (isinstance(node, LinearWeight) and hasattr(node, "shape") and hasattr(node, "dtype"))
