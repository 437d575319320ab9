"""The optimizer inside the backward pass: bytes of whole training steps, and values compared with plain training.

    python benchmarks/layerwise.py [--part stack] [--part values] [--part 8b] [--part 70b] [--json FILE]

`stack`: 24 MLP layers of 2048 x 8192 (805 M float32 parameters), 4,096 tokens, Adam, compiled for one v5e. The steps
are: recomputation with everything on the device, whole-tree moves of the optimizer state, and
`lowtide.offload.layerwise_step`.

`values`: 20 steps of a small stack and of a small Llama on the CPU, each clipping mode versus its plain counterpart.
The table also shows the effect of rounding alone: plain training versus itself, started with every parameter one
rounding off.

`8b`, `70b`: full-parameter AdamW of Llama 3 shapes, float32 masters, bfloat16 compute, for one v5e chip and for eight
v5p chips with every matrix sharded over them. Nothing is allocated.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable
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
from lowtide.core import format_bytes
from lowtide.models import DecoderConfig, init
from lowtide.offload import Clip, layerwise_step

Tree = Any
HOST = {"layers": "host", "outer": "host", "opt_state": "host", "inputs": "host"}
DEVICE = dict.fromkeys(HOST, "device")
LLAMA_8B = DecoderConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope_theta=500000.0,
)
LLAMA_70B = dataclasses.replace(LLAMA_8B, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One training step on one target; bytes of one device and of its host."""

    model: str
    """The trained model."""
    variant: str
    """The kind of step."""
    target: str
    """The target hardware."""
    tokens: int
    """Tokens per step."""
    device_bytes: int
    """All device memory while the step runs."""
    argument_bytes: int
    """Arguments on the device."""
    temp_bytes: int
    """Temporaries on the device."""
    host_bytes: int
    """All host memory."""
    fits_device: bool | None
    """Whether the step fits the device."""
    fits: bool | None
    """Whether the step fits device and host."""


def row(model: str, variant: str, tokens: int, report: Any) -> Row:
    """Return the figures of a report."""
    capacity = report.target.budget_bytes
    return Row(
        model=model,
        variant=variant,
        target=report.target.name,
        tokens=tokens,
        device_bytes=report.device_bytes,
        argument_bytes=report.device.argument_bytes,
        temp_bytes=report.device.temp_bytes,
        host_bytes=report.host_bytes,
        fits_device=None if capacity is None else report.device_bytes <= capacity,
        fits=report.fits,
    )


# --- 805 M parameters ----------------------------------------------------------------------------------------------


def mlp_stack() -> lt.LayerStack:
    """Return a stack of residual MLP layers with a squared error."""
    return lt.LayerStack(
        first=lambda outer, batch: batch["x"],
        block=lambda layer, h, batch: h + jax.nn.gelu(h @ layer["up"]) @ layer["down"],
        last=lambda outer, h, batch: (jnp.mean((h - batch["y"]) ** 2), {}),
    )


def mlp_shapes(num_layers: int = 24, width: int = 2048, tokens: int = 4096) -> tuple[Tree, Tree]:
    """Return the shapes of the stacked layers and of a batch."""
    layers = {
        "up": jax.ShapeDtypeStruct((num_layers, width, 4 * width), jnp.float32),
        "down": jax.ShapeDtypeStruct((num_layers, 4 * width, width), jnp.float32),
    }
    return layers, {name: jax.ShapeDtypeStruct((tokens, width), jnp.float32) for name in ("x", "y")}


def plain_step(stack: lt.LayerStack, tx: Any, moved: bool = False) -> Callable[..., Any]:
    """Return a step with all gradients, then one update; `moved` moves the whole state to the device and back."""

    def step(layers: Tree, opt: Tree, batch: Tree) -> Any:
        loss, grads = jax.value_and_grad(lambda layers: stack.apply({}, layers, batch, remat=True)[0])(layers)
        on_device = jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), opt) if moved else opt
        updates, new = tx.update(grads, on_device, layers)
        if moved:
            new = jax.tree.map(lambda x, old: jax.device_put(x, jax.typeof(old).memory_space), new, opt)
        return optax.apply_updates(layers, updates), new, loss

    return step


def stack_rows() -> list[Row]:
    """Compile the 805 M parameters, from everything on the device to everything on the host."""
    stack, tx = mlp_stack(), optax.adam(1e-3)
    layers, batch = mlp_shapes()
    opt = jax.eval_shape(tx.init, layers)
    rows, model = [], "24 x MLP, 805 M"
    for variant, moved in (("remat + Adam", False), ("whole-tree moves of mu and nu", True)):
        state = lt.offload.to_host(opt, "0/{mu,nu}/**") if moved else opt
        step = plain_step(stack, tx, moved)
        report = lt.memory.analyze(step, layers, state, batch, target="v5e", donate_argnums=(0, 1))
        rows.append(row(model, variant, 4096, report))
    places = {
        "layerwise, on the device": DEVICE,
        "+ optimizer state on the host": {**DEVICE, "opt_state": "host"},
        "+ layer inputs on the host": {**DEVICE, "opt_state": "host", "inputs": "host"},
        "+ parameters on the host": HOST,
    }
    for variant, place in places.items():
        step = layerwise_step(stack, tx, place=place)
        state, frozen = step.init({}, layers)
        report = lt.memory.analyze(step, state, frozen, batch, target="v5e", donate_argnums=0)
        rows.append(row(model, variant, 4096, report))
    return rows


