"""`value_and_grad`: a pipelined loss and its gradients, as one compiled program whose memory is flat in microbatches.

A `shard_map` over one axis of a mesh, in which every rank goes through a table of ticks: in each an input, a weight and
a forward pass, where the schedule has them. A pass is a loop of no or one
iteration, so that whatever it changes (buffers, totals of gradients) is changed in place; a `switch` would return it,
and its branches copy what they hand through (JAX issues 38145, 16661). Nothing is differentiated through the ticks,
only the stages inside (JAX issue 40823); nothing is sent along the pipeline's axis inside a pass.

Between passes wait only what `_split` leaves, in as many slots as the schedule needs at a time. Gradients are added to
one total for each weight. The last function runs forward and backward in the last stage's input pass, so that logits
never wait; losses are summed as they come.

Known inefficiency: of float32 activations that only products read, a TPU keeps a copy in bfloat16 of the whole buffer
while a pass runs; activations in bfloat16, as decoders compute in, have none.

Legend: R ranks, V stages a rank, K layers of the longest stage, M microbatches, T ticks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from ...core import LayerStack, ScheduleError, StackShapes, Tree, combine, format_bytes
from ...jaxprs import jaxpr_flops, make_jaxpr
from ..schedules import Costs, Schedule, Tables, simulate, tables
from ..split import Pass, PassFlops, Rows, TracedSplit, at, put, shape_of, trace_split
from ._checks import refuse_collectives, refuse_undivided_calls
from ._inplace import InPlace, empty_buffer
from ._layout import Layout
from ._permutes import permuting_nothing, without_permutes
from ._recomputing import recomputing

State = dict[str, Any]
Came = dict[str, list[Any]]
"""What comes, by the column of a table that says where it is put."""
HERE = "from_here"
_NO_RESIDUALS = 0.5
"""Of what a forward pass leaves: a limit below it is met by no schedule."""
_NUM_FITTING = 4
"""Of how many schedules within a limit of memory the best is taken: with less of it they need not be slower."""


@dataclasses.dataclass(frozen=True)
class Program:
    """What one rank runs, on shapes that are known."""

    stack: LayerStack
    schedule: Schedule
    layout: Layout
    axis: str
    trainable: Tree
    """Of ``{"outer": ..., "layers": ...}``: the shapes of what has gradients, None in place of the others."""
    frozen: Tree
    """Those of the others."""
    batch: Tree
    """Shapes of one microbatch."""
    memory_limit: int | None
    """Bytes that what waits may take, of all devices of a rank, where the schedule says no limit."""
    remat: bool | Callable[..., bool]
    inputs_on_host: bool
    """Whether what enters each block waits for the backward pass in host memory."""
    batch_axes: tuple[str, ...]
    """Along which axes of the mesh the rows of a microbatch are divided."""
    platform: str
    """Of the devices."""

    def gradients(self, trainable: Tree, frozen: Tree, microbatches: Tree, loss_weights: Any) -> Any:
        """Run the program, under `shard_map`.

        Args:
            trainable: the weights that have gradients: outer leaves whole, layers of this rank, [V * K, ...].
            frozen: the others.
            microbatches: [M, ...].
            loss_weights: the part of each microbatch in the loss, [M].

        Returns:
            The loss, the metrics, the gradients of the outer leaves, those of this rank's layers.
        """
        run = _Run(self, trainable, frozen, microbatches, loss_weights)
        state = lax.scan(run.tick, run.begin(), jnp.asarray(run.tables.rows))[0]
        loss, metrics = lax.psum((state["loss"], state["metrics"]), self.axis)
        outer, layers = (run.totals(state, name) for name in ("outer", "layers"))
        return loss, metrics, {"outer": lax.psum(outer, self.axis), "layers": layers}

    def evaluate(self, trainable: Tree, frozen: Tree, microbatches: Tree, loss_weights: Any) -> Any:
        """Run the forward passes alone; arguments as of `gradients`.

        Returns:
            The loss and the metrics.
        """
        run = _Forward(self, trainable, frozen, microbatches, loss_weights)
        state = lax.scan(run.tick, run.begin(), jnp.asarray(run.tables.rows))[0]
        return lax.psum((state["loss"], state["metrics"]), self.axis)

    def held(self, trainable: Tree, frozen: Tree, microbatches: Tree, loss_weights: Any) -> Held:
        """Return what `gradients` holds from its first tick to its last; arguments as of it."""
        run = _Run(self, trainable, frozen, microbatches, loss_weights)
        state = run.begin()
        names = dict.fromkeys(one.buffer for part in run.parts.values() for one in part.residuals)
        return Held(
            {name: (state["buffers"][name].shape, state["buffers"][name].dtype) for name in names},
            [(leaf.shape, leaf.dtype) for leaf in state["messages"]],
            [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(run.hoisted)],
            run.tables.used,
            run.schedule,
            run.costs,
            {
                **{name: part.split.flops for name, part in run.parts.items()},
                # Forward and backward in one go.
                "last": PassFlops(forward=0, input=jaxpr_flops(self.traced_last(run.shapes.h)), weight=0),
            },
        )

    def traced_last(self, h: Tree) -> Any:
        """Return the jaxpr of `last`."""
        loss_weight = jax.ShapeDtypeStruct((), jnp.float32)
        return make_jaxpr(self.last)(self.trainable["outer"], self.frozen["outer"], h, loss_weight, self.batch)[0].jaxpr

    def last(self, trainable: Tree, frozen: Tree, h: Tree, loss_weight: Any, batch: Tree) -> Any:
        """Compute the loss, the metrics, the gradients of the outer leaves and those of what in `h` has any."""
        moved = jax.tree.map(lambda leaf: leaf if jnp.issubdtype(leaf.dtype, jnp.inexact) else None, h)

        def loss(trainable: Tree, moved: Tree) -> tuple[Any, Tree]:
            return self.stack.last(combine(trainable, frozen), _filled(h, moved), batch)

        value, back, metrics = jax.vjp(loss, trainable, moved, has_aux=True)
        grads, dh = back(loss_weight.astype(value.dtype))
        return value, metrics, grads, dh

    def splits(self, h: Tree) -> dict[str, TracedSplit]:
        """Split each part of the model into passes, for activations of these shapes."""

        def first(outer: Tree, _: Any, batch: Tree) -> Any:
            return self.divided(self.stack.first(outer, batch))

        outer, rows = (self.trainable["outer"], self.frozen["outer"]), (self.trainable["layers"], self.frozen["layers"])
        rows = [jax.tree.map(self.stage_shape, tree) for tree in rows]
        count = jax.ShapeDtypeStruct((), jnp.int32)
        return {
            "first": trace_split(first, *outer, (), self.batch, rewrite=self.sendable),
            "blocks": trace_split(self.blocks, *rows, h, self.batch, count, rewrite=self.sendable),
        }

    def blocks(self, layers: Tree, h: Any, batch: Tree, count: Any) -> Any:
        """Run the blocks of a stage, of which only `count` are there."""
        block = recomputing(self.stack.block, self.remat, inputs_on_host=self.inputs_on_host)

        def body(h: Any, row: tuple[Tree, Any]) -> tuple[Any, None]:
            layer, index = row
            if self.layout.is_even:
                return self.divided(block(layer, h, batch)), None

            def choose(one: Any, other: Any) -> Any:
                return jnp.where(index < count, one, other)

            # Padding computes on activations that no such layer is ever given: its gradient may be 0 times infinity.
            given = jax.tree.map(lambda leaf: choose(leaf, lax.stop_gradient(leaf)), h)
            return jax.tree.map(choose, self.divided(block(layer, given, batch)), h), None

        return lax.scan(body, self.divided(h), (layers, jnp.arange(self.layout.longest)))[0]

    def sendable(self, jaxpr: Any) -> Any:
        """Return a jaxpr whose collectives other ranks need not take part in."""
        return without_permutes(jaxpr, self.axis) if self.platform == "cpu" else jaxpr

    def running(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of the stack whose collectives other ranks need not take part in."""
        return permuting_nothing(fn, self.axis) if self.platform == "cpu" else fn

    def divided(self, tree: Tree) -> Tree:
        """Arrays whose rows are divided: else XLA may gather them, and divide them along weights' axes."""
        number = math.prod(jax.sharding.get_abstract_mesh().shape.get(axis, 1) for axis in self.batch_axes)

        def divide(leaf: Any) -> Any:
            if number == 1 or not jnp.ndim(leaf) or leaf.shape[0] % number:
                return leaf
            return lax.with_sharding_constraint(leaf, PartitionSpec(self.batch_axes))

        return jax.tree.map(divide, tree)

    def stage_shape(self, leaf: Any) -> Any:
        """Of a leaf of the layers, what one stage has."""
        return jax.ShapeDtypeStruct((self.layout.longest, *leaf.shape[1:]), leaf.dtype)

    def shapes(self) -> StackShapes:
        """Return the shapes of one microbatch; errors as of `LayerStack.shapes`."""
        weights = combine(self.trainable, self.frozen)
        layer = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), weights["layers"])
        return self.stack.shapes(weights["outer"], layer, self.batch)


