import gzip
import json
import os

import numpy as np
import pytest
from tokenizers import Tokenizer, models, processors

from lowtide.core import ConfigError, DataError, ModelFileError
from lowtide.finetune import read_documents, text_data


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir):
    return Tokenizer.from_file(f"{tiny_model_dir}/tokenizer.json")


def _data(documents, tokenizer, **changes):
    return text_data(documents, tokenizer, **{"seq_len": 8, "batch_size": 4, "seed": 0, "end_token": 0, **changes})


def test_the_built_in_corpus_is_the_language_reference():
    documents = read_documents(None)
    assert len(documents) > 50
    assert any("lambda" in text for text in documents)


def test_files_folders_and_json_lines_are_read(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.py").write_text("first")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "c.md").write_text("third \u2028 line")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / "image.bin").write_bytes(b"\0\1\2")
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    (tmp_path / "blank.txt").write_text("  \n")
    assert read_documents(tmp_path) == ["first", "second", "third \u2028 line"]
    assert read_documents(tmp_path / "a.py") == ["first"]
    lines = [{"text": "one \u2028 two"}, {"text": "three", "more": 1}]
    (tmp_path / "d.jsonl").write_text("\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines))
    assert read_documents(tmp_path / "d.jsonl") == ["one \u2028 two", "three"]


def test_a_folder_is_read_whole_or_not_at_all(tmp_path, monkeypatch):
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    for folder in (data / "deep" / "deeper", elsewhere):
        folder.mkdir(parents=True)
    (data / "a.txt").write_text("first")
    (data / "deep" / "b.txt").write_text("second")
    (elsewhere / "c.txt").write_text("third")
    (data / "linked").symlink_to(elsewhere)
    (data / "twice").symlink_to(elsewhere)
    (data / "deep" / "deeper" / "around").symlink_to(data)
    assert read_documents(data) == ["first", "second", "third"]
    (data / "z.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(DataError, match=r"z.txt: the link is broken(.|\n)*hint:"):
        read_documents(data)
    (data / "z.txt").unlink()
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("deeper"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(
        DataError, match=r"deeper: cannot be read(.|\n)*got: Permission denied(.|\n)*hint: .*permissions"
    ):
        read_documents(data)


@pytest.mark.parametrize("name", ["one.txt", "many.jsonl", "folder"])
def test_data_that_may_not_be_read_is_named(tmp_path, monkeypatch, name):
    path, stat = tmp_path / name, os.stat

    def refuse(at, **options):
        if str(at).endswith(name):
            raise PermissionError(13, "Permission denied", str(at))
        return stat(at, **options)

    monkeypatch.setattr(os, "stat", refuse)
    with pytest.raises(DataError, match=rf"{name}: cannot be read(.|\n)*Permission denied(.|\n)*hint:"):
        read_documents(path)
    with pytest.raises(DataError, match=r"path of the data is empty(.|\n)*hint:"):
        read_documents("")


def test_unusable_data_is_named(tmp_path):
    with pytest.raises(DataError, match=r"gone.txt: no such file or folder(.|\n)*hint:"):
        read_documents(tmp_path / "gone.txt")
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match=r"empty.txt: the data has no text(.|\n)*hint:"):
        read_documents(tmp_path / "empty.txt")
    with pytest.raises(DataError, match=r"the data has no text(.|\n)*hint:"):
        read_documents(tmp_path)
    (tmp_path / "x.bin").write_bytes(b"\0\1")
    with pytest.raises(DataError, match=r"x.bin: not UTF-8 text(.|\n)*hint:"):
        read_documents(tmp_path / "x.bin")
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"text": ')
    with pytest.raises(DataError, match=r"bad.jsonl:2: not readable as JSON(.|\n)*hint:"):
        read_documents(tmp_path / "bad.jsonl")
    (tmp_path / "bad.jsonl").write_text('{"txt": "fine"}')
    with pytest.raises(DataError, match=r"bad.jsonl:1: the record has no field 'text'(.|\n)*hint:"):
        read_documents(tmp_path / "bad.jsonl")
    (tmp_path / "bad.jsonl").write_bytes(b'{"text": "caf\xe9"}')
    with pytest.raises(DataError, match=r"bad.jsonl:1: not readable as JSON(.|\n)*utf-8(.|\n)*hint:"):
        read_documents(tmp_path / "bad.jsonl")


_ROW = {"prompt": "why?", "completion": "so."}


@pytest.mark.parametrize(
    ("name", "content", "what", "fields"),
    [
        ("d.csv", "prompt,completion\nwhy?,so.\n", "a table", "prompt, completion"),
        ("d.CSV", "\ufeffprompt;completion\nwhy?;so.\n", "a table", "prompt, completion"),
        ("d.tsv", "prompt\tcompletion\n", "a table", "prompt, completion"),
        ("d.json", json.dumps([_ROW, _ROW], indent=1), "JSON", "prompt, completion"),
        ("d.json", json.dumps(_ROW), "JSON", "prompt, completion"),
        ("d.json", "[" * 10**5, "JSON", None),
        ("d.ndjson", json.dumps(_ROW), "JSON lines", "prompt, completion"),
        ("d.JSONL", json.dumps(_ROW), "JSON lines", "prompt, completion"),
        ("d.txt", json.dumps(_ROW) + "\n" + json.dumps(_ROW), "JSON lines", "prompt, completion"),
        ("d", json.dumps(_ROW), "JSON lines", "prompt, completion"),
        ("d.parquet", b"PAR1\0\1", "a table", None),
        ("train", b"PAR1\0\1", "a table", None),
        ("d.arrow", b"\xff\xff\xff\xff\1\0", "a table", None),
        ("d.jsonl", gzip.compress(b"{}", mtime=0), "compressed", None),
        ("d.jsonl.gz", gzip.compress(b"{}", mtime=0), "compressed", None),
        ("d.zst", b"\x28\xb5\x2f\xfd\0", "compressed", None),
        ("d.zip", b"PK\x03\x04", "an archive", None),
        ("d.pdf", b"%PDF-1.7", "a PDF", None),
        ("d.txt", "the tide goes out".encode("utf-16"), "text in UTF-16", None),
        ("d.txt", "the tide goes out".encode("utf-16-le"), "text in UTF-16", None),
        ("d.txt", "the tide goes out".encode("utf-16-be"), "text in UTF-16", None),
    ],
)
def test_what_is_no_text_is_refused_by_what_it_is(tmp_path, name, content, what, fields):
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(
        DataError, match=rf"{name}: the file is {what}(.|\n)*not read as plain text(.|\n)*hint:"
    ) as caught:
        read_documents(path)
    assert (f"fields {fields}\n" in str(caught.value)) == (fields is not None)
    is_elsewhere = name.endswith((".csv", ".CSV", ".tsv", ".json", ".ndjson", ".JSONL"))  # who reads records reads it
    assert is_elsewhere != (".csv, .tsv, .parquet" in str(caught.value))


@pytest.mark.parametrize(
    ("files", "fields"),
    [
        ({"a.jsonl": json.dumps(_ROW) * 3, "README.md": "rows"}, "prompt, completion"),
        ({"a.csv": "prompt,completion\n" * 9, "README.md": "rows"}, "prompt, completion"),
        ({"train/0.parquet": "PAR1" * 9, "README.md": "rows"}, None),
    ],
)
def test_a_folder_of_records_is_refused_by_what_it_holds(tmp_path, files, fields):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(
        DataError, match=r"the folder has records, which are not read as plain text(.|\n)*hint:"
    ) as caught:
        read_documents(tmp_path)
    assert (f"fields {fields}\n" in str(caught.value)) == (fields is not None)


def test_a_source_tree_may_hold_a_few_records(tmp_path):
    (tmp_path / "package.json").write_text("{}")
    (tmp_path / "main.py").write_text("print('the tide')")
    assert len(read_documents(tmp_path)) == 2


def test_text_that_begins_like_something_else_is_text(tmp_path):
    for name, text in {"a.py": "{1: 2}\n[3]\n", "b.txt": "a,b\n1,2\n", "c.md": "\ufeff{see}"}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert read_documents(tmp_path / name) == [text.removeprefix("\ufeff")]


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "data.txt")
    for path in (tmp_path / "data.txt", "/dev/zero"):
        with pytest.raises(DataError, match=r"not a regular file(.|\n)*hint:"):
            read_documents(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "\\ud800"}', r"not readable as JSON(.|\n)*surrogates"),
        ("[" * 10**5, "not readable as JSON"),
        ('{"prompt": 1, "completion": 2}', r"the record has no field 'text'(.|\n)*'prompt', 'completion'"),
        ("3", r"not a JSON object(.|\n)*got: int"),
        ('{"text": ' + "9" * 5000 + "}", "not readable as JSON"),
    ],
)
def test_a_line_that_is_no_document_is_named(tmp_path, line, message):
    (tmp_path / "d.jsonl").write_text('{"text": "fine"}\n' + line)
    with pytest.raises(DataError, match=rf"d.jsonl:2: {message}(.|\n)*hint:"):
        read_documents(tmp_path / "d.jsonl")


