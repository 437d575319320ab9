"""Encode and decode text with any `tokenizers` tokenizer, for plain text and for records.

A tokenizer.json comes from a third party, so its failures and ids are checked here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from ..core import DataError, ModelFileError, shortened, shown
from ._windows import LongEncoding, encode_long, is_long

_CONTEXT = 16
"""Number of prompt tokens decoded together with a continuation."""


def encode(tokenizer: Tokenizer, texts: Sequence[str], *, special: bool = True, offsets: bool = False) -> list[Any]:
    """Tokenise texts. A text that begins with BOS gets no second BOS.

    Args:
        tokenizer: a tokenizer of the `tokenizers` library.
        texts: texts to tokenise.
        special: whether the tokenizer adds its special tokens.
        offsets: whether encodings have the character range of each token, which takes longer.

    Returns:
        An encoding for each text, with `ids` and `offsets`. A text of more than a million characters is encoded in
        windows.

    Raises:
        ModelFileError: when the tokenizer fails.
    """
    try:
        encode_batch = tokenizer.encode_batch if offsets else tokenizer.encode_batch_fast
        short = iter(encode_batch([text for text in texts if not is_long(text)], add_special_tokens=special))
        encodings = [encode_long(tokenizer, text, special=special) if is_long(text) else next(short) for text in texts]
        # The special tokens of an empty text begin with BOS, if the tokenizer adds BOS. A text that starts with the
        # characters of BOS then has two of them, and the first is removed.
        added = tokenizer.encode("").ids if special else []
        for encoding in encodings if added else ():
            if not isinstance(encoding, LongEncoding) and encoding.ids[:2] == [added[0]] * 2:
                encoding.truncate(len(encoding) - 1, direction="left")
        return encodings
    # The library raises bare Exception, and a Rust panic arrives as PanicException, a subclass of BaseException only.
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ModelFileError(
            "the tokenizer cannot encode the data",
            got=shortened(error),
            hint="copy tokenizer.json again; it lacks characters of the data, or is damaged",
        ) from error


def decode_after(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text that tokens add to a prompt; decoded alone they may lose a leading space."""
    # Decode both texts and compare, since a decoder may write a token in another way at the start of a text.
    prompt = list(prompt[-_CONTEXT:])
    before, whole = (tokenizer.decode(tokens) for tokens in (prompt, [*prompt, *ids]))
    return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(list(ids))


def largest_id(tokenizer: Tokenizer, end_token: int | None) -> int:
    """Return the largest id among a tokenizer's vocabulary and the end token."""
    return max(*tokenizer.get_vocab().values(), -1, -1 if end_token is None else end_token)


def refuse_unknown_id(token_id: int, largest: int) -> None:
    """Raise ModelFileError when the largest id in the data, `token_id`, is beyond the vocabulary."""
    if token_id > largest:
        raise ModelFileError(
            "the tokenizer returns tokens that are not in its vocabulary",
            expected=f"ids up to {largest}",
            got=f"id {token_id}",
            hint="copy tokenizer.json again; its post_processor names ids that its vocabulary lacks",
        )


def name_documents(documents: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Return texts by name; a sequence of texts gets numbered names.

    A single string raises DataError, since its characters would count as texts.
    """
    if isinstance(documents, str):
        raise DataError(
            "a text is not a list of documents",
            expected="texts, or texts by name",
            got=shown(documents),
            hint="pass [text], or Path(name) for a file of records",
        )
    if isinstance(documents, Mapping):
        return dict(documents)
    return {f"document {number}": text for number, text in enumerate(documents, 1)}


def check_ids(
    ids: Sequence[int] | np.ndarray[Any, Any], tokenizer: Tokenizer, vocab_size: int | None, where: str
) -> None:
    """Refuse tokens that a model has no embedding for, such as some added tokens of published models.

    Args:
        ids: token ids of one text.
        tokenizer: the model's tokenizer, for the text of a token.
        vocab_size: number of the model's embeddings; None: nothing is refused.
        where: name of the text, for the message.

    Raises:
        DataError: for such a token, with its text and id.
    """
    if vocab_size is None or np.max(ids, initial=0) < vocab_size:
        return
    token_id = next(int(token) for token in ids if token >= vocab_size)
    raise DataError(
        f"{where}: the model has no embedding for a token",
        expected=f"ids below {vocab_size}",
        got=f"{shown(tokenizer.id_to_token(token_id))}, id {token_id}",
        hint="remove it from the text; the tokenizer has this token, but the weights do not",
    )
