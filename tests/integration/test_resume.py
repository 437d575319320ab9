"""Killed without warning at random moments, a run continues as if nothing had happened."""

import json
import random
import signal
import time

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.slow]

FLAGS = ["--steps", "60", "--seq-len", "8", "--batch-size", "4"]


def _losses(out):
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    steps = {r["step"]: r["loss"] for r in records if "loss" in r}
    evals = {r["step"]: r["eval_loss"] for r in records if "eval_loss" in r}
    return steps, evals, len(records)


def _kill_after(process, out, num_records):
    """Kill a run as soon as it has written so many records."""
    deadline = time.monotonic() + 300
    while _losses(out)[2] < num_records and process.is_running and time.monotonic() < deadline:
        time.sleep(0.005)
    process.kill()
    assert process.wait() == -signal.SIGKILL, process.text


@pytest.mark.parametrize(
    ("kind", "result", "num_kills"),
    [
        (["--rank", "2"], "adapter/adapter_model.safetensors", 2),
        (["--full", "--offload", "optimizer,activations,parameters"], "model/model.safetensors", 1),
    ],
    ids=["adapters", "full"],
)
def test_kills_leave_the_losses_of_an_uninterrupted_run(fork, tiny_model_dir, tmp_path, kind, result, num_kills):
    (tmp_path / "data.txt").write_text("the tide goes out and the tide comes in and the moon pulls the sea\n" * 60)
    (tmp_path / "config.toml").write_text(
        "checkpoint_every = 7\neval_every = 10\nlearning_rate = 0.01\nsample_tokens = 4\n"
    )
    flags = ["--model", tiny_model_dir, "--data", tmp_path / "data.txt", *FLAGS, *kind]
    flags += ["--config", tmp_path / "config.toml"]
    out, seed = tmp_path / "killed", random.randrange(10**6)

    def finetune(folder, *flags):
        return fork("lowtide", "finetune", "--out", folder, *flags)

    whole = finetune(tmp_path / "whole", *flags)
    assert whole.wait() == 0, whole.text
    moments = sorted(random.Random(seed).sample(range(1, 60), num_kills))
    _kill_after(finetune(out, *flags), out, moments[0])
    for moment in moments[1:]:
        _kill_after(finetune(out, "--resume"), out, moment)
    final = finetune(out, "--resume")
    assert final.wait() == 0, final.text

    assert _losses(out) == _losses(tmp_path / "whole"), f"killed after records {moments} (seed {seed})"
    assert sorted(_losses(out)[0]) == list(range(1, 61))
    assert (out / result).read_bytes() == (tmp_path / "whole" / result).read_bytes()
