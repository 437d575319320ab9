"""Tokenised records in files, so that data larger than memory is read once and then memory-mapped.

The name of a store's folder is a digest of the data files, the tokenizer, the template and the settings. The store is
written under a temporary name and renamed when it is complete, so a killed run leaves no broken store. Stores are in
``LOWTIDE_CACHE``, or ``~/.cache/lowtide``, below ``data``. You can delete them at any time except during a run.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from ...core import DataError, OutputError, shortened
from .._tokens import largest_id, name_documents
from ._chat import ChatTemplate
from ._encode import Encoder
from ._readers import data_files, read_records
from ._schema import Example

_VERSION = 5
_BATCH_RECORDS = 256
_MOST_UNREAD = 100
_ABANDONED_SECONDS = 86_400
Source = Path | Sequence[str] | Mapping[str, str]
_TOKENS, _LEARNED, _ENDS, _METADATA = "tokens.bin", "learned.bin", "ends.bin", "about.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Store:
    """Tokens of all documents, one after the other."""

    tokens: np.ndarray
    """Token ids, int32 [N], memory-mapped."""
    learned: np.ndarray
    """1 for learned tokens, uint8 [N], memory-mapped."""
    offsets: np.ndarray
    """Index of the first token of each document, then N, int64 [D + 1]."""
    kind: str
    """Kind of the records, as in `Example`."""
    num_blank: int
    """Number of records without text."""
    digest: str
    """SHA-256 of `tokens` and `learned`."""
    unread: tuple[str, ...] = ()
    """Columns of the records that are not read, in sorted order."""

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document."""
        return np.diff(self.offsets)


def open_store(
    source: Source,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    *,
    columns: Mapping[str, str],
    end_token: int | None,
    loss_on: str,
    vocab_size: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Store:
    """Tokenise records into files, or open the files of an earlier call.

    A template that writes the date and has no day gets today as its day, since a store must not depend on the time of
    day. The total is unknown, so `on_progress` gets the number of finished records twice. The host holds 256 records
    with their tokens, and 8 bytes a document; the files take 5 bytes a token.
    """
    settings: dict[str, Any] = {"columns": dict(columns), "end": end_token, "loss_on": loss_on, "version": _VERSION}
    if template is not None and template.writes_date and template.day is None:
        template = dataclasses.replace(template, day=datetime.date.today().isoformat())
    if vocab_size is not None and largest_id(tokenizer, end_token) >= vocab_size:
        settings["vocab_size"] = vocab_size  # a store written without this check may contain refused tokens
    template_key = None if template is None else [template.source, template.special]
    if template is not None and template_key is not None and template.writes_date:
        template_key.append(template.day or "")
    # The name covers every input of the tokenisation, so that a changed input leads to another store.
    hasher = hashlib.sha256(tokenizer.to_str().encode())
    hasher.update(json.dumps([settings, template_key], sort_keys=True).encode())
    for piece in _digests(source):
        hasher.update(piece)
    cache_folder = _cache_folder()
    folder = cache_folder / hasher.hexdigest()
    if not folder.is_dir():
        encoder = Encoder(tokenizer, template, end_token=end_token, loss_on=loss_on, vocab_size=vocab_size)
        unfinished = _new_folder(cache_folder)
        try:
            _write(unfinished, source, columns, encoder, on_progress)
            _publish(unfinished, folder)
        except OSError as error:
            raise _unwritable_error(cache_folder, error) from error
        finally:
            encoder.close()
            shutil.rmtree(unfinished, ignore_errors=True)
    return _open(folder)


def _digests(source: Source) -> Iterator[bytes]:
    """Yield digests of the source's files or texts."""
    if isinstance(source, Path):
        for file in data_files(source):
            yield file.name.encode() + b"\0" + _file_digest(file)
    else:
        yield from (hashlib.sha256(text.encode()).digest() for text in name_documents(source).values())


def _new_folder(cache_folder: Path) -> Path:
    try:
        cache_folder.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(cache_folder)
        return Path(tempfile.mkdtemp(prefix="unfinished-", dir=cache_folder))
    except OSError as error:
        raise _unwritable_error(cache_folder, error) from error


def _remove_abandoned(cache_folder: Path) -> None:
    """Remove unfinished folders without a write for a day, which killed runs left."""
    for folder in cache_folder.glob("unfinished-*"):
        try:
            times = [file.stat().st_mtime for file in (folder, *folder.iterdir())]
        except OSError:  # another process has renamed or removed it, or it belongs to another user
            continue
        if time.time() - max(times) > _ABANDONED_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)


