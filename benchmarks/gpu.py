"""Measure everything that needs a GPU, with one command, in whatever time there is.

    python benchmarks/gpu.py [--part NAME ...] [--minutes N] [--out DIR] [--again]
    python benchmarks/gpu.py --rehearse     # the same at toy size on the CPU: writes to a temporary folder
    python benchmarks/gpu.py --list | --summary | --readme | --missing | --wheels DIR [--python 3.12]

The parts run in the order of worth, each a script of its own with a time limit. `benchmarks/results/gpu/<device>/` has
a file for each, written anew after every case, so that a kill loses at most one; a second call skips what is there.
With `--minutes` a case starts while half of its limit is left; what the end cuts short runs with the next call.
`docs/internals/gpu-day.md` says how to use a machine without a network.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from _gpu import (
    RESULTS,
    ROOT,
    TIRED,
    Stopped,
    environment,
    folder,
    gpu,
    is_complete,
    positive,
    read_result,
    run,
    stoppable,
    why_not_usable,
)
from _packages import conflicts, lacking, oldest_python, wanted
from _summary import PARTS as LINES
from _summary import Rehearsed, block, in_readme, table

WHEELS = ROOT / "gpu-wheels.txt"
README = ROOT.parent / "README.md"
MAX_WHEEL_BYTES = 60 * 2**20
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux1")
SAID = {True: "README.md is rewritten", False: "nothing changed"}
SPENT = "its minutes are spent, the rest at the end"
LEAST_SECONDS = 20.0
"""With less than this left no part is started."""


class Part(NamedTuple):
    """A script and the minutes that it may take before the parts after it, over all calls."""

    name: str
    script: str
    about: str
    minutes: float


PARTS = (
    Part("smoke", "gpu_smoke.py", "the default finetune: predicted and measured bytes, held-out loss", 4),
    Part("peak", "measured_peak.py", "compiled against measured peak of many programs", 5),
    Part("lora", "lora_peft.py", "LoRA on 1B and 8B shapes beside PEFT: tokens a second and peak", 12),
    Part("sft", "sft_peft.py", "packed rows on Qwen3's shapes, dense and a mixture, beside PEFT", 10),
    Part("qlora", "qlora_peft.py", "QLoRA, DoRA and rsLoRA on Qwen3's shapes beside PEFT with bitsandbytes", 12),
    Part("generate", "generate_time.py", "answers of Qwen3's shapes, dense and a mixture, beside transformers", 12),
    Part("attention", "attention_time.py", "one layer's attention from 4k to 128k tokens, cuDNN's beside blocks", 6),
    Part("ladder", "ladder_time.py", "one LoRA step on 1B, a technique that saves bytes more in each case", 4),
    Part("longest", "longest_sequence.py", "QLoRA on 8B shapes: the longest sequence in 80 GB", 12),
    Part("offload", "offload_time.py", "a step with offloaded activations beside the one on the device", 8),
    Part("copies", "copies_time.py", "which options and orders of XLA let copies run beside kernels", 3),
    Part("optimizer", "optimizer_time.py", "AdamW's update with state in 8 and 4 bits beside float32", 5),
    Part("layerwise", "layerwise_time.py", "AdamW on all 8 B parameters inside the backward pass", 8),
    Part("trainer", "trainer_time.py", "what Trainer.fit adds to the bare step, LoRA on 1B", 6),
    Part("pipeline", "pipeline_time.py", "a pipeline of one stage beside plain accumulation", 5),
    Part("tests", "gpu_tests.py", "the tests marked gpu", 8),
)


# --- measuring -----------------------------------------------------------------------------------------------------


def measure(parts: Sequence[Part], options: argparse.Namespace) -> int:
    """Run the parts one after another; nonzero if one failed or had no time."""
    found = {} if options.rehearse else gpu()
    if not options.rehearse and not found:
        print("no GPU here (nvidia-smi finds none); --rehearse runs toy sizes on the CPU")
        return 2
    if importlib.util.find_spec("jax") is None:
        print("JAX is not here, and nothing runs without it; beside it: gpu.py --missing")
        return 2
    text = WHEELS.read_text(encoding="utf-8")
    if absent := lacking(text):
        print(f"missing here, so some parts may fail: {' '.join(absent)}")
    print("".join(f"{line}\n" for line in conflicts(text)), end="")
    home = folder(found.get("name", "cpu"))
    temporary = Path(tempfile.mkdtemp(prefix="lowtide-rehearsal-")) if options.rehearse and not options.out else None
    out: Path = temporary or options.out or home
    written(out)
    if not options.rehearse and out != home:
        for name in {*LINES, *(part.name for part in parts)}:  # what is measured already counts here, too
            if (path := home / f"{name}.json").exists() and not (out / path.name).exists():
                shutil.copy(path, out)
    due = [part for part in parts if options.again or not is_complete(_before(part, out, options))]
    if due and not options.rehearse and (why := why_not_usable()):
        print(why)
        return 2
    print(f"{'rehearsal on the CPU' if options.rehearse else found['name']}, results in {out}", flush=True)
    deadline = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    states: dict[str, str] = {}
    try:
        for part in parts:
            states[part.name] = _one(part, out, deadline, options)
        for part in parts:  # what found no time within its part's minutes, in whatever is left
            if states[part.name] == SPENT or read_result(out / f"{part.name}.json").get("not_started"):
                states[part.name] = _one(part, out, deadline, options, last=True)
    except Stopped:
        print(f"stopped: what was measured is in {out}, and a second call goes on from there", flush=True)
        raise
    width = max(map(len, states))
    print("\n".join(f"  {name:{width}}  {state}" for name, state in states.items()))
    return int(any(not state.startswith(("complete", "there")) for state in states.values()))


def _before(part: Part, out: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What a part left; what a rehearsal took and failed at is no measurement's, nor the other way around."""
    before = read_result(out / f"{part.name}.json")
    return before if before.get("rehearsal") == options.rehearse else {}


