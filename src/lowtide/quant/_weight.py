"""Quantised weights: their formats, the pytree node that replaces a weight, its products, and its codes.

A code is a small integer that stands for a number. Neighbours in a row form a block with one scale, by which their
numbers are multiplied. Shapes: L layers; ``out`` and ``in`` are the sizes of outputs and inputs. Leaves of a stacked
node have the weight's layer axis, so the node is sliced, streamed and sharded like the array that it replaces.

Sources: Dettmers et al., "QLoRA" (arXiv:2305.14314), for nf4 and double quantisation; Dettmers, "8-Bit Approximations
for Parallelism in Deep Learning" (arXiv:1511.04561), for the codes of scales; Micikevicius et al., "FP8 Formats for
Deep Learning" (arXiv:2209.05433); Open Compute Project, "OCP Microscaling Formats" 1.0, for mxfp4.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

from ..core import (
    ConfigError,
    StructureError,
    check_choice,
    check_matrix,
    is_count,
    lookup_sharding,
    shardings_of,
    without_explicit_axes,
)

# Codes are stored in an array of the weight's own shape, in a JAX dtype that XLA packs: a 4-bit code takes 4 bits. So
# functions that slice, shard or stream weights work on codes, too. bitsandbytes stores two neighbours of a row in a
# byte. To separate them, a TPU would have to interleave lanes. Compiled for a v5e, the forward and backward pass of a
# layer with such bytes took 2.5 times the cycles of bfloat16. With XLA's own 4-bit arrays it took 1.1 times.
#
# Codes have integer dtypes, also FP8 codes, which are the bits of the number. So a selection of floating-point leaves
# for training never includes codes.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """One format of quantised weights."""

    name: str
    """Name of the format, such as ``nf4``."""
    codes: Any
    """Dtype of the codes."""
    block: int
    """Neighbours in a row that share a scale; 0: the whole row."""
    scales: Any
    """Dtype of the scales, before double quantisation."""
    table: tuple[float, ...] = ()
    """The number that each code stands for, relative to its scale; empty if the code itself is the number."""
    largest: float = 1.0
    """The largest number that a code stands for, relative to its scale."""
    double: bool = False
    """Whether scales are quantised again, to 8-bit codes with nested scales."""


NF4_VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_VALUES = (*_E2M1_MAGNITUDES, *(-value for value in _E2M1_MAGNITUDES))

_LARGEST_BLOCK = 2**16
"""Most neighbours in a row that can share a scale; a whole row may be longer."""

_FORMATS = (
    Format(name="nf4", codes=jnp.uint4, block=64, scales=jnp.float32, table=NF4_VALUES, double=True),
    Format(name="int8", codes=jnp.int8, block=0, scales=jnp.float32, largest=127.0),
    Format(name="int4", codes=jnp.int4, block=32, scales=jnp.bfloat16, largest=7.0),
    Format(name="fp8", codes=jnp.uint8, block=0, scales=jnp.float32, largest=448.0),
    Format(name="mxfp4", codes=jnp.uint4, block=32, scales=jnp.uint8, table=E2M1_VALUES, largest=6.0),
)
FORMATS = {form.name: form for form in _FORMATS}


def format_named(name: str, block: int | None = None) -> Format:
    """Return a format by name, with the block size `block` if it is not None.

    Args:
        name: ``"nf4"``, ``"int8"``, ``"int4"``, ``"fp8"`` or ``"mxfp4"``.
        block: neighbours in a row that share a scale, a multiple of 8 up to 65,536; 0 for the whole row, None for the
            block size of the format.

    Raises:
        ConfigError: for an unknown name, or a block size that the format does not support.
    """
    check_choice("the quantisation format", name, tuple(FORMATS), hint="QLoRA uses nf4")
    form = FORMATS[name]
    if block is None:
        return form
    is_fixed = name == "mxfp4"
    is_size = is_count(block, least=0) and block % 8 == 0 and block <= _LARGEST_BLOCK
    if not is_size or (is_fixed and block != form.block):
        sizes = f"{form.block}" if is_fixed else "a multiple of 8 up to 65,536, or 0 for whole rows"
        hint = f"leave it out for {form.block or 'whole rows'}"
        raise ConfigError(f"block of {name} must be {sizes}, not {block!r}", hint=hint)
    return dataclasses.replace(form, block=int(block))


# A product dequantises one matrix to the dtype of `x`. XLA fuses this with the product, or frees the matrix after it.
# The backward pass dequantises again, so its residuals are the codes and scales, which the model holds anyway.
# `jax.checkpoint` does this; unlike `jax.custom_vjp`, it supports forward-mode derivatives. Its optimization barrier
# keeps XLA from using the forward pass's matrix again. Scales get no gradient.
#
# Known inefficiencies: no kernel multiplies by codes directly, so the weight may pass through the device's memory once
# for each product. The experts of `lowtide.models` cannot be quantised, because their products use many matrices at a
# time. For a CPU, XLA unpacks the 4-bit codes of a whole stack of layers to a byte each, and keeps them while a step
# runs.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedWeight:
    """A frozen quantised weight: a pytree node that multiplies, and looks up rows, like the weight that it replaces.

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
    """One scale for each block of neighbours in a row, [out, blocks] or [L, out, blocks]. With double quantisation,
    the scales are stored as 8-bit codes."""
    nested_scales: Any
    """Scales of the codes in `scales`, one for every 256 codes, [N] or [L, N]; None without double quantisation."""
    offset: Any
    """Mean of the scales, which is added to each decoded scale, [] or [L]; None without double quantisation."""
    format: str = dataclasses.field(metadata={"static": True})
    """Name of the format (static)."""
    block: int = dataclasses.field(metadata={"static": True})
    """Neighbours in a row that share a scale, 0 for the whole row (static)."""
    weight_dtype: str = dataclasses.field(metadata={"static": True})
    """Dtype of the weight that this node replaces (static)."""
    transposed: bool = dataclasses.field(default=False, metadata={"static": True})
    """Whether the node stands for the transposed weight, [in, out] (static)."""

    is_frozen: ClassVar[bool] = True  # `value_and_grad` refuses to train its scales
    __array_ufunc__ = None  # so that the product with a NumPy array calls this class

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
        return None if self.transposed else getattr(self.codes, "sharding", None)

    def dense(self, dtype: Any = None) -> Float[Array, "*stack out in"]:
        """Return the weight as an array.

        Args:
            dtype: dtype of the array; None for the dtype of the weight.

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

        Raises:
            StructureError: for a stacked weight.

        Memory:
            In addition to the result, at most one matrix in the dtype of `x`, in the forward and in the backward pass.
            Between the passes, only this node is kept.
        """
        check_matrix(self)
        return _product(x, _stop_gradient(self), "linear")

    def rows(self, ids: Int[Array, "*ids"]) -> Float[Array, "*ids in"]:
        """Look up rows, as in an embedding, in the dtype of the weight.

        Args:
            ids: row indices; negative ones count from the end. An index out of range gives NaN.

        Returns:
            Shape [..., in].

        Raises:
            StructureError: for a transposed or stacked weight.

        Memory:
            The result; no other row is dequantised.
        """
        if self.transposed or self.ndim != 2:
            got = f"shape {list(self.shape)}" + (", transposed" if self.transposed else "")
            hint = "look up rows before the weight is transposed, and in one layer of a stack"
            raise StructureError("an embedding lookup needs one matrix [rows, width]", got=got, hint=hint)
        ids = jnp.where(ids < 0, ids + self.shape[0], ids)
        return without_explicit_axes(
            _take_rows, lambda mesh: lookup_sharding(mesh, ids, self.codes), _stop_gradient(self), ids
        )

    def __matmul__(self, x: Float[Array, "*batch_in n"] | Float[Array, " in"]) -> Array:
        """Compute W x, in the promoted dtype of the weight and `x`, as for arrays."""
        return _product(x, _stop_gradient(self), "left")

    def __rmatmul__(self, x: Float[Array, "*batch out"]) -> Float[Array, "*batch in"]:
        """Compute x W, in the promoted dtype of the weight and `x`, as for arrays."""
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
            problem = f"weight.T of a quantised weight {list(self.shape)} also transposes its layer axis"
            raise StructureError(problem, hint="use weight.mT, which transposes each layer, or narrow the pattern")
        return self.mT


