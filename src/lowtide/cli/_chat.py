"""Messages to tokens, by the chat template of a model's directory."""

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
    """Render conversations, each with the beginning of an answer, and tokenise them.

    Args:
        args: the arguments that name the model and its template.
        tokenizer: the model's.
        conversations: messages, by what a conversation is called in errors.
        tools: of conversations that have some, by the same names.

    Raises:
        ModelFileError: when the model has no chat template, or one that cannot be used.
        DataError: when the template refuses a conversation.
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
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
