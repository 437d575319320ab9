"""The shared view of a model: a function before, a stack of equal blocks, a function after.

Streaming, layerwise updates, remat policies, planning and pipelines all work on this type. Parameters are two
trees: `outer` (embedding, final norm, head) and `layers`, whose leaves all have a leading axis of length
`num_layers`. A tied head needs no special case, because `first` and `last` both receive all of `outer`.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._checks import check_count
from ._errors import ConfigError, StructureError
from ._groups import STAYS, Moves, scan_in_groups
from ._paths import Tree, leaves_with_paths
from ._spaces import on_device

First = Callable[[Tree, Tree], Any]
Block = Callable[[Tree, Any, Tree], Any]
Last = Callable[[Tree, Any, Tree], tuple[Any, Tree]]


class StackShapes(NamedTuple):
    """Shapes of the results of a stack's functions."""

    h: Tree
    """The activations between blocks."""
    metrics: Tree
    """The metrics of `last`."""


@dataclasses.dataclass(frozen=True)
class LayerStack:
    """A model as three pure functions over `outer` and `layers` parameters.

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
    """Globs of outer leaves that `last` uses once, in `lowtide.core.linear` or `lowtide.losses.chunked_cross_entropy`.
    Over microbatches each such leaf may be a `lowtide.core.RunningGradient`."""

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
            layers_per_remat: with ``remat=True``, the most blocks for which one activation is kept. The backward pass
                recomputes the activations between them, one group of blocks at a time. All blocks but the last of each
                group run forward one time more, effects included. The first derivative then has to be one of reverse
                mode: JAX refuses `jax.jvp` of it.

        Returns:
            The activations, of the shape that `first` and `block` return.

        Raises:
            StructureError: for layers that do not stack, or a block whose result differs in structure, shape or dtype
                from its input.
            ConfigError: for a `remat` that is neither a bool nor a policy; for a `layers_per_remat` outside of 1 to
                `num_layers`; and for one above 1 if `remat` is not True.

        Memory:
            With ``remat=True``, one activation per layer plus one block's residuals. With groups,
            ``num_layers / layers_per_remat + layers_per_remat`` activations; about the square root of `num_layers`
            needs the fewest. A TPU may keep float32 inputs of single layers in bfloat16 if only dots read them, but not
            inputs of groups.
        """
        if not (isinstance(remat, bool | np.bool_) or callable(remat)):
            raise ConfigError(
                "remat: whether the backward pass computes blocks again, or what of them it does not",
                expected="True, False or a policy of jax.checkpoint_policies",
                got=repr(remat),
                hint="False keeps what blocks make, True what enters them",
            )
        remat = bool(remat) if isinstance(remat, np.bool_) else remat
        _check_layers_per_remat(layers_per_remat, remat, num_layers(layers))
        if layers_per_remat > 1:
            return hidden_in_groups(self, outer, layers, batch, layers_per_remat)
        block = self.block
        if remat is not False:
            policy = None if remat is True else remat
            # Inside of a scan XLA cannot merge recomputation with the forward pass, so `prevent_cse` would only cost
            # time.
            block = jax.checkpoint(recomputed(block) if remat is True else block, policy=policy, prevent_cse=False)

        divide = _divide.get()

        def body(h: Any, layer: Tree) -> tuple[Any, None]:
            return divide(block(on_device(layer), h, batch)), None

        h = divide(self.first(on_device(outer), batch))
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
        """Run the whole stack, with arguments as in `hidden`, and return the result of `last`: ``(loss, metrics)``."""
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
            StructureError: when `block` does not return what it is given, or `last` does not return a scalar loss and
                metrics.
        """
        h = jax.eval_shape(self.first, outer, batch)
        _check_block(h, jax.eval_shape(self.block, layer, h, batch))
        result: Any = jax.eval_shape(self.last, outer, h, batch)
        if not (isinstance(result, tuple) and len(result) == 2 and _is_loss(result[0])):
            raise StructureError(
                "the last function of the stack returns no loss",
                expected="(loss, metrics), of which loss is a floating-point scalar",
                got=_format_types(result),
                hint="last(outer, h, batch) -> (loss, {}) when there are no metrics",
            )
        return StackShapes(h, result[1])


def hidden_in_groups(
    stack: LayerStack, outer: Tree, layers: Tree, batch: Tree, layers_per_remat: int, moves: Moves = STAYS
) -> Any:
    """Run `LayerStack.hidden` with `layers_per_remat`, where inputs of groups may be kept elsewhere.

    Args:
        stack: the model.
        outer: as in `LayerStack.hidden`.
        layers: as in `LayerStack.hidden`.
        batch: as in `LayerStack.hidden`.
        layers_per_remat: the most blocks of a group, as in `LayerStack.hidden`.
        moves: two functions of a list of arrays. The first moves a group's input to where it is kept, the second moves
            it back.

    Returns:
        The activations that enter `last`.

    Raises:
        StructureError: for layers that do not stack.
        ConfigError: for a `layers_per_remat` outside of 1 to `num_layers`.
    """
    _check_layers_per_remat(layers_per_remat, True, num_layers(layers))
    divide, block = _divide.get(), recomputed(stack.block)

    def body(h: Any, layer: Tree) -> Any:
        return divide(block(layer, h, batch))

    h = divide(stack.first(outer, batch))
    with _explain_mismatch(stack.block, h, layers, batch):
        return scan_in_groups(body, h, layers, layers_per_remat, moves)


@contextlib.contextmanager
def _explain_mismatch(block: Block, h: Tree, layers: Tree, batch: Tree) -> Generator[None]:
    """Replace a scan's `TypeError` by an error that names what a block returns differently from its input."""
    try:
        yield
    except TypeError as error:
        if (mismatch := _find_mismatch(block, h, layers, batch)) is not None:
            raise mismatch from error
        raise