def _scales(node: QuantizedWeight) -> Float[Array, "*stack out blocks"]:
    if node.nested_scales is not None:
        return dequantize_scales(node.scales, node.nested_scales, node.offset)
    return _scales_as_float32(node.scales, node.format)


def _repeat_scales(scales: Array, block: int, width: int) -> Array:
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
    if FORMATS[form].scales == jnp.uint8:  # E8M0: the shifted bits of its NaN are an infinity
        powers = jax.lax.bitcast_convert_type(scales.astype(jnp.int32) << 23, jnp.float32)
        return jnp.where(scales == _E8M0_NAN, jnp.nan, powers)
    return scales.astype(jnp.float32)


def _take_rows(node: QuantizedWeight, ids: Array) -> Array:
    take = functools.partial(jnp.take, axis=0, fill_value=0, mode="fill")
    codes, scales = take(node.codes, ids), take(node.scales, ids)
    if node.nested_scales is not None:
        scales = _dequantize_row_scales(scales, node.nested_scales, node.offset, ids)
    else:
        scales = _scales_as_float32(scales, node.format)
    values = _values(codes, node.format) * _repeat_scales(scales, node.block, codes.shape[-1])
    # NaN for an index out of range, as `jnp.take` gives.
    is_in_range = (ids >= 0) & (ids < node.shape[0])
    return jnp.where(is_in_range[..., None], values, jnp.nan).astype(node.dtype)


