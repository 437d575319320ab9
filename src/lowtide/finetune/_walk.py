"""The files of a folder of data, text or records: all of them, or an error."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

from ..core import DataError


def files_below(folder: Path) -> list[Path]:
    """List the files below a folder that are not hidden, in sorted order; links are followed.

    Raises:
        DataError: for what cannot be read, and links to nothing.
    """
    found: list[Path] = []

    def fail(error: OSError) -> NoReturn:
        raise unreadable(Path(error.filename or folder), error) from error

    root, seen = folder.resolve(), {folder.resolve()}
    for here, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        paths = {name: Path(here, name) for name in [*folders, *names] if not name.startswith(".")}
        # A folder that is linked to twice, or is in this one anyway, perhaps around the link, is read once.
        folders[:] = [name for name in sorted(folders) if name in paths and not _is_seen(paths[name], root, seen)]
        for name in names:
            if name in paths and paths[name].is_symlink() and not paths[name].exists():
                raise DataError(f"{paths[name]}: a link to nothing", hint="delete it, or put back what it links to")
            if name in paths and paths[name].is_file():
                found.append(paths[name])
    return sorted(found)


def _is_seen(folder: Path, root: Path, seen: set[Path]) -> bool:
    if not folder.is_symlink():
        return False
    real = folder.resolve()
    is_seen = real in seen or real.is_relative_to(root)
    seen.add(real)
    return is_seen


def unreadable(path: Path, error: OSError) -> DataError:
    """Make the error for a file or folder that cannot be read."""
    return DataError(
        f"{path}: cannot be read",
        got=error.strerror or error,
        hint="check the permissions; what cannot be read is not left out, since the data would be another one",
    )
