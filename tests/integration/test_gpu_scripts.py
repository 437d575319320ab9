"""Scripts of a GPU day: what they compute, what they try, and what they refuse."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowtide as lt
from lowtide.ops import _attention, _tiled_map

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import _ladder  # noqa: E402
import _overlap  # noqa: E402
import attention_time  # noqa: E402
import gpu_smoke  # noqa: E402
import layerwise_time  # noqa: E402
import longest_sequence  # noqa: E402
import lora_peft  # noqa: E402
import measured_peak  # noqa: E402
import offload_time  # noqa: E402
from _decoders import LLAMA_1B, LLAMA_8B, batch_of  # noqa: E402

sys.path.remove(str(BENCHMARKS))

SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


# --- copies under kernels -------------------------------------------------------------------------------------------


def test_copies_are_hidden_where_a_kernel_runs() -> None:
    events = [
        *[("gemm", 0.0, 2.0), ("loop_fusion", 1.0, 3.0), ("gemm", 5.0, 6.0)],  # kernels from 0 to 3 and from 5 to 6
        *[("MemcpyH2D", 2.0, 4.0), ("MemcpyH2D", 3.5, 5.5)],  # from 2 to 5.5; hidden 2 to 3 and 5 to 5.5
        *[("MemcpyD2H", 7.0, 8.0), ("MemcpyD2D", 0.0, 9.0), ("Memset", 0.0, 9.0)],
    ]
    seconds = {"kernel": 4.0, "h2d": 3.5, "d2h": 1.0, "copy": 4.5}
    seconds |= {"h2d_hidden": 1.5, "d2h_hidden": 0.0, "copy_hidden": 1.5}
    assert _overlap.hidden(events) == pytest.approx({f"{name}_seconds": value for name, value in seconds.items()})
    assert _overlap.union([(3, 4), (0, 1), (1, 2), (0.5, 0.6)]) == [(0, 2), (3, 4)]
    assert _overlap.common([(0, 2), (3, 4)], [(1, 3.5), (3.7, 9)]) == [(1, 2), (3, 3.5), (3.7, 4)]
    assert _overlap.common([], [(0, 1)]) == [] and _overlap.length([(0, 2), (3, 4.5)]) == 3.5


PLANE = """
planes {{ id: {id} name: "{name}"
  lines {{ id: 1 name: "{line}" timestamp_ns: 1000
    events {{ metadata_id: 1 offset_ps: 0 duration_ps: 3000000 }}
    events {{ metadata_id: 2 offset_ps: 2000000 duration_ps: 2000000 }} }}
  event_metadata {{ key: 1 value {{ id: 1 name: "loop_fusion" }} }}
  event_metadata {{ key: 2 value {{ id: 2 name: "MemcpyD2H" }} }} }}
