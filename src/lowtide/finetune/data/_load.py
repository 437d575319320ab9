"""Training data of a run: plain text in windows, or records packed into rows, depending on the configuration.

Documents of plain text are shuffled by seed, tokenised with the model's own tokenizer, joined with the end token, and
cut into windows of ``seq_len + 1`` tokens. The last windows are held out. `_pack` makes rows of records. Grain
shuffles, repeats and batches both: its `MapDataset` returns the batch of any step, so a run is resumable.
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

from ...core import ConfigError, DataError, check_integer, check_number, shown
from .._config import FinetuneConfig, flag_of, with_seq_len
from ..objectives import objective
from . import _formats
from ._chat import ChatTemplate, load_chat_template
from ._encode import (
    LongEncoding,
    Store,
    check_ids,
    encode,
    encode_pieces,
    largest_id,
    name_documents,
    open_store,
    refuse_unknown_id,
)
from ._normalize import parse_columns
from ._pack import EvaluationBatches, TextData, pack_stores
from ._read import files_below, folder_of_records, is_records, read_records, unreadable

_MOST_NAMES = 6
_MOST_BATCH_TOKENS = 2**28
"""Largest batch in tokens, which takes 4 GiB on the host with four int32 columns. More is probably a typing error."""
_BATCH_TEXTS = 256
_MOST_AT_ONCE = 32 * 1024**2
"""Bytes of the largest text file that is read as a whole; larger files are tokenised in windows."""
_MOST_IN_MEMORY = 2**24
"""Tokens kept in memory during tokenisation before they go to a temporary file."""
_LEAST_WINDOWS = 16
"""Least number of windows if the sequence length is chosen from the data."""


def load_data(
    config: FinetuneConfig,
    directory: Path,
    tokenizer: Tokenizer,
    *,
    end_token: int | None,
    context: int = 2**17,
    vocab_size: int | None = None,
    day: str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> TextData:
    """Read and tokenise the data of a run, and make batches; for records also a report.

    `directory` is the tokenizer's folder, for its chat template. `context` is the model's number of positions, used if
    no sequence length is set. `day` is the date that chat templates may write; None: today.
    """
    if config.batch_size * config.seq_len > _MOST_BATCH_TOKENS:
        size = f"{config.batch_size} × {config.seq_len:,}"
        hint = f"lower --seq-len or --batch-size, to at most {_MOST_BATCH_TOKENS:,} tokens in a batch"
        raise ConfigError(f"seq_len: a batch of {size} tokens is too large", hint=hint)
    encode_options: dict[str, Any] = {"end_token": end_token, "vocab_size": vocab_size, "on_progress": on_progress}
    batch_options: dict[str, Any] = {
        "batch_size": config.batch_size,
        "seed": config.seed,
        "held_out_fraction": config.held_out_fraction,
    }
    if (targets := objective(config.objective).targets) == "class" and not config.columns:
        config = dataclasses.replace(config, columns=("text=text", "label=label"))  # JSON lines with text are records
    is_plain = not is_read_as_records(config.data, config.columns)
    has_windows = config.objective in ("sft", "distillation")
    if config.packing == "contiguous" or (config.packing == "auto" and is_plain and has_windows):
        _refuse_record_settings(config, is_plain=is_plain)
        documents = _texts(config.data, config.columns)
        eval_documents = None if config.eval_data is None else _texts(config.eval_data, config.columns)
        seq_len = config.seq_len or (lambda longest: with_seq_len(config, context, longest).seq_len)
        options = encode_options | batch_options
        data = text_data(documents, tokenizer, eval_documents=eval_documents, seq_len=seq_len, **options)
        return _with_notes(data, config)
    template = load_chat_template(directory, config.chat_template)
    dated_template = None if template is None else dataclasses.replace(template, day=day)
    source = _source(config.data, config.columns)
    eval_source = None if config.eval_data is None else _source(config.eval_data, config.columns)
    encode_options |= {"columns": parse_columns(config.columns), "loss_on": config.loss_on}
    encode_options |= {"targets": targets}
    if targets == "class" or config.objective == "embedding":
        encode_options["end_token"] = None  # transformers and sentence-transformers add none
    store = open_store(source, tokenizer, dated_template, **encode_options)
    eval_store = store if eval_source is None else open_store(eval_source, tokenizer, dated_template, **encode_options)
    _check_group(store, config)
    _check_group(eval_store, config)
    if (
        targets == "class"
        and (largest := int(max(store.learned.max(), eval_store.learned.max())) - 1) >= config.num_labels
    ):
        hint = f"set --num-labels {largest + 1}; classes are numbered from 0"
        raise DataError(f"data: a record has the label {largest}, but num_labels is {config.num_labels}", hint=hint)
    data = pack_stores(
        store,
        eval_store,
        tokenizer,
        dated_template,
        seq_len=with_seq_len(config, context, int(store.lengths.max(initial=1)) * store.group).seq_len,
        packing={"auto": "none" if config.objective == "embedding" else "best-fit"}.get(config.packing, config.packing),
        too_long=config.too_long,
        **batch_options,
    )
    return _with_notes(data, config, template)


def _check_group(store: Store, config: FinetuneConfig) -> None:
    """Raise DataError if the records do not fit the objective."""
    group = objective(config.objective).group
    if (store.kind == "pair") != (config.objective == "embedding"):
        problem = "pairs of anchor and positive are for --objective embedding, which reads nothing else"
        raise DataError(problem, got=f"{store.kind} and {config.objective}", hint="set --objective or --columns")
    if store.group == 2 and group == 1:
        hint = "tune on preferences with --objective dpo, or on the chosen answers: --columns prompt=prompt,"
        raise DataError("the records have chosen and rejected answers", hint=f"{hint}completion=chosen")
    if store.group == 1 and group == 2:
        expected, hint = "records with prompt, chosen and rejected", "leave --objective out for supervised tuning"
        problem = f"the records have one answer, but {config.objective} compares two"
        raise DataError(problem, expected=expected, got=store.kind, hint=hint)


def _with_notes(data: TextData, config: FinetuneConfig, template: ChatTemplate | None = None) -> TextData:
    notes = [*notes_on(config.data, config.columns), *notes_on(config.eval_data, config.columns, is_evaluation=True)]
    num_rows, batch_size = data.num_train_sequences, config.batch_size
    if num_rows < batch_size:
        notes.append(f"a batch repeats rows: --batch-size is {batch_size:,}, with {num_rows:,} rows to train on")
    if template is not None and data.report is not None and data.report.kind == "prompt":
        note = f"prompts are read as plain text, without the template {template.where}"
        notes.append(f'{note}; records with "messages" use it')
    return dataclasses.replace(data, notes=tuple(notes))


def is_read_as_records(data: str | None, columns: tuple[str, ...] | None) -> bool:
    """Return whether data is read as records; JSON lines with ``text`` and no chat, prompt or instruction are not.

    Args:
        data: the path in the configuration; None, the built-in corpus, is plain text.
        columns: the columns in the configuration; if they are set, JSON lines are records.
    """
    if not data:
        return False
    path = Path(data)
    if not is_records(path):
        return False
    if path.is_dir() or path.suffix.lower() in _formats.BINARY_SUFFIXES:
        return True
    head = _formats.read_head(path)
    if _formats.is_binary(head):
        return False  # the text reader raises an error that names the format
    if path.suffix != ".jsonl" or columns:
        return True
    fields = set(_formats.first_fields(head, ".jsonl"))
    return "text" not in fields or any(kind <= fields for kind in _formats.RECORD_FIELDS)


def notes_on(data: str | None, columns: tuple[str, ...] | None, *, is_evaluation: bool = False) -> list[str]:
    """Describe the files of a folder that are not read, or are read in an unexpected way.

    Args:
        data: the path in the configuration.
        columns: the columns in the configuration.
        is_evaluation: whether this is evaluation data.

    Returns:
        Sentences; none for a single file, or if all files are read as expected.
    """
    if not data or not Path(data).is_dir():
        return []
    folder, notes = Path(data), list[str]()
    if not is_read_as_records(data, columns):
        if tables := [file for file in files_below(folder) if file.suffix.lower() in _formats.TEXT_SUFFIXES]:
            notes.append(f"{folder}: read as plain text, braces and commas included: {_join_names(folder, tables)}")
        return notes
    if (record_folder := folder_of_records(folder)) is None:  # a folder that the `datasets` library saved
        return []
    if record_folder.evaluation_files:
        names = _join_names(folder, record_folder.evaluation_files)
        notes.append(f"{folder}: files named for evaluation are not read; name them with --eval-data: {names}")
    if record_folder.is_evaluation and not is_evaluation:
        notes.append(f"{folder}: files named for evaluation are trained on: {_join_names(folder, record_folder.files)}")
    if record_folder.other_files:
        notes.append(f"{folder}: files without records are not read: {_join_names(folder, record_folder.other_files)}")
    return notes


def _join_names(folder: Path, files: Sequence[Path]) -> str:
    names = [shown(str(file.relative_to(folder))).strip("'") for file in files]
    num_more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {num_more} more" if num_more > 0 else "")


def _refuse_record_settings(config: FinetuneConfig, *, is_plain: bool) -> None:
    """Raise ConfigError for record settings that contiguous windows of text would ignore."""
    settings = {"chat_template": config.chat_template, "columns": config.columns if is_plain else None}
    settings |= {"too_long": config.too_long != "cut", "loss_on": config.loss_on != "completion"}
    if ignored := [name for name, value in settings.items() if value]:
        hint = f"leave {flag_of(ignored[0])} out, choose --packing best-fit, or check that --data names the right file"
        raise ConfigError(f"{ignored[0]} has no effect on text in contiguous windows", hint=hint)


def _source(data: str | None, columns: tuple[str, ...] | None) -> Path | dict[str, str]:
    return Path(data) if data and is_read_as_records(data, columns) else named_documents(data)


def _texts(data: str | None, columns: tuple[str, ...] | None) -> Mapping[str, str | Path]:
    """Return documents by name, for contiguous windows: texts, or paths of large files; records must be plain text."""
    path = Path(data or "")
    if is_read_as_records(data, columns):
        texts = texts_of_records(path, columns)
        if not texts:
            raise DataError(f"{data}: the data has no text", hint="check --data; at least one record must have text")
        return texts
    if data and path.is_file() and path.suffix != ".jsonl" and path.stat().st_size > _MOST_AT_ONCE:
        _formats.refuse_other_formats(path)
        return {data: path}
    return named_documents(data)


def read_documents(path: str | Path | None) -> list[str]:
    """Read documents from a text file, a folder of text or source, or JSONL; or the built-in corpus.

    Args:
        path: a text file, which is one document, or a ``.jsonl`` file, whose lines are objects with a field ``text``.
            Or a folder: every UTF-8 file at any depth is a document, in sorted order. Hidden and binary files are
            skipped, and links are followed. None: the language reference inside Python (`pydoc_data.topics`).

    Returns:
        The documents that are not blank.

    Raises:
        DataError: when the path does not exist, cannot be read or holds no text. Also for compressed files and for
            records (CSV, JSON, Parquet and others, folders of JSON lines), which would be trained on as text.
    """
    return [*named_documents(path).values()]


def named_documents(path: str | Path | None) -> dict[str, str]:
    """Read documents as `read_documents` does, and return them by name: the path, or the path and line in JSONL."""
    if path is None:
        from pydoc_data.topics import topics

        return dict(sorted(topics.items()))
    if not str(path):
        raise DataError("the path of the data is empty", hint="name a file or folder; Path('.') is the current folder")
    path = Path(path)
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        hint = f"name a file of text or of records ({', '.join(_formats.RECORD_SUFFIXES)}), or a folder of them"
        raise DataError(f"{path}: no such file or folder", hint=hint) from None
    except OSError as error:
        raise unreadable(path, error) from error
    if path.is_dir():
        files = files_below(path)
        _formats.refuse_folder_of_records(path, files)
        documents = {str(file): text for file in files if (text := _read_utf8(file)) is not None}
    else:
        _formats.refuse_other_formats(path)
        documents = texts_of_records(path, ("text=text",)) if path.suffix == ".jsonl" else {str(path): _read_text(path)}
    documents = {name: text for name, text in documents.items() if text.strip()}
    if not documents:
        raise DataError(f"{path}: the data has no text", hint="check --data; at least one document must have text")
    return documents


def texts_of_records(path: Path, columns: tuple[str, ...] | None = None) -> dict[str, str]:
    """Read records of plain text, by file and line; records of another kind raise DataError."""
    texts: dict[str, str] = {}
    for example in filter(None, read_records(path, parse_columns(columns))):
        if example.kind != "text":
            hint = "leave --packing out, or choose best-fit or none"
            raise DataError(f"{example.where}: the record has the kind {example.kind}, not plain text", hint=hint)
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
        documents: texts, or a dict from names to texts or to paths of text files; errors contain the names.
        tokenizer: the model's tokenizer.
        seq_len: tokens in a training sequence, T; or a function that maps a sixteenth of the number of tokens to T.
        batch_size: sequences in a batch, B.
        seed: seed of the document order and the batch order.
        end_token: token appended to each document, if any.
        held_out_fraction: fraction of the windows kept for evaluation, at least one window.
        eval_documents: evaluation texts for separate windows; if given, all windows of `documents` are for training.
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

    if not callable(seq_len):
        check_integer("seq_len", seq_len)
    check_integer("batch_size", batch_size)
    check_number("held_out_fraction", held_out_fraction, above=0, below=1)
    # Shuffle documents before the split, so that the held-out end of the stream is a random sample of them.
    order, items = np.random.default_rng(seed).permutation(len(documents)), [*name_documents(documents).items()]
    digest = hashlib.sha256()
    options: Any = {"vocab_size": vocab_size, "on_progress": on_progress, "digest": digest}
    stream = token_stream(dict(items[i] for i in order), tokenizer, end_token, **options)
    seq_len = seq_len(len(stream) // _LEAST_WINDOWS) if callable(seq_len) else int(seq_len)
    window = seq_len + 1
    if eval_documents is None:
        windows = _windows(stream, window, "one training and one held-out sequence", 2)
        num_held_out = min(len(windows) - 1, max(1, round(len(windows) * held_out_fraction)))
        train, held_out = windows[:-num_held_out], windows[-num_held_out:]
    else:
        eval_stream = token_stream(eval_documents, tokenizer, end_token, **options)
        train = _windows(stream, window, "one training sequence", 1)
        held_out = _windows(eval_stream, window, "one evaluation sequence", 1)
    dataset = grain.MapDataset.source(train).seed(seed).shuffle().repeat().batch(batch_size).map(_tokens_and_labels)  # pyright: ignore
    held_out_rows = grain.MapDataset.source(held_out).map(_tokens_and_labels)  # pyright: ignore
    return TextData(
        train=dataset,
        held_out=EvaluationBatches(held_out_rows, batch_size),
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
        expected = f"at least {min_windows * window} tokens ({min_windows} × (seq_len {window - 1} + 1))"
        hint = "give more text or a smaller --seq-len"
        raise DataError(f"the data has {len(stream)} tokens, too few for {description}", expected=expected, hint=hint)
    return stream[: count * window].reshape(count, window)


def token_stream(
    documents: Sequence[str] | Mapping[str, str | Path],
    tokenizer: Tokenizer,
    end_token: int | None,
    *,
    vocab_size: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    digest: Any = None,
) -> np.ndarray:
    """Tokenise documents and join them, each followed by the end token, if any.

    Args:
        documents: texts, or a dict from names to texts or to paths of text files; errors contain the names.
        tokenizer: the model's tokenizer.
        end_token: token appended to each document; None: no token.
        vocab_size: number of the model's embeddings; tokens beyond are refused. None: nothing is refused.
        on_progress: called with the number of finished documents and the total.
        digest: a hash of `hashlib` that is updated with the tokens.

    Returns:
        Token ids, int32 [N].

    Raises:
        DataError: for a token that the model has no embedding for.
        ModelFileError: for a tokenizer that cannot encode the text, or returns an id outside of its own vocabulary.

    Memory:
        At most 128 MiB on the host. More than 2^24 ids are in a memory-mapped file.
    """
    documents = name_documents(documents)
    names, texts = [*documents], [*documents.values()]
    largest, num_tokens = -1, 0
    with tempfile.SpooledTemporaryFile(max_size=np.dtype(np.int32).itemsize * _MOST_IN_MEMORY) as file:

        def add(ids: np.ndarray) -> None:
            nonlocal largest, num_tokens
            if digest is not None:
                digest.update(ids)
            largest = max(largest, int(ids.max(initial=-1)))
            num_tokens += len(ids)
            file.write(ids.tobytes())

        for start in range(0, len(documents), _BATCH_TEXTS):
            stop = min(start + _BATCH_TEXTS, len(documents))
            short = iter(encode(tokenizer, [text for text in texts[start:stop] if isinstance(text, str)]))
            for name, text in zip(names[start:stop], texts[start:stop], strict=True):
                last: list[int] = []
                for encoding in [next(short)] if isinstance(text, str) else _encode_file(tokenizer, text):
                    ids = np.asarray(encoding.ids, np.int32)
                    if vocab_size is not None and np.max(ids, initial=0) >= vocab_size:
                        check_ids(ids, tokenizer, vocab_size, _locate_token(name, text, ids, tokenizer, vocab_size))
                    add(ids)
                    last = ids[-1:].tolist() or last
                if end_token is not None and last != [end_token]:
                    add(np.asarray([end_token], np.int32))
            if on_progress is not None:
                on_progress(stop, len(documents))
        refuse_unknown_id(largest, largest_id(tokenizer, end_token))
        file.flush()
        if num_tokens > _MOST_IN_MEMORY:
            return np.memmap(file, np.int32, mode="r")
        tokens = np.empty(num_tokens, np.int32)
        file.seek(0)
        file.readinto(tokens.data)
        return tokens


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
    return DataError(f"{path}: not UTF-8 text", expected=_formats.SUPPORTED, hint=hint)


def _locate_token(name: str, text: str | Path, ids: np.ndarray, tokenizer: Tokenizer, vocab_size: int) -> str:
    """Return the document's name, with the line of the first token without an embedding if it is found in the text."""
    token = tokenizer.id_to_token(int(ids[ids >= vocab_size][0]))
    position = text.find(token) if token and isinstance(text, str) else -1
    if position < 0 or isinstance(text, Path) or "\n" not in text:
        return name
    return f"{name}, line {text.count(chr(10), 0, position) + 1}"


def _tokens_and_labels(windows: np.ndarray) -> dict[str, np.ndarray]:
    return {"tokens": np.ascontiguousarray(windows[..., :-1]), "labels": np.ascontiguousarray(windows[..., 1:])}


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
