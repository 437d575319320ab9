"""Optimizer state in 8 and 4 bits: bytes of state, temporaries and traffic, bytes of whole steps, and time on a CPU.

    python benchmarks/optimizer_state.py [--part update] [--part steps] [--part 8b] [--part cpu] [--json FILE]

`update`: AdamW on one leaf of 8 x 2048 x 2048 parameters, the update and `optax.apply_updates`, all donated, compiled
for a v5e and an H100. It compares float32 state, parameters and gradients with each format of
`lowtide.optim.low_precision`. ``+ split`` has parameters and gradients in bfloat16, and keeps each parameter's rounding
residual in 8 bits. Bytes are per parameter; the traffic is a lower bound on what the compiled program reads and writes.

`steps`: whole training steps of a stack of 32 layers (1.07 B parameters, 16 tokens), everything on the device: a plain
step, whose gradients all exist before the update, and `lowtide.offload.layerwise_step`. In addition, a plain step of
Llama 3.2 1B's shapes, 256 tokens.

`8b`: full-parameter AdamW of Llama 3 8B's shapes on one v5e, 4,096 tokens, with layers, state and activations on its
host. libtpu uses low tiles for arguments there (`lowtide.core.choose_low_tiles`), as in `lowtide finetune --full`.

`cpu`: CPU seconds of an update of 1024 x 1024 parameters on this machine, the median of 50, and the distance of the
final parameters from those with float32 state. The same figures follow for PyTorch's AdamW and, if they are installed,
for bitsandbytes' 8-bit version and torchao's 8-bit and 4-bit versions. These figures show the cost of a format's
arithmetic on this CPU, and say nothing about other chips.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import time
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _common import ROOT, header, write
from rich.console import Console
from rich.table import Table

import lowtide as lt
from lowtide.core import choose_low_tiles, tree_bytes
from lowtide.memory import compile
from lowtide.optim import low_precision

Tree = Any
SHAPE = (8, 2048, 2048)
FORMATS = ("float32", "8bit", "companded", "fp8", "4bit", "bfloat16")
SPLIT = "8bit + split"
TARGETS = ("v5e:1x1", "h100")
STEPS, RATE, DECAY = 50, 1e-3, 1e-2


def optimizer(form: str) -> optax.GradientTransformation:
    """Return AdamW with its state in a format."""
    adamw = optax.adamw(RATE, weight_decay=DECAY)
    if form == "float32":
        return adamw
    return low_precision(adamw, "8bit", weights="split") if form == SPLIT else low_precision(adamw, form)


def step_of(tx: optax.GradientTransformation) -> Any:
    """Return a step that computes the update and applies it."""

    def step(grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def compiled(form: str, target: str) -> dict[str, Any]:
    """Return the bytes per parameter on a target."""
    params = {"w": jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16 if form == SPLIT else jnp.float32)}
    tx, size = optimizer(form), float(params["w"].size)
    state = jax.eval_shape(tx.init, params)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers")  # the updates reuse the gradients' memory
        program = compile(step_of(tx), params, state, params, target=target, donate_argnums=(0, 1, 2))
        alone = compile(tx.update, params, state, params, target=target, donate_argnums=(0, 1))
    return {
        "format": form,
        "state_bytes": tree_bytes(state) / size,
        "temp_bytes": program.report().device.temp_bytes / size,
        "bytes_accessed": program.bytes_accessed / size,
        "update_bytes_accessed": alone.bytes_accessed / size,
    }


def update_rows() -> list[dict[str, Any]]:
    """Compile all formats for each target."""
    return [{"target": target, **compiled(form, target)} for target in TARGETS for form in (*FORMATS, SPLIT)]


def step_rows() -> list[dict[str, Any]]:
    """Compile whole steps; the figures are bytes per parameter."""
    num_layers, width = 32, 2048
    size = num_layers * 8 * width**2
    model = lt.LayerStack(
        first=lambda outer, batch: batch["x"],
        block=lambda layer, h, batch: h + jnp.tanh(h @ layer["up"]) @ layer["down"],
        last=lambda outer, h, batch: (jnp.mean(h.astype(jnp.float32) ** 2), {}),
    )
    rows = []
    for target in TARGETS:
        place = jax.sharding.SingleDeviceSharding(lt.target(target).devices()[0])
        for form in ("float32", SPLIT):
            dtype, tx = jnp.float32 if form == "float32" else jnp.bfloat16, optimizer(form)
            shapes = {"up": (num_layers, width, 4 * width), "down": (num_layers, 4 * width, width)}
            layers = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=place) for name, shape in shapes.items()}
            batch = {"x": jax.ShapeDtypeStruct((16, width), dtype)}

            def plain(params: Tree, state: Tree, batch: Tree, tx: Any = tx) -> Tree:
                grads = jax.grad(lambda params: model.apply({}, params, batch, remat=True)[0])(params)
                updates, state = tx.update(grads, state, params)
                return optax.apply_updates(params, updates), state

            state = jax.eval_shape(tx.init, layers)
            report = compile(plain, layers, state, batch, target=target, donate_argnums=(0, 1)).report()
            places = dict.fromkeys(("layers", "outer", "opt_state", "inputs"), "device")
            step = lt.offload.layerwise_step(model, tx, place=places, chunk_bytes="16 MiB")
            parts = compile(step, *step.init({}, layers), batch, target=target, donate_argnums=0).report()
            for name, made in (("plain", report), ("layerwise", parts)):
                rows.append(
                    {
                        "target": target,
                        "step": name,
                        "format": form,
                        "device_bytes": made.device_bytes / size,
                        "temp_bytes": made.device.temp_bytes / size,
                    }
                )
            rows.append(decoder_row(form, target))
    return rows


def decoder_row(form: str, target: str) -> dict[str, Any]:
    """Compile a plain step of Llama 3.2 1B's shapes."""
    from _decoders import LLAMA_1B

    dtype, tx = jnp.float32 if form == "float32" else jnp.bfloat16, optimizer(form)
    model = jax.eval_shape(
        lambda key: lt.models.init(LLAMA_1B, key=key, dtype=dtype, compute_dtype=jnp.bfloat16), jax.random.key(0)
    )

    def step(model: Tree, state: Tree, batch: Tree) -> Tree:
        loss, grads = jax.value_and_grad(lambda model: lt.models.loss(model, batch, remat=True)[0])(model)
        updates, state = tx.update(grads, state, model)
        return optax.apply_updates(model, updates), state, loss

    batch = dict.fromkeys(("tokens", "labels"), jax.ShapeDtypeStruct((1, 256), jnp.int32))
    made = compile(step, model, jax.eval_shape(tx.init, model), batch, target=target, donate_argnums=(0, 1)).report()
    size = sum(leaf.size for leaf in jax.tree.leaves(model))
    return {
        "target": target,
        "step": "plain, Llama 3.2 1B",
        "format": form,
        "device_bytes": made.device_bytes / size,
        "temp_bytes": made.device.temp_bytes / size,
    }