def _one(part: Part, out: Path, deadline: float, options: argparse.Namespace, last: bool = False) -> str:
    """Run one part unless it is there, at last without regard to its own minutes; what became of it."""
    path, script = out / f"{part.name}.json", ROOT / part.script
    before = _before(part, out, options)
    again = options.again and not last
    if is_complete(before) and not again:
        print(f"{part.name}: there already", flush=True)
        return "there already"
    left = deadline - time.monotonic()
    if left < LEAST_SECONDS:
        print(f"{part.name}: not started, {max(left, 0):.0f} s left", flush=True)
        return "not started: no time left"
    minutes = part.minutes - (0 if again else before.get("spent_seconds", 0) / 60)
    if not last and minutes <= 0:
        print(f"{part.name}: {SPENT}", flush=True)
        return SPENT
    limit = left if last else min(60 * minutes, left)
    shown = "" if left == float("inf") else f", {left / 60:.1f} minutes left of all"
    print(f"=== {part.name}: {part.about} (at most {limit / 60:.1f} minutes{shown})", flush=True)
    words = [sys.executable, str(script), "--json", str(path), "--minutes", f"{min(limit / 60, 1e6):.4f}"]
    words += ["--rehearse" if options.rehearse else "--usable"] + ["--again"] * again
    late = before.get("not_started", []) if last else []
    words += [word for case in late for word in ("--case", case)]
    tired = [name for name, row in before.get("rows", {}).items() if row.get("failures", 0) >= TIRED and not last]
    words += [word for case in tired for word in ("--leave", case)]
    started = time.monotonic()
    # The part looks at the clock itself; it is killed only when it does not.
    status = run(words, environment(options.rehearse), limit + 15, patience=10)
    seconds = time.monotonic() - started
    after = read_result(path)
    state = "complete" if status == 0 and after.get("complete") else "not complete" if after else "failed"
    failed = [name for name, row in after.get("rows", {}).items() if not row.get("ok") and not row.get("not_here")]
    late = after.get("not_started", [])
    notes = [f"failed: {', '.join(failed)}"] * bool(failed) + [f"no time for: {', '.join(late)}"] * bool(late)
    notes += ["killed at its limit"] * (status is None) + [f"exit status {status}"] * (not after and status is not None)
    print(f"=== {part.name}: {state} after {seconds:.0f} s", flush=True)
    return "; ".join([f"{state} after {seconds:.0f} s", *notes])


# --- results -------------------------------------------------------------------------------------------------------


