"""Full-parameter AdamW of Llama 3 8B shapes for one chip with 16 GB: what the README says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

GIB = 2**30
RESULTS = Path(__file__).parents[2] / "benchmarks/results/layerwise.json"


def row(variant: str) -> dict[str, Any]:
    """What `benchmarks/layerwise.py` compiled: each takes minutes."""
    return {row["variant"]: row for row in json.loads(RESULTS.read_text())["8b"]}[variant]


def test_embedding_and_head_on_the_device() -> None:
    made = row("embedding and head on the device, 1 microbatch")
    assert made["device_bytes"] <= 8.2 * GIB and made["fits_device"]
    assert not made["fits"] and made["host_bytes"] > 85 * GIB  # the machine of one v5e has 48 GB


def test_everything_on_the_host_at_any_number_of_tokens() -> None:
    """That microbatches add nothing is compiled anew, of a small model, in tests/offload/test_layerwise.py."""
    one, sixteen = (row(f"everything on the host, {number}") for number in ("1 microbatch", "16 microbatches"))
    assert one["device_bytes"] <= 6.0 * GIB
    assert sixteen["device_bytes"] <= 1.03 * one["device_bytes"]
    assert sixteen["fits"] is False and sixteen["host_bytes"] > 85 * GIB
