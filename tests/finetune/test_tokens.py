"""Text to tokens and back, by a tokenizer of Llama 2's kind."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from tokenizers.decoders import DecodeStream

from lowtide.finetune import decode_after, encode
from lowtide.finetune.data._load import token_stream

WORDS = ["<unk>", "<s>", "</s>", "▁Once", "▁upon", "▁a", "▁time", "▁", "."]


@pytest.fixture
def tokenizer():
    vocab = [(word, -1.0) for word in WORDS]
    made = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=False))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    made.add_special_tokens(["<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


@pytest.mark.parametrize("offsets", [False, True])
def test_a_text_that_begins_with_bos_gets_no_second_one(tokenizer, offsets):
    given, plain, twice = encode(tokenizer, ["<s>Once upon", "Once upon", "<s><s>Once"], offsets=offsets)
    assert plain.ids[0] == 1 and given.ids.count(1) == plain.ids.count(1) == 1
    assert given.ids[-2:] == plain.ids[-2:] == [3, 4]
    assert twice.ids.count(1) == 2  # as the text has it
    if offsets:
        assert given.offsets[-2:] == [(3, 7), (7, 12)]
    chat, empty = (encode(tokenizer, [text], special=False)[0].ids for text in ("<s>Once", ""))
    assert chat.count(1) == 1 and empty == []


def test_a_document_that_ends_with_its_end_token_gets_no_second_one(tokenizer):
    ids = token_stream({"a": "Once</s>", "b": "Once", "c": ""}, tokenizer, 2)
    assert np.flatnonzero(ids == 2).size == 3 and ids[-2:].tolist() == [1, 2]


def test_what_continues_a_prompt_keeps_the_space_at_its_beginning(tokenizer):
    prompt, answer = tokenizer.encode("Once upon").ids, tokenizer.encode("a time.", add_special_tokens=False).ids
    assert tokenizer.decode(answer) == "a time."
    assert decode_after(tokenizer, prompt, answer) == " a time."
    assert decode_after(tokenizer, [], answer) == "a time."
    assert decode_after(tokenizer, [*range(3, 7)] * 99, answer) == " a time."
    stream = DecodeStream(ids=prompt, skip_special_tokens=True)
    assert "".join(stream.step(tokenizer, token) or "" for token in answer) == " a time."
