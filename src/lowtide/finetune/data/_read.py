"""Stream the records of files: JSON lines, JSON, CSV, TSV, Parquet, and output of Hugging Face's ``save_to_disk``.

A reader yields the location and raw fields of each record. `read_records` checks the fields, yields None for a blank
record, and refuses a file with records of several kinds. Parquet and Arrow files need only pyarrow. An unreadable file
or folder is an error, since skipping it would silently change the data.
"""

from __future__ import annotations

import csv
import dataclasses
import os
import re
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from ...core import ConfigError, DataError, format_bytes, input_file, parse_json, read_input, shortened, shown
from ._normalize import Example, as_data_error, parse_list, parse_record

_MOST_LINE_BYTES = 256 * 1024**2
_MOST_JSON_BYTES = 1024**3
_MOST_FIELD = 64 * 1024**2
_BATCH_ROWS = 1024
_MOST_STATE_BYTES = 16 * 1024**2
_STATE, _SPLITS = "state.json", "dataset_dict.json"
_NOTE_NAME = re.compile(r"(?i)(readme|licen[cs]e|notice|citation|changelog|copying|datasheet)\b|dataset_infos?\.json$")
_EVALUATION_WORDS = {"test", "testing", "validation", "validate", "valid", "val", "dev", "eval", "evaluation"}
_RawRecords = Iterator[tuple[str, Mapping[str, Any]]]


def is_records(path: Path) -> bool:
    """Return whether a path has records, not plain text: for a file by its suffix, for a folder by its content.

    Args:
        path: a file or a folder; any other path gives False.
    """
    if path.is_dir():
        return _find_split(path) is not None or folder_of_records(path) is not None
    return path.is_file() and path.suffix.lower() in _READERS


def read_records(path: Path, columns: Mapping[str, str]) -> Iterator[Example | None]:
    """Stream the records of a file or a folder, with None for each blank record.

    A folder has files of one format, read in sorted order, without files named for evaluation if there are others. Or
    `datasets` saved it with ``save_to_disk``. `columns` is from `parse_columns`. Files that are damaged, empty or in
    another format, and records that are unusable or of several kinds, raise DataError. The host holds one record at a
    time, of a table 1,024 rows, and a JSON file that is one list as a whole.
    """
    kind: str | None = None
    for location, raw in _read_raw(path):
        example = parse_record(raw, location, columns)
        if example is not None:
            kind = kind or example.label
            if example.label != kind:
                problem = f"the record has another kind than those before it: {example.label}, not {kind}"
                hint = "train on one kind at a time: name a file, or a folder of one kind"
                raise DataError(f"{location}: {problem}", hint=hint)
        yield example


def data_files(path: Path) -> list[Path]:
    """List the files with the records of a path; a path that is no file or folder raises DataError."""
    if not path.is_dir():
        if not path.is_file():
            problem = "neither a file nor a folder" if path.exists() else "no such file or folder"
            raise DataError(f"{path}: {problem}", hint="name a file of records, or a folder of them")
        return [path]
    split = _find_split(path)
    if split is not None:
        return sorted(file for file in split.iterdir() if file.is_file())
    record_files = folder_of_records(path)
    return [] if record_files is None else record_files.files


def files_below(folder: Path) -> list[Path]:
    """List the files below a folder in sorted order, without hidden ones; follow links, and refuse broken links."""
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
    """Return whether a linked folder was visited before, or is in the tree of `root`; also add it to `visited`."""
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


@dataclasses.dataclass(frozen=True)
class RecordFolder:
    """The files of a folder of records, such as a downloaded dataset with its page, licence and evaluation records.

    At least half of its bytes are records of one format; other folders are text, or refused. Words such as ``test`` in
    the names of files and folders mark evaluation records, as on the Hugging Face Hub.
    """

    files: list[Path]
    """Record files that are read, in sorted order."""
    evaluation_files: list[Path]
    """Record files that are not read: their names mark them for evaluation, and there are files for training."""
    other_files: list[Path]
    """Files without records."""
    is_evaluation: bool
    """Whether the names mark all read files for evaluation."""


