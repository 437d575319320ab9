"""`lowtide generate` from arguments to answers, and every way to call it wrongly."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lowtide import lora, models
from lowtide.cli import _generate as command
from lowtide.cli import main
from lowtide.models import _generation as generation


@pytest.fixture
def generate(tiny_model_dir, capfd):
    """Run the command on a tiny model; returns exit status, standard output and standard error."""

    def run(*flags, model=tiny_model_dir):
        status = main(["generate", "--model", str(model), *map(str, flags)])
        return (status, *capfd.readouterr())

    return run


@pytest.fixture
def adapters(tiny_model_dir, tmp_path):
    base = models.load(tiny_model_dir)
    for name in "ab":
        adapted = lora.add(base, lora.Config(rank=2, targets="**/{q,v}_proj"), key=jax.random.key(ord(name)))
        lora.save(jax.tree.map(lambda x: x + 0.3 if x.ndim == 3 else x, adapted), tmp_path / name)
    return [tmp_path / name for name in "ab"]


def _records(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.mark.sentinel
@pytest.mark.slow
def test_adapters_answer_the_same_prompts_into_a_file(generate, adapters, tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text('{"prompt": "the tide"}\n\n{"prompt": "out", "other": 1}\n')
    flags = [flag for adapter in adapters for flag in ("--adapter", adapter)]
    sizes = ["--max-new-tokens", 6, "--num-samples", 2, "--batch-size", 3, "--output", out]
    status, printed, said = generate("--prompts", prompts, *flags, *sizes)
    assert (status, printed) == (0, "")
    assert "8 of 8 answers" in said and "tokens/s" in said and "keys and values take" in said
    records = _records(out)
    cases = [(str(a), p, s) for a in adapters for p in ("the tide", "out") for s in (0, 1)]
    assert [(r["adapter"], r["prompt"], r["sample"]) for r in records] == cases
    assert len({r["text"] for r in records}) > 2
    assert all(r["ended"] or r["num_tokens"] == 6 for r in records)
    again, _, _ = generate("--prompts", prompts, *flags, *sizes)
    assert again == 2 and _records(out) == records


@pytest.mark.slow
def test_one_answer_is_printed_as_it_comes_and_equals_the_batched_one(generate, tmp_path):
    flags = ["--max-new-tokens", 7, "--seed", 3]
    status, streamed, said = generate("--prompt", "the tide", *flags)
    assert status == 0 and "tokens in" in said
    (tmp_path / "p.txt").write_text("the tide\r\n")
    generate("--prompts", tmp_path / "p.txt", *flags, "--output", tmp_path / "a.jsonl")
    assert _records(tmp_path / "a.jsonl")[0]["text"] == streamed[:-1]
    status, printed, _ = generate("--prompt", "the tide", *flags, "--num-samples", 2)
    assert status == 0 and streamed[:-1] in printed and "sample 1" in printed


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_a_gpu_gets_layers_apart_where_the_base_is_used_once(generate, adapters, count, monkeypatch):
    flags = ["--prompt", "the tide", "--max-new-tokens", 3]
    flags += [flag for adapter in adapters[:count] for flag in ("--adapter", adapter)]
    _, want, _ = generate(*flags)
    apart = []
    name = "stream" if count == 1 else "generate_batch"
    run = getattr(models, name)

    def watched(model, *args, **options):
        apart.append(isinstance(model.layers, tuple))
        return run(model, *args, **options)

    monkeypatch.setattr(models, name, watched)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    status, answer, _ = generate(*flags)
    assert (status, answer) == (0, want)
    assert apart == ([True] if count == 1 else [False, False])


def test_end_tokens_of_both_files_end_an_answer(generate, tiny_model_dir, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(tiny_model_dir, model)
    flags = ["--prompt", "the tide", "--temperature", 0, "--max-new-tokens", 6]
    out = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    generate(*flags, "--output", out[0], model=model)
    tokenizer = models.load_tokenizer(model)
    text = _records(out[0])[0]["text"]
    end = models.generate(models.load(model), _ids(tokenizer, "the tide"), 1, key=jax.random.key(0), temperature=0)[-1]
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [int(end)]}))
    generate(*flags, "--output", out[1], model=model)
    assert text and _records(out[1])[0] | {"text": ""} == _records(out[1])[0]
    assert _records(out[1])[0]["ended"] and _records(out[1])[0]["num_tokens"] == 0


def _ids(tokenizer, text):
    return jax.numpy.asarray(tokenizer.encode(text).ids)


def test_an_interrupt_keeps_what_was_written(generate, tmp_path, monkeypatch):
    (tmp_path / "p.txt").write_text("the\ntide\n")
    whole = generation._batch
    calls = []

    def interrupted(*args, **options):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return whole(*args, **options)

    monkeypatch.setattr(generation, "_batch", interrupted)
    monkeypatch.setattr("lowtide.cli._main._end_quietly", lambda: None)
    out = tmp_path / "a.jsonl"
    flags = ["--batch-size", 1, "--max-new-tokens", 3, "--output", out]
    status, _, said = generate("--prompts", tmp_path / "p.txt", *flags)
    assert status == 130 and "1 of 2 answers" in said and "interrupted" in said
    assert [r["prompt"] for r in _records(out)] == ["the"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt", ""], "a prompt is empty"),
        (["--prompt", "x", "--adapter", ""], "--adapter is empty"),
        (["--prompt", "x", "--adapter", "a", "--adapter", "a"], "given twice"),
        (["--prompt", "x", "--adapter", "none"], "no such file"),
        (["--prompt", "x", "--top-p", "0"], "top_p must be a finite number above 0"),
        (["--prompt", "x", "--output", "a.txt"], "must be a .jsonl file"),
        (["--prompt", "x", "--output", "none/a.jsonl"], "cannot be written"),
        (["--prompts", "none.txt"], "cannot be read"),
        (["--prompts", "none.csv"], "unknown file type"),
        (["--chat", "--num-samples", "2"], "--chat supports only one conversation"),
    ],
)
def test_bad_arguments(generate, flags, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, _, said = generate(*flags)
    assert status == 2 and message in " ".join(said.split())
    assert not list(tmp_path.glob("*.jsonl"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "contains no prompt"),
        ("{", "not JSON"),
        ("[1]", "no prompt"),
        ('{"text": "a"}', "no prompt"),
        ('{"prompt": "a", "messages": []}', "no prompt"),
        ('{"messages": [{"role": "user"}]}', "no prompt"),
        ('{"messages": [{"role": "system"}, {"role": "user", "content": "a"}]}', "no prompt"),
        ('{"prompt": "a", "tools": [{"name": "f"}]}', 'except "tools" next to "messages"'),
        ('{"messages": [{"role": "user", "content": 4}]}', "messages.0.content"),
        ('{"messages": [{"role": "user", "content": "a"}], "tools": {}}', "tools has an unusable value"),
    ],
)
def test_bad_prompts(generate, text, message, tmp_path):
    (tmp_path / "p.jsonl").write_text(text)
    status, _, said = generate("--prompts", tmp_path / "p.jsonl")
    assert status == 2 and message in said


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture
def chat_dir(tiny_model_dir, tmp_path):
    shutil.copytree(tiny_model_dir, tmp_path / "chat")
    (tmp_path / "chat" / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path / "chat"


@pytest.mark.slow
def test_a_conversation_ends_with_an_empty_line(generate, chat_dir, monkeypatch):
    asked = iter(["hello", "more", ""])
    seen = []
    whole = models.Conversation._tokens

    def tokens(self, prompt, *rest):
        seen.append(models.load_tokenizer(chat_dir).decode(prompt))
        return whole(self, prompt, *rest)

    monkeypatch.setattr(models.Conversation, "_tokens", tokens)
    monkeypatch.setattr("builtins.input", lambda _: next(asked))
    status, printed, _ = generate("--chat", "--max-new-tokens", 3, "--temperature", 0, model=chat_dir)
    assert status == 0
    assert seen[0] == "<user>hello<a>"
    assert seen[1].startswith("<user>hello<assistant>") and seen[1].endswith("<user>more<a>")
    answer = seen[1].removeprefix("<user>hello<assistant>").removesuffix("<user>more<a>")
    assert printed.startswith(answer)


def test_messages_are_rendered_by_the_models_template(generate, chat_dir, tiny_model_dir, tmp_path):
    (tmp_path / "m.jsonl").write_text('{"messages": [{"role": "user", "content": "the tide"}]}\n{"prompt": "out"}\n')
    (tmp_path / "p.jsonl").write_text('{"prompt": "<user>the tide<a>"}\n{"prompt": "out"}\n')
    flags = ["--max-new-tokens", 4, "--temperature", 0, "--output"]
    for name in "mp":
        status, *_ = generate(
            "--prompts", tmp_path / f"{name}.jsonl", *flags, tmp_path / f"{name}-out.jsonl", model=chat_dir
        )
        assert status == 0
    rendered, written = (_records(tmp_path / f"{name}-out.jsonl") for name in "mp")
    assert [r["text"] for r in rendered] == [r["text"] for r in written]
    assert rendered[0]["messages"][0]["content"] == "the tide"
    status, _, said = generate("--prompts", tmp_path / "m.jsonl")
    assert status == 2 and "no chat template" in said
    named = ["--chat-template", chat_dir / "chat_template.jinja", *flags, tmp_path / "named.jsonl"]
    status, _, said = generate("--prompts", tmp_path / "m.jsonl", *named)
    assert status == 0 and "without its chat template" not in said
    assert _records(tmp_path / "named.jsonl") == rendered


def test_tools_and_turns_that_call_them_are_rendered(generate, chat_dir, tmp_path, monkeypatch):
    (tmp_path / "chat" / "chat_template.jinja").write_text(
        "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}<{{ m.role }}>"
        "{{ m.content if m.content is string else (m.content or []) | map(attribute='text') | join }}"
        "{% for c in m.tool_calls or [] %}({{ c.function.name }}){% endfor %}{% endfor %}"
    )
    tools = [{"type": "function", "function": {"name": "tide"}}]
    calls = [{"type": "function", "function": {"name": "tide", "arguments": {"at": "noon"}}}]
    asked, called = {"role": "user", "content": "when?"}, {"role": "assistant", "content": None, "tool_calls": calls}
    answered = {"role": "tool", "content": [{"type": "text", "text": "at 9"}]}
    records = [{"messages": [asked], "tools": tools}, {"messages": [asked, called, answered]}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, records)))
    seen, whole = [], command._messages_to_ids
    monkeypatch.setattr(command, "_messages_to_ids", lambda *given: seen.append(whole(*given)) or seen[-1])
    flags = ["--prompts", tmp_path / "p.jsonl", "--max-new-tokens", 1]
    assert generate(*flags, "--output", tmp_path / "o.jsonl", model=chat_dir)[0] == 0
    del called["content"]  # a null is read as a field that is not there
    answered["content"] = "at 9"  # parts are joined
    tokenizer = models.load_tokenizer(chat_dir)
    assert [tokenizer.decode(ids) for ids in seen[0]] == ["[tide]<user>when?", "<user>when?<assistant>(tide)<tool>at 9"]
    assert [{name: each[name] for name in each if name in ("messages", "tools")} for each in
            _records(tmp_path / "o.jsonl")] == records  # fmt: skip
    status, printed, _ = generate(*flags, model=chat_dir)
    assert status == 0 and "at 9" in printed


def test_a_weight_that_is_no_number_is_an_error(generate, tiny_model_dir, tmp_path):
    shutil.copytree(tiny_model_dir, tmp_path / "nan")
    file = tmp_path / "nan" / "model.safetensors"
    stored = load_file(file)
    stored["model.norm.weight"][0] = np.nan
    save_file(stored, file, {"format": "pt"})
    for flags in (["--num-samples", 2], []):
        status, _, said = generate("--prompt", "the tide", "--max-new-tokens", 2, *flags, model=tmp_path / "nan")
        assert status == 2 and "LT012" in said and "not finite" in said


def test_who_gives_text_to_a_model_of_chats_is_told(generate, chat_dir, monkeypatch):
    monkeypatch.setattr(models, "stream", lambda *_, **__: iter(()))
    for model, is_told in ((chat_dir, True), (None, False)):
        named = {"model": model} if model else {}
        status, _, said = generate("--prompt", "the tide", "--max-new-tokens", 1, **named)
        assert status == 0 and ("without its chat template" in said) == is_told


def test_a_text_ends_an_answer_and_is_no_part_of_it(generate, tmp_path):
    (tmp_path / "p.txt").write_text("the tide\nthe moon\n")
    flags = ["--temperature", 0, "--max-new-tokens", 24]
    _, whole, _ = generate("--prompt", "the tide", *flags)
    stop = whole[5:7]
    before = whole[: whole.index(stop)]
    _, printed, _ = generate("--prompt", "the tide", *flags, "--stop", "never said", "--stop", stop)
    assert printed == before + "\n"
    assert generate("--prompts", tmp_path / "p.txt", *flags, "--stop", stop, "--output", tmp_path / "o.jsonl")[0] == 0
    first = _records(tmp_path / "o.jsonl")[0]
    assert (first["text"], first["ended"]) == (before, True)
    assert generate("--prompt", "the tide", "--stop", "")[0] == 2


@pytest.mark.slow
def test_a_system_prompt_goes_before_conversations_without_one(generate, chat_dir, tmp_path, monkeypatch):
    asked = {"role": "user", "content": "when?"}
    records = [{"messages": [asked]}, {"messages": [{"role": "system", "content": "own"}, asked]}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, records)))
    seen, whole = [], command._messages_to_ids
    monkeypatch.setattr(command, "_messages_to_ids", lambda *given: seen.extend(whole(*given)) or seen)
    flags = ["--max-new-tokens", 1, "--system", "be brief"]
    prompts = ["--prompts", tmp_path / "p.jsonl", "--output", tmp_path / "o.jsonl"]
    assert generate(*prompts, *flags, model=chat_dir)[0] == 0
    texts = [models.load_tokenizer(chat_dir).decode(ids) for ids in seen]
    assert texts == ["<system>be brief<user>when?<a>", "<system>own<user>when?<a>"]
    assert [each["messages"] for each in _records(tmp_path / "o.jsonl")] == [each["messages"] for each in records]
    monkeypatch.setattr("builtins.input", lambda _, asked=["when?"]: asked.pop() if asked else "")
    seen.clear()
    assert generate("--chat", *flags, model=chat_dir)[0] == 0
    assert [models.load_tokenizer(chat_dir).decode(ids) for ids in seen] == texts[:1]
    status, _, said = generate("--prompt", "when?", "--system", "be brief")
    assert status == 2 and "--system is for conversations" in said


@pytest.mark.slow
def test_weights_are_stored_in_few_bits_for_an_answer(generate, monkeypatch):
    seen, load = [], models.load
    monkeypatch.setattr(models, "load", lambda *args, **options: seen.append(load(*args, **options)) or seen[-1])
    flags = ["--max-new-tokens", 2, "--quantize", "nf4", "--quantize-embeddings", "int8"]
    assert generate("--prompt", "the tide", *flags)[0] == 0
    weights = seen[0].layers["mlp"]["up_proj"]["weight"], seen[0].outer["embed"]["weight"]
    assert [weight.format for weight in weights] == ["nf4", "int8"]


def test_variables_of_the_template_are_given(generate, chat_dir, tmp_path, monkeypatch):
    (tmp_path / "chat" / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if not think %}(no thought){% endif %}{{ depth + 1 }}"
    )
    (tmp_path / "p.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "when?"}]}))
    seen, whole = [], command._messages_to_ids
    monkeypatch.setattr(command, "_messages_to_ids", lambda *given: seen.append(whole(*given)) or seen[-1])
    flags = ["--prompts", tmp_path / "p.jsonl", "--max-new-tokens", 1, "--template-arg"]
    assert generate(*flags, "think=false", "--template-arg", "depth=2", model=chat_dir)[0] == 0
    assert models.load_tokenizer(chat_dir).decode(seen[0][0]) == "when?(no thought)3"
    status, _, said = generate(*flags, "think", model=chat_dir)
    assert status == 2 and "--template-arg needs KEY=VALUE" in said
    status, _, said = generate("--prompt", "when?", "--template-arg", "think=true")
    assert status == 2 and "--template-arg is for conversations" in said
