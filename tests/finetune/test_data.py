import dataclasses
import json
import re

import pytest
from tokenizers import Tokenizer

from lowtide.cli._data_report import lost_tokens_warning
from lowtide.core import ConfigError, DataError
from lowtide.finetune import FinetuneConfig, config_from_dict, config_to_toml
from lowtide.finetune.data._load import load_data


def paired(config):
    return dataclasses.replace(config, objective="dpo", data="pairs.jsonl")


CHATS = [{"prompt": f"ask {i}", "completion": f" answer {i}"} for i in range(12)]
TEXTS = [{"text": f"the tide goes out {i} " * 4} for i in range(12)]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def load(tiny_model_dir, tmp_path):
    tokenizer = Tokenizer.from_file(f"{tiny_model_dir}/tokenizer.json")

    def made(records, name="data.jsonl", **settings):
        (tmp_path / name).write_text("\n".join(json.dumps(record) for record in records))
        settings = {"data": str(tmp_path / name), "batch_size": 2, "seq_len": 64, **settings}
        return load_data(FinetuneConfig(**settings), tiny_model_dir, tokenizer, end_token=0)

    return made


def test_text_keeps_its_windows_and_records_are_packed(load):
    text, records = load(TEXTS), load(CHATS)
    assert set(text.train[0]) == {"tokens", "labels"}
    assert text.report is None
    assert set(records.train[0]) == {"tokens", "labels", "segment_ids", "positions"}
    assert records.report.kind == "prompt"
    assert records.num_documents == 12
    assert load(TEXTS, packing="best-fit").report.kind == "text"
    assert load(CHATS, packing="none").report.num_rows == 11
    assert load(TEXTS, columns=("text=text",)).report.num_documents == 12


def test_a_batch_with_rows_more_than_once_is_said(load):
    assert load(CHATS, packing="none", batch_size=11).notes == ()
    (note,) = load(CHATS, packing="none", batch_size=12).notes
    assert note == "a batch repeats rows: --batch-size is 12, with 11 rows to train on"


def test_the_length_is_that_of_the_longest_record_and_lost_tokens_are_said(load):
    records = [{"prompt": "a ", "completion": "tide " * 200}, *CHATS * 4]
    whole = load(records, model="m", seq_len=0)
    assert whole.seq_len == whole.train[0]["tokens"].shape[1] and whole.report.num_cut == 0
    assert whole.seq_len % 64 == 0 and whole.notes == ()
    cut = load(records)
    assert cut.report.num_cut == 1 and cut.notes == ()
    config = FinetuneConfig(seq_len=cut.seq_len)
    warning = lost_tokens_warning(cut.report, config)
    assert re.match(r"\d+ of [\d,]+ tokens \(\d+%\) are lost: records are longer than \d+ tokens\nhint: ", warning)
    assert "split" in warning and "split" not in lost_tokens_warning(cut.report, paired(config))
    assert lost_tokens_warning(whole.report, config) is lost_tokens_warning(None, config) is None
    text = load([{"text": "the tide goes out " * 400}], model="m", seq_len=0)
    assert text.seq_len % 64 == 0 and text.num_train_sequences > 9


def test_prompts_beside_a_chat_template_are_said(load, tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    (note,) = load(CHATS, chat_template=str(template)).notes
    assert note == f'prompts are read as plain text, without the template {template}; records with "messages" use it'


def test_contiguous_windows_are_for_text(load):
    assert load(TEXTS, "data.ndjson", packing="contiguous").report is None
    with pytest.raises(DataError, match=r"data.jsonl:1: the record has the kind prompt, not plain text(.|\n)*hint:"):
        load(CHATS, packing="contiguous")


@pytest.mark.parametrize("name", ["too_long", "loss_on", "columns", "chat_template"])
def test_settings_of_records_are_refused_where_text_would_ignore_them(load, name):
    value = {"too_long": "drop", "loss_on": "all", "columns": ("text=text",), "chat_template": "x.jinja"}[name]
    with pytest.raises(ConfigError, match=rf"{name} has no effect on text in contiguous windows(.|\n)*hint: leave --"):
        load(TEXTS, "data.txt", **{name: value})


def test_a_batch_that_no_machine_holds_is_refused(load):
    with pytest.raises(ConfigError, match=r"a batch of 2 × 1,000,000,000 tokens is too large(.|\n)*hint:"):
        load(CHATS, seq_len=10**9)


def test_text_has_an_evaluation_set_of_its_own_too(load, tmp_path):
    (tmp_path / "eval.txt").write_text("another text to evaluate " * 20)
    data = load(TEXTS, eval_data=str(tmp_path / "eval.txt"))
    assert data.num_train_tokens > load(TEXTS).num_train_tokens
    assert data.num_held_out_tokens
    assert data.digest != load(TEXTS).digest


def test_settings_of_data_are_checked_and_written():
    for values in ({"packing": "tight"}, {"too_long": "fold"}, {"loss_on": "prompt"}, {"columns": ["chat"]}):
        with pytest.raises(ConfigError, match=f"{next(iter(values))}(.|\n)*hint:"):
            config_from_dict(values, "config.toml")
    for field in ("eval_data", "chat_template"):
        with pytest.raises(ConfigError, match=f"{field} is empty"):
            FinetuneConfig(**{field: ""})
    assert 'columns = [\n    "messages=chat",\n]' in config_to_toml(FinetuneConfig(columns=("messages=chat",)))
