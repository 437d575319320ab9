"""A training step that runs the optimizer inside the backward pass, one block at a time.

A usual training step holds all gradients before the first update, and all optimizer state. Here the backward pass
visits one block of a `LayerStack` at a time. The optimizer uses the block's gradients before the next block runs. By
default, the block's weights and state are on the device only during this visit. Each block processes all microbatches
before the next block, so more tokens per step need no more host traffic of weights and optimizer state. State on the
host follows ZeRO-Offload (Ren et al., arXiv:2101.06840). Every block runs forward twice. Optimizers that mix leaves are
refused.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ...core import (
    ConfigError,
    LayerStack,
    LowtideError,
    PlacementError,
    SelectionError,
    Selector,
    StructureError,
    Tree,
    check_choice,
    check_differentiable,
    check_integer,
    check_number,
    check_type,
    combine,
    fractions,
    leaf_bytes,
    leaves_with_paths,
    map_with_paths,
    match_path,
    memory_space,
    microbatch_weights,
    num_layers,
    on_host,
    partition,
    products_explained,
    split_batch,
    traced_device,
    zero_after,
)
from ...jaxprs import variables_read
from .._host_memory import (
    DEVICE,
    HOST,
    SPACES,
    entry_shape,
    index_after,
    put,
    read,
    to_device,
    to_host,
    write,
    zero_buffer,
)
from .._optimizer import check_chunk, check_transformation, is_offloaded, replicated, state_shardings
from .._streaming import Entry, part_of_parameters, refuse_other_type, stream
from ._checks import refuse_coupled, refuse_explicit_axes, refuse_unusable
from ._passes import StackPasses

PLACES = {"layers": "host", "outer": "device", "opt_state": "host", "inputs": "host"}
"""Default memory of each part, the argument `place` of `layerwise_step`."""
OnNan = Literal["ignore", "skip"]
ClipMode = Literal["exact", "previous", "layer"]


def layerwise_step(
    stack: LayerStack,
    tx: optax.GradientTransformation,
    *,
    wrt: Selector = "**",
    place: Mapping[str, str] | None = None,
    clip: Clip | None = None,
    num_microbatches: int = 1,
    weight: Callable[[Tree], Any] | None = None,
    chunk_bytes: int | str = 2**26,
    on_nan: OnNan = "skip",
) -> LayerwiseStep:
    """Make a training step that updates each layer inside the backward pass.

    Args:
        stack: the model as functions `first`, `block` and `last`.
        tx: any Optax optimizer that updates a leaf without gradients of other leaves (no clipping by a global norm). It
            receives each layer, without the stacking axis, and each outer leaf as a separate tree, with paths
            ``layers/...`` and ``outer/...``. So optimizers that reduce over a leaf (LAMB, Adafactor, Muon) reduce over
            one layer's leaf. A mask such as ``x.ndim > 1`` counts the axes of one layer, unlike a plain step on stacked
            leaves.
        wrt: selects the leaves of ``{"outer": ..., "layers": ...}`` that train: globs such as ``"layers/**/lora_*"``,
            or a predicate.
        place: ``"host"`` or ``"device"`` for ``"layers"`` (stacked parameters), ``"outer"`` (embedding, norm, head),
            ``"opt_state"`` (of both) and ``"inputs"`` (inputs of blocks, kept for the backward pass). By default
            everything but the outer parameters is on the host. Scalars, and vectors below 1 MiB, stay on the device.
        clip: how to clip gradients, or None.
        num_microbatches: number of parts of a batch; each layer processes all of them before the next layer is fetched.
        weight: function of a microbatch that returns its weight, as in `lowtide.accumulate`; None for equal weights.
        chunk_bytes: approximate bytes of optimizer state on the device at one time during an update; a number, or text
            such as ``"64 MiB"``.
        on_nan: what to do when the loss or a gradient is not finite. ``"ignore"`` applies the updates. ``"skip"`` skips
            all updates when the loss is not finite. With ``"exact"`` clipping it also skips all updates when a gradient
            is not finite, because the norm of all gradients is known before any update. With other clipping, or none,
            it skips the first part with such a gradient, and all later parts. The parts are, in this order: outer
            leaves that only `last` reads; layers, from last to first; other outer leaves. The metrics report the loss
            and the norm. A `lowtide.Trainer` has a separate ``on_nan``, and with ``"skip"`` counts the skipped steps.

    Returns:
        The step: ``state, frozen = step.init(outer, layers)``, then
        ``state, metrics = jax.jit(step, donate_argnums=0)(state, frozen, batch)``.

    Raises:
        StructureError: when `stack` is not a `LayerStack`.
        ConfigError: for an invalid argument, or a `tx` that is wrapped by `lowtide.offload.optimizer`.

    Memory:
        The device holds the arrays that `place` puts there, and the weights and gradients of one layer. It also holds
        the activations of one block for one microbatch, a few times `chunk_bytes` of optimizer state, and the gradient
        of the largest outer leaf. Gradients of leaves that `first` and `last` share are held throughout the backward
        pass. Apart from the placed arrays, this does not grow with the number of layers or microbatches. The host holds
        one copy of the arrays that are placed there. With ``"inputs"`` on the host, these include up to
        ``num_layers + 2`` times the activations that one block returns for the whole batch.

    Examples:
        >>> stack = LayerStack(
        ...     first=lambda outer, batch: batch["x"] * outer["scale"],
        ...     block=lambda layer, h, batch: jnp.tanh(h @ layer["w"]),
        ...     last=lambda outer, h, batch: (jnp.mean((h - batch["y"]) ** 2), {}),
        ... )
        >>> step = layerwise_step(stack, optax.adam(1e-3))
        >>> state, frozen = step.init({"scale": jnp.ones(())}, {"w": jnp.ones((3, 2, 2))})
        >>> batch = {"x": jnp.ones((4, 2)), "y": jnp.zeros((4, 2))}
        >>> state, metrics = jax.jit(step, donate_argnums=0)(state, frozen, batch)
        >>> sorted(metrics), state.layers["w"].sharding.memory_kind
        (['grad_norm', 'loss'], 'pinned_host')

    References:
        Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources", arXiv:2306.09782.
        Pudipeddi et al., "Training Large Neural Networks with Constant Memory using a New Execution Algorithm",
        arXiv:2002.05645.
    """
    hint = "make one from three functions, or use lt.offload.optimizer, which takes any model"
    check_type("stack", stack, LayerStack, "a lowtide.LayerStack", hint=hint, error=StructureError)
    check_type("place", place or {}, Mapping, "a mapping of parts to memories", hint='pass place={"layers": "host"}')
    places = {**PLACES, **(place or {})}
    for name, memory in places.items():
        check_choice("a key of place", name, tuple(PLACES))
        check_choice(f"place of {name}", memory, tuple(SPACES), hint=f"leave it out for {PLACES[name]!r}, the default")
    check_integer("num_microbatches", num_microbatches, hint="leave it out for the default")
    hint = 'use "skip" to leave out updates that are not finite; lt.Trainer has more actions'
    check_choice("on_nan", on_nan, get_args(OnNan), hint=hint)
    if clip is not None:
        check_type("clip", clip, Clip, "a lowtide.offload.Clip or None", hint="pass clip=Clip(max_norm=1.0)")
    check_transformation(tx)
    if is_offloaded(tx):
        problem = "the optimizer is wrapped by lt.offload.optimizer, but a layerwise step offloads its state itself"
        hint = 'pass the inner optimizer; place={"opt_state": "host"}, the default, keeps its state on the host'
        raise ConfigError(problem, hint=hint)
    return LayerwiseStep(
        stack=stack,
        tx=tx,
        wrt=wrt,
        place=places,
        clip=clip,
        num_microbatches=num_microbatches,
        weight=weight,
        chunk_bytes=check_chunk(chunk_bytes),
        on_nan=on_nan,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clip:
    """Settings for clipping gradients; the constructor raises `ConfigError` for invalid values.

    Examples:
        >>> Clip(max_norm=1.0)
        Clip(max_norm=1.0, mode='exact')
    """

    max_norm: float
    """Largest norm, above 0. Gradients with a larger norm are scaled down to this norm."""
    mode: ClipMode = "exact"
    """Norm that decides the scale. ``"exact"``: the norm of all gradients of this step, as `optax.clip_by_global_norm`,
    from a second forward and backward pass. It costs twice the arithmetic and 1.3 times the host traffic of weights and
    optimizer state. ``"previous"``: the norm of the last step that was not skipped; the first step is not clipped.
    ``"layer"``: the norm of each layer, and of each outer leaf. The last two have no extra cost."""

    def __post_init__(self) -> None:
        check_number("max_norm", self.max_norm, above=0, hint="use for instance 1.0, or clip=None for no clipping")
        check_choice("mode", self.mode, get_args(ClipMode), hint='use "exact", which equals optax.clip_by_global_norm')

    def factor(self, norm: Any) -> Any:
        """Return the factor for gradients with this norm: 1, or the factor that reduces the norm to `max_norm`."""
        return jnp.where(norm < self.max_norm, 1.0, self.max_norm / norm)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "outer", "layers", "outer_opt", "layers_opt", "grad_norm"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class LayerwiseState:
    """All arrays that a layerwise step changes."""

    step: Any
    """Number of steps taken, an int32 scalar."""
    outer: Tree
    """Trainable outer leaves, `None` elsewhere."""
    layers: Tree
    """Trainable stacked leaves, `None` elsewhere."""
    outer_opt: Mapping[str, Tree]
    """The optimizer's state of each outer leaf, by the path of the leaf."""
    layers_opt: Tree
    """The optimizer's state of one layer, every leaf with a leading axis for the layers."""
    grad_norm: Any
    """Norm of all gradients in the last unskipped step, 0 before any; float32 (float64 with `jax_enable_x64`)."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)  # jax.jit distinguishes steps by identity
class LayerwiseStep:
    """A pure training step; made by `layerwise_step`, called under `jax.jit` with its first argument donated."""

    stack: LayerStack
    """The model."""
    tx: optax.GradientTransformation
    """The optimizer."""
    wrt: Selector
    """Selects the leaves that train."""
    place: Mapping[str, str]
    """Memory of each part."""
    clip: Clip | None
    """How gradients are clipped."""
    num_microbatches: int
    """Number of parts of a batch."""
    weight: Callable[[Tree], Any] | None
    """Weight of a microbatch."""
    chunk_bytes: int
    """Approximate bytes of optimizer state on the device at one time."""
    on_nan: OnNan
    """Action for a loss or gradients that are not finite."""

    def init(self, outer: Tree, layers: Tree) -> tuple[LayerwiseState, Tree]:
        """Place the parameters and make the optimizer's state.

        Args:
            outer: parameters outside the stack.
            layers: stacked parameters. The leaves of `outer` and `layers` are arrays, or for ahead-of-time compilation
                `jax.ShapeDtypeStruct`s; then the results are shapes, too. Each leaf keeps its sharding.

        Returns:
            The state, which every step consumes and returns, and the frozen leaves, which a step only reads.

        Raises:
            ConfigError: for leaves on a mesh with explicit axes.
            SelectionError: when `wrt` selects nothing, or a leaf that has no gradient (an integer); when
                `LayerStack.running` matches no outer leaf.
            StructureError: for layers without a common leading axis or without a trainable leaf, or outer leaves with
                equal paths; for an optimizer that mixes leaves, draws random numbers, or needs more than gradients,
                parameters and the loss.

        Memory:
            One copy of each parameter in its place; optimizer state is made one layer at a time. A parameter that is
            already in its place is not copied: it becomes part of the state, which the first step donates.
        """
        if not num_layers(layers):
            hint = "use lt.value_and_grad and an optimizer for a model without layers"
            raise StructureError("the stack has no layers", hint=hint)
        paths, running = [path for path, _ in leaves_with_paths(outer)], self.stack.running
        for path in paths:  # the path is the key of a leaf's state
            if (count := paths.count(path)) > 1:
                hint = "rename a key that contains '/'"
                raise StructureError(f"{count} leaves have the path outer/{path}", hint=hint)
        refuse_explicit_axes(outer=outer, layers=layers)
        if running and not any(match_path(path, pattern) for path in paths for pattern in running):
            problem = f"LayerStack.running matches no outer leaf: {', '.join(map(repr, running))}"
            expected = f"a pattern for one of {', '.join(paths[:8]) or 'no leaves'}"
            hint = "name matrices that last multiplies by, such as lm_head/weight, or pass ()"
            raise SelectionError(problem, expected=expected, hint=hint)
        # A Python number has no memory space, so it becomes an array.
        outer = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)) if isinstance(x, float | int) else x, outer)
        trainable, frozen = partition({"outer": outer, "layers": layers}, self.wrt)
        check_differentiable(trainable)
        if not jax.tree.leaves(trainable["layers"]):
            problem = "no stacked leaf, below 'layers', is selected for training"
            got = ", ".join(path for path, _ in leaves_with_paths(trainable))
            raise StructureError(problem, got=got, hint="use lowtide.value_and_grad if the layers need no gradients")

        def place_leaf(name: str, leaf: Any) -> Any:
            is_on_host = self.place[name] == "host" and _can_move_to_host(leaf, is_stacked=name == "layers")
            # `to_device` also commits arrays to the device. Otherwise the second step, which gets the results of the
            # first, would compile again.
            return to_host(leaf) if is_on_host else to_device(leaf)

        trainable, frozen = (
            {name: jax.tree.map(functools.partial(place_leaf, name), tree[name]) for name in ("outer", "layers")}
            for tree in (trainable, frozen)
        )
        refuse_coupled(_scope_optimizer(self.tx, "layers"), jax.tree.map(entry_shape, trainable["layers"]))
        shapes = jax.tree.map(_shape, trainable["outer"])
        for path, _ in leaves_with_paths(shapes):
            refuse_unusable(_scope_optimizer(self.tx, "outer"), _select_paths(shapes, {path}))
        return _initial_state(self.tx, trainable["outer"], trainable["layers"], self.place["opt_state"]), frozen

    def parameters(self, state: LayerwiseState, frozen: Tree) -> tuple[Tree, Tree]:
        """Return the model's current parameters `outer` and `layers`, without copies or moves."""
        return combine(state.outer, frozen["outer"]), combine(state.layers, frozen["layers"])

    def __call__(self, state: LayerwiseState, frozen: Tree, batch: Tree) -> tuple[LayerwiseState, dict[str, Any]]:
        """Run one step.

        Args:
            state: as `init` or the previous step returned it; donate it.
            frozen: the frozen leaves that `init` returned.
            batch: data that the stack's functions read. With several microbatches, the leading axis of every leaf is
                split.

        Returns:
            The new state, and the metrics: ``loss``, ``grad_norm`` (of all gradients, before clipping), and the metrics
                of `last`, averaged over microbatches by weight.

        Raises:
            ConfigError: for a batch on a mesh with explicit axes.
            PlacementError: when a leaf of the state is not in the memory where it was placed.
            StructureError: when the batch's leading axis is not a multiple of `num_microbatches`, or a function of the
                stack returns a wrong structure or type. Also for a trainable outer leaf that neither `first` nor `last`
                reads, or one that `LayerStack.running` names but `last` does not use exactly once.
        """
        _refuse_other_state(state, frozen)
        self._check_places(state, frozen)
        refuse_explicit_axes(batch=batch)
        clip = self.clip
        with products_explained(self.parameters(state, frozen)):
            if self.num_microbatches == 1:  # leaves without a leading axis need no split
                batches = jax.tree.map(lambda leaf: jnp.expand_dims(leaf, 0), batch)
                loss_weights = jnp.ones(1, jnp.float32)
            else:
                batches = split_batch(batch, self.num_microbatches)
                loss_weights = fractions(microbatch_weights(self.weight, batches, self.num_microbatches))
            passes = StackPasses(
                stack=self.stack,
                frozen_outer=frozen["outer"],
                frozen_layers=frozen["layers"],
                batches=batches,
                loss_weights=loss_weights,
                num_layers=num_layers(state.layers),
                inputs_space=SPACES[self.place["inputs"]],
            )
            if clip is not None and clip.mode == "exact":
                norm, layers = _Step(settings=self, state=state, passes=passes).measure()
                # `measure` may write layers back in place, so the update continues with the layers that it returned.
                measured_step = _Step(settings=self, state=dataclasses.replace(state, layers=layers), passes=passes)
                return measured_step.update(clip.factor(norm), jnp.isfinite(norm))
            factor = clip.factor(state.grad_norm) if clip is not None and clip.mode == "previous" else None
            return _Step(settings=self, state=state, passes=passes).update(factor)

    def _check_places(self, state: LayerwiseState, frozen: Tree) -> None:
        if not traced_device().addressable_memories():
            return  # compile-only GPUs have no host memory; memory reports use the declared placement
        trees = (
            ("outer", False, (state.outer, frozen["outer"])),
            ("layers", True, (state.layers, frozen["layers"])),
            ("opt_state", False, (state.outer_opt,)),
            ("opt_state", True, (state.layers_opt,)),
        )
        for name, is_stacked, tree in trees:
            expected_space = SPACES[self.place[name]]
            for path, leaf in leaves_with_paths(tree):
                if _can_move_to_host(leaf, is_stacked=is_stacked) and memory_space(leaf) != expected_space:
                    description = f"{name}/{path.partition('/')[2]}"
                    problem = f"{description} is not in {self.place[name]} memory, where place= puts it"
                    hint = "take the state from step.init, or move a restored state back with lt.offload.to_host"
                    raise PlacementError(problem, hint=hint)


