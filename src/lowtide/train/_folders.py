"""Folders that checkpoints may be written to."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ..core import ConfigError, OutputError


def meant(directory: str | Path) -> Path:
    """The folder that is meant, from the root.

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
    """Raise now rather than at the first checkpoint."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise OutputError(
            f"{directory}: no checkpoint can be written there",
            got=error.strerror or error,
            hint="choose a checkpoint_dir that you may write to",
        ) from error


def refuse_foreign(directory: Path, marks: Sequence[str]) -> None:
    """Raise for what would be taken for checkpoints: set aside as damaged, or deleted as old ones.

    Args:
        directory: of checkpoints.
        marks: what checkpoints of ours hold, at least one of it.
    """
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        if path.name.isdigit() and path.is_dir() and not any((path / name).exists() for name in marks):
            raise OutputError(
                f"{path}: a folder with the name of a checkpoint, and none of Lowtide's",
                expected="a folder for checkpoints of lt.Trainer alone",
                got=", ".join(sorted(each.name for each in path.iterdir())[:4]) or "an empty folder",
                hint="choose another checkpoint_dir, or rename that folder",
            )
