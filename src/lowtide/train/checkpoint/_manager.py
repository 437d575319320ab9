"""Checkpoints of the trainable state, written by Orbax: asynchronous and atomic, with only a few kept.

The state is stored as one flat dictionary from tree path to array (`_storage`), so a checkpoint does not depend on
Python classes. It never contains frozen leaves.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import logging
import math
import os
import re
import shutil
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from ...core import (
    ConfigError,
    OutputError,
    StateError,
    StructureError,
    Tree,
    check_choice,
    check_integer,
    check_writable,
    require_extra,
    write_files,
)
from ...distributed import SHARED, any_process, call_on_first
from ...memory import is_out_of_memory
from .._events import user_stacklevel
from .._signals import delay_signals
from ._storage import (
    CHECKSUMS,
    CHUNK_BYTES,
    Rearrangement,
    check_leaves,
    check_origin,
    checkpoint_bytes,
    checksummed_folder,
    chunking,
    find_damage,
    flatten_state,
    largest_leaf,
    read_leaves,
    unflatten_state,
    warn_of_random,
)

# Orbax logs every save through absl at INFO and above; the trainer's own records contain what a user needs.
# Orbax raises failures of its threads and tasks, so the tracebacks that it logs for them are noise.
_QUIET = ("/futures/", "/checkpointers/async_checkpointer", "/checkpoint_manager")


def _is_relevant(record: logging.LogRecord) -> bool:
    """Return False for log records of Orbax, except for errors that Orbax only logs and does not raise."""
    path = record.pathname.replace("\\", "/")
    return "orbax/checkpoint/" not in path or (
        record.levelno >= logging.ERROR and not any(part in path for part in _QUIET)
    )


logging.getLogger("absl").addFilter(_is_relevant)
logging.getLogger("asyncio").addFilter(
    lambda record: not any(name in record.getMessage() for name in ("orbax", "tensorstore"))
)

_STATE, _NOTES = "state", "notes"
_NEW, _OLD = ".new-", ".old-"
"""Name prefixes: of a checkpoint that will replace another one, and of folders that will be deleted."""
_DELETED = f"{_OLD}checkpoints"
"""Folder to which Orbax moves checkpoints that are too old."""
_VERIFY_SECONDS = 24 * 3600
"""Longest wait for other processes to read their files; a process that dies is detected in another way."""
_EVALUATIONS = "evaluations.json"
"""File with the results of evaluations."""


# Orbax renames a checkpoint when it is complete. The next run deletes incomplete ones of a killed run at its first
# save, not before, so that a process may read while another run writes. A checkpoint that replaces another one of the
# same step is completed under a temporary name before the swap. An old checkpoint is renamed before it is deleted, so a
# kill never leaves half of it under the name of a complete one. Signals are delayed while a save starts, and interrupt
# only the wait for the previous save: an interrupt elsewhere would make Orbax lose track of its writes.
class Checkpoints:
    """Numbered checkpoints in one folder. Mutable: it stores whether it has saved.

    Args:
        directory: the folder; made when missing.
        max_to_keep: number of newest checkpoints to keep.
        best: name of a value in evaluations, such as ``eval_loss``, whose best checkpoint is kept in addition.
        best_mode: ``"min"`` or ``"max"``.
        like: the state to save, as arrays or shapes; the host memory of a save is then bounded as in
            `checkpoint_bytes`. With None, Orbax sets the bound.

    Raises:
        ConfigError: for an unknown `best_mode`, a `max_to_keep` below 1, or a URL; when Orbax is not installed.
        OutputError: for a folder that cannot be made, or that holds other folders with names of checkpoints (digits).
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        max_to_keep: int = 2,
        best: str | None = None,
        best_mode: str = "min",
        like: Tree | None = None,
    ) -> None:
        require_extra("train")
        import orbax.checkpoint as ocp  # takes a second; `import lowtide` does not need it

        self._ocp = ocp
        self._limit_bytes = None if like is None else largest_leaf(like) + CHUNK_BYTES
        self._is_copied = like is None or checkpoint_bytes(like).is_copied
        if re.match(r"[A-Za-z][\w+.-]+:/", str(directory)):
            hint = "mount the bucket (gcsfuse, mountpoint-s3), and pass the path of the mount"
            raise ConfigError(f"checkpoint_dir must be a folder, but {str(directory)!r} is a URL", hint=hint)
        self.directory = Path(directory).expanduser().resolve()
        if not os.path.isdir(self.directory):  # an existing folder may be read-only
            _check_folder(self.directory)
        _refuse_foreign(self.directory)
        call_on_first(self._complete_swaps)
        self._retention = _Retention(self.directory, max_to_keep, best, best_mode)
        self._has_saved = False
        self._deletion = _Deletion(self.directory / _DELETED)
        self._folder_class = checksummed_folder(ocp, self.directory)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self._retention,
            create=True,
            temporary_path_class=self._folder_class,
            todelete_subdir=_DELETED,
        )
        self._manager = ocp.CheckpointManager(self.directory, options=options, item_handlers=self._handlers())
        self._waiter = concurrent.futures.ThreadPoolExecutor(1)

    def _handlers(self) -> dict[str, Any]:
        limit: Any = None if self._limit_bytes is None else self._limit_bytes / 10**9  # its type hint says int
        state = self._ocp.PyTreeCheckpointHandler(
            save_concurrent_gb=limit, save_device_host_concurrent_gb=None if self._is_copied else limit
        )
        return {_STATE: state, _NOTES: self._ocp.JsonCheckpointHandler()}

    def latest_step(self) -> int | None:
        """Return the step of the newest complete checkpoint, or None."""
        return self._manager.latest_step()

    def look_again(self) -> int | None:
        """Read the folder again and return `latest_step`, because another trainer may have written checkpoints."""
        _check_folder(self.directory)
        _refuse_foreign(self.directory)
        self.wait()
        self._manager.reload()
        return self.latest_step()

    def _refuse_other_run(self) -> None:
        """Raise when the folder holds a checkpoint of a later step that this run did not write."""
        last_step = max([-1, *self._manager.all_steps()])
        steps = [int(path.name) for path in self.directory.iterdir() if path.name.isdigit()]
        if jax.process_count() == 1 and max([-1, *steps]) > last_step:
            problem = f"{self.directory}: another run writes checkpoints here, and has written step {max(steps)}"
            hint = "choose another checkpoint_dir for one of the two runs; both have written here"
            raise OutputError(problem, hint=hint)

    @property
    def best(self) -> str | None:
        """Name of the value that selects the best checkpoint."""
        return self._retention.best

    def best_step(self) -> int | None:
        """Return the step of the best complete checkpoint, or None when none was evaluated."""
        return self._retention.best_step(self._manager.all_steps())

    def evaluated(self, step: int, record: Mapping[str, float]) -> bool:
        """Record the result of an evaluation, and return whether its step is the best so far.

        `ConfigError` is raised when the record lacks the value that `best` names.
        """
        return self.best is not None and self._retention.add_evaluation(step, record, self._manager.all_steps())

    def changed(self, step: int) -> None:
        """Record that weights were changed at a step, so that its evaluation is dropped before its next checkpoint."""
        self._retention.mark_changed(step)

    def save(self, step: int, state: Tree, notes: Mapping[str, Any], *, replace: bool = False) -> bool:
        """Start to write a checkpoint; when this returns, the arrays may be donated.

        Args:
            step: number of the step, which names the checkpoint.
            state: any pytree of arrays.
            notes: metadata of the step, as data that JSON can represent.
            replace: whether an existing checkpoint of this step is replaced.

        Returns:
            Whether a checkpoint is written: there was none of this step, or it is replaced.

        Raises:
            ConfigError: when the notes are not JSON.
            StructureError: when two leaves have the same name in a checkpoint.
            OutputError: when this or an earlier checkpoint cannot be written, or a checkpoint of a later step exists.

        Memory:
            None on the device. Host memory as in `checkpoint_bytes`. A small state is copied to the host, and is
            written after this returns, unless it replaces a checkpoint. A large state is copied and written one leaf at
            a time, and training waits. The compressed form needs as many bytes again. On CPUs the state is in host
            memory already and is not copied.
        """
        is_existing = step == self._manager.latest_step()
        if is_existing and not replace:
            return False
        try:
            json.dumps(notes)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"the state() of a callback or the get_state() of a data iterator cannot be saved as JSON: {error}",
                hint="return plain numbers, such as float(value)",
            ) from error
        leaves = flatten_state(state)
        chunks = {name: chunking(leaf) for name, leaf in leaves.items()}
        save_args = {name: self._ocp.SaveArgs(**options) for name, options in chunks.items()}
        file_bytes = max((options["chunk_byte_size"] for options in chunks.values()), default=CHUNK_BYTES)
        items = {
            # Orbax buffers each file up to this size.
            _STATE: self._ocp.args.PyTreeSave(leaves, save_args=save_args, ocdbt_target_data_file_size=file_bytes),
            _NOTES: self._ocp.args.JsonSave({**notes, CHECKSUMS: True}),
        }
        args = self._ocp.args.Composite(**items)
        with self._writing():
            self._finish()
            with delay_signals():  # Orbax can neither finish nor restart a save whose start was interrupted
                self._refuse_other_run()
                if not self._has_saved:
                    self._clear()
                    self._has_saved = True
                self._retention.forget_if_changed(step)
                if is_existing:
                    self._replace(step, args)
                    return True
                self._delete_old()
                is_started = self._manager.save(step, args=args)
            if not self._is_copied:
                self._finish()  # leaves are copied one at a time, and the next step would donate the rest
        if not is_started:
            raise OutputError(
                f"{self.directory}: step {step} was not saved, because step {self._manager.latest_step()} is there",
                hint="to continue from an earlier checkpoint, choose another checkpoint_dir",
            )
        return True

    def _replace(self, step: int, args: Any) -> None:
        """Replace a checkpoint; at every moment the old one or the new one is complete."""
        path, new, old = (self.directory / f"{prefix}{step}" for prefix in ("", _NEW, _OLD))
        self._clear()
        handler = self._ocp.CompositeCheckpointHandler(**self._handlers())
        with self._ocp.Checkpointer(handler, temporary_path_class=self._folder_class) as checkpointer:
            checkpointer.save(new, args=args)

        def swap() -> None:
            path.rename(old)
            new.rename(path)
            shutil.rmtree(old)

        call_on_first(swap)

    def _complete_swaps(self) -> None:
        """Complete the swap of a run that was killed inside `_replace`."""
        for new in self.directory.glob(f"{_NEW}*"):
            path = self.directory / new.name.removeprefix(_NEW)
            if path.name.isdigit() and not path.exists():
                with contextlib.suppress(PermissionError):  # a read-only folder
                    new.rename(path)

    def _finish(self) -> None:
        """Wait in another thread for started saves, because Orbax forgets a save if the wait is interrupted."""
        concurrent.futures.wait([self._waiter.submit(self._manager.wait_until_finished)])
        with delay_signals():
            self._manager.wait_until_finished()  # raises failures, which Orbax does once in each thread

    @contextlib.contextmanager
    def _writing(self) -> Generator[None]:
        """Raise `OutputError` with the folder when a checkpoint cannot be written."""
        try:
            yield
        except OutputError:
            raise
        except Exception as error:  # any error of Orbax, TensorStore or the file system
            self._has_saved = False  # the next save first deletes the incomplete checkpoint
            reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
            hint = "free some space, or choose another checkpoint_dir; the trainer keeps its state"
            if jax.process_count() > 1:
                hint = "check that all processes are alive, and that the disk has free space"
            raise OutputError(f"{self.directory}: a checkpoint could not be written: {reason}", hint=hint) from error

    def _clear(self) -> None:
        """Delete incomplete checkpoints of killed runs."""
        self._deletion.end()
        if jax.process_index() == 0:
            self._complete_swaps()
            for path in self.directory.iterdir():
                if self._ocp.utils.TMP_DIR_SUFFIX in path.name or path.name.startswith((_NEW, _OLD)):
                    shutil.rmtree(path)
                elif path.name.startswith((f".{_EVALUATIONS}.", SHARED)):
                    path.unlink()

    def _delete_old(self) -> None:
        """Start to delete the checkpoints that Orbax moved to `_DELETED`."""
        self._deletion.end()
        if self._has_saved and jax.process_index() == 0:
            self._deletion.begin()

    def notes(self, step: int) -> dict[str, Any]:
        """Read the metadata that was saved with the state of a step."""
        args = self._ocp.args.Composite(**{_NOTES: self._ocp.args.JsonRestore()})
        return dict(self._manager.restore(step, args=args)[_NOTES])

    def existing(self, step: int | None) -> int:
        """Return `step`, or the best step if `step` is None; raise `ConfigError` if there is no such checkpoint."""
        self.wait()
        steps = sorted(self._manager.all_steps())
        selected = self.best_step() if step is None else step
        if selected in steps:
            return selected
        problem = f"there is no checkpoint of step {step!r}"
        hint = "max_to_keep sets how many checkpoints are kept; restore() loads the newest"
        if step is None:
            problem = "no checkpoint was evaluated"
            hint = 'Trainer(..., best="eval_loss"), and fit(..., eval_data=..., eval_every=...)'
        existing = f"steps {', '.join(map(str, steps))}" if steps else "no checkpoint"
        raise ConfigError(f"{self.directory}: {problem}", got=existing, hint=hint)

    def read(
        self, step: int, like: Tree, given: Mapping[str, Any], give_up: Callable[[], Any]
    ) -> tuple[int, Tree, dict[str, Any]]:
        """Read a checkpoint, verify that it fits this run, and return its step, state and notes.

        Args:
            step: step of the checkpoint.
            like: as in `restore`.
            given: metadata of this run to compare with the notes: ``base``, the fingerprint of frozen leaves;
                ``arrangement``, the layer in each row of a pipeline's state; ``random``, kinds and settings of keys.
            give_up: called before arrays are read, to free the old arrays.

        Raises:
            StructureError: for a checkpoint of another model, of other frozen leaves, or of other random keys.
            StateError: when the checkpoint cannot be read, or its files differ from what was written.
        """
        # Each process verifies a part of the files; all raise if any file is damaged.
        reason = find_damage(self.directory / str(step), jax.process_index(), jax.process_count())
        if any_process(reason is not None, _VERIFY_SECONDS):
            raise self._damage_error(step, reason or "another process has found the damage")
        try:
            notes = self.notes(step)
            saved, current = notes.get("arrangement"), given["arrangement"]
            rearrangement = None if saved == current else Rearrangement(saved, current, like)
            stored = like if rearrangement is None else rearrangement.source_structs()
            self.check(step, stored)
            check_origin(step, notes, given)
            give_up()
            state = self.restore(step, stored)
            state = state if rearrangement is None else rearrangement.apply(state)
        except (StructureError, MemoryError):
            raise
        except Exception as error:  # any error of Orbax, TensorStore or the file system for a damaged file
            if is_out_of_memory(error) or (isinstance(error, OSError) and not isinstance(error, FileNotFoundError)):
                raise  # the checkpoint is not damaged
            reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
            raise self._damage_error(step, reason) from error
        self._retention.mark_changed(None)
        warn_of_random(step, notes.get("random"), given["random"])
        return step, state, notes

    def _damage_error(self, step: int, reason: str) -> StateError:
        return StateError(
            f"the checkpoint of step {step} in {self.directory} is damaged: {reason}",
            hint="restore() loads the newest checkpoint that can be read",
        )

    def newest(
        self, like: Tree, given: Mapping[str, Any], give_up: Callable[[], Any]
    ) -> tuple[int, Tree, dict[str, Any]] | None:
        """Read the newest checkpoint that can be read, as `read` does; return None when there is no checkpoint.

        Raise `StateError` if there are checkpoints, but none can be read.
        """
        self.wait()
        steps = sorted(self._manager.all_steps(), reverse=True)
        damaged: list[int] = []
        for step in steps:
            result, text = None, f"the checkpoint of step {step} in {self.directory} cannot be read by another process"
            try:
                result = self.read(step, like, given, give_up)
            except StateError as error:
                text = error.message
            if not any_process(result is None):
                self._set_aside(damaged)
                return result
            damaged.append(step)
            hint = "there is no earlier checkpoint" if step == steps[-1] else "the checkpoint before it is tried"
            warnings.warn(f"{text}\nhint: {hint}", UserWarning, stacklevel=user_stacklevel())
        if steps:
            raise StateError(
                f"{self.directory}: no checkpoint can be read, because steps {', '.join(map(str, steps))} are damaged",
                hint="restore the folder from a backup, or start again in another folder",
            )
        return None

    def set_aside(self, after: int) -> None:
        """Rename the checkpoints of steps above `after`; call it only if none of them can be read."""
        self._set_aside([step for step in self._manager.all_steps() if step > after])

    def _set_aside(self, steps: list[int]) -> None:
        """Rename damaged checkpoints, so that their steps can be saved again."""

        def rename() -> list[str]:
            names: list[str] = []
            for step in steps:
                candidates = (self.directory / f"damaged-{step}{'+' * count}" for count in range(100))
                with contextlib.suppress(PermissionError):  # a read-only folder
                    path = (self.directory / str(step)).rename(next(path for path in candidates if not path.exists()))
                    names.append(path.name)
            return names

        if not steps:
            return
        names = call_on_first(rename)
        self._manager.reload()
        if names:
            warnings.warn(
                f"{self.directory}: damaged checkpoints were renamed: {', '.join(names)}\nhint: delete them",
                UserWarning,
                stacklevel=user_stacklevel(),
            )

    def check(self, step: int, like: Tree) -> None:
        """Raise `StructureError` unless a checkpoint has the leaves, shapes and dtypes of `like`; read no array."""
        stored = dict(self._manager.item_metadata(step)[_STATE])
        check_leaves(stored, like, step, self.directory)

    def restore(self, step: int, like: Tree) -> Tree:
        """Read the state of a checkpoint.

        Args:
            step: step of the checkpoint.
            like: a pytree with the expected structure, shapes and dtypes: arrays, or `jax.ShapeDtypeStruct`s with
                shardings.

        Returns:
            The state, with arrays placed as in `like`, in device or host memory.

        Raises:
            StructureError: when the checkpoint holds other leaves.

        Memory:
            The state in its final place; `like` needs no bytes when it is made of shapes. In addition a few chunks in
            host memory, as in `checkpoint_bytes`.
        """
        self.check(step, like)
        return unflatten_state(read_leaves(self.directory / str(step) / _STATE, flatten_state(like)), like)

    def wait(self) -> None:
        """Wait until all started saves are complete on disk; raise `OutputError` when one could not be written."""
        with self._writing():
            self._finish()
        self._delete_old()
        self._deletion.end()


