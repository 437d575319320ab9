"""Memory and FLOPs of every rank of a pipeline, computed from shapes alone.

One program runs on all ranks. So each device reserves the memory that the fullest rank needs, and other ranks use only
a part of it. Temporaries of a running pass depend on the compiler; `lowtide.memory` reports them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import NamedSharding

from ...core import Tree, format_bytes
from ...memory import MemoryReport
from ..schedules import scan_makespan, simulate
from ..split import PassFlops, Unsplit
from ._executor import ResidentArrays, total_dtype
from ._layout import Layout

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankBytes:
    """Memory that one rank uses, in bytes of one of its devices."""

    stages: tuple[int, ...]
    """The stages of the rank."""
    layers: tuple[int, ...]
    """The layers of the model in these stages."""
    weight_bytes: int
    """Bytes of the outer leaves and of the rank's layers, including leaves without a gradient."""
    gradient_bytes: int
    """Bytes of the gradient totals, which are at least float32."""
    waiting_bytes: int
    """Bytes of the slots that the rank uses in device memory, for saved values and for messages from other stages."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageReport:
    """Memory that a pipeline's program reserves on a device, and each rank's use of it; made by `Pipeline.report`.

    Bytes count one device: its shard of arrays that are sharded along other axes of the mesh. A value that only the
    compiler shards, such as activations along ``tensor``, counts whole unless a compiled `memory` shows its shard.
    """

    name: str
    """Name of the schedule."""
    num_microbatches: int
    """Number of parts of the batch."""
    ranks: tuple[RankBytes, ...]
    """Memory of each rank."""
    weight_bytes: int
    """Bytes reserved for outer leaves and layers; every stage counts with the length of the longest."""
    gradient_bytes: int
    """Bytes reserved for gradient totals."""
    buffers: Mapping[str, int]
    """Bytes of the buffers for values between passes. Keys name the pass that writes, and dtype and shape of an entry.
    Buffers with ``host/`` in the key are in host memory: block inputs kept there, and values that a policy offloads."""
    message_bytes: int
    """Bytes of the buffer for messages: activations and cotangents from other stages."""
    hoisted_bytes: int
    """Bytes of values that are computed from weights once for all microbatches: casts, transposes."""
    num_padding_rows: int
    """Number of rows that pad stages to equal length, over all ranks."""
    flops: Mapping[str, PassFlops]
    """FLOPs of the stack's functions in each pass, for one microbatch and all devices of a rank: ``first``, ``blocks``
    (one stage, the longest if uneven) and ``last``, which runs only in I of the last stage."""
    is_split: bool
    """Whether the schedule has separate input and weight passes."""
    time_over_ideal: float
    """Simulated time of the schedule in lockstep, divided by the compute time of the busiest rank. FLOPs stand for the
    time of passes; transfers are not counted."""
    scan_over_ideal: float
    """`time_over_ideal` of a differentiated loop over ticks, which keeps the residuals of all microbatches."""
    limit_bytes: int | None = None
    """Limit of the memory between passes, for which the schedule was chosen (``memory_limit`` of `value_and_grad`), or
    None."""
    memory: MemoryReport | None = None
    """Report of the compiled program, if there is one."""

    @property
    def waiting_bytes(self) -> int:
        """Bytes reserved in device memory for values between passes: buffers and messages."""
        return sum(self.buffers.values()) - self.host_bytes + self.message_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of the buffers in host memory."""
        return sum(size for name, size in self.buffers.items() if "/host/" in name)

    @property
    def held_bytes(self) -> int:
        """Bytes that a device holds throughout the program, without the batch."""
        return self.weight_bytes + self.gradient_bytes + self.waiting_bytes + self.hoisted_bytes

    @property
    def other_bytes(self) -> int | None:
        """Remaining bytes of the compiled program: batch, optimizer state, code, and temporaries of a running pass."""
        return None if self.memory is None else self.memory.device_bytes - self.held_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON, with the device total of `memory` as ``device_bytes`` in place of `memory`."""
        plain = dataclasses.asdict(dataclasses.replace(self, memory=None))
        del plain["memory"]
        device = None if self.memory is None else self.memory.device_bytes
        return {**plain, "held_bytes": self.held_bytes, "other_bytes": self.other_bytes, "device_bytes": device}

    def __rich__(self) -> Group:
        """Draw tables of bytes by rank and FLOPs by pass, and list the operations that the split left whole."""
        from rich.console import Group  # imported here because `import lowtide` does not need it
        from rich.text import Text

        notes = [f"not split: {_describe(operation)}" for part in self.flops.values() for operation in part.unsplit]
        return Group(self._bytes(), "", self._arithmetic(), *map(Text, notes if self.is_split else []))

    def _arithmetic(self) -> Table:
        """Draw the table of FLOPs, with a row for each function of the stack."""
        table = _table("FLOPs of one microbatch", [""], ["F", "I", "W", "--costs"])
        for name, part in self.flops.items():
            counts = (_format_count(count) for count in (part.forward, part.input, part.weight))
            is_stage = name == "blocks"
            table.add_row("blocks of a stage" if is_stage else name, *counts, part.ratio if is_stage else "")
        return table

    def _bytes(self) -> Table:
        """Draw the table of bytes, with a row for each rank, a row for the reserved memory, and the totals."""
        title = f"{self.name}, {self.num_microbatches} microbatches: bytes of one device"
        table = _table(title, ["rank", "stages", "layers"], ["weights", "gradients", "waiting"])
        for index, rank in enumerate(self.ranks):
            sizes = (rank.weight_bytes, rank.gradient_bytes, rank.waiting_bytes)
            table.add_row(
                str(index), _format_ranges(rank.stages), _format_ranges(rank.layers), *map(format_bytes, sizes)
            )
        reserved = (self.weight_bytes, self.gradient_bytes, self.waiting_bytes)
        table.add_row("reserved", "", "", *map(format_bytes, reserved))
        table.add_section()
        rows = {"computed once from weights": self.hoisted_bytes, "waiting, on the host": self.host_bytes}
        rows["limit of waiting memory"] = self.limit_bytes or 0
        if self.memory is not None and self.other_bytes is not None:
            rows["everything else (compiled)"] = self.other_bytes
            rows["one device (compiled)"] = self.memory.device_bytes
        for name, size in rows.items():
            if size:
                table.add_row(name, "", "", "", "", format_bytes(size))
        empty = tuple(index for index, rank in enumerate(self.ranks) if not rank.layers)
        if empty:
            table.add_row("ranks without a layer", "", "", "", "", _format_ranges(empty))
        table.add_row("time over the ideal", "", "", "", "", f"{self.time_over_ideal:.2f}")
        table.add_row("same for a differentiated scan", "", "", "", "", f"{self.scan_over_ideal:.2f}")
        if self.num_padding_rows:
            # The gradients of padding rows are zero, but their weights are copies.
            table.caption = (
                f"{self.num_padding_rows} rows of padding: optimizers that use norms of whole leaves (LAMB) count them"
            )
            table.caption_justify = "left"
        return table


def stage_report(
    resident: ResidentArrays,
    layer_layout: Layout,
    trainable: Tree,
    frozen: Tree,
    *,
    axis: str,
    rows: int,
    num_parts: int,
    num_devices: int,
    memory_limit: int | None,
    memory: MemoryReport | None,
) -> StageReport:
    """Report the memory of a program.

    `trainable` and `frozen` are shapes of ``{"outer": ..., "layers": ...}``, with arranged layers. `rows` is the number
    of rows of a microbatch, which are sharded into `num_parts`. `num_devices` counts the devices of a rank.
    """

    def sizes(tree: Tree, *, is_gradient: bool = False) -> tuple[int, int]:
        """Return the bytes of the outer leaves, and of one row of the layers."""

        def size(leaf: Any) -> int:
            dtype = total_dtype(leaf.dtype) if is_gradient else leaf.dtype
            return leaf.size * dtype.itemsize // _num_parts(leaf, axis)

        outer, layers = (sum(map(size, jax.tree.leaves(tree[name]))) for name in ("outer", "layers"))
        return outer, layers // layer_layout.num_rows

    def shard_bytes(shape: tuple[int, ...], dtype: Any) -> int:
        # Rows are sharded into `num_parts` where they divide evenly. The compiled program may show another shard size.
        parts = num_parts if rows % num_parts == 0 and rows in shape[1:] else 1
        other_counts = [count for count in range(1, num_devices + 1) if num_devices % count == 0]
        shard_counts = (count for count in (parts, *other_counts) if _has_shard(memory, shape, dtype, count))
        return math.prod(shape) * dtype.itemsize // next(shard_counts, parts)

    schedule = resident.schedule
    run = simulate(schedule, resident.costs, lockstep=True)
    per_rank = schedule.stages_per_rank * layer_layout.longest
    buffer_bytes = {name: shard_bytes(shape, dtype) for name, (shape, dtype) in resident.buffers.items()}
    messages = sum(shard_bytes(shape, dtype) for shape, dtype in resident.messages)
    weights = [a + b for a, b in zip(sizes(trainable), sizes(frozen), strict=True)]
    gradients = sizes(trainable, is_gradient=True)
    on_device = {name: size for name, size in buffer_bytes.items() if "/host/" not in name}
    ranks = []
    for rank in range(schedule.num_ranks):
        stages = schedule.stages_of(rank)
        layers = tuple(layer for stage in stages for layer in layer_layout.layers_of(stage))
        waiting = sum(size * resident.used[name][rank] // max(resident.used[name]) for name, size in on_device.items())
        waiting += messages * resident.used["messages"][rank] // max(1, *resident.used["messages"])
        ranks.append(
            RankBytes(
                stages=stages,
                layers=layers,
                weight_bytes=weights[0] + weights[1] * len(layers),
                gradient_bytes=gradients[0] + gradients[1] * len(layers),
                waiting_bytes=waiting,
            )
        )
    return StageReport(
        name=schedule.name,
        num_microbatches=schedule.num_microbatches,
        ranks=tuple(ranks),
        weight_bytes=weights[0] + weights[1] * per_rank,
        gradient_bytes=gradients[0] + gradients[1] * per_rank,
        buffers=dict(sorted(buffer_bytes.items(), key=lambda item: -item[1])),
        message_bytes=messages,
        hoisted_bytes=_hoisted_bytes(resident, (trainable, frozen), per_rank, axis),
        num_padding_rows=layer_layout.num_rows - layer_layout.num_layers,
        flops=resident.flops,
        is_split=schedule.is_split,
        time_over_ideal=run.makespan / max(run.busy),
        scan_over_ideal=scan_makespan(schedule, resident.costs) / max(run.busy),
        limit_bytes=memory_limit,
        memory=memory,
    )


def _table(title: str, texts: Sequence[str], figures: Sequence[str]) -> Table:
    """Make a table with text columns, followed by right-aligned columns of figures."""
    from rich.table import Table

    table = Table(*texts, title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in figures:
        table.add_column(name, justify="right")
    return table


def _format_count(count: int) -> str:
    """Format a number with three digits: ``1.63 G``."""
    power = min(int(f"{count:.2e}".split("e")[1]) // 3, 5)  # power of the rounded number: 999,999 is printed as 1 M
    return f"{count / 1000**power:.3g} {' kMGTP'[power]}".rstrip()


def _describe(operation: Unsplit) -> str:
    share = "" if operation.share is None else f" ({operation.share:.0%} of the backward pass)"
    location = f" at {operation.where}" if operation.where else ""
    return f"{operation.name}{location}{share} computes weight gradients in I\nhint: {operation.hint}"


def _has_shard(memory: MemoryReport | None, shape: tuple[int, ...], dtype: Any, num_parts: int) -> bool:
    """Return whether a program has a buffer for one of an array's `num_parts` shards; only XLA knows all shardings."""
    size = math.prod(shape) * dtype.itemsize // num_parts
    return memory is not None and any(
        buffer.num_bytes - buffer.padding_bytes == size
        and math.prod(buffer.shape) * num_parts == math.prod(shape)
        and len(buffer.shape) == len(shape)
        and all(part and dim % part == 0 for dim, part in zip(shape, buffer.shape, strict=True))
        for buffer in memory.peak
    )


