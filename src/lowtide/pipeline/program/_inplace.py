"""Passes of a stage on buffers that they change in place: values between passes, and gradient totals.

`TracedSplit` passes values between passes as arrays. Between the ticks of a program they are in buffers, where a loop
over layers writes and reads its rows directly. So a residual is never in memory twice. Values of one shape that a pass
leaves share a buffer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...core import Tree
from ..schedules import Waiting
from ..split import Buffers, Environment, Pass, Slot, TracedSplit, Value, shape_of


@dataclasses.dataclass(frozen=True)
class Residual:
    """A value that a pass leaves for a later pass."""

    value: Value
    made: Pass
    last: Pass
    """The pass that reads it last."""
    shape: jax.ShapeDtypeStruct
    num_rows: int
    """Number of rows that a loop writes one by one; 1 for a value that is written whole."""
    is_on_host: bool
    """Whether it is offloaded to the host."""
    buffer: str
    """Buffer that it shares with all values of this shape that the pass leaves."""

    @property
    def num_bytes(self) -> int:
        """Size for one microbatch, over all devices of a rank."""
        return math.prod(self.shape.shape) * self.shape.dtype.itemsize


class InPlace:
    """The passes of one part of the model."""

    def __init__(self, name: str, split: TracedSplit, totals: Sequence[str]) -> None:
        """Initialise from a split.

        Args:
            name: name of the part.
            split: its passes.
            totals: the buffers to which the gradients of its weights are added.
        """
        self.name, self.split, self.totals = name, split, totals
        self.residuals = [
            _residual(split, value, *ends) for ends, values in split.kept.items() for value in values if ends[0] > 0
        ]

    def column(self, number: int) -> str:
        """Return the table column with the slots of a residual."""
        return f"{self.name}/{number}"

    def waiting(self) -> list[Waiting]:
        """List the values that occupy slots of buffers."""
        return [
            Waiting(self.column(i), self.name, one.made.name[0], one.last.name[0], one.buffer)
            for i, one in enumerate(self.residuals)
        ]

    def left_bytes(self, made: Pass, last: Pass) -> int:
        """Return the bytes that one pass of a microbatch leaves and another pass frees.

        Bytes on the host count, too. If a schedule ignored them, they would grow with the number of microbatches.
        """
        return sum(one.num_bytes for one in self.residuals if (one.made, one.last) == (made, last))

    def forward(
        self, buffers: Buffers, cell: dict[str, Any], weights: Tree, hoisted: Any, x: Tree, *extras: Tree
    ) -> tuple[Tree, Buffers]:
        """Run the forward pass; return the stage's result and the buffers."""
        env = self.split.env(weights, hoisted, extras)
        env.update(zip(self.split.arguments.x_values, self.split.arguments.x_arrays(x), strict=True))
        buffers = self._run(Pass.FORWARD, env, buffers, cell, 0)
        return self.split.results(env, buffers), buffers

    def input(
        self, buffers: Buffers, cell: dict[str, Any], begin: Any, weights: Tree, hoisted: Any, dy: Tree, *extras: Tree
    ) -> tuple[Tree, Buffers]:
        """Run the input pass; return the gradient of the input and the buffers.

        Args:
            buffers: buffers by name.
            cell: table entries by column.
            begin: first row of the stage in the totals.
            weights: weights of the stage.
            hoisted: result of `TracedSplit.hoist`.
            dy: cotangents.
            extras: constants.
        """
        env = self.split.env(weights, hoisted, extras)
        env.update(zip(self.split.arguments.dy_values, self.split.arguments.dy_arrays(dy), strict=True))
        buffers = self._run(Pass.INPUT, env, buffers, cell, begin)
        return self.split.dx(env, buffers), buffers

    def weight(
        self, buffers: Buffers, cell: dict[str, Any], begin: Any, weights: Tree, hoisted: Any, *extras: Tree
    ) -> Buffers:
        """Run the weight pass; return the buffers. The arguments are those of `input`."""
        return self._run(Pass.WEIGHT, self.split.env(weights, hoisted, extras), buffers, cell, begin)

    def _run(self, at: Pass, env: Environment, buffers: Buffers, cell: dict[str, Any], begin: Any) -> Buffers:
        buffers = dict(buffers)
        slots = {
            one.value: Slot(one.buffer, cell[self.column(i)] * one.num_rows) for i, one in enumerate(self.residuals)
        }
        env.update((one.value, slots[one.value]) for one in self.residuals if one.made < at <= one.last)
        left = {one.value: slots[one.value] for one in self.residuals if one.made is at}
        given = self.split.gradients(at)
        totals = {atom: Slot(self.totals[i], begin) for i, atom in given if self.split.plan.adds_up(atom)}
        self.split.plan.run(at, env, buffers, left, totals)
        for i, atom in given:
            if not (isinstance(atom, Value) and atom in totals):
                found = jnp.asarray(self.split.plan.read(atom, env, buffers))
                buffers[self.totals[i]] = _add(buffers[self.totals[i]], begin, found)
        return buffers


def _residual(split: TracedSplit, value: Value, made: Pass, last: Pass) -> Residual:
    shape = shape_of(value)
    is_stacked = split.plan.is_stacked(value)
    # If a loop reads some rows of a buffer and writes others, the compiler copies the buffer. So the buffer's name
    # contains the pass that writes it, and later passes only read it.
    is_on_host = value.aval.memory_space == jax.memory.Space.Host
    kind = f"{made.name.lower()}/{'host/' * is_on_host}{'rows' if is_stacked else 'one'}"
    name = f"{kind}/{shape.dtype}/{'x'.join(map(str, shape.shape))}"
    return Residual(value, made, last, shape, shape.shape[0] if is_stacked else 1, is_on_host, name)


def empty_buffer(residual: Residual, num_slots: int) -> Any:
    """Make a buffer with `num_slots` slots in the memory space of its residual."""
    dims = (num_slots, *residual.shape.shape)
    if "rows/" in residual.buffer:
        dims = (num_slots * residual.num_rows, *residual.shape.shape[1:])
    if not residual.is_on_host:
        return jnp.zeros(dims, residual.shape.dtype)
    # The buffer is made row by row, so it is never whole on the device.
    row = jnp.zeros(dims[1:], residual.shape.dtype)
    return lax.scan(lambda _, __: (None, jax.device_put(row, jax.memory.Space.Host)), None, length=dims[0])[1]


def _add(total: Any, begin: Any, found: Any) -> Any:
    if total.shape == found.shape:
        return total + found.astype(total.dtype)
    old = lax.dynamic_slice_in_dim(total, begin, found.shape[0])
    return lax.dynamic_update_slice_in_dim(total, old + found.astype(total.dtype), begin, 0)
