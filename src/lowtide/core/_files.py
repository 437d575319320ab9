"""Writing files so that they exist either completely or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path

from ._errors import OutputError


def write_files(directory: str | os.PathLike[str], contents: Mapping[str, bytes]) -> None:
    """Write files that belong together into a folder, replacing older ones of the same names.

    All files are written under temporary names first, and renamed when every one is on disk. So a reader never sees
    half a file, and a full disk leaves the older files unchanged.

    Args:
        directory: the folder; it and its parents are created if they are missing.
        contents: file name to content, in the order of renaming.

    Raises:
        OutputError: when the folder or a file in it cannot be written; no temporary file remains.
    """
    folder = Path(directory)
    staged: dict[Path, Path] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            temporary = folder / f".{name}.{secrets.token_hex(8)}.tmp"
            staged[temporary] = folder / name
            with open(temporary, "xb") as file:
                file.write(content)
                file.flush()
                # Without this a crash after the rename could leave an empty file under the final name.
                os.fsync(file.fileno())
        for temporary, final in list(staged.items()):
            os.replace(temporary, final)
            del staged[temporary]
        _sync(folder)
    except OSError as error:
        raise OutputError(
            f"{folder}: cannot write {', '.join(contents)}",
            expected="a folder that can be written, with room for the files",
            got=f"{type(error).__name__}: {error}",
            hint="choose another folder, or change its permissions",
        ) from error
    finally:
        for temporary in staged:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def check_writable(directory: Path, problem: str, hint: str) -> None:
    """Create a folder and raise now, not at the first write, if it cannot be written to.

    Args:
        directory: the folder; its parents are created, too.
        problem: message of the error.
        hint: the remedy.

    Raises:
        OutputError: when no file can be created in the folder.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise OutputError(f"{directory}: {problem}", got=error.strerror or error, hint=hint) from error


def _sync(folder: Path) -> None:
    """Make the names in a folder survive a power cut, where the file system supports it."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
