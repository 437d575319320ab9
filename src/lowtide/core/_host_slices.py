"""Check that this machine's GPU slices host memory at the offset that a loop asks for.

XLA for GPUs replaces a slice of host memory inside a loop by a copy, whose offset it derives from the loop counter. In
jaxlib 0.10.2 and 0.11.0 it ignores arithmetic between the counter and the index. The backward pass of a scan reads
entry ``n - 1 - i`` and gets entry ``i``, so gradients are wrong and nothing fails. Programs that these versions compile
for an H100 show the wrong offset; those of 0.11.1, 0.11.2 and 0.12.0.1 show the right one.

Version numbers do not describe nightly or vendor builds of XLA, so a small program decides.

Source: openxla/xla pull requests 46231 (report) and 46308 (fix).
"""

from __future__ import annotations

import concurrent.futures
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from ._errors import PlacementError
from ._tracing import traced_device

_NUM_STEPS, _WIDTH = 5, 256


def check_host_slices() -> None:
    """Raise if the GPU that a program is traced for slices host memory in a loop at a wrong offset.

    The first call of a process compiles and runs two programs of a few kilobytes. Later calls, other platforms and
    devices that are only compiled for cost nothing.

    Raises:
        PlacementError: if the gradients of a small scan change when its residuals are kept in host memory.
    """
    if (device := _local_gpu()) is not None:
        _check(device)


def _local_gpu() -> Any | None:
    """Return a GPU of this process if the program is traced for GPUs that are present."""
    device = traced_device()
    return jax.local_devices()[0] if device.platform == "gpu" and device in jax.devices() else None


@functools.cache
def _check(device: Any) -> None:
    # A new thread has none of the caller's traces, meshes and settings.
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        offloaded, reference = (
            executor.submit(_gradients, device, is_offloaded).result() for is_offloaded in (True, False)
        )
    if not np.allclose(offloaded, reference, rtol=1e-3, atol=1e-5):
        raise PlacementError(
            f"with JAX {jax.__version__} this GPU gives wrong gradients when a loop reads values from host memory",
            expected="the gradients of the same scan without host memory",
            got=f"gradients that differ by up to {np.max(np.abs(offloaded - reference)):.2g}",
            hint="install JAX 0.11.1 or newer (it needs Python 3.12), or set "
            "XLA_FLAGS=--xla_disable_hlo_passes=dynamic-slice-annotator before JAX starts",
        )


def _gradients(device: Any, is_offloaded: bool) -> np.ndarray:
    """Differentiate a scan whose steps all differ, so that a residual of another step changes the gradient."""
    weights = np.linspace(0.5, 1.5, _NUM_STEPS * _WIDTH, dtype=np.float32).reshape(_NUM_STEPS, 1, _WIDTH)
    x = np.linspace(-1.0, 1.0, 8 * _WIDTH, dtype=np.float32).reshape(8, _WIDTH)
    fn = jax.jit(jax.grad(functools.partial(_loss, is_offloaded=is_offloaded)))
    return np.asarray(fn(jax.device_put(weights, device), jax.device_put(x, device)))


def _loss(weights: Any, x: Any, *, is_offloaded: bool) -> jax.Array:
    def step(h: Any, weight: Any) -> tuple[Any, None]:
        return jnp.sin(checkpoint_name(h, "h") * weight), None

    if is_offloaded:
        policy = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=["h"],
            offload_src="device",
            offload_dst="pinned_host",
        )
        step = jax.checkpoint(step, policy=policy, prevent_cse=False)
    return jnp.sum(jax.lax.scan(step, x, weights)[0])
