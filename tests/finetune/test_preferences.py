"""Preference tuning: records of pairs, rows that keep a pair together, the loss beside plain JAX, and whole runs."""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowtide as lt
from lowtide import models
from lowtide.core import ConfigError, DataError
from lowtide.finetune import FinetuneConfig, objectives
from lowtide.finetune._job import JobPlan, reference_columns
from lowtide.finetune._run import Finetune
from lowtide.finetune._run_folder import MemoryTable
from lowtide.finetune.data import record_data
from lowtide.finetune.data._encode import _with_mismatches, open_store
from lowtide.finetune.data._normalize import parse_record
from lowtide.finetune.data._pack import Pieces, Rows, RowSource, cut_documents
from lowtide.finetune.objectives import objective
from lowtide.finetune.objectives._objective import Objective
from lowtide.memory import Job

CHAT = [{"role": "user", "content": "Which tide?"}]
ANSWERS = [[{"role": "assistant", "content": text}] for text in ("Low.", "High.")]


def write_pairs(path: Path, count: int = 24, **fields: Any) -> Path:
    words = "tide low moon sea sand shell wave boat fish gull".split()
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        for _ in range(count):
            a, b = rng.choice(words, 2, replace=False)
            record = {"prompt": f"Say {a} and {b}: ", "chosen": f"{a} {b} yes", "rejected": f"{b} {a} no"}
            file.write(json.dumps(record | fields) + "\n")
    return path


def test_shapes_of_records() -> None:
    text = parse_record({"prompt": "a ", "chosen": "b", "rejected": "c"}, "here", {})
    assert text is not None and text.rejected is not None
    assert (text.kind, text.prompt, text.text, text.rejected.text) == ("prompt", "a ", "b", "c")
    explicit = parse_record({"prompt": CHAT, "chosen": ANSWERS[0], "rejected": ANSWERS[1]}, "here", {})
    implicit = parse_record({"chosen": CHAT + ANSWERS[0], "rejected": CHAT + ANSWERS[1]}, "here", {})
    table = parse_record({"chosen": json.dumps(CHAT + ANSWERS[0]), "rejected": json.dumps(CHAT + ANSWERS[1])}, "x", {})
    for example in (explicit, implicit, table):
        assert example is not None and example.rejected is not None
        assert (example.kind, example.first, example.label) == ("chat", 1, "preference of the kind chat")
        assert [item.messages[-1]["content"] for item in (example, example.rejected)] == ["Low.", "High."]
    named = parse_record(
        {"q": "a ", "good": "b", "bad": "c"}, "x", {"prompt": "q", "chosen": "good", "rejected": "bad"}
    )
    assert named is not None and named.rejected is not None and named.rejected.text == "c"


