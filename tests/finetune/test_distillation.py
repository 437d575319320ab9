"""Distillation: the loss beside plain JAX, a run that learns what a teacher writes, and teachers that do not fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowtide import models
from lowtide.core import ConfigError
from lowtide.finetune import FinetuneConfig
from lowtide.finetune._job import JobPlan, load_reference, reference_columns
from lowtide.finetune._run import Finetune

BASE = str(models.base_path())


def write_records(path: Path) -> str:
    records = ({"prompt": f"{a} then ", "completion": f"{b} and {a}"} for a in "abcdefgh" for b in "stuvwxyz")
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def noisy(model: Any, scale: float) -> Any:
    leaves, treedef = jax.tree.flatten(model)
    keys = jax.random.split(jax.random.key(3), len(leaves))
    parts = zip(leaves, keys, strict=True)
    return treedef.unflatten([leaf + scale * jax.random.normal(key, leaf.shape) for leaf, key in parts])


@pytest.mark.parametrize("nll_weight", [None, 0.5])
def test_the_loss_equals_that_of_plain_jax(nll_weight: float | None, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"teacher_top_k": 7, "temperature": 2.0, "nll_weight": nll_weight}
    data = write_records(tmp_path / "records.jsonl")
    config = FinetuneConfig(objective="distillation", teacher=BASE, data=data, **settings)
    base, tokenizer = models.load(BASE), models.load_tokenizer(BASE)
    model, teacher = noisy(JobPlan.make(config, base).model, 0.02), load_reference(config, base, tokenizer)
    tokens = jax.random.randint(jax.random.key(0), (2, 16), 0, base.config.vocab_size)
    labels = jnp.roll(tokens, -1, 1).at[:, 8:].set(-100)
    batch = {"tokens": tokens, "labels": labels}
    columns = reference_columns(config)(teacher, batch)
    loss, metrics = jax.jit(JobPlan.make(config, base).loss_fn)(model, batch | columns)

    top, ids = jax.lax.top_k(models.logits(base, tokens), 7)
    student = models.logits(model, tokens)
    probs = jax.nn.softmax(top / 2)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(student / 2), ids, -1)
    kl = jnp.sum(probs * (jnp.log(probs) - chosen), -1)[:, :8].mean()
    gold = jnp.take_along_axis(jax.nn.log_softmax(student), jnp.maximum(labels, 0)[..., None], -1)[:, :8].mean()
    np.testing.assert_allclose(metrics["kl"], kl, rtol=1e-4)
    np.testing.assert_allclose(loss, kl - (nll_weight or 0) * gold, rtol=1e-4)
    assert float(kl) > 0.01


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("full", [False, True])
def test_a_run_learns_from_its_teacher_and_resumes(full: bool, tmp_path: Path) -> None:
    data = write_records(tmp_path / "records.jsonl")
    tuned = Finetune(FinetuneConfig(data=data, full=True, num_steps=10, seq_len=64), tmp_path / "teacher")
    tuned.run()
    tuned.finish(tuned.memory())
    settings: dict[str, Any] = {"objective": "distillation", "teacher": str(tmp_path / "teacher/model"), "seq_len": 64}
    settings |= {"data": data, "num_steps": 8, "eval_every": 8, "checkpoint_every": 4, "full": full}
    whole = Finetune(FinetuneConfig(**settings), tmp_path / "whole")
    whole.run()
    first, last = (loss for _, loss in whole.eval_losses())
    assert last < 0.5 * first
    part = Finetune(FinetuneConfig(**settings), tmp_path / "part")
    part.trainer.fit(part.data.train, num_steps=4, checkpoint_every=4, progress=False)
    resumed = Finetune(FinetuneConfig(**settings), tmp_path / "part")
    assert resumed.resumed_at == 4
    resumed.run()
    pairs = zip(jax.tree.leaves(resumed.trainer.model), jax.tree.leaves(whole.trainer.model), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)


def test_columns_of_the_teacher_count_in_the_plan() -> None:
    config = FinetuneConfig(objective="distillation", teacher=BASE, teacher_top_k=5, batch_size=2, seq_len=32)
    batch = JobPlan.from_shapes(config, "cpu").job().args[-1]
    assert {name: batch[name].shape for name in ("teacher_ids", "teacher_log_probs")} == {
        "teacher_ids": (2, 32, 5),
        "teacher_log_probs": (2, 32, 5),
    }


def test_a_teacher_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    teacher = tmp_path / "teacher"
    shutil.copytree(BASE, teacher)
    contents = json.loads((teacher / "tokenizer.json").read_text())
    vocabulary = contents["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (teacher / "tokenizer.json").write_text(json.dumps(contents))
    config = FinetuneConfig(objective="distillation", teacher=str(teacher), seq_len=64)
    with pytest.raises(ConfigError, match=r"has another tokenizer than the model(.|\n)*hint: "):
        Finetune(config, tmp_path / "run")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": "distillation"}, "needs a teacher"),
        ({"teacher": "x"}, "teacher applies only to distillation"),
        ({"temperature": 2.0}, "temperature applies only to distillation"),
        ({"objective": "distillation", "teacher": "x", "beta": 0.2}, "beta applies only to"),
        ({"objective": "distillation", "teacher": "x", "temperature": 0.0}, "temperature is out of range"),
    ],
)
def test_settings_that_contradict_the_objective(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        FinetuneConfig(**settings)
    assert "hint: " in str(error.value)
