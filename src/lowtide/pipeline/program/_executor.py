"""The SPMD program of a pipeline: it computes the loss and its gradients in the order of a schedule.

The program is a `shard_map` over one axis of a mesh. Every rank runs a table of ticks; a tick has at most an input, a
weight and a forward pass. Between passes, only the values that the split saves exist, in as many slots as the schedule
needs at a time. So memory does not grow with the number of microbatches, unless the schedule keeps all of them.
Gradients are added to one total for each weight.

Legend: R ranks, V stages per rank, K layers of the longest stage, M microbatches, T ticks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core as jex
from jax.sharding import PartitionSpec

from ...core import (
    INTERNAL_PREFIX,
    LAYER_INPUT,
    LayerStack,
    ScheduleError,
    StackShapes,
    StructureError,
    Tree,
    check_host_slices,
    combine,
    format_bytes,
    is_key,
    keep_layer_inputs,
    recomputed,
)
from ...jaxprs import jaxpr_flops, make_jaxpr
from ..schedules import Costs, Schedule, Tables, Waiting, simulate, tables
from ..split import (
    Buffers,
    Environment,
    Pass,
    PassFlops,
    Rows,
    Slot,
    TracedSplit,
    Value,
    at,
    put,
    replace_leaves,
    trace_split,
)
from ._collectives import refuse_collectives, refuse_undivided_calls, without_permutes
from ._layout import Layout

# A pass is a loop of zero or one iterations, so that it changes buffers and gradient totals in place. A `switch` would
# return them, and its branches copy the values that they pass through (JAX issues 38145, 16661). JAX differentiates
# only the stages, never the ticks (JAX issue 40823). No pass communicates along the pipeline's axis.
#
# The last function runs forward and backward in the input pass of the last stage, so logits are never kept. Losses are
# added to a sum as they are computed.
#
# Known inefficiency: if only products read a float32 activation, a TPU keeps a bfloat16 copy of the whole buffer while
# a pass runs. Activations in bfloat16, the compute dtype of decoders, have no such copy.

State = dict[str, Any]
Arrivals = dict[str, list[Any]]
"""Maps the table column with the slot of an arriving result, such as ``from_left``, to the arrays of the result."""
FROM_HERE = "from_here"
_NO_RESIDUALS = 0.5
"""Lowest memory limit to try, as a share of a forward pass's residuals; every schedule needs more."""
_NUM_FITTING = 4
"""The search for a schedule ends after this number of schedules that fit into memory, and takes the fastest. It tries
several, because a lower memory limit does not always give a slower schedule."""


