from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from lowtide.core import BATCH_AXES, memory_space, put


def test_arrays_are_put_where_a_sharding_says_and_share_no_buffer():
    mesh = jax.make_mesh((2,), ("fsdp",), devices=jax.devices()[:2])
    rows = NamedSharding(mesh, jax.P(BATCH_AXES[-1]))
    given = np.ones((4, 2), np.float32)
    found = put(given, rows)
    given[:] = 0
    assert found.sharding == rows and found.tolist() == [[1.0, 1.0]] * 4
    assert put(found, rows) is found
    assert put(jnp.zeros(2), NamedSharding(mesh, jax.P())).is_fully_replicated


HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def _sharding(kind):
    return jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=kind)


@pytest.mark.parametrize(("kind", "space"), [("device", DEVICE), ("pinned_host", HOST), ("unpinned_host", HOST)])
def test_arrays_and_shape_structs_are_where_their_sharding_says(kind, space):
    array = jax.device_put(jnp.ones(4), _sharding(kind))
    assert memory_space(array) == space
    assert memory_space(jax.ShapeDtypeStruct((4,), jnp.float32, sharding=_sharding(kind))) == space


@pytest.mark.parametrize("leaf", [np.ones(3), 1.0, jax.ShapeDtypeStruct((4,), jnp.float32), "text"])
def test_what_has_no_space_counts_as_device(leaf):
    assert memory_space(leaf) == DEVICE


def test_tracers_say_where_they_are_inside_jit():
    seen = {}

    @jax.jit
    def f(on_host, on_device):
        seen.update(host=memory_space(on_host), device=memory_space(on_device))
        seen["moved"] = memory_space(jax.device_put(on_device, HOST))
        return on_device

    f(jax.device_put(jnp.ones(4), _sharding("pinned_host")), jnp.ones(2))
    assert seen == {"host": HOST, "device": DEVICE, "moved": HOST}
