"""The only file that touches JAX outside its public, stable interface.

| use | checked on | replaced by |
|---|---|---|
| `jax.stages.Traced.jaxpr.jaxpr.debug_info.arg_names` | jax 0.10.2 | a public list of the arguments that `jit` kept |
| `jax._src.compilation_cache.is_cache_used` | jax 0.10.2 | a public way to compile once without the persistent cache |
| `jax.experimental.topologies.get_topology_desc` | jax 0.10.2 | a stable home for ahead-of-time topologies |
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any


def tpu_topology_devices(topology_name: str, *, chip_config_name: str | None = None) -> list[Any]:
    """Devices of a TPU topology that need not be present, for ahead-of-time compilation.

    Args:
        topology_name: ``name:AxB[xC]``, such as ``v5e:2x2``.
        chip_config_name: how a chip's cores appear, where libtpu's default is not what a machine shows: ``megacore``
            makes the two cores of a v4 chip one device.

    Returns:
        Compile-only JAX devices.

    Raises:
        Exception: whatever libtpu raises for a topology it does not know.
    """
    from jax.experimental import topologies

    # Without these libtpu asks the (absent) TPU metadata server, and refuses to load in two processes at once.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    options = {} if chip_config_name is None else {"chip_config_name": chip_config_name}
    return list(topologies.get_topology_desc(platform="tpu", topology_name=topology_name, **options).devices)


@contextlib.contextmanager
def without_compilation_cache() -> Iterator[None]:
    """Compile for certain: a program found in JAX's persistent cache would dump nothing."""
    from jax._src import compilation_cache

    original = compilation_cache.is_cache_used
    compilation_cache.is_cache_used = lambda backend: False
    try:
        yield
    finally:
        compilation_cache.is_cache_used = original


def argument_names(traced: Any) -> list[str]:
    """JAX's names of a traced function's argument leaves, ``params['w']``, as its compiled programs carry them.

    Args:
        traced: a `jax.stages.Traced`.

    Returns:
        One name a leaf, in flattening order; empty when JAX keeps none.
    """
    return list(traced.jaxpr.jaxpr.debug_info.arg_names or ())
