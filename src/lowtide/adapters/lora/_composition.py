"""Several adapters of one base: attach them one at a time, undo a merge, or combine them into one.

An adapter without a base is a tree like the model, with nodes without a weight, and None for all other leaves.
`split` and `attach` copy no arrays. A function compiled for one adapter also serves others with the same ranks, alphas
and targets. A combined adapter is merged and rounded only once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from ...core import ConfigError, LinearWeight, StructureError, Tree, is_array_like, is_key, path_str
from .._adapted import is_weight
from ._kernel import LoRAKernel
from ._lora import LoRAWeight
from ._model import disable, merge
from ._node import is_adapter, shard_adapter
from ._saved import SavedWeight, make_saved
from ._sites import adapted_sites, check_complete, sites

_ONE_BASE_HINT = "attach all adapters to one base: lt.lora.attach(base, lt.lora.split(model)[0]), or load them into it"


def split(model: Tree) -> tuple[Tree, Tree]:
    """Separate a model's adapter from its base.

    Args:
        model: a model with adapters.

    Returns:
        The adapter, which `attach` puts onto a base, and the base, which is the result of `disable`.

    Raises:
        StructureError: when there is no adapter.

    Memory:
        No copy.

    Examples:
        >>> from lowtide.adapters.lora import LoRAWeight
        >>> node = LoRAWeight(jnp.zeros((2, 2)), jnp.ones((1, 2)), jnp.ones((2, 1)), alpha=3.0)
        >>> adapter, base = split({"w": node, "b": jnp.zeros(2)})
        >>> len(jax.tree.leaves(adapter)), attach(base, adapter)["w"].weight is node.weight
        (2, True)
    """
    base = disable(model)
    detach = lambda node: dataclasses.replace(node, weight=None) if is_adapter(node) else None  # noqa: E731
    return jax.tree.map(detach, model, is_leaf=is_weight), base


def attach(base: Tree, adapter: Tree) -> Tree:
    """Put an adapter onto a base; this also works inside `jax.jit`, with both as arguments.

    Args:
        base: a model without adapters. Weights that get an adapter are arrays, shapes or quantised weights.
        adapter: the first result of `split`, for a model of this base.

    Returns:
        The model with the adapter.

    Raises:
        StructureError: when the base has an adapter, or the adapter belongs to another model. Also for a `LoRAKernel`,
            as of a convolution, on a quantised weight.

    Memory:
        No copy.

    Examples:
        >>> from lowtide.adapters.lora import LoRAWeight
        >>> node = LoRAWeight(jnp.zeros((2, 2)), jnp.ones((1, 2)), jnp.ones((2, 1)), alpha=3.0)
        >>> adapter, _ = split({"w": node})
        >>> attach({"w": jnp.ones((2, 2))}, adapter)["w"].linear(jnp.ones(2)).tolist()
        [8.0, 8.0]
    """
    base_sites = sites(base)
    if adapted := next((site for site in base_sites if is_adapter(site.node)), None):
        hint = "remove it with lt.lora.split, or add both with lt.lora.combine"
        raise StructureError(f"{adapted.path}: already has an adapter ({adapted.node.kind})", hint=hint)
    treedef = jax.tree.structure(base, is_leaf=is_weight)
    try:
        nodes: list[Any] = treedef.flatten_up_to(adapter)
    except (ValueError, TypeError, KeyError) as error:
        hint = "attach it to the model that it was split from, or one of the same configuration"
        difference = str(error).splitlines()[0][:200]
        raise StructureError("the adapter does not belong to this base", got=difference, hint=hint) from error
    if not any(is_adapter(node) for node in nodes):
        raise StructureError("the tree has no adapter", hint="pass the first result of lt.lora.split")
    attached: list[Any] = []
    for site, node in zip(base_sites, nodes, strict=True):
        shape = tuple(getattr(site.weight, "shape", ()))
        if node is not None and not (is_adapter(node) and _fits(node, shape)):
            actual = f"{type(node).__name__} with {[list(leaf.shape) for leaf in jax.tree.leaves(node)]}"
            hint = "attach it to the model that it was split from, or one of the same shapes"
            raise StructureError(f"{site.path}: the adapter does not fit the base {list(shape)}", got=actual, hint=hint)
        if isinstance(node, LoRAKernel) and isinstance(site.node, LinearWeight):
            message = f"{site.path}: the adapter of a kernel or an embedding needs its weight as an array"
            hint = "do not quantise this weight, or call lt.dequantize first"
            raise StructureError(f"{message}, not a {type(site.node).__name__}", hint=hint)
        attached.append(site.node if node is None else dataclasses.replace(node, weight=site.node))
    return treedef.unflatten(attached)


def unmerge(model: Tree, adapter: Tree) -> Tree:
    """Remove an adapter that `merge` folded into the weights.

    The subtraction is in float32, and its result is rounded once to the dtype of W.

    Args:
        model: a merged model.
        adapter: from `split`, before the merge.

    Returns:
        The model before the merge, up to the rounding of both steps (in bfloat16 up to two units in the last place).

    Raises:
        StructureError: for a variant such as DoRA, because merging rescales the rows of W + B A. For an array that
            trained as a whole, because merging drops its old values. Also when the adapter belongs to another model.
        NonFiniteError: when a weight has a value that is not finite, such as where (IA)³ scaled by zero.

    Memory:
        As `merge`: a new array for each adapted weight. `model` is not changed.

    Examples:
        >>> from lowtide.adapters.lora import LoRAWeight, merge
        >>> node = LoRAWeight(jnp.zeros((2, 2)), jnp.ones((1, 2)), jnp.ones((2, 1)), alpha=3.0)
        >>> unmerge(merge({"w": node}), split({"w": node})[0])["w"].tolist()
        [[0.0, 0.0], [0.0, 0.0]]
    """
    attached = attach(model, adapter)
    for site in adapted_sites(attached):
        is_saved = isinstance(site.node, SavedWeight)
        if name := "an array that trained as a whole" if is_saved else site.node.variants.non_sums:
            hint = "keep the base, which merging does not change"
            raise StructureError(f"{site.path}: {name} cannot be unmerged", hint=hint)
    return merge(jax.tree.map(lambda node: node.inverted() if is_adapter(node) else node, attached, is_leaf=is_weight))


def _fits(node: Any, shape: tuple[int, ...]) -> bool:
    """Return whether the shapes of an adapter's leaves fit a weight of this shape."""
    if any(getattr(node, name, None) is None for name in node.REQUIRED_LEAVES[1:]):
        return False
    if isinstance(node, SavedWeight):
        return tuple(node.lora_saved.shape) == shape
    if isinstance(node, LoRAKernel):
        stack = len(shape) - node.num_rows - node.num_columns
        split_at = stack + node.num_rows
        a, b = tuple(node.lora_a.shape), tuple(node.lora_b.shape)
        free_a = (*a[:stack], *a[stack + 1 :])  # without the axis r, as b[:-1]
        return stack >= 0 and b[:-1] == shape[:split_at] and free_a == (*shape[:stack], *shape[split_at:])
    if len(shape) < 2:
        return False
    sizes = {"out": shape[-2], "in": shape[-1]}
    for name, axes in node.AXES.items():
        leaf = getattr(node, name)
        if leaf is None or name == "layer_scale":
            continue
        expected = (*shape[:-2], *(sizes.get(axis) for axis in axes))
        actual = tuple(leaf.shape)
        if len(actual) != len(expected) or any(b not in (None, a) for a, b in zip(actual, expected, strict=True)):
            return False
    return True


