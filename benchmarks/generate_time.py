"""Generation with a cache versus `transformers`, on Qwen3's shapes, dense and as a mixture of experts.

    python benchmarks/generate_time.py [--case 8b-lowtide] [--rehearse]

The weights are those of `sft_peft.py` (38 GB of random bfloat16, written once), without adapters. Batches are 1, 8 and
32 prompts of 128 tokens, and 8 prompts of 1,024; prompts are random and of one length. Each answer has 128 new tokens,
greedy, and no token ends it. Ours is `generate_batch` with unstacked layers, as in `lowtide generate`. Theirs is
`generate` with its own cache and, in a separate case, with ``cache_implementation="static"``, for which it compiles the
model.

Wall-clock seconds of warm calls end when the tokens are on the host. `seconds` is the median of whole answers,
`prefill_seconds` the median for one new token; the difference is decoding. Peaks are those of each side's allocator
since the process began. `share_of_same_tokens` compares with this library's case on the same machine: in bfloat16 two
programs round differently, and after the first different token the answers diverge. A rehearsal runs in float32 and
requires equal tokens.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from _gpu import main, peak_bytes
from lora_peft import OURS, THEIRS, device_of
from sft_peft import MODELS, files_of

PART = "generate"
SHAPES = ((1, 128), (8, 128), (32, 128), (8, 1024))
"""Batch size and prompt length of each run."""
NEW = 128
REPEATS = 2
Answer = Callable[[list[list[int]], int], list[list[int]]]
"""Function that continues prompts by a number of tokens."""


def run_lowtide(model: str, rehearsal: bool) -> dict[str, Any]:
    """Measure this library and return a row."""
    folder = files_of(model, rehearsal)
    import jax
    from _decoders import memory_may_run_out

    from lowtide import models

    row: dict[str, Any] = {"side": "lowtide", "model": model, "runs": {}}
    decoder = models.unstack(models.load(folder, compute_dtype="float32" if rehearsal else "bfloat16"), donate=True)
    greedy = models.Sampling(temperature=0)

    def answer(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        options: dict[str, Any] = {"key": jax.random.key(0), "sampling": greedy, "batch_size": len(prompts)}
        return [[*each.tokens] for each in models.generate_batch(decoder, prompts, num_tokens, **options)]

    with memory_may_run_out(row):
        for size, length in shapes(rehearsal):
            found, row["runs"][f"{size}x{length}"] = measured(answer, folder, size, length, rehearsal)
            _tokens(folder, size, length).write_text(json.dumps(found), encoding="utf-8")
    return {**row, "peak_bytes": peak_bytes()}


def run_transformers(model: str, cache: str | None, rehearsal: bool) -> dict[str, Any]:
    """Measure PyTorch with a kind of cache, and return a row."""
    folder = files_of(model, rehearsal)
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    device = device_of(torch, rehearsal)
    torch.set_float32_matmul_precision("high")
    options: dict[str, Any] = {"attn_implementation": "sdpa", "dtype": torch.float32 if rehearsal else torch.bfloat16}
    if model == "moe":
        options["experts_implementation"] = "grouped_mm"
    row: dict[str, Any] = {"side": "transformers", "model": model, "cache": cache or "default", "runs": {}}
    row["out_of_memory"] = False
    given: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    if cache is not None:
        given["cache_implementation"] = cache

    def answer(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts, device=device)
        with torch.inference_mode():
            found = decoder.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, **given
            )
        return found[:, ids.shape[1] :].tolist()

    try:
        decoder: Any = AutoModelForCausalLM.from_pretrained(folder, **options).to(device).eval()
        for size, length in shapes(rehearsal):
            # Otherwise PyTorch recompiles the graphs of earlier shapes for dynamic sizes, which are slower.
            if cache is not None:
                torch._dynamo.reset()
                vars(decoder).pop("_cache", None)
            found, figures = measured(answer, folder, size, length, rehearsal)
            figures["compiled"] = "_compiled_call" in vars(decoder)
            row["runs"][f"{size}x{length}"] = {**figures, **_beside(folder, size, length, found)}
    except torch.OutOfMemoryError as error:
        row |= {"out_of_memory": True, "error": str(error)[:1000]}
    if rehearsal:
        shares = {name: run["share_of_same_tokens"] for name, run in row["runs"].items()}
        if any(share is not None and share < 1 for share in shares.values()):
            raise AssertionError(f"the two sides write other tokens: {shares}")
        return {"device_kind": "cpu", **row, "peak_bytes": None}
    return {"device_kind": torch.cuda.get_device_name(), **row, "peak_bytes": torch.cuda.max_memory_allocated()}


def shapes(rehearsal: bool) -> tuple[tuple[int, int], ...]:
    """Return the measured shapes, or fewer and smaller ones for a rehearsal."""
    return ((1, 8), (2, 16)) if rehearsal else SHAPES


def measured(
    answer: Answer, folder: Path, size: int, length: int, rehearsal: bool
) -> tuple[list[list[int]], dict[str, Any]]:
    """Return the tokens, and the seconds of whole answers and of their first tokens."""
    vocab_size = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    prompts = np.random.default_rng(size * length).integers(3, vocab_size, (size, length)).tolist()
    num_tokens = 12 if rehearsal else NEW
    found = answer(prompts, num_tokens)
    assert [len(row) for row in found] == [num_tokens] * size
    answer(prompts, 1)
    seconds: dict[int, list[float]] = {num_tokens: [], 1: []}
    for _ in range(1 if rehearsal else REPEATS):
        for number, times in seconds.items():
            started = time.perf_counter()
            answer(prompts, number)
            times.append(time.perf_counter() - started)
    whole, first = (statistics.median(seconds[number]) for number in (num_tokens, 1))
    return found, {
        "batch_size": size,
        "prompt_tokens": length,
        "new_tokens": num_tokens,
        "seconds": whole,
        "prefill_seconds": first,
        "tokens_per_second": size * num_tokens / whole,
        "decoded_tokens_per_second": size * (num_tokens - 1) / (whole - first) if whole > first else None,
        "all_seconds": {"whole": seconds[num_tokens], "prefill": seconds[1]},
    }


def _tokens(folder: Path, size: int, length: int) -> Path:
    return folder / f"tokens-{size}x{length}.json"


def _beside(folder: Path, size: int, length: int, found: list[list[int]]) -> dict[str, Any]:
    """Return the share of tokens equal to this library's, if its case has run on this machine."""
    path = _tokens(folder, size, length)
    if not path.is_file():
        return {"share_of_same_tokens": None}
    return {"share_of_same_tokens": float(np.mean(np.array(json.loads(path.read_text("utf-8"))) == np.array(found)))}


def _cases() -> dict[str, Callable[[bool], dict[str, Any]]]:
    cases: dict[str, Callable[[bool], dict[str, Any]]] = {}
    for model in MODELS:
        cases[f"{model}-lowtide"] = functools.partial(run_lowtide, model)
        cases[f"{model}-transformers"] = functools.partial(run_transformers, model, None)
    cases["8b-transformers_static"] = functools.partial(run_transformers, "8b", "static")
    return cases


CASES = _cases()
NEEDS = {name: ("torch", "transformers") for name in CASES if "transformers" in name}

if __name__ == "__main__":
    limits = dict.fromkeys(CASES, 5.0)
    places = {} if "--rehearse" in sys.argv else {name: THEIRS if name in NEEDS else OURS for name in CASES}
    main(PART, CASES, __doc__, minutes=limits, needs=NEEDS, env=places)
