"""The decisions of a plan: what a step keeps of each layer until the backward pass, and what that costs and saves.

`Remat` applies decisions: while it is the value of `lowtide.core.hidden_pass`, each `LayerStack.hidden` runs with it.
`measure` traces a step, and counts for each name of its layers the bytes that keeping costs and the FLOPs that it
saves. Nothing is compiled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax

from ..core import ConfigError, HiddenPass, LayerStack, Tree, hidden_pass, num_layers
from ..hlo import place_arguments
from ..jaxprs import jaxpr_flops, plain
from ..offload import checkpoint, named_residuals, tag
from ..targets import Target

Action = Literal["keep", "recompute"]


@dataclasses.dataclass(frozen=True)
class Decision:
    """The treatment of values of each layer between the forward and the backward pass."""

    names: tuple[str, ...]
    """Names of the values. Several names form one decision if the values save FLOPs only together."""
    action: Action
    """``keep`` on the device, or ``recompute`` in the backward pass."""
    num_bytes: int
    """Bytes of the values of all layers, for one microbatch."""
    flops: int
    """FLOPs of a whole step that keeping the values saves."""

    @property
    def label(self) -> str:
        """The names as one text."""
        return " + ".join(self.names)


@dataclasses.dataclass(frozen=True)
class Remat:
    """A `lowtide.core.HiddenPass`: recompute each layer in the backward pass, except for named values."""

    save: frozenset[str] = frozenset()
    """Names of values that stay on the device."""
    tagged: bool = False
    """Whether `lowtide.offload.tag` names the values, for blocks without names."""

    def hidden(self, stack: LayerStack, outer: Tree, layers: Tree, batch: Tree) -> Any:
        """Run `LayerStack.hidden` with these decisions."""
        if not self.save:
            return stack.hidden(outer, layers, batch, remat=True)
        block = tag(stack.block) if self.tagged else stack.block
        kept = checkpoint(block, save=sorted(self.save), prevent_cse=False)
        return dataclasses.replace(stack, block=kept).hidden(outer, layers, batch)


class _Recorder:
    """A `HiddenPass` that recomputes everything, and records the bytes of the names of each stack. Mutable."""

    def __init__(self) -> None:
        self.bytes = dict[str, int]()
        self.tagged = False

    def hidden(self, stack: LayerStack, outer: Tree, layers: Tree, batch: Tree) -> Any:
        def block(layer: Tree, h: Any) -> Any:
            return stack.block(layer, h, batch)

        layer = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), layers)
        args = layer, jax.eval_shape(lambda: stack.first(outer, batch))  # a batch may hold leaves that are no arrays
        layer_bytes = named_residuals(block, *args)
        if not layer_bytes:
            layer_bytes, self.tagged = named_residuals(tag(block), *args), True
        for name, num_bytes in layer_bytes.items():
            self.bytes[name] = self.bytes.get(name, 0) + num_layers(layers) * num_bytes
        return stack.hidden(outer, layers, batch, remat=True)


@dataclasses.dataclass(frozen=True)
class Measured:
    """Results of tracing a step."""

    decisions: tuple[Decision, ...]
    """Values that may be kept, with the action ``recompute``. Values that save no FLOPs are left out."""
    flops: int
    """FLOPs of the step that recomputes everything."""
    tagged: bool
    """As in `Remat`."""


class _Applied:
    """A `HiddenPass` that notes whether a stack has used it. Mutable.

    Each object is a new value for JAX's caches of traces.
    """

    def __init__(self, hidden: HiddenPass) -> None:
        self._hidden = hidden
        self.is_used = False

    def hidden(self, stack: LayerStack, outer: Tree, layers: Tree, batch: Tree) -> Any:
        self.is_used = True
        return self._hidden.hidden(stack, outer, layers, batch)


def planned(fn: Callable[..., Any], hidden: HiddenPass) -> Callable[..., Any]:
    """Return a function of arrays whose `LayerStack.hidden` runs as `hidden` says.

    It raises `ConfigError` if it runs no stack, because then the decisions would have no effect.
    """
    applied = _Applied(hidden)

    def run(*args: Any) -> Any:
        with hidden_pass(applied):
            results = fn(*args)
        if not applied.is_used:
            problem = "a plan has no effect: the loss does not call LayerStack.hidden or apply"
            raise ConfigError(problem, hint="compute the loss with lt.LayerStack(first, block, last).apply")
        return results

    return run


def measure(fn: Callable[..., Any], args: Sequence[Any], target: Target) -> Measured:
    """Trace a step for a target with each of its names, and return the decisions that save FLOPs.

    Raises:
        ConfigError: when the step runs no `LayerStack.hidden`.
    """
    # Shapes need shardings on the target: without them, tracing drops their memory spaces.
    args = place_arguments((tuple(args), {}), target, strict=True)[0][0]
    recorder = _Recorder()
    jax.jit(planned(fn, recorder)).trace(*args)

    def flops(names: Sequence[str]) -> int:
        hidden = Remat(save=frozenset(names), tagged=recorder.tagged)
        return jaxpr_flops(plain(jax.jit(planned(fn, hidden)).trace(*args).jaxpr))

    base = flops(())
    savings = {name: base - flops((name,)) for name in recorder.bytes}
    # The backward pass of a kernel may read several results, such as output and log-sum-exp. Keeping one saves nothing.
    useless = tuple(name for name, saved in savings.items() if saved <= 0)
    groups: dict[tuple[str, ...], int] = {(name,): saved for name, saved in savings.items() if saved > 0}
    if len(useless) > 1 and (saved := base - flops(useless)) > 0:
        groups[useless] = saved
    for name, saved in savings.items():
        together = (name, *useless)
        if saved > 0 and useless and (saved_together := base - flops(together)) > saved + groups.get(useless, 0):
            del groups[name,]
            groups.pop(useless, None)
            groups[together] = saved_together
            break  # decisions must not share names
    decisions = [
        Decision(names, "recompute", sum(recorder.bytes[name] for name in names), saved)
        for names, saved in groups.items()
    ]
    return Measured(tuple(decisions), base, recorder.tagged)
