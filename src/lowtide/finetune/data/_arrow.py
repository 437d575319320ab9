"""Read tables with pyarrow alone: Parquet, and the Arrow files of Hugging Face's ``Dataset.save_to_disk``.

Nothing is unpickled: `state.json` and `dataset_dict.json` are JSON, and the shards are Arrow streams. Shards are
memory-mapped. Every batch of rows is validated before its values are read, since the offsets in a damaged file can
point outside the buffer.
"""

from __future__ import annotations

import importlib
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...core import ConfigError, DataError, ModelFileError, input_file, parse_json, read_input, shortened, shown

_BATCH_ROWS = 1024
_MOST_STATE_BYTES = 16 * 1024**2
_STATE, _SPLITS = "state.json", "dataset_dict.json"


def read_parquet(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Stream the rows of a Parquet file in small batches; a damaged file raises DataError."""
    _pyarrow(path)
    import pyarrow.parquet as parquet

    with _convert_errors(path), parquet.ParquetFile(path, memory_map=True) as file:
        yield from _rows(file.iter_batches(batch_size=_BATCH_ROWS), path, 0)


def find_split(folder: Path) -> Path | None:
    """Find the folder of one split in the output of ``save_to_disk``; None for another kind of folder.

    A `DatasetDict` needs a split ``train``, or only one split; otherwise it raises DataError.
    """
    if (folder / _STATE).is_file():
        return folder
    if not (folder / _SPLITS).is_file():
        return None
    splits = _read_json(folder, _SPLITS).get("splits")
    names = [name for name in splits if isinstance(name, str)] if isinstance(splits, list) else []
    safe_names = [name for name in names if name and Path(name).name == name and name not in (".", "..")]
    name = "train" if "train" in safe_names else safe_names[0] if len(safe_names) == 1 == len(names) else None
    if name is None or not (folder / name / _STATE).is_file():
        raise DataError(
            f"{folder}: the DatasetDict has no split that can be selected",
            expected="a split named train, or a single split",
            got=shortened(", ".join(map(shown, names)), 300) or "no splits",
            hint=f"name the folder of a split, for instance {folder}/{safe_names[0] if safe_names else 'train'}",
        )
    return folder / name


def read_saved(folder: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Stream the rows of one split that ``save_to_disk`` wrote: a folder with `state.json` and Arrow shards.

    A damaged file, or a selection of rows that is saved as separate indices, raises DataError.
    """
    pa = _pyarrow(folder)
    state = _read_json(folder, _STATE)
    index_keys = [name for name, value in state.items() if name.startswith("_indices") and value]
    if index_keys:
        raise DataError(
            f"{folder}: {_STATE} has {index_keys[0]}, a selection of rows that is saved separately",
            hint="save it again: dataset.flatten_indices().save_to_disk(...)",
        )
    files = state.get("_data_files")
    entries = files if isinstance(files, list) else []
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in entries]
    if not names or not all(isinstance(name, str) for name in names):
        raise DataError(f"{folder}: {_STATE} names no data files", hint="save the dataset again")
    number = 0
    for name in names:
        try:
            path = input_file(folder, str(name), hint="copy it again; the folder is incomplete")
        except ModelFileError as error:
            raise DataError(error.message, expected=error.expected, got=error.got, hint=error.hint) from error
        with _convert_errors(path), pa.memory_map(str(path)) as source:
            # Arrow has two formats: a file begins with this mark, a stream does not.
            is_file = source.read(6) == b"ARROW1"
            source.seek(0)
            reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else reader
            for batch in batches:
                yield from _rows([batch], path, number)
                number += batch.num_rows


def _rows(batches: Any, path: Path, number: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
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
        raise DataError(
            f"{path}: cannot be read as a table", got=shortened(error), hint="copy it again; it is truncated or damaged"
        ) from error


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        path = input_file(folder, name, hint="copy it again; the folder is incomplete")
        return parse_json(read_input(path, most_bytes=_MOST_STATE_BYTES), str(path))
    except ModelFileError as error:
        raise DataError(error.message, expected=error.expected, got=error.got, hint=error.hint) from error


def _pyarrow(path: Path) -> Any:
    try:
        importlib.import_module("pyarrow.ipc")
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise ConfigError(
            f"{path}: tables are read by pyarrow, which is not installed",
            hint="pip install 'lowtide[data]', or write JSON lines",
        ) from error
