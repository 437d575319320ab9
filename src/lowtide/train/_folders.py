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
    """Return the absolute path of a folder.

    Raises:
        ConfigError: for the address of a bucket.
    """
    if re.match(r"[A-Za-z][\w+.-]+:/", str(directory)):
        raise ConfigError(
            "checkpoint_dir is an address, and checkpoints are written to folders",
            expected="a path",
            got=repr(str(directory)),
            hint="mount the bucket (gcsfuse, mountpoint-s3), and give the path of the mount",
        )
    return Path(directory).expanduser().resolve()


def check_folder(directory: Path) -> None:
    """Raise now, rather than at the first checkpoint, if a folder is not writable."""
    check_writable(directory, "no checkpoint can be written there", "choose a checkpoint_dir that you may write to")


def refuse_foreign(directory: Path, marks: Sequence[str]) -> None:
    """Raise for folders that would be taken for checkpoints, and so be renamed as damaged or deleted as old.

    Args:
        directory: folder of the checkpoints.
        marks: names of entries, of which each checkpoint of this package has at least one.
    """
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        if path.name.isdigit() and path.is_dir() and not any((path / name).exists() for name in marks):
            raise OutputError(
                f"{path}: a folder with the name of a checkpoint, and none of Lowtide's",
                expected="a folder for checkpoints of lt.Trainer alone",
                got=", ".join(sorted(entry.name for entry in path.iterdir())[:4]) or "an empty folder",
                hint="choose another checkpoint_dir, or rename that folder",
            )


class Deletion:
    """Deletes the contents of a folder in a thread, because it may take long.

    Args:
        folder: its contents at the time of `begin` are deleted, and the folder itself when it is empty.
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
        """Wait for the deletion.

        Warns:
            UserWarning: for contents that could not be deleted.
        """
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        with contextlib.suppress(OSError):
            self._folder.rmdir()
        if remaining := sorted(path.name for path in self._paths if path.exists()):
            warnings.warn(
                f"{self._folder}: checkpoints that are too old cannot be deleted: {', '.join(remaining)}\n"
                "hint: look who may write there, or has files of them open; the disk fills up otherwise",
                UserWarning,
                stacklevel=4,
            )
