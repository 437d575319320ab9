import csv
import json
import os

import pytest

from lowtide.core import ConfigError, DataError
from lowtide.finetune.data import is_records, parse_columns, read_records
from lowtide.finetune.data._formats import RECORD_SUFFIXES
from lowtide.finetune.data._read import _READERS

CHAT = {"messages": [{"role": "user", "content": "ebb?"}, {"role": "assistant", "content": "flow"}]}
RECORDS = {
    "text": ({"text": "the tide", "id": 1}, "text"),
    "prompt": ({"prompt": "ebb", "completion": " and flow"}, "prompt"),
    "alpaca": ({"instruction": "say", "input": "tide", "output": "tide"}, "alpaca"),
    "messages": (CHAT, "chat"),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "ebb?"}, {"from": "gpt", "value": "flow"}], "text": None},
        "chat",
    ),
    "messages of a prompt": ({"prompt": CHAT["messages"][:1], "completion": CHAT["messages"][1:]}, "chat"),
}


def _lines(path, *records):
    path.write_text("\n".join(each if isinstance(each, str) else json.dumps(each) for each in records) + "\n")
    return path


def _read(path, *columns):
    return list(read_records(path, parse_columns(columns)))


def _error(path, *columns):
    with pytest.raises(DataError) as caught:
        _read(path, *columns)
    assert "hint:" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", [name for name in RECORDS if name != "sharegpt"])
def test_kinds_are_found_from_the_fields(tmp_path, name):
    record, kind = RECORDS[name]
    (found,) = _read(_lines(tmp_path / "a.jsonl", record))
    assert (found.kind, found.where) == (kind, f"{tmp_path}/a.jsonl:1")
    if kind == "chat":
        assert list(found.messages) == CHAT["messages"]
        assert found.first == (1 if "prompt" in record else 0)


def test_conversations_become_messages(tmp_path):
    record = {"conversations": RECORDS["sharegpt"][0]["conversations"]}
    (found,) = _read(_lines(tmp_path / "a.jsonl", record))
    assert list(found.messages) == CHAT["messages"]
    turns = [{**each, "weight": weight} for each, weight in zip(record["conversations"], (None, 0), strict=True)]
    (found,) = _read(_lines(tmp_path / "a.jsonl", {"conversations": turns}))
    assert [each.get("weight") for each in found.messages] == [None, 0]
    record["conversations"][0]["from"] = "narrator"
    assert "unknown speaker 'narrator'" in _error(_lines(tmp_path / "a.jsonl", record))


def test_messages_that_are_called_conversations_are_named_as_what_they_are(tmp_path):
    file = _lines(tmp_path / "a.jsonl", {"conversations": CHAT["messages"], "tools": []})
    columns = _error(file).split("--columns ")[1].split()[0].split(",")
    assert list(_read(file, *columns)[0].messages) == CHAT["messages"]


def test_blank_records_are_told_from_wrong_ones(tmp_path):
    file = _lines(tmp_path / "a.jsonl", {"text": "a"}, "", {"text": " "}, {"text": None}, {"text": "b"})
    assert [each and each.text for each in _read(file)] == ["a", None, None, "b"]


def test_roles_that_only_a_template_knows_are_left_to_it(tmp_path):
    messages = [{"role": role, "content": "x"} for role in ("developer", "ipython", "tool", "model", "assistant")]
    (example,) = read_records(_lines(tmp_path / "a.jsonl", json.dumps({"messages": messages})), {})
    assert [each["role"] for each in example.messages] == [each["role"] for each in messages]


def test_columns_say_which_field_is_meant(tmp_path):
    file = _lines(tmp_path / "a.jsonl", {"chat": CHAT["messages"], "text": "x", "question": "q", "answer": "a"})
    assert _read(file, "messages=chat")[0].kind == "chat"
    found = _read(file, "prompt=question", "completion=answer")[0]
    assert (found.prompt, found.text) == ("q", "a")
    assert _read(file)[0].text == "x"
    assert "no field 'talk'" in _error(file, "messages=talk")
    for word in ("messages", "message=chat", "text="):
        with pytest.raises(ConfigError, match=r"columns: (.|\n)*hint:"):
            parse_columns((word,))


