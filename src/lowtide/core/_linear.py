"""Products ``linear(x, weight)`` and lookups ``rows(weight, ids)``, for arrays and for the nodes that replace them.

Models multiply with these functions. An adapter or a quantised weight is a pytree node in place of an array, with its
own product (`LinearWeight`). So models do not depend on adapters, and a factored weight is never materialised.

Two special products follow: `transposed_product` has a gradient that is faster on a CPU, and `RunningGradient`
accumulates the gradient of a weight in place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Generator
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ._compat import bilinear
from ._devices import traced_device
from ._errors import StructureError
from ._paths import Tree, leaves_with_paths
from ._placement import explicit_mesh
from ._tracing import varying_axes

# The TPU compiler casts small weights, such as adapters, of all layers before a loop over layers, and keeps the copies.
# Rounding them to bfloat16 first does not change the result of the cast, and the compiler then casts one layer at a
# time. A weight with more elements per layer than this is not rounded.
_MAX_ROUNDED_SIZE = 2**21


@runtime_checkable
class LinearWeight(Protocol):
    """A pytree node in place of a weight matrix of shape [out, in].

    A node that also changes the bias has a second method, ``linear_with_bias(x, bias)``.
    """

    def linear(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        """Compute x Wᵀ, in the dtype of `x`."""
        ...


def linear(
    x: Float[Array, "*batch in"], weight: Array | LinearWeight, bias: Float[Array, " out"] | None = None
) -> Float[Array, "*batch out"]:
    """Multiply activations by a weight stored as [out, in]: y = x Wᵀ, or y = x Wᵀ + b with a bias.

    Args:
        x: activations, shape [..., in]; their dtype is the compute dtype.
        weight: an array of shape [out, in], cast to the dtype of `x`, or a `LinearWeight`.
        bias: added to the product, cast to the dtype of `x`. A model that has a bias passes it here, because some
            adapters scale it, too.

    Returns:
        Shape [..., out], in the dtype of `x`.

    Raises:
        StructureError: for a stack of weights, whose layer axis would be taken for [out].

    Memory:
        A weight of another dtype is cast again in the backward pass. So under a scan over layers no cast copy is kept.

    Examples:
        >>> import jax.numpy as jnp
        >>> linear(jnp.ones((2, 3)), jnp.ones((4, 3))).shape
        (2, 4)
    """
    if bias is not None:
        linear_with_bias: Any = getattr(weight, "linear_with_bias", None)
        if linear_with_bias is not None:
            return linear_with_bias(x, bias)
        y = linear(x, weight)
        return y + jnp.expand_dims(bias.astype(y.dtype), tuple(range(y.ndim - 1)))
    if isinstance(weight, LinearWeight):
        return weight.linear(x)
    if weight.dtype == x.dtype:
        return _product(x, weight)
    # Without `checkpoint` the cast weight would be a residual: under a scan, a second copy of all stacked weights.
    return jax.checkpoint(_cast_product, prevent_cse=False)(x, weight)


def rows(weight: Array | LinearWeight, ids: Int[Array, "*ids"], *, path: str = "weight") -> Float[Array, "*ids in"]:
    """Look up rows of a weight stored as [rows, width], such as an embedding.

    Args:
        weight: an array, or a `LinearWeight` that has a method ``rows(ids)``.
        ids: row indices; negative ones count from the end. An index out of range gives NaN.
        path: path of the module that holds the weight, for messages.

    Returns:
        Shape [..., width], in the dtype of the weight.

    Raises:
        StructureError: for a `LinearWeight` without a method ``rows``.

    Memory:
        Only the result.

    Examples:
        >>> import jax.numpy as jnp
        >>> rows(jnp.eye(3), jnp.array([2, 0])).tolist()
        [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    """
    if not isinstance(weight, LinearWeight):
        return jnp.take(weight, ids, axis=0)
    look_up: Any = getattr(weight, "rows", None)
    if look_up is None:
        kind, hint = type(weight).__name__, 'leave it out of the targets, for instance with the pattern "!outer/embed"'
        raise StructureError(f"{path}: an embedding lookup needs an array or a method rows(ids), not {kind}", hint=hint)
    return look_up(ids)


def check_matrix(weight: Any) -> None:
    """Raise `StructureError` unless a weight is one matrix."""
    if weight.ndim != 2:
        hint = "reshape it to [1, in]"
        if weight.ndim > 2:
            hint = "multiply by one layer of a stack at a time, under jax.lax.scan or jax.vmap"
        raise StructureError("a product needs one matrix [out, in]", got=f"shape {list(weight.shape)}", hint=hint)


def _product(x: Array, weight: Array) -> Array:
    check_matrix(weight)
    return jax.lax.dot_general(x, weight.astype(x.dtype), (((x.ndim - 1,), (1,)), ((), ())))


def _cast_product(x: Array, weight: Array) -> Array:
    is_rounded = (x.dtype, weight.dtype) == (jnp.bfloat16, jnp.float32)
    if is_rounded and weight.size <= _MAX_ROUNDED_SIZE and traced_device().platform == "tpu":
        weight = jax.lax.reduce_precision(weight, 8, 7)
    return _product(x, weight)


def _is_linear_weight(node: Any) -> bool:
    # `type`: a user's module may have a field named ``linear``.
    return isinstance(node, LinearWeight) and hasattr(type(node), "linear")


@contextlib.contextmanager
def products_explained(model: Tree) -> Generator[None]:
    """Raise a clear error if a ``with`` block uses a `LinearWeight` of the model for anything but a product.

    Raises:
        StructureError: replaces a `TypeError` or `AttributeError` whose message names the class of such a node.
    """
    try:
        yield
    except (TypeError, AttributeError) as error:
        nodes = leaves_with_paths(model, is_leaf=_is_linear_weight)
        kinds = {type(node).__name__: path for path, node in reversed(nodes) if _is_linear_weight(node)}
        for kind, path in kinds.items():
            if kind in str(error):
                raise StructureError(
                    f"the model uses a weight as an array, but the weight is now a {kind}, for instance at {path}",
                    expected="only products: lowtide.core.linear(x, weight), weight @ x, x @ weight, x @ weight.T",
                    got=str(error).splitlines()[0],
                    hint="write the product in one of these forms, or narrow the targets to weights that the model "
                    "only multiplies by: exclude embeddings, and layers that convert weights to arrays, as Flax does",
                ) from error
        raise


def transposed_product(x: Array, factor: Array) -> Array:
    """Compute x Fᵀ with a gradient that is faster on a CPU.

    Shapes: `x` [..., T, rank], `factor` [out, rank], result [..., T, out]. The operands have the same dtype.

    For the gradient of `factor`, JAX multiplies the transposed cotangent [out, T] by `x` [T, rank]. XLA for CPUs copies
    the left operand of a product if the summed axis is not its last axis. The cotangent is the wider array: with LoRA
    on small models its copy takes a fifth of a step. This function computes the transposed gradient, so the left
    operand is `x`, the narrower array.

    Limits: policies of `jax.checkpoint` that select products by primitive, such as `dots_saveable`, do not recognise
    this primitive. The function computes a plain product on other platforms, with `jax_default_matmul_precision`, on a
    mesh with explicit axes, and for arrays that vary over axes of a `jax.shard_map`.
    """
    config: Any = jax.config
    if traced_device().platform != "cpu" or config.jax_default_matmul_precision is not None:
        return _product(x, factor)
    if explicit_mesh((x, factor)) is not None or any(varying_axes(jax.typeof(array)) for array in (x, factor)):
        return _product(x, factor)
    return _transposed_product_primitive().bind(x, factor)


@functools.cache
def _transposed_product_primitive() -> Any:
    def transpose_x(dy: Array, x: Any, factor: Array) -> Array:
        return jax.lax.dot_general(dy, factor, (((dy.ndim - 1,), (0,)), ((), ())))

    def transpose_factor(dy: Array, x: Array, factor: Any) -> Array:
        batch_axes = tuple(range(dy.ndim - 1))
        return jnp.swapaxes(jax.lax.dot_general(x, dy, ((batch_axes, batch_axes), ((), ()))), 0, 1)

    return bilinear("transposed_product", _product, transpose_x, transpose_factor)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["weight", "total", "active"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class RunningGradient:
    """A `LinearWeight` whose cotangent is `total` plus the gradient, so that microbatches accumulate in place.

    A separate sum ``total + grad`` needs both arrays in memory: for a language model, twice the size of its head. The
    gradient of a matrix is itself a sum over tokens, so the sum can start from the total instead of from zero. `linear`
    and `lowtide.losses.chunked_cross_entropy` support this, and return ``total + grad`` as the weight's cotangent.

    Use it at one place of a function only, outside of loops and `jax.vmap`, which would add the total at every step.

    Examples:
        >>> import jax.numpy as jnp
        >>> from lowtide.core import linear
        >>> x, total = jnp.ones((2, 3)), jnp.full((4, 3), 10.0)
        >>> loss = lambda w: jnp.sum(linear(x, RunningGradient(w, total)))
        >>> jax.grad(loss)(jnp.ones((4, 3)))[0].tolist()
        [12.0, 12.0, 12.0]
    """

    weight: Any
    """The weight, shape [out, in]."""
    total: Any
    """The gradient so far, of the weight's shape and dtype. It gets no cotangent itself."""
    active: Bool[Array, ""] | None = None
    """If False, the gradient and the cotangent of `x` count as zero, even if they are NaN (a mean over no tokens is
    0/0). None means True."""

    def linear(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        """Compute x Wᵀ, in the dtype of `x`."""
        return _running_product(x, self.weight, self.total, self.active)


@jax.custom_batching.custom_vmap
def add_running(total: Array, grad: Array) -> Array:
    """Add a gradient to the running total, in derivative rules of operations that support `RunningGradient`.

    Raises:
        StructureError: under `jax.vmap`, which would add the total once for each entry of its axis.

    Memory:
        In place if the total is not read again.

    Examples:
        >>> import jax.numpy as jnp
        >>> add_running(jnp.ones(2), jnp.ones(2)).tolist()
        [2.0, 2.0]
    """
    return total + grad


@add_running.def_vmap
def _refuse_vmap(axis_size: int, in_batched: Any, total: Array, grad: Array) -> Any:
    raise StructureError(
        f"a running gradient cannot be computed under jax.vmap, which would add the total {axis_size} times",
        hint="call linear or chunked_cross_entropy without vmap, or remove the leaf from LayerStack.running",
    )


def if_active(active: Array | None, x: Array) -> Array:
    """Return `x` if `active`, the boolean scalar of a `RunningGradient`, is True or None; otherwise return zeros.

    Memory:
        None if the compiler fuses the selection with the operation that reads the result.

    Examples:
        >>> import jax.numpy as jnp
        >>> if_active(jnp.bool_(False), jnp.full(2, jnp.nan)).tolist()
        [0.0, 0.0]
    """
    return x if active is None else jnp.where(active, x, jnp.zeros((), x.dtype))


@jax.custom_vjp
def _running_product(x: Array, weight: Array, total: Array, active: Array | None) -> Array:
    return _product(x, weight)


def _running_forward(x: Array, weight: Array, total: Array, active: Array | None) -> tuple[Array, Any]:
    return _running_product(x, weight, total, active), (x, weight, total, active)


def _running_backward(residuals: Any, dy: Array) -> tuple[Array, Array, None, None]:
    x, weight, total, active = residuals
    # Select both operands: NaN in either one would reach the total, since 0 * NaN is NaN.
    x, dy = if_active(active, x), if_active(active, dy)
    dx = jax.lax.dot_general(dy, weight.astype(dy.dtype), (((dy.ndim - 1,), (0,)), ((), ())))
    batch = tuple(range(x.ndim - 1))
    grad = jax.lax.dot_general(dy, x, ((batch, batch), ((), ())), preferred_element_type=total.dtype)
    return dx.astype(x.dtype), add_running(total, grad), None, None


_running_product.defvjp(_running_forward, _running_backward)
