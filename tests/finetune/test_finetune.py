import json
from types import SimpleNamespace

import numpy as np
import pytest

from lowtide import models
from lowtide.core import OutputError
from lowtide.finetune import Finetune, FinetuneConfig, _run
from lowtide.finetune._job import JobPlan


def test_the_bytes_that_frozen_weights_save_are_exact():
    embedding, norms = 2048 * 192, (2 * 4 + 1) * 192
    projections = 4 * (2 * 192 * 192 + 2 * 64 * 192 + 3 * 512 * 192)
    num_weights = embedding + norms + projections
    in_float32 = 4 * num_weights + 2 * 4 * num_weights  # gradients, then two moments
    cases = (
        ({}, in_float32),
        ({"offload": ("optimizer",), "loraplus_ratio": 16.0}, in_float32),
        ({"method": "vera"}, in_float32),  # without its random projections
        ({"quantize": "nf4", "quantize_embeddings": "int8"}, in_float32),
        ({"param_dtype": "bfloat16"}, in_float32 // 2),
        ({"modules_to_save": "outer/embed"}, in_float32 - 3 * 4 * embedding),
        # Arrays with fewer than 4,096 numbers, here the norms, keep float32 moments.
        ({"state_dtype": "bfloat16"}, 4 * num_weights + 2 * 2 * (num_weights - norms) + 2 * 4 * norms),
        ({"full": True}, None),
    )
    for settings, num_bytes in cases:
        assert JobPlan.from_shapes(FinetuneConfig(**settings), "cpu").saved_bytes() == num_bytes, settings
    assert in_float32 == 23_613_696


def test_a_sample_begins_with_one_document_or_a_question_and_no_padding(tiny_model_dir, monkeypatch):
    tokens = np.asarray([[5, 6, 7, 8, 9, 0, 0, 0]], np.int32)
    batch = {"tokens": tokens, "segment_ids": np.asarray([[1, 1, 1, 2, 2, 0, 0, 0]], np.int32)}
    learned = {"labels": np.roll(tokens, -1, axis=1)}
    question = {"labels": np.where(np.arange(8) < 3, -100, learned["labels"])}  # token 9, at column 4, is learned first
    asked = []

    def generate(model, prompt, num_tokens, **options):
        asked.append(prompt.tolist())
        return np.asarray([*prompt, 3, 4, 3])

    monkeypatch.setattr(models, "generate", generate)
    model, tokenizer = models.load(tiny_model_dir), models.load_tokenizer(tiny_model_dir)
    config = FinetuneConfig(seq_len=8, sample_tokens=1)
    parts = {"config": config, "tokenizer": tokenizer, "ends": SimpleNamespace(answer=(4,))}
    for held_out, answer in (
        ({**batch, **learned}, [3, 4, 3]),
        ({"tokens": tokens, **learned}, [3, 4, 3]),
        ({"tokens": tokens, **question}, [3]),  # up to an end token
    ):
        run = SimpleNamespace(data=SimpleNamespace(held_out=[held_out]), **parts)
        assert Finetune.sample(run, model)[1] == tokenizer.decode(answer)
    assert asked == [[5, 6, 7], tokens[0].tolist(), [5, 6, 7, 8]]


@pytest.mark.slow
def test_a_template_that_writes_the_date_writes_that_of_the_runs_first_day(tiny_model_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))
    chats = [
        {"messages": [{"role": "user", "content": "ebb?"}, {"role": "assistant", "content": f"flow {i}"}]}
        for i in range(9)
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    turn = "{{ m.role }}: {% generation %}{{ m.content }}{% endgeneration %}"
    (tmp_path / "dated.jinja").write_text(
        "{{ strftime_now('%d %B %Y') }}{% for m in messages %}" + turn + "{% endfor %}"
    )
    paths = {"model": str(tiny_model_dir), "data": str(tmp_path / "chats.jsonl")}
    config = FinetuneConfig(**paths, chat_template=str(tmp_path / "dated.jinja"), seq_len=64, batch_size=2, rank=2)
    with monkeypatch.context() as long_ago:
        long_ago.setattr(_run, "start_day", lambda out: "1999-12-31")
        begun = Finetune(config, tmp_path / "run")
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "another cache"))
    resumed = Finetune(config, tmp_path / "run")
    other = Finetune(config, tmp_path / "other")
    assert "31 December 1999" in begun.data.report.examples[0][0][0]
    assert begun.data.digest == resumed.data.digest != other.data.digest
    (tmp_path / "run" / "data.json").write_text('{"sha256_of_tokens": "a", "day": "yesterday"}')
    with pytest.raises(OutputError, match=r"data.json: the file is damaged(.|\n)*hint:"):
        Finetune(config, tmp_path / "run")
