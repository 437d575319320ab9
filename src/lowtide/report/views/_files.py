"""Files of reports: JSON with one line per buffer, a strict reader, and a writer that never leaves a partial file.

The reader refuses incomplete files and other versions of the format, because wrong figures would not be noticed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast, get_args

from ...core import OutputError, ReportError, write_files
from ...targets import Target
from .._facts import SCHEMA_VERSION, Buffer, Space, SpaceBytes

_LONG_LISTS = ("buffers", "moments", "rows")
_READ_HINT = "give a file that MemoryReport.to_json wrote"
_WRITE_HINT = "give a file in an existing folder that you may write to"


def write_view(path: str | Path, content: bytes) -> None:
    """Write one file, replacing an older one; raise `OutputError` if the folder is missing or writing fails."""
    file = Path(path)
    try:
        if file.exists() and not file.is_file() and not file.is_dir():
            file.write_bytes(content)  # a pipe or a device such as a terminal, which must not be replaced
            return
        file = file.resolve() if file.is_symlink() else file  # replace the linked file, not the link
        if file.is_dir():
            raise IsADirectoryError(f"{file} is a folder")
        if not file.parent.is_dir():  # `write_files` would create it
            raise NotADirectoryError(f"{file.parent} is not a folder")
        write_files(file.parent, {file.name: content})
    except (OSError, OutputError) as error:
        got = error.got if isinstance(error, OutputError) else f"{type(error).__name__}: {error}"
        raise OutputError(f"{path}: the report cannot be written", got=got, hint=_WRITE_HINT) from error


def dump_json(data: Mapping[str, Any], *, indent: str = "") -> str:
    """Return JSON with one line per key and per element of `_LONG_LISTS`; `indent` stands before the closing brace."""
    inner = f"{indent}  "
    parts: list[str] = []
    for key, value in data.items():
        if key in _LONG_LISTS and value:
            text = f"[\n{inner}  " + f",\n{inner}  ".join(_compact(item) for item in value) + f"\n{inner}]"
        elif isinstance(value, Mapping) and any(name in value for name in _LONG_LISTS):
            text = dump_json(cast("Mapping[str, Any]", value), indent=inner)
        else:
            text = _compact(value)
        parts.append(f"{inner}{json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + f"\n{indent}}}"


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def read_fields(path: str | Path) -> dict[str, Any]:
    """Read the arguments of `MemoryReport` from a file that `to_json` wrote; `ReportError` for any other file."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ReportError(f"{path}: the report cannot be read", got=error.strerror or error, hint=_READ_HINT) from error
    except ValueError as error:  # not UTF-8, or not JSON
        raise ReportError(f"{path}: the file is not JSON", got=error, hint=_READ_HINT) from error
    return parse_fields(data, path)


def parse_fields(data: Any, path: str | Path) -> dict[str, Any]:
    """Return the arguments of `MemoryReport` from the parsed JSON of `path`; `ReportError` if it is invalid."""
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version is None:
        raise ReportError(f"{path}: the file is not a memory report", hint=_READ_HINT)
    if version != SCHEMA_VERSION:
        raise ReportError(
            f"{path}: the report has schema_version {version!r}, not {SCHEMA_VERSION}",
            hint="make the report again with this version of Lowtide, or read it with the version that wrote it",
        )
    try:
        return _fields(cast("dict[str, Any]", data))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        got = f"missing key {error}" if isinstance(error, KeyError) else error
        raise ReportError(f"{path}: the report is damaged or incomplete", got=got, hint=_READ_HINT) from error


def _fields(data: dict[str, Any]) -> dict[str, Any]:
    spaces: dict[str, SpaceBytes] = {}
    for name in get_args(Space):
        parts = dict(data[name])
        total = parts.pop("total_bytes")
        spaces[name] = SpaceBytes(**parts)
        # The total is derived from the parts, so a difference means that the file was edited or damaged.
        if spaces[name].total_bytes != total:
            raise ValueError(f"the parts of {name} add up to {spaces[name].total_bytes}, not {total}")
    rows: list[dict[str, Any]] = [{**row, "shape": tuple(row.get("shape", ()))} for row in data["buffers"]]
    buffers = tuple(Buffer(**row) for row in rows)
    moments = tuple(data["moments"])
    peaks = {name: data[name] for name in ("peak_moment", "host_peak_moment")}
    spans = [*((b.start, b.end) for b in buffers), *((peak, peak) for peak in peaks.values())]
    if any(not 0 <= start <= end < len(moments) for start, end in spans):
        raise ValueError(f"a position lies outside of the {len(moments)} moments")
    target: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data["target"].items()}
    return {
        "target": Target(**target),
        **spaces,
        **{name: data[name] for name in ("by_role", "host_by_role", "versions")},
        "buffers": buffers,
        "moments": moments,
        **peaks,
        "notes": tuple(data["notes"]),
    }
