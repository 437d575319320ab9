"""Arrays that train as a whole (PEFT's `modules_to_save`, biases), without a low-rank form: node, selection and files.

The node holds the frozen original array and a copy that trains, as in PEFT. So the base is available without the
adapter, and ``**/lora_*`` selects the trainable leaves of every kind of adapter. Deviation from PEFT: the copy is
float32 for every dtype of the array, like all trainable leaves here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ...core import (
    ConfigError,
    ExternalNames,
    LinearWeight,
    ModelFileError,
    SelectionError,
    StructureError,
    Tree,
    fill_layer,
    layer_indices,
    linear,
    put,
    rows,
    shortened,
)
from ...core import memory_space as space_of
from ._lora import Config
from ._node import AdapterWeight, is_adapter
from ._peft import LORA, PREFIX, AdapterKind, PeftConfig, TensorFile, check_array, check_values, is_saved
from ._sites import Site, match_field, sites, tied_names

_TIED_HINT = "train it with ensure_weight_tying=True in PEFT, or merge it there"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SavedWeight(AdapterWeight):
    """An array with a trainable copy that is used in its place: a head, an embedding, a norm or a bias.

    The paths of its leaves are ``<path>/weight`` and ``<path>/lora_saved``. For operations that this class does not
    define, use ``jnp.asarray(node)`` or `lowtide.adapted`.

    Examples:
        >>> node = SavedWeight(jnp.zeros((2, 3)), jnp.ones((2, 3)))
        >>> node.linear(jnp.ones((1, 3))).tolist(), (jnp.ones((2, 3)) * node).shape
        ([[3.0, 3.0]], (2, 3))
    """

    NAME: ClassVar[str] = "trained whole"
    REQUIRED_LEAVES: ClassVar[tuple[str, ...]] = ("weight", "lora_saved")
    AXES: ClassVar[dict[str, tuple[str, ...]]] = {}
    """Empty, because `make_saved` shards the copy like the array."""

    weight: Any
    """The original array, of any shape, frozen."""
    lora_saved: Any
    """The trainable copy, of the same shape, float32."""

    __array_ufunc__ = None  # so that a NumPy array leaves an operation to this class

    def linear(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        """Compute x Wᵀ with the copy, in the dtype of `x`."""
        return linear(x, self.lora_saved)

    def rows(self, ids: Int[Array, "*ids"]) -> Float[Array, "*ids in"]:
        """Look up rows of the copy."""
        return rows(self.lora_saved, ids)

    def folded(self) -> Array:
        """Return the copy in the dtype of the array; for merging, and for programs that expect that dtype."""
        return self.lora_saved.astype(self.weight.dtype)

    def astype(self, dtype: Any) -> Array:
        """Return the copy in a dtype."""
        return self.lora_saved.astype(dtype)

    def __jax_array__(self) -> Array:
        return self.folded()

    def __getitem__(self, index: Any) -> Array:
        return self.folded()[index]

    def __matmul__(self, other: Any) -> Array:
        return self.folded() @ other

    def __rmatmul__(self, other: Any) -> Array:
        return other @ self.folded()

    def __add__(self, other: Any) -> Array:
        return self.folded() + other

    __radd__ = __add__

    def __mul__(self, other: Any) -> Array:
        return self.folded() * other

    __rmul__ = __mul__

    @property
    def mT(self) -> Array:  # noqa: N802 - NumPy's name
        """The copy with its last two axes swapped."""
        return self.folded().mT

    @property
    def T(self) -> Array:  # noqa: N802 - NumPy's name
        """The transposed copy."""
        return self.folded().T

    @property
    def size(self) -> int:
        """Number of elements of the array."""
        return self.weight.size


def make_saved(weight: Any, values: Any = None) -> SavedWeight:
    """Make a node with a float32 copy of `weight`, or of `values` if it is not None, sharded like `weight`.

    If `weight` is a `jax.ShapeDtypeStruct`, so is the copy.
    """
    sharding = getattr(weight, "sharding", None)
    if isinstance(weight, jax.ShapeDtypeStruct):
        return SavedWeight(weight, jax.ShapeDtypeStruct(weight.shape, jnp.float32, sharding=sharding))
    # Always copy: one array at two paths cannot train at only one of them.
    copy = jnp.array(weight if values is None else values, jnp.float32, copy=True)
    is_placed = isinstance(sharding, jax.sharding.NamedSharding) and not isinstance(copy, jax.core.Tracer)
    return SavedWeight(weight, put(copy, sharding) if is_placed else copy)


# The arrays, and their names in PEFT. A module is the node that holds a leaf: ``outer/lm_head`` for
# ``outer/lm_head/weight``. In a model with external names (`lowtide.core.ExternalNames`), all leaves of a module train
# together, because PEFT's files hold whole modules.


class _ArrayNames(NamedTuple):
    """Names of an array in the external library."""

    modules: Sequence[str]
    """Name of the module; in a stack one per layer."""
    leaf: str
    """Name of the leaf, such as ``weight`` or ``bias``."""
    is_stacked: bool
    """Whether the array's first axis is the axis of layers."""


