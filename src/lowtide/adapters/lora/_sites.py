"""Sites, the places of weights in a tree: their names, their selection by a configuration, and their replacement.

External names are those in another library, such as Transformers (`lowtide.core.ExternalNames`).
"""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ...core import (
    ConfigError,
    ExternalNames,
    Pattern,
    SelectionError,
    StructureError,
    Tree,
    check_integer,
    fill_layer,
    is_count,
    is_pattern,
    layer_indices,
    layer_slot,
    leaves_with_paths,
    match_names,
    shown,
)
from .._adapted import is_weight
from ._node import is_adapter

EXPERT = "{expert}"
_ALL_LINEAR = "all-linear"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Site:
    """A place of a weight in a tree, with or without an adapter."""

    index: int
    """Position in the result of `sites`."""
    path: str
    """Tree path of the weight."""
    node: Any
    """The node at this place: an array (or its shape), another `lowtide.core.LinearWeight`, or an adapter."""
    stride: tuple[int, int] = (1, 0)
    """For a stack of every n-th layer: n, and the index of its first layer."""

    @property
    def module(self) -> str:
        """Path of the module that holds the weight; the weight's own path when it is not named ``weight``."""
        return self.path.removesuffix("/weight")

    @property
    def names(self) -> tuple[str, str]:
        """The paths that patterns match: the path of the module, and the path of the weight."""
        return self.module, self.path

    @property
    def exclusion_hint(self) -> str:
        """Hint for errors that refuse this site as a target: the pattern that excludes it."""
        return f'leave it out of the targets, for instance with the pattern "!{self.module}"'

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
        # A depthwise convolution [num_layers, channels, 1, taps] has as many axes.
        return self.is_floating and len(self.weight.shape) == 4 and self.weight.shape[-2] > 1

    @property
    def layers(self) -> range:
        """Indices of the layers in a stacked weight."""
        stride, offset = self.stride
        return range(offset, offset + stride * self.weight.shape[0], stride)

    @property
    def is_matrix(self) -> bool:
        """Whether the base weight is one floating-point matrix, or a stack of them."""
        return self.is_floating and len(self.weight.shape) in (2, 3)

    def random_key(self, key: Any) -> Array:
        # The key depends on the path only, so that values stay the same when other targets are added. Python's `hash`
        # of a text differs between processes.
        return jax.random.fold_in(key, zlib.crc32(self.path.encode()))


def sites(model: Tree) -> list[Site]:
    """Return a site for every leaf, in flattening order; an adapted weight is one site."""
    leaves = leaves_with_paths(model, is_leaf=is_weight)
    strides: Mapping[str, tuple[int, int]] = getattr(model, "layer_strides", {})
    return [
        Site(index=index, path=path, node=node, stride=_stride(path, strides))
        for index, (path, node) in enumerate(leaves)
    ]


