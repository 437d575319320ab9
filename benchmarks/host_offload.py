"""Bytes that host offload saves: JAX's tutorial, and Adam with its moments on the host. Compiled, never run.

    python benchmarks/host_offload.py [--target v5e] [--target cpu] [--target h100] [--json FILE]

The tutorial ("Memories and host offloading") computes the gradients of ten layers of two matrix products, 256 x 1024 x
256. It does so with everything on the device, with every layer's input offloaded to the host, and with the parameters
on the host as well. "Naive" is the tutorial's code: a checkpoint policy, and `device_put` inside `jax.lax.scan`. "Ours"
is `lowtide.offload.scan`. The same programs run at 2048 x 8192 x 2048 and 2,048 rows, where a layer exceeds a chip's
on-chip memory, which XLA's totals leave out.

The second part is one whole Adam step on four matrices of 7168 x 7168: with everything on the device, with the moments
moved as whole trees, and with `lowtide.offload.optimizer`, which streams them. The third part is the update alone, for
8 and for 96 such matrices.

A CPU has one memory, so both columns show the same place there. Compile-only GPUs keep arguments on the device. The
report moves the arguments that were declared on the host, and ours is compiled as a loop over device arguments.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax
from _common import ROOT, header, mib, write
from jax.ad_checkpoint import checkpoint_name
from rich.console import Console
from rich.table import Table

from lowtide import offload
from lowtide.core import PlacementWarning
from lowtide.memory import analyze

Tree = Any
NUM_LAYERS = 10
MOMENTS = "0/{mu,nu}/**"
BATCH = 8192
"""Rows of the batch in the Adam step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One program on one target."""

    program: str
    """The computation."""
    variant: str
    """Naive or ours, with its placement."""
    argument_bytes: int
    """Arguments on the device."""
    output_bytes: int
    """Outputs on the device, except those written into arguments."""
    temp_bytes: int
    """Temporaries on the device."""
    device_bytes: int
    """All device memory while the program runs."""
    host_argument_bytes: int
    """Arguments on the host."""
    host_temp_bytes: int
    """Temporaries on the host."""
    host_bytes: int
    """All host memory."""


def shape(*dims: int) -> jax.ShapeDtypeStruct:
    """Return the shape of a float32 array that is never allocated."""
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def row(program: str, variant: str, name: str, fn: Callable[..., Any], *args: Any, **options: Any) -> Row:
    """Compile a program and return its totals."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlacementWarning)  # the module docstring documents the naive programs
        report = analyze(fn, *args, target=name, **options)
    return Row(
        program=program,
        variant=variant,
        argument_bytes=report.device.argument_bytes,
        output_bytes=report.device.output_bytes - report.device.alias_bytes,
        temp_bytes=report.device.temp_bytes,
        device_bytes=report.device_bytes,
        host_argument_bytes=report.host.argument_bytes,
        host_temp_bytes=report.host.temp_bytes,
        host_bytes=report.host_bytes,
    )


# The tutorial.


def layer(h: jax.Array, weights: Tree) -> tuple[jax.Array, None]:
    """Compute two matrix products, named as in the tutorial."""
    w1, w2 = weights
    return checkpoint_name(checkpoint_name(h, "x") @ w1, "y") @ w2, None


def moved_layer(h: jax.Array, weights: Tree) -> tuple[jax.Array, None]:
    """Compute the same after moving the weights to the device."""
    return layer(h, offload.to_device(weights))


def naive(body: Callable[..., Any], *, offloaded: bool) -> Callable[..., Any]:
    """Return the tutorial's gradient, with its checkpoint policy if activations are offloaded."""
    if offloaded:
        policy = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=["x"],
            offload_src="device",
            offload_dst="pinned_host",
        )
        body = jax.checkpoint(body, policy=policy)
    return jax.grad(lambda params, x: jnp.sum(jax.lax.scan(body, x, params)[0]))


def ours(**options: Any) -> Callable[..., Any]:
    """Return the gradient through `lowtide.offload.scan`."""
    return jax.grad(lambda params, x: jnp.sum(offload.scan(layer, x, params, **options)[0]))


