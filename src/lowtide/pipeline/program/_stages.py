"""What every rank of a pipeline holds throughout its program, and what its passes compute, from shapes alone.

One program runs on all ranks, so each device has the room that the fullest rank needs, and a rank that needs less
leaves some of it empty. What a pass has while it runs is the compiler's: `lowtide.memory` reports it.
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
from ._executor import Held, total_dtype
from ._layout import Layout

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankBytes:
    """One rank: what it uses of a device's memory."""

    stages: tuple[int, ...]
    """Its stages."""
    layers: tuple[int, ...]
    """The layers of the model in them."""
    weight_bytes: int
    """Outer leaves and its layers, those that have no gradient, too."""
    gradient_bytes: int
    """Totals of what has gradients, float32 at least."""
    waiting_bytes: int
    """Slots that it uses in device memory: of what passes leave to later ones, and of activations from other ranks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageReport:
    """What a device holds throughout a pipeline's program, and what each rank uses of it; made by `Pipeline.report`.

    Bytes are those of one device; of arrays that are divided along other axes of the mesh, its part. What the compiler
    divides by itself, as activations along ``tensor``, is counted whole where no compiled `memory` shows its part.
    """

    name: str
    """Of the schedule."""
    num_microbatches: int
    """Parts of the batch."""
    ranks: tuple[RankBytes, ...]
    """By rank."""
    weight_bytes: int
    """Room for outer leaves and layers: of uneven stages, for those of the longest."""
    gradient_bytes: int
    """Room for their gradients."""
    buffers: Mapping[str, int]
    """The buffers for what passes leave to later ones, by the pass that leaves it, dtype and shape of an entry; with
    ``host/`` those in host memory: blocks' inputs that wait there, and what a policy offloads."""
    message_bytes: int
    """The buffer for activations and cotangents of other ranks; with the others it is what waits."""
    hoisted_bytes: int
    """What is made of weights once for all microbatches: casts, transposes."""
    num_padding_rows: int
    """Rows of the layers, on all ranks, that make stages equally long."""
    flops: Mapping[str, PassFlops]
    """Arithmetic of the stack's functions in each pass, of one microbatch, by all devices of a rank: ``first``,
    ``blocks`` (those of a stage, of uneven ones the longest) and ``last``, which runs in the last stage's I alone."""
    is_split: bool
    """Whether the schedule has I and W apart."""
    time_over_ideal: float
    """How long it takes on ranks in lockstep, whose passes take as long as their FLOPs say, over what the busiest rank
    computes alone. Simulated; transfers are not counted."""
    scan_over_ideal: float
    """The same of one loop over ticks that is differentiated, which keeps what all microbatches leave."""
    limit_bytes: int | None = None
    """What waits was limited to when the schedule was chosen, if it was (`value_and_grad`'s ``memory_limit``)."""
    memory: MemoryReport | None = None
    """Of the compiled program, if there is one."""

    @property
    def waiting_bytes(self) -> int:
        """Room for what waits in device memory: buffers and messages."""
        return sum(self.buffers.values()) - self.host_bytes + self.message_bytes

    @property
    def host_bytes(self) -> int:
        """Of the buffers those in host memory."""
        return sum(size for name, size in self.buffers.items() if "/host/" in name)

    @property
    def held_bytes(self) -> int:
        """What is on a device throughout the program, beside the batch."""
        return self.weight_bytes + self.gradient_bytes + self.waiting_bytes + self.hoisted_bytes

    @property
    def other_bytes(self) -> int | None:
        """Of the compiled program all others: the batch, optimizer state, code, and what a pass has while it runs."""
        return None if self.memory is None else self.memory.device_bytes - self.held_bytes

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        plain = dataclasses.asdict(dataclasses.replace(self, memory=None))
        del plain["memory"]
        device = None if self.memory is None else self.memory.device_bytes
        return {**plain, "held_bytes": self.held_bytes, "other_bytes": self.other_bytes, "device_bytes": device}

    def __rich__(self) -> Group:
        """Draw a table of bytes by rank, one of arithmetic by pass, and what the split had to leave whole."""
        from rich.console import Group  # `import lowtide` does not need what draws
        from rich.text import Text

        notes = [f"not split: {_described(one)}" for part in self.flops.values() for one in part.unsplit]
        return Group(self._bytes(), "", self._arithmetic(), *map(Text, notes if self.is_split else []))

    def _arithmetic(self) -> Table:
        """Draw a row for each function of the stack."""
        table = _table("FLOPs of one microbatch", [""], ["F", "I", "W", "--costs"])
        for name, part in self.flops.items():
            counts = (_short(count) for count in (part.forward, part.input, part.weight))
            is_stage = name == "blocks"
            table.add_row("blocks of a stage" if is_stage else name, *counts, part.ratio if is_stage else "")
        return table

    def _bytes(self) -> Table:
        """Draw a row for each rank, what all have, and the sum."""
        title = f"{self.name}, {self.num_microbatches} microbatches: bytes of one device"
        table = _table(title, ["rank", "stages", "layers"], ["weights", "gradients", "waiting"])
        for number, rank in enumerate(self.ranks):
            sizes = (rank.weight_bytes, rank.gradient_bytes, rank.waiting_bytes)
            table.add_row(str(number), _runs(rank.stages), _runs(rank.layers), *map(format_bytes, sizes))
        room = (self.weight_bytes, self.gradient_bytes, self.waiting_bytes)
        table.add_row("room", "", "", *map(format_bytes, room))
        table.add_section()
        rows = {"made of weights once": self.hoisted_bytes, "of what waits, on the host": self.host_bytes}
        rows["limit of what waits"] = self.limit_bytes or 0
        if self.memory is not None and self.other_bytes is not None:
            rows["everything else (compiled)"] = self.other_bytes
            rows["one device (compiled)"] = self.memory.device_bytes
        for name, size in rows.items():
            if size:
                table.add_row(name, "", "", "", "", format_bytes(size))
        empty = tuple(number for number, rank in enumerate(self.ranks) if not rank.layers)
        if empty:
            table.add_row("ranks without a layer", "", "", "", "", _runs(empty))
        table.add_row("time over the ideal", "", "", "", "", f"{self.time_over_ideal:.2f}")
        table.add_row("of a scan that is differentiated", "", "", "", "", f"{self.scan_over_ideal:.2f}")
        if self.num_padding_rows:
            # Its gradient is zero, but the weights are copies.
            table.caption = (
                f"{self.num_padding_rows} rows of padding: optimizers with norms of whole leaves (LAMB) count them"
            )
            table.caption_justify = "left"
        return table


