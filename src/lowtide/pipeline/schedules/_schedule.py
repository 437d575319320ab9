"""A schedule: the order in which each rank runs its actions. It is plain data; other modules simulate, draw and run it.

An action is one pass of one stage over one microbatch, such as its forward pass. The text form is that of PyTorch
(torch.distributed.pipelining): ``2F0`` is the forward pass of stage 2 on microbatch 0. PyTorch also writes
communication actions (``2SEND_F0``, ``2UNSHARD``, ...). The passes and the placement of the stages determine them, so
this module leaves them out.

Shape legend: a schedule has R ranks (devices along the pipeline's mesh axis), S stages (parts of the model, at least as
many as ranks) and M microbatches.
"""

from __future__ import annotations

import csv
import dataclasses
import enum
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ...core import ConfigError, ScheduleError, check_number, is_count, write_files


class Kind(enum.StrEnum):
    """Kind of a pass: forward, the whole backward pass, or one of its two parts."""

    FORWARD = "F"
    INPUT = "I"
    """The part of the backward pass that computes the gradient of the stage's input ("B" in the zero-bubble papers)."""
    WEIGHT = "W"
    """The part of the backward pass that computes the gradients of the stage's weights."""
    BACKWARD = "B"
    """The whole backward pass: both parts in one action."""


class Action(NamedTuple):
    """One pass of one stage over one microbatch.

    Examples:
        >>> str(Action(2, Kind.FORWARD, 0))
        '2F0'
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


_ACTION = re.compile(r"(\d+)(F|I|W|B|FORWARD|BACKWARD_INPUT|BACKWARD_WEIGHT|BACKWARD)(\d+)")
_OVERLAPPED = re.compile(r"\((.+)\)OVERLAP_F_B")
_COMMUNICATION = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d*")
_KIND_LETTERS = {"FORWARD": "F", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W", "BACKWARD": "B"}


def _parse_actions(text: str) -> list[Action]:
    """Parse the actions in one cell of a table, such as ``2F0`` or PyTorch's ``(0F8;7B1)OVERLAP_F_B``.

    An empty cell and a communication action give no action. Overlapped actions keep their order. Any other text raises
    `ConfigError`.
    """
    text = text.strip()
    if not text or _COMMUNICATION.fullmatch(text):
        return []
    if overlapped := _OVERLAPPED.fullmatch(text):
        return [action for part in overlapped[1].split(";") for action in _parse_actions(part)]
    match = _ACTION.fullmatch(text)
    if match is None:
        hint = "write a stage, one of F, I, W and B, and a microbatch, for instance 2F0"
        raise ConfigError(f"{text!r} is not an action of a pipeline", hint=hint)
    stage, kind, microbatch = match.groups()
    return [Action(int(stage), Kind(_KIND_LETTERS.get(kind, kind)), int(microbatch))]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """Times of actions and memory of stages, in any unit. All but `communication` may have a number for each stage.

    Raises:
        ConfigError: when the time of a pass is not above 0, another cost is below 0, a cost is not finite, or
            `communication` is not one number.

    Examples:
        >>> Costs(forward=1.0, weight=(0.5, 1.5)).of(Action(1, Kind.BACKWARD, 0))
        2.5
    """

    forward: float | Sequence[float] = 1.0
    """Time of a forward pass, F."""
    input: float | Sequence[float] = 1.0
    """Time of an input pass, I."""
    weight: float | Sequence[float] = 1.0
    """Time of a weight pass, W; the time of a whole backward pass, B, is the sum of I and W."""
    communication: float = 0.0
    """Time from the end of an action until its result is on another rank; ranks compute during a transfer."""
    input_residuals: float | Sequence[float] = 0.0
    """Memory that F allocates and I frees."""
    weight_residuals: float | Sequence[float] = 1.0
    """Memory that F allocates and W frees."""
    cotangents: float | Sequence[float] = 0.0
    """Memory that I allocates and W frees. With recomputation, it is most of the memory that a stage holds from I to W.
    Simulated peaks leave it out for B, and for I with W right after it, because every schedule needs it there."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value: Any = getattr(self, field.name)
            value = value.tolist() if hasattr(value, "tolist") else value  # measured costs are NumPy arrays
            value = tuple(value) if isinstance(value, Sequence) else value
            object.__setattr__(self, field.name, value)
            above, least = (0, None) if field.name in ("forward", "input", "weight") else (None, 0)
            for cost in value if isinstance(value, Sequence) and field.name != "communication" else [value]:
                hint = "use any unit: Costs(forward=1.0, input=1.1, weight=0.9)"
                check_number(field.name, cost, above=above, least=least, hint=hint)

    def refuse_other(self, num_stages: int) -> None:
        """Raise `ConfigError` if a cost is a sequence of another length than `num_stages`."""
        for field in dataclasses.fields(self):
            value: Any = getattr(self, field.name)
            if isinstance(value, Sequence) and len(value) != num_stages:
                problem = f"{field.name} must be one number, or {num_stages} numbers, not {len(value)}"
                raise ConfigError(problem, hint="give one number per stage; a rank may have several stages")

    def of(self, action: Action) -> float:
        """Return the time of an action."""
        if action.kind is Kind.FORWARD:
            return _stage_cost(self.forward, action.stage)
        weight = _stage_cost(self.weight, action.stage) if action.kind is not Kind.INPUT else 0.0
        return weight + (_stage_cost(self.input, action.stage) if action.kind is not Kind.WEIGHT else 0.0)

    def kept(self, action: Action) -> float:
        """Return the memory that an action allocates for later passes, minus the memory that it frees."""
        costs = (self.input_residuals, self.weight_residuals, self.cotangents)
        input_residuals, weight_residuals, cotangents = (_stage_cost(cost, action.stage) for cost in costs)
        changes = {
            Kind.INPUT: cotangents - input_residuals,
            Kind.WEIGHT: -weight_residuals - cotangents,
            Kind.BACKWARD: -input_residuals - weight_residuals,
        }
        return changes.get(action.kind, input_residuals + weight_residuals)

    def by_rank(self, placement: Sequence[int], num_microbatches: float = 1) -> list[float]:
        """Return the memory of each rank after it has run the forward passes of `num_microbatches` microbatches."""
        memory = [0.0] * (1 + max(placement))
        for stage, rank in enumerate(placement):
            memory[rank] += num_microbatches * self.kept(Action(stage, Kind.FORWARD, 0))
        return memory


