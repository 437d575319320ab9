"""Tokens that a tokenizer adds beyond the embeddings, as Gemma 3's small models do: refused where a text has one."""

import json
import shutil

import numpy as np
import pytest

from lowtide import models
from lowtide.cli import main
from lowtide.core import DataError
from lowtide.finetune import batches_loss, check_ids, open_base

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'user' %}{{ m.content }}"
    "{% else %}{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}"
)
FITS, BEYOND = "the tide goes out " * 30, "and\nthe <image> tide"
CHAT = [{"role": "user", "content": "the tide"}, {"role": "assistant", "content": "comes in"}]


@pytest.fixture(scope="module")
def model_dir(tiny_model_dir, tmp_path_factory):
    """A model of 300 embeddings, and a tokenizer with an added token of the id 300."""
    folder = tmp_path_factory.mktemp("added") / "model"
    shutil.copytree(tiny_model_dir, folder)
    tokenizer = models.load_tokenizer(folder)
    tokenizer.add_tokens([f"<unused{number}>" for number in range(tokenizer.get_vocab_size(), 300)])
    tokenizer.add_special_tokens(["<image>"])
    assert tokenizer.token_to_id("<image>") == 300
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def lowtide(model_dir, tmp_path, capfd, monkeypatch):
    """Run a command on that model; returns exit status and all that was said."""
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "300")

    def run(command, *flags):
        status = main([command, *(["--model", str(model_dir)] if command != "inspect" else []), *map(str, flags)])
        return status, "".join(capfd.readouterr())

    return run


def _write(path, *lines):
    path.write_text("\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines))
    return path


@pytest.mark.slow
def test_a_model_with_such_a_token_is_used_where_no_text_has_it(lowtide, model_dir, tmp_path):
    status, said = lowtide("inspect", model_dir)
    assert status == 0 and "301 tokens" in said
    assert "adds tokens beyond the 300 embeddings" in said and "<image>" in said and "cannot be handled" not in said
    data = _write(tmp_path / "a.txt", FITS)
    flags = ["--out", tmp_path / "run", "--steps", 1, "--rank", 2, "--seq-len", 8, "--batch-size", 2]
    assert lowtide("finetune", "--data", data, *flags, "--sample-tokens", 0)[0] == 0
    assert lowtide("generate", "--prompt", "the tide", "--max-new-tokens", 2)[0] == 0


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("command", ["finetune", "evaluate"])
def test_data_with_it_is_refused_by_file_and_line(lowtide, tmp_path, command):
    folder = tmp_path / "texts"
    folder.mkdir()
    _write(folder / "a.md", FITS)
    _write(folder / "b.md", BEYOND)
    chat = [{"role": "user", "content": "<image>"}, CHAT[1]]
    cases = [
        (folder, f"{folder / 'b.md'}, line 2: "),
        (_write(tmp_path / "t.jsonl", {"text": FITS}, {"text": "<image>"}), "t.jsonl:2: "),
        (_write(tmp_path / "c.jsonl", *[{"messages": CHAT}] * 3, {"messages": chat}), "c.jsonl:4: "),
        (_write(tmp_path / "p.jsonl", {"prompt": "a", "completion": "<image>"}), "p.jsonl:1: "),
    ]
    sizes = ["--seq-len", 8, "--batch-size", 2]
    out = ["--out", tmp_path / "run", "--steps", 1, "--rank", 2] if command == "finetune" else []
    for data, where in cases:
        status, said = lowtide(command, "--data", data, *sizes, *out)
        assert status == 2
        assert f"{where}the model has no embedding for a token" in said and "'<image>', id 300" in said


def test_what_was_tokenised_before_it_was_known_is_not_used(model_dir, tmp_path, monkeypatch):
    from lowtide.finetune.data import evaluation_data

    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))
    data = _write(tmp_path / "p.jsonl", {"prompt": "a", "completion": "<image>"})
    model, tokenizer = open_base(model_dir)
    batches, _ = evaluation_data(data, tokenizer, None, seq_len=8, batch_size=1)
    with pytest.raises(DataError, match=r"tokens that the model has no embedding for(.|\n)*id 300"):
        batches_loss(model, batches, 1)
    with pytest.raises(DataError, match=r"p.jsonl:1: the model has no embedding for a token"):
        evaluation_data(data, tokenizer, None, seq_len=8, batch_size=1, vocab_size=300)


def test_prompts_with_it_are_refused_by_line(lowtide, tmp_path, monkeypatch):
    chats = [{"messages": CHAT[:1]}, {"messages": [{"role": "user", "content": "<image>"}]}]
    cases = [
        (["--prompt", "a <image>"], "--prompt: "),
        (["--prompts", _write(tmp_path / "p.txt", "the tide", "", "<image>")], "p.txt:3: "),
        (["--prompts", _write(tmp_path / "p.jsonl", {"prompt": "a"}, *chats)], "p.jsonl:3: "),
        (["--chat"], "the conversation: "),
    ]
    monkeypatch.setattr("builtins.input", lambda _: "what is <image>")
    for flags, where in cases:
        status, said = lowtide("generate", *flags, "--max-new-tokens", 2)
        assert status == 2
        assert f"{where}the model has no embedding for a token" in said and "id 300" in said


def test_ids_are_checked_where_a_vocabulary_is_said(model_dir):
    tokenizer = models.load_tokenizer(model_dir)
    check_ids([], tokenizer, 300, "here")
    check_ids([300], tokenizer, None, "here")
    with pytest.raises(DataError, match=r"here: the model has no embedding for a token(.|\n)*id 300(.|\n)*hint:"):
        check_ids(np.asarray([3, 300]).tolist(), tokenizer, 300, "here")
