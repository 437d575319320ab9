"""Commands on a directory that other software quantised."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowtide as lt
from lowtide import finetune, lora, models
from lowtide.cli import main
from tests.models.quantized_files import quantized_directory

Command = Callable[..., tuple[int, str]]
TEXT = "the tide goes out and the tide comes in\n" * 200


@pytest.fixture(scope="module")
def nested(tiny_model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    sizes: dict[str, Any] = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 128, "num_layers": 2}
    config = models.DecoderConfig(**sizes, num_heads=4, num_kv_heads=2, head_dim=16)
    tokenizer = f"{tiny_model_dir}/tokenizer.json"
    models.save(models.init(config, key=jax.random.key(0)), folder / "dense", tokenizer=tokenizer)
    quantized_directory(folder / "dense", folder / "nested", "nf4 nested")
    return folder / "nested"


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Command:
    """Run a command; returns the exit status and what it printed."""

    def run(*words: Any) -> tuple[int, str]:
        status = main([*map(str, words)])
        return status, "".join(capfd.readouterr())

    return run


def test_inspect_counts_weights_and_not_bytes(command: Command, nested: Path, tmp_path: Path) -> None:
    status, printed = command("inspect", nested, "--json")
    found = json.loads(printed)
    dense = models.load(nested.parent / "dense")
    facts = found["facts"]
    assert (status, found["problems"]) == (0, [])
    projections = sum(x.size for path, x in lt.core.leaves_with_paths(dense) if path.endswith("_proj/weight"))
    assert facts["parameters"] == sum(leaf.size for leaf in jax.tree.leaves(dense))
    assert facts["dtypes"] == {"NF4": projections, "F32": facts["parameters"] - projections}
    # 4 bits, 8 of each 64's scale, and one of 32 for each matrix' 32 to 128 scales.
    assert facts["quantization"]["method"] == "bitsandbytes"
    assert 4.125 < float(facts["quantization"]["NF4"].removesuffix(" bits each")) < 4.2
    shutil.copytree(nested, tmp_path / "m")
    raw = json.loads((nested / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps({**raw, "quantization_config": {"quant_method": "awq"}}))
    status, printed = command("inspect", tmp_path / "m", "--json")
    assert status == 1 and "quantised by 'awq'" in json.loads(printed)["problems"][0]


def test_a_step_is_planned_with_the_bytes_that_weights_have(nested: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"rank": 2, "batch_size": 2, "seq_len": 16}
    steps = [finetune.step_job(folder, **options) for folder in (nested, nested.parent / "dense")]
    ours, dense = (step.args[4] for step in steps)
    codes = ours.layers["attn"]["q_proj"]["weight"].weight
    assert isinstance(codes, lt.QuantizedWeight) and codes.format == "nf4" and codes.codes.shape == (2, 64, 64)
    quarter = 2 * 4 * (64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 128) // 8
    assert quarter < lt.core.tree_bytes(ours.layers) < quarter * 1.2 < lt.core.tree_bytes(dense.layers) / 3
    (tmp_path / "config.json").write_bytes((nested / "config.json").read_bytes())  # no weights
    alone = finetune.step_job(tmp_path, **options).args[4]
    assert lt.core.tree_bytes(alone) == lt.core.tree_bytes(ours)


def test_what_such_weights_cannot_do_is_refused_before_anything_is_read(
    command: Command, nested: Path, tmp_path: Path
) -> None:
    (tmp_path / "data.txt").write_text(TEXT)
    paths = ("--model", nested, "--data", tmp_path / "data.txt", "--out", tmp_path / "run", "--steps", 2)
    for flags, words in (
        (("--quantize", "nf4"), "already quantised, by bitsandbytes"),
        (("--offload", "parameters"), "has 4-bit weights"),
        (("--full",), "full tunes all parameters"),
    ):
        status, printed = command("finetune", *paths, *flags)
        assert status == 2 and words in " ".join(printed.split()), flags
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_an_adapter_trains_on_the_weights_as_they_are_and_merges_into_arrays(
    command: Command, nested: Path, tmp_path: Path
) -> None:
    (tmp_path / "data.txt").write_text(TEXT)
    paths = ("--model", nested, "--data", tmp_path / "data.txt", "--out", tmp_path / "run")
    sizes = ("--steps", 2, "--batch-size", 2, "--seq-len", 16, "--rank", 2, "--sample-tokens", 0)
    status, printed = command("finetune", *paths, *sizes)
    assert status == 0, printed
    step = finetune.step_job(nested, rank=2, batch_size=2, seq_len=16, packing="contiguous")
    memory = json.loads((tmp_path / "run" / "memory.json").read_text())
    assert memory["frozen_bytes"] == pytest.approx(lt.core.tree_bytes(step.args[4]), rel=0.01)
    assert step.analyze().device_bytes == pytest.approx(memory["device_bytes"], rel=0.005)
    assert memory["device_bytes"] > memory["frozen_bytes"]

    status, printed = command(
        "merge", "--model", nested, "--adapter", tmp_path / "run" / "adapter", "--out", tmp_path / "m"
    )
    assert status == 0, printed
    assert "quantization_config" not in json.loads((tmp_path / "m" / "config.json").read_text())
    merged = models.load(tmp_path / "m")
    adapted = lora.load(models.load(nested), tmp_path / "run" / "adapter")
    assert isinstance(merged.layers["attn"]["q_proj"]["weight"], jax.Array)
    tokens, logits = jnp.arange(12)[None], jax.jit(models.logits)
    np.testing.assert_allclose(logits(merged, tokens), logits(adapted, tokens), rtol=0, atol=1e-5)
    assert re.search("merged 1 adapter into", printed)
