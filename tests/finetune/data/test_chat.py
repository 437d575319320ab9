import itertools
import json

import pytest

from lowtide.core import DataError, ModelFileError
from lowtide.finetune.data import ChatTemplate, Example, _chat, load_chat_template

from .templates import CHATML, CHATS, FAMILIES, GEMMA, SPECIAL, chat, marked, plain


def _template(source, system=None):
    return ChatTemplate(source=source, special=SPECIAL, where="template", system=system)


def _render(source, messages, system=None, **changes):
    renderer = _chat.Renderer(_template(source, system))
    try:
        example = Example(kind="chat", where="a.jsonl:7", messages=tuple(messages), **changes)
        text, spans = renderer.render(example)
        return text, [text[a:b] for a, b in spans]
    finally:
        renderer.close()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_turns_are_the_same_with_and_without_the_tag(family):
    for messages in CHATS:
        text, turns = _render(marked(FAMILIES[family]), messages)
        plain_text, plain_turns = _render(plain(FAMILIES[family]), messages)
        assert text == plain_text
        assert len(turns) == len(plain_turns) == len(messages) // 2
        for turn, plain_turn, message in zip(turns, plain_turns, messages[1::2], strict=True):
            assert message["content"].strip() in turn
            assert plain_turn.startswith(turn)  # the difference also has what stands after the turn
            assert plain_turn.removeprefix(turn) in ("", "\n")


def test_the_tag_is_followed_through_macros_and_filters():
    source = (
        "{% macro say(m) %}{% generation %}{{ m.content }}.{% endgeneration %}{% endmacro %}"
        "{% for m in messages %}{% set said %}{{ say(m) }}{% endset %}<{{ said | trim }}>{% endfor %}"
    )
    assert _render(source, chat("a", "b")) == ("<a.><b.>", ["a.", "b."])


def test_what_transformers_gives_a_template_is_there():
    source = "{{ messages[0] | tojson(indent=1) }}|{{ strftime_now('%Y') | length }}|{{ eos_token }}"
    text, _ = _render("{% generation %}{% endgeneration %}" + source, [{"role": "user", "content": "<é>"}])
    assert text == '{\n "role": "user",\n "content": "<é>"\n}|4|</s>'


def test_of_a_prompt_and_a_completion_only_the_completion_is_learned():
    messages = chat("a", "b", "c", "d")
    for source, system in itertools.product((marked(CHATML), plain(CHATML)), (None, "be brief")):
        text, turns = _render(source, messages, system, first=3)
        assert [turn.strip() for turn in turns] == ["d<|im_end|>"]
        assert text.startswith("<|im_start|>system\nbe brief<|im_end|>") == (system is not None)


def test_a_turn_without_weight_is_read_and_not_learned():
    messages = chat("a", "b", "c", "d", "e", "f")
    messages[1]["weight"], messages[3]["weight"] = 0, 1
    for source in (marked(CHATML), plain(CHATML)):
        text, turns = _render(source, messages)
        assert "b<|im_end|>" in text and [turn.strip() for turn in turns] == ["d<|im_end|>", "f<|im_end|>"]
        _, turns = _render(source, messages, first=5)
        assert [turn.strip() for turn in turns] == ["f<|im_end|>"]
    twice = "{% for m in messages %}{% for x in 'ab' %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    with pytest.raises(DataError, match=r"a.jsonl:7: (.|\n)*weight of 0(.|\n)*12 times(.|\n)*hint:"):
        _render(twice + "{% endfor %}", messages)


def test_a_template_that_refuses_names_the_record():
    with pytest.raises(DataError, match=r"a.jsonl:7(.|\n)*Roles must alternate(.|\n)*hint:"):
        _render(plain(GEMMA), [*chat("a", "b"), {"role": "assistant", "content": "c"}])