def test_published_shapes_of_records() -> None:
    instruction = {"instruction": "Which?", "input": "sea", "chosen": "Low.", "rejected": "High."}
    example = parse_record(instruction, "x", {})
    assert example is not None and example.rejected is not None and not example.unread
    assert (example.kind, example.prompt, example.more) == ("alpaca", "Which?", "sea")
    assert (example.text, example.rejected.text) == ("Low.", "High.")
    example = parse_record(instruction | {"tools": [{"name": "f"}], "messages": CHAT}, "x", {})
    assert example is not None and example.unread == ("tools", "messages")
    texts = {"chosen": "Low.", "rejected": "High."}
    turns = {"conversations": [{"from": "human", "value": "Which tide?"}], "system": "Be short."}
    speakers = {name: {"from": "gpt", "value": text} for name, text in texts.items()}
    roles = {name: {"role": "assistant", "content": text} for name, text in texts.items()}
    repeated = {"chosen": CHAT + ANSWERS[0], "rejected": CHAT + ANSWERS[1]}
    for record, num_prompt in (
        (turns | speakers, 2),
        (turns | texts, 2),
        ({"conversations": json.dumps(turns["conversations"])} | texts, 1),
        ({"messages": CHAT} | roles, 1),
        ({"conversations": CHAT} | roles, 1),
        ({"prompt": "Which tide?", "messages": repeated["chosen"]} | repeated, 1),
    ):
        example = parse_record(record, "x", {})
        assert example is not None and example.rejected is not None
        assert (example.kind, example.first, len(example.messages)) == ("chat", num_prompt, num_prompt + 1)
        assert example.messages[:-1] == example.rejected.messages[:-1]
        assert example.messages[-2] == CHAT[0]
        assert [item.messages[-1] for item in (example, example.rejected)] == [*ANSWERS[0], *ANSWERS[1]]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"instruction": "a", "history": [["b", "c"]], "chosen": "b", "rejected": "c"}, "history is not read"),
        ({"instruction": "a", "images": ["b"], "chosen": "b", "rejected": "c"}, "the record has images"),
        ({"conversations": 3, "chosen": "b", "rejected": "c"}, "a preference without a prompt"),
        ({"conversations": [{"from": "x", "value": "a"}], "chosen": "b", "rejected": "c"}, "unknown speaker"),
        ({"messages": CHAT, "chosen": {"role": "assistant", "content": ""}, "rejected": "c"}, "chosen is empty"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are equal"),
        ({"prompt": "a", "chosen": "b", "rejected": " "}, "rejected is empty"),
        ({"chosen": "b", "rejected": "c"}, "a preference without a prompt"),
        ({"chosen": CHAT + ANSWERS[0], "rejected": ANSWERS[1]}, "different prompts"),
        ({"chosen": CHAT, "rejected": CHAT + ANSWERS[1]}, "different prompts, or no answer"),
        ({"prompt": "a", "chosen": ANSWERS[0], "rejected": ANSWERS[1]}, "one of prompt and completion is text"),
        ({"prompt": "a", "chosen": "b", "rejected": 3}, "line 1: rejected"),
    ],
)
def test_bad_records(record: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as error:
        parse_record(record, "line 1", {})
    assert "hint: " in str(error.value)


def test_a_row_keeps_the_documents_of_a_pair_together(tmp_path: Path) -> None:
    directory = models.base_path()
    tokenizer = models.load_tokenizer(directory)
    path = write_pairs(tmp_path / "pairs.jsonl")
    options: dict[str, Any] = {"seq_len": 64, "batch_size": 2, "seed": 0}
    data = record_data(path, tokenizer, None, **options)
    store = open_store(path, tokenizer, None, columns={}, end_token=None, loss_on="completion")
    assert store.group == 2 and len(store.lengths) == 48
    seen: list[tuple[str, str]] = []
    for batch in [data.train[step] for step in range(data.num_train_sequences // 2)]:
        for tokens, segments, labels in zip(batch["tokens"], batch["segment_ids"], batch["labels"], strict=True):
            assert segments.max() % 2 == 0
            for first in range(1, segments.max(), 2):
                chosen, rejected = (tokenizer.decode(tokens[segments == number]) for number in (first, first + 1))
                assert chosen.split(":")[0] == rejected.split(":")[0] and chosen != rejected
                assert (labels[segments == first] != -100).any() and (labels[segments == first + 1] != -100).any()
                seen.append((chosen, rejected))
    assert all("yes" in chosen and "no" in rejected for chosen, rejected in seen) and len(seen) >= 18
    with pytest.raises(DataError, match=r"too many preferences lose an answer(.|\n)*--seq-len above 16"):
        record_data(path, tokenizer, None, **{**options, "seq_len": 16})


def write_verdicts(path: Path, count: int = 60) -> str:
    words = "tide low moon sea sand shell wave boat fish gull".split()
    rng = np.random.default_rng(0)
    records: list[dict[str, Any]] = []
    for _ in range(count):
        a, b = rng.choice(words, 2, replace=False)
        records += [
            {"prompt": f"Say {a} and {b}: ", "completion": f"{a} {b} yes", "label": True},
            {"prompt": f"Say {a} and {b}: ", "completion": f"{b} {a} no", "label": False},
        ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


VERDICTS = [
    [{"prompt": "a ", "completion": "b", "label": True}, {"prompt": "c ", "completion": "d", "label": False}],
    [{"prompt": "a ", "completion": "b", "label": "True"}, {"prompt": "c ", "completion": "d", "label": 0}],
    [{"instruction": "a", "output": "b", "label": True}, {"instruction": "c", "output": "d", "label": False}],
    [
        {"messages": [{"role": "user", "content": f"{text}?"}, {"role": "assistant", "content": text}], "label": label}
        for text, label in (("b", True), ("d", False))
    ],
]


@pytest.mark.parametrize("records", VERDICTS)
def test_answers_with_a_verdict_are_paired_with_the_answer_of_the_next_record(
    records: list[dict[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "verdicts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    examples = list(_with_mismatches(parse_record(record, "x", {}) for record in records))
    texts: list[tuple[str, ...]] = []
    for example in examples:
        assert example is not None and example.rejected is not None
        both = (example, example.rejected)
        texts.append(tuple(e.messages[-1]["content"] if e.messages else e.text for e in both))
        assert [message["role"] for message in example.rejected.messages] == [m["role"] for m in example.messages]
        assert example.rejected.prompt == example.prompt and example.target in (0, 1)
    assert texts == [("b", "d"), ("d", "b")]
    assert [bool(example and example.target) for example in examples] == [True, False]


def test_supervised_tuning_refuses_undesirable_answers(tmp_path: Path) -> None:
    path, tokenizer = Path(write_verdicts(tmp_path / "verdicts.jsonl", 4)), models.load_tokenizer(models.base_path())
    with pytest.raises(DataError, match=r"jsonl:2: label is false(.|\n)*--objective kto") as error:
        record_data(path, tokenizer, None, seq_len=64, batch_size=2, seed=0)
    assert "hint: " in str(error.value)


def test_a_mismatch_has_another_prompt() -> None:
    pairs = [{"prompt": f"{p} ", "chosen": f"{p} yes", "rejected": f"{p} no"} for p in "abc"]
    single = [
        {"prompt": f"{p} ", "completion": f"{p} {word}", "label": word == "yes"}
        for p in "abc"
        for word in ("yes", "no")
    ]
    for records in (pairs, single):
        examples = list(_with_mismatches([None, *(parse_record(record, "x", {}) for record in records)]))
        assert examples.count(None) == 1
        texts = [(e.text, e.rejected and e.rejected.text, bool(e.target)) for e in examples if e is not None]
        others = {"a": "b", "b": "c", "c": "a"}
        assert texts == [(f"{p} {word}", f"{others[p]} {word}", word == "yes") for p in "abc" for word in ("yes", "no")]


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "a", "completion": "b"},
        {"prompt": "a", "completion": "b", "label": 3},
        {"text": "a", "label": True},
        {"messages": CHAT, "label": True},
    ],
)
def test_an_answer_without_a_verdict_is_refused(record: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="no answer with a label(.|\n)*expected: prompt and completion"):
        list(_with_mismatches([parse_record(record, "line 1", {})]))


def check_kto_loss(run: Finetune) -> None:
    """Compare the loss of the first batch with that of all logits, one document at a time."""
    batch = jax.tree.map(jnp.asarray, run.data.train[0])
    assert JobPlan.make(run.config, run.base).job().args[-1].keys() == batch.keys()
    keys = iter(jax.random.split(jax.random.key(1), 100))
    model = jax.tree.map(lambda leaf: leaf + 0.02 * jax.random.normal(next(keys), leaf.shape), run.trainer.model)
    base = lt.lora.disable(model)
    gold = []
    for params in (model, base):
        options = {name: batch[name] for name in ("segment_ids", "positions")}
        log_softmax = jax.nn.log_softmax(models.logits(params, batch["tokens"], **options))
        picked = jnp.take_along_axis(log_softmax, jnp.maximum(batch["labels"], 0)[..., None], -1)[..., 0]
        gold.append(np.where(batch["labels"] == -100, 0, picked))
    ratios, verdicts = [], []
    for row in range(4):
        for number in range(1, int(batch["segment_ids"][row].max()) + 1):
            mask = np.asarray(batch["segment_ids"][row] == number)
            ratios.append((gold[0] - gold[1])[row][mask].sum())
            verdicts.append(np.asarray(batch["targets"])[row][mask].max())
            text = run.tokenizer.decode(np.asarray(batch["tokens"])[row][mask].tolist())
            assert number % 2 == 0 or ("yes" in text) == (verdicts[-1] == 1)
    ratios, verdicts = np.array(ratios).reshape(-1, 2), np.array(verdicts)[::2]
    zero = max(ratios[:, 1].mean(), 0)
    signs = np.where(verdicts == 1, 1, -1)
    wanted = np.where(verdicts == 1, 1.5, 1) * (1 - 1 / (1 + np.exp(-0.5 * signs * (ratios[:, 0] - zero))))
    loss, metrics = JobPlan.make(run.config, run.base).loss_fn(model, batch)
    np.testing.assert_allclose(loss, wanted.mean(), rtol=1e-3)
    np.testing.assert_allclose(metrics["kl"], zero, rtol=1e-3, atol=1e-4)
    rewards = 0.5 * signs * ratios[:, 0]
    np.testing.assert_allclose(metrics["rewards/signed"], rewards.mean(), rtol=1e-3)
    np.testing.assert_allclose(metrics["rewards/accuracies"], (rewards > 0).mean(), rtol=1e-6)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("full", [False, True])
def test_kto_learns_and_equals_plain_jax(full: bool, tmp_path: Path) -> None:
    data = write_verdicts(tmp_path / "verdicts.jsonl")
    settings: dict[str, Any] = {"data": data, "objective": "kto", "seq_len": 96, "batch_size": 4, "beta": 0.5}
    settings |= {"eval_every": 25, "num_steps": 25, "learning_rate": 1e-3, "desirable_weight": 1.5, "full": full}
    run = Finetune(FinetuneConfig(**settings), tmp_path / "run")
    if not full:
        check_kto_loss(run)
    run.run()
    first, last = (loss for _, loss in run.eval_losses())
    assert last < 0.7 * first


def job(tmp_path: Path, **settings: Any) -> Any:
    settings = {"objective": "dpo", **settings}
    config = FinetuneConfig(data=str(write_pairs(tmp_path / "pairs.jsonl")), **settings)
    base = models.load(models.base_path(), dtype=jnp.float32, compute_dtype=jnp.float32)
    return JobPlan.make(config, base)


@pytest.mark.parametrize("variant", ["sigmoid", "ipo"])
def test_the_loss_equals_that_of_plain_jax(variant: Any, tmp_path: Path) -> None:
    plan = job(tmp_path, preference_loss=variant, beta=0.3)
    tokenizer = models.load_tokenizer(models.base_path())
    data = record_data(tmp_path / "pairs.jsonl", tokenizer, None, seq_len=64, batch_size=2, seed=0)
    batch = jax.tree.map(jnp.asarray, data.train[0])
    keys = iter(jax.random.split(jax.random.key(1), 100))
    model = jax.tree.map(lambda leaf: leaf + 0.02 * jax.random.normal(next(keys), leaf.shape), plan.model)

    def log_probs(model: Any, row: int, number: int) -> Any:
        """Return the log-probability of one answer, and its number of tokens, from all logits of its document."""
        tokens, labels = (
            np.asarray(batch[name][row])[batch["segment_ids"][row] == number] for name in ("tokens", "labels")
        )
        log_softmax = jax.nn.log_softmax(models.logits(model, jnp.asarray(tokens)[None])[0])
        picked = jnp.take_along_axis(log_softmax, jnp.maximum(labels, 0)[:, None], 1)[:, 0]
        return jnp.sum(jnp.where(labels == -100, 0, picked)), (labels != -100).sum()

    def reference_loss(model: Any) -> Any:
        losses: list[Any] = []
        for row in range(2):
            for first in range(1, int(batch["segment_ids"][row].max()), 2):
                policy = [log_probs(model, row, number) for number in (first, first + 1)]
                base = [log_probs(lt.lora.disable(model), row, number)[0] for number in (first, first + 1)]
                ratios = [sums - jax.lax.stop_gradient(old) for (sums, _), old in zip(policy, base, strict=True)]
                if variant == "ipo":
                    means = [ratio / length for ratio, (_, length) in zip(ratios, policy, strict=True)]
                    losses.append((means[0] - means[1] - 1 / 0.6) ** 2)
                else:
                    losses.append(-jax.nn.log_sigmoid(0.3 * (ratios[0] - ratios[1])))
        return jnp.mean(jnp.stack(losses))

    grad = lt.value_and_grad(plan.loss_fn, wrt="**/lora_*", has_aux=True)
    (loss, metrics), grads = jax.jit(grad)(model, batch)
    wanted, wanted_grads = lt.value_and_grad(reference_loss, wrt="**/lora_*")(model)
    np.testing.assert_allclose(loss, wanted, rtol=1e-4)
    assert {"rewards/accuracies", "rewards/margins", "logps/chosen"} <= set(metrics)
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(wanted_grads))
    for leaf, reference in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted_grads), strict=True):
        np.testing.assert_allclose(leaf, reference, rtol=1e-3, atol=1e-4 * scale)
    assert objective("dpo").weight(batch) == sum(int(row.max()) // 2 for row in batch["segment_ids"])


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("name", "settings"),
    [("orpo", {"beta": 0.2}), ("simpo", {"preference_margin": 0.5}), ("cpo", {"nll_weight": 0.5, "beta": 0.3})],
)
def test_objectives_without_a_reference(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    plan = job(tmp_path, **settings, **{"objective": name})
    tokenizer = models.load_tokenizer(models.base_path())
    data = record_data(tmp_path / "pairs.jsonl", tokenizer, None, seq_len=64, batch_size=2, seed=0)
    batch = jax.tree.map(jnp.asarray, data.train[0])
    loss, metrics = jax.jit(plan.loss_fn)(plan.model, batch)
    logits = models.logits(plan.base, batch["tokens"], segment_ids=batch["segment_ids"], positions=batch["positions"])
    gold = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(batch["labels"], 0)[..., None], -1)[..., 0]
    is_answer = np.asarray(batch["labels"] != -100)
    sums, lengths = [], []
    for row in range(2):
        for number in range(1, int(batch["segment_ids"][row].max()) + 1):
            mask = is_answer[row] & (np.asarray(batch["segment_ids"][row]) == number)
            sums.append(float(jnp.sum(jnp.where(mask, gold[row], 0))))
            lengths.append(int(mask.sum()))
    sums, lengths = np.array(sums).reshape(-1, 2), np.array(lengths).reshape(-1, 2)
    nll = -sums[:, 0].sum() / lengths[:, 0].sum()
    chosen, rejected = sums.T if name == "cpo" else (sums / lengths).T
    functions = {
        "orpo": lambda: lt.losses.orpo(chosen, rejected, nll, beta=0.2),
        "simpo": lambda: lt.losses.simpo(chosen, rejected, beta=2.0, margin=0.5),
        "cpo": lambda: lt.losses.cpo(chosen, rejected, nll, beta=0.3, nll_weight=0.5),
    }
    wanted, wanted_metrics = functions[name]()
    np.testing.assert_allclose(loss, wanted, rtol=1e-4)
    assert set(metrics) == set(wanted_metrics)
    assert all(np.allclose(metrics[key], value, rtol=1e-3) for key, value in wanted_metrics.items())


def test_the_reference_is_the_same_in_the_step_and_as_a_column(tmp_path: Path) -> None:
    plan = job(tmp_path)
    tokenizer = models.load_tokenizer(models.base_path())
    data = record_data(tmp_path / "pairs.jsonl", tokenizer, None, seq_len=64, batch_size=2, seed=0)
    batch = jax.tree.map(jnp.asarray, data.train[0])
    model = jax.tree.map(lambda leaf: leaf + 0.01, plan.model)
    columns = reference_columns(plan.config)(lt.lora.disable(model), batch)
    loss_fn = jax.jit(plan.loss_fn)
    with_column = loss_fn(model, batch | columns)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), with_column, loss_fn(model, batch))
    assert float(loss_fn(model, batch | {"reference": columns["reference"] + 1})[0]) == pytest.approx(with_column[0])
    shifted = columns["reference"].at[:, 1::2].add(1.0)  # preferred answers only
    assert float(loss_fn(model, batch | {"reference": shifted})[0]) > float(with_column[0]) + 0.01


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("full", [False, True])
def test_a_run_learns_a_preference_and_resumes(full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = str(write_pairs(tmp_path / "pairs.jsonl", 80))
    settings: dict[str, Any] = {"data": data, "objective": "dpo", "seq_len": 96, "batch_size": 4, "full": full}
    settings |= {"num_microbatches": 2, "eval_every": 20, "checkpoint_every": 10, "learning_rate": 1e-3}
    whole = Finetune(FinetuneConfig(**settings, num_steps=20), tmp_path / "whole")

    def loss_of_naive_step(model: Any, loss_fn: Any, tx: Any, wrt: Any, batch: Any, **_: Any) -> Any:
        return loss_fn(model, batch)[0]

    with monkeypatch.context() as patched:
        patched.setattr("lowtide.finetune._run.analyze_naive", loss_of_naive_step)
        unused: Any = None
        table = MemoryTable(ours=unused, trainable_bytes=0, frozen_bytes=0, gradient_bytes=0, optimizer_bytes=0)
        assert whole.compare(table).naive == pytest.approx(np.log(2), rel=1e-3)
    records: list[dict[str, Any]] = []
    whole.run(records.append)
    steps = [record for record in records if "loss" in record]
    assert steps[0]["loss"] == pytest.approx(np.log(2), rel=1e-3)
    last = next(record for record in reversed(records) if "eval_loss" in record)
    assert last["eval_rewards/accuracies"] > 0.9 and last["eval_loss"] < 0.5
    part = Finetune(FinetuneConfig(**settings, num_steps=20), tmp_path / "part")
    part.trainer.fit(part.data.train, num_steps=10, checkpoint_every=10, progress=False)
    part.trainer.save()
    del part
    resumed = Finetune(FinetuneConfig(**settings, num_steps=20), tmp_path / "part")
    assert resumed.resumed_at == 10
    resumed.run()
    pairs = zip(jax.tree.leaves(resumed.trainer.model), jax.tree.leaves(whole.trainer.model), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta": 0.2}, "beta applies only to dpo, kto, orpo, simpo, cpo"),
        ({"objective": "orpo", "preference_loss": "ipo"}, "preference_loss applies only to dpo"),
        ({"objective": "dpo"}, "needs data"),
        ({"objective": "dpo", "data": "x", "loss_on": "all"}, "objective contradicts loss_on"),
        ({"objective": "dpo", "data": "x", "too_long": "split"}, "objective contradicts too_long"),
        ({"objective": "dpo", "data": "x", "label_smoothing": 0.6}, "label_smoothing is out of range"),
        (
            {"objective": "dpo", "data": "x", "preference_loss": "ipo", "label_smoothing": 0.1},
            "label_smoothing contradicts preference_loss",
        ),
        ({"objective": "ppo"}, "objective is out of range"),
    ],
)
def test_settings_that_contradict_the_objective(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        FinetuneConfig(**settings)
    assert "hint: " in str(error.value)


def test_an_objective_is_a_module_and_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A third objective, which learns nothing, runs from its module and its name alone."""
    module = types.ModuleType("lowtide.finetune.objectives._still")
    module.STILL = Objective(  # pyright: ignore[reportAttributeAccessIssue]
        description="no objective",
        loss=lambda model, batch, hidden, config: (0 * jnp.sum(hidden(model, batch).astype(jnp.float32)), {}),
        weight=lambda batch: jnp.float32(1),
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(objectives, "_PLACES", {**objectives._PLACES, "still": ("_still", "STILL")})
    base = models.load(models.base_path(), dtype=jnp.float32, compute_dtype=jnp.float32)
    config = FinetuneConfig()
    object.__setattr__(config, "objective", "still")  # the name in `ObjectiveName` is not patched
    loss, _ = JobPlan.make(config, base).loss_fn(base, {"tokens": jnp.zeros((1, 8), jnp.int32)})
    assert float(loss) == 0


def test_records_that_do_not_fit_the_objective(tmp_path: Path) -> None:
    pairs = str(write_pairs(tmp_path / "pairs.jsonl"))
    with pytest.raises(DataError, match="have chosen and rejected answers(.|\n)*--objective dpo"):
        Finetune(FinetuneConfig(data=pairs), tmp_path / "a")
    (tmp_path / "single.jsonl").write_text('{"prompt": "a ", "completion": "b c d"}\n' * 9)
    with pytest.raises(DataError, match="have one answer, but dpo compares two"):
        Finetune(FinetuneConfig(data=str(tmp_path / "single.jsonl"), objective="dpo"), tmp_path / "b")


SHAPES_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}


@pytest.mark.slow
@pytest.mark.gpu_aot
def test_preferences_need_the_memory_of_supervised_tuning(tmp_path: Path) -> None:
    """Two pairs of 2,048 tokens an answer, LoRA on Llama 3 8B's shapes: no second copy of a weight, no more logits."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPES_8B))
    settings: dict[str, Any] = {"model": str(tmp_path), "batch_size": 2, "seq_len": 4096, "packing": "best-fit"}
    reports = [
        JobPlan.from_shapes(FinetuneConfig(**settings, **more), lt.target("h100")).job().analyze("h100")
        for more in ({}, {"objective": "dpo", "data": "pairs.jsonl"})
    ]
    supervised, preferences = reports
    assert preferences.device_bytes <= 1.15 * supervised.device_bytes
    assert preferences.by_role["frozen"] == supervised.by_role["frozen"]
    assert preferences.device.temp_bytes < supervised.by_role["frozen"] / 3
    frozen_paths = [buffer.path for buffer in preferences.peak if buffer.role == "frozen"]
    assert frozen_paths and len(frozen_paths) == len(set(frozen_paths))


@pytest.mark.slow
@pytest.mark.tpu_aot
@pytest.mark.usefixtures("little_optimized")
def test_full_tuning_of_one_billion_parameters_fits_a_v5e(tmp_path: Path) -> None:
    """Two pairs of 2,048 tokens an answer; weights, optimizer state and reference are on the host."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(SHAPES_8B | sizes | {"tie_word_embeddings": True}))
    config = FinetuneConfig(
        **{"model": str(tmp_path), "data": "pairs.jsonl", "objective": "dpo", "full": True},
        **{"batch_size": 2, "seq_len": 4096},
    )
    job = JobPlan.from_shapes(config, lt.target("v5e")).job()
    step = job.analyze("v5e")
    assert step.fits and step.device_bytes < 4 * 2**30
    base = JobPlan.from_shapes(dataclasses.replace(config, offload=("parameters",)), lt.target("v5e")).base
    batch = {name: leaf for name, leaf in job.args[2].items() if name != "reference"}
    reference = Job(fn=reference_columns(config), args=(base, batch), roles={"base": 0, "batch": 1}).analyze("v5e")
    assert reference.device_bytes < 1.7 * 2**30 and reference.by_role["base"] < 2**20 < reference.host_bytes / 2**11


@pytest.mark.slow_after(1)
def test_ten_steps_equal_those_of_trl_and_peft(tmp_path: Path) -> None:
    golden = json.loads((Path(__file__).parents[1] / "golden/dpo_steps.json").read_text())
    path = tmp_path / "pairs.jsonl"
    names = ("prompt", "chosen", "rejected")
    path.write_text("".join(json.dumps(dict(zip(names, pair, strict=True))) + "\n" for pair in golden["pairs"]))
    config = FinetuneConfig(data=str(path), objective="dpo", rank=8, alpha=16.0, lora_init="gaussian")
    plan = JobPlan.make(config, models.load(models.base_path(), dtype=jnp.float32, compute_dtype=jnp.float32))
    tokenizer = models.load_tokenizer(models.base_path())
    end = json.loads(Path(models.base_path(), "config.json").read_text())["eos_token_id"]
    store = open_store(path, tokenizer, None, columns={}, end_token=end, loss_on="completion")
    rows = RowSource(store, *one_pair_a_row(store), 64)
    tx = optax.adamw(5e-4, weight_decay=0.0)
    trainable, frozen = lt.partition(plan.model, "**/lora_*")
    grad = lt.value_and_grad(plan.loss_fn, wrt="**/lora_*", has_aux=True)

    @jax.jit
    def step(trainable: Any, state: Any, batch: Any) -> Any:
        (loss, _), grads = grad(lt.combine(trainable, frozen), batch)
        updates, state = tx.update(grads, state, trainable)
        return optax.apply_updates(trainable, updates), state, loss

    state, losses = tx.init(trainable), []
    for first in range(0, 40, 4):
        batch = {name: np.stack([rows[first + index][name] for index in range(4)]) for name in rows[0]}
        trainable, state, loss = step(trainable, state, batch)
        losses.append(float(loss))
    np.testing.assert_allclose(losses, golden["losses"], rtol=0, atol=1e-4)


def one_pair_a_row(store: Any) -> tuple[Pieces, Rows]:
    documents = np.arange(len(store.lengths))
    pieces = cut_documents(store.lengths, documents, 64, "drop")
    return pieces, Rows(documents, np.arange(0, len(documents) + 1, 2))
