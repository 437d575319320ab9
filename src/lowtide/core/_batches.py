"""Convert batches to arrays that JAX accepts, and split them into weighted microbatches.

For a loss that is a mean over tokens, the weighted mean over microbatches equals the full batch's loss, however
unevenly the tokens are distributed. All code that processes a batch in parts (`accumulate`, layerwise steps, pipelines)
splits and weights it with these functions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._checks import check_integer
from ._errors import DataError, StructureError
from ._paths import Tree, is_array_like, leaves_with_paths, path_str

_NON_NUMERIC_KINDS = "OSUMm"
"""NumPy's dtype kinds of objects, text and times."""


def as_arguments(batch: Tree) -> Tree:
    """Convert the leaves of a batch to JAX arrays; on a CPU, NumPy arrays whose dtype JAX keeps are only copied.

    The copy is needed because on a CPU a step reads NumPy's buffers, which the user may refill while the step runs. A
    copy is faster than a conversion. Raises the errors of `as_numpy` and `refuse_objects`.
    """
    is_cpu = jax.default_backend() == "cpu"

    def convert(leaf: Any) -> Any:
        is_array = type(leaf) is np.ndarray and leaf.dtype.kind not in _NON_NUMERIC_KINDS
        if is_cpu and is_array and leaf.dtype == jax.dtypes.canonicalize_dtype(leaf.dtype):
            return leaf.copy()
        return jnp.asarray(check_range(as_numpy(leaf)))

    leaves, structure = jax.tree.flatten(batch)
    try:
        return structure.unflatten([convert(leaf) for leaf in leaves])
    except (TypeError, OverflowError):
        refuse_objects(batch)
        raise


def check_range(leaf: Any) -> Any:
    """Return a leaf unchanged, or raise `OverflowError` if JAX's integers (32 bits without x64) cannot hold its values.

    JAX would keep only the lower bits.
    """
    wide: Any = np.int64(leaf) if type(leaf) is int else leaf
    if isinstance(wide, np.ndarray | np.generic) and wide.dtype.kind in "iu":
        narrow = jax.dtypes.canonicalize_dtype(wide.dtype)
        if narrow != wide.dtype and wide.size:
            lowest, highest = np.iinfo(narrow).min, np.iinfo(narrow).max
            if wide.min() < lowest or wide.max() > highest:
                raise OverflowError(f"{wide.min()} to {wide.max()}")
    return leaf


def as_numpy(leaf: Any) -> Any:
    """Convert a leaf of another library, such as a PyTorch CPU tensor, to NumPy; return other leaves unchanged.

    Raises:
        DataError: for a leaf that cannot be converted, such as a tensor on a GPU, in an autograd graph, or of bfloat16.
    """
    if not hasattr(leaf, "__array__") or isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic):
        return leaf
    try:
        return np.asarray(leaf)
    except (TypeError, RuntimeError, ValueError) as error:
        problem = f"a {type(leaf).__module__}.{type(leaf).__name__} of a batch cannot be converted to a NumPy array"
        got = (str(error) or type(error).__name__).splitlines()[0]
        hint = "convert a PyTorch tensor with tensor.detach().cpu().float().numpy(), for instance in collate_fn"
        raise DataError(problem, got=got, hint=hint) from error


def numbers(batch: Tree) -> Tree:
    """Convert arrays of other libraries in a batch to NumPy; raise as `as_numpy` and `refuse_objects` do."""
    batch = jax.tree.map(as_numpy, batch)
    refuse_objects(batch)
    return batch


def argument_shapes(batch: Tree) -> Tree:
    """Replace each leaf that is not a JAX array by its `jax.ShapeDtypeStruct`; raise as `numbers` does."""
    array_types = (jax.Array, jax.ShapeDtypeStruct)
    return jax.tree.map(lambda x: x if isinstance(x, array_types) else jax.eval_shape(jnp.asarray, x), numbers(batch))