def _refuse_other_state(state: Any, frozen: Any) -> None:
    """Raise `StructureError` unless the arguments of a step have the types of the results of `init`."""
    if not isinstance(state, LayerwiseState) or not isinstance(frozen, Mapping) or set(frozen) != {"outer", "layers"}:
        got = f"step({type(state).__name__}, {type(frozen).__name__}, ...)"
        hint = "make both with state, frozen = step.init(outer, layers)"
        raise StructureError(f"call a layerwise step as step(state, frozen, batch), not {got}", hint=hint)


# --- one step over a batch -------------------------------------------------------------------------------------------

# The global norm is known only when the last gradient has been computed. An update inside the backward pass has already
# happened by then. `Clip` lists the alternatives and their costs.


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Step:
    """One training step: its settings, the state before it, and the passes over its batch; every method is pure."""

    settings: LayerwiseStep
    state: LayerwiseState
    passes: StackPasses

    def measure(self) -> tuple[Any, Tree]:
        """Return the norm of all gradients, without keeping them, and the stacked leaves that `forward` returns."""
        first, last = self._find_read_paths()
        inputs, boundary, layers = self.passes.forward(self._select_outer(first), self.state.layers, self.state.step)
        _, _, grads_last, boundary = self.passes.last(self._select_outer(last), boundary)
        shared = self._store_shared(grads_last, first & last)
        squares = _square_norm(_without_paths(grads_last, first))

        def consume(squares: Any, i: Any, layer: Tree, grads: Tree) -> Any:
            return squares + _square_norm(grads)

        after = zero_after(squares)
        squares, boundary = self.passes.backward(lambda _: layers, inputs, boundary, consume, squares, after)
        grads = self._first_gradients(first, boundary, shared)
        return jnp.sqrt(squares + _square_norm(grads)), layers

    def update(self, factor: Any, is_finite: Any = True) -> tuple[LayerwiseState, dict[str, Any]]:
        """Compute the new state and the metrics.

        `factor` scales all gradients; None for the clip mode ``"layer"`` and without clipping. `is_finite` is whether
        the norm from `measure` is finite; True if `measure` did not run.
        """
        state, (first, last) = self.state, self._find_read_paths()
        inputs, boundary, layers = self.passes.forward(self._select_outer(first), state.layers, (state.step, factor))
        loss, metrics, grads_last, boundary = self.passes.last(self._select_outer(last), boundary)
        shared = self._store_shared(grads_last, first & last)
        # Leaves that only `last` reads are updated before the blocks. Leaves that `first` also reads wait for the
        # gradients of `first`, at the end of the backward pass.
        head = _without_paths(grads_last, first)
        squares = _square_norm(head)
        outer, outer_opt = self._update_outer(head, factor, loss, self._guard(squares, loss, is_finite))

        def consume(carry: Any, i: Any, layer: Tree, grads: Tree) -> Any:
            layers, opt, squares = carry
            layer_factor, squares = self._factor(grads, factor), squares + _square_norm(grads)
            options = {"guard": self._guard(squares, loss, is_finite), **self._options}
            tx = _scope_optimizer(self.settings.tx, "layers")
            layers, opt = _update_layer(tx, grads, layer, layers, opt, i, loss, layer_factor, **options)
            return layers, opt, squares

        # The first block waits for the update of the head, so that the head's gradients are freed first.
        after = zero_after((outer, squares))
        carry = (layers, state.layers_opt, squares)
        carry, boundary = self.passes.backward(lambda carry: carry[0], inputs, boundary, consume, carry, after)
        layers, layers_opt, squares = carry
        grads = self._first_gradients(first, boundary, shared)
        squares = squares + _square_norm(grads)
        guard = self._guard(squares, loss, is_finite)
        remaining, remaining_opt = self._update_outer(grads, factor, loss, guard)
        norm = jnp.sqrt(squares)
        new_state = LayerwiseState(
            step=state.step + 1,
            outer=combine(outer, remaining),
            layers=layers,
            outer_opt={**outer_opt, **remaining_opt},
            layers_opt=layers_opt,
            grad_norm=norm if guard is None else jnp.where(guard, norm, state.grad_norm),
        )
        return new_state, {**metrics, "loss": loss, "grad_norm": norm}

    def _find_read_paths(self) -> tuple[frozenset[str], frozenset[str]]:
        """Return the paths of the trainable outer leaves that `first` reads, and of those that `last` reads."""
        passes, outer = self.passes, jax.tree.map(_shape, put(self.state.outer, DEVICE))
        frozen = jax.tree.map(_shape, put(passes.frozen_outer, DEVICE))
        batch = jax.tree.map(_shape, passes.batch(0))
        layer = jax.tree.map(entry_shape, combine(self.state.layers, passes.frozen_layers))
        stack = passes.stack
        h, metrics = stack.shapes(combine(outer, frozen), layer, batch)
        check_type("the metrics of last", metrics, dict, "a dictionary of scalars", error=StructureError)
        if taken := ", ".join(sorted({"loss", "grad_norm"} & set(metrics))):
            problem = f"last returns a metric named {taken}, which the step reports itself"
            raise StructureError(problem, hint="rename it")
        first = _find_paths_read_by(lambda o, f, b: stack.first(combine(o, f), b), outer, frozen, batch)
        last = _find_paths_read_by(lambda o, f, h, b: stack.last(combine(o, f), h, b), outer, frozen, h, batch)
        for path, _ in leaves_with_paths(outer):
            if path not in first | last:
                hint = f'leave it out of the selection, for instance with the pattern "!outer/{path}"'
                raise StructureError(f"outer/{path} cannot train: neither first nor last reads it", hint=hint)
        return first, last

    def _select_outer(self, paths: frozenset[str]) -> Tree:
        return _select_paths(self.state.outer, paths)

    def _first_gradients(self, paths: frozenset[str], boundary: Tree, shared: Tree) -> Tree:
        """Return the gradients of `first`, plus those of `last` for shared leaves."""
        grads, shared_by_path = self._select_outer(paths), dict(leaves_with_paths(shared))

        def add(path: str, leaf: Any) -> Any:
            return leaf + put(shared_by_path[path], DEVICE).astype(leaf.dtype) if path in shared_by_path else leaf

        return map_with_paths(add, self.passes.first(grads, boundary)) if paths else grads

    def _store_shared(self, grads: Tree, paths: frozenset[str]) -> Tree:
        """Move the gradients of leaves that `first` and `last` share to the memory of the outer parameters."""
        space = SPACES[self.settings.place["outer"]]
        return jax.tree.map(lambda x: put(x, space) if x.ndim > 1 else x, _select_paths(grads, paths))

    def _factor(self, grads: Tree, factor: Any) -> Any:
        clip = self.settings.clip
        return clip.factor(jnp.sqrt(_square_norm(grads))) if clip is not None and clip.mode == "layer" else factor

    @property
    def _options(self) -> dict[str, Any]:
        # On a mesh, rows can be sharded, and cutting them would gather the leaf. So leaves are updated whole, one at a
        # time.
        meshes = [jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves((self.state.outer, self.state.layers))]
        return {"chunk_bytes": self.settings.chunk_bytes, "by_leaf": any(mesh.size > 1 for mesh in meshes)}

    def _guard(self, squares: Any, loss: Any, is_finite: Any) -> Any:
        """Return whether the loss and all gradients so far are finite; None if updates are never skipped."""
        is_guarded = self.settings.on_nan == "skip"
        return jnp.isfinite(squares) & jnp.isfinite(loss) & is_finite if is_guarded else None

    def _update_outer(self, grads: Tree, factor: Any, loss: Any, guard: Any) -> tuple[Tree, dict[str, Tree]]:
        """Update outer leaves one after the other; return the new leaves, and optimizer states by path."""
        outer, states = _select_paths(self.state.outer, ()), dict[str, Tree]()
        for path, _ in leaves_with_paths(grads):
            grad, old_leaf = _select_paths(grads, {path}), _select_paths(self.state.outer, {path})
            leaf_factor, opt = self._factor(grad, factor), self.state.outer_opt[path]
            options = {"guard": guard, **self._options}
            new_leaf, states[path] = _update(
                _scope_optimizer(self.settings.tx, "outer"), grad, old_leaf, opt, loss, leaf_factor, **options
            )
            outer = combine(outer, new_leaf)
        return outer, states


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _without_paths(tree: Tree, paths: frozenset[str]) -> Tree:
    return _select_paths(tree, {path for path, _ in leaves_with_paths(tree)} - paths)


