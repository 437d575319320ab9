"""Targets: names, capacities, and refusals that say what would work."""

from __future__ import annotations

import importlib.util

import jax
import pytest

from lowtide.core import TargetError
from lowtide.memory import Target, target

GIB = 2**30


def test_here_and_cpu_are_the_cpu_backend_without_a_capacity() -> None:
    for name in ("here", "cpu"):
        goal = target(name)
        assert (goal.name, goal.platform, goal.device_bytes) == (name, "cpu", None)
        assert goal.num_devices == len(goal.devices()) == len(jax.devices())
        assert not goal.is_ahead_of_time


def test_here_takes_the_smallest_limit_that_the_allocator_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        device_kind = "NVIDIA H100"

        def __init__(self, stats: dict[str, int] | None) -> None:
            self.stats = stats

        def memory_stats(self) -> dict[str, int] | None:
            return self.stats

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [Device({"bytes_limit": 7 * GIB}), Device({"bytes_limit": 6 * GIB})])
    assert target("here") == Target(
        name="here", platform="gpu", chip="NVIDIA H100", num_devices=2, device_bytes=6 * GIB
    )
    monkeypatch.setattr(jax, "devices", lambda: [Device({"bytes_limit": 7 * GIB}), Device(None)])
    assert target("here").device_bytes is None


def test_unknown_backend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "METAL")
    with pytest.raises(TargetError, match=r"default backend 'METAL'[\s\S]*hint: "):
        target("here")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", r"name is empty[\s\S]*hint: \"here\""),
        ("   ", r"name is empty"),
        ("hree", r"unknown target 'hree'[\s\S]*hint: near misses: here"),
        ("v5l:2x2", r"unknown target 'v5l:2x2'[\s\S]*hint: near misses: .*v5e:2x2"),
        ("v5litepod-4", r"near misses: v5e"),
        ("trillium", r"near misses: v6e"),
        ("v99:2x2", r"unknown target 'v99:2x2'[\s\S]*chips: v2, v3, v4, v5p, v5e, v6e, tpu7x"),
        ("h100", r"'h100' is a GPU, and GPU targets are not available yet[\s\S]*hint: .*\"here\" works"),
        ("h200:8", r"'h200:8' is a GPU"),
        ("rtx 4090", r"'rtx 4090' is a GPU"),
        ("v5e:", r"'v5e:' has no valid topology[\s\S]*hint: \"v5e:1x1\" is one chip"),
        ("v5e:4", r"'v5e:4' has no valid topology"),
        ("v5e:0x1", r"'v5e:0x1' has no valid topology"),
        ("v5e:2x-2", r"has no valid topology"),
        ("v5p:2x2x2x2", r"has no valid topology"),
    ],
)
def test_wrong_names_list_what_would_work(name: str, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        target(name)


def test_missing_libtpu_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TargetError, match=r'needs libtpu[\s\S]*hint: pip install "lowtide\[tpu-aot\]"'):
        target("v6e:8x16")


@pytest.mark.tpu_aot
@pytest.mark.parametrize(
    ("name", "canonical", "num_devices", "gib"),
    [
        ("v2:2x2", "v2:2x2", 8, 7.48),
        ("v3", "v3:1x1", 2, 15.48),
        ("v4:2x2x1", "v4:2x2x1", 4, 30.75),
        ("v5p", "v5p:1x1x1", 1, 95.73),
        ("v5e", "v5e:1x1", 1, 15.75),
        (" V5E:2x2 ", "v5e:2x2", 4, 15.75),
        ("v6e:4x4", "v6e:4x4", 16, 31.24),
        ("tpu7x:2x2x1", "tpu7x:2x2x1", 8, 94.74),
    ],
)
def test_tpu_names(name: str, canonical: str, num_devices: int, gib: float) -> None:
    goal = target(name)
    assert (goal.name, goal.platform, goal.num_devices) == (canonical, "tpu", num_devices)
    assert goal.device_bytes == int(gib * GIB)
    assert goal.is_ahead_of_time
    assert [device.platform for device in goal.devices()] == ["tpu"] * num_devices


@pytest.mark.tpu_aot
def test_refused_topology_gives_the_reason() -> None:
    with pytest.raises(
        TargetError, match=r"libtpu refuses the topology 'v5e:3x3'\n  got: .*not divisible[\s\S]*hint: "
    ):
        target("v5e:3x3")
