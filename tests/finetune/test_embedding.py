"""Embedding models: the loss beside plain JAX, cached gradients, whole runs, and the files of sentence-transformers."""

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
from lowtide.finetune import FinetuneConfig, write_merged
from lowtide.finetune._job import JobPlan
from lowtide.finetune._run import Finetune
from lowtide.finetune.data._normalize import parse_record

WORDS = "tide low moon sea sand shell wave boat fish gull rock dune crab weed foam salt".split()


def write_pairs(path: Path, count: int = 120) -> str:
    rng = np.random.default_rng(0)
    pairs = [rng.choice(WORDS, 2, replace=False) for _ in range(count)]
    records = [{"anchor": f"{a} near {b}", "positive": f"the {b} beside the {a}"} for a, b in pairs]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def settings(tmp_path: Path, **more: Any) -> dict[str, Any]:
    data = write_pairs(tmp_path / "pairs.jsonl")
    defaults = {"num_steps": 20, "eval_every": 20, "batch_size": 16, "learning_rate": 1e-3}
    return {"objective": "embedding", "data": data, **defaults, **more}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_the_loss_equals_that_of_plain_jax(pooling: Any, tmp_path: Path) -> None:
    run = Finetune(
        FinetuneConfig(**settings(tmp_path, pooling=pooling, temperature=0.2, batch_size=8)), tmp_path / "run"
    )
    batch = jax.tree.map(jnp.asarray, run.data.train[0])
    batch = jax.tree.map(lambda leaf: leaf.at[3].set(0), batch)  # padding, as in the last evaluation batch
    model = run.trainer.model

    def reference(model: Any) -> Any:
        embeddings: list[Any] = []
        for row in (row for row in range(8) if row != 3):
            for number in (1, 2):
                tokens = np.asarray(batch["tokens"][row])[np.asarray(batch["segment_ids"][row]) == number]
                states = models.hidden_states(model, jnp.asarray(tokens)[None])[0]
                vector = states.mean(0) if pooling == "mean" else states[-1]
                embeddings.append(vector / jnp.linalg.norm(vector))
        anchors, positives = jnp.stack(embeddings[::2]), jnp.stack(embeddings[1::2])
        return -jnp.diagonal(jax.nn.log_softmax(anchors @ positives.T / 0.2)).mean()

    wanted, wanted_grads = lt.value_and_grad(reference, wrt="**/lora_*")(model)
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(wanted_grads))
    for parts in (1, 4):
        plan = JobPlan.make(FinetuneConfig(**{**vars(run.config), "num_microbatches": parts}), run.base)
        grad = lt.value_and_grad(plan.loss_fn, wrt="**/lora_*", has_aux=True)
        (loss, metrics), grads = jax.jit(grad)(model, batch)
        np.testing.assert_allclose(loss, wanted, rtol=1e-4)
        assert {"accuracy", "similarity"} == set(metrics)
        for leaf, other in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted_grads), strict=True):
            np.testing.assert_allclose(leaf, other, rtol=1e-3, atol=1e-4 * scale)


@pytest.mark.slow_after(1)
def test_a_run_writes_what_sentence_transformers_opens(tmp_path: Path) -> None:
    run = Finetune(
        FinetuneConfig(**settings(tmp_path, num_microbatches=4, pooling="last", num_steps=30, eval_every=30)),
        tmp_path / "run",
    )
    run.run()
    first, last = (loss for _, loss in run.eval_losses())
    assert last < 0.8 * first
    run.finish(run.memory())
    write_merged(None, [tmp_path / "run/adapter"], tmp_path / "merged")
    folder = tmp_path / "merged"
    assert [module["path"] for module in json.loads((folder / "modules.json").read_text())] == [
        "",
        "1_Pooling",
        "2_Normalize",
    ]
    pooling = json.loads((folder / "1_Pooling/config.json").read_text())
    assert pooling["pooling_mode_lasttoken"] and not pooling["pooling_mode_mean_tokens"]
    assert pooling["word_embedding_dimension"] == run.base.config.hidden_size
    assert json.loads((folder / "tokenizer_config.json").read_text())["pad_token"] == "<|endoftext|>"
    assert not (folder / "adapter_model.safetensors").exists()


def test_cached_gradients_need_the_memory_of_one_part() -> None:
    options: dict[str, Any] = {"objective": "embedding", "data": "pairs.jsonl", "seq_len": 64}
    reports = [
        JobPlan.from_shapes(FinetuneConfig(**options, batch_size=size, num_microbatches=parts), "cpu")
        .job()
        .analyze("cpu")
        for size, parts in ((8, 1), (256, 32), (256, 1))
    ]
    small, parts, whole = (report.device.temp_bytes for report in reports)
    assert parts < small + 4 * 2**20 < whole / 4


@pytest.mark.parametrize(
    ("record", "message"),
    [({"anchor": "a", "positive": 3}, "positive"), ({"anchor": None, "positive": "a"}, "anchor")],
)
def test_bad_records(record: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"line 1: {message}"):
        parse_record(record, "line 1", {})
    assert parse_record({"anchor": "a", "positive": " "}, "line 1", {}) is None


def test_records_and_objectives_that_do_not_fit(tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path / "pairs.jsonl")
    for objective in ("sft", "dpo"):
        with pytest.raises(DataError, match=r"pairs of anchor and positive are for --objective embedding"):
            Finetune(FinetuneConfig(objective=objective, data=pairs, seq_len=64), tmp_path / objective)
    (tmp_path / "single.jsonl").write_text('{"prompt": "a ", "completion": "b c d"}\n' * 9)
    with pytest.raises(DataError, match=r"got: prompt and embedding"):
        Finetune(FinetuneConfig(objective="embedding", data=str(tmp_path / "single.jsonl")), tmp_path / "b")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": "embedding"}, "needs data(.|\n)*anchor and positive"),
        ({"objective": "embedding", "data": "x", "packing": "best-fit"}, "objective contradicts packing"),
        ({"objective": "embedding", "data": "x", "full": True}, "objective contradicts full"),
        ({"pooling": "last"}, "pooling applies only to embedding"),
    ],
)
def test_settings_that_contradict_the_objective(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FinetuneConfig(**settings)
