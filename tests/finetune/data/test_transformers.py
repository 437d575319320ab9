"""Token ids and masks beside transformers' ``apply_chat_template(..., return_assistant_tokens_mask=True)``."""

from pathlib import Path

import pytest

from lowtide.finetune.data import ChatTemplate, Example
from lowtide.finetune.data._encode import Encoder
from lowtide.models import base_path, load_tokenizer

from .templates import CHATS, FAMILIES, SPECIAL, marked, plain

pytestmark = pytest.mark.peers


@pytest.fixture(scope="module")
def theirs():
    transformers = pytest.importorskip("transformers", reason="needs the extra `peers`")
    file = str(Path(base_path()) / "tokenizer.json")
    return transformers.PreTrainedTokenizerFast(tokenizer_file=file, **SPECIAL)


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_and_masks_are_those_of_transformers(theirs, family):
    theirs.backend_tokenizer.no_padding()
    # Both with the same special tokens: transformers adds those that it is named.
    ours = load_tokenizer(base_path())
    ours.add_special_tokens([token for token in SPECIAL.values() if ours.token_to_id(token) is None])
    for source in (marked(FAMILIES[family]), plain(FAMILIES[family])):
        template = ChatTemplate(source=source, special=SPECIAL, where="template")
        encoder = Encoder(ours, template, end_token=0, loss_on="completion")
        try:
            examples = [Example(kind="chat", where=f"{i}", messages=tuple(each)) for i, each in enumerate(CHATS)]
            for messages, (ids, mask) in zip(CHATS, encoder.encode(examples), strict=True):
                expected = theirs.apply_chat_template(
                    messages,
                    chat_template=source,
                    tokenize=True,
                    return_dict=True,
                    return_assistant_tokens_mask=source == marked(source) and "generation %}" in source,
                )
                assert ids.tolist() == expected["input_ids"]
                if "assistant_masks" in expected:
                    assert mask.tolist() == expected["assistant_masks"]
                    assert 0 < mask.sum() < len(mask)
        finally:
            encoder.close()