def folder_of_records(folder: Path) -> RecordFolder | None:
    """Classify the files below a folder; None if it is text, records of several formats, or saved by `datasets`."""
    if not folder.is_dir() or _find_split(folder) is not None:
        return None
    files = files_below(folder)
    is_note = {file: bool(_NOTE_NAME.match(file.name)) for file in files}
    is_record = {file: not is_note[file] and file.suffix.lower() in _READERS for file in files}
    records = [file for file in files if is_record[file]]
    other_files = [file for file in files if not is_record[file]]
    texts = [file for file in other_files if not is_note[file]]
    formats = {file.suffix.lower() for file in records}
    if len(formats) != 1 or _num_bytes(records) < _num_bytes(texts):
        return None
    if texts and formats == {".json"}:  # probably the settings of a source tree; records are alone or with notes
        return None
    words = {file: re.split("[^a-z]+", str(file.relative_to(folder)).lower()) for file in records}
    evaluation_files = [file for file in records if _EVALUATION_WORDS.intersection(words[file])]
    is_evaluation = len(evaluation_files) == len(records)
    training = records if is_evaluation else [file for file in records if file not in set(evaluation_files)]
    return RecordFolder(training, [] if is_evaluation else evaluation_files, other_files, is_evaluation)


def _num_bytes(files: list[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def _read_raw(path: Path) -> _RawRecords:
    if path.is_dir() and (split := _find_split(path)) is not None:
        yield from _read_saved(split)
        return
    for file in data_files(path):
        if file.suffix.lower() not in _READERS:
            hint = "unpack compressed files; convert others, for instance to JSON lines (.jsonl)"
            raise DataError(f"{file}: not a supported file of records ({', '.join(_READERS)})", hint=hint)
        try:
            if not file.stat().st_size:
                raise DataError(f"{file}: the file is empty", hint="check --data")
            yield from _READERS[file.suffix.lower()](file)
        except UnicodeDecodeError as error:
            hint = "convert it (iconv -f LATIN1 -t UTF-8)"
            raise DataError(f"{file}: not UTF-8 text", got=shortened(error), hint=hint) from error
        except OSError as error:
            raise unreadable(file, error) from error


def _read_lines(path: Path) -> _RawRecords:
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
                with as_data_error("write one standard JSON object a line"):
                    record = parse_json(line, location, allow_nan=True)
                yield location, record


def _read_json(path: Path) -> _RawRecords:
    if _is_json_lines(path):
        yield from _read_lines(path)
        return
    size = path.stat().st_size
    if size > _MOST_JSON_BYTES:
        limit = format_bytes(_MOST_JSON_BYTES)
        hint = "write JSON lines (.jsonl), which are not read as a whole: jq -c '.[]' data.json > data.jsonl"
        raise DataError(f"{path}: the JSON list is larger than {limit}", got=format_bytes(size), hint=hint)
    content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    for number, record in enumerate(parse_list(content, str(path), allow_nan=True), 1):
        if not isinstance(record, dict):
            hint = "write a list of objects"
            raise DataError(f"{path}: record {number} is not an object", got=shown(record), hint=hint)
        yield f"{path}: record {number}", record


def _is_json_lines(path: Path) -> bool:
    """Return whether a file begins with two lines that are objects; one line alone may be an object of all records."""
    with open(path, "rb") as file:
        lines = (line for line in iter(lambda: file.readline(_MOST_LINE_BYTES), b"") if line.strip())
        first = next(lines, b"").removeprefix(b"\xef\xbb\xbf")
        if not first.startswith(b"{"):
            return False
        try:
            parse_json(first, str(path), allow_nan=True)
        except ValueError:  # no object
            return False
        return next(lines, b"").startswith(b"{")


def _read_csv(path: Path) -> _RawRecords:
    # The default limit of the csv module is 131,072 characters a field, which long documents exceed.
    csv.field_size_limit(max(csv.field_size_limit(), min(_MOST_FIELD, sys.maxsize)))
    with open(path, encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
        try:
            names = next(rows, [])
            if not names or len(set(names)) < len(names):
                got = shortened(", ".join(map(shown, names)), 300) or "nothing"
                hint = "name each column once in the first line"
                raise DataError(f"{path}: the header is missing, or repeats a name", got=got, hint=hint)
            for row in rows:
                location = f"{path}:{rows.line_num}"
                if not row:
                    continue
                if len(row) != len(names):
                    hint = "quote fields with commas or line breaks; the delimiter is a comma, or a tab for .tsv"
                    problem = f"the header has {len(names)} fields, but this row has {len(row)}"
                    raise DataError(f"{location}: {problem}", hint=hint)
                yield location, dict(zip(names, row, strict=True))
        except csv.Error as error:
            hint = "close every quote, or copy the file again if it is truncated"
            raise DataError(f"{path}:{rows.line_num}: not a CSV file", got=shortened(error), hint=hint) from error


# --- tables ----------------------------------------------------------------------------------------------------------

# Nothing is unpickled: `state.json` and `dataset_dict.json` are JSON, and the shards are Arrow streams. Shards are
# memory-mapped. Every batch of rows is validated before its values are read, since the offsets in a damaged file can
# point outside the buffer.


def _read_parquet(path: Path) -> _RawRecords:
    """Stream the rows of a Parquet file in small batches; a damaged file raises DataError."""
    _pyarrow(path)
    import pyarrow.parquet as parquet

    with _convert_errors(path), parquet.ParquetFile(path, memory_map=True) as file:
        yield from _table_rows(file.iter_batches(batch_size=_BATCH_ROWS), path, 0)


def _find_split(folder: Path) -> Path | None:
    """Find the folder of one split in the output of ``save_to_disk``; None for another kind of folder."""
    if (folder / _STATE).is_file():
        return folder
    if not (folder / _SPLITS).is_file():
        return None
    splits = _read_metadata(folder, _SPLITS).get("splits")
    names = [name for name in splits if isinstance(name, str)] if isinstance(splits, list) else []
    safe_names = [name for name in names if name and Path(name).name == name and name not in (".", "..")]
    name = "train" if "train" in safe_names else safe_names[0] if len(safe_names) == 1 == len(names) else None
    if name is None or not (folder / name / _STATE).is_file():
        problem = "the DatasetDict has no split that can be selected (train, or a single split)"
        got = shortened(", ".join(map(shown, names)), 300) or "no splits"
        hint = f"name the folder of a split, for instance {folder}/{safe_names[0] if safe_names else 'train'}"
        raise DataError(f"{folder}: {problem}", got=got, hint=hint)
    return folder / name


def _read_saved(folder: Path) -> _RawRecords:
    """Stream the rows of one split that ``save_to_disk`` wrote: a folder with `state.json` and Arrow shards."""
    pa = _pyarrow(folder)
    state = _read_metadata(folder, _STATE)
    index_keys = [name for name, value in state.items() if name.startswith("_indices") and value]
    if index_keys:
        hint = "save it again: dataset.flatten_indices().save_to_disk(...)"
        raise DataError(f"{folder}: {_STATE} has {index_keys[0]}, a separate selection of rows", hint=hint)
    files = state.get("_data_files")
    entries = files if isinstance(files, list) else []
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in entries]
    if not names or not all(isinstance(name, str) for name in names):
        raise DataError(f"{folder}: {_STATE} names no data files", hint="save the dataset again")
    number = 0
    for name in names:
        with as_data_error():
            path = input_file(folder, str(name), hint="copy it again; the folder is incomplete")
        with _convert_errors(path), pa.memory_map(str(path)) as source:
            # Arrow has two formats: a file begins with this mark, a stream does not.
            is_file = source.read(6) == b"ARROW1"
            source.seek(0)
            reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else reader
            for batch in batches:
                yield from _table_rows([batch], path, number)
                number += batch.num_rows


def _table_rows(batches: Any, path: Path, number: int) -> _RawRecords:
    for batch in batches:
        batch.validate(full=True)
        for start in range(0, batch.num_rows, _BATCH_ROWS):
            for row in batch.slice(start, _BATCH_ROWS).to_pylist():
                number += 1
                yield f"{path}: row {number}", {name: _drop_nulls(value) for name, value in row.items()}


def _drop_nulls(value: Any) -> Any:
    """Remove null fields of objects: tables fill missing fields with null, and chat templates test for presence."""
    if isinstance(value, dict):
        return {name: _drop_nulls(item) for name, item in value.items() if item is not None}
    return [_drop_nulls(item) for item in value] if isinstance(value, list) else value


@contextmanager
def _convert_errors(path: Path) -> Generator[None]:
    """Convert pyarrow's exceptions for a damaged file to a DataError that names the file."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        hint = "copy it again; it is truncated or damaged"
        raise DataError(f"{path}: cannot be read as a table", got=shortened(error), hint=hint) from error


def _read_metadata(folder: Path, name: str) -> dict[str, Any]:
    with as_data_error():
        path = input_file(folder, name, hint="copy it again; the folder is incomplete")
        return parse_json(read_input(path, most_bytes=_MOST_STATE_BYTES), str(path))


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow.ipc  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        hint = "pip install 'lowtide[data]', or write JSON lines"
        raise ConfigError(f"{path}: tables are read by pyarrow, which is not installed", hint=hint) from error
    return pyarrow


_READERS: dict[str, Callable[[Path], _RawRecords]] = {
    ".jsonl": _read_lines,
    ".ndjson": _read_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
}