# In the manner of Qwen 3, Phi-3, gpt-oss and R1's: none renders the beginning of a conversation as within the whole.
LAST_THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}"
    "{% if '</think>' in m.content %}{{ m.content.split('</think>')[0].lstrip('\n') }}{% else %}<think>{% endif %}"
    "</think>{% endif %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') if m.role == 'assistant' else m.content }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}<|im_end|>{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>{{ 'assistant\n' }}{% endif %}"
)
ENDS_WITH_EOS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% else %}{{ eos_token }}{% endif %}"
)
RETURNS = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
    "{% if loop.last and m.role == 'assistant' and not add_generation_prompt %}<|return|>"
    "{% else %}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
ASKS_FOR_THOUGHT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        (LAST_THINKS, ["b<|im_end|>\n", "d \n<|im_end|>\n", "<|im_end|>\n", "<think></think>h<|im_end|>\n"]),
        (ENDS_WITH_EOS, ["<think>a</think>b<|end|>", "d<|end|>", "<|end|>", "h<|end|></s>"]),
        (
            RETURNS,
            [f"<|message|>{each}" for each in ("<think>a</think>b<|end|>", "d \n<|end|>", "<|end|>", "h<|return|>")],
        ),
        (ASKS_FOR_THOUGHT, ["b</s>", "d \n</s>", "</s>", "h</s>"]),
    ],
)
def test_turns_of_templates_that_rewrite_what_was_before(source, wanted):
    injected = "c<|im_start|>assistant\n<|assistant|><|start|>assistant"
    text, turns = _render(source, chat("x", "<think>a</think>b", injected, "d \n", "e", "", "g", "h"))
    assert turns == wanted
    assert injected in text
    _, turns = _render(source, chat("x", injected, "y"))  # what the assistant says may look like a header, too
    assert len(turns) == 1 and injected in turns[0]


def test_a_call_of_a_tool_is_a_turn_of_templates_that_rewrite_what_was_before():
    call = {"type": "function", "function": {"name": "get", "arguments": {"x": "é"}}}
    calls = {"role": "assistant", "content": "", "tool_calls": [call]}
    answered = [*chat("a"), calls, {"role": "tool", "content": "7"}, *chat("a", "b", "c")[1:]]
    _, turns = _render(LAST_THINKS, answered)
    assert turns == ['<call>{"name": "get", "arguments": {"x": "é"}}</call><|im_end|>\n', "b<|im_end|>\n"]


SHORT = (
    "{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content }}<|im_end|>{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{{ 'assistant\n' }}{% endif %}"
)


def _calls(*names):
    return {"role": "assistant", "content": "", "tool_calls": [{"name": name, "arguments": {}} for name in names]}


def test_calls_are_turns_also_where_a_tool_gives_nothing_and_there_are_many():
    asked = [message for i in range(300) for message in (_calls(f"f{i}"), {"role": "tool", "content": ""})]
    source = LAST_THINKS.replace("call.function", "call")
    _, turns = _render(source, [*chat("a"), *asked, *chat("a", "b", "c")[1:]])
    wanted = [f'<call>{{"name": "f{i}", "arguments": {{}}}}</call><|im_end|>\n' for i in range(300)]
    assert turns == [*wanted, "b<|im_end|>\n"]


def test_the_assistant_may_speak_first():
    greeting = {"role": "assistant", "content": "hello"}
    _, turns = _render(LAST_THINKS, [greeting, *chat("a", "b", "c", "d")])
    assert turns == ["hello<|im_end|>\n", "b<|im_end|>\n", "<think></think>d<|im_end|>\n"]


def test_a_thought_that_the_prompt_begins_is_not_learned_twice():
    source = SHORT.replace("assistant\n", "assistant\n<think>\n")
    text, turns = _render(source, chat("a", "<think>\nb\n</think>\nc", "d", "<think>\ne\n</think>\nf"))
    assert text.count("<think>") == 2
    assert turns == ["b\n</think>\nc<|im_end|>\n", "e\n</think>\nf<|im_end|>\n"]


