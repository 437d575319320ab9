"""Layers of a stack whose ranks or alphas differ in PEFT's files: one node of the largest rank, padded with zeros.

A component with zeros in its row of A and its column of B adds nothing and has no gradient. So a layer of a lower rank
keeps that rank. The scale of a layer comes from its own rank and alpha, and is stored relative to the node's scale.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ._peft import PeftConfig
from ._tensors import read_tensor

_DIGITS = 7
"""Significant digits of an alpha that is computed from a float32 scale."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scales:
    """Rank and alpha of a node, and those of its layers where they differ."""

    rank: int
    alpha: float
    ranks: Mapping[str, int]
    """Rank of each layer that has an adapter, by the layer's name."""
    layer_scales: list[float] | None
    """Factor of each layer's correction in addition to the node's scale, 0 without an adapter; None: 1 for all."""
    rslora: bool

    @property
    def node_fields(self) -> dict[str, Any]:
        """Rank, alpha and `rslora` of the node."""
        return {"rank": self.rank, "alpha": self.alpha, "rslora": self.rslora}

    def read(self, file: Any, path: Path, keys: Mapping[str, str], leaf: str, shape: tuple[int, ...]) -> dict[str, Any]:
        """Read a leaf of all layers, by the layer's name; A [r, in] and B [out, r] are padded with zeros."""
        # Padding starts after all tensors are read, so a rank that no tensor has is refused before it takes memory.
        axis = {"lora_a": 0, "lora_b": 1}.get(leaf)
        shapes = {
            name: tuple(rank if i == axis else size for i, size in enumerate(shape))
            for name, rank in self.ranks.items()
        }
        tensors = {name: read_tensor(file, path, keys[name], layer_shape) for name, layer_shape in shapes.items()}
        if axis is None:
            return tensors
        padding = {
            name: [(0, self.rank - rank if i == axis else 0) for i in range(2)] for name, rank in self.ranks.items()
        }
        return {name: np.pad(values, padding[name]) for name, values in tensors.items()}


def stack_scales(names: Sequence[str], mask: Sequence[bool], config: PeftConfig) -> Scales:
    """Return the ranks and scales of a stack's layers; `mask` is True for layers with an adapter, at least one."""
    adapted_names = [name for name, is_adapted in zip(names, mask, strict=True) if is_adapted]
    ranks = {name: config.rank_of(name) for name in adapted_names}
    power = 0.5 if config.file.use_rslora else 1.0
    # The node has the largest scale of its layers, and each layer stores its share of it, 1 or less in size.
    scales = {name: config.alpha_of(name) / rank**power for name, rank in ranks.items()}
    rank, largest = max(ranks.values()), max(scales.values(), key=abs)
    layer_scales = [scales.get(name, 0.0) / largest for name in names]
    first_name = adapted_names[0]
    is_uniform = len({(ranks[name], scales[name]) for name in adapted_names}) == 1
    alpha = config.alpha_of(first_name) if is_uniform else largest * rank**power
    stored_scales = None if all(share == 1 for share in layer_scales) else layer_scales
    return Scales(rank=rank, alpha=alpha, ranks=ranks, layer_scales=stored_scales, rslora=bool(config.file.use_rslora))


def used_ranks(lora_a: np.ndarray, lora_b: np.ndarray) -> list[int]:
    """Return how many components of each layer, A [L, r, in] and B [L, out, r], are more than padding.

    A layer of zeros has the full rank. If all layers have the same number, nothing counts as padding.
    """
    rank = lora_a.shape[1]
    # A component is used if its row of A or its column of B has a number other than zero.
    is_used = np.any(lora_a != 0, axis=2) | np.any(lora_b != 0, axis=1)
    ranks = [int(np.flatnonzero(layer)[-1]) + 1 if layer.any() else rank for layer in is_used]
    return ranks if len(set(ranks)) > 1 else [rank] * len(ranks)


def layer_entry(entry: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Return the entries for a layer with fewer components than its node: its own rank, and the same scale."""
    alpha = entry["alpha"] * (math.sqrt(rank / entry["rank"]) if entry["rslora"] else rank / entry["rank"])
    return {**entry, "rank": rank, "alpha": float(f"{alpha:.{_DIGITS}g}")}


def remove_padding(values: np.ndarray, leaf: str, rank: int) -> np.ndarray:
    """Remove the padding from A [r, in] or B [out, r] of a layer."""
    return values[:rank] if leaf == "lora_a" else values[:, :rank] if leaf == "lora_b" else values
