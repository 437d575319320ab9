"""Analysis in a separate process: the same report, and failures that come back as what they were."""

from __future__ import annotations

import os
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lowtide.core import ConfigError, StructureError, TargetError
from lowtide.memory import analyze, target

pytestmark = pytest.mark.processes

TARGETS = ["cpu", pytest.param("v5e:2x2", marks=[pytest.mark.tpu_aot, pytest.mark.slow])]


def shape(*dims: int, sharding: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.float32, sharding=sharding)


def owners(report: Any) -> list[tuple[str, str, int]]:
    return sorted((b.role, b.path, b.num_bytes) for b in report.peak)


@pytest.mark.parametrize("name", TARGETS)
def test_the_report_is_the_same(name: str) -> None:
    factor, processes = 0.5, list[int]()

    def step(mode: str, state: Any, x: Any, *, scale: Any, table: Any) -> Any:
        assert mode == "fast"
        processes.append(os.getpid())
        return jax.tree.map(lambda leaf: leaf * factor + jnp.sum(x) * scale + jnp.sum(table), state)

    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    x = jax.device_put(jnp.ones((64, 128)), NamedSharding(mesh, PartitionSpec("data")))
    arguments = ("fast", {"w": shape(256, 128, sharding=NamedSharding(mesh, PartitionSpec()))}, x)
    options: dict[str, Any] = {
        "target": name,
        "roles": {"state": 1},
        "donate_argnums": 1,
        "static_argnums": 0,
        "scale": jnp.float32(2.0),
        "table": np.ones((64, 64), np.float64),  # float32 without `jax_enable_x64`, in the child as well
    }
    child = analyze(step, *arguments, isolate=True, **options)
    assert processes == []  # it was traced elsewhere
    here = analyze(step, *arguments, **options)
    assert processes == [os.getpid()]
    assert child.by_role == here.by_role
    assert owners(child) == owners(here)
    assert child.device.argument_bytes == here.device.argument_bytes
    assert child.target == here.target


@pytest.mark.slow
def test_errors_come_back() -> None:
    def fails(x: Any) -> Any:
        raise ConfigError("a mistake in the function", hint="mend it")

    with pytest.raises(ConfigError, match=r"a mistake in the function[\s\S]*hint: mend it"):
        analyze(fails, shape(3), isolate=True)
    with pytest.raises(ZeroDivisionError):
        analyze(lambda x: x * (1 // 0), shape(3), isolate=True)


def test_what_cannot_travel_is_named() -> None:
    lock = threading.Lock()
    with pytest.raises(StructureError, match=r"cannot be sent to a separate process[\s\S]*hint"):
        analyze(lambda x: x + lock.locked(), shape(3), isolate=True)


def test_a_child_that_dies_is_reported() -> None:
    def crash(x: Any) -> Any:
        os._exit(7)

    with pytest.raises(
        TargetError, match=r"ended without a report \(status 7\)[\s\S]*hint: leave isolate out, to compile"
    ):
        analyze(crash, shape(3), target=target("cpu"), isolate=True)


@pytest.mark.slow
def test_the_configuration_of_jax_holds_in_the_child() -> None:
    with jax.enable_x64(True):
        report = analyze(lambda x: x * 2.0, np.ones((64, 64), np.float64), target="cpu", isolate=True)
    assert report.device.argument_bytes == 64 * 64 * 8
