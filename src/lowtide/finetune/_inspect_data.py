"""Dry run on data: count the records and tokens that a run would read, learn, cut and skip."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from .. import models
from ._auxiliary_files import tokenizer_folder
from ._config import FinetuneConfig
from ._data import is_read_as_records, notes_on
from ._end_tokens import load_end_tokens
from ._inspect import Inspection
from ._job import directory_of
from ._recipe import with_seq_len
from ._text import named_documents

_BATCH_RECORDS = 256
"""Number of records that are tokenised together."""


def inspect_data(config: FinetuneConfig) -> Inspection:
    """Read and tokenise all data of a run, and report how the run would use it.

    Args:
        config: the settings; `data` is required. `model`, `tokenizer`, `chat_template`, `columns`, `loss_on` and
            `seq_len` have the same effect as in a run.

    Returns:
        Counts of records, tokens, columns, duplicates, empty turns, and records longer than a row.

    Raises:
        DataError: for data that a run would refuse.
        ModelFileError: for an unusable tokenizer or chat template.

    Memory:
        Holds one batch of records at a time; plain text as a whole.
    """
    from .data import Example, load_chat_template, parse_columns, read_records
    from .data._encode import Encoder

    assert config.data is not None
    directory = directory_of(config)
    model_config, folder = models.load_config(directory), tokenizer_folder(directory, config.tokenizer)
    tokenizer, template = models.load_tokenizer(folder), load_chat_template(folder, config.chat_template)
    ends = load_end_tokens(
        model_config, tokenizer, directory, tokenizer_dir=config.tokenizer, chat_template=config.chat_template
    )
    columns = parse_columns(config.columns)
    examples: Iterator[Example | None]
    is_plain = not is_read_as_records(config.data, config.columns)
    if not is_plain:
        examples = read_records(Path(config.data), columns)
    else:
        texts = named_documents(config.data)
        examples = (Example(kind="text", where=location, text=text) for location, text in texts.items())
    encoder = Encoder(
        tokenizer, template, end_token=ends.text, loss_on=config.loss_on, vocab_size=model_config.vocab_size
    )
    counts, unread, digests = Counter[str](), Counter[str](), set[bytes]()
    kinds, lengths, starts, num_learned = Counter[str](), list[int](), list[float](), 0
    try:
        while batch := list(islice(examples, _BATCH_RECORDS)):
            records = [example for example in batch if example is not None]
            counts["blank"] += len(batch) - len(records)
            for example in records:
                kinds[example.kind] += 1
                unread.update([*example.unread, *encoder.unread_in(example)])
                counts["empty turns"] += sum(_is_empty(message) for message in example.messages)
                content = (example.text, example.prompt, example.more, example.messages, example.tools)
                digest = hashlib.sha256(repr(content).encode("utf-8", "surrogatepass")).digest()
                counts["duplicates"] += digest in digests
                digests.add(digest)
            for ids, mask in encoder.encode(records) if records else ():
                lengths.append(len(ids))
                num_learned += int(mask.sum())
                starts.append(int(np.argmax(mask)) if mask.any() else np.inf)  # first learned token
    finally:
        encoder.close()
    facts: dict[str, Any] = {
        "records": dict(kinds),
        "tokens": {"total": sum(lengths), "learned": num_learned},
        **{name: counts[name] for name in ("blank", "duplicates", "empty turns")},
        "columns not read": dict(unread) or None,
        "chat template": template.where if template is not None and {"chat", "alpaca"} & kinds.keys() else None,
    }
    notes = list(notes_on(config.data, config.columns))
    if counts["duplicates"]:
        notes.append(f"{counts['duplicates']:,} records are duplicates, and are learned again")
    if counts["empty turns"]:
        notes.append(f"turns without text: {counts['empty turns']:,}")
    problems: list[str] = []
    if lengths and not is_plain:  # windows over plain text lose no tokens
        length_facts, length_notes = _length_facts(
            config, model_config.max_position_embeddings, np.asarray(lengths), np.asarray(starts)
        )
        facts |= length_facts
        notes += length_notes
        if facts["without a token to learn"] == len(lengths):
            problems.append("no record has a token to learn within a row, so a run refuses this data")
    if not lengths:
        problems.append("no record has text")
    results: dict[str, Any] = {"facts": facts, "problems": tuple(problems), "notes": tuple(notes)}
    return Inspection(kind="data", path=str(config.data), **results)


def _length_facts(
    config: FinetuneConfig, context: int, lengths: np.ndarray[Any, Any], starts: np.ndarray[Any, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return statistics of record lengths and of lost tokens, and a note if more than 2 % are lost."""
    seq_len = with_seq_len(config, context, int(lengths.max())).seq_len
    total, long_lengths = int(lengths.sum()), lengths[lengths > seq_len]
    num_lost = int((long_lengths - seq_len).sum())
    percentiles = {"median": 50, "95th percentile": 95, "longest": 100}
    facts = {
        "tokens of a record": {name: int(np.percentile(lengths, share)) for name, share in percentiles.items()},
        "longer than a row": {f"of {seq_len:,} tokens": len(long_lengths), "tokens lost": num_lost},
        "without a token to learn": int((starts >= seq_len).sum()),
    }
    note = (
        f"{num_lost:,} of {total:,} tokens, in {len(long_lengths):,} records, are lost at --seq-len {seq_len}; raise it"
    )
    return facts, [note] if num_lost > 0.02 * total else []


def _is_empty(message: dict[str, Any]) -> bool:
    return not (message.get("content") or "").strip() and not message.get("tool_calls")