def tutorial_rows(name: str, rows: int, dim: int) -> list[Row]:
    """Compile the three programs of the tutorial, and ours for the last one."""
    params: Tree = (shape(NUM_LAYERS, dim, 4 * dim), shape(NUM_LAYERS, 4 * dim, dim))
    hosted, x = offload.to_host(params), shape(rows, dim)
    size = f"{dim} wide"
    programs = [
        (f"base, {size}", "naive", naive(layer, offloaded=False), params),
        (f"activations, {size}", "naive", naive(layer, offloaded=True), params),
        (f"activations + parameters, {size}", "naive", naive(moved_layer, offloaded=True), hosted),
        (f"activations + parameters, {size}", "ours", ours(inputs="host"), hosted),
        (f"activations + parameters, {size}", "ours, no prefetch", ours(inputs="host", prefetch=False), hosted),
        (f"parameters, {size}", "naive", naive(moved_layer, offloaded=False), hosted),
        (f"parameters, {size}", "ours", ours(), hosted),
    ]
    return [row(program, variant, name, fn, args, x) for program, variant, fn, args in programs]


# Adam.


def adam_step(tx: optax.GradientTransformation, *, whole_tree: bool = False) -> Callable[..., Any]:
    """Return one step on four layers; `whole_tree` moves the moments as whole trees."""

    def loss(params: Sequence[jax.Array], x: jax.Array) -> jax.Array:
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def step(params: Tree, state: Tree, x: jax.Array) -> tuple[Tree, Tree]:
        grads = jax.grad(loss)(params, x)
        state = offload.to_device(state, MOMENTS) if whole_tree else state
        updates, state = tx.update(grads, state, params)
        state = offload.to_host(state, MOMENTS) if whole_tree else state
        return optax.apply_updates(params, updates), state

    return step


def adam_rows(name: str) -> list[Row]:
    """Compile Adam on 4 x 7168 x 7168."""
    adam = optax.adam(1e-3)
    params = [shape(7168, 7168) for _ in range(4)]
    state = jax.eval_shape(adam.init, params)
    hosted, x = offload.to_host(state, MOMENTS), shape(BATCH, 7168)
    streamed = offload.optimizer(adam, match=r".*/(mu|nu)/.*")
    programs = [
        ("on the device", adam_step(adam), state),
        ("naive: whole trees", adam_step(adam, whole_tree=True), hosted),
        ("ours: streamed", adam_step(streamed), hosted),
    ]
    label = "Adam on 4 x 7168 x 7168"
    return [row(label, variant, name, fn, params, s, x, donate_argnums=(0, 1)) for variant, fn, s in programs]


def update_rows(name: str) -> list[Row]:
    """Compile the streamed update alone; its arguments are the state and the gradients, which the updates overwrite."""
    adam, rows = optax.adam(1e-3), []
    streamed = offload.optimizer(adam, match=r".*/(mu|nu)/.*")
    for num_leaves in (8, 96):
        grads = [shape(7168, 7168) for _ in range(num_leaves)]
        state = offload.to_host(jax.eval_shape(adam.init, grads), MOMENTS)
        label = f"update of {num_leaves} x 7168 x 7168"
        rows.append(row(label, "ours: streamed", name, streamed.update, grads, state, donate_argnums=(0, 1)))
    return rows


# Printing and writing.


def table(name: str, rows: Sequence[Row]) -> Table:
    """Return a table of device and host bytes, by program and variant."""
    made = Table(title=f"Host offload on {name}: MiB on one device and its host, compiled")
    for column in ("program", "variant"):
        made.add_column(column)
    for column in (
        "arguments",
        "outputs",
        "temporaries",
        "alive",
        "device",
        "host arguments",
        "host temporaries",
        "host",
    ):
        made.add_column(column, justify="right")
    for r in rows:
        device = (r.argument_bytes, r.output_bytes, r.temp_bytes, r.device_bytes)
        host = (r.host_argument_bytes, r.host_temp_bytes, r.host_bytes)
        made.add_row(r.program, r.variant, *(mib(num_bytes) for num_bytes in (*device, *host)))
    return made


def measure(name: str) -> list[Row]:
    """Compile every program for one target."""
    return [*tutorial_rows(name, 256, 256), *tutorial_rows(name, 2048, 2048), *adam_rows(name), *update_rows(name)]


def main() -> None:
    """Measure, print and write the raw result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", help="a target of lowtide.memory.target; default v5e, cpu, h100")
    parser.add_argument("--json", type=Path, help="one file for all targets, in place of benchmarks/results/")
    options = parser.parse_args()
    console = Console(width=160)
    results = []
    for name in options.target or ["v5e", "cpu", "h100"]:
        rows = measure(name)
        console.print(table(name, rows))
        result = {
            **header(f"python benchmarks/host_offload.py --target {name}"),
            "label": "compiled",
            "target": name,
            "rows": [dataclasses.asdict(r) for r in rows],
        }
        results.append(result)
        if options.json is None:
            write(ROOT / "results" / f"host_offload-{name.replace(':', '-')}.json", result)
    if options.json is not None:
        write(options.json, {"results": results})


if __name__ == "__main__":
    main()