"""


def test_a_trace_is_read_by_the_streams_of_its_gpus(tmp_path: Path) -> None:
    from jax.profiler import ProfileData

    planes = [("/device:GPU:0", "Stream #7(Compute,MemcpyD2H)"), ("/device:GPU:0", "XLA Ops"), ("/host:CPU", "Stream")]
    text = "".join(PLANE.format(id=index, name=name, line=line) for index, (name, line) in enumerate(planes))
    folder = tmp_path / "plugins/profile/now"
    folder.mkdir(parents=True)
    (folder / "machine.xplane.pb").write_bytes(ProfileData.text_proto_to_serialized_xspace(text))
    seconds = _overlap.overlap(tmp_path)
    assert seconds["kernel_seconds"] == pytest.approx(3e-6) and seconds["d2h_seconds"] == pytest.approx(2e-6)
    assert seconds["hidden_share"] == pytest.approx(0.5)
    assert _overlap.overlap(tmp_path / "nothing") == {}


# --- attention and long sequences -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_rungs_train_the_same_in_their_own_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Toys of the ladder: gradients of the adapters and the loss, with padding, against the first rung's."""
    config = dataclasses.replace(LLAMA_8B, **SIZES, num_layers=4, num_heads=4, num_kv_heads=2)
    model = dataclasses.replace(lt.models.init(config, key=jax.random.key(0)), tile_tokens=96)
    batch = batch_of(config, 2, 80)
    batch["labels"] = batch["labels"].at[:, 70:].set(-100)
    functions = {"attend_in_blocks": _attention, "attend_with_scores": _attention, "_over_tiles": _tiled_map}
    spies = {name: mock.Mock(wraps=getattr(module, name)) for name, module in functions.items()}
    for name, module in functions.items():
        monkeypatch.setattr(module, name, spies[name])

    def gradients(rung: _ladder.Rung) -> Any:
        trainable, frozen = lt.partition(rung.adapted(model, jax.random.key(1)), "**/lora_*")
        trainable = jax.tree.map(lambda leaf: leaf + 0.01, trainable)  # beyond zeros, where half of the gradients are
        for spy in spies.values():
            spy.reset_mock()
        with rung.around():
            values = jax.value_and_grad(lambda part: rung.loss(lt.combine(part, frozen), batch)[0])(trainable)
        return jax.device_get(values), {name for name, spy in spies.items() if spy.called}

    rungs = {**_ladder.RUNGS, "groups": _ladder.GROUPS}
    results = {name: gradients(rung) for name, rung in rungs.items() if rung.base is None}
    assert [rung.is_hosted for rung in rungs.values()] == [name in ("host", "nf4") for name in rungs]
    assert {name: ways for name, (_, ways) in results.items()} == {
        **dict.fromkeys(("scores", "chunks"), {"attend_with_scores"}),
        "kernel": {"attend_in_blocks"},
        **dict.fromkeys(("remat", "host", "groups"), {"attend_in_blocks", "_over_tiles"}),
    }
    for name, (values, _) in results.items():
        for leaf, expected in zip(*map(jax.tree.leaves, (values, results["scores"][0])), strict=True):
            np.testing.assert_allclose(leaf, expected, rtol=1e-4, atol=1e-6, err_msg=name)


def test_pairs_are_those_that_a_query_sees() -> None:
    shapes = [(2, 24, None, None), (1, 24, 6, None), (3, 24, None, 7)]
    for batch_size, seq_len, document, window in shapes:
        shape = attention_time.Shape(batch_size, seq_len, document=document, window=window)
        seen = sum(
            query - key < (window or seq_len) and (document is None or key // document == query // document)
            for query in range(seq_len)
            for key in range(query + 1)
        )
        assert shape.pairs == batch_size * seen
        assert attention_time.flops(shape, 4, 8, backward=True) == 3.5 * 4 * 4 * 8 * shape.pairs


def test_results_that_differ_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_time, "scratch", lambda part: tmp_path)
    ones = [jnp.ones((2, 4)), jnp.full((2, 4), 2.0)]
    assert attention_time.distance("a", "blocks", ones) == {"compared_with": None, "relative_error": None}
    assert attention_time.distance("a", "cudnn", ones) == {}
    assert attention_time.distance("a", "blocks", ones)["relative_error"] == 0.0
    assert attention_time.distance("a", "blocks", [ones[0], 1.1 * ones[1]])["relative_error"] == pytest.approx(0.1)
    assert math.isnan(attention_time.distance("a", "blocks", [ones[0], jnp.nan * ones[1]])["relative_error"])


def test_lengths_above_one_that_did_not_fit_are_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert longest_sequence.run(200, False)["out_of_memory"]  # that length itself is tried again
    monkeypatch.setattr(longest_sequence, "host_bytes", lambda: 2**30)
    assert "bytes of the host" in longest_sequence.run(60, False)["error"] and tried == [50, 200, 200]
    # A larger card lends 80 GB, and the host the 32 GiB of the layers' inputs.
    monkeypatch.setattr(longest_sequence, "gpu", lambda: {"memory.total": "143771 MiB"})
    limits = longest_sequence.environment(131072)
    assert float(limits["XLA_PYTHON_CLIENT_MEM_FRACTION"]) * 143771 * 2**20 == pytest.approx(80e9, rel=1e-3)
    assert limits["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"] == "36"


