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
    producer: Pass
    last_reader: Pass
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


class InPlacePasses:
    """The passes of one part of the model. `totals` are the buffers to which the gradients of its weights are added."""

    def __init__(self, name: str, split: TracedSplit, totals: Sequence[str]) -> None:
        self.name, self.split, self.totals = name, split, totals
        self.residuals = [
            _residual(split, value, *producer_and_reader)
            for producer_and_reader, values in split.kept.items()
            for value in values
            if producer_and_reader[0] > 0
        ]

    def column(self, index: int) -> str:
        """Return the table column with the slots of a residual."""
        return f"{self.name}/{index}"

    def saved_values(self) -> list[Waiting]:
        """List the values that occupy slots of buffers."""
        return [
            Waiting(self.column(i), self.name, residual.producer.name[0], residual.last_reader.name[0], residual.buffer)
            for i, residual in enumerate(self.residuals)
        ]

    def saved_bytes(self, producer: Pass, last_reader: Pass) -> int:
        """Return the bytes that one pass of a microbatch leaves and another pass frees.

        Bytes on the host count, too. If a schedule ignored them, they would grow with the number of microbatches.
        """
        return sum(
            residual.num_bytes
            for residual in self.residuals
            if (residual.producer, residual.last_reader) == (producer, last_reader)
        )

    def forward(
        self, buffers: Buffers, cell: dict[str, Any], weights: Tree, hoisted: Any, x: Tree, *extras: Tree
    ) -> tuple[Tree, Buffers]:
        """Run the forward pass; return the stage's result and the buffers."""
        env = self.split.env(weights, hoisted, extras)
        env.update(zip(self.split.arguments.x_values, self.split.arguments.x_arrays(x), strict=True))
        buffers = self._run(Pass.FORWARD, env, buffers, cell, 0)
        return self.split.results(env, buffers), buffers

    def input(
        self,
        buffers: Buffers,
        cell: dict[str, Any],
        first_row: Any,
        weights: Tree,
        hoisted: Any,
        dy: Tree,
        *extras: Tree,
    ) -> tuple[Tree, Buffers]:
        """Run the input pass; return the gradient of the input and the buffers.

        `cell` has table entries by column. `first_row` is the first row of the stage in the totals.
        """
        env = self.split.env(weights, hoisted, extras)
        env.update(zip(self.split.arguments.dy_values, self.split.arguments.dy_arrays(dy), strict=True))
        buffers = self._run(Pass.INPUT, env, buffers, cell, first_row)
        return self.split.dx(env, buffers), buffers

    def weight(
        self, buffers: Buffers, cell: dict[str, Any], first_row: Any, weights: Tree, hoisted: Any, *extras: Tree
    ) -> Buffers:
        """Run the weight pass; return the buffers. The arguments are those of `input`."""
        return self._run(Pass.WEIGHT, self.split.env(weights, hoisted, extras), buffers, cell, first_row)

    def _run(self, pass_: Pass, env: Environment, buffers: Buffers, cell: dict[str, Any], first_row: Any) -> Buffers:
        buffers = dict(buffers)
        slots = {
            residual.value: Slot(residual.buffer, cell[self.column(i)] * residual.num_rows)
            for i, residual in enumerate(self.residuals)
        }
        env.update(
            (residual.value, slots[residual.value])
            for residual in self.residuals
            if residual.producer < pass_ <= residual.last_reader
        )
        saved_slots = {
            residual.value: slots[residual.value] for residual in self.residuals if residual.producer is pass_
        }
        gradients = self.split.gradients(pass_)
        totals = {
            atom: Slot(self.totals[i], first_row) for i, atom in gradients if self.split.plan.can_accumulate_rows(atom)
        }
        self.split.plan.run(pass_, env, buffers, saved_slots, totals)
        for i, atom in gradients:
            if not (isinstance(atom, Value) and atom in totals):
                gradient = jnp.asarray(self.split.plan.read(atom, env, buffers))
                buffers[self.totals[i]] = _add_gradient(buffers[self.totals[i]], first_row, gradient)
        return buffers


def _residual(split: TracedSplit, value: Value, producer: Pass, last_reader: Pass) -> Residual:
    shape = shape_of(value)
    is_stacked = split.plan.is_stacked(value)
    # If a loop reads some rows of a buffer and writes others, the compiler copies the buffer. So the buffer's name
    # contains the pass that writes it, and later passes only read it.
    is_on_host = value.aval.memory_space == jax.memory.Space.Host
    kind = f"{producer.name.lower()}/{'host/' * is_on_host}{'rows' if is_stacked else 'one'}"
    name = f"{kind}/{shape.dtype}/{'x'.join(map(str, shape.shape))}"
    return Residual(value, producer, last_reader, shape, shape.shape[0] if is_stacked else 1, is_on_host, name)


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


def _add_gradient(total: Any, first_row: Any, gradient: Any) -> Any:
    if total.shape == gradient.shape:
        return total + gradient.astype(total.dtype)
    current = lax.dynamic_slice_in_dim(total, first_row, gradient.shape[0])
    return lax.dynamic_update_slice_in_dim(total, current + gradient.astype(total.dtype), first_row, 0)
