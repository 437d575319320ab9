"""Plain text to training batches: read, tokenise, cut into windows, split, shuffle.

Documents are tokenised with the model's own tokenizer, shuffled once by seed, joined with the end-of-document token
and cut into windows of ``seq_len + 1`` tokens. The last part of the stream is held out. Grain does the order,
repetition and batching: its `MapDataset` returns the batch of any step, so a run is resumable.
"""

from __future__ import annotations

import dataclasses
import hashlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from ...core import ConfigError, DataError
from ._encode import LongEncoding, check_ids, encode, encode_pieces, largest_id, name_documents, refuse_unknown_id
from ._formats import RECORD_SUFFIXES, SUPPORTED, refuse_folder_of_records, refuse_other_formats
from ._normalize import parse_columns
from ._pack import IGNORE, DataReport
from ._read import files_below, read_records, unreadable

_BATCH_TEXTS = 256
_MOST_AT_ONCE = 32 * 1024**2
"""Bytes of the largest text file that is read as a whole; larger files are tokenised in windows."""
_MOST_IN_MEMORY = 2**24
"""Tokens kept in memory during tokenisation before they go to a temporary file."""
_LEAST_WINDOWS = 16
"""Least number of windows if the sequence length is chosen from the data."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextData:
    """Tokenised text, ready for `Trainer`."""

    train: Any
    """A `grain.MapDataset` of batches by step: ``tokens`` and ``labels``, int32 [B, T]; records add ``segment_ids`` and
    ``positions``."""
    held_out: Sequence[dict[str, np.ndarray]]
    """Evaluation batches; padding rows of the last batch have all labels ignored."""
    num_documents: int
    """Documents read."""
    num_train_tokens: int
    """Tokens in training windows."""
    num_held_out_tokens: int
    """Tokens in held-out windows."""
    num_train_sequences: int | None
    """Sequences of an epoch; None for data of unknown length."""
    digest: str
    """SHA-256 of all tokens in their order, to check that a resumed run has the same data."""
    seq_len: int
    """Tokens in a sequence, T."""
    report: DataReport | None = None
    """Counts of records that were read, packed, cut and dropped; None for plain text."""
    notes: tuple[str, ...] = ()
    """Facts that a user may not expect, such as files that were not read, or were read in an unexpected way."""


def read_documents(path: str | Path | None) -> list[str]:
    """Read documents from a text file, a folder of text or source, or JSONL; or the built-in corpus.

    Args:
        path: a file (``.jsonl``: one object with a ``text`` field a line; other text: one document), a folder
            (every UTF-8 file below it is a document, in sorted order; hidden and binary files are skipped, links are
            followed), or None for the language reference that ships inside Python (`pydoc_data.topics`).

    Returns:
        The documents that are not blank.

    Raises:
        DataError: when the path does not exist, cannot be read or holds no text. Also for compressed files and for
            records (CSV, JSON, Parquet and others, folders of JSON lines), which would be trained on as text.
    """
    return [*named_documents(path).values()]


def named_documents(path: str | Path | None) -> dict[str, str]:
    """Read documents as `read_documents` does, by their name in errors: a file, or a file and a line.

    Args:
        path: as in `read_documents`.

    Raises:
        DataError: as `read_documents` does.
    """
    if path is None:
        from pydoc_data.topics import topics

        return dict(sorted(topics.items()))
    if not str(path):
        raise DataError(
            "the path of the data is empty", hint="name a file or a folder; Path('.') is the current folder"
        )
    path = Path(path)
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        hint = f"name a file of text or of records ({', '.join(RECORD_SUFFIXES)}), or a folder of them"
        raise DataError(f"{path}: no such file or folder", hint=hint) from None
    except OSError as error:
        raise unreadable(path, error) from error
    if path.is_dir():
        files = files_below(path)
        refuse_folder_of_records(path, files)
        documents = {str(file): text for file in files if (text := _read_utf8(file)) is not None}
    else:
        refuse_other_formats(path)
        documents = texts_of_records(path, ("text=text",)) if path.suffix == ".jsonl" else {str(path): _read_text(path)}
    documents = {name: text for name, text in documents.items() if text.strip()}
    if not documents:
        raise DataError(
            f"{path}: the data has no text", expected="at least one document with text", hint="check --data"
        )
    return documents


def texts_of_records(path: Path, columns: tuple[str, ...] | None = None) -> dict[str, str]:
    """Read records of plain text, by file and line; records of another kind raise DataError."""
    texts: dict[str, str] = {}
    for example in read_records(path, parse_columns(columns)):
        if example is not None and example.kind != "text":
            raise DataError(
                f"{example.where}: the record has the kind {example.kind}, but plain text is read here",
                expected='records with "text"',
                hint="leave --packing out, or choose best-fit or none",
            )
        if example is not None:
            texts[example.where] = example.text
    return texts


def text_data(
    documents: Sequence[str] | Mapping[str, str | Path],
    tokenizer: Tokenizer,
    *,
    seq_len: int | Callable[[int], int],
    batch_size: int,
    seed: int,
    end_token: int | None = None,
    held_out_fraction: float = 0.1,
    eval_documents: Sequence[str] | Mapping[str, str | Path] | None = None,
    vocab_size: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> TextData:
    """Tokenise, pack, split and shuffle documents.

    Args:
        documents: texts, or texts by their name in errors.
        tokenizer: the model's tokenizer.
        seq_len: tokens in a training sequence, T; or a function that maps a sixteenth of the number of tokens to T.
        batch_size: sequences in a batch, B.
        seed: seed of the document order and the batch order.
        end_token: token appended to each document, if any.
        held_out_fraction: fraction of the windows kept for evaluation, at least one window.
        eval_documents: evaluation texts that replace this fraction, in separate windows.
        vocab_size: number of the model's embeddings; tokens beyond are refused. None: nothing is refused.
        on_progress: called with the number of finished documents and the total.

    Returns:
        The batches.

    Raises:
        DataError: when there are fewer tokens than two windows (one for training, one held out), and for tokens that
            the model has no embedding for.
        ConfigError: for a sequence length, batch size or fraction out of range.
    """
    import grain  # takes a second; `import lowtide` does not need it

    if (isinstance(seq_len, int) and seq_len < 1) or batch_size < 1 or not 0 < held_out_fraction < 1:
        raise ConfigError(
            "sequence length, batch size or held-out fraction is out of range",
            expected="seq_len >= 1, batch_size >= 1, 0 < held_out_fraction < 1",
            got=f"seq_len={seq_len}, batch_size={batch_size}, held_out_fraction={held_out_fraction}",
            hint="check --seq-len and --batch-size",
        )
    # Shuffle documents before the split, so that the held-out end of the stream is a random sample of them.
    order, items = np.random.default_rng(seed).permutation(len(documents)), [*name_documents(documents).items()]
    digest = hashlib.sha256()
    stream = tokenise(dict(items[i] for i in order), tokenizer, end_token, vocab_size, on_progress, digest)
    seq_len = seq_len if isinstance(seq_len, int) else seq_len(len(stream) // _LEAST_WINDOWS)
    window = seq_len + 1
    if eval_documents is None:
        windows = _windows(stream, window, "one training and one held-out sequence", 2)
        num_held_out = min(len(windows) - 1, max(1, round(len(windows) * held_out_fraction)))
        train, held_out = windows[:-num_held_out], windows[-num_held_out:]
    else:
        eval_stream = tokenise(name_documents(eval_documents), tokenizer, end_token, vocab_size, on_progress, digest)
        train = _windows(stream, window, "one training sequence", 1)
        held_out = _windows(eval_stream, window, "one evaluation sequence", 1)
    dataset = grain.MapDataset.source(train).seed(seed).shuffle().repeat().batch(batch_size).map(_tokens_and_labels)  # pyright: ignore
    return TextData(
        train=dataset,
        held_out=_EvaluationBatches(held_out, batch_size),
        num_documents=len(documents),
        num_train_tokens=train.size,
        num_held_out_tokens=held_out.size,
        num_train_sequences=len(train),
        digest=digest.hexdigest(),
        seq_len=seq_len,
    )


def _windows(stream: np.ndarray, window: int, description: str, min_windows: int) -> np.ndarray:
    count = len(stream) // window
    if count < min_windows:
        raise DataError(
            f"the data has {len(stream)} tokens, too few for {description}",
            expected=f"at least {min_windows * window} tokens ({min_windows} × (seq_len {window - 1} + 1))",
            got=f"{len(stream)} tokens",
            hint="give more text or a smaller --seq-len",
        )
    return stream[: count * window].reshape(count, window)


def tokenise(
    documents: Mapping[str, str | Path],
    tokenizer: Tokenizer,
    end_token: int | None,
    vocab_size: int | None,
    on_progress: Callable[[int, int], None] | None = None,
    digest: Any = None,
) -> np.ndarray:
    """Tokenise and join texts or text files as `text_data` does, int32 [N].

    The hash `digest`, if given, is updated with the tokens. Ids outside the tokenizer's own vocabulary raise
    ModelFileError, and tokens without an embedding raise DataError.
    """
    tokens = _TokenBuffer(digest)
    names, texts = [*documents], [*documents.values()]
    for start in range(0, len(documents), _BATCH_TEXTS):
        stop = min(start + _BATCH_TEXTS, len(documents))
        short = iter(encode(tokenizer, [text for text in texts[start:stop] if isinstance(text, str)]))
        for name, text in zip(names[start:stop], texts[start:stop], strict=True):
            last: list[int] = []
            for encoding in [next(short)] if isinstance(text, str) else _encode_file(tokenizer, text):
                ids = np.asarray(encoding.ids, np.int32)
                if vocab_size is not None and np.max(ids, initial=0) >= vocab_size:
                    check_ids(ids, tokenizer, vocab_size, _locate_token(name, text, ids, tokenizer, vocab_size))
                tokens.add(ids)
                last = ids[-1:].tolist() or last
            if end_token is not None and last != [end_token]:
                tokens.add(np.asarray([end_token], np.int32))
        if on_progress is not None:
            on_progress(stop, len(documents))
    refuse_unknown_id(tokens.largest, largest_id(tokenizer, end_token))
    return tokens.stream()


class _TokenBuffer:
    """Tokens of all documents. This object is mutated: `add` appends, and moves large amounts to a temporary file.

    It takes at most 128 MiB. If the file was used, `stream` returns a memory map of it.
    """

    def __init__(self, digest: Any) -> None:
        self.largest, self._digest = -1, digest
        self._pieces: list[np.ndarray] = []
        self._count, self._file = 0, None

    def add(self, ids: np.ndarray) -> None:
        """Append tokens, int32 [n]."""
        if self._digest is not None:
            self._digest.update(ids)
        self.largest = max(self.largest, int(ids.max(initial=-1)))
        self._pieces.append(ids)
        self._count += len(ids)
        if self._count > _MOST_IN_MEMORY:
            self._write()

    def stream(self) -> np.ndarray:
        """Return all tokens, int32 [N]."""
        if self._file is None:
            return np.concatenate(self._pieces) if self._pieces else np.zeros((0,), np.int32)
        self._write()
        with self._file as file:
            return np.memmap(file, np.int32, mode="r")

    def _write(self) -> None:
        self._file = tempfile.TemporaryFile() if self._file is None else self._file
        for piece in self._pieces:
            self._file.write(piece.tobytes())
        self._file.flush()
        self._pieces, self._count = [], 0


def _encode_file(tokenizer: Tokenizer, path: Path) -> Iterator[LongEncoding]:
    """Tokenise a text file in windows; a file that cannot be read, or is not UTF-8 text, raises DataError."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            yield from encode_pieces(tokenizer, file, special=True)
    except UnicodeDecodeError as error:
        raise _not_text_error(path) from error
    except OSError as error:
        raise unreadable(path, error) from error


