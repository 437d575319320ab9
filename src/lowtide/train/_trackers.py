"""Callbacks that write records: to a file of JSON lines, to TensorBoard, Weights & Biases or Trackio.

A tracker only displays a run, so its exceptions during training become warnings. Weights & Biases identifies a run by
an id, Trackio by its name. Both are stored in the run's folder, where a resumed run reads them.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import secrets
import warnings
from collections.abc import Callable, Generator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ..core import ConfigError, OutputError, check_choice, write_files
from ._callbacks import Callback, TrainerView
from ._events import Record, user_stacklevel

_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}


@contextlib.contextmanager
def _writing(path: Path, kind: str) -> Generator[None]:
    """Raise `OutputError` with the path when a file cannot be written."""
    try:
        yield
    except OSError as error:
        hint = f"choose another {kind}"
        raise OutputError(f"{path} cannot be written: {error.strerror or error}", hint=hint) from error


class JsonlLogger(Callback):
    """Write every record as a line of JSON; numbers that are not finite become null, as JSON has no such numbers.

    Mutable: it stores whether this process writes.

    Args:
        path: the file; only the first process writes, and appends to it.

    Raises:
        OutputError: during a run, when the file cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._is_writing = False

    def on_train_begin(self, trainer: TrainerView) -> None:
        """Make the folder, and raise now rather than at the first record if the file cannot be written."""
        if trainer.processes.is_first:
            with contextlib.suppress(OSError):
                self.path.parent.mkdir(parents=True, exist_ok=True)
        self._write(trainer, "")

    def on_record(self, trainer: TrainerView, record: Record) -> None:
        """Append a record."""
        values = {name: value if math.isfinite(value) else None for name, value in record.items()}
        self._write(trainer, json.dumps(values) + "\n")

    def state(self) -> None:
        """Flush the file to disk, so that it survives a power cut; called before every checkpoint."""
        if self._is_writing:
            with _writing(self.path, "path"), self.path.open("a", encoding="utf-8") as file:
                os.fsync(file.fileno())

    def _write(self, trainer: TrainerView, line: str) -> None:
        self._is_writing = trainer.processes.is_first
        if self._is_writing:
            with _writing(self.path, "path"), self.path.open("a", encoding="utf-8") as file:
                file.write(line)


class Scalars(Callback):
    """Pass every value of the records to a writer: any object with ``add_scalar(name, value, step)``, or a W&B run.

    Args:
        writer: for example a ``SummaryWriter(folder)`` of tensorboardX or of torch.utils.tensorboard; or a run of
            Weights & Biases, whose ``log(values, step=)`` is called.

    Raises:
        ConfigError: for a writer with neither method.
    """

    def __init__(self, writer: Any) -> None:
        if not (hasattr(writer, "add_scalar") or hasattr(writer, "log")):
            problem = f"a {type(writer).__name__} has neither add_scalar(name, value, step) nor log(values, step=step)"
            raise ConfigError(problem, hint="pass tensorboardX.SummaryWriter(folder), or wandb.init(...)")
        self.writer = writer

    def on_record(self, trainer: TrainerView, record: Record) -> None:
        """Write the values of a record."""
        if not trainer.processes.is_first:
            return
        values = {name: value for name, value in record.items() if name != "step"}
        if not hasattr(self.writer, "add_scalar"):
            self.writer.log(values, step=record["step"])
            return
        for name, value in values.items():
            self.writer.add_scalar(name, value, record["step"])

    def on_train_end(self, trainer: TrainerView) -> None:
        """Flush the writer."""
        if hasattr(self.writer, "flush"):
            self.writer.flush()

    def on_exception(self, trainer: TrainerView, error: BaseException) -> None:
        """Flush the writer."""
        self.on_train_end(trainer)


