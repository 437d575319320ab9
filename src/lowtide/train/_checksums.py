"""Checksums of a checkpoint's files: damage is noticed before anything of it is used.

Orbax and TensorStore check what leads to the arrays and not the arrays: a bit that a disk or a copy has turned comes
back as another weight. So every file gets a checksum when all of them are written, and before the checkpoint gets its
name: a checkpoint of that name has checksums, and they are of what was saved, however long that took.

Files and not arrays, because a file is what gets damaged: notes and metadata are covered too, no copy of an array is
made, nothing of the trainer's state is given up for a checkpoint that turns out to be damaged, and on how many devices
a leaf was or will be makes no difference. CRC-32 finds every damage within 32 bits, and misses one of 4e9 others.

Known inefficiencies: what was written is read once more, by a thread beside the training, and with several processes by
the first alone; and once more before it is restored, there each process its share.
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
_UNCHECKED = "_CHECKPOINT_METADATA"
"""Orbax's own times, written into the file when the checkpoint gets its name; nothing of it is restored."""
_AT_ONCE, _THREADS = 1 << 22, 8


def sealed(ocp: Any, directory: Path) -> type[Any]:
    """Orbax's folder of a checkpoint that is not complete, which gets checksums before it gets its name.

    Args:
        ocp: `orbax.checkpoint`, which takes a second to import.
        directory: of the checkpoints.
    """

    class Sealed(ocp.path.atomicity.AtomicRenameTemporaryPath):
        async def finalize(self) -> None:
            if Path(self.get_final()).parent == directory:  # Orbax makes folders of it in a checkpoint, too
                write_checksums(Path(self.get()))
            await super().finalize()

    return Sealed


def write_checksums(folder: Path) -> None:
    """Write the checksums of all files in a folder, which are on the disk then.

    Raises:
        OSError: when a file cannot be read.
        OutputError: when the checksums cannot be written.
    """
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    names = [name for name in names if name not in (FILE, _UNCHECKED)]
    sums = _sums((folder / name for name in names), is_new=True)
    text = json.dumps({"crc32": dict(zip(names, sums, strict=True))}, indent=1)
    write_files(folder, {FILE: (text + "\n").encode()})


def has_checksums(folder: Path) -> bool:
    """Whether a folder's files can be verified; earlier versions wrote no checksums."""
    return (folder / FILE).is_file()


def damage(folder: Path, part: int = 0, num_parts: int = 1) -> str | None:
    """Say what is wrong with the files of a folder.

    Args:
        folder: where `write_checksums` has written.
        part: which of the files to read.
        num_parts: into how many parts they are divided.

    Returns:
        The first file that is not as it was written, and why; None when all are.

    Raises:
        OSError: when a file cannot be read that is there, and not because its disk is damaged.
    """
    try:
        expected = json.loads((folder / FILE).read_bytes())["crc32"]
        written = [(str(name), int(size), str(crc)) for name, (size, crc) in sorted(expected.items())]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        written = []
    if not written:
        return f"{FILE} is no list of checksums"
    try:
        sizes = [(folder / name).stat().st_size if (folder / name).is_file() else -1 for name, _, _ in written]
    except (OSError, ValueError):  # names that no file can have
        return f"{FILE} is no list of files"
    for (name, size, _), found in zip(written, sizes, strict=True):
        if found != size:
            return f"{name} is missing" if found < 0 else f"{name} has {found} bytes of {size}"
    mine = written[part::num_parts]
    try:
        sums = _sums(folder / name for name, _, _ in mine)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return "a file cannot be read from its disk any more"
    for (name, _, crc), (_, found) in zip(mine, sums, strict=True):
        if found != crc:
            return f"{name} is not what was written, by its checksum"
    return None


def _sums(paths: Iterable[Path], *, is_new: bool = False) -> list[tuple[int, str]]:
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as threads:
        return list(threads.map(lambda path: _sum(path, is_new), paths))


def _sum(path: Path, is_new: bool) -> tuple[int, str]:
    """Bytes of a file, and their checksum."""
    crc, size, buffer = 0, 0, memoryview(bytearray(_AT_ONCE))
    with open(path, "rb", buffering=0) as file:
        if is_new:
            os.fsync(file.fileno())
        while count := file.readinto(buffer):
            crc, size = zlib.crc32(buffer[:count], crc), size + count
    return size, f"{crc:08x}"
