"""`value_and_grad`: the loss of a layer stack and its gradients, pipelined over one axis of a mesh."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import traceback
import warnings
from collections.abc import Callable, Generator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import linear_call
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ...core import (
    BATCH_AXES,
    CONTEXT,
    ConfigError,
    LayerStack,
    LowtideError,
    Selector,
    StructureError,
    Tree,
    check_choice,
    check_differentiable,
    check_integer,
    check_type,
    combine,
    fractions,
    is_count,
    is_key,
    leaves_with_paths,
    microbatch_weights,
    num_layers,
    parse_bytes,
    partition,
    shown,
    split_batch,
)
from ...memory import MemoryReport
from ..schedules import Schedule, tables
from ._collectives import translate_error
from ._executor import Program, ResidentArrays
from ._layout import Layout, layout
from ._stages import StageReport, stage_report

_PROGRAM_ORDER_FLAG = "xla_cpu_enable_concurrency_optimized_scheduler"
"""XLA flag that, when false, makes CPU devices run collectives in program order (jaxlib 0.10)."""


def value_and_grad(
    stack: LayerStack,
    schedule: Schedule,
    *,
    mesh: Mesh,
    axis: str = "stage",
    wrt: Selector = "**",
    weight: Callable[[Tree], Any] | None = None,
    remat: bool | Callable[..., bool] = False,
    layers_per_stage: Sequence[int] | None = None,
    arranged: bool = False,
    batch_axes: Sequence[str] | None = None,
    memory_limit: int | str | None = None,
    inputs: Literal["device", "host"] = "device",
) -> Pipeline:
    """Make a pipelined loss with gradients, as one compiled program.

    Args:
        stack: the model as `first`, `block`, `last`. Every function receives the microbatch, so its masks and positions
            reach every stage. An auxiliary loss of the blocks is a leaf of `h` that `last` adds to the loss.
        schedule: order of the passes; its ranks are the devices along `axis`. An ``"auto"`` schedule that has no costs
            is made again with the costs of the stack: FLOPs of its passes, and bytes kept between them.
        mesh: the devices, as from `lowtide.train.make_mesh`. Its other axes have to be automatic (`AxisType.Auto`).
            Arrays keep their shardings along these axes.
        axis: name of the pipeline's axis. A `lowtide.Trainer` requires the name ``stage``.
        wrt: selects the leaves of ``{"outer": ..., "layers": ...}`` that have gradients.
        weight: function of a microbatch that returns its weight, as in `lowtide.accumulate`; None: equal weights. With
            the number of target tokens as weight, the loss is that of the whole batch. Microbatches of weight 0 are not
            computed.
        remat: as in `lowtide.LayerStack.hidden`.
        layers_per_stage: number of layers of every stage; None distributes them as evenly as possible.
        arranged: whether layers and their gradients are in the order of `Pipeline.arrange`, so that no layer moves
            between ranks. This helps if a rank has several stages or if stages are uneven. Uneven stages then require
            `layers_per_stage`.
        batch_axes: other axes of the mesh along which the rows of every microbatch are sharded. None: ``expert``,
            ``data`` and ``fsdp``, as far as the mesh has them.
        memory_limit: most memory between passes on each device, in bytes or as text (``"4 GiB"``), for an ``"auto"``
            schedule without costs and limit. It counts messages and saved values, in every slot that the fullest rank
            needs. None: the residuals of ``2 * num_ranks - 1`` microbatches, plus messages and the values between an
            input pass and a weight pass right after it. A `lowtide.Trainer` chooses the limit by the free memory of its
            device.
        inputs: ``"device"`` or ``"host"``, the memory that keeps the input of each recomputed block until the backward
            pass. Scalars, vectors, integers and random keys of `h` stay on the device.

    Returns:
        The function: ``(loss, metrics), (outer_grads, layer_grads) = pipeline(outer, layers, batch)``. JAX cannot
            differentiate it in reverse mode, because it computes its own gradients.

    Raises:
        ConfigError: for an argument of the wrong type; an axis that the mesh does not have, explicit axes, or a sharded
            ``context``; a schedule whose ranks do not match the mesh, whose stages do not match `layers_per_stage`, or
            whose ranks have unequal numbers of stages; an unknown `inputs`, or ``inputs="host"`` with ``remat=False``;
            a `memory_limit` that the schedule cannot use.
        ScheduleError: for consecutive stages that are not on neighbouring ranks.
        StructureError: when `stack` is not a `LayerStack`.

    Warns:
        UserWarning: for CPU devices on a mesh with other axes, whose collectives may deadlock without an XLA flag.

    Memory:
        Each device holds its layers, the outer leaves, gradients of both (float32 at least), the batch, and the values
        that the schedule keeps between passes. GPipe and looped BFS keep the residuals of all microbatches. For other
        schedules this memory does not grow with the number of microbatches. ``inputs="host"`` moves block inputs to
        host memory. With `batch_axes`, each device also holds a copy of its rows in the order of the microbatches.

    Examples:
        >>> from lowtide.pipeline import schedule
        >>> stack = LayerStack(
        ...     first=lambda outer, batch: batch["x"],
        ...     block=lambda layer, h, batch: jnp.tanh(h @ layer["w"]),
        ...     last=lambda outer, h, batch: (jnp.mean((h - batch["y"]) ** 2), {}),
        ... )
        >>> pipeline = value_and_grad(
        ...     stack,
        ...     schedule("zb-h1", num_stages=1, num_microbatches=2),
        ...     mesh=jax.sharding.Mesh(jax.devices()[:1], ("stage",)),
        ... )
        >>> batch = {"x": jnp.ones((4, 2)), "y": jnp.zeros((4, 2))}
        >>> (loss, _), (_, grads) = jax.jit(pipeline)({}, {"w": jnp.ones((3, 2, 2))}, batch)
        >>> grads["w"].shape
        (3, 2, 2)

    References:
        Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024. Narayanan et al., "Efficient Large-Scale Language
        Model Training on GPU Clusters Using Megatron-LM", SC 2021.
    """
    hint = "make one from three functions: LayerStack(first, block, last)"
    check_type("stack", stack, LayerStack, "a lowtide.LayerStack", hint=hint, error=StructureError)
    hint = 'make one with lt.pipeline.schedule("zb-h1", num_stages=4, num_microbatches=16)'
    check_type("schedule", schedule, Schedule, "a lowtide.pipeline.Schedule", hint=hint)
    check_type("mesh", mesh, Mesh, "a jax.sharding.Mesh", hint="make one with lowtide.train.make_mesh(stage=4)")
    check_type("axis", axis, str, "the name of one axis of the mesh", hint='pass axis="stage"')
    _refuse_wrong_types(weight, remat, layers_per_stage, batch_axes, memory_limit)
    _refuse_other_mesh(schedule, mesh, axis, batch_axes)
    _refuse_other_stages(schedule, layers_per_stage)
    _refuse_other_inputs(inputs, remat)
    _warn_of_deadlock(mesh, axis)
    axes = tuple(name for name in BATCH_AXES if name in mesh.shape and name != axis)
    axes = axes if batch_axes is None else tuple(batch_axes)
    limit = None if memory_limit is None else parse_bytes(memory_limit)
    _refuse_unused_limit(schedule, limit)
    return Pipeline(stack, schedule, mesh, axis, wrt, weight, remat, layers_per_stage, arranged, axes, limit, inputs)


@dataclasses.dataclass(frozen=True, eq=False)  # jax.jit distinguishes pipelines by identity
class Pipeline:
    """A pipelined loss with gradients; made by `value_and_grad`, called under `jax.jit`."""

    stack: LayerStack
    """The model."""
    schedule: Schedule
    """Order of the passes."""
    mesh: Mesh
    """The devices."""
    axis: str
    """The pipeline's axis."""
    wrt: Selector
    """Selects the leaves that have gradients."""
    weight: Callable[[Tree], Any] | None
    """Weight of a microbatch; None: equal weights."""
    remat: bool | Callable[..., bool]
    """Recomputation of blocks, as in `LayerStack.hidden`."""
    layers_per_stage: Sequence[int] | None
    """Number of layers of every stage; None distributes them as evenly as possible."""
    arranged: bool
    """Whether layers are in the order of ranks."""
    batch_axes: tuple[str, ...]
    """Axes along which the rows of microbatches are sharded."""
    memory_limit: int | None = None
    """Most bytes that are kept between passes on each device; None leaves the limit to the schedule."""
    inputs: str = "device"
    """Memory that keeps the input of each block: ``device`` or ``host``."""

    def within(self, memory_limit: int) -> Pipeline:
        """Return the pipeline with another limit, in bytes, of the memory that is kept between passes on each device.

        The placement of stages does not change, so arranged layers fit both pipelines.

        Raises:
            ConfigError: for a limit below 1, or a schedule that is not ``"auto"`` or was made with costs or a limit.
        """
        _refuse_unused_limit(self.schedule, memory_limit)
        return dataclasses.replace(self, memory_limit=memory_limit)

    def __call__(self, outer: Tree, layers: Tree, batch: Tree) -> tuple[tuple[Any, Tree], tuple[Tree, Tree]]:
        """Compute the loss, the metrics and the gradients.

        Args:
            outer: parameters outside the stack.
            layers: stacked parameters [num_layers, ...]; with `arranged`, the result of `arrange`.
            batch: leaves whose leading axis splits into the schedule's microbatches. A scalar random key is allowed:
                each microbatch gets the key with its index folded in.

        Returns:
            ``(loss, metrics), (outer_grads, layer_grads)``. Loss and metrics are weighted means over microbatches, in
            float32. Gradients have the dtypes of the parameters. Leaves that `wrt` does not select have None instead.
            Gradients of padding rows are zero.

        Raises:
            ConfigError: for a model without layers, or `layers_per_stage` that do not match the model.
            PlacementError: for ``inputs="host"`` on a GPU whose XLA reads host memory in the wrong order.
            ScheduleError: when no schedule stays within `memory_limit`.
            SelectionError: when `wrt` selects nothing, or a leaf that has no gradient.
            StructureError: for leaves that are not arrays; for a batch that does not split into microbatches or along
                `batch_axes`; for a function of the stack with a wrong result or a collective along the pipeline's axis;
                for ``inputs="host"`` if no leaf of `h` can be kept on the host.
        """
        layer_layout, trainable, frozen = self._prepare(outer, layers)
        check_differentiable(trainable)
        self._refuse_unshardable_rows(batch)
        with self._name_available_leaves(outer=outer, batch=batch):
            batches, weights = self._microbatches(batch, self.schedule.num_microbatches)
            program = self._program(layer_layout, trainable, frozen, batches)
            run = self._shard_map(program.gradients, (PartitionSpec(), PartitionSpec(), self._weight_specs))
            loss, metrics, grads = run(trainable, frozen, batches, fractions(weights))
        grads = jax.tree.map(lambda total, leaf: total.astype(leaf.dtype), grads, trainable)
        layer_grads = grads["layers"]
        if self.arranged:
            layer_grads = layer_layout.clear_padding(layer_grads)
        else:
            layer_grads = layer_layout.restore(layer_grads, self.mesh, self.axis)
        return _refuse_differentiation(((loss, metrics), (grads["outer"], layer_grads)))

    def evaluate(self, outer: Tree, layers: Tree, batch: Tree) -> tuple[Any, Tree]:
        """Compute ``(loss, metrics)`` without a backward pass; arguments are those of a call.

        Errors are also those of a call, but leaves need no gradient, and a batch may have any positive number of rows.
        A microbatch has the batch's number of rows divided by the schedule's number of microbatches, rounded up.
        Remaining rows form a smaller, last microbatch. Microbatches are weighted by `weight`; if it is None, by their
        numbers of rows.
        """
        rows = _check_rows(batch) or self.schedule.num_microbatches
        # Rows of a microbatch, rounded up to a multiple of the parts into which its rows are sharded.
        size = max(1, min(math.ceil(rows / (self.schedule.num_microbatches * self._num_parts)) * self._num_parts, rows))
        num_full, num_even_rows = rows // size, rows - rows % size
        prepared = self._prepare(outer, layers)
        with self._name_available_leaves(outer=outer, batch=batch):
            means, weights = self._evaluate_rows(prepared, batch, slice(0, num_even_rows), num_full, 0)
            if num_even_rows == rows:
                return _refuse_differentiation(means)
            last_rows = slice(num_even_rows, rows)
            remainder, weight = self._evaluate_rows(prepared, batch, last_rows, 1, num_full)
        even_fraction, remainder_fraction = fractions(jnp.stack([weights, weight]))
        means = jax.tree.map(lambda even, last: even_fraction * even + remainder_fraction * last, means, remainder)
        return _refuse_differentiation(means)

    def _evaluate_rows(
        self, prepared: tuple[Layout, Tree, Tree], batch: Tree, rows: slice, num_microbatches: int, first_index: int
    ) -> tuple[tuple[Any, Tree], Any]:
        """Compute loss, metrics and weight of some rows of a batch; indices for random keys start at `first_index`."""
        layer_layout, trainable, frozen = prepared
        batch = jax.tree.map(lambda leaf: leaf[rows] if jnp.ndim(leaf) else leaf, batch)
        batches, weights = self._microbatches(batch, num_microbatches, first_index)
        program = self._program(layer_layout, trainable, frozen, batches)
        program = dataclasses.replace(program, schedule=self.schedule.truncated(num_microbatches))
        run = self._shard_map(program.evaluate, PartitionSpec())
        total = jnp.float32(rows.stop - rows.start) if self.weight is None else jnp.sum(weights)
        return run(trainable, frozen, batches, fractions(weights)), total

    def report(self, outer: Tree, layers: Tree, batch: Tree, *, memory: MemoryReport | None = None) -> StageReport:
        """Report the memory of every rank and the FLOPs of its passes, without compiling.

        Args:
            outer: as in a call; arrays or shapes.
            layers: as in a call; arrays or shapes.
            batch: as in a call; arrays or shapes.
            memory: report of the compiled program, or of a program that contains it (`lowtide.memory.analyze`). With
                it, the result also has the total of the device.

        Returns:
            The report, which `rich` prints as tables: bytes of every rank, FLOPs of F, I and W, and the operations that
                were not split. The input pass computes the weight gradients of these. Errors are those of a call.

        Examples:
            >>> from lowtide.pipeline import schedule
            >>> stack = LayerStack(
            ...     first=lambda outer, batch: batch,
            ...     block=lambda layer, h, batch: jnp.tanh(h @ layer),
            ...     last=lambda outer, h, batch: (jnp.mean(h**2), {}),
            ... )
            >>> one = schedule("1f1b", num_stages=1, num_microbatches=2)
            >>> pipeline = value_and_grad(stack, one, mesh=jax.sharding.Mesh(jax.devices()[:1], ("stage",)))
            >>> report = pipeline.report({}, jnp.ones((3, 8, 8)), jnp.ones((4, 8)))
            >>> report.weight_bytes, report.gradient_bytes
            (768, 768)
        """

        def shape(leaf: Any) -> Any:
            aval = jax.typeof(leaf)
            return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=getattr(leaf, "sharding", None))

        shapes = jax.tree.map(shape, (outer, layers, batch))
        layer_layout, trainable, frozen = self._prepare(*shapes[:2])
        check_differentiable(trainable)
        self._refuse_unshardable_rows(shapes[2])
        resident_arrays: list[ResidentArrays] = []

        def run(*arguments: Any) -> None:
            resident_arrays.append(program.resident_arrays(*arguments))

        # Trace blocks for the devices of the mesh, because they may compute differently for another kind of device.
        with _trace_for(self.mesh), self._name_available_leaves(outer=outer, batch=batch):
            split = functools.partial(self._microbatches, num_microbatches=self.schedule.num_microbatches)
            batches, loss_weights = jax.eval_shape(split, shapes[2])
            program = self._program(layer_layout, trainable, frozen, batches)
            jax.eval_shape(self._shard_map(run, PartitionSpec()), trainable, frozen, batches, loss_weights)
        rows = next((leaf.shape[1] for leaf in jax.tree.leaves(batches) if len(leaf.shape) > 1), 0)
        return stage_report(
            resident_arrays[0],
            layer_layout,
            trainable,
            frozen,
            axis=self.axis,
            rows=rows,
            num_parts=self._num_parts,
            num_devices=self.mesh.size // self.mesh.shape[self.axis],
            memory_limit=self.memory_limit,
            memory=memory,
        )

    @property
    def _num_parts(self) -> int:
        """Number of parts into which the rows of a microbatch are sharded."""
        return math.prod(self.mesh.shape[axis] for axis in self.batch_axes)

    def _refuse_unshardable_rows(self, batch: Tree) -> None:
        """Raise if the rows cannot be sharded; every device would then compute all rows."""
        _check_rows(batch)
        num_parts = self.schedule.num_microbatches * self._num_parts
        for path, leaf in leaves_with_paths(batch):
            if self._num_parts > 1 and jnp.ndim(leaf) and leaf.shape[0] % num_parts:
                name, axes = path or "(root)", ", ".join(self.batch_axes)
                parts = f"{self.schedule.num_microbatches} microbatches × {self._num_parts} parts"
                raise StructureError(
                    f"batch leaf {name}: its {leaf.shape[0]} rows cannot be sharded along {axes}",
                    expected=f"a multiple of {num_parts} ({parts})",
                    hint="choose another batch size; with batch_axes=() every device of a rank computes all rows",
                )

    def layout(self, num_layers: int) -> Layout:
        """Return the placement of the layers of a stack of `num_layers`."""
        return layout(self.schedule, num_layers, self.layers_per_stage)

    def arrange(self, layers: Tree) -> Tree:
        """Arrange stacked layers in the order of ranks, sharded over the mesh.

        Args:
            layers: leaves [num_layers, ...]; arrays or shapes.

        Returns:
            Leaves [R * V * K, ...] for R ranks, V stages per rank and K layers in the longest stage.

        Raises:
            ConfigError: for wrong `layers_per_stage`; if `arranged`, for uneven stages without `layers_per_stage`.
            StructureError: for leaves without a common leading axis.
        """
        layer_layout = self.layout(num_layers(layers))
        if self.arranged and self.layers_per_stage is None and not layer_layout.is_even:
            problem = f"{layer_layout.num_layers} layers do not divide evenly into {self.schedule.num_stages} stages"
            hint = f"call value_and_grad(..., arranged=True, layers_per_stage={list(layer_layout.layers_per_stage)})"
            raise ConfigError(f"{problem}, and arranged layers do not show which rows are padding", hint=hint)
        return layer_layout.arrange(layers, self.mesh, self.axis)

    def restore(self, rows: Tree, num_layers: int) -> Tree:
        """Undo `arrange`; return leaves [num_layers, ...].

        Raises:
            StructureError: for rows that do not belong to `num_layers` layers.
        """
        layer_layout = self.layout(num_layers)
        _refuse_other_rows(rows, layer_layout)
        return layer_layout.restore(rows, self.mesh, self.axis)

    def _prepare(self, outer: Tree, layers: Tree) -> tuple[Layout, Tree, Tree]:
        outer = jax.tree.map(lambda leaf: jnp.asarray(leaf) if isinstance(leaf, int | float) else leaf, outer)
        for path, leaf in leaves_with_paths(outer):
            if not hasattr(leaf, "shape"):
                hint = "remove it, and let the functions of the stack read it as a captured variable"
                raise StructureError(f"outer/{path} is not an array, but {type(leaf).__name__}", hint=hint)
        rows, lengths = num_layers(layers), self.layers_per_stage if self.arranged else None
        # Every row of arranged layers is a layer, unless stages are uneven. Then `layers_per_stage` is required.
        layer_layout = self.layout(rows if lengths is None else sum(lengths))
        if self.arranged:
            _refuse_other_rows(layers, layer_layout)
        else:
            layers = layer_layout.arrange(layers, self.mesh, self.axis)
        return layer_layout, *partition({"outer": outer, "layers": layers}, self.wrt)

    def _program(self, layer_layout: Layout, trainable: Tree, frozen: Tree, batches: Tree) -> Program:
        def shapes(tree: Tree) -> Tree:
            return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)

        return Program(
            stack=self.stack,
            layout=layer_layout,
            schedule=self.schedule,
            axis=self.axis,
            trainable=shapes(trainable),
            frozen=shapes(frozen),
            batch=jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), batches),
            memory_limit=self.memory_limit,
            remat=self.remat,
            inputs_on_host=self.inputs == "host",
            batch_axes=self.batch_axes,
            num_parts=self._num_parts,
            platform=_platform(self.mesh),
        )

    @contextlib.contextmanager
    def _name_available_leaves(self, **trees: Tree) -> Generator[None]:
        """Add the available names to the error of a function of the stack that does not find a leaf or an axis."""
        try:
            yield
        except KeyError as error:
            for name, tree in trees.items():
                error.add_note(f"leaves of {name}: {', '.join(path for path, _ in leaves_with_paths(tree)) or 'none'}")
            raise
        except AssertionError as error:  # JAX raises it for an axis that a typed shard_map lacks
            if not error.args and _is_raised_by_jax(error):
                error.add_note(f"axes of the mesh: {', '.join(map(str, self.mesh.axis_names))}")
            raise
        except (NameError, TypeError, ValueError) as error:
            translated = None if isinstance(error, LowtideError) else translate_error(error, self.mesh, self.axis)
            if translated is None:
                raise
            raise translated from error

    @property
    def _weight_specs(self) -> dict[str, PartitionSpec]:
        return {"outer": PartitionSpec(), "layers": PartitionSpec(self.axis)}

    def _shard_map(self, program: Callable[..., Any], out_specs: Any) -> Callable[..., Any]:
        mapped = jax.shard_map(
            program,
            mesh=self.mesh,
            in_specs=(self._weight_specs, self._weight_specs, PartitionSpec(), PartitionSpec()),
            out_specs=out_specs,
            axis_names={self.axis},
            check_vma=False,
        )

        def run(trainable: Tree, frozen: Tree, batches: Tree, weights: Any) -> Any:
            return mapped(trainable, frozen, jax.tree.map(self._join_rows, batches), weights)

        return jax.jit(run)  # outside jit, shard_map rejects automatic axes

    def _join_rows(self, leaf: Any) -> Any:
        """Return a leaf [M, rows, ...] as [M * rows, ...], unless its rows are sharded.

        A TPU has another layout for a leaf with 2 or 4 rows per microbatch, and would hold a copy of the batch in that
        layout (v5p, jaxlib 0.10.2). This reshape is free: it restores the shape of the argument, so XLA removes it.
        """
        return leaf if leaf.ndim < 2 or self._num_parts > 1 else leaf.reshape(-1, *leaf.shape[2:])

    def _shard_rows(self, leaf: Any) -> Any:
        """Shard the rows of every microbatch along `batch_axes`."""
        if self._num_parts == 1 or leaf.shape[1] % self._num_parts:  # the last rows of an evaluation
            return leaf
        sharding = NamedSharding(self.mesh, PartitionSpec(None, self.batch_axes))
        return jax.lax.with_sharding_constraint(leaf, sharding)

    def _microbatches(self, batch: Tree, num_microbatches: int, first_index: int = 0) -> tuple[Tree, Any]:
        """Return the microbatches and their weights; the indices for random keys begin with `first_index`."""

        def is_scalar_key(leaf: Any) -> bool:
            return is_key(leaf) and leaf.ndim == 0

        batches = split_batch(jax.tree.map(lambda leaf: None if is_scalar_key(leaf) else leaf, batch), num_microbatches)

        def fold_in_indices(leaf: Any) -> Any:
            return jax.vmap(functools.partial(jax.random.fold_in, leaf))(first_index + jnp.arange(num_microbatches))

        folded_keys = jax.tree.map(lambda leaf: fold_in_indices(leaf) if is_scalar_key(leaf) else None, batch)
        batches = combine(jax.tree.map(self._shard_rows, batches), folded_keys)
        return batches, microbatch_weights(self.weight, batches, num_microbatches).astype(jnp.float32)