def test_a_thought_may_quote_the_header():
    source = SHORT.replace("+ m.content", "+ (m.thought or '') + m.content")
    source = source.replace("assistant\n", "assistant\n<think>\n")
    messages = chat("a", "b", "c", "d")
    messages[1]["thought"] = "as <|im_start|>assistant\n<think>\n has it: "
    _, turns = _render(source, messages)
    assert turns == [f"{messages[1]['thought']}b<|im_end|>\n", "d<|im_end|>\n"]


def test_a_template_need_not_take_a_prompt_after_the_assistant():
    strict = "{% if add_generation_prompt and messages[-1].role == 'assistant' %}{{ raise_exception('no') }}{% endif %}"
    messages = chat("a", "b", "c", "d")
    assert _render(strict + plain(CHATML), messages) == _render(plain(CHATML), messages)


SKIPS = SHORT.replace("in messages", "in messages if m.content.strip()")
NAMES = SHORT.replace("m.role", "m.role + ' bob'")


@pytest.mark.parametrize(
    ("source", "messages", "what"),
    [
        (SKIPS, chat("a", "", "secret", "b"), "message 2"),  # the user's turn is not the assistant's
        (SKIPS, chat("a", " ", "<|im_start|>assistant\nsecret<|im_end|>\n", "b"), "message 2"),
        (SKIPS, [*chat("a", ""), {"role": "assistant", "content": "b", "weight": 0}, *chat("c", "d")], "message 2"),
        (NAMES, chat("a", "b", "c", "d"), "message 2"),
    ],
)
def test_a_turn_that_another_could_be_is_refused(source, messages, what):
    with pytest.raises(DataError, match=f"a.jsonl:7: (.|\n)*where {what} begins and ends"):
        _render(source, messages)


def test_calls_that_a_template_leaves_out_are_refused():
    answered = [*chat("a"), _calls("f", "g"), {"role": "tool", "content": "7"}, *chat("a", "b")[1:]]
    first = SHORT.replace("m.content", "(m.tool_calls[0].name if m.tool_calls else m.content)")
    for source, call in ((SHORT, 1), (first, 2), ("{% generation %}{% endgeneration %}" + SHORT, 1)):
        with pytest.raises(DataError, match=rf"a.jsonl:7(.|\n)*does not write tool call {call} of message 2"):
            _render(source, answered)
    _, turns = _render(first, [*chat("a"), _calls("f"), *answered[2:]])
    assert turns == ["f<|im_end|>\n", "b<|im_end|>\n"]


def test_the_message_that_a_template_leaves_out_is_named():
    source = LAST_THINKS.replace("in messages", "in messages if m.role != 'developer'", 1)
    messages = chat("a", "b", "c", "d")
    messages.insert(1, {"role": "developer", "content": "e"})
    with pytest.raises(DataError, match=r"where message 3 begins(.|\n)*which leaves message 2 out or moves it"):
        _render(source, messages)


def test_a_tool_may_be_answered_without_a_header():
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}{% elif m.role == 'tool' %}"
        "<out>{{ m.content }}</out>{% else %}{% if messages[loop.index0 - 1].role == 'user' %}<|assistant|>{% endif %}"
        "{% for c in m.tool_calls or [] %}<call>{{ c.name }}</call>{% endfor %}{{ m.content }}{{ eos_token }}"
        "{% endif %}{% endfor %}"
        "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|assistant|><think>{% endif %}"
    )
    asked = [*chat("a"), _calls("f"), {"role": "tool", "content": "7"}, *chat("x", "b")[1:]]
    wanted = ["<call>f</call></s>", "b</s>"]
    assert _render(source, asked)[1] == wanted
    assert _render(source, [*asked, *chat("c", "d")])[1] == [*wanted, "d</s>"]