def _parent(path: str) -> str:
    """Return the path of the module that holds a leaf; the path of the leaf if it has no module."""
    return path.rpartition("/")[0] or path


def _array_names(model: Tree, site: Site) -> _ArrayNames | None:
    """Return the external names of an array; None if the external library has no module with this leaf."""
    module, _, leaf = site.path.rpartition("/")
    if not isinstance(model, ExternalNames):
        return _ArrayNames([(module or site.path).replace("/", ".")], leaf if module else "weight", False)
    try:
        name = model.external_name(module)
    except KeyError:
        return None
    layers = layer_indices(name, site.weight.shape[0])
    if name.count("{") > (layers is not None) or leaf not in ("weight", "bias"):
        return None
    if layers is None:
        return _ArrayNames([name], leaf, False)
    return _ArrayNames([fill_layer(name, layer) for layer in layers], leaf, True)


def adapter_modules(model: Tree, adapted: Collection[str], indices: Collection[int]) -> set[str]:
    """Return the names of the modules with adapters, in the form of `_array_names`.

    `adapted` holds their names in PEFT's files, and `indices` the `Site.index` of their weights.
    """
    if isinstance(model, ExternalNames):
        return {*adapted}
    return {name for index, names in _named_arrays(model).items() if index in indices for name in names.modules}


def _named_arrays(model: Tree) -> dict[int, _ArrayNames]:
    """Return the external names of every floating-point array that could train as a whole, by `Site.index`."""
    return {site.index: names for site in sites(model) if site.is_floating and (names := _array_names(model, site))}


def saved_sites(model: Tree, config: Any, targets: Sequence[Site]) -> list[Site]:
    """Return the sites of arrays that train as a whole (`modules_to_save`, `bias`); raise if an array cannot train."""
    chosen = {site.index: site for site in _match_saved(model, config.modules_to_save)}
    if isinstance(config, Config) and config.bias != "none":
        chosen |= {site.index: site for site in _bias_sites(model, config, targets)}
    for site in chosen.values():
        _check_trainable(model, site)
    return [chosen[index] for index in sorted(chosen)]


def exclude_saved(model: Tree, config: Any, targets: Sequence[Site]) -> list[Site]:
    """Return the targets outside of `modules_to_save`: PEFT adds no adapter to a module that it saves."""
    modules = {_parent(site.path) for site in _match_saved(model, config.modules_to_save)}
    remaining = [site for site in targets if _parent(site.path) not in modules]
    if targets and not remaining:
        raise SelectionError("modules_to_save leaves no target for an adapter", hint="leave some targets out of it")
    return remaining


def _array_sites(model: Tree) -> list[Site]:
    return [site for site in sites(model) if hasattr(site.node, "shape")]