def largest_values(node: QuantizedWeight) -> Float[Array, "*stack out blocks"]:
    """Return the largest number that each block can hold, in the dtype of the weight; infinite on overflow."""
    return (_scales(node) * FORMATS[node.format].largest).astype(node.dtype)


def _values(codes: Array, form: str) -> Float[Array, "*any"]:
    """Return the numbers that codes stand for, relative to their scale, in float32."""
    choices: list[Any] = list(FORMATS[form].table)
    if not choices:
        values = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn) if form == "fp8" else codes
        return values.astype(jnp.float32)
    # Select by the bits of the codes: a TPU gathers slowly, and XLA fuses selects with the product.
    codes, bit = codes.astype(jnp.int32), 1
    while len(choices) > 1:
        is_set = (codes & bit) != 0
        choices = [jnp.where(is_set, odd, even) for even, odd in zip(choices[::2], choices[1::2], strict=True)]
        bit *= 2
    return choices[0].astype(jnp.float32)


_MIN_NORMAL = 2.0**-126
_E8M0_NAN = 255


def encode(weight: Float[Array, "*stack out in"], form: Format, dtype: Any) -> QuantizedWeight:
    """Quantise a weight; the node records `dtype`. A block with an entry that is not finite gets the scale NaN."""
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
    if form.name == "nf4":  # bitsandbytes multiplies by the inverse; a division gives other codes near a border
        factor = _overflow_factor(divisor)
        inverse = 1 / (jnp.maximum(divisor, _MIN_NORMAL) * factor)
        scaled = jnp.clip(blocks * factor[..., None] * inverse[..., None], -1, 1)
    else:
        scaled = blocks / jnp.where(divisor > 0, divisor, 1)[..., None]
    codes = _round_to_codes(scaled, form).reshape(*leading, num_blocks * block)[..., :width]
    nested_scales = offset = None
    if form.double:
        scales, nested_scales, offset = _quantize_scales(scales)
    return QuantizedWeight(codes, scales, nested_scales, offset, form.name, form.block, jnp.dtype(dtype).name)


def _round_to_codes(scaled: Array, form: Format) -> Array:
    if form.table:
        code_of = {value: code for code, value in reversed([*enumerate(form.table)])}  # of two zeros, use the first
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


# Double quantisation as in bitsandbytes: an 8-bit code stores a scale's distance from the mean of a matrix's scales.
# These scales are taken row by row, and 256 of them share a nested scale. A code stands for one of 256 numbers between
# -1 and 1 whose spacing grows with their size: the i-th of seven decades (from 0) has 2ⁱ evenly spaced numbers of each
# sign. Decoding computes these numbers instead of looking them up, because gathers are slow on a TPU.

_NESTED_BLOCK = 256
_DECADES = 7
_ZERO = 127
_LARGE = 2.0**64


@functools.cache
def dynamic_map() -> np.ndarray:
    """Return the 256 numbers, ascending in float32, for which codes of scales stand; a nested scale multiplies them."""
    positive: list[float] = []
    for decade in range(_DECADES):
        # From both ends to the middle, each rounded once, as `torch.linspace` does: the last digit can change a code.
        i, count, start = np.arange(2**decade + 1), 2**decade, float(np.float32(0.1))
        step = float((np.float32(1) - np.float32(0.1)) / np.float32(count))
        bounds = np.where(2 * i < count + 1, start + step * i, 1 - step * (count - i)).astype(np.float32)
        means = (bounds[:-1] + bounds[1:]) / np.float32(2)
        positive += (np.float32(10.0 ** (decade - _DECADES + 1)) * means).tolist()
    return np.asarray([*(-value for value in reversed(positive)), 0.0, *positive, 1.0], np.float32)


