"""List the files of a data folder, whether text or records.

An unreadable file or folder is an error, since skipping it would silently change the data.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

from ..core import DataError


def files_below(folder: Path) -> list[Path]:
    """List the files below a folder in sorted order, without hidden ones; symbolic links are followed.

    An unreadable folder or a broken link raises DataError.
    """
    files: list[Path] = []

    def fail(error: OSError) -> NoReturn:
        raise unreadable(Path(error.filename or folder), error) from error

    root, visited = folder.resolve(), {folder.resolve()}
    for parent, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        paths = {name: Path(parent, name) for name in [*folders, *names] if not name.startswith(".")}
        # Read a folder once when several links point to it, or when a link points into this tree. The second case
        # includes links to a parent of the link, which would recurse without end.
        folders[:] = [name for name in sorted(folders) if name in paths and not _is_visited(paths[name], root, visited)]
        for name in names:
            if name in paths and paths[name].is_symlink() and not paths[name].exists():
                raise DataError(f"{paths[name]}: the link is broken", hint="delete it, or restore its target")
            if name in paths and paths[name].is_file():
                files.append(paths[name])
    return sorted(files)


def _is_visited(folder: Path, root: Path, visited: set[Path]) -> bool:
    """Return whether a linked folder was visited before, or is in the tree of `root`; adds it to `visited`."""
    if not folder.is_symlink():
        return False
    real = folder.resolve()
    is_visited = real in visited or real.is_relative_to(root)
    visited.add(real)
    return is_visited


def unreadable(path: Path, error: OSError) -> DataError:
    """Make the error for a file or folder that cannot be read."""
    return DataError(
        f"{path}: cannot be read",
        got=error.strerror or error,
        hint="check the permissions; unreadable files are not skipped, since that would change the data",
    )