def _match_saved(model: Tree, patterns: Any) -> list[Site]:
    if not patterns:
        return []
    by_name: dict[str, list[Site]] = {}
    for site in _array_sites(model):
        for name in {_parent(site.path), site.path}:
            by_name.setdefault(name, []).append(site)
    matched = match_field("modules_to_save", list(by_name), patterns)
    # PEFT's files hold whole modules, so with external names one matched leaf selects all leaves of its module.
    modules = {_parent(site.path) for name in matched for site in by_name[name]}
    if isinstance(model, ExternalNames):
        matches = [site for module in modules for site in by_name[module] if _parent(site.path) == module]
    else:
        matches = [site for name in matched for site in by_name[name]]
    # Arrays of a module that are not floating-point, such as sizes of attention windows, are not parameters.
    return [site for site in matches if site.is_floating or isinstance(site.node, LinearWeight) or site.path in matched]


def _bias_sites(model: Tree, config: Config, targets: Sequence[Site]) -> list[Site]:
    biases_by_path = {site.path: site for site in _array_sites(model) if site.path.rpartition("/")[2] == "bias"}
    modules = [site.path.rpartition("/")[0] for site in targets]
    target_biases = [f"{module}/bias" if module else "bias" for module in modules]
    paths = target_biases if config.bias == "lora_only" else list(biases_by_path)
    biases = [biases_by_path[path] for path in paths if path in biases_by_path]
    if not biases:
        hint = 'leave bias out, or use bias="all"' if biases_by_path else "leave bias out"
        number = f"{len(biases_by_path)} biases in the model"
        raise StructureError(f"bias: {config.bias!r} does not select any bias", got=number, hint=hint)
    return biases


def _check_trainable(model: Tree, site: Site) -> None:
    if is_adapter(site.node):
        message = f"{site.path}: already has an adapter ({site.node.kind}), and cannot also train as a whole"
        hint = "merge the old adapter with lt.lora.merge, or leave it out of modules_to_save"
        raise StructureError(message, hint=hint)
    if isinstance(site.node, LinearWeight):
        message = f"{site.path}: a quantised weight ({type(site.node).__name__}) cannot train as a whole"
        raise StructureError(message, hint="add an adapter to it, or do not quantise it")
    if not site.is_floating:
        message = f"{site.path}: {site.weight.dtype}{list(site.weight.shape)} is not floating-point, and cannot train"
        raise StructureError(message, hint="leave it out of modules_to_save")
    if isinstance(model, ExternalNames) and _array_names(model, site) is None:
        hint = "leave it out of modules_to_save and bias: PEFT's format cannot store it"
        raise StructureError(f"{site.path}: the external library has no module with this leaf", hint=hint)
    if isinstance(site.node, jax.Array) and space_of(site.node) == jax.memory.Space.Host:
        hint = "leave it out of modules_to_save, or do not offload it"
        raise ConfigError(f"{site.path}: trains as a whole, but is in host memory", hint=hint)


# In files, a module ``m`` of `modules_to_save` has the tensors ``base_model.model.m.weight`` and
# ``base_model.model.m.bias``. A trained bias is ``base_model.model.m.bias``, or ``base_model.model.m.base_layer.bias``
# if its module has an adapter. A text in `modules_to_save` selects modules if their name, or a parent's name, ends with
# it. The text need not begin after a dot (`utils.other._set_trainable` of PEFT 0.21).
#
# If the embedding of a model is also its head, PEFT trains one of the two modules, or with `ensure_weight_tying` both
# as one. Here they are one array. It is written as two equal tensors, and reading unequal tensors raises.


