"""The node that replaces a weight: codes, scales, products with them, and the choice of codes.

Shapes: L layers; ``out`` and ``in`` are the weight's. Every leaf has the same leading axes as the weight, so a stacked
node is sliced, streamed and sharded like the array it replaced.

A product dequantises one matrix to the dtype of `x`. XLA fuses this with the product, or frees the matrix after it. The
backward pass dequantises again, so its residuals are the codes and scales, which the model holds anyway. This is done
with `jax.checkpoint`, which unlike `jax.custom_vjp` supports `jax.jvp`, `jax.vmap` and higher derivatives. Its barrier
keeps XLA from using the forward pass's matrix again. Scales get no gradient.

Known inefficiencies: no kernel multiplies by codes directly, so the weight may pass through the device's memory once
for each product. The experts of `lowtide.models` cannot be quantised, because their products use many matrices at a
time. For a CPU, XLA unpacks the 4-bit codes of a whole stack of layers to a byte each, and keeps them while a step
runs.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..core import StructureError, lookup_sharding, shardings_of, without_explicit_axes
from ._double import dequantize_row_scales, dequantize_scales, overflow_factor, quantize_scales
from ._formats import FORMATS, Format

_MIN_NORMAL = 2.0**-126
_E8M0_NAN = 255


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scales", "nested_scales", "offset"],
    meta_fields=["format", "block", "weight_dtype", "transposed"],
)
@dataclasses.dataclass(frozen=True)
class QuantizedWeight:
    """A frozen quantised weight; a pytree node that multiplies, and looks up rows, like the weight it replaced.

    The paths of its leaves are ``<path>/codes``, ``<path>/scales`` and, with double quantisation,
    ``<path>/nested_scales`` and ``<path>/offset``. The leaves are not checked, because JAX transformations replace them
    by other objects.

    Examples:
        >>> import jax.numpy as jnp
        >>> from lowtide import quantize
        >>> node = quantize({"w": jnp.eye(4, 64)}, "w", "nf4")["w"]
        >>> node.shape, node.codes.dtype.name, node.linear(jnp.ones((2, 64))).tolist()
        ((4, 64), 'uint4', [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    """

    codes: Any
    """Integers, [out, in] or stacked [L, out, in]; a 4-bit code takes 4 bits."""
    scales: Any
    """One for each block of neighbours in a row, [out, blocks] or [L, out, blocks]; codes of them with double
    quantisation."""
    nested_scales: Any
    """Scales of 256 scales each, [number] or [L, number]; None without double quantisation."""
    offset: Any
    """The number that is added to every scale, [] or [L]; None without double quantisation."""
    format: str
    """Name of the format (static)."""
    block: int
    """Neighbours in a row that share a scale, 0 for the whole row (static)."""
    weight_dtype: str
    """Dtype of the weight that this node replaces (static)."""
    transposed: bool = False
    """Whether the node stands for the transposed weight, [in, out] (static)."""

    is_frozen: ClassVar[bool] = True  # `value_and_grad` refuses to train its scales
    __array_ufunc__ = None  # so that a NumPy array leaves a product to this class

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        *stack, out, inner = self.codes.shape
        return (*stack, inner, out) if self.transposed else (*stack, out, inner)

    @property
    def ndim(self) -> int:
        """Number of axes of the weight."""
        return len(self.codes.shape)

    @property
    def dtype(self) -> Any:
        """Dtype of the weight."""
        return jnp.dtype(self.weight_dtype)

    @property
    def sharding(self) -> Any:
        """Sharding of the codes, whose shape is the weight's; None if it is unknown or the node is transposed."""
        sharding = getattr(self.codes, "sharding", None)
        return None if self.transposed else sharding

    def dense(self, dtype: Any = None) -> Float[Array, "*stack out in"]:
        """Return the weight as an array.

        Args:
            dtype: of the array; by default that of the weight.

        Memory:
            The whole weight, with all its layers, in `dtype`.
        """

        def dequantize(node: QuantizedWeight) -> Array:
            values = _values(node.codes, node.format) * _repeat_scales(_scales(node), node.block, node.codes.shape[-1])
            return values.astype(node.dtype if dtype is None else dtype)

        values = without_explicit_axes(dequantize, lambda _: shardings_of(self.codes), self)
        return jnp.swapaxes(values, -1, -2) if self.transposed else values

    def linear(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        """Compute x Wᵀ, in the dtype of `x`.

        Args:
            x: activations, shape [..., in]; the weight is dequantised to their dtype.

        Returns:
            Shape [..., out].

        Memory:
            In addition to the result, at most one matrix in the dtype of `x`, in the forward and in the backward pass.
            Between the passes, only this node is kept.
        """
        return _product(x, _stop_gradient(self), "linear")

    def rows(self, ids: Int[Array, "*ids"]) -> Float[Array, "*ids in"]:
        """Look up rows, as in an embedding, in the dtype of the weight.

        Args:
            ids: indices of rows of a matrix that is not stacked.

        Returns:
            Shape [..., in].

        Memory:
            The result; no other row is dequantised.
        """
        if self.transposed or self.ndim != 2:
            raise StructureError(
                "an embedding lookup needs one matrix",
                expected="a weight of shape [rows, width]",
                got=f"shape {list(self.shape)}" + (", transposed" if self.transposed else ""),
                hint="look up rows before the weight is transposed, and in one layer of a stack",
            )
        ids = jnp.where(ids < 0, ids + self.shape[0], ids)
        return without_explicit_axes(
            _take_rows, lambda mesh: lookup_sharding(mesh, ids, self.codes), _stop_gradient(self), ids
        )

    def __matmul__(self, x: Float[Array, "*batch_in n"] | Float[Array, " in"]) -> Array:
        """Compute W x, in the dtype that arrays would have."""
        return _product(x, _stop_gradient(self), "left")

    def __rmatmul__(self, x: Float[Array, "*batch out"]) -> Float[Array, "*batch in"]:
        """Compute x W, in the dtype that arrays would have."""
        return _product(x, _stop_gradient(self), "right")

    @property
    def mT(self) -> QuantizedWeight:  # noqa: N802 - NumPy's name
        """The transposed weight, [in, out] or [L, in, out]."""
        return dataclasses.replace(self, transposed=not self.transposed)

    @property
    def T(self) -> QuantizedWeight:  # noqa: N802 - NumPy's name
        """The transposed weight, [in, out], if it is not stacked.

        Raises:
            StructureError: for a stacked weight, because ``.T`` would also move the layer axis.
        """
        if self.ndim > 2:
            raise StructureError(
                "weight.T of a stacked quantised weight also transposes its layer axis",
                expected="weight.mT, which transposes each layer",
                got=f"shape {list(self.shape)}",
                hint="use weight.mT, or narrow the pattern",
            )
        return self.mT


def _scales(node: QuantizedWeight) -> Float[Array, "*stack out blocks"]:
    if node.nested_scales is not None:
        return dequantize_scales(node.scales, node.nested_scales, node.offset)
    return _scales_as_float32(node.scales, node.format)


def _repeat_scales(scales: Array, block: int, width: int) -> Array:
    """Repeat each scale for every weight of its block."""
    return jnp.repeat(scales, min(block, width), axis=-1)[..., :width] if block else scales


def _stop_gradient(node: QuantizedWeight) -> QuantizedWeight:
    return jax.tree.map(jax.lax.stop_gradient, node)


@functools.partial(jax.checkpoint, static_argnums=2)
def _product(x: Array, node: QuantizedWeight, side: str) -> Array:
    if side == "linear":
        weight = dataclasses.replace(node, transposed=False).dense(x.dtype)
        contracted = 0 if node.transposed else 1
        return jax.lax.dot_general(x, weight, (((x.ndim - 1,), (contracted,)), ((), ())))
    weight = node.dense(jnp.promote_types(x.dtype, node.dtype))
    return jnp.matmul(weight, x) if side == "left" else jnp.matmul(x, weight)


def _scales_as_float32(scales: Array, form: str) -> Float[Array, "*any"]:
    """Return scales without double quantisation as float32."""
    if FORMATS[form].scales == jnp.uint8:  # E8M0: 255 means NaN, and its shifted bits are an infinity
        powers = jax.lax.bitcast_convert_type(scales.astype(jnp.int32) << 23, jnp.float32)
        return jnp.where(scales == 255, jnp.nan, powers)
    return scales.astype(jnp.float32)


def _take_rows(node: QuantizedWeight, ids: Array) -> Array:
    take = functools.partial(jnp.take, axis=0, fill_value=0, mode="fill")
    codes, scales = take(node.codes, ids), take(node.scales, ids)
    if node.nested_scales is not None:
        scales = dequantize_row_scales(scales, node.nested_scales, node.offset, ids)
    else:
        scales = _scales_as_float32(scales, node.format)
    values = _values(codes, node.format) * _repeat_scales(scales, node.block, codes.shape[-1])
    # NaN for an index out of range, as `jnp.take` gives.
    is_in_range = (ids >= 0) & (ids < node.shape[0])
    return jnp.where(is_in_range[..., None], values, jnp.nan).astype(node.dtype)


def largest_values(node: QuantizedWeight) -> Float[Array, "*stack out blocks"]:
    """Return the largest number of each block in the weight's dtype; infinite where rounding makes it too large."""
    return (_scales(node) * FORMATS[node.format].largest).astype(node.dtype)


def _values(codes: Array, form: str) -> Float[Array, "*any"]:
    """Return the numbers that codes stand for, relative to their scale, float32."""
    table = FORMATS[form].table
    if table:
        return _select_values(codes.astype(jnp.int32), table)
    if form == "fp8":
        return jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
    return codes.astype(jnp.float32)


def _select_values(codes: Int[Array, "*any"], table: tuple[float, ...]) -> Float[Array, "*any"]:
    """Select from a table by the bits of the codes: a TPU gathers slowly, and XLA fuses selects with the product."""
    choices: list[Any] = list(table)
    bit = 1
    while len(choices) > 1:
        is_set = (codes & bit) != 0
        choices = [jnp.where(is_set, odd, even) for even, odd in zip(choices[::2], choices[1::2], strict=True)]
        bit *= 2
    return choices[0].astype(jnp.float32)


class _Codes(NamedTuple):
    """Quantised rows of a weight, before double quantisation of the scales."""

    codes: Array
    """[..., out, in]."""
    scales: Array
    """[..., out, blocks]."""


def encode(weight: Float[Array, "*stack out in"], form: Format) -> _Codes:
    """Quantise rows, each independently of the others, so that a weight may come in parts.

    A block with a number that is not finite gets NaN as its scale.
    """
    weight = weight.astype(jnp.float32)
    *leading, width = weight.shape
    block = min(form.block or width, width)
    num_blocks = -(-width // block)
    padded = jnp.pad(weight, ((0, 0),) * len(leading) + ((0, num_blocks * block - width),))
    blocks = padded.reshape(*leading, num_blocks, block)
    absmax = jnp.max(jnp.abs(blocks), axis=-1)
    is_finite = jnp.all(jnp.isfinite(blocks), axis=-1)  # a maximum may ignore NaN, as XLA's does on a CPU
    if form.scales == jnp.uint8:
        # The exponent comes from the bits, because a computed logarithm of a power of two may be too small. The largest
        # number of a block is then 4 to 8 times the scale, and the largest code stands for 6.
        exponents = (jax.lax.bitcast_convert_type(absmax, jnp.int32) >> 23) - 2
        scales = jnp.where(is_finite, jnp.clip(exponents, 1, 254), _E8M0_NAN).astype(jnp.uint8)
        divisor = _scales_as_float32(scales, form.name)
    else:
        scales = jnp.where(is_finite, absmax / form.largest, jnp.nan).astype(form.scales)
        divisor = scales.astype(jnp.float32)
    if form.name == "nf4":  # multiplied by the inverse as in bitsandbytes: near a border between codes it matters
        factor = overflow_factor(divisor)
        inverse = 1 / (jnp.maximum(divisor, _MIN_NORMAL) * factor)
        scaled = jnp.clip(blocks * factor[..., None] * inverse[..., None], -1, 1)
    else:
        scaled = blocks / jnp.where(divisor > 0, divisor, 1)[..., None]
    codes = _round_to_codes(scaled, form).reshape(*leading, num_blocks * block)[..., :width]
    return _Codes(codes, scales)


def _round_to_codes(scaled: Array, form: Format) -> Array:
    if form.table:
        code_of = {value: code for code, value in reversed([*enumerate(form.table)])}  # the first of two zeros
        values = sorted(code_of)
        index = jnp.zeros(scaled.shape, jnp.int32)
        for low, high in zip(values, values[1:], strict=False):
            midpoint = (np.float32(low) + np.float32(high)) / np.float32(2)
            index += (scaled > midpoint).astype(jnp.int32)
        codes = jnp.asarray([code_of[value] for value in values], jnp.int32)[index]
        return codes.astype(jnp.uint8).astype(form.codes)
    if form.name == "fp8":
        clipped = jnp.clip(scaled, -form.largest, form.largest)
        return jax.lax.bitcast_convert_type(clipped.astype(jnp.float8_e4m3fn), jnp.uint8)
    return jnp.clip(jnp.round(scaled), -form.largest, form.largest).astype(jnp.int8).astype(form.codes)


def assemble_node(codes: Any, scales: Any, form: Format, dtype: Any) -> QuantizedWeight:
    """Make the node of whole matrices from codes [..., out, in] and scales [..., out, blocks].

    `dtype` is that of the weight. The scales are quantised again where the format has double quantisation.
    """
    name = jnp.dtype(dtype).name
    if not form.double:
        return QuantizedWeight(codes, scales, None, None, form.name, form.block, name)
    scale_codes, nested_scales, offset = quantize_scales(scales)
    return QuantizedWeight(codes, scale_codes, nested_scales, offset, form.name, form.block, name)