def llama_rows() -> list[dict[str, Any]]:
    """Compile 8 B for one v5e, with different parts on the device."""
    from layerwise import HOST, LLAMA_8B

    rows = []
    for form in ("float32", SPLIT):
        dtype = jnp.float32 if form == "float32" else jnp.bfloat16
        for variant, places in (("embedding and head on the device", {}), ("everything on the host", HOST)):
            model = jax.eval_shape(
                lambda key, dtype=dtype: lt.models.init(LLAMA_8B, key=key, dtype=dtype, compute_dtype=jnp.bfloat16),
                jax.random.key(0),
            )
            tokens = jax.ShapeDtypeStruct((1, 4096), jnp.int32)
            step = lt.offload.layerwise_step(model.stack, optimizer(form), place=places)
            state, frozen = step.init(model.outer, model.layers)
            batch = {"tokens": tokens, "labels": tokens}
            report = lt.memory.analyze(step, state, frozen, batch, target="v5e", donate_argnums=0)
            rows.append(
                {
                    "target": "v5e",
                    "format": form,
                    "variant": variant,
                    "device_gib": report.device_bytes / 2**30,
                    "host_gib": report.host_bytes / 2**30,
                    "fits": report.fits,
                }
            )
    return rows


def cpu_rows() -> list[dict[str, Any]]:
    """Time updates on this machine, ours and those of other libraries."""
    rng = np.random.default_rng(0)
    begin = (rng.normal(size=(1024, 1024)) / 10).astype(np.float32)
    grads = [(rng.normal(size=begin.shape) / 100).astype(np.float32) for _ in range(STEPS)]
    made = {form: ours(form, begin, grads) for form in (*FORMATS, SPLIT)}
    made |= theirs(begin, grads)
    wide = made["float32"][0]
    return [
        {"target": "cpu", "format": name, "seconds": seconds, "mean_error": float(np.abs(params - wide).mean())}
        for name, (params, seconds) in made.items()
    ]


