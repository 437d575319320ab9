"""Columns of batches that a frozen model computes: a teacher, or the reference of preferences.

A separate program computes the columns before each step. So the step holds neither the frozen model nor its
activations. Layers of the frozen model are in host memory, and are streamed to the device one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...core import Tree


class BatchesWithColumns(Sequence[Any]):
    """Batches by number, each with the columns that `columns` computes when the batch is read."""

    def __init__(self, batches: Any, columns: Callable[[Tree], Tree]) -> None:
        self._batches, self._columns = batches, columns

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[index] for index in range(*number.indices(len(self)))]
        batch = self._batches[number]
        return {**batch, **self._columns(batch)}