def _find_mismatch(block: Block, h: Tree, layers: Tree, batch: Tree) -> StructureError | None:
    try:
        layer = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), layers)
        # `batch` is closed over: it may hold leaves that are not arrays, which `eval_shape` refuses as arguments.
        _check_block(*jax.eval_shape(lambda layer, h: (h, block(layer, h, batch)), layer, h))
    except StructureError as error:
        return error
    except Exception:  # the caller raises the original error
        return None
    return None


def _check_block(h: Tree, after: Tree) -> None:
    if jax.tree.structure(h) != jax.tree.structure(after):
        raise StructureError(
            "a block returns another tree than it is given",
            expected=_format_types(h),
            got=_format_types(after),
            hint="block(layer, h, batch) -> h has to return what first returned, in structure, shape and dtype",
        )
    for (path, leaf), (_, result) in zip(leaves_with_paths(h), leaves_with_paths(after), strict=True):
        if _format_types(leaf) != _format_types(result):
            raise StructureError(
                f"{path or 'activations'}: a block returns another shape or dtype than it is given",
                expected=_format_types(leaf),
                got=_format_types(result),
                hint="block(layer, h, batch) -> h has to return what first returned; cast its result",
            )


def _check_layers_per_remat(number: Any, remat: Any, length: int) -> None:
    limit = max(length, 1)
    hint = f"about the root of the number of layers takes the fewest bytes: {round(limit**0.5)}"
    expected = f"from 1 to {limit}"
    check_count(f"layers_per_remat: {number!r} is no number of layers", number, 1, expected, hint)
    if number > limit:
        problem = "layers_per_remat: a group of more layers than there are"
        raise ConfigError(problem, expected=expected, got=number, hint=hint)
    if number > 1 and remat is not True:
        raise ConfigError(
            "layers_per_remat: groups of layers are computed again as a whole",
            expected="remat=True",
            got=f"remat={remat!r}",
            hint="leave layers_per_remat out, or the policy",
        )


class _Unquoted(str):
    """Text whose repr has no quotes, for printing inside of containers."""

    __repr__ = str.__str__


def _format_types(tree: Any) -> str:
    """Format the shapes and dtypes of a tree."""
    return str(jax.tree.map(lambda leaf: _Unquoted(f"{leaf.dtype}{list(leaf.shape)}"), tree))


def _is_loss(value: Any) -> bool:
    return getattr(value, "shape", None) == () and jnp.issubdtype(value.dtype, jnp.floating)


