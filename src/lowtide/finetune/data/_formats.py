"""Detect the format of data files by name and first bytes, and refuse to read other formats as plain text.

Without this check, a run could train on a table as if it were plain text: the loss falls, the run reports success, and
the model has learned commas. So such a file raises an error with its format and the fields of its first record.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ...core import DataError, format_bytes, shortened, shown

_HEAD_BYTES = 1024**2
_MODEL_FILES = ("config.json", "adapter_config.json", "config.toml", "generation_config.json", "tokenizer.json")
"""Names of files that show that a folder is a model, an adapter or a run, and not data."""
_EXPECTED_TEXT = "a text file, a folder of text or source code, or JSON lines (.jsonl)"
_WRITE_JSON_LINES = 'write JSON lines, one object such as {"text": "..."} a line, into a file that ends in .jsonl'
_ONE_FORMAT = "name one of its files, or a folder of records in one format"
_JOIN = "put all lines into one .jsonl file (cat folder/*.jsonl > data.jsonl), and name that file"
_UNPACK = "unpack it first"


class _FileFormat(NamedTuple):
    """A format of files that are not read as plain text; `description` and `hint` are for messages."""

    description: str
    hint: str = _WRITE_JSON_LINES
    first_bytes: bytes = b""
    """The bytes that every file of the format begins with; empty if they are not fixed."""
    is_text: bool = False
    """Whether the files are text, such as CSV, and not binary."""
    is_read: bool = False
    """Whether Lowtide reads records from the files; `_READERS` of `_read` has the readers."""


_FORMATS = {
    ".jsonl": _FileFormat("JSON lines", _JOIN, is_text=True, is_read=True),
    ".ndjson": _FileFormat("JSON lines", "rename it to .jsonl", is_text=True, is_read=True),
    ".json": _FileFormat("JSON", is_text=True, is_read=True),
    ".csv": _FileFormat("a table (CSV)", is_text=True, is_read=True),
    ".tsv": _FileFormat("a table (TSV)", is_text=True, is_read=True),
    ".parquet": _FileFormat("a table (Parquet)", first_bytes=b"PAR1", is_read=True),
    ".jl": _FileFormat("JSON lines", "rename it to .jsonl", is_text=True),
    ".arrow": _FileFormat("a table (Arrow)", first_bytes=b"ARROW1"),
    ".feather": _FileFormat("a table (Arrow)"),
    ".avro": _FileFormat("a table (Avro)", first_bytes=b"Obj\x01"),
    ".orc": _FileFormat("a table (ORC)"),
    ".xlsx": _FileFormat("a spreadsheet"),
    ".docx": _FileFormat("a Word document", "save it as plain text"),
    ".pdf": _FileFormat("a PDF document", "extract its text first (pdftotext)", b"%PDF-"),
    ".gz": _FileFormat("compressed (gzip)", _UNPACK, b"\x1f\x8b"),
    ".zst": _FileFormat("compressed (Zstandard)", _UNPACK, b"\x28\xb5\x2f\xfd"),
    ".bz2": _FileFormat("compressed (bzip2)", _UNPACK, b"BZh"),
    ".xz": _FileFormat("compressed (xz)", _UNPACK, b"\xfd7zXZ\0"),
    ".zip": _FileFormat("an archive (zip)", _UNPACK, b"PK\x03\x04"),
    ".7z": _FileFormat("an archive (7z)", _UNPACK, b"7z\xbc\xaf\x27\x1c"),
    ".tar": _FileFormat("an archive (tar)", _UNPACK),
    ".tgz": _FileFormat("an archive (tar, gzip)", _UNPACK),
}
"""Formats by suffix. Messages list formats in this order."""
RECORD_SUFFIXES = tuple(suffix for suffix, row in _FORMATS.items() if row.is_read)
"""Suffixes of the files that `lowtide.finetune.data` reads records from."""
BINARY_SUFFIXES = tuple(suffix for suffix in RECORD_SUFFIXES if not _FORMATS[suffix].is_text)
"""Suffixes in `RECORD_SUFFIXES` of files that are not text."""
TEXT_SUFFIXES = tuple(suffix for suffix, row in _FORMATS.items() if row.is_text)
"""Suffixes of records and tables that are text."""
_FORMAT_BY_MAGIC = {
    row.first_bytes: row._replace(hint=f"rename it to {suffix}") if row.is_read else row
    for suffix, row in _FORMATS.items()
    if row.first_bytes
}
SUPPORTED = (
    f"a file of text, source code or records ({', '.join(RECORD_SUFFIXES)}), or a folder of text, source code or "
    "records in one format"
)
RECORD_FIELDS = ({"messages"}, {"conversations"}, {"prompt", "completion"}, {"instruction", "output"})
"""Sets of fields that identify training records (chats, prompts, instructions)."""
_UTF16 = _FileFormat("text in UTF-16", "convert it: iconv -f UTF-16 -t UTF-8")


def refuse_other_formats(path: Path) -> None:
    """Raise DataError unless an existing file is plain text, or JSON lines with the suffix ``.jsonl``.

    JSON lines with another suffix raise, with the hint to rename the file. Pipes, devices and sockets also raise.
    """
    if not path.is_file():
        got = "a pipe" if path.is_fifo() else "a device or a socket"
        hint = "write the content into a file; a resumed run reads its data again"
        raise DataError(f"{path}: not a regular file", got=got, hint=hint)
    head = read_head(path)
    suffix = path.suffix.lower()
    default = _UTF16 if _is_utf16(head) else None
    match = next((row for start, row in _FORMAT_BY_MAGIC.items() if head.startswith(start)), default)
    if match is None and path.suffix != ".jsonl":
        match = _FORMATS.get(suffix)
        if match is None and _is_json_lines(head):
            match = _FORMATS[".jsonl"]._replace(hint="rename it to .jsonl")
        elif suffix == ".jsonl":
            match = _FORMATS[".jsonl"]._replace(hint="rename it to .jsonl, in lower case")
    if match is not None:
        expected = _EXPECTED_TEXT if suffix in RECORD_SUFFIXES and not is_binary(head) else SUPPORTED
        problem = f"the file is {match.description}, which is not read as plain text"
        got = f"fields {shortened(', '.join(fields), 300)}" if (fields := first_fields(head, suffix)) else None
        raise DataError(f"{path}: {problem}", expected=expected, got=got, hint=match.hint)


def refuse_folder_of_records(folder: Path, files: Sequence[Path]) -> None:
    """Raise DataError if at least half of the bytes of `files` are in formats of `_FORMATS`.

    It also raises if one of `files` begins with a training record (`RECORD_FIELDS`). A source tree may contain a few
    tables, but no chats, prompts or instructions.
    """
    sizes = {file: file.stat().st_size for file in files}
    records = [file for file in files if file.suffix.lower() in _FORMATS]
    num_bytes = sum(sizes[file] for file in records)
    if not records or 2 * num_bytes < sum(sizes.values()):
        _refuse_records_among_text(folder, records)
        return
    first, suffix = records[0], records[0].suffix.lower()
    hint = _FORMATS[suffix].hint if len({file.suffix.lower() for file in records}) == 1 else _ONE_FORMAT
    got = f"{format_bytes(num_bytes)} of {format_bytes(sum(sizes.values()))} in {len(records)} files of records; "
    got += f"{first.name} is {_FORMATS[suffix].description}"
    if fields := first_fields(read_head(first), suffix) if suffix in TEXT_SUFFIXES else []:
        got += f", fields {shortened(', '.join(fields), 300)}"
    problem = "the folder has records, which are not read as plain text"
    raise DataError(f"{folder}: {problem}", expected=SUPPORTED, got=got, hint=hint)


def _refuse_records_among_text(folder: Path, records: Sequence[Path]) -> None:
    """Raise DataError if a file begins with a training record, whose syntax the model would learn as text."""
    for file in records:
        suffix = file.suffix.lower()
        fields = first_fields(read_head(file), suffix) if suffix in TEXT_SUFFIXES else []
        if any(kind <= {*fields} for kind in RECORD_FIELDS):
            got = f"{file.relative_to(folder)} has fields {shortened(', '.join(fields), 300)}"
            hint = f"name that file: --data {file}; or move it away, to train on the text alone"
            problem = "the folder mixes text with records, which would be read as text, too"
            raise DataError(f"{folder}: {problem}", got=got, hint=hint)


def first_fields(head: bytes, suffix: str) -> list[str]:
    """Find the fields of the first record: a table's columns, or an object's keys; empty if it cannot be parsed."""
    text = head.decode("utf-8", "replace").removeprefix("\ufeff").lstrip()
    if suffix in (".csv", ".tsv"):
        line = text.split("\n", 1)[0]
        delimiter = max(",;\t|", key=line.count)
        try:
            return [shown(name).strip("'") for name in next(csv.reader([line], delimiter=delimiter), [])]
        except csv.Error:
            return []
    start = len(text) - len(text.removeprefix("[").lstrip())
    try:
        record = json.JSONDecoder().raw_decode(text, start)[0]
    except (ValueError, RecursionError):
        return []
    return [shown(name).strip("'") for name in record] if isinstance(record, dict) else []


def read_head(path: Path) -> bytes:
    """Read the beginning of a file; empty if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(_HEAD_BYTES)
    except OSError:  # the code that reads the whole file raises a DataError
        return b""


