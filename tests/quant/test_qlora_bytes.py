"""QLoRA of 8 billion parameters, compiled for one v5e chip: the promise of the documentation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "qlora.py"
GIB = 2**30


@pytest.mark.slow
@pytest.mark.tpu_aot
def test_eight_billion_parameters_train_in_seven_gib_of_a_v5e(tmp_path: Path) -> None:
    case = ["--case", "rank 8", "--base", "nf4, embedding and head int8", "--json", str(tmp_path / "rows.json")]
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run([sys.executable, str(BENCHMARK), *case], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert row["device_bytes"] <= 7.0 * GIB
    # No stack is made of floats, and of 4 bits a weight is little more than half a byte.
    assert row["most_matrices_in_a_float_buffer"] <= 1
    assert row["argument_bytes"] <= 4.7 * GIB