def _refuse_differentiation(results: Tree) -> Tree:
    """Make reverse-mode differentiation of the results raise; JAX's own error is about loops that users do not know."""

    @jax.custom_jvp
    def identity(leaf: Any) -> Any:
        return leaf

    def refuse(_: Any, __: Any) -> Any:
        raise StructureError(
            "JAX cannot differentiate a pipeline in reverse mode: it computes its own gradients",
            hint="use (loss, metrics), (outer_grads, layer_grads) = pipeline(outer, layers, batch); where you need no "
            "gradient, use jax.lax.stop_gradient(loss)",
        )

    @identity.defjvp
    def _(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:  # pyright: ignore[reportUnusedFunction]
        return primals[0], linear_call(lambda _, tangent: tangent, refuse, (), tangents[0])

    return jax.tree.map(lambda leaf: identity(leaf) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf, results)


def _check_rows(batch: Tree) -> int | None:
    """Check that all leaves have the same positive number of rows, and return it; None if all are scalars."""
    rows: dict[int, str] = {}
    for path, leaf in leaves_with_paths(batch):
        if jnp.ndim(leaf):
            rows.setdefault(leaf.shape[0], path or "(root)")
    if len(rows) > 1:
        (num_rows, name), (other_num_rows, other_name), *_ = rows.items()
        raise StructureError(
            f"batch leaves {name} and {other_name} have different numbers of rows, {num_rows} and {other_num_rows}",
            hint="give every leaf a row for each example, even if all rows are equal",
        )
    if 0 in rows:
        raise StructureError(f"batch leaf {rows[0]} has no rows", hint="leave out batches without examples")
    return next(iter(rows), None)


def _refuse_other_rows(layers: Tree, layer_layout: Layout) -> None:
    for leaf in jax.tree.leaves(layers):
        if leaf.shape[:1] != (layer_layout.num_rows,):
            got = f"{leaf.shape[0]}" if leaf.shape else "a scalar"
            problem = f"layers in the order of ranks must have {layer_layout.num_rows} rows, not {got}"
            raise StructureError(problem, hint="arrange them: layers = pipeline.arrange(layers)")


def _is_raised_by_jax(error: BaseException) -> bool:
    """Return whether JAX itself raised the error, perhaps without frames of its own, not a function that it called."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    line = traceback.extract_tb(error.__traceback__)[-1].line or ""
    return frame.f_globals.get("__name__", "").split(".")[0] == "jax" or not line.startswith(("assert", "raise"))


def _trace_for(mesh: Mesh | AbstractMesh) -> contextlib.AbstractContextManager[Any]:
    """Return a context that traces code for this process's first device of the mesh, if there is one."""
    devices = [] if isinstance(mesh, AbstractMesh) else list(mesh.devices.flat)
    local_devices = [device for device in devices if device.process_index == jax.process_index()]
    return jax.default_device(local_devices[0]) if local_devices else contextlib.nullcontext()


def _platform(mesh: Mesh | AbstractMesh) -> str:
    """Return the platform of a mesh's devices; for an abstract mesh, as in a trainer's step, that of this process."""
    return jax.default_backend() if isinstance(mesh, AbstractMesh) else mesh.devices.flat[0].platform


# --- checks of the arguments ------------------------------------------------------------------------------------------


def _refuse_other_mesh(schedule: Schedule, mesh: Mesh, axis: str, batch_axes: Sequence[str] | None) -> None:
    if axis not in mesh.shape:
        names = " or ".join(map(repr, mesh.shape)) or "'stage'"
        raise ConfigError(f"the mesh has no axis {axis!r}", hint=f"pass axis={names}, or another mesh")
    if mesh.shape[axis] != schedule.num_ranks:
        raise ConfigError(
            f"{schedule.name}: the schedule is for another number of devices",
            expected=f"{schedule.num_ranks} devices along {axis!r}",
            got=mesh.shape[axis],
            hint="set num_stages of the schedule to ranks times stages per rank",
        )
    if mesh.shape.get(CONTEXT, 1) > 1:
        hint = f"for long rows use make_mesh({CONTEXT}=..., fsdp=...) without a pipeline; else drop axis {CONTEXT!r}"
        raise ConfigError(f"a pipeline cannot shard the tokens of a row along an axis {CONTEXT!r} yet", hint=hint)
    if any(kind is not AxisType.Auto for kind in mesh.axis_types):
        types = ", ".join(map(str, mesh.axis_types))
        hint = "use lowtide.train.make_mesh(stage=...), or jax.sharding.Mesh(mesh.devices, mesh.axis_names)"
        raise ConfigError(f"the mesh has explicit or manual axes, not only AxisType.Auto: {types}", hint=hint)
    names, other_axes = list(batch_axes or ()), [name for name in mesh.shape if name != axis]
    if len(set(names)) < len(names) or not set(names) <= set(other_axes):
        candidates = " or ".join(map(repr, other_axes)) or "no axis"
        problem = f"batch_axes must name {candidates}, each at most once, not {', '.join(map(repr, names))}"
        hint = f"leave it out to shard rows along {', '.join(BATCH_AXES[:-1])} and {BATCH_AXES[-1]}"
        raise ConfigError(problem, hint=hint)


def _refuse_unused_limit(schedule: Schedule, memory_limit: int | None) -> None:
    if memory_limit is None:
        return
    check_integer("memory_limit in bytes", memory_limit, hint='pass memory_limit="4 GiB", or None')
    if schedule.remake is None or schedule.remake.memory_limit is not None:
        raise ConfigError(
            f"memory_limit cannot change {schedule.name}, which is already made",
            expected='lt.pipeline.schedule("auto", ...) without costs and without a memory_limit of its own',
            hint="pass it here or to lt.pipeline.schedule, where its unit is one microbatch's residuals in a stage",
        )


def _refuse_other_inputs(inputs: str, remat: Any) -> None:
    hint = 'pass inputs="host" to keep them in host memory until the backward pass'
    check_choice("inputs", inputs, ("device", "host"), hint=hint)
    if inputs == "host" and remat is False:
        hint = "pass remat=True, or a policy of jax.checkpoint; values that it saves stay on the device"
        problem = 'inputs="host" contradicts remat=False, which keeps all residuals of blocks on the device'
        raise ConfigError(problem, hint=hint)


def _refuse_other_stages(schedule: Schedule, layers_per_stage: Sequence[int] | None) -> None:
    """Raise for stages that one program cannot run."""
    if layers_per_stage is not None and len(layers_per_stage) != schedule.num_stages:
        raise ConfigError(
            f"layers_per_stage must have {schedule.num_stages} numbers, one per stage, not {len(layers_per_stage)}",
            hint="leave it out to distribute the layers as evenly as possible",
        )
    counts = [len(schedule.stages_of(rank)) for rank in range(schedule.num_ranks)]
    if len(set(counts)) > 1:
        problem = f"{schedule.name}: ranks have different numbers of stages, {', '.join(map(str, counts))}"
        hint = "give every rank the same number of stages; with layers_per_stage a stage may have 0 layers"
        raise ConfigError(problem, hint=hint)
    tables(schedule, [1] * schedule.num_stages)  # raises for consecutive stages on ranks that are not neighbours


def _warn_of_deadlock(mesh: Mesh, axis: str) -> None:
    """Warn that XLA's CPU client may start collectives of several axes in different orders and abort the process."""
    is_exposed = mesh.size > mesh.shape[axis] > 1 and mesh.devices.flat[0].platform == "cpu"
    if is_exposed and _PROGRAM_ORDER_FLAG not in os.environ.get("XLA_FLAGS", ""):
        warnings.warn(
            f"collectives of a pipeline along {axis!r} and along other axes of the mesh may deadlock on a CPU, "
            f"until XLA aborts the process\nhint: set XLA_FLAGS=--{_PROGRAM_ORDER_FLAG}=false before JAX starts",
            stacklevel=3,
        )


def _refuse_wrong_types(weight: Any, remat: Any, layers_per_stage: Any, batch_axes: Any, memory_limit: Any) -> None:
    def is_numbers(value: Any) -> bool:
        return isinstance(value, Sequence | np.ndarray) and all(isinstance(item, int | np.integer) for item in value)

    def is_names(value: Any) -> bool:
        return (
            isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(item, str) for item in value)
        )

    def require(is_right: bool, name: str, expected: str, value: Any, hint: str) -> None:
        if not is_right:
            raise ConfigError(f"{name} must be {expected}, not {shown(value)}", hint=hint)

    hint = 'pass weight=lambda batch: jnp.sum(batch["labels"] >= 0)'
    require(weight is None or callable(weight), "weight", "a function of a microbatch, or None", weight, hint)
    hint = "pass remat=jax.checkpoint_policies.dots_saveable"
    require(isinstance(remat, bool) or callable(remat), "remat", "a boolean or a policy of jax.checkpoint", remat, hint)
    expected = "a list with the number of layers of every stage"
    hint = "leave it out to distribute the layers as evenly as possible"
    has_numbers = layers_per_stage is None or is_numbers(layers_per_stage)
    require(has_numbers, "layers_per_stage", expected, layers_per_stage, hint)
    hint = f"pass batch_axes=[{batch_axes!r}]" if isinstance(batch_axes, str) else 'pass batch_axes=["fsdp"]'
    require(batch_axes is None or is_names(batch_axes), "batch_axes", "a list of names of axes", batch_axes, hint)
    hint = 'pass memory_limit="4 GiB", or None'
    is_limit = memory_limit is None or isinstance(memory_limit, str) or is_count(memory_limit, 0)
    require(is_limit, "memory_limit", "a whole number of bytes, or text", memory_limit, hint)
