"""`value_and_grad`: the loss of a layer stack and its gradients, pipelined over an axis of a mesh."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ..core import (
    ConfigError,
    LayerStack,
    StructureError,
    Tree,
    Where,
    check_differentiable,
    leaves_with_paths,
    microbatch_weights,
    num_layers,
    partition,
    split_batch,
)
from ..memory import MemoryReport
from ._executor import Held, Program
from ._layout import Layout, layout
from ._schedule import Schedule
from ._stages import StageReport, stage_report
from ._tables import tables

_ONE_ORDER = "xla_cpu_enable_concurrency_optimized_scheduler"
"""XLA's flag that, when false, has CPU devices run collectives in the program's order (jaxlib 0.10)."""


def value_and_grad(
    stack: LayerStack,
    schedule: Schedule,
    *,
    mesh: Mesh,
    axis: str = "stage",
    wrt: Where = "**",
    weight: Callable[[Tree], Any] | None = None,
    remat: bool | Callable[..., bool] = False,
    layers_per_stage: Sequence[int] | None = None,
    arranged: bool = False,
    batch_axes: Sequence[str] | None = None,
) -> Pipeline:
    """A pipelined loss with its gradients, as one compiled program.

    Args:
        stack: the model as `first`, `block`, `last`. Every function is given the microbatch, so masks and positions in
            it reach every stage; a loss of the blocks is a leaf of `h` that `last` adds.
        schedule: what runs when; its ranks are the devices along `axis`.
        mesh: the devices. Along its other axes arrays are divided as their own shardings say.
        axis: the name of the pipeline's axis.
        wrt: which leaves of ``{"outer": ..., "layers": ...}`` have gradients.
        weight: a function of a microbatch that gives its weight, as in `lowtide.accumulate`: with its number of target
            tokens, the loss is that of the whole batch. Of a microbatch of weight 0 nothing is computed.
        remat: as in `lowtide.LayerStack.hidden`.
        layers_per_stage: of every stage; by default as even as can be.
        arranged: whether layers come, and gradients go, in the order of `Pipeline.arrange`, in which nothing has to be
            moved between ranks. That is of use where a rank has several stages, or stages are uneven (then
            `layers_per_stage` has to say how).
        batch_axes: along which other axes the rows of every microbatch are divided; by default ``data`` and ``fsdp``,
            where the mesh has them.

    Returns:
        The function: ``(loss, metrics), (outer_grads, layer_grads) = pipeline(outer, layers, batch)``.

    Raises:
        ConfigError: for an axis that the mesh does not have, a schedule of another number of ranks, or an argument of
            another type.
        ScheduleError: for stages that are not on neighbouring ranks.
        StructureError: when `stack` is no `LayerStack`.

    Memory:
        On each device: its layers, the outer leaves, gradients of both (float32 at least), the batch, and what the
        schedule keeps between passes: of GPipe and looped BFS all microbatches, of the others no more for more of them.

    Examples:
        >>> from lowtide.pipeline import schedule
        >>> stack = LayerStack(
        ...     first=lambda outer, batch: batch["x"],
        ...     block=lambda layer, h, batch: jnp.tanh(h @ layer["w"]),
        ...     last=lambda outer, h, batch: (jnp.mean((h - batch["y"]) ** 2), {}),
        ... )
        >>> pipeline = value_and_grad(
        ...     stack, schedule("zb-h1", num_stages=1, num_microbatches=2), mesh=jax.make_mesh((1,), ("stage",))
        ... )
        >>> batch = {"x": jnp.ones((4, 2)), "y": jnp.zeros((4, 2))}
        >>> (loss, _), (_, grads) = jax.jit(pipeline)({}, {"w": jnp.ones((3, 2, 2))}, batch)
        >>> grads["w"].shape
        (3, 2, 2)

    References:
        Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024. Narayanan et al., "Efficient Large-Scale Language
        Model Training on GPU Clusters Using Megatron-LM", SC 2021.
    """
    _refuse_wrong_types(stack, schedule, mesh, weight, remat, layers_per_stage, batch_axes)
    if axis not in mesh.shape:
        raise ConfigError(
            f"the mesh has no axis {axis!r}",
            expected=" or ".join(map(repr, mesh.shape)),
            got=repr(axis),
            hint=f'axis="{next(iter(mesh.shape), "stage")}", or another mesh',
        )
    if mesh.shape[axis] != schedule.num_ranks:
        raise ConfigError(
            f"{schedule.name}: the schedule is for another mesh",
            expected=f"{schedule.num_ranks} devices along {axis!r}",
            got=mesh.shape[axis],
            hint="num_stages of a schedule is ranks times stages a rank",
        )
    if layers_per_stage is not None and len(layers_per_stage) != schedule.num_stages:
        raise ConfigError(
            "layers_per_stage is not of this schedule",
            expected=f"{schedule.num_stages} numbers",
            got=f"{len(layers_per_stage)}",
            hint="leave it out to divide the layers as evenly as can be",
        )
    if len({len(schedule.stages_of(rank)) for rank in range(schedule.num_ranks)}) > 1:
        raise ConfigError(
            f"{schedule.name}: ranks have different numbers of stages",
            expected=f"{schedule.stages_per_rank} each",
            got=", ".join(str(len(schedule.stages_of(rank))) for rank in range(schedule.num_ranks)),
            hint="one program gives every rank room for as many layers; a stage may have none: layers_per_stage",
        )
    tables(schedule, [1] * schedule.num_stages)  # refuses stages that are no neighbours
    axes = tuple(one for one in ("data", "fsdp") if one in mesh.shape and one != axis)
    for one in batch_axes or ():
        if one not in mesh.shape or one == axis:
            raise ConfigError(
                f"batch_axes: rows cannot be divided along {one!r}",
                expected=" or ".join(repr(other) for other in mesh.shape if other != axis) or "no axis",
                got=repr(one),
                hint="leave it out to divide them along data and fsdp",
            )
    axes = axes if batch_axes is None else tuple(batch_axes)
    _warn_of_waiting_forever(mesh, axis)
    # Other axes are the compiler's to divide arrays along, whatever type of axis the mesh was made with.
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    return Pipeline(stack, schedule, mesh, axis, wrt, weight, remat, layers_per_stage, arranged, axes)


def _warn_of_waiting_forever(mesh: Mesh, axis: str) -> None:
    """XLA's CPU client may start collectives of several axes in another order on each device, and abort the process."""
    is_exposed = mesh.size > mesh.shape[axis] > 1 and mesh.devices.flat[0].platform == "cpu"
    if is_exposed and _ONE_ORDER not in os.environ.get("XLA_FLAGS", ""):
        warnings.warn(
            f"collectives of a pipeline along {axis!r} and of the mesh's other axes may wait for one another on a CPU, "
            f"until XLA aborts the process\nhint: XLA_FLAGS=--{_ONE_ORDER}=false, set before JAX starts",
            stacklevel=3,
        )


