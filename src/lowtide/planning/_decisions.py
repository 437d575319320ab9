"""The decisions of a plan: what a step keeps of each layer until the backward pass, and what that costs and saves.

`Remat` applies decisions: while it is the value of `lowtide.core.hidden_pass`, each `LayerStack.hidden` runs with it.
`measure` traces a step, and counts for each name of its layers the bytes that keeping costs and the FLOPs that it
saves. Nothing is compiled.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from .. import offload
from ..core import (
    ConfigError,
    HiddenPass,
    LayerStack,
    SelectionError,
    Tree,
    hidden_in_groups,
    hidden_pass,
    memory_space,
    num_layers,
    recomputed,
    tree_bytes,
)
from ..hlo import place_arguments
from ..jaxprs import jaxpr_flops, plain
from ..memory import Job
from ..targets import Target

Action = Literal["keep", "host", "recompute"]
Memory = Literal["device", "host"]
_INPUT = "layer_input"


@dataclasses.dataclass(frozen=True)
class Decision:
    """The treatment of values of each layer between the forward and the backward pass."""

    names: tuple[str, ...]
    """Names of the values. Several names form one decision if the values save FLOPs only together."""
    action: Action
    """``keep`` on the device, move to the ``host`` and back, or ``recompute`` in the backward pass."""
    num_bytes: int
    """Bytes of the values of all layers, for one microbatch."""
    flops: int
    """FLOPs of a whole step that are saved if the values are not recomputed."""

    @property
    def label(self) -> str:
        """The names as one text."""
        return " + ".join(self.names)


@dataclasses.dataclass(frozen=True)
class Remat:
    """A `lowtide.core.HiddenPass`: recompute each layer in the backward pass, except for named values.

    Layers in host memory are streamed one at a time (`lowtide.offload.scan`), and recomputed as a whole. So are the
    layers of groups.
    """

    save: frozenset[str] = frozenset()
    """Names of values that stay on the device."""
    offload: frozenset[str] = frozenset()
    """Names of values that move to host memory in the forward pass, and back in the backward pass."""
    layer_inputs: Memory = "device"
    """Memory that holds the input of each layer, or of each group, until the backward pass."""
    layers_per_remat: int = 1
    """Largest number of layers in a group, as in `LayerStack.hidden`."""
    tagged: bool = False
    """Whether `lowtide.offload.tag` names the values, for blocks without names."""

    @property
    def names(self) -> frozenset[str]:
        """All names of values that are not recomputed."""
        return self.save | self.offload

    def hidden(self, stack: LayerStack, outer: Tree, layers: Tree, batch: Tree) -> Any:
        """Run `LayerStack.hidden` with these decisions."""
        if _is_on_host(layers):

            def body(h: Any, layer: Tree) -> tuple[Any, None]:
                return recomputed(stack.block)(layer, h, batch), None

            return offload.scan(body, stack.first(outer, batch), layers, inputs=self.layer_inputs)[0]
        # The loop over groups reloads one group ahead, so groups of one layer serve layer inputs on the host.
        if self.layers_per_remat > 1 or (self.layer_inputs == "host" and not self.names):
            moves = () if self.layer_inputs == "device" else ((_to_host, offload.to_device),)
            return hidden_in_groups(stack, outer, layers, batch, self.layers_per_remat, *moves)
        if not self.names:
            return stack.hidden(outer, layers, batch, remat=True)
        block, offloaded = stack.block, self.offload
        if self.tagged:
            block = offload.tag(block)
        if self.layer_inputs == "host":
            block, offloaded = _with_named_input(block), self.offload | {_INPUT}
        names = {"save": sorted(self.save), "offload": sorted(offloaded)}
        selected: dict[str, Any] = {argument: value for argument, value in names.items() if value}
        # The stack scans over its blocks. XLA does not merge recomputation with the forward pass across two loops, so
        # the barriers of `prevent_cse` would have no use.
        kept = offload.checkpoint(block, **selected, prevent_cse=False)
        return dataclasses.replace(stack, block=kept).hidden(outer, layers, batch)


def remat(decisions: Sequence[Decision], layer_inputs: Memory, layers_per_remat: int) -> Remat:
    """Return the `Remat` that applies decisions."""

    def names(action: Action) -> frozenset[str]:
        return frozenset(name for item in decisions if item.action == action for name in item.names)

    return Remat(names("keep"), names("host"), layer_inputs, layers_per_remat)


def _with_named_input(block: Callable[..., Any]) -> Callable[..., Any]:
    def with_named_input(layer: Tree, h: Any, batch: Tree) -> Any:
        return block(layer, checkpoint_name(h, _INPUT), batch)

    return with_named_input


def _to_host(h: Tree) -> Tree:
    """Move the inputs of a group of blocks to the host; keep integers, and vectors (a TPU cannot slice vectors)."""
    return offload.to_host(h, lambda path, leaf: leaf.ndim > 1 and jnp.issubdtype(leaf.dtype, jnp.inexact))


def _is_on_host(tree: Tree) -> bool:
    return any(memory_space(leaf) == jax.memory.Space.Host for leaf in jax.tree.leaves(tree))


def _names_of(stack: LayerStack, outer: Tree, layers: Tree, batch: Tree) -> tuple[dict[str, int], bool, int]:
    """Return the bytes of each name of one layer, whether `tag` made the names, and the bytes of a layer's input."""

    def block(layer: Tree, h: Any) -> Any:
        return stack.block(layer, h, batch)

    layer = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), layers)
    h = jax.eval_shape(lambda: stack.first(outer, batch))  # a batch may hold leaves that are no arrays
    num_bytes = tree_bytes(h)
    if named := offload.named_residuals(block, layer, h):
        return named, False, num_bytes
    return offload.named_residuals(offload.tag(block), layer, h), True, num_bytes


