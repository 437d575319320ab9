"""Tokenise a long text in windows, so that memory does not grow with its length.

The `tokenizers` library takes about 150 bytes for each byte of a text that it encodes at once. So a long text is
encoded in overlapping windows, and two windows are joined where they agree on a run of tokens. Subword tokenizers
(BPE, Unigram, WordPiece) depend only on nearby characters. So after a common run, all tokens equal those of the whole
text. Windows without a common run are encoded together.
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
"""Characters that two windows share."""
_RUN = 24
"""Number of consecutive tokens on which two windows have to agree."""


class LongEncoding(NamedTuple):
    """Token ids of a text, and the first and end character of each token."""

    ids: np.ndarray[Any, Any]
    """int32 [N]."""
    offsets: np.ndarray[Any, Any]
    """int64 [N, 2]."""

    def __len__(self) -> int:
        return len(self.ids)


def is_long(text: str) -> bool:
    """Return whether a text is encoded in windows: it has more than twice a window's characters."""
    return len(text) > 2 * _WINDOW


def encode_long(tokenizer: Tokenizer, text: str, *, special: bool) -> LongEncoding:
    """Tokenise a text in windows; the tokens equal those of one call for the whole text.

    It takes about 150 bytes for each character of a window, and 40 bytes for each token.
    """
    parts = list(encode_pieces(tokenizer, io.StringIO(text), special=special))
    return LongEncoding(*(np.concatenate([part[field] for part in parts]) for field in range(2)))


def encode_pieces(tokenizer: Tokenizer, file: TextIO, *, special: bool) -> Iterator[LongEncoding]:
    """Tokenise a file in windows, and yield the tokens piece by piece, in order.

    The file is read once from start to end. It takes about 150 bytes for each character of a window.
    """
    text = _Buffer(file)
    before, after = _special_ids(tokenizer) if special else ([], [])
    begin, end = 0, _WINDOW
    window = _encode_window(tokenizer, text, begin, end)
    if before and window.ids[:1].tolist() == before[:1]:  # a text that begins with BOS gets no second one
        before = before[1:]
    yield _special_encoding(before)
    while not text.ends_at(end):
        start, stop = max(end - _OVERLAP, begin + 1), end + _WINDOW
        following = _encode_window(tokenizer, text, start, stop)
        cut = _common_cut(window, following)
        if cut is None:  # encode both windows together, and search the next overlap for a common run
            window, end = _encode_window(tokenizer, text, begin, stop), stop
            continue
        # Tokens before the cut come from the first window, the others from the second. This drops the last tokens of
        # the first window and the first tokens of the second, which lack context on one side.
        yield LongEncoding(window.ids[: cut[0]], window.offsets[: cut[0]])
        window = LongEncoding(following.ids[cut[1] :], following.offsets[cut[1] :])
        begin, end = int(window.offsets[0, 0]), stop
        text.drop(begin)
    yield window
    yield _special_encoding(after)


class _Buffer:
    """Loaded part of a text file. This object is mutated: it reads more text, and drops text that is done."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._text, self._begin = file, "", 0

    def __getitem__(self, characters: slice) -> str:
        num_missing = characters.stop - self._begin - len(self._text)
        if num_missing > 0:
            self._text += self._file.read(num_missing)
        return self._text[characters.start - self._begin : characters.stop - self._begin]

    def ends_at(self, end: int) -> bool:
        """Return whether the text has no character at or after this position."""
        return not self[end : end + 1]

    def drop(self, begin: int) -> None:
        """Drop the text before this position."""
        self._text, self._begin = self._text[begin - self._begin :], begin


def _special_encoding(ids: list[int]) -> LongEncoding:
    return LongEncoding(np.asarray(ids, np.int32), np.zeros((len(ids), 2), np.int64))


def _encode_window(tokenizer: Tokenizer, text: _Buffer, start: int, stop: int) -> LongEncoding:
    encoding = tokenizer.encode(text[start:stop], add_special_tokens=False)
    offsets = np.asarray(encoding.offsets, np.int64).reshape(-1, 2) + start
    return LongEncoding(np.asarray(encoding.ids, np.int32), offsets)


def _common_cut(first: LongEncoding, second: LongEncoding) -> tuple[int, int] | None:
    """Return the indices of one token in both windows, in the middle of a common run; None without such a run.

    A token is common if its id and its characters are equal in both windows.
    """
    if not len(second):
        return None
    tail = int(np.searchsorted(first.offsets[:, 0], second.offsets[0, 0]))
    positions = {(*offset, id): index for index, (id, offset) in enumerate(_token_list(second, len(first) - tail))}
    run, previous = 0, -1
    for index, (id, offset) in enumerate(_token_list(LongEncoding(first.ids[tail:], first.offsets[tail:])), tail):
        match = positions.get((*offset, id))
        is_next = match is not None and (run == 0 or match == previous + 1)
        run, previous = (run + 1 if is_next else int(match is not None)), -1 if match is None else match
        # The previous token has to end where this one begins. Byte-level tokens can be parts of one character: they
        # have equal offsets, and a window that began between them would split the character.
        if run >= _RUN and first.offsets[index - _RUN // 2, 0] >= first.offsets[index - _RUN // 2 - 1, 1]:
            return index - _RUN // 2, previous - _RUN // 2
    return None


def _token_list(encoding: LongEncoding, num_tokens: int | None = None) -> list[tuple[int, tuple[int, int]]]:
    """Return ids and offsets as Python integers, which are faster to compare one by one than NumPy scalars."""
    offsets = encoding.offsets[:num_tokens].tolist()
    return [(id, (start, end)) for id, (start, end) in zip(encoding.ids[:num_tokens].tolist(), offsets, strict=True)]


def _special_ids(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the special tokens that a tokenizer adds before and after a text."""
    encoding = tokenizer.encode("a", add_special_tokens=True)
    text = [index for index, is_special in enumerate(encoding.special_tokens_mask) if not is_special]
    if not text:
        return list(encoding.ids), []
    return encoding.ids[: text[0]], encoding.ids[text[-1] + 1 :]
