"""Full-parameter AdamW of Llama 3 8B shapes for one chip with 16 GB: what the README says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import lowtide as lt
from lowtide.models import LlamaConfig, init

CONFIG = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope_theta=500000.0,
)
GIB = 2**30
RESULTS = Path(__file__).parents[2] / "benchmarks/results/layerwise.json"


def row(variant: str) -> dict[str, Any]:
    """What `benchmarks/layerwise.py` compiled: each takes minutes."""
    return {row["variant"]: row for row in json.loads(RESULTS.read_text())["8b"]}[variant]


def test_embedding_and_head_on_the_device() -> None:
    made = row("embedding and head on the device, 1 microbatch")
    assert made["device_bytes"] <= 8.2 * GIB and made["fits_device"]
    assert not made["fits"] and made["host_bytes"] > 85 * GIB  # the machine of one v5e has 48 GB


@pytest.mark.slow
@pytest.mark.tpu_aot
def test_everything_on_the_host_at_any_number_of_tokens() -> None:
    num_microbatches = 16
    model = jax.eval_shape(
        lambda key: init(CONFIG, key=key, dtype=jnp.float32, compute_dtype=jnp.bfloat16), jax.random.key(0)
    )
    place = {"outer": "host"}
    step = lt.offload.layerwise_step(model.stack, optax.adamw(1e-5), place=place, num_microbatches=num_microbatches)
    state, frozen = step.init(model.outer, model.layers)
    tokens = jax.ShapeDtypeStruct((num_microbatches, 4096), jnp.int32)
    batch = {"tokens": tokens, "labels": tokens}
    program = lt.memory.compile(step, state, frozen, batch, target="v5e", donate_argnums=0)
    lt.offload.verify(program, {"0/layers/**/*_proj/weight": "host", "0/layers_opt/**/*_proj/weight": "host"})
    made, one = program.report(), row("everything on the host, 1 microbatch")["device_bytes"]
    assert one <= 6.0 * GIB
    assert made.device_bytes <= 1.03 * one
    assert made.fits is False and made.host_bytes > 85 * GIB
