"""The first check on a GPU: the default finetune learns, and its memory is as predicted.

    python benchmarks/gpu_smoke.py [--rehearse]

The script runs `lowtide finetune` without options: the embedded model, the language reference that ships with Python,
300 steps of 8 x 128 tokens. A short run that tunes all parameters follows. The measured peak covers the whole run with
evaluation and samples; the predicted bytes are those of the step. `peak_before_bytes` is the peak before the first
step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from _gpu import ROOT, check_child, main

README = ROOT.parent / "README.md"
WATCHED = """
import json, sys
import lowtide
from lowtide.cli import main
from lowtide.finetune._run_folder import measured_peak_bytes

fit, path = lowtide.Trainer.fit, sys.argv.pop(1)

def watched(self, *args, **options):
    with open(path, "w") as file:
        json.dump(measured_peak_bytes(), file)
    return fit(self, *args, **options)

lowtide.Trainer.fit = watched
raise SystemExit(main())
"""
"""The `lowtide` command; it writes the allocator's peak before the first step to a file."""


def finetune(flags: tuple[str, ...], steps: int, rehearsal: bool) -> dict[str, Any]:
    """Run the command in a separate folder, and read its files."""
    small = ("--steps", "8", "--batch-size", "4", "--seq-len", "32", "--data", str(README))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        before = Path(folder) / "before.json"
        command = [sys.executable, "-c", WATCHED, str(before), "finetune", "--out", str(out), *flags]
        command += small if rehearsal else ("--steps", str(steps))
        if rehearsal:
            config = Path(folder) / "config.toml"
            config.write_text("eval_every = 1000\nsample_tokens = 0\n", encoding="utf-8")
            command += ["--config", str(config)]
        started = time.perf_counter()
        check_child("lowtide finetune", command, stdout=subprocess.DEVNULL, env={**os.environ, "COLUMNS": "120"})
        seconds = time.perf_counter() - started
        memory = json.loads((out / "memory.json").read_text(encoding="utf-8"))
        lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        peak_before = json.loads(before.read_text(encoding="utf-8"))
        adapters = [path.name for path in sorted(out.glob("*/*.safetensors"))]
    if not rehearsal:
        check_place(memory)
    records = [json.loads(line) for line in lines]
    losses = [record["eval_loss"] for record in records if "eval_loss" in record]
    steps_seconds = [record["seconds"] for record in records if "seconds" in record and "loss" in record]
    rises = {} if losses[-1] < losses[0] else {"ok": False, "error": f"the held-out loss does not fall: {losses}"}
    return {
        **rises,
        "loss_before": losses[0],
        "loss_after": losses[-1],
        "predicted_bytes": memory["device_bytes"],
        "measured_bytes": memory["measured_peak_bytes"],
        "peak_before_bytes": peak_before,
        "host_bytes": memory["host_bytes"],
        "by_role": memory["by_role"],
        "target": memory["target"],
        "chip": memory["chip"],
        "run_seconds": round(seconds, 2),
        "step_seconds": steps_seconds[-20:],
        "files": adapters,
    }


def check_place(memory: dict[str, Any]) -> None:
    """Raise unless the run was on a GPU, because a CPU's allocator does not count bytes."""
    if not memory["measured_peak_bytes"] or "cpu" in str(memory["chip"]).lower():
        raise RuntimeError(f"the run was on {memory['chip']} ({memory['target']}): a measurement needs a GPU")


if __name__ == "__main__":
    main(
        "smoke",
        {"finetune": partial(finetune, (), 300), "full": partial(finetune, ("--full",), 30)},
        __doc__,
        minutes={"finetune": 3, "full": 2},
    )
