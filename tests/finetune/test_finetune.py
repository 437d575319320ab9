from types import SimpleNamespace

import numpy as np

from lowtide import models
from lowtide.finetune import Finetune, FinetuneConfig


def test_a_sample_begins_with_one_document_and_no_padding(tiny_model_dir, monkeypatch):
    tokens = np.asarray([[5, 6, 7, 8, 9, 0, 0, 0]], np.int32)
    batch = {"tokens": tokens, "segment_ids": np.asarray([[1, 1, 1, 2, 2, 0, 0, 0]], np.int32)}
    asked = []

    def generate(model, prompt, num_tokens, **options):
        asked.append(prompt.tolist())
        return np.asarray([*prompt, 3])

    monkeypatch.setattr(models, "generate", generate)
    model, tokenizer = models.load(tiny_model_dir), models.load_tokenizer(tiny_model_dir)
    config = FinetuneConfig(seq_len=8, sample_tokens=1)
    for held_out in (batch, {"tokens": tokens}):
        run = SimpleNamespace(data=SimpleNamespace(held_out=[held_out]), config=config, tokenizer=tokenizer)
        assert Finetune.sample(run, model)[1] == tokenizer.decode([3])
    assert asked == [[5, 6, 7], tokens[0].tolist()]
