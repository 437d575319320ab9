"""Experiment trackers as one callback: TensorBoard, Weights & Biases, Trackio.

A tracker only displays a run, so its exceptions during training become warnings. Weights & Biases identifies a run by
an id, Trackio by its name. Both are stored in the run's folder, where a resumed run reads them.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import secrets
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..core import ConfigError, OutputError, check_choice, write_files
from ._callbacks import Callback, TensorBoard, TrainerView
from ._events import Record, user_stacklevel

_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}


@dataclasses.dataclass(frozen=True)
class _TrackerRun:
    """An open run of a tracker, which takes values."""

    log: Callable[[dict[str, float], int], Any]
    finish: Callable[[bool], Any]
    """Ends the tracker's run; the argument is whether the training failed."""


class Tracker(Callback):
    """Write every value of the records to an experiment tracker.

    With several processes, only the first one writes. A resumed run continues the tracker's old run. If a tracker fails
    during training, there is one warning, and training continues without it. No account is needed for Weights & Biases
    with ``WANDB_MODE=offline``, which stores its data in `directory`, or for Trackio, which is local by default.

    Args:
        library: ``"tensorboard"``, ``"wandb"`` or ``"trackio"``.
        directory: the run's folder; the identity of the tracker's run is stored there in ``tracker-LIBRARY.json``.
        project: project of the tracker's run.
        name: name of the run; by default the name of the folder.
        config: settings to show with the run.
        values: selects the values of a record to write; by default all.

    Raises:
        ConfigError: for another `library`, or one that is not installed; when a new run begins and its tracker cannot.
        OutputError: when `directory` cannot be written.

    Examples:
        >>> tracker = Tracker("tensorboard", "runs/mine")

    Memory:
        None on a device; on the host the library's own buffers.
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
        check_choice("unknown tracker", library, tuple(_PACKAGES), '"tensorboard" needs no account')
        self.library, self.directory, self.project = library, Path(directory), project
        self.name, self.config, self._values = name, dict(config or {}), values
        self._run: _TrackerRun | None = None
        try:
            self._module: Any = importlib.import_module(_PACKAGES[library])
        except ImportError as error:
            raise ConfigError(
                f"the tracker {library} is not installed",
                expected=f"the package {_PACKAGES[library]}",
                got=str(error),
                hint=f'pip install "lowtide[{library}]"',
            ) from error

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
            raise ConfigError(
                f"{self.library} cannot start a run",
                got=f"{type(error).__name__}: {error}",
                hint=f"{offline}; or leave the tracker out",
            ) from error

    def on_record(self, trainer: TrainerView, record: Record) -> None:
        """Write the values of a record."""
        if (run := self._run) is None:
            return
        values = record if self._values is None else self._values(record)
        self._attempt(lambda: run.log({k: v for k, v in values.items() if k != "step"}, int(record["step"])))

    def on_train_end(self, trainer: TrainerView) -> None:
        """End the tracker's run."""
        self._finish(failed=False)

    def on_exception(self, trainer: TrainerView, error: BaseException) -> None:
        """End the tracker's run as failed."""
        self._finish(failed=True)

    def _finish(self, *, failed: bool) -> None:
        run = self._run
        if run is not None:
            self._attempt(lambda: run.finish(failed))
        self._run = None

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

    def _open(self, trainer: TrainerView) -> _TrackerRun:
        if self.library == "tensorboard":
            return _tensorboard(trainer, self.directory)
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
        # Trackio may have generated an unused name.
        name = getattr(run, "name", None) if self.library == "trackio" else name
        new_identity = {"project": project, "name": name if isinstance(name, str) else options["name"]}
        new_identity |= {"id": options["id"]} if "id" in options else {}
        write_files(self.directory, {path.name: (json.dumps(new_identity) + "\n").encode()})

        def finish(failed: bool) -> None:
            run.finish(**({"exit_code": int(failed)} if self.library == "wandb" else {}))

        return _TrackerRun(lambda values, step: run.log(values, step=step), finish)


def _tensorboard(trainer: TrainerView, directory: Path) -> _TrackerRun:
    board = TensorBoard(directory / "tensorboard")
    board.on_train_begin(trainer)

    def log(values: dict[str, float], step: int) -> None:
        board.on_record(trainer, {**values, "step": step})

    return _TrackerRun(log, lambda failed: board.on_train_end(trainer))


def _read(path: Path) -> dict[str, str]:
    """Return the identity of an earlier run; {} for a damaged file, so that the tracker begins another run."""
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