def select_saved(
    model: Tree, adapted: Collection[str], kind: AdapterKind
) -> tuple[dict[str, Any], dict[int, list[str]]]:
    """Return PEFT's options for all nodes that train as a whole, and the names of their tensors by `Site.index`.

    `model` may hold shapes; `adapted` holds the names of modules with an adapter. A selection that PEFT's options
    cannot express raises `StructureError`.
    """
    chosen = {site.index: site for site in sites(model) if isinstance(site.node, SavedWeight)}
    if not chosen:
        return {}, {}
    names = _named_arrays(model)
    module_paths = _saved_module_paths(model, chosen, names)
    is_bias = {index: _parent(site.path) not in module_paths for index, site in chosen.items()}
    biases = {name for index in chosen if is_bias[index] for name in names[index].modules}
    module_names = {name for index in chosen if not is_bias[index] for name in names[index].modules}
    options: dict[str, Any] = {}
    if biases:
        options["bias"] = _bias_option(names, biases, module_names, adapted)
        if kind.peft_type != LORA:
            message = f"biases train in addition to {kind.peft_type} adapters, which PEFT's format cannot express"
            hint = (
                "name the modules of the biases in modules_to_save, or leave bias out; a checkpoint stores any choice"
            )
            raise StructureError(message, hint=hint)
    if any(module in module_names for module in tied_names(model)):
        options["ensure_weight_tying"] = True
    if module_names:
        all_names = {name for array in names.values() for name in array.modules}
        options["modules_to_save"] = _saved_names(module_names, all_names)
    keys: dict[int, list[str]] = {}
    for index in chosen:
        modules, leaf, _ = names[index]
        keys[index] = [_key(name, leaf, is_wrapped=is_bias[index] and name in adapted) for name in modules]
    return options, keys


