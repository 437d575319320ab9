"""Detect the format of data files by name and first bytes, and refuse files that are not plain text.

Any UTF-8 file could be trained on as text, so a table of records would be trained on by mistake: the loss falls, the
run reports success, and the model has learned commas. So files whose records Lowtide does not read are an error that
names their format and the fields of their first record.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core import DataError, format_bytes, shortened, shown

_HEAD_BYTES = 1024**2
RECORDS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
"""Suffixes of the files that `lowtide.finetune.data` reads records from."""
_NO_DATA = ("config.json", "adapter_config.json", "config.toml", "generation_config.json", "tokenizer.json")
"""Files of a model, an adapter or a run."""
READ = f"text or source, or records ({', '.join(RECORDS)}); a file, or a folder of text or of one format of records"
_TEXT = "a text file, a folder of text or source, or JSON lines (.jsonl)"
_AS_LINES = 'write JSON lines, one object such as {"text": "..."} a line, into a file that ends in .jsonl'
_ONE_FORMAT = "name one of its files, or a folder of records of one format"
_UNPACK = "unpack it first"

_BY_SUFFIX = {
    ".csv": ("a table (CSV)", _AS_LINES),
    ".tsv": ("a table (TSV)", _AS_LINES),
    ".json": ("JSON", _AS_LINES),
    ".jsonl": ("JSON lines", "put all lines into one .jsonl file (cat folder/*.jsonl > data.jsonl), and give that"),
    ".ndjson": ("JSON lines", "name it .jsonl"),
    ".jl": ("JSON lines", "name it .jsonl"),
    ".parquet": ("a table (Parquet)", _AS_LINES),
    ".arrow": ("a table (Arrow)", _AS_LINES),
    ".feather": ("a table (Arrow)", _AS_LINES),
    ".avro": ("a table (Avro)", _AS_LINES),
    ".orc": ("a table (ORC)", _AS_LINES),
    ".xlsx": ("a spreadsheet", _AS_LINES),
    ".docx": ("a Word document", "save it as plain text"),
    ".pdf": ("a PDF document", "take its text out first (pdftotext)"),
    ".gz": ("compressed (gzip)", _UNPACK),
    ".zst": ("compressed (Zstandard)", _UNPACK),
    ".bz2": ("compressed (bzip2)", _UNPACK),
    ".xz": ("compressed (xz)", _UNPACK),
    ".zip": ("an archive (zip)", _UNPACK),
    ".7z": ("an archive (7z)", _UNPACK),
    ".tar": ("an archive (tar)", _UNPACK),
    ".tgz": ("an archive (tar, gzip)", _UNPACK),
}
_BY_HEAD = (
    (b"PAR1", (_BY_SUFFIX[".parquet"][0], "name it .parquet")),
    (b"ARROW1", _BY_SUFFIX[".arrow"]),
    (b"Obj\x01", _BY_SUFFIX[".avro"]),
    (b"\x1f\x8b", _BY_SUFFIX[".gz"]),
    (b"\x28\xb5\x2f\xfd", _BY_SUFFIX[".zst"]),
    (b"BZh", _BY_SUFFIX[".bz2"]),
    (b"\xfd7zXZ\0", _BY_SUFFIX[".xz"]),
    (b"PK\x03\x04", _BY_SUFFIX[".zip"]),
    (b"7z\xbc\xaf\x27\x1c", _BY_SUFFIX[".7z"]),
    (b"%PDF-", _BY_SUFFIX[".pdf"]),
)
_TEXTS = (".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".jl")
KINDS = ({"messages"}, {"conversations"}, {"prompt", "completion"}, {"instruction", "output"})
"""Sets of fields that identify training records (chats, prompts, instructions)."""
_UTF16 = ("text in UTF-16", "convert it: iconv -f UTF-16 -t UTF-8")


def refuse_other_formats(path: Path) -> None:
    """Raise for one file that is neither plain text nor JSON lines.

    Args:
        path: the file, which exists.

    Raises:
        DataError: with its format and the fields of its first record.
    """
    if not path.is_file():
        raise DataError(
            f"{path}: not a regular file",
            expected=READ,
            got="a pipe" if path.is_fifo() else "a device or a socket",
            hint="a run reads its data again when it is resumed; write the content into a file",
        )
    head = read_head(path)
    suffix = path.suffix.lower()
    known = next((kind for start, kind in _BY_HEAD if head.startswith(start)), _UTF16 if _is_utf16(head) else None)
    if known is None and path.suffix != ".jsonl":
        known = _BY_SUFFIX.get(suffix)
        if known is None and _is_json_lines(head):
            known = (_BY_SUFFIX[".jsonl"][0], "name it .jsonl")
        elif suffix == ".jsonl":
            known = (_BY_SUFFIX[".jsonl"][0], "name it .jsonl, in small letters")
    if known is not None:
        what, hint = known
        fields = first_fields(head, suffix)
        raise DataError(
            f"{path}: {what}, which is not read as plain text",
            expected=_TEXT if suffix in RECORDS and not is_binary(head) else READ,
            got=f"fields {shortened(', '.join(map(str, fields)), 300)}" if fields else None,
            hint=hint,
        )


def refuse_folder_of_records(folder: Path, files: Sequence[Path]) -> None:
    """Raise for a folder of mostly records, or of text mixed with chats; a source tree may contain a few tables.

    Args:
        folder: the folder as the user named it.
        files: those of its files that would be read.

    Raises:
        DataError: when at least half of the bytes are in files that `refuse_other_formats` would refuse by name. Also
            when one of these files has the fields of chats, prompts or instructions.
    """
    sizes = {file: file.stat().st_size for file in files}
    records = [file for file in files if file.suffix.lower() in _BY_SUFFIX]
    num_bytes = sum(sizes[file] for file in records)
    if not records or 2 * num_bytes < sum(sizes.values()):
        _refuse_records_beside_text(folder, records, len(files))
        return
    first, suffix = records[0], records[0].suffix.lower()
    what, hint = _BY_SUFFIX[suffix]
    fields = first_fields(read_head(first), suffix) if suffix in _TEXTS else []
    raise DataError(
        f"{folder}: a folder of records, which is not read as plain text",
        expected=READ,
        got=f"{format_bytes(num_bytes)} of {format_bytes(sum(sizes.values()))} in {len(records)} such files; "
        f"{first.name} is {what}" + (f", fields {shortened(', '.join(fields), 300)}" if fields else ""),
        hint=hint if len({file.suffix.lower() for file in records}) == 1 else _ONE_FORMAT,
    )


def _refuse_records_beside_text(folder: Path, records: Sequence[Path], num_files: int) -> None:
    """Raise if a file's first record is a training record; read as text, the model would learn its braces."""
    for file in records:
        suffix = file.suffix.lower()
        fields = first_fields(read_head(file), suffix) if suffix in _TEXTS else []
        if any(kind <= {*fields} for kind in KINDS):
            raise DataError(
                f"{folder}: text, with records in it that would be read as text, too",
                expected="a folder of text or source, or of records that are half of its bytes or more",
                got=f"{len(records)} files of tables or JSON among {num_files}; {file.relative_to(folder)} has fields "
                f"{shortened(', '.join(fields), 300)}",
                hint=f"name that file: --data {file}; or move it elsewhere, to tune on the text alone",
            )


