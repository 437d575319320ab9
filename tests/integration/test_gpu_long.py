"""Attention and long sequences of a GPU day: what is said of them, and what their scripts compute and try."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowtide as lt
from lowtide.ops import _attention, _tokens

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import _ladder  # noqa: E402
import _summary  # noqa: E402
import attention_time  # noqa: E402
import longest_sequence  # noqa: E402
from _decoders import LLAMA_8B, batch_of  # noqa: E402

sys.path.remove(str(BENCHMARKS))


def good(**fields: Any) -> dict[str, Any]:
    return {"ok": True, "losses": [5.0, 4.5], "commit": "a", "versions": {"jax": "1"}, **fields}


def state(part: str, rows: dict[str, Any], figure: str) -> tuple[str, str]:
    found = _summary.lines({part: {"part": part, "rows": rows}})
    (line,) = [line for _, line in found if line.figure.startswith(figure)]
    return line.state, line.found


SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
FAILED = {"ok": False, "error": "ValueError: no"}

CUDNN = good(forward_ms=2.0, both_ms=8.0, both_tflops=480.0, both_peak_bytes=2**30)
BLOCKS = good(forward_ms=5.0, both_ms=16.0, both_tflops=240.0, both_peak_bytes=2**31, relative_error=0.01)
LOST: dict[str, Any] = {"out_of_memory": True, "both_out_of_memory": True}


@pytest.mark.parametrize(
    ("blocks", "cudnn", "said"),
    [
        (
            BLOCKS,
            CUDNN,
            (
                "measured",
                "2.50 × forward, 2.00 × with gradients (blocks 5.0 and 16.0 ms, 240 TFLOP/s, peak 2.00 GiB; "
                "cuDNN 2.0 and 8.0 ms, 480 TFLOP/s, peak 1.00 GiB)",
            ),
        ),
        (BLOCKS | {"relative_error": 0.3}, CUDNN, ("missed", "values apart by 30.0 % of their norm")),
        (BLOCKS | {"relative_error": math.nan}, CUDNN, ("missed", "values apart by nan % of their norm")),
        (
            good(**LOST, forward_ms=5.0),
            CUDNN,
            (
                "missed",
                "2.50 × forward (blocks 5.0 ms, and runs out of memory with gradients; cuDNN 2.0 and 8.0 ms, "
                "480 TFLOP/s, peak 1.00 GiB)",
            ),
        ),
        (
            BLOCKS,
            good(out_of_memory=True),
            ("measured", "blocks 5.0 and 16.0 ms, 240 TFLOP/s, peak 2.00 GiB; cuDNN runs out of memory"),
        ),
        (good(**LOST), good(**LOST), ("measured", "blocks runs out of memory; cuDNN runs out of memory")),
        (BLOCKS, FAILED, ("measured", "blocks 5.0 and 16.0 ms, 240 TFLOP/s, peak 2.00 GiB")),
        (FAILED, FAILED, ("failed", "")),
    ],
)
def test_attention_is_told_beside_cudnns(blocks: Any, cudnn: Any, said: tuple[str, str]) -> None:
    rows = {"32k-packed-cudnn": cudnn, "32k-packed-blocks": blocks}
    assert state("attention", rows, "attention of Llama 3.1 8B's shapes, 32k-packed") == said


def test_values_that_nobody_compared_are_said_to_be() -> None:
    alone = {name: value for name, value in BLOCKS.items() if name != "relative_error"}
    found = state("attention", {"4k-cudnn": CUDNN, "4k-blocks": alone}, "attention of Llama 3.1 8B's shapes, 4k")
    assert found[1].endswith("; values not compared")


FITS = good(tokens_per_second=900.0, peak_bytes=2**36, host_bytes=2**35, verified=True)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({"65536": FITS, "400000": FITS}, ("met", "400,000 tokens")),
        (
            {"65536": FITS, "131072": good(out_of_memory=True), "262144": good(not_tried=True, did_not_fit=131072)},
            ("missed", "65,536 tokens; 131,072 run out of memory"),
        ),
        ({"65536": FITS}, ("measured", "65,536 tokens")),
        ({"65536": good(out_of_memory=True)}, ("missed", "less than 65,536 tokens")),
        ({"65536": FITS, "400000": FITS | {"verified": False}}, ("measured", "65,536 tokens")),
        ({"65536": FITS, "400000": FITS | {"losses": [math.nan]}}, ("measured", "65,536 tokens")),
        ({"65536": FAILED}, ("failed", "")),
        ({}, ("not measured", "")),
    ],
)
def test_the_longest_sequence_is_one_that_was_trained_on(rows: Any, said: tuple[str, str]) -> None:
    assert state("longest", rows, "QLoRA of Llama 3.1 8B's shapes on 80 GB, longest") == said
    if rows and rows["65536"] is FITS:
        each = state("longest", rows, "QLoRA of Llama 3.1 8B's shapes on 80 GB, 65,536 tokens")
        assert each == ("measured", "900 tokens/s, peak 64.00 GiB, 32.00 GiB on the host")


RUNG = good(rung="+ loss in chunks", tokens_per_second=900.0, step_peak_bytes=2**31, host_bytes=0, method="lora")
RUNG |= {"peak_bytes": 2**33}
ABOVE = RUNG | {"losses": [loss + 0.01 for loss in RUNG["losses"]]}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (RUNG, ("measured", "900 tokens/s, peak 2.00 GiB")),
        (
            RUNG | {"host_bytes": 2**30, "verified": True},
            ("measured", "900 tokens/s, peak 2.00 GiB, 1.00 GiB on the host"),
        ),
        (RUNG | {"verified": False, "verify_error": "not there\n..."}, ("missed", "not verified: not there")),
        (RUNG | {"losses": [loss + 0.2 for loss in ABOVE["losses"]]}, ("missed", "losses apart by 0.2 nats")),
        (RUNG | {"losses": [math.nan]}, ("missed", "the loss is no number")),
        (RUNG | {"losses": []}, ("missed", "losses not compared")),
        (RUNG | {"losses": [9.0], "method": "qlora"}, ("measured", "900 tokens/s, peak 2.00 GiB")),
        (good(rung="+ loss in chunks", out_of_memory=True), ("measured", "runs out of memory")),
    ],
)
def test_a_rung_is_told_unless_it_computes_something_else(row: Any, said: tuple[str, str]) -> None:
    rows = {"scores": good(out_of_memory=True), "kernel": ABOVE | {"rung": "above"}, "chunks": row}
    assert state("ladder", rows, "LoRA 1b-4x2048, + loss in chunks: tokens/s and peak") == said


def test_a_ladder_that_failed_or_was_not_measured_is_told() -> None:
    assert state("ladder", {"chunks": FAILED}, "LoRA 1b-4x2048, chunks") == ("failed", "")
    assert state("ladder", {}, "LoRA 1b-4x2048, a technique more") == ("not measured", "")


ON_DEVICE = good(seconds_per_step=1.0)
AHEAD = good(seconds_per_step=1.25, overlap={"hidden_share": 0.5})


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (AHEAD, ("measured", "1.25 × the time, 50 % of the copies under kernels")),
        (AHEAD | {"losses": [9.0, 9.0]}, ("missed", "losses apart by 4.5 nats")),
        (good(option_error="No such option"), ("measured", "an option that is not known here")),
        (good(out_of_memory=True), ("measured", "runs out of memory")),
        (FAILED, ("failed", "")),
    ],
)
def test_copies_are_told_beside_the_step_on_the_device(row: Any, said: tuple[str, str]) -> None:
    found = state("copies", {"device": ON_DEVICE, "ahead": row}, "layers' inputs on the host over the device, ahead")
    assert found == said
    lost = {"device": FAILED, "ahead": AHEAD}
    assert state("copies", lost, "layers' inputs on the host over the device, ahead") == ("failed", "")
    assert state("copies", {}, "layers' inputs on the host over the device, by") == ("not measured", "")


@pytest.mark.slow
def test_rungs_train_the_same_in_their_own_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Toys of the ladder: gradients of the adapters and the loss, with padding, against the first rung's."""
    config = dataclasses.replace(LLAMA_8B, **SIZES, num_layers=4, num_heads=4, num_kv_heads=2)
    model = dataclasses.replace(lt.models.init(config, key=jax.random.key(0)), tile_tokens=96)
    batch = batch_of(config, 2, 80)
    batch["labels"] = batch["labels"].at[:, 70:].set(-100)
    used: set[str] = set()
    for module, name in (
        (_attention, "attend_in_blocks"),
        (_attention, "attend_with_scores"),
        (_tokens, "_over_tiles"),
    ):
        monkeypatch.setattr(module, name, noted(used, name, getattr(module, name)))

    def gradients(rung: _ladder.Rung) -> Any:
        trainable, frozen = lt.partition(rung.adapted(model, jax.random.key(1)), "**/lora_*")
        trainable = jax.tree.map(lambda leaf: leaf + 0.01, trainable)  # beyond zeros, where half of the gradients are
        used.clear()
        with rung.around():
            found = jax.value_and_grad(lambda part: rung.loss(lt.combine(part, frozen), batch)[0])(trainable)
        return jax.device_get(found), {*used}

    rungs = {**_ladder.RUNGS, "groups": _ladder.GROUPS}
    found = {name: gradients(rung) for name, rung in rungs.items() if rung.base is None}
    assert [rung.is_hosted for rung in rungs.values()] == [name in ("host", "nf4") for name in rungs]
    assert {name: ways for name, (_, ways) in found.items()} == {
        **dict.fromkeys(("scores", "chunks"), {"attend_with_scores"}),
        "kernel": {"attend_in_blocks"},
        **dict.fromkeys(("remat", "host", "groups"), {"attend_in_blocks", "_over_tiles"}),
    }
    for name, (each, _) in found.items():
        for one, other in zip(*map(jax.tree.leaves, (each, found["scores"][0])), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6, err_msg=name)


