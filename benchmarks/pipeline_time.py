"""Cost of the pipeline's executor without a pipeline: one stage on one GPU versus accumulation.

    python benchmarks/pipeline_time.py [--case zb-h1-8_remat] [--rehearse]

Loss and gradients of Llama 3.2 1B's shapes (float32 parameters, bfloat16 compute), with 8 and 32 microbatches of one
sequence of 2,048 tokens, blocks kept and recomputed. The programs are `lowtide.accumulate`, and
`lowtide.pipeline.value_and_grad` with one stage as 1F1B and as ZB-H1, which splits each backward pass in two. The
difference is the cost of a schedule's ticks, buffers and split passes; waiting and transfers between ranks do not
occur. Values are compared with accumulation's.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from _decoders import (
    LLAMA_1B,
    batch_of,
    compare,
    compiled,
    decoder,
    keep,
    memory_may_run_out,
    num_parameters,
    sampled,
    toy,
)
from _gpu import main, peak_bytes, timed

import lowtide as lt

Tree = Any
PART = "pipeline"
REHEARSED = 8
ENVIRONMENT = {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".93"}


def gradients(program: str, stack: lt.LayerStack, num_microbatches: int, *, remat: bool) -> Callable[..., Any]:
    """Return a function of outer leaves, layers and batch that returns the loss and the gradients of both."""
    if program == "accumulate":

        def loss(params: Tree, batch: Tree) -> Any:
            return stack.apply(*params, batch, remat=remat)[0]

        grad_fn = lt.accumulate(jax.value_and_grad(loss), num_microbatches)
        return lambda outer, layers, batch: grad_fn((outer, layers), batch)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("stage",))
    made = lt.pipeline.schedule(program, num_stages=1, num_microbatches=num_microbatches)
    pipeline = lt.pipeline.value_and_grad(stack, made, mesh=mesh, remat=remat)

    def run(outer: Tree, layers: Tree, batch: Tree) -> Any:
        (loss, _), grads = pipeline(outer, layers, batch)
        return loss, grads

    return run


def run(program: str, num_microbatches: int, remat: bool, rehearsal: bool) -> dict[str, Any]:
    """Compile, compare and time one case."""
    if rehearsal and (num_microbatches != REHEARSED or (program, remat) in (("zb-h1", False), ("1f1b", True))):
        return {"rehearsed_as": name_of(program, REHEARSED, program == "zb-h1")}
    config, length = (toy(), 32) if rehearsal else (LLAMA_1B, 2048)
    row: dict[str, Any] = {
        "model": "toy" if rehearsal else "1b",
        "program": program,
        "remat": remat,
        "num_microbatches": num_microbatches,
        "tokens": num_microbatches * length,
        "seq_len": length,
        "num_parameters": num_parameters(config),
        "dtype": "float32",
        "compute_dtype": "bfloat16",
    }
    with memory_may_run_out(row):
        model, batch = decoder(config), batch_of(config, num_microbatches, length)
        args = (model.outer, model.layers, batch)
        grads = compiled(row, gradients(program, model.stack, num_microbatches, remat=remat), *args)
        measure(row, name_of("toy" if rehearsal else "1b", num_microbatches, remat), lambda: grads(*args), rehearsal)
    return {**row, "peak_bytes": peak_bytes()}


def measure(row: dict[str, Any], name: str, step: Callable[[], Any], rehearsal: bool) -> None:
    """Measure a case and fill its row."""
    loss, found = step()
    losses, values = [float(loss)], sampled(found)
    del loss, found
    row["losses"] = losses
    if row["program"] == "accumulate":
        keep(PART, name, losses, values)
    else:
        row |= compare(PART, name, losses, values)
    seconds = timed(step, warmup=1, repeats=2 if rehearsal else 8)
    row |= {"seconds_per_step": statistics.median(seconds), "step_seconds": seconds}
    row["tokens_per_second"] = row["tokens"] / row["seconds_per_step"]


def name_of(program: str, num_microbatches: int, remat: bool) -> str:
    """Return the case name, for instance ``zb-h1-8`` or, with blocks recomputed, ``zb-h1-8_remat``."""
    return f"{program}-{num_microbatches}{'_remat' * remat}"


CASES: dict[str, Callable[[bool], dict[str, Any]]] = {
    name_of(program, count, remat): functools.partial(run, program, count, remat)
    for count, remat in ((8, False), (32, False), (8, True), (32, True))
    for program in ("accumulate", "1f1b", "zb-h1")
}

if __name__ == "__main__":
    limits, places = dict.fromkeys(CASES, 4.0), dict.fromkeys(CASES, ENVIRONMENT)
    main(PART, CASES, __doc__, minutes=limits, env=places)