def _find_paths_read_by(fn: Callable[..., Any], outer: Tree, *other_args: Tree) -> frozenset[str]:
    jaxpr = jax.make_jaxpr(fn)(outer, *other_args).jaxpr
    used_variables = variables_read(jaxpr)
    paths = [path for path, _ in leaves_with_paths(outer)]
    return frozenset(path for path, var in zip(paths, jaxpr.invars, strict=False) if var in used_variables)


def _square_norm(tree: Tree) -> Any:
    """Return the sum of the squares of all leaves, in float32, or in float64 with `jax_enable_x64`."""

    def square(leaf: Any) -> Any:
        size = jnp.abs(leaf)
        return jnp.sum(jnp.square(size.astype(jnp.promote_types(size.dtype, jnp.float32))))

    return sum((square(leaf).astype(float) for leaf in jax.tree.leaves(tree)), jnp.zeros((), float))


# --- updates of one layer of a stack, or of one outer leaf, in the memory that holds them ----------------------------


def _update(
    tx: Any,
    grads: Tree,
    params: Tree,
    opt: Tree,
    loss: Any,
    factor: Any,
    *,
    into: Tree = None,
    guard: Any = None,
    **options: Any,
) -> tuple[Tree, Tree]:
    """Update parameters and state in place, in host or device memory, one block of rows at a time.

    Gradients are on the device. The new parameters overwrite `into` if it is given, otherwise `params`. `guard` is a
    boolean scalar: if False, old values are kept. None means True. `options` are those of `stream`.
    """

    def apply(grads: Tree, opt: Tree, params: Tree, into: Tree, loss: Any, factor: Any, guard: Any) -> Any:
        if factor is not None:
            grads = jax.tree.map(lambda leaf: leaf * factor.astype(leaf.dtype), grads)
        updates, new_state = tx.update(grads, opt, params, value=loss)
        result = optax.apply_updates(params, updates), new_state
        if guard is None:
            return result

        def select(new: Any, old: Any) -> Any:  # a changed shape or dtype is refused elsewhere, with the leaf's name
            return jnp.where(guard, new, old) if (new.shape, new.dtype) == (old.shape, old.dtype) else new

        return jax.tree.map(select, result, (params, opt))

    def replaces(grads: Tree, opt: Tree, params: Tree, into: Tree, loss: Any, factor: Any, guard: Any) -> Any:
        return params if into is None else into, opt

    num_grads = len(jax.tree.leaves(grads))
    declared = [num_grads + index for index, leaf in enumerate(jax.tree.leaves(opt)) if _is_8_bit(leaf)]
    args = grads, opt, params, into, jnp.asarray(loss), factor, guard
    return stream(apply, args, replaces, declared=declared, **options)


