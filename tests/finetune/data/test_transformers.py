"""Token ids and masks compared with transformers' ``apply_chat_template(..., return_assistant_tokens_mask=True)``."""

from pathlib import Path
from typing import Any

import pytest

from lowtide.finetune.data import ChatTemplate, Example
from lowtide.finetune.data._encode import Encoder
from lowtide.models import base_path, load_tokenizer
from tests import peers

from .templates import CHATS, FAMILIES, SPECIAL, marked, plain


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_ids_and_masks_are_those_of_transformers(family: str, peer: peers.Peer) -> None:
    sources = [marked(FAMILIES[family]), plain(FAMILIES[family])]
    tokenizer_file = Path(base_path()) / "tokenizer.json"

    def compute() -> dict[str, Any]:
        import transformers

        theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_file), **SPECIAL)
        theirs.backend_tokenizer.no_padding()
        ids, masks = [], []
        for source in sources:
            for messages in CHATS:
                encoded = theirs.apply_chat_template(
                    messages,
                    chat_template=source,
                    tokenize=True,
                    return_dict=True,
                    return_assistant_tokens_mask="generation %}" in source,
                )
                ids.append(encoded["input_ids"])
                masks.append(encoded.get("assistant_masks"))
        return {"ids": ids, "masks": masks}

    want = peer.answer("ids and masks", compute, [tokenizer_file, SPECIAL, sources, CHATS])
    # Both have the same special tokens: transformers adds those in SPECIAL.
    ours = load_tokenizer(base_path())
    ours.add_special_tokens([token for token in SPECIAL.values() if ours.token_to_id(token) is None])
    examples = [Example(kind="chat", where=f"{i}", messages=tuple(messages)) for i, messages in enumerate(CHATS)]
    encoded: list[Any] = []
    for source in sources:
        template = ChatTemplate(source=source, special=SPECIAL, where="template")
        encoder = Encoder(ours, template, end_token=0, loss_on="completion")
        try:
            encoded += encoder.encode(examples)
        finally:
            encoder.close()
    assert [ids.tolist() for ids, _ in encoded] == want["ids"]
    assert [mask is None for mask in want["masks"]] == [False] * len(CHATS) + [True] * len(CHATS)
    for (_, mask), expected in zip(encoded, want["masks"], strict=True):
        if expected is not None:
            assert mask.tolist() == expected
            assert 0 < mask.sum() < len(mask)
