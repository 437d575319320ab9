"""Two ways to avoid gradients of frozen leaves: split the tree, or reject their cotangents afterwards.

    python benchmarks/with_refs.py [--json FILE]

The split (`lowtide.value_and_grad`) makes the frozen leaves constants of the differentiated function. The other way
differentiates everything, then requests less: ``jax.vjp(f, model)[1].with_refs(tree)(1.0)`` with `jax.ad.DontWant()` at
the frozen leaves, and `jax.ad.GradValue()` or a `Ref` at the others.

Each way runs on three programs. The first is one LoRA linear layer (65536 -> 1024, rank 64). The second is `lax.scan`
over eight layers of 1024 x 1024 with adapters of rank 8. The third is the same scan with adapters of full rank, where
every leaf has one shape. Figures:

- compiled: output and temporary bytes under `jit`;
- eager: the residuals that live between forward and backward, and the equations that build an array of a frozen
  weight's size or more (each allocates when nothing is jitted), counted on the jaxpr. If adapters are as large as the
  base, their own gradients are included;
- measured: whether the gradients equal `jax.value_and_grad`'s, bit for bit and within 1e-5, run on the CPU.
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
from _common import ROOT, header, mib, write
from rich.console import Console
from rich.table import Table

import lowtide as lt
from lowtide.core import leaf_bytes
from lowtide.memory import analyze

Tree = Any
LORA = "**/lora_*"
TARGETS = ("v5e:2x2", "cpu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """One program with one way."""

    program: str
    """Name of the program."""
    way: str
    """How the frozen leaves are excluded."""
    error: str | None = None
    """The error that JAX raised, if any."""
    output_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    """Compiled bytes of outputs, per target."""
    temp_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    """Compiled bytes of temporaries, per target."""
    residual_bytes: int | None = None
    """Bytes that live between forward and backward when nothing is jitted, without the arguments."""
    large_equations: int | None = None
    """Number of equations whose result is at least as large as a frozen weight."""
    equal_bits: bool | None = None
    """Whether gradients equal those of `jax.value_and_grad`, bit for bit, jitted."""
    equal_close: bool | None = None
    """Whether they are equal within 1e-5, jitted and eagerly."""


def single_layer(model: Tree, x: jax.Array) -> jax.Array:
    """Compute the loss of JAX issue 23316."""
    return jnp.square(jnp.mean(_linear(model, x)))


def scanned_layers(model: Tree, x: jax.Array) -> jax.Array:
    """Compute a loss of layers that are stacked on a leading axis, as in decoders."""

    def body(h: jax.Array, layer: Tree) -> tuple[jax.Array, None]:
        return jnp.tanh(_linear(layer, h)), None

    return jnp.mean(jnp.square(jax.lax.scan(body, x, model)[0]))


def _linear(layer: Tree, x: jax.Array) -> jax.Array:
    return layer["base"] @ x + layer["lora_b"] @ (layer["lora_a"] @ x)


def _layer(*leading: int, out_features: int, in_features: int, rank: int) -> Tree:
    dims = {"base": (out_features, in_features), "lora_a": (rank, in_features), "lora_b": (out_features, rank)}
    return {name: jax.ShapeDtypeStruct((*leading, *dim), jnp.float32) for name, dim in dims.items()}


PROGRAMS: dict[str, tuple[Callable[..., Any], Tree, Any]] = {
    "LoRA linear": (
        single_layer,
        _layer(out_features=1024, in_features=65536, rank=64),
        jax.ShapeDtypeStruct((65536,), jnp.float32),
    ),
    "scan over 8 layers": (
        scanned_layers,
        _layer(8, out_features=1024, in_features=1024, rank=8),
        jax.ShapeDtypeStruct((1024, 32), jnp.float32),
    ),
    "scan, equal shapes": (
        scanned_layers,
        _layer(8, out_features=256, in_features=256, rank=256),
        jax.ShapeDtypeStruct((256, 32), jnp.float32),
    ),
}


def split(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return our gradient function."""
    return lambda model, x: lt.value_and_grad(loss, wrt=LORA)(model, x)