def noted(used: set[str], name: str, fn: Any) -> Any:
    def run(*args: Any, **options: Any) -> Any:
        used.add(name)
        return fn(*args, **options)

    return run


@pytest.mark.parametrize(
    "shape",
    [attention_time.Shape(2, 24), attention_time.Shape(1, 24, document=6), attention_time.Shape(3, 24, window=7)],
)
def test_pairs_are_those_that_a_query_sees(shape: attention_time.Shape) -> None:
    at = range(shape.seq_len)
    seen = sum(
        key <= query
        and query - key < (shape.window or shape.seq_len)
        and (shape.document is None or key // shape.document == query // shape.document)
        for query in at
        for key in at
    )
    assert shape.pairs == shape.batch_size * seen
    assert attention_time.flops(shape, 4, 8, backward=True) == 3.5 * 4 * 4 * 8 * shape.pairs


def test_results_that_differ_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_time, "scratch", lambda part: tmp_path)
    ones = [jnp.ones((2, 4)), jnp.full((2, 4), 2.0)]
    assert attention_time.distance("a", "blocks", ones) == {"compared_with": None, "relative_error": None}
    assert attention_time.distance("a", "cudnn", ones) == {}
    assert attention_time.distance("a", "blocks", ones)["relative_error"] == 0.0
    assert attention_time.distance("a", "blocks", [ones[0], 1.1 * ones[1]])["relative_error"] == pytest.approx(0.1)
    assert math.isnan(attention_time.distance("a", "blocks", [ones[0], jnp.nan * ones[1]])["relative_error"])


