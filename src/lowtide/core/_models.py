"""Interfaces of models: a stack of equal blocks, and protocols for mutable models and for names in other libraries.

Streaming, layerwise updates, remat policies, planning and pipelines all work on `LayerStack`. It has three functions:
`first` makes the activations, `block` is one layer, and `last` computes the loss. Parameters are two trees: `outer`
(embedding, final norm, head) and `layers`, whose leaves all have a leading axis of length `num_layers`. A tied head
needs no special case: `first` and `last` both receive all of `outer`. The last section recomputes layers in groups.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from ._checks import check_integer
from ._devices import check_host_slices
from ._errors import ConfigError, StructureError
from ._files import shown
from ._paths import Tree, leaves_with_paths
from ._placement import activation_constraint, on_device
from ._selection import Selector, combine, sample
from ._tracing import closure_convert

First = Callable[[Tree, Tree], Any]
Block = Callable[[Tree, Any, Tree], Any]
Last = Callable[[Tree, Any, Tree], tuple[Any, Tree]]
Leaves = list[Any]
Move = Callable[[Leaves], Leaves]
Moves = tuple[Move, Move]
NO_MOVES: Moves = (lambda leaves: leaves, lambda leaves: leaves)


class HiddenPass(Protocol):
    """A way to run `LayerStack.hidden` that a plan has chosen; hashable, because it is part of the keys of caches."""

    def hidden(self, stack: LayerStack, outer: Tree, layers: Tree, batch: Tree) -> Any:
        """Return the activations that enter `last`, as `LayerStack.hidden` does."""
        ...


# JAX's caches distinguish the values of a user context. With a context variable, a function with `jax.jit` inside of a
# loss function would run as it was traced for another plan.
hidden_pass: Any = jax.make_user_context(None)
"""The `HiddenPass` of the traced step, or None. ``with hidden_pass(value):`` sets it; ``hidden_pass.value`` is it."""


class StackShapes(NamedTuple):
    """Shapes of the results of a stack's functions."""

    h: Tree
    """The activations between blocks."""
    metrics: Tree
    """The metrics of `last`."""


