"""Folders of checkpoints: validation, and deletion in the background."""

from __future__ import annotations

import contextlib
import re
import shutil
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path

from ..core import ConfigError, OutputError, check_writable


def resolve_folder(directory: str | Path) -> Path:
    """Return the absolute path of a folder; raise `ConfigError` for the address of a bucket."""
    if re.match(r"[A-Za-z][\w+.-]+:/", str(directory)):
        raise ConfigError(
            "checkpoint_dir is a URL, but checkpoints are written to folders",
            expected="a path",
            got=repr(str(directory)),
            hint="mount the bucket (gcsfuse, mountpoint-s3), and pass the path of the mount",
        )
    return Path(directory).expanduser().resolve()


def check_folder(directory: Path) -> None:
    """Raise now, rather than at the first checkpoint, if a folder is not writable."""
    check_writable(directory, "no checkpoint can be written there", "choose a checkpoint_dir that you may write to")


def refuse_foreign(directory: Path, marks: Sequence[str]) -> None:
    """Raise for folders that would be taken for checkpoints, and so be renamed as damaged or deleted as old.

    Each checkpoint of this package has at least one of the entries that `marks` names.
    """
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        if path.name.isdigit() and path.is_dir() and not any((path / name).exists() for name in marks):
            raise OutputError(
                f"{path}: this folder has the name of a checkpoint, but Lowtide did not write it",
                expected="a folder that holds only checkpoints of lt.Trainer",
                got=", ".join(sorted(entry.name for entry in path.iterdir())[:4]) or "an empty folder",
                hint="choose another checkpoint_dir, or rename that folder",
            )


class Deletion:
    """Deletes what a folder holds at `begin`, and the folder once it is empty; in a thread, as it may take long."""

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
