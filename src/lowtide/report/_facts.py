"""The data of reports and of their differences: buffers with their owners, and figures derived from them.

The owner of a buffer is the argument, output or operation to which its bytes belong. A position, or moment, is an index
into the operations of the program in the order of execution.

All figures come from the compiled program. They are XLA's own, or derived from the executable's layouts so that parts
add up to XLA's total exactly. XLA's `peak_memory_in_bytes` is not used, because on a TPU it counts host bytes, too.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any, Literal, get_args

from ..core import format_bytes
from ..targets import Target

Space = Literal["device", "host"]
Phase = Literal["argument", "output", "forward", "recompute", "backward", "update", ""]

SPACES: tuple[Space, ...] = get_args(Space)
DIFF_SCHEMA_VERSION = 1
"""Version of the JSON that `MemoryDiff.to_json` writes."""
SCHEMA_VERSION = 2
"""Version of the JSON that `MemoryReport.to_json` writes; it changes when a key gets another meaning or is removed."""

_IS_COMPUTED = {
    "activations": True,
    "gradients": False,
    "copies": False,
    "cotangents": True,
    "recomputed": True,
    "workspaces": True,
    "temporaries": True,
    "outputs": False,
    "constants": False,
    "code": False,
    "fragmentation": False,
    "unattributed": False,
}
"""Maps a role to whether its buffers are assumed to grow with the batch; gradients keep the shapes of arguments."""
DERIVED_ROLES = tuple(_IS_COMPUTED)
"""Roles of buffers that are not arguments; `Buffer.role` explains them."""
COMPUTED_ROLES = tuple(role for role, is_computed in _IS_COMPUTED.items() if is_computed)
"""Roles whose buffers are assumed to grow with the batch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffer:
    """One piece of memory of a compiled program, with its owner.

    Examples:
        >>> Buffer(space="device", role="params", path="params/w", shape=(2, 3), dtype="f32", num_bytes=512,
        ...        padding_bytes=488, start=0, end=9).phase
        'argument'
    """

    space: Space
    """The memory space that holds the buffer."""
    role: str
    """For an argument, the role from the caller of `analyze`; for any other buffer, one of `DERIVED_ROLES`.
    ``activations`` are made in the forward pass and read in the backward pass. ``gradients`` are cotangents of
    arguments, also of single examples or microbatches. ``copies`` hold only the data of one argument (cast, transposed,
    sliced, gathered from other devices). ``cotangents`` are other results of the backward pass, and ``recomputed`` are
    activations that the backward pass computes again. ``workspaces`` are memory that an operation needs in addition to
    operands and results (a kernel's scratch, indices, steps into which the compiler splits it). ``temporaries`` are all
    other results inside of the program. ``outputs`` are results of the program that do not reuse an argument's buffer.
    ``constants`` and ``code`` belong to the program. ``fragmentation`` are unused bytes of the heap at the peak.
    ``unattributed`` has no known owner."""
    path: str = ""
    """Tree path of an argument or output; for a copy or a gradient, the path of its argument; else empty."""
    phase: Phase = "argument"
    """Phase of the program that makes the buffer; empty for code and fragmentation, which hold no values."""
    scope: str = ""
    """Scope in which JAX made the operation: the names of its transformations, functions and modules."""
    operation: str = ""
    """Opcode and XLA's name of the operation that writes the buffer: ``fusion loop_multiply_fusion.2``."""
    source: str = ""
    """Source line of the operation: ``train.py:41 (loss_fn)``."""
    shape: tuple[int, ...] = ()
    """The array's shape on one device."""
    dtype: str = ""
    """XLA's name of the dtype: ``f32``, ``bf16``, ``s32``; empty if the buffer is not an array."""
    num_bytes: int
    """Bytes on one device, padding included."""
    padding_bytes: int = 0
    """Bytes of `num_bytes` that hold no element."""
    start: int
    """The first position of the program at which the buffer is alive."""
    end: int
    """The last position at which the buffer is alive."""

    @property
    def label(self) -> str:
        """A short name: the path, else the last three parts of the scope, else the operation, else the role."""
        return self.path or "/".join(self.scope.split("/")[-3:]) or self.operation or self.role

    def alive_at(self, moment: int) -> bool:
        """Return whether the buffer is alive at a position of the program."""
        return self.start <= moment <= self.end


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpaceBytes:
    """Bytes that one program needs in one memory space of one device.

    Examples:
        >>> SpaceBytes(argument_bytes=10, output_bytes=6, alias_bytes=4, temp_bytes=3, code_bytes=1).total_bytes
        16
    """

    argument_bytes: int = 0
    """Arguments, padded as they are stored."""
    output_bytes: int = 0
    """Outputs, including those that are written into donated arguments."""
    alias_bytes: int = 0
    """Outputs that are written into donated arguments, and so need no additional bytes."""
    temp_bytes: int = 0
    """Memory that the program allocates while it runs, fragmentation included."""
    code_bytes: int = 0
    """The program itself and its constants."""

    @property
    def total_bytes(self) -> int:
        """Bytes in this space while the program runs: argument + output - alias + temp + code."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes + self.code_bytes


def versions() -> dict[str, str | None]:
    """Map the packages that determine a compiled figure to their versions; None if a package is not installed."""
    package_versions: dict[str, str | None] = {}
    for name in ("lowtide", "jax", "jaxlib", "libtpu"):
        try:
            package_versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            package_versions[name] = None
    # The compiler for GPUs is a plugin; its package is named after the major version of CUDA.
    for name in ("jax-cuda12-plugin", "jax-cuda13-plugin"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            package_versions[name] = metadata.version(name)
    return package_versions


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class ReportFacts:
    """The data of a `MemoryReport`, for views and differences; made by `lowtide.memory.analyze`."""

    target: Target
    """The hardware the program was compiled for."""
    device: SpaceBytes
    """Bytes in the device's own memory (HBM on an accelerator)."""
    host: SpaceBytes
    """Bytes in the memory of the machine that holds the device; offloaded arrays are there."""
    by_role: Mapping[str, int]
    """Device bytes per role; the values add up to `device_bytes`. Arguments have roles from the caller of `analyze`, or
    ``other``. ``unattributed`` are argument bytes that belong to no leaf, such as tables of pointers. ``outputs``
    excludes outputs in the buffers of arguments. ``temporaries`` and ``code`` are all other bytes."""
    host_by_role: Mapping[str, int]
    """Host bytes per role, as in `by_role`; the values add up to `host_bytes`."""
    buffers: tuple[Buffer, ...] = ()
    """Every piece of memory of the program, with its owner and the positions between which it is alive."""
    moments: tuple[str, ...] = ("",)
    """Operation at each position of the program, in execution order; every loop body occurs once."""
    peak_moment: int = 0
    """The position at which most device bytes are alive."""
    host_peak_moment: int = 0
    """The position at which most host bytes are alive."""
    notes: tuple[str, ...] = ()
    """Facts that a reader needs to judge the figures."""
    versions: Mapping[str, str | None] = dataclasses.field(default_factory=versions)
    """Versions of the packages that determine the figures, at the time of the report."""

    @property
    def peak(self) -> tuple[Buffer, ...]:
        """The buffers on the device at the peak, largest first; the bytes add up to `device_bytes`."""
        return self.alive_at(self.peak_moment)

    @property
    def host_peak(self) -> tuple[Buffer, ...]:
        """The buffers on the host at its peak, largest first; the bytes add up to `host_bytes`."""
        return self.alive_at(self.host_peak_moment, space="host")

    @property
    def peak_by_role(self) -> dict[str, int]:
        """Bytes of `peak` per role, largest first."""
        return sum_by_role(self.peak)

    def alive_at(self, moment: int, *, space: Space = "device") -> tuple[Buffer, ...]:
        """List the buffers that are alive at a position of the program, largest first.

        Args:
            moment: a position in `moments`.
            space: the memory space.
        """
        alive = [b for b in self.buffers if b.space == space and b.alive_at(moment)]
        return tuple(sorted(alive, key=lambda b: -b.num_bytes))

    def live_bytes(self, *, space: Space = "device") -> list[int]:
        """Return the number of live bytes at each position in `moments`, without fragmentation."""
        return live_bytes([b for b in self.buffers if b.space == space], len(self.moments))

    @property
    def device_bytes(self) -> int:
        """Bytes on one device while the program runs."""
        return self.device.total_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory, for one device, while the program runs."""
        return self.host.total_bytes

    @property
    def margin_bytes(self) -> int | None:
        """Device bytes that program and reserve leave free; negative if they do not fit, None for unknown capacity."""
        budget = self.target.budget_bytes
        return None if budget is None else budget - self.device_bytes

    @property
    def host_margin_bytes(self) -> int | None:
        """Free bytes in this device's share of host memory; negative if too small, None if the share is unknown."""
        return None if self.target.host_bytes is None else self.target.host_bytes - self.host_bytes

    @property
    def fits(self) -> bool | None:
        """Whether the program fits into the device (without the target's reserve) and into host memory.

        False if host memory is too small, even if the device's capacity is unknown. Otherwise None if that capacity is
        unknown. Host memory of unknown size counts as large enough.
        """
        if self.host_bytes and self.host_margin_bytes is not None and self.host_margin_bytes < 0:
            return False
        return None if self.margin_bytes is None else self.margin_bytes >= 0

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, the content of `to_json`."""
        return {
            "schema_version": SCHEMA_VERSION,
            "figures": "compiled",
            "target": dataclasses.asdict(self.target),
            "device_bytes": self.device_bytes,
            "host_bytes": self.host_bytes,
            "fits": self.fits,
            "margin_bytes": self.margin_bytes,
            "host_margin_bytes": self.host_margin_bytes,
            "device": {**dataclasses.asdict(self.device), "total_bytes": self.device_bytes},
            "host": {**dataclasses.asdict(self.host), "total_bytes": self.host_bytes},
            "by_role": dict(self.by_role),
            "host_by_role": dict(self.host_by_role),
            "buffers": _to_rows(self.buffers),
            "moments": list(self.moments),
            "peak_moment": self.peak_moment,
            "host_peak_moment": self.host_peak_moment,
            "notes": list(self.notes),
            "versions": dict(self.versions),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiffRow:
    """Bytes of one owner at the peak, before and after.

    Examples:
        >>> DiffRow(space="device", role="params", owner="w", dtype="f32", before_bytes=4, after_bytes=6).delta_bytes
        2
    """

    space: Space
    """The memory space."""
    role: str
    """The role, as in `Buffer`."""
    owner: str
    """A path, else a scope, else an operation without its number, else the role."""
    dtype: str = ""
    """XLA's name of the dtype."""
    before_bytes: int = 0
    """Bytes at the peak of the first report."""
    after_bytes: int = 0
    """Bytes at the peak of the second report."""
    before_count: int = 0
    """Number of buffers at the peak of the first report."""
    after_count: int = 0
    """Number of buffers at the peak of the second report."""

    @property
    def delta_bytes(self) -> int:
        """Bytes after minus bytes before."""
        return self.after_bytes - self.before_bytes


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class DiffFacts:
    """The data of a `MemoryDiff`, for views."""

    before: ReportFacts
    """The first report."""
    after: ReportFacts
    """The second report."""
    rows: tuple[DiffRow, ...]
    """One row per owner, largest change first. In each space, the changes add up to the difference of the totals."""
    notes: tuple[str, ...] = ()
    """Facts that a reader needs for the comparison, such as different targets or versions."""

    def delta_bytes(self, *, space: Space = "device") -> int:
        """Return the bytes of the second report minus those of the first.

        Args:
            space: the memory space.
        """
        return space_total(self.after, space) - space_total(self.before, space)

    def by_role(self, *, space: Space = "device") -> dict[str, tuple[int, int]]:
        """Map each role to its (before, after) bytes at the peaks of both reports, largest change first.

        Args:
            space: the memory space.
        """
        sizes: dict[str, tuple[int, int]] = {}
        for row in self.rows:
            if row.space == space:
                before, after = sizes.get(row.role, (0, 0))
                sizes[row.role] = (before + row.before_bytes, after + row.after_bytes)
        return dict(sorted(sizes.items(), key=lambda item: -abs(item[1][1] - item[1][0])))

    def to_dict(self) -> dict[str, Any]:
        """Return the difference as plain data, the content of `to_json`, with both reports."""
        return {
            "diff_schema_version": DIFF_SCHEMA_VERSION,
            "delta_bytes": self.delta_bytes(),
            "host_delta_bytes": self.delta_bytes(space="host"),
            "by_role": {space: self.by_role(space=space) for space in SPACES},
            "rows": [{**vars(row), "delta_bytes": row.delta_bytes} for row in self.rows],
            "notes": list(self.notes),
            "before": self.before.to_dict(),
            "after": self.after.to_dict(),
        }