@dataclasses.dataclass(frozen=True)
class Program:
    """The program that every rank runs, for given shapes."""

    stack: LayerStack
    schedule: Schedule
    layout: Layout
    axis: str
    trainable: Tree
    """Shapes of the leaves of ``{"outer": ..., "layers": ...}`` that have gradients, and None elsewhere."""
    frozen: Tree
    """Shapes of the other leaves."""
    batch: Tree
    """Shapes of one microbatch."""
    memory_limit: int | None
    """Limit in bytes of the values between passes on each device; None: the schedule's limit."""
    remat: bool | Callable[..., bool]
    inputs_on_host: bool
    """Whether the input of each block is kept in host memory until the backward pass."""
    batch_axes: tuple[str, ...]
    """Axes of the mesh along which the rows of a microbatch are sharded."""
    num_parts: int
    """Number of parts into which the rows are sharded."""
    platform: str

    def gradients(self, trainable: Tree, frozen: Tree, microbatches: Tree, loss_weights: Any) -> Any:
        """Run the program under `shard_map`; return the loss, the metrics and the gradients.

        `trainable`, `frozen` and the gradients hold whole outer leaves, and the layers of this rank, [V * K, ...].
        Leaves of `microbatches` are [M, rows, ...], or [M * rows, ...]; `loss_weights` are [M].
        """
        run = _Run(self, trainable, frozen, microbatches, loss_weights)
        state = lax.scan(run.tick, run.begin(), jnp.asarray(run.tables.rows))[0]
        loss, metrics = lax.psum((state["loss"], state["metrics"]), self.axis)
        outer, layers = (run.totals(state, name) for name in ("outer", "layers"))
        return loss, metrics, {"outer": lax.psum(outer, self.axis), "layers": layers}

    def evaluate(self, trainable: Tree, frozen: Tree, microbatches: Tree, loss_weights: Any) -> Any:
        """Run the forward passes only; return the loss and the metrics. The arguments are those of `gradients`."""
        run = _Forward(self, trainable, frozen, microbatches, loss_weights)
        state = lax.scan(run.tick, run.begin(), jnp.asarray(run.tables.rows))[0]
        return lax.psum((state["loss"], state["metrics"]), self.axis)

    def resident_arrays(self, trainable: Tree, frozen: Tree, microbatches: Tree, loss_weights: Any) -> ResidentArrays:
        """Describe the arrays that `gradients` holds from its first to its last tick, for the same arguments."""
        run = _Run(self, trainable, frozen, microbatches, loss_weights)
        state = run.begin()
        buffer_names = dict.fromkeys(
            residual.waiting.buffer for part in run.parts.values() for residual in part.residuals
        )
        return ResidentArrays(
            {name: (state["buffers"][name].shape, state["buffers"][name].dtype) for name in buffer_names},
            [(leaf.shape, leaf.dtype) for leaf in state["messages"]],
            [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(run.hoisted)],
            run.tables.used,
            run.schedule,
            run.costs,
            {
                **{name: part.split.flops for name, part in run.parts.items()},
                # `last` runs forward and backward together, in the input pass.
                "last": PassFlops(forward=0, input=jaxpr_flops(self.traced_last(run.shapes.h)), weight=0),
            },
        )

    def traced_last(self, h: Tree) -> Any:
        loss_weight = jax.ShapeDtypeStruct((), jnp.float32)
        return make_jaxpr(self.last)(self.trainable["outer"], self.frozen["outer"], h, loss_weight, self.batch)[0].jaxpr

    def last(self, trainable: Tree, frozen: Tree, h: Tree, loss_weight: Any, batch: Tree) -> Any:
        """Compute the loss, the metrics, and the gradients of the outer leaves and of the inexact leaves of `h`."""
        inexact_h = jax.tree.map(lambda leaf: leaf if jnp.issubdtype(leaf.dtype, jnp.inexact) else None, h)

        def loss(trainable: Tree, inexact_h: Tree) -> tuple[Any, Tree]:
            return self.stack.last(combine(trainable, frozen), replace_leaves(h, inexact_h), batch)

        value, vjp, metrics = jax.vjp(loss, trainable, inexact_h, has_aux=True)
        grads, dh = vjp(loss_weight.astype(value.dtype))
        return value, metrics, grads, dh

    def splits(self, h: Tree) -> dict[str, TracedSplit]:
        """Split the parts ``first`` and ``blocks`` of the model into passes, for activations of the shapes of `h`."""

        def first(outer: Tree, _: Any, batch: Tree) -> Any:
            return self.shard_rows(self.stack.first(outer, batch))

        def stage_shape(leaf: Any) -> Any:
            return jax.ShapeDtypeStruct((self.layout.longest, *leaf.shape[1:]), leaf.dtype)

        outer = self.trainable["outer"], self.frozen["outer"]
        rows = jax.tree.map(stage_shape, (self.trainable["layers"], self.frozen["layers"]))
        count = jax.ShapeDtypeStruct((), jnp.int32)
        return {
            "first": trace_split(first, *outer, (), self.batch, rewrite=self.remove_permutes),
            "blocks": trace_split(self.blocks, *rows, h, self.batch, count, rewrite=self.remove_permutes),
        }

    def blocks(self, layers: Tree, h: Any, batch: Tree, count: Any) -> Any:
        """Run the first `count` blocks of a stage; the remaining rows are padding."""
        block = recomputing(self.stack.block, self.remat, inputs_on_host=self.inputs_on_host)

        def body(h: Any, row: tuple[Tree, Any]) -> tuple[Any, None]:
            layer, index = row
            if self.layout.is_even:
                return self.shard_rows(block(layer, h, batch)), None

            def choose(layer_value: Any, padding_value: Any) -> Any:
                return jnp.where(index < count, layer_value, padding_value)

            # A padding layer gets activations that it was not made for, and its gradient can be 0 times infinity. So
            # its input has no gradient.
            layer_input = jax.tree.map(lambda leaf: choose(leaf, lax.stop_gradient(leaf)), h)
            return jax.tree.map(choose, self.shard_rows(block(layer, layer_input, batch)), h), None

        return lax.scan(body, self.shard_rows(h), (layers, jnp.arange(self.layout.longest)))[0]

    def remove_permutes(self, jaxpr: Any) -> Any:
        """Return the jaxpr; on CPUs, without permutations that would involve other ranks (`without_permutes`)."""
        return without_permutes(jaxpr, self.axis) if self.platform == "cpu" else jaxpr

    def run_without_permutes(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `fn`, a function of trees of arrays, so that its jaxpr is the one that `remove_permutes` returns."""

        def run(*args: Any) -> Any:
            closed, shapes = make_jaxpr(fn)(*args)
            rewritten = self.remove_permutes(closed)
            if rewritten is closed:
                return fn(*args)
            return jax.tree.unflatten(jax.tree.structure(shapes), jex.jaxpr_as_fun(rewritten)(*jax.tree.leaves(args)))

        return run if self.platform == "cpu" else fn

    def shard_rows(self, tree: Tree) -> Tree:
        """Shard the rows of arrays; otherwise XLA may gather the rows and shard the arrays like weights instead."""

        def shard(leaf: Any) -> Any:
            if self.num_parts == 1 or not jnp.ndim(leaf) or leaf.shape[0] % self.num_parts:
                return leaf
            return lax.with_sharding_constraint(leaf, PartitionSpec(self.batch_axes))

        return jax.tree.map(shard, tree)

    def shapes(self) -> StackShapes:
        """Return the shapes of activations and metrics of one microbatch; errors as in `LayerStack.shapes`."""
        weights = combine(self.trainable, self.frozen)
        layer = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), weights["layers"])
        return self.stack.shapes(weights["outer"], layer, self.batch)


class ResidentArrays(NamedTuple):
    """Shapes and dtypes of the arrays that a rank holds throughout the program, and the schedule that needs them."""

    buffers: dict[str, tuple[tuple[int, ...], Any]]
    """Shape and dtype of each buffer for values between passes, by name."""
    messages: list[tuple[tuple[int, ...], Any]]
    """Shapes and dtypes of the message buffers."""
    hoisted: list[tuple[tuple[int, ...], Any]]
    """Shapes and dtypes of the values that are computed from weights once for all microbatches."""
    used: dict[str, tuple[int, ...]]
    """Maps the name of a buffer to the numbers of slots that the ranks use."""
    schedule: Schedule
    """The schedule that runs; an ``auto`` schedule without costs is already fitted to the stages."""
    costs: Costs
    """Costs of the stages: FLOPs, and memory in units of the residuals of one microbatch in a stage."""
    flops: dict[str, PassFlops]
    """Maps each function of the stack to its FLOPs; the FLOPs of ``blocks`` are those of one stage."""


class _Forward:
    """One run of the forward passes, which keeps no residuals. The method `tick` is the body of the program's loop."""

    def __init__(self, program: Program, trainable: Tree, frozen: Tree, microbatches: Tree, loss_weights: Any) -> None:
        self.program, self.microbatches, self.loss_weights = program, microbatches, loss_weights
        self.trainable, self.frozen = trainable, frozen
        self.outer, self.layers = (combine(trainable[name], frozen[name]) for name in ("outer", "layers"))
        self.shapes = program.shapes()
        self.tables = self._tables()
        for name, jaxpr in self._traced():
            refuse_undivided_calls(name, jaxpr, program.platform)
            refuse_collectives(name, jaxpr, program.axis)

    def _traced(self) -> Iterator[tuple[str, Any]]:
        """Yield the name and the jaxpr of each function of the stack that this run uses."""
        stack, batch = self.program.stack, self.program.batch
        outer, layers = jax.tree.map(jax.typeof, (self.outer, self.layers))
        layer = jax.tree.map(lambda leaf: leaf.update(shape=leaf.shape[1:]), layers)
        yield "first", make_jaxpr(stack.first)(outer, batch)[0].jaxpr
        yield "blocks", make_jaxpr(stack.block)(layer, self.shapes.h, batch)[0].jaxpr
        yield "last", make_jaxpr(stack.last)(outer, self.shapes.h, batch)[0].jaxpr

    def _tables(self) -> Tables:
        return tables(self.program.schedule, self.program.layout.layers_per_stage, forward_only=True)

    def begin(self) -> State:
        h = jax.tree.leaves(self.shapes.h)
        return {
            "messages": [jnp.zeros((self.tables.num_messages, *s.shape), s.dtype) for s in h],
            "F": [jnp.zeros(s.shape, s.dtype) for s in h],
            "loss": jnp.zeros((), jnp.float32),
            "metrics": jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.float32), self.shapes.metrics),
        }

    def tick(self, state: State, row: Any) -> tuple[State, None]:
        """Run one row of the program: the forward pass of a tick, then the backward passes of the next tick.

        Results of the previous row's input passes are sent while this row's forward pass runs. Results of this forward
        pass are sent while the row's backward passes run.
        """
        entries = dict(zip(self.tables.columns, at(row, lax.axis_index(self.program.axis)), strict=True))
        cells: dict[str, State] = {}
        for name, entry in entries.items():
            kind, _, column = name.partition("/")
            cells.setdefault(kind, {})[column] = entry
        cotangents = self._exchange("I", state) if "I" in state else {}
        state = self._run(self._forward, _after(cotangents, state, "F"), cells["F"])
        # The barrier ties the end of the transfer to the end of the pass. Without it, a TPU's compiler starts and
        # finishes the transfer at once, without overlap (v5p, `tests/pipeline/test_executor_bytes.py`).
        state["F"], cotangents = lax.optimization_barrier((state["F"], cotangents))
        activations = self._exchange("F", state)
        state = self._store_messages(state, cells["I"], cotangents)
        own_results = {FROM_HERE: activations.pop(FROM_HERE)} if FROM_HERE in activations else {}
        state = self._store_messages(state, cells["F"], own_results)
        if "I" in state:
            state = self._backward(_after(activations, state, "I"), cells)
            state["I"], activations = lax.optimization_barrier((state["I"], activations))
        return self._store_messages(state, cells["F"], activations), None

    def _backward(self, state: State, cells: dict[str, State]) -> State:
        """Do nothing; `_Run` runs the backward passes of a row here."""
        return state

    def _run(self, run: Callable[[State, State, Tree], State], state: State, cell: State) -> State:
        # A microbatch of weight 0 is skipped, so NaN in its activations or loss has no effect.
        has_weight = at(self.loss_weights, cell["microbatch"]) != 0

        def run_on_microbatch(state: State, cell: State) -> State:
            rows = functools.partial(_rows_of_microbatch, cell["microbatch"])
            return run(state, cell, jax.tree.map(rows, self.microbatches, self.program.batch))

        return _run_if(has_weight & (cell["runs"] == 1), run_on_microbatch, state, cell)

    def _forward(self, state: State, cell: State, batch: Tree) -> State:
        stack, outer = self.program.stack, self.outer

        def first(_: Tree, batch: Tree) -> Tree:
            return self.program.shard_rows(self.program.run_without_permutes(stack.first)(outer, batch))

        h = _run_if(cell["is_first"] == 1, first, self._message(state, cell), batch)
        layers = jax.tree.map(
            lambda rows: lax.dynamic_slice_in_dim(rows.array, rows.begin, self.program.layout.longest),
            self._stage_weights(cell["chunk"]),
        )
        h = self.program.run_without_permutes(self.program.blocks)(layers, h, batch, cell["num_layers"])

        def last(state: State, arguments: tuple[Tree, Tree]) -> State:
            results = self.program.run_without_permutes(stack.last)(outer, *arguments)
            return self._add_loss(state, at(self.loss_weights, cell["microbatch"]), *results)

        return {**_run_if(cell["is_last"] == 1, last, state, (h, batch)), "F": jax.tree.leaves(h)}

    def _first_row(self, chunk: Any) -> Any:
        return chunk * self.program.layout.longest

    def _stage_weights(self, chunk: Any) -> Tree:
        """Return the weights of a stage as `Rows` of the rank's weights, without a copy."""
        return jax.tree.map(lambda leaf: Rows(leaf, self._first_row(chunk)), self.layers)

    def _message(self, state: State, cell: State) -> Tree:
        tree = jax.tree.structure(self.shapes.h)
        return tree.unflatten([at(buffer, cell["message"]) for buffer in state["messages"]])

    def _add_loss(self, state: State, loss_weight: Any, loss: Any, metrics: Tree) -> State:
        def add(total: Any, value: Any) -> Any:
            return total + loss_weight * jnp.asarray(value).astype(jnp.float32)

        return {**state, "loss": add(state["loss"], loss), "metrics": jax.tree.map(add, state["metrics"], metrics)}

    def _exchange(self, kind: str, state: State) -> Arrivals:
        """Send a kind of pass's last results to the neighbours; return the results that arrive, also from this rank."""
        num_ranks = self.program.schedule.num_ranks
        arrivals: Arrivals = {}
        for name, offset in (("from_left", 1), ("from_right", -1), (FROM_HERE, 0)):
            if self.tables.comes(kind, name):
                # A result that moves by +1 arrives from the left neighbour, one that moves by -1 from the right.
                pairs = [(rank, (rank + offset) % num_ranks) for rank in range(num_ranks)]
                arrivals[name] = [
                    lax.ppermute(leaf, self.program.axis, pairs) if offset else leaf for leaf in state[kind]
                ]
        return arrivals

    def _store_messages(self, state: State, cell: State, arrivals: Arrivals) -> State:
        messages = state["messages"]
        for name, leaves in arrivals.items():

            def store(messages: list[Any], slot: Any, leaves: list[Any] = leaves) -> list[Any]:
                return [put(buffer, leaf, slot) for buffer, leaf in zip(messages, leaves, strict=True)]

            messages = _run_if(cell[name] >= 0, store, messages, cell[name])
        return {**state, "messages": messages}


