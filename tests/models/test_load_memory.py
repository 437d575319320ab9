import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "load_memory.py"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="RssAnon is Linux's")
def test_reading_and_writing_take_no_more_of_the_host_than_predicted(tmp_path):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": os.environ["QUICK_CPU_FLAGS"]}
    command = [sys.executable, str(SCRIPT), "--gigabytes", "0.8", "--folder", str(tmp_path)]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "found.json")], env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = {row["operation"]: row for row in json.loads((tmp_path / "found.json").read_text())["rows"]}
    assert list(rows) == ["load", "save", "checkpoint", "restore", "load nf4"]
    for row in rows.values():
        assert row["bytes"] > (3 * 10**8 if row["operation"] == "load nf4" else 10**9)
        assert row["extra_bytes"] <= row["predicted_bytes"], row
        assert row["predicted_bytes"] <= row["largest_leaf_bytes"] + 512 * 2**20