def stage_report(
    held: Held,
    plan: Layout,
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
    """Report what a program holds.

    Args:
        held: buffers.
        plan: which layers are where.
        trainable: shapes of ``{"outer": ..., "layers": ...}``, layers arranged.
        frozen: of what has no gradient.
        axis: of the pipeline.
        rows: of a microbatch.
        num_parts: into which its rows are divided.
        num_devices: of a rank.
        memory_limit: of what waits on a device.
        memory: of the compiled program.
    """

    def sizes(tree: Tree, *, is_gradient: bool = False) -> tuple[int, int]:
        """Of the outer leaves, and of one row of the layers."""

        def size(leaf: Any) -> int:
            dtype = total_dtype(leaf.dtype) if is_gradient else leaf.dtype
            return leaf.size * dtype.itemsize // _num_parts(leaf, axis)

        outer, layers = (sum(map(size, jax.tree.leaves(tree[name]))) for name in ("outer", "layers"))
        return outer, layers // plan.num_rows

    def room(shape: tuple[int, ...], dtype: Any) -> int:
        parts = num_parts if rows % num_parts == 0 and rows in shape[1:] else 1
        others = [number for number in range(1, num_devices + 1) if num_devices % number == 0]
        found = (number for number in (parts, *others) if _is_alive(memory, shape, dtype, number))
        return math.prod(shape) * dtype.itemsize // next(found, parts)

    schedule = held.schedule
    run = simulate(schedule, held.costs, lockstep=True)
    per_rank = schedule.stages_per_rank * plan.longest
    kept = {name: room(shape, dtype) for name, (shape, dtype) in held.buffers.items()}
    messages = sum(room(shape, dtype) for shape, dtype in held.messages)
    weights = [a + b for a, b in zip(sizes(trainable), sizes(frozen), strict=True)]
    gradients = sizes(trainable, is_gradient=True)
    on_device = {name: size for name, size in kept.items() if "/host/" not in name}
    ranks = []
    for rank in range(schedule.num_ranks):
        stages = schedule.stages_of(rank)
        layers = tuple(layer for stage in stages for layer in plan.layers_of(stage))
        waiting = sum(size * held.used[name][rank] // max(held.used[name]) for name, size in on_device.items())
        waiting += messages * held.used["messages"][rank] // max(1, *held.used["messages"])
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
        buffers=dict(sorted(kept.items(), key=lambda item: -item[1])),
        message_bytes=messages,
        hoisted_bytes=_hoisted_bytes(held, (trainable, frozen), per_rank, axis),
        num_padding_rows=plan.num_rows - plan.num_layers,
        flops=held.flops,
        is_split=schedule.is_split,
        time_over_ideal=run.makespan / max(run.busy),
        scan_over_ideal=scan_makespan(schedule, held.costs) / max(run.busy),
        limit_bytes=memory_limit,
        memory=memory,
    )


def _table(title: str, texts: Sequence[str], figures: Sequence[str]) -> Table:
    """Make a table with columns of text, and of figures to the right of them."""
    from rich.table import Table

    table = Table(*texts, title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in figures:
        table.add_column(name, justify="right")
    return table


def _short(count: int) -> str:
    """Write a number in three digits: ``1.63 G``."""
    power = min(int(f"{count:.2e}".split("e")[1]) // 3, 5)  # of what is printed: 999,999 is 1 M
    return f"{count / 1000**power:.3g} {' kMGTP'[power]}".rstrip()


def _described(one: Unsplit) -> str:
    share = "" if one.share is None else f" ({one.share:.0%} of the backward pass)"
    place = f" at {one.where}" if one.where else ""
    return f"{one.name}{place}{share} gives gradients of weights in I\nhint: {one.hint}"


def _is_alive(memory: MemoryReport | None, shape: tuple[int, ...], dtype: Any, num_parts: int) -> bool:
    """Whether a part of a buffer is in the compiled program: only the compiler knows what it divides by itself."""
    size = math.prod(shape) * dtype.itemsize // num_parts
    return memory is not None and any(
        one.num_bytes - one.padding_bytes == size
        and math.prod(one.shape) * num_parts == math.prod(shape)
        and len(one.shape) == len(shape)
        and all(part and dim % part == 0 for dim, part in zip(shape, one.shape, strict=True))
        for one in memory.peak
    )


def _num_parts(leaf: Any, axis: str) -> int:
    """Among how many devices of one rank a leaf is divided."""
    if not isinstance(leaf.sharding, NamedSharding):
        return 1
    names = [name for entry in leaf.sharding.spec for name in ((entry,) if isinstance(entry, str) else entry or ())]
    return math.prod(leaf.sharding.mesh.shape[name] for name in names if name != axis)


def _hoisted_bytes(held: Held, weights: Sequence[Tree], num_rows: int, axis: str) -> int:
    """Of what is made of weights once: a cast or a transpose is divided as the weight of the same dimensions is."""
    parts: dict[tuple[int, ...], int] = {}
    for tree in weights:
        for name, begin in (("outer", ()), ("layers", (num_rows,))):
            for leaf in jax.tree.leaves(tree[name]):
                dims = tuple(sorted((*begin, *leaf.shape[len(begin) :])))
                parts[dims] = min(parts.get(dims, _num_parts(leaf, axis)), _num_parts(leaf, axis))
    return sum(math.prod(shape) * dtype.itemsize // parts.get(tuple(sorted(shape)), 1) for shape, dtype in held.hoisted)


def _runs(numbers: tuple[int, ...]) -> str:
    """Numbers, neighbours together: ``0-3, 7``."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][-1] == number - 1:
            found[-1] = [found[-1][0], number]
        else:
            found.append([number])
    return ", ".join("-".join(map(str, run)) for run in found) or "none"