def _stride(path: str, strides: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    first, _, rest = path.partition("/")
    return strides.get(f"{first}/{rest.partition('/')[0]}") or strides.get(first) or (1, 0)


def adapted_sites(model: Tree) -> list[Site]:
    """Return the sites that have an adapter; raise if an adapter lacks a leaf, as after `lowtide.partition`."""
    adapted = [site for site in sites(model) if is_adapter(site.node)]
    for site in adapted:
        check_complete(site.path, site.node, site.node.REQUIRED_LEAVES)
    return adapted


def check_complete(path: str, node: Any, required: Sequence[str]) -> None:
    """Raise if an adapter lacks one of the `required` leaves, as after `lowtide.partition`."""
    if missing := [name for name in required if getattr(node, name) is None]:
        hint = "combine the halves of a partition first: lt.combine(trainable, frozen)"
        raise StructureError(f"{path}: the adapter has no {' and no '.join(missing)}", hint=hint)


def require_adapters(adapted: Sequence[Site], purpose: str, hint: str) -> None:
    """Raise if a model has no adapter; the message says "no adapter to" and then `purpose`, such as "merge"."""
    if not adapted:
        raise StructureError(f"the model has no adapter to {purpose}", hint=hint)


def replace(model: Tree, nodes: Mapping[int, Any]) -> Tree:
    """Return the model with other nodes at some sites; the keys of `nodes` are `Site.index`."""
    leaves, treedef = jax.tree.flatten(model, is_leaf=is_weight)
    return treedef.unflatten([nodes.get(index, leaf) for index, leaf in enumerate(leaves)])


def normalize_fields(config: Any) -> None:
    """Check the fields that all configurations have, and make them hashable."""
    for name in ("modules_to_save", "targets", "exclude"):
        object.__setattr__(config, name, to_patterns(name, getattr(config, name), may_be_empty=name != "targets"))
    if (layers := config.layers) is None:
        return
    indices = tuple(layers) if isinstance(layers, Sequence) and not isinstance(layers, str) else ()
    if not indices or not all(is_count(layer, 0) for layer in indices):
        hint = "pass for instance layers=range(8, 16), or None for all layers"
        raise ConfigError(f"layers must be one or more indices counted from 0, not {shown(layers)}", hint=hint)
    object.__setattr__(config, "layers", tuple(sorted({int(layer) for layer in indices})))


def to_patterns(name: str, value: Any, *, may_be_empty: bool = False) -> Any:
    """Check one pattern or several; return a text unchanged, and anything else as a tuple."""
    patterns: Any = value if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (value,)
    is_allowed = may_be_empty and patterns == ()
    if not is_allowed and (not patterns or not all(is_pattern(pattern) and pattern for pattern in patterns)):
        message = f"{name} must be at least one glob or compiled regular expression, not {shown(value)}"
        raise ConfigError(message, hint='pass for instance "**/{q,v}_proj", or "**/*_proj" for every projection')
    return patterns


def check_rank(rank: Any, name: str) -> None:
    check_integer(name, rank, hint="use for instance 8, 16 or 64; to train no adapter, do not add one")


def match_field(field: str, names: Sequence[str], patterns: Any) -> list[str]:
    """Return the names that the patterns of a configuration's field select; an error names the field."""
    try:
        return match_names(names, patterns)
    except SelectionError as error:
        message = f"{field}: {error.message}"
        raise SelectionError(message, expected=error.expected, got=error.got, hint=error.hint) from error


def select_sites(model: Tree, targets: Pattern | Sequence[Pattern], exclude: Pattern | Sequence[Pattern]) -> list[Site]:
    """Return the sites whose weight or module path matches `targets` but not `exclude`; raise as `match_names` does."""
    by_name: dict[str, list[Site]] = {}
    for site in sites(model):
        if is_adapter(site.node) or hasattr(site.node, "shape"):
            for name in {site.module, site.path}:
                by_name.setdefault(name, []).append(site)
    # Module paths come first, so that error messages list the names that a user would write.
    names = sorted(by_name, key=lambda name: not any(name == site.module != site.path for site in by_name[name]))
    selection: Any = targets
    patterns: list[Any] = [selection] if is_pattern(selection) else [*selection]
    if _ALL_LINEAR in patterns:
        patterns = [*_all_linear(model), *(pattern for pattern in patterns if pattern != _ALL_LINEAR)]
    chosen = {site.index: site for name in match_names(names, patterns) for site in by_name[name]}
    # Exclude by site, not by name: a site that was chosen by its own path may be excluded by its module's path.
    for name in match_names(names, exclude) if exclude else ():
        for site in by_name[name]:
            chosen.pop(site.index, None)
    if not chosen:
        raise SelectionError(f"exclude leaves no target: {shown(exclude)}", hint="narrow the patterns of exclude")
    return [chosen[index] for index in sorted(chosen)]


def _all_linear(model: Tree) -> list[str]:
    """Return the paths of all stacked matrices that are one module per layer in the external library."""
    paths: list[str] = []
    for site in sites(model) if isinstance(model, ExternalNames) else ():
        name = external_name(model, site)
        is_layer = len(site.weight.shape) == 3 or "/layers/" in site.path
        if site.is_matrix and is_layer and name is not None and name.count("{") == len(site.weight.shape) - 2:
            paths.append(site.path)
    if not paths:
        message = f'targets: "{_ALL_LINEAR}" needs a model that declares its linear layers with external_name'
        hint = 'select them with globs, for instance "**/*_proj"'
        raise ConfigError(f"{message}, not a {type(model).__name__}", hint=hint)
    return paths


def select_layers(chosen: Sequence[Site], layers: Sequence[int] | None) -> list[Site]:
    """Remove unstacked weights of layers outside of `layers`, and check that all of `layers` exist."""
    if layers is None:
        return list(chosen)
    is_stack = {site.index: len(site.weight.shape) == 3 for site in chosen}
    selected = [
        site
        for site in chosen
        if (not {*layers}.isdisjoint(site.layers) if is_stack[site.index] else _layer_index(site) in layers)
    ]
    stacks = [site.layers for site in chosen if len(site.weight.shape) == 3]
    existing = {index for stack in stacks for index in stack} | {_layer_index(site) for site in selected}
    if absent := [layer for layer in layers if layer not in existing]:
        indices = sorted({index for stack in stacks for index in stack})
        hint = "use the indices in paths such as layers/3/q_proj"
        if stacks:
            is_whole = indices == [*range(len(indices))]
            hint = f"use indices below {len(indices)}" if is_whole else f"the targets are in layers {shown(indices)}"
        raise ConfigError(f"layers: {absent[0]} is not a layer of the targets", hint=hint)
    return selected


def _layer_index(site: Site) -> int | None:
    """Return the first number in a path, which is the index of a layer."""
    return next((int(part) for part in site.path.split("/") if part.isdecimal()), None)


def layer_scale(site: Site, layers: Sequence[int] | None) -> Any:
    """Make the leaf `layer_scale`: 1 for chosen layers of a stack, 0 for others; None without `layers` or a stack."""
    if layers is None or len(site.weight.shape) != 3:
        return None
    return make_leaf(site, (), lambda shape: jnp.asarray([float(i in layers) for i in site.layers], jnp.float32))


def make_leaf(site: Site, shape: tuple[int, ...], make: Callable[[tuple[int, ...]], Array]) -> Any:
    """Make an array [*stack, *shape] with the weight's stack axes; for abstract weights a `jax.ShapeDtypeStruct`."""
    full_shape = (*site.weight.shape[:-2], *shape)
    is_abstract = isinstance(jax.tree.leaves(site.weight)[0], jax.ShapeDtypeStruct)
    return jax.ShapeDtypeStruct(full_shape, jnp.float32) if is_abstract else make(full_shape)


def external_name(model: Tree, site: Site) -> str | None:
    """Return the external name of a site's module, with ``{layer}`` for a stacked weight; None without such a name.

    In a model without `lowtide.core.ExternalNames`, it is the module's tree path with dots. ``{layer}`` then follows
    the first segment ``layers``, or is the last segment.
    """
    if isinstance(model, ExternalNames):
        try:
            return model.external_name(site.module)
        except KeyError:
            return None
    segments = site.module.split("/")
    if len(site.weight.shape) == 3:
        segments.insert(segments.index("layers") + 1 if "layers" in segments else len(segments), layer_slot(1, 0))
    return ".".join(segments)


def layer_names(model: Tree, site: Site) -> list[str]:
    """Return a site's external names: one, one for each layer of a stack, or one for each expert of each layer."""
    name, shape = external_name(model, site), tuple(site.weight.shape)
    layers = None if name is None else layer_indices(name, shape[0])
    if site.is_experts:
        if name is None or layers is None or EXPERT not in name:
            message = f"{site.path}: the external name has no module for each of these experts: {name!r}"
            hint = f"return a name with {layer_slot(1, 0)} and {EXPERT}, or merge the adapters with lt.lora.merge"
            raise StructureError(message, hint=hint)
        indices = itertools.product(layers, range(shape[1]))
        return [fill_layer(name, layer).replace(EXPERT, str(expert)) for layer, expert in indices]
    if name is None:
        message = f"{site.path}: the model has no external name for {site.module!r}"
        raise StructureError(message, hint="target another module, or extend external_name")
    if (layers is not None) != (len(shape) == 3):
        raise StructureError(
            f"{site.path}: the name {name!r} does not fit a weight of shape {shape}",
            expected=f"{layer_slot(1, 0)} in the name exactly when the weight is stacked [num_layers, out, in]",
            hint="leave out vectors of stacked layers (norms, biases) [num_layers, dim], which support no adapter",
        )
    return [name] if layers is None else [fill_layer(name, layer) for layer in layers]


TIED_MESSAGE = "is also the model's head, and an adapter would change both"
TIED_HINT = "adapt other weights, or train it as a whole with modules_to_save"


def tied_names(model: Tree) -> Mapping[str, str]:
    """Map the external name of each tied module to that of its second use; empty for a model without ``tied_names``."""
    return getattr(model, "tied_names", {})


def table_names(model: Tree) -> frozenset[str]:
    """Return the external names of a model's embeddings, whose rows it looks up, from its attribute ``table_names``."""
    return frozenset(getattr(model, "table_names", ()))


def is_table(model: Tree, site: Site) -> bool:
    """Return whether the model declares a weight as an embedding, by ``table_names``."""
    names = table_names(model)
    return bool(names) and external_name(model, site) in names