def _read_text(path: Path) -> str:
    if (text := _read_utf8(path)) is None:
        raise _not_text_error(path)
    return text


def _not_text_error(path: Path) -> DataError:
    hint = "convert it (iconv -f LATIN1 -t UTF-8), or name a folder or a .jsonl file"
    return DataError(f"{path}: not UTF-8 text", expected=SUPPORTED, hint=hint)


def is_large_text(path: str | Path) -> bool:
    """Return whether a path is one text document that is read in pieces; raises DataError for other formats."""
    path = Path(path)
    if not path.is_file() or path.suffix == ".jsonl" or path.stat().st_size <= _MOST_AT_ONCE:
        return False
    refuse_other_formats(path)
    return True


class _EvaluationBatches(Sequence[dict[str, np.ndarray]]):
    """Batches of windows [N, T + 1], built at access; the last batch is padded with ignored rows."""

    def __init__(self, windows: np.ndarray, batch_size: int) -> None:
        self._windows, self._batch_size = windows, batch_size

    def __len__(self) -> int:
        return -(-len(self._windows) // self._batch_size)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        start = range(len(self))[index] * self._batch_size
        return _tokens_and_labels(_pad_rows(self._windows[start : start + self._batch_size], self._batch_size))


def _locate_token(name: str, text: str | Path, ids: np.ndarray, tokenizer: Tokenizer, vocab_size: int) -> str:
    """Return the document's name, with the line of the first token beyond the vocabulary if the text contains it."""
    token = tokenizer.id_to_token(int(ids[ids >= vocab_size][0]))
    position = text.find(token) if token and isinstance(text, str) else -1
    return (
        name
        if position < 0 or isinstance(text, Path) or "\n" not in text
        else f"{name}, line {text.count(chr(10), 0, position) + 1}"
    )


def _tokens_and_labels(windows: np.ndarray) -> dict[str, np.ndarray]:
    tokens, labels = np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:])
    # Padding rows contain IGNORE, which is a valid label but a negative token id.
    return {"tokens": np.maximum(tokens, 0), "labels": labels}


def _pad_rows(rows: np.ndarray, batch_size: int) -> np.ndarray:
    return np.pad(rows, ((0, batch_size - len(rows)), (0, 0)), constant_values=IGNORE)


def _read_utf8(path: Path) -> str | None:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error
    if b"\0" in data:
        return None
    try:
        return data.decode("utf-8").removeprefix("\ufeff")  # byte order mark of some editors
    except UnicodeDecodeError:
        return None
