"""Milliseconds, TFLOP/s and bytes of one layer's attention, by cuDNN's kernel and by blocks of XLA's operations.

    python benchmarks/attention_time.py [--case 32k-blocks] [--rehearse]

`lowtide.ops.attention` in bfloat16 on Llama 3.1 8B's shapes (32 query heads on 8 of keys and values, of 128), causal:
32,768 tokens in rows of 4,096 to 32,768, one row of 65,536 and of 131,072; one of 32,768 with documents of 2,048, and
with a window of 4,096. Forward alone, then forward with the gradients of queries, keys and values.

TFLOP/s count what a query sees, and nothing that a kernel computes beside it: 4 per pair, head and its width, 2.5 times
that more for the gradients. Peaks are the allocator's since the process began; queries, keys and values are drawn a
part at a time, so that drawing them leaves none. What runs out of memory says so. cuDNN leaves samples of its results
for the case of blocks, whose distance from them is `relative_error`: that of the worst of result and gradients.

A rehearsal has no cuDNN: XLA's operations on whole rows of scores stand in for it.
"""

from __future__ import annotations

import functools
import math
import statistics
import typing
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from _decoders import LLAMA_8B, SAMPLES, compiled, memory_may_run_out, scratch
from _gpu import main, peak_bytes, timed

import lowtide as lt
from lowtide.ops import attention

PART = "attention"
IMPLEMENTATIONS = ("cudnn", "blocks")
STAND_IN = "xla"
"""Of a rehearsal, for what the library does not have there."""
DTYPE = jnp.bfloat16
WARMUP, LEAST, MOST, SECONDS = 1, 3, 20, 4.0
"""Calls before the clock, and on it: as many as take about so long."""
BACKWARD = 2.5
"""Products of the gradients over those of the forward pass, which are computed once more among them."""
TOLERANCE = 0.05
"""Share of a result's norm by which two kernels in bfloat16 may differ in a rehearsal."""
FIRST = ("forward_ms", "both_ms", "forward_tflops", "both_tflops")
ENVIRONMENT = {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".95"}


