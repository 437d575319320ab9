"""Text to tokens by a tokenizer that a stranger wrote, for plain text and for records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from ..core import ModelFileError, shortened


def encode(tokenizer: Tokenizer, texts: Sequence[str], *, special: bool = True, offsets: bool = False) -> list[Any]:
    """Tokenise texts.

    Args:
        tokenizer: of the `tokenizers` library.
        texts: what to tokenise.
        special: whether the tokenizer adds its special tokens.
        offsets: whether it says which characters a token has, which takes longer.

    Returns:
        An encoding for each text.

    Raises:
        ModelFileError: when the tokenizer cannot.
    """
    try:
        run = tokenizer.encode_batch if offsets else tokenizer.encode_batch_fast
        return run(list(texts), add_special_tokens=special)
    except BaseException as error:  # the library raises bare Exception, and panics as a BaseException of its own
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ModelFileError(
            "the tokenizer cannot encode the data",
            got=shortened(error),
            hint="tokenizer.json lacks characters that the data has, or is damaged",
        ) from error


def largest_id(tokenizer: Tokenizer, end_token: int | None) -> int:
    """Return the largest id that a tokenizer's vocabulary, or the end token, has."""
    return max(*tokenizer.get_vocab().values(), -1, -1 if end_token is None else end_token)


def refuse_unknown(found: int, largest: int) -> None:
    """Raise ModelFileError when the largest id that was found is beyond the vocabulary."""
    if found > largest:
        raise ModelFileError(
            "the tokenizer gives tokens that are not in its vocabulary",
            expected=f"ids up to {largest}",
            got=f"id {found}",
            hint="the post_processor of tokenizer.json names other ids than its vocabulary; copy the file again",
        )