@pytest.mark.slow
def test_a_drawn_model_is_the_one_that_is_quantised() -> None:
    config = dataclasses.replace(LLAMA_8B, **SIZES, num_layers=2, num_heads=4, num_kv_heads=2)
    model = longest_sequence.model_of(config)
    make = functools.partial(lt.models.init, config, dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16)
    base = lt.quantize(jax.eval_shape(make, key=jax.random.key(0)), "layers/**/*_proj", "nf4")
    adapters = lt.lora.Config(rank=longest_sequence.RANK, alpha=longest_sequence.ALPHA, targets="all-linear")
    shapes = jax.eval_shape(lambda: lt.lora.add(base, adapters, key=jax.random.key(0)))
    assert jax.tree.structure(model) == jax.tree.structure(shapes)
    leaves, expected = ([(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)] for tree in (model, shapes))
    assert leaves == expected
    weight = lt.dequantize(model).layers["attn"]["q_proj"]["weight"].weight
    assert float(jnp.std(weight.astype(jnp.float32))) == pytest.approx(0.02, rel=0.1)
    assert len({float(jnp.sum(layer)) for layer in weight.astype(jnp.float32)}) == config.num_layers


# --- refusals ------------------------------------------------------------------------------------------------------


def test_a_measurement_without_a_gpu_or_enough_memory_is_refused() -> None:
    torch: Any = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False))
    assert lora_peft.device_of(torch, rehearsal=True) == "cpu"
    with pytest.raises(RuntimeError, match="PyTorch finds no GPU"):
        lora_peft.device_of(torch, rehearsal=False)
    gpu_smoke.check_place({"target": "here", "chip": "H200", "measured_peak_bytes": 1})
    for memory in ({"chip": "cpu", "measured_peak_bytes": 1}, {"chip": "H200", "measured_peak_bytes": None}):
        with pytest.raises(RuntimeError, match="needs a GPU"):
            gpu_smoke.check_place({"target": "here", **memory})
    assert layerwise_time.host_bytes() > 0
    layerwise_time.check_host("host", 128 * 2**30)
    layerwise_time.check_host("device", 2**30)
    with pytest.raises(MemoryError, match="opt_state pins up to 76 GiB of the host's memory, which has 64 GiB"):
        layerwise_time.check_host("opt_state", 64 * 2**30)


def test_predictions_and_placements_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured_peak.is_covered(10, 10, 10) and measured_peak.is_covered(10, 10, 9)
    assert not measured_peak.is_covered(10, 10, 11) and not measured_peak.is_covered(9, 10, 9)
    assert not measured_peak.is_covered(None, None, 9)
    asked: list[int] = []

    def verify(program: Any, places: Any, *, host_temp_bytes: int) -> Any:
        asked.append(host_temp_bytes)
        raise lt.core.PlacementError("1 leaf is elsewhere", expected="", got="", hint="")

    monkeypatch.setattr(offload_time.lt.offload, "verify", verify)
    row = offload_time.verified("activations", None, offload_time.saved_bytes(LLAMA_1B, 4096))
    assert row["verified"] is False and "elsewhere" in row["verify_error"]
    per_token = 16 * 2 * (2048 + 2 * 512 + 2 * 8192)  # layers, bytes, features
    assert asked == [4096 * per_token // 2]


# --- the other side, at toy size on the CPU: PyTorch, transformers and PEFT -----------------------------------------


@pytest.mark.peers
@pytest.mark.parametrize(
    ("script", "step"),
    [
        ("lora_peft.py", "1b-4x2048-remat"),
        ("sft_peft.py", "moe-4x2048-remat"),
        ("qlora_peft.py", "1.7b-dora-4x2048-remat"),
        ("generate_time.py", ""),
    ],
)
def test_both_sides_can_be_rehearsed(script: str, step: str, tmp_path: Path) -> None:
    """Where PyTorch is installed; `test_every_part_can_be_rehearsed` runs without it."""
    names = [f"{step}-lowtide", f"{step}-peft"] if step else []
    words = [
        "--rehearse",
        "--json",
        str(tmp_path / "rows.json"),
        *(word for name in names for word in ("--case", name)),
    ]
    command = [sys.executable, str(BENCHMARKS / script), *words]
    env = {**os.environ, "LOWTIDE_SCRATCH": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert rows and all(row["ok"] for row in rows.values()), done.stdout + done.stderr
    if names:
        ours, theirs = (rows[name] for name in names)
        assert theirs["loss_difference"] <= lora_peft.TOLERANCE and theirs["num_trained"] == ours["num_trained"]
    else:
        runs = [run for row in rows.values() for run in row["runs"].values() if "cache" in row]
        assert [run["share_of_same_tokens"] for run in runs] == [1.0] * 6
