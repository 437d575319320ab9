"""Training data of a run: plain text in windows, or records packed into rows, depending on the configuration.

`_text` makes windows and `_pack` packs records; this module selects one of them and collects notes for the user.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ...core import ConfigError, DataError, shown
from .._config import FinetuneConfig, flag_of, with_seq_len
from ._chat import ChatTemplate, load_chat_template
from ._formats import RECORD_FIELDS, files_read_as_text, first_fields, is_binary, read_head
from ._pack import record_data
from ._read import files_below, folder_of_records, is_records
from ._text import TextData, is_large_text, named_documents, text_data, texts_of_records

_MOST_NAMES = 6
_MOST_LOST = 0.02
"""Share of the tokens that may be cut off without a note."""
_MOST_BATCH_TOKENS = 2**28
"""Largest batch in tokens. With four int32 columns it takes 4 GiB on the host before anything is compiled.

More is probably a typing error, and would exhaust the machine's memory.
"""


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
    """Read, tokenise and pack the data of a run into batches; for records with a report.

    `directory` is the tokenizer's folder, for its chat template. `context` is the model's number of positions, used if
    no sequence length is set. `day` is the date that chat templates may write; None: today. The host holds all tokens
    of plain text; for records see `lowtide.finetune.data.record_data`.
    """
    if config.batch_size * config.seq_len > _MOST_BATCH_TOKENS:
        raise ConfigError(
            "seq_len: a batch is too large",
            expected=f"at most {_MOST_BATCH_TOKENS:,} tokens in a batch",
            got=f"{config.batch_size} × {config.seq_len:,}",
            hint="lower --seq-len or --batch-size",
        )
    options: dict[str, Any] = {
        "seq_len": config.seq_len or (lambda longest: with_seq_len(config, context, longest).seq_len),
        "batch_size": config.batch_size,
        "seed": config.seed,
        "end_token": end_token,
        "vocab_size": vocab_size,
        "held_out_fraction": config.held_out_fraction,
        "on_progress": on_progress,
    }
    is_plain = not is_read_as_records(config.data, config.columns)
    if config.packing == "contiguous" or (config.packing == "auto" and is_plain):
        _refuse_record_settings(config, is_plain=is_plain)
        documents = _texts(config.data, config.columns)
        eval_documents = None if config.eval_data is None else _texts(config.eval_data, config.columns)
        return _with_notes(text_data(documents, tokenizer, eval_documents=eval_documents, **options), config)
    template = load_chat_template(directory, config.chat_template)
    records = record_data(
        named_documents(config.data) if is_plain else Path(config.data or ""),
        tokenizer,
        None if template is None else dataclasses.replace(template, day=day),
        eval_source=_source(config.eval_data, config.columns),
        columns=config.columns,
        loss_on=config.loss_on,
        packing="best-fit" if config.packing == "auto" else config.packing,
        too_long=config.too_long,
        **options,
    )
    data = TextData(
        train=records.train,
        held_out=records.held_out,
        num_documents=records.report.num_documents,
        num_train_tokens=records.num_train_tokens,
        num_held_out_tokens=records.num_held_out_tokens,
        num_train_sequences=records.report.num_rows,
        digest=records.digest,
        seq_len=records.seq_len,
        report=records.report,
    )
    return _with_notes(data, config, template)


def _with_notes(data: TextData, config: FinetuneConfig, template: ChatTemplate | None = None) -> TextData:
    """Add notes on facts that a user may not expect."""
    notes = [*notes_on(config.data, config.columns), *notes_on(config.eval_data, config.columns, is_evaluation=True)]
    num_rows, batch_size = data.num_train_sequences, config.batch_size
    if num_rows is not None and num_rows < batch_size:
        notes.append(f"a batch repeats rows: --batch-size is {batch_size:,}, with {num_rows:,} rows to train on")
    num_lost = 0 if data.report is None else data.report.num_lost_tokens + data.report.num_held_out_lost_tokens
    if data.report is not None and num_lost > _MOST_LOST * data.report.num_tokens:
        share = f"{num_lost:,} of {data.report.num_tokens:,} tokens ({num_lost / data.report.num_tokens:.0%})"
        notes.insert(0, f"{share} are lost: records are longer than {data.seq_len:,} tokens; raise --seq-len")
    if template is not None and data.report is not None and data.report.kind == "prompt":
        notes.append(
            f'prompts are read as plain text, without the template {template.where}; records with "messages" use it'
        )
    return dataclasses.replace(data, notes=tuple(notes))


def is_read_as_records(data: str | None, columns: tuple[str, ...] | None) -> bool:
    """Return whether data is read as records; JSON lines with ``text`` and no fields of another kind are plain text.

    Args:
        data: the path in the configuration.
        columns: the columns in the configuration; if they are set, the data is records.
    """
    if not data:
        return False
    path = Path(data)
    if not is_records(path):
        return False
    if path.is_dir() or path.suffix.lower() == ".parquet":
        return True
    head = read_head(path)
    if is_binary(head):
        return False  # the text reader raises an error that names the format
    if path.suffix != ".jsonl" or columns:
        return True
    fields = set(first_fields(head, ".jsonl"))
    return "text" not in fields or any(kind <= fields for kind in RECORD_FIELDS)


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
        if tables := files_read_as_text(files_below(folder)):
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
    columns = config.columns if is_plain else None
    settings = {"chat_template": config.chat_template, "columns": columns}
    settings |= {"too_long": config.too_long != "cut", "loss_on": config.loss_on != "completion"}
    if ignored := [name for name, value in settings.items() if value]:
        raise ConfigError(
            f"{ignored[0]} has no effect on text in contiguous windows",
            expected="records, or --packing best-fit or none",
            got=f"{ignored[0]} = {getattr(config, ignored[0])!r}",
            hint=f"leave {flag_of(ignored[0])} out, or check that --data names the right file",
        )


def _source(data: str | None, columns: tuple[str, ...] | None) -> Path | dict[str, str] | None:
    if data is None:
        return None
    return Path(data) if is_read_as_records(data, columns) else named_documents(data)


def _texts(data: str | None, columns: tuple[str, ...] | None) -> Mapping[str, str | Path]:
    """Read documents for contiguous windows; a large text file is returned as a path, and records need plain text."""
    if not is_read_as_records(data, columns):
        return {data: Path(data)} if data and is_large_text(data) else named_documents(data)
    texts = texts_of_records(Path(data or ""), columns)
    if not texts:
        raise DataError(f"{data}: the data has no text", expected="at least one record with text", hint="check --data")
    return texts
