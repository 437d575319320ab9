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

_NOTE_NAME = re.compile(
    r"(readme|licen[cs]e|notice|citation|changelog|copying|datasheet)\b|dataset_infos?\.json$", re.I
)
_EVALUATION_WORDS = frozenset(
    ("test", "testing", "validation", "validate", "valid", "val", "dev", "eval", "evaluation")
)


@dataclasses.dataclass(frozen=True)
class RecordFolder:
    """The files of a folder of records."""

    files: list[Path]
    """Record files that are read, in sorted order."""
    evaluation_files: list[Path]
    """Record files that are not read, since their names mark them for evaluation and others exist."""
    other_files: list[Path]
    """Files without records."""
    is_evaluation: bool
    """Whether the names mark all read files for evaluation."""


def record_folder(folder: Path, suffixes: Container[str]) -> RecordFolder | None:
    """Sort the files of a folder and the folders below it; None if it is text, or records of several formats.

    `suffixes` are those of record files, in lower case.
    """
    files = files_below(folder)
    is_note = {file: bool(_NOTE_NAME.match(file.name)) for file in files}
    is_record = {file: not is_note[file] and file.suffix.lower() in suffixes for file in files}
    records = [file for file in files if is_record[file]]
    other_files = [file for file in files if not is_record[file]]
    texts = [file for file in other_files if not is_note[file]]
    formats = {file.suffix.lower() for file in records}
    if len(formats) != 1 or _num_bytes(records) < _num_bytes(texts):
        return None
    if texts and formats == {".json"}:  # probably the settings of a source tree, not records
        return None
    evaluation_files = [file for file in records if _is_for_evaluation(file.relative_to(folder))]
    is_evaluation = len(evaluation_files) == len(records)
    training = records if is_evaluation else [file for file in records if file not in set(evaluation_files)]
    return RecordFolder(training, [] if is_evaluation else evaluation_files, other_files, is_evaluation)


def _is_for_evaluation(path: Path) -> bool:
    words = (word for part in path.parts for word in re.split("[^a-z]+", part.lower()))
    return any(word in _EVALUATION_WORDS for word in words)


def _num_bytes(files: list[Path]) -> int:
    return sum(file.stat().st_size for file in files)