def test_a_tokenizer_that_cannot_encode_the_data_is_named():
    tokenizer = Tokenizer(models.WordLevel({"tide": 0}, unk_token="<unk>"))
    with pytest.raises(ModelFileError, match=r"cannot encode the data(.|\n)*UNK(.|\n)*hint:"):
        _data(["no such word"], tokenizer)


def test_tokens_outside_of_the_vocabulary_are_refused():
    tokenizer = Tokenizer(models.WordLevel({"tide": 0, "<unk>": 1}, unk_token="<unk>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 99)])
    with pytest.raises(ModelFileError, match=r"returns id 99, but its vocabulary ends at 1(.|\n)*hint:"):
        _data(["tide"] * 40, tokenizer)


def test_labels_are_the_next_tokens_and_nothing_is_lost(tokenizer):
    text = "the tide goes out and the tide comes in " * 20
    data = _data([text], tokenizer, batch_size=2)
    stream = [*tokenizer.encode(text).ids, 0]
    windows = [stream[i : i + 9] for i in range(0, len(stream) - 8, 9)]
    held_out = [row for batch in data.held_out for row in zip(batch["tokens"], batch["labels"], strict=True)]
    real = [(*tokens, labels[-1]) for tokens, labels in held_out if (labels >= 0).any()]
    num_train = data.num_train_tokens // 9
    assert real == [tuple(window) for window in windows[num_train:]]
    per_epoch = [data.train[i] for i in range(num_train // 2)]
    seen = {(*row, last) for b in per_epoch for row, last in zip(b["tokens"].tolist(), b["labels"][:, -1], strict=True)}
    assert seen <= {tuple(window) for window in windows[:num_train]}
    assert len(per_epoch) * 2 >= num_train - 1
    for batch in per_epoch:
        np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
    assert len(windows) - num_train == max(1, round(len(windows) * 0.1))


def test_the_last_held_out_batch_is_filled_with_ignored_rows(tokenizer):
    data = _data(["the tide goes out " * 60], tokenizer, batch_size=7)
    last = data.held_out[-1]
    assert last["tokens"].shape == (7, 8)
    assert (last["tokens"] >= 0).all()
    real = sum(int((row >= 0).all()) for batch in data.held_out for row in batch["labels"])
    assert real == data.num_held_out_tokens // 9
    assert {int(row[0]) for row in last["labels"] if (row < 0).any()} <= {-100}


def test_the_batch_of_a_step_depends_on_the_seed_alone(tokenizer):
    documents = [f"the tide {i} goes out and comes in" for i in range(40)]
    one, same, other = (_data(documents, tokenizer, seed=s) for s in (1, 1, 2))
    for step in (0, 3, 200):
        np.testing.assert_array_equal(one.train[step]["tokens"], same.train[step]["tokens"])
    assert (one.train[0]["tokens"] != other.train[0]["tokens"]).any()
    assert (one.train[0]["tokens"] != one.train[1]["tokens"]).any()


def test_a_smaller_corpus_than_a_batch_repeats(tokenizer):
    data = _data(["the tide goes out and the tide comes in again and again"], tokenizer, batch_size=64)
    assert data.train[0]["tokens"].shape == (64, 8)


def test_data_shorter_than_a_sequence_is_refused(tokenizer):
    with pytest.raises(DataError, match=r"too few for one training and one held-out(.|\n)*202 tokens(.|\n)*hint:"):
        _data(["the tide"], tokenizer, seq_len=100)


@pytest.mark.parametrize("change", [{"seq_len": 0}, {"batch_size": 0}, {"held_out_fraction": 1.0}])
def test_sizes_out_of_range_are_refused(tokenizer, change):
    with pytest.raises(ConfigError, match=f"{next(iter(change))} must be "):
        _data(["the tide " * 50], tokenizer, **change)


def test_progress_counts_documents(tokenizer):
    seen = []
    _data(["the tide goes out"] * 600, tokenizer, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(256, 600), (512, 600), (600, 600)]
