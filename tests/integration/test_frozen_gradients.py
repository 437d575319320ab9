"""The programs of JAX issue 23316, as `benchmarks/frozen_gradients.py` compiles them, stay within their bounds."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
MIB = 2**20
TARGETS = ["cpu", pytest.param("v5e:2x2", marks=pytest.mark.tpu_aot)]


@pytest.fixture(scope="module")
def bench() -> Any:
    name = "frozen_gradients"
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(BENCHMARKS))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(BENCHMARKS))
        for loaded in (name, "_common"):
            sys.modules.pop(loaded, None)


@pytest.mark.parametrize("name", TARGETS)
def test_the_lora_programs(bench: Any, name: str) -> None:
    rows = {(row.program, row.figure): (row.naive_bytes, row.ours_bytes) for row in bench.lora_figures(name)}
    base, adapter, batch, small = 256 * MIB, 16 * MIB + MIB // 4, MIB // 4, 2048
    # 272 MiB with the base's zeros, 16 MiB without; `small` holds the loss, counters and tables of pointers.
    assert rows["LoRA gradients", "output"] == pytest.approx((base + adapter, adapter), abs=small)
    # 817 MiB and 305 MiB: the base needs neither moments nor a gradient.
    arguments = (3 * (base + adapter) + batch, base + 3 * adapter + batch)
    assert arguments == (817 * MIB, 305 * MIB)
    assert rows["LoRA AdamW step", "argument"] == pytest.approx(arguments, abs=small)
    assert rows["LoRA AdamW step", "alias"][1] == pytest.approx(3 * adapter, abs=small)
    assert rows["LoRA AdamW step", "temp"][1] <= MIB


THIRTY_FOUR_LAYERS = """
import json
import frozen_gradients as bench
model, x = [bench.lora_linear(16384, 16384) for _ in range(34)], bench.shape(16384)
naive, ours = bench.gradient_reports(model, x, "cpu")
print(json.dumps([naive.by_role["outputs"], ours.by_role["outputs"], ours.device.temp_bytes]))
"""


@pytest.mark.processes
@pytest.mark.slow  # in small the programs of LoRA have the same bytes below
def test_gradients_of_thirty_four_layers_on_the_cpu() -> None:
    # With XLA's own order of operations: that of the tests, which is another, needs 4 MiB.
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": str(BENCHMARKS)}
    found = subprocess.run(
        [sys.executable, "-c", THIRTY_FOUR_LAYERS], env=environment, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    naive, ours, temp_bytes = json.loads(found.stdout.splitlines()[-1])
    base_bytes, adapter_bytes = 34 * 2**30, 34 * 8 * MIB
    assert naive == pytest.approx(base_bytes + adapter_bytes, abs=4096)
    assert ours == pytest.approx(adapter_bytes, abs=4096)
    assert temp_bytes <= MIB


@pytest.mark.slow
@pytest.mark.tpu_aot
def test_thirty_four_layers_do_not_fit_a_v5e_and_their_adamw_step_fits_a_v5p_only_split(bench: Any) -> None:
    model, x = [bench.lora_linear(16384, 16384) for _ in range(34)], bench.shape(16384)
    refused = bench.gradient_reports(model, x, "v5e:2x2")
    assert [round(report.device_bytes / 2**30) for report in refused] == [69, 35]
    assert [report.fits for report in refused] == [False, False]
    naive, ours = bench.step_reports(model, x, bench.ROOMY)
    assert round(naive.device_bytes / 2**30) == 103
    assert naive.fits is False and ours.fits
    assert ours.by_role["outputs"] < MIB
    assert ours.by_role["opt_state"] == pytest.approx(2 * 34 * 8 * MIB, abs=1024)


@pytest.mark.slow
def test_the_idioms(bench: Any) -> None:
    rows = {row.name: row for row in bench.idioms("cpu")}
    assert len(rows) == 9
    state = {name: round(row.state_bytes / MIB, 2) for name, row in rows.items()}
    assert state["adam, stop_gradient in the loss"] == 48.75
    assert state["MultiSteps(partition(adam, set_to_zero))"] == 25.13
    assert state["partition(MultiSteps(adam), set_to_zero)"] == 1.13
    ours = rows["split trees (ours)"]
    assert state["split trees (ours)"] == state["split trees + accumulate (ours)"] == 0.75
    # A norm of the whole gradient tree computes the frozen weights' gradients after all; ours has none to compute.
    assert rows["partition + global_norm of all gradients"].flops > 1.5 * ours.flops
    assert rows["split trees + global_norm (ours)"].flops < 1.01 * ours.flops
