import json
import os
import time
from pathlib import Path

import grain
import numpy as np
import pytest
from tokenizers import Tokenizer

from lowtide.core import DataError, OutputError
from lowtide.finetune.data import ChatTemplate, _encode, record_data

from .templates import CHATML, SPECIAL, chat, plain

TEMPLATE = ChatTemplate(source=plain(CHATML), special=SPECIAL, where="chat_template.jinja")


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir):
    return Tokenizer.from_file(f"{tiny_model_dir}/tokenizer.json")


def _file(tmp_path, records, name="data.jsonl"):
    (tmp_path / name).write_text("\n".join(json.dumps(record) for record in records))
    return tmp_path / name


def _data(source, tokenizer, template=TEMPLATE, **changes):
    return record_data(source, tokenizer, template, **{"seq_len": 256, "batch_size": 2, "seed": 0, **changes})


def _learned(batches, tokenizer):
    """Decode what of each document is learned."""
    found = []
    for batch in batches:
        for labels, segments in zip(batch["labels"], batch["segment_ids"], strict=True):
            for segment in range(1, segments.max() + 1):
                here = labels[segments == segment]
                found.append(tokenizer.decode(here[here >= 0].tolist(), skip_special_tokens=False))
    return found


def test_of_chats_the_assistants_turns_are_learned(tmp_path, tokenizer):
    chats = [{"messages": chat(f"ask {i}", f"answer {i}", "more", f"again {i}")} for i in range(8)]
    data = _data(_file(tmp_path, [*chats, {"messages": []}]), tokenizer, seq_len=1024)
    assert isinstance(data.train, grain.MapDataset)
    learned = {text for text in _learned(data.held_out, tokenizer) + _learned([data.train[0]], tokenizer)}
    assert learned <= {f"answer {i}<|im_end|>\nagain {i}<|im_end|>\n" for i in range(8)}
    report = data.report
    assert (report.kind, report.num_documents, report.num_blank) == ("chat", 8, 1)
    assert report.template == "chat_template.jinja"
    assert 0 < report.loss_share < 1
    (asked, is_learned), (answered, is_answer_learned) = report.examples[0][:2]
    assert asked.startswith("<|im_start|>system")
    assert answered.startswith("answer")
    assert (is_learned, is_answer_learned) == (False, True)


def test_turns_without_weight_are_not_learned_and_need_turns(tmp_path, tokenizer):
    chats = [{"messages": chat("ask", f"answer {i}", "more", f"again {i}")} for i in range(4)]
    for each in chats:
        each["messages"][1]["weight"] = 0
    file = _file(tmp_path, chats)
    assert _learned(_data(file, tokenizer).held_out, tokenizer)[0].startswith("again")
    with pytest.raises(DataError, match=r"data.jsonl:1: a turn has the weight 0(.|\n)*--loss-on"):
        _data(file, tokenizer, loss_on="all")


def test_of_prompts_the_completion_is_learned_and_its_end(tmp_path, tokenizer):
    pairs = [{"prompt": f"ask {i}", "completion": f" answer {i}"} for i in range(6)]
    end = tokenizer.decode([5], skip_special_tokens=False)
    data = _data(_file(tmp_path, pairs), tokenizer, end_token=5, seq_len=64)
    assert set(_learned([data.train[0]], tokenizer)) <= {f" answer {i}{end}" for i in range(6)}
    data = _data(_file(tmp_path, pairs), tokenizer, end_token=5, seq_len=64, loss_on="all")
    assert all("sk " in text and text.endswith(end) for text in _learned([data.train[0]], tokenizer))


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_alpaca_is_a_chat_where_there_is_a_template(tmp_path, tokenizer, template):
    records = [{"instruction": "Add.", "input": "" if i % 2 else "1 2", "output": f"it is {i}"} for i in range(4)]
    data = _data(_file(tmp_path, records), tokenizer, template, seq_len=512)
    assert all(text.startswith("it is ") for text in _learned([data.train[0]], tokenizer))
    prompt = data.report.examples[0][0][0]
    assert ("### Instruction:\nAdd." in prompt) == (template is None)


def test_messages_need_a_template(tmp_path, tokenizer):
    file = _file(tmp_path, [{"messages": chat("a", "b")}] * 3)
    with pytest.raises(
        DataError, match=r"data.jsonl:1: the record has messages, but the model has no(.|\n)*--chat-template"
    ):
        _data(file, tokenizer, None)


def test_an_evaluation_set_of_its_own_is_all_that_is_evaluated(tmp_path, tokenizer):
    train = _file(tmp_path, [{"text": f"train {i}"} for i in range(5)])
    evaluation = _file(tmp_path, [{"text": f"evaluate {i}"} for i in range(3)], "eval.jsonl")
    data = _data(train, tokenizer, eval_source=evaluation, packing="none")
    assert data.report.num_rows == 5
    assert len(data.held_out) == 2  # the second batch is filled up with a row of padding
    assert (data.held_out[-1]["segment_ids"][1] == 0).all()
    assert len(list(data.held_out)) == 2
    assert len(_learned(data.held_out, tokenizer)) == 3


