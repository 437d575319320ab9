"""A tokenizer's folder has several files, and each can name tokens that `tokenizer.json` lacks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lowtide import models
from lowtide.core import ModelFileError

TURN = {"content": "<|im_end|>", "special": True, "normalized": False}
WORD = {"content": "<fim>", "special": False, "normalized": True}


@pytest.fixture
def folder(tiny_model_dir: str, tmp_path: Path) -> Path:
    shutil.copytree(tiny_model_dir, tmp_path / "model")
    return tmp_path / "model"


def write(folder: Path, file: str, content: Any) -> None:
    (folder / file).write_text(json.dumps(content))


@pytest.mark.parametrize("file", ["tokenizer_config.json", "added_tokens.json"])
def test_tokens_that_tokenizer_json_lacks_are_added(folder: Path, file: str) -> None:
    size = models.load_tokenizer(folder).get_vocab_size()
    if file == "added_tokens.json":
        write(folder, file, {"<fim>": size + 1, "<|im_end|>": size, "<|endoftext|>": 0})
        write(folder, "special_tokens_map.json", {"eos_token": "<|im_end|>"})
    else:
        write(folder, file, {"added_tokens_decoder": {str(size + 1): WORD, str(size): TURN}})
    tokenizer = models.load_tokenizer(folder)
    assert tokenizer.encode("tide<|im_end|><fim>").ids[-2:] == [size, size + 1]
    assert [token.special for token in tokenizer.get_added_tokens_decoder().values()] == [True, True, False]
    assert tokenizer.decode([size, size + 1]) == "<fim>"


def test_a_special_token_in_the_vocabulary_is_not_split(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"] = []
    write(folder, "tokenizer.json", content)
    assert len(models.load_tokenizer(folder).encode("tide<|endoftext|>").ids) > 8
    write(folder, "special_tokens_map.json", {"bos_token": {"content": "<|endoftext|>"}, "pad_token": "[PAD]"})
    tokenizer = models.load_tokenizer(folder)
    assert tokenizer.encode("tide<|endoftext|>").ids[-1] == 0
    assert tokenizer.encode("[PAD]").ids == [tokenizer.get_vocab_size() - 1]


def test_an_id_that_the_tokenizer_cannot_give_is_refused(folder: Path) -> None:
    write(folder, "added_tokens.json", {"<|im_end|>": 299})
    with pytest.raises(
        ModelFileError, match=r"added_tokens.json: added tokens: '<\|im_end\|>' has id 299, but the next"
    ):
        models.load_tokenizer(folder)
    write(folder, "tokenizer_config.json", {"added_tokens_decoder": {"299": {**TURN, "special": "yes"}}})
    with pytest.raises(ModelFileError, match=r"tokenizer_config.json: added tokens: special has an unusable value"):
        models.load_tokenizer(folder)