def test_several_kinds_at_once_and_one_after_the_other_are_refused(tmp_path):
    text = _error(_lines(tmp_path / "a.jsonl", {**CHAT, "text": "x"}))
    assert "several kinds" in text
    assert "--columns messages=messages" in text
    alpaca, tools = {"instruction": "a", "input": "b", "output": "c", "text": "abc"}, [{"name": "f"}]
    for record, left in ((alpaca, ["b"]), ({**CHAT, "tools": tools, "text": "x"}, [tools])):  # the hint loses nothing
        file = _lines(tmp_path / "a.jsonl", record)
        found = _read(file, *_error(file).split("--columns ")[1].split()[0].split(","))[0]
        assert [found.more or found.tools] == left
    file = _lines(tmp_path / "a.jsonl", {"chat": CHAT["messages"], "mine": tools, "text": "x"})
    asked = _error(file, "messages=chat", "tools=mine", "text=text")
    assert "--columns messages=chat,tools=mine" in asked
    assert ":2: the record has another kind" in _error(_lines(tmp_path / "a.jsonl", {"text": "x"}, CHAT))
    text = _error(_lines(tmp_path / "a.jsonl", {"question": "x"}))
    assert "the record matches no known kind" in text
    assert "fields 'question'" in text


BAD_LINES = {
    '{"text": "cut': "a.jsonl:2: not readable as JSON",
    "[1]": "not a JSON object",
    '{"text": 1}': "text has an unusable value",
    '{"messages": [{"role": "user", "content": "x"}], "tools": [{"default": NaN}]}': "a number in a tool is not finite",
    '{"text": "a", "text": "b"}': "occurs twice",
    '{"text": "\\ud800"}': "surrogates",
    '{"text":' + "[" * 5000 + "]" * 5000 + "}": "not readable as JSON",
    '{"messages": [{"role": "user"}, 3]}': "messages.1",
    '{"messages": "hello"}': "not readable as JSON",
    '{"messages": [{"content": "x"}]}': "messages.0.role is missing",
    '{"messages": [{"role": "user", "content": "x"}, {"role": "asistant", "content": "y"}]}': "hint: write assistant",
    '{"messages": [{"role": "human", "content": "x"}, {"role": "gpt", "content": "y"}]}': "hint: write user",
    '{"instruction": "x", "output": "y", "system": "z"}': "system next to instruction",
    '{"instruction": "x", "output": "y", "history": [["a", "b"]]}': "history is not read with instruction",
    '{"prompt": [{"role": "User", "content": "x"}], "completion": [{"role": "a", "content": "y"}]}': "hint: write user",
    '{"messages": [{"role": "user", "content": 4}]}': "messages.0.content",
    '{"messages": [{"role": "assistant", "content": "x", "weight": 0.5}]}': "a turn has the weight 0.5",
    '{"conversations": [{"from": "gpt", "value": "x", "weight": true}]}': "a turn has the weight True",
    '{"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]}': "has the type 'image'",
    '{"prompt": "x", "completion": [{"role": "assistant", "content": "y"}]}': "one of prompt and completion",
    '{"instruction": "x", "output": ["y"]}': "output has an unusable value",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=lambda line: line[:30])
def test_a_bad_line_is_named(tmp_path, line):
    text = _error(_lines(tmp_path / "a.jsonl", "", line))
    assert "a.jsonl:2" in text
    assert BAD_LINES[line] in text


