"""Steps of other libraries, as `benchmarks/attribution.py` compiles them: every byte has an owner."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TPU, GPU = pytest.mark.tpu_aot, pytest.mark.gpu_aot
NEEDS = {"equinox_mlp": "equinox", "equinox_transformer": "equinox", "nnx_transformer": "flax", "keras_model": "keras"}
PROGRAMS = {
    "cpu": (*NEEDS, "adam_loop", "fsdp"),
    "h100": ("scan_remat_names", "fsdp", "offload_base", "offload_activations", "offload_parameters"),
    "v5e": ("offload_activations", "lora_8b"),
}
"""The benchmark has more: these are other ways to make bytes, on chips for which they compile in less time."""
QUICK = {"equinox_mlp-cpu", "keras_model-cpu", "offload_parameters-h100"}
"""Programs of other libraries on the CPU, and of ours for a GPU."""


def case(name: str, target: str) -> Any:
    marks = [
        *{"h100": [GPU], "v5e": [TPU]}.get(target, []),
        *([pytest.mark.slow] if f"{name}-{target}" not in QUICK else []),
    ]
    return pytest.param(name, "v5e:2x2" if target == "v5e" else target, id=f"{name}-{target}", marks=marks)


EVERYWHERE = [case(name, target) for target, names in PROGRAMS.items() for name in names]


@pytest.fixture(scope="module")
def bench() -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("attribution", BENCHMARKS / "attribution.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(BENCHMARKS))
        for loaded in ("_common", "_programs", "_nested_programs"):
            sys.modules.pop(loaded, None)


@pytest.mark.slow_after(1)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("name", "target"), EVERYWHERE)
@pytest.mark.usefixtures("little_optimized")
def test_every_byte_has_an_owner(bench: Any, name: str, target: str) -> None:
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"needs {NEEDS[name]}: install its extra")
    with jax.numpy_rank_promotion("allow"):  # other people's code
        row = bench.measure(name, target)
    assert bench.problems(row) == []
    assert row["sum_of_owners_bytes"] == row["device_bytes"]
    if name.startswith("offload") and target != "cpu":
        assert (row["host_bytes"] > 0) == (name != "offload_base")
    if name == "lora_8b" and target.startswith("v5e"):
        assert row["fits"] is False
        assert row["by_role"]["frozen"] > 14 * 2**30


def test_a_row_that_breaks_a_promise_is_told(bench: Any) -> None:
    row = bench.measure("offload_base", "cpu")
    assert bench.problems(row) == []
    assert bench.problems({**row, "sum_of_owners_bytes": row["device_bytes"] - 1}) == ["owners do not add up"]
    assert bench.problems({**row, "unattributed": 0.03}) == ["too much unattributed"]
    assert bench.problems({**row, "difference": 0.002}) == ["not argument + output - alias + temp"]
    assert bench.problems({**row, "xla_total_bytes": 1}) == ["not XLA's total"]