# --- which checkpoints are kept --------------------------------------------------------------------------------------
# The newest ones are kept, and the best of those that were evaluated. The results of evaluations are in one small file
# next to the checkpoints, so that a checkpoint may also be evaluated after it was written. A result is written before
# its checkpoint. So a checkpoint never lacks its result, and a result without a checkpoint is ignored.


class _Retention:
    """Orbax's policy for the checkpoints to keep: the `max_to_keep` newest, and the one with the best value `best`.

    Mutable: every evaluation adds its values.
    """

    def __init__(self, directory: Path, max_to_keep: int, best: str | None, best_mode: str) -> None:
        check_choice("best_mode", best_mode, ("min", "max"), hint='"min" is for losses')
        check_integer("max_to_keep", max_to_keep)
        self.best, self._sign = best, 1 if best_mode == "min" else -1
        self._directory, self._max_to_keep = directory, max_to_keep
        self._evaluations: dict[int, dict[str, float]] = {}
        self._changed_step: int | None = None
        """Step at which weights were changed since they were evaluated or restored."""
        path = directory / _EVALUATIONS
        if best is not None and path.is_file():
            try:
                results = json.loads(path.read_text(encoding="utf-8")).items()
                self._evaluations = {int(step): dict(values) for step, values in results}
            except (OSError, ValueError, TypeError, AttributeError) as error:
                warnings.warn(
                    f"{path} is damaged, so the best checkpoint is not known: {error}\n"
                    "hint: the next evaluation writes it again",
                    UserWarning,
                    stacklevel=user_stacklevel(),
                )

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Return for each checkpoint, oldest first, whether it is kept; Orbax's ``PreservationPolicy``."""
        steps = [checkpoint.step for checkpoint in checkpoints]
        steps_to_keep = {*steps[-self._max_to_keep :], self.best_step(steps)}
        return [step in steps_to_keep for step in steps]

    def best_step(self, steps: Iterable[int]) -> int | None:
        """Return the best of these steps (the first of equally good steps), or None if none was evaluated."""
        evaluated_steps = sorted(step for step in steps if math.isfinite(self._value(step)))
        return min(evaluated_steps, key=self._value) if evaluated_steps else None

    def add_evaluation(self, step: int, record: Mapping[str, float], steps: Iterable[int]) -> bool:
        """Store the result of an evaluation; return whether it is the best, compared with the checkpoints `steps`."""
        names = [name for name in record if name != "step"]
        if self.best not in names:
            problem = f"best={self.best!r} is not a value of the evaluation, which has {', '.join(names)}"
            raise ConfigError(problem, hint="return it among the loss function's metrics, or choose another value")
        other_steps = [number for number in steps if number != step]
        self._evaluations = {number: values for number, values in self._evaluations.items() if number in other_steps}
        self._evaluations[step] = {name: record[name] for name in names if math.isfinite(record[name])}
        self._changed_step = None
        self._write()
        return self.best_step([*other_steps, step]) == step

    def mark_changed(self, step: int | None) -> None:
        """Record that weights were changed at a step; None means that they were restored from a checkpoint."""
        self._changed_step = step

    def forget_if_changed(self, step: int) -> None:
        """Drop the evaluation of a step if its weights have changed since; call it before its checkpoint is written."""
        if self._changed_step == step and self._evaluations.pop(step, None) is not None:
            self._write()

    def _write(self) -> None:
        if jax.process_index() == 0:
            write_files(self._directory, {_EVALUATIONS: (json.dumps(self._evaluations) + "\n").encode()})

    def _value(self, step: int) -> float:
        """Return the value of a step, with the sign that makes lower better; it is infinite if unknown."""
        return self._sign * self._evaluations.get(step, {}).get(self.best or "", math.inf)


