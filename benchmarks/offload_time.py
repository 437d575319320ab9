"""Seconds and bytes of a training step with parts on the host, versus the same step on the device.

    python benchmarks/offload_time.py [--case 16k-activations] [--rehearse]

All 1.24 B parameters of Llama 3.2 1B's shapes, float32, bfloat16 compute, AdamW, sequences of 4,096 tokens, chunked
loss. Steps have 4,096, 16,384 and 65,536 tokens:

    device       projections kept for the backward pass by name, the rest recomputed; everything on the device
    activations  the same names on the host
    remat        only layer inputs kept
    inputs       only layer inputs kept, on the host, and fetched one layer ahead
    opt_state    `remat`, with AdamW's moments on the host (`lowtide.offload.optimizer`)
    gradients    `remat`, only loss and gradients
    parameters   the same with layers on the host, streamed (`lowtide.offload.scan`), their gradients returned there

`again` repeats a step of `device` in another process, to show the effect of a GPU's own order of additions. Each row
has the largest difference of losses and of sampled parameters from `device` (for gradients, from `gradients`), the
bytes that XLA predicts, and the allocator's peak. It also says whether `lowtide.offload.verify` agrees, and how much of
the copies overlapped with kernels, from a profile.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import optax
from _decoders import (
    LLAMA_1B,
    batch_of,
    compare,
    compiled,
    decoder,
    host_peak_bytes,
    keep,
    memory_may_run_out,
    num_parameters,
    placed,
    sampled,
    step_peak_bytes,
    toy,
)
from _gpu import main, overlap, peak_bytes, timed

import lowtide as lt
from lowtide.planning import Remat

Tree = Any
PART = "offload"
NAMES = r"(attn|mlp)/(q|k|v|gate|up)_proj"
MOMENTS = r".*/(mu|nu)/.*"
TOKENS = {"4k": 4096, "16k": 16384, "64k": 65536}
REHEARSED = "16k"
"""Toys of the other sizes would run the same program."""
KINDS = ("device", "activations", "inputs", "opt_state", "remat", "gradients", "parameters")
WARMUP, PROFILED = 2, 2
REFERENCES = {
    "parameters": "gradients",
    **dict.fromkeys(("activations", "inputs", "opt_state", "remat", "again"), "device"),
}
ENVIRONMENT = {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".93", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "64"}


def loss_of(kind: str, stack: lt.LayerStack) -> Callable[[Tree, Tree], Any]:
    """Return the loss of ``(outer, layers)``, with activations and parameters placed according to the kind of step."""
    if kind == "parameters":

        def streamed(params: Tree, batch: Tree) -> Any:
            outer, layers = params

            def body(h: Any, layer: Tree) -> tuple[Any, None]:
                return stack.block(layer, h, batch), None

            h, _ = lt.offload.scan(body, stack.first(outer, batch), layers)
            return stack.last(outer, h, batch)[0]

        return streamed
    if kind == "inputs":

        def with_inputs_on_host(params: Tree, batch: Tree) -> Any:
            h = Remat(layer_inputs="host").hidden(stack, *params, batch)
            return stack.last(params[0], h, batch)[0]

        return with_inputs_on_host
    claims = {"device": {"save": NAMES}, "again": {"save": NAMES}, "activations": {"offload": NAMES}}
    if kind in claims:
        block = lt.offload.checkpoint(lt.offload.tag(stack.block), prevent_cse=False, **claims[kind])
        stack = dataclasses.replace(stack, block=block)
    return lambda params, batch: stack.apply(*params, batch, remat=kind not in claims)[0]


def step_of(kind: str, stack: lt.LayerStack, tx: Any) -> Callable[..., Any]:
    """Return one step. Without an optimizer it returns the loss and the gradients."""
    loss_fn = loss_of(kind, stack)

    def gradients(params: Tree, batch: Tree) -> Any:
        return jax.value_and_grad(loss_fn)(params, batch)

    def update(params: Tree, state: Tree, batch: Tree) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return update if tx is not None else gradients


def saved_bytes(config: Any, num_tokens: int) -> int:
    """Return the bytes of the named values in bfloat16: queries, keys, values, gate and up of every token and layer."""
    heads = config.num_heads + 2 * config.num_kv_heads
    return 2 * num_tokens * config.num_layers * (heads * config.head_dim + 2 * config.intermediate_size)


def verified(kind: str, program: Any, saved: int) -> dict[str, Any]:
    """Return the result of `lowtide.offload.verify`; at least half of the saved bytes must be on the host."""
    places = {"opt_state": {"1/0/{mu,nu}/**": "host"}, "parameters": {"0/1/*/**": "host"}}
    try:
        # The pattern also matches stacked vectors, because all leaves of the layers were placed on the host.
        least = saved // 2 if kind == "activations" else 0
        found = lt.offload.verify(program, places.get(kind, {}), host_temp_bytes=least)
    except lt.LowtideError as error:
        return {"verified": False, "verify_error": str(error)[:2000]}
    return {"verified": True, **placed(found)}


def run(num_tokens: int, kind: str, rehearsal: bool) -> dict[str, Any]:
    """Train, compare, time and profile one case."""
    name = next(word for word, number in TOKENS.items() if number == num_tokens)
    same = {"again": "device", "remat": "opt_state"}.get(kind, kind)
    if rehearsal and (name != REHEARSED or same != kind):
        return {"rehearsed_as": f"{REHEARSED}-{same}"}
    config, length = (toy(), 64) if rehearsal else (LLAMA_1B, 4096)
    rows = num_tokens // 4096
    row: dict[str, Any] = {
        "model": "toy" if rehearsal else "1b",
        "kind": kind,
        "tokens": rows * length,
        "batch_size": rows,
        "seq_len": length,
        "num_parameters": num_parameters(config),
        "dtype": "float32",
        "compute_dtype": "bfloat16",
        "optimizer": "none" if kind in ("gradients", "parameters") else "adamw",
    }
    with memory_may_run_out(row):
        measure(row, f"{name}{'-toy' * rehearsal}", kind, config, batch_of(config, rows, length), rehearsal)
    return {**row, "peak_bytes": peak_bytes(), "host_peak_bytes": host_peak_bytes()}


def measure(row: dict[str, Any], name: str, kind: str, config: Any, batch: Tree, rehearsal: bool) -> None:
    """Measure a case and fill its row."""
    model = decoder(config, on_host="layers/**" if kind == "parameters" else None)
    pair, stack = (model.outer, model.layers), model.stack
    del model  # donated, so its arrays are deleted after the first step
    tx = None if kind in ("gradients", "parameters") else optax.adamw(1e-4, weight_decay=0.01)
    losses: list[float] = []
    options = None if rehearsal or kind in ("device", "again", "remat", "gradients") else lt.offload.copy_options()
    row["compiler_options"] = options
    if tx is None:
        program = compiled(row, step_of(kind, stack, None), pair, batch, compiler_options=options)
        loss, grads = program(pair, batch)
        losses, values = [float(loss)], sampled(grads)
        del grads

        def step() -> Any:
            return program(pair, batch)

    else:
        tx = lt.offload.optimizer(tx, match=MOMENTS) if kind == "opt_state" else tx
        shardings = lt.offload.state_shardings(tx, pair) if kind == "opt_state" else None
        state = jax.jit(tx.init, out_shardings=shardings)(pair)
        places = None if shardings is None else (jax.tree.map(lambda leaf: leaf.sharding, pair), shardings, None)
        fn = step_of(kind, stack, tx)
        row["peak_before_bytes"] = peak_bytes()
        jit_options: Any = {"donate_argnums": (0, 1), "out_shardings": places, "compiler_options": options}
        program = compiled(row, fn, pair, state, batch, **jit_options)
        held = [pair, state]
        del pair, state

        def step() -> Any:
            held[0], held[1], loss = program(*held, batch)
            return loss

        losses = [float(step()) for _ in range(3)]
        values = sampled(held[0])
    row |= {"losses": losses, "saved_bytes": saved_bytes(config, row["tokens"])}
    row |= verified(kind, program, row["saved_bytes"])
    if kind in REFERENCES:
        row |= compare(PART, name + "-" + REFERENCES[kind], losses, values)
    else:
        keep(PART, f"{name}-{kind}", losses, values)
    seconds = timed(step, warmup=WARMUP, repeats=2 if rehearsal else 8)
    row |= {"seconds_per_step": statistics.median(seconds), "step_seconds": seconds}
    row["tokens_per_second"] = row["tokens"] / row["seconds_per_step"]
    row["step_peak_bytes"] = step_peak_bytes(step)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            timed(step, warmup=0, repeats=PROFILED)
        row |= {"overlap": overlap(folder), "profiled_steps": PROFILED}


CASES: dict[str, Callable[[bool], dict[str, Any]]] = {
    f"{name}-{kind}": functools.partial(run, TOKENS[name], kind)
    for name, kind in (
        *((word, kind) for word in ("64k", "16k") for kind in ("device", "remat", "inputs", "activations")),
        *((word, "opt_state") for word in ("16k", "64k")),
        *(("16k", kind) for kind in ("gradients", "parameters", "again")),
        *(("4k", kind) for kind in KINDS),
        *(("64k", kind) for kind in ("gradients", "parameters")),
    )
}

if __name__ == "__main__":
    limits, places = dict.fromkeys(CASES, 4.0), dict.fromkeys(CASES, ENVIRONMENT)
    main(PART, CASES, __doc__, minutes=limits, env=places)
