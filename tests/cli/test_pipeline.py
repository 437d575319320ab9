"""`lowtide finetune --pipeline`: the losses of a run without one, also where it goes on without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lowtide.cli import _distributed, main
from lowtide.core import ConfigError
from lowtide.finetune import Finetune, FinetuneConfig


def losses(out: Path) -> list[float]:
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [value for record in records for name, value in record.items() if name in ("loss", "eval_loss")]


@pytest.mark.slow
@pytest.mark.parametrize("offload", [[], ["--offload", "activations"]], ids=["device", "host"])
def test_a_run_in_stages_has_the_losses_of_one_without_and_goes_on_without(
    offload: list[str], tiny_model_dir: str, tmp_path: Path, capfd: Any
) -> None:
    """A trainer goes on with other stages, too: `tests/train/test_pipelined.py`."""
    (tmp_path / "data.txt").write_text("the tide goes out and the tide comes in\n" * 60)
    small = ["--model", tiny_model_dir, "--data", str(tmp_path / "data.txt"), "--batch-size", "8", "--seq-len", "8"]
    small += ["--rank", "2", "--sample-tokens", "0", "--checkpoint-every", "2", "--seed", "3"]

    def finetune(out: str, *flags: str) -> list[float]:
        assert main(["finetune", "--out", str(tmp_path / out), *flags]) == 0
        return losses(tmp_path / out)

    plain = finetune("plain", *small, "--steps", "4")
    stages = ["--pipeline", "2", *offload]
    begun = finetune("begun", *small, "--steps", "2", "--schedule-steps", "4", *stages)
    printed = " ".join(capfd.readouterr().out.split())
    assert "2 stages, 2 microbatches" in printed
    assert ("host activations" in printed) == bool(offload)
    assert begun[:3] == pytest.approx(plain[:3], abs=1e-5)
    resumed = finetune("begun", "--resume", "--steps", "4")
    assert resumed[-3:] == pytest.approx(plain[-3:], abs=1e-5)


@pytest.mark.slow_after(6)
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--pipeline", "0"], "--pipeline must be an integer of at least 1, not 0"),
        (["--pipeline", "3"], "--pipeline 3: 8 devices cannot be split into 3 stages expected: 1, 2, 4, 8: the"),
        (["--pipeline", "3"], "hint: use --pipeline 4"),
        (["--pipeline", "16"], "hint: use --pipeline 8"),
        (["--pipeline", "4", "--full"], "leave out --distributed and --pipeline"),
        (
            ["--pipeline", "4", "--offload", "activations,optimizer"],
            "--offload optimizer cannot be sharded over devices yet",
        ),
        (["--pipeline", "2", "--batch-size", "3"], "a multiple of 4 (fsdp 4)"),
        (["--pipeline", "2", "--lora-dropout", "0.1"], "lora_dropout: the loss of a pipeline takes no random key"),
        (["--pipeline", "2", "--layers-per-remat", "2"], "layers_per_remat contradicts --pipeline, whose stages keep"),
        (["--pipeline", "2", "--process-id", "0"], "add --distributed"),
    ],
)
def test_stages_that_cannot_be_are_refused_before_anything_is_written(
    tmp_path: Path, capfd: Any, flags: list[str], said: str
) -> None:
    assert main(["finetune", "--out", str(tmp_path / "run"), *flags]) == 2
    assert said in " ".join(capfd.readouterr().err.split())
    assert not (tmp_path / "run").exists()


def test_activations_of_devices_without_stages_stay_on_them(tmp_path: Path) -> None:
    rules = _distributed._rules({"data": 8}, "data=8")
    with pytest.raises(ConfigError, match=r"(?s)--offload activations cannot be sharded.*hint: .*with --pipeline "):
        Finetune(FinetuneConfig(offload=("activations",)), tmp_path / "run", sharding=rules)


@pytest.mark.parametrize(
    ("stages", "distributed", "said"),
    [
        (4, "fsdp=4", r"--pipeline 4: 8 devices .* with --distributed fsdp=4.*is 8.*hint: use --pipeline 2"),
        (4, "tensor=4", r"expected: 1, 2: .*divides 8.*hint: use --pipeline 2"),
        (2, "fsdp=3", r"--distributed fsdp=3: the mesh does not match 8 devices: fsdp 3 × stage 2.*use --distributed"),
        (None, "data=-1,fsdp=-1", r"data -1 × fsdp -1.*at most one size is -1"),
        (None, "tensor=0", r"--distributed tensor=0"),
    ],
)
def test_a_mesh_that_the_devices_do_not_make_is_said_in_flags(stages: Any, distributed: str, said: str) -> None:
    sizes = _distributed._sizes(distributed) | ({} if stages is None else {"stage": stages})
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        _distributed._rules(sizes, distributed)


@pytest.mark.parametrize(("stages", "distributed"), [(2, "fsdp=4"), (2, "tensor=2"), (8, ""), (2, "data=-1,fsdp=2")])
def test_a_mesh_that_the_devices_make_is_made(stages: int, distributed: str) -> None:
    rules = _distributed._rules(_distributed._sizes(distributed) | {"stage": stages}, distributed)
    assert rules.mesh.size == 8 and rules.mesh.shape["stage"] == stages
