"""Make batches of tokenised records: hold out documents for evaluation, and pack the documents into rows.

Dimensions: B rows of a batch, T tokens of a row. Grain shuffles, repeats and batches training rows, as for plain text.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from ...core import DataError
from ._chat import ChatTemplate
from ._encode import Source, Store, open_store
from ._normalize import parse_columns

IGNORE = -100
"""Label of a token without a loss."""
_NUM_EXAMPLES = 3
_MOST_LOST_PAIRS = 0.2
"""Largest share of preferences that may lose an answer because rows are too short."""
_EXAMPLE_TOKENS = 400


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataReport:
    """Counts of used, cut and dropped records, printed before training."""

    kind: str
    """One of ``text``, ``prompt``, ``alpaca`` and ``chat``."""
    template: str | None
    """The file of the chat template; None if no template was used."""
    num_documents: int
    """Records of the source that are not blank, including held-out ones."""
    num_blank: int
    """Blank records of the source, which were skipped."""
    num_tokens: int
    """Tokens of all documents that are not blank."""
    num_cut: int
    """Documents longer than a row that were cut or split."""
    num_dropped: int
    """Documents longer than a row that were dropped."""
    num_lost_tokens: int
    """Tokens that were cut off or dropped."""
    num_without_loss: int
    """Pieces of documents that were skipped because, after cutting, they have no token to learn."""
    num_rows: int
    """Training rows."""
    utilisation: float
    """Fraction of the tokens in training rows that are not padding."""
    loss_share: float
    """Fraction of the tokens that are learned; padding does not count as tokens."""
    num_held_out_left_out: int
    """Evaluation documents that were dropped as too long, or have no token to learn."""
    num_held_out_lost_tokens: int
    """Evaluation tokens that were cut off or dropped."""
    examples: list[list[tuple[str, bool]]]
    """Beginnings of the first documents, each as runs of text with a flag for learned text."""
    unread: tuple[str, ...] = ()
    """Columns of the records that are not read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextData:
    """Tokenised text or records, ready for `Trainer`."""

    train: Any
    """A `grain.MapDataset` of batches by step: ``tokens`` and ``labels``, int32 [B, T]; records add ``segment_ids`` and
    ``positions``, and some objectives ``targets`` or the columns of a reference."""
    held_out: Sequence[dict[str, np.ndarray]]
    """Evaluation batches; padding rows of the last batch have all labels ignored."""
    num_documents: int
    """Documents read."""
    num_train_tokens: int
    """Tokens in training windows or rows, without padding."""
    num_held_out_tokens: int
    """Tokens in held-out windows or rows, without padding."""
    num_train_sequences: int
    """Sequences of an epoch."""
    digest: str
    """SHA-256 by which a resumed run checks that its data is unchanged: of all tokens in order; for records, also of
    the masks of learned tokens and the packing settings."""
    seq_len: int
    """Tokens in a sequence, T."""
    report: DataReport | None = None
    """Counts of records that were read, packed, cut and dropped; None for plain text."""
    notes: tuple[str, ...] = ()
    """Facts that a user may not expect, such as files that were not read, or were read in an unexpected way."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordData(TextData):
    """Batches of packed records, as `lowtide.finetune.TextData`."""

    report: DataReport = dataclasses.field()
    """Counts of used, cut and dropped records."""


def record_data(
    source: Source,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    *,
    seq_len: int,
    batch_size: int,
    seed: int,
    eval_source: Source | None = None,
    columns: tuple[str, ...] | None = None,
    end_token: int | None = None,
    held_out_fraction: float = 0.1,
    loss_on: str = "completion",
    packing: str = "best-fit",
    too_long: str = "cut",
    vocab_size: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> RecordData:
    """Tokenise, split, pack and shuffle records, and return batches and a report.

    Args:
        source: a path for `read_records`, a list of texts, or a dict from names to texts. Errors contain these names.
        tokenizer: the model's tokenizer.
        template: the model's chat template, or None.
        seq_len: tokens in a row, T.
        batch_size: rows in a batch, B.
        seed: seed of the split and of the order of rows.
        eval_source: a separate evaluation set; None: a fraction of the documents is held out.
        columns: words ``field=column``, such as ``("messages=chat",)``, which name the column of each field.
        end_token: id of a token appended to text and completions, but not to chats; None: no token is appended.
        held_out_fraction: fraction of the documents to hold out, at least one document.
        loss_on: ``completion``: only completions, outputs and turns of the assistant are learned; ``all``: all tokens.
            Documents of plain text are always learned as a whole.
        packing: ``best-fit``, or ``none`` for one document a row.
        too_long: what happens to documents longer than a row: ``cut``, ``split`` or ``drop``, as in `cut_documents`.
        vocab_size: number of the model's embeddings; tokens beyond are refused. None: nothing is refused.
        on_progress: called with two equal arguments, the number of finished records, since the total is unknown.

    Raises:
        DataError: for unusable data, tokens without an embedding, and if no training or evaluation document is left.
        ModelFileError: for an unusable tokenizer or template.
        ConfigError: for unusable `columns`.
        OutputError: when the cache folder cannot be written.

    Memory:
        The host holds about 100 bytes a document, and the rows of the batches that Grain prefetches. The tokens are in
        memory-mapped files of 5 bytes a token, whose pages the system may evict.
    """
    options: Any = {"end_token": end_token, "loss_on": loss_on, "vocab_size": vocab_size, "on_progress": on_progress}
    options["columns"] = parse_columns(columns)
    store = open_store(source, tokenizer, template, **options)
    eval_store = store if eval_source is None else open_store(eval_source, tokenizer, template, **options)
    return pack_stores(
        store,
        eval_store,
        tokenizer,
        template,
        seq_len=seq_len,
        batch_size=batch_size,
        seed=seed,
        held_out_fraction=held_out_fraction,
        packing=packing,
        too_long=too_long,
    )


def pack_stores(
    store: Store,
    eval_store: Store,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    *,
    seq_len: int,
    batch_size: int,
    seed: int,
    held_out_fraction: float,
    packing: str,
    too_long: str,
) -> RecordData:
    """Do what `record_data` does with tokenised records; with `eval_store` equal to `store`, hold out a fraction."""
    import grain  # takes a second; `import lowtide` does not need it

    if eval_store.group != store.group:
        problem = "training and evaluation data are not both preferences"
        raise DataError(problem, hint="give pairs of chosen and rejected answers for both, or for none")
    train, held_out = _split_documents(store, eval_store, held_out_fraction, seed)
    pack = partial(_pack, seq_len=seq_len, packing=packing, too_long=too_long)
    train, rows, counts = pack(store, train, "data: ")
    eval_pieces, eval_rows, eval_counts = pack(eval_store, held_out, "held-out data: ")
    row_source = RowSource(store, train, rows, seq_len)
    dataset = grain.MapDataset.source(row_source).seed(seed).shuffle().repeat().batch(batch_size)  # pyright: ignore
    settings = f"{store.digest} {eval_store.digest} {seq_len} {seed} {held_out_fraction} {packing} {too_long}"
    counts["num_held_out_left_out"] = eval_counts["num_dropped"] + eval_counts["num_without_loss"]
    counts["num_held_out_lost_tokens"] = eval_counts["num_lost_tokens"]
    counts["examples"] = [_example(store, tokenizer, document) for document in train.document[:_NUM_EXAMPLES]]
    return RecordData(
        train=dataset,
        held_out=EvaluationBatches(RowSource(eval_store, eval_pieces, eval_rows, seq_len), batch_size),
        num_documents=len(store.lengths),
        num_train_sequences=len(rows),
        num_train_tokens=int(train.length.sum()),
        num_held_out_tokens=int(eval_pieces.length.sum()),
        digest=hashlib.sha256(settings.encode()).hexdigest(),
        seq_len=seq_len,
        report=_report(store, template, train, rows, counts, seq_len),
    )


def evaluation_data(
    source: Source,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    *,
    seq_len: int,
    batch_size: int,
    columns: tuple[str, ...] | None = None,
    end_token: int | None = None,
    loss_on: str = "completion",
    vocab_size: int | None = None,
) -> tuple[Sequence[dict[str, np.ndarray]], DataReport]:
    """Pack all records for evaluation; documents longer than a row are split.

    Args:
        source: as in `record_data`.
        tokenizer: the model's tokenizer.
        template: the model's chat template, or None.
        seq_len: tokens in a row, T.
        batch_size: rows in a batch, B.
        columns: ``field=column`` words.
        end_token: token appended to text and completions.
        loss_on: ``completion`` or ``all``.
        vocab_size: as in `record_data`.

    Returns:
        The batches, and a report without examples.

    Raises:
        DataError: for unusable data, and if no document is left to evaluate.
        ModelFileError, ConfigError, OutputError: as in `record_data`.

    Memory:
        As in `record_data`.
    """
    options: Any = {"end_token": end_token, "loss_on": loss_on, "vocab_size": vocab_size}
    store = open_store(source, tokenizer, template, columns=parse_columns(columns), **options)
    if store.group > 1:
        hint = 'evaluate on one answer: columns=("prompt=prompt", "completion=chosen")'
        raise DataError("data: preferences are only evaluated in a run, with --eval-data", hint=hint)
    documents = np.arange(len(store.lengths))
    pieces, rows, counts = _pack(store, documents, "data: ", seq_len=seq_len, packing="best-fit", too_long="split")
    counts |= {"num_held_out_left_out": 0, "num_held_out_lost_tokens": 0, "examples": []}
    report = _report(store, template, pieces, rows, counts, seq_len)
    return EvaluationBatches(RowSource(store, pieces, rows, seq_len), batch_size), report


class RowSource:
    """Rows by number, built at access from memory-mapped tokens; the data source for Grain.

    Leaves are int32 [T]. ``labels[t]`` is the token after ``tokens[t]`` if that token is learned and in the same
    document, else -100. ``segment_ids`` numbers the documents of a row from 1, and is 0 in padding. ``targets``, if the
    store has them, is the target of the record at learned tokens, else -1.
    """

    def __init__(self, store: Store, pieces: Pieces, rows: Rows, seq_len: int) -> None:
        self._store, self._pieces, self._rows, self._seq_len = store, pieces, rows, seq_len

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: Any) -> dict[str, np.ndarray]:
        number, pieces = int(number), self._pieces
        row = {name: np.zeros(self._seq_len, np.int32) for name in ("tokens", "labels", "segment_ids", "positions")}
        row["labels"][:] = IGNORE
        if self._store.has_targets:
            row["targets"] = np.full(self._seq_len, -1, np.int32)
        position = 0
        members = self._rows.order[self._rows.offsets[number] : self._rows.offsets[number + 1]]
        for segment, piece in enumerate(members, 1):
            document, start, length = pieces.document[piece], pieces.start[piece], int(pieces.length[piece])
            first = self._store.offsets[document] + start
            tokens = self._store.tokens[first : first + length]
            learned = self._store.learned[first : first + length]
            span = slice(position, position + length)
            row["tokens"][span] = tokens
            # The last token keeps the label IGNORE, since the next token belongs to another document.
            row["labels"][position : position + length - 1] = np.where(learned[1:], tokens[1:], IGNORE)
            row["segment_ids"][span] = segment
            if self._store.has_targets:
                row["targets"][span] = learned.astype(np.int32) - 1
            row["positions"][span] = np.arange(length)
            position += length
        return row


class EvaluationBatches(Sequence[dict[str, np.ndarray]]):
    """Batches of rows in order, built at access; the last batch is padded with rows whose labels are all ignored."""

    def __init__(self, rows: Any, batch_size: int) -> None:
        self._rows, self._batch_size = rows, batch_size

    def __len__(self) -> int:
        return -(-len(self._rows) // self._batch_size)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        start = range(len(self))[number] * self._batch_size  # raises the IndexError that ends an iteration
        rows = [self._rows[i] for i in range(start, min(start + self._batch_size, len(self._rows)))]
        padding = {name: np.full_like(leaf, IGNORE if name == "labels" else 0) for name, leaf in rows[0].items()}
        rows += [padding] * (self._batch_size - len(rows))
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


@dataclasses.dataclass(frozen=True)
class Pieces:
    """Parts of documents that fit into a row."""

    document: np.ndarray
    """Index of the document, int64 [N]."""
    start: np.ndarray
    """First token within the document, int64 [N]."""
    length: np.ndarray
    """Number of tokens, int64 [N]."""
    num_cut: int
    """Number of documents that were cut or split."""
    num_cut_tokens: int
    """Number of tokens that were cut off or dropped."""
    num_dropped: int
    """Number of documents that were dropped for their length."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """Assignment of pieces to rows."""

    order: np.ndarray
    """Indices of the pieces, row after row, int64 [N]."""
    offsets: np.ndarray
    """Index in `order` of the first piece of each row, then N, int64 [R + 1]."""

    def __len__(self) -> int:
        return len(self.offsets) - 1


def cut_documents(lengths: np.ndarray, documents: np.ndarray, seq_len: int, too_long: str) -> Pieces:
    """Cut (keep the first `seq_len` tokens), split or drop `documents`, indices into `lengths`, longer than a row."""
    document_lengths = lengths[documents]
    is_long = document_lengths > seq_len
    num_long = int(is_long.sum())
    if too_long == "split":
        counts = np.maximum(-(-document_lengths // seq_len), 1)
        piece_documents = np.repeat(documents, counts)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        start = (np.arange(len(piece_documents)) - first) * seq_len
        piece_lengths = np.minimum(np.repeat(document_lengths, counts) - start, seq_len)
        return Pieces(piece_documents, start, piece_lengths, num_long, 0, 0)
    if too_long == "drop":
        short_documents = documents[~is_long]
        num_lost = int(document_lengths[is_long].sum())
        return Pieces(short_documents, np.zeros_like(short_documents), lengths[short_documents], 0, num_lost, num_long)
    num_lost = int((document_lengths - np.minimum(document_lengths, seq_len)).sum())
    return Pieces(documents, np.zeros_like(documents), np.minimum(document_lengths, seq_len), num_long, num_lost, 0)


def best_fit(lengths: np.ndarray, seq_len: int) -> Rows:
    """Pack pieces into rows, best-fit decreasing.

    The algorithm is that of Ding et al., "Fewer Truncations Improve Language Modeling" (arXiv:2404.10830). Each piece,
    longest first, goes into the fullest row that has space for it. The distinct free spaces are kept sorted, so a piece
    costs one bisection: O(n log T) comparisons for rows of T tokens, in addition to sorting the lengths. The host holds
    about 40 bytes a piece. `lengths` are from 1 to `seq_len`.
    """
    row_of = np.empty(len(lengths), np.int64)
    rows_by_space: dict[int, list[int]] = {}
    spaces: list[int] = []  # free spaces of partly filled rows, sorted; the non-empty keys of `rows_by_space`
    num_rows = 0
    decreasing: Any = np.argsort(-lengths, kind="stable")
    for piece, length in zip(decreasing.tolist(), lengths[decreasing].tolist(), strict=True):
        index = bisect.bisect_left(spaces, length)  # the least free space that is at least `length`
        if index == len(spaces):
            row, space = num_rows, seq_len
            num_rows += 1
        else:
            space = spaces[index]
            row = rows_by_space[space].pop()
            if not rows_by_space[space]:
                spaces.pop(index)
        row_of[piece] = row
        space_left = space - length
        if space_left:
            rows = rows_by_space.setdefault(space_left, [])
            if not rows:
                bisect.insort(spaces, space_left)
            rows.append(row)
    counts = np.bincount(row_of, minlength=num_rows)
    return Rows(np.argsort(row_of, kind="stable"), np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))


def _pack(
    store: Store, documents: np.ndarray, source: str, *, seq_len: int, packing: str, too_long: str
) -> tuple[Pieces, Rows, dict[str, Any]]:
    """Cut documents, drop pieces without a learned token, and pack the others; return pieces, rows and some counts."""
    pieces = cut_documents(store.lengths, documents, seq_len // store.group, too_long)
    # Drop pieces without a learned token before packing: they would fill rows and add nothing to the loss.
    num_learned = _count_learned(store, pieces)
    useful = np.flatnonzero(num_learned)
    if store.group > 1:  # a preference needs both of its answers
        records, counts = np.unique(pieces.document[useful] // store.group, return_counts=True)
        complete = records[counts == store.group]
        useful = useful[np.isin(pieces.document[useful] // store.group, complete)]
        _refuse_lost_answers(store, documents, len(complete), source, seq_len)
    if not len(useful):
        _refuse_without_answer(store, documents, source)
        got = f"{len(documents)} documents, {pieces.num_cut} cut and {pieces.num_dropped} dropped as too long"
        hint = f"raise --seq-len above {seq_len}, give more data, or learn the prompts, too: --loss-on all"
        raise DataError(f"{source}no document with a token to learn is left", got=got, hint=hint)
    counts = {
        "num_cut": pieces.num_cut,
        "num_dropped": pieces.num_dropped,
        "num_lost_tokens": pieces.num_cut_tokens,
        "num_without_loss": len(pieces.document) - len(useful),
        "loss_share": int(num_learned.sum()) / int(pieces.length[useful].sum()),
    }
    parts = {name: getattr(pieces, name)[useful] for name in ("document", "start", "length")}
    pieces = dataclasses.replace(pieces, **parts)
    group = store.group
    lengths = pieces.length.reshape(-1, group).sum(1)
    if packing == "none":
        rows = Rows(np.arange(len(lengths)), np.arange(len(lengths) + 1))
    else:
        rows = best_fit(lengths, seq_len)
    # The documents of a record stay together, so that a preference is in one row.
    order = (rows.order[:, None] * group + np.arange(group)).ravel()
    return pieces, Rows(order, rows.offsets * group), counts


def _refuse_lost_answers(store: Store, documents: np.ndarray, num_complete: int, source: str, seq_len: int) -> None:
    """Raise DataError if too many preferences lose an answer because they are cut or dropped."""
    num_records = len(documents) // store.group
    num_lost = num_records - num_complete
    if num_lost > _MOST_LOST_PAIRS * num_records:
        got = f"{num_lost:,} of {num_records:,} pairs have an answer without tokens after cutting"
        hint = f"raise --seq-len above {seq_len:,}; each answer with its prompt gets half of a row"
        raise DataError(f"{source}too many preferences lose an answer", got=got, hint=hint)


def _refuse_without_answer(store: Store, documents: np.ndarray, source: str) -> None:
    """Raise DataError if no document has a learned token, even without cutting."""
    if _count_learned(store, cut_documents(store.lengths, documents, int(store.lengths.max()), "cut")).any():
        return
    expectations = {
        "chat": 'turns of the role assistant with content, without "weight": 0, and inside the marks of the template',
        "text": "documents of more than one token",
    }
    expected = expectations.get(store.kind, "completions or outputs that are not empty")
    got = f"{len(documents):,} documents of the kind {store.kind}, none with a token to learn"
    hint = "check the roles of the records and the template's marks, or learn all tokens with --loss-on all"
    raise DataError(f"{source}there is no answer to learn", expected=expected, got=got, hint=hint)


def _count_learned(store: Store, pieces: Pieces) -> np.ndarray:
    """Count the learned tokens of each piece; the first one is never a label, so it counts only without labels."""
    skipped = 0 if store.kind == "pair" or (store.has_targets and store.group == 1) else 1
    first = store.offsets[pieces.document] + pieces.start
    counts = np.zeros(len(first), np.int64)
    for i, (start, length) in enumerate(zip(first.tolist(), pieces.length.tolist(), strict=True)):
        counts[i] = np.count_nonzero(store.learned[start + skipped : start + length])
    return counts


def _split_documents(store: Store, eval_store: Store, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the training documents and of the evaluation documents."""
    group = store.group
    count = len(store.lengths) // group
    order = np.random.default_rng(seed).permutation(count)

    def documents_of(records: np.ndarray) -> np.ndarray:
        return (records[:, None] * group + np.arange(group)).ravel()

    if eval_store is not store:
        return documents_of(order), np.arange(len(eval_store.lengths))
    if count < 2:
        hint = "give more data, or a separate file for evaluation: --eval-data"
        raise DataError("the data has one document, too few to train on one and hold out another", hint=hint)
    num_held_out = min(count - 1, max(1, round(count * fraction)))
    return documents_of(order[:-num_held_out]), documents_of(order[-num_held_out:])


def _report(
    store: Store, template: ChatTemplate | None, pieces: Pieces, rows: Rows, counts: dict[str, Any], seq_len: int
) -> DataReport:
    return DataReport(
        kind=store.kind,
        template=template.where if template is not None and store.kind in ("chat", "alpaca") else None,
        num_documents=len(store.lengths),
        num_blank=store.num_blank,
        num_tokens=len(store.tokens),
        unread=store.unread,
        num_rows=len(rows),
        utilisation=int(pieces.length.sum()) / (len(rows) * seq_len),
        **counts,
    )


def _example(store: Store, tokenizer: Tokenizer, document: int) -> list[tuple[str, bool]]:
    """Decode the beginning of a document, in runs of learned and unlearned tokens."""
    start = int(store.offsets[document])
    end = min(int(store.offsets[document + 1]), start + _EXAMPLE_TOKENS)
    tokens, learned = store.tokens[start:end], store.learned[start:end].astype(bool)
    bounds = [0, *(np.flatnonzero(learned[1:] != learned[:-1]) + 1).tolist(), end - start]
    return [
        (tokenizer.decode(tokens[a:b].tolist(), skip_special_tokens=False), bool(learned[a]))
        for a, b in itertools.pairwise(bounds)
        if b > a
    ]
