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
    of_layers: list[float] | None
    """Factor of each layer's correction in addition to the node's scale, 0 without an adapter; None: 1 for all."""
    rslora: bool

    @property
    def said(self) -> dict[str, Any]:
        """Rank, alpha and `rslora` of the node."""
        return {"rank": self.rank, "alpha": self.alpha, "rslora": self.rslora}

    def read(self, file: Any, path: Path, keys: Mapping[str, str], leaf: str, shape: tuple[int, ...]) -> dict[str, Any]:
        """Read a leaf of all layers, by the layer's name; A [r, in] and B [out, r] are padded with zeros.

        Padding starts after all tensors are read, so a rank that no tensor has is refused before memory is allocated
        for it.
        """
        axis = {"lora_a": 0, "lora_b": 1}.get(leaf)
        own = {name: tuple(r if at == axis else n for at, n in enumerate(shape)) for name, r in self.ranks.items()}
        read = {name: read_tensor(file, path, keys[name], of_layer) for name, of_layer in own.items()}
        if axis is None:
            return read
        more = {name: [(0, self.rank - r if at == axis else 0) for at in range(2)] for name, r in self.ranks.items()}
        return {name: np.pad(values, more[name]) for name, values in read.items()}


def scales_of(names: Sequence[str], on: Sequence[bool], config: PeftConfig) -> Scales:
    """Return the ranks and scales of a stack's layers.

    Args:
        names: names of all layers.
        on: which layers have an adapter; at least one.
        config: the directory's configuration.
    """
    there = [name for name, is_on in zip(names, on, strict=True) if is_on]
    ranks = {name: config.rank_of(name) for name in there}
    power = 0.5 if config.file.use_rslora else 1.0
    # The node has the largest scale of its layers, and each layer stores its share of it, 1 or less in size.
    scales = {name: config.alpha_of(name) / rank**power for name, rank in ranks.items()}
    rank, largest = max(ranks.values()), max(scales.values(), key=abs)
    of_layers = [scales.get(name, 0.0) / largest for name in names]
    first = there[0]
    is_one = len({(ranks[name], scales[name]) for name in there}) == 1
    alpha = config.alpha_of(first) if is_one else largest * rank**power
    shares = None if all(share == 1 for share in of_layers) else of_layers
    return Scales(rank=rank, alpha=alpha, ranks=ranks, of_layers=shares, rslora=bool(config.file.use_rslora))


def own_ranks(lora_a: np.ndarray, lora_b: np.ndarray) -> list[int]:
    """Return how many components of each layer, A [L, r, in] and B [L, out, r], are more than padding.

    A layer of zeros alone counts as having the full rank. If all layers have the same number, nothing counts as
    padding.
    """
    rank = lora_a.shape[1]
    # A component is used if its row of A or its column of B has a number other than zero.
    used = np.any(lora_a != 0, axis=2) | np.any(lora_b != 0, axis=1)
    found = [int(np.flatnonzero(layer)[-1]) + 1 if layer.any() else rank for layer in used]
    return found if len(set(found)) > 1 else [rank] * len(found)


def of_layer(said: Mapping[str, Any], own: int) -> dict[str, Any]:
    """Return the entries for a layer with fewer components than its node: its own rank, and the same scale."""
    alpha = said["alpha"] * (math.sqrt(own / said["rank"]) if said["rslora"] else own / said["rank"])
    return {**said, "rank": own, "alpha": float(f"{alpha:.{_DIGITS}g}")}


def cut(values: np.ndarray, leaf: str, own: int) -> np.ndarray:
    """Remove the padding from A [r, in] or B [out, r] of a layer."""
    return values[:own] if leaf == "lora_a" else values[:, :own] if leaf == "lora_b" else values
