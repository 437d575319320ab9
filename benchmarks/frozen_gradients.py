"""Cost of frozen parameters: the programs of JAX issue 23316, and seven optimizer idioms. Compiled, never run.

    python benchmarks/frozen_gradients.py [--target v5e:2x2] [--target cpu] [--json FILE]

The issue ("Full zero arrays allocated for gradients of `stop_gradient` parameters") has three programs:

1. gradients of a rank-64 LoRA on a Linear 65536 -> 1024, float32: `jax.value_and_grad` of the whole model with
   `stop_gradient` on the base ("naive"), versus `lowtide.value_and_grad` of the trainable leaves ("ours");
2. one AdamW step of the same;
3. a stack of 34 such layers of 16,384 x 16,384 ("a 34 GB model"). A v5e chip cannot hold it even as an argument. There
   the figures are those of the plan that the compiler refused, and the program is also compiled for a v5p chip.

A second table compares the ways in which people freeze parameters with Optax, on a 24 MiB base: bytes of optimizer
state and of temporaries, and the floating-point operations of the step.

Every figure is compiled (XLA's own, per device). Figures marked "refused" belong to programs that the compiler planned
and then refused, because they do not fit.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax
from _common import ROOT, header, mib, write
from rich.console import Console
from rich.table import Table

import lowtide as lt
from lowtide.memory import MemoryReport, analyze, analyze_compiled, target

Tree = Any
RANK = 64
LORA = "**/lora_*"
ROOMY = "v5p:2x2x1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure of a program, for the naive version and for ours."""

    program: str
    """Name of the program."""
    figure: str
    """The counted quantity."""
    target: str
    """Target of the compilation."""
    naive_bytes: int
    """Bytes with the whole tree and `stop_gradient`."""
    ours_bytes: int
    """Bytes with only the trainable leaves."""
    naive_refused: bool = False
    """Whether the compiler refused the naive program, because it does not fit."""
    ours_refused: bool = False
    """Whether it refused ours."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Idiom:
    """One way to freeze parameters, compiled."""

    name: str
    """The code of the idiom."""
    state_bytes: int
    """Bytes of optimizer state that the program takes."""
    temp_bytes: int
    """Bytes of temporaries of the step."""
    flops: float | None
    """Floating-point operations of the step, as XLA counts them. None for a step with a loop, because XLA counts its
    body once.
    """


def shape(*dims: int) -> jax.ShapeDtypeStruct:
    """Return the shape of a float32 array that is never allocated."""
    return jax.ShapeDtypeStruct(dims, jnp.float32)


# Programs 1 to 3: a LoRA on every layer.


def lora_linear(in_features: int, out_features: int, rank: int = RANK) -> Tree:
    """Return the shapes of one linear layer and its adapter."""
    return {
        "base": shape(out_features, in_features),
        "lora_a": shape(rank, in_features),
        "lora_b": shape(out_features, rank),
    }


def apply_linear(layer: Tree, x: jax.Array) -> jax.Array:
    """Compute Wx + BAx without W + BA."""
    return layer["base"] @ x + layer["lora_b"] @ (layer["lora_a"] @ x)


def loss_fn(model: Sequence[Tree], x: jax.Array) -> jax.Array:
    """Compute the loss of the issue: the squared mean of the output."""
    for layer in model:
        x = apply_linear(layer, x)
    return jnp.square(jnp.mean(x))


def naive_loss_fn(model: Sequence[Tree], x: jax.Array) -> jax.Array:
    """Compute the same loss with `stop_gradient` on every base, as in the issue."""
    return loss_fn([{**layer, "base": jax.lax.stop_gradient(layer["base"])} for layer in model], x)


def naive_step(model: Tree, opt_state: Tree, x: jax.Array) -> tuple[Tree, Tree, jax.Array]:
    """Take an AdamW step over the whole model. Weight decay shrinks the frozen weights, despite `stop_gradient`."""
    loss, grads = jax.value_and_grad(naive_loss_fn)(model, x)
    updates, opt_state = TX.update(grads, opt_state, model)
    return optax.apply_updates(model, updates), opt_state, loss


def our_step(trainable: Tree, opt_state: Tree, frozen: Tree, x: jax.Array) -> tuple[Tree, Tree, jax.Array]:
    """Take an AdamW step over the trainable leaves; the frozen leaves are inputs and not outputs."""
    loss, grads = lt.value_and_grad(loss_fn, wrt=LORA)(lt.combine(trainable, frozen), x)
    updates, opt_state = TX.update(grads, opt_state, trainable)
    return optax.apply_updates(trainable, updates), opt_state, loss


TX = optax.adamw(1e-4)


def gradient_reports(model: Tree, x: Any, name: str) -> tuple[MemoryReport, MemoryReport]:
    """Analyze the gradients of the whole model, and of the trainable leaves."""
    roles = {"params": 0, "batch": 1}
    return (
        analyze(jax.value_and_grad(naive_loss_fn), model, x, target=name, roles=roles),
        analyze(lt.value_and_grad(loss_fn, wrt=LORA), model, x, target=name, roles=roles),
    )


def step_reports(model: Tree, x: Any, name: str) -> tuple[MemoryReport, MemoryReport]:
    """Analyze one AdamW step over the whole model, and over the trainable leaves."""
    trainable, frozen = lt.partition(model, LORA)
    state, whole_state = jax.eval_shape(TX.init, trainable), jax.eval_shape(TX.init, model)
    naive_roles = {"params": 0, "opt_state": 1, "batch": 2}
    our_roles = {"trainable": 0, "opt_state": 1, "frozen": 2, "batch": 3}
    donate = (0, 1)
    return (
        analyze(naive_step, model, whole_state, x, target=name, roles=naive_roles, donate_argnums=donate),
        analyze(our_step, trainable, state, frozen, x, target=name, roles=our_roles, donate_argnums=donate),
    )


def lora_figures(name: str) -> list[Figure]:
    """Return the figures of programs 1 and 2."""
    model, x = [lora_linear(65536, 1024)], shape(65536)
    figures = _compare("LoRA gradients", name, gradient_reports(model, x, name), ("output_bytes", "temp_bytes"))
    kinds = ("argument_bytes", "alias_bytes", "temp_bytes", "total_bytes")
    return figures + _compare("LoRA AdamW step", name, step_reports(model, x, name), kinds)


def deep_figures(name: str) -> list[Figure]:
    """Return the figures of program 3: 34 layers of 16,384 squared, gradients and an AdamW step."""
    model, x = [lora_linear(16384, 16384) for _ in range(34)], shape(16384)
    kinds = ("argument_bytes", "output_bytes", "temp_bytes", "total_bytes")
    return [
        *_compare("34 layers, gradients", name, gradient_reports(model, x, name), kinds),
        *_compare("34 layers, AdamW step", name, step_reports(model, x, name), ("argument_bytes", "total_bytes")),
    ]


def _compare(program: str, name: str, reports: tuple[MemoryReport, MemoryReport], kinds: Sequence[str]) -> list[Figure]:
    naive, ours = reports
    return [
        Figure(
            program=program,
            figure=kind.removesuffix("_bytes"),
            target=name,
            naive_bytes=getattr(naive.device, kind),
            ours_bytes=getattr(ours.device, kind),
            naive_refused=naive.fits is False,
            ours_refused=ours.fits is False,
        )
        for kind in kinds
    ]


# The idioms: six layers of 1024 x 1024 (24 MiB) with adapters of rank 8 (0.375 MiB).

NUM_MICROBATCHES = 4


def small_model() -> Tree:
    """Return the shapes of the model for the idioms."""
    return [lora_linear(1024, 1024, rank=8) for _ in range(6)]


def small_loss(model: Sequence[Tree], x: jax.Array) -> jax.Array:
    """Compute a mean over a batch, which can be accumulated over microbatches."""
    for layer in model:
        x = jnp.tanh(apply_linear(layer, x.T).T)
    return jnp.mean(jnp.square(x))


def frozen_small_loss(model: Sequence[Tree], x: jax.Array) -> jax.Array:
    """Compute the same loss with `stop_gradient` on every base."""
    return small_loss([{**layer, "base": jax.lax.stop_gradient(layer["base"])} for layer in model], x)


def labels(tree: Tree) -> Tree:
    """Return Optax labels for trainable and frozen leaves."""
    return jax.tree_util.tree_map_with_path(lambda path, _: "train" if "lora" in str(path[-1]) else "freeze", tree)


def whole_tree_step(
    tx: optax.GradientTransformation, loss: Callable[..., Any], *, log_norm: bool = False
) -> Callable[..., Any]:
    """Return a step that differentiates every leaf and freezes leaves with the optimizer."""

    def step(params: Tree, opt_state: Tree, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x)
        norm = optax.tree.norm(grads) if log_norm else None
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value, norm

    return step


def split_step(
    tx: optax.GradientTransformation, *, microbatches: int = 1, log_norm: bool = False
) -> Callable[..., Any]:
    """Return a step that differentiates only the trainable leaves."""
    grad_fn = lt.accumulate(lt.value_and_grad(small_loss, wrt=LORA), microbatches)

    def step(trainable: Tree, opt_state: Tree, frozen: Tree, x: jax.Array) -> Any:
        value, grads = grad_fn(lt.combine(trainable, frozen), x)
        norm = optax.tree.norm(grads) if log_norm else None
        updates, opt_state = tx.update(grads, opt_state, trainable)
        return optax.apply_updates(trainable, updates), opt_state, value, norm

    return step


def idioms(name: str) -> list[Idiom]:
    """Compile the seven idioms, and ours with two common additions: accumulation and a logged norm."""
    adam, zero = optax.adam(1e-4), optax.set_to_zero()
    partition = optax.partition({"train": adam, "freeze": zero}, labels)
    in_steps = optax.MultiSteps(adam, NUM_MICROBATCHES).gradient_transformation()
    masked = optax.masked(zero, lambda tree: jax.tree.map(lambda label: label == "freeze", labels(tree)))
    whole = [
        ("adam, stop_gradient in the loss", adam, frozen_small_loss, False),
        ("chain(adam, masked(set_to_zero))", optax.chain(adam, masked), small_loss, False),
        ("partition(adam, set_to_zero)", partition, small_loss, False),
        (
            "MultiSteps(partition(adam, set_to_zero))",
            optax.MultiSteps(partition, NUM_MICROBATCHES).gradient_transformation(),
            small_loss,
            False,
        ),
        (
            "partition(MultiSteps(adam), set_to_zero)",
            optax.partition({"train": in_steps, "freeze": zero}, labels),
            small_loss,
            False,
        ),
        ("partition + global_norm of all gradients", partition, small_loss, True),
    ]
    x = shape(32, 1024)
    rows = [
        _idiom(label, whole_tree_step(tx, loss, log_norm=log_norm), tx, small_model(), (), x, name)
        for label, tx, loss, log_norm in whole
    ]
    trainable, frozen = lt.partition(small_model(), LORA)
    ours = [
        ("split trees (ours)", split_step(adam)),
        ("split trees + accumulate (ours)", split_step(adam, microbatches=NUM_MICROBATCHES)),
        ("split trees + global_norm (ours)", split_step(adam, log_norm=True)),
    ]
    return rows + [_idiom(label, step, adam, trainable, (frozen,), x, name) for label, step in ours]


def _idiom(label: str, step: Any, tx: Any, params: Tree, frozen: tuple[Tree, ...], x: Any, name: str) -> Idiom:
    goal = target(name)
    place = jax.sharding.SingleDeviceSharding(goal.devices()[0])
    arguments = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        (params, jax.eval_shape(tx.init, params), *frozen, x),
    )
    lowered = jax.jit(step, donate_argnums=(0, 1)).trace(*arguments).lower(lowering_platforms=(goal.platform,))
    compiled = lowered.compile()
    report = analyze_compiled(compiled, target=goal, roles={"opt_state": 1})
    return Idiom(
        name=label,
        state_bytes=report.by_role["opt_state"],
        temp_bytes=report.device.temp_bytes,
        flops=None if "accumulate" in label else compiled.cost_analysis()["flops"],
    )


# Printing and writing.


def figures_table(name: str, figures: Sequence[Figure]) -> Table:
    """Return a table of naive and our figures."""
    table = Table(title=f"JAX issue 23316 on {name}: MiB on one device, compiled", caption="* refused: it does not fit")
    for column, justify in (
        ("program", "left"),
        ("target", "left"),
        ("figure", "left"),
        ("naive", "right"),
        ("ours", "right"),
    ):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for figure in figures:
        cells = (
            f"{mib(num_bytes)}{'*' * refused}"
            for num_bytes, refused in (
                (figure.naive_bytes, figure.naive_refused),
                (figure.ours_bytes, figure.ours_refused),
            )
        )
        table.add_row(figure.program, figure.target, figure.figure, *cells)
    return table


def idioms_table(name: str, rows: Sequence[Idiom]) -> Table:
    """Return a table of the idioms, with FLOPs relative to ours."""
    table = Table(title=f"Seven idioms and ours, 24 MiB frozen base, on {name}: MiB, compiled")
    for column, justify in (
        ("idiom", "left"),
        ("optimizer state", "right"),
        ("temporaries", "right"),
        ("FLOPs", "right"),
    ):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    base = next(row.flops for row in rows if row.name == "split trees (ours)") or 1.0
    for row in rows:
        table.add_row(
            row.name,
            mib(row.state_bytes),
            mib(row.temp_bytes),
            "-" if row.flops is None else f"{row.flops / base:.2f} x",
        )
    return table


def measure(name: str) -> dict[str, Any]:
    """Return all figures of one target as plain data."""
    figures = lora_figures(name) + deep_figures(name)
    if name.startswith("v5e"):
        figures += deep_figures(ROOMY)
    return {"target": name, "figures": figures, "idioms": idioms(name)}


def main() -> None:
    """Measure, print and write the raw result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", help="a target of lowtide.memory.target; default v5e:2x2 and cpu")
    parser.add_argument("--json", type=Path, help="one file for all targets, in place of benchmarks/results/")
    options = parser.parse_args()
    console = Console(width=120)
    results = []
    for name in options.target or ["v5e:2x2", "cpu"]:
        result = measure(name)
        console.print(figures_table(name, result["figures"]), idioms_table(name, result["idioms"]))
        result = {
            **header(f"python benchmarks/frozen_gradients.py --target {name}"),
            "label": "compiled",
            "target": name,
            "figures": [dataclasses.asdict(figure) for figure in result["figures"]],
            "idioms": [dataclasses.asdict(row) for row in result["idioms"]],
        }
        results.append(result)
        if options.json is None:
            write(ROOT / "results" / f"frozen_gradients-{name.replace(':', '-')}.json", result)
    if options.json is not None:
        write(options.json, {"results": results})


if __name__ == "__main__":
    main()
