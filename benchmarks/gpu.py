"""Measure everything that needs a GPU, with one command, in the time that is available.

    python benchmarks/gpu.py [--part NAME ...] [--minutes N] [--out DIR] [--again | --stale]
    python benchmarks/gpu.py --rehearse     # every part at toy size on the CPU, into a temporary folder
    python benchmarks/gpu.py --list | --summary | --missing | --wheels DIR [--python 3.12]

The most important parts run first. Each is a script with a time limit, at most 150 seconds for all parts but one.
`benchmarks/results/gpu/<device>/` has a file per part, which is replaced after every case, so a kill loses at most one
case. A second call skips finished cases.
`docs/internals/gpu-day.md` explains how to use a machine without a network.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from _gpu import RESULTS, ROOT, environment, gpu, home_of, read_result, run, run_child
from _packages import download, lacking
from _processes import reason
from _summary import table

PROBE_SECONDS = 120


class Part(NamedTuple):
    """A script, and its time limit in minutes for one call."""

    name: str
    script: str
    about: str
    minutes: float


PARTS = (
    Part("attention", "attention_time.py", "one layer's attention from 4k to 128k tokens, cuDNN versus blocks", 2.5),
    Part("copies", "copies_time.py", "loops and XLA's options that let copies run under kernels", 2),
    Part("offload", "offload_time.py", "a step with activations on the host versus on the device", 2.5),
    Part("optimizer", "optimizer_time.py", "AdamW's update with state in 8 and 4 bits versus float32", 2),
    Part("peak", "measured_peak.py", "compiled against measured peak of many programs", 2.5),
    Part("lora", "lora_peft.py", "LoRA on 1B and 8B shapes versus PEFT: tokens per second and peak", 2.5),
    Part("trainer", "trainer_time.py", "time that Trainer.fit adds to the bare step, LoRA on 1B", 2),
    Part("layerwise", "layerwise_time.py", "AdamW on all 8 B parameters inside the backward pass", 2.5),
    Part("pipeline", "pipeline_time.py", "a pipeline of one stage versus plain accumulation", 2),
    Part("tests", "gpu_tests.py", "the tests marked gpu", 2.5),
    Part("sft", "sft_peft.py", "packed rows on Qwen3's shapes, dense and mixture of experts, versus PEFT", 2.5),
    Part("qlora", "qlora_peft.py", "QLoRA, DoRA and rsLoRA on Qwen3's shapes versus PEFT with bitsandbytes", 2.5),
    Part("longest", "longest_sequence.py", "QLoRA on 8B shapes: the longest sequence in 80 GB", 12),
    Part("ladder", "ladder_time.py", "one LoRA step on 1B; every case adds a technique that saves bytes", 2.5),
    Part("generate", "generate_time.py", "generation with Qwen3's shapes versus transformers", 2.5),
    Part("smoke", "gpu_smoke.py", "the default finetune: predicted and measured bytes, held-out loss", 2.5),
)
"""The first six take at most 14 minutes, the first ten at most 23. A later call goes on with the missing cases."""


def measure(options: argparse.Namespace) -> int:
    """Run the parts one after another; return nonzero if one failed or had no time."""
    card = {} if options.rehearse else gpu()
    if not options.rehearse and (problem := why_not_usable(card)):
        print(problem)
        return 2
    out: Path = options.out or home_of(card.get("name", ""), options.rehearse)
    out.mkdir(parents=True, exist_ok=True)
    if options.out and not options.rehearse:
        for path in home_of(card["name"], rehearsal=False).glob("*.json"):  # results of earlier days
            if not (out / path.name).exists():
                shutil.copy(path, out)
    print(f"results in {out}", flush=True)
    deadline = time.monotonic() + 60 * options.minutes
    named = options.part or []
    states = {part.name: run_part(part, out, deadline, options) for part in PARTS if part.name in named or not named}
    print("\n".join(f"  {name:10} {state}" for name, state in states.items()))
    return int(not {*states.values()} <= {"complete", "there already"})


def why_not_usable(card: dict[str, Any]) -> str:
    """Return why nothing can be measured here; empty if JAX uses the GPU.

    JAX silently uses the CPU if the driver is too old, or if the plugin is missing or of another version.
    """
    if not card:
        return "no GPU here (nvidia-smi finds none); --rehearse runs toy sizes on the CPU"
    command = [sys.executable, "-c", "import jax; print(jax.devices()[0].platform)"]
    env = environment(False, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})
    done = run_child(command, env=env, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
    if done.returncode == 0 and done.stdout.split()[-1:] != ["cpu"]:
        return ""
    told = reason(done.stderr) if done.stderr.strip() else "no plugin for a GPU; hint: pip install jax[cuda13]"
    return f"JAX does not use the GPU here: {told}"


def run_part(part: Part, out: Path, deadline: float, options: argparse.Namespace) -> str:
    """Run the script of a part unless its file is complete; return its state afterwards.

    A part named by `--part` also starts if it is complete, and runs the cases that were added to its script. So does
    every part with `--stale`, which runs the cases of another commit.
    """
    path, left = out / f"{part.name}.json", deadline - time.monotonic()
    before = read_result(path)
    may_skip = not (options.again or options.stale or options.part)
    if before.get("complete") and before["rehearsal"] == options.rehearse and may_skip:
        return "there already"
    if left < 20:  # a part imports JAX before it looks at the clock
        return f"not started: {max(left, 0):.0f} s left"
    limit = left if options.rehearse else min(60 * part.minutes, left)
    print(f"=== {part.name}: {part.about} (at most {limit / 60:.1f} minutes)", flush=True)
    words = [sys.executable, str(ROOT / part.script), "--json", str(path), "--minutes", f"{limit / 60:.4f}"]
    words += ["--rehearse"] * options.rehearse + ["--again"] * options.again + ["--stale"] * options.stale
    # The part enforces the limit itself; it is killed only if that fails.
    status = run(words, environment(options.rehearse), limit + 15)
    return "complete" if status == 0 and read_result(path).get("complete") else "not complete"


def results(home: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the results by device and part, from a folder of devices or of one device."""
    devices: dict[str, dict[str, dict[str, Any]]] = {}
    for part in PARTS:
        for path in sorted([*home.glob(f"{part.name}.json"), *home.glob(f"*/{part.name}.json")]):
            content = read_result(path)
            devices.setdefault(content["device_kind"], {})[part.name] = content
    return devices


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [part.name for part in PARTS]
    parser.add_argument("--part", action="append", choices=names, metavar="NAME", help="only this; repeatable")
    parser.add_argument("--minutes", type=float, default=math.inf, metavar="N", help="limit of everything together")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the results, also for --summary")
    parser.add_argument("--again", action="store_true", help="measure finished cases again")
    parser.add_argument("--stale", action="store_true", help="measure cases of other code again")
    parser.add_argument("--python", default="3.12", metavar="X.Y", help="for --wheels (default: 3.12)")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--rehearse", action="store_true", help="toy sizes on the CPU")
    action.add_argument("--list", action="store_true", help="print the parts")
    action.add_argument("--summary", action="store_true", help="print the results as Markdown tables")
    action.add_argument("--missing", action="store_true", help="print the wheels that this Python lacks")
    action.add_argument("--wheels", type=Path, metavar="DIR", help="download the wheels")
    options = parser.parse_args()
    if options.list:
        for part in PARTS:
            print(f"{part.name:10} {part.minutes:3.0f} min  {part.script:20} {part.about}")
    elif options.summary:
        print(table(results(options.out or RESULTS)))
    elif options.missing:
        print("".join(f"{pin}\n" for pin in lacking()), end="")
    elif options.wheels:
        download(options.wheels, options.python)
    else:
        return measure(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
