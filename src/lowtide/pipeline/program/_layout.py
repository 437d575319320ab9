"""Layout of the layers of a stack: which rank holds which layers, and in which order.

Stages are contiguous runs of layers. A rank holds the layers of its stages in turn, and each stage is padded to the
length of the longest. Leaves have shape [R * V * K, ...] and are sharded over the ranks along their first axis, whose
entries are called rows. A padding row is a copy of a layer of the model, and its results are discarded.

Legend: R ranks, V stages per rank, K layers of the longest stage, L layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from ...core import ConfigError, Tree
from ..schedules import Schedule


@dataclasses.dataclass(frozen=True)
class Layout:
    """Assignment of layers to stages."""

    schedule: Schedule
    """The schedule, which has the rank of each stage."""
    layers_per_stage: tuple[int, ...]
    """Number of layers of each stage, from the first stage on."""

    @property
    def num_layers(self) -> int:
        """Number of layers, L."""
        return sum(self.layers_per_stage)

    @property
    def longest(self) -> int:
        """Number of layers of the longest stage, K."""
        return max(self.layers_per_stage)

    @property
    def num_rows(self) -> int:
        """Number of rows, R * V * K."""
        return self.schedule.num_ranks * self.schedule.stages_per_rank * self.longest

    @property
    def is_even(self) -> bool:
        """Whether no row is padding."""
        return self.num_rows == self.num_layers

    def layers_of(self, stage: int) -> range:
        begin = sum(self.layers_per_stage[:stage])
        return range(begin, begin + self.layers_per_stage[stage])

    def rows(self) -> np.ndarray:
        """Return the layer of every row, shape [R * V * K]."""
        stages = [self.layers_of(stage) for stage in self._stages_in_row_order()]
        # A stage without layers copies a layer of a neighbouring stage.
        rows = [np.minimum(layers.start + np.arange(self.longest), max(layers.stop - 1, 0)) for layers in stages]
        return np.concatenate(rows)

    def positions(self) -> np.ndarray:
        """Return the row of every layer, shape [L]."""
        layer_rows = np.zeros(self.num_layers, int)
        for index, stage in enumerate(self._stages_in_row_order()):
            layers = self.layers_of(stage)
            layer_rows[layers.start : layers.stop] = index * self.longest + np.arange(len(layers))
        return layer_rows

    def _stages_in_row_order(self) -> list[int]:
        """List the stages in the order of their rows."""
        return [stage for rank in range(self.schedule.num_ranks) for stage in self.schedule.stages_of(rank)]

    def arrange(self, layers: Tree, mesh: Any, axis: str) -> Tree:
        """Arrange stacked layers in the order of ranks; see `Pipeline.arrange`."""
        return self._take(layers, self.rows(), mesh, axis)

    def restore(self, rows: Tree, mesh: Any, axis: str) -> Tree:
        """Return the rows of layers in the order of the model: undo `arrange` and drop the padding."""
        return self._take(rows, self.positions(), mesh, axis)

    def clear_padding(self, rows: Tree) -> Tree:
        """Set gradients of padding rows to zero; they may be NaN."""
        if self.is_even:
            return rows
        is_layer = np.isin(np.arange(self.num_rows), self.positions())

        def clear(leaf: Any) -> Any:
            return jnp.where(np.expand_dims(is_layer, tuple(range(1, leaf.ndim))), leaf, jnp.zeros((), leaf.dtype))

        return jax.tree.map(clear, rows)

    def _take(self, tree: Tree, rows: np.ndarray, mesh: Any, axis: str) -> Tree:
        def take(leaf: Any) -> Any:
            if np.array_equal(rows, np.arange(leaf.shape[0])):
                return leaf
            spec = getattr(getattr(leaf, "sharding", None), "spec", ())
            sharding = NamedSharding(mesh, PartitionSpec(axis, *spec[1:]))
            if isinstance(leaf, jax.ShapeDtypeStruct):
                return jax.ShapeDtypeStruct((len(rows), *leaf.shape[1:]), leaf.dtype, sharding=sharding)
            taken = jnp.take(jnp.asarray(leaf), rows, axis=0)
            if isinstance(leaf, Tracer) or len(rows) % mesh.shape[axis]:
                return taken
            return jax.device_put(taken, sharding)

        return jax.tree.map(take, tree)


def layout(schedule: Schedule, num_layers: int, layers_per_stage: Sequence[int] | None) -> Layout:
    """Divide layers into stages, evenly by default; raise `ConfigError` for 0 layers or wrong `layers_per_stage`."""
    if not num_layers:
        raise ConfigError("the pipeline has no layers", hint="call first and last without a pipeline")
    if layers_per_stage is None:
        layers_per_even_stage, num_surplus = divmod(num_layers, schedule.num_stages)
        # The first and the last stage also run the first and the last function, so inner stages get the surplus layers.
        order = sorted(range(schedule.num_stages), key=lambda stage: stage in (0, schedule.num_stages - 1))
        layers_per_stage = [
            layers_per_even_stage + (stage in order[:num_surplus]) for stage in range(schedule.num_stages)
        ]
    lengths = tuple(layers_per_stage)
    if len(lengths) != schedule.num_stages or min(lengths) < 0 or sum(lengths) != num_layers:
        expected = f"{schedule.num_stages} numbers of at least 0 that add up to {num_layers}"
        hint = "leave it out to distribute the layers as evenly as possible"
        raise ConfigError(f"layers_per_stage must be {expected}, not {list(lengths)}", hint=hint)
    return Layout(schedule, lengths)
