"""Optimizer state in few bits: bytes of the state, of an update's temporaries and traffic, and its time on a CPU.

    python benchmarks/optimizer_state.py [--target v5e:1x1] [--target h100] [--json FILE]

AdamW on one leaf of 8 x 2048 x 2048 float32 parameters with float32 gradients, the update and `optax.apply_updates`,
all of them donated: with float32 state, and with `lowtide.optim.low_precision` in each of its formats.
Bytes are a parameter's, compiled and never run; the traffic is what the compiler's program reads and writes, at least.
Seconds are of 2 x 1024 x 1024 parameters on this machine's CPU, the median of `REPEATS` updates; they say what the
arithmetic of a format costs there, and nothing of other chips.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax
from _common import ROOT, header, write
from rich.console import Console
from rich.table import Table

from lowtide.core import tree_bytes
from lowtide.memory import compile
from lowtide.optim import low_precision

Tree = Any
SHAPE, SMALL = (8, 2048, 2048), (2, 1024, 1024)
FORMATS = ("float32", "8bit", "companded", "fp8", "bfloat16")
REPEATS = 7


def optimizer(form: str) -> optax.GradientTransformation:
    """AdamW with its state in a format."""
    adamw = optax.adamw(1e-4)
    return adamw if form == "float32" else low_precision(adamw, form)


def step_of(tx: optax.GradientTransformation) -> Any:
    """The update, applied."""

    def step(grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def compiled(form: str, target: str) -> dict[str, Any]:
    """Bytes a parameter on a target."""
    params = {"w": jax.ShapeDtypeStruct(SHAPE, jnp.float32)}
    tx, size = optimizer(form), float(params["w"].size)
    state = jax.eval_shape(tx.init, params)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers")  # gradients: their place is for the updates
        program = compile(step_of(tx), params, state, params, target=target, donate_argnums=(0, 1, 2))
    return {
        "format": form,
        "state_bytes": tree_bytes(state) / size,
        "temp_bytes": program.report().device.temp_bytes / size,
        "bytes_accessed": program.bytes_accessed / size,
    }


def timed(form: str) -> dict[str, Any]:
    """Seconds of updates on this CPU."""
    params = {"w": jax.random.normal(jax.random.key(0), SMALL)}
    tx = optimizer(form)
    step, state, grads = jax.jit(step_of(tx), donate_argnums=(1, 2)), tx.init(params), {"w": params["w"] / 100}
    seconds = []
    for _ in range(REPEATS + 1):
        begin = time.perf_counter()
        params, state = jax.block_until_ready(step(grads, state, params))
        seconds.append(time.perf_counter() - begin)
    return {"format": form, "seconds": statistics.median(seconds[1:]), "all_seconds": seconds[1:]}


def table(title: str, rows: list[dict[str, Any]], columns: dict[str, str]) -> Table:
    """Formats, one a line."""
    made = Table(title=title)
    made.add_column("state")
    for label in columns.values():
        made.add_column(label, justify="right")
    for row in rows:
        made.add_row(row["format"], *(f"{row[name]:.3f}" for name in columns))
    return made


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--target", action="append", help="of lowtide.memory.target; by default v5e:1x1, h100 and this CPU"
    )
    parser.add_argument("--json", type=Path, help="one file for all, in place of benchmarks/results/")
    options = parser.parse_args()
    console, results = Console(width=120), []
    labels = {"state_bytes": "state", "temp_bytes": "temporaries", "bytes_accessed": "moved"}
    for target in options.target or ["v5e:1x1", "h100"]:
        rows = [compiled(form, target) for form in FORMATS]
        console.print(table(f"AdamW on {target}: bytes a parameter, compiled", rows, labels))
        about = header(f"python benchmarks/optimizer_state.py --target {target}")
        results.append({**about, "label": "compiled", "target": target, "rows": rows})
    if options.target is None:
        rows = [timed(form) for form in FORMATS]
        console.print(table("AdamW on this CPU: seconds an update", rows, {"seconds": "seconds"}))
        about = header("python benchmarks/optimizer_state.py")
        results.append({**about, "label": "measured", "target": "cpu", "cores": os.cpu_count(), "rows": rows})
    if options.json is not None:
        write(options.json, {"results": results})
        return
    for result in results:
        write(ROOT / "results" / f"optimizer_state-{result['target'].replace(':', '-')}.json", result)


if __name__ == "__main__":
    main()
