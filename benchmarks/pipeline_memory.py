"""Memory of a pipeline: schedules compared with each other, and with a differentiated scan. Compiled, never run.

    python benchmarks/pipeline_memory.py [--target v5p:2x2x1] [--large] [--json FILE] [--picture FILE]

The decoder has 16 layers (512 wide, 8 heads, MLP of 1536, bfloat16 activations) in four stages. The programs compute
the gradients of all weights for 8 to 64 microbatches of two rows of 512 tokens, with and without recomputation of
blocks. "Scan" is how MaxText and praxis pipeline: a loop over ticks, in which every stage works and passes its result
on, differentiated as a whole. Differentiation keeps every tick's residuals, so its memory grows with the number of
microbatches.

"held" is zero-bubble as PyTorch had it before its pull request 138119, when outputs of the last stage and losses lived
until the end of the step. It is our program with that behaviour added. PyTorch reports that releasing them saved 10 %
of a 7 B model's memory, and 50 % with activation checkpointing.

`--large` compiles a step of Llama-3-8B's shapes in eight stages on v5p:2x2x2, with AdamW and its state, and prints what
each rank holds.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _common import ROOT, header, mib, write
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

from lowtide import models, target
from lowtide.memory import analyze
from lowtide.pipeline import Pipeline, StageReport, schedule, value_and_grad
from lowtide.pipeline.program import _executor as executor

Tree = Any
RANKS, ROWS, LENGTH = 4, 2, 512
CONFIG = models.DecoderConfig(
    vocab_size=1024,
    hidden_size=512,
    intermediate_size=1536,
    num_layers=16,
    num_heads=8,
    num_kv_heads=8,
    head_dim=64,
    tie_embeddings=False,
)
LLAMA_3_8B = models.DecoderConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    tie_embeddings=False,
)
TWO_STAGES = ("zb-v", "v-half", "v-min")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One program."""

    program: str
    """A schedule, or the scan."""
    num_microbatches: int
    """Number of microbatches of the batch."""
    remat: bool
    """Whether blocks are recomputed."""
    argument_bytes: int
    """Weights and batch, on one device."""
    temp_bytes: int
    """Temporaries on one device."""
    device_bytes: int
    """All device memory."""
    time_over_ideal: float | None
    """Simulated time of ranks in lockstep, over the work of the busiest rank; passes take as long as their FLOPs say.
    """


def placed(tree: Tree, mesh: Mesh, spec: PartitionSpec) -> Tree:
    """Return shapes placed on a mesh."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)), tree)


def batch_of(num_microbatches: int, mesh: Mesh, rows: int = ROWS, length: int = LENGTH) -> Tree:
    """Return the shapes of tokens and labels."""
    leaf = jax.ShapeDtypeStruct((num_microbatches * rows, length), jnp.int32)
    return placed({"tokens": leaf, "labels": leaf}, mesh, PartitionSpec())


def pipelined(name: str, num_microbatches: int, mesh: Mesh, *, remat: bool) -> tuple[Callable[..., Any], Tree]:
    """Return a schedule's program and its weights."""
    stages = RANKS * (2 if name in TWO_STAGES else 1)
    made = schedule(name, num_stages=stages, num_microbatches=num_microbatches)
    pipeline = value_and_grad(model().stack, made, mesh=mesh, remat=remat, arranged=True)
    layers = placed(pipeline.arrange(model().layers), mesh, PartitionSpec("stage"))
    return pipeline, (placed(model().outer, mesh, PartitionSpec()), layers)


def scanned(num_microbatches: int, mesh: Mesh, *, remat: bool) -> tuple[Callable[..., Any], Tree]:
    """Return a program that runs all stages in every tick, differentiated through the loop over ticks."""
    stack = model().stack

    def loss(outer: Tree, layers: Tree, batch: Tree) -> Any:
        parts = jax.tree.map(lambda x: x.reshape(num_microbatches, -1, *x.shape[1:]), batch)

        def of_rank(outer: Tree, layers: Tree, parts: Tree) -> Any:
            rank = lax.axis_index("stage")

            def tick(h: Any, number: Any) -> tuple[Any, Any]:
                # Rank r works on microbatch t - r in tick t. Outside that range it repeats the first or the last
                # microbatch, and nothing uses the results.
                at = jnp.clip(number - rank, 0, num_microbatches - 1)
                part = jax.tree.map(lambda x: x[at], parts)
                h = jnp.where(rank == 0, stack.first(outer, part), h)
                block = jax.checkpoint(stack.block, prevent_cse=False) if remat else stack.block
                h = lax.scan(lambda h, layer: (block(layer, h, part), None), h, layers)[0]
                return lax.ppermute(h, "stage", [(i, (i + 1) % RANKS) for i in range(RANKS)]), h

            part = jax.tree.map(lambda x: x[0], parts)
            h = jnp.zeros_like(stack.first(outer, part))
            outputs = lax.scan(tick, h, jnp.arange(num_microbatches + RANKS - 1))[1][RANKS - 1 :]
            ends = lax.map(lambda both: stack.last(outer, *both)[0], (outputs, parts))
            return lax.psum(jnp.where(rank == RANKS - 1, jnp.mean(ends), 0), "stage")

        places = (PartitionSpec(), PartitionSpec("stage"), PartitionSpec())
        return jax.shard_map(of_rank, mesh=mesh, in_specs=places, out_specs=PartitionSpec(), check_vma=False)(
            outer, layers, parts
        )

    weights = placed(model().outer, mesh, PartitionSpec()), placed(model().layers, mesh, PartitionSpec("stage"))
    return jax.value_and_grad(loss, argnums=(0, 1)), weights


