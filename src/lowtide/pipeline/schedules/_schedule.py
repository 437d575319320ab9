"""A schedule: which rank does what in which order. Data without a device, that other modules simulate, draw and run.

Shape legend: a schedule has R ranks (devices along the pipeline's mesh axis), S stages (parts of the model, at least as
many as ranks) and M microbatches.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from ...core import ConfigError, ScheduleError, is_count, write_files
from ._actions import Action, Kind, parse_actions
from ._costs import Costs

Order = tuple[Action, ...]
Ends = dict[tuple[Kind, int, int], float]
"""When actions have ended, under what `gives` returns."""


class Remake(Protocol):
    """What makes a schedule for costs and a limit of memory."""

    @property
    def memory_limit(self) -> float | Sequence[float] | None:
        """That was said for it, and stays."""
        ...

    def __call__(self, costs: Costs, memory_limit: float | Sequence[float] | None, /) -> Schedule: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """The order of actions on every rank.

    When an action begins is not part of it: a rank does its next one as soon as what it needs is there. What ranks in
    lockstep do together may be.

    Examples:
        >>> one = Schedule.from_text("0F0 0B0", name="one stage")
        >>> one.num_stages, one.num_microbatches
        (1, 1)
    """

    name: str
    """Of the algorithm, or of the file it came from."""
    num_microbatches: int
    """Parts of a batch."""
    placement: tuple[int, ...]
    """The rank of every stage."""
    orders: tuple[Order, ...]
    """What every rank does, one after the other."""
    ticks: tuple[tuple[int, ...], ...] | None = None
    """For ranks in lockstep, of each action the tick in which it runs, from 0 on; with several actions of a rank in one
    tick, an input pass comes before a weight pass before a forward pass. None: each has one of its own."""
    remake: Remake | None = dataclasses.field(default=None, compare=False, repr=False)
    """Makes it for other costs, with its stages where they are, if those that it was made for were not said; files do
    not keep it."""

    def __post_init__(self) -> None:
        validate(self)

    def __repr__(self) -> str:
        sizes = f"{self.num_stages} stages on {self.num_ranks} ranks, {self.num_microbatches} microbatches"
        return f"<Schedule {self.name}: {sizes}>"

    @property
    def num_stages(self) -> int:
        """Parts of the model."""
        return len(self.placement)

    @property
    def num_ranks(self) -> int:
        """Devices along the pipeline's axis."""
        return len(self.orders)

    @property
    def stages_per_rank(self) -> int:
        """The most stages that a rank has."""
        return max(self.placement.count(rank) for rank in range(self.num_ranks))

    @property
    def is_split(self) -> bool:
        """Whether the backward pass of a stage is split into its two parts anywhere."""
        return any(action.kind is Kind.INPUT for order in self.orders for action in order)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """List the stages of a rank, in the order of the model."""
        return tuple(stage for stage, where in enumerate(self.placement) if where == rank)

    def truncated(self, num_microbatches: int) -> Schedule:
        """Return the schedule of the first microbatches alone, in the same order, an action a tick."""
        orders = tuple(tuple(a for a in order if a.microbatch < num_microbatches) for order in self.orders)
        return dataclasses.replace(self, num_microbatches=num_microbatches, orders=orders, ticks=None, remake=None)

    def fitted(self, costs: Costs, memory_limit: float | Sequence[float] | None = None) -> Schedule:
        """Return the schedule for these costs, if it was made without any; else as it is.

        Args:
            costs: of its stages.
            memory_limit: of each rank, if none was said either.
        """
        return self if self.remake is None else self.remake(costs, memory_limit)

    def to_csv(self, path: str | Path | None = None) -> str:
        """As PyTorch writes schedules: a row for each rank, a cell for each action.

        Ticks are written in three cells each, for an input, a weight and a forward pass, which may be empty: idle.

        Args:
            path: the file to write, if any.

        Returns:
            What it holds.

        Raises:
            OutputError: when it cannot be written.
        """
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(self._rows())
        if path is not None:
            write_files(Path(path).parent, {Path(path).name: text.getvalue().encode()})
        return text.getvalue()

    @classmethod
    def from_csv(cls, path: str | Path, *, name: str | None = None) -> Schedule:
        """Read what `to_csv` or PyTorch wrote.

        Args:
            path: the file.
            name: of the schedule; by default the file's.

        Raises:
            ConfigError: when it cannot be read, or a cell is no action.
            ScheduleError: for a schedule that is not valid.
        """
        path = Path(path)
        try:
            with path.open(encoding="utf-8", newline="") as file:
                rows = list(csv.reader(file))
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise ConfigError(
                f"{path}: cannot be read",
                got=str(error),
                hint="a table of comma-separated actions, a row for each rank",
            ) from error
        return cls.of_rows(rows, name=name or path.stem)

    @classmethod
    def from_text(cls, text: str, *, name: str = "text") -> Schedule:
        """Read actions that are separated by blanks, a line for each rank; a ``-`` is an empty cell.

        Args:
            text: such as ``"0F0 0F1 0B0 0B1"``.
            name: of the schedule.

        Raises:
            ConfigError: when a word is no action.
            ScheduleError: for a schedule that is not valid.
        """
        rows = [["" if word == "-" else word for word in line.split()] for line in text.strip().splitlines()]
        return cls.of_rows(rows, name=name)

    @classmethod
    def of_rows(cls, rows: Sequence[Sequence[str]], *, name: str) -> Schedule:
        """Make the schedule of a table of actions, with a row for each rank; empty cells are idle.

        Where the cells of every row are in turn for input, weight and forward passes, three of them are a tick.
        """
        parsed = [[parse_actions(cell) for cell in row] for row in rows]
        orders = tuple(tuple(action for cell in row for action in cell) for row in parsed)
        ticks = tuple(tuple(i // len(_PLACES) for i, cell in enumerate(row) if cell) for row in parsed)
        are_ticks = all(
            len(cell) == 1 and cell[0].kind in _PLACES[i % len(_PLACES)]
            for row in parsed
            for i, cell in enumerate(row)
            if cell
        )
        found = {action.stage: rank for rank, order in enumerate(orders) for action in order}
        if not found:
            raise ScheduleError(f"{name}: no action", expected="a row of actions for each rank", hint="0F0 0B0")
        if sorted(found) != list(range(len(found))):
            raise ScheduleError(
                f"{name}: not every stage has a rank",
                expected=f"stages 0 to {max(found)}",
                got=", ".join(map(str, sorted(found))),
                hint="stages are counted from 0",
            )
        num_microbatches = 1 + max(action.microbatch for order in orders for action in order)
        placement = tuple(found[stage] for stage in range(len(found)))
        return cls(
            name=name,
            num_microbatches=num_microbatches,
            placement=placement,
            orders=orders,
            ticks=ticks if are_ticks else None,
        )

    def to_text(self) -> str:
        """Write what `from_text` reads."""
        return "\n".join(" ".join(word or "-" for word in row) for row in self._rows())

    def _rows(self) -> list[list[str]]:
        """Write a table that `of_rows` reads."""
        if self.ticks is None:
            return [[str(action) for action in order] for order in self.orders]
        rows: list[list[str]] = []
        for order, numbers in zip(self.orders, self.ticks, strict=True):
            row = [""] * (len(_PLACES) * (1 + max(numbers, default=-1)))
            for action, tick in zip(order, numbers, strict=True):
                row[len(_PLACES) * tick + place(action)] = str(action)
            rows.append(row)
        return rows


_PLACES = ((Kind.INPUT, Kind.BACKWARD), (Kind.WEIGHT,), (Kind.FORWARD,))
"""The order of passes in a tick."""


def place(action: Action) -> int:
    """Return where in a tick an action is."""
    return next(i for i, kinds in enumerate(_PLACES) if action.kind in kinds)


def needs(action: Action, num_stages: int) -> list[tuple[Kind, int]]:
    """Return what has to come before an action of the microbatch: kinds and stages, where `Kind.INPUT` may be a B."""
    stage = action.stage
    if action.kind is Kind.FORWARD:
        return [(Kind.FORWARD, stage - 1)] if stage else []
    if action.kind is Kind.WEIGHT:
        return [(Kind.INPUT, stage)]
    return [(Kind.FORWARD, stage), *([(Kind.INPUT, stage + 1)] if stage + 1 < num_stages else [])]


def gives(action: Action) -> tuple[Kind, int, int]:
    """Under what `needs` finds an action."""
    kind = Kind.INPUT if action.kind is Kind.BACKWARD else action.kind
    return kind, action.stage, action.microbatch


def read_by(action: Action, num_stages: int) -> tuple[Kind, int] | None:
    """Return the kind and the stage of what is given an action's result; None when it stays where it is.

    The last stage's backward pass is given the activations of its own forward pass: the loss is taken there.
    """
    if action.kind is Kind.FORWARD:
        is_last = action.stage + 1 == num_stages
        return (Kind.INPUT, action.stage) if is_last else (Kind.FORWARD, action.stage + 1)
    return None if action.kind is Kind.WEIGHT or not action.stage else (Kind.INPUT, action.stage - 1)


def sends_on(action: Action, placement: Sequence[int]) -> bool:
    """Whether the result of an action goes to another rank."""
    reader = read_by(action, len(placement))
    return reader is not None and placement[reader[1]] != placement[action.stage]


def ready(action: Action, placement: Sequence[int], ends: Ends, communication: float = 0.0) -> float:
    """When what an action needs is on its rank; infinite when that is not known yet."""
    begin = 0.0
    for kind, stage in needs(action, len(placement)):
        away = communication if placement[stage] != placement[action.stage] else 0.0
        begin = max(begin, ends.get((kind, stage, action.microbatch), math.inf) + away)
    return begin


def sweep(orders: Sequence[Order], run: Callable[[int, Action], bool]) -> list[int]:
    """Try each rank's next action, rank by rank, until none can run.

    Args:
        orders: of each rank.
        run: ``run(rank, action)``: whether the action could run.

    Returns:
        How many actions of each rank have run.
    """
    counts, advanced = [0] * len(orders), True
    while advanced:
        advanced = False
        for rank, order in enumerate(orders):
            while counts[rank] < len(order) and run(rank, order[counts[rank]]):
                counts[rank] += 1
                advanced = True
    return counts


def validate(schedule: Schedule) -> None:
    """Raise unless every stage sees every microbatch once each way, where it is, and no rank waits for ever.

    Raises:
        ScheduleError: with the rank and the action.
    """
    if schedule.num_microbatches < 1 or not schedule.placement:
        raise ScheduleError(f"{schedule.name}: nothing to do", expected="at least one stage and one microbatch")
    _refuse_unplaced(schedule)
    if schedule.ticks is not None:
        _refuse_impossible(schedule, schedule.ticks)
    done: Ends = {}

    def run(_: int, action: Action) -> bool:
        if ready(action, schedule.placement, done) == math.inf:
            return False
        done[gives(action)] = 0.0
        return True

    at = sweep(schedule.orders, run)
    waiting = {rank: order[at[rank]] for rank, order in enumerate(schedule.orders) if at[rank] < len(order)}
    for rank, action in waiting.items():
        missing = [
            f"{stage}{kind}{action.microbatch}"
            for kind, stage in needs(action, schedule.num_stages)
            if (kind, stage, action.microbatch) not in done
        ]
        raise ScheduleError(
            f"{schedule.name}: rank {rank} waits for ever before {action}",
            expected=f"{missing[0]} before it",
            got="; ".join(f"rank {where} waits before {what}" for where, what in waiting.items()),
            hint="change the order so that what an action needs does not wait for it",
        )


def _refuse_impossible(schedule: Schedule, ticks: tuple[tuple[int, ...], ...]) -> None:
    """Raise unless each action can run in its tick."""
    fits = [len(order) == len(numbers) for order, numbers in zip(schedule.orders, ticks, strict=False)]
    if len(ticks) != len(schedule.orders) or not all(fits):
        raise ScheduleError(
            f"{schedule.name}: ticks are not those of the orders",
            expected="for each rank a tick for each action",
            got=f"{sum(map(len, ticks))} ticks for {sum(map(len, schedule.orders))} actions",
            hint="ticks=None runs each action in one of its own",
        )
    seen = {tick for numbers in ticks for tick in numbers}
    given: Any = next((tick for tick in seen if not is_count(tick, 0)), None)
    if given is not None or seen != set(range(len(seen))):
        raise ScheduleError(
            f"{schedule.name}: ticks are no numbers from 0 on, in each of which some rank does something",
            expected=f"0 to {len(seen) - 1}",
            got=repr(given) if given is not None else f"up to {max(seen)}",
            hint="count the ticks without those in which nobody does anything",
        )
    begins: Ends = {}
    for order, numbers in zip(schedule.orders, ticks, strict=True):
        for action, tick in zip(order, numbers, strict=True):
            begins[gives(action)] = tick
    for rank, (order, numbers) in enumerate(zip(schedule.orders, ticks, strict=True)):
        moments = [(tick, place(action)) for action, tick in zip(order, numbers, strict=True)]
        # A whole backward pass is in the places of both of its parts.
        taken = [(tick, at + (action.kind is Kind.BACKWARD)) for action, (tick, at) in zip(order, moments, strict=True)]
        for number, (action, tick) in enumerate(zip(order, numbers, strict=True)):
            early = number > 0 and moments[number] <= taken[number - 1]
            inputs = [begins[kind, stage, action.microbatch] for kind, stage in needs(action, schedule.num_stages)]
            known = max(inputs, default=-1) + (action.kind is not Kind.WEIGHT)
            if early or known > tick:
                raise ScheduleError(
                    f"{schedule.name}: rank {rank} cannot run {action} in tick {tick}",
                    expected=f"a tick from {int(known)} on" if known > tick else "after what it does before",
                    got=f"tick {tick}",
                    hint="in a tick a rank runs at most an input, a weight and a forward pass, in that order, on what "
                    "others gave in earlier ticks",
                )


def _refuse_unplaced(schedule: Schedule) -> None:
    seen: dict[tuple[int, int], list[Kind]] = {}
    for rank, order in enumerate(schedule.orders):
        for action in order:
            wrong = None
            if not (0 <= action.stage < schedule.num_stages and 0 <= action.microbatch < schedule.num_microbatches):
                wrong = f"stages below {schedule.num_stages} and microbatches below {schedule.num_microbatches}"
            elif schedule.placement[action.stage] != rank:
                wrong = f"stage {action.stage} on rank {schedule.placement[action.stage]} alone"
            if wrong is not None:
                raise ScheduleError(
                    f"{schedule.name}: rank {rank} does {action}",
                    expected=wrong,
                    got=str(action),
                    hint="every stage has one rank",
                )
            seen.setdefault((action.stage, action.microbatch), []).append(action.kind)
    whole, split = sorted("FB"), sorted("FIW")
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            kinds = sorted(seen.get((stage, microbatch), []))
            if kinds not in (whole, split):
                raise ScheduleError(
                    f"{schedule.name}: stage {stage}, microbatch {microbatch}",
                    expected="F once, and B once or I and W once",
                    got=" ".join(kinds) or "nothing",
                    hint="every microbatch passes every stage once each way",
                )
