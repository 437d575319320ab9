"""The schedule of a pipeline for what its device has left.

``"auto"`` that was made without costs and limit may keep more between passes, or less, than it does by default. How
much room there is only the compiled step tells: so that is compiled, its schedule is made anew within what the device
leaves, and what comes of it is compiled again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from ..core import ScheduleError, Tree, format_bytes
from ..memory import MemoryReport
from ..pipeline import StageReport
from ._pipelined import PipelineStep
from ._step import TrainingStep

_TRIES = 3
"""How often less is tried: what a pass needs while it runs is another amount in each program."""
_WORTH = 0.99
"""Of the time, that more memory has to come below: another compilation takes minutes."""


class Tried(NamedTuple):
    """A step that was compiled."""

    step: TrainingStep
    """What was compiled."""
    program: Any
    """What came of it, for whom compiled it."""
    report: MemoryReport | None
    """Its bytes, where anybody asked."""
    left: int | None
    """What a device has beside it, negative where it is too large; None where nobody knows. Of a run all
    processes say the same."""


def choose_schedule(step: PipelineStep, tried: Callable[[PipelineStep], Tried], arrays: Tree, batch: Tree) -> Tried:
    """Choose the schedule that the device has room for.

    Args:
        step: with the schedule of the pipeline, which may be made anew.
        tried: compiles a step.
        arrays: the model's, arranged; arrays or shapes.
        batch: shapes of one.

    Returns:
        The step itself where there is nothing to win; else one with less that waits, where it did not fit, or one that
        ends sooner, where memory is left. Of several that do not fit, the smallest.
    """
    best = usual = tried(step)
    if usual.left is None:
        return usual
    before = step.report(arrays, batch, None)
    if usual.left >= 0:
        more = _within(usual, usual.left, arrays, batch)
        if more is None or more[1].time_over_ideal > _WORTH * before.time_over_ideal:
            return usual
        return usual if ((found := tried(more[0])).left or 0) < 0 else found
    for _ in range(_TRIES):
        # Where all of it cannot be spared, a part may do: what passes need while they run becomes less, too.
        spared = (_within(best, int(part * (best.left or 0)), arrays, batch) for part in (1, 0.5, 0.25))
        less = next((one for one in spared if one is not None), None)
        if less is None or ((found := tried(less[0])).left or 0) <= (best.left or 0):
            break
        best = found
        if (best.left or 0) >= 0:
            _tell(before, less[1])
            break
    return best


def _within(one: Tried, rest: int, arrays: Tree, batch: Tree) -> tuple[PipelineStep, StageReport] | None:
    """Make the step that may keep so many bytes more between passes than this one, or so many less; None for none."""
    assert isinstance(one.step, PipelineStep)
    counted, there = (one.step.report(arrays, batch, memory).waiting_bytes for memory in (None, one.report))
    # What the compiler divides by itself counts whole where a schedule is chosen.
    limit = int((there + rest) * counted / there) if there else 0
    if limit < 1:
        return None
    other = one.step.within(limit)
    try:
        return other, other.report(arrays, batch, None)
    except ScheduleError:
        return None


def _tell(before: StageReport, after: StageReport) -> None:
    """Warn of the time that a step takes which keeps less."""
    if after.time_over_ideal > before.time_over_ideal / _WORTH:
        warnings.warn(
            f"the pipeline keeps {format_bytes(after.waiting_bytes)} between passes instead of "
            f"{format_bytes(before.waiting_bytes)}, for which the device has no room: it takes "
            f"{after.time_over_ideal:.2f} of the ideal time instead of {before.time_over_ideal:.2f}\n"
            "hint: smaller microbatches, more stages, remat=True or inputs='host' of lt.pipeline.value_and_grad",
            UserWarning,
            stacklevel=2,
        )
