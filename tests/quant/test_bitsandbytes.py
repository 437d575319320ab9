"""nf4 compared with bitsandbytes, its build for CPUs."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import lowtide as lt
from lowtide.quant._weight import decode, dequantize_scales, dynamic_map, quantize_around_mean
from tests.peers import Peer, normal, thin

DTYPES: dict[str, Any] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def answers(weight: np.ndarray, dtype: str) -> dict[str, Any]:
    """Return what bitsandbytes makes of a weight: codes, scales with and without a second level, numbers again."""
    import torch
    from bitsandbytes import functional

    tensor = torch.tensor(weight).to(getattr(torch, dtype))
    codes, state = functional.quantize_4bit(tensor, blocksize=64, compress_statistics=True, quant_type="nf4")
    _, plain = functional.quantize_4bit(tensor, blocksize=64, compress_statistics=False, quant_type="nf4")
    state.dtype = torch.float32
    answer = {
        "codes": codes.ravel(),
        "scales": plain.absmax,
        "offset": state.offset,
        "nested codes": state.absmax,
        "nested scales": state.state2.absmax,
        "map": state.state2.code,
        "dense": thin(functional.dequantize_4bit(codes, state), 31),
    }
    full = plain.absmax.numel() // 256 * 256  # the rest is divided there, and multiplied by the inverse on GPUs
    if full:
        shifted = (plain.absmax - state.offset)[:full].clone()
        portable = torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd)
        quantize = torch.ops.bitsandbytes.quantize_blockwise.default
        answer["portable codes"], answer["portable scales"] = quantize.redispatch(
            portable, shifted, state.state2.code, 256
        )
    return {name: np.asarray(value) for name, value in answer.items()}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("shape", "dtype"), [((6, 128), "float32"), ((300, 320), "bfloat16"), ((128, 512), "float16")])
def test_codes_and_scales_are_those_of_bitsandbytes(shape: tuple[int, int], dtype: str, peer: Peer) -> None:
    weight = normal("weight", shape, std=0.02).astype(DTYPES[dtype]).astype(np.float32)
    weight[1, :64] = 0
    want = peer.answer("nf4", lambda: answers(weight, dtype), {"weight": weight, "dtype": dtype})
    node = lt.quantize({"w": jnp.asarray(weight)}, "w", "nf4")["w"]

    ours = np.asarray(node.codes).astype(np.uint8).ravel()
    np.testing.assert_array_equal(ours[::2] << 4 | ours[1::2], want["codes"])
    np.testing.assert_array_equal(dynamic_map(), want["map"])
    np.testing.assert_allclose(decode(jnp.arange(256, dtype=jnp.uint8)), dynamic_map(), rtol=0, atol=1e-7)
    # Sums in another order.
    np.testing.assert_allclose(node.offset, want["offset"], rtol=1e-6)
    np.testing.assert_allclose(node.nested_scales, want["nested scales"], rtol=1e-6)
    scales, mean = want["scales"].reshape(node.scales.shape), want["offset"]
    own, largest = quantize_around_mean(jnp.asarray(scales), jnp.asarray(mean))
    np.testing.assert_array_equal(largest, want["nested scales"])
    np.testing.assert_array_equal(_as_on_cpus(scales - np.float32(mean), np.asarray(largest)), want["nested codes"])
    full = own.size // 256 * 256
    if full:
        np.testing.assert_array_equal(np.asarray(own).ravel()[:full], want["portable codes"])
        np.testing.assert_array_equal(np.asarray(largest)[: full // 256], want["portable scales"])
    # Their codes and scales stand for the same numbers here and there.
    read = lt.QuantizedWeight(
        node.codes,
        jnp.asarray(want["nested codes"].reshape(node.scales.shape)),
        jnp.asarray(want["nested scales"]),
        jnp.asarray(mean),
        node.format,
        node.block,
        "float32",
    )
    np.testing.assert_allclose(thin(read.dense(), 31), want["dense"], rtol=0, atol=1e-6)
    unnested_scales = dequantize_scales(read.scales, read.nested_scales, read.offset)
    np.testing.assert_allclose(unnested_scales.ravel(), want["scales"], rtol=0, atol=1e-3)


def _as_on_cpus(shifted: np.ndarray, largest: np.ndarray) -> np.ndarray:
    """Round to one of 65,536 numbers before the nearest code is taken, as bitsandbytes' build for CPUs does."""
    flat, one = shifted.reshape(-1), np.float32(1)
    scaled = flat * np.repeat(one / largest, 256)[: flat.size]
    numbers = np.floor((scaled + one) * np.float32(32767.5) + np.float32(0.5)) / np.float32(32767.5) - one
    table = dynamic_map()
    return np.searchsorted((table[:-1] + table[1:]) / np.float32(2), numbers).astype(np.uint8)