class _Run(_Forward):
    """One run with forward and backward passes."""

    def _tables(self) -> Tables:
        splits = self.program.splits(self.shapes.h)
        self.parts: dict[str, _InPlacePasses] = {}
        for part, name in (("first", "outer"), ("blocks", "layers")):
            num_totals = len(jax.tree.leaves(self.trainable[name]))
            self.parts[part] = _InPlacePasses(part, splits[part], [f"{name}/{i}" for i in range(num_totals)])
        self.hoisted: dict[str, Any] = {"first": splits["first"].hoist(self.outer)}
        chunks = range(self.program.schedule.stages_per_rank)
        chunk_values = [splits["blocks"].hoist(self._stage_weights(chunk)) for chunk in chunks]
        self.hoisted["blocks"] = tuple(
            jnp.concatenate([jnp.atleast_1d(chunk_value) for chunk_value in values])
            for values in zip(*chunk_values, strict=True)
        )
        self.costs = self._costs()
        self.schedule, schedule_tables = self._fit_schedule()
        assert self.schedule.placement == self.program.schedule.placement, "fitting keeps the placement"
        return schedule_tables

    def _fit_schedule(self) -> tuple[Schedule, Tables]:
        """Choose the schedule for the stages' costs, such that all values between passes fit into the memory limit.

        A schedule counts only residuals. Messages, cotangents of the running pass and slots that only the fullest rank
        uses come in addition. So schedules are made for decreasing limits until all of these fit into the limit in
        bytes. The fastest of the first few that fit is chosen. Raises `ScheduleError` when none fits.
        """
        saved_values = [residual.waiting for part in self.parts.values() for residual in part.residuals]
        lengths, device_limit = self.program.layout.layers_per_stage, self.program.memory_limit
        if device_limit is None:
            schedule = self.program.schedule.fitted(self.costs)
            return schedule, tables(schedule, lengths, saved_values)
        limit = device_limit * self.program.num_parts  # sizes are those of whole arrays
        num_ranks, chunks = self.program.schedule.num_ranks, self.program.schedule.stages_per_rank
        order_changing_limits = (chunks * (2 * num_ranks - 1), chunks * num_ranks)  # limits at which the order changes
        sizes: list[int] = []
        fitting: list[tuple[float, int, Schedule, Tables]] = []

        def try_limit(limit_units: float) -> int | None:
            try:
                schedule = self.program.schedule.fitted(self.costs, limit_units)
            except ScheduleError:
                return None
            table = tables(schedule, lengths, saved_values)
            sizes.append(self._buffer_bytes(table))
            if sizes[-1] <= limit:
                fitting.append((simulate(schedule, self.costs, lockstep=True).makespan, sizes[-1], schedule, table))
            return sizes[-1]

        unit = self._unit_bytes()
        # Memory of a rank that keeps the values of all microbatches.
        most = sum(size / unit for size in self._stage_bytes()) * chunks * self.program.schedule.num_microbatches
        limit_units = min(limit / unit, 2 * most)
        while (
            len(fitting) < _NUM_FITTING and limit_units > _NO_RESIDUALS and (size := try_limit(limit_units)) is not None
        ):
            # Lower the limit in proportion to the excess, by at least 10 %, but do not skip a limit at which the order
            # changes.
            next_limit = limit_units * min(limit / max(size, 1), 0.9)
            limit_units = next(
                (threshold for threshold in order_changing_limits if next_limit < threshold < limit_units), next_limit
            )
        for limit_units in () if fitting else (chunks, order_changing_limits[1]):
            try_limit(limit_units)  # limits of 1 and R microbatches; stages without residuals try only these
        if fitting:
            return min(fitting, key=lambda entry: entry[:2])[2:]
        raise ScheduleError(
            "memory_limit is less than the waiting memory, on each device, of every schedule that was tried",
            expected=f"about {format_bytes(-(-min(sizes) // self.program.num_parts))}" if sizes else "a larger limit",
            got=format_bytes(device_limit),
            hint='raise it, or use smaller microbatches, more stages, remat=True or inputs="host"',
        )

    def _buffer_bytes(self, schedule_tables: Tables) -> int:
        """Return the bytes of a rank's buffers and messages in device memory, as unsharded arrays."""
        residuals = [residual for part in self.parts.values() for residual in part.residuals if not residual.is_on_host]
        sizes = {residual.waiting.buffer: residual.value.size_bytes for residual in residuals}
        h = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.shapes.h))
        buffer_bytes = sum(max(schedule_tables.used[name]) * size for name, size in sizes.items())
        return buffer_bytes + schedule_tables.num_messages * h

    def _costs(self) -> Costs:
        """Return the costs of the stages, with ``first`` in the first stage and ``last`` in the last stage."""
        first, blocks = (self.parts[name].split.flops for name in ("first", "blocks"))
        last = jaxpr_flops(self.program.traced_last(self.shapes.h))
        num_stages = self.program.schedule.num_stages

        def stage_costs(name: str) -> tuple[float, ...]:
            costs = [max(float(getattr(blocks, name)), 1.0)] * num_stages
            costs[0] += getattr(first, name)
            costs[-1] += last if name == "input" else 0
            return tuple(costs)

        input_residuals, weight_residuals, cotangents = (size / self._unit_bytes() for size in self._stage_bytes())
        return Costs(
            forward=stage_costs("forward"),
            input=stage_costs("input"),
            weight=stage_costs("weight"),
            input_residuals=input_residuals,
            weight_residuals=weight_residuals,
            cotangents=cotangents,
        )

    def _stage_bytes(self) -> list[int]:
        """Return the bytes that passes of a stage save for one microbatch: by F for I, by F for W, and by I for W.

        Bytes on the host are included: if a schedule ignored them, they would grow with the number of microbatches.
        """
        kept = self.parts["blocks"].split.kept
        pairs = ((Pass.FORWARD, Pass.INPUT), (Pass.FORWARD, Pass.WEIGHT), (Pass.INPUT, Pass.WEIGHT))
        return [sum(value.size_bytes for value in kept.get(pair, ())) for pair in pairs]

    def _unit_bytes(self) -> int:
        """Return the bytes that the forward pass of a stage saves for one microbatch, at least 1."""
        return max(sum(self._stage_bytes()[:2]), 1)

    def _traced(self) -> Iterator[tuple[str, Any]]:
        yield from ((name, part.split.traced) for name, part in self.parts.items())
        yield "last", self.program.traced_last(self.shapes.h)

    def begin(self) -> State:
        buffers: State = {}
        for part in self.parts.values():
            for residual in part.residuals:
                buffer = residual.waiting.buffer
                if buffer not in buffers:
                    buffers[buffer] = _empty_buffer(residual, max(self.tables.used[buffer]))
        for name in ("outer", "layers"):
            for i, leaf in enumerate(jax.tree.leaves(self.trainable[name])):
                buffers[f"{name}/{i}"] = _zero_total(leaf)
        state = super().begin()
        return {**state, "buffers": buffers, "I": [jnp.zeros_like(leaf) for leaf in state["F"]]}

    def totals(self, state: State, name: str) -> Tree:
        tree = jax.tree.structure(self.trainable[name])
        return tree.unflatten([state["buffers"][f"{name}/{i}"] for i in range(tree.num_leaves)])

    def _backward(self, state: State, cells: dict[str, State]) -> State:
        return self._run(self._weight, self._run(self._input, state, cells["I"]), cells["W"])

    def _forward(self, state: State, cell: State, batch: Tree) -> State:
        def first(carry: tuple[Tree, State], arguments: tuple[State, Tree]) -> tuple[Tree, State]:
            cell, batch = arguments
            return self.parts["first"].forward(carry[1], cell, self.outer, self.hoisted["first"], (), batch)

        carry = self._message(state, cell), state["buffers"]
        h, buffers = _run_if(cell["is_first"] == 1, first, carry, (cell, batch))
        h, buffers = self.parts["blocks"].forward(buffers, cell, *self._stage(cell), h, batch, cell["num_layers"])
        return {**state, "buffers": buffers, "F": jax.tree.leaves(h)}

    def _input(self, state: State, cell: State, batch: Tree) -> State:
        loss_weight, is_last = at(self.loss_weights, cell["microbatch"]), cell["is_last"] == 1
        message = self._message(state, cell)  # in the last stage: activations of its forward pass
        # The message of the last stage is no cotangent. Its cotangent starts at zero, and `_last` computes it.
        dy = jax.tree.map(lambda leaf: jnp.where(is_last, jnp.zeros_like(leaf), leaf), message)

        dy, state = _run_if(is_last, self._last, (dy, state), (message, loss_weight, batch))
        stage = (self._first_row(cell["chunk"]), *self._stage(cell))
        dx, buffers = self.parts["blocks"].input(state["buffers"], cell, *stage, dy, batch, cell["num_layers"])
        dx = replace_leaves(dy, dx)

        def first(buffers: State, arguments: tuple[State, Tree, Tree]) -> State:
            cell, *inputs = arguments
            return self.parts["first"].input(buffers, cell, 0, self.outer, self.hoisted["first"], *inputs)[1]

        buffers = _run_if(cell["is_first"] == 1, first, buffers, (cell, dx, batch))
        return {**state, "I": jax.tree.leaves(dx), "buffers": buffers}

    def _last(self, carry: tuple[Tree, State], arguments: tuple[Tree, Any, Tree]) -> tuple[Tree, State]:
        """Compute the loss and its gradients together, so that logits are never kept."""
        state, (h, loss_weight, batch) = carry[1], arguments
        trainable, frozen = self.trainable["outer"], self.frozen["outer"]
        last = self.program.run_without_permutes(self.program.last)
        value, metrics, grads, dh = last(trainable, frozen, h, loss_weight, batch)
        buffers = dict(state["buffers"])
        for i, grad in enumerate(jax.tree.leaves(grads)):
            buffers[f"outer/{i}"] += grad.astype(buffers[f"outer/{i}"].dtype)
        state = self._add_loss({**state, "buffers": buffers}, loss_weight, value, metrics)
        return replace_leaves(jax.tree.map(jnp.zeros_like, h), dh), state

    def _weight(self, state: State, cell: State, batch: Tree) -> State:
        stage = (self._first_row(cell["chunk"]), *self._stage(cell))
        buffers = self.parts["blocks"].weight(state["buffers"], cell, *stage, batch, cell["num_layers"])

        def first(buffers: State, arguments: tuple[State, Tree]) -> State:
            cell, batch = arguments
            return self.parts["first"].weight(buffers, cell, 0, self.outer, self.hoisted["first"], batch)

        return {**state, "buffers": _run_if(cell["is_first"] == 1, first, buffers, (cell, batch))}

    def _stage(self, cell: State) -> tuple[Tree, tuple[Any, ...]]:
        """Return the weights of a stage, and the hoisted values that were computed from them."""
        chunk, num_chunks = cell["chunk"], self.program.schedule.stages_per_rank
        hoisted: list[Any] = []
        for stacked, value in zip(self.hoisted["blocks"], self.parts["blocks"].split.hoisted, strict=True):
            rows = Rows(stacked, chunk * (stacked.shape[0] // num_chunks))
            hoisted.append(rows if value.struct.shape else at(stacked, chunk))
        return self._stage_weights(chunk), tuple(hoisted)


def _zero_total(leaf: Any) -> Any:
    """Make a zero gradient total that is sharded like the weight.

    The zeros are selected from the weight by a condition that the compiler cannot evaluate. Without this dependence the
    compiler could not infer a sharding, and every device would hold the whole total.
    """
    never = lax.optimization_barrier(jnp.zeros((), bool))
    return jnp.where(never, leaf, jnp.zeros_like(leaf)).astype(total_dtype(leaf.dtype))


def total_dtype(dtype: Any) -> Any:
    """Return the dtype of a gradient total, at least float32; JAX promotes no floats of 8 or fewer bits implicitly."""
    return jnp.dtype(jnp.float32) if jnp.dtype(dtype).itemsize < 2 else jnp.promote_types(dtype, jnp.float32)


def _run_if(flag: Any, run: Callable[[Any, Any], Any], state: Any, operands: Any) -> Any:
    """Return ``run(state, operands)`` if the flag is set, otherwise `state`; the state is changed in place.

    The condition is a loop of zero or one iterations. All inputs that differ from run to run must be in `operands`. A
    barrier ties them to the loop. Without the barrier, XLA moves work out of the loop, where it always runs.
    """

    def body(i: Any, state: Any) -> Any:
        return run(state, lax.optimization_barrier((i, operands))[1])

    return lax.fori_loop(0, flag.astype(jnp.int32), body, state)


def _rows_of_microbatch(index: Any, leaf: Any, shape: Any) -> Any:
    """Return one microbatch of a leaf [M, rows, ...] or [M * rows, ...]; `shape` is its `jax.ShapeDtypeStruct`."""
    if leaf.ndim > len(shape.shape):
        return at(leaf, index)
    num_rows = shape.shape[0]
    return lax.dynamic_slice_in_dim(leaf, index * num_rows, num_rows)


def _after(arrivals: Arrivals, state: State, name: str) -> State:
    """On CPUs, make a pass wait for messages, by making `state[name]`, which the pass overwrites, depend on them.

    A CPU device starts any operation whose arguments are ready, and barriers are removed before execution. Devices that
    share a stage could then deadlock: one device waits in a collective of a pass for other devices, which wait in a
    transfer for this device. Other platforms run a program in its order, which is the same on all devices.
    """
    columns = [leaves for source, leaves in arrivals.items() if source != FROM_HERE]

    def add_dependence(results: list[Any], columns: list[list[Any]]) -> list[Any]:
        for leaves in columns:
            results = [jnp.where(_false_like(leaf), leaf, result) for leaf, result in zip(leaves, results, strict=True)]
        return results

    if not columns:
        return state
    results = lax.platform_dependent(state[name], columns, cpu=add_dependence, default=lambda results, _: results)
    return {**state, name: results}


def _false_like(leaf: Any) -> Any:
    """Return an array of False that the compiler cannot simplify to a constant."""
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
        return jnp.isnan(leaf) & (leaf == leaf)
    if is_key(leaf):
        return jnp.any(_false_like(jax.random.key_data(leaf)), axis=-1)
    return (leaf.astype(jnp.int32) & 1) == 2


# Passes on buffers. Between the ticks of a program, saved values are in buffers. A loop over layers reads and writes
# their rows directly, so a residual is never in memory twice. Values of one shape that a pass saves share a buffer.


@dataclasses.dataclass(frozen=True)
class _Residual:
    """A value that a pass saves for a later pass."""

    value: Value
    producer: Pass
    last_reader: Pass
    num_rows: int
    """Number of rows that a loop writes one by one; 1 for a value that is written as a whole."""
    is_on_host: bool
    waiting: Waiting
    """Table column of its slots, and the buffer that it shares with all values of this shape that the pass saves."""


class _InPlacePasses:
    """The passes of one part of the model; `totals` are the names of the buffers for its gradient totals."""

    def __init__(self, name: str, split: TracedSplit, totals: Sequence[str]) -> None:
        self.split, self.totals = split, totals
        self.residuals: list[_Residual] = []
        for (producer, last_reader), values in split.kept.items():
            for value in values if producer is not Pass.HOISTED else []:
                shape, is_stacked = value.struct, split.plan.is_stacked(value)
                # If a loop reads some rows of a buffer and writes others, the compiler copies the buffer. So the
                # buffer's name contains the pass that writes it, and later passes only read it.
                is_on_host = value.aval.memory_space == jax.memory.Space.Host
                kind = f"{producer.name.lower()}/{'host/' * is_on_host}{'rows' if is_stacked else 'one'}"
                buffer = f"{kind}/{shape.dtype}/{'x'.join(map(str, shape.shape))}"
                column = f"{name}/{len(self.residuals)}"
                waiting = Waiting(column, name, producer.name[0], last_reader.name[0], buffer)
                num_rows = shape.shape[0] if is_stacked else 1
                self.residuals.append(_Residual(value, producer, last_reader, num_rows, is_on_host, waiting))

    def forward(
        self, buffers: Buffers, cell: State, weights: Tree, hoisted: Any, x: Tree, *extras: Tree
    ) -> tuple[Tree, Buffers]:
        """Run the forward pass; return the stage's result and the buffers."""
        env = self.split.env(weights, hoisted, extras) | self.split.x.env(x)
        buffers = self._run(Pass.FORWARD, env, buffers, cell, 0)
        return self.split.read(self.split.y, env, buffers), buffers

    def input(
        self, buffers: Buffers, cell: State, first_row: Any, weights: Tree, hoisted: Any, dy: Tree, *extras: Tree
    ) -> tuple[Tree, Buffers]:
        """Run the input pass; return the gradient of the input and the buffers.

        `cell` maps table columns to entries. `first_row` is the first row of the stage in the totals.
        """
        env = self.split.env(weights, hoisted, extras) | self.split.dy.env(dy)
        buffers = self._run(Pass.INPUT, env, buffers, cell, first_row)
        return self.split.read(self.split.dx, env, buffers), buffers

    def weight(
        self, buffers: Buffers, cell: State, first_row: Any, weights: Tree, hoisted: Any, *extras: Tree
    ) -> Buffers:
        """Run the weight pass; return the buffers. The arguments are those of `input`."""
        return self._run(Pass.WEIGHT, self.split.env(weights, hoisted, extras), buffers, cell, first_row)

    def _run(self, pass_: Pass, env: Environment, buffers: Buffers, cell: State, first_row: Any) -> Buffers:
        buffers = dict(buffers)
        saved_slots: dict[Value, Slot] = {}
        for residual in self.residuals:
            slot = Slot(residual.waiting.buffer, cell[residual.waiting.column] * residual.num_rows)
            if residual.producer is pass_:
                saved_slots[residual.value] = slot
            elif residual.producer < pass_ <= residual.last_reader:
                env[residual.value] = slot
        gradients = self.split.gradients(pass_)
        totals = {
            atom: Slot(self.totals[i], first_row) for i, atom in gradients if self.split.plan.can_accumulate_rows(atom)
        }
        self.split.plan.run(pass_, env, buffers, saved_slots, totals)
        for i, atom in gradients:
            if not (isinstance(atom, Value) and atom in totals):
                gradient = jnp.asarray(self.split.plan.read(atom, env, buffers))
                buffers[self.totals[i]] = _add_gradient(buffers[self.totals[i]], first_row, gradient)
        return buffers


def _empty_buffer(residual: _Residual, num_slots: int) -> Any:
    """Make a buffer with `num_slots` slots in the memory of its residual, device or host."""
    shape = residual.value.struct.shape
    dims = (num_slots * residual.num_rows, *shape[1:]) if "rows/" in residual.waiting.buffer else (num_slots, *shape)
    if not residual.is_on_host:
        return jnp.zeros(dims, residual.value.struct.dtype)
    # The buffer is made row by row, so it is never on the device as a whole.
    row = jnp.zeros(dims[1:], residual.value.struct.dtype)
    return lax.scan(lambda _, __: (None, jax.device_put(row, jax.memory.Space.Host)), None, length=dims[0])[1]


def _add_gradient(total: Any, first_row: Any, gradient: Any) -> Any:
    if total.shape == gradient.shape:
        return total + gradient.astype(total.dtype)
    current = lax.dynamic_slice_in_dim(total, first_row, gradient.shape[0])
    return lax.dynamic_update_slice_in_dim(total, current + gradient.astype(total.dtype), first_row, 0)


_Block = Callable[[Tree, Any, Tree], Any]
_INPUT_NAME = f"{INTERNAL_PREFIX}block_input"


def recomputing(block: _Block, remat: bool | Callable[..., bool], *, inputs_on_host: bool) -> _Block:
    """Return a block that recomputes in its backward pass what `remat` selects (see `LayerStack.hidden`).

    Tracing the block raises `StructureError` if no part of its input can be kept on the host. It raises
    `PlacementError` for a GPU whose XLA reads host memory in the wrong order.
    """
    if remat is False:
        return block
    policy = keep_layer_inputs if remat is True else remat
    block = recomputed(block) if remat is True else block
    if not inputs_on_host:
        return jax.checkpoint(block, policy=policy, prevent_cse=False)

    def named_block(layer: Tree, h: Any, batch: Tree) -> Any:
        check_host_slices()
        if not any(map(_can_wait_on_host, jax.tree.leaves(h))):
            types = jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", h)
            raise StructureError(
                'inputs="host" needs a floating-point array with at least two axes among the inputs of a block, '
                f"not {types}",
                hint='pass inputs="device"',
            )
        h = jax.tree.map(lambda leaf: checkpoint_name(leaf, _INPUT_NAME) if _can_wait_on_host(leaf) else leaf, h)
        return block(layer, h, batch)

    offload_input = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[_INPUT_NAME, LAYER_INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def decide(primitive: Any, *args: Any, **params: Any) -> Any:
        if params.get("name") in (_INPUT_NAME, LAYER_INPUT):
            return offload_input(primitive, *args, **params)
        return policy(primitive, *args, **params)

    return jax.checkpoint(named_block, policy=decide, prevent_cse=False)


def _can_wait_on_host(leaf: Any) -> bool:
    """Return whether a leaf is floating-point with two axes or more; a TPU cannot slice half-precision host vectors."""
    return leaf.ndim > 1 and jnp.issubdtype(leaf.dtype, jnp.inexact)
