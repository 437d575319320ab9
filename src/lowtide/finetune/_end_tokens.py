"""Tokens at which an answer ends.

A base model's config.json names the end of a document (``<|endoftext|>``). Chats end their turns with another token
(``<|im_end|>``), and a model tuned on chats writes only that one. So answers end at all tokens that config.json,
generation_config.json and the tokenizer name. They also end at the token that closes an assistant's turn in the chat
template.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from .. import models
from ..core import DataError, ModelFileError, input_file, parse_json, read_input, shown
from ._tokens import encode
from .data import ChatTemplate, chat_turn, load_chat_template

_GENERATION_CONFIG = "generation_config.json"
_ANSWER = "Spring tide"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EndTokens:
    """Ids of the tokens that end a generated text."""

    answer: tuple[int, ...]
    """All end tokens, those of config.json first."""
    text: int | None
    """Token appended to learned documents and completions: from config.json, else from the tokenizer."""
    turn: int | None
    """Token that closes an assistant's turn in the chat template; None without a template or such a token."""
    is_turn_open: bool
    """Whether the chat template writes no added token after an answer."""


def load_end_tokens(
    config: models.DecoderConfig,
    tokenizer: Tokenizer,
    directory: str | Path | None,
    *,
    tokenizer_dir: str | Path | None = None,
    chat_template: str | Path | None = None,
) -> EndTokens:
    """Collect the tokens that end an answer.

    Args:
        config: the model's configuration.
        tokenizer: the model's tokenizer.
        directory: the model's directory, or a GGUF file; None: the embedded model.
        tokenizer_dir: the folder of its tokenizer, if it is a different one.
        chat_template: a file to use instead of the model's template.

    Raises:
        ModelFileError: for an end token outside the vocabulary, with the name of the file, and for unusable files.
    """
    folders = [Path(folder) for folder in (directory, tokenizer_dir) if folder is not None]
    sources: list[tuple[Any, Any]] = [(directory or "the embedded model", config.eos_token_id)]
    for folder in folders:
        if os.path.lexists(folder / _GENERATION_CONFIG):
            path = input_file(folder, _GENERATION_CONFIG, hint="copy it from the model's source again")
            sources.append((path, parse_json(read_input(path, most_bytes=1024**2), str(path)).get("eos_token_id")))
    ends = [end for source, value in sources for end in _parse_ids(value, source, config.vocab_size)]
    tokenizer_folder = (folders or [models.base_path()])[-1]
    tokenizer_end = tokenizer.token_to_id(models.load_special_tokens(tokenizer_folder).get("eos_token", ""))
    try:
        template = load_chat_template(tokenizer_folder, chat_template)
        turn, is_turn_open = (None, False) if template is None else _turn_end(template, tokenizer)
    except (DataError, ModelFileError):  # plain text needs no template; rendering a chat raises this error again
        turn, is_turn_open = None, False
    # The tokenizer may have tokens that the model has no embedding for.
    tokenizer_end, turn = (None if end is None or end >= config.vocab_size else end for end in (tokenizer_end, turn))
    text = tokenizer_end if config.eos_token_id is None else ends[0]
    answer = [*ends, *(end for end in (tokenizer_end, turn) if end is not None)]
    return EndTokens(answer=tuple(dict.fromkeys(answer)), text=text, turn=turn, is_turn_open=is_turn_open)


def _parse_ids(value: Any, source: Any, vocab_size: int) -> Sequence[int]:
    ends: list[Any] = [*value] if isinstance(value, tuple | list) else [] if value is None else [value]
    for end in ends:
        if type(end) is not int or not 0 <= end < vocab_size:
            raise ModelFileError(
                f"{source}: eos_token_id is not a token id",
                expected=f"an id from 0 to {vocab_size - 1}",
                got=shown(end),
                hint="copy the file from the model's source again; it belongs to a model with another vocabulary",
            )
    return ends


def _turn_end(template: ChatTemplate, tokenizer: Tokenizer) -> tuple[int | None, bool]:
    """Return the first added token after an answer, and whether the template writes an answer without one."""
    text = chat_turn(template, _ANSWER)
    begin = text.rfind(_ANSWER)
    if begin < 0:
        return None, False
    begin += len(_ANSWER)
    encoding = encode(tokenizer, [text], special=False, offsets=True)[0]
    added = tokenizer.get_added_tokens_decoder()
    tokens = zip(encoding.ids, encoding.offsets, strict=True)
    end = next((id for id, (start, _) in tokens if start >= begin and id in added), None)
    return end, end is None


def with_end_tokens(files: Mapping[str, bytes], ends: EndTokens, config: models.DecoderConfig) -> dict[str, bytes]:
    """Write all end tokens into the generation_config.json of a model's files, contents by name.

    The `generate` of transformers stops at the tokens of this file. If it names none, those of `config` count.
    """
    settings = parse_json(files[_GENERATION_CONFIG], _GENERATION_CONFIG) if _GENERATION_CONFIG in files else {}
    stop_ids = settings.get("eos_token_id", config.eos_token_id)
    if set(ends.answer) <= set(stop_ids if isinstance(stop_ids, list | tuple) else [stop_ids]):
        return dict(files)
    if config.bos_token_id is not None:
        settings.setdefault("bos_token_id", config.bos_token_id)
    settings["eos_token_id"] = ends.answer[0] if len(ends.answer) == 1 else list(ends.answer)
    return {**files, _GENERATION_CONFIG: (json.dumps(settings, indent=2) + "\n").encode()}