class _Recorder:
    """A `HiddenPass` that recomputes everything, and records the bytes of the names of each stack. Mutable."""

    def __init__(self) -> None:
        self.bytes = dict[str, int]()
        self.input_bytes = 0
        self.num_layers = 0

    def hidden(self, stack: LayerStack, outer: Tree, layers: Tree, batch: Tree) -> Any:
        named, _, input_bytes = _names_of(stack, outer, layers, batch)
        length = num_layers(layers)
        if not _is_on_host(layers):
            for name, num_bytes in named.items():
                self.bytes[name] = self.bytes.get(name, 0) + length * num_bytes
        self.input_bytes += length * input_bytes
        self.num_layers = max(self.num_layers, length)
        return Remat().hidden(stack, outer, layers, batch)


@dataclasses.dataclass(frozen=True)
class Measured:
    """Results of tracing a step."""

    decisions: tuple[Decision, ...]
    """Values that may be kept, with the action ``recompute``. Those that save no FLOPs come last, with 0 FLOPs."""
    flops: int
    """FLOPs of the step that recomputes everything."""
    recomputed_flops: int
    """FLOPs of `flops` that a step which keeps all values does not need: about those of the layers' forward pass."""
    group_flops: int = 0
    """FLOPs that the step with groups of `layers_per_remat` layers needs in addition."""
    layers_per_remat: int = 1
    """About the square root of the number of layers."""
    input_bytes: int = 0
    """Bytes of the inputs of all layers, for one microbatch."""
    num_layers: int = 0
    """Layers of the longest stack."""


class _Applied:
    """A `HiddenPass` that notes whether a stack has used it, and which names its stacks have. Mutable.

    Each object is a new value for JAX's caches of traces.
    """

    def __init__(self, hidden: HiddenPass) -> None:
        self._hidden = hidden
        self.is_used = False
        self.unused = hidden.names if isinstance(hidden, Remat) else frozenset[str]()
        """Names that no stack has."""

    def hidden(self, stack: LayerStack, outer: Tree, layers: Tree, batch: Tree) -> Any:
        self.is_used = True
        hidden = self._hidden
        if isinstance(hidden, Remat) and hidden.names:
            # A loss may run several stacks, whose layers have different names.
            named, tagged, _ = _names_of(stack, outer, layers, batch)
            self.unused -= named.keys()
            save, offloaded = hidden.save & named.keys(), hidden.offload & named.keys()
            hidden = dataclasses.replace(hidden, save=save, offload=offloaded, tagged=tagged)
        return hidden.hidden(stack, outer, layers, batch)