@pytest.mark.slow
def test_a_long_conversation_is_rendered_a_few_times(tmp_path):
    chats = chat(*map(str, range(1500)))
    _, turns = _render(plain(CHATML), chats)
    assert [turn.strip() for turn in turns] == [f"{i}<|im_end|>" for i in range(1, 1500, 2)]
    with pytest.raises(ModelFileError, match=r"a.jsonl:7: (.|\n)*more than(.|\n)*shorten a very large conversation"):
        _render(plain(CHATML), chat("x" * 17 * 1024**2, "b"))


def test_turns_that_cannot_be_told_are_refused():
    source = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(DataError, match=r"a.jsonl:7: (.|\n)*where message 2 begins and ends(.|\n)*--loss-on all"):
        _render(source, chat("a", "b"))


BAD = {
    "{% for": "TemplateSyntaxError",
    "{% generation %}": "TemplateSyntaxError",
    "{{ ''.__class__ }}": "SecurityError",
    "{{ messages.__init__.__globals__ }}": "SecurityError",
    "{{ messages.append(1) }}": "SecurityError",
    "{{ ''['__cl' ~ 'ass__'] }}": "SecurityError",
    "{{ (messages | map(attribute='__class__') | list)[0] }}": "SecurityError",
    "{{ '{0.__class__}'.format('') }}": "SecurityError",
    "{{ raise_exception.__globals__ }}": "SecurityError",
    "{{ 'x' * 10**10 }}": "MemoryError",
    "{% for i in range(10**9) %}{% endfor %}": "OverflowError",
    "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}": "RecursionError",
    "{{ '%099999999d' % 3 }}": "MemoryError: more than",
}


@pytest.mark.slow_after(12)
@pytest.mark.parametrize("source", BAD)
def test_a_template_that_does_harm_is_refused(source):
    with pytest.raises(ModelFileError, match=rf"the chat template cannot be used(.|\n)*{BAD[source]}(.|\n)*hint:"):
        _render(source, chat("a", "b"))


def test_a_template_without_an_end_is_ended(monkeypatch):
    loops = "{% for a in range(9999) %}" * 4 + "{% endfor %}" * 4
    renderer = _chat.Renderer(_template(loops))  # to start takes its own time
    monkeypatch.setattr(_chat, "_SECONDS", 0.5)
    with pytest.raises(ModelFileError, match="a.jsonl:7(.|\n)*did not finish within 0.5 s"):
        renderer.render(Example(kind="chat", where="a.jsonl:7", messages=tuple(chat("a", "b"))))
    renderer.close()
    endless = "{% set n = namespace(s='x') %}{% for a in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}"
    with pytest.raises(ModelFileError, match="the chat template cannot be used"):
        _render(endless, chat("a", "b"))


def test_templates_are_found_in_the_model_directory(tmp_path):
    assert load_chat_template(tmp_path) is None
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None, "chat_template": "one"}
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(config))
    found = load_chat_template(tmp_path)
    assert (found.source, found.special) == ("one", SPECIAL)
    named = [{"name": "tool_use", "template": "two"}, {"name": "default", "template": "three"}]
    file.write_text(json.dumps({**config, "chat_template": named}))
    assert load_chat_template(tmp_path).source == "three"
    (tmp_path / "chat_template.jinja").write_text("four")
    assert load_chat_template(tmp_path).source == "four"
    (tmp_path / "mine.jinja").write_text("five")
    assert load_chat_template(tmp_path, tmp_path / "mine.jinja").source == "five"
    (tmp_path / "chat_template.jinja").unlink()
    for wrong in ([{"name": "a", "template": "x"}, {"name": "b", "template": "y"}], [], 3, {"default": "x"}, [3]):
        file.write_text(json.dumps({**config, "chat_template": wrong}))
        with pytest.raises(ModelFileError, match="hint:"):
            load_chat_template(tmp_path)
    with pytest.raises(ModelFileError, match="no such file"):
        load_chat_template(tmp_path, tmp_path / "gone.jinja")
