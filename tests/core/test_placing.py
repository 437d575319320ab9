import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from lowtide.core import BATCH_AXES, put


def test_arrays_are_put_where_a_sharding_says_and_share_no_buffer():
    mesh = jax.make_mesh((2,), ("fsdp",), devices=jax.devices()[:2])
    rows = NamedSharding(mesh, jax.P(BATCH_AXES[-1]))
    given = np.ones((4, 2), np.float32)
    found = put(given, rows)
    given[:] = 0
    assert found.sharding == rows and found.tolist() == [[1.0, 1.0]] * 4
    assert put(found, rows) is found
    assert put(jnp.zeros(2), NamedSharding(mesh, jax.P())).is_fully_replicated
