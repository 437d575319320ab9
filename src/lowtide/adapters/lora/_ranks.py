"""Layers of a stack whose ranks or alphas differ in PEFT's files: one node of the largest rank, padded with zeros.

A component whose row of A and column of B are zeros adds nothing, and has no gradient: a layer of a lower rank stays
one. Its scale is that of its own rank and alpha, as a share of the node's.
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
"""Of an alpha that is computed out of a scale in float32."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scales:
    """Rank and alpha of a node, and of its layers where they differ."""

    rank: int
    alpha: float
    ranks: Mapping[str, int]
    """Of each layer that has an adapter, by its name."""
    of_layers: list[float] | None
    """What a layer's correction is multiplied by beside the node's scale, 0 without an adapter; None: 1."""
    rslora: bool

    @property
    def said(self) -> dict[str, Any]:
        """What the node is made of beside its leaves."""
        return {"rank": self.rank, "alpha": self.alpha, "rslora": self.rslora}

    def read(self, file: Any, path: Path, keys: Mapping[str, str], leaf: str, shape: tuple[int, ...]) -> dict[str, Any]:
        """Read a leaf of all layers, by the layer's name; A [r, in] and B [out, r] are filled up with zeros.

        Nothing is filled up before all are read: a rank that no tensor has is refused until then.
        """
        axis = {"lora_a": 0, "lora_b": 1}.get(leaf)
        own = {name: tuple(r if at == axis else n for at, n in enumerate(shape)) for name, r in self.ranks.items()}
        read = {name: read_tensor(file, path, keys[name], of_layer) for name, of_layer in own.items()}
        if axis is None:
            return read
        more = {name: [(0, self.rank - r if at == axis else 0) for at in range(2)] for name, r in self.ranks.items()}
        return {name: np.pad(values, more[name]) for name, values in read.items()}


def scales_of(names: Sequence[str], on: Sequence[bool], config: PeftConfig) -> Scales:
    """Read ranks and alphas of a stack's layers.

    Args:
        names: of all layers.
        on: which have an adapter; one at least.
        config: the directory's.
    """
    there = [name for name, is_on in zip(names, on, strict=True) if is_on]
    ranks = {name: config.rank_of(name) for name in there}
    power = 0.5 if config.file.use_rslora else 1.0
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

    Where all layers have as many, or a layer has none, nothing is taken for padding.
    """
    rank = lora_a.shape[1]
    used = np.any(lora_a != 0, axis=2) | np.any(lora_b != 0, axis=1)
    found = [int(np.flatnonzero(layer)[-1]) + 1 if layer.any() else rank for layer in used]
    return found if len(set(found)) > 1 else [rank] * len(found)


def of_layer(said: Mapping[str, Any], own: int) -> dict[str, Any]:
    """Return what `adapter_config.json` has to say of a layer with fewer components than its node: the same scale."""
    alpha = said["alpha"] * (math.sqrt(own / said["rank"]) if said["rslora"] else own / said["rank"])
    return {**said, "rank": own, "alpha": float(f"{alpha:.{_DIGITS}g}")}


def cut(values: np.ndarray, leaf: str, own: int) -> np.ndarray:
    """Take the padding off A [r, in] or B [out, r] of a layer."""
    return values[:own] if leaf == "lora_a" else values[:, :own] if leaf == "lora_b" else values