def test_columns_that_are_not_read_may_hold_nan(tmp_path):
    line = '{"text": "a", "score": NaN, "bounds": [-Infinity, 1e999]}'
    assert [each.text for each in _read(_lines(tmp_path / "a.jsonl", line, line))] == ["a", "a"]
    turn = {"role": "user", "content": "x", "score": float("nan")}
    assert _read(_lines(tmp_path / "b.jsonl", {"messages": [turn, {"role": "assistant", "content": "y"}]}))
    (tmp_path / "a.json").write_text(f"[{line}]")
    assert [each.text for each in _read(tmp_path / "a.json")] == ["a"]


def test_json_is_a_list_of_objects(tmp_path):
    file = tmp_path / "a.json"
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps([CHAT, CHAT]).encode())
    assert [each.where for each in _read(file)] == [f"{file}: record 1", f"{file}: record 2"]
    for content, said in {
        '[{"text": "a"}': "not readable as JSON",
        '{"text": "a"}': "not a list",
        "[1]": "record 1 is not an object",
        '[], "x": []': "not readable as JSON",
        "": "the file is empty",
    }.items():
        file.write_text(content)
        assert said in _error(file)


def test_json_lines_are_read_whatever_they_are_named(tmp_path):
    file = _lines(tmp_path / "a.json", "\ufeff" + json.dumps({"text": "a"}), "", {"text": "b"})
    assert [(each.text, each.where) for each in _read(file)] == [("a", f"{file}:1"), ("b", f"{file}:3")]
    file.write_text('{"text": "a"}\n{"text": ')
    assert "a.json:2: not readable as JSON" in _error(file)
    file.write_text('{\n"data": [\n{"text": "a"}\n]}')
    assert "not a list" in _error(file)
    for name in ("a.jsonl.gz", "a.xyz", "a"):
        (tmp_path / name).write_text("x")
        assert "not a supported file of records" in (said := _error(tmp_path / name)) and ".parquet" in said


def test_tables_of_text_have_a_header(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("prompt;completion\na;b\n")
    assert "columns seem to be separated by ';'" in _error(file)
    with open(file, "w", newline="", encoding="utf-8-sig") as out:
        rows = [["prompt", "completion"], ["a,\nb", 'c"d'], ["x" * 200_000, "y"]]
        csv.writer(out).writerows(rows)
    found = _read(file)
    assert [(each.prompt, each.text) for each in found] == [tuple(row) for row in rows[1:]]
    (tmp_path / "b.tsv").write_text(f"id\tmessages\n1\t{json.dumps(CHAT['messages'])}\n")
    assert list(_read(tmp_path / "b.tsv")[0].messages) == CHAT["messages"]
    for content, said in {
        "text\n": None,
        "text,text\na,b\n": "the header is missing, or repeats a name",
        "text,b\na\n": "a.csv:2: the header has 2 fields, but this row has 1",
        'text\n"a': "not a CSV file",
        "a;b\n1;2\n": "the record matches no known kind",
    }.items():
        file.write_text(content)
        assert _read(file) == [] if said is None else said in _error(file)
    file.write_bytes("text\ncaf\xe9\n".encode("latin-1"))
    assert "not UTF-8" in _error(file)


def test_a_folder_of_shards_is_read_in_order(tmp_path):
    for name in ("b", "a", "c"):
        _lines(tmp_path / f"{name}.jsonl", {"text": name})
    (tmp_path / "README.md").write_text("about")
    (tmp_path / ".hidden").write_text("x")
    assert is_records(tmp_path)
    assert [each.text for each in _read(tmp_path)] == ["a", "b", "c"]
    (tmp_path / "d.txt").write_text("text")
    assert [each.text for each in _read(tmp_path)] == ["a", "b", "c"]
    (tmp_path / "d.txt").write_text("text" * 100)  # more than the records: a folder of text
    assert not is_records(tmp_path)
    assert not is_records(tmp_path / "d.txt")


def test_messages_name_what_is_read():
    assert set(RECORD_SUFFIXES) == set(_READERS)


def test_a_pipe_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "a.jsonl")
    assert not is_records(tmp_path / "a.jsonl")  # what reads text says that it is a pipe
