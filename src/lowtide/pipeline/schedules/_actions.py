"""What a rank of a pipeline does, and how it is written: ``2F0`` is the forward pass of stage 2 on microbatch 0.

The text is PyTorch's (torch.distributed.pipelining), so that schedules can be exchanged. Its actions of communication
(``2SEND_F0``, ``2UNSHARD``, ...) follow from the others and from where stages are, and are left out here.
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
    """The part of the backward pass that gives the gradient of the stage's input."""
    WEIGHT = "W"
    """The part that gives the gradients of its weights."""
    BACKWARD = "B"
    """Both parts at once."""


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
_LONG = {"FORWARD": "F", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W", "BACKWARD": "B"}


def parse_actions(text: str) -> list[Action]:
    """Parse the actions in one cell of a table: none when it is empty or of communication, two when they overlap.

    Args:
        text: such as ``2F0``, or PyTorch's ``(0F8;7B1)OVERLAP_F_B``, of which the first comes first.

    Raises:
        ConfigError: for anything else.
    """
    text = text.strip()
    if not text or _COMMUNICATION.fullmatch(text):
        return []
    if both := _OVERLAPPED.fullmatch(text):
        return [action for part in both[1].split(";") for action in parse_actions(part)]
    found = _ACTION.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"{text!r} is no action of a pipeline",
            expected="a stage, one of F, I, W and B, and a microbatch",
            got=text,
            hint="2F0 is the forward pass of stage 2 on microbatch 0",
        )
    stage, kind, microbatch = found.groups()
    return [Action(int(stage), Kind(_LONG.get(kind, kind)), int(microbatch))]