def is_binary(head: bytes) -> bool:
    """Return whether a file that begins with `head` is compressed, a binary table, a document or UTF-16 text."""
    return head.startswith(tuple(_FORMAT_BY_MAGIC)) or _is_utf16(head)


def _is_json_lines(head: bytes) -> bool:
    """Return whether the first two lines, or the only line, are JSON objects."""
    lines = [line for line in head.removeprefix(b"\xef\xbb\xbf").split(b"\n")[:8] if line.strip()][:2]
    try:
        return bool(lines) and all(line.startswith(b"{") and isinstance(json.loads(line), dict) for line in lines)
    except (ValueError, RecursionError):
        return False


def _is_utf16(head: bytes) -> bool:
    """Return whether the bytes begin with a UTF-16 byte order mark, or every other byte is mostly zero.

    The second test detects Western text without a mark: its high bytes are zero, and its low bytes are not.
    """
    sample = head[:4096]
    halves = (sample[::2], sample[1::2])
    return head.startswith((b"\xff\xfe", b"\xfe\xff")) or (
        len(sample) >= 8
        and any(half.count(0) > 0.7 * len(half) for half in halves)
        and not all(0 in half for half in halves)
    )


def is_data(path: str | Path) -> bool:
    """Return whether a path is a folder of records, or a file with a suffix in `RECORD_SUFFIXES`, ``.txt`` or ``.md``.

    Models, adapters and runs are not data. Folders of plain text and files of source code also give False.
    """
    path = Path(path)
    if path.is_dir():
        from ._read import is_records

        return not any((path / name).exists() for name in _MODEL_FILES) and is_records(path)
    return path.suffix.lower() in (*RECORD_SUFFIXES, ".txt", ".md") and path.name not in _MODEL_FILES
