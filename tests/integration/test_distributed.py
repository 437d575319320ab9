"""Two processes of four CPU devices each: one training run, one log, one checkpoint, and no hang when one fails.

The reference runs have one process and one device; they run inside the test process.
"""

import json
import runpy
import socket
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from lowtide.cli import main

pytestmark = pytest.mark.processes

WORKER = Path(__file__).parent / "distributed_worker.py"
MINUTE = 60
SMALL = {"kind": "small"}
"""Two matrices in place of a decoder, where the model makes no difference."""
LAYERS = {"kind": "layers"}
"""Two layers of one matrix each: a pipeline of them is traced in a fraction of a decoder's time."""


def free_port():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def options_of(out, checkpoints, **options):
    defaults = {"kind": "decoder", "num_steps": 6, "fsdp": 4, "tensor": 2}
    return {"out": str(out), "checkpoints": str(checkpoints), **defaults, **options}


@pytest.fixture
def start(fork):
    """Start two processes of a run."""

    def start(out, checkpoints, *, devices=4, **options):
        values = {**options_of(out, checkpoints, **options), "port": free_port(), "count": 2}
        return [fork(WORKER, json.dumps({**values, "process": process}), num_devices=devices) for process in range(2)]

    return start


def finish(processes):
    codes = [process.wait() for process in processes]
    return codes, [process.text for process in processes]


@pytest.fixture
def run(start):
    """Run two processes to their end; returns the results of each."""

    def run(out, checkpoints, **options):
        codes, logs = finish(start(out, checkpoints, **options))
        assert not any(codes), "\n".join(logs)
        return [json.loads(Path(f"{out}-{process}.json").read_text()) for process in range(2)]

    return run