def _is_8_bit(leaf: Any) -> bool:
    """Return whether a state leaf is an 8-bit matrix; `stream` then holds only a block of the leaf in float32."""
    return leaf.ndim > 1 and leaf.dtype.itemsize == 1


def _update_layer(
    tx: Any, grads: Tree, layer: Tree, layers: Tree, opt: Tree, i: Any, loss: Any, factor: Any, **options: Any
) -> tuple[Tree, Tree]:
    """Update layer i of a stack; return the stacked parameters and state, with layer i replaced in place.

    `grads` and `layer` belong to layer i and are on the device. `layers` and `opt` are stacked.
    """
    is_narrow = any(map(_is_8_bit, jax.tree.leaves(opt)))
    # On a GPU, parameters are updated in place, like the state. On a TPU, XLA would keep a copy of all layers for later
    # reads: seen in compiled programs.
    is_all_narrow = is_narrow and traced_device().platform == "gpu"

    def entry(leaf: Any, is_in_place: bool) -> Any:
        return Entry(leaf, i) if memory_space(leaf) == HOST or (is_in_place and leaf.ndim > 2) else read(leaf, i)

    index = i

    def write_back(stacked: Any, new: Any) -> Any:
        nonlocal index
        if new.shape == stacked.shape:
            return new
        refuse_other_type("the state of a layer", stacked, new)
        written = write(stacked, new, index)
        index = index_after(i, written)  # new parameters are computed from the old state, so the state is written last
        return written

    into = jax.tree.map(functools.partial(entry, is_in_place=is_all_narrow), layers)
    state = jax.tree.map(functools.partial(entry, is_in_place=is_narrow), opt)
    new, new_state = _update(tx, grads, layer, state, loss, factor, into=into, **options)
    return jax.tree.map(write_back, layers, new), jax.tree.map(write_back, opt, new_state)