def combine(models: Sequence[Tree], weights: Sequence[float] | None = None) -> Tree:
    """Combine models with one base and different adapters into one model, with the weighted sum of their corrections.

    The factors A and B are concatenated along the rank, so the ranks of a weight add up. B A is not computed.

    Bases that are not the same arrays are compared. Shapes and dtypes of all arrays must be equal. Values must be equal
    for weights with an adapter in any of the models, and for all floating-point arrays of two or more axes. NaN equals
    NaN. Values are not compared if they are unknown under `jax.jit`, or if two arrays have different shardings and
    another process holds a part of one. Other arrays are taken from the first model: counters, random keys, and norms,
    biases and running statistics without a layer axis. So are leaves that are not arrays.

    Args:
        models: models of one base, each with its adapters, such as `load` returns for several directories.
        weights: a factor for the corrections of each model; None means 1 for each.

    Returns:
        A model with an adapter on every weight that has an adapter in any of the models; the base is the first model's.

    Raises:
        ConfigError: when there are no models, or `weights` does not hold one number per model.
        StructureError: when the models have different bases, or an adapter is incomplete. For adapters that are not
            sums, such as DoRA and (IA)³, unless there is only one model, of weight 1. Also when adapters of one weight
            cannot be added, because their kinds or groups of axes differ.

    Memory:
        A copy of the adapters, in the dtype of their factors; the base is not copied.

    Examples:
        >>> node = LoRAWeight(jnp.zeros((2, 2)), jnp.ones((1, 2)), jnp.ones((2, 1)), alpha=3.0)
        >>> from lowtide import lora
        >>> lora.merge(combine([{"w": node}, {"w": node}], [1.0, 0.5]))["w"].tolist()
        [[4.5, 4.5], [4.5, 4.5]]
    """
    models, factors = _check_models(models, weights)
    if len(models) == 1 and (weights is None or (not isinstance(factors[0], jax.core.Tracer) and factors[0] == 1)):
        return models[0]

    def combine_nodes(keys: Any, *nodes: Any) -> Any:
        path, bases = path_str(keys), [node.weight if is_adapter(node) else node for node in nodes]
        base, terms = bases[0], [(node, scale) for node, scale in zip(nodes, factors, strict=True) if is_adapter(node)]
        for next_base in bases[1:]:
            _check_base(path, base, next_base, is_adapted=bool(terms))
        if not terms:
            return base
        for node, _ in terms:
            check_complete(path, node, node.REQUIRED_LEAVES[1:])
        types = {type(node) for node, _ in terms}
        if types == {LoRAKernel}:
            return _combine_kernels(path, terms)
        if types == {SavedWeight}:
            if [scale for _, scale in terms] == [1.0]:
                return make_saved(base, terms[0][0].lora_saved)
            # Sum the differences from the base, because a `SavedWeight` holds a full copy and not a correction.
            values = jnp.asarray(base, jnp.float32)
            return make_saved(base, values + sum(scale * (node.lora_saved - values) for node, scale in terms))
        if types & {LoRAKernel, SavedWeight}:
            kinds = " and ".join(sorted({node.kind for node, _ in terms}))
            hint = "create them with the same fn and configuration, or merge them one by one with lt.lora.merge"
            raise StructureError(f"{path}: adapters of different kinds cannot be added: {kinds}", hint=hint)
        pairs = [_scaled_factors(path, node) for node, _ in terms]
        lora_a = jnp.concatenate([a for a, _ in pairs], axis=-2)
        lora_b = jnp.concatenate([scale * b for (_, b), (_, scale) in zip(pairs, terms, strict=True)], axis=-1)
        # All scales are in B, and an alpha equal to the rank makes `scaling` 1.
        return shard_adapter(LoRAWeight(base, lora_a, lora_b, float(lora_a.shape[-2])))

    try:
        return jax.tree_util.tree_map_with_path(combine_nodes, *models, is_leaf=is_weight)
    except StructureError:
        raise
    except ValueError as error:
        raise StructureError("the models have different bases", got=str(error)[:200], hint=_ONE_BASE_HINT) from error