@dataclasses.dataclass(frozen=True)
class LayerStack:
    """A model as three pure functions of a batch, the stacked `layers` parameters, and all other parameters, `outer`.

    Examples:
        >>> import jax.numpy as jnp
        >>> stack = LayerStack(
        ...     first=lambda outer, batch: batch["x"],
        ...     block=lambda layer, h, batch: jnp.tanh(layer["w"] * h),
        ...     last=lambda outer, h, batch: (jnp.mean((h - batch["y"]) ** 2), {}),
        ... )
        >>> batch = {"x": jnp.ones(3), "y": jnp.zeros(3)}
        >>> loss, metrics = stack.apply({}, {"w": jnp.ones((2, 1))}, batch)
        >>> loss.shape
        ()
    """

    first: First
    """``first(outer, batch) -> h``: the activations that enter the first block."""
    block: Block
    """``block(layer, h, batch) -> h``: one block; `layer` is one slice of `layers`, without the leading axis."""
    last: Last
    """``last(outer, h, batch) -> (loss, metrics)``: the loss of the activations that leave the last block."""
    running: tuple[str, ...] = ()
    """Globs of outer leaves whose gradient may be summed in place over microbatches (`lowtide.core.RunningGradient`).
    `last` must use each of them once, in `lowtide.core.linear` or `lowtide.losses.chunked_cross_entropy`."""

    def hidden(
        self,
        outer: Tree,
        layers: Tree,
        batch: Tree,
        *,
        remat: bool | Callable[..., bool] = False,
        layers_per_remat: int = 1,
    ) -> Any:
        """Run `first` and all blocks, and return the activations that enter `last`.

        Args:
            outer: parameters outside the stack.
            layers: parameters of the blocks, every leaf with a leading axis of length `num_layers`.
            batch: any tree that the three functions read.
            remat: False keeps every block's residuals; True recomputes each block in the backward pass; a policy of
                `jax.checkpoint_policies` recomputes what it does not save.
            layers_per_remat: largest number of consecutive blocks in a group; values above 1 need ``remat=True``. The
                forward pass keeps only the input of each group. The backward pass recomputes the inputs of the other
                blocks, one group at a time. Each block except the last of its group runs forward three times instead of
                twice, effects included. With groups, `jax.jvp` raises.

        Returns:
            The activations, of the shape that `first` and `block` return.

        Raises:
            StructureError: for layers that do not stack, or a block whose result differs in structure, shape or dtype
                from its input.
            ConfigError: for a `remat` that is neither a bool nor a policy; for a `layers_per_remat` outside of 1 to
                `num_layers`, or above 1 without ``remat=True``.

        Memory:
            With ``remat=True``, one activation per layer plus the residuals of one block. With groups, about
            ``num_layers / layers_per_remat + layers_per_remat`` activations plus these residuals. This is smallest if
            `layers_per_remat` is about the square root of `num_layers`. On a TPU, XLA may store the float32 inputs of
            single layers as bfloat16 if only dots read them. It does not do so for the inputs of groups.
        """
        if not (isinstance(remat, bool | np.bool_) or callable(remat)):
            problem = f"remat must be True, False or a policy of jax.checkpoint_policies, not {shown(remat)}"
            raise ConfigError(problem, hint="False keeps the residuals of blocks, True keeps only their inputs")
        remat = bool(remat) if isinstance(remat, np.bool_) else remat
        if (planned := hidden_pass.value) is not None:
            with hidden_pass(None):
                return planned.hidden(self, outer, layers, batch)
        _check_layers_per_remat(layers_per_remat, remat, num_layers(layers))
        if layers_per_remat > 1:
            return hidden_in_groups(self, outer, layers, batch, layers_per_remat)
        block = self.block
        if remat is not False:
            policy = keep_layer_inputs if remat is True else remat
            # Inside of a scan XLA cannot merge recomputation with the forward pass, so `prevent_cse` would only cost
            # time.
            block = jax.checkpoint(recomputed(block) if remat is True else block, policy=policy, prevent_cse=False)

        constrain = activation_constraint()

        def body(h: Any, layer: Tree) -> tuple[Any, None]:
            return constrain(block(on_device(layer), h, batch)), None

        h = constrain(self.first(on_device(outer), batch))
        with _explain_mismatch(self.block, h, layers, batch):
            return jax.lax.scan(body, h, layers)[0]

    def apply(
        self,
        outer: Tree,
        layers: Tree,
        batch: Tree,
        *,
        remat: bool | Callable[..., bool] = False,
        layers_per_remat: int = 1,
    ) -> tuple[Any, Tree]:
        """Run the whole stack, with arguments and errors as in `hidden`, and return ``(loss, metrics)`` of `last`."""
        h = self.hidden(outer, layers, batch, remat=remat, layers_per_remat=layers_per_remat)
        return self.last(on_device(outer), h, batch)

    def shapes(self, outer: Tree, layer: Tree, batch: Tree) -> StackShapes:
        """Trace the three functions and check that they fit together, so that errors name the function at fault.

        Args:
            outer: arrays or shapes of the parameters outside the stack.
            layer: arrays or shapes of one layer, without the leading axis.
            batch: arrays or shapes of one batch.

        Returns:
            Shapes of the results; nothing is computed.

        Raises:
            StructureError: when `block` returns another structure, shape or dtype than its input, or `last` does not
                return a scalar loss and metrics.
        """
        h = jax.eval_shape(self.first, outer, batch)
        _check_block(h, jax.eval_shape(self.block, layer, h, batch))
        result: Any = jax.eval_shape(self.last, outer, h, batch)
        if not (isinstance(result, tuple) and len(result) == 2 and is_loss(result[0])):
            problem, got = "the last function of the stack does not return a loss", _format_types(result)
            expected = "(loss, metrics), where loss is a floating-point scalar, and metrics may be {}"
            raise StructureError(problem, expected=expected, got=got)
        return StackShapes(h, result[1])


