import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "load_memory.py"


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="RssAnon is Linux's")
def test_reading_and_writing_take_no_more_of_the_host_than_predicted(tmp_path):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": os.environ["QUICK_CPU_FLAGS"]}

    def run(operation: str, gigabytes: str) -> Any:
        command = [sys.executable, str(SCRIPT), "--folder", str(tmp_path), "--gigabytes", gigabytes]
        done = subprocess.run(
            [*command, "--operation", operation], env=environment, capture_output=True, text=True, timeout=500
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout) if done.stdout.strip() else None

    run("make", "0.4")
    # All but one bound are far below a second copy of one layer and the embedding, that of a checkpoint of two.
    sizes = {"load": "0.4", "save": "0.4", "load nf4": "0.4", "checkpoint": "0.8", "restore": "0.8"}
    for row in (run(*each) for each in sizes.items()):
        operation, least = row["operation"], {"load nf4": 3, "checkpoint": 10, "restore": 10}
        assert row["bytes"] > 10**8 * least.get(operation, 6)
        assert row["extra_bytes"] <= row["predicted_bytes"] < row["bytes"], row
        assert row["predicted_bytes"] <= row["largest_leaf_bytes"] + 512 * 2**20
