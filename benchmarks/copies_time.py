"""Which loops and XLA options let a GPU copy to and from the host while kernels run.

    python benchmarks/copies_time.py [--case ahead] [--rehearse]

The program has sixteen layers of two bfloat16 matrix products, recomputed in the backward pass. The figures are the
seconds of the loss and the weight gradients, with the layer inputs on the device and on the host. A layer's arithmetic
takes four times the time of its copy, so hidden copies cost nothing and exposed copies half of the forward pass.

    device       layer inputs on the device
    ahead        on the host, fetched one layer ahead (`lowtide.planning.Remat`)
    host         on the host, by `jax.checkpoint`'s policy for names
    ...-options  the same program, compiled with `lowtide.offload.copy_options`
    ...-NAME     the same program, compiled with one XLA option

Each row has the share of the copies' seconds that overlaps with kernels, from a profile. If this XLA does not know an
option, the row records that.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _decoders import compare, compiled, keep, memory_may_run_out
from _gpu import main, overlap, peak_bytes, timed
from jax.ad_checkpoint import checkpoint_name

import lowtide as lt
from lowtide.planning import Remat

Tree = Any
PART = "copies"
NUM_LAYERS, TOKENS, WIDTH, HIDDEN = 16, 16384, 4096, 16384
OPTIONS: dict[str, dict[str, Any]] = {
    "options": lt.offload.copy_options("h100"),
    "no_command_buffers": {"xla_gpu_enable_command_buffer": ""},
    "pipelined": {"xla_gpu_enable_pipelined_host_offloading": True},
    "scheduler": {"xla_gpu_enable_latency_hiding_scheduler": True},
}
PROFILED = 2


def block(layer: Tree, h: Any, batch: Tree) -> Any:
    """Compute one layer."""
    return h + jnp.tanh(h @ layer["up"]) @ layer["down"]


def with_named_input(layer: Tree, h: Any, batch: Tree) -> Any:
    """Compute one layer, and name its input for a policy."""
    return block(layer, checkpoint_name(h, "input"), batch)


def loss_of(kind: str) -> Callable[[Tree, Any], Any]:
    """Return the loss as a function of layers and input."""
    hidden, layer = Remat(layer_inputs="device" if kind == "device" else "host"), block
    if kind == "host":
        hidden, layer = Remat(offload=frozenset({"input"})), with_named_input
    stack = lt.LayerStack(lambda outer, batch: batch["x"], layer, lambda outer, h, batch: (h, {}))

    def loss(layers: Tree, x: Any) -> Any:
        return jnp.mean(jnp.square(hidden.hidden(stack, {}, layers, {"x": x}).astype(jnp.float32)))

    return loss


def run(kind: str, option: str | None, rehearsal: bool) -> dict[str, Any]:
    """Compile, compare, time and profile one case."""
    width, hidden, tokens = (16, 16, 32) if rehearsal else (WIDTH, HIDDEN, TOKENS)
    row: dict[str, Any] = {"kind": kind, "option": option, "tokens": tokens, "width": width, "num_layers": NUM_LAYERS}
    random = np.random.default_rng(0)

    def drawn(*shape: int) -> Any:
        return jax.device_put((random.standard_normal(shape, np.float32) * shape[-2] ** -0.5).astype(jnp.bfloat16))

    layers = {"up": drawn(NUM_LAYERS, width, hidden), "down": drawn(NUM_LAYERS, hidden, width)}
    x = drawn(tokens, width)
    options = None if rehearsal or option is None else OPTIONS[option]
    with memory_may_run_out(row):
        try:
            program = compiled(row, jax.value_and_grad(loss_of(kind)), layers, x, compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            if options is None or "option" not in str(error).lower():
                raise
            return {**row, "option_error": str(error)[:500]}
        loss, grads = program(layers, x)
        values = [np.asarray(leaf[::5, ::7, ::11], np.float32) for leaf in jax.tree.leaves(grads)]
        row["losses"] = [float(loss)]
        name = "device-toy" if rehearsal else "device"
        if kind == "device":
            keep(PART, name, row["losses"], values)
        else:
            row |= compare(PART, name, row["losses"], values)
        seconds = timed(lambda: program(layers, x), warmup=2, repeats=2 if rehearsal else 8)
        row |= {"seconds_per_step": statistics.median(seconds), "step_seconds": seconds}
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                timed(lambda: program(layers, x), warmup=0, repeats=PROFILED)
            row |= {"overlap": overlap(folder), "profiled_steps": PROFILED}
    return {**row, "peak_bytes": peak_bytes()}


CASES: dict[str, Callable[[bool], dict[str, Any]]] = {
    "device": functools.partial(run, "device", None),
    **{
        f"{kind}{f'-{option}' * (option is not None)}": functools.partial(run, kind, option)
        for option in (None, *OPTIONS)
        for kind in ("ahead", "host")
    },
}

if __name__ == "__main__":
    main(PART, CASES, __doc__, minutes=dict.fromkeys(CASES, 0.7))
