"""What `lowtide finetune` says of LoRA's variants beside their kind: dropout, rates, what trains as a whole."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

from lowtide import lora, models
from lowtide.cli import main
from lowtide.core import ConfigError, SelectionError, StructureError
from lowtide.distributed import ShardingRules, make_mesh
from lowtide.finetune import Finetune, FinetuneConfig
from lowtide.finetune._job import add_adapter
from tests.models.kinds import KINDS

PLAIN: dict[str, Any] = {"seq_len": 8, "batch_size": 4, "rank": 2, "sample_tokens": 0, "num_steps": 4}
KEY = jax.random.key(0)
TEXT = "the tide goes out and the tide comes in and the moon pulls and the sea follows\n" * 60


@pytest.fixture
def config(tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data.txt").write_text(TEXT)
    steady = {"schedule": "constant", "warmup_steps": 0, "learning_rate": 1e-2}
    paths = {"model": str(tiny_model_dir), "data": str(tmp_path / "data.txt")}
    return lambda **options: FinetuneConfig(**(PLAIN | paths | steady | options))


def ran(config: FinetuneConfig, out: Path) -> tuple[list[Any], dict[str, np.ndarray]]:
    """Run a configuration; returns its records' losses, and what was written."""
    run = Finetune(config, out)
    run.run()
    run.finish(run.memory())
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], r.get("loss"), r.get("eval_loss")) for r in records], load_file(
        out / "adapter" / "adapter_model.safetensors"
    )


def test_an_adapter_that_was_trained_with_dropout_says_which_flag_goes_on(
    config: Any, tiny_model_dir: Path, tmp_path: Path
) -> None:
    base = models.load(tiny_model_dir)
    lora.save(lora.add(base, lora.Config(rank=2, targets="**/q_proj"), key=KEY), tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "lora_dropout": 0.5}))
    going_on = {"adapter": str(tmp_path / "adapter"), "rank": 16}  # the adapter has its own
    with pytest.warns(UserWarning, match="lowtide finetune has --lora-dropout 0.5"):
        add_adapter(base, config(**going_on))
    add_adapter(base, config(**going_on, lora_dropout=0.5))


