"""Tokenise records, and mark the tokens that are learned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from ...core import DataError
from .._tokens import check_ids, encode, largest_id, refuse_unknown_id
from ._chat import ChatTemplate, Renderer, Spans
from ._schema import Example

_ALPACA_FORMAT = (
    "Below is an instruction that describes a task{}. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{}\n\n{}### Response:\n"
)
_TURN_FIELDS = {"role", "content", "weight", "tool_calls"}
"""Fields of a turn that are read or refused, whether or not the template mentions them."""


class Encoder:
    """Tokeniser of records of one kind. This object is mutated: the first chat starts a process for its template.

    Text, and a prompt with its completion, get the tokenizer's special tokens and an end token. A chat has only the
    special tokens of its template. An Alpaca record becomes a chat of two messages if the model has a template;
    otherwise it becomes the text that Alpaca was trained with. Prompt and completion are tokenised together. A token
    with characters of both belongs to the completion.

    With `loss_on` ``completion`` the model learns the assistant's turns, completions and outputs, including their end,
    and whole texts; with ``all`` every token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        end_token: int | None,
        loss_on: str,
        vocab_size: int | None = None,
    ) -> None:
        self._tokenizer, self._template, self._loss_on = tokenizer, template, loss_on
        self._end_token, self._vocab_size = end_token, vocab_size
        self._largest = largest_id(tokenizer, end_token)
        self._renderer: Renderer | None = None

    def close(self) -> None:
        """Stop the process that renders templates, if it was started."""
        if self._renderer is not None:
            self._renderer.close()

    def encode(self, examples: Sequence[Example]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Tokenise records of one kind: ids, int32 [L], and a mask of the learned tokens, uint8 [L], for each.

        A chat without a template, a chat that the template refuses, and tokens without an embedding raise DataError.
        """
        examples = [self._to_chat(example) for example in examples]
        is_chat = bool(examples) and examples[0].kind == "chat"
        rendered = [self._text_and_spans(example) for example in examples]
        encodings = encode(self._tokenizer, [text for text, _ in rendered], special=not is_chat, offsets=True)
        for example, encoding in zip(examples, encodings, strict=True):
            check_ids(encoding.ids, self._tokenizer, self._vocab_size, example.where)
        return [
            self._ids_and_mask(encoding, spans, is_chat=is_chat)
            for encoding, (_, spans) in zip(encodings, rendered, strict=True)
        ]

    def unread_in(self, example: Example) -> set[str]:
        """Return the fields of a chat's turns that the template does not mention, such as ``messages.name``."""
        if self._template is None:
            return set()
        fields = {name for message in example.messages for name in message} - _TURN_FIELDS
        return {f"messages.{name}" for name in fields if name not in self._template.source}

    def _to_chat(self, example: Example) -> Example:
        if example.kind != "alpaca" or self._template is None:
            return example
        question = f"{example.prompt}\n\n{example.more}" if example.more.strip() else example.prompt
        messages = ({"role": "user", "content": question}, {"role": "assistant", "content": example.text})
        return Example(kind="chat", where=example.where, messages=messages)

    def _text_and_spans(self, example: Example) -> tuple[str, Spans | None]:
        """Return a record as text, and the character spans that are learned; None means all of it."""
        is_all_learned = self._loss_on == "all"
        if example.kind == "text":
            return example.text, None
        if example.kind != "chat":
            prompt = example.prompt if example.kind == "prompt" else _alpaca_prompt(example)
            text = prompt + example.text
            return text, None if is_all_learned else [(len(prompt), len(text))]
        if self._template is None:
            raise DataError(
                f"{example.where}: the record has messages, but the model has no chat template",
                expected="chat_template.jinja, or chat_template in tokenizer_config.json",
                hint="copy it from the model's source, or name a template: --chat-template FILE",
            )
        if is_all_learned and any(message.get("weight") == 0 for message in example.messages):
            raise DataError(
                f"{example.where}: a turn has the weight 0, but --loss-on all learns all tokens",
                expected="turns without weight, or --loss-on completion",
                hint="leave --loss-on out, or remove the weight from the record",
            )
        if self._renderer is None:
            self._renderer = Renderer(self._template)
        text, spans = self._renderer.render(example, turns=not is_all_learned)
        return text, None if is_all_learned else spans

    def _ids_and_mask(self, encoding: Any, spans: Spans | None, *, is_chat: bool) -> tuple[np.ndarray, np.ndarray]:
        ids = np.asarray(encoding.ids, np.int32)
        mask = np.ones(len(ids), np.uint8) if spans is None else _learned_mask(encoding, spans)
        if not is_chat and self._end_token is not None:
            # The end token is always learned, even if the tokenizer's special tokens already contain it.
            if ids[-1:].tolist() != [self._end_token]:
                ids = np.append(ids, np.int32(self._end_token))
                mask = np.append(mask, np.uint8(1))
            mask[-1] = 1
        refuse_unknown_id(int(np.max(ids, initial=0)), self._largest)
        return ids, mask.astype(np.uint8)


def _learned_mask(encoding: Any, spans: Spans) -> np.ndarray:
    """Find the tokens that have a character in one of the spans, uint8 [L]."""
    offsets = np.asarray(encoding.offsets, np.int64).reshape(-1, 2)
    learned = np.zeros(len(offsets), np.uint8)
    for start, end in spans:
        # Half-open intervals overlap if each begins before the other ends.
        learned |= ((offsets[:, 0] < end) & (offsets[:, 1] > start)).astype(np.uint8)
    return learned


def _alpaca_prompt(example: Example) -> str:
    has_input = bool(example.more.strip())
    input_text = f"### Input:\n{example.more}\n\n" if has_input else ""
    return _ALPACA_FORMAT.format(
        ", paired with an input that provides further context" if has_input else "", example.prompt, input_text
    )