def _stage_cost(cost: float | Sequence[float], stage: int) -> float:
    return cost[stage] if isinstance(cost, Sequence) else cost


Order = tuple[Action, ...]
Ends = dict[tuple[Kind, int, int], float]
"""End time of each action, under the key that `result_key` returns."""


class Remake(Protocol):
    """A function that makes a schedule for given costs and a memory limit."""

    @property
    def memory_limit(self) -> float | Sequence[float] | None:
        """Memory limit of the original request. If it is not None, calls ignore their `memory_limit` argument."""
        ...

    def __call__(self, costs: Costs, memory_limit: float | Sequence[float] | None, /) -> Schedule: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """The order of actions on every rank.

    A schedule does not fix start times: a rank starts its next action as soon as the inputs of the action have arrived.
    For ranks in lockstep, `ticks` can fix which actions run together.

    Raises:
        ScheduleError: for actions that are missing, repeated or on a wrong rank, a deadlock, or wrong `ticks`.

    Examples:
        >>> one = Schedule.from_text("0F0 0B0", name="one stage")
        >>> one.num_stages, one.num_microbatches
        (1, 1)
    """

    name: str
    """Name of the algorithm, or of the file that the schedule was read from."""
    num_microbatches: int
    """Number of parts of a batch."""
    placement: tuple[int, ...]
    """The rank of every stage."""
    orders: tuple[Order, ...]
    """Actions of each rank, in the order in which it runs them."""
    ticks: tuple[tuple[int, ...], ...] | None = None
    """For ranks in lockstep: the tick of each action in `orders`, counted from 0. If a rank runs several actions in one
    tick, the input pass comes first, then the weight pass, then the forward pass. None: one action per tick."""
    remake: Remake | None = dataclasses.field(default=None, compare=False, repr=False)
    """Function that makes the schedule again for other costs with the same placement. None unless the schedule is
    ``auto`` and was made without costs; files do not store it."""

    def __post_init__(self) -> None:
        validate(self)

    def __repr__(self) -> str:
        sizes = f"{self.num_stages} stages on {self.num_ranks} ranks, {self.num_microbatches} microbatches"
        return f"<Schedule {self.name}: {sizes}>"

    @property
    def num_stages(self) -> int:
        """Number of parts of the model."""
        return len(self.placement)

    @property
    def num_ranks(self) -> int:
        """Number of devices along the pipeline's axis."""
        return len(self.orders)

    @property
    def stages_per_rank(self) -> int:
        """The largest number of stages on one rank."""
        return max(self.placement.count(rank) for rank in range(self.num_ranks))

    @property
    def is_split(self) -> bool:
        """Whether the backward pass of any stage is split into its two parts."""
        return any(action.kind is Kind.INPUT for order in self.orders for action in order)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """List the stages of a rank, in the order of the model."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)

    def truncated(self, num_microbatches: int) -> Schedule:
        """Return the schedule of the first microbatches only: same order, no ticks."""
        orders = tuple(tuple(a for a in order if a.microbatch < num_microbatches) for order in self.orders)
        return dataclasses.replace(self, num_microbatches=num_microbatches, orders=orders, ticks=None, remake=None)

    def fitted(self, costs: Costs, memory_limit: float | Sequence[float] | None = None) -> Schedule:
        """Make the schedule again for other costs if `remake` is set; otherwise return it unchanged.

        Args:
            costs: time of the actions and memory of the stages.
            memory_limit: most memory of a rank in the unit of `costs`, or one such number for each rank. It is used
                only if the schedule was made without a limit.

        Raises:
            ConfigError: for costs that do not match the number of stages, or an invalid limit.
            ScheduleError: when no schedule stays within the limit.
        """
        return self if self.remake is None else self.remake(costs, memory_limit)

    def to_csv(self, path: str | Path | None = None) -> str:
        """Write the schedule as PyTorch does: a row for each rank, a cell for each action.

        With `ticks`, each tick takes three cells: an input, a weight and a forward pass. Empty cells are idle.

        Args:
            path: the file to write, if any.

        Returns:
            The CSV text.

        Raises:
            OutputError: when the file cannot be written.
        """
        text = "".join(f"{','.join(row)}\n" for row in self._rows())
        if path is not None:
            write_files(Path(path).parent, {Path(path).name: text.encode()})
        return text

    @classmethod
    def from_csv(cls, path: str | Path, *, name: str | None = None) -> Schedule:
        """Read a file that `to_csv` or PyTorch wrote.

        Args:
            path: the file.
            name: name of the schedule; by default the stem of the file name.

        Raises:
            ConfigError: when the file cannot be read, or a cell is not an action.
            ScheduleError: for a schedule that is not valid.
        """
        path = Path(path)
        try:
            with path.open(encoding="utf-8", newline="") as file:
                rows = list(csv.reader(file))
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            hint = "write a table of comma-separated actions, with a row for each rank"
            raise ConfigError(f"{path}: cannot be read: {error}", hint=hint) from error
        return cls.of_rows(rows, name=name or path.stem)

    @classmethod
    def from_text(cls, text: str, *, name: str = "text") -> Schedule:
        """Read actions that are separated by blanks, one line for each rank; a ``-`` is an empty cell.

        Args:
            text: such as ``"0F0 0F1 0B0 0B1"``.
            name: name of the schedule.

        Raises:
            ConfigError: when a word is not an action.
            ScheduleError: for a schedule that is not valid.
        """
        rows = [["" if word == "-" else word for word in line.split()] for line in text.strip().splitlines()]
        return cls.of_rows(rows, name=name)

    @classmethod
    def of_rows(cls, rows: Sequence[Sequence[str]], *, name: str) -> Schedule:
        """Make a schedule from a table of actions, with one row for each rank.

        Empty cells are idle. If all rows repeat the pattern (I or B, W, F), every three cells are one tick. The errors
        are those of `from_text`.
        """
        parsed = [[_parse_actions(cell) for cell in row] for row in rows]
        orders = tuple(tuple(action for cell in row for action in cell) for row in parsed)
        ticks = tuple(tuple(i // len(_TICK_POSITIONS) for i, cell in enumerate(row) if cell) for row in parsed)
        are_ticks = all(
            len(cell) == 1 and cell[0].kind in _TICK_POSITIONS[i % len(_TICK_POSITIONS)]
            for row in parsed
            for i, cell in enumerate(row)
            if cell
        )
        ranks = {action.stage: rank for rank, order in enumerate(orders) for action in order}
        if not ranks:
            hint = "write a row of actions for each rank, for instance 0F0 0B0"
            raise ScheduleError(f"{name}: the schedule has no actions", hint=hint)
        if sorted(ranks) != list(range(len(ranks))):
            stages = ", ".join(map(str, sorted(ranks)))
            raise ScheduleError(
                f"{name}: only the stages {stages} have a rank", hint="count stages from 0, without gaps"
            )
        return cls(
            name=name,
            num_microbatches=1 + max(action.microbatch for order in orders for action in order),
            placement=tuple(ranks[stage] for stage in range(len(ranks))),
            orders=orders,
            ticks=ticks if are_ticks else None,
        )

    def to_text(self) -> str:
        """Return the text that `from_text` reads."""
        return "\n".join(" ".join(word or "-" for word in row) for row in self._rows())

    def _rows(self) -> list[list[str]]:
        if self.ticks is None:
            return [[str(action) for action in order] for order in self.orders]
        rows: list[list[str]] = []
        for order, numbers in zip(self.orders, self.ticks, strict=True):
            row = [""] * (len(_TICK_POSITIONS) * (1 + max(numbers, default=-1)))
            for action, tick in zip(order, numbers, strict=True):
                row[len(_TICK_POSITIONS) * tick + position_in_tick(action)] = str(action)
            rows.append(row)
        return rows


_TICK_POSITIONS = ((Kind.INPUT, Kind.BACKWARD), (Kind.WEIGHT,), (Kind.FORWARD,))
"""The kinds of passes at each position of a tick. Backward passes come first, because they free memory before a forward
pass takes it."""


def position_in_tick(action: Action) -> int:
    """Return the position of an action within its tick: 0 for I and B, 1 for W, 2 for F."""
    return next(i for i, kinds in enumerate(_TICK_POSITIONS) if action.kind in kinds)


def prerequisites(action: Action, num_stages: int) -> list[tuple[Kind, int]]:
    """List the passes (kind and stage) that must end before an action of the same microbatch starts.

    `Kind.INPUT` in the result stands for an input pass or a whole backward pass.
    """
    stage = action.stage
    if action.kind is Kind.FORWARD:
        return [(Kind.FORWARD, stage - 1)] if stage else []
    if action.kind is Kind.WEIGHT:
        return [(Kind.INPUT, stage)]
    return [(Kind.FORWARD, stage), *([(Kind.INPUT, stage + 1)] if stage + 1 < num_stages else [])]


def result_key(action: Action) -> tuple[Kind, int, int]:
    """Return the key of an action in `Ends`; a whole backward pass has the key of an input pass."""
    kind = Kind.INPUT if action.kind is Kind.BACKWARD else action.kind
    return kind, action.stage, action.microbatch


def reader_of(action: Action, num_stages: int) -> tuple[Kind, int] | None:
    """Return the kind and stage of the pass that receives an action's activations or input gradient, or None.

    The backward pass of the last stage computes the loss, so it receives the activations of that stage's forward pass.
    Weight passes do not count, because they read only values of the same stage.
    """
    if action.kind is Kind.FORWARD:
        is_last = action.stage + 1 == num_stages
        return (Kind.INPUT, action.stage) if is_last else (Kind.FORWARD, action.stage + 1)
    return None if action.kind is Kind.WEIGHT or not action.stage else (Kind.INPUT, action.stage - 1)


def sends_result(action: Action, placement: Sequence[int]) -> bool:
    """Return whether the result of an action goes to another rank."""
    reader = reader_of(action, len(placement))
    return reader is not None and placement[reader[1]] != placement[action.stage]


def ready_time(action: Action, placement: Sequence[int], ends: Ends, communication: float = 0.0) -> float:
    """Return the time at which the inputs of an action are on its rank; infinity while that time is unknown."""
    time = 0.0
    for kind, stage in prerequisites(action, len(placement)):
        delay = communication if placement[stage] != placement[action.stage] else 0.0
        time = max(time, ends.get((kind, stage, action.microbatch), math.inf) + delay)
    return time


def sweep(orders: Sequence[Order], run: Callable[[int, Action], bool]) -> list[int]:
    """Try the next action of each rank, rank by rank, until no rank can run its next action.

    ``run(rank, action)`` runs the action if it can, and returns whether it did. Returns the number of actions that each
    rank has run.
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
    """Raise `ScheduleError` unless each stage runs each pass of each microbatch once, on its rank, without deadlock.

    Also checks that every action can run in its tick, if the schedule has ticks.
    """
    if schedule.num_microbatches < 1 or not schedule.placement:
        raise ScheduleError(f"{schedule.name}: the schedule is empty", expected="at least one stage and one microbatch")
    _refuse_wrong_actions(schedule)
    if schedule.ticks is not None:
        _refuse_wrong_ticks(schedule, schedule.ticks)
    ends: Ends = {}

    def run(_: int, action: Action) -> bool:
        if ready_time(action, schedule.placement, ends) == math.inf:
            return False
        ends[result_key(action)] = 0.0
        return True

    # Run the orders without time: an action runs as soon as its inputs exist. A rank that stops early is in a deadlock.
    counts = sweep(schedule.orders, run)
    waiting = {rank: order[counts[rank]] for rank, order in enumerate(schedule.orders) if counts[rank] < len(order)}
    for rank, action in waiting.items():
        missing = [
            f"{stage}{kind}{action.microbatch}"
            for kind, stage in prerequisites(action, schedule.num_stages)
            if (kind, stage, action.microbatch) not in ends
        ]
        raise ScheduleError(
            f"{schedule.name}: rank {rank} waits forever before {action}, which needs {missing[0]}",
            got="; ".join(f"rank {index} waits before {blocked}" for index, blocked in waiting.items()),
            hint="change the order so that no action runs before one that it needs",
        )