# --- values --------------------------------------------------------------------------------------------------------


def value_rows() -> list[dict[str, Any]]:
    """Train twenty steps on the CPU, and return the largest difference of any parameter from plain training."""
    rng = np.random.default_rng(0)
    width = 64
    layers = {
        "up": jnp.asarray(rng.normal(0, 0.1, (6, width, 4 * width)), jnp.float32),
        "down": jnp.asarray(rng.normal(0, 0.1, (6, 4 * width, width)), jnp.float32),
    }
    data = [{name: jnp.asarray(rng.normal(size=(32, width)), jnp.float32) for name in ("x", "y")} for _ in range(20)]
    llama = init(
        DecoderConfig(
            vocab_size=96,
            hidden_size=32,
            intermediate_size=64,
            num_layers=4,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            tie_embeddings=True,
        ),
        key=jax.random.key(0),
    )
    tokens = rng.integers(0, 96, (20, 4, 17))
    text = [{"tokens": jnp.asarray(t[:, :-1], jnp.int32), "labels": jnp.asarray(t[:, 1:], jnp.int32)} for t in tokens]
    models = {
        "MLP stack": (mlp_stack(), {"outer": {}, "layers": layers}, data, 0.003),
        "tied Llama": (llama.stack, {"outer": llama.outer, "layers": llama.layers}, text, 0.3),
    }
    rows = []
    for name, (stack, params, batches, max_norm) in models.items():
        beside = jax.tree.map(lambda leaf: jnp.nextafter(leaf, jnp.inf), params)
        for mode in (None, "exact", "previous", "layer"):
            for count in (1, 4):
                options = (batches, mode, max_norm, count)
                theirs = train_plain(stack, params, *options)
                rows.append(
                    {
                        "model": name,
                        "clip": mode or "none",
                        "microbatches": count,
                        "max_difference": difference(train_layerwise(stack, params, *options), theirs),
                        "of_rounding": difference(train_plain(stack, beside, *options), theirs),
                    }
                )
    return rows


def difference(ours: Tree, theirs: Tree) -> float:
    """Return the largest difference between any two numbers."""
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    return max(float(np.max(np.abs(np.asarray(a) - np.asarray(b)))) for a, b in pairs)


def train_layerwise(stack: Any, params: Tree, batches: Any, mode: str | None, max_norm: float, count: int) -> Tree:
    """Train with `layerwise_step`, everything on the host."""
    clip = None if mode is None else Clip(max_norm=max_norm, mode=mode)
    step = layerwise_step(stack, optax.adam(1e-3), place=HOST, clip=clip, num_microbatches=count)
    copied = jax.tree.map(lambda x: jnp.array(x, copy=True), params)
    state, frozen = step.init(copied["outer"], copied["layers"])
    jitted = jax.jit(step, donate_argnums=0)
    for batch in batches:
        state, _ = jitted(state, frozen, batch)
    outer, layers = step.parameters(state, frozen)
    return {"outer": outer, "layers": layers}


def train_plain(stack: Any, params: Tree, batches: Any, mode: str | None, max_norm: float, count: int) -> Tree:
    """Train with all gradients at once, accumulated and clipped according to `mode`, in plain Optax and JAX."""
    tx = optax.adam(1e-3)

    def shrink(norm: Any) -> Any:
        return jnp.minimum(1.0, max_norm / jnp.maximum(norm, 1e-30))

    def clip(grads: Tree, previous: Any) -> Tree:
        if mode is None:
            return grads
        if mode == "layer":

            def norms(layer: Any) -> Any:
                return jnp.sqrt(sum(jnp.sum(g**2, axis=tuple(range(1, g.ndim))) for g in jax.tree.leaves(layer)))

            factors = shrink(norms(grads["layers"]))
            return {
                "outer": jax.tree.map(lambda g: g * shrink(jnp.linalg.norm(g)), grads["outer"]),
                "layers": jax.tree.map(lambda g: g * factors.reshape(-1, *[1] * (g.ndim - 1)), grads["layers"]),
            }
        norm = optax.tree.norm(grads) if mode == "exact" else previous
        return jax.tree.map(lambda g: g * shrink(norm), grads)

    def loss_fn(params: Tree, batch: Tree) -> Any:
        return stack.apply(params["outer"], params["layers"], batch, remat=True)[0]

    grad_fn = lt.accumulate(jax.value_and_grad(loss_fn), count)

    @jax.jit
    def step(params: Tree, opt: Tree, previous: Any, batch: Tree) -> Any:
        _, grads = grad_fn(params, batch)
        updates, opt = tx.update(clip(grads, previous), opt, params)
        return optax.apply_updates(params, updates), opt, optax.tree.norm(grads)

    opt, norm = tx.init(params), jnp.float32(0)
    for batch in batches:
        params, opt, norm = step(params, opt, norm, batch)
    return params


