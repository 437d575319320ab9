"""`lowtide fits`: a row a target, and the largest size that fits."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lowtide.cli import _fits
from lowtide.cli._main import main
from lowtide.finetune import step_job
from lowtide.memory import MemoryReport


@pytest.mark.sentinel
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.tpu_aot
def test_a_row_a_target_and_a_failing_one_does_not_stop_the_others(lowtide: Any, folder: Path) -> None:
    targets = ("--target", "v5e:2x2", "--target", "v9", "--target", "cpu")
    status, printed, errors = lowtide("fits", "train.py:make_step", *targets, "--set", "batch=8", "--json", "t.json")
    assert status == 1, "one target failed"
    assert re.search(r"v5e:2x2 .* 15.75 GiB +yes +15.75 GiB", printed)
    assert re.search(r"v9 +failed +\[LT008\] unknown target 'v9'", printed)
    assert re.search(r"cpu .* unknown", printed)
    assert "set a limit with --budget" in printed
    assert "hint: near misses" in errors
    rows = {row["target"]: row for row in json.loads((folder / "t.json").read_text())["rows"]}
    assert rows["v5e:2x2"]["fits"] is True
    assert rows["cpu"]["fits"] is None
    assert rows["v9"]["device_bytes"] is None
    assert lowtide("explain", "train.py:make_step", "--set", "batch=8", "--target", "cpu", "--json", "c.json")[0] == 0
    assert rows["cpu"]["device_bytes"] == MemoryReport.from_json(folder / "c.json").device_bytes


@pytest.mark.slow
@pytest.mark.processes
def test_a_models_folder_is_a_job(lowtide: Any, tiny_model_dir: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((Path(tiny_model_dir) / "config.json").read_bytes())  # no weights
    (tmp_path / "run.toml").write_text("rank = 4\nbatch_size = 4\noffload = ['optimizer']\n")
    settings = ("--config", str(tmp_path / "run.toml"), "--batch-size", "2", "--set", "seq_len=16", "--budget", "1 GiB")
    files = ("--json", str(tmp_path / "fits.json"))
    status, printed, errors = lowtide("fits", str(tmp_path), "--target", "cpu", *settings, *files)
    assert status == 0, errors
    assert re.search(r"cpu .* yes ", printed)
    (row,) = json.loads((tmp_path / "fits.json").read_text())["rows"]
    ours = step_job(tmp_path, rank=4, batch_size=2, seq_len=16, offload=("optimizer",)).analyze("cpu")
    assert (row["device_bytes"], row["host_bytes"]) == (ours.device_bytes, ours.host_bytes) > (0, 0)
    status, _, errors = lowtide("fits", "train.py:make_step", "--rank", "4")
    assert status == 2 and "are for a model's folder" in errors
    status, _, errors = lowtide("explain", str(tmp_path), "--target", "cpu", "--set", "batchsize=2")  # of one process
    assert status != 0 and "batch_size" in errors


def test_one_target_that_does_not_suffice_decides_the_exit_status(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(args: Any, settings: Any, name: str, budget: int | None) -> dict[str, Any]:
        usable = 3 if name == "v5e" else 1
        sizes = {"device_bytes": 2, "usable_bytes": usable, "host_bytes": 0, "host_usable_bytes": None}
        figures = {"compile_seconds": 0.0, "margin_bytes": usable - 2, "host_fits": None, "fits": usable >= 2}
        return {"target": name, **sizes, **figures}

    monkeypatch.chdir(folder)
    monkeypatch.setattr(_fits, "_measure", measure)
    assert main(["fits", "train.py:make_step", "--target", "v5e"]) == 0
    assert main(["fits", "train.py:make_step", "--target", "v5e", "--target", "v4"]) == 1


@pytest.mark.processes
def test_the_exit_status_says_that_a_budget_is_too_small(lowtide: Any) -> None:
    status, printed, _ = lowtide("fits", "train.py:make_step", "--target", "cpu", "--budget", "1 KiB")
    assert status == 1
    assert re.search(r"cpu .* no ", printed)


@pytest.mark.slow
@pytest.mark.processes
def test_when_every_target_fails_by_a_mistake_it_is_told_once(lowtide: Any) -> None:
    status, printed, errors = lowtide("fits", "train.py:nope", "--target", "cpu", "--target", "here")
    assert status == 2
    assert errors.count("train.py has no 'nope'") == 1
    assert printed == ""


@pytest.mark.slow
@pytest.mark.processes
def test_users_code_that_fails_is_shown(lowtide: Any) -> None:
    status, printed, errors = lowtide("fits", "train.py:broken", "--target", "cpu")
    assert status == 1
    assert "return layers.fails()" in errors
    assert printed == ""


@pytest.mark.slow_after(8)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py:f"], "there is no such file"),
        (["train.py:make_step", "--budget", "much"], "'much' is not a size"),
        (["train.py:make_step", "--sizes", "2,4"], "--sizes needs --largest"),
        (["train.py:make_step", "--multiple-of", "2"], "--multiple-of needs --largest"),
        (["train.py:make_step", "--largest", "batch", "--sizes", "2,b"], "--sizes needs whole numbers"),
        (["train.py:make_step", "--largest", "batch", "--target", "cpu"], "the capacity of 'cpu' is unknown"),
        (["train.py:make_step", "--largest", "bath", "--budget", "1 GiB"], "did you mean 'batch'?"),
        (["train.py:make_step", "--largest", "batch", "--set", "batch=3"], "batch is set, but --largest"),
        (["train.py:make_step", "--largest", "batch", "--target=cpu", "--budget=1 B"], "does not fit, even at size 2"),
    ],
)
def test_mistakes_in_arguments_are_errors_without_tracebacks(arguments: Any, message: str, lowtide: Any) -> None:
    status, _, errors = lowtide("fits", *arguments)
    assert status == 2
    assert message in errors
    assert "Traceback" not in errors


def test_the_largest_size_is_compiled_and_so_is_the_next(lowtide: Any, folder: Path) -> None:
    flags = ("--largest", "batch", "--target", "cpu", "--budget", "4 MiB", "--sizes", "8,16,32", "--json", "l.json")
    status, printed, _ = lowtide("fits", "train.py:make_step", *flags)
    assert status == 0
    row = json.loads((folder / "l.json").read_text())["rows"][0]
    points = {point["size"]: point for point in row["points"]}
    assert points[row["answer"]]["device_bytes"] <= 4 * 2**20 < points[row["answer"] + 1]["device_bytes"]
    assert f"batch {row['answer']:,} fits cpu" in printed
    assert re.search(rf"{row['answer']:,} .*yes <-", printed)


@pytest.mark.processes
@pytest.mark.slow
def test_several_targets_get_their_largest_size_each(lowtide: Any) -> None:
    flags = ("--largest", "batch", "--budget", "4 MiB", "--multiple-of", "64", "--maximum", "512")
    status, printed, errors = lowtide("fits", "train.py:make_step", *flags, "--target", "cpu", "--target", "v9")
    assert status == 1
    assert re.search(r"cpu +512 .*at the maximum", printed)
    assert re.search(r"v9 +failed .*LT008", printed)
    assert "near misses" in errors


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system that refuses new files")
@pytest.mark.parametrize("more", [(), ("--largest", "batch", "--maximum", "2")])
def test_a_table_that_cannot_be_written_is_an_error(more: tuple[str, ...], lowtide: Any) -> None:
    flags = ("--target", "cpu", "--budget", "1 GiB", "--json", "/proc/rows.json")
    status, _, errors = lowtide("fits", "train.py:pair", *flags, *more)
    assert status == 2
    assert "/proc/rows.json: cannot be written" in errors


@pytest.mark.slow
@pytest.mark.processes
def test_what_the_users_code_prints_is_not_the_error(lowtide: Any, folder: Path) -> None:
    source = (folder / "train.py").read_text()
    lines = "def loud():\n    import sys\n    print('error none at all', file=sys.stderr)\n    raise KeyError('k')\n"
    (folder / "train.py").write_text(f"{source}\n\n{lines}")
    status, _, errors = lowtide("fits", "train.py:loud", "--target", "cpu")
    assert (status, "none at all" in errors) == (1, False)
    assert "KeyError: 'k'" in errors
