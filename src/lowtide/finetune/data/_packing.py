"""Best-fit packing of documents into rows: Fewer Truncations Improve Language Modeling (arXiv:2404.10830).

Each document, longest first, goes into the row with the least free space that holds it. The distinct free spaces are
kept sorted, so a document costs one bisection: O(n log T) comparisons for rows of T tokens, in addition to sorting the
lengths.
"""

from __future__ import annotations

import bisect
import dataclasses
from typing import Any

import numpy as np


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
        """Count the rows."""
        return len(self.offsets) - 1


def cut_documents(lengths: np.ndarray, documents: np.ndarray, seq_len: int, too_long: str) -> Pieces:
    """Cut, split or drop those of `documents` (indices into `lengths`) that are longer than a row of `seq_len` tokens.

    `too_long` is ``cut`` (keep the first `seq_len` tokens), ``split`` (keep all tokens, in several pieces) or ``drop``.
    """
    document_lengths = lengths[documents]
    is_long = document_lengths > seq_len
    num_long = int(is_long.sum())
    if too_long == "split":
        counts = np.maximum(-(-document_lengths // seq_len), 1)
        piece_documents = np.repeat(documents, counts)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        start = (np.arange(len(piece_documents)) - first) * seq_len
        return Pieces(
            piece_documents, start, np.minimum(np.repeat(document_lengths, counts) - start, seq_len), num_long, 0, 0
        )
    if too_long == "drop":
        short_documents = documents[~is_long]
        num_lost = int(document_lengths[is_long].sum())
        return Pieces(short_documents, np.zeros_like(short_documents), lengths[short_documents], 0, num_lost, num_long)
    num_lost = int((document_lengths - np.minimum(document_lengths, seq_len)).sum())
    return Pieces(documents, np.zeros_like(documents), np.minimum(document_lengths, seq_len), num_long, num_lost, 0)


def best_fit(lengths: np.ndarray, seq_len: int) -> Rows:
    """Pack pieces into rows, best-fit decreasing.

    Args:
        lengths: tokens of each piece, from 1 to `seq_len`.
        seq_len: tokens of a row.

    Returns:
        The rows; each piece is in exactly one.

    Memory:
        About 40 bytes a piece on the host.
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


def one_row_each(count: int) -> Rows:
    """Put every piece into a separate row."""
    return Rows(np.arange(count), np.arange(count + 1))
