"""XLA for GPUs may slice host memory at a wrong offset without an error, so a small program checks it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import SingleDeviceSharding

import lowtide as lt
from lowtide.core import PlacementError, _host_slices
from lowtide.pipeline.program._executor import recomputing

OUTER, LAYERS, X = {}, {"w": jnp.ones((3, 256, 256))}, jnp.ones((8, 256))


def block(layer: Any, h: Any, batch: Any) -> jax.Array:
    return jnp.tanh(checkpoint_name(h, "h") @ layer["w"])


STACK = lt.LayerStack(lambda outer, x: x, block, lambda outer, h, x: (jnp.sum(h**2), {}))


def named_activations() -> Any:
    offloaded = lt.offload.checkpoint(block, offload=["h"])
    return jax.eval_shape(jax.grad(lambda layer: offloaded(layer, X, X).sum()), {"w": LAYERS["w"][0]})


def streamed_layers() -> Any:
    def loss(layers: Any) -> jax.Array:
        return lt.offload.scan(lambda h, layer: (block(layer, h, X), None), X, layers)[0].sum()

    return jax.eval_shape(lambda layers: jax.grad(loss)(jax.device_put(layers, jax.memory.Space.Host)), LAYERS)


def layers_updated_one_by_one() -> Any:
    step = lt.offload.layerwise_step(STACK, optax.adam(1e-3), place={"layers": "host", "opt_state": "host"})
    state, frozen = step.init(OUTER, jax.tree.map(jnp.copy, LAYERS))
    return jax.eval_shape(step, state, frozen, X)


def optimizer_state() -> Any:
    tx = lt.offload.optimizer(optax.adam(1e-3), chunk_bytes=2**16)
    return jax.eval_shape(tx.update, LAYERS, tx.init(LAYERS), LAYERS)


def pipeline_inputs() -> Any:
    offloaded = recomputing(block, True, inputs_on_host=True)
    return jax.eval_shape(offloaded, {"w": LAYERS["w"][0]}, X, X)


PROGRAMS = [named_activations, streamed_layers, layers_updated_one_by_one, optimizer_state, pipeline_inputs]


@pytest.fixture
def faulty_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU whose backward pass reads offloaded residuals from first to last."""
    right = _host_slices._gradients

    def wrong(device: jax.Device, is_offloaded: bool) -> np.ndarray:
        gradients = right(device, is_offloaded)
        return gradients[::-1] if is_offloaded else gradients

    monkeypatch.setattr(_host_slices, "_local_gpu", lambda: jax.local_devices()[0])
    monkeypatch.setattr(_host_slices, "_gradients", wrong)
    _host_slices._check.cache_clear()


def test_a_right_device_passes_the_check() -> None:
    device = jax.local_devices()[0]
    _host_slices._check(device)
    gradients = _host_slices._gradients(device, True)
    assert not np.allclose(gradients, gradients[::-1], rtol=0.1), "reversed steps would not be noticed"


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.usefixtures("faulty_gpu")
def test_a_gpu_with_the_fault_is_refused(program: Callable[[], Any]) -> None:
    with pytest.raises(PlacementError, match=r"(?s)wrong gradients.*hint: install JAX 0\.11\.1 .*XLA_FLAGS"):
        program()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_other_devices_are_not_checked(program: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_host_slices, "_check", lambda device: pytest.fail("no GPU is present"))
    program()


@pytest.mark.usefixtures("faulty_gpu")
def test_programs_that_stay_on_the_device_are_not_refused() -> None:
    kept = lt.offload.checkpoint(block, save=["h"])
    jax.eval_shape(jax.grad(lambda layer: kept(layer, X, X).sum()), {"w": LAYERS["w"][0]})
    jax.eval_shape(recomputing(block, True, inputs_on_host=False), {"w": LAYERS["w"][0]}, X, X)


@pytest.mark.gpu_aot
def test_the_checks_program_has_the_fault_where_xla_has_it() -> None:
    """The backward pass reads 5 entries of 8,192 bytes from last to first, as jaxlib 0.11.1 and later compile it."""
    sharding = SingleDeviceSharding(lt.target("h100").devices()[0])
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding) for shape in ((5, 1, 256), (8, 256))]
    gradients = jax.jit(jax.grad(functools.partial(_host_slices._loss, is_offloaded=True)))
    compiled = gradients.trace(*shapes).lower(lowering_platforms=("cuda",)).compile()
    assert compiled.memory_analysis().host_temp_size_in_bytes == 5 * 8192
    text = compiled.as_text() or ""
    assert re.search(r"dynamic-slice-start.* = \(\(f32\[5,8,256\]\{2,1,0:S\(5\)\}", text), "no slice of host memory"
    config = r"\"byte_offset\":\"(\d+)\",\"byte_stride\":\"(-?\d+)\"\}"
    reads = re.findall(rf"= f32\[1,8,256\]\S* dynamic-slice\(.*{config}", text)
    assert reads == [("0", "8192") if jax.__version_info__ < (0, 11, 1) else (str(4 * 8192), "-8192")]
