"""Tokenise a long text in windows, so that memory does not grow with its length.

The `tokenizers` library takes about 150 bytes for each byte of a text that it encodes at once. So a long text is
encoded in windows that overlap, and two windows are joined where they agree on a run of tokens. Subword tokenizers
(BPE, Unigram, WordPiece) depend on nearby characters alone, so a run in common means that all tokens after it are those
of the whole text. Windows without a run in common are encoded together.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any, NamedTuple, TextIO

import numpy as np
from tokenizers import Tokenizer

_WINDOW = 2**19
"""Characters of a window."""
_OVERLAP = 2**11
_RUN = 24
"""Tokens that two windows have to agree on."""


class LongEncoding(NamedTuple):
    """Ids of a text, and where each token begins and ends in it, in characters."""

    ids: np.ndarray[Any, Any]
    """int32 [N]."""
    offsets: np.ndarray[Any, Any]
    """int64 [N, 2]."""

    def __len__(self) -> int:
        return len(self.ids)


def is_long(text: str) -> bool:
    """Return whether a text is to be encoded in windows."""
    return len(text) > 2 * _WINDOW


def encode_long(tokenizer: Tokenizer, text: str, *, special: bool) -> LongEncoding:
    """Tokenise a text in windows, to the same tokens as at once.

    Args:
        tokenizer: of the `tokenizers` library.
        text: what to tokenise.
        special: whether to add the tokenizer's special tokens.

    Returns:
        Ids and offsets.

    Memory:
        About 150 bytes for each character of a window, and 40 bytes for each token.
    """
    parts = list(encoded_pieces(tokenizer, io.StringIO(text), special=special))
    return LongEncoding(*(np.concatenate([part[field] for part in parts]) for field in range(2)))


def encoded_pieces(tokenizer: Tokenizer, file: TextIO, *, special: bool) -> Iterator[LongEncoding]:
    """Tokenise a file in windows, and yield the tokens piece by piece.

    Args:
        tokenizer: of the `tokenizers` library.
        file: a text file, which is read once.
        special: whether to add the tokenizer's special tokens.

    Yields:
        Ids and offsets, in order.

    Memory:
        About 150 bytes for each character of a window.
    """
    text = _Buffer(file)
    before, after = _special_ids(tokenizer) if special else ([], [])
    begin, end = 0, _WINDOW
    window = _encoded(tokenizer, text, begin, end)
    if before and window.ids[:1].tolist() == before[:1]:  # a text that begins with BOS gets no second one
        before = before[1:]
    yield _without_text(before)
    while not text.ends_at(end):
        start, stop = max(end - _OVERLAP, begin + 1), end + _WINDOW
        following = _encoded(tokenizer, text, start, stop)
        cut = _common_cut(window, following)
        if cut is None:  # encode both together, and look for a run in a later overlap
            window, end = _encoded(tokenizer, text, begin, stop), stop
            continue
        yield LongEncoding(window.ids[: cut[0]], window.offsets[: cut[0]])
        window = LongEncoding(following.ids[cut[1] :], following.offsets[cut[1] :])
        begin, end = int(window.offsets[0, 0]), stop
        text.drop(begin)
    yield window
    yield _without_text(after)


class _Buffer:
    """Part of a text file. This object is mutated: it reads on, and drops what is not needed any more."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._text, self._begin = file, "", 0

    def __getitem__(self, place: slice) -> str:
        missing = place.stop - self._begin - len(self._text)
        if missing > 0:
            self._text += self._file.read(missing)
        return self._text[place.start - self._begin : place.stop - self._begin]

    def ends_at(self, end: int) -> bool:
        """Return whether no character comes after a place."""
        return not self[end : end + 1]

    def drop(self, begin: int) -> None:
        """Drop the text before a place."""
        self._text, self._begin = self._text[begin - self._begin :], begin


def _without_text(ids: list[int]) -> LongEncoding:
    return LongEncoding(np.asarray(ids, np.int32), np.zeros((len(ids), 2), np.int64))


def _encoded(tokenizer: Tokenizer, text: _Buffer, start: int, stop: int) -> LongEncoding:
    encoding = tokenizer.encode(text[start:stop], add_special_tokens=False)
    offsets = np.asarray(encoding.offsets, np.int64).reshape(-1, 2) + start
    return LongEncoding(np.asarray(encoding.ids, np.int32), offsets)


def _common_cut(first: LongEncoding, second: LongEncoding) -> tuple[int, int] | None:
    """Return the indices of one token in both windows, in the middle of a run that they have in common."""
    if not len(second):
        return None
    tail = int(np.searchsorted(first.offsets[:, 0], second.offsets[0, 0]))
    places = {(*offset, id): index for index, (id, offset) in enumerate(_head(second, len(first) - tail))}
    run, previous = 0, -1
    for index, (id, offset) in enumerate(_head(LongEncoding(first.ids[tail:], first.offsets[tail:])), tail):
        other = places.get((*offset, id))
        is_next = other is not None and (run == 0 or other == previous + 1)
        run, previous = (run + 1 if is_next else int(other is not None)), -1 if other is None else other
        # The token before has to end where this one begins: several tokens may be parts of one character.
        if run >= _RUN and first.offsets[index - _RUN // 2, 0] >= first.offsets[index - _RUN // 2 - 1, 1]:
            return index - _RUN // 2, previous - _RUN // 2
    return None


def _head(encoding: LongEncoding, most: int | None = None) -> list[tuple[int, tuple[int, int]]]:
    """Return ids and offsets as numbers of Python."""
    offsets = encoding.offsets[:most].tolist()
    return [(id, (start, end)) for id, (start, end) in zip(encoding.ids[:most].tolist(), offsets, strict=True)]


def _special_ids(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the special tokens that a tokenizer puts before and after a text."""
    encoding = tokenizer.encode("a", add_special_tokens=True)
    text = [index for index, is_special in enumerate(encoding.special_tokens_mask) if not is_special]
    if not text:
        return list(encoding.ids), []
    return encoding.ids[: text[0]], encoding.ids[text[-1] + 1 :]
