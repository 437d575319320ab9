"""Places of weights in a tree: names here and in other software, selection by a configuration, and replacement."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ...core import (
    ConfigError,
    ExternalNames,
    LinearWeight,
    Pattern,
    SelectionError,
    StructureError,
    Tree,
    is_count,
    is_pattern,
    leaves_with_paths,
    match_names,
)
from ._node import is_adapter

LAYER, EXPERT = "{layer}", "{expert}"
_ALL_LINEAR = "all-linear"


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
    def names(self) -> tuple[str, str]:
        """The names that patterns match: those of the module and of the weight."""
        return self.module, self.path

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
        check_complete(site.path, site.node, site.node.REQUIRED_LEAVES)
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


def is_weight(node: Any) -> bool:
    """Return whether a node stands for one weight.

    A `LinearWeight` must also have a shape and a dtype, because a user's module may have a field named ``linear``.
    """
    return is_adapter(node) or (isinstance(node, LinearWeight) and hasattr(node, "shape") and hasattr(node, "dtype"))


def replace(model: Tree, nodes: Mapping[int, Any]) -> Tree:
    """Replace the nodes at some sites of the model, keyed by `Site.index`."""
    leaves, treedef = jax.tree.flatten(model, is_leaf=is_weight)
    return treedef.unflatten([nodes.get(index, leaf) for index, leaf in enumerate(leaves)])


# Selection by a configuration.


def normalize_fields(config: Any, targets: Any, exclude: Any, layers: Any, modules_to_save: Any) -> None:
    """Check the fields that all configurations have, and make them hashable."""
    object.__setattr__(config, "modules_to_save", to_patterns("modules_to_save", modules_to_save, may_be_empty=True))
    object.__setattr__(config, "targets", to_patterns("targets", targets))
    object.__setattr__(config, "exclude", to_patterns("exclude", exclude, may_be_empty=True))
    if layers is None:
        return
    indices = tuple(layers) if isinstance(layers, Sequence) and not isinstance(layers, str) else ()
    if not indices or not all(is_count(layer, 0) for layer in indices):
        raise ConfigError(
            f"layers: {layers!r} is not a list of layer indices",
            expected="at least one index, counted from 0",
            got=repr(layers),
            hint="pass for instance layers=range(8, 16), or None for all layers",
        )
    object.__setattr__(config, "layers", tuple(sorted({int(layer) for layer in indices})))


def to_patterns(name: str, value: Any, *, may_be_empty: bool = False) -> Any:
    """Check one pattern or several, and return a text or a tuple."""
    patterns: Any = value if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (value,)
    is_allowed = may_be_empty and patterns == ()
    if not is_allowed and (not patterns or not all(is_pattern(pattern) and pattern for pattern in patterns)):
        raise ConfigError(
            f"{name}: {value!r} is not a pattern",
            expected="at least one glob or compiled regular expression",
            got=repr(value),
            hint='pass for instance "**/{q,v}_proj", or "**/*_proj" for every projection',
        )
    return patterns


def check_rank(rank: Any, name: str) -> None:
    """Check that a value is a valid rank."""
    if not is_count(rank, 1):
        raise ConfigError(
            f"{name}: {rank!r} is not a rank",
            expected="an integer of at least 1",
            got=repr(rank),
            hint="use for instance 8, 16 or 64; to train no adapter, do not add one",
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
    patterns = [pattern for pattern in selected_patterns if pattern != _ALL_LINEAR]
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
            f'targets: "{_ALL_LINEAR}" needs a model that declares which weights are linear layers',
            expected="a decoder of Lowtide, or a model with stacked layers and an external_name",
            got=type(model).__name__,
            hint='select them with globs, for instance "**/*_proj"',
        )
    return paths


def select_layers(chosen: Sequence[Site], layers: Sequence[int] | None) -> list[Site]:
    """Leave out sites of other layers where layers are not stacked, and check that all layers exist."""
    if layers is None:
        return list(chosen)
    selected = [site for site in chosen if len(site.weight.shape) == 3 or _layer_index(site) in layers]
    counts = [site.weight.shape[0] for site in chosen if len(site.weight.shape) == 3]
    existing = {index for count in counts for index in range(count)} | {_layer_index(site) for site in selected}
    if absent := [layer for layer in layers if layer not in existing]:
        raise ConfigError(
            f"layers: {absent[0]} is not a layer of the targets",
            expected=f"indices below {min(counts)}" if counts else "indices in paths such as layers/3/q_proj",
            got=list(layers),
            hint="count layers from 0",
        )
    return selected


def _layer_index(site: Site) -> int | None:
    """Return the first number in a path, which is the index of a layer."""
    return next((int(part) for part in site.path.split("/") if part.isdecimal()), None)


def layer_scale(site: Site, layers: Sequence[int] | None) -> Any:
    """Make the leaf that is 1 for chosen layers of a stack and 0 for the others; None where all have an adapter."""
    if layers is None or len(site.weight.shape) != 3:
        return None
    return make_leaf(site, (), lambda shape: jnp.asarray([float(i in layers) for i in range(shape[0])], jnp.float32))


def make_leaf(site: Site, shape: tuple[int, ...], make: Callable[[tuple[int, ...]], Array]) -> Any:
    """Make an array with the weight's leading axes in front, or only its shape where the weight is a shape."""
    full_shape = (*site.weight.shape[:-2], *shape)
    is_abstract = isinstance(jax.tree.leaves(site.weight)[0], jax.ShapeDtypeStruct)
    return jax.ShapeDtypeStruct(full_shape, jnp.float32) if is_abstract else make(full_shape)


# Names in other software.


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


def tied_names(model: Tree) -> Mapping[str, str]:
    """Return the modules that a model uses in a second place, with the external name of that place."""
    return getattr(model, "tied_names", {})


def table_names(model: Tree) -> frozenset[str]:
    """Return the external names of the modules whose rows a model looks up; empty if it has no ``table_names``."""
    return frozenset(getattr(model, "table_names", ()))


def is_table(model: Tree, site: Site) -> bool:
    """Return whether a weight is a table whose rows the model looks up."""
    names = table_names(model)
    return bool(names) and external_name(model, site) in names
