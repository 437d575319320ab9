"""The optimizer inside the backward pass: gradients of one block at a time are used at once, and state is on the host.

A usual training step holds all gradients before the first update, and all optimizer state. Here the backward pass
visits one block of a `LayerStack` at a time. The optimizer uses the block's gradients before the next block runs. The
block's weights and state are on the device only during this visit. Microbatches run breadth first, so tokens per step
can grow while the host traffic of weights and optimizer state does not. Activations between blocks are then kept on the
host and add traffic.

The update inside the backward pass follows LOMO (Lv et al., arXiv:2306.09782). State on the host follows ZeRO-Offload
(Ren et al., arXiv:2101.06840). Layer-by-layer execution of all microbatches follows L2L (Pudipeddi et al.,
arXiv:2002.05645).

Deviations and limits: the optimizer sees each layer, and each outer leaf, as a separate tree. So optimizers that mix
leaves (a global norm in a chain) are refused, and `Clip` replaces clipping. Every block runs forward twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ...core import (
    ConfigError,
    LayerStack,
    PlacementError,
    Selector,
    StructureError,
    Tree,
    check_count,
    check_differentiable,
    combine,
    fractions,
    leaves_with_paths,
    memory_space,
    microbatch_weights,
    num_layers,
    partition,
    products_explained,
    split_batch,
)
from .._host_memory import HOST, SPACES, default_device, entry_shape
from .._optimizer import check_chunk, check_transformation, is_offloaded
from ._checks import refuse_coupled, refuse_equal_paths, refuse_explicit_axes, refuse_unmatched, refuse_unusable
from ._passes import StackPasses
from ._state import LayerwiseState, can_move_to_host, initial_state, place_parameters, scope_optimizer, select_paths
from ._step import Clip, Step

PLACES = {"layers": "host", "outer": "device", "opt_state": "host", "inputs": "host"}
"""Default places of `layerwise_step`."""
OnNan = Literal["ignore", "skip"]


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
        stack: the model as `first`, `block`, `last`.
        tx: any Optax optimizer that treats leaves one by one, without clipping by a global norm. It sees each layer,
            without the stacking axis, and each outer leaf as a separate tree, at the paths ``layers/...`` and
            ``outer/...``. So optimizers that reduce over a leaf (LAMB, Adafactor, Muon) reduce over one layer's leaf. A
            mask such as ``x.ndim > 1`` counts the axes of one layer, unlike in a plain step on the stacked leaves.
        wrt: selects the leaves of ``{"outer": ..., "layers": ...}`` that train: globs such as ``"layers/**/lora_*"``,
            or a predicate.
        place: ``"host"`` or ``"device"`` for ``"layers"`` (stacked parameters), ``"outer"`` (embedding, norm, head),
            ``"opt_state"`` (of both) and ``"inputs"`` (inputs of blocks, kept for the backward pass). By default
            everything but the outer parameters is on the host. Vectors of less than 1 MiB stay on the device.
        clip: how to clip gradients, or None.
        num_microbatches: number of parts of a batch; each layer processes all of them before the next layer is fetched.
        weight: function of a microbatch that returns its weight, as in `lowtide.accumulate`.
        chunk_bytes: approximate bytes of optimizer state on the device at one time during an update; a number, or text
            such as ``"64 MiB"``.
        on_nan: what to do when the loss or gradients are not finite: ``"ignore"`` updates with them, ``"skip"`` skips
            updates. ``"skip"`` skips all updates when the loss is not finite. It also skips all with ``"exact"``
            clipping, because the norm of all gradients is known before. Otherwise it skips updates from the first layer
            backward on whose gradients are not finite. The metrics report the loss and the norm. A `lowtide.Trainer`
            has a separate ``on_nan``, and with ``"skip"`` counts the skipped steps.

    Returns:
        The step: ``state, frozen = step.init(outer, layers)``, then
        ``state, metrics = jax.jit(step, donate_argnums=0)(state, frozen, batch)``.

    Raises:
        StructureError: when `stack` is not a `LayerStack`.
        ConfigError: for an unknown place or a number out of range.

    Memory:
        The device holds the arrays that `place` leaves there, and the weights and gradients of one layer. It also holds
        the activations of one block for one microbatch, and a few blocks of `chunk_bytes`. It also holds the gradient
        of the largest outer leaf. Gradients of leaves that `first` and `last` share are held throughout the backward
        pass. This does not grow with the number of layers or microbatches. The host holds one copy of the arrays that
        are placed there, and ``(num_layers + 2) * batch`` activations between blocks.

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
    value: Any = stack
    if not isinstance(value, LayerStack):
        raise StructureError(
            "layerwise_step needs a model as a stack of equal blocks",
            expected="a lowtide.LayerStack",
            got=type(value).__name__,
            hint="make one from three functions, or use lt.offload.optimizer, which takes any model",
        )
    value = place or {}
    if not isinstance(value, Mapping):
        raise ConfigError(
            "place is not a mapping",
            expected=f"a dictionary with keys {', '.join(PLACES)}",
            got=repr(value),
            hint='pass place={"layers": "host"}',
        )
    places = {**PLACES, **value}
    for name, memory in places.items():
        if name not in PLACES or memory not in ("host", "device"):
            raise ConfigError(
                f"unknown placement {name!r}: {memory!r}",
                expected=f'"host" or "device" for {", ".join(PLACES)}',
                got=f"{name!r}: {memory!r}",
                hint=f"leave it out for the default, {PLACES}",
            )
    problem = "num_microbatches has to be at least 1"
    check_count(problem, num_microbatches, 1, "a whole number", "leave it out for the default")
    if on_nan not in get_args(OnNan):
        raise ConfigError(
            f"unknown action {on_nan!r} for gradients that are not finite",
            expected=" or ".join(map(repr, get_args(OnNan))),
            got=repr(on_nan),
            hint='use "skip" to leave their updates out; lt.Trainer has more actions',
        )
    value = clip
    if value is not None and not isinstance(value, Clip):
        raise ConfigError(
            "clip is not a Clip",
            expected="a lowtide.offload.Clip",
            got=repr(value),
            hint="pass clip=Clip(max_norm=1.0)",
        )
    check_transformation(tx)
    if is_offloaded(tx):
        raise ConfigError(
            "the optimizer is wrapped by lt.offload.optimizer, but a layerwise step offloads its state itself",
            expected="an unwrapped optimizer, such as optax.adamw(1e-4)",
            got="lt.offload.optimizer(...)",
            hint='pass the inner optimizer; place={"opt_state": "host"}, the default, keeps its state on the host',
        )
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
            layers: stacked parameters. Both may be arrays, or `jax.ShapeDtypeStruct`s for ahead-of-time compilation;
                then the results are shapes, too. Each leaf keeps its sharding.

        Returns:
            The state, which every step consumes and returns, and the frozen leaves, which a step only reads.

        Raises:
            ConfigError: for leaves on a mesh with explicit axes.
            SelectionError: when `wrt` selects nothing, or a leaf that has no gradient (an integer).
            StructureError: for layers without a common leading axis, or outer leaves with equal paths; for an optimizer
                that mixes leaves, draws random numbers, or needs more than gradients, parameters and the loss.

        Memory:
            One copy of each parameter in its place; optimizer state is made one layer at a time. A parameter that is
            already in its place is not copied: it becomes part of the state, and the first step consumes it.
        """
        if not num_layers(layers):
            raise StructureError(
                "the stack has no layers",
                expected="at least one",
                got="0",
                hint="use lt.value_and_grad and an optimizer for a model without layers",
            )
        refuse_equal_paths(outer)
        refuse_explicit_axes(outer=outer, layers=layers)
        refuse_unmatched(self.stack.running, outer)
        # A Python number has no memory space, so it becomes an array.
        outer = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)) if isinstance(x, float | int) else x, outer)
        trainable, frozen = partition({"outer": outer, "layers": layers}, self.wrt)
        check_differentiable(trainable)
        if not jax.tree.leaves(trainable["layers"]):
            raise StructureError(
                "no stacked leaf is selected for training",
                expected="at least one selected leaf below 'layers'",
                got=", ".join(path for path, _ in leaves_with_paths(trainable)),
                hint="use lowtide.value_and_grad if the layers need no gradients",
            )
        trainable, frozen = (place_parameters(tree, self.place) for tree in (trainable, frozen))
        refuse_coupled(scope_optimizer(self.tx, "layers"), jax.tree.map(entry_shape, trainable["layers"]))
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), trainable["outer"])
        for path, _ in leaves_with_paths(shapes):
            refuse_unusable(scope_optimizer(self.tx, "outer"), select_paths(shapes, {path}))
        return initial_state(self.tx, trainable["outer"], trainable["layers"], self.place["opt_state"]), frozen

    def parameters(self, state: LayerwiseState, frozen: Tree) -> tuple[Tree, Tree]:
        """Return the model's current parameters: `outer` and `layers`, in their places."""
        return combine(state.outer, frozen["outer"]), combine(state.layers, frozen["layers"])

    def __call__(self, state: LayerwiseState, frozen: Tree, batch: Tree) -> tuple[LayerwiseState, dict[str, Any]]:
        """Run one step.

        Args:
            state: as `init` or the previous step returned it; donate it.
            frozen: the frozen leaves.
            batch: data that the stack's functions read. With several microbatches, the leading axis of every leaf is
                split.

        Returns:
            The new state, and the metrics: ``loss``, ``grad_norm`` (of all gradients, before clipping), and the metrics
                of `last`, averaged over microbatches by weight.

        Raises:
            ConfigError: for a batch on a mesh with explicit axes.
            PlacementError: when a leaf of the state is not in the memory where it was placed.
            StructureError: when the batch does not split, or a function of the stack returns a wrong result; for an
                outer leaf that no function reads, or one that `LayerStack.running` names but `last` does not use
                exactly once.
        """
        _refuse_other_state(state, frozen)
        self._check_places(state, frozen)
        refuse_explicit_axes(batch=batch)
        with products_explained(self.parameters(state, frozen)):
            return self._run(self._step(state, frozen, batch))

    def _run(self, step: Step) -> tuple[LayerwiseState, dict[str, Any]]:
        if self.clip is not None and self.clip.mode == "exact":
            norm, layers = step.measure()
            # `measure` may write layers back in place, so the update continues with the layers that it returned.
            measured_step = dataclasses.replace(step, state=dataclasses.replace(step.state, layers=layers))
            return measured_step.update(self.clip.factor(norm), jnp.isfinite(norm))
        if self.clip is not None and self.clip.mode == "previous":
            return step.update(self.clip.factor(step.state.grad_norm))
        return step.update(None)

    def _step(self, state: LayerwiseState, frozen: Tree, batch: Tree) -> Step:
        batches, loss_weights = self._batches(batch)
        return Step(
            tx=self.tx,
            clip=self.clip,
            chunk_bytes=self.chunk_bytes,
            is_guarded=self.on_nan == "skip",
            outer_space=SPACES[self.place["outer"]],
            state=state,
            passes=StackPasses(
                stack=self.stack,
                frozen_outer=frozen["outer"],
                frozen_layers=frozen["layers"],
                batches=batches,
                loss_weights=loss_weights,
                num_layers=num_layers(state.layers),
                inputs_space=SPACES[self.place["inputs"]],
            ),
        )

    def _batches(self, batch: Tree) -> tuple[Tree, Any]:
        """Return the microbatches, and the weight of each in the loss."""
        if self.num_microbatches == 1:  # leaves without a leading axis need no split
            return jax.tree.map(lambda leaf: jnp.expand_dims(leaf, 0), batch), jnp.ones(1, jnp.float32)
        batches = split_batch(batch, self.num_microbatches)
        return batches, fractions(microbatch_weights(self.weight, batches, self.num_microbatches))

    def _check_places(self, state: LayerwiseState, frozen: Tree) -> None:
        if not default_device().addressable_memories():
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
                if can_move_to_host(leaf, is_stacked=is_stacked) and memory_space(leaf) != expected_space:
                    raise PlacementError(
                        f"{name}/{path.partition('/')[2]} is not in the memory that place= sets",
                        expected=f"{self.place[name]} memory",
                        got="device memory" if expected_space == HOST else "host memory",
                        hint="take the state from step.init, or move a restored state back with lt.offload.to_host",
                    )


def _refuse_other_state(state: Any, frozen: Any) -> None:
    """Raise when the arguments of a step are not those that its `init` returned."""
    if not isinstance(state, LayerwiseState) or not isinstance(frozen, Mapping) or set(frozen) != {"outer", "layers"}:
        raise StructureError(
            "the arguments are not those of a layerwise step",
            expected="step(state, frozen, batch)",
            got=f"step({type(state).__name__}, {type(frozen).__name__}, ...)",
            hint="make both with state, frozen = step.init(outer, layers)",
        )
