"""The named values of a function: their bytes, and the FLOPs of computing them again.

Both figures matter for the choice between saving, offloading and recomputing. FLOPs count the operations between a
value and the values that exist anyway: the function's arguments and the other named values. Inside a loop, the FLOPs of
a value are counted from the start of the iteration. A loop on the way to a value counts whole, with or without named
values inside.

Limit: names in the forward function of a `custom_vjp` exist only under differentiation, and are not listed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from ..core import format_bytes, leaf_bytes
from ..jaxprs import bodies, called, eqn_flops, fold, kind_of
from ._trace import HIDING, is_name, trace


@dataclasses.dataclass(frozen=True, kw_only=True)
class Name:
    """One name, and all values of one shape that have it."""

    name: str
    """The name from `checkpoint_name` or `lowtide.offload.tag`."""
    shape: tuple[int, ...]
    """Shape of one value."""
    dtype: str
    """Dtype of one value."""
    count: int
    """Number of values: iterations of the enclosing loops times places with the name."""
    bytes: int
    """Bytes of all values together, without a device's padding."""
    flops: int
    """FLOPs to compute all of them again from the arguments and the other named values."""
    hidden: str = ""
    """Why `lowtide.offload.checkpoint` cannot act on it; empty if it can."""


@dataclasses.dataclass(frozen=True)
class Names:
    """The named values of a function, in program order; iterates over its rows."""

    rows: tuple[Name, ...]
    """One row for each name and shape."""

    def __iter__(self) -> Iterator[Name]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name: str) -> Name:
        """Return the first row of a name."""
        return next(row for row in self.rows if row.name == name)

    def __str__(self) -> str:
        if not self.rows:
            return "no value has a name; hint: lt.offload.tag(fn) names the results of matrix products and attention"
        table = [("name", "values", "bytes", "FLOPs to recompute", "")]
        for row in self.rows:
            values = f"{row.count} x {row.dtype}{list(row.shape)}"
            table.append((row.name, values, format_bytes(row.bytes), f"{row.flops:.3g}", row.hidden))
        widths = [max(len(line[column]) for line in table) for column in range(5)]
        marks = "<<>><"  # text to the left, figures to the right
        lines = [
            "  ".join(f"{cell:{mark}{width}}" for cell, mark, width in zip(line, marks, widths, strict=True))
            for line in table
        ]
        return "\n".join(line.rstrip() for line in lines)


def names(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Names:
    """List the named values of a function, with their bytes and the FLOPs to compute them again.

    FLOPs are counted on the traced function: 2mnk for a matrix product, one for each element that another operation
    computes or reduces, none for moving data. XLA's fusion may remove some of them, and XLA may add others.

    Args:
        fn: a function with values named by `jax.ad_checkpoint.checkpoint_name` or `lowtide.offload.tag`.
        *args: its arguments: arrays or `jax.ShapeDtypeStruct`s. Nothing is computed.
        **kwargs: its keyword arguments.

    Returns:
        One row for each name and shape; `str` formats them as a table.

    Memory:
        None. `bytes` of a row is the cost of saving it on the device or offloading it to the host. Inside a
        `jax.shard_map` it counts one device.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from jax.ad_checkpoint import checkpoint_name
        >>> def loss(w, x):
        ...     def body(h, w):
        ...         return jnp.tanh(checkpoint_name(h @ w, "up")), None
        ...     return jax.lax.scan(body, x, w)[0].sum()
        >>> print(names(loss, jax.ShapeDtypeStruct((3, 8, 8), "float32"), jnp.ones((4, 8))))
        name  values              bytes  FLOPs to recompute
        up    3 x float32[4, 8]   384 B            1.54e+03
    """
    closed = trace(fn, args, kwargs).closed
    graph = _Graph(1, "")
    graph.add(closed, [graph.new_value() for _ in closed.in_avals])
    merged: dict[tuple[Any, ...], Name] = {}
    for row in graph.rows():
        key = (row.name, row.shape, row.dtype, row.hidden)
        previous = merged.get(key)
        merged[key] = (
            row
            if previous is None
            else dataclasses.replace(
                previous,
                count=previous.count + row.count,
                bytes=previous.bytes + row.bytes,
                flops=previous.flops + row.flops,
            )
        )
    return Names(tuple(merged.values()))


class _Graph:
    """Operations of one iteration, with calls inlined. A value is a number, computed by one operation or given."""

    def __init__(self, count: int, hidden: str) -> None:
        self._count, self._hidden = count, hidden
        self._num_values = 0
        self._producers: dict[int, tuple[list[int], int, bool]] = {}
        self._order: list[Any] = []  # (operation, value, hidden) for a name, a graph for a body

    def new_value(self) -> int:
        """Return the number of a new given value."""
        self._num_values += 1
        return self._num_values

    def add(self, jaxpr: Any, arguments: list[int], hidden: str = "") -> list[int]:
        """Add the operations of a jaxpr; return the values of its results."""
        hidden = hidden or self._hidden

        def apply(eqn: Any, operands: list[int]) -> list[int]:
            inner_hidden = hidden or HIDING.get(kind_of(eqn), "")
            if (inner := called(eqn)) is not None:
                return self.add(inner, operands, inner_hidden)
            for body in bodies(eqn):  # loops and branches have separate graphs with given arguments
                graph = _Graph(self._count * body.times, inner_hidden)
                graph.add(body.jaxpr, [graph.new_value() for _ in body.jaxpr.in_avals])
                self._order.append(graph)
            results = [self.new_value() for _ in eqn.outvars]
            producer = (operands, eqn_flops(eqn), is_name(eqn))
            self._producers.update((result, producer) for result in results)
            if is_name(eqn):
                self._order.append((eqn, operands[0], hidden))
            return results

        return fold(jaxpr, arguments, apply, lambda *_: self.new_value())

    def rows(self) -> Iterator[Name]:
        """Yield a row for each place with a name, in program order."""
        for entry in self._order:
            if isinstance(entry, _Graph):
                yield from entry.rows()
                continue
            eqn, operand, hidden = entry
            aval = eqn.outvars[0].aval
            yield Name(
                name=eqn.params["name"],
                shape=tuple(aval.shape),
                dtype=str(aval.dtype),
                count=self._count,
                bytes=self._count * leaf_bytes(aval),
                flops=self._count * self._flops(operand),
                hidden=hidden,
            )

    def _flops(self, value: int) -> int:
        """Return the FLOPs of all operations that a value needs, back to arguments and named values."""
        visited, operations, worklist = {value}, dict[int, int](), [value]
        while worklist:
            operands, flops, is_name = self._producers.get(worklist.pop(), ([], 0, True))
            # The key is the operand list, so an operation with several results counts once.
            if is_name:
                continue
            operations[id(operands)] = flops
            worklist += [operand for operand in operands if operand not in visited]
            visited.update(operands)
        return sum(operations.values())