def _check_models(models: Any, weights: Any) -> tuple[list[Tree], list[Any]]:
    if isinstance(models, (str, Mapping)) or not isinstance(models, Iterable):
        kind = type(models).__name__
        raise ConfigError(f"models must be a list, as in lt.lora.combine([first, second]), not a {kind}")
    models = list[Tree](models)
    values = weights if isinstance(weights, Iterable) else ()
    factors = [1.0] * len(models) if weights is None else [*values]
    is_number = all(is_array_like(weight) and np.ndim(weight) == 0 and not is_key(weight) for weight in factors)
    if not models or len(factors) != len(models) or not is_number:
        raise ConfigError(
            "the models and their weights do not match",
            expected="at least one model, and one number for each as its weight",
            got=f"{len(models)} adapters, {len(factors)} weights" + ("" if is_number else f": {factors}"),
            hint="leave the weights out to add the adapters unscaled",
        )
    return models, factors


def _check_base(path: str, base: Any, next_base: Any, *, is_adapted: bool) -> None:
    """Check that a leaf is the same in two models; `is_adapted` is True if any model has an adapter on the leaf."""
    if base is next_base or not (hasattr(base, "shape") or hasattr(next_base, "shape")):
        return
    kinds = [_describe(leaf) for leaf in (base, next_base)]
    is_same = kinds[0] == kinds[1] and jax.tree.structure(base) == jax.tree.structure(next_base)
    is_compared = is_adapted or (len(base.shape) > 1 and jnp.issubdtype(base.dtype, jnp.floating)) if is_same else False
    if not is_same or (is_compared and not all(map(_is_equal, jax.tree.leaves(base), jax.tree.leaves(next_base)))):
        expected, actual = f"the weight of the first model, {kinds[0]}", "other values" if is_same else kinds[1]
        message = f"{path}: the models have different bases"
        raise StructureError(message, expected=expected, got=actual, hint=_ONE_BASE_HINT)


