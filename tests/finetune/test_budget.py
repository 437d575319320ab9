"""Bytes and plans of a run before anything is loaded, compared with the compiled step of the run itself."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import lowtide as lt
from lowtide.cli import main
from lowtide.core import OutOfMemoryError, parse_bytes
from lowtide.finetune import FORMATS, Finetune, FinetuneConfig, _budget, plan_within
from lowtide.finetune._budget import planned_config
from lowtide.finetune._job import JobPlan
from lowtide.finetune._run_folder import MetricsFile, read_records
from lowtide.planning import Plan
from lowtide.planning._compiler import compile_step

PLAN_FIELDS = ("budget_bytes", "num_microbatches", "device_bytes", "host_bytes", "flops")
RUNS: dict[str, dict[str, Any]] = {
    "int8 with DoRA": {"quantize": "int8", "method": "dora", "num_microbatches": 2, "modules_to_save": "outer/embed"}
    | {"remat": False, "state_dtype": "8bit"},
    "all on the host": {"offload": ("activations", "optimizer", "parameters"), "method": "vera"},
    "all parameters": {"full": True},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:low_precision.*fewer than least_size")  # the frozen weights of a tiny model
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "int8 with DoRA" else pytest.mark.slow) for name in RUNS]
)
def test_the_figure_is_that_of_the_runs_own_step(name: str, tiny_model_dir: str, tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("the tide goes out and the sea follows\n" * 60)
    sizes: dict[str, Any] = {"rank": 2} if name == "int8 with DoRA" else {}
    paths = {"model": str(tiny_model_dir), "data": str(tmp_path / "data.txt"), "packing": "contiguous"}
    config = FinetuneConfig(**paths, seq_len=16, batch_size=4, **sizes, **RUNS[name])
    size = compile_step(JobPlan.from_shapes(config).job(), None, lt.target("here"))
    ours = Finetune(config, tmp_path / "run").memory().ours
    # As users compile them both are equal to 0.1 %; of the tests' unoptimised programs the trainer's has more copies.
    assert size.device_bytes == pytest.approx(ours.device_bytes, rel=0.15)


@pytest.mark.slow
def test_the_command_refuses_from_config_json_alone(tiny_model_dir: str, tmp_path: Path, capfd: Any) -> None:
    (tmp_path / "model").mkdir()
    shutil.copy(Path(tiny_model_dir) / "config.json", tmp_path / "model")
    args = ["finetune", "--model", str(tmp_path / "model"), "--out", str(tmp_path / "run"), "--seq-len", "8"]
    args += ["--batch-size", "1", "--rank", "2"]
    for flags, said in (
        (["--budget", "3 parsecs"], "'3 parsecs' is not a size"),
        (["--budget", "0 GiB"], "--budget must be a size above 0, not '0 GiB'"),
        (["--budget", "1 GiB"], "tokenizer.json"),  # it fits, so the rest of the model is looked for
        (
            ["--budget", "100 B"],
            r"no choice fits the budget of 100 B on(.|\n)*allow nf4_weights or 8bit_state",
        ),
        (["--budget", "1 GiB", "--no-remat"], r"it excludes --no-remat(.|\n)*hint:"),
        (["--budget", "1 GiB", "--plan", "off"], "which excludes --plan off"),
        (["--target", "here"], "the memory of this machine is unknown"),
        (["--budget", "1 GiB", "--target", "v99"], "v99"),
    ):
        assert main([*args, *flags]) == 2
        assert re.search(said, capfd.readouterr().err), said
    with pytest.raises(SystemExit, match="2"):
        main([*args, "--allow", "4bit"])
    assert "invalid choice: '4bit'" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:low_precision.*fewer than least_size")
def test_formats_are_used_only_where_they_are_allowed_and_needed(tiny_model_dir: str) -> None:
    config = FinetuneConfig(model=str(tiny_model_dir), rank=2, seq_len=8, batch_size=1)
    plain = plan_within(config, 2**30, allow=FORMATS)
    assert plain.formats == () and planned_config(config, plain).quantize is None
    with pytest.raises(OutOfMemoryError) as raised:
        plan_within(config, 1024)
    smallest = parse_bytes(str(raised.value.got).partition(" with ")[0])
    quantized = plan_within(config, int(0.93 * smallest), allow=["nf4_weights"])
    assert quantized.formats == ("nf4_weights",) and planned_config(config, quantized).quantize == "nf4"
    assert quantized.device_bytes <= quantized.budget_bytes


def test_small_tiles_are_tried_without_permission_for_long_rows(
    tiny_model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words: list[Any] = []

    def stop(_problem: Any, formats: Any, allow: Any, **_options: Any) -> Any:
        words.append((formats[0], list(allow)))
        raise OutOfMemoryError("stop")

    monkeypatch.setattr(_budget, "search_formats", stop)
    monkeypatch.setattr(_budget, "_TILE_TOKENS", 8)
    config = FinetuneConfig(model=str(tiny_model_dir), rank=2, seq_len=16, batch_size=2)
    for changes in ({}, {"seq_len": 8}, {"tile_tokens": 4}):
        with pytest.raises(OutOfMemoryError):
            plan_within(dataclasses.replace(config, **changes), 2**30, "h100")
    assert words == [("small_tiles", ["small_tiles"]), *[("nf4_weights", [])] * 2]
    plan = Plan(**dict.fromkeys(PLAN_FIELDS, 1), decisions=(), target="here", seconds=(1, 1), formats=("small_tiles",))
    assert planned_config(config, plan).tile_tokens == 8


@pytest.mark.slow
def test_full_tuning_is_planned_by_placement(tiny_model_dir: str) -> None:
    config = FinetuneConfig(model=str(tiny_model_dir), full=True, seq_len=8, batch_size=2)
    target = lt.target("cpu", host_link_bandwidth="20 GB/s")
    large = plan_within(config, 2**30, target)
    assert planned_config(config, large).offload == () and large.num_microbatches == 1
    small = plan_within(config, large.device_bytes - 2048, target)
    changed = planned_config(config, small)
    assert (changed.offload != () or changed.num_microbatches > 1) and small.device_bytes < large.device_bytes
    assert plan_within(dataclasses.replace(config, offload=("optimizer",)), 2**30, target).optimizer == "host"


@pytest.mark.slow
@pytest.mark.sentinel
def test_a_run_with_a_budget_trains_the_planned_step_and_continues_with_it(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ["finetune", "--out", str(tmp_path / "run"), "--batch-size", "2", "--rank", "2", "--seq-len", "32"]
    settings: dict[str, Any] = {"batch_size": 2, "rank": 2, "seq_len": 32}
    budget = plan_within(FinetuneConfig(**settings), 2**30).device_bytes - 2**19
    assert main([*args, "--steps", "2", "--budget", f"{budget} B"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    plan = Plan.from_json((tmp_path / "run" / "plan.json").read_text())
    assert f"plan {plan.choice}" in printed and plan.device_bytes <= plan.budget_bytes == budget
    table = json.loads((tmp_path / "run" / "memory.json").read_text())
    assert plan.device_bytes in table.values(), table
    with monkeypatch.context() as patched:  # a resumed run keeps its plan
        patched.setattr(_budget, "plan_within", None)
        assert main(["finetune", "--out", str(tmp_path / "run"), "--resume", "--steps", "3"]) == 0
    assert f"plan {plan.choice}" in " ".join(capsys.readouterr().out.split())
    assert main(["finetune", "--out", str(tmp_path / "run"), "--resume", "--steps", "4", "--seq-len", "16"]) == 2
    capsys.readouterr()
    on_host = FinetuneConfig(**settings, offload=("optimizer",), modules_to_save=("outer/embed",))
    assert plan_within(on_host, 2**30).host_bytes > 0
    (tmp_path / "run" / "plan.json").write_text("{")
    assert main(["finetune", "--out", str(tmp_path / "run"), "--resume", "--steps", "4"]) == 2
    assert "plan.json: the file is damaged" in capsys.readouterr().err


def test_metrics_of_steps_that_are_taken_again_replace_the_earlier_ones(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl", None)
    for step, loss in ((1, 0.5), (2, 0.4), (3, 0.3), (2, 0.45), (3, 0.35)):
        file.append({"step": step, "loss": loss})
        file.append({"step": step, "eval_loss": loss})
    file.close()
    records = read_records(tmp_path / "metrics.jsonl")
    assert [record["loss"] for record in records if "loss" in record] == [0.5, 0.45, 0.35]
    assert [record["eval_loss"] for record in records if "eval_loss" in record] == [0.5, 0.45, 0.35]