def run_alone(out, checkpoints, **options):
    """Run in this process, on one device."""
    values = options_of(out, checkpoints, count=1, process=0, **{"fsdp": 1, "tensor": 1, **options})
    with mock.patch.object(sys, "argv", [str(WORKER), json.dumps(values)]):
        runpy.run_path(str(WORKER), run_name="__main__")
    return json.loads(Path(f"{out}-0.json").read_text())


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Four steps on one device."""
    folder = tmp_path_factory.mktemp("alone")
    return run_alone(folder / "run", folder / "checkpoints", num_steps=4)


@pytest.mark.sentinel
@pytest.mark.slow
def test_two_processes_train_shard_save_and_are_resumed_by_one(run, alone, tmp_path):
    both = run(tmp_path / "both", tmp_path / "checkpoints", num_steps=2)
    assert both[0] == both[1]
    np.testing.assert_allclose(both[0]["losses"], alone["losses"][:2], rtol=0, atol=1e-5)
    assert both[0]["spec"] == both[0]["moments"] == "P(None, 'tensor', 'fsdp')"
    assert both[0]["local_bytes"] * 8 == both[0]["bytes"]
    log = [json.loads(line) for line in (tmp_path / "both.jsonl").read_text().splitlines()]
    assert [record["step"] for record in log if "loss" in record] == [1, 2]  # one log
    resumed = run_alone(tmp_path / "one", tmp_path / "checkpoints", num_steps=4)
    assert resumed["resumed"] == 2
    np.testing.assert_allclose(resumed["losses"], alone["losses"][2:], rtol=0, atol=1e-5)
    np.testing.assert_allclose(resumed["predicted"], alone["predicted"], rtol=0, atol=1e-4)


@pytest.mark.slow
def test_each_process_loads_rows_of_its_own_and_splits_them_into_microbatches(run, tmp_path):
    alone = run_alone(tmp_path / "alone", tmp_path / "of-one", num_steps=4, **SMALL)
    both = run(tmp_path / "both", tmp_path / "checkpoints", local=True, microbatches=2, num_steps=4, **SMALL)
    np.testing.assert_allclose(both[0]["losses"], alone["losses"], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_pipeline_runs_across_processes(run, tmp_path):
    """Each process is a rank; of four stages for two layers two are empty. How one is resumed: test_pipelined."""
    how = {"stage": 2, "fsdp": 2, "tensor": 1, "schedule": "zb-v", "stages": 4, **LAYERS}
    alone = run_alone(tmp_path / "alone", tmp_path / "of-one", **LAYERS)
    both = run(tmp_path / "both", tmp_path / "checkpoints", devices=2, **how)
    assert both[0] == both[1]
    np.testing.assert_allclose(both[0]["losses"], alone["losses"], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_processes_whose_devices_have_different_room_choose_one_schedule(run, alone, tmp_path):
    """Each for itself would choose another one: the second has less than the default needs."""
    how = {"devices": 1, "stage": 2, "fsdp": 1, "tensor": 1, "schedule": "auto", "stages": 2, "num_steps": 2}
    both = run(tmp_path / "both", tmp_path / "checkpoints", room=[2, 0.97], **how)
    assert both[0] == both[1] and both[0]["limit"]
    np.testing.assert_allclose(both[0]["losses"], alone["losses"][:2], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_adapters_train_and_are_resumed_where_each_process_has_one_device(run, tmp_path):
    for steps, resumed in ((2, None), (4, 2)):
        how = {"devices": 1, "fsdp": 2, "tensor": 1, "adapters": True, "num_steps": steps, **SMALL}
        both = run(tmp_path / "run", tmp_path / "checkpoints", **how)
        assert both[0] == both[1] and both[0]["resumed"] == resumed


OF_TWO_STAGES = {"devices": 1, "stage": 2, "fsdp": 1, "tensor": 1, "schedule": "1f1b", "stages": 2, **LAYERS}


@pytest.mark.slow
@pytest.mark.parametrize(("who", "model"), [(1, SMALL), (0, SMALL), (1, OF_TWO_STAGES)], ids=["1", "0", "pipeline"])
def test_a_killed_process_is_an_error_in_the_other_within_a_minute(start, who, model, tmp_path):
    processes = start(
        tmp_path / "run", tmp_path / "checkpoints", at=6, how="kill", who=who, num_steps=10**6, heartbeat=10, **model
    )
    killed = processes[who].wait()
    died = time.monotonic()
    code = processes[1 - who].wait(timeout=2 * MINUTE)
    waited = time.monotonic() - died
    text = processes[1 - who].text
    assert killed == -9 and code != 0
    assert waited < MINUTE, text
    said = ("checkpoint is of step", "heartbeat", "UNAVAILABLE", "Connection reset", "coordination service")
    assert any(words in text for words in said), text
    assert {"2"} <= {path.name for path in (tmp_path / "checkpoints").iterdir()}


@pytest.mark.slow
def test_a_process_that_fails_tells_the_other(start, tmp_path):
    codes, logs = finish(start(tmp_path / "run", tmp_path / "checkpoints", at=3, how="raise", num_steps=10**6, **SMALL))
    assert all(codes), logs
    assert "ZeroDivisionError: in one process" in logs[1]
    assert "process 1 failed: ZeroDivisionError: in one process" in logs[0], logs[0]
    assert "hint: start all processes again" in logs[0]


@pytest.mark.slow
def test_arguments_that_one_process_refuses_are_an_error_in_the_other(start, tmp_path):
    codes, logs = finish(start(tmp_path / "run", tmp_path / "checkpoints", odd="callbacks", **SMALL))
    assert all(codes), logs
    assert "a callback must be an object of a subclass" in logs[1]
    assert "process 1 failed: ConfigError" in logs[0], logs[0]
    assert logs[0].count("cannot continue without it") == 1


@pytest.mark.slow
def test_a_sigterm_in_the_last_step_ends_all_with_its_checkpoint_and_none_as_failed_for_being_last(start, tmp_path):
    options = {"at": 6, "how": "terminate", "every": 1000, "late": 1, **SMALL}
    codes, logs = finish(start(tmp_path / "run", tmp_path / "checkpoints", **options))
    assert codes == [-15, -15], logs
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["6"]


@pytest.mark.slow
def test_a_checkpoint_that_is_damaged_is_passed_over_by_all(run, tmp_path):
    run(tmp_path / "both", tmp_path / "checkpoints", **SMALL)
    both = run(tmp_path / "both", tmp_path / "checkpoints", damaged=0, num_steps=8, **SMALL)
    assert [one["resumed"] for one in both] == [4, 4]
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert "damaged-6" in names and "damaged-6+" not in names and "8" in names


@pytest.mark.slow
@pytest.mark.parametrize("how", ["terminate", "stop"])
def test_what_ends_one_process_ends_all_at_the_same_step_with_a_checkpoint(start, how, tmp_path):
    codes, logs = finish(
        start(tmp_path / "run", tmp_path / "checkpoints", at=3, how=how, num_steps=10**6, every=1000, **SMALL)
    )
    assert codes == ([-15, -15] if how == "terminate" else [0, 0]), logs
    steps = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    last = {[line for line in log.splitlines() if line.startswith("step ")][-1] for log in logs}
    assert ("SIGTERM: stopped after step" in logs[0]) == (how == "terminate") and "SIGTERM" not in logs[1]
    assert len(steps) == 1 and last == {f"step {steps[0]}"}, (steps, logs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ("steps", "differs from process {} in num_steps"),
        ("data", "differs from process {} in batch[0]"),
        ("weights", "differs from process {} in weights"),
        ("settings", "differs from process {} in step"),
        ("evaluation", "differs from process {} in batches"),
    ],
)
def test_processes_that_differ_say_in_what(start, odd, said, tmp_path):
    codes, logs = finish(start(tmp_path / "run", tmp_path / "checkpoints", odd=odd, **SMALL))
    assert all(codes), logs
    for mine, log in enumerate(logs):
        assert f"process {1 - mine} {said.format(mine)}" in log, log
        assert "hint: start all processes with the same code" in log


@pytest.mark.slow
def test_processes_that_save_into_other_folders_do_not_begin(start, tmp_path):
    codes, logs = finish(start(tmp_path / "run", tmp_path / "checkpoints", odd="folder", patience=2, **SMALL))
    assert all(codes), logs
    for log in logs:
        assert (
            "is not the same folder for all processes" in log and "hint: give all processes the same folder" in log
        ), log
    assert not list(tmp_path.glob("checkpoints*/.shared-*"))


def finetune(fork, out, *flags, count=1, devices=8):
    """Run `lowtide finetune` in processes that join each other."""
    joined = ["--coordinator", f"localhost:{free_port()}", "--num-processes", str(count), "--process-id"]
    command = ["lowtide", "finetune", "--out", str(out), *flags]
    return finish(
        [
            fork(*command, *([*joined, str(process)] if count > 1 else []), num_devices=devices)
            for process in range(count)
        ]
    )


@pytest.mark.slow
def test_the_command_tunes_adapters_on_two_processes_and_goes_on_with_one(fork, tiny_model_dir, tmp_path):
    data = tmp_path / "data.txt"
    data.write_text("the tide goes out and the tide comes in and the moon pulls and the sea follows\n" * 60)
    flags = ["--model", tiny_model_dir, "--data", str(data), "--seq-len", "8"]
    flags += ["--steps", "3", "--batch-size", "8", "--rank", "2"]

    def losses(out):
        records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        return [record["loss"] for record in records if "loss" in record]

    assert main(["finetune", "--out", str(tmp_path / "alone"), *flags]) == 0
    codes, logs = finetune(fork, tmp_path / "both", *flags, "--distributed", "fsdp=4,tensor=2", count=2, devices=4)
    assert codes == [0, 0], logs
    assert "8 in 2 processes: data 1, fsdp 4, tensor 2" in logs[0] and "held-out loss" not in logs[1]
    np.testing.assert_allclose(losses(tmp_path / "both"), losses(tmp_path / "alone"), rtol=0, atol=1e-5)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "both" / "adapter" / name).is_file()
    codes, logs = finetune(fork, tmp_path / "both", "--resume", "--distributed")
    assert codes == [0], logs
    assert "3 of 3 done" in logs[0] and "8 in 1 process: data 1, fsdp 8, tensor 1" in logs[0]
    codes, logs = finetune(fork, tmp_path / "both", *flags, "--distributed", count=2, devices=4)
    assert codes == [2, 2], logs
    assert "the folder is not empty" in logs[0] and "the first process failed: " in logs[1]