def _unwritable_error(cache_folder: Path, error: OSError) -> OutputError:
    return OutputError(
        f"{cache_folder}: tokenised data cannot be written here",
        got=error.strerror or str(error),
        hint="name another folder in the variable LOWTIDE_CACHE",
    )


def _cache_folder() -> Path:
    path = os.environ.get("LOWTIDE_CACHE")
    return (Path(path).expanduser() if path else Path.home() / ".cache" / "lowtide") / "data"


def _write(
    folder: Path,
    source: Source,
    columns: Mapping[str, str],
    encoder: Encoder,
    on_progress: Callable[[int, int], None] | None,
) -> None:
    is_path = isinstance(source, Path)
    records = read_records(source, columns) if is_path else _examples(source)
    digest = hashlib.sha256()
    kind, num_blank, count, end = "", 0, 0, 0
    batch: list[Example] = []
    unread: set[str] = set()
    with (
        open(folder / _TOKENS, "wb") as tokens,
        open(folder / _LEARNED, "wb") as learned,
        open(folder / _ENDS, "wb") as ends,
    ):

        def flush() -> None:
            nonlocal end
            for ids, mask in encoder.encode(batch):
                end += len(ids)
                for file, content in ((tokens, ids.tobytes()), (learned, mask.tobytes())):
                    file.write(content)
                    digest.update(content)
                ends.write(np.int64(end).tobytes())
            batch.clear()
            if on_progress is not None:
                on_progress(count, count)

        for example in records:
            count += 1
            if example is None:
                num_blank += 1
                continue
            kind = example.kind
            unread.update(example.unread, encoder.unread_in(example))
            batch.append(example)
            if len(batch) == _BATCH_RECORDS:
                flush()
        flush()
        for file in (tokens, learned, ends):
            file.flush()
            os.fsync(file.fileno())
    if not end:
        raise DataError(
            f"{source if is_path else 'text'}: {f'all {count} records are blank' if count else 'there are no records'}",
            expected="at least one record with text",
            hint="check --data and --columns",
        )
    metadata: dict[str, Any] = {"kind": kind, "num_blank": num_blank, "digest": digest.hexdigest(), "num_tokens": end}
    metadata["unread"] = sorted(unread)[:_MOST_UNREAD]
    (folder / _METADATA).write_text(json.dumps(metadata))


def _examples(texts: Sequence[str] | Mapping[str, str]) -> Iterator[Example]:
    return (Example(kind="text", where=name, text=text) for name, text in name_documents(texts).items())


def _publish(unfinished: Path, folder: Path) -> None:
    try:
        unfinished.rename(folder)
    except OSError:
        if not folder.is_dir():  # otherwise another process has written the same store in the meantime
            raise


def _open(folder: Path) -> Store:
    try:
        metadata: dict[str, Any] = json.loads((folder / _METADATA).read_text())
        tokens = np.memmap(folder / _TOKENS, np.int32, "r")
        learned = np.memmap(folder / _LEARNED, np.uint8, "r")
        ends = np.fromfile(folder / _ENDS, np.int64)
        is_whole = len(tokens) == len(learned) == ends[-1] == metadata["num_tokens"]
        unread = tuple(map(str, metadata["unread"]))
        kind, blank, digest = metadata["kind"], metadata["num_blank"], metadata["digest"]
    except (OSError, ValueError, LookupError) as error:
        raise _truncated_error(folder, error) from error
    if not is_whole:
        raise _truncated_error(folder)
    offsets = np.concatenate([np.zeros(1, np.int64), ends])
    return Store(
        tokens=tokens, learned=learned, offsets=offsets, kind=kind, num_blank=blank, digest=digest, unread=unread
    )


def _truncated_error(folder: Path, error: Exception | None = None) -> DataError:
    hint = "delete this folder; the next run writes it again"
    return DataError(f"{folder}: the store is truncated", got=error and shortened(error), hint=hint)


def _file_digest(path: Path) -> bytes:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
