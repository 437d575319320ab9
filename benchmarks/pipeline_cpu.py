"""CPU seconds of a pipelined gradient versus plain accumulation, measured in pairs on CPU devices.

    python benchmarks/pipeline_cpu.py [--repeats 7] [--json FILE]

The decoder has 8 layers (256 wide, MLP of 768), in four stages and in eight stages of one layer. It runs 8 and 32
microbatches of one row of 128 tokens, with blocks kept and recomputed. Each repetition runs `lowtide.accumulate` on one
device, then each schedule on as many devices as it has ranks. CPU seconds are those of the process over all threads, so
waiting costs nothing. The excess over accumulation comes from ticks, buffers and repeated computation. The figure is
the median ratio.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_cpu_enable_concurrency_optimized_scheduler=false"
)

import jax
import jax.numpy as jnp
import numpy as np
from _common import ROOT, header, write
from rich.console import Console
from rich.table import Table

import lowtide as lt

CONFIG = lt.models.DecoderConfig(
    vocab_size=512, hidden_size=256, intermediate_size=768, num_layers=8, num_heads=8, num_kv_heads=4, head_dim=32
)
LENGTH = 128
SCHEDULES = ("1f1b", "zb-h1", "auto")


def programs(num_ranks: int, num_microbatches: int, *, remat: bool) -> dict[str, Callable[[], Any]]:
    """Return compiled gradients of the same batch."""
    model = lt.models.init(CONFIG, key=jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (num_microbatches, LENGTH), 0, CONFIG.vocab_size)
    args = (model.outer, model.layers, {"tokens": tokens, "labels": tokens})

    def loss(params: Any, batch: Any) -> Any:
        return model.stack.apply(*params, batch, remat=remat)[0]

    plain = lt.accumulate(jax.value_and_grad(loss), num_microbatches)
    compiled = jax.jit(lambda outer, layers, batch: plain((outer, layers), batch)).lower(*args).compile()
    found: dict[str, Callable[[], Any]] = {"accumulate": lambda: compiled(*args)}
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:num_ranks]), ("stage",))
    everywhere = jax.NamedSharding(mesh, jax.P())
    for name in SCHEDULES:
        made = lt.pipeline.schedule(name, num_stages=num_ranks, num_microbatches=num_microbatches)
        pipeline = lt.pipeline.value_and_grad(model.stack, made, mesh=mesh, remat=remat, arranged=True)
        outer, batch = jax.device_put((args[0], args[2]), everywhere)
        given = (outer, pipeline.arrange(model.layers), batch)
        program = jax.jit(pipeline).lower(*given).compile()
        assert jnp.allclose(program(*given)[0][0], compiled(*args)[0], rtol=1e-5), name
        found[name] = lambda program=program, given=given: program(*given)
    return found


def measure(repeats: int, console: Console) -> list[dict[str, Any]]:
    """Measure all programs, and print which one is running."""
    rows: list[dict[str, Any]] = []
    for num_ranks in (4, 8):
        for num_microbatches in (8, 32):
            for remat in (False, True):
                console.print(f"{num_ranks} stages, {num_microbatches} microbatches, remat={remat}")
                taken: dict[str, list[float]] = {}
                runs = programs(num_ranks, num_microbatches, remat=remat)
                for _ in range(repeats):
                    for name, run in runs.items():
                        begin = time.process_time()
                        jax.block_until_ready(run())
                        taken.setdefault(name, []).append(time.process_time() - begin)
                for name, seconds in taken.items():
                    ratios = [one / plain for one, plain in zip(seconds, taken["accumulate"], strict=True)]
                    rows.append(
                        {
                            "program": name,
                            "num_ranks": num_ranks,
                            "num_microbatches": num_microbatches,
                            "remat": remat,
                            "cpu_seconds": seconds,
                            "over_accumulate": statistics.median(ratios),
                        }
                    )
    return rows


def main() -> None:
    """Measure, print and write the raw results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="how often each program runs")
    parser.add_argument("--json", type=Path, default=ROOT / "results" / "pipeline_cpu.json", help="the file")
    options = parser.parse_args()
    load = os.getloadavg()
    rows = measure(options.repeats, Console(stderr=True))
    table = Table(title="CPU seconds over those of plain accumulation, median of pairs")
    for name in ("stages", "microbatches", "blocks", *SCHEDULES):
        table.add_column(name, justify="right")
    found = {(r["num_ranks"], r["num_microbatches"], r["remat"], r["program"]): r["over_accumulate"] for r in rows}
    for case in dict.fromkeys(key[:3] for key in found):
        kept = "recomputed" if case[2] else "kept"
        table.add_row(str(case[0]), str(case[1]), kept, *(f"{found[*case, name]:.2f}" for name in SCHEDULES))
    Console(width=120).print(table)
    machine = {"label": "measured", "cores": os.cpu_count(), "load_before": load}
    write(options.json, {**header("python benchmarks/pipeline_cpu.py"), **machine, "rows": rows})


if __name__ == "__main__":
    main()