def _refuse_wrong_ticks(schedule: Schedule, ticks: tuple[tuple[int, ...], ...]) -> None:
    """Raise unless each action can run in its tick."""
    if list(map(len, ticks)) != list(map(len, schedule.orders)):
        counts = f"{sum(map(len, ticks))} ticks for {sum(map(len, schedule.orders))} actions"
        hint = "give a tick for each action of each rank, or pass ticks=None to run each action in its own tick"
        raise ScheduleError(f"{schedule.name}: ticks do not match the orders, {counts}", hint=hint)
    used_ticks = {tick for numbers in ticks for tick in numbers}
    invalid: Any = next((tick for tick in used_ticks if not is_count(tick, 0)), None)
    if invalid is not None or used_ticks != set(range(len(used_ticks))):
        outlier = max(used_ticks) if invalid is None else invalid
        hint = "count only ticks in which at least one rank runs an action"
        problem = f"{schedule.name}: ticks are not consecutive numbers from 0: they include {outlier!r}"
        raise ScheduleError(problem, hint=hint)
    begins: Ends = {}
    for order, numbers in zip(schedule.orders, ticks, strict=True):
        for action, tick in zip(order, numbers, strict=True):
            begins[result_key(action)] = tick
    for rank, (order, numbers) in enumerate(zip(schedule.orders, ticks, strict=True)):
        positions = [(tick, position_in_tick(action)) for action, tick in zip(order, numbers, strict=True)]
        # A whole backward pass takes two positions of a tick: that of I and that of W.
        last_positions = [
            (tick, position + (action.kind is Kind.BACKWARD))
            for action, (tick, position) in zip(order, positions, strict=True)
        ]
        for index, (action, tick) in enumerate(zip(order, numbers, strict=True)):
            is_early = index > 0 and positions[index] <= last_positions[index - 1]
            inputs = [
                begins[kind, stage, action.microbatch] for kind, stage in prerequisites(action, schedule.num_stages)
            ]
            # A weight pass may follow its input pass in the same tick. All other inputs must come from earlier ticks.
            earliest = max(inputs, default=-1) + (action.kind is not Kind.WEIGHT)
            if is_early or earliest > tick:
                limit = f"from tick {int(earliest)} on" if earliest > tick else "after the previous action"
                raise ScheduleError(
                    f"{schedule.name}: rank {rank} cannot run {action} in tick {tick}, only {limit}",
                    hint="run at most an input, a weight and a forward pass in a tick, in that order, on results of "
                    "earlier ticks",
                )


def _refuse_wrong_actions(schedule: Schedule) -> None:
    kinds_by_pass: dict[tuple[int, int], list[Kind]] = {}
    for rank, order in enumerate(schedule.orders):
        for action in order:
            problem = None
            if not (0 <= action.stage < schedule.num_stages and 0 <= action.microbatch < schedule.num_microbatches):
                problem = f"there are {schedule.num_stages} stages and {schedule.num_microbatches} microbatches"
            elif schedule.placement[action.stage] != rank:
                problem = f"stage {action.stage} is on rank {schedule.placement[action.stage]}"
            if problem is not None:
                hint = "place each stage on one rank, and count stages and microbatches from 0"
                raise ScheduleError(f"{schedule.name}: rank {rank} cannot run {action}: {problem}", hint=hint)
            kinds_by_pass.setdefault((action.stage, action.microbatch), []).append(action.kind)
    whole, split = sorted("FB"), sorted("FIW")
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            kinds = sorted(kinds_by_pass.get((stage, microbatch), []))
            if kinds not in (whole, split):
                runs = " ".join(kinds) or "nothing"
                problem = f"{schedule.name}: stage {stage} runs {runs} for microbatch {microbatch}"
                raise ScheduleError(problem, hint="run F once, and B once or I and W once")
