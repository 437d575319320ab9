"""Reward models and classifiers: losses beside plain JAX, whole runs, files for PEFT, and records that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowtide as lt
from lowtide import models
from lowtide.core import ConfigError, DataError
from lowtide.finetune import FinetuneConfig
from lowtide.finetune._job import JobPlan
from lowtide.finetune._run import Finetune

WORDS = "tide low moon sea sand shell wave boat fish gull".split()


def write(path: Path, *, has_classes: bool) -> str:
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        for _ in range(80):
            a, b = rng.choice(WORDS, 2, replace=False)
            texts = [f"{a} {b} yes", f"{b} {a} no"]
            if has_classes:
                records = [{"text": text, "label": label} for label, text in enumerate(texts)]
            else:
                records = [{"prompt": f"Say {a} and {b}: ", "chosen": texts[0], "rejected": texts[1]}]
            file.write("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def settings(tmp_path: Path, objective: str, **more: Any) -> dict[str, Any]:
    data = write(tmp_path / "data.jsonl", has_classes=objective == "classification")
    defaults = {"num_steps": 25, "eval_every": 25, "seq_len": 64, "batch_size": 4, "learning_rate": 1e-3}
    return {"objective": objective, "data": data, **defaults, **more}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("objective", ["reward", "classification"])
def test_a_run_trains_a_head_that_peft_can_name(objective: Any, tmp_path: Path) -> None:
    more = {"reward_margin": 0.5} if objective == "reward" else {"num_labels": 3}
    run = Finetune(FinetuneConfig(**settings(tmp_path, objective, **more)), tmp_path / "run")
    batch = jax.tree.map(jnp.asarray, run.data.train[0])
    assert JobPlan.make(run.config, run.base).job().args[-1].keys() == batch.keys()
    model = run.trainer.model
    head = model.outer["score"]["weight"]
    weight = head.lora_saved if hasattr(head, "lora_saved") else head["lora_saved"]
    states = models.hidden_states(
        model, batch["tokens"], segment_ids=batch["segment_ids"], positions=batch["positions"]
    )
    losses: list[float] = []
    for row in range(4):
        scores: list[Any] = []
        for number in range(1, int(batch["segment_ids"][row].max()) + 1):
            last = int(np.flatnonzero(np.asarray(batch["segment_ids"][row]) == number)[-1])
            text = run.tokenizer.decode(np.asarray(batch["tokens"])[row][batch["segment_ids"][row] == number].tolist())
            scores.append((states[row, last] @ weight.T, "no" in text.split()))
        if objective == "classification":
            losses += [-float(jax.nn.log_softmax(score)[int(is_no)]) for score, is_no in scores]
        else:
            pairs = zip(scores[::2], scores[1::2], strict=True)
            losses += [-float(jax.nn.log_sigmoid(a[0] - b[0] - 0.5)[0]) for a, b in pairs]
            assert not any(is_no for _, is_no in scores[::2])
    loss, _ = JobPlan.make(run.config, run.base).loss_fn(model, batch)
    np.testing.assert_allclose(loss, np.mean(losses), rtol=1e-4)
    records: list[dict[str, Any]] = []
    run.run(records.append)
    name = "eval_rewards/accuracies" if objective == "reward" else "eval_accuracy"
    assert [record[name] for record in records if name in record][-1] > 0.9
    assert not run.samples
    run.finish(run.memory())
    settings_of_peft = json.loads((tmp_path / "run/adapter/adapter_config.json").read_text())
    assert (settings_of_peft["task_type"], settings_of_peft["modules_to_save"]) == ("SEQ_CLS", ["score"])
    base = models.with_score_head(run.base, run.config.num_scores, key=jax.random.key(7))
    loaded = lt.lora.load(base, tmp_path / "run/adapter")
    h = [m.stack.hidden(m.outer, m.layers, {"tokens": batch["tokens"]}) for m in (loaded, run.trainer.model)]
    np.testing.assert_allclose(loaded.scores(h[0]), run.trainer.model.scores(h[1]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "a b c", "label": 2}, "label 2, but num_labels is 2(.|\n)*--num-labels 3"),
        ({"text": "a b c", "label": "good"}, "no text with a class(.|\n)*a whole number from 0 to 253"),
        ({"text": "a b c", "label": 254}, "no text with a class"),
        ({"text": "a b c", "label": None}, "no text with a class"),
    ],
)
def test_records_without_a_usable_class(record: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"text": "a b", "label": 0}) + "\n" for _ in range(9)) + json.dumps(record))
    config = FinetuneConfig(objective="classification", data=str(path), seq_len=32, batch_size=2)
    with pytest.raises(DataError, match=message):
        Finetune(config, tmp_path / "run")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": "reward", "data": "x", "full": True}, "objective contradicts full"),
        ({"objective": "classification", "data": "x", "adapter": "y"}, "objective contradicts adapter"),
        ({"objective": "classification"}, "needs data"),
        ({"objective": "reward", "data": "x", "beta": 0.5}, "beta applies only to"),
        ({"num_labels": 3}, "num_labels applies only to classification"),
        ({"objective": "classification", "data": "x", "num_labels": 1}, "num_labels is out of range"),
    ],
)
def test_settings_that_contradict_the_objective(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        FinetuneConfig(**settings)
    assert "hint: " in str(error.value)
