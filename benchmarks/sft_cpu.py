"""Tokens per CPU second of a fine-tuning step on packed chats, versus `transformers` with `peft`, in pairs.

    python benchmarks/sft_cpu.py [--model dense] [--model mixture] [--model qlora] [--repeats 7]

There are three models: a dense decoder like Qwen3's, a mixture of experts like Qwen3-MoE's, and the dense one with its
projections in nf4, which the other side quantises with bitsandbytes. They are small, in float32, written once and read
by both sides with the same adapters and the same packed rows (`_sft.py`). Each side is a process that waits for its
turn: steps alternate, and a step's CPU seconds are those of its process over all threads. transformers runs its SDPA
attention, and each of its ways to compute experts in a separate process; the ratio refers to the fastest. Losses of all
steps are compared before the figures are computed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from _sft import facts, our_step, packed, their_step, write_model

ROWS, LENGTH, VOCABULARY = 2, 512, 8192
WARMUP = 2
TOLERANCE = 1e-4
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 64,
    "rope_theta": 1e6,
    "qk_norm": "head",
}
EXPERTS = {"num_experts": 16, "num_experts_per_token": 4, "intermediate_size": 384}
MODELS = ("dense", "mixture", "qlora")
PEERS = {"dense": ("peft",), "mixture": ("peft-grouped_mm", "peft-eager"), "qlora": ("peft",)}
QUIET = {
    "JAX_PLATFORMS": "cpu",
    "OMP_WAIT_POLICY": "PASSIVE",  # PyTorch threads that spin while they wait would be counted as computing
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}


def config_of(model: str) -> Any:
    """Return the configuration of this library's decoder."""
    import lowtide as lt

    if model != "mixture":
        return lt.models.DecoderConfig(**SIZES, intermediate_size=1536, num_layers=4, family="qwen3")
    experts = lt.models.Experts(**EXPERTS)
    return lt.models.DecoderConfig(**SIZES, intermediate_size=1536, num_layers=3, family="qwen3_moe", experts=experts)


# --- one side ------------------------------------------------------------------------------------------------------