def hidden_in_groups(
    stack: LayerStack, outer: Tree, layers: Tree, batch: Tree, layers_per_remat: int, moves: Moves = NO_MOVES
) -> Any:
    """Run `LayerStack.hidden` with recomputation in groups, whose inputs may be kept elsewhere, such as on the host.

    `moves` are two functions of a list of arrays. The first moves a group's input to where it is kept, the second moves
    it back. The other arguments are those of `LayerStack.hidden`.

    Raises:
        StructureError: for layers that do not stack, or a block whose result differs from its input.
        ConfigError: for a `layers_per_remat` outside of 1 to `num_layers`.
    """
    _check_layers_per_remat(layers_per_remat, True, num_layers(layers))
    constrain, block = activation_constraint(), recomputed(stack.block)

    def body(h: Any, layer: Tree) -> Any:
        return constrain(block(on_device(layer), h, batch))

    h = constrain(stack.first(on_device(outer), batch))
    with _explain_mismatch(stack.block, h, layers, batch):
        return _scan_in_groups(body, h, layers, layers_per_remat, moves)


@contextlib.contextmanager
def _explain_mismatch(block: Block, h: Tree, layers: Tree, batch: Tree) -> Generator[None]:
    """Replace a scan's `TypeError` by an error that names how a block's result differs from its input."""
    try:
        yield
    except TypeError as error:
        try:
            layer = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), layers)
            # `batch` is closed over: it may hold leaves that are not arrays, which `eval_shape` refuses as arguments.
            _check_block(*jax.eval_shape(lambda layer, h: (h, block(layer, h, batch)), layer, h))
        except StructureError as mismatch:
            raise mismatch from error
        except Exception:
            pass  # the original error is raised
        raise


def _check_block(h: Tree, after: Tree) -> None:
    if jax.tree.structure(h) != jax.tree.structure(after):
        problem = "a block returns a tree whose structure differs from its input"
        hint = "return the structure, shapes and dtypes of first from block(layer, h, batch) -> h"
        raise StructureError(problem, expected=_format_types(h), got=_format_types(after), hint=hint)
    for (path, leaf), (_, result) in zip(leaves_with_paths(h), leaves_with_paths(after), strict=True):
        expected, got = _format_types(leaf), _format_types(result)
        if expected != got:
            problem = f"{path or 'activations'}: a block returns a shape or dtype that differs from its input"
            hint = "cast the result of block(layer, h, batch) -> h to the shape and dtype that first returned"
            raise StructureError(problem, expected=expected, got=got, hint=hint)


def _check_layers_per_remat(number: Any, remat: Any, length: int) -> None:
    limit = max(length, 1)
    hint = f"use about the square root of the number of layers, {round(limit**0.5)}, which needs the fewest bytes"
    check_integer("layers_per_remat", number, 1, limit, hint=hint)
    if number > 1 and remat is not True:
        problem = f"layers_per_remat above 1 recomputes whole groups of layers: remat must be True, not {shown(remat)}"
        raise ConfigError(problem, hint="leave layers_per_remat out, or pass remat=True")


class _Unquoted(str):
    """Text whose repr has no quotes, for printing inside of containers."""

    __repr__ = str.__str__


def _format_types(tree: Any) -> str:
    return str(jax.tree.map(lambda leaf: _Unquoted(f"{leaf.dtype}{list(leaf.shape)}"), tree))


def is_loss(value: Any) -> bool:
    """Return whether a value is a floating-point scalar: a Python float, an array, a tracer or a shape."""
    is_number = isinstance(value, float) or hasattr(value, "dtype")
    return is_number and jnp.shape(value) == () and jnp.issubdtype(jnp.result_type(value), jnp.floating)


INTERNAL_PREFIX = "_lowtide/"
"""Prefix of Lowtide's internal `checkpoint_name`s; reports and lists for users leave these names out."""