class Held(NamedTuple):
    """What a rank has room for throughout the program."""

    buffers: dict[str, tuple[tuple[int, ...], Any]]
    """Of what waits: shape and dtype."""
    messages: list[tuple[tuple[int, ...], Any]]
    """Shapes and dtypes of what other ranks send."""
    hoisted: list[tuple[tuple[int, ...], Any]]
    """Shapes and dtypes of what is made of weights once."""
    used: dict[str, tuple[int, ...]]
    """Slots that each rank uses of them."""
    schedule: Schedule
    """What runs, made for the costs of the stages where it was made for none."""
    costs: Costs
    """Of the stages: their FLOPs, and what waits, of which the forward pass of a stage leaves 1 of a microbatch."""
    flops: dict[str, PassFlops]
    """Arithmetic of the functions of the stack, of blocks that of a stage."""


class _Weights:
    """The weights of a rank."""

    def __init__(self, trainable: Tree, frozen: Tree, longest: int) -> None:
        self.trainable, self.frozen, self._longest = trainable, frozen, longest
        self.outer, self.layers = (combine(trainable[name], frozen[name]) for name in ("outer", "layers"))

    def begin(self, chunk: Any) -> Any:
        """Return the first row of a stage."""
        return chunk * self._longest

    def of(self, chunk: Any) -> Tree:
        """Return the weights of a stage, not copied out of those of the rank."""
        return jax.tree.map(lambda leaf: Rows(leaf, self.begin(chunk)), self.layers)


