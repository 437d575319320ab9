"""Fine-tuning on packed chats versus `transformers` and `peft`, on Qwen3's shapes, dense and as a mixture of experts.

    python benchmarks/sft_peft.py [--case 8b-4x2048-remat-lowtide] [--rehearse]

The weights are random bfloat16 of Qwen3-8B's shapes, and of Qwen3-30B-A3B's with 16 of its 48 layers. The latter are 21
GB, so that the files of all parts fit a small disk and both sides fit one GPU. `lowtide.models.save` writes them once.
`_sft.py` contains the rows, the adapters and both steps. transformers multiplies its experts by ``grouped_mm``, masks
documents in SDPA, and runs under `torch.autocast` with float32 adapters, as the Trainer does.

Seconds are wall-clock seconds of a step, with the device idle before and after. Peaks are those of each side's
allocator since the process began. The files (38 GB, in `LOWTIDE_SCRATCH` or the system's temporary folder) stay for the
next call.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _gpu import check_child, main, peak_bytes, timed
from _sft import facts, our_step, packed, their_step, write_model
from lora_peft import LOSSES, OURS, REPEATS, THEIRS, TOLERANCE, WARMUP, device_of, figures

PART = "sft"
ROWS, LENGTH = 4, 2048
MODELS = ("8b", "moe")
SIZES: dict[str, Any] = {"vocab_size": 151936, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "qk_norm": "head"}
SIZES |= {"num_heads": 32, "head_dim": 128, "max_position_embeddings": 40960}
TOY: dict[str, Any] = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
TOY |= {"num_heads": 4, "num_kv_heads": 2, "num_layers": 2}


def config_of(model: str, rehearsal: bool) -> Any:
    """Return the shapes of Qwen3-1.7B, Qwen3-8B or Qwen3-30B-A3B (config.json), the last with a third of its layers."""
    import lowtide as lt

    if model != "moe":
        sizes = {**SIZES, "hidden_size": 4096, "intermediate_size": 12288, "num_layers": 36, "num_kv_heads": 8}
        if model == "1.7b":
            smaller = {"hidden_size": 2048, "intermediate_size": 6144, "num_layers": 28, "num_heads": 16}
            sizes |= {**smaller, "tie_embeddings": True}
        return lt.models.DecoderConfig(**{**sizes, **(TOY if rehearsal else {})}, family="qwen3")
    count, width = (4, 32) if rehearsal else (128, 768)
    experts = lt.models.Experts(num_experts=count, num_experts_per_token=2 if rehearsal else 8, intermediate_size=width)
    sizes = {**SIZES, "hidden_size": 2048, "intermediate_size": 6144, "num_layers": 16, "num_kv_heads": 4}
    return lt.models.DecoderConfig(**{**sizes, **(TOY if rehearsal else {})}, family="qwen3_moe", experts=experts)


# --- files ---------------------------------------------------------------------------------------------------------


def place(model: str, rehearsal: bool) -> Path:
    """Return the folder for the files of a model."""
    home = os.environ.get("LOWTIDE_SCRATCH", tempfile.gettempdir())
    return Path(home, f"lowtide-sft-{os.getuid()}", f"{model}{'-toy' * rehearsal}")


def is_complete(folder: Path) -> bool:
    """Return whether this code wrote all files of a model."""
    mark = folder / "complete"
    return mark.is_file() and mark.read_text(encoding="utf-8") == _fingerprint()


def prepare(model: str, rehearsal: bool) -> dict[str, Any]:
    """Write weights and adapters, unless they exist."""
    folder, started = place(model, rehearsal), time.perf_counter()
    there = is_complete(folder)
    if not there:
        shutil.rmtree(folder, ignore_errors=True)  # files of a killed process
        write_model(config_of(model, rehearsal), folder, "bfloat16")
        (folder / "complete").write_text(_fingerprint(), encoding="utf-8")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return {"model": model, "file_bytes": size, "was_there": there, "write_seconds": time.perf_counter() - started}


def _fingerprint() -> str:
    sources = [Path(__file__), Path(__file__).with_name("_sft.py")]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


def files_of(model: str, rehearsal: bool) -> Path:
    """Return the files of a model. If they are missing, another process writes them, with the GPU to itself."""
    folder = place(model, rehearsal)
    if not is_complete(folder):
        words = [sys.executable, "-c", f"import sft_peft; sft_peft.prepare({model!r}, {rehearsal})"]
        check_child(f"writing the weights of {model}", words, cwd=Path(__file__).parent)
    return folder


def _begin(side: str, model: str, method: str, rehearsal: bool) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """Return the folder of the files, the rows, and a row with the settings."""
    folder = files_of(model, rehearsal)
    vocab_size = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    rows = packed(vocab_size, 2 if rehearsal else ROWS, 128 if rehearsal else LENGTH)
    return (
        folder,
        rows,
        {"side": side, "model": model, "method": method, **facts(rows), "remat": True, "base_dtype": "bfloat16"},
    )


# --- sides ---------------------------------------------------------------------------------------------------------


def run_lowtide(model: str, rehearsal: bool, *, method: str = "lora") -> dict[str, Any]:
    """Measure this library and return a row."""
    folder, rows, row = _begin("lowtide", model, method, rehearsal)
    from _decoders import compiled, memory_may_run_out

    with memory_may_run_out(row):
        compile_it = functools.partial(compiled, row)
        one, sizes = our_step(folder, rows, remat=True, dtype="bfloat16", compiled=compile_it, method=method)
        row |= sizes
        row["losses"] = [float(one()) for _ in range(LOSSES)]
        figures(row, timed(one, warmup=WARMUP, repeats=2 if rehearsal else REPEATS))
        (folder / f"losses-{method}.json").write_text(json.dumps(row["losses"]), encoding="utf-8")
    return {**row, "peak_bytes": peak_bytes()}


def run_peft(model: str, rehearsal: bool, *, method: str = "lora") -> dict[str, Any]:
    """Measure PyTorch and return a row."""
    folder, rows, row = _begin("peft", model, method, rehearsal)
    import torch

    device = device_of(torch, rehearsal)
    torch.set_float32_matmul_precision("high")
    options: dict[str, Any] = {"attn_implementation": "sdpa"}
    if model == "moe":
        options["experts_implementation"] = "grouped_mm"
    try:
        how = {"dtype": "bfloat16", "device": device, "options": options, "method": method}
        one, sizes = their_step(folder, rows, remat=True, **how)
        row |= sizes
        row["losses"] = [float(one()) for _ in range(LOSSES)]
        figures(row, _timed_on(torch, device, one, 2 if rehearsal else REPEATS))
    except torch.OutOfMemoryError as error:
        row |= {"out_of_memory": True, "error": str(error)[:1000]}
    else:
        row |= {"out_of_memory": False, **_against_ours(folder, row)}
    if rehearsal:
        if row["loss_difference"] is not None and not row["loss_difference"] <= TOLERANCE:
            raise AssertionError(f"losses differ: {row}")
        return {"device_kind": "cpu", **row, "peak_bytes": None}
    peaks = {"peak_bytes": torch.cuda.max_memory_allocated(), "peak_reserved_bytes": torch.cuda.max_memory_reserved()}
    return {"device_kind": torch.cuda.get_device_name(), **row, **peaks}


def _timed_on(torch: Any, device: str, one: Callable[[], Any], repeats: int) -> list[float]:
    """Return the seconds of steps, with the device idle before and after."""
    seconds: list[float] = []
    for index in range(WARMUP + repeats):
        started = time.perf_counter()
        one()
        if device == "cuda":
            torch.cuda.synchronize()
        if index >= WARMUP:
            seconds.append(time.perf_counter() - started)
    return seconds


def _against_ours(folder: Path, row: dict[str, Any]) -> dict[str, Any]:
    """Return the largest loss difference from this library, if its case has run on this machine."""
    path = folder / f"losses-{row['method']}.json"
    if not path.is_file():
        return {"loss_difference": None}
    ours = json.loads(path.read_text(encoding="utf-8"))
    return {"loss_difference": max(abs(a - b) for a, b in zip(ours, row["losses"], strict=True))}


def _cases() -> dict[str, Callable[[bool], dict[str, Any]]]:
    cases: dict[str, Callable[[bool], dict[str, Any]]] = {}
    for model in MODELS:
        cases[f"prepare-{model}"] = functools.partial(prepare, model)
        for side, run in (("lowtide", run_lowtide), ("peft", run_peft)):
            cases[f"{model}-{ROWS}x{LENGTH}-remat-{side}"] = functools.partial(run, model)
    return cases


CASES = _cases()
NEEDS = {name: ("torch", "transformers", "peft", "accelerate") for name in CASES if name.endswith("-peft")}

if __name__ == "__main__":
    limits = dict.fromkeys(CASES, 4.0)
    places = {} if "--rehearse" in sys.argv else {name: THEIRS if name in NEEDS else OURS for name in CASES}
    main(PART, CASES, __doc__, minutes=limits, needs=NEEDS, env=places)
