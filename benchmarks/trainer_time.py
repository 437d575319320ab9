"""Time that `Trainer.fit` adds to the bare step on a GPU; predicted and measured bytes, and tokens per second.

    python benchmarks/trainer_time.py [--case 1b] [--rehearse]

Rank-16 adapters on all projections of Llama 1B shapes, random bfloat16 weights, AdamW, 8 x 2048 tokens, each layer
recomputed:

    1b        the bare jitted step with donated state, `fit`, and `fit` without its guard against losses that are not
              finite, in turn over the same batches (the code is `trainer_overhead.py`'s). `overhead` is the median over
              repeats of the difference between `fit` and the bare step, over the bare step.
    1b-peak   `fit` alone: the bytes predicted before the first step, and the allocator's peak. Weights are drawn on
              the host, so that the peak is the step's.

`small` is the residual MLP of `trainer_overhead.py`: the cost of `fit` if a step is too short to hide it.
"""

from __future__ import annotations

import dataclasses
import statistics
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _decoders import LLAMA_1B, decoder, toy
from _gpu import main, peak_bytes, timed
from trainer_overhead import SMALL, Task, batches, model, paired, summarise

import lowtide as lt
from lowtide.models import DecoderConfig

WRT = "**/lora_*"


def _loss(model: Any, batch: Any) -> Any:
    return lt.models.loss(model, batch, remat=True)[0]


def _sizes(rehearsal: bool) -> tuple[DecoderConfig, int, int]:
    return (toy(), 2, 64) if rehearsal else (LLAMA_1B, 8, 2048)


def _model(config: DecoderConfig) -> Any:
    base = decoder(config, dtype="bfloat16")
    return lt.lora.add(base, lt.lora.Config(rank=16, targets="layers/**/*_proj"), key=jax.random.key(1))


def _batches(config: DecoderConfig, rows: int, length: int, count: int) -> list[Any]:
    drawn = np.random.default_rng(0).integers(0, config.vocab_size, (count, rows, length + 1), np.int32)
    return [{"tokens": tokens[:, :-1], "labels": tokens[:, 1:]} for tokens in drawn]


def overhead(rehearsal: bool) -> dict[str, Any]:
    """Measure the three subjects on one base, which none of them changes."""
    config, rows, length = _sizes(rehearsal)
    trainable, frozen = lt.partition(_model(config), WRT)
    task = Task(
        make=lambda: lt.combine(jax.tree.map(partial(jnp.array, copy=True), trainable), frozen),
        loss_fn=_loss,
        tx=optax.adamw(1e-4),
        wrt=WRT,
    )
    repeats, steps = (2, 3) if rehearsal else (9, 10)
    # The guard changes the program, which may round differently in bfloat16.
    row = _row(*paired(repeats, _batches(config, rows, length, steps), task, rtol=0.02))
    return {**row, "tokens": rows * length, "tokens_per_second": rows * length / row["seconds_per_step"]}


def small(rehearsal: bool) -> dict[str, Any]:
    """Measure a step of a few hundred microseconds."""
    task = dataclasses.replace(SMALL, make=partial(model, 2)) if rehearsal else SMALL
    return _row(*paired(*(2, batches(5)) if rehearsal else (30, batches(100)), task, rtol=1e-3))


def _row(times: dict[str, list[float]], own: dict[str, list[float]]) -> dict[str, Any]:
    found = summarise(times, own)
    return {
        "overhead": found["lowtide"]["share"],
        "overhead_seconds": found["lowtide"]["over_bare_seconds"],
        "overhead_without_guard": found["no guard"]["share"],
        "seconds_per_step": found["lowtide"]["step_seconds"],
        "subjects": found,
        "step_seconds": times,
        "host_seconds": own,
    }


def peak(rehearsal: bool) -> dict[str, Any]:
    """Measure one trainer from its weights to a few steps."""
    config, rows, length = _sizes(rehearsal)
    trainer = lt.Trainer(_model(config), _loss, optax.adamw(1e-4), wrt=WRT)
    data = _batches(config, rows, length, 10)
    report, before = trainer.memory(data[0]), peak_bytes()
    records: list[Any] = []
    seconds = timed(
        lambda: records.extend(trainer.fit(data, num_steps=trainer.step + 1)), warmup=2, repeats=2 if rehearsal else 8
    )
    return {
        "predicted_bytes": report.device_bytes,
        "predicted_by_role": dict(report.by_role),
        "measured_bytes": peak_bytes(),
        "peak_before_bytes": before,
        "losses": [record["loss"] for record in records],
        "tokens": rows * length,
        "tokens_per_second": rows * length / statistics.median(seconds),
        "step_seconds": seconds,
    }


if __name__ == "__main__":
    main(
        "trainer",
        {"1b": overhead, "1b-peak": peak, "small": small},
        __doc__,
        minutes={"1b": 4, "1b-peak": 2, "small": 2},
    )
