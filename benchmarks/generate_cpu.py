"""Generation with a cache on a CPU versus `transformers`: tokens per second, on the same files and prompts.

    python benchmarks/generate_cpu.py [--out benchmarks/results/generate_cpu.json]

The model is a random Llama of 10 million parameters in float32, written once by `lowtide.models.save` and read by both
sides. Both decode greedily, so they must write the same tokens; this is checked first. Prompts have 16 to 64 tokens,
padded on the left, and 64 new tokens follow, for a batch of one and a batch of eight.

Both sides are warm, in one process on one core, and alternate: the ratio of a round is that of two adjacent runs. More
threads are avoided, because PyTorch's threads spin while they wait, and take ten times as long next to other work.
Rates use wall-clock seconds; the CPU seconds of the process are reported in addition. Ours is `generate_batch` as
`lowtide generate` calls it, including the rounding of lengths. Theirs is `generate` with its default cache.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
import transformers
from _common import ROOT, header, write

from lowtide import models

CONFIG = models.DecoderConfig(
    vocab_size=8192,
    hidden_size=256,
    intermediate_size=768,
    num_layers=8,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
    max_position_embeddings=512,
)
NEW, ROUNDS, BATCHES = 64, 5, (1, 8)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "generate_cpu.json")
    args = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # before either side starts its threads
    torch.set_num_threads(1)
    jax.config.update("jax_platforms", "cpu")
    with tempfile.TemporaryDirectory() as folder:
        made = models.init(CONFIG, key=jax.random.key(0))
        models.save(jax.tree.map(lambda x: 3 * x if x.ndim > 2 else x, made), folder)
        ours = models.load(folder)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = [measure(ours, theirs, size) for size in BATCHES]
    for row in rows:
        print(  # noqa: T201
            f"batch {row['batch_size']}: {row['lowtide_tokens_per_second']:,.0f} tokens/s, transformers "
            f"{row['transformers_tokens_per_second']:,.0f}; ratio {row['ratio']:.2f} ({min(row['ratios']):.2f} to "
            f"{max(row['ratios']):.2f}), of CPU seconds {row['cpu_ratio']:.2f}"
        )
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    told = {"figures": "measured", "cores": 1, "torch_threads": torch.get_num_threads(), **versions}
    write(args.out, {**header("python benchmarks/generate_cpu.py"), **told, "rows": rows})


def measure(ours: models.Decoder, theirs: Any, batch_size: int) -> dict[str, Any]:
    """Measure both sides in turn; the ratio is our tokens per second over theirs."""
    rng = np.random.default_rng(batch_size)
    lengths = np.linspace(16, 64, batch_size).astype(int) if batch_size > 1 else [32]
    prompts = [rng.integers(3, CONFIG.vocab_size, length).tolist() for length in lengths]
    width = max(lengths)
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    sampling = models.Sampling(temperature=0)

    def lowtide() -> list[list[int]]:
        found = models.generate_batch(
            ours, prompts, NEW, key=jax.random.key(0), sampling=sampling, batch_size=batch_size
        )
        return [[*each.tokens] for each in found]

    def transformers_() -> list[list[int]]:
        options: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0}
        with torch.inference_mode():
            return theirs.generate(input_ids=ids, attention_mask=mask, **options)[:, width:].tolist()

    assert lowtide() == transformers_(), "the two sides write other tokens"
    seconds: dict[str, list[tuple[float, float]]] = {"lowtide": [], "transformers": []}
    for turn in range(ROUNDS):
        sides: list[tuple[str, Callable[[], Any]]] = [("lowtide", lowtide), ("transformers", transformers_)]
        for name, run in sides if turn % 2 == 0 else sides[::-1]:
            clock, cpu = time.perf_counter(), time.process_time()
            run()
            seconds[name].append((time.perf_counter() - clock, time.process_time() - cpu))
    pairs = list(zip(seconds["lowtide"], seconds["transformers"], strict=True))
    rates = {
        f"{name}_tokens_per_second": batch_size * NEW / statistics.median(clock for clock, _ in each)
        for name, each in seconds.items()
    }
    ratios = [theirs_ / ours_ for (ours_, _), (theirs_, _) in pairs]
    return {
        "batch_size": batch_size,
        "new_tokens": NEW,
        "prompt_lengths": [int(length) for length in lengths],
        **rates,
        "ratio": statistics.median(ratios),
        "cpu_ratio": statistics.median(theirs_ / ours_ for (_, ours_), (_, theirs_) in pairs),
        "ratios": ratios,
        "seconds": {name: [clock for clock, _ in each] for name, each in seconds.items()},
        "cpu_seconds": {name: [cpu for _, cpu in each] for name, each in seconds.items()},
    }


if __name__ == "__main__":
    main()
