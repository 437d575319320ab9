"""Fields that other trainers read: read with the same meaning, or refused by name."""

import json

import pytest

from lowtide.core import DataError
from lowtide.finetune.data import ChatTemplate, parse_record, read_records
from lowtide.finetune.data._encode import Encoder
from lowtide.models import load_tokenizer

ASKED, SAID = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"name": "tide", "arguments": {"at": 2}}
CALLED = {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]}
ARGUMENTS = "tool-call arguments are not a JSON object"
TOOL = {"type": "function", "function": {"name": "tide"}}


def text_call(arguments):
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": {**CALL, "arguments": arguments}}]}


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"messages": [ASKED, SAID], "system": "Be brief."}, [SYSTEM, ASKED, SAID]),
        ({"messages": [SYSTEM, ASKED, SAID], "system_prompt": "Be brief."}, [SYSTEM, ASKED, SAID]),
        ({"messages": [ASKED, SAID], "system": " "}, [ASKED, SAID]),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "Be brief."},
            [SYSTEM, ASKED, SAID],
        ),
        ({"prompt": [ASKED], "completion": [SAID], "system": "Be brief."}, [SYSTEM, ASKED, SAID]),
        ({"messages": [ASKED, {**SAID, "train": False}, SAID]}, [ASKED, {**SAID, "weight": 0}, SAID]),
        ({"messages": [ASKED, {**SAID, "trainable": 0}, SAID]}, [ASKED, {**SAID, "weight": 0}, SAID]),
        ({"messages": [ASKED, {**SAID, "loss_mask": 0}, SAID]}, [ASKED, {**SAID, "weight": 0}, SAID]),
        ({"messages": [ASKED, {**SAID, "masked": True}, SAID]}, [ASKED, {**SAID, "weight": 0}, SAID]),
        ({"messages": [ASKED, {**SAID, "loss": True, "masked": False}]}, [ASKED, SAID]),
        ({"messages": [ASKED, text_call('{"at": 2}'), SAID]}, [ASKED, CALLED, SAID]),
        ({"messages": [ASKED, {"role": "assistant", "function_call": CALL}, SAID]}, [ASKED, CALLED, SAID]),
        *(
            (
                {
                    "conversations": [
                        {"from": "human", "value": "a"},
                        {"from": "function_call", "value": value},
                        {"from": "gpt", "value": "b"},
                    ]
                },
                [ASKED, CALLED, SAID],
            )
            for value in (
                json.dumps(CALL),
                json.dumps([CALL]),
                json.dumps({**CALL, "arguments": json.dumps(CALL["arguments"])}),
            )
        ),
        (
            {"messages": [ASKED, SAID, {"role": "function", "name": "tide", "content": "2 m"}, SAID]},
            [ASKED, SAID, {"role": "tool", "name": "tide", "content": "2 m"}, SAID],
        ),
        ({"messages": [ASKED, {**SAID, "reasoning_content": None, "tool_calls": None}]}, [ASKED, SAID]),
        ({"messages": [ASKED, {**CALLED, "content": None}, SAID]}, [ASKED, CALLED, SAID]),
        ({"messages": [ASKED, text_call({"at": None}), SAID]}, [ASKED, text_call({"at": None}), SAID]),
    ],
)
def test_a_field_with_one_meaning_is_read(record, messages):
    example = parse_record(record, "a.jsonl:1", {})
    assert list(example.messages) == messages
    assert example.unread == ()
    if "completion" in record:
        assert example.first == len(messages) - 1, "the system is not learned"


def test_functions_are_tools_and_an_empty_text_is_no_tools():
    assert parse_record({"messages": [ASKED, SAID], "functions": [TOOL["function"]]}, "", {}).tools == [TOOL]
    assert parse_record({"messages": [ASKED, SAID], "tools": ""}, "", {}).tools is None


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"messages": [SYSTEM, ASKED, SAID], "system": "Be long."}, "system differs from the system prompt"),
        ({"messages": [ASKED, SAID], "system": "a", "system_prompt": "b"}, "system and system_prompt next to messages"),
        ({"instruction": "a", "output": "b", "system_prompt": "c"}, "system_prompt next to instruction and output"),
        ({"prompt": "a", "completion": "b", "system": "c"}, "system next to prompt and completion"),
        ({"messages": [ASKED, SAID], "images": ["a.png"]}, "the record has images"),
        ({"messages": [ASKED, {**SAID, "train": "no"}]}, "a turn has train = 'no'"),
        (
            {"messages": [ASKED, text_call("at 2"), SAID]},
            ARGUMENTS,
        ),
        ({"messages": [ASKED, text_call("[2]"), SAID]}, ARGUMENTS),
        (
            {"messages": [ASKED, SAID], "tools": [TOOL], "functions": [TOOL["function"]]},
            "a record has both",
        ),
    ],
)
def test_a_field_that_would_change_the_meaning_is_refused(record, text):
    with pytest.raises(DataError, match=f"^\\[LT005\\] a.jsonl:1: {text}"):
        parse_record(record, "a.jsonl:1", {})


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"messages": [ASKED, SAID], "functions": 5}, "functions must be a list, not 5"),
        ({"messages": [ASKED, {**SAID, "function_call": "auto"}]}, "the function_call of a turn cannot be read"),
        ({"messages": [ASKED, {**CALLED, "function_call": CALL}]}, "the function_call of a turn cannot be read"),
        ({"text": "see <image>", "images": ["a.png"]}, "the record has images"),
    ],
)
def test_values_of_another_type_are_refused(record, text):
    with pytest.raises(DataError, match=f"{text}(?s:.*)hint: "):
        parse_record(record, "a.jsonl:1", {})


