"""Write one file of a view, whole or not at all; pipes and devices are written to directly."""

from __future__ import annotations

from pathlib import Path

from ...core import OutputError, write_files

_HINT = "give a file in an existing folder that you may write to"


def write_view(path: str | Path, content: bytes) -> None:
    """Write one file, replacing an older one; raise `OutputError` where the folder is missing or writing fails."""
    file = Path(path)
    message = f"{file}: the report cannot be written"
    if file.exists() and not file.is_file() and not file.is_dir():
        _write_through(file, content, message)
        return
    file = file.resolve() if file.is_symlink() else file  # the link stays, as with a shell's redirection
    if not file.parent.is_dir():
        raise OutputError(message, got=f"{file.parent} is not a folder", hint=_HINT)
    if file.is_dir():
        raise OutputError(message, got="a folder of that name", hint=_HINT)
    try:
        write_files(file.parent, {file.name: content})
    except OutputError as error:
        raise OutputError(message, got=error.got, hint=_HINT) from error


def _write_through(file: Path, content: bytes, message: str) -> None:
    """Write to a pipe, a terminal or another device, which must not be replaced by a file."""
    try:
        with open(file, "wb") as device:
            device.write(content)
    except OSError as error:
        raise OutputError(message, got=f"{type(error).__name__}: {error}", hint=_HINT) from error
