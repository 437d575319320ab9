"""Texts that are tokenised in windows get the tokens that they get at once."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics
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


IN_A_PROCESS = """
import resource, sys
from pathlib import Path
from lowtide import models
from lowtide.finetune import FinetuneConfig
from lowtide.finetune.data._load import load_data

def status(name):
    return 1024 * int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith(name)))

def read(path):
    config = FinetuneConfig(data=path, seq_len=64, batch_size=2)
    return load_data(config, models.base_path(), tokenizer, end_token=0)

tokenizer = models.load_tokenizer(models.base_path())
read(sys.argv[1])
start = status("VmRSS")
resource.setrlimit(resource.RLIMIT_AS, (status("VmSize") + 4 * 2**30,) * 2)  # a fault must not fill the machine
Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the start
data = read(sys.argv[2])
print(status("VmHWM") - start, data.num_train_tokens + data.num_held_out_tokens)
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, which reports the memory of a process")
def test_a_document_of_40_mb_takes_at_most_512_mib(tmp_path: Path) -> None:
    """Of the host, above what the process has; as a whole it would take 150 bytes for each byte of text."""
    text = "\n\n".join(topics.values())
    (tmp_path / "small.txt").write_text(text)
    with open(tmp_path / "large.txt", "w") as file:
        for _ in range(40_000_000 // len(text)):
            file.write(text)
    command = [sys.executable, "-c", IN_A_PROCESS, str(tmp_path / "small.txt"), str(tmp_path / "large.txt")]
    peak, num_tokens = map(int, subprocess.run(command, check=True, capture_output=True).stdout.split())
    assert num_tokens > 10_000_000
    assert peak < 512 * 2**20
