"""What a step computes, beside what has to be computed: half of the scores, or those in a window, and all products."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowtide as lt
from lowtide.core import _compat
from lowtide.jaxprs import jaxpr_flops
from lowtide.models import DecoderConfig, init, loss
from lowtide.ops import _splash

CONFIG = DecoderConfig(
    vocab_size=32000,
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=2,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    tie_embeddings=False,
)
WIDTH = CONFIG.num_heads * CONFIG.head_dim


def step_flops(config: DecoderConfig, length: int, target: str, *, remat: bool) -> float:
    """Of a LoRA step over one row, traced for a target."""

    def make() -> Any:
        base = init(config, key=jax.random.key(0), dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16)
        return lt.lora.add(base, lt.lora.Config(rank=8), key=jax.random.key(1))

    batch = {name: jax.ShapeDtypeStruct((1, length), jnp.int32) for name in ("tokens", "labels")}
    step = lt.value_and_grad(functools.partial(loss, remat=remat), wrt="**/lora_*", has_aux=True)
    with jax.default_device(lt.target(target).devices()[0]):
        return jaxpr_flops(jax.make_jaxpr(step)(jax.eval_shape(make), batch))


def arithmetic(config: DecoderConfig, length: int, *, remat: bool) -> float:
    """Products of activations with frozen weights and their transposes, of the pairs that see each other, and logits.

    Of a pair's two products in the forward pass the backward pass computes one again, and four are of gradients.
    """
    narrow = config.num_kv_heads * config.head_dim
    weights = config.hidden_size * (2 * WIDTH + 2 * narrow + 3 * config.intermediate_size)
    window = min(config.sliding_window or length, length)
    pairs = window * (window + 1) / 2 + (length - window) * window
    layer = (3 if remat else 2) * 2 * length * weights + (2 * (1 + remat) + 5) * 2 * pairs * WIDTH
    return config.num_layers * layer + 2 * 2 * length * config.hidden_size * config.vocab_size


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("target", ["cpu", pytest.param("v5e:1x1", marks=pytest.mark.tpu_aot)])
@pytest.mark.parametrize("remat", [False, True])
def test_a_causal_step_computes_half_of_the_scores(target: str, remat: bool) -> None:
    for length in (2048, 8192, 65536):
        found = step_flops(CONFIG, length, target, remat=remat)
        assert 0.9 < found / arithmetic(CONFIG, length, remat=remat) < 1.1


@pytest.mark.slow
def test_a_window_computes_what_is_in_it() -> None:
    length, windows = 32768, (1024, 2048, 4096, 8192)
    configs = [dataclasses.replace(CONFIG, sliding_window=window) for window in windows]
    found = [step_flops(config, length, "cpu", remat=False) for config in configs]
    wanted = [arithmetic(config, length, remat=False) for config in configs]
    assert (np.divide(found, wanted) < 1.1).all()
    more = np.diff(found) / np.diff(wanted)  # of what a wider window adds
    assert (more > 0.95).all() and (more < 1.1).all()


@pytest.mark.parametrize(("length", "window"), [(2048, None), (8192, None), (65536, None), (65536, 4096)])
def test_the_kernel_for_tpus_visits_the_blocks_of_pairs_that_see_each_other(length: int, window: int | None) -> None:
    block = _splash._size_of(length, length, window)
    table, _, _ = _compat._splash_tables(length, length, True, window, block, False)
    visited = np.count_nonzero(table.block_mask) * block**2
    config = dataclasses.replace(CONFIG, sliding_window=window)
    seen = arithmetic(config, length, remat=True)
    pairs = (seen - arithmetic(dataclasses.replace(CONFIG, sliding_window=1), length, remat=True)) / (2 * 9 * 2 * WIDTH)
    assert visited > pairs
    assert seen + 2 * 9 * 2 * (visited - pairs) * WIDTH < 1.1 * seen