def planned(fn: Callable[..., Any], hidden: HiddenPass) -> Callable[..., Any]:
    """Return a function of arrays whose `LayerStack.hidden` runs as `hidden` says.

    It raises `ConfigError` if it runs no stack, and `SelectionError` for a name that no stack has, because then
    decisions would have no effect.
    """
    applied = _Applied(hidden)

    def run(*args: Any) -> Any:
        with hidden_pass(applied):
            results = fn(*args)
        if not applied.is_used:
            problem = "a plan has no effect: the loss does not call LayerStack.hidden or apply"
            raise ConfigError(problem, hint="compute the loss with lt.LayerStack(first, block, last).apply")
        if applied.unused:
            problem = f"a plan keeps values that no layer has: {', '.join(sorted(applied.unused))}"
            raise SelectionError(problem, hint="make the plan for this model and loss, with lt.plan")
        return results

    return run


def runs_stack(job: Job, target: Target) -> bool:
    """Return whether a step runs a `LayerStack.hidden`."""
    args = place_arguments((job.args, {}), target, strict=True)[0][0]
    with jax.default_device(target.devices()[0]):
        applied = _Applied(Remat())

        def run(*args: Any) -> Any:
            with hidden_pass(applied):
                return job.fn(*args)

        jax.jit(run).trace(*args)
    return applied.is_used


def measure(fn: Callable[..., Any], args: Sequence[Any], target: Target) -> Measured:
    """Trace a step for a target with each of its names, and return what keeping each value costs and saves.

    Raises:
        ConfigError: when the step runs no `LayerStack.hidden`.
    """
    # Shapes need shardings on the target: without them, tracing drops their memory spaces.
    args = place_arguments((tuple(args), {}), target, strict=True)[0][0]
    recorder = _Recorder()
    jax.jit(planned(fn, recorder)).trace(*args)

    def traced_flops(hidden: HiddenPass) -> int:
        return jaxpr_flops(plain(jax.jit(planned(fn, hidden)).trace(*args).jaxpr))

    @functools.cache
    def flops(*names: str) -> int:
        return traced_flops(Remat(save=frozenset(names)))

    base = flops()
    savings = {name: base - flops(name) for name in recorder.bytes}
    # The backward pass of a kernel may read several results, such as output and log-sum-exp. Keeping one saves nothing.
    useless = tuple(name for name, saved in savings.items() if saved <= 0)
    groups: dict[tuple[str, ...], int] = {(name,): saved for name, saved in savings.items() if saved > 0}
    if len(useless) > 1 and (saved := base - flops(*useless)) > 0:
        groups[useless] = saved
    for name, saved in savings.items():
        together = (name, *useless)
        if saved > 0 and useless and (saved_together := base - flops(*together)) > saved + groups.get(useless, 0):
            del groups[name,]
            groups.pop(useless, None)
            groups[together] = saved_together
            break  # decisions must not share names
    named = {name for names in groups for name in names}
    groups |= {(name,): 0 for name in savings if name not in named}
    decisions = [
        Decision(names, "recompute", sum(recorder.bytes[name] for name in names), saved)
        for names, saved in groups.items()
    ]
    group_size = round(recorder.num_layers**0.5)
    group_flops = traced_flops(Remat(layers_per_remat=group_size)) - base if group_size > 1 else 0
    return Measured(
        decisions=tuple(decisions),
        flops=base,
        recomputed_flops=base - flops(*sorted(recorder.bytes)),
        group_flops=group_flops,
        layers_per_remat=group_size,
        input_bytes=recorder.input_bytes,
        num_layers=recorder.num_layers,
    )
