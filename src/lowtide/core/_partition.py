"""Split a tree into trainable and frozen leaves, and combine the halves again.

Both halves keep the structure of the tree, with `None` (an empty subtree in JAX) wherever the other half holds the
leaf. Each half therefore has only its own leaves, and a function that maps over it costs nothing for the others. The
idea is Equinox's `partition`/`combine`. Deviations: leaves are selected by path, and ambiguous input (a pattern without
a match, an array shared by both halves) is an error.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ._errors import SelectionError, StateError, StructureError
from ._paths import Tree, is_array_like, leaves_with_paths, path_str
from ._select import Selector, select

_HOLD_ONCE = "hold the array at one path and use it twice in the model, or untie it with jnp.array(leaf, copy=True)"


def partition(tree: Tree, selector: Selector) -> tuple[Tree, Tree]:
    """Split a tree into the selected leaves and the rest.

    Args:
        tree: any pytree (a dictionary, an Equinox module, NNX state, ...).
        selector: glob patterns on tree paths, or a predicate ``(path, leaf) -> bool``.

    Returns:
        ``(selected, unselected)``, both with the structure of `tree` and `None` where the other half holds the leaf.

    Raises:
        SelectionError: when a pattern matches nothing, or when one array is at both a selected and an unselected path.
            Training would silently untie the two paths, and donating one half would delete the array of the other.

    Memory:
        No copy: both trees refer to the arrays of `tree`.

    Examples:
        >>> partition({"base": 1.0, "lora_a": 2.0}, "lora_*")
        ({'base': None, 'lora_a': 2.0}, {'base': 1.0, 'lora_a': None})
    """
    mask = select(tree, selector)
    leaves, treedef = jax.tree.flatten(tree)
    _refuse_split_sharing(tree, mask)
    selected = treedef.unflatten([leaf if chosen else None for leaf, chosen in zip(leaves, mask, strict=True)])
    unselected = treedef.unflatten([None if chosen else leaf for leaf, chosen in zip(leaves, mask, strict=True)])
    return selected, unselected


def combine(*trees: Tree) -> Tree:
    """Combine the halves of `partition`, or any trees with disjoint leaves.

    Args:
        *trees: trees of the same structure, with `None` where a tree lacks a leaf.

    Returns:
        The tree with every leaf of every argument.

    Raises:
        StructureError: when the structures differ, or two trees hold a leaf at the same path.

    Memory:
        No copy.

    Examples:
        >>> combine({"a": None, "b": 2.0}, {"a": 1.0, "b": None})
        {'a': 1.0, 'b': 2.0}
    """

    def pick(path: Any, *leaves: Any) -> Any:
        present = [leaf for leaf in leaves if leaf is not None]
        if len(present) > 1:
            raise StructureError(
                f"{path_str(path)}: {len(present)} trees hold this leaf",
                expected="each leaf in exactly one tree",
                hint="combine the two halves that partition returned",
            )
        return present[0] if present else None

    try:
        # `None` is an empty subtree to JAX: without `is_leaf` two complementary halves would differ in structure.
        return jax.tree_util.tree_map_with_path(pick, *trees, is_leaf=lambda leaf: leaf is None)
    except StructureError:
        raise
    except ValueError as error:
        raise StructureError(
            "the trees to combine have different structures",
            got=str(error).splitlines()[0],
            hint="combine the two halves that partition returned, without changing their structure",
        ) from error


def shared_leaves(tree: Tree) -> list[list[str]]:
    """Group the paths that hold the same array object (tied weights)."""
    by_identity: dict[int, list[str]] = {}
    for path, leaf in leaves_with_paths(tree):
        if isinstance(leaf, (jax.Array, np.ndarray)):
            by_identity.setdefault(id(leaf), []).append(path)
    return [paths for paths in by_identity.values() if len(paths) > 1]


def refuse_shared(*parts: Tree) -> None:
    """Raise when two trainable paths hold the same array, since each path would get only a part of its gradient.

    Args:
        *parts: trees of trainable leaves, or of leaves that a step changes.

    Raises:
        SelectionError: with both paths. Inside `jit` the paths hold different tracers, so sharing is not detected.
    """
    for paths in shared_leaves(parts):
        first, second = (path.partition("/")[2] for path in paths[:2])
        raise SelectionError(
            f"{first} and {second} are the same array, and both are trainable",
            expected="one array at each trainable path",
            hint=_HOLD_ONCE,
        )


def refuse_consumed(*trees: Tree) -> None:
    """Raise when a trainer or another donating function has consumed arrays of a tree.

    Args:
        *trees: any pytrees.

    Raises:
        StateError: with the path of the first such array.
    """
    leaves = [pair for tree in trees for pair in leaves_with_paths(tree)]
    deleted = [path for path, leaf in leaves if isinstance(leaf, jax.Array) and leaf.is_deleted()]
    if deleted:
        raise StateError(
            f"{deleted[0]} was consumed by another trainer or a donating function",
            expected="arrays that nothing else consumes",
            got=f"{len(deleted)} deleted arrays",
            hint="use the trainer's arrays, trainer.model, or give each trainer a copy: jax.tree.map(jnp.array, model)",
        )


def _refuse_split_sharing(tree: Tree, mask: list[bool]) -> None:
    groups = shared_leaves(tree)
    if not groups:
        return
    chosen = {path for (path, _), is_selected in zip(leaves_with_paths(tree), mask, strict=True) if is_selected}
    for paths in groups:
        selected_paths = [path for path in paths if path in chosen]
        if selected_paths and len(selected_paths) < len(paths):
            unselected_paths = [path for path in paths if path not in chosen]
            raise SelectionError(
                f"{selected_paths[0]} is selected but the same array at {unselected_paths[0]} is not",
                expected="both paths selected, neither, or two separate arrays",
                hint=_HOLD_ONCE,
            )


def split_static(model: Tree) -> tuple[Tree, Tree]:
    """Split a model into its numeric leaves and all others, such as an Equinox module's activation function."""
    arrays = jax.tree.map(lambda leaf: leaf if is_array_like(leaf) else None, model)
    return arrays, jax.tree.map(lambda leaf: None if is_array_like(leaf) else leaf, model)
