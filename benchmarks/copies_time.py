"""Which XLA options, and which order of operations, let a GPU copy to and from the host while kernels run.

    python benchmarks/copies_time.py [--case ahead] [--rehearse]

The program has sixteen layers of two bfloat16 matrix products, recomputed in the backward pass. The figures are the
seconds of the loss and the weight gradients, with the layer inputs on the device and on the host. A layer's arithmetic
takes about as long as its copy. So hidden copies should cost little, and exposed copies two thirds of the step.

    device       layer inputs on the device
    host         layer inputs on the host, by `jax.checkpoint`'s policy for names
    host-NAME    the same program, compiled with an XLA option
    ahead        written by hand: a layer's input is copied while the next layer runs, and fetched while the one after
                 it runs; every copy of this loop begins and ends with an iteration
    ahead-NAME   the same with an option

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

Tree = Any
PART = "copies"
NUM_LAYERS, TOKENS, WIDTH, HIDDEN = 16, 16384, 4096, 4096
OPTIONS: dict[str, dict[str, Any]] = {
    "no_command_buffers": {"xla_gpu_enable_command_buffer": ""},
    "pipelined": {"xla_gpu_enable_pipelined_host_offloading": True},
    "scheduler": {"xla_gpu_enable_latency_hiding_scheduler": True},
}
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
PROFILED = 2


def block(h: Any, layer: Tree) -> Any:
    """Compute one layer."""
    return h + jnp.tanh(h @ layer["up"]) @ layer["down"]


def scanned(layers: Tree, x: Any, *, on_host: bool) -> Any:
    """Apply the layers in a scan whose checkpoint policy keeps each layer's input by name."""

    def body(h: Any, layer: Tree) -> tuple[Any, None]:
        return block(checkpoint_name(h, "input"), layer), None

    policies = jax.checkpoint_policies
    policy = policies.save_only_these_names("input")
    if on_host:
        places = {"offload_src": "device", "offload_dst": "pinned_host"}
        policy = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[], names_which_can_be_offloaded=["input"], **places
        )
    return jax.lax.scan(jax.checkpoint(body, policy=policy, prevent_cse=False), x, layers)[0]


@jax.custom_vjp
def ahead(layers: Tree, x: Any) -> Any:
    """Apply the layers; each layer's input is copied to the host while the next layer runs."""
    return _ahead_forward(layers, x)[0]


def _ahead_forward(layers: Tree, x: Any) -> Any:
    def body(carry: Any, layer: Tree) -> Any:
        h, before = carry
        return (block(h, layer), h), jax.device_put(before, HOST)

    # The first iteration has no previous layer; it copies the input a second time.
    (h, last), kept = jax.lax.scan(body, (x, x), layers)
    return h, (layers, last, kept)


def _ahead_backward(residuals: Any, g: Any) -> Any:
    layers, last, kept = residuals

    def body(carry: Any, entry: Any) -> Any:
        g, h = carry
        layer, before = entry
        fetched = jax.device_put(before, DEVICE)
        to_layer, g = jax.vjp(lambda layer, h: block(h, layer), layer, h)[1](g)
        return (g, fetched), to_layer

    # `kept` is shifted by one layer: each iteration fetches the input of the layer that the next iteration runs.
    (g, _), grads = jax.lax.scan(body, (g, last), (layers, kept), reverse=True)
    return grads, g


ahead.defvjp(_ahead_forward, _ahead_backward)


def loss_of(kind: str) -> Callable[[Tree, Any], Any]:
    """Return the loss as a function of layers and input."""
    run = ahead if kind == "ahead" else functools.partial(scanned, on_host=kind == "host")
    return lambda layers, x: jnp.mean(jnp.square(run(layers, x).astype(jnp.float32)))


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
        for kind in ("host", "ahead")
        for option in (None, *OPTIONS)
    },
}

if __name__ == "__main__":
    main(PART, CASES, __doc__, minutes=dict.fromkeys(CASES, 0.7))
