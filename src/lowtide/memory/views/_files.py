"""One file of a view, written whole or not at all."""

from __future__ import annotations

from pathlib import Path

from lowtide.core import OutputError, write_files

_HINT = "give a file in an existing folder that you may write to"


def write_view(path: str | Path, content: bytes) -> None:
    """Write one file, replacing an older one.

    Args:
        path: the file.
        content: all of it.

    Raises:
        OutputError: when the folder does not exist, or the file cannot be written.
    """
    file = Path(path)
    message = f"{file}: the report cannot be written"
    if not file.parent.is_dir():
        raise OutputError(message, got=f"{file.parent} is not a folder", hint=_HINT)
    if file.is_dir():
        raise OutputError(message, got="a folder of that name", hint=_HINT)
    try:
        write_files(file.parent, {file.name: content})
    except OutputError as error:
        raise OutputError(message, got=error.got, hint=_HINT) from error