class TensorBoard(Callback):
    """Write every value of the records for TensorBoard, with tensorboardX.

    Mutable: it holds the open file.

    A resumed run writes into the same folder, and TensorBoard then hides the old values of steps that are repeated.
    If the process is killed, the last values may be missing; a `JsonlLogger` writes every value at once. `Scalars`
    supports other writers.

    Args:
        directory: folder of the event files.

    Raises:
        ConfigError: when a run begins and tensorboardX is not installed.
        OutputError: when a run begins and the folder cannot be written.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._scalars: Scalars | None = None

    def on_train_begin(self, trainer: TrainerView) -> None:
        """Open an event file, in the first process."""
        if not trainer.processes.is_first:
            return
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise ConfigError("TensorBoard needs tensorboardX", hint='pip install "lowtide[tensorboard]"') from error

        step = trainer.step
        # Files that are opened in the same second would have the same name without a suffix.
        purge_step, suffix = (step + 1, f".{step}") if step else (None, "")
        with _writing(self.directory, "folder"):
            writer = SummaryWriter(str(self.directory), purge_step=purge_step, filename_suffix=suffix)
        self._scalars = Scalars(writer)

    def on_record(self, trainer: TrainerView, record: Record) -> None:
        """Write the values of a record."""
        if self._scalars is not None:
            self._scalars.on_record(trainer, record)

    def on_train_end(self, trainer: TrainerView) -> None:
        """Close the file."""
        if self._scalars is not None:
            self._scalars.writer.close()
            self._scalars = None

    def on_exception(self, trainer: TrainerView, error: BaseException) -> None:
        """Close the file and keep its values."""
        self.on_train_end(trainer)


class Tracker(Callback):
    """Write every value of the records to an experiment tracker. Mutable: it holds the tracker's run.

    With several processes, only the first one writes. A resumed run continues the tracker's old run. If a tracker fails
    during training, there is one warning, and training continues without it. No account is needed for Weights & Biases
    with ``WANDB_MODE=offline``, which stores its data in `directory`, or for Trackio, which is local by default.

    Args:
        library: ``"tensorboard"``, ``"wandb"`` or ``"trackio"``.
        directory: the run's folder; the identity of the tracker's run is stored there in ``tracker-LIBRARY.json``.
        project: project of the tracker's run.
        name: name of the run; by default the name of the folder.
        config: settings to show with the run.
        values: a function from a record to the values that are written; by default all values are written.

    Raises:
        ConfigError: for a `library` that is unknown or not installed; when the tracker of a new run cannot start.
        OutputError: when a run begins and `directory` cannot be written.

    Examples:
        >>> tracker = Tracker("tensorboard", "runs/mine")

    Memory:
        None on a device. On the host, the buffers of the library.
    """

    def __init__(
        self,
        library: str,
        directory: str | Path,
        *,
        project: str = "lowtide",
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        values: Callable[[Record], Mapping[str, float]] | None = None,
    ) -> None:
        check_choice("library", library, tuple(_PACKAGES), hint='"tensorboard" needs no account')
        self.library, self.directory, self.project = library, Path(directory), project
        self.name, self.config, self._values = name, dict(config or {}), values
        self._run: Any = None  # a `TensorBoard`, or the library's own run
        try:
            self._module: Any = importlib.import_module(_PACKAGES[library])
        except ImportError as error:
            hint = f'pip install "lowtide[{library}]"'
            raise ConfigError(f"the tracker {library} is not installed: {error}", hint=hint) from error

    def on_train_begin(self, trainer: TrainerView) -> None:
        """Begin the tracker's run, or continue it."""
        if not trainer.processes.is_first:
            return
        try:
            self._run = self._open(trainer)
        except OutputError:
            raise
        except Exception as error:
            if trainer.step:  # a resumed run may have waited for a machine: it must not stop because of its tracker
                self._give_up(error)
                return
            offline = "log in, or set WANDB_MODE=offline" if self.library == "wandb" else "follow its message"
            hint = f"{offline}; or leave the tracker out"
            raise ConfigError(f"{self.library} cannot start a run: {error!r}", hint=hint) from error

    def on_record(self, trainer: TrainerView, record: Record) -> None:
        """Write the values of a record."""
        if self._run is not None:
            self._attempt(partial(self._log, self._run, trainer, record))

    def _log(self, run: Any, trainer: TrainerView, record: Record) -> None:
        values, step = record if self._values is None else self._values(record), int(record["step"])
        if isinstance(run, TensorBoard):
            run.on_record(trainer, {**values, "step": step})
        else:
            run.log({name: value for name, value in values.items() if name != "step"}, step=step)

    def on_train_end(self, trainer: TrainerView) -> None:
        """End the tracker's run."""
        self._finish(trainer, failed=False)

    def on_exception(self, trainer: TrainerView, error: BaseException) -> None:
        """End the tracker's run as failed."""
        self._finish(trainer, failed=True)

    def _finish(self, trainer: TrainerView, *, failed: bool) -> None:
        run, self._run = self._run, None
        if isinstance(run, TensorBoard):
            self._attempt(partial(run.on_train_end, trainer))
        elif run is not None:
            self._attempt(partial(run.finish, **({"exit_code": int(failed)} if self.library == "wandb" else {})))

    def _attempt(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._run = None
        warnings.warn(
            f"{self.library} failed, and receives no more values of this run: {type(error).__name__}: {error}\n"
            "hint: the run continues; its records are in its own files",
            UserWarning,
            stacklevel=user_stacklevel(),
        )

    def _open(self, trainer: TrainerView) -> Any:
        if self.library == "tensorboard":
            board = TensorBoard(self.directory / "tensorboard")
            board.on_train_begin(trainer)
            return board
        path = self.directory / f"tracker-{self.library}.json"
        identity = _read(path)
        name = identity.get("name") or self.name or self.directory.resolve().name
        project = identity.get("project") or self.project
        options: dict[str, Any] = {"project": project, "name": name, "config": self.config}
        if self.library == "wandb":
            options |= {"id": identity.get("id") or secrets.token_hex(6), "dir": str(self.directory)}
        options["resume"] = "allow" if identity or self.library == "wandb" else "never"
        self.directory.mkdir(parents=True, exist_ok=True)
        run = self._module.init(**options)
        # Trackio may have replaced a name that is in use by another one.
        name = getattr(run, "name", None) if self.library == "trackio" else name
        new_identity = {"project": project, "name": name if isinstance(name, str) else options["name"]}
        new_identity |= {"id": options["id"]} if "id" in options else {}
        write_files(self.directory, {path.name: (json.dumps(new_identity) + "\n").encode()})
        return run


def _read(path: Path) -> dict[str, str]:
    """Return the identity of an earlier run; {} for a missing or damaged file, so that the tracker begins a new run."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        values = error
    if isinstance(values, dict):
        return {name: value for name, value in values.items() if isinstance(value, str)}
    warnings.warn(
        f"{path} is damaged, so the tracker starts another run: {values}\nhint: remove the file",
        UserWarning,
        stacklevel=user_stacklevel(),
    )
    return {}