def test_functions_may_be_json_text_and_labels_of_texts_are_columns():
    functions = json.dumps([TOOL["function"]])
    assert parse_record({"messages": [ASKED, SAID], "functions": functions}, "", {}).tools == [TOOL]
    labelled = parse_record({"text": "a", "label": False, "system": "b", "image": "a.png"}, "", {})
    assert labelled.unread == ("label", "system", "image")


def test_columns_that_nobody_reads_are_known(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"id": 3, "source": "web", "messages": [ASKED, SAID], "label": True, "images": []}))
    (example,) = read_records(file, {})
    assert example.unread == ("id", "source")


def test_parts_that_are_text_are_joined_and_others_are_refused():
    parts = [{"type": "text", "text": "line 1\n"}, {"type": "input_text", "text": "'2'"}, {"text": " "}]
    answer = {"role": "assistant", "content": [{"type": "output_text", "text": "b"}]}
    example = parse_record({"messages": [{"role": "user", "content": parts}, answer]}, "a:1", {})
    assert [each["content"] for each in example.messages] == ["line 1\n'2' ", "b"]
    for part in ({"type": "thinking", "text": "hm"}, {"type": "image_url", "image_url": "x"}):
        with pytest.raises(DataError, match=f"a:1: a part of a message has the type '{part['type']}'"):
            parse_record({"prompt": [{"role": "user", "content": [part]}], "completion": [answer]}, "a:1", {})
    for broken in ("text", {"type": "text", "text": 1}):
        with pytest.raises(DataError, match="a:1"):
            parse_record({"messages": [{"role": "user", "content": [broken]}]}, "a:1", {})


def test_columns_name_a_system_prompt_and_list_what_is_not_read():
    record = {"conversations": [ASKED, SAID], "tools": [TOOL], "system": "Be brief.", "id": 3}
    with pytest.raises(DataError, match="--columns messages=conversations,tools=tools,system=system"):
        parse_record(record, "d:1", {})
    columns = {"messages": "conversations", "tools": "tools", "system": "system"}
    example = parse_record(record, "d:1", columns)
    assert (example.messages, example.tools, example.unread) == ((SYSTEM, ASKED, SAID), [TOOL], ("id",))
    example = parse_record(record, "d:1", {"messages": "conversations"})
    assert example.unread == ("tools", "system", "id")


def test_a_null_turn_of_conversations_is_empty_as_one_of_messages_is():
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": None}]
    example = parse_record({"conversations": turns}, "d:1", {})
    assert example.messages == (ASKED, {"role": "assistant", "content": ""})


def test_a_label_that_is_no_verdict_and_fields_that_the_template_leaves_out_are_listed(tiny_model_dir):
    record = {"messages": [ASKED, {**SAID, "reasoning_content": "c", "name": "d"}], "label": 3}
    example = parse_record(record, "", {})
    assert example.unread == ("label",)
    assert parse_record({"a": "x", "label": "y"}, "", {"prompt": "a", "completion": "label"}).unread == ()
    source = "{% for m in messages %}{{ m.content }}{{ m.name }}{% endfor %}"
    template = ChatTemplate(source=source, special={}, where="")
    encoder = Encoder(load_tokenizer(tiny_model_dir), template, end_token=None, loss_on="all")
    assert encoder.unread_in(example) == {"messages.reasoning_content"}


@pytest.mark.parametrize(
    ("content", "position", "hint"),
    [
        ("[{'text': 'a'}]", "2", "json.dumps"),
        ('[{"text": "a"},]', "1[45]", "remove the comma"),  # Python 3.13 names the place of the comma
        ('[{"text": "a"}', "14", "truncated or damaged"),
    ],
)
def test_a_list_that_is_not_json_gets_the_hint_that_repairs_it(content, position, hint, tmp_path):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(DataError, match=rf"a.json: not readable as JSON(.|\n)*char {position}\)(.|\n)*hint: .*{hint}"):
        list(read_records(tmp_path / "a.json", {}))