def test_what_is_longer_than_what_did_not_fit_is_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(longest_sequence, "scratch", lambda *parts: tmp_path)
    monkeypatch.setattr(longest_sequence, "host_bytes", lambda: 2**40)
    tried: list[int] = []

    def measure(row: dict[str, Any], config: Any, length: int) -> None:
        tried.append(length)
        if length > 100:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.")

    monkeypatch.setattr(longest_sequence, "measure", measure)
    rows = [longest_sequence.run(length, False) for length in (50, 200, 400)]
    assert [row.get("out_of_memory") for row in rows] == [False, True, None]
    assert (rows[2]["not_tried"], rows[2]["did_not_fit"], tried) == (True, 200, [50, 200])
    assert longest_sequence.run(200, False)["out_of_memory"]  # itself it is tried again
    monkeypatch.setattr(longest_sequence, "host_bytes", lambda: 2**30)
    assert "bytes of the host" in longest_sequence.run(60, False)["error"] and tried == [50, 200, 200]


def test_a_larger_card_lends_80_gb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(longest_sequence, "gpu", lambda: {"memory.total": "143771 MiB"})
    found = longest_sequence.environment(131072)
    assert float(found["XLA_PYTHON_CLIENT_MEM_FRACTION"]) * 143771 * 2**20 == pytest.approx(80e9, rel=1e-3)
    assert found["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"] == "36"  # 32 GiB enter the layers


@pytest.mark.slow
def test_a_drawn_model_is_the_one_that_is_quantised() -> None:
    config = dataclasses.replace(LLAMA_8B, **SIZES, num_layers=2, num_heads=4, num_kv_heads=2)
    model = longest_sequence.model_of(config)
    make = functools.partial(lt.models.init, config, dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16)
    base = lt.quantize(jax.eval_shape(make, key=jax.random.key(0)), "layers/**/*_proj", "nf4")
    adapters = lt.lora.Config(rank=longest_sequence.RANK, alpha=longest_sequence.ALPHA, targets="all-linear")
    shapes = jax.eval_shape(lambda: lt.lora.add(base, adapters, key=jax.random.key(0)))
    assert jax.tree.structure(model) == jax.tree.structure(shapes)
    told = [[(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)] for tree in (model, shapes)]
    assert told[0] == told[1]
    weight = lt.dequantize(model).layers["attn"]["q_proj"]["weight"].weight
    assert float(jnp.std(weight.astype(jnp.float32))) == pytest.approx(0.02, rel=0.1)
    assert len({float(jnp.sum(each)) for each in weight.astype(jnp.float32)}) == config.num_layers
