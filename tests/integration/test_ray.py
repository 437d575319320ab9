"""The example for Ray Train on a local cluster of two nodes: it survives a killed worker, and a node less.

Ray runs in processes of its own, as a user starts it; workers are killed from outside.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = [
    pytest.mark.peers,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray: install the ray extra"),
]

EXAMPLE = Path(__file__).parents[2] / "examples" / "launch" / "ray_train.py"
STEPS, EVERY = 15, 3
MINUTE = 60
SMALL = {"steps": STEPS, "checkpoint_every": EVERY, "seq_len": 32, "batch_size": 8, "learning_rate": 5e-3}

CLUSTER = """
import sys
from ray.cluster_utils import Cluster

cluster, nodes = Cluster(), []
for line in sys.stdin:
    while len(nodes) < int(line):
        nodes.append(cluster.add_node(num_cpus=1, include_dashboard=False, object_store_memory=2**27))
    while len(nodes) > int(line):
        cluster.remove_node(nodes.pop(), allow_graceful=False)
    print("at", cluster.address, flush=True)
cluster.shutdown()
"""
"""As many nodes of one CPU as the last line says."""

ALONE = """
import json, runpy, sys

example, config = runpy.run_path(sys.argv[1]), json.loads(sys.argv[2])
model, data = example["model_and_data"](config)
records = example["make_trainer"](config, model).fit(data, num_steps=config["steps"], progress=False)
print(json.dumps([record["loss"] for record in records]))
"""


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": os.environ["QUICK_CPU_FLAGS"],
        "PYTHONUNBUFFERED": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10",  # for which it waits for a node that is gone
    }


class Cluster:
    def __init__(self, folder: str) -> None:
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        # Not `temp_dir` of a node: Ray also writes its address, into a folder that only RAY_TMPDIR moves.
        self.environment = {**environment(), **token, "RAY_TMPDIR": folder}
        self._process = subprocess.Popen(
            [sys.executable, "-c", CLUSTER],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def set_nodes(self, count: int) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(count, file=self._process.stdin, flush=True)
        lines = (line for line in self._process.stdout if line.startswith("at "))
        self.environment["RAY_ADDRESS"] = next(lines).removeprefix("at ").strip()

    def close(self) -> None:
        self._process.communicate(timeout=MINUTE)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    folder = tempfile.mkdtemp(prefix="ray-")  # a short path, for the names of sockets
    made = Cluster(folder)
    yield made
    made.close()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def alone() -> list[float]:
    """Losses of the uninterrupted run: `lt.Trainer` on one device, without Ray."""
    config = json.dumps({**SMALL, "pipeline": None})
    done = subprocess.run(
        [sys.executable, "-c", ALONE, EXAMPLE, config], env=environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


class Run:
    """The example, started as a user does."""

    def __init__(self, cluster: Cluster, out: Path, *flags: str, steps: int = STEPS) -> None:
        self.out, self.log, self.steps = out, out.with_suffix(".log"), steps
        settings = [
            part
            for name, value in {**SMALL, "steps": steps}.items()
            for part in (f"--{name.replace('_', '-')}", str(value))
        ]
        command = [sys.executable, str(EXAMPLE), "--out", str(out), "--report-every", "4", *settings, *flags]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, env=cluster.environment, stdout=log, stderr=subprocess.STDOUT)

    def attempts(self) -> list[dict[str, Any]]:
        """What each worker said when it began: its attempts are told apart by their processes."""
        said = r"worker (\d) of (\d), process (\d+): (.*); goes on from step (\d+)"
        found = dict.fromkeys(re.findall(said, self.log.read_text()))
        return [
            {"rank": int(rank), "of": int(of), "pid": int(pid), "mesh": mesh, "step": int(step)}
            for rank, of, pid, mesh, step in found
        ]

    def wait_until(self, condition: Any) -> None:
        until = time.monotonic() + 5 * MINUTE
        while not condition():
            assert self.process.poll() is None and time.monotonic() < until, self.log.read_text()
            time.sleep(0.05)

    def kill_a_worker(self) -> None:
        """Kill one with SIGKILL when there is a checkpoint, and wait until both are there again."""
        self.wait_until(lambda: len(self.attempts()) == 2 and (self.out / "checkpoints" / str(EVERY)).is_dir())
        assert [attempt["step"] for attempt in self.attempts()] == [0, 0]
        other, killed = (attempt["pid"] for attempt in sorted(self.attempts(), key=lambda attempt: attempt["rank"]))
        os.kill(killed, signal.SIGKILL)
        died = time.monotonic()
        self.wait_until(lambda: not Path(f"/proc/{other}").exists())
        assert (waited := time.monotonic() - died) < MINUTE
        self.wait_until(lambda: len(self.attempts()) == 4)
        print(
            f"from the kill {waited:.1f} s to the end of the other, {time.monotonic() - died:.1f} to the next attempt"
        )

    def finish(self, alone: list[float]) -> list[dict[str, Any]]:
        """Compare all that was written with the uninterrupted run, also of steps taken twice; return the attempts."""
        assert self.process.wait(timeout=5 * MINUTE) == 0, self.log.read_text()
        records = [json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()]
        losses = {record["step"]: record["loss"] for record in records}
        assert sorted(losses) == [*range(1, self.steps + 1)]
        expected = [alone[record["step"] - 1] for record in records]
        np.testing.assert_allclose([record["loss"] for record in records], expected, rtol=0, atol=1e-5)
        print(f"losses differ by at most {max(abs(losses[step] - alone[step - 1]) for step in losses):.1e}")
        return self.attempts()


def test_a_pipeline_over_two_workers_survives_one_that_is_killed(
    cluster: Cluster, alone: list[float], tmp_path: Path
) -> None:
    cluster.set_nodes(2)
    run = Run(cluster, tmp_path / "run", "--pipeline", "2", "--devices", "2", steps=9)
    run.kill_a_worker()
    *before, first, second = run.finish(alone)
    assert {attempt["mesh"] for attempt in (*before, first, second)} == {"stage 2, data 1, fsdp 2, tensor 1"}
    assert len(before) == 2 and EVERY <= first["step"] == second["step"] < run.steps


def test_fsdp_survives_a_killed_worker_and_then_goes_on_with_a_node_less(
    cluster: Cluster, alone: list[float], tmp_path: Path
) -> None:
    cluster.set_nodes(2)
    run = Run(cluster, tmp_path / "run", "--min-workers", "1")
    run.kill_a_worker()
    again = run.attempts()[2]["step"]
    run.wait_until(lambda: (run.out / "checkpoints" / str(again + EVERY)).is_dir())
    cluster.set_nodes(1)
    *before, last = run.finish(alone)
    assert [attempt["of"] for attempt in before] == [2, 2, 2, 2] and EVERY <= again
    assert last["of"] == 1 and again + EVERY <= last["step"] < STEPS
    assert {attempt["mesh"] for attempt in before} == {"data 1, fsdp 2, tensor 1"}
