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

from ...core import DataError, format_bytes, shortened, shown

_HEAD_BYTES = 1024**2
RECORD_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
"""Suffixes of the files that `lowtide.finetune.data` reads records from."""
BINARY_SUFFIXES = (".parquet",)
"""Those of them whose files are not text."""
_MODEL_FILES = ("config.json", "adapter_config.json", "config.toml", "generation_config.json", "tokenizer.json")
"""Files of a model, an adapter or a run."""
SUPPORTED = (
    f"a file of text, source code or records ({', '.join(RECORD_SUFFIXES)}), or a folder of text, source code or "
    "records in one format"
)
_EXPECTED_TEXT = "a text file, a folder of text or source code, or JSON lines (.jsonl)"
_WRITE_JSON_LINES = 'write JSON lines, one object such as {"text": "..."} a line, into a file that ends in .jsonl'
_ONE_FORMAT = "name one of its files, or a folder of records in one format"
_UNPACK = "unpack it first"

_FORMAT_BY_SUFFIX = {
    ".csv": ("a table (CSV)", _WRITE_JSON_LINES),
    ".tsv": ("a table (TSV)", _WRITE_JSON_LINES),
    ".json": ("JSON", _WRITE_JSON_LINES),
    ".jsonl": (
        "JSON lines",
        "put all lines into one .jsonl file (cat folder/*.jsonl > data.jsonl), and name that file",
    ),
    ".ndjson": ("JSON lines", "rename it to .jsonl"),
    ".jl": ("JSON lines", "rename it to .jsonl"),
    ".parquet": ("a table (Parquet)", _WRITE_JSON_LINES),
    ".arrow": ("a table (Arrow)", _WRITE_JSON_LINES),
    ".feather": ("a table (Arrow)", _WRITE_JSON_LINES),
    ".avro": ("a table (Avro)", _WRITE_JSON_LINES),
    ".orc": ("a table (ORC)", _WRITE_JSON_LINES),
    ".xlsx": ("a spreadsheet", _WRITE_JSON_LINES),
    ".docx": ("a Word document", "save it as plain text"),
    ".pdf": ("a PDF document", "extract its text first (pdftotext)"),
    ".gz": ("compressed (gzip)", _UNPACK),
    ".zst": ("compressed (Zstandard)", _UNPACK),
    ".bz2": ("compressed (bzip2)", _UNPACK),
    ".xz": ("compressed (xz)", _UNPACK),
    ".zip": ("an archive (zip)", _UNPACK),
    ".7z": ("an archive (7z)", _UNPACK),
    ".tar": ("an archive (tar)", _UNPACK),
    ".tgz": ("an archive (tar, gzip)", _UNPACK),
}
_FORMAT_BY_MAGIC = (
    (b"PAR1", (_FORMAT_BY_SUFFIX[".parquet"][0], "rename it to .parquet")),
    (b"ARROW1", _FORMAT_BY_SUFFIX[".arrow"]),
    (b"Obj\x01", _FORMAT_BY_SUFFIX[".avro"]),
    (b"\x1f\x8b", _FORMAT_BY_SUFFIX[".gz"]),
    (b"\x28\xb5\x2f\xfd", _FORMAT_BY_SUFFIX[".zst"]),
    (b"BZh", _FORMAT_BY_SUFFIX[".bz2"]),
    (b"\xfd7zXZ\0", _FORMAT_BY_SUFFIX[".xz"]),
    (b"PK\x03\x04", _FORMAT_BY_SUFFIX[".zip"]),
    (b"7z\xbc\xaf\x27\x1c", _FORMAT_BY_SUFFIX[".7z"]),
    (b"%PDF-", _FORMAT_BY_SUFFIX[".pdf"]),
)
TEXT_SUFFIXES = (".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".jl")
"""Suffixes of records and tables that are text."""
RECORD_FIELDS = ({"messages"}, {"conversations"}, {"prompt", "completion"}, {"instruction", "output"})
"""Sets of fields that identify training records (chats, prompts, instructions)."""
_UTF16 = ("text in UTF-16", "convert it: iconv -f UTF-16 -t UTF-8")


def refuse_other_formats(path: Path) -> None:
    """Raise DataError for an existing file that is neither plain text nor JSON lines."""
    if not path.is_file():
        got = "a pipe" if path.is_fifo() else "a device or a socket"
        hint = "write the content into a file; a resumed run reads its data again"
        raise DataError(f"{path}: not a regular file", got=got, hint=hint)
    head = read_head(path)
    suffix = path.suffix.lower()
    default = _UTF16 if _is_utf16(head) else None
    match = next((kind for start, kind in _FORMAT_BY_MAGIC if head.startswith(start)), default)
    if match is None and path.suffix != ".jsonl":
        match = _FORMAT_BY_SUFFIX.get(suffix)
        if match is None and _is_json_lines(head):
            match = (_FORMAT_BY_SUFFIX[".jsonl"][0], "rename it to .jsonl")
        elif suffix == ".jsonl":
            match = (_FORMAT_BY_SUFFIX[".jsonl"][0], "rename it to .jsonl, in lower case")
    if match is not None:
        description, hint = match
        expected = _EXPECTED_TEXT if suffix in RECORD_SUFFIXES and not is_binary(head) else SUPPORTED
        problem, fields = f"the file is {description}, which is not read as plain text", first_fields(head, suffix)
        got = f"fields {shortened(', '.join(fields), 300)}" if fields else None
        raise DataError(f"{path}: {problem}", expected=expected, got=got, hint=hint)


def refuse_folder_of_records(folder: Path, files: Sequence[Path]) -> None:
    """Raise DataError for a folder whose `files` are mostly records, or text mixed with chats.

    Mostly: at least half of their bytes. A source tree may contain a few tables, but no file with the fields of chats,
    prompts or instructions.
    """
    sizes = {file: file.stat().st_size for file in files}
    records = [file for file in files if file.suffix.lower() in _FORMAT_BY_SUFFIX]
    num_bytes = sum(sizes[file] for file in records)
    if not records or 2 * num_bytes < sum(sizes.values()):
        _refuse_records_among_text(folder, records)
        return
    first, suffix = records[0], records[0].suffix.lower()
    description, hint = _FORMAT_BY_SUFFIX[suffix]
    hint = hint if len({file.suffix.lower() for file in records}) == 1 else _ONE_FORMAT
    got = f"{format_bytes(num_bytes)} of {format_bytes(sum(sizes.values()))} in {len(records)} files of records; "
    got += f"{first.name} is {description}"
    if fields := first_fields(read_head(first), suffix) if suffix in TEXT_SUFFIXES else []:
        got += f", fields {shortened(', '.join(fields), 300)}"
    problem = "the folder has records, which are not read as plain text"
    raise DataError(f"{folder}: {problem}", expected=SUPPORTED, got=got, hint=hint)


def _refuse_records_among_text(folder: Path, records: Sequence[Path]) -> None:
    """Raise if a file's first record is a training record; read as text, the model would learn its braces."""
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
    """Return whether the first bytes are those of a compressed file, a binary table, a document or UTF-16 text."""
    return head.startswith(tuple(start for start, _ in _FORMAT_BY_MAGIC)) or _is_utf16(head)


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
    """Return whether a path is data rather than a model, an adapter or a run."""
    path = Path(path)
    if path.is_dir():
        from ._read import is_records

        return not any((path / name).exists() for name in _MODEL_FILES) and is_records(path)
    return path.suffix.lower() in (*RECORD_SUFFIXES, ".txt", ".md") and path.name not in _MODEL_FILES
