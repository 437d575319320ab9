"""Choice of a pipeline's schedule that fits the memory left on the device.

An ``"auto"`` schedule without given costs or limit may keep more or less memory between passes than by default.
Only the compiled step shows how much memory is left. So the step is compiled, a new schedule is made for the memory
left, and the step with that schedule is compiled again.
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
"""Number of attempts with less memory: each program needs a different amount while a pass runs."""
_WORTH = 0.99
"""A schedule that needs more memory must take less than this share of the time: another compilation takes minutes."""


class Tried(NamedTuple):
    """A compiled step."""

    step: TrainingStep
    """The step."""
    program: Any
    """The result of the compilation: the compiled program, or the error of a step that does not fit."""
    report: MemoryReport | None
    """Memory report of the program; None where it was not requested."""
    left: int | None
    """Bytes left on a device, negative where the step is too large, None where unknown. The same in all processes of a
    run."""


def choose_schedule(step: PipelineStep, tried: Callable[[PipelineStep], Tried], arrays: Tree, batch: Tree) -> Tried:
    """Choose the schedule that fits the device's memory.

    Args:
        step: the step with its current schedule, which may be replaced.
        tried: compiles a step.
        arrays: arrays of the model, arranged for the pipeline, or their shapes.
        batch: shapes of a batch.

    Returns:
        The step itself if no other schedule is better. Otherwise a step that keeps less between passes, if `step` does
        not fit; or a step that ends sooner, if memory is left. If none of several steps fits, the smallest.
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
        # If a schedule cannot save all missing bytes, it may save a part: the memory that running passes need shrinks,
        # too.
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
    """Return a step that keeps at most `rest` more bytes between passes (or `-rest` fewer), or None."""
    assert isinstance(one.step, PipelineStep)
    counted, there = (one.step.report(arrays, batch, memory).waiting_bytes for memory in (None, one.report))
    # A schedule counts arrays as whole even where the compiler shards them, so the limit is scaled to that count.
    limit = int((there + rest) * counted / there) if there else 0
    if limit < 1:
        return None
    other = one.step.within(limit)
    try:
        return other, other.report(arrays, batch, None)
    except ScheduleError:
        return None


def _tell(before: StageReport, after: StageReport) -> None:
    """Warn about a step that saves memory and takes longer."""
    if after.time_over_ideal > before.time_over_ideal / _WORTH:
        warnings.warn(
            f"the pipeline keeps {format_bytes(after.waiting_bytes)} between passes instead of "
            f"{format_bytes(before.waiting_bytes)}, for which the device has no room: it takes "
            f"{after.time_over_ideal:.2f} of the ideal time instead of {before.time_over_ideal:.2f}\n"
            "hint: smaller microbatches, more stages, remat=True or inputs='host' of lt.pipeline.value_and_grad",
            UserWarning,
            stacklevel=2,
        )
