"""Folders of records: which of their files are read, and which are not.

Datasets are downloaded with a page, a licence and perhaps a script beside the records, and with the records to evaluate
on beside those to train on. A folder is records when they are half of its bytes or more, and all of one format; else it
is text, or refused. JSON is records alone or beside notes: a source tree has settings in it. Split names are looked for
as the Hub does, as words in the names of files and folders.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Container
from pathlib import Path

from .._walk import files_below

_NOTE = re.compile(r"(readme|licen[cs]e|notice|citation|changelog|copying|datasheet)\b|dataset_infos?\.json$", re.I)
_EVALUATION = frozenset(("test", "testing", "validation", "validate", "valid", "val", "dev", "eval", "evaluation"))


@dataclasses.dataclass(frozen=True)
class RecordFolder:
    """The files of a folder of records."""

    read: list[Path]
    """Those that are read, in sorted order."""
    held_back: list[Path]
    """Records that are not, since their names say that they are to evaluate on, and others are there."""
    others: list[Path]
    """What is no records."""
    is_evaluation: bool
    """Whether the names of all that is read say so."""


def record_folder(folder: Path, suffixes: Container[str]) -> RecordFolder | None:
    """Divide the files of a folder; None where it is text, or records of several formats.

    Args:
        folder: with files, also in folders below.
        suffixes: of files of records, in small letters.

    Raises:
        DataError: for what cannot be read, and links to nothing.
    """
    files = files_below(folder)
    is_note = {each: bool(_NOTE.match(each.name)) for each in files}
    is_record = {each: not is_note[each] and each.suffix.lower() in suffixes for each in files}
    records = [each for each in files if is_record[each]]
    others = [each for each in files if not is_record[each]]
    texts = [each for each in others if not is_note[each]]
    formats = {each.suffix.lower() for each in records}
    if len(formats) != 1 or _num_bytes(records) < _num_bytes(texts):
        return None
    if texts and formats == {".json"}:  # settings of a source tree rather than records
        return None
    evaluation = [each for each in records if _is_for_evaluation(each.relative_to(folder))]
    is_evaluation = len(evaluation) == len(records)
    read = records if is_evaluation else [each for each in records if each not in set(evaluation)]
    return RecordFolder(read, [] if is_evaluation else evaluation, others, is_evaluation)


def _is_for_evaluation(path: Path) -> bool:
    words = (word for part in path.parts for word in re.split("[^a-z]+", part.lower()))
    return any(word in _EVALUATION for word in words)


def _num_bytes(files: list[Path]) -> int:
    return sum(each.stat().st_size for each in files)
