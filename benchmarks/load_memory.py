"""Host memory while a model or its training state is loaded or saved: measured versus predicted.

    python benchmarks/load_memory.py [--gigabytes 8] [--json FILE]

A directory of random bfloat16 weights in shards is written to a temporary folder (`--folder`), which is deleted at the
end. Each operation runs in a separate process on the CPU, where placed arrays are host memory, too. `extra` is the peak
of anonymous memory (`RssAnon`, read every 5 ms), minus the value before the operation, minus the arrays that the
operation returns. File pages, which the system caches, are not anonymous.

The state of a checkpoint is the model's weights. The state of a run that trains all weights has two or three times as
many bytes, in leaves of the same sizes. `load nf4` reads a directory of the same sizes as bitsandbytes writes it.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
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
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from _common import MIB, ROOT, header, write
from rich.console import Console
from rich.table import Table
from safetensors.numpy import save_file

import lowtide as lt
from lowtide.core import map_with_paths, tree_bytes
from lowtide.models import host_bytes
from lowtide.quant import dynamic_map, format_named
from lowtide.train import Checkpoints, checkpoint_bytes

OPERATIONS = ("load", "save", "checkpoint", "restore", "load nf4")


def anonymous() -> int:
    """Return the bytes of this process that do not belong to a file."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) * 1024


class Peak:
    """The peak of anonymous memory while a block runs, minus the value before it."""

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


def shapes_of(gigabytes: float) -> Any:
    """Return the shapes of a model of about this size."""
    layers = max(1, round(gigabytes * 1e9 / (4 * 4096 * 4096 + 3 * 4096 * 11008) / 2))
    config = lt.models.DecoderConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_layers=layers,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        tie_embeddings=True,
    )
    return jax.eval_shape(lambda: lt.models.init(config, key=jax.random.key(0), dtype="bfloat16"))


def random_model(shapes: Any) -> Any:
    """Create weights on the host that hardly compress; the layers of a stack share one random layer."""
    random = np.random.default_rng(0)

    def leaf(path: str, shape: Any) -> np.ndarray:
        # All these values are finite.
        bits = random.integers(0, 2**14, shape.shape[path.startswith("layers") :], np.uint16)
        return np.broadcast_to(bits.view(ml_dtypes.bfloat16), shape.shape)

    return map_with_paths(leaf, shapes)


def write_quantized(folder: Path) -> None:
    """Write projections as random nf4 codes with double quantisation, and the rest as zeros."""
    random, tensors = np.random.default_rng(0), dict[str, np.ndarray]()
    dense = lt.models.stored_weights(folder / "model")
    for name, (_, shape, _) in dense.items():
        if not name.endswith("_proj.weight"):
            tensors[name] = np.zeros(shape, np.float16)
            continue
        number = math.prod(shape) // 64
        state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": shape, "nested_blocksize": 256}
        text = json.dumps({**state, "nested_dtype": "float32", "nested_offset": 0.05}).encode()
        tensors |= {
            name: random.integers(0, 256, (32 * number, 1), np.uint8),
            f"{name}.absmax": random.integers(0, 256, number, np.uint8),
            f"{name}.quant_map": np.asarray(format_named("nf4").table, np.float32),
            f"{name}.nested_absmax": np.full(-(-number // 256), 0.01, np.float32),
            f"{name}.nested_quant_map": dynamic_map(),
            f"{name}.quant_state.bitsandbytes__nf4": np.frombuffer(text, np.uint8),
        }
    (folder / "nf4").mkdir()
    save_file(tensors, folder / "nf4" / "model.safetensors")
    raw = json.loads((folder / "model" / "config.json").read_text())
    scheme = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "nf4" / "config.json").write_text(json.dumps({**raw, "quantization_config": scheme}))


def measure(operation: str, folder: Path, gigabytes: float) -> dict[str, Any]:
    """Run one operation in this process."""
    model: Any = shapes_of(gigabytes)
    if operation in ("save", "checkpoint"):
        model = jax.tree.map(lambda leaf: jax.block_until_ready(jnp.array(leaf)), random_model(model))
    with Peak() as peak:
        if operation.startswith("load"):
            model = lt.models.load(folder / ("nf4" if operation == "load nf4" else "model"))
        elif operation == "save":
            lt.models.save(model, folder / "saved", max_shard_bytes=2 * 10**9)
        else:
            model = _checkpoint(operation, folder, model)
        jax.block_until_ready(model)
    arrays = jax.tree.leaves(model)
    size = tree_bytes(model)
    files, copies = host_bytes(model), checkpoint_bytes({"model": model})
    predicted = dict(
        zip(OPERATIONS, (files.loading, files.saving, copies.saving, copies.restoring, files.loading), strict=True)
    )
    return {
        "operation": operation,
        "bytes": size,
        "largest_leaf_bytes": max(leaf.nbytes for leaf in arrays),
        "extra_bytes": peak.extra - (0 if operation in ("save", "checkpoint") else size),
        "predicted_bytes": predicted[operation],
        "seconds": peak.seconds,
    }


def _checkpoint(operation: str, folder: Path, model: Any) -> Any:
    checkpoints = Checkpoints(folder / "checkpoints", like={"model": model})
    if operation == "checkpoint":
        checkpoints.save(1, {"model": model}, {})
        checkpoints.wait()
        return model
    place = jnp.zeros(()).sharding
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), model)
    return checkpoints.restore(1, {"model": like})["model"]


def main() -> None:
    """Measure every operation, print a table, and write the raw figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=8.0, help="of weights")
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made")
    parser.add_argument("--json", type=Path, default=ROOT / "results" / "load_memory.json")
    parser.add_argument("--operation", help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.operation == "make":
        weights = random_model(shapes_of(parsed.gigabytes))
        lt.models.save(weights, parsed.folder / "model", max_shard_bytes=2 * 10**9)
        return write_quantized(parsed.folder)
    if parsed.operation is not None:
        print(json.dumps(measure(parsed.operation, parsed.folder, parsed.gigabytes)))
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