def _num_parts(leaf: Any, axis: str) -> int:
    """Return the number of devices of one rank among which a leaf is sharded."""
    if not isinstance(leaf.sharding, NamedSharding):
        return 1
    names = [name for entry in leaf.sharding.spec for name in ((entry,) if isinstance(entry, str) else entry or ())]
    return math.prod(leaf.sharding.mesh.shape[name] for name in names if name != axis)


def _hoisted_bytes(resident: ResidentArrays, weights: Sequence[Tree], num_rows: int, axis: str) -> int:
    """Return the bytes of hoisted values; a cast or transpose is sharded like the weight of the same dimensions."""
    parts: dict[tuple[int, ...], int] = {}
    for tree in weights:
        for name, leading_axes in (("outer", ()), ("layers", (num_rows,))):
            for leaf in jax.tree.leaves(tree[name]):
                dims = tuple(sorted((*leading_axes, *leaf.shape[len(leading_axes) :])))
                parts[dims] = min(parts.get(dims, _num_parts(leaf, axis)), _num_parts(leaf, axis))
    return sum(
        math.prod(shape) * dtype.itemsize // parts.get(tuple(sorted(shape)), 1) for shape, dtype in resident.hoisted
    )


def _format_ranges(numbers: tuple[int, ...]) -> str:
    """Format ascending numbers, with consecutive numbers as ranges: ``0-3, 7``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs) or "none"
