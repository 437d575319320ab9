"""How many queries attention without a kernel takes at a time."""

from __future__ import annotations

import types

import pytest

from lowtide.ops import _scores


@pytest.mark.parametrize(
    ("shape", "num_keys", "block"),
    [
        ((1, 512, 8, 64), 512, 512),  # 8 MiB of scores
        ((2, 2048, 32, 128), 2048, 512),  # 1 GiB of them: 256 MiB are a quarter
        ((1, 4096, 8, 64), 4096, 1024),  # long rows, few heads
        ((1, 100, 64, 64), 16384, 100),  # 400 MiB, but fewer than 128 queries are no block
        ((64, 300, 64, 128), 2**20, 128),  # of which a single query has more than that
        ((64, 5, 64, 128), 2**20, 5),
    ],
)
def test_queries_at_a_time(shape: tuple[int, ...], num_keys: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _scores._queries_at_a_time(shape, num_keys) == min(shape[1], 1024 if shape[1] > 2048 else shape[1])
    monkeypatch.setattr(_scores, "traced_device", lambda: types.SimpleNamespace(platform="tpu"))
    assert _scores._queries_at_a_time(shape, num_keys) == block