# --- folders: validation, and deletion in the background -------------------------------------------------------------


def _check_folder(directory: Path) -> None:
    """Raise now, rather than at the first checkpoint, if a folder is not writable."""
    check_writable(directory, "no checkpoint can be written there", "choose a checkpoint_dir that you may write to")


def _refuse_foreign(directory: Path) -> None:
    """Raise for folders that would be taken for checkpoints, and so be renamed as damaged or deleted as old."""
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        if path.name.isdigit() and path.is_dir() and not any((path / name).exists() for name in (_NOTES, CHECKSUMS)):
            problem = f"{path}: this folder has the name of a checkpoint, but Lowtide did not write it"
            raise OutputError(problem, hint="choose another checkpoint_dir, or rename that folder")


class _Deletion:
    """Deletion, in a thread, of the contents that a folder has at `begin`, and of the folder once it is empty.

    Mutable: it holds the thread and its paths.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._paths: list[Path] = []
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Start to delete, if the folder exists."""
        if self._folder.is_dir():
            self._paths = list(self._folder.iterdir())
            self._thread = threading.Thread(target=lambda: [shutil.rmtree(path, True) for path in self._paths])
            self._thread.start()

    def end(self) -> None:
        """Wait for the deletion, and warn of contents that could not be deleted."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        with contextlib.suppress(OSError):
            self._folder.rmdir()
        if remaining := sorted(path.name for path in self._paths if path.exists()):
            warnings.warn(
                f"{self._folder}: old checkpoints cannot be deleted: {', '.join(remaining)}\n"
                "hint: check who may write there, or has these files open; otherwise the disk fills up",
                UserWarning,
                stacklevel=4,
            )