def _describe(leaf: Any) -> str:
    if not hasattr(leaf, "shape"):
        return f"a {type(leaf).__name__}"
    array = f"{leaf.dtype}{list(leaf.shape)}"
    if not is_weight(leaf):
        return array
    return f"{array} as a {type(leaf).__name__} {getattr(leaf, 'format', '')}".rstrip()


def _is_equal(first: Any, second: Any) -> bool:
    """Return whether two arrays are equal; True if a tracer, a shape or another process hides the values."""
    unknown = (jax.core.Tracer, jax.ShapeDtypeStruct)
    if first is second or isinstance(first, unknown) or isinstance(second, unknown):
        return True
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if isinstance(first, jax.Array) and getattr(second, "sharding", None) == first.sharding:
        with jax.ensure_compile_time_eval():
            return bool(_jitted_compare(first, second))
    is_addressable = all(getattr(array, "is_fully_addressable", True) for array in (first, second))
    return not is_addressable or bool(_compare(np.asarray(first), np.asarray(second)))


def _compare(first: Any, second: Any) -> Any:
    # NaN equals NaN here.
    return ((first == second) | ((first != first) & (second != second))).all()


_jitted_compare = jax.jit(_compare)


def _combine_kernels(path: str, kernels: Sequence[tuple[LoRAKernel, Any]]) -> LoRAKernel:
    first = kernels[0][0]
    for node, _ in kernels:
        if (node.num_rows, node.num_columns) != (first.num_rows, first.num_columns):
            splits = " and ".join(f"{n.num_rows} axes of rows and {n.num_columns} of columns" for n in (first, node))
            message = f"{path}: these adapters split the axes of the kernel {list(node.shape)} in different ways"
            hint = "create them with the fn that trains, or merge them one by one with lt.lora.merge"
            raise StructureError(message, got=splits, hint=hint)
    lora_a = jnp.concatenate([jnp.asarray(node.lora_a) for node, _ in kernels], axis=first.num_stacked)
    lora_b = jnp.concatenate([scale * node.scaling * jnp.asarray(node.lora_b) for node, scale in kernels], axis=-1)
    return dataclasses.replace(first, lora_a=lora_a, lora_b=lora_b, alpha=float(lora_b.shape[-1]))


def _scaled_factors(path: str, node: Any) -> tuple[Any, Any]:
    factors = node.scaled_factors()
    if factors is None:
        message = f"{path}: an adapter of the kind {node.kind} is not a sum of a weight and a correction"
        raise StructureError(message, hint="merge this model separately and unweighted, with lt.lora.merge")
    return factors