# --- the state, initialised one layer at a time ----------------------------------------------------------------------


def _select_paths(tree: Tree, paths: Collection[str]) -> Tree:
    """Keep the leaves of the tree at the given paths; all other leaves become None."""
    return map_with_paths(lambda path, leaf: leaf if path in paths else None, tree)


def _scope_optimizer(tx: optax.GradientTransformation, name: str) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer so that it sees a part of the parameters as ``{name: part}``.

    Its paths then begin with ``layers/`` or ``outer/``, as in the whole tree. So labels and masks that are functions of
    paths give the same result as in a plain step.
    """
    inner: Any = optax.with_extra_args_support(tx)

    def init(params: Tree) -> Tree:
        with part_of_parameters():
            return inner.init({name: params})

    def update(updates: Tree, state: Tree, params: Tree = None, **extra: Any) -> tuple[Tree, Tree]:
        updates, state = inner.update({name: updates}, state, {name: params}, **extra)
        return updates[name], state

    return optax.GradientTransformationExtraArgs(init, update)


def _can_move_to_host(leaf: Any, *, is_stacked: bool) -> bool:
    """Return whether a leaf may move to the host: it has two or more axes, or at least 1 MiB.

    Stacked leaves count without their leading axis. Smaller vectors stay on the device: a partitioned program may need
    to slice a leaf in host memory, and a TPU cannot slice such vectors there.
    """
    entry = leaf.shape[1:] if is_stacked else leaf.shape
    return len(entry) > 1 or leaf_bytes(jax.ShapeDtypeStruct(entry, leaf.dtype)) >= 2**20


def _initial_state(tx: optax.GradientTransformation, outer: Tree, layers: Tree, opt_place: str) -> LayerwiseState:
    """Make the state of step 0 for placed parameters; for shapes, return shapes."""
    space = SPACES[opt_place]

    def make_layers(layers: Tree) -> Tree:
        init = _scope_optimizer(tx, "layers").init
        shapes = jax.eval_shape(lambda: init(read(layers, 0)))
        empty = jax.tree.map(
            lambda leaf: zero_buffer(leaf, (count,), space if _can_move_to_host(leaf, is_stacked=False) else DEVICE),
            shapes,
        )
        return jax.lax.fori_loop(0, count, lambda i, state: write(state, init(read(layers, i)), i), empty)

    def make_outer(leaf: Tree) -> Tree:
        state = _scope_optimizer(tx, "outer").init(put(leaf, DEVICE))
        return jax.tree.map(lambda x: put(x, space) if _can_move_to_host(x, is_stacked=False) else x, state)

    count = num_layers(layers)
    try:  # raises the optimizer's error if it selects no parameter of the whole tree; one part may be unselected
        jax.eval_shape(lambda outer, layers: tx.init({"outer": outer, "layers": read(layers, 0)}), outer, layers)
    except LowtideError:
        raise
    except Exception:  # noqa: S110, BLE001 -- labels or masks given as trees may fit one part only
        pass
    return LayerwiseState(
        step=_zero_scalar(layers, jnp.int32),
        outer=outer,
        layers=layers,
        outer_opt={
            path: _make_sharded(make_outer, _select_paths(outer, {path})) for path, _ in leaves_with_paths(outer)
        },
        layers_opt=_make_sharded(make_layers, layers),
        grad_norm=_zero_scalar(layers, jnp.result_type(float)),
    )


def _make_sharded(make: Callable[[Tree], Tree], params: Tree) -> Tree:
    """Compute ``make(params)``, with each leaf sharded like its parameter; for shapes, return shapes."""
    initialiser: Any = make  # only `init` of the transformation is called
    shardings = state_shardings(optax.GradientTransformation(initialiser, initialiser), params)
    if not _has_shapes(params):
        return jax.jit(make, out_shardings=shardings)(params)

    def make_shape(leaf: Any, sharding: Any) -> Any:
        shape = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        return to_host(shape) if on_host(sharding) else shape

    return jax.tree.map(make_shape, jax.eval_shape(make, params), shardings)


def _has_shapes(tree: Tree) -> bool:
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))


def _zero_scalar(like: Tree, dtype: Any) -> Any:
    """Make a scalar zero on the devices of a tree; for shapes, return a shape."""
    if _has_shapes(like):
        return jax.ShapeDtypeStruct((), dtype)
    return jax.device_put(jnp.zeros((), dtype), replicated(like).with_memory_kind("device"))
