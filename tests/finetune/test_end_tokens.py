"""Answers end at the tokens of config.json, of the tokenizer, and of the chat template's turns."""

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from lowtide import models
from lowtide.finetune import Finetune, FinetuneConfig, config_from_dict, load_end_tokens
from lowtide.finetune._base import _copy_config_keys, with_end_tokens
from lowtide.finetune.data._load import load_data
from lowtide.models._config_file import config_to_hf

from ..models.kinds import KINDS

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content }}<|im_end|>{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "chatml": (CHATML, "<|im_end|>"),
    "eos": ("{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}", "<|endoftext|>"),
    "thinks": ("<|im_start|><|im_start|>{{ messages[-1].content | trim }}\n<|im_end|><|endoftext|>", "<|im_end|>"),
    "none": ("{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n{% endfor %}", None),
    "broken": ("{% for m in messages %}{{ m.content }}", None),
    "refuses": ("{{ raise_exception('only tools') }}", None),
}


@pytest.fixture
def base(tiny_model_dir, tmp_path):
    """A base model whose config.json names the end of a document, with the tokens of a chat in its tokenizer."""
    folder = tmp_path / "base"
    shutil.copytree(tiny_model_dir, folder)
    tokenizer = models.load_tokenizer(folder)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    document = tokenizer.token_to_id("<|endoftext|>")
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": document}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return folder


def ends_of(folder, **options):
    return load_end_tokens(models.load_config(folder), models.load_tokenizer(folder), folder, **options)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_turn_of_the_template_ends_an_answer(base, name):
    source, closing = TEMPLATES[name]
    (base / "chat_template.jinja").write_text(source)
    tokenizer, ends = models.load_tokenizer(base), ends_of(base)
    document = tokenizer.token_to_id("<|endoftext|>")
    turn = None if closing is None else tokenizer.token_to_id(closing)
    assert (ends.text, ends.turn, ends.is_turn_open) == (document, turn, name == "none")
    assert ends.answer == tuple(dict.fromkeys(id for id in (document, turn) if id is not None))
    if turn is not None and turn > document:  # a model without an embedding of the token cannot learn it
        config = dataclasses.replace(models.load_config(base), vocab_size=turn)
        ends = load_end_tokens(config, tokenizer, base)
        assert (ends.turn, ends.is_turn_open, ends.answer) == (None, True, (document,))


def test_a_model_without_an_end_takes_that_of_its_tokenizer(base, tmp_path):
    config = json.loads((base / "config.json").read_text())
    document = config.pop("eos_token_id")
    (base / "config.json").write_text(json.dumps(config))
    assert ends_of(base).text == document
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": f"the tide {i}", "completion": " goes out"}) for i in range(40)))
    settings = config_from_dict({"data": str(rows), "seq_len": 16, "batch_size": 2}, "a test")
    data = load_data(settings, base, models.load_tokenizer(base), end_token=ends_of(base).text)
    labels = data.train[0]["labels"]
    assert (labels == document).any()
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        (base / "tokenizer_config.json").unlink(missing_ok=True)
        if file == "special_tokens_map.json":
            (base / file).write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
            assert ends_of(base).text == models.load_tokenizer(base).token_to_id("<|im_end|>")
    (base / "special_tokens_map.json").unlink()
    assert (ends_of(base).text, ends_of(base).answer) == (None, ())


def test_what_is_written_says_where_answers_end(base):
    (base / "chat_template.jinja").write_text(CHATML)
    config, ends = models.load_config(base), ends_of(base)
    (file,) = with_end_tokens({}, ends, config).values()
    assert json.loads(file)["eos_token_id"] == list(ends.answer) and len(ends.answer) == 2
    theirs = {"generation_config.json": b'{"temperature": 0.6, "eos_token_id": 1}'}
    assert json.loads(with_end_tokens(theirs, ends, config)["generation_config.json"])["temperature"] == 0.6
    (base / "chat_template.jinja").unlink()
    assert with_end_tokens({}, ends_of(base), config) == {}


def test_a_model_that_is_tuned_as_a_whole_has_them_and_the_dtype_that_was_asked_for(base, tmp_path):
    (base / "chat_template.jinja").write_text(CHATML)
    (base / "generation_config.json").write_text('{"temperature": 0.6}')
    ends = ends_of(base)
    for save_dtype, dtype in (("auto", "float32"), ("bfloat16", "bfloat16")):
        run = SimpleNamespace(
            config=FinetuneConfig(full=True, save_dtype=save_dtype),
            trainer=SimpleNamespace(model=models.load(base), sharding=None),
            **{"directory": base, "tokenizer_dir": base, "out": tmp_path / dtype, "ends": ends},
            **{"write_memory": lambda table: None, "_processes": SimpleNamespace(is_first=True)},
        )
        Finetune.finish(run, None)
        written = tmp_path / dtype / "model"
        assert models.load_shapes(written).outer["embed"]["weight"].dtype == dtype
        assert json.loads((written / "config.json").read_text())["torch_dtype"] == dtype
        generation = json.loads((written / "generation_config.json").read_text())
        assert generation == {"temperature": 0.6, "eos_token_id": list(ends.answer)}
        assert ends_of(written) == ends and len(ends.answer) == 2


def test_a_merged_phi3_keeps_the_padding_token_of_its_base(tmp_path: Path) -> None:
    written = config_to_hf(KINDS["phi3"], "float32")
    assert written["pad_token_id"] is None
    for folder, changes in (("base", {"pad_token_id": 1}), ("out", {})):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps({**written, **changes}))
    _copy_config_keys(tmp_path / "base", tmp_path / "out", models.load_config(tmp_path / "base"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["pad_token_id"] == 1