@functools.cache
def model() -> models.Decoder:
    """Return the shapes of the decoder."""
    return jax.eval_shape(lambda: models.init(CONFIG, key=jax.random.key(0), compute_dtype=jnp.bfloat16))


def held(num_microbatches: int, mesh: Mesh, *, remat: bool) -> tuple[Callable[..., Any], Tree]:
    """Return ZB-H1 that keeps the last stage's outputs until the end of the step."""
    fn, weights = pipelined("zb-h1", num_microbatches, mesh, remat=remat)

    class Holding(executor._Run):
        def begin(self) -> Tree:
            state = super().begin()
            shape = (num_microbatches, *self.shapes.h.shape)
            return {**state, "held": jnp.zeros(shape, self.shapes.h.dtype)}

        def _forward(self, state: Tree, cell: Tree, batch: Tree) -> Tree:
            state = super()._forward(state, cell, batch)
            return {**state, "held": executor.put(state["held"], state["F"][0], cell["microbatch"])}

        def totals(self, state: Tree, name: str) -> Tree:
            # Read at the end, as the caller of PyTorch's step could. The compiler cannot drop this product with 0,
            # because NaN * 0 is NaN.
            end = jnp.max(state["held"]).astype(jnp.float32) * 0
            return jax.tree.map(lambda total: total + end, super().totals(state, name))

    def run(*args: Any) -> Any:
        before = executor._Run
        executor._Run = Holding
        try:
            return fn(*args)
        finally:
            executor._Run = before

    return run, weights


def measure(name: str, numbers: Sequence[int]) -> list[Row]:
    """Compile every program for one target."""
    mesh = Mesh(np.array(target(name).devices()[:RANKS]), ("stage",))
    programs = {one: functools.partial(pipelined, one) for one in ("gpipe", "1f1b", "zb-h1", "auto", *TWO_STAGES)}
    programs |= {"zb-h1, held": held, "scan": scanned}
    rows = []
    for remat in (False, True):
        for program, make in programs.items():
            # GPipe keeps all microbatches, and takes the longest to compile.
            for number in numbers if program != "gpipe" else numbers[:2]:
                fn, weights = make(number, mesh, remat=remat)
                batch = batch_of(number, mesh)
                report = analyze(fn, *weights, batch, target=name)
                ratio = (number + RANKS - 1) / number if program == "scan" else None
                if isinstance(fn, Pipeline):
                    ratio = fn.report(*weights, batch).time_over_ideal
                rows.append(
                    Row(
                        program=program,
                        num_microbatches=number,
                        remat=remat,
                        argument_bytes=report.device.argument_bytes,
                        temp_bytes=report.device.temp_bytes,
                        device_bytes=report.device_bytes,
                        time_over_ideal=ratio,
                    )
                )
    return rows


def large(name: str = "v5p:2x2x2", num_microbatches: int = 32, length: int = 4096) -> tuple[Row, StageReport]:
    """Compile a step of Llama-3-8B in eight stages."""
    mesh = Mesh(np.array(target(name).devices()[:8]), ("stage",))
    shapes = jax.eval_shape(lambda: models.init(LLAMA_3_8B, key=jax.random.key(0), compute_dtype=jnp.bfloat16))
    made = schedule(num_stages=8, num_microbatches=num_microbatches)
    pipeline = value_and_grad(shapes.stack, made, mesh=mesh, remat=True, arranged=True)
    outer, layers = placed(shapes.outer, mesh, PartitionSpec()), placed(shapes.layers, mesh, PartitionSpec("stage"))
    tx = optax.adamw(1e-4)

    def step(params: Tree, state: Tree, batch: Tree) -> Any:
        (loss, _), grads = pipeline(*params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state = jax.eval_shape(tx.init, (outer, layers))
    like = {leaf.shape: leaf.sharding for leaf in jax.tree.leaves((outer, layers))}
    whole = NamedSharding(mesh, PartitionSpec())
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=like.get(x.shape, whole)), state)
    batch = batch_of(num_microbatches, mesh, 1, length)
    report = analyze(step, (outer, layers), state, batch, target=name, donate_argnums=(0, 1))
    row = Row(
        program="Llama-3-8B, auto",
        num_microbatches=num_microbatches,
        remat=True,
        argument_bytes=report.device.argument_bytes,
        temp_bytes=report.device.temp_bytes,
        device_bytes=report.device_bytes,
        time_over_ideal=None,
    )
    return row, pipeline.report(outer, layers, batch, memory=report)


