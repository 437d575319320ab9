"""Folders of records: select the files to read.

A downloaded dataset contains a page, a licence and perhaps a script in addition to its records, and evaluation records
in addition to training records. A folder is a record folder if records of one format are at least half of its bytes;
otherwise it is text, or refused. JSON files are records only alone or with notes, since a source tree contains JSON
settings. Split names are detected as on the Hugging Face Hub: words in the names of files and folders.
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
    """Record files that are read, in sorted order."""
    held_back: list[Path]
    """Record files that are not read, since their names mark them for evaluation and others exist."""
    others: list[Path]
    """Files without records."""
    is_evaluation: bool
    """Whether the names mark all read files for evaluation."""


def record_folder(folder: Path, suffixes: Container[str]) -> RecordFolder | None:
    """Sort the files of a folder; None if it is text, or records of several formats.

    Args:
        folder: the folder; files in folders below count, too.
        suffixes: suffixes of record files, in lower case.

    Raises:
        DataError: for an unreadable folder or a broken link.
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
    if texts and formats == {".json"}:  # probably the settings of a source tree, not records
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