def live_bytes(buffers: Iterable[Buffer], num_moments: int) -> list[int]:
    """Return the number of live bytes at each position of a program.

    Args:
        buffers: the buffers to add up; those of the role ``fragmentation`` are left out.
        num_moments: number of positions of the program.

    Returns:
        One sum per position.
    """
    deltas = [0] * (num_moments + 1)
    for buffer in buffers:
        if buffer.role != "fragmentation":
            deltas[buffer.start] += buffer.num_bytes
            # Bytes are added at the first position and removed after the last one; the running sum is the live bytes.
            deltas[buffer.end + 1] -= buffer.num_bytes
    return list(itertools.accumulate(deltas[:-1]))


def sum_by_role(buffers: Iterable[Buffer]) -> dict[str, int]:
    """Return the bytes per role, largest first."""
    roles = collections.Counter[str]()
    for buffer in buffers:
        roles[buffer.role] += buffer.num_bytes
    return dict(roles.most_common())


def _to_rows(buffers: Sequence[Buffer]) -> list[dict[str, Any]]:
    """Return buffers as plain data, without fields that have their default value."""
    defaults = {f.name: f.default for f in dataclasses.fields(Buffer) if f.default is not dataclasses.MISSING}
    return [
        {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in vars(buffer).items()
            if name not in defaults or value != defaults[name]
        }
        for buffer in buffers
    ]


def signed(num_bytes: int) -> str:
    """Format a difference of bytes: ``+1.50 GiB``, ``-512 B``, ``0 B``."""
    return f"+{format_bytes(num_bytes)}" if num_bytes > 0 else format_bytes(num_bytes)


def space_total(report: ReportFacts, space: Space) -> int:
    """Return the bytes of a report in one space."""
    return report.device_bytes if space == "device" else report.host_bytes