def draw(name: str, rows: Sequence[Row], path: Path) -> None:
    """Draw temporaries over microbatches, with blocks kept and recomputed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained", sharey=True)
    colors = {
        "scan": "#c44e52",
        "1f1b": "#4c72b0",
        "zb-h1": "#55a868",
        "auto": "#1f7a8c",
        "v-half": "#8172b2",
        "v-min": "#937860",
    }
    for axis, remat in zip(axes, (False, True), strict=True):
        for program, color in colors.items():
            points = [
                (r.num_microbatches, r.temp_bytes / 2**20) for r in rows if (r.program, r.remat) == (program, remat)
            ]
            label = "differentiating through a scan" if program == "scan" else program
            axis.plot(*zip(*points, strict=True), marker="o", color=color, label=label)
        axis.set(
            xscale="log", yscale="log", xlabel="microbatches", title="blocks recomputed" if remat else "blocks kept"
        )
        axis.set_xticks(sorted({row.num_microbatches for row in rows}), minor=False)
        axis.set_yticks([100, 300, 1000, 3000, 10000], minor=False)
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.yaxis.set_major_formatter("{x:,.0f}")
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("temporaries on a device, MiB")
    axes[1].legend(frameon=False, fontsize=9, loc="upper center", ncols=2)
    figure.suptitle(f"A decoder of 16 layers in four stages, compiled for {name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def table(name: str, rows: Sequence[Row]) -> Table:
    """Return a table of programs by number of microbatches."""
    numbers = sorted({row.num_microbatches for row in rows})
    made = Table(title=f"Temporaries of a pipeline on {name}: MiB on one device, compiled")
    made.add_column("program")
    made.add_column("blocks")
    made.add_column(f"time over ideal, m = {numbers[-1]}", justify="right")
    for number in numbers:
        made.add_column(f"m = {number}", justify="right")
    found = {(row.program, row.remat, row.num_microbatches): row.temp_bytes for row in rows}
    for program, remat in dict.fromkeys((row.program, row.remat) for row in rows):
        cells = (mib(found.get((program, remat, number))) for number in numbers)
        ratios = [row.time_over_ideal for row in rows if (row.program, row.remat) == (program, remat)]
        time = f"{ratios[-1]:.2f}" if ratios[-1] is not None else ""
        made.add_row(program, "recomputed" if remat else "kept", time, *cells)
    return made


def main() -> None:
    """Measure, print and write the raw results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="v5p:2x2x1", help="a TPU topology of at least four devices")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 16, 32, 64], help="how many to compile for")
    parser.add_argument("--large", action="store_true", help="compile Llama-3-8B in eight stages, and nothing else")
    parser.add_argument("--json", type=Path, help="the file, in place of one in benchmarks/results/")
    parser.add_argument("--picture", type=Path, help="also draw a PNG (needs the report extra)")
    options = parser.parse_args()
    if options.picture and options.large:
        parser.error("--picture is of microbatches, and --large has one number of them")
    name = "v5p:2x2x2" if options.large else options.target
    console = Console(width=160)
    ranks: dict[str, Any] = {}
    if options.large:
        row, report = large(name)
        rows, ranks = [row], {"ranks": report.to_dict()}
        console.print(report)
    else:
        rows = measure(name, options.microbatches)
    console.print(table(name, rows))
    result = {
        **header(f"python benchmarks/pipeline_memory.py{' --large' * options.large}"),
        "label": "compiled",
        "target": name,
        "rows": [dataclasses.asdict(row) for row in rows],
        **ranks,
    }
    file = f"pipeline_memory-{'llama-3-8b-' * options.large}{name.replace(':', '-')}.json"
    write(options.json or ROOT / "results" / file, result)
    if options.picture:
        draw(name, rows, options.picture)


if __name__ == "__main__":
    main()
