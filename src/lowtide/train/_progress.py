"""Progress output of `Trainer.fit`: the bytes of the step, evaluations, and a bar (without a terminal: losses)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from ..core import format_bytes
from ..memory import MemoryReport
from ._callbacks import Callback, TrainerView
from ._events import LossLines, Record


class Progress(Callback):
    """Print progress to standard error. Mutable: it holds the progress bar.

    `num_steps` is the step at which the run ends, or None if unknown.
    """

    def __init__(self, num_steps: int | None) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._num_steps = num_steps
        self._lines = LossLines(num_steps)
        self._bar: Bar | None = None
        self._task = TaskID(0)

    def on_preflight(self, trainer: TrainerView, report: MemoryReport) -> None:
        """Print the predicted and the available bytes; on a terminal, start the bar."""
        self._show(memory_table(report, trainer.budget_bytes))
        if trainer.stages is not None:
            self._show(trainer.stages)
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            self._bar = Bar(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self._console, transient=True)
            self._task = self._bar.add_task("training", total=self._num_steps, completed=trainer.step)
            self._attempt(self._bar.start)

    def on_record(self, trainer: TrainerView, record: Record) -> None:
        """Move the bar, or print an evaluation or a loss."""
        if "eval_loss" in record:
            self._show(f"step {record['step']:>6}  eval_loss {record['eval_loss']:.4f}")
        elif self._bar is None and self._lines.is_due(int(record["step"])):
            self._show(f"step {record['step']:>6}  loss {record['loss']:.4f}  {record['seconds']:.3f} s/step")
        elif self._bar is not None:
            text = f"loss {record['loss']:.4f}  {record['seconds']:.3f} s/step"
            self._attempt(partial(self._bar.update, self._task, completed=record["step"], description=text))

    def on_train_end(self, trainer: TrainerView) -> None:
        if self._bar is not None:
            self._attempt(self._bar.stop)
            self._bar = None

    def on_exception(self, trainer: TrainerView, error: BaseException) -> None:
        self.on_train_end(trainer)

    def _show(self, renderable: Any) -> None:
        self._attempt(partial(self._console.print, renderable))

    def _attempt(self, action: Callable[[], Any]) -> None:
        """Call a function that prints; if standard error is closed, print nothing more instead of ending the run."""
        try:
            action()
        except (OSError, ValueError):
            self._console.quiet, self._bar = True, None


def memory_table(report: MemoryReport, budget_bytes: int | None = None) -> Table:
    """Return a table of the predicted bytes of each role of a step, and the bytes that the step may use."""
    usable = report.target.budget_bytes if budget_bytes is None else budget_bytes
    chip = report.target.chip
    table = Table(box=None, padding=(0, 2, 0, 0), show_footer=True)
    table.add_column("step (compiled)", footer="predicted")
    table.add_column(f"one device ({chip})", justify="right", footer=_format_of_total(report.device_bytes, usable))
    if report.host_bytes:
        table.add_column("host", justify="right", footer=_format_of_total(report.host_bytes, report.target.host_bytes))
    names = [name for name, size in report.by_role.items() if size or report.host_by_role.get(name)]
    for name in names:
        host_cells = [format_bytes(report.host_by_role.get(name, 0))] if report.host_bytes else []
        table.add_row(name, format_bytes(report.by_role[name]), *host_cells)
    return table


def _format_of_total(num_bytes: int, total_bytes: int | None) -> str:
    return format_bytes(num_bytes) + ("" if total_bytes is None else f" of {format_bytes(total_bytes)}")
