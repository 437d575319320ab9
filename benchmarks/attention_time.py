"""Milliseconds, TFLOP/s and bytes of one layer's attention: cuDNN's kernel versus blocks of XLA operations.

    python benchmarks/attention_time.py [--case 32k-blocks] [--rehearse]

The benchmark runs `lowtide.ops.attention` in bfloat16 on Llama 3.1 8B's shapes: 32 query heads and 8 key/value heads,
of width 128, causal. The cases are 32,768 tokens in rows of 4,096 to 32,768, and one row each of 65,536 and of 131,072.
Two further cases are one row of 32,768 tokens with documents of 2,048, and with a window of 4,096. ``gemma`` has
heads of Gemma 3 4B, of width 256, in such documents, and a window of 1,024 that the program computes. ``sinks`` has
heads of gpt-oss, of width 64, with a window of 128 and sinks. Each case runs the forward pass alone, then the forward
pass with the gradients of queries, keys and values.

TFLOP/s count only the query-key pairs that attention allows, and no other work of a kernel: 4 FLOPs per pair, head and
unit of head width, plus 2.5 times as many for the gradients. Peaks are those of the allocator since the process began.
Queries, keys and values are drawn in parts, so that drawing them leaves no peak. The row of a case that runs out of
memory records that. The cuDNN case saves samples of its results for the blocks case. `relative_error` of the blocks
case is the largest error among result and gradients.

A rehearsal has no cuDNN; XLA operations on whole rows of scores replace it.
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
from lowtide.ops import AttentionMask, attention

PART = "attention"
IMPLEMENTATIONS = ("cudnn", "blocks")
STAND_IN = "xla"
"""The implementation that a rehearsal uses if the library does not support the requested one on its device."""
DTYPE = jnp.bfloat16
WARMUP, LEAST, MOST, SECONDS = 1, 3, 20, 4.0
"""Warm-up calls, fewest and most timed calls, and the seconds that the timed calls should take."""
BACKWARD = 2.5
"""FLOPs of the backward pass over those of the forward pass: five matrix products versus two. One of the five computes
the scores again.
"""
TOLERANCE = 0.05
"""Share of a result's norm by which two bfloat16 kernels may differ in a rehearsal."""
FIRST = ("forward_ms", "both_ms", "forward_tflops", "both_tflops")
ENVIRONMENT = {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".95"}


class Shape(NamedTuple):
    """The rows of a case, and which keys their queries attend to."""

    batch_size: int
    seq_len: int
    document: int | None = None
    window: int | None = None
    heads: tuple[int, int, int] = (LLAMA_8B.num_heads, LLAMA_8B.num_kv_heads, LLAMA_8B.head_dim)
    """Query heads, key/value heads, and their width."""
    is_traced: bool = False
    """Whether the program computes the window."""
    has_sinks: bool = False

    @property
    def pairs(self) -> int:
        """Number of allowed query-key pairs of all rows."""
        # Query i of a document attends to min(i + 1, window) keys: a triangle for the first `seen` queries, then `seen`
        # keys for each of the others.
        length = self.document or self.seq_len
        seen = min(self.window or length, length)
        documents = self.batch_size * self.seq_len // length
        return documents * (seen * (seen + 1) // 2 + (length - seen) * seen)


SHAPES = {
    "4k": Shape(8, 4096),
    "32k": Shape(1, 32768),
    "32k-packed": Shape(1, 32768, document=2048),
    "gemma": Shape(1, 32768, document=2048, window=1024, heads=(8, 4, 256), is_traced=True),
    "sinks": Shape(8, 4096, window=128, heads=(64, 8, 64), has_sinks=True),
    "128k": Shape(1, 131072),
    "32k-window": Shape(1, 32768, window=4096),
    "8k": Shape(4, 8192),
    "16k": Shape(2, 16384),
    "64k": Shape(1, 65536),
}
TOYS = {
    "4k": Shape(2, 1024, heads=(4, 2, 16)),
    "32k-packed": Shape(1, 1024, document=128, heads=(4, 2, 16)),
    "gemma": Shape(1, 1024, document=128, window=64, heads=(4, 2, 16), is_traced=True),
    "sinks": Shape(2, 1024, window=64, heads=(4, 2, 16), has_sinks=True),
    "32k-window": Shape(1, 1024, window=192, heads=(4, 2, 16)),
}
"""Shapes of a rehearsal. Toys of the other lengths would run the same program."""


def flops(shape: Shape, num_heads: int, head_dim: int, *, backward: bool) -> float:
    """Return the FLOPs of two matrix products, a multiplication and an addition per pair, and of their gradients."""
    return 4.0 * num_heads * head_dim * shape.pairs * (1 + BACKWARD * backward)


# --- one case ------------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=(1, 2))
def _drawn(key: Any, shape: tuple[int, ...], parts: int) -> Any:
    """Draw normal values a few tokens at a time; all of them in float32 at once would be the forward pass's peak."""
    batch, length, heads, dim = shape
    part = (batch * length // parts, heads, dim)
    made = jax.lax.map(lambda one: jax.random.normal(one, part, DTYPE), jax.random.split(key, parts))
    return made.reshape(shape)


def drawn(shape: Shape, seed: int, num_heads: int, head_dim: int) -> Any:
    """Return random values [B, T, heads, width] on the device."""
    rows, length = shape.batch_size, shape.seq_len
    made = _drawn(jax.random.key(seed), (rows, length, num_heads, head_dim), max(1, rows * length // 4096))
    return jax.block_until_ready(made)


def passes(shape: Shape, implementation: Any) -> dict[str, Callable[..., Any]]:
    """Return the forward pass, and the forward pass with its gradients."""

    def forward(q: Any, k: Any, v: Any) -> Any:
        segments, window, windows, sinks = None, shape.window, None, None
        if shape.document:
            segments = jnp.broadcast_to(jnp.arange(shape.seq_len) // shape.document, q.shape[:2])
        if shape.is_traced:
            window, windows = jnp.int32(shape.window) + jnp.int32(q[0, 0, 0, 0] * 0), (shape.window, 2**30)
        if shape.has_sinks:
            sinks = jnp.linspace(-1, 1, q.shape[2], dtype=jnp.float32)
        mask = AttentionMask(segment_ids=segments, window=window, windows=windows)
        return attention(q, k, v, mask=mask, sinks=sinks, implementation=implementation)

    def both(q: Any, k: Any, v: Any, out_grad: Any) -> Any:
        out, vjp = jax.vjp(forward, q, k, v)
        return out, *vjp(out_grad)

    return {"forward": forward, "both": both}


def measured(row: dict[str, Any], fn: Callable[..., Any], arrays: Sequence[Any], num_flops: float) -> Any:
    """Compile, run and time a program; return its result, or None if memory runs out."""
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
    """Measure one case and return its row."""
    if rehearsal and name not in TOYS:
        return {"rehearsed_as": f"4k-{implementation}"}
    shape = TOYS[name] if rehearsal else SHAPES[name]
    heads, groups, dim = shape.heads
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
                break  # the gradients need more memory
            if which == "both":
                row |= distance(f"{name}{'-toy' * rehearsal}", implementation, result)
            del result
    if rehearsal and (row.get("relative_error") or 0) > TOLERANCE:
        raise AssertionError(f"results differ: {row}")
    first = {key: figures.pop(key) for key in FIRST if key in figures}
    return {**first, **row, **figures}


def is_known(implementation: str) -> bool:
    """Return whether the library supports this implementation on the current device."""
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
    """Save samples of the first implementation's results, or return how far another one's results are from them.

    The error of the result and of each gradient is the norm of the samples' difference over the norm of the samples.
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
