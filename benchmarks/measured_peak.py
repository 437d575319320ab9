"""Predicted against measured peak of steps that really run on the accelerator at hand.

    python benchmarks/measured_peak.py [--program NAME] [--json FILE]

Each step runs twice in processes of their own, with and without JAX's preallocation, on zeros of the arguments'
shapes. `predicted` is the compiled step's device bytes; `measured` is the most that JAX's allocator held while the
step ran (`peak_bytes_in_use`), the arguments included. A backend without that count (a CPU) leaves "not measured".
The last line is the median of the absolute errors, and the worst step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from _common import ROOT, header, write
from _programs import BF16, F32, PROGRAMS, shape
from rich.console import Console
from rich.table import Table

import lowtide as lt
from lowtide.core import format_bytes


def _attention(length: int) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        def loss(q: Any, k: Any, v: Any) -> Any:
            return jnp.sum(jax.nn.dot_product_attention(q, k, v, is_causal=True).astype(F32))

        heads = [shape(1, length, 16, 64, dtype=BF16) for _ in range(3)]
        return {"fn": jax.grad(loss, argnums=(0, 1, 2)), "args": tuple(heads), "roles": {"heads": (0, 1, 2)}}

    return make


STEPS: dict[str, Callable[..., dict[str, Any]]] = {
    **{name: make for name, make in PROGRAMS.items() if name != "fsdp"},
    "attention_2048": _attention(2048),
    "attention_8192": _attention(8192),
}


def measure(name: str) -> dict[str, Any]:
    """Predict one step, run it, and read the allocator."""
    target = lt.target("here")
    make = STEPS[name]
    job = make(target) if name.startswith("offload") else make()
    fn, args, roles = job["fn"], job["args"], job["roles"]
    donate = job.get("donate_argnums", ())
    predicted = lt.memory.analyze(fn, *args, target=target, roles=roles, donate_argnums=donate)
    device = jax.local_devices()[0]
    if (device.memory_stats() or {}).get("peak_bytes_in_use") is None:
        return {"program": name, "predicted_bytes": predicted.device_bytes, "measured_bytes": None}
    # Functions inside a module are no arguments of a compiled program.
    constants = [jax.tree.map(lambda leaf: None if _is_shape(leaf) else leaf, arg) for arg in args]
    arrays = jax.block_until_ready([jax.tree.map(_zeros, arg) for arg in args])

    def step(*arrays: Any) -> Any:
        return fn(*(lt.combine(array, held) for array, held in zip(arrays, constants, strict=True)))

    jax.block_until_ready(jax.jit(step, donate_argnums=donate)(*arrays))
    return {
        "program": name,
        "predicted_bytes": predicted.device_bytes,
        "measured_bytes": device.memory_stats()["peak_bytes_in_use"],
        "by_role": predicted.peak_by_role,
    }


def _is_shape(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _zeros(leaf: Any) -> Any:
    """Zeros where a program takes them: on the device, or in the host memory that the shape names."""
    if not _is_shape(leaf):
        return None
    zeros = jnp.zeros(leaf.shape, leaf.dtype)
    kind = getattr(leaf.sharding, "memory_kind", None)
    if kind is None or "host" not in kind:
        return zeros
    return jax.device_put(zeros, jax.sharding.SingleDeviceSharding(jax.local_devices()[0], memory_kind=kind))


def _in_child(name: str, preallocate: bool) -> dict[str, Any]:
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "true" if preallocate else "false"}
    command = [sys.executable, __file__, "--child", name]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if child.returncode:
        error = child.stderr.strip().splitlines()[-1:] or ["no message"]
        return {"program": name, "preallocate": preallocate, "error": error[0]}
    return {**json.loads(child.stdout.splitlines()[-1]), "preallocate": preallocate}


def _error(row: dict[str, Any]) -> float | None:
    if not row.get("measured_bytes"):
        return None
    return (row["predicted_bytes"] - row["measured_bytes"]) / row["measured_bytes"]


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title=f"Peak bytes of one step on {jax.local_devices()[0].device_kind}")
    for column in ("program", "preallocate", "predicted (compiled)", "measured", "error"):
        table.add_column(column, justify="left" if column == "program" else "right")
    for row in rows:
        error, measured = _error(row), row.get("measured_bytes")
        cells = (format_bytes(row["predicted_bytes"]), format_bytes(measured) if measured else "not measured")
        cells = cells if "error" not in row else ("failed", row["error"][:60])
        table.add_row(row["program"], str(row["preallocate"]), *cells, "" if error is None else f"{error:+.2%}")
    console = Console(width=140)
    console.print(table)
    errors = {
        f"{row['program']} (preallocate {row['preallocate']})": abs(e) for row in rows if (e := _error(row)) is not None
    }
    if errors:
        worst = max(errors, key=lambda name: errors[name])
        console.print(
            f"median absolute error {statistics.median(errors.values()):.2%}, worst {worst} {errors[worst]:.2%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", action="append", choices=list(STEPS), help="only this one; repeatable")
    parser.add_argument("--json", type=Path, default=ROOT / "results" / "measured_peak.json")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.child)))
        return
    rows = [_in_child(name, preallocate) for name in options.program or list(STEPS) for preallocate in (True, False)]
    show(rows)
    if any(row.get("measured_bytes") for row in rows):
        device = jax.local_devices()[0].device_kind
        write(options.json, {**header("python benchmarks/measured_peak.py"), "device": device, "rows": rows})


if __name__ == "__main__":
    main()