def test_what_is_too_long_is_counted(tmp_path, tokenizer):
    records = [{"prompt": "p" * 40 * (i == 0), "completion": "the tide " * (1 + 9 * (i == 1))} for i in range(6)]
    file = _file(tmp_path, records)
    reports = {}
    for way in ("cut", "drop", "split"):
        data = _data(file, tokenizer, seq_len=16, too_long=way, eval_source=[" more of it"])
        reports[way] = (data.report.num_cut, data.report.num_dropped, data.report.num_without_loss)
    data = _data(file, tokenizer, seq_len=16, eval_source=["the tide " * 40, "an ebb"])
    lost = int(data.report.num_held_out_lost_tokens)
    assert lost > 16
    assert data.report.num_held_out_left_out == 0
    data = _data(file, tokenizer, seq_len=16, too_long="drop", eval_source=["the tide " * 40, "an ebb"])
    assert (data.report.num_held_out_left_out, data.report.num_held_out_lost_tokens) == (1, lost + 16)
    assert reports["cut"] == (2, 0, 1)
    assert reports["drop"] == (0, 2, 0)
    assert reports["split"][:2] == (2, 0)
    with pytest.raises(DataError, match=r"no document with a token to learn is left(.|\n)*--seq-len"):
        _data(_file(tmp_path, records[:1] * 2), tokenizer, seq_len=16)


def test_tokens_are_made_once_and_a_batch_is_the_same_again(tmp_path, tokenizer, monkeypatch):
    file = _file(tmp_path, [{"text": f"the tide {i}"} for i in range(20)])
    one = _data(file, tokenizer, seq_len=16)
    monkeypatch.setattr(_encode, "read_records", None)
    two = _data(file, tokenizer, seq_len=16)
    assert one.digest == two.digest
    for step in (0, 3, 17):
        for name, value in one.train[step].items():
            np.testing.assert_array_equal(value, two.train[step][name])
    assert _data(file, tokenizer, seq_len=16, seed=1).digest != one.digest


def test_what_was_not_finished_is_not_taken_for_whole(tmp_path, tokenizer, monkeypatch):
    file = _file(tmp_path, [{"text": f"the tide {i}"} for i in range(20)])
    home = tmp_path / "cache"
    monkeypatch.setenv("LOWTIDE_CACHE", str(home))
    monkeypatch.setattr(_encode, "_publish", _killed)
    with pytest.raises(KeyboardInterrupt):
        _data(file, tokenizer)
    assert os.listdir(home / "data") == []
    monkeypatch.undo()
    monkeypatch.setenv("LOWTIDE_CACHE", str(home))
    for name, age in (("unfinished-old", 10**6), ("unfinished-new", 60)):  # of runs that nothing could clean up after
        (home / "data" / name).mkdir()
        os.utime(home / "data" / name, (time.time() - age,) * 2)
    _data(file, tokenizer)
    assert not (home / "data" / "unfinished-old").exists()
    (home / "data" / "unfinished-new").rmdir()
    (store,) = (home / "data").iterdir()
    with open(store / "tokens.bin", "r+b") as tokens:
        tokens.truncate(8)
    with pytest.raises(DataError, match="the store is truncated"):
        _data(file, tokenizer)
    (store / "about.json").unlink()
    with pytest.raises(DataError, match="the store is truncated"):
        _data(file, tokenizer)


def test_what_another_process_finishes_meanwhile_is_no_error(tmp_path, tokenizer, monkeypatch):
    file = _file(tmp_path, [{"text": f"the tide {i}"} for i in range(20)])
    home = tmp_path / "cache"
    monkeypatch.setenv("LOWTIDE_CACHE", str(home))
    gone = home / "data" / "unfinished-gone"
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: iter([gone]))
    assert _data(file, tokenizer).report.num_documents == 20


def _killed(unfinished, folder):
    raise KeyboardInterrupt


def test_a_cache_that_cannot_be_written_is_named(tmp_path, tokenizer, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "file"))
    with pytest.raises(OutputError, match="LOWTIDE_CACHE"):
        _data(["a", "b"], tokenizer)


def test_chats_without_an_answer_are_not_said_to_be_too_long(tmp_path, tokenizer):
    asked = [{"role": "system", "content": "brief"}, {"role": "user", "content": "ebb?"}]
    with pytest.raises(
        DataError, match=r"no answer to learn(.|\n)*role assistant(.|\n)*hint: check the roles"
    ) as caught:
        _data(_file(tmp_path, [{"messages": asked}] * 4), tokenizer)
    assert "raise --seq-len" not in str(caught.value)
    answered = {"messages": [*asked, {"role": "assistant", "content": "flow"}]}
    with pytest.raises(DataError, match=r"(.|\n)*hint: raise --seq-len"):
        _data(_file(tmp_path, [answered] * 4), tokenizer, seq_len=4)


def test_a_name_is_no_list_of_texts(tmp_path, tokenizer):
    with pytest.raises(DataError, match=r"a text is not a list of documents(.|\n)*Path"):
        _data("data.jsonl", tokenizer)
    with pytest.raises(DataError, match=r"gone.jsonl: no such file"):
        _data(tmp_path / "gone.jsonl", tokenizer)
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(DataError, match=r"pipe.jsonl: neither a file"):
        _data(tmp_path / "pipe.jsonl", tokenizer)


@pytest.mark.parametrize("records", [[], [{"text": " "}], [{"text": "one"}]])
def test_too_little_data_is_said(tmp_path, tokenizer, records):
    with pytest.raises(DataError, match="hint:"):
        _data(_file(tmp_path, records), tokenizer)
