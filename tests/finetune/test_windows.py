"""Texts that are tokenised in windows get the tokens that they get at once."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from lowtide.core import DataError
from lowtide.finetune import FinetuneConfig, encode, text_data
from lowtide.finetune.data import _encode, _load
from lowtide.finetune.data._load import load_data

WORDS = [
    "the",
    "tide",
    "goes  out",
    "\n\n",
    "μ-law",
    "🙂🙂",
    "—",
    "\t x",
    "don't",
    "1234567",
    "潮の満ち引き",
    "   ",
    "a" * 70,
]


def text_of(count: int, seed: int = 0) -> str:
    rng = random.Random(seed)
    return "".join(rng.choice(WORDS) + rng.choice([" ", "", "\n"]) for _ in range(count))


def made(kind: str) -> Tokenizer:
    if kind == "byte-level":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer: Any = trainers.BpeTrainer(vocab_size=600, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    elif kind == "sentencepiece":  # as Llama 2's: no words, one space in front
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", "<s>", "</s>"], max_token_length=12)
    elif kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>")
    else:
        tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=["<unk>", "<s>", "</s>"])
    tokenizer.train_from_iterator([text_of(400, 1)], trainer)
    ids = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ids)
    return tokenizer


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece", "unigram", "wordpiece"])
def test_windows_give_the_tokens_of_the_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, text = made(kind), text_of(3000)
    for start in ("", "<s>"):  # no second BOS
        whole = encode(tokenizer, [start + text], offsets=True)[0]
        with monkeypatch.context() as small:
            small.setattr(_encode, "_WINDOW", 900)
            small.setattr(_encode, "_OVERLAP", 300)
            ours = encode(tokenizer, [start + text, "short"], offsets=True)
        assert isinstance(ours[0], _encode.LongEncoding) and ours[1].ids == tokenizer.encode("short").ids
        assert ours[0].ids.tolist() == whole.ids
        inner = slice(1, -1)
        assert ours[0].offsets[inner].tolist() == [list(offset) for offset in whole.offsets[inner]]


def test_windows_that_never_agree_are_encoded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = made("byte-level")
    monkeypatch.setattr(_encode, "_WINDOW", 64)
    monkeypatch.setattr(_encode, "_OVERLAP", 8)  # fewer tokens than a run
    text = text_of(60)
    ours = _encode._encode_long(tokenizer, text, special=False)
    assert ours.ids.tolist() == tokenizer.encode(text, add_special_tokens=False).ids


def test_a_long_document_is_data_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = made("byte-level")
    documents = {"long": text_of(2000), "short": text_of(40, 2)}
    options: dict[str, Any] = {"seq_len": 16, "batch_size": 2, "seed": 0, "end_token": 1, "vocab_size": 600}
    whole = text_data(documents, tokenizer, **options)
    monkeypatch.setattr(_encode, "_WINDOW", 900)
    windowed = text_data(documents, tokenizer, **options)
    assert windowed.digest == whole.digest
    assert np.array_equal(windowed.train[3]["tokens"], whole.train[3]["tokens"])


def test_a_large_file_is_read_in_pieces_to_the_same_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = made("sentencepiece")
    (tmp_path / "data.txt").write_bytes(b"\xef\xbb\xbf" + text_of(3000).replace("\n", "\r\n").encode())
    config = FinetuneConfig(data=str(tmp_path / "data.txt"), seq_len=16, batch_size=2)
    whole = load_data(config, tmp_path, tokenizer, end_token=2)
    monkeypatch.setattr(_load, "_MOST_AT_ONCE", 1000)
    monkeypatch.setattr(_load, "_MOST_IN_MEMORY", 500)
    monkeypatch.setattr(_encode, "_WINDOW", 900)
    pieces = load_data(config, tmp_path, tokenizer, end_token=2)
    assert pieces.digest == whole.digest and pieces.num_train_tokens == whole.num_train_tokens
    assert len(pieces.held_out) == len(whole.held_out) > 2
    for index in (0, 1, -1):
        for name, batch in whole.held_out[index].items():
            assert np.array_equal(pieces.held_out[index][name], batch)
    assert np.array_equal(pieces.train[5]["tokens"], whole.train[5]["tokens"])
    (tmp_path / "data.txt").write_bytes(b"fine " * 1000 + b"\xff")
    with pytest.raises(DataError, match=r"data.txt: not UTF-8 text(.|\n)*hint: convert it"):
        load_data(config, tmp_path, tokenizer, end_token=2)
