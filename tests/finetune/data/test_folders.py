"""What of a folder of records is read, and what is said of the rest."""

from __future__ import annotations

import json

import pytest

from lowtide.core import DataError
from lowtide.finetune import notes_on, read_documents
from lowtide.finetune.data._read import data_files

CHAT = json.dumps({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}) + "\n"


def _files(folder, **contents):
    for name, content in contents.items():
        (folder / name.replace("__", ".")).write_text(content)


def test_evaluation_files_and_pages_are_left_out_and_named(tmp_path):
    _files(tmp_path, train__jsonl=CHAT, latest__jsonl=CHAT, test__jsonl=CHAT, README__md="about " * 100)
    (tmp_path / "validation").mkdir()
    _files(tmp_path / "validation", part__jsonl=CHAT)
    assert [each.name for each in data_files(tmp_path)] == ["latest.jsonl", "train.jsonl"]
    held_back, others = notes_on(str(tmp_path), None)
    assert held_back.endswith("name them with --eval-data: test.jsonl, validation/part.jsonl")
    assert others.endswith("files without records are not read: README.md")


def test_training_on_what_is_named_for_evaluation_is_said(tmp_path):
    _files(tmp_path, test__jsonl=CHAT)
    assert data_files(tmp_path) == [tmp_path / "test.jsonl"]
    (note,) = notes_on(str(tmp_path), None)
    assert "files named for evaluation are trained on: test.jsonl" in note
    assert notes_on(str(tmp_path), None, is_evaluation=True) == []


def test_chats_among_text_are_refused_and_tables_are_named(tmp_path):
    _files(tmp_path, a__txt="text " * 200, b__csv="x,y\n1,2\n")
    (note,) = notes_on(str(tmp_path), None)
    assert note.endswith("read as plain text, braces and commas included: b.csv")
    assert len(read_documents(tmp_path)) == 2
    _files(tmp_path, c__jsonl=CHAT)
    with pytest.raises(DataError, match="mixes text with records, which would be read as text"):
        read_documents(tmp_path)
