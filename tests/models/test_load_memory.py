import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# Each operation runs in its own fork, which is safe before JAX has a backend and saves the imports.
SCRIPT = """
import json, os, sys
import load_memory

for flags in json.loads(sys.argv[1]):
    if os.fork() == 0:
        sys.argv[1:] = flags
        load_memory.main()
        sys.stdout.flush()
        os._exit(0)
    assert os.wait()[1] == 0, flags
"""


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="RssAnon is Linux's")
def test_reading_and_writing_take_no_more_of_the_host_than_predicted(tmp_path):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": os.environ["QUICK_CPU_FLAGS"]}
    # All but one bound are far below a second copy of one layer and the embedding, that of a checkpoint of two.
    sizes = {"make": "0.4", "load": "0.4", "save": "0.4", "load nf4": "0.4", "checkpoint": "0.8", "restore": "0.8"}
    flags = [
        ["--folder", str(tmp_path), "--gigabytes", gigabytes, "--operation", operation]
        for operation, gigabytes in sizes.items()
    ]
    command = [sys.executable, "-c", SCRIPT, json.dumps(flags)]
    done = subprocess.run(command, cwd=BENCHMARKS, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert ["make", *(row["operation"] for row in rows)] == [*sizes]
    for row in rows:
        operation, least = row["operation"], {"load nf4": 3, "checkpoint": 10, "restore": 10}
        assert row["bytes"] > 10**8 * least.get(operation, 6)
        assert row["extra_bytes"] <= row["predicted_bytes"] < row["bytes"], row
        assert row["predicted_bytes"] <= row["largest_leaf_bytes"] + 512 * 2**20
