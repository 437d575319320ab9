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

_MAX_ATTEMPTS = 3
"""Number of attempts with less memory: each program needs a different amount while a pass runs."""
_MAX_TIME_SHARE = 0.99
"""A schedule that needs more memory must take less than this share of the time: another compilation takes minutes."""


class Trial(NamedTuple):
    """A compiled step."""

    step: TrainingStep
    program: Any
    """The result of the compilation: the compiled program, or the error of a step that does not fit."""
    report: MemoryReport | None
    """Memory report of the program; None where it was not requested."""
    free_bytes: int | None
    """Bytes left on a device, negative where the step is too large, None where unknown. The same in all processes of a
    run."""


def choose_schedule(step: PipelineStep, build: Callable[[PipelineStep], Trial], arrays: Tree, batch: Tree) -> Trial:
    """Return a trial of the step itself, or of one with another schedule that fits the device's memory better.

    If `step` does not fit, the other one keeps less between passes (the smallest one, if several do not fit). If memory
    is left, the other one ends sooner. `arrays` are the model's arrays, arranged for the pipeline, or their shapes.
    """
    best = default = build(step)
    if default.free_bytes is None:
        return default
    default_report = step.report(arrays, batch, None)
    if default.free_bytes >= 0:
        larger = _reschedule(default, default.free_bytes, arrays, batch)
        if larger is None or larger[1].time_over_ideal > _MAX_TIME_SHARE * default_report.time_over_ideal:
            return default
        return default if ((trial := build(larger[0])).free_bytes or 0) < 0 else trial
    for _ in range(_MAX_ATTEMPTS):
        # If a schedule cannot save all missing bytes, it may save a part: the memory that running passes need shrinks,
        # too.
        options = (_reschedule(best, int(part * (best.free_bytes or 0)), arrays, batch) for part in (1, 0.5, 0.25))
        smaller = next((option for option in options if option is not None), None)
        if smaller is None or ((trial := build(smaller[0])).free_bytes or 0) <= (best.free_bytes or 0):
            break
        best = trial
        if (best.free_bytes or 0) >= 0:
            _warn_slower(default_report, smaller[1])
            break
    return best


def _reschedule(trial: Trial, extra_bytes: int, arrays: Tree, batch: Tree) -> tuple[PipelineStep, StageReport] | None:
    """Return a step that keeps at most `extra_bytes` more between passes (fewer where it is negative), or None."""
    assert isinstance(trial.step, PipelineStep)
    counted, compiled = (trial.step.report(arrays, batch, memory).waiting_bytes for memory in (None, trial.report))
    # A schedule counts arrays as whole even where the compiler shards them, so the limit is scaled to that count.
    limit = int((compiled + extra_bytes) * counted / compiled) if compiled else 0
    if limit < 1:
        return None
    limited_step = trial.step.within(limit)
    try:
        return limited_step, limited_step.report(arrays, batch, None)
    except ScheduleError:
        return None


def _warn_slower(before: StageReport, after: StageReport) -> None:
    """Warn about a step that saves memory and takes longer."""
    if after.time_over_ideal > before.time_over_ideal / _MAX_TIME_SHARE:
        warnings.warn(
            f"the pipeline keeps {format_bytes(after.waiting_bytes)} between passes instead of "
            f"{format_bytes(before.waiting_bytes)}, for which the device has too little memory: it takes "
            f"{after.time_over_ideal:.2f} times the ideal time instead of {before.time_over_ideal:.2f}\n"
            "hint: use smaller microbatches, more stages, remat=True or inputs='host' of lt.pipeline.value_and_grad",
            UserWarning,
            stacklevel=2,
        )
