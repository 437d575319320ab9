"""Actions of a pipeline rank and their text form: ``2F0`` is the forward pass of stage 2 on microbatch 0.

The text form is that of PyTorch (torch.distributed.pipelining), so schedules can be exchanged. PyTorch also writes
communication actions (``2SEND_F0``, ``2UNSHARD``, ...). The other actions and the placement of the stages determine
these, so this module leaves them out.
"""

from __future__ import annotations

import enum
import re
from typing import NamedTuple

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
