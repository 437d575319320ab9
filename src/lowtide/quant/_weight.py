"""The node that stands where a weight stood: codes, scales, and how to multiply by them.

Shapes: L layers; ``out`` and ``in`` are the weight's. Every leaf has the same leading axes as the weight, so a stacked
node is sliced by `jax.lax.scan`, streamed and divided like the array it replaced.

A product makes the weight of one matrix in the dtype of `x`, which XLA fuses with the product or frees after it, and
again in the backward pass: what waits for that pass are the codes and scales, which the model holds anyway.
`jax.checkpoint` says so, and unlike `jax.custom_vjp` it keeps `jax.jvp`, `jax.vmap` and derivatives of derivatives. Its
barrier keeps XLA from using the forward pass's weight again. Scales get no gradient.

Known inefficiencies: no kernel that multiplies by codes, so the weight may pass through the device's memory once for
each product; the experts of `lowtide.models` cannot be quantised, whose products are of many matrices at a time. For a
CPU XLA unpacks the 4-bit codes of a whole stack of layers, a byte each, which wait there while a step runs.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..core import StructureError, kept, rows_place, without_explicit_axes
from ._double import unnested, unnested_rows
from ._formats import FORMATS


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scales", "nested_scales", "offset"],
    meta_fields=["format", "block", "weight_dtype", "transposed"],
)
@dataclasses.dataclass(frozen=True)
class QuantizedWeight:
    """A frozen weight in few bits; a pytree node that multiplies, and looks rows up, like the weight it replaced.

    Its leaves stand at ``<path>/codes``, ``<path>/scales`` and, where scales have scales, ``<path>/nested_scales`` and
    ``<path>/offset``. They are not checked: JAX puts other things there, too.

    Examples:
        >>> import jax.numpy as jnp
        >>> from lowtide import quantize
        >>> node = quantize({"w": jnp.eye(4, 64)}, "w", "nf4")["w"]
        >>> node.shape, node.codes.dtype.name, node.linear(jnp.ones((2, 64))).tolist()
        ((4, 64), 'uint4', [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    """

    codes: Any
    """Integers, [out, in] or stacked [L, out, in]; those of 4 bits take 4."""
    scales: Any
    """One for each block of neighbours in a row, [out, blocks] or [L, out, blocks]."""
    nested_scales: Any
    """Scales of 256 scales each, [number] or [L, number]; None where scales are numbers."""
    offset: Any
    """What is added to every scale, [] or [L]; None where scales are numbers."""
    format: str
    """Name of the format (static)."""
    block: int
    """Neighbours of a row that share a scale, 0 for the whole row (static)."""
    weight_dtype: str
    """Dtype of the weight that this stands for (static)."""
    transposed: bool = False
    """Whether it stands for the transposed weight, [in, out] (static)."""

    is_frozen: ClassVar[bool] = True  # so that nobody trains its scales
    __array_ufunc__ = None  # so that a NumPy array leaves a product to this class

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the weight."""
        *stack, out, inner = self.codes.shape
        return (*stack, inner, out) if self.transposed else (*stack, out, inner)

    @property
    def ndim(self) -> int:
        """That of the weight."""
        return len(self.codes.shape)

    @property
    def dtype(self) -> Any:
        """That of the weight."""
        return jnp.dtype(self.weight_dtype)

    @property
    def sharding(self) -> Any:
        """That of the codes, whose shape is the weight's, or None."""
        sharding = getattr(self.codes, "sharding", None)
        return None if self.transposed else sharding

    def dense(self, dtype: Any = None) -> Float[Array, "*stack out in"]:
        """Return the weight as an array.

        Args:
            dtype: of the array; by default that of the weight.

        Memory:
            The whole weight, all layers of it, in `dtype`.
        """

        def made(node: QuantizedWeight) -> Array:
            values = _values(node.codes, node.format) * _spread(_scales(node), node.block, node.codes.shape[-1])
            return values.astype(node.dtype if dtype is None else dtype)

        values = without_explicit_axes(made, lambda _: kept(self.codes), self)
        return jnp.swapaxes(values, -1, -2) if self.transposed else values

    def linear(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        """Compute x Wᵀ, in the dtype of `x`.

        Args:
            x: activations, shape [..., in]; their dtype is the one that the weight is made in.

        Returns:
            Shape [..., out].

        Memory:
            Beside the result at most one matrix in the dtype of `x`, in the forward and in the backward pass. Between
            them nothing waits but this node.
        """
        return _product(x, _frozen(self), "linear")

    def rows(self, ids: Int[Array, "*ids"]) -> Float[Array, "*ids in"]:
        """Look rows up, as of an embedding, in the dtype of the weight.

        Args:
            ids: which rows of a matrix that is not stacked.

        Returns:
            Shape [..., in].

        Memory:
            The result; no other row is made.
        """
        if self.transposed or self.ndim != 2:
            raise StructureError(
                "rows are looked up in one matrix",
                expected="a weight of shape [rows, width]",
                got=f"shape {list(self.shape)}" + (", transposed" if self.transposed else ""),
                hint="look up before the weight is transposed, and in one layer of a stack",
            )
        ids = jnp.where(ids < 0, ids + self.shape[0], ids)
        return without_explicit_axes(_rows, lambda mesh: rows_place(mesh, ids, self.codes), _frozen(self), ids)

    def __matmul__(self, x: Float[Array, "*batch_in n"] | Float[Array, " in"]) -> Array:
        """Compute W x, in the dtype that arrays would have."""
        return _product(x, _frozen(self), "left")

    def __rmatmul__(self, x: Float[Array, "*batch out"]) -> Float[Array, "*batch in"]:
        """Compute x W, in the dtype that arrays would have."""
        return _product(x, _frozen(self), "right")

    @property
    def mT(self) -> QuantizedWeight:  # noqa: N802 - NumPy's name
        """The transposed weight, [in, out] or [L, in, out]."""
        return dataclasses.replace(self, transposed=not self.transposed)

    @property
    def T(self) -> QuantizedWeight:  # noqa: N802 - NumPy's name
        """The transposed weight, [in, out], of one that is not stacked.

        Raises:
            StructureError: for a stacked weight, whose layers would be turned, too.
        """
        if self.ndim > 2:
            raise StructureError(
                "weight.T of a stacked quantised weight turns its layers, too",
                expected="weight.mT, which transposes each layer",
                got=f"shape {list(self.shape)}",
                hint="write weight.mT, or narrow the pattern",
            )
        return self.mT


def _scales(node: QuantizedWeight) -> Float[Array, "*stack out blocks"]:
    if node.nested_scales is not None:
        return unnested(node.scales, node.nested_scales, node.offset)
    return numbers(node.scales, node.format)


def _spread(scales: Array, block: int, width: int) -> Array:
    """Give every weight of a row its scale."""
    return jnp.repeat(scales, min(block, width), axis=-1)[..., :width] if block else scales


def _frozen(node: QuantizedWeight) -> QuantizedWeight:
    return jax.tree.map(jax.lax.stop_gradient, node)


@functools.partial(jax.checkpoint, static_argnums=2)
def _product(x: Array, node: QuantizedWeight, side: str) -> Array:
    if side == "linear":
        weight = dataclasses.replace(node, transposed=False).dense(x.dtype)
        contracted = 0 if node.transposed else 1
        return jax.lax.dot_general(x, weight, (((x.ndim - 1,), (contracted,)), ((), ())))
    weight = node.dense(jnp.promote_types(x.dtype, node.dtype))
    return jnp.matmul(weight, x) if side == "left" else jnp.matmul(x, weight)


def numbers(scales: Array, form: str) -> Float[Array, "*any"]:
    """Return scales that have no scales as float32."""
    if FORMATS[form].scales == jnp.uint8:  # exponents of two, 255 for NaN, which are the bits of an infinity
        powers = jax.lax.bitcast_convert_type(scales.astype(jnp.int32) << 23, jnp.float32)
        return jnp.where(scales == 255, jnp.nan, powers)
    return scales.astype(jnp.float32)


def _rows(node: QuantizedWeight, ids: Array) -> Array:
    take = functools.partial(jnp.take, axis=0, fill_value=0, mode="fill")
    codes, scales = take(node.codes, ids), take(node.scales, ids)
    if node.nested_scales is not None:
        scales = unnested_rows(scales, node.nested_scales, node.offset, ids)
    else:
        scales = numbers(scales, node.format)
    values = _values(codes, node.format) * _spread(scales, node.block, codes.shape[-1])
    # What jnp.take gives for a row that is not there.
    known = (ids >= 0) & (ids < node.shape[0])
    return jnp.where(known[..., None], values, jnp.nan).astype(node.dtype)


def largest_values(node: QuantizedWeight) -> Float[Array, "*stack out blocks"]:
    """Return the largest number of each block in the weight's dtype, infinite where it is rounded up too far."""
    return (_scales(node) * FORMATS[node.format].largest).astype(node.dtype)


def _values(codes: Array, form: str) -> Float[Array, "*any"]:
    """Return what codes stand for, times their scale, float32."""
    table = FORMATS[form].table
    if table:
        return _looked_up(codes.astype(jnp.int32), table)
    if form == "fp8":
        return jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
    return codes.astype(jnp.float32)


def _looked_up(codes: Int[Array, "*any"], table: tuple[float, ...]) -> Float[Array, "*any"]:
    """Choose from a table by the bits of the codes: a TPU gathers slowly, and fuses this with the product."""
    choices: list[Any] = list(table)
    bit = 1
    while len(choices) > 1:
        is_set = (codes & bit) != 0
        choices = [jnp.where(is_set, odd, even) for even, odd in zip(choices[::2], choices[1::2], strict=True)]
        bit *= 2
    return choices[0].astype(jnp.float32)
