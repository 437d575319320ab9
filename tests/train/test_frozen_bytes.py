"""The compiled fine-tuning step costs nothing for what is frozen, on a CPU and on a TPU that is not there."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest

import lowtide as lt
from lowtide.core import tree_bytes
from lowtide.finetune import Finetune, FinetuneConfig
from lowtide.models import DecoderConfig, init, loss
from lowtide.train import Trainer, analyze_naive, analyze_step

# Wide and short, so that the frozen tree (23 MiB in bfloat16) is far larger than all activations.
CONFIG = DecoderConfig(
    vocab_size=1024,
    hidden_size=512,
    intermediate_size=2048,
    num_layers=3,
    num_heads=4,
    num_kv_heads=1,
    head_dim=128,
)
TARGETS = ["cpu", pytest.param("v5e:2x2", marks=pytest.mark.tpu_aot)]
WRT = "**/lora_*"


@pytest.fixture(scope="module", params=TARGETS)
def target(request):
    return request.param


@pytest.fixture(scope="module")
def trainer(target):
    # XLA's CPU compiler widens half-precision stacks to float32 in a temporary; a TPU computes in bfloat16.
    dtype = jnp.float32 if target == "cpu" else jnp.bfloat16
    base = init(CONFIG, key=jax.random.key(0), dtype=dtype, compute_dtype=dtype)
    model = lt.lora.add(base, lt.lora.Config(rank=8, targets="layers/**/*_proj"), key=jax.random.key(1))
    return Trainer(model, partial(loss, remat=True), optax.adamw(1e-4), wrt=WRT)


@pytest.fixture(scope="module")
def batch():
    return {name: jax.ShapeDtypeStruct((1, 64), jnp.int32) for name in ("tokens", "labels")}


@pytest.fixture(scope="module")
def report(trainer, batch, target):
    """Of our step, compiled once."""
    return trainer.memory(batch, target=target)


@pytest.mark.slow_after(1)
def test_no_output_and_no_temporary_has_the_size_of_the_frozen_tree(trainer, report, target):
    frozen_bytes, trainable_bytes = tree_bytes(trainer.frozen), tree_bytes(trainer.state.trainable)
    assert frozen_bytes > 20 * trainable_bytes
    assert report.by_role["frozen"] >= frozen_bytes
    assert report.by_role["outputs"] < 4096
    # The CPU's scan copies the slice of one layer, a third of this tree; a TPU's does not.
    assert report.device.temp_bytes < frozen_bytes / (2 if target == "cpu" else 10)
    assert report.device.alias_bytes >= tree_bytes(trainer.state)
    assert report.host_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cpu"], indirect=True)  # tests/train/test_offload.py compiles it for absent chips
def test_the_naive_step_pays_for_the_whole_model(trainer, report, batch, target):
    ours = report
    naive = analyze_naive(trainer.model, partial(loss, remat=True), optax.adamw(1e-4), WRT, batch, target=target)
    frozen_bytes = tree_bytes(trainer.frozen)
    assert naive.by_role["optimizer"] - ours.by_role["optimizer"] >= 2 * frozen_bytes
    assert naive.device_bytes - ours.device_bytes >= 2 * frozen_bytes
    assert naive.by_role["frozen"] == ours.by_role["frozen"]


@pytest.mark.slow
def test_both_steps_are_compared_with_the_same_microbatches():
    def loss(model, x):
        return jnp.mean(jnp.tanh(x @ (model["w"] + model["lora_a"] @ model["lora_b"])) ** 2)

    shapes = {"w": (64, 1024), "lora_a": (64, 4), "lora_b": (4, 1024)}
    model = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    batch = jax.ShapeDtypeStruct((4096, 64), jnp.float32)
    arguments = (model, loss, optax.adamw(1e-4), "lora_*", batch)
    whole, parts = (analyze_naive(*arguments, num_microbatches=n, target="cpu") for n in (1, 8))
    ours = analyze_step(*arguments, num_microbatches=8, target="cpu")
    assert ours.device.temp_bytes <= parts.device.temp_bytes < whole.device.temp_bytes / 2


@pytest.mark.slow
def test_the_memory_table_counts_what_trains(tiny_model_dir, tmp_path):
    (tmp_path / "data.txt").write_text("the tide goes out and the tide comes in " * 40)
    config = FinetuneConfig(model=tiny_model_dir, data=str(tmp_path / "data.txt"), seq_len=8, rank=2)
    (tmp_path / "out").mkdir()
    job = Finetune(config, tmp_path / "out")
    table = job.memory()
    content = table.to_dict()
    parameters = sum(x.size for x in jax.tree.leaves(job.trainer.state.trainable))
    assert content["gradient_bytes"] == content["trainable_bytes"] == 4 * parameters
    # AdamW: two float32 moments a parameter and its own and the schedule's step counter.
    assert content["optimizer_bytes"] == 8 * parameters + 8
    assert content["frozen_bytes"] == tree_bytes(job.base)
    assert content["device_bytes"] == sum(content["by_role"].values())
    assert not table.is_compared and not [key for key in content if "naive" in key]
    compared = job.compare(table).to_dict()
    assert {key: compared[key] for key in content} == content
    assert compared["naive_gradient_bytes"] == content["frozen_bytes"] + content["trainable_bytes"]
    assert compared["naive_device_bytes"] > content["device_bytes"]
    assert json.loads(json.dumps(compared)) == compared
