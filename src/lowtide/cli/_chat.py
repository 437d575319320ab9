"""Rendering of messages with the model's chat template, and their tokenisation."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from ..core import ModelFileError
from ._answers import chat_template


def messages_to_ids(
    args: argparse.Namespace,
    tokenizer: Any,
    conversations: Mapping[str, Sequence[Mapping[str, Any]]],
    tools: Mapping[str, Any] | None = None,
) -> list[list[int]]:
    """Render conversations up to the start of the next answer, and tokenise them.

    `conversations` and `tools` are keyed by label, which error messages quote; not every conversation has tools. Raises
    `ModelFileError` when the model has no usable chat template, and `DataError` when it rejects a conversation.
    """
    from ..finetune.data import chat_prompts

    template = chat_template(args)
    if template is None:
        raise ModelFileError(
            f"{args.tokenizer or args.model or 'the embedded model'}: no chat template",
            expected="chat_template.jinja, or chat_template in tokenizer_config.json",
            hint='this is a model that continues text: give the text with --prompt, or as "prompt" in '
            "the file; or name a template: --chat-template FILE",
        )
    texts = chat_prompts(template, conversations, tools)
    # The template writes the special tokens, so the tokenizer must not add them again.
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
