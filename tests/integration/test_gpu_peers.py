"""The other side of the day with a GPU, at toy size on the CPU: PyTorch, transformers and PEFT."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import _summary  # noqa: E402
import lora_peft  # noqa: E402

sys.path.remove(str(BENCHMARKS))


@pytest.mark.peers
@pytest.mark.parametrize(
    ("script", "step"),
    [
        ("lora_peft.py", "1b-4x2048-remat"),
        ("sft_peft.py", "moe-4x2048-remat"),
        ("qlora_peft.py", "1.7b-dora-4x2048-remat"),
    ],
)
def test_the_peers_side_can_be_rehearsed(script: str, step: str, tmp_path: Path) -> None:
    """Where PyTorch is: `test_every_part_can_be_rehearsed` runs where it is not."""
    names = [f"{step}-lowtide", f"{step}-peft"]
    words = [word for name in names for word in ("--case", name)]
    command = [sys.executable, str(BENCHMARKS / script), "--rehearse", "--json", str(tmp_path / "rows.json")]
    env = {**os.environ, "LOWTIDE_SCRATCH": str(tmp_path)}
    done = subprocess.run([*command, *words], env=env, capture_output=True, text=True, check=False)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert {name: row["ok"] for name, row in rows.items()} == dict.fromkeys(names, True), done.stdout + done.stderr
    ours, theirs = (rows[name] for name in names)
    assert theirs["loss_difference"] <= lora_peft.TOLERANCE and theirs["num_trained"] == ours["num_trained"]


@pytest.mark.peers
def test_answers_beside_transformers_can_be_rehearsed(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(BENCHMARKS / "generate_time.py"),
        "--rehearse",
        "--json",
        str(tmp_path / "rows.json"),
    ]
    env = {**os.environ, "LOWTIDE_SCRATCH": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    content = json.loads((tmp_path / "rows.json").read_text())
    rows = content["rows"]
    assert content["complete"] and all(row["ok"] for row in rows.values()), done.stdout + done.stderr
    shares = [run["share_of_same_tokens"] for row in rows.values() for run in row["runs"].values() if "cache" in row]
    assert shares == [1.0] * 6
    lines = _summary.generate(_summary.Result(rows, True, list(rows)))
    assert len(lines) == 6 and all(" × (" in line.found and "100 % of the tokens" in line.found for line in lines)
