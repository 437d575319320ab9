"""Tokens per second and peak of one LoRA step, with one technique more per case: `long_context.py --part ladder`, run.

    python benchmarks/ladder_time.py [--case remat] [--rehearse]

Llama 3.2 1B's shapes in bfloat16, LoRA of rank 16 on all projections, AdamW, 4 x 2048 tokens; random weights.

    scores  all attention scores and all logits, everything kept for the backward pass
    chunks  the loss in chunks of tokens
    kernel  attention by the device's kernel
    remat   layers recomputed, their MLP in tiles
    host    layer inputs on the host
    nf4     the base's projections in nf4
    groups  as `remat`, four layers at a time

Each row has the bytes that XLA predicts, the allocator's peak, and the peak of a step alone. It also has the losses,
which must equal those of the first rung that fits; only `nf4` has other weights. If something is on the host, the row
says whether `lowtide.offload.verify` agrees. By default, `lowtide finetune` runs the `remat` step.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

import jax
import optax
from _decoders import (
    LLAMA_1B,
    batch_of,
    compiled,
    decoder,
    host_peak_bytes,
    memory_may_run_out,
    step_peak_bytes,
    toy,
    verified,
)
from _gpu import main, peak_bytes, timed
from _ladder import GROUPS, RANK, RUNGS, Rung

import lowtide as lt
from lowtide.core._compat import called

Tree = Any
PART = "ladder"
BATCH_SIZE, SEQ_LEN, LEARNING_RATE, STEPS = 4, 2048, 1e-3, 3
REHEARSED = "scores", "remat", "nf4"
"""The tests train toys of the other rungs."""
ENVIRONMENT = {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".93"}


def step_of(rung: Rung, tx: optax.GradientTransformation) -> Callable[..., Any]:
    """Return one step of the adapters."""

    def step(trainable: Tree, state: Tree, frozen: Tree, batch: Tree) -> Any:
        value, grads = jax.value_and_grad(lambda part: rung.loss(lt.combine(part, frozen), batch)[0])(trainable)
        updates, state = tx.update(grads, state, trainable)
        return optax.apply_updates(trainable, updates), state, value

    return step


def run(name: str, rung: Rung, rehearsal: bool) -> dict[str, Any]:
    """Train, compare and time one rung."""
    if rehearsal and name not in REHEARSED:
        return {"rehearsed_as": "remat"}
    config, length = (toy(), 64) if rehearsal else (LLAMA_1B, SEQ_LEN)
    row: dict[str, Any] = {
        "rung": rung.said,
        "model": "toy" if rehearsal else "1b",
        "method": "lora" if rung.base is None else "qlora",
        "rank": RANK,
        "batch_size": BATCH_SIZE,
        "seq_len": length,
        "tokens": BATCH_SIZE * length,
    }
    with memory_may_run_out(row):
        measure(row, rung, config, rehearsal)
    return {**row, "peak_bytes": peak_bytes(), "host_peak_bytes": host_peak_bytes()}


def measure(row: dict[str, Any], rung: Rung, config: Any, rehearsal: bool) -> None:
    """Measure a rung and fill its row."""
    model = rung.adapted(decoder(config, dtype="bfloat16"), jax.random.key(1))
    trainable, frozen = lt.partition(model, "**/lora_*")
    del model
    batch, tx = batch_of(config, BATCH_SIZE, row["seq_len"]), optax.adamw(LEARNING_RATE)
    held = [trainable, jax.jit(tx.init)(trainable)]
    row["num_trained"] = sum(leaf.size for leaf in jax.tree.leaves(trainable))
    with rung.around():
        program = compiled(row, step_of(rung, tx), *held, frozen, batch, donate_argnums=(0, 1))
    del trainable
    row["peak_before_bytes"] = peak_bytes()
    if rung.is_hosted:
        row |= verified(program, 2 * config.num_layers * config.hidden_size * row["tokens"])

    def step() -> Any:
        held[0], held[1], loss = called(program, *held, frozen, batch)  # JAX 0.10 rejects int4 arrays on a device
        return loss

    row["losses"] = [float(step()) for _ in range(STEPS)]
    seconds = timed(step, warmup=2, repeats=2 if rehearsal else 8)
    row |= {"seconds_per_step": statistics.median(seconds), "step_seconds": seconds}
    row["tokens_per_second"] = row["tokens"] / row["seconds_per_step"]
    row["step_peak_bytes"] = step_peak_bytes(step)


CASES: dict[str, Callable[[bool], dict[str, Any]]] = {
    name: functools.partial(run, name, rung) for name, rung in {**RUNGS, "groups": GROUPS}.items()
}

if __name__ == "__main__":
    main(PART, CASES, __doc__, minutes=dict.fromkeys(CASES, 1.5), env=dict.fromkeys(CASES, ENVIRONMENT))
