"""Host memory while a model is loaded and saved, and while its training state is: measured, beside what was predicted.

    python benchmarks/load_memory.py [--gigabytes 8] [--json FILE]

A directory of random bfloat16 weights in shards is written to a temporary folder (`--folder`), which is deleted at the
end. Each operation runs in a process of its own on the CPU, so that the placed arrays are host memory, too: `extra` is
the peak of anonymous memory (`RssAnon`, read every 5 ms) less that before the operation, less the arrays that it
returns. Pages of files, which the system caches, are not anonymous. A state is the model's weights, as one that trains
all of them has three times.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import ml_dtypes
import numpy as np
from _common import MIB, ROOT, header, write
from rich.console import Console
from rich.table import Table

import lowtide as lt
from lowtide.models import host_bytes
from lowtide.train import checkpoint_bytes

OPERATIONS = ("load", "save", "checkpoint", "restore")


def anonymous() -> int:
    """Bytes of this process that are of no file."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) * 1024


class Peak:
    """The most anonymous memory while a block runs, beside that before it."""

    def __enter__(self) -> Peak:
        gc.collect()
        self.before = self.most = anonymous()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        self._begun = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._begun
        self._done.set()
        self._thread.join()
        self.extra = self.most - self.before

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            self.most = max(self.most, anonymous())


def make(folder: Path, gigabytes: float) -> None:
    """Write a model directory of about this size, whose layers are one random layer again and again."""
    hidden, layers = 4096, max(1, round(gigabytes * 1e9 / (4 * 4096 * 4096 + 3 * 4096 * 11008) / 2))
    config = lt.models.LlamaConfig(
        vocab_size=32000,
        hidden_size=hidden,
        intermediate_size=11008,
        num_layers=layers,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        tie_embeddings=True,
    )
    shapes = jax.eval_shape(lambda: lt.models.init(config, key=jax.random.key(0), dtype="bfloat16"))
    random = np.random.default_rng(0)

    def leaf(shape: jax.ShapeDtypeStruct) -> np.ndarray:
        one = shape.shape[1:] if len(shape.shape) > 1 and shape.shape[0] == layers else shape.shape
        bits = random.integers(0, 2**14, one, np.uint16)  # finite numbers, which hardly compress
        return np.broadcast_to(bits.view(ml_dtypes.bfloat16), shape.shape)

    lt.models.save(jax.tree.map(leaf, shapes), folder, max_shard_bytes=2 * 10**9)


def measure(operation: str, folder: Path) -> dict[str, Any]:
    """Do one operation in this process."""
    model: Any = None
    if operation != "load":
        model = jax.block_until_ready(lt.models.load(folder / "model"))
    state = {} if model is None else {"model": model}
    with Peak() as peak:
        if operation == "load":
            model = jax.block_until_ready(lt.models.load(folder / "model"))
        elif operation == "save":
            lt.models.save(model, folder / "saved", max_shard_bytes=2 * 10**9)
        else:
            state = _checkpoint(operation, folder, state)
    arrays = jax.tree.leaves(model if operation == "load" else state)
    size = sum(leaf.nbytes for leaf in arrays)
    placed = size if operation == "load" else 0
    if operation in ("load", "save"):
        predicted = host_bytes(model)
        bound = predicted.loading if operation == "load" else predicted.saving
    else:
        predicted = checkpoint_bytes(state)
        bound = predicted.saving if operation == "checkpoint" else predicted.restoring
    return {
        "operation": operation,
        "bytes": size,
        "largest_leaf_bytes": max(leaf.nbytes for leaf in arrays),
        "extra_bytes": peak.extra - placed,
        "predicted_bytes": bound,
        "seconds": peak.seconds,
    }


def _checkpoint(operation: str, folder: Path, state: Any) -> Any:
    from lowtide.train._checkpoint import Checkpoints
    from lowtide.train._stored import largest_leaf

    checkpoints = Checkpoints(folder / "checkpoints", largest_bytes=largest_leaf(state))
    if operation == "checkpoint":
        checkpoints.save(1, state, {})
        checkpoints.wait()
        return state
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
    jax.tree.map(lambda leaf: leaf.delete(), state)  # as a trainer gives up its own state
    return checkpoints.restore(1, like)


def main() -> None:
    """Measure every operation, print a table, and write the raw figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=8.0, help="of weights")
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made")
    parser.add_argument("--json", type=Path, default=ROOT / "results" / "load_memory.json")
    parser.add_argument("--operation", help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.operation == "make":
        return make(parsed.folder / "model", parsed.gigabytes)
    if parsed.operation is not None:
        print(json.dumps(measure(parsed.operation, parsed.folder)))
        return None
    with tempfile.TemporaryDirectory(dir=parsed.folder) as name:
        rows = [row for row in (_child(one, Path(name), parsed.gigabytes) for one in ("make", *OPERATIONS)) if row]
    console, table = (
        Console(width=110),
        Table("", "size", "largest leaf", "extra, measured", "extra, at most", "seconds"),
    )
    for row in rows:
        sizes = (row[key] / MIB for key in ("bytes", "largest_leaf_bytes", "extra_bytes", "predicted_bytes"))
        table.add_row(row["operation"], *(f"{size:,.0f} MiB" for size in sizes), f"{row['seconds']:.1f}")
    console.print(table)
    write(parsed.json, {**header("python benchmarks/load_memory.py"), "gigabytes": parsed.gigabytes, "rows": rows})
    return None


def _child(operation: str, folder: Path, gigabytes: float) -> dict[str, Any] | None:
    command = [sys.executable, __file__, "--operation", operation, "--folder", str(folder)]
    done = subprocess.run([*command, "--gigabytes", str(gigabytes)], stdout=subprocess.PIPE, text=True, check=True)
    print(operation, done.stdout.strip(), file=sys.stderr, flush=True)
    return json.loads(done.stdout) if done.stdout.strip() else None


if __name__ == "__main__":
    main()
