"""Buffers and their owners, from which views, differences, remedies and findings are computed."""

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
"""Roles of buffers that are not arguments; `Buffer.role` explains them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffer:
    """One piece of memory of a compiled program, with its owner.

    Examples:
        >>> Buffer(space="device", role="params", path="0/w", shape=(2, 3), dtype="f32", num_bytes=512,
        ...        padding_bytes=488, start=0, end=9).phase
        'argument'
    """

    space: Space
    """The memory space that holds it."""
    role: str
    """For an argument the caller's role. Otherwise one of `DERIVED_ROLES`. ``activations`` are made in the forward pass
    and read in the backward pass. ``gradients`` are cotangents of arguments, also for each example or microbatch.
    ``copies`` hold only the data of one argument (cast, transposed, sliced, gathered from other devices).
    ``cotangents`` are other results of the backward pass, and ``recomputed`` are activations that it computes again.
    ``workspaces`` are memory that an operation needs in addition to its operands and results (a kernel's scratch,
    indices, steps into which the compiler splits it). ``temporaries`` are all other results of the program.
    ``fragmentation`` is heap that no value can use at the peak. ``unattributed`` has no known owner."""
    path: str = ""
    """Tree path of the argument or output that it is, that it holds a copy of, or whose gradient it is; else empty."""
    phase: Phase = "argument"
    """Phase of the program that makes it; empty for what is not a value (code, fragmentation)."""
    scope: str = ""
    """Scope in which JAX made the operation: the names of its transformations, functions and modules."""
    operation: str = ""
    """The operation that writes it, as XLA names it: ``fusion loop_multiply_fusion.2``."""
    source: str = ""
    """The source line: ``train.py:41 (loss_fn)``."""
    shape: tuple[int, ...] = ()
    """The array's shape on one device."""
    dtype: str = ""
    """XLA's name of the item type: ``f32``, ``bf16``, ``s32``; empty for a tuple or bytes."""
    num_bytes: int
    """Bytes on one device, padding included."""
    padding_bytes: int = 0
    """Bytes among them that hold no element."""
    start: int
    """The first position of the program at which it is alive."""
    end: int
    """The last position at which it is alive."""

    @property
    def label(self) -> str:
        """The shortest text that identifies it: its path, else the end of its scope, its operation or its role."""
        return self.path or "/".join(self.scope.split("/")[-3:]) or self.operation or self.role

    def alive_at(self, moment: int) -> bool:
        """Return whether it is alive at a position of the program."""
        return self.start <= moment <= self.end


def live_bytes(buffers: Iterable[Buffer], num_moments: int) -> list[int]:
    """Return the bytes that are alive at every position of a program.

    Args:
        buffers: the buffers to add up; fragmentation is not alive and is left out.
        num_moments: number of positions of the program.

    Returns:
        One sum per position.
    """
    steps = [0] * (num_moments + 1)
    for buffer in buffers:
        if buffer.role != "fragmentation":
            steps[buffer.start] += buffer.num_bytes
            # A buffer adds its bytes where it starts and removes them after its last position; the running sum is the
            # live bytes.
            steps[buffer.end + 1] -= buffer.num_bytes
    return list(itertools.accumulate(steps[:-1]))


def sum_by_role(buffers: Iterable[Buffer]) -> dict[str, int]:
    """Return the bytes per role, largest first."""
    roles = collections.Counter[str]()
    for buffer in buffers:
        roles[buffer.role] += buffer.num_bytes
    return dict(roles.most_common())


def to_rows(buffers: Sequence[Buffer]) -> list[dict[str, Any]]:
    """Return buffers as plain data, without fields that have their default."""
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
    """Return the buffers that `to_rows` turned into plain data."""
    fields: Iterable[dict[str, Any]] = ({**row, "shape": tuple(row.get("shape", ()))} for row in rows)
    return tuple(Buffer(**values) for values in fields)