# --- Llama shapes --------------------------------------------------------------------------------------------------


def llama_report(
    config: DecoderConfig, place: dict[str, str], *, num_microbatches: int, target: str = "v5e", shard: int = 1
) -> Any:
    """Return the memory report of full-parameter AdamW, 4,096 tokens per microbatch."""
    model = jax.eval_shape(
        lambda key: init(config, key=key, dtype=jnp.float32, compute_dtype=jnp.bfloat16), jax.random.key(0)
    )
    outer, layers = model.outer, model.layers
    tokens = jax.ShapeDtypeStruct((num_microbatches * max(1, shard), 4096 // max(1, shard)), jnp.int32)
    batch = {"tokens": tokens, "labels": tokens}
    if shard > 1:
        devices = lt.target(target).devices()[:shard]
        mesh = jax.make_mesh((shard,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices)
        outer, layers, batch = sharded((outer, layers, batch), mesh)
    step = layerwise_step(model.stack, optax.adamw(1e-5), place=place, num_microbatches=num_microbatches)
    state, frozen = step.init(outer, layers)
    roles = {"state": 0, "batch": 2}
    return lt.memory.analyze(step, state, frozen, batch, target=target, roles=roles, donate_argnums=0)


def sharded(trees: tuple[Tree, Tree, Tree], mesh: Any) -> tuple[Tree, Tree, Tree]:
    """Shard matrices along their last axis and the batch along its first; replicate the rest."""
    outer, layers, batch = trees

    def placed(leaf: Any, spec: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jax.NamedSharding(mesh, spec))

    return (
        jax.tree.map(lambda x: placed(x, jax.P(*[None] * (x.ndim - 1), "fsdp") if x.ndim == 2 else jax.P()), outer),
        jax.tree.map(lambda x: placed(x, jax.P(None, None, "fsdp") if x.ndim == 3 else jax.P()), layers),
        jax.tree.map(lambda x: placed(x, jax.P("fsdp")), batch),
    )


def llama_8b_rows() -> list[Row]:
    """Compile 8 B for one v5e."""
    rows = []
    for variant, place in (("embedding and head on the device", {}), ("everything on the host", HOST)):
        for count in (1, 16):
            report = llama_report(LLAMA_8B, place, num_microbatches=count)
            name = f"{variant}, {count} microbatch{'es' if count > 1 else ''}"
            rows.append(row("Llama 3 8B, AdamW", name, 4096 * count, report))
    return rows


def llama_70b_rows() -> list[Row]:
    """Compile 70 B for eight v5p chips."""
    report = llama_report(LLAMA_70B, HOST, num_microbatches=1, target="v5p:2x2x2", shard=8)
    return [row("Llama 3 70B, AdamW", "everything on the host, sharded over 8", 4096, report)]


PARTS: dict[str, Callable[[], list[Any]]] = {
    "stack": stack_rows,
    "values": value_rows,
    "8b": llama_8b_rows,
    "70b": llama_70b_rows,
}


def show(console: Console, rows: list[Row]) -> None:
    """Print a table of compiled bytes."""
    table = Table(
        "model", "step", "target", "tokens", "device", "arguments", "temporaries", "host", "device fits", "fits"
    )
    for r in rows:
        sizes = (r.device_bytes, r.argument_bytes, r.temp_bytes, r.host_bytes)
        verdicts = ({True: "yes", False: "no", None: "-"}[v] for v in (r.fits_device, r.fits))
        table.add_row(r.model, r.variant, r.target, f"{r.tokens:,}", *map(format_bytes, sizes), *verdicts)
    console.print(table)


def show_values(console: Console, rows: list[dict[str, Any]]) -> None:
    """Print a table of differences."""
    table = Table("model", "clip", "microbatches", "largest difference after 20 steps", "of rounding alone")
    for r in rows:
        figures = (f"{r[name]:.1e}" for name in ("max_difference", "of_rounding"))
        table.add_row(r["model"], r["clip"], str(r["microbatches"]), *figures)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=sorted(PARTS), help="what to run (default: all)")
    parser.add_argument("--json", default=ROOT / "results" / "layerwise.json", help="where to write the raw result")
    args = parser.parse_args()
    console, content = Console(width=max(Console().width, 150)), header("python benchmarks/layerwise.py")
    for part in args.part or PARTS:
        rows = PARTS[part]()
        if part == "values":
            show_values(console, rows)
            content[part] = rows
        else:
            show(console, rows)
            content[part] = [dataclasses.asdict(r) for r in rows]
    if not args.part:
        write(Path(args.json), content)


if __name__ == "__main__":
    main()
