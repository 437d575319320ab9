"""Stream files of records: JSON lines, JSON, CSV and TSV here, Parquet and Arrow tables in `_arrow`.

A reader yields the location and raw fields of each record. `read_records` checks the fields, yields None for a blank
record, and refuses a file with records of several kinds.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...core import DataError, ModelFileError, format_bytes, parse_json, shortened, shown
from .._walk import unreadable
from ._arrow import find_split, read_parquet, read_saved
from ._folders import RecordFolder, record_folder
from ._schema import Example, parse_list, parse_record

_MOST_LINE_BYTES = 256 * 1024**2
_MOST_JSON_BYTES = 1024**3
_MOST_FIELD = 64 * 1024**2
RawRecords = Iterator[tuple[str, Mapping[str, Any]]]


def is_records(path: Path) -> bool:
    """Return whether a path is records and not plain text: a file by its name, a folder by its content.

    Args:
        path: a file or a folder; any other path is not records.
    """
    if path.is_dir():
        return find_split(path) is not None or folder_of_records(path) is not None
    return path.is_file() and path.suffix.lower() in _READERS


def read_records(path: Path, columns: Mapping[str, str]) -> Iterator[Example | None]:
    """Stream the records of a file or a folder.

    Args:
        path: a ``.jsonl``, ``.ndjson``, ``.json``, ``.csv``, ``.tsv`` or ``.parquet`` file, a folder of such files of
            one format (read in sorted order, without files named for evaluation if there are others), or a folder that
            `datasets` saved with ``save_to_disk``.
        columns: field to column, from `parse_columns`.

    Yields:
        Each record; None for a blank one.

    Raises:
        DataError: for a file that is damaged, empty or in another format, and for records that are unusable or of
            several kinds.

    Memory:
        Holds one record; 1,024 rows of a Parquet file; a whole JSON file if it is a list and not JSON lines.
    """
    kind: str | None = None
    for location, raw in _read_raw(path):
        example = parse_record(raw, location, columns)
        if example is not None:
            kind = kind or example.kind
            if example.kind != kind:
                raise DataError(
                    f"{location}: the record has another kind than those before it",
                    expected=kind,
                    got=example.kind,
                    hint="train on one kind at a time: name a file, or a folder of one kind",
                )
        yield example


def data_files(path: Path) -> list[Path]:
    """List the files with the records of a path, for a digest; a path that is no file or folder raises DataError."""
    if not path.is_dir():
        if not path.is_file():
            problem = "neither a file nor a folder" if path.exists() else "no such file or folder"
            raise DataError(f"{path}: {problem}", hint="name a file of records, or a folder of them")
        return [path]
    split = find_split(path)
    if split is not None:
        return sorted(file for file in split.iterdir() if file.is_file())
    record_files = folder_of_records(path)
    return [] if record_files is None else record_files.files


def folder_of_records(path: Path) -> RecordFolder | None:
    """Return which files of a folder are read; None if it is not a folder of record files of one format."""
    return record_folder(path, _READERS) if path.is_dir() and find_split(path) is None else None


def _read_raw(path: Path) -> RawRecords:
    if path.is_dir():
        split = find_split(path)
        if split is not None:
            yield from read_saved(split)
            return
    for file in data_files(path):
        if file.suffix.lower() not in _READERS:
            raise DataError(
                f"{file}: not a supported file of records",
                expected=f"one of {', '.join(_READERS)}, or a folder of one of them",
                got=shown(file.suffix) if file.suffix else "a name without a suffix",
                hint="unpack compressed files; convert others, for instance to JSON lines (.jsonl)",
            )
        try:
            if not file.stat().st_size:
                raise DataError(f"{file}: the file is empty", hint="check --data")
            yield from _READERS[file.suffix.lower()](file)
        except UnicodeDecodeError as error:
            hint = "convert it (iconv -f LATIN1 -t UTF-8)"
            raise DataError(f"{file}: not UTF-8 text", got=shortened(error), hint=hint) from error
        except OSError as error:
            raise unreadable(file, error) from error


def _read_lines(path: Path) -> RawRecords:
    with open(path, "rb") as file:
        number = 0
        while line := file.readline(_MOST_LINE_BYTES + 1):
            number += 1
            location = f"{path}:{number}"
            if len(line) > _MOST_LINE_BYTES:
                got = f"more than {format_bytes(_MOST_LINE_BYTES)}"
                raise DataError(f"{location}: the line is too long", got=got, hint="write one JSON object a line")
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if line.strip():
                yield location, _parse_object(line, location)


def _parse_object(line: bytes, location: str) -> dict[str, Any]:
    try:
        return parse_json(line, location)
    except ModelFileError as error:
        raise DataError(error.message, got=error.got, hint="write one standard JSON object a line") from error


def _read_json(path: Path) -> RawRecords:
    if _is_json_lines(path):
        yield from _read_lines(path)
        return
    size = path.stat().st_size
    if size > _MOST_JSON_BYTES:
        raise DataError(
            f"{path}: the file is too large for a JSON list, which is read as a whole",
            expected=f"at most {format_bytes(_MOST_JSON_BYTES)}",
            got=format_bytes(size),
            hint="write JSON lines (.jsonl): jq -c '.[]' data.json > data.jsonl",
        )
    for number, record in enumerate(parse_list(path.read_bytes().removeprefix(b"\xef\xbb\xbf"), str(path)), 1):
        if not isinstance(record, dict):
            hint = "write a list of objects"
            raise DataError(f"{path}: record {number} is not an object", got=shown(record), hint=hint)
        yield f"{path}: record {number}", record


def _is_json_lines(path: Path) -> bool:
    """Return whether a file begins with two lines that are objects; a single line may be an object of all records."""
    with open(path, "rb") as file:
        lines = (line for line in iter(lambda: file.readline(_MOST_LINE_BYTES), b"") if line.strip())
        first = next(lines, b"").removeprefix(b"\xef\xbb\xbf")
        if not first.startswith(b"{"):
            return False
        try:
            parse_json(first, str(path))
        except ModelFileError:
            return False
        return next(lines, b"").startswith(b"{")


def _read_csv(path: Path) -> RawRecords:
    # The default limit of the csv module is 131,072 characters a field, which long documents exceed.
    csv.field_size_limit(max(csv.field_size_limit(), min(_MOST_FIELD, sys.maxsize)))
    with open(path, encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
        try:
            names = next(rows, [])
            if not names or len(set(names)) < len(names):
                raise DataError(
                    f"{path}: the header is missing, or repeats a name",
                    expected="a first line of distinct names",
                    got=shortened(", ".join(map(shown, names)), 300) or "nothing",
                    hint="name each column once in the first line",
                )
            for row in rows:
                location = f"{path}:{rows.line_num}"
                if not row:
                    continue
                if len(row) != len(names):
                    raise DataError(
                        f"{location}: the row does not match the header",
                        expected=f"{len(names)} fields",
                        got=f"{len(row)} fields",
                        hint="quote fields with commas or line breaks; the delimiter is a comma, or a tab for .tsv",
                    )
                yield location, dict(zip(names, row, strict=True))
        except csv.Error as error:
            hint = "close every quote, or copy the file again if it is truncated"
            raise DataError(f"{path}:{rows.line_num}: not a CSV file", got=shortened(error), hint=hint) from error


_READERS: dict[str, Callable[[Path], RawRecords]] = {
    ".jsonl": _read_lines,
    ".ndjson": _read_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": read_parquet,
}