def ours(form: str, begin: Any, grads: list[Any]) -> tuple[Any, float]:
    """Return the parameters after all steps, and the CPU seconds of one step."""
    dtype = jnp.bfloat16 if form == SPLIT else jnp.float32
    params, tx = {"w": jnp.asarray(begin, dtype)}, optimizer(form)
    step, state, seconds = jax.jit(step_of(tx), donate_argnums=(1, 2)), tx.init(params), []
    for grad in grads:
        given = jax.block_until_ready({"w": jnp.asarray(grad, dtype)})
        started = time.process_time()
        params, state = jax.block_until_ready(step(given, state, params))
        seconds.append(time.process_time() - started)
    return np.asarray(params["w"], np.float32), statistics.median(seconds)


def theirs(begin: Any, grads: list[Any]) -> dict[str, tuple[Any, float]]:
    """Return the same for PyTorch's optimizers."""
    found: dict[str, Any] = {}
    if importlib.util.find_spec("torch") is None:
        return {}
    import torch

    found["torch.optim.AdamW"] = torch.optim.AdamW
    if importlib.util.find_spec("bitsandbytes") is not None:
        import bitsandbytes

        found["bitsandbytes AdamW8bit"] = bitsandbytes.optim.AdamW8bit
    if importlib.util.find_spec("torchao") is not None:
        import torchao.optim

        found |= {"torchao AdamW8bit": torchao.optim.AdamW8bit, "torchao AdamW4bit": torchao.optim.AdamW4bit}
    made = {}
    for name, kind in found.items():
        param, seconds = torch.nn.Parameter(torch.tensor(begin.copy())), []
        tx = kind([param], lr=RATE, weight_decay=DECAY)
        for grad in grads:
            param.grad = torch.tensor(grad)
            started = time.process_time()
            tx.step()
            seconds.append(time.process_time() - started)
        made[name] = param.detach().numpy(), statistics.median(seconds)
    return made


PARTS = {"update": update_rows, "steps": step_rows, "8b": llama_rows, "cpu": cpu_rows}


def table(title: str, rows: list[dict[str, Any]]) -> Table:
    """Return a table with all entries of the rows."""
    made = Table(title=title)
    for name in rows[0]:
        made.add_column(name.replace("_", " "), justify="right" if isinstance(rows[0][name], float) else "left")
    for row in rows:
        made.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    return made


def main() -> None:
    """Measure, print and write the raw results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=PARTS, help="default: all")
    parser.add_argument("--json", type=Path, help="one file for all, in place of benchmarks/results/")
    options = parser.parse_args()
    console, results = Console(width=140), []
    parts = options.part or list(PARTS)
    if "8b" in parts:
        choose_low_tiles()
    for part in parts:
        rows = PARTS[part]()
        console.print(table(part, rows))
        about = header(f"python benchmarks/optimizer_state.py --part {part}")
        if part == "cpu":
            about |= {"cores": len(os.sched_getaffinity(0))}
            others = ("torch", "bitsandbytes", "torchao")
            about["versions"] |= {name: metadata.version(name) for name in others if importlib.util.find_spec(name)}
        results.append({**about, "label": "measured" if part == "cpu" else "compiled", "part": part, "rows": rows})
        if options.json is None:
            write(ROOT / "results" / f"optimizer_state-{part}.json", results[-1])
    if options.json is not None:
        write(options.json, {"results": results})


if __name__ == "__main__":
    main()