def worker(side: str, folder: Path, remat: bool) -> None:
    """Take a step for each input line, and write its figures as a line of JSON; the first line describes the model."""
    rows, method = packed(VOCABULARY, ROWS, LENGTH), "qlora" if folder.name == "qlora" else "lora"
    if side == "lowtide":
        import jax

        def compiled(fn: Any, *args: Any, **options: Any) -> Any:
            return jax.jit(fn, **options).lower(*args).compile()

        step, sizes = our_step(folder, rows, remat=remat, dtype="float32", compiled=compiled, method=method)
    else:
        options: dict[str, Any] = {"attn_implementation": "sdpa"}
        if "-" in side:
            options["experts_implementation"] = side.partition("-")[2]
        step, sizes = their_step(
            folder, rows, remat=remat, dtype="float32", device="cpu", options=options, method=method
        )
    _say(sizes)
    for _ in sys.stdin:
        wall, begin = time.perf_counter(), time.process_time()
        loss = float(step())
        used = {"cpu_seconds": time.process_time() - begin, "seconds": time.perf_counter() - wall}
        # `ru_maxrss` is in KiB, and covers the whole process, including the library and its compiler.
        _say({"loss": loss, **used, "peak_rss_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss})


def _say(content: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


class Side:
    """A worker process and its answers; mutable."""

    def __init__(self, side: str, folder: Path, remat: bool) -> None:
        words = [sys.executable, __file__, "--worker", side, "--folder", str(folder), *["--remat"] * remat]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, env={**os.environ, **QUIET})
        self.steps: list[dict[str, float]] = []
        self.sizes = self._answer()

    def step(self) -> None:
        """Take one step."""
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.steps.append(self._answer())

    def close(self) -> None:
        """End the worker."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()

    def of(self, key: str) -> list[float]:
        """Return the figures of the steps after the warm-up."""
        return [step[key] for step in self.steps[WARMUP:]]

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"a side ended with {self.process.wait()}")


# --- pairs ---------------------------------------------------------------------------------------------------------


def measure(model: str, remat: bool, folder: Path, repeats: int) -> dict[str, Any]:
    """Measure one case in pairs."""
    names = ("lowtide", *PEERS[model])
    sides = {name: Side(name, folder, remat) for name in names}
    try:
        for _ in range(WARMUP + repeats):
            for side in sides.values():
                side.step()
    finally:
        for side in sides.values():
            side.close()
    ours = sides["lowtide"]
    row: dict[str, Any] = {"model": model, "remat": remat, **facts(packed(VOCABULARY, ROWS, LENGTH)), "sides": {}}
    for name, side in sides.items():
        apart = max(abs(a["loss"] - b["loss"]) for a, b in zip(ours.steps, side.steps, strict=True))
        if not apart <= TOLERANCE or side.sizes["num_trained"] != ours.sizes["num_trained"]:
            raise AssertionError(f"{name} does not train what lowtide does: {apart} nats apart, {side.sizes}")
        seconds = side.of("cpu_seconds")
        row["sides"][name] = {
            **side.sizes,
            "losses": [step["loss"] for step in side.steps],
            "loss_difference": apart,
            "cpu_seconds": seconds,
            "seconds": side.of("seconds"),
            "peak_rss_bytes": side.of("peak_rss_bytes")[-1],
            "tokens_per_cpu_second": row["tokens"] / statistics.median(seconds),
            "speed_of_ours": statistics.median(b / a for a, b in zip(ours.of("cpu_seconds"), seconds, strict=True)),
        }
    row["over_fastest"] = min(row["sides"][name]["speed_of_ours"] for name in PEERS[model])
    return row


def main() -> None:
    """Measure, print and write the raw results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=MODELS, help="default: all")
    parser.add_argument("--repeats", type=int, default=7, help="pairs")
    parser.add_argument("--write", choices=MODELS, help=argparse.SUPPRESS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--remat", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        write_model(config_of(options.write), options.folder, "float32")
    elif options.worker:
        worker(options.worker, options.folder, options.remat)
    else:
        compare(options.model or MODELS, options.repeats)


def compare(models: Any, repeats: int) -> None:
    """Compare all cases of the models. This process never starts either framework."""
    for model in models:
        load, rows = os.getloadavg(), list[dict[str, Any]]()
        with tempfile.TemporaryDirectory() as home:
            folder = Path(home, model)
            words = [sys.executable, __file__, "--write", model, "--folder", str(folder)]
            subprocess.run(words, check=True, env={**os.environ, **QUIET})
            for remat in (True, False):
                rows.append(measure(model, remat, folder, repeats))
                show(rows[-1])
                save(model, load, rows)


def show(row: dict[str, Any]) -> None:
    """Print a line for each side."""
    for name, side in row["sides"].items():
        print(
            f"{row['model']:8} remat={row['remat']!s:5} {name:16} {side['tokens_per_cpu_second']:7.0f} tokens/CPU s, "
            f"ours {side['speed_of_ours']:.2f}, {side['peak_rss_bytes'] / 2**20:5.0f} MiB resident at most, "
            f"losses apart {side['loss_difference']:.1e}",
            flush=True,
        )


def save(model: str, load: Any, rows: list[dict[str, Any]]) -> None:
    """Write the results of a model so far."""
    from _common import ROOT, header, write

    content = header(f"python benchmarks/sft_cpu.py --model {model}")
    content["versions"] |= {name: metadata.version(name) for name in ("torch", "transformers", "peft", "bitsandbytes")}
    machine = {"label": "measured", "cores": os.cpu_count(), "cpu": _cpu(), "load_before": load, "warmup": WARMUP}
    sizes = {"dtype": "float32", "vocabulary": VOCABULARY}
    write(ROOT / "results" / f"sft_cpu-{model}.json", {**content, **machine, **sizes, "rows": rows})


def _cpu() -> str | None:
    """Return the name of the processor."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


if __name__ == "__main__":
    main()