def saved_modules(
    model: Tree, adapted: Collection[str], kind: AdapterKind
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the tensors by name, and PEFT's options, of all nodes that train as a whole."""
    (options, keys), names = select_saved(model, adapted, kind), _named_arrays(model)
    tensors: dict[str, np.ndarray] = {}
    for site in sites(model) if keys else ():
        if site.index in keys:
            check_values(site.path, [site.node.lora_saved])
            values = np.asarray(site.node.lora_saved, np.float32)
            layers = values if names[site.index].is_stacked else [values]
            for key, layer in zip(keys[site.index], layers, strict=True):
                tensors[key] = np.ascontiguousarray(layer)
    for module, tied in tied_names(model).items():
        if _key(module, "weight") in tensors:
            tensors[_key(tied, "weight")] = tensors[_key(module, "weight")].copy()
    return tensors, options


def expected_keys(model: Tree, config: PeftConfig, adapted: Collection[str]) -> tuple[set[str], dict[int, list[str]]]:
    """Return the names of the tensors that files must have for arrays that train as a whole.

    The results are the set of all names, and the names of each array by `Site.index`, one per layer. It raises if only
    some layers of a stack would train, or only one of two tied modules without PEFT's `ensure_weight_tying`. `adapted`
    holds the names of modules with adapters.
    """
    keys: dict[int, list[str]] = {}
    by_index = {site.index: site for site in sites(model)}
    for index, names in _named_arrays(model).items():
        saved_mask = [config.saves(name) for name in names.modules]
        bias_mask = [names.leaf == "bias" and config.trains_bias(name, name in adapted) for name in names.modules]
        mask = [is_saved or trains_bias for is_saved, trains_bias in zip(saved_mask, bias_mask, strict=True)]
        if not any(mask):
            continue
        if not all(mask):
            message = f"{config.source}: only some layers of {by_index[index].path} train as a whole"
            hint = "name the module of every layer in modules_to_save, and train the adapter again"
            raise ModelFileError(message, got=f"{sum(mask)} of {len(mask)}", hint=hint)
        keys[index] = [
            _key(name, names.leaf, is_wrapped=not is_saved and name in adapted)
            for name, is_saved in zip(names.modules, saved_mask, strict=True)
        ]
    all_keys = {key for array_keys in keys.values() for key in array_keys}
    for module, tied in tied_names(model).items():
        if config.saves(tied) or config.saves(module):
            if not (config.saves(module) and (config.saves(tied) or config.file.ensure_weight_tying)):
                message = f"option 'modules_to_save' unties {tied} from {module}, but both are one array"
                raise ModelFileError(f"{config.source}: {message}", hint=_TIED_HINT)
            all_keys.add(_key(tied, "weight"))
    return all_keys, keys


def read_saved_modules(file: TensorFile, model: Tree, keys: Mapping[int, list[str]]) -> dict[int, Any]:
    """Read arrays that train as a whole, by `Site.index`; `keys` come from `expected_keys`. Tied tensors must match."""
    by_index, names = {site.index: site for site in sites(model)}, _named_arrays(model)
    nodes: dict[int, Any] = {}
    for index, array_keys in keys.items():
        site, shape = by_index[index], tuple(by_index[index].weight.shape)
        check_array(file.path, site, "trains as a whole")
        layer_shape = shape[1:] if names[index].is_stacked else shape
        tensors = [file.read(key, layer_shape) for key in array_keys]
        nodes[index] = make_saved(site.weight, np.stack(tensors) if names[index].is_stacked else tensors[0])
        tied = tied_names(model).get(names[index].modules[0])
        if tied is not None and not np.array_equal(tensors[0], file.read(_key(tied, "weight"), layer_shape)):
            message = f"{file.path}: {tied} and {names[index].modules[0]} differ, but both are one array in the model"
            raise ModelFileError(message, hint=_TIED_HINT)
    return nodes


def _key(module: str, leaf: str, *, is_wrapped: bool = False) -> str:
    return f"{PREFIX}{module}.{'base_layer.' if is_wrapped else ''}{leaf}"


def _saved_module_paths(model: Tree, chosen: Mapping[int, Site], arrays: Mapping[int, _ArrayNames]) -> set[str]:
    """Return the paths of modules that train as a whole; raise if a bias of one of them does not train."""
    modules = {_parent(site.path) for site in chosen.values() if not site.path.endswith("/bias")}
    for site in sites(model):
        if site.index in arrays and _parent(site.path) in modules and "/" in site.path and site.index not in chosen:
            if arrays[site.index].leaf == "bias":
                message = f"{site.path}: its module trains as a whole except for this leaf, which PEFT cannot express"
                raise StructureError(message, hint="name the module, not its weight, in modules_to_save")
    return modules


def _bias_option(names: Mapping[int, _ArrayNames], biases: set[str], saved: set[str], adapted: Collection[str]) -> str:
    """Return PEFT's value of the option `bias` for the biases that train."""
    all_biases = {name for array in names.values() if array.leaf == "bias" for name in array.modules}
    if biases == all_biases & {*adapted}:
        return "lora_only"
    # Biases of modules in modules_to_save train with their module, so "all" covers the others.
    if biases == all_biases - saved:
        return "all"
    number, hint = f"{len(biases)} of {len(all_biases)}", 'add the adapters with bias="all" or bias="lora_only"'
    raise StructureError("PEFT's format cannot express this choice of biases", got=number, hint=hint)


def _saved_names(chosen: Collection[str], modules: Collection[str]) -> list[str]:
    """Return entries of `modules_to_save` that select exactly the chosen modules; raise if no such entries exist."""
    selected, all_names = {*chosen}, {*chosen, *modules}
    # Prefer the last segment of a name; use the full name if that segment also selects other modules.
    segments = {name: name.rpartition(".")[2] for name in chosen}
    is_exact = {
        end: all(name in selected for name in all_names if is_saved([end], name)) for end in {*segments.values()}
    }
    names = sorted({end if is_exact[end] else name for name, end in segments.items()})
    if {name for name in all_names if is_saved(names, name)} == selected:
        return names
    message = "PEFT's modules_to_save cannot distinguish these modules from others whose names have the same end"
    hint = "also save the other modules, or rename some"
    raise StructureError(message, got=shortened(", ".join(sorted(chosen))), hint=hint)
