"""Checksums of a checkpoint's files, which detect damage before any of its contents is used.

Orbax and TensorStore verify the index of the arrays, but not their contents: a bit that a disk or a copy has flipped is
read as another weight. So every file gets a checksum after all files are written and before the checkpoint is renamed.
A checkpoint with its final name therefore has checksums of the saved bytes, however long the save took.

The checksums cover files, not arrays, because files get damaged. So notes and metadata are covered, and no array is
copied. The trainer keeps its state if the checkpoint turns out to be damaged, and the number of devices may change.
CRC-32 detects all damage within 32 bits, and misses one in 4e9 other damages.

Known inefficiencies: written files are read again, in a thread next to the training; with several processes, the first
one reads all of them. A restore first reads them a third time, with a part in each process.
"""

from __future__ import annotations

import errno
import json
import os
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..core import write_files

FILE = "checksums.json"
_UNVERIFIED = "_CHECKPOINT_METADATA"
"""File with Orbax's own times, written when the checkpoint is renamed; a restore does not use it."""
_BUFFER_BYTES, _NUM_THREADS = 1 << 22, 8


def checksummed_folder(ocp: Any, directory: Path) -> type[Any]:
    """Return Orbax's class for the folder of an incomplete checkpoint, extended by checksums before the rename.

    `ocp` is `orbax.checkpoint`, whose import takes a second.
    """

    class ChecksummedFolder(ocp.path.atomicity.AtomicRenameTemporaryPath):
        async def finalize(self) -> None:
            if Path(self.get_final()).parent == directory:  # Orbax also uses this class for folders in a checkpoint
                write_checksums(Path(self.get()))
            await super().finalize()

    return ChecksummedFolder


def write_checksums(folder: Path) -> None:
    """Flush all files of a folder to disk, and write their checksums."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    names = [name for name in names if name not in (FILE, _UNVERIFIED)]
    checksums = _compute_checksums((folder / name for name in names), is_new=True)
    text = json.dumps({"crc32": dict(zip(names, checksums, strict=True))}, indent=1)
    write_files(folder, {FILE: (text + "\n").encode()})


def has_checksums(folder: Path) -> bool:
    """Return whether a folder has checksums; earlier versions wrote none."""
    return (folder / FILE).is_file()


def find_damage(folder: Path, part: int = 0, num_parts: int = 1) -> str | None:
    """Return the first file that differs from what was written, with the difference; None if there is no damage.

    The sizes of all files are compared, and the checksums of part `part` of `num_parts`. `OSError` is raised when an
    existing file cannot be read for another reason than a damaged disk.
    """
    try:
        expected = json.loads((folder / FILE).read_bytes())["crc32"]
        entries = [(str(name), int(size), str(crc)) for name, (size, crc) in sorted(expected.items())]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        entries = []
    if not entries:
        return f"{FILE} is not a list of checksums"
    try:
        sizes = [(folder / name).stat().st_size if (folder / name).is_file() else -1 for name, _, _ in entries]
    except (OSError, ValueError):  # invalid file names
        return f"{FILE} is not a list of files"
    for (name, size, _), actual in zip(entries, sizes, strict=True):
        if actual != size:
            return f"{name} is missing" if actual < 0 else f"{name} has {actual} bytes instead of {size}"
    own_entries = entries[part::num_parts]
    try:
        checksums = _compute_checksums(folder / name for name, _, _ in own_entries)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return "a file can no longer be read from its disk"
    for (name, _, crc), (_, actual) in zip(own_entries, checksums, strict=True):
        if actual != crc:
            return f"{name} does not match its checksum"
    return None


def _compute_checksums(paths: Iterable[Path], *, is_new: bool = False) -> list[tuple[int, str]]:
    with ThreadPoolExecutor(min(_NUM_THREADS, os.cpu_count() or 1)) as threads:
        return list(threads.map(lambda path: _compute_checksum(path, is_new), paths))


def _compute_checksum(path: Path, is_new: bool) -> tuple[int, str]:
    """Return the size of a file in bytes, and its checksum."""
    crc, size, buffer = 0, 0, memoryview(bytearray(_BUFFER_BYTES))
    with open(path, "rb", buffering=0) as file:
        if is_new:
            os.fsync(file.fileno())
        while count := file.readinto(buffer):
            crc, size = zlib.crc32(buffer[:count], crc), size + count
    return size, f"{crc:08x}"