def refuse_objects(batch: Tree) -> None:
    """Raise if a leaf of a batch does not hold numbers, or holds integers too large for JAX's dtype.

    Raises:
        DataError: with the path of the first such leaf.
    """
    for path, leaf in leaves_with_paths(batch):
        try:
            check_range(leaf)
        except OverflowError as error:
            problem = f"batch leaf {path or '(root)'} holds integers of more than 32 bits"
            hint = "take them modulo the table's size, or set jax_enable_x64; JAX would keep only their lower bits"
            raise DataError(problem, got=error, hint=hint) from None
        if not is_array_like(leaf) or getattr(getattr(leaf, "dtype", None), "kind", "f") in _NON_NUMERIC_KINDS:
            got = f"dtype {leaf.dtype}" if hasattr(leaf, "dtype") else type(leaf).__name__
            hint = "encode strings as tokens, and leave other objects out of the batches"
            if dataclasses.is_dataclass(leaf):
                hint = "make the dataclass a pytree with jax.tree_util.register_dataclass"
            raise DataError(f"batch leaf {path or '(root)'} holds no numbers", got=got, hint=hint)


def accumulate(
    grad_fn: Callable[..., tuple[Any, Tree]],
    num_microbatches: int,
    *,
    weight: Callable[[Tree], Any] | None = None,
    has_aux: bool = False,
    has_carry: bool = False,
) -> Callable[..., tuple[Any, Tree]]:
    """Make a gradient function that runs over microbatches and averages their gradients in one accumulator.

    Args:
        grad_fn: a function ``(model, batch, *args) -> (loss, grads)`` such as `value_and_grad` returns; with
            `has_aux`, ``((loss, aux), grads)``.
        num_microbatches: number of equal parts into which the leading axis of every batch leaf is split.
        weight: a function of a microbatch that returns its weight, for instance its number of target tokens. The
            result is then the weighted mean. A microbatch of weight 0 contributes nothing. By default all microbatches
            have the same weight. A single microbatch needs no weight, so the function is not called then.
        has_aux: whether `grad_fn` returns auxiliary values.
        has_carry: whether each microbatch changes state that the next one reads, such as batch statistics. Then
            ``grad_fn(model, batch, carry, *args) -> ((loss, (aux, carry)), grads)``, and `has_aux` has to be True.

    Returns:
        A function with the arguments and results of `grad_fn` for the whole batch. Auxiliary values are stacked along
        a leading axis of length `num_microbatches`. The carry is the one that the last microbatch returned.

    Raises:
        StructureError: when `num_microbatches` is not an integer of at least 1, or does not divide the leading axis of
            a batch leaf; when `weight` does not return a number; or when `has_aux` contradicts `grad_fn`.

    Memory:
        One accumulator for the leaves that have gradients, at least float32. `lax.scan` carries it, so it is updated
        in place. Activations of one microbatch are live at a time.

    Examples:
        >>> from lowtide.core import value_and_grad
        >>> grad_fn = value_and_grad(lambda model, x: jnp.mean(model["w"] * x))
        >>> loss, grads = accumulate(grad_fn, num_microbatches=2)({"w": jnp.array(2.0)}, jnp.arange(4.0))
        >>> float(loss), float(grads["w"])
        (3.0, 1.5)
    """
    check_integer("num_microbatches", num_microbatches, hint="use 1 for no accumulation", error=StructureError)

    @functools.wraps(grad_fn)
    def wrapped(model: Tree, batch: Tree, *args: Any, **kwargs: Any) -> tuple[Any, Tree]:
        init_carry, extra_args = (args[:1], args[1:]) if has_carry else ((), args)

        def call(microbatch: Tree, carry: tuple[Tree, ...]) -> tuple[Any, Any, tuple[Tree, ...], Tree]:
            value, grads = grad_fn(model, microbatch, *carry, *extra_args, **kwargs)
            if isinstance(value, tuple) is not has_aux:
                values = "no auxiliary values" if has_aux else "auxiliary values in addition to the loss"
                problem = f"grad_fn returns {values}, but accumulate got has_aux={has_aux}"
                hint = f"give accumulate and value_and_grad the same has_aux: {not has_aux}"
                raise StructureError(problem, hint=hint)
            aux: Any
            loss, aux = value if has_aux else (value, None)
            return (loss, aux[0], (aux[1],), grads) if has_carry else (loss, aux, (), grads)

        def result(loss: Any, aux: Any, carry: tuple[Tree, ...], grads: Tree) -> tuple[Any, Tree]:
            aux = (aux, *carry) if has_carry else aux
            return ((loss, aux) if has_aux else loss), grads

        if num_microbatches == 1:  # needs no accumulator
            loss, aux, carry, grads = call(batch, init_carry)
            return result(loss, jax.tree.map(lambda x: jnp.expand_dims(x, 0), aux), carry, grads)
        microbatches = split_batch(batch, num_microbatches)
        loss_shape, _, _, grads_shape = jax.eval_shape(
            lambda stacked: call(jax.tree.map(lambda x: x[0], stacked), init_carry), microbatches
        )
        # At least float32: a bfloat16 total would round small gradients of later microbatches away.
        accumulators = jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.promote_types(s.dtype, jnp.float32)), grads_shape)

        def body(carried: Any, microbatch: Tree) -> tuple[Any, Any]:
            total_loss, total_grads, total_weight, carry = carried
            loss, aux, carry, grads = call(microbatch, carry)
            w = jnp.ones((), float) if weight is None else _weight_of(weight, microbatch)

            def add(total: Any, value: Any) -> Any:
                # A mean over no tokens is 0/0. `where` keeps that NaN out of the sum; multiplication by 0 would not.
                return total + jnp.where(w == 0, 0, w.astype(total.dtype) * value.astype(total.dtype))

            return (add(total_loss, loss), jax.tree.map(add, total_grads, grads), total_weight + w, carry), aux

        zero = jnp.zeros((), jnp.promote_types(loss_shape.dtype, jnp.float32))
        start = (zero, accumulators, jnp.zeros((), float), init_carry)
        (loss, grads, total, carry), aux = jax.lax.scan(body, start, microbatches, length=num_microbatches)
        # If all weights are 0, so are both sums: divide by 1, not by 0.
        total = jnp.where(total == 0, 1, total)

        def mean(acc: Any, like: Any) -> Any:
            return (acc * (1 / total.astype(acc.dtype))).astype(like.dtype)

        return result(mean(loss, loss_shape), aux, carry, jax.tree.map(mean, grads, grads_shape))

    return wrapped