LAYER_INPUT = f"{INTERNAL_PREFIX}layer_input"
"""Name of the inputs of the layers within a block of several layers. `remat=True` keeps them, as it keeps the inputs of
blocks, so that each layer runs forward twice, and not three times."""
keep_layer_inputs = jax.checkpoint_policies.save_only_these_names(LAYER_INPUT)
"""Policy that recomputes everything else."""

LAYER_NAMES: Mapping[str, str] = {
    "attn_q": "rotated queries",
    "attn_k": "rotated keys",
    "attn_v": "values",
    "attn_out": "output of attention, before the output projection",
    "attn_lse": "log-sum-exp of the scores of each query",
    "attn_proj": "output projection of attention",
    "attn_gate": "gate of the output of attention, or of a delta net",
    "delta_qkv": "queries, keys and values of a delta net, before its convolution",
    "mlp_gate": "gate projection of the MLP",
    "mlp_up": "up projection of the MLP",
    "mlp_gate_up": "gate and up projections of the MLP, if they are one matrix",
    "mlp_out": "down projection of the MLP, if a norm follows it",
}
"""Names of values in a decoder's layers, for `lowtide.offload.checkpoint` and plans, with their meaning."""


def is_own_name(name: str) -> bool:
    """Return whether a `jax.ad_checkpoint.checkpoint_name` is internal to Lowtide."""
    return name.startswith(INTERNAL_PREFIX)


# As `hidden_pass`, these are part of the keys of JAX's caches, so that functions with `jax.jit` inside of a block are
# traced for each value.
_is_recomputed: Any = jax.make_user_context(False)
_kept_names: Any = jax.make_user_context(frozenset())


def recomputed(block: Callable[..., Any], kept: frozenset[str] | None = frozenset()) -> Callable[..., Any]:
    """Wrap a block so that `is_recomputed` returns True while the block is traced.

    The caller must recompute the block, for instance with `jax.checkpoint`. `kept` are the names of values that the
    caller's policy keeps until the backward pass; None means any name, for a caller that only lists names.
    """

    @functools.wraps(block)
    def traced(*args: Any, **kwargs: Any) -> Any:
        with _is_recomputed(True), _kept_names(kept):
            return block(*args, **kwargs)

    return traced