class _Forward:
    """One run of the forward passes, which leaves nothing behind; `tick` is the body of its loop."""

    def __init__(self, program: Program, trainable: Tree, frozen: Tree, microbatches: Tree, loss_weights: Any) -> None:
        self.program, self.microbatches, self.loss_weights = program, microbatches, loss_weights
        self.weights = _Weights(trainable, frozen, program.layout.longest)
        self.shapes = program.shapes()
        self.tables = self._tables()
        for name, jaxpr in self._traced():
            refuse_undivided_calls(name, jaxpr, program.platform)
            refuse_collectives(name, jaxpr, program.axis)

    def _traced(self) -> Iterator[tuple[str, Any]]:
        """Trace the jaxprs of what this runs."""
        stack, batch = self.program.stack, self.program.batch
        outer, layers = jax.tree.map(jax.typeof, (self.weights.outer, self.weights.layers))
        layer = jax.tree.map(lambda leaf: leaf.update(shape=leaf.shape[1:]), layers)
        yield "first", make_jaxpr(stack.first)(outer, batch)[0].jaxpr
        yield "blocks", make_jaxpr(stack.block)(layer, self.shapes.h, batch)[0].jaxpr
        yield "last", make_jaxpr(stack.last)(outer, self.shapes.h, batch)[0].jaxpr

    def _tables(self) -> Tables:
        return tables(self.program.schedule, self.program.layout.layers_per_stage, forward_only=True)

    def begin(self) -> State:
        """Empty buffers."""
        h = jax.tree.leaves(self.shapes.h)
        return {
            "messages": [jnp.zeros((self.tables.num_messages, *s.shape), s.dtype) for s in h],
            "F": [jnp.zeros(s.shape, s.dtype) for s in h],
            "loss": jnp.zeros((), jnp.float32),
            "metrics": jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.float32), self.shapes.metrics),
        }

    def tick(self, state: State, row: Any) -> tuple[State, None]:
        """Do what every rank does in one tick.

        What the input passes of the row before gave is on its way while forward passes run, what these give while the
        backward passes after them do.
        """
        numbers = dict(zip(self.tables.columns, at(row, lax.axis_index(self.program.axis)), strict=True))
        cells: dict[str, State] = {}
        for name, number in numbers.items():
            kind, _, column = name.partition("/")
            cells.setdefault(kind, {})[column] = number
        back = self._given("I", state) if "I" in state else {}
        state = self._run(self._forward, _after(back, state, "F"), cells["F"])
        state["F"], back = lax.optimization_barrier((state["F"], back))
        came = self._given("F", state)
        state = self._stored(state, cells["I"], back)
        state = self._stored(state, cells["F"], {name: came.pop(name) for name in [*came] if name == HERE})
        if "I" in state:
            state = self._backward(_after(came, state, "I"), cells)
            state["I"], came = lax.optimization_barrier((state["I"], came))
        return self._stored(state, cells["F"], came), None

    def _backward(self, state: State, cells: dict[str, State]) -> State:
        """Run the backward passes of a row."""
        return state

    def _run(self, run: Callable[[State, State, Tree], State], state: State, cell: State) -> State:
        """Run a pass, if the tick has it."""
        # A microbatch of weight 0 contributes nothing, also where its activations or its loss are no numbers.
        counts = at(self.loss_weights, cell["microbatch"]) != 0

        def one(state: State, cell: State) -> State:
            return run(state, cell, jax.tree.map(lambda x: at(x, cell["microbatch"]), self.microbatches))

        return _when(counts & (cell["runs"] == 1), one, state, cell)

    def _forward(self, state: State, cell: State, batch: Tree) -> State:
        stack, outer = self.program.stack, self.weights.outer

        def first(_: Tree, batch: Tree) -> Tree:
            return self.program.divided(self.program.running(stack.first)(outer, batch))

        h = _when(cell["is_first"] == 1, first, self._message(state, cell), batch)
        layers = jax.tree.map(
            lambda rows: lax.dynamic_slice_in_dim(rows.array, rows.begin, self.program.layout.longest),
            self.weights.of(cell["chunk"]),
        )
        h = self.program.running(self.program.blocks)(layers, h, batch, cell["num_layers"])

        def last(state: State, given: tuple[Tree, Tree]) -> State:
            found = self.program.running(stack.last)(outer, *given)
            return self._add_loss(state, at(self.loss_weights, cell["microbatch"]), *found)

        return {**_when(cell["is_last"] == 1, last, state, (h, batch)), "F": jax.tree.leaves(h)}

    def _message(self, state: State, cell: State) -> Tree:
        """Return what a neighbour sent."""
        tree = jax.tree.structure(self.shapes.h)
        return tree.unflatten([at(buffer, cell["message"]) for buffer in state["messages"]])

    def _add_loss(self, state: State, loss_weight: Any, loss: Any, metrics: Tree) -> State:
        def add(total: Any, value: Any) -> Any:
            return total + loss_weight * jnp.asarray(value).astype(jnp.float32)

        return {**state, "loss": add(state["loss"], loss), "metrics": jax.tree.map(add, state["metrics"], metrics)}

    def _given(self, kind: str, state: State) -> Came:
        """Give neighbours the last results of a kind of pass, and get theirs, and what stays on this rank."""
        num_ranks = self.program.schedule.num_ranks
        found: Came = {}
        for name, step in (("from_left", 1), ("from_right", -1), (HERE, 0)):
            if self.tables.comes(kind, name):
                pairs = [(rank, (rank + step) % num_ranks) for rank in range(num_ranks)]
                found[name] = [lax.ppermute(leaf, self.program.axis, pairs) if step else leaf for leaf in state[kind]]
        return found

    def _stored(self, state: State, cell: State, came: Came) -> State:
        """Put what has come where its reader finds it."""
        messages = state["messages"]
        for name, leaves in came.items():

            def store(messages: list[Any], slot: Any, leaves: list[Any] = leaves) -> list[Any]:
                return [put(buffer, leaf, slot) for buffer, leaf in zip(messages, leaves, strict=True)]

            messages = _when(cell[name] >= 0, store, messages, cell[name])
        return {**state, "messages": messages}


