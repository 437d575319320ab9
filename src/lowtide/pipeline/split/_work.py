"""FLOPs of each pass of a stage, and the operations that the split of its backward pass had to leave whole.

FLOPs are counted on the traced passes as in `jaxprs/_flops.py`, for one microbatch and all devices of a rank together.
They compare passes with each other and do not predict time.

An operation stays whole if it contributes to the input gradient and to weight gradients, and nothing shows which part
of its work belongs to which: a kernel, a `while` loop, a branch with an effect. Its work for weights then runs in the
input pass. A zero-bubble schedule lacks this work in the weight pass, where it would fill the bubble.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from ...jaxprs import kind_of, source_line
from ._cut import Pass, Reach, Sink, Source
from ._graph import Op, repeated
from ._inner import WholeOp
from ._replay import Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unsplit:
    """An operation whose work for weight gradients runs in the input pass."""

    name: str
    """Name of the JAX primitive: ``pallas_call``, ``while``, ``cond``."""
    where: str
    """Source line of the operation; empty if unknown."""
    flops: int | None
    """FLOPs of the operation; for an effect, FLOPs of the products that it waits for. None for calls of foreign code,
    whose FLOPs are unknown."""
    share: float | None
    """Share of the FLOPs of the backward pass, from 0 to 1."""
    hint: str
    """The remedy."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassFlops:
    """FLOPs of one part of a model in each pass, for one microbatch."""

    forward: int
    """FLOPs of F."""
    input: int
    """FLOPs of I: the input gradient, its recomputation, and other work that is not delayed to W."""
    weight: int
    """FLOPs of W: products for weight gradients; 0 if no matrix has a gradient."""
    unsplit: tuple[Unsplit, ...] = ()
    """Operations that stayed whole, the most expensive first."""

    @property
    def ratio(self) -> str:
        """FLOPs of F, I and W divided by those of F, in the format of ``lowtide schedule --costs``."""
        return ",".join(f"{part / max(self.forward, 1):.3g}" for part in (self.forward, self.input, self.weight))


def pass_flops(plan: Plan, sources: Sequence[Source], sinks: Sequence[Sink], whole_ops: Sequence[WholeOp]) -> PassFlops:
    """Count the FLOPs of the passes of a stage. `whole_ops` is the result of `split_nested`."""
    totals = {pass_: plan.flops(pass_) for pass_ in Pass}
    backward_flops = max(totals[Pass.INPUT] + totals[Pass.WEIGHT], 1)
    entries: list[tuple[str, str, str, int | None]] = []
    for whole_op in whole_ops:
        flops = None if kind_of(whole_op.eqn) is None else whole_op.flops
        entries.append((whole_op.eqn.primitive.name, whole_op.location, _hint(whole_op.eqn), flops))
    entries += _early_effects(plan, Reach(plan.graph, list(sources), list(sinks)), sinks)
    merged: dict[tuple[str, str, str], int | None] = {}
    for name, location, hint, flops in entries:
        previous = merged.get((name, location, hint), 0)
        merged[name, location, hint] = None if flops is None or previous is None else previous + flops
    unsplit = [
        Unsplit(
            name=name,
            where=location,
            flops=flops,
            share=None if flops is None else min(flops / backward_flops, 1.0),
            hint=hint,
        )
        for (name, location, hint), flops in merged.items()
    ]
    return PassFlops(
        forward=totals[Pass.FORWARD],
        input=totals[Pass.INPUT],
        weight=totals[Pass.WEIGHT],
        unsplit=tuple(
            sorted(unsplit, key=lambda entry: math.inf if entry.flops is None else entry.flops, reverse=True)
        ),
    )


def _early_effects(plan: Plan, reach: Reach, sinks: Sequence[Sink]) -> list[tuple[str, str, str, int | None]]:
    """Return effects that force products into the input pass which nothing else in it needs."""
    effects = [op for op in reach.nodes if isinstance(op, Op) and op.has_effects and op.eqn is not None]
    if not effects:
        return []
    run_counts = dict(repeated(plan.graph.items))
    needed = reach.ancestors(sink for sink in sinks if not sink.is_added)
    entries: list[tuple[str, str, str, int | None]] = []
    for effect in effects:
        products = [op for op in reach.ancestors([effect]) - needed if isinstance(op, Op) and op.is_heavy]
        products = [op for op in products if op is not effect and Source.COTANGENT in reach.ancestors([op])]
        if products:
            needed |= set(products)
            hint = "inspect the weight gradients that the pipeline returns: those that it reads cannot be delayed"
            flops = sum(op.flops * run_counts[op] for op in products)
            entries.append((effect.eqn.primitive.name, source_line(effect.eqn), hint, flops))
    return entries


_KERNEL = "use separate kernels for the gradients of input and weights, in the backward function of its custom_vjp"
_HINTS = {
    "while": "use lax.scan, or lax.fori_loop with known bounds: their carries are split one by one",
    "jit": "remove shardings from jax.jit inside of a block, and use lax.with_sharding_constraint instead",
    "device_put": "call jax.device_put for one array at a time",
}


def _hint(eqn: Any) -> str:
    name = eqn.primitive.name
    if name in ("cond", "shard_map"):
        effects = ", ".join(sorted({type(effect).__name__.removesuffix("Effect") for effect in eqn.effects}))
        return f"move its effect ({effects}) out of it: without an effect it is split"
    return _HINTS.get(name, _KERNEL)