class Shape(NamedTuple):
    """Rows, and what their queries see."""

    batch_size: int
    seq_len: int
    document: int | None = None
    window: int | None = None

    @property
    def pairs(self) -> int:
        """Of a query and a key that it sees, of all rows."""
        length = self.document or self.seq_len
        seen = min(self.window or length, length)
        documents = self.batch_size * self.seq_len // length
        return documents * (seen * (seen + 1) // 2 + (length - seen) * seen)


SHAPES = {
    "4k": Shape(8, 4096),
    "32k": Shape(1, 32768),
    "128k": Shape(1, 131072),
    "32k-packed": Shape(1, 32768, document=2048),
    "32k-window": Shape(1, 32768, window=4096),
    "8k": Shape(4, 8192),
    "16k": Shape(2, 16384),
    "64k": Shape(1, 65536),
}
TOYS = {
    "4k": Shape(2, 1024),
    "32k-packed": Shape(1, 1024, document=128),
    "32k-window": Shape(1, 1024, window=192),
}
"""Of a rehearsal; toys of the other lengths would run the same program."""


def flops(shape: Shape, num_heads: int, head_dim: int, *, backward: bool) -> float:
    """Of the two products of each pair that is seen, a product and a sum each, and of their gradients."""
    return 4.0 * num_heads * head_dim * shape.pairs * (1 + BACKWARD * backward)


# --- one case ------------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=(1, 2))
def _drawn(key: Any, shape: tuple[int, ...], parts: int) -> Any:
    """Normal numbers, some tokens at a time: their float32 numbers would be the peak of the forward pass."""
    batch, length, heads, dim = shape
    part = (batch * length // parts, heads, dim)
    made = jax.lax.map(lambda one: jax.random.normal(one, part, DTYPE), jax.random.split(key, parts))
    return made.reshape(shape)


def drawn(shape: Shape, seed: int, num_heads: int, head_dim: int) -> Any:
    """Random numbers [B, T, heads, width] on the device."""
    rows, length = shape.batch_size, shape.seq_len
    made = _drawn(jax.random.key(seed), (rows, length, num_heads, head_dim), max(1, rows * length // 4096))
    return jax.block_until_ready(made)


def passes(shape: Shape, implementation: str) -> dict[str, Callable[..., Any]]:
    """The forward pass, and that with the gradients."""
    options: dict[str, Any] = {"causal": True, "window": shape.window, "implementation": implementation}

    def forward(q: Any, k: Any, v: Any) -> Any:
        segments = None
        if shape.document:
            segments = jnp.broadcast_to(jnp.arange(shape.seq_len) // shape.document, q.shape[:2])
        return attention(q, k, v, segment_ids=segments, **options)

    def both(q: Any, k: Any, v: Any, out_grad: Any) -> Any:
        out, vjp = jax.vjp(forward, q, k, v)
        return out, *vjp(out_grad)

    return {"forward": forward, "both": both}


def measured(row: dict[str, Any], fn: Callable[..., Any], arrays: Sequence[Any], num_flops: float) -> Any:
    """Compile, run, time; what it gives, or None where memory runs out."""
    result: Any = None
    with memory_may_run_out(row):
        program = compiled(row, fn, *arrays)
        row["peak_before_bytes"] = peak_bytes()
        result = jax.block_until_ready(program(*arrays))
        row["peak_bytes"] = peak_bytes()
        (once,) = timed(lambda: program(*arrays), warmup=0, repeats=1)
        repeats = min(MOST, max(LEAST, int(SECONDS / max(once, 1e-9))))
        seconds = timed(lambda: program(*arrays), warmup=WARMUP, repeats=repeats)
        low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
        row |= {"ms": 1e3 * middle, "ms_low": 1e3 * low, "ms_high": 1e3 * high, "repeats": repeats}
        row["tflops"] = num_flops / middle / 1e12
    return result


def run(name: str, implementation: str, rehearsal: bool) -> dict[str, Any]:
    """One row."""
    if rehearsal and name not in TOYS:
        return {"rehearsed_as": f"4k-{implementation}"}
    shape = TOYS[name] if rehearsal else SHAPES[name]
    heads, groups, dim = (4, 2, 16) if rehearsal else (LLAMA_8B.num_heads, LLAMA_8B.num_kv_heads, LLAMA_8B.head_dim)
    row: dict[str, Any] = {
        "implementation": implementation,
        **shape._asdict(),
        "tokens": shape.batch_size * shape.seq_len,
        "pairs": shape.pairs,
        "num_heads": heads,
        "num_kv_heads": groups,
        "head_dim": dim,
        "dtype": jnp.dtype(DTYPE).name,
    }
    figures: dict[str, Any] = {}
    with memory_may_run_out(row):
        arrays = [drawn(shape, seed, count, dim) for seed, count in enumerate((heads, groups, groups))]
        by = STAND_IN if rehearsal and not is_known(implementation) else implementation
        for which, fn in passes(shape, by).items():
            if which == "both":
                arrays.append(drawn(shape, len(arrays), heads, dim))
            part: dict[str, Any] = {}
            result = measured(part, fn, arrays, flops(shape, heads, dim, backward=which == "both"))
            figures |= {f"{which}_{key}": value for key, value in part.items()}
            if result is None:
                row["out_of_memory"] = True
                break  # the gradients need more
            if which == "both":
                row |= distance(f"{name}{'-toy' * rehearsal}", implementation, result)
            del result
    if rehearsal and (row.get("relative_error") or 0) > TOLERANCE:
        raise AssertionError(f"results differ: {row}")
    first = {key: figures.pop(key) for key in FIRST if key in figures}
    return {**first, **row, **figures}


def is_known(implementation: str) -> bool:
    """Whether the device at hand computes attention that way, by the library's own word."""
    one = jnp.ones((1, 8, 1, 8), DTYPE)
    try:
        jax.eval_shape(functools.partial(attention, implementation=typing.cast(Any, implementation)), one, one, one)
    except lt.core.ConfigError:
        return False
    return True


# --- the same results ----------------------------------------------------------------------------------------------


@jax.jit
def _at(leaf: Any, places: Any) -> Any:
    return leaf.ravel()[places].astype(jnp.float32)


def distance(name: str, implementation: str, results: Sequence[Any]) -> dict[str, Any]:
    """Leave samples of the first implementation's results; of another how far it is from them, if they are there.

    Samples of result and gradients each: the norm of the difference over the norm.
    """
    generator = np.random.default_rng(0)
    ours = [np.asarray(_at(leaf, generator.integers(0, leaf.size, SAMPLES))) for leaf in results]
    path = scratch(PART) / f"{name}.npz"
    if implementation == IMPLEMENTATIONS[0]:
        np.savez(path, *ours)
        return {}
    if not path.is_file():
        return {"compared_with": None, "relative_error": None}
    with np.load(path) as kept:
        theirs = [kept[key] for key in kept.files]
    errors = [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(ours, theirs, strict=True)]
    worst = math.nan if any(map(math.isnan, errors)) else max(errors)
    return {"compared_with": IMPLEMENTATIONS[0], "relative_error": worst}


CASES: dict[str, Callable[[bool], dict[str, Any]]] = {
    f"{name}-{implementation}": functools.partial(run, name, implementation)
    for name in SHAPES
    for implementation in IMPLEMENTATIONS
}

if __name__ == "__main__":
    limits = {name: 2.0 if name.startswith(("64k", "128k")) else 1.0 for name in CASES}
    main(PART, CASES, __doc__, minutes=limits, env=dict.fromkeys(CASES, ENVIRONMENT))
