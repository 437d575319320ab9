"""Report which weights have an adapter, and what the adapters cost."""

from __future__ import annotations

import dataclasses

import numpy as np

from ...core import Tree, format_bytes, leaf_bytes, leaves_with_paths, match_path
from ._adapter import TRAINABLE, kind_of
from ._saved import SavedWeight
from ._sites import adapted_sites
from ._vectors import IA3Weight


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matched:
    """One weight with an adapter."""

    path: str
    """Tree path of the weight."""
    kind: str
    """Such as "LoRA" or "DoRA"."""
    rank: int | None
    """Rank of the adapter; None for (IA)³, and for an array that trains as a whole."""
    shape: tuple[int, ...]
    """Shape of the weight."""
    num_parameters: int
    """Number of trainable parameters, in all layers."""
    trainable_bytes: int
    """Bytes of the trainable parameters."""
    frozen_bytes: int
    """Bytes of other leaves of the adapter, which do not train; the weight is not included."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """All weights of a model that have an adapter."""

    matched: tuple[Matched, ...]
    """One entry per weight, in the order of the tree."""

    @property
    def num_parameters(self) -> int:
        """Number of trainable parameters."""
        return sum(row.num_parameters for row in self.matched)

    @property
    def trainable_bytes(self) -> int:
        """Bytes of the trainable parameters."""
        return sum(row.trainable_bytes for row in self.matched)

    def __str__(self) -> str:
        rows = [
            f"{row.path}: {row.kind}{'' if row.rank is None else f' of rank {row.rank}'} on {list(row.shape)}, "
            f"{row.num_parameters:,} parameters, {format_bytes(row.trainable_bytes)}"
            for row in self.matched
        ]
        total = f"{len(rows)} weights, {self.num_parameters:,} parameters, {format_bytes(self.trainable_bytes)}"
        return "\n".join([*rows, total])


def report(model: Tree) -> Report:
    """Report which weights of a model have an adapter, and what the adapters cost.

    Args:
        model: a model, with or without adapters; shapes are enough.

    Returns:
        The weights with adapters, with parameters and bytes; its text is a table.

    Memory:
        None.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from lowtide.adapters.lora import Config, add
        >>> model = add({"w": jnp.ones((4, 4))}, Config(rank=2, targets="w"), key=jax.random.key(0))
        >>> print(report(model))
        w: LoRA of rank 2 on [4, 4], 16 parameters, 64 B
        1 weights, 16 parameters, 64 B
    """
    rows: list[Matched] = []
    for site in adapted_sites(model):
        leaves = [(path, leaf) for path, leaf in leaves_with_paths(site.node) if path.split("/")[0] != "weight"]
        trainable = [leaf for path, leaf in leaves if match_path(path, TRAINABLE)]
        size = sum(leaf_bytes(leaf) for leaf in trainable)
        rows.append(
            Matched(
                path=site.path,
                kind=kind_of(site.node),
                rank=None if isinstance(site.node, (IA3Weight, SavedWeight)) else site.node.rank,
                shape=tuple(site.weight.shape),
                num_parameters=sum(int(np.prod(leaf.shape)) for leaf in trainable),
                trainable_bytes=size,
                frozen_bytes=sum(leaf_bytes(leaf) for _, leaf in leaves) - size,
            )
        )
    return Report(matched=tuple(rows))
