"""nf4 beside bitsandbytes' own, its build for CPUs."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import lowtide as lt
from lowtide.quant._double import around, decoded, dynamic_map, unnested

pytestmark = pytest.mark.peers


@pytest.mark.parametrize(
    ("shape", "dtype"), [((6, 128), "float32"), ((300, 320), "bfloat16"), ((512, 4096), "float16")]
)
def test_codes_and_scales_are_those_of_bitsandbytes(shape: tuple[int, int], dtype: str) -> None:
    torch = pytest.importorskip("torch")
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = (0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(getattr(torch, dtype))
    weight[1, :64] = 0
    codes, state = functional.quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    _, plain = functional.quantize_4bit(weight, blocksize=64, compress_statistics=False, quant_type="nf4")
    node = lt.quantize({"w": jnp.asarray(weight.float().numpy())}, "w", "nf4")["w"]

    ours = np.asarray(node.codes).astype(np.uint8).ravel()
    np.testing.assert_array_equal(ours[::2] << 4 | ours[1::2], codes.numpy().ravel())
    np.testing.assert_array_equal(dynamic_map(), state.state2.code.numpy())
    np.testing.assert_allclose(decoded(jnp.arange(256, dtype=jnp.uint8)), dynamic_map(), rtol=0, atol=1e-7)
    # Sums in another order.
    np.testing.assert_allclose(node.offset, state.offset, rtol=1e-6)
    np.testing.assert_allclose(node.nested_scales, state.state2.absmax, rtol=1e-6)
    scales, mean = np.asarray(plain.absmax).reshape(node.scales.shape), jnp.asarray(state.offset.numpy())
    own, largest = around(jnp.asarray(scales), mean)
    np.testing.assert_array_equal(largest, state.state2.absmax)
    np.testing.assert_array_equal(_as_on_cpus(scales - np.float32(mean), np.asarray(largest)), state.absmax)
    full = own.size // 256 * 256  # the rest is divided there, and multiplied by the inverse on GPUs
    shifted = torch.from_numpy((scales - np.float32(mean)).reshape(-1)[:full].copy())
    portable = torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd)
    quantize = torch.ops.bitsandbytes.quantize_blockwise.default
    if full:
        theirs, absmax = quantize.redispatch(portable, shifted, state.state2.code, 256)
        np.testing.assert_array_equal(np.asarray(own).ravel()[:full], theirs)
        np.testing.assert_array_equal(np.asarray(largest)[: full // 256], absmax)
    # What their codes stand for here is what they stand for there.
    theirs = jnp.asarray(state.absmax.numpy().reshape(node.scales.shape))
    read = lt.QuantizedWeight(
        node.codes,
        theirs,
        jnp.asarray(state.state2.absmax.numpy()),
        jnp.asarray(state.offset.numpy()),
        node.format,
        node.block,
        "float32",
    )
    state.dtype = torch.float32
    np.testing.assert_allclose(read.dense(), functional.dequantize_4bit(codes, state), rtol=0, atol=1e-6)
    scales = unnested(read.scales, read.nested_scales, read.offset)
    np.testing.assert_allclose(scales.ravel(), plain.absmax.numpy(), rtol=0, atol=1e-3)


def _as_on_cpus(shifted: np.ndarray, largest: np.ndarray) -> np.ndarray:
    """Round to one of 65,536 numbers before the nearest code is taken, as bitsandbytes' build for CPUs does."""
    flat, one = shifted.reshape(-1), np.float32(1)
    scaled = flat * np.repeat(one / largest, 256)[: flat.size]
    numbers = np.floor((scaled + one) * np.float32(32767.5) + np.float32(0.5)) / np.float32(32767.5) - one
    table = dynamic_map()
    return np.searchsorted((table[:-1] + table[1:]) / np.float32(2), numbers).astype(np.uint8)
