"""Several adapters of one base as one, which is folded in and rounded once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ...core import ConfigError, StructureError, Tree, is_key, path_str
from ._adapter import is_adapter, kind_of, placed
from ._kernel import LoRAKernel
from ._saved import SavedWeight, saved
from ._vectors import VeRAWeight
from ._weight import LoRAWeight


def combine(models: Sequence[Tree], weights: Sequence[float] | None = None) -> Tree:
    """Make one model of several that have different adapters on the same base: the weighted sum of their corrections.

    The factors stand beside each other, so the rank of a weight is the sum of its ranks, and no product is made.

    Args:
        models: of one base, each with its adapters, such as `load` returns for several directories.
        weights: a factor for each model's corrections; None: 1 for each.

    Returns:
        A model with adapters on every weight that has one in any of the models; the base is that of the first.

    Raises:
        ConfigError: when there are no models, or not one weight a model.
        StructureError: when the models are not of one base, or for several with DoRA or (IA)³, which are no sums, or
            for kernels whose axes are grouped otherwise. Bases that are not the same arrays are compared, number by
            number; not below `jax.jit`, nor those of which another process has a part.

    Memory:
        The adapters once more, in the dtype of their factors; the base is not copied.

    Examples:
        >>> node = LoRAWeight(jnp.zeros((2, 2)), jnp.ones((1, 2)), jnp.ones((2, 1)), alpha=3.0)
        >>> from lowtide import lora
        >>> lora.merge(combine([{"w": node}, {"w": node}], [1.0, 0.5]))["w"].tolist()
        [[4.5, 4.5], [4.5, 4.5]]
    """
    factors = [1.0] * len(models) if weights is None else [*weights]
    if not models or len(factors) != len(models):
        raise ConfigError(
            "adapters and weights do not fit each other",
            expected="at least one model, and one weight for each",
            got=f"{len(models)} adapters, {len(factors)} weights",
            hint="leave the weights out to add the adapters up as they are",
        )

    if len(models) == 1 and (weights is None or (not isinstance(factors[0], jax.core.Tracer) and factors[0] == 1)):
        return models[0]

    def of_one(keys: Any, *nodes: Any) -> Any:
        base = nodes[0].weight if is_adapter(nodes[0]) else nodes[0]
        found = [(node, by) for node, by in zip(nodes, factors, strict=True) if is_adapter(node)]
        for node in nodes:
            _check_base(path_str(keys), base, node.weight if is_adapter(node) else node)
        if not found:
            return base
        kernels = [(node, by) for node, by in found if isinstance(node, LoRAKernel)]
        if kernels and len(kernels) == len(found):
            return _of_kernels(path_str(keys), kernels)
        whole = [(node, by) for node, by in found if isinstance(node, SavedWeight)]
        if whole and len(whole) == len(found):
            if [by for _, by in whole] == [1.0]:
                return saved(base, whole[0][0].lora_saved)
            plain = jnp.asarray(base, jnp.float32)
            return saved(base, plain + sum(by * (node.lora_saved - plain) for node, by in whole))
        pairs = [_factors(node) for node, _ in found]
        lora_a = jnp.concatenate([a for a, _ in pairs], axis=-2)
        lora_b = jnp.concatenate([by * b for (_, b), (_, by) in zip(pairs, found, strict=True)], axis=-1)
        return placed(LoRAWeight(base, lora_a, lora_b, float(lora_a.shape[-2])))

    try:
        return jax.tree_util.tree_map_with_path(of_one, *models, is_leaf=is_adapter)
    except StructureError:
        raise
    except ValueError as error:
        raise StructureError(
            "the models are not of one base", got=str(error)[:200], hint="load them onto one"
        ) from error


def _check_base(path: str, base: Any, other: Any) -> None:
    """Refuse weights that are not the same; what is no array is not looked at."""
    if base is other or (getattr(base, "shape", None) is None and getattr(other, "shape", None) is None):
        return
    shapes = [getattr(each, "shape", None) for each in (base, other)]
    parts, others = jax.tree.leaves(base), jax.tree.leaves(other)
    is_one = jax.tree.structure(base) == jax.tree.structure(other)
    if shapes[0] != shapes[1] or not is_one or not all(map(_is_same, parts, others)):
        differs = "other numbers" if shapes[0] == shapes[1] else f"shape {shapes[1]}"
        raise StructureError(
            f"{path}: the models are not of one base",
            expected=f"the weight of the first model, shape {shapes[0]}",
            got=differs,
            hint="load them onto one",
        )


def _is_same(one: Any, other: Any) -> bool:
    """Whether two arrays are equal, as far as that can be known."""
    unknown = (jax.core.Tracer, jax.ShapeDtypeStruct)
    if one is other or isinstance(one, unknown) or isinstance(other, unknown) or is_key(one):
        return True
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if getattr(one, "sharding", None) == getattr(other, "sharding", None):
        return bool(_equal(one, other)) if isinstance(one, jax.Array) else np.array_equal(one, other)
    are_here = all(getattr(each, "is_fully_addressable", True) for each in (one, other))
    return not are_here or np.array_equal(np.asarray(one), np.asarray(other))


@jax.jit
def _equal(one: Array, other: Array) -> Array:
    # Compared by itself, NaN is the same.
    return jnp.all((one == other) | ((one != one) & (other != other)))


def _of_kernels(path: str, kernels: Sequence[tuple[LoRAKernel, Any]]) -> LoRAKernel:
    """Put the factors of kernels beside each other."""
    first = kernels[0][0]
    for node, _ in kernels:
        if (node.num_rows, node.num_columns) != (first.num_rows, first.num_columns):
            raise StructureError(
                f"{path}: these adapters divide the axes of the kernel in different ways",
                expected=f"{first.num_rows} axes of rows and {first.num_columns} of columns, as in the first model",
                got=f"{node.num_rows} and {node.num_columns}, of a kernel {list(node.shape)}",
                hint="add all of them with the fn that trains, or merge them one by one with lt.lora.merge",
            )
    lora_a = jnp.concatenate([jnp.asarray(node.lora_a) for node, _ in kernels], axis=first.num_stacked)
    lora_b = jnp.concatenate([by * node.scaling * jnp.asarray(node.lora_b) for node, by in kernels], axis=-1)
    return dataclasses.replace(first, lora_a=lora_a, lora_b=lora_b, alpha=float(lora_b.shape[-1]))


def _factors(node: Any) -> tuple[Any, Any]:
    """Return A and B with all scales of their product in them."""
    if isinstance(node, VeRAWeight):
        return node.factors()
    if not isinstance(node, LoRAWeight) or node.lora_magnitude is not None:
        raise StructureError(
            f"an adapter of the kind {kind_of(node)} is no sum of a weight and a correction",
            expected="LoRA, rsLoRA or VeRA",
            got=kind_of(node),
            hint="merge such a model by itself and unweighted, with lt.lora.merge",
        )
    scale = node.scaling if node.layer_scale is None else node.scaling * node.layer_scale[:, None, None]
    lora_a, lora_b = node.factors()
    return jnp.asarray(lora_a), scale * jnp.asarray(lora_b)
