"""Several adapters of one base: small trees that are attached to the base one at a time.

An adapter without a base is the model's tree with nodes that have no weight, and None elsewhere. Nothing is copied in
either direction. A function compiled for one adapter also serves others with the same ranks, alphas and targets.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from ...core import LinearWeight, StructureError, Tree
from ._adapter import REQUIRED_LEAVES, is_adapter, kind_of
from ._kernel import LoRAKernel
from ._model import disable, merge
from ._saved import SavedWeight
from ._sites import is_weight, sites
from ._vectors import IA3Weight, VeRAWeight


def split(model: Tree) -> tuple[Tree, Tree]:
    """Separate a model's adapter from its base.

    Args:
        model: a model with adapters.

    Returns:
        The adapter, a tree of its arrays alone that `attach` puts onto a base; and the base, as `disable` returns it.

    Raises:
        StructureError: when there is no adapter.

    Memory:
        No copy.

    Examples:
        >>> import jax.numpy as jnp
        >>> from lowtide.adapters.lora import LoRAWeight
        >>> node = LoRAWeight(jnp.zeros((2, 2)), jnp.ones((1, 2)), jnp.ones((2, 1)), alpha=3.0)
        >>> adapter, base = split({"w": node, "b": jnp.zeros(2)})
        >>> len(jax.tree.leaves(adapter)), attach(base, adapter)["w"].weight is node.weight
        (2, True)
    """
    base = disable(model)
    return jax.tree.map(
        lambda node: dataclasses.replace(node, weight=None) if is_adapter(node) else None, model, is_leaf=is_weight
    ), base


def attach(base: Tree, adapter: Tree) -> Tree:
    """Put an adapter onto a base; this also works inside `jax.jit`, with both as arguments.

    Args:
        base: a model without adapters: an array, a shape, or a quantised weight wherever the adapter has a node.
        adapter: the first result of `split`, for a model of this base.

    Returns:
        The model with the adapter.

    Raises:
        StructureError: when the base has an adapter, or the adapter is of another model.

    Memory:
        No copy.

    Examples:
        >>> import jax.numpy as jnp
        >>> from lowtide.adapters.lora import LoRAWeight
        >>> node = LoRAWeight(jnp.zeros((2, 2)), jnp.ones((1, 2)), jnp.ones((2, 1)), alpha=3.0)
        >>> adapter, _ = split({"w": node})
        >>> attach({"w": jnp.ones((2, 2))}, adapter)["w"].linear(jnp.ones(2)).tolist()
        [8.0, 8.0]
    """
    base_sites = sites(base)
    if adapted := next((site for site in base_sites if is_adapter(site.node)), None):
        raise StructureError(
            f"{adapted.path}: already has an adapter",
            expected="a base without adapters",
            got=kind_of(adapted.node),
            hint="remove it with lt.lora.split, or add both with lt.lora.combine",
        )
    treedef = jax.tree.structure(base, is_leaf=is_weight)
    try:
        nodes: list[Any] = treedef.flatten_up_to(adapter)
    except (ValueError, TypeError, KeyError) as error:
        raise StructureError(
            "the adapter does not belong to this base",
            got=str(error).splitlines()[0][:200],
            hint="attach it to the model that it was split from, or one of the same configuration",
        ) from error
    if not any(is_adapter(node) for node in nodes):
        raise StructureError("the tree has no adapter", hint="pass the first result of lt.lora.split")
    for site, node in zip(base_sites, nodes, strict=True):
        if node is not None and not (is_adapter(node) and _fits(node, tuple(getattr(site.weight, "shape", ())))):
            raise StructureError(
                f"{site.path}: the adapter does not fit the base",
                expected=f"an adapter of a weight {list(getattr(site.weight, 'shape', ()))}",
                got=f"{type(node).__name__} with {[list(leaf.shape) for leaf in jax.tree.leaves(node)]}",
                hint="attach it to the model that it was split from, or one of the same shapes",
            )
        if isinstance(node, LoRAKernel) and isinstance(site.node, LinearWeight):
            raise StructureError(
                f"{site.path}: the adapter of a kernel or an embedding needs its weight as an array",
                expected="an array",
                got=type(site.node).__name__,
                hint="do not quantise this weight, or call lt.dequantize first",
            )
    return treedef.unflatten(
        [
            site.node if node is None else dataclasses.replace(node, weight=site.node)
            for site, node in zip(base_sites, nodes, strict=True)
        ]
    )


def unmerge(model: Tree, adapter: Tree) -> Tree:
    """Remove an adapter that `merge` folded into the weights, in float32, rounded once to the dtype of W.

    Args:
        model: a merged model.
        adapter: from `split`, before the merge.

    Returns:
        The model before the merge, up to the rounding of both steps (in bfloat16 up to two units in the last place).

    Raises:
        StructureError: for DoRA, whose directions are not those of the merged weights, and for an array that trained as
            a whole, whose old values are gone; and when the adapter is of another model.
        NonFiniteError: when a weight has a value that is not finite, such as where (IA)³ scaled by zero.

    Memory:
        As `merge`: a new array for each adapted weight; the given model is not changed.

    Examples:
        >>> import jax.numpy as jnp
        >>> from lowtide.adapters.lora import LoRAWeight, merge
        >>> node = LoRAWeight(jnp.zeros((2, 2)), jnp.ones((1, 2)), jnp.ones((2, 1)), alpha=3.0)
        >>> unmerge(merge({"w": node}), split({"w": node})[0])["w"].tolist()
        [[0.0, 0.0], [0.0, 0.0]]
    """
    attached = attach(model, adapter)
    for site in sites(attached):
        if isinstance(site.node, SavedWeight) or getattr(site.node, "lora_magnitude", None) is not None:
            description = "an array that trained as a whole" if isinstance(site.node, SavedWeight) else "DoRA"
            raise StructureError(
                f"{site.path}: {description} cannot be unmerged",
                expected="LoRA, rsLoRA, VeRA or (IA)³",
                got=kind_of(site.node),
                hint="keep the base, which merging does not change",
            )
    return merge(jax.tree.map(lambda node: _invert(node) if is_adapter(node) else node, attached, is_leaf=is_weight))


def _invert(node: Any) -> Any:
    if isinstance(node, IA3Weight):
        return dataclasses.replace(node, lora_scale=1 / node.lora_scale)
    # The correction is linear in B, and with first factors it is B A minus their product, so both B are negated.
    names = ["lora_lambda_b"] if isinstance(node, VeRAWeight) else ["lora_b", "start_b"]
    leaves = {name: getattr(node, name, None) for name in names}
    return dataclasses.replace(node, **{name: -leaf for name, leaf in leaves.items() if leaf is not None})


def _fits(node: Any, shape: tuple[int, ...]) -> bool:
    """Return whether the leaves of an adapter have the axes of a weight."""
    if any(getattr(node, name, None) is None for name in REQUIRED_LEAVES.get(type(node), ()) if name != "weight"):
        return False
    if isinstance(node, SavedWeight):
        return node.lora_saved is not None and tuple(node.lora_saved.shape) == shape
    if isinstance(node, LoRAKernel):
        stack = len(shape) - node.num_rows - node.num_columns
        split_at = stack + node.num_rows
        a, b = tuple(node.lora_a.shape), tuple(node.lora_b.shape)
        return (
            stack >= 0
            and b[:-1] == shape[:split_at]
            and (*a[:stack], *a[stack + 1 :])
            == (
                *shape[:stack],
                *shape[split_at:],
            )
        )
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
