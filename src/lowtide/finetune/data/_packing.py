"""Best-fit packing of documents into rows: Fewer Truncations Improve Language Modeling (arXiv:2404.10830).

Longest first, each document goes into the row with the least room that it fits in. Rooms that some row has are kept
in order, so a document costs one bisection: O(n log T) comparisons for rows of T tokens, beside sorting the lengths.
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
    """Which document, int64 [N]."""
    start: np.ndarray
    """The first token, within the document, int64 [N]."""
    length: np.ndarray
    """Tokens, int64 [N]."""
    num_cut: int
    """Documents that were cut."""
    num_cut_tokens: int
    """Tokens that were cut off or dropped."""
    num_dropped: int
    """Documents that were left out for their length."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """Which pieces are in which row."""

    order: np.ndarray
    """Pieces, row after row, int64 [N]."""
    offsets: np.ndarray
    """Where each row begins in `order`, and at the end N, int64 [R + 1]."""

    def __len__(self) -> int:
        """Count the rows."""
        return len(self.offsets) - 1


def cut(lengths: np.ndarray, documents: np.ndarray, seq_len: int, too_long: str) -> Pieces:
    """Make documents fit into rows.

    Args:
        lengths: tokens of every document.
        documents: those that are wanted.
        seq_len: tokens of a row, T.
        too_long: what becomes of a longer one: ``cut`` keeps its first T tokens, ``split`` all of it in parts, ``drop``
            nothing.
    """
    wanted = lengths[documents]
    is_long = wanted > seq_len
    long = int(is_long.sum())
    if too_long == "split":
        counts = np.maximum(-(-wanted // seq_len), 1)
        whole = np.repeat(documents, counts)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        start = (np.arange(len(whole)) - first) * seq_len
        return Pieces(whole, start, np.minimum(np.repeat(wanted, counts) - start, seq_len), long, 0, 0)
    if too_long == "drop":
        kept = documents[~is_long]
        lost = int(wanted[is_long].sum())
        return Pieces(kept, np.zeros_like(kept), lengths[kept], 0, lost, long)
    lost = int((wanted - np.minimum(wanted, seq_len)).sum())
    return Pieces(documents, np.zeros_like(documents), np.minimum(wanted, seq_len), long, lost, 0)


def best_fit(lengths: np.ndarray, seq_len: int) -> Rows:
    """Pack pieces into rows, best-fit decreasing.

    Args:
        lengths: tokens of each piece, from 1 to `seq_len`.
        seq_len: tokens of a row.

    Returns:
        The rows; each piece is in one.

    Memory:
        On the host about 40 bytes a piece.
    """
    row_of = np.empty(len(lengths), np.int64)
    by_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # those of `by_room` that have a row, in order
    count = 0
    decreasing: Any = np.argsort(-lengths, kind="stable")
    for piece, length in zip(decreasing.tolist(), lengths[decreasing].tolist(), strict=True):
        place = bisect.bisect_left(rooms, length)
        if place == len(rooms):
            row, room = count, seq_len
            count += 1
        else:
            room = rooms[place]
            row = by_room[room].pop()
            if not by_room[room]:
                rooms.pop(place)
        row_of[piece] = row
        left = room - length
        if left:
            waiting = by_room.setdefault(left, [])
            if not waiting:
                bisect.insort(rooms, left)
            waiting.append(row)
    counts = np.bincount(row_of, minlength=count)
    return Rows(np.argsort(row_of, kind="stable"), np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))


def one_each(count: int) -> Rows:
    """Give every piece a row of its own."""
    return Rows(np.arange(count), np.arange(count + 1))
