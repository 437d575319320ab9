"""The schedule of a pipeline for what its device has left.

``"auto"`` that was made without costs and limit may keep more between passes, or less, than it does by default. How
much room there is only the compiled step tells: so that is compiled, its schedule is made anew within what the device
leaves, and what comes of it is compiled again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

from ..core import ScheduleError, Tree, format_bytes
from ..memory import MemoryReport
from ._pipelined import PipelineStep

_TRIES = 3
"""How often less is tried: what a pass needs while it runs is another amount in each program."""
_WORTH = 0.99
"""Of the time, that more memory has to come below: another compilation takes minutes."""


def fitting(
    step: PipelineStep,
    compiled: Callable[[PipelineStep], MemoryReport],
    left: Callable[[MemoryReport], int | None],
    arrays: Tree,
    batch: Tree,
) -> PipelineStep:
    """Choose the schedule that the device has room for.

    Args:
        step: with the schedule of the pipeline.
        compiled: compiles a step, and reports its bytes.
        left: bytes that a device has beside a compiled step, negative where it is too large; None where nobody knows.
        arrays: the model's, arranged; arrays or shapes.
        batch: shapes of one.

    Returns:
        The step itself where there is nothing to choose, or nothing to win; else one with less that waits, where it
        did not fit, or one that ends sooner, where memory is left. The one that needs least, if none fits.
    """
    if not step.is_open or (rest := left(memory := compiled(step))) is None:
        return step
    if rest >= 0:
        return _faster(step, compiled, left, arrays, batch, memory)
    usual = step
    for _ in range(_TRIES):
        less = _within(step, rest, arrays, batch, memory)
        if less is None or (found := compiled(less)).device_bytes >= memory.device_bytes:
            break
        step, memory, rest = less, found, left(found) or 0
        if rest >= 0:
            break
    if rest >= 0:
        _tell(usual, step, arrays, batch)
    return step


def _tell(usual: PipelineStep, less: PipelineStep, arrays: Tree, batch: Tree) -> None:
    """Warn of the time that a step takes which keeps less."""
    before, after = (one.report(arrays, batch, None) for one in (usual, less))
    if after.time_over_ideal > before.time_over_ideal / _WORTH:
        warnings.warn(
            f"the pipeline keeps {format_bytes(after.waiting_bytes)} between passes instead of "
            f"{format_bytes(before.waiting_bytes)}, for which the device has no room: it takes "
            f"{after.time_over_ideal:.2f} of the ideal time instead of {before.time_over_ideal:.2f}\n"
            "hint: smaller microbatches, more stages, or remat=True of lt.pipeline.value_and_grad",
            UserWarning,
            stacklevel=2,
        )


def _faster(
    step: PipelineStep,
    compiled: Callable[[PipelineStep], MemoryReport],
    left: Callable[[MemoryReport], int | None],
    arrays: Tree,
    batch: Tree,
    memory: MemoryReport,
) -> PipelineStep:
    more = _within(step, left(memory) or 0, arrays, batch, memory)
    if more is None:
        return step
    before, after = (one.report(arrays, batch, None).time_over_ideal for one in (step, more))
    if after > _WORTH * before or (left(compiled(more)) or 0) < 0:
        return step
    return more


def _within(step: PipelineStep, rest: int, arrays: Tree, batch: Tree, memory: MemoryReport) -> PipelineStep | None:
    """Make the step that may keep so many bytes more between passes than this one, or so many less; None for none."""
    counted, there = (step.report(arrays, batch, one).waiting_bytes for one in (None, memory))
    # What the compiler divides by itself counts whole where a schedule is chosen.
    limit = int((there + rest) * counted / there) if there else 0
    if limit < 1:
        return None
    other = step.within(limit)
    try:
        other.report(arrays, batch, None)
    except ScheduleError:
        return None
    return other