@pytest.mark.slow
def test_dropout_goes_on_bit_for_bit_and_is_off_in_evaluation(config: Any, tmp_path: Path) -> None:
    dropped = {"lora_dropout": 0.5, "lora_init": "pissa", "checkpoint_every": 2, "eval_every": 2}
    whole, tensors = ran(config(**dropped), tmp_path / "whole")
    ran(config(**dropped, num_steps=2), tmp_path / "parts")
    flags = ["--out", str(tmp_path / "parts"), "--resume", "--steps", "4"]
    assert main(["finetune", *flags]) == 0
    parts = [json.loads(line) for line in (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()]
    losses = [(r["step"], r["loss"]) for r in parts if "loss" in r]
    assert losses == [(step, loss) for step, loss, _ in whole if loss is not None]
    again = load_file(tmp_path / "parts" / "adapter" / "adapter_model.safetensors")
    assert all(np.array_equal(again[name], tensors[name]) for name in tensors)
    plain = Finetune(config(eval_every=2, lora_init="pissa"), tmp_path / "plain")
    step, _, held_out = whole[0]
    assert (step, plain.trainer.evaluate(plain.data.held_out)["loss"]) == (0, held_out)  # before the first step
    first = plain.trainer.evaluate([plain.data.train[0]])["loss"]
    trained = plain.trainer.fit(plain.data.train, num_steps=1)[0]
    assert abs(first - trained["loss"]) < 1e-5  # a step without dropout has the loss of an evaluation
    assert abs(first - losses[0][1]) > 1e-4  # the same batch and weights, with dropout


@pytest.mark.slow
def test_factors_b_learn_at_a_multiple_of_the_rate(config: Any, tmp_path: Path) -> None:
    config_of_two = lora.Config(rank=2, targets="**/{q,v}_proj")
    model = lora.add(models.init(KINDS["qwen2"], key=jax.random.key(0)), config_of_two, key=jax.random.key(1))
    trainable = jax.tree.map(jnp.ones_like, lora_part(model))
    plain, faster = (
        tx.update(trainable, tx.init(trainable), trainable)[0]
        for tx in (optax.adamw(0.1, weight_decay=0.1), optax.chain(optax.adamw(0.1, weight_decay=0.1), lora.plus(16)))
    )
    rates = optax.adamw(1.6, weight_decay=0.1)
    at_rate = rates.update(trainable, rates.init(trainable), trainable)[0]
    for of_plain, of_faster, wanted in zip(*map(nodes, (plain, faster, at_rate)), strict=True):
        np.testing.assert_array_equal(of_faster.lora_a, of_plain.lora_a)
        np.testing.assert_allclose(of_faster.lora_b, wanted.lora_b, rtol=1e-6)
    with pytest.raises(SelectionError, match=r"the trainable leaves have no factor B(.|\n)*hint:"):
        lora.plus(16).init({"w": jnp.ones(2)})
    with pytest.raises(ConfigError, match=r"ratio must be a finite number above 0, not 0"):
        lora.plus(0)
    # Adam's first step is the rate, whatever the gradient: B, which begins as zero, is 16 times as far.
    slower = ran(config(num_steps=1, loraplus_ratio=1.0), tmp_path / "slower")[1]
    for place, options in {"device": {}, "host": {"offload": ("optimizer",)}}.items():
        faster = ran(config(num_steps=1, loraplus_ratio=16.0, **options), tmp_path / place)[1]
        for name, factor in slower.items():
            np.testing.assert_allclose(faster[name], factor * (16 if "lora_B" in name else 1), rtol=1e-5)


@pytest.mark.slow
def test_eva_begins_with_the_first_batches(config: Any, tmp_path: Path) -> None:
    options = {"lora_init": "eva", "quantize": "int8", "lora_dropout": 0.1, "checkpoint_every": 1}
    _, tensors = ran(config(**options, num_steps=1), tmp_path / "run")  # of B alone: while it is zero A has no gradient
    begun = Finetune(config(**options, num_steps=1, num_microbatches=2), tmp_path / "parts").trainer.model
    lora.save(begun, tmp_path / "begun")
    parts = load_file(tmp_path / "begun" / "adapter_model.safetensors")
    for name, factor in tensors.items():
        if "lora_A" in name:
            np.testing.assert_allclose(factor @ factor.T, np.eye(len(factor)), atol=1e-5)
            np.testing.assert_allclose(np.abs(np.linalg.det(parts[name] @ factor.T)), 1, atol=1e-3)
    # What is resumed begins as the checkpoint says.
    _, whole = ran(config(**options, num_steps=2), tmp_path / "whole")
    assert main(["finetune", "--out", str(tmp_path / "run"), "--resume", "--steps", "2"]) == 0
    again = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    assert all(np.array_equal(again[name], whole[name]) for name in whole)
    assert any(not np.array_equal(whole[name], tensors[name]) for name in whole if "lora_A" in name)
    sharding = ShardingRules(mesh=make_mesh(data=1))
    with pytest.raises(ConfigError, match=r"lora_init: EVA reads whole batches(.|\n)*--adapter"):
        Finetune(config(lora_init="eva"), tmp_path / "divided", sharding=sharding)


def test_a_target_that_eva_cannot_begin_is_refused_before_anything_is_written(
    config: Any, tmp_path: Path, tiny_model_dir: str
) -> None:
    untied = models.init(dataclasses.replace(models.load_config(tiny_model_dir), tie_embeddings=False), key=KEY)
    models.save(untied, tmp_path / "untied", tokenizer=f"{tiny_model_dir}/tokenizer.json")
    config = partial(config, model=str(tmp_path / "untied"))
    with pytest.raises(StructureError, match=r"outer/embed/weight: EVA supports only matrices(.|\n)*got: an embedding"):
        Finetune(config(lora_init="eva", targets=("outer/embed/weight", "layers/**/*_proj")), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def lora_part(model: Any) -> Any:
    from lowtide.core import partition

    return partition(model, lora.TRAINABLE)[0]


def nodes(tree: Any) -> list[Any]:
    is_node = lambda node: isinstance(node, lora.LoRAWeight)  # noqa: E731
    return [node for node in jax.tree.leaves(tree, is_leaf=is_node) if is_node(node)]


@pytest.mark.slow
def test_a_head_and_norms_train_with_the_adapter_are_saved_and_go_on(
    config: Any, tmp_path: Path, tiny_model_dir: Path
) -> None:
    whole = {"modules_to_save": ("outer/*", "layers/*_norm")}
    _, tensors = ran(config(**whole, lora_dropout=0.1, offload=("activations",)), tmp_path / "run")
    base = models.load(tiny_model_dir)
    saved = lora.load(base, tmp_path / "run" / "adapter")
    assert any("norm.weight" in name for name in tensors)
    assert not np.array_equal(saved.outer["norm"]["weight"].lora_saved, base.outer["norm"]["weight"])
    options = {"adapter": str(tmp_path / "run" / "adapter"), "rank": 16, "num_steps": 1, "quantize": "int8"}
    _, more = ran(config(**options), tmp_path / "more")
    assert {*more} == {*tensors}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_dropout": 1.0}, r"lora_dropout is out of range(.|\n)*less than 1"),
        ({"loraplus_ratio": 0.0}, r"loraplus_ratio is out of range"),
        ({"lora_init": "pissa", "method": "dora"}, r"lora_init contradicts method"),
        ({"lora_init": "orthogonal", "rank": 3}, r"rank is out of range(.|\n)*an even number"),
        ({"bias": "most"}, r"bias is out of range(.|\n)*lora_only"),
        ({"method": "ia3", "lora_dropout": 0.1, "rank": 16}, r"lora_dropout contradicts method"),
        ({"method": "vera", "loraplus_ratio": 2.0}, r"loraplus_ratio contradicts method"),
        ({"full": True, "modules_to_save": "outer/*", "rank": 16}, r"modules_to_save is a setting of adapters"),
        ({"adapter": "a", "bias": "all", "rank": 16}, r"bias contradicts adapter"),
    ],
)
def test_what_contradicts_is_refused(config: Any, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**options)
