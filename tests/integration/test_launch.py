"""The examples for schedulers: each file is read as its scheduler reads it, and its command as `lowtide` does.

Their scripts run in bash with stand-ins for `lowtide`, `srun` and the like, for a new run and for one that goes on.
"""

from __future__ import annotations

import argparse
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import yaml

from lowtide.cli import _finetune, main

FOLDER = Path(__file__).parents[2] / "examples" / "launch"

STAND_INS = {
    "lowtide": 'printf "%s\\0" "$@"',
    "srun": 'while [[ $1 == -* ]]; do shift; done\n"$@"',
    "scontrol": 'echo "scontrol $*" >&2',
}
SETTINGS = {
    "JOB_COMPLETION_INDEX": "1",
    "SLURM_JOB_ID": "7",
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "1",
}
BY_HAND = {
    "jobset.yaml": ("tune-worker-0-0.tune:1234", 4, 1),
    "slurm.sh": (None, None, None),
    "skypilot.yaml": ("10.0.0.1:1234", 2, 1),
}
"""Of each file the coordinator, the number of processes, and which this one is."""


def script_of(name: str) -> str:
    text = (FOLDER / name).read_text(encoding="utf-8")
    if name == "slurm.sh":
        return text
    document = yaml.safe_load(text)
    return document["run"] if name == "skypilot.yaml" else pod_of(document)["containers"][0]["args"][0]


def pod_of(jobset: Any) -> Any:
    return jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def run(
    name: str, folder: Path, lowtide: str = STAND_INS["lowtide"], **settings: str
) -> subprocess.CompletedProcess[str]:
    """Run its script, with `folder` as the shared one."""
    programs = folder / "venv" / "bin"
    programs.mkdir(parents=True, exist_ok=True)
    (programs / "activate").write_text("")
    for program, text in (STAND_INS | {"lowtide": lowtide}).items():
        (programs / program).write_text(f"#!/bin/bash\n{text}\n")
        (programs / program).chmod(0o755)
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", **SETTINGS, **settings}
    script = script_of(name).replace("/shared", str(folder))
    subprocess.run(["bash", "-n", "-c", script], check=True)
    return subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("name", sorted(BY_HAND))
def test_its_command_is_one_that_lowtide_takes(
    name: str, resumes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "runs" / "mine"
    if resumes:
        out.mkdir(parents=True)
        (out / "config.toml").touch()
    done = run(name, tmp_path)
    assert done.returncode == 0 and not done.stderr, done.stderr
    seen: list[argparse.Namespace] = []
    monkeypatch.setattr(_finetune, "run", lambda args: seen.append(args) or 0)
    assert main(done.stdout.split("\0")[:-1]) == 0
    (args,) = seen
    assert (args.coordinator, args.num_processes, args.process_id) == BY_HAND[name]
    assert (args.out, args.resume) == (str(out), resumes) and args.distributed == "fsdp=8,data=-1"
    fresh = [f"{tmp_path}/model", f"{tmp_path}/text", 32]
    assert [args.model, args.data, args.batch_size] == ([None, None, None] if resumes else fresh)


@pytest.mark.parametrize("left", [0, 150, None])
def test_slurm_puts_a_job_whose_time_is_up_into_the_queue_again_and_again(left: int | None, tmp_path: Path) -> None:
    """Slurm before 22.05 does not say when that is."""
    for count in range(12):
        end = {} if left is None else {"SLURM_JOB_END_TIME": str(int(time.time()) + left)}
        done = run("slurm.sh", tmp_path, lowtide="exit 143", SLURM_RESTART_COUNT=str(count), **end)
        assert (done.returncode, done.stderr) == (143, "scontrol requeue 7\n")


@pytest.mark.parametrize("status", [1, 143])
def test_slurm_puts_a_job_that_failed_into_the_queue_ten_times(status: int, tmp_path: Path) -> None:
    """Also one whose tasks were ended because another had died, long before the time was up."""
    end = str(int(time.time()) + 3600)
    for _ in range(10):
        done = run("slurm.sh", tmp_path, lowtide=f"exit {status}", SLURM_JOB_END_TIME=end)
        assert (done.returncode, done.stderr) == (status, "scontrol requeue 7\n")
    done = run("slurm.sh", tmp_path, lowtide=f"exit {status}", SLURM_JOB_END_TIME=end)
    assert done.returncode == status and "not put into the queue again: more than ten failures" in done.stderr
    assert "requeue" not in done.stderr and not (tmp_path / "runs" / "mine").exists()


def test_slurm_does_not_put_a_mistake_in_the_command_into_the_queue_again(tmp_path: Path) -> None:
    done = run("slurm.sh", tmp_path, lowtide="exit 2")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "a mistake in the command" in done.stderr


@pytest.fixture
def ray_example(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    for name in ("ray", "ray.train", "ray.train.v2", "ray.train.v2.jax"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    return runpy.run_path(str(FOLDER / "ray_train.py"))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--workers 4 --devices 2 --pipeline 2 --batch-size 2", "--batch-size 2: has to be a multiple of 4"),
        ("--workers 4 --pipeline 3", "--pipeline 3: has to divide the 4 devices"),
    ],
)
def test_ray_refuses_what_a_pipeline_cannot_be(
    ray_example: dict[str, Any], flags: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        ray_example["parse"](["--out", "x", *flags.split()])
    assert said in capsys.readouterr().err
    assert ray_example["parse"](["--out", "x", "--workers", "4", "--pipeline", "2"]).batch_size == 8


def test_the_devices_of_a_ray_worker_are_those_that_were_asked_for(
    ray_example: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0")
    flags = ray_example["environment_of"](ray_example["parse"](["--out", "x", "--devices", "2"]))["XLA_FLAGS"].split()
    assert [flag for flag in flags if "device_count" in flag][-1] == "--xla_force_host_platform_device_count=2"
    assert "--xla_backend_optimization_level=0" in flags


def test_jobset_has_as_many_pods_as_processes_and_restarts_all_of_them() -> None:
    spec = yaml.safe_load((FOLDER / "jobset.yaml").read_text(encoding="utf-8"))["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    assert job["completions"] == job["parallelism"] == 4 and job["backoffLimit"] == 0
    assert spec["failurePolicy"]["maxRestarts"] and pod_of({"spec": spec})["restartPolicy"] == "Never"


def test_the_page_of_the_examples_names_every_file() -> None:
    page = (FOLDER.parent / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in FOLDER.iterdir() if path.is_file() and f"`launch/{path.name}`" not in page] == []
