"""The recipe of `lowtide finetune`, its trackers and its page, from flags to files."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from lowtide.cli import main
from lowtide.finetune import _run as job
from lowtide.finetune import config_from_dict, read_config
from lowtide.train._data import DataCursor
from lowtide.train._evaluation import Evaluation

TEXT = "the tide goes out and the tide comes in and the moon pulls and the sea follows <b>\n" * 20
SMALL = "--seq-len 8 --batch-size 4 --rank 2 --sample-tokens 0 --eval-every 2".split()


@pytest.fixture
def finetune(tiny_model_dir: str, tmp_path: Path, capfd: Any) -> Any:
    """Run the command on tiny things; returns the exit status and all that it printed."""
    (tmp_path / "data.txt").write_text(TEXT)

    def run(*flags: str) -> tuple[int, str]:
        start = [] if {"--resume", "--report-only"} & {*flags} else [*SMALL, "--data", str(tmp_path / "data.txt")]
        start += ["--model", tiny_model_dir] if start else []
        status = main(["finetune", "--out", str(tmp_path / "run"), *start, *flags])
        return status, "".join(capfd.readouterr())

    return run


def records(tmp_path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


def losses(monkeypatch: pytest.MonkeyPatch, *values: float) -> None:
    """Let evaluations find these."""
    found = iter(values)
    monkeypatch.setattr(Evaluation, "means", lambda self, data: {"loss": next(found)})


@pytest.mark.slow  # runs that are resumed
def test_epochs_and_a_schedule_decide_the_rates_and_a_resumed_run_keeps_them(finetune: Any, tmp_path: Path) -> None:
    flags = "--num-epochs 0.2 --schedule warmup_stable_decay --learning-rate 1 --warmup-ratio 0.3 --max-grad-norm 0"
    status, printed = finetune(*flags.split())
    assert status == 0, printed
    rates = [record["learning_rate"] for record in records(tmp_path) if "loss" in record]
    num_steps = len(rates)
    assert num_steps > 3 and rates[0] < rates[2] and max(rates) == rates[-2] == 1.0
    status, printed = finetune("--resume", "--steps", str(num_steps + 2))
    assert status == 0, printed
    longer = [record["learning_rate"] for record in records(tmp_path) if "loss" in record]
    assert longer[:num_steps] == rates and longer[num_steps:] == pytest.approx([0.1, 0.1])
    status, printed = finetune("--resume", "--schedule", "linear")
    assert status == 2 and "schedule = 'warmup_stable_decay'" in printed


@pytest.mark.slow
def test_a_run_stops_early_and_writes_the_best(finetune: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses(monkeypatch, 5.0, 3.0, 4.0, 4.5, 4.6, 4.7)
    flags = "--num-epochs 1 --early-stopping-patience 2 --load-best-at-end --checkpoint-every 100 --schedule constant"
    flags += " --warmup-steps 0"
    status, printed = finetune(*flags.split())
    assert status == 0 and "The run writes the weights of step 2" in printed, printed
    num_steps = json.loads((tmp_path / "run" / "data.json").read_text())["num_steps"]
    assert f"Stopped early at step 6 of {num_steps}:" in printed and "→ 3.0000 nats" in printed
    assert max(record["step"] for record in records(tmp_path)) == 6
    kept = {int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.isdigit()}
    assert 2 in kept and 6 in kept
    best = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    losses(monkeypatch, 5.0, 3.0)
    two = f"--num-epochs {2 / num_steps - 1e-6}"
    again = [*flags.replace("--num-epochs 1", two).split(), "--out", str(tmp_path / "short")]
    status, printed = finetune(*again)
    assert status == 0 and "0 of 2 done" in printed and "Stopped early" not in printed, printed
    short = load_file(tmp_path / "short" / "adapter" / "adapter_model.safetensors")
    for name in best:
        np.testing.assert_array_equal(best[name], short[name])


@pytest.mark.slow  # runs that are resumed
def test_trackers_hear_of_a_run_and_of_its_continuation(
    finetune: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[dict[str, Any]] = []
    logged: list[tuple[int, dict[str, float]]] = []

    def init(**options: Any) -> Any:
        begun.append(options)
        return types.SimpleNamespace(
            log=lambda values, step: logged.append((step, values)), finish=lambda **how: None, name=options["name"]
        )

    for name in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(init=init))
    flags = ["--track", "wandb,trackio", "--project", "tides", "--run-name", "low", "--steps", "2"]
    assert finetune(*flags)[0] == 0
    assert finetune("--resume", "--steps", "3")[0] == 0
    assert [options["name"] for options in begun] == ["low"] * 4 and begun[0]["id"] == begun[2]["id"]
    assert begun[0]["project"] == "tides" and begun[0]["config"]["rank"] == 2
    assert [values["learning_rate"] > 0 for step, values in logged if "loss" in values] == [True] * 6


def test_a_tracker_that_is_not_installed_is_an_error_before_anything_is_read(
    finetune: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(job, "load_base", lambda *args: pytest.fail("a model was loaded"))
    status, printed = finetune("--track", "wandb")
    assert status == 2 and 'pip install "lowtide[wandb]"' in printed and not (tmp_path / "run").exists()
    status, printed = finetune("--track", "comet")
    assert status == 2 and "track: unknown word 'comet'" in printed


@pytest.mark.slow  # runs that are resumed
def test_a_run_has_a_page_also_when_it_is_interrupted_and_later(
    finetune: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, took = tmp_path / "run" / "report.html", DataCursor.next

    def interrupted(self: Any, step: int, *args: Any) -> Any:
        if step == 2:
            raise KeyboardInterrupt
        return took(self, step, *args)

    monkeypatch.setattr(DataCursor, "next", interrupted)
    assert finetune("--steps", "4", "--report")[0] == 130
    assert "2 of 4 steps" in page.read_text()
    monkeypatch.undo()
    page.unlink()
    status, printed = finetune("--report-only")
    assert status == 0 and str(page) in printed and "2 of 4 steps" in page.read_text()
    status, printed = finetune("--resume")
    text = page.read_text()
    assert status == 0 and "4 of 4 steps" in text and "Memory of a step, on the device" in text
    assert "tokens held out" in text
    status, printed = finetune("--report-only", "--resume")
    assert status == 2 and "--report-only does not train" in printed


def test_flags_of_other_libraries_are_answered_with_ours(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["finetune", "--lora-r", "8", "--no-such-thing", "--per_device_train_batch_size=4"])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and "--lora-r 8 --no-such-thing" in said
    assert "hint: --lora-r of other libraries is rank here" in said
    assert "hint: --per_device_train_batch_size of other libraries is batch_size here" in said


def test_a_page_needs_the_folder_of_a_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["finetune", "--report-only"]) == 2 and "--report-only needs --out" in capsys.readouterr().err
    assert main(["finetune", "--report-only", "--out", str(tmp_path)]) == 2
    assert "no run to report on" in capsys.readouterr().err


@pytest.mark.slow
def test_settings_with_words_are_kept_in_the_run(finetune: Any, tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX", reason="the extra tensorboard is not installed")
    assert finetune("--steps", "1", "--track", "tensorboard", "--adam-beta2", "0.95")[0] == 0
    config = config_from_dict(read_config(tmp_path / "run" / "config.toml"), "config.toml")
    assert (config.track, config.adam_beta2) == (("tensorboard",), 0.95)
    assert [*(tmp_path / "run" / "tensorboard").iterdir()]