def split_batch(batch: Tree, num_microbatches: int) -> Tree:
    """Split the leading axis of every leaf into microbatches: shape [num_microbatches, part, ...].

    Raises:
        StructureError: with the path of a leaf whose leading axis is not a positive multiple of `num_microbatches`.
    """

    def split(path: Any, leaf: Any) -> Any:
        shape = jnp.shape(leaf)
        if not shape or not shape[0] or shape[0] % num_microbatches:
            hint = "change num_microbatches or the batch size"
            if not shape:
                hint = "repeat it for every row, such as np.full(num_rows, value), or keep it outside of the batch"
            problem = f"batch leaf {path_str(path) or '(root)'}: the leading axis does not split into microbatches"
            expected = f"a leading axis that is a multiple of {num_microbatches}"
            raise StructureError(problem, expected=expected, got=f"shape {shape}", hint=hint)
        return jnp.reshape(leaf, (num_microbatches, shape[0] // num_microbatches, *shape[1:]))

    return jax.tree_util.tree_map_with_path(split, batch)


def microbatch_weights(weight: Callable[[Tree], Any] | None, batches: Tree, num_microbatches: int) -> Any:
    """Return the weight of each microbatch; `fractions` turns weights into shares of the loss.

    `weight` is a function of a microbatch that returns a scalar, or None for equal weights. The leaves of `batches`
    have the shape [num_microbatches, part, ...].

    Returns:
        Numbers of shape [num_microbatches], in float32, or float64 with `jax_enable_x64`.

    Raises:
        StructureError: when `weight` does not return a number.
    """
    if weight is None:
        return jnp.ones(num_microbatches, float)
    return jax.vmap(functools.partial(_weight_of, weight), axis_size=num_microbatches)(batches)


def _weight_of(weight: Callable[[Tree], Any], microbatch: Tree) -> Any:
    value = weight(microbatch)
    if not is_array_like(value) or jnp.ndim(value):
        got = f"shape {list(jnp.shape(value))}" if is_array_like(value) else repr(value)[:80]
        hint = "sum it: lambda batch: jnp.sum(batch['mask'])"
        raise StructureError("the weight of a microbatch is not a number", got=got, hint=hint)
    return jnp.asarray(value, float)


def fractions(weights: Any) -> Any:
    """Return weights of shape [num_microbatches] as fractions of their sum, or zeros if all weights are 0."""
    total = jnp.sum(weights)
    return weights / jnp.where(total == 0, 1, total)
