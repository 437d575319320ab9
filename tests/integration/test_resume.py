"""Killed without warning at random moments, a run continues as if nothing had happened."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.slow

FLAGS = ["--steps", "60", "--seq-len", "8", "--batch-size", "4"]


def _command(model, data, out, *flags):
    return [sys.executable, "-m", "lowtide", "finetune", "--model", model, "--data", data, "--out", str(out), *flags]


def _environment(out):
    """Of a run: CPU programs that compile fast, and once for all runs beside this one."""
    return {
        **os.environ,
        **{"XLA_FLAGS": os.environ["QUICK_CPU_FLAGS"], "JAX_PLATFORMS": "cpu"},
        "JAX_COMPILATION_CACHE_DIR": str(out.with_name("programs")),
        **{"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"},
    }


def _losses(out):
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    steps = {r["step"]: r["loss"] for r in records if "loss" in r}
    evals = {r["step"]: r["eval_loss"] for r in records if "eval_loss" in r}
    return steps, evals, len(records)


def _kill_after(command, out, num_records):
    """Start a run and kill it as soon as it has written so many records."""
    process = subprocess.Popen(command, env=_environment(out), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 300
    while _losses(out)[2] < num_records and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    _, errors = process.communicate()
    assert process.returncode == -signal.SIGKILL, errors.decode()


@pytest.mark.parametrize(
    ("kind", "result", "num_kills"),
    [
        (["--rank", "2"], "adapter/adapter_model.safetensors", 3),
        (["--full", "--offload", "optimizer,activations,parameters"], "model/model.safetensors", 1),
    ],
    ids=["adapters", "full"],
)
def test_kills_leave_the_losses_of_an_uninterrupted_run(tiny_model_dir, tmp_path, kind, result, num_kills):
    (tmp_path / "data.txt").write_text("the tide goes out and the tide comes in and the moon pulls the sea\n" * 60)
    (tmp_path / "config.toml").write_text(
        "checkpoint_every = 7\neval_every = 10\nlearning_rate = 0.01\nsample_tokens = 4\n"
    )
    flags = [*FLAGS, *kind, "--config", str(tmp_path / "config.toml")]
    model, data = tiny_model_dir, str(tmp_path / "data.txt")
    out, seed = tmp_path / "killed", random.randrange(10**6)
    command = _command(model, data, tmp_path / "whole", *flags)
    subprocess.run(command, env=_environment(out), check=True, capture_output=True)

    moments = sorted(random.Random(seed).sample(range(1, 60), num_kills))
    _kill_after(_command(model, data, out, *flags), out, moments[0])
    for moment in moments[1:]:
        _kill_after(_command(model, data, out, "--resume"), out, moment)
    final = subprocess.run(_command(model, data, out, "--resume"), env=_environment(out), capture_output=True)
    assert final.returncode == 0, final.stderr.decode()

    assert _losses(out) == _losses(tmp_path / "whole"), f"killed after records {moments} (seed {seed})"
    assert sorted(_losses(out)[0]) == list(range(1, 61))
    assert (out / result).read_bytes() == (tmp_path / "whole" / result).read_bytes()