class _Run(_Forward):
    """One run with backward passes."""

    def _tables(self) -> Tables:
        splits = self.program.splits(self.shapes.h)
        self.parts: dict[str, InPlace] = {}
        for part, name in (("first", "outer"), ("blocks", "layers")):
            num_totals = len(jax.tree.leaves(self.weights.trainable[name]))
            self.parts[part] = InPlace(part, splits[part], [f"{name}/{i}" for i in range(num_totals)])
        self.hoisted: dict[str, Any] = {"first": splits["first"].hoist(self.weights.outer)}
        each = [
            splits["blocks"].hoist(self.weights.of(chunk)) for chunk in range(self.program.schedule.stages_per_rank)
        ]
        self.hoisted["blocks"] = tuple(
            jnp.concatenate([jnp.atleast_1d(one) for one in ones]) for ones in zip(*each, strict=True)
        )
        self.costs = self._costs()
        self.schedule, made = self._fitted()
        assert self.schedule.placement == self.program.schedule.placement, "layers are where they are"
        return made

    def _fitted(self) -> tuple[Schedule, Tables]:
        """Choose the schedule for the costs of the stages, so that what waits keeps within the limit in every slot.

        What a schedule counts is residuals; messages, cotangents of the pass that runs, and slots that only the fullest
        rank uses come on top. So the limit that it is given is lowered until all of them are within ours, and of some
        that are the soonest to end is taken.

        Raises:
            ScheduleError: when none was found.
        """
        waiting = [one for part in self.parts.values() for one in part.waiting()]
        lengths, limit = self.program.layout.layers_per_stage, self.program.memory_limit
        if limit is None:
            made = self.program.schedule.fitted(self.costs)
            return made, tables(made, lengths, waiting)
        num_ranks, chunks = self.program.schedule.num_ranks, self.program.schedule.stages_per_rank
        telling = (chunks * (2 * num_ranks - 1), chunks * num_ranks)  # limits at which the order changes
        sizes: list[int] = []
        found: list[tuple[float, int, Schedule, Tables]] = []

        def tried(left: float) -> int | None:
            try:
                made = self.program.schedule.fitted(self.costs, left)
            except ScheduleError:
                return None
            table = tables(made, lengths, waiting)
            sizes.append(self._waiting_bytes(table))
            if sizes[-1] <= limit:
                found.append((simulate(made, self.costs, lockstep=True).makespan, sizes[-1], made, table))
            return sizes[-1]

        left = min(limit / self._unit_bytes(), 2 * self._most_residuals())
        while len(found) < _NUM_FITTING and left > _NO_RESIDUALS and (size := tried(left)) is not None:
            lower = left * min(limit / max(size, 1), 0.9)
            left = next((one for one in telling if lower < one < left), lower)
        for left in () if found else (chunks, telling[1]):
            tried(left)  # also of stages that leave nothing; room for as many microbatches as ranks is always enough
        if found:
            return min(found, key=lambda one: one[:2])[2:]
        raise ScheduleError(
            "memory_limit is less than what waits in any schedule that was found",
            expected=f"about {format_bytes(min(sizes))}, of all devices of a rank" if sizes else "more",
            got=format_bytes(limit),
            hint='raise it, or have smaller microbatches, more stages, remat=True or inputs="host"',
        )

    def _most_residuals(self) -> float:
        """Return what a rank keeps of all microbatches at once, in the unit of `_costs`."""
        parts = (self.costs.input_residuals, self.costs.weight_residuals, self.costs.cotangents)
        each = sum(max(part) if isinstance(part, Sequence) else part for part in parts)
        return each * self.program.schedule.stages_per_rank * self.program.schedule.num_microbatches

    def _waiting_bytes(self, made: Tables) -> int:
        """Return the bytes on the devices of a rank of all that waits: buffers and messages."""
        sizes = {one.buffer: one.num_bytes for part in self.parts.values() for one in part.residuals}
        hosted = {one.buffer for part in self.parts.values() for one in part.residuals if one.is_on_host}
        h = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.shapes.h))
        kept = sum(made.num_slots[name] * size for name, size in sizes.items() if name not in hosted)
        return kept + made.num_messages * h

    def _costs(self) -> Costs:
        """Return what the stages cost, of which the first has the first function, and the last the last, too."""
        first, blocks = (self.parts[name].split.flops for name in ("first", "blocks"))
        last = jaxpr_flops(self.program.traced_last(self.shapes.h))
        num_stages = self.program.schedule.num_stages

        def of_stages(name: str) -> tuple[float, ...]:
            found = [max(float(getattr(blocks, name)), 1.0)] * num_stages
            found[0] += getattr(first, name)
            found[-1] += last if name == "input" else 0
            return tuple(found)

        left = self.parts["blocks"].left_bytes
        unit = self._unit_bytes()
        return Costs(
            forward=of_stages("forward"),
            input=of_stages("input"),
            weight=of_stages("weight"),
            input_residuals=left(Pass.FORWARD, Pass.INPUT) / unit,
            weight_residuals=left(Pass.FORWARD, Pass.WEIGHT) / unit,
            cotangents=left(Pass.INPUT, Pass.WEIGHT) / unit,
        )

    def _unit_bytes(self) -> int:
        """Return the bytes that the forward pass of a stage leaves of one microbatch."""
        left = self.parts["blocks"].left_bytes
        return max(left(Pass.FORWARD, Pass.INPUT) + left(Pass.FORWARD, Pass.WEIGHT), 1)

    def _traced(self) -> Iterator[tuple[str, Any]]:
        yield from ((name, part.split.traced) for name, part in self.parts.items())
        yield "last", self.program.traced_last(self.shapes.h)

    def begin(self) -> State:
        buffers: State = {}
        for part in self.parts.values():
            for one in part.residuals:
                if one.buffer not in buffers:
                    buffers[one.buffer] = empty_buffer(one, self.tables.num_slots[one.buffer])
        for name in ("outer", "layers"):
            for i, leaf in enumerate(jax.tree.leaves(self.weights.trainable[name])):
                buffers[f"{name}/{i}"] = _total(leaf)
        state = super().begin()
        return {**state, "buffers": buffers, "I": [jnp.zeros_like(leaf) for leaf in state["F"]]}

    def totals(self, state: State, name: str) -> Tree:
        """Add up the gradients of the ``outer`` leaves or the ``layers``."""
        tree = jax.tree.structure(self.weights.trainable[name])
        return tree.unflatten([state["buffers"][f"{name}/{i}"] for i in range(tree.num_leaves)])

    def _backward(self, state: State, cells: dict[str, State]) -> State:
        return self._run(self._weight, self._run(self._input, state, cells["I"]), cells["W"])

    def _forward(self, state: State, cell: State, batch: Tree) -> State:
        outer, hoisted = self.weights.outer, self.hoisted

        def first(carry: tuple[Tree, State], given: tuple[State, Tree]) -> tuple[Tree, State]:
            cell, batch = given
            return self.parts["first"].forward(carry[1], cell, outer, hoisted["first"], (), batch)

        carry = self._message(state, cell), state["buffers"]
        h, buffers = _when(cell["is_first"] == 1, first, carry, (cell, batch))
        h, buffers = self.parts["blocks"].forward(buffers, cell, *self._stage(cell), h, batch, cell["num_layers"])
        return {**state, "buffers": buffers, "F": jax.tree.leaves(h)}

    def _input(self, state: State, cell: State, batch: Tree) -> State:
        outer, hoisted = self.weights.outer, self.hoisted
        loss_weight, is_last = at(self.loss_weights, cell["microbatch"]), cell["is_last"] == 1
        came = self._message(state, cell)  # of the last stage's own forward pass: activations
        dy = jax.tree.map(lambda leaf: jnp.where(is_last, jnp.zeros_like(leaf), leaf), came)
        dy, state = _when(is_last, lambda c, given: self._last(c[1], *given), (dy, state), (came, loss_weight, batch))
        buffers = state["buffers"]
        begin = self.weights.begin(cell["chunk"])
        dx, buffers = self.parts["blocks"].input(
            buffers, cell, begin, *self._stage(cell), dy, batch, cell["num_layers"]
        )
        dx = _filled(dy, dx)

        def first(buffers: State, given: tuple[State, Tree, Tree]) -> State:
            cell, *of_microbatch = given
            return self.parts["first"].input(buffers, cell, 0, outer, hoisted["first"], *of_microbatch)[1]

        buffers = _when(cell["is_first"] == 1, first, buffers, (cell, dx, batch))
        return {**state, "I": jax.tree.leaves(dx), "buffers": buffers}

    def _last(self, state: State, h: Tree, loss_weight: Any, batch: Tree) -> tuple[Tree, State]:
        """Compute the loss and its gradients, in one go: nothing of a microbatch's logits ever waits."""
        trainable, frozen = self.weights.trainable["outer"], self.weights.frozen["outer"]
        value, metrics, grads, dh = self.program.running(self.program.last)(trainable, frozen, h, loss_weight, batch)
        buffers = dict(state["buffers"])
        for i, grad in enumerate(jax.tree.leaves(grads)):
            buffers[f"outer/{i}"] += grad.astype(buffers[f"outer/{i}"].dtype)
        state = self._add_loss({**state, "buffers": buffers}, loss_weight, value, metrics)
        return _filled(jax.tree.map(jnp.zeros_like, h), dh), state

    def _weight(self, state: State, cell: State, batch: Tree) -> State:
        outer, hoisted, begin = self.weights.outer, self.hoisted, self.weights.begin(cell["chunk"])
        buffers = self.parts["blocks"].weight(
            state["buffers"], cell, begin, *self._stage(cell), batch, cell["num_layers"]
        )

        def first(buffers: State, given: tuple[State, Tree]) -> State:
            cell, batch = given
            return self.parts["first"].weight(buffers, cell, 0, outer, hoisted["first"], batch)

        return {**state, "buffers": _when(cell["is_first"] == 1, first, buffers, (cell, batch))}

    def _stage(self, cell: State) -> tuple[Tree, tuple[Any, ...]]:
        """Return the weights of the tick's stage, and what was made of them once."""
        chunk, num_chunks = cell["chunk"], self.program.schedule.stages_per_rank
        hoisted: list[Any] = []
        for whole, value in zip(self.hoisted["blocks"], self.parts["blocks"].split.of(Pass.HOISTED), strict=True):
            rows = Rows(whole, chunk * (whole.shape[0] // num_chunks))
            hoisted.append(rows if shape_of(value).shape else at(whole, chunk))
        return self.weights.of(chunk), tuple(hoisted)


def _total(leaf: Any) -> Any:
    """Zeros for gradients, divided among devices as the weight is.

    They are made of it by a choice that the compiler cannot foresee: it has nothing else to tell by how to divide them,
    and would have every device hold all of them.
    """
    never = lax.optimization_barrier(jnp.zeros((), bool))
    return jnp.where(never, leaf, jnp.zeros_like(leaf)).astype(total_dtype(leaf.dtype))


def total_dtype(dtype: Any) -> Any:
    """Of a total of gradients: float32 at least. JAX promotes no floats of eight bits and fewer by itself."""
    return jnp.dtype(jnp.float32) if jnp.dtype(dtype).itemsize < 2 else jnp.promote_types(dtype, jnp.float32)


def _when(flag: Any, run: Callable[[Any, Any], Any], state: Any, given: Any) -> Any:
    """`run` in place, if the flag is up.

    Args:
        flag: whether.
        run: of the state and what is given.
        state: what it changes.
        given: all that differs from run to run. It is tied to the loop: what a loop does not change XLA computes before
            it, also when the loop then runs no time.
    """

    def body(i: Any, state: Any) -> Any:
        return run(state, lax.optimization_barrier((i, given))[1])

    return lax.fori_loop(0, flag.astype(jnp.int32), body, state)


def _after(came: Came, state: State, name: str) -> State:
    """Have a pass begin after what is sent has come, on CPUs, by way of the results that it overwrites.

    There each device starts whatever has its arguments, and barriers are gone by then: of devices that share a stage
    one might wait in a collective of a pass for others, which wait for it where something is sent. Other platforms run
    a program in its order, which is the same on all devices.
    """
    columns = [leaves for one, leaves in came.items() if one != HERE]

    def tied(results: list[Any], columns: list[list[Any]]) -> list[Any]:
        for leaves in columns:
            results = [jnp.where(_never(leaf), leaf, result) for leaf, result in zip(leaves, results, strict=True)]
        return results

    if not columns:
        return state
    results = lax.platform_dependent(state[name], columns, cpu=tied, default=lambda results, _: results)
    return {**state, name: results}


def _never(leaf: Any) -> Any:
    """Return False for every entry, which no compiler sees."""
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
        return jnp.isnan(leaf) & (leaf == leaf)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jnp.any(_never(jax.random.key_data(leaf)), axis=-1)
    return (leaf.astype(jnp.int32) & 1) == 2


def _filled(tree: Tree, others: Tree) -> Tree:
    """Put other leaves in place of what is there, where they are not None."""
    return jax.tree.map(lambda old, new: old if new is None else new, tree, others)