def _refuse_wrong_types(
    stack: Any, schedule: Any, mesh: Any, weight: Any, remat: Any, layers_per_stage: Any, batch_axes: Any
) -> None:
    if not isinstance(stack, LayerStack):
        raise StructureError(
            "a pipeline needs a model as a stack of equal blocks",
            expected="a lowtide.LayerStack",
            got=type(stack).__name__,
            hint="make one from three functions: LayerStack(first, block, last)",
        )

    def is_numbers(given: Any) -> bool:
        return isinstance(given, Sequence | np.ndarray) and all(isinstance(one, int | np.integer) for one in given)

    checks = [
        (
            isinstance(schedule, Schedule),
            ("schedule is no schedule", "a lowtide.pipeline.Schedule", schedule),
            'lt.pipeline.schedule("zb-h1", num_stages=4, num_microbatches=16)',
        ),
        (
            isinstance(mesh, Mesh),
            ("mesh is no mesh of devices", "a jax.sharding.Mesh", mesh),
            'jax.make_mesh((4,), ("stage",))',
        ),
        (
            weight is None or callable(weight),
            ("weight is no function", "a function of a microbatch, or None", weight),
            'weight=lambda batch: jnp.sum(batch["labels"] >= 0)',
        ),
        (
            isinstance(remat, bool) or callable(remat),
            ("remat is no policy", "a boolean or a policy of jax.checkpoint", remat),
            "remat=jax.checkpoint_policies.dots_saveable",
        ),
        (
            layers_per_stage is None or is_numbers(layers_per_stage),
            ("layers_per_stage is no list of numbers", "a number of layers for every stage", layers_per_stage),
            "leave it out to divide the layers as evenly as can be",
        ),
        (
            not isinstance(batch_axes, str),
            ("batch_axes is no list of names", "names of axes", batch_axes),
            f"batch_axes=[{batch_axes!r}]",
        ),
    ]
    for is_right, (message, expected, got), hint in checks:
        if not is_right:
            raise ConfigError(message, expected=expected, got=repr(got), hint=hint)