def recomputed_layer(layer: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap one layer of a block of several: the backward pass of a recomputed block recomputes one layer at a time."""
    if not is_recomputed():
        return layer

    def named(params: Tree, h: Tree, *args: Any) -> Any:
        # `prevent_cse` stays True: otherwise XLA could merge the recomputation with the forward pass of the block.
        return jax.checkpoint(layer)(params, jax.tree.map(lambda leaf: checkpoint_name(leaf, LAYER_INPUT), h), *args)

    return named


def kept_names() -> frozenset[str] | None:
    """Return the names of values that the traced code keeps until the backward pass; None means any name."""
    return _kept_names.value


def is_recomputed() -> bool:
    """Return whether the backward pass recomputes the traced code, which then need not save residuals."""
    return _is_recomputed.value


def model_part(path: str) -> str | None:
    """Return which part of a model (or of a tree with its structure) a path is in: ``outer``, ``layers`` or None."""
    return next((part for part in path.split("/") if part in ("outer", "layers")), None)


def is_stacked(path: str, leaf: Any, num_rows: int) -> bool:
    """Return whether a leaf of a model, or of a tree that mirrors it, stacks `num_rows` layers along its first axis."""
    return model_part(path) == "layers" and leaf.shape[:1] == (num_rows,)


def num_layers(layers: Tree) -> int:
    """Return the common length of the leading axes of stacked layer parameters.

    Raises:
        StructureError: when there is no leaf, or the leading axes differ.
    """
    descriptions = {path: _describe_length(leaf) for path, leaf in leaves_with_paths(layers)}
    lengths = list(descriptions.values())
    if len(set(lengths)) != 1 or not lengths[0].isdigit():
        # List leaves that are not arrays first, then the rarest lengths.
        first = sorted(
            descriptions, key=lambda path: (descriptions[path][0].isdigit(), lengths.count(descriptions[path]))
        )
        got = sample(f"{path}: {descriptions[path]}" for path in first) or "no leaf"
        hint = "stack the layers with jax.tree.map(lambda *x: jnp.stack(x), *layers); keep functions and settings in "
        hint += "the block, for instance with eqx.partition(layers, eqx.is_array)"
        raise StructureError("the leaves of stacked layers must have leading axes of one length", got=got, hint=hint)
    return int(lengths[0])


def _describe_length(leaf: Any) -> str:
    """Return the length of a leaf's leading axis as text, or text that says why it has none."""
    if shape := getattr(leaf, "shape", ()):
        return str(shape[0])
    is_array = hasattr(leaf, "shape") or isinstance(leaf, bool | int | float | complex)
    return "no axis" if is_array else f"not an array but a {type(leaf).__name__}"


# --- Protocols --------------------------------------------------------------------------------------------------------
#
# A mutable model (a Flax NNX module, a Keras model) refers to its arrays. While steps run, a trainer borrows the arrays
# that steps change, and the model holds placeholders. So the device never holds a second copy. Frozen arrays stay in
# the model. Bridges in `lowtide.ext` implement this protocol, `ModelObject`.
#
# A model that reads and writes another library's format implements `ExternalNames`. Adapters then store their tensors
# under the names that this library expects, without depending on the model.


@runtime_checkable
class ModelObject(Protocol):
    """A mutable model whose arrays a trainer borrows while steps run.

    Optional members:

    - ``call(model, batch)``: the default function of `Trainer.predict`.
    - ``replace(model)``: replaces an immutable model, such as an Equinox module; `Trainer.update` calls it.
    - ``constrained(trainable)``: applies weight constraints to trainable leaves; called after every update.
    - ``lowered(model, dtype)``: returns the model prepared to compute in `dtype`. It is used with `compute_dtype`.
    - ``autocast(dtype)``: alternative to ``lowered``, a context manager for tracing the model. The trainer then casts
      no arrays itself. `dtype` is a name, such as ``"bfloat16"``.
    """

    model: Any
    """The user's object."""
    wrt: Selector
    """Leaves that train by default."""
    mutable: Selector | None
    """Other leaves that a call may change, such as batch statistics and random seeds; None without such leaves."""

    def arrays(self) -> Tree:
        """Return the object's arrays as a tree."""
        ...

    def lend(self, arrays: Tree) -> None:
        """Replace the object's arrays by placeholders that raise when used, except where the tree `arrays` has None."""
        ...

    def give_back(self, arrays: Tree) -> None:
        """Put every leaf that is not None back into the object.

        Raises:
            StateError: if something was written over a placeholder. The leaves are back, and the written value is lost.
        """
        ...

    def bind(self, fn: Callable[..., Any], *, training: bool) -> Callable[..., tuple[Any, Tree]]:
        """Make a pure function of the arrays.

        Args:
            fn: a function of the model and more arguments.
            training: whether dropout and batch statistics are on.

        Returns:
            ``(arrays, *args) -> (fn(model, *args), arrays after the call)``, for JAX to trace.
        """
        ...


@runtime_checkable
class ExternalNames(Protocol):
    """A model that maps its modules to their names in another library.

    Optional members:

    - ``table_names``: set of the external names of embedding lookups.
    - ``tied_names``: dictionary from the name of a module whose weight is used twice to the name of the second use.
    - ``named_as(names)``: returns the model with the naming scheme of these module or tensor names.
    - ``ignored_modules``: names of modules of the other library that the model lacks.
    - ``expert_parameters``: dictionary from external parameters that hold all experts of a layer to module paths.
    - ``out_first_experts``: whether such parameters without modules for each expert are [experts, out, in]. Otherwise
      they are [experts, in, out].
    - ``layer_strides``: dictionary from paths of stacks of every n-th layer to n and the index of their first layer.
    """

    def external_name(self, path: str) -> str:
        """Return the other library's name of a module.

        Args:
            path: a module's tree path, such as ``layers/attn/q_proj``.

        Returns:
            The name, such as ``model.layers.{layer}.self_attn.q_proj``. It contains the text ``{layer}`` in place of
            the layer's index when the module's leaves are stacked along a leading layer axis. The text is
            ``{layer:4+1}`` if the stack holds every fourth layer, beginning with layer 1.

        Raises:
            KeyError: when the other library has no module for `path`.
        """
        ...


_LAYER_SLOT = re.compile(r"\{layer(?::(\d+)\+(\d+))?\}")


def layer_slot(stride: int, offset: int) -> str:
    """Return the text for the layer's index in an external name whose stack holds every `stride`-th layer.

    The stride of a single layer is 0.
    """
    if stride == 0:
        return str(offset)
    return "{layer}" if (stride, offset) == (1, 0) else f"{{layer:{stride}+{offset}}}"


def layer_indices(name: str, count: int) -> range | None:
    """Return the indices of the layers in a stack of `count`, from its external name; None without a layer's index."""
    match = _LAYER_SLOT.search(name)
    if match is None:
        return None
    stride, offset = int(match[1] or 1), int(match[2] or 0)
    return range(offset, offset + stride * count, stride)


def fill_layer(name: str, layer: int) -> str:
    """Replace the text for the layer's index in an external name by an index."""
    return _LAYER_SLOT.sub(str(layer), name)


# --- Groups of layers -------------------------------------------------------------------------------------------------
#
# Recomputing single layers keeps one activation per layer: for Llama 8B 512 MiB at 2,048 tokens, 24.5 GiB at 100,352.
# With groups of about sqrt(num_layers) layers, about 2 sqrt(num_layers) activations are live (Chen et al. 2016,
# arXiv:1604.06174, section 4.3): one per group, and in the backward pass one per layer of the current group. All layers
# but the last of each group run forward one time more than with recomputation of single layers.
#
# Nested `jax.checkpoint`s compute the same. But a scan over groups gives each inner scan a copy of its group's
# parameters, and stacks their gradients a second time. So this section defines one operation with a custom derivative.
# Layers are slices of the whole stack, taken where they are used, and gradients are written in place into the gradient
# of the stack. Frozen parameters get no gradient, not even an intermediate one. Every floating-point activation that
# layers change gets a gradient.
#
# Limits: reverse mode only, as for every `jax.custom_vjp`. If groups cannot all have one size, their sizes differ by
# one layer. Each of the two sizes then has its own loop, which is compiled separately.


class _Span(NamedTuple):
    """Consecutive groups of one size: index of their first layer, number of groups, layers per group."""

    first: int
    num_groups: int
    size: int

    @property
    def starts(self) -> Any:
        """Index of the first layer of each group."""
        return self.first + self.size * jnp.arange(self.num_groups)


def _scan_in_groups(body: Callable[[Tree, Tree], Tree], init: Tree, xs: Tree, size: int, moves: Moves) -> Tree:
    """Run ``h = body(h, x)`` over the slices of `xs`, and keep only each group's input for the backward pass.

    Leaves of `xs` have the shape ``[num_layers, ...]``. `body` may close over differentiated arrays. A group has up to
    `size` layers. `moves` are those of `hidden_in_groups`. The backward pass needs ceil(num_layers / size) group inputs
    where `moves` keeps them. On the device it needs `size` activations and the residuals of one layer. Activations that
    layers return unchanged are kept once.
    """
    closed = closure_convert(body, init, _take(xs, 0))
    if _types(closed.shapes) != _types(init):
        # For a real mismatch, `scan` raises an error that names it. `scan` accepts Python numbers in `init`, which are
        # weakly typed: convert them to arrays of the dtype that the layers return.
        after = jax.eval_shape(lambda init: jax.lax.scan(lambda h, x: (body(h, x), None), init, xs)[0], init)
        init = jax.tree.map(lambda leaf, like: jnp.asarray(leaf, like.dtype), init, after)
        closed = closure_convert(body, init, _take(xs, 0))
    leaves, structure = jax.tree.flatten(init)
    passes, tracers = closed.passes, closed.tracers
    fixed = [leaf for leaf, is_fixed in zip(leaves, passes, strict=True) if is_fixed]

    def pure(h: Leaves, x: Leaves, captured: Leaves) -> Leaves:
        # Activations that all layers return unchanged are passed in like the values that layers close over.
        constants, activations = iter(captured[: len(fixed)]), iter(h)
        args = [next(constants if is_fixed else activations) for is_fixed in passes]
        outs = closed([*args, *x], captured[len(fixed) :])
        return [out for out, is_fixed in zip(outs, passes, strict=True) if not is_fixed]

    h = [leaf for leaf, is_fixed in zip(leaves, passes, strict=True) if not is_fixed]
    weights = jax.tree.leaves(xs)
    run = _build_scan(pure, weights[0].shape[0], size, moves)
    outputs = iter(run(h, (weights, [*fixed, *tracers])))
    return structure.unflatten(
        [leaf if is_fixed else next(outputs) for leaf, is_fixed in zip(leaves, passes, strict=True)]
    )


def _build_scan(pure: Callable[..., Leaves], length: int, size: int, moves: Moves) -> Callable[..., Leaves]:
    """Build the differentiable function ``run(h, (xs, captured))`` that runs all layers in groups.

    `h` is the input of the first layer, `xs` are the stacked parameters, and `captured` are closed-over values.
    """
    keep, fetch = moves
    # Balanced groups: `num_large` of them have `small + 1` layers, the others `small`.
    num_groups = -(-length // size)
    small, num_large = divmod(length, num_groups)
    spans = [_Span(0, num_large, small + 1), _Span(num_large * (small + 1), num_groups - num_large, small)]
    spans = [span for span in spans if span.num_groups]

    @jax.custom_vjp
    def run(h: Leaves, operands: Any) -> Leaves:
        xs, captured = operands
        return jax.lax.scan(lambda h, x: (pure(h, x, captured), None), h, xs)[0]

    def forward(h: Any, operands: Any) -> tuple[Leaves, Any]:
        # With `symbolic_zeros`, `perturbed` says which operands are differentiated. Only those get gradients.
        h = [primal.value for primal in h]
        trainable = jax.tree.map(lambda primal: primal.value if primal.perturbed else None, operands)
        frozen = jax.tree.map(lambda primal: None if primal.perturbed else primal.value, operands)
        xs, captured = combine(trainable, frozen)

        def layer(h: Leaves, index: Any) -> tuple[Leaves, None]:
            return pure(h, _take(xs, index), captured), None

        group_inputs: list[Leaves] = []
        for span in spans:

            def group(h: Leaves, start: Any, size: int = span.size) -> tuple[Leaves, Leaves]:
                return jax.lax.scan(layer, h, start + jnp.arange(size))[0], keep(h)

            h, saved = jax.lax.scan(group, h, span.starts)
            group_inputs.append(saved)
        return h, (group_inputs, trainable, frozen)

    def backward(residuals: Any, d_out: Leaves) -> Any:
        group_inputs, trainable, frozen = residuals
        state = _instantiate_zeros(_floating(d_out)), jax.tree.map(jnp.zeros_like, trainable)
        # Spans, groups and layers run in reverse. Only the layer inputs of one group are live at a time.
        for span, saved in zip(reversed(spans), reversed(group_inputs), strict=True):

            def group(state: Any, h: Leaves, start: Any, size: int = span.size) -> Any:
                with jax.named_scope("rematted_computation"):
                    layer_inputs = _recompute_inputs(pure, combine(trainable, frozen), h, start, size)
                propagate = functools.partial(_layer_backward, pure, trainable, frozen, is_alone=size == 1)

                def layer(state: Any, offset: Any) -> tuple[Any, None]:
                    return propagate(state, _take(layer_inputs, offset), start + offset), None

                return jax.lax.scan(layer, state, jnp.arange(size), reverse=True)[0]

            state = _scan_with_prefetch(group, state, saved, span.starts, fetch if moves is not NO_MOVES else None)
        return state

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run


def _scan_with_prefetch(
    group: Callable[[Any, Leaves, Any], Any], state: Any, saved: Leaves, starts: Any, fetch: Move | None
) -> Any:
    """Run ``state = group(state, h, start)`` for the groups in reverse.

    With `fetch`, each iteration starts to fetch the inputs of the next group, so a copy from the host has a whole
    group's time. Without this, XLA for GPUs starts the copy in the iteration that needs it.
    """
    if fetch is None:
        return jax.lax.scan(lambda state, x: (group(state, x[1], x[0]), None), state, (starts, saved), reverse=True)[0]

    def step(carry: Any, number: Any) -> tuple[Any, None]:
        state, h = carry
        fetched = fetch(_take(saved, jnp.maximum(number - 1, 0)))
        return (group(state, h, starts[number]), fetched), None

    check_host_slices()
    last = starts.shape[0] - 1
    return jax.lax.scan(step, (state, fetch(_take(saved, last))), jnp.arange(last + 1), reverse=True)[0][0]


def _recompute_inputs(pure: Callable[..., Leaves], operands: Any, h: Leaves, start: Any, size: int) -> Leaves:
    """Recompute the inputs of a group's layers from the group's input, stacked along a new leading axis."""
    xs, captured = operands

    def layer(carry: tuple[Leaves, Leaves], offset: Any) -> tuple[tuple[Leaves, Leaves], None]:
        h, stacked = carry
        h = pure(h, _take(xs, start + offset), captured)
        return (h, _put(stacked, h, offset + 1)), None

    stacked = [jnp.broadcast_to(leaf, (size, *leaf.shape)) for leaf in h]
    # The last layer does not run: its output enters no layer of this group.
    return jax.lax.scan(layer, (h, stacked), jnp.arange(size - 1))[0][1]


def _layer_backward(
    pure: Callable[..., Leaves], trainable: Any, frozen: Any, state: Any, h: Leaves, index: Any, *, is_alone: bool
) -> Any:
    """Propagate the gradient of one layer's output to its input and its parameters."""
    d_h, (d_xs, d_captured) = state
    frozen_xs, frozen_captured = frozen
    non_floating = [None if _is_floating(leaf) else leaf for leaf in h]

    def layer(h: Leaves, x: Leaves, captured: Leaves) -> Leaves:
        return _floating(
            pure(combine(h, non_floating), combine(x, _take(frozen_xs, index)), combine(captured, frozen_captured))
        )

    # `jax.checkpoint` labels the computation of residuals as recomputation. XLA removes the forward pass of this `vjp`,
    # except for its effects. If a group has one layer, XLA unrolls both loops. It would then merge the recomputation
    # with the original forward pass and keep that pass's residuals alive. `prevent_cse` prevents this.
    remat_layer = jax.checkpoint(layer, prevent_cse=is_alone)
    _, pull = jax.vjp(remat_layer, _floating(h), _take(trainable[0], index), trainable[1])
    d_h, d_x, d_layer_captured = pull(d_h)
    return d_h, (_put(d_xs, d_x, index), jax.tree.map(jnp.add, d_captured, d_layer_captured))


def _types(tree: Tree) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves]


def _take(tree: Tree, index: Any) -> Tree:
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), tree)


def _put(stacked: Tree, tree: Tree, index: Any) -> Tree:
    return jax.tree.map(lambda stack, leaf: jax.lax.dynamic_update_index_in_dim(stack, leaf, index, 0), stacked, tree)


def _is_floating(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _floating(tree: Tree) -> Tree:
    """Replace leaves without a gradient, such as counters and keys, by None."""
    return jax.tree.map(lambda leaf: leaf if _is_floating(leaf) else None, tree)


def _instantiate_zeros(tree: Tree) -> Tree:
    full: Any = jax.lax.full_like
    return jax.tree.map(lambda leaf: full(leaf.aval, 0) if isinstance(leaf, SymbolicZero) else leaf, tree)
