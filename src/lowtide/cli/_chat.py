"""Messages to tokens, by the chat template of a model's directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..core import ModelFileError


def messages_to_ids(
    directory: str | None,
    tokenizer: Any,
    conversations: Mapping[str, Sequence[Mapping[str, Any]]],
    file: str | None,
    tools: Mapping[str, Any] | None = None,
) -> list[list[int]]:
    """Render conversations, each with the beginning of an answer, and tokenise them.

    Args:
        directory: of the model; None: the embedded one.
        tokenizer: the model's.
        conversations: messages, by what a conversation is called in errors.
        file: a chat template to take instead of the model's.
        tools: of conversations that have some, by the same names.

    Raises:
        ModelFileError: when the model has no chat template, or one that cannot be used.
        DataError: when the template refuses a conversation.
    """
    from ..finetune.data import chat_prompts, load_chat_template
    from ..models import base_path

    template = load_chat_template(directory or base_path(), file)
    if template is None:
        raise ModelFileError(
            f"{directory or 'the embedded model'}: no chat template",
            expected="chat_template.jinja, or chat_template in tokenizer_config.json",
            hint='this is a model that continues text: give the text with --prompt, or as "prompt" in '
            "the file; or name a template: --chat-template FILE",
        )
    texts = chat_prompts(template, conversations, tools)
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
