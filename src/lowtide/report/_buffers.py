"""Who owns which bytes: the unit of every view, difference, remedy and finding of this room."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Literal

Space = Literal["device", "host"]
Phase = Literal["argument", "output", "forward", "recompute", "backward", "update", ""]

DERIVED_ROLES = (
    "activations",
    "gradients",
    "copies",
    "cotangents",
    "recomputed",
    "workspaces",
    "temporaries",
    "outputs",
    "constants",
    "code",
    "fragmentation",
    "unattributed",
)
"""Roles of what is no argument; `Buffer.role` explains them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffer:
    """One piece of memory of a compiled program, with its owner.

    Examples:
        >>> Buffer(space="device", role="params", path="0/w", shape=(2, 3), dtype="f32", num_bytes=512,
        ...        padding_bytes=488, start=0, end=9).phase
        'argument'
    """

    space: Space
    """The memory it lies in."""
    role: str
    """For an argument the caller's role. Otherwise one of `DERIVED_ROLES`: ``activations`` are made in the forward pass
    and read in the backward pass; ``gradients`` are cotangents of arguments, also for each example or microbatch;
    ``copies`` hold nothing but the data of one argument (cast, transposed, sliced, gathered from other devices);
    ``cotangents`` are what else the backward pass computes, ``recomputed`` the activations that it computes anew;
    ``workspaces`` are what an operation needs beside its operands and results (a kernel's scratch, indices, steps of
    what the compiler makes of it); ``temporaries`` everything else that the program computes; ``fragmentation`` is heap
    that no value can use at the peak; ``unattributed`` has no known owner."""
    path: str = ""
    """The tree path of the argument or output that it is, holds a copy of, or is the gradient of; else empty."""
    phase: Phase = "argument"
    """When the program makes it; empty for what is no value (code, fragmentation)."""
    scope: str = ""
    """Where JAX made the operation: the scopes of its transformations, functions and modules."""
    operation: str = ""
    """The operation that writes it, in XLA's words: ``fusion loop_multiply_fusion.2``."""
    source: str = ""
    """The line of the program: ``train.py:41 (loss_fn)``."""
    shape: tuple[int, ...] = ()
    """The array's shape on one device."""
    dtype: str = ""
    """XLA's name of the item type: ``f32``, ``bf16``, ``s32``; empty for a tuple or bytes."""
    num_bytes: int
    """Bytes on one device, padding included."""
    padding_bytes: int = 0
    """Of them, bytes that hold no element."""
    start: int
    """The first position of the program at which it is alive."""
    end: int
    """The last position at which it is alive."""

    @property
    def label(self) -> str:
        """The shortest text that says what it is: its path, else the end of its scope, else its operation."""
        return self.path or "/".join(self.scope.split("/")[-3:]) or self.operation or self.role

    def alive_at(self, moment: int) -> bool:
        """Whether it takes its bytes at a position of the program."""
        return self.start <= moment <= self.end


def live_bytes(buffers: Iterable[Buffer], num_moments: int) -> list[int]:
    """Bytes alive at every position of a program.

    Args:
        buffers: the buffers to add up; fragmentation is no live byte and is left out.
        num_moments: positions of the program.

    Returns:
        One sum a position.
    """
    steps = [0] * (num_moments + 1)
    for buffer in buffers:
        if buffer.role != "fragmentation":
            steps[buffer.start] += buffer.num_bytes
            steps[buffer.end + 1] -= buffer.num_bytes
    return list(itertools.accumulate(steps[:-1]))


def sum_by_role(buffers: Iterable[Buffer]) -> dict[str, int]:
    """Bytes per role, the largest first."""
    roles = collections.Counter[str]()
    for buffer in buffers:
        roles[buffer.role] += buffer.num_bytes
    return dict(roles.most_common())


def to_rows(buffers: Sequence[Buffer]) -> list[dict[str, Any]]:
    """Buffers as plain data, defaults left out."""
    defaults = {f.name: f.default for f in dataclasses.fields(Buffer) if f.default is not dataclasses.MISSING}
    return [
        {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in vars(buffer).items()
            if name not in defaults or value != defaults[name]
        }
        for buffer in buffers
    ]


def from_rows(rows: Iterable[dict[str, Any]]) -> tuple[Buffer, ...]:
    """Undo `to_rows`."""
    made: Iterable[dict[str, Any]] = ({**row, "shape": tuple(row.get("shape", ()))} for row in rows)
    return tuple(Buffer(**values) for values in made)