def dont_want(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return a gradient function that uses `with_refs` with values for the trainable leaves."""

    def run(model: Tree, x: jax.Array) -> Any:
        value, vjp = jax.vjp(lambda model: loss(model, x), model)
        wanted = {name: jax.ad.GradValue() if "lora" in name else jax.ad.DontWant() for name in model}
        (grads,) = vjp.with_refs(wanted)(jnp.ones_like(value))
        return value, {name: grads[name] if "lora" in name else None for name in model}

    return run


def into_refs(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return a gradient function that uses `with_refs` to accumulate into a `Ref` for each trainable leaf."""

    def run(model: Tree, x: jax.Array) -> Any:
        value, vjp = jax.vjp(lambda model: loss(model, x), model)
        refs = {name: jax.new_ref(jnp.zeros_like(leaf)) for name, leaf in model.items() if "lora" in name}
        vjp.with_refs({name: refs.get(name, jax.ad.DontWant()) for name in model})(jnp.ones_like(value))
        return value, {name: refs[name][...] if name in refs else None for name in model}

    return run


def stop_gradient(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return the common gradient function: it differentiates every leaf and returns zeros for the frozen ones."""

    def frozen(model: Tree, x: jax.Array) -> Any:
        return loss({**model, "base": jax.lax.stop_gradient(model["base"])}, x)

    return jax.value_and_grad(frozen)


WAYS = {
    "split the tree (ours)": split,
    "with_refs, DontWant + GradValue": dont_want,
    "with_refs, DontWant + Ref": into_refs,
    "value_and_grad, stop_gradient": stop_gradient,
}


def measure(program: str, way: str) -> Outcome:
    """Compile, count and compare one program with one way."""
    loss, model, x = PROGRAMS[program]
    fn = WAYS[way](loss)
    try:
        jaxpr = jax.make_jaxpr(fn)(model, x).jaxpr
    except ValueError as error:
        return Outcome(program=program, way=way, error=str(error).splitlines()[0])
    reports = {name: analyze(fn, model, x, target=name) for name in TARGETS}
    bits, close = _agreement(loss, fn, model, x)
    return Outcome(
        program=program,
        way=way,
        output_bytes={name: report.device.output_bytes for name, report in reports.items()},
        temp_bytes={name: report.device.temp_bytes for name, report in reports.items()},
        residual_bytes=_residual_bytes(loss, way, model, x),
        large_equations=_large_equations(jaxpr, leaf_bytes(model["base"])),
        equal_bits=bits,
        equal_close=close,
    )


def _residual_bytes(loss: Callable[..., Any], way: str, model: Tree, x: Any) -> int | None:
    """Return the bytes of the residuals of `jax.vjp` that are not arguments."""
    if way.startswith("value_and_grad"):
        return None
    trainable, frozen = lt.partition(model, LORA)

    def residuals(model: Tree, trainable: Tree, frozen: Tree, x: Any) -> Any:
        if way.startswith("split"):
            return jax.vjp(lambda t: loss(lt.combine(t, frozen), x), trainable)[1].opaque_residuals
        return jax.vjp(lambda m: loss(m, x), model)[1].opaque_residuals

    # Residuals that are inputs of the jaxpr (a closed-over frozen weight) take no additional bytes.
    jaxpr = jax.make_jaxpr(residuals)(model, trainable, frozen, x).jaxpr
    arguments = {id(var) for var in jaxpr.invars}
    own = {id(var): leaf_bytes(var.aval) for var in jaxpr.outvars if id(var) not in arguments}
    return sum(own.values())


def _large_equations(jaxpr: Any, threshold: int) -> int:
    """Return the number of equations with a result of at least `threshold` bytes, including those in sub-programs."""
    count = 0
    for equation in jaxpr.eqns:
        inner = [
            value for value in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr) if _is_jaxpr(value)
        ]
        count += sum(_large_equations(getattr(value, "jaxpr", value), threshold) for value in inner)
        sizes = [leaf_bytes(var.aval) for var in equation.outvars if hasattr(var.aval, "shape")]
        count += not inner and any(size >= threshold for size in sizes)
        # A loop also builds the arrays that it stacks.
        count += (
            bool(inner) and equation.primitive.name in ("scan", "while") and any(size >= threshold for size in sizes)
        )
    return count


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns")


def _agreement(loss: Callable[..., Any], fn: Callable[..., Any], model: Tree, x: Any) -> tuple[bool, bool]:
    rng = np.random.default_rng(0)
    values = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * 0.02, leaf.dtype), (model, x))
    expected = jax.jit(jax.value_and_grad(loss))(*values)[1]
    jitted, eager = jax.jit(fn)(*values)[1], fn(*values)[1]
    names = [name for name in model if "lora" in name]
    bits = all(np.array_equal(jitted[name], expected[name]) for name in names)
    close = all(
        np.allclose(got[name], expected[name], rtol=1e-5, atol=1e-5 * float(jnp.max(jnp.abs(expected[name]))))
        for name in names
        for got in (jitted, eager)
    )
    return bits, close


def table(outcomes: list[Outcome]) -> Table:
    """Return a table with one row per program and way."""
    table = Table(title="Frozen leaves without cotangents, MiB")
    for column in ("program", "way"):
        table.add_column(column)
    for name in TARGETS:
        table.add_column(f"output, {name} (compiled)", justify="right")
        table.add_column(f"temp, {name} (compiled)", justify="right")
    for column in ("eager residuals", "large equations", "equal bits", "equal 1e-5"):
        table.add_column(column, justify="right")
    for row in outcomes:
        if row.error is not None:
            table.add_row(row.program, row.way, f"[red]{row.error}", *[""] * 7)
            continue
        compiled = [mib(figures[name]) for name in TARGETS for figures in (row.output_bytes, row.temp_bytes)]
        eager = [mib(row.residual_bytes), str(row.large_equations)]
        table.add_row(row.program, row.way, *compiled, *eager, str(row.equal_bits), str(row.equal_close))
    return table


def main() -> None:
    """Measure, print and write the raw results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=ROOT / "results" / "with_refs.json")
    options = parser.parse_args()
    outcomes = [measure(program, way) for program in PROGRAMS for way in WAYS]
    Console(width=170).print(table(outcomes))
    rows = [dataclasses.asdict(outcome) for outcome in outcomes]
    write(options.json, {**header("python benchmarks/with_refs.py"), "outcomes": rows})


if __name__ == "__main__":
    main()