@dataclasses.dataclass(frozen=True, eq=False)  # jax.jit tells pipelines apart by identity
class Pipeline:
    """A pipelined loss with its gradients; made by `value_and_grad`, called under `jax.jit`."""

    stack: LayerStack
    """The model."""
    schedule: Schedule
    """What runs when."""
    mesh: Mesh
    """The devices."""
    axis: str
    """The pipeline's axis."""
    wrt: Where
    """What has gradients."""
    weight: Callable[[Tree], Any] | None
    """Weight of a microbatch."""
    remat: bool | Callable[..., bool]
    """What is recomputed."""
    layers_per_stage: Sequence[int] | None
    """Of every stage, or None."""
    arranged: bool
    """Whether layers are in the order of ranks."""
    batch_axes: tuple[str, ...]
    """Along which the rows of microbatches are divided."""

    def __call__(self, outer: Tree, layers: Tree, batch: Tree) -> tuple[tuple[Any, Tree], tuple[Tree, Tree]]:
        """The loss, the metrics and the gradients.

        Args:
            outer: parameters outside the stack.
            layers: stacked parameters [num_layers, ...]; with `arranged`, in the order of `arrange`.
            batch: leaves whose leading axis splits into the schedule's microbatches. A scalar key is folded with the
                number of the microbatch.

        Returns:
            ``(loss, metrics), (outer_grads, layer_grads)``: loss and metrics are means over microbatches by weight, in
            float32; gradients have the dtypes of the parameters, and None where `wrt` selects none; those of padding
            are zero.

        Raises:
            ConfigError: for `layers_per_stage` that are not of this model.
            SelectionError: when `wrt` selects nothing, or a leaf that has no gradient.
            StructureError: for leaves that are no arrays, when the batch does not split, or when a function of the
                stack returns what it should not.
        """
        plan, trainable, frozen = self._prepared(outer, layers)
        check_differentiable(trainable)
        batches, seeds = self._microbatches(batch, self.schedule.num_microbatches)
        program = self._program(plan, trainable, frozen, batches)
        places = {"outer": PartitionSpec(), "layers": PartitionSpec(self.axis)}
        loss, metrics, grads = self._mapped(
            program.gradients, (places, places), (PartitionSpec(), PartitionSpec(), places)
        )(trainable, frozen, batches, seeds)
        grads = jax.tree.map(lambda total, leaf: total.astype(leaf.dtype), grads, trainable)
        of_layers = grads["layers"]
        of_layers = plan.cleared(of_layers) if self.arranged else plan.restore(of_layers, self.mesh, self.axis)
        return (loss, metrics), (grads["outer"], of_layers)

    def evaluate(self, outer: Tree, layers: Tree, batch: Tree) -> tuple[Any, Tree]:
        """The loss and the metrics without a backward pass; arguments and errors as of a call.

        A batch with fewer rows is divided into fewer microbatches, as many as its rows divide into.
        """
        schedule = self.schedule.truncated(self._num_parts(batch))
        plan, trainable, frozen = self._prepared(outer, layers)
        batches, seeds = self._microbatches(batch, schedule.num_microbatches)
        program = dataclasses.replace(self._program(plan, trainable, frozen, batches), schedule=schedule)
        places = {"outer": PartitionSpec(), "layers": PartitionSpec(self.axis)}
        return self._mapped(program.evaluate, (places, places), (PartitionSpec(), PartitionSpec()))(
            trainable, frozen, batches, seeds
        )

    def _num_parts(self, batch: Tree) -> int:
        """Microbatches of an evaluation: at most the schedule's."""
        rows = next((leaf.shape[0] for leaf in jax.tree.leaves(batch) if jnp.ndim(leaf)), 0)
        most = self.schedule.num_microbatches
        return next(number for number in range(most, 0, -1) if rows % number == 0)

    def report(self, outer: Tree, layers: Tree, batch: Tree, *, memory: MemoryReport | None = None) -> StageReport:
        """What every rank holds throughout the program, before anything is compiled.

        Args:
            outer: as in a call; arrays or shapes.
            layers: likewise.
            batch: likewise.
            memory: the report of the compiled program (`lowtide.memory.analyze`), or of one that contains it, to say
                what the device has in all.

        Returns:
            The report, which `rich` prints as a table.

        Examples:
            >>> from lowtide.pipeline import schedule
            >>> stack = LayerStack(
            ...     first=lambda outer, batch: batch,
            ...     block=lambda layer, h, batch: jnp.tanh(h @ layer),
            ...     last=lambda outer, h, batch: (jnp.mean(h**2), {}),
            ... )
            >>> one = schedule("1f1b", num_stages=1, num_microbatches=2)
            >>> pipeline = value_and_grad(stack, one, mesh=jax.make_mesh((1,), ("stage",)))
            >>> report = pipeline.report({}, jnp.ones((3, 8, 8)), jnp.ones((4, 8)))
            >>> report.weight_bytes, report.gradient_bytes
            (768, 768)
        """
        shapes = jax.tree.map(_struct, (outer, layers, batch))
        plan, trainable, frozen = self._prepared(*shapes[:2])
        batches, seeds = jax.eval_shape(lambda one: self._microbatches(one, self.schedule.num_microbatches), shapes[2])
        program = self._program(plan, trainable, frozen, batches)
        found: list[Held] = []

        def run(*arguments: Any) -> None:
            found.append(program.held(*arguments))

        places = {"outer": PartitionSpec(), "layers": PartitionSpec(self.axis)}
        jax.eval_shape(self._mapped(run, (places, places), PartitionSpec()), trainable, frozen, batches, seeds)
        rows = next((leaf.shape[1] for leaf in jax.tree.leaves(batches) if len(leaf.shape) > 1), 0)
        number = math.prod(self.mesh.shape[axis] for axis in self.batch_axes)
        return stage_report(
            found[0],
            plan,
            trainable,
            frozen,
            axis=self.axis,
            rows=rows,
            num_parts=number,
            num_devices=self.mesh.size // self.mesh.shape[self.axis],
            memory=memory,
        )

    def layout(self, num_layers: int) -> Layout:
        """Which layers are where, of a stack of so many."""
        return layout(self.schedule, num_layers, self.layers_per_stage)

    def arrange(self, layers: Tree) -> Tree:
        """Stacked layers in the order of ranks, divided over the mesh.

        Args:
            layers: leaves [num_layers, ...]; arrays or shapes.

        Returns:
            Leaves [R * V * K, ...], where R are the ranks, V the stages of each and K the layers of the longest.

        Raises:
            ConfigError: for `layers_per_stage` that are not of this model; for uneven stages without them.
            StructureError: for leaves without a common leading axis.
        """
        plan = self.layout(num_layers(layers))
        if self.arranged and self.layers_per_stage is None and not plan.is_even:
            raise ConfigError(
                "stages are uneven, and of arranged layers nobody sees which rows are padding",
                expected=f"a number of layers that {self.schedule.num_stages} stages divide, or layers_per_stage",
                got=f"{plan.num_layers} layers",
                hint=f"value_and_grad(..., arranged=True, layers_per_stage={list(plan.layers_per_stage)})",
            )
        return plan.arrange(layers, self.mesh, self.axis)

    def restore(self, rows: Tree, num_layers: int) -> Tree:
        """The opposite of `arrange`: leaves [num_layers, ...].

        Raises:
            StructureError: for rows that are not of so many layers.
        """
        plan = self.layout(num_layers)
        _refuse_other_rows(rows, plan)
        return plan.restore(rows, self.mesh, self.axis)

    def _prepared(self, outer: Tree, layers: Tree) -> tuple[Layout, Tree, Tree]:
        outer = jax.tree.map(lambda leaf: jnp.asarray(leaf) if isinstance(leaf, int | float) else leaf, outer)
        for path, leaf in leaves_with_paths(outer):
            if not hasattr(leaf, "shape"):
                raise StructureError(
                    f"outer/{path}: is no array",
                    expected="arrays alone",
                    got=type(leaf).__name__,
                    hint="let the functions of the stack read it from elsewhere",
                )
        rows = num_layers(layers)
        plan = self.layout(self._num_layers(rows) if self.arranged else rows)
        if self.arranged:
            _refuse_other_rows(layers, plan)
        else:
            layers = plan.arrange(layers, self.mesh, self.axis)
        return plan, *partition({"outer": outer, "layers": layers}, self.wrt)

    def _num_layers(self, rows: int) -> int:
        """Layers of an arranged stack: all rows, unless stages are uneven, of which the lengths are known."""
        return rows if self.layers_per_stage is None else sum(self.layers_per_stage)

    def _program(self, plan: Layout, trainable: Tree, frozen: Tree, batches: Tree) -> Program:
        def shapes(tree: Tree) -> Tree:
            return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)

        return Program(
            stack=self.stack,
            layout=plan,
            schedule=self.schedule,
            axis=self.axis,
            trainable=shapes(trainable),
            frozen=shapes(frozen),
            batch=jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), batches),
            remat=self.remat,
            batch_axes=self.batch_axes,
        )

    def _mapped(self, program: Callable[..., Any], places: tuple[Any, ...], results: Any) -> Callable[..., Any]:
        mapped = jax.shard_map(
            program,
            mesh=self.mesh,
            in_specs=(*places, PartitionSpec(), PartitionSpec()),
            out_specs=results,
            axis_names={self.axis},
            check_vma=False,
        )
        return jax.jit(mapped)  # outside of one, axes that are left to the compiler are an error

    def _divided(self, leaf: Any) -> Any:
        """The rows of all microbatches, divided alike."""
        number = math.prod(self.mesh.shape[axis] for axis in self.batch_axes)
        if number == 1 or leaf.shape[1] % number:
            return leaf
        sharding = NamedSharding(self.mesh, PartitionSpec(None, self.batch_axes))
        return jax.lax.with_sharding_constraint(leaf, sharding)

    def _microbatches(self, batch: Tree, number: int) -> tuple[Tree, Any]:
        """The microbatches, and the part of each in the loss."""
        batches = split_batch(jax.tree.map(lambda leaf: None if _is_key(leaf) else leaf, batch), number)
        keys = jax.tree.map(
            lambda leaf: (
                jax.vmap(functools.partial(jax.random.fold_in, leaf))(jnp.arange(number)) if _is_key(leaf) else None
            ),
            batch,
        )
        batches = jax.tree.map(self._divided, batches)
        batches = jax.tree.map(
            lambda leaf, key: key if leaf is None else leaf, batches, keys, is_leaf=lambda x: x is None
        )
        return batches, microbatch_weights(self.weight, batches, number)


def _refuse_other_rows(layers: Tree, plan: Layout) -> None:
    for leaf in jax.tree.leaves(layers):
        if leaf.shape[:1] != (plan.num_rows,):
            raise StructureError(
                "layers are not in the order of ranks",
                expected=f"{plan.num_rows} rows",
                got=f"{leaf.shape[0]}" if leaf.shape else "a scalar",
                hint="layers = pipeline.arrange(layers)",
            )


def _struct(leaf: Any) -> Any:
    """The shape of an array, and where it is."""
    aval = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=getattr(leaf, "sharding", None))


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(getattr(leaf, "dtype", jnp.float32), jax.dtypes.prng_key) and leaf.ndim == 0