def files_read_as_text(files: Sequence[Path]) -> list[Path]:
    """List the text-based record and table files (CSV, JSON) among the files of a folder of text."""
    return [file for file in files if file.suffix.lower() in _TEXTS]


def first_fields(head: bytes, suffix: str) -> list[str]:
    """Find the fields of the first record: a table's columns, or an object's keys; empty if it cannot be parsed.

    Args:
        head: the beginning of the file.
        suffix: suffix of its name, in lower case.
    """
    text = head.decode("utf-8", "replace").removeprefix("\ufeff").lstrip()
    if suffix in (".csv", ".tsv"):
        line = text.split("\n", 1)[0]
        mark = max(",;\t|", key=line.count)
        try:
            return [shown(name).strip("'") for name in next(csv.reader([line], delimiter=mark), [])]
        except csv.Error:
            return []
    record = _first_object(text)
    return [shown(name).strip("'") for name in record] if isinstance(record, dict) else []


def read_head(path: Path) -> bytes:
    """Read the beginning of a file; empty if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(_HEAD_BYTES)
    except OSError:  # the code that reads the whole file raises a DataError
        return b""


def is_binary(head: bytes) -> bool:
    """Return whether the first bytes are those of a compressed file, a binary table, a document or UTF-16 text."""
    return head.startswith(tuple(start for start, _ in _BY_HEAD)) or _is_utf16(head)


def _first_object(text: str) -> Any:
    """Parse the first JSON object of a text that begins with an object or a list of objects; None on failure."""
    start = len(text) - len(text.removeprefix("[").lstrip())
    try:
        return json.JSONDecoder().raw_decode(text, start)[0]
    except (ValueError, RecursionError):
        return None


def _is_json_lines(head: bytes) -> bool:
    """Return whether the first two lines, or the only line, are JSON objects."""
    lines = [line for line in head.removeprefix(b"\xef\xbb\xbf").split(b"\n")[:8] if line.strip()][:2]
    return bool(lines) and all(line.startswith(b"{") and isinstance(_parsed(line), dict) for line in lines)


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _is_utf16(head: bytes) -> bool:
    """Return whether the bytes begin with a UTF-16 byte order mark, or every other byte is mostly zero.

    The second test detects Western text without a mark: its high bytes are zero, and its low bytes are not.
    """
    some = head[:4096]
    halves = (some[::2], some[1::2])
    return head.startswith((b"\xff\xfe", b"\xfe\xff")) or (
        len(some) >= 8
        and any(half.count(0) > 0.7 * len(half) for half in halves)
        and not all(0 in half for half in halves)
    )


def is_data(path: str | Path) -> bool:
    """Return whether a path is data rather than a model, an adapter or a run."""
    path = Path(path)
    if path.is_dir():
        from .data import is_records

        return not any((path / name).exists() for name in _NO_DATA) and is_records(path)
    return path.suffix.lower() in (*RECORDS, ".txt", ".md") and path.name not in _NO_DATA
