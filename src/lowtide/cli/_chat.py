"""Messages to tokens, by the chat template of a model's directory.

The renderer is not here: `lowtide.finetune.data` brings it with the readers of chat data, and is looked for when
messages come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core import ConfigError


def messages_to_ids(directory: str | None, tokenizer: Any, messages: Sequence[dict[str, str]]) -> list[int]:
    """Render messages, with the beginning of an answer, and tokenise them.

    Raises:
        ConfigError: when this version renders no templates.
    """
    raise ConfigError(
        f"{directory or 'the embedded model'}: messages are not rendered by this version",
        expected="a prompt as text",
        got=f"{len(messages)} messages",
        hint='write out the turns as the model was trained on them, as --prompt or {"prompt": "..."}',
    )