def _quantize_scales(scales: Float[Array, "*stack O N"]) -> tuple[UInt8[Array, "*stack O N"], Array, Array]:
    """Quantise float32 scales; return codes of the same shape, nested scales [..., nested], and the mean scale [...].

    A scale that is not finite is left out of the mean. Its nested scale becomes NaN, because no code stands for NaN.
    """
    flat = scales.reshape(*scales.shape[:-2], -1)
    mean = jnp.mean(flat, axis=-1)
    is_finite = jnp.isfinite(flat)
    finite = jnp.where(is_finite, flat, 0)
    factor = _overflow_factor(jnp.max(finite, axis=-1))  # the sum may be too large for float32
    total, count = jnp.sum(finite * factor[..., None], axis=-1), jnp.sum(is_finite, axis=-1)
    mean_of_finite = total / jnp.maximum(count, 1).astype(jnp.float32) / factor
    mean = jnp.where(jnp.isfinite(mean), mean, mean_of_finite)
    return *quantize_around_mean(scales, mean), mean


def _overflow_factor(sizes: Float[Array, "*any"]) -> Float[Array, "*any"]:
    """Return factors that keep sums and inverses in float32's range: 1 for magnitudes `sizes` up to 2⁶⁴, else 2⁻⁶⁴."""
    return jnp.where(sizes > _LARGE, 1 / _LARGE, 1.0).astype(jnp.float32)


def quantize_around_mean(scales: Float[Array, "*stack O N"], mean: Array) -> tuple[UInt8[Array, "*stack O N"], Array]:
    """Quantise the distances of scales from a mean, as bitsandbytes does; return the codes and nested scales.

    On GPUs, and in PyTorch, bitsandbytes takes the nearest code, as here. Its CPU code first rounds a distance to one
    of 65,536 numbers. Then fewer than one code in 200 differs from ours, by one step, and the distance 0 becomes
    2.1e-5. The last digits of the mean depend on the order of its sum (in PyTorch, on processor and threads).
    """
    *stack, out, num_blocks = scales.shape
    shifted = scales.reshape(*stack, out * num_blocks) - mean[..., None]
    num_nested = math.ceil(out * num_blocks / _NESTED_BLOCK)
    padding = num_nested * _NESTED_BLOCK - out * num_blocks
    blocks = jnp.pad(shifted, ((0, 0),) * len(stack) + ((0, padding),)).reshape(*stack, num_nested, _NESTED_BLOCK)
    absmax = jnp.max(jnp.abs(blocks), axis=-1)
    factor = _overflow_factor(absmax)
    scaled = blocks * factor[..., None] * (1 / jnp.where(absmax > 0, absmax * factor, 1))[..., None]
    table = dynamic_map()
    bounds = (table[:-1] + table[1:]) / np.float32(2)  # rounded as in bitsandbytes; a tie takes the lower code
    codes = jnp.searchsorted(jnp.asarray(bounds), scaled).astype(jnp.uint8)
    # A maximum may ignore NaN, as XLA's does on a CPU.
    absmax = jnp.where(jnp.all(jnp.isfinite(blocks), axis=-1), absmax, jnp.nan)
    return codes.reshape(*stack, -1)[..., : out * num_blocks].reshape(scales.shape), absmax


def decode(codes: UInt8[Array, "*any"]) -> Float[Array, "*any"]:
    """Return the float32 numbers that codes of scales stand for, computed without a table."""
    distance = codes.astype(jnp.int32) - _ZERO
    size = jnp.abs(distance)
    value = jnp.zeros(codes.shape, jnp.float32)
    for decade in range(_DECADES):
        position = (size - 2**decade).astype(jnp.float32)
        means = 0.1 + 0.9 * (position + 0.5) / 2**decade
        value = jnp.where(size >= 2**decade, 10.0 ** (decade - _DECADES + 1) * means, value)
    return jnp.where(size > _ZERO, 1.0, value) * jnp.sign(distance).astype(jnp.float32)


def dequantize_scales(codes: Array, nested_scales: Array, offset: Array) -> Float[Array, "*stack O N"]:
    """Return the float32 scales of whole matrices from codes [..., out, blocks] and nested scales [..., nested]."""
    *_, out, num_blocks = codes.shape
    flat = jnp.repeat(nested_scales, _NESTED_BLOCK, axis=-1)[..., : out * num_blocks].reshape(codes.shape)
    return decode(codes) * flat + offset[..., None, None]


def _dequantize_row_scales(codes: Array, nested_scales: Array, offset: Array, ids: Array) -> Float[Array, "*ids N"]:
    """Return the scales of the rows `ids` of one matrix from their codes [*ids, blocks]."""
    num_blocks = codes.shape[-1]
    block_indices = jnp.arange(num_blocks).reshape((1,) * ids.ndim + (num_blocks,))
    # Nested blocks run over the whole matrix, row by row, so one row may use several nested scales.
    nested_indices = (ids[..., None] * num_blocks + block_indices) // _NESTED_BLOCK
    return decode(codes) * nested_scales[nested_indices] + offset