_divide: contextvars.ContextVar[Callable[[Any], Any]] = contextvars.ContextVar("divide", default=lambda h: h)


_mesh: contextvars.ContextVar[Any] = contextvars.ContextVar("mesh", default=None)


@contextlib.contextmanager
def dividing(divide: Callable[[Any], Any], mesh: Any = None) -> Generator[None]:
    """Constrain, inside the ``with`` block, how devices share the activations between layers of a traced stack.

    If weights are sharded and activations have no constraint, XLA may gather the activations instead of one layer's
    weights. Every device then computes all rows.

    Args:
        divide: a function that returns activations with a sharding constraint.
        mesh: mesh of the devices, for blocks that shard their work themselves (`divided_mesh`).
    """
    tokens = _divide.set(divide), _mesh.set(mesh)
    try:
        yield
    finally:
        _divide.reset(tokens[0])
        _mesh.reset(tokens[1])


OWN_NAMES = "_lowtide/"
"""Prefix of the checkpoint names that Lowtide uses for its own policies; claims, lists and tags of users omit them."""


def is_own_name(name: str) -> bool:
    """Return whether a name of `jax.ad_checkpoint.checkpoint_name` is Lowtide's own."""
    return name.startswith(OWN_NAMES)


_is_recomputed: contextvars.ContextVar[bool] = contextvars.ContextVar("is_recomputed", default=False)


def recomputed(block: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a block, while it is traced, as recomputed by the backward pass (`is_recomputed`).

    Args:
        block: the function. The caller has to recompute it, as `jax.checkpoint` does.
    """

    @functools.wraps(block)
    def traced(*args: Any) -> Any:
        token = _is_recomputed.set(True)
        try:
            return block(*args)
        finally:
            _is_recomputed.reset(token)

    return traced


def is_recomputed() -> bool:
    """Return whether the backward pass recomputes the traced code, so that values kept for it may be computed there."""
    return _is_recomputed.get()


def divided_mesh() -> Any:
    """Return the mesh that a block is traced for: that of `jax.set_mesh` or a pipeline, else a trainer's, else None."""
    current = jax.sharding.get_abstract_mesh()
    return _mesh.get() if current.empty else current


def divided_along(axis: str) -> int:
    """Return how many devices of `divided_mesh` shard the traced arrays along an axis that the compiler partitions.

    Args:
        axis: name of the mesh axis. The result is 1 if the mesh lacks it, and inside of a `jax.shard_map` over it,
            where arrays are local to one device.
    """
    mesh = divided_mesh()
    return 1 if mesh is None or axis in getattr(mesh, "manual_axes", ()) else mesh.shape.get(axis, 1)


def side_of(path: str) -> str | None:
    """Return the side of a path in a model, or in a tree that mirrors it: ``outer``, ``layers`` or None."""
    return next((part for part in path.split("/") if part in ("outer", "layers")), None)


def is_stacked(path: str, leaf: Any, num_rows: int) -> bool:
    """Return whether a leaf of a model, or of a tree that mirrors it, has one row per layer.

    Args:
        path: the path of the leaf.
        leaf: an array or its shape struct.
        num_rows: number of layers.
    """
    return side_of(path) == "layers" and leaf.shape[:1] == (num_rows,)


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
        suffix = f", … ({len(first) - 6} more)" if len(first) > 6 else ""
        raise StructureError(
            "stacked layers need leaves with one common leading axis",
            expected="every leaf of shape [num_layers, ...]",
            got=", ".join(f"{path}: {descriptions[path]}" for path in first[:6]) + suffix or "no leaf",
            hint="stack the layers with jax.tree.map(lambda *x: jnp.stack(x), *layers); functions and settings are no "
            "leaves: keep them in the block, as with eqx.partition(layers, eqx.is_array)",
        )
    return int(lengths[0])


def _describe_length(leaf: Any) -> str:
    """Return the length of a leaf's leading axis as text, or text that says why it has none."""
    if shape := getattr(leaf, "shape", ()):
        return str(shape[0])
    is_array = hasattr(leaf, "shape") or isinstance(leaf, bool | int | float | complex)
    return "None" if is_array else f"no array but a {type(leaf).__name__}"
