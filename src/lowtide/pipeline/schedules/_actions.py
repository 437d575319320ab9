"""Actions of a pipeline rank, their text form and their costs: ``2F0`` is the forward pass of stage 2 on microbatch 0.

The text form is that of PyTorch (torch.distributed.pipelining), so schedules can be exchanged. PyTorch also writes
communication actions (``2SEND_F0``, ``2UNSHARD``, ...). The other actions and the placement of the stages determine
these, so this module leaves them out.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from ...core import ConfigError


class Kind(enum.StrEnum):
    """A pass of one stage over one microbatch."""

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


def parse_actions(text: str) -> list[Action]:
    """Parse the actions in one cell of a table, such as ``2F0`` or PyTorch's ``(0F8;7B1)OVERLAP_F_B``.

    An empty cell and a communication action give no action. Overlapped actions keep their order. Any other text raises
    `ConfigError`.
    """
    text = text.strip()
    if not text or _COMMUNICATION.fullmatch(text):
        return []
    if overlapped := _OVERLAPPED.fullmatch(text):
        return [action for part in overlapped[1].split(";") for action in parse_actions(part)]
    match = _ACTION.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"{text!r} is not an action of a pipeline",
            expected="a stage, one of F, I, W and B, and a microbatch",
            got=text,
            hint="write for instance 2F0, the forward pass of stage 2 on microbatch 0",
        )
    stage, kind, microbatch = match.groups()
    return [Action(int(stage), Kind(_KIND_LETTERS.get(kind, kind)), int(microbatch))]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """Time of actions and memory of stages, in any unit: one number for all stages, or one number for each stage.

    Raises:
        ConfigError: for a time that is not positive, or a negative memory or communication.

    Examples:
        >>> Costs(forward=1.0, weight=(0.5, 1.5)).of(Action(1, Kind.BACKWARD, 0))
        2.5
    """

    forward: float | Sequence[float] = 1.0
    """Time of F."""
    input: float | Sequence[float] = 1.0
    """Time of I."""
    weight: float | Sequence[float] = 1.0
    """Time of W; the time of B is the sum of I and W."""
    communication: float = 0.0
    """Time from the end of an action until its result is on another rank; ranks compute during a transfer."""
    input_residuals: float | Sequence[float] = 0.0
    """Memory that F allocates and I frees."""
    weight_residuals: float | Sequence[float] = 1.0
    """Memory that F allocates and W frees."""
    cotangents: float | Sequence[float] = 0.0
    """Memory that I allocates and W frees; with recomputation this is most of the memory between passes. If a weight
    pass directly follows its input pass, this memory is not counted. It is not counted for B either. Every schedule
    holds it for one pass at a time."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value: Any = getattr(self, field.name)
            if hasattr(value, "tolist"):  # measured costs are NumPy arrays
                value = value.tolist()
            value = tuple(value) if isinstance(value, Sequence) else value
            object.__setattr__(self, field.name, value)
            is_time = field.name in ("forward", "input", "weight")
            for cost in value if isinstance(value, Sequence) else [value]:
                if not (isinstance(cost, int | float) and (cost > 0 if is_time else cost >= 0) and cost < float("inf")):
                    raise ConfigError(
                        f"{field.name} is not a cost",
                        expected="numbers above 0" if is_time else "numbers of at least 0",
                        got=repr(cost),
                        hint="use any unit: Costs(forward=1.0, input=1.1, weight=0.9)",
                    )

    def refuse_other(self, num_stages: int) -> None:
        """Raise `ConfigError` if the costs belong to another number of stages."""
        for field in dataclasses.fields(self):
            value: Any = getattr(self, field.name)
            if isinstance(value, Sequence) and len(value) != num_stages:
                raise ConfigError(
                    f"{field.name} does not fit the number of stages",
                    expected=f"one number, or {num_stages}",
                    got=f"{len(value)} numbers",
                    hint="give one number per stage; a rank may have several stages",
                )

    def of(self, action: Action) -> float:
        """Return the time of an action."""
        if action.kind is Kind.FORWARD:
            return _stage_cost(self.forward, action.stage)
        weight = _stage_cost(self.weight, action.stage) if action.kind is not Kind.INPUT else 0.0
        return weight + (_stage_cost(self.input, action.stage) if action.kind is not Kind.WEIGHT else 0.0)

    def kept(self, action: Action) -> float:
        """Return the memory that an action allocates for later passes; negative if the action frees memory."""
        input_residuals, weight_residuals = (
            _stage_cost(self.input_residuals, action.stage),
            _stage_cost(self.weight_residuals, action.stage),
        )
        cotangents = _stage_cost(self.cotangents, action.stage)
        changes = {
            Kind.INPUT: cotangents - input_residuals,
            Kind.WEIGHT: -weight_residuals - cotangents,
            Kind.BACKWARD: -input_residuals - weight_residuals,
        }
        return changes.get(action.kind, input_residuals + weight_residuals)

    def by_rank(self, placement: Sequence[int], num_microbatches: float = 1) -> list[float]:
        """Return the memory of each rank after it has run the forward passes of this many microbatches."""
        memory = [0.0] * (1 + max(placement))
        for stage, rank in enumerate(placement):
            memory[rank] += num_microbatches * self.kept(Action(stage, Kind.FORWARD, 0))
        return memory


def _stage_cost(cost: float | Sequence[float], stage: int) -> float:
    """Return the cost of one stage."""
    return cost[stage] if isinstance(cost, Sequence) else cost