def results(home: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Results by device and part, from a folder of devices or of one device; other files are not looked at."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for path in sorted(path for name in LINES for path in (*home.glob(f"{name}.json"), *home.glob(f"*/{name}.json"))):
        content = read_result(path)
        if content.get("part") == path.stem:
            found.setdefault(content["device_kind"], {})[path.stem] = content
        else:
            print(f"{path} is no result of {path.stem}, and left out", file=sys.stderr)
    return found


def rewrite_readme(readme: Path, home: Path) -> bool:
    """Put the block that the results give in its place; whether anything changed."""
    before = readme.read_text(encoding="utf-8")
    after = in_readme(before, block(results(home)))
    readme.write_text(after, encoding="utf-8")
    return after != before


# --- wheels for a machine without a network ------------------------------------------------------------------------


def total_bytes(paths: Iterable[Path]) -> int:
    """Of the wheels together; an error over what may be carried."""
    total = sum(path.stat().st_size for path in paths)
    print(f"{total / 2**20:.1f} MiB of at most {MAX_WHEEL_BYTES / 2**20:.0f}")
    if total > MAX_WHEEL_BYTES:
        raise SystemExit("the wheels are too large")
    return total


def download(directory: Path, python: str) -> None:
    """Fetch the wheels of the list for Linux on x86_64."""
    major, minor = (int(number) for number in python.split("."))
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    words += ["--implementation", "cp", "--python-version", python]
    words += [word for name in PLATFORMS for word in ("--platform", f"{name}_x86_64")]
    words += wanted(WHEELS.read_text(encoding="utf-8"), (major, minor))
    with tempfile.TemporaryDirectory() as text:  # the folder may hold those of another Python
        if status := subprocess.run([*words, "--dest", text], check=False).returncode:
            raise SystemExit(f"pip could not download the wheels for Python {python}: it ended with {status}")
        found = sorted(Path(text).glob("*.whl"))
        total_bytes(found)
        for path in found:
            shutil.copy(path, directory)


# --- command line --------------------------------------------------------------------------------------------------


def python_version(text: str) -> str:
    """For instance ``3.12``."""
    if not re.fullmatch(r"\d+\.\d+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a version such as 3.12")
    if _numbers(text) < _numbers(oldest_python()):
        raise argparse.ArgumentTypeError(f"Lowtide needs Python {oldest_python()} or newer, not {text}")
    return text


def _numbers(version: str) -> list[int]:
    return [int(number) for number in version.split(".")]


def folder_path(text: str) -> Path:
    """Where a folder is, or can be."""
    path = Path(text)
    there = next(place for place in (path, *path.absolute().parents) if os.path.exists(place))
    if not os.path.isdir(there):
        raise argparse.ArgumentTypeError(f"{there} is no folder")
    return path


def written(path: Path | None) -> None:
    """Make a folder that is to be written to; a sentence where that cannot be."""
    if path is None:
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise SystemExit(f"{path} cannot be written to: {error.strerror}") from error


def parsed() -> argparse.Namespace:
    """The command line, in which one thing is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [part.name for part in PARTS]
    parser.add_argument("--part", action="append", choices=names, metavar="NAME", help="only this; repeatable")
    parser.add_argument("--minutes", type=positive, metavar="N", help="for everything together")
    parser.add_argument(
        "--out", type=folder_path, metavar="DIR", help="where results go, or where --summary finds them"
    )
    parser.add_argument("--again", action="store_true", help="measure anew what is there already")
    parser.add_argument("--python", type=python_version, metavar="X.Y", help="for --wheels (default: 3.12)")
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--rehearse", action="store_true", help="toy sizes on the CPU")
    one.add_argument("--list", action="store_true", help="print the parts")
    one.add_argument("--summary", action="store_true", help="print key figures beside their aims")
    one.add_argument("--readme", action="store_true", help="rewrite README's block from the results")
    one.add_argument("--missing", action="store_true", help="print the wheels that this Python lacks")
    one.add_argument("--wheels", type=folder_path, metavar="DIR", help="download the wheels")
    options = parser.parse_args()
    reads = options.summary or options.readme
    measures = not (options.list or reads or options.missing or options.wheels)
    for name, is_used in (
        ("part", measures),
        ("minutes", measures),
        ("again", measures),
        ("out", measures or reads),
        ("python", options.wheels),
    ):
        if getattr(options, name) and not is_used:
            parser.error(f"--{name} says nothing of what is asked for")
    if reads and options.out and not os.path.isdir(options.out):
        parser.error(f"{options.out} is not there")
    return options


def main() -> int:
    options = parsed()
    text = WHEELS.read_text(encoding="utf-8")
    if options.list:
        for part in PARTS:
            print(f"{part.name:10} {part.minutes:3.0f} min  {part.script:20} {part.about}")
    elif options.missing:
        print("".join(f"{line}\n" for line in lacking(text)), end="")
        told = conflicts(text)
        print("".join(f"{line}\n" for line in told), file=sys.stderr, end="")
        return int(bool(told))
    elif options.wheels:
        written(options.wheels)
        download(options.wheels, options.python or "3.12")
    elif options.summary or options.readme:
        try:
            home = options.out or RESULTS
            print(table(results(home)) if options.summary else SAID[rewrite_readme(README, home)])
        except Rehearsed as error:
            raise SystemExit(str(error)) from error
    else:
        with stoppable():
            return measure([part for part in PARTS if not options.part or part.name in options.part], options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
