"""Tiles of TPUs, compared with what XLA compiles; and the check for GPUs that slice host memory at a wrong offset."""

from __future__ import annotations

import functools
import math
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
from lowtide.core import PlacementError, _devices, is_row_major, most_tile_rows, slice_step, tile_axes
from lowtide.core._devices import _padding
from lowtide.hlo._executable import padded_bytes
from lowtide.pipeline.program._executor import recomputing

# --- Tiles of TPUs ----------------------------------------------------------------------------------------------------


# Some where dtypes differ: few rows, two axes that are equal for one dtype and not for another.
SHAPES = [
    *((rows, 128) for rows in (1, 2, 3, 4, 5, 8, 9, 64)),
    *((1000, columns) for columns in (1, 3, 5, 12, 17)),
    *((1000, 1, 768), (4096, 2, 64), (4096, 24, 64), (2, 4096, 3), (64, 2, 128), (12, 3, 256), (64, 8, 16, 24)),
    *((16, 4096), (4096, 16), (20, 40), (129, 130), (300, 300), (5, 7, 129), (3, 40, 300)),
]


@pytest.mark.slow_after(1)
@pytest.mark.tpu_aot
@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        (jnp.bfloat16, "device"),
        (jnp.int4, "pinned_host"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                *((jnp.bfloat16, "pinned_host"), (jnp.int4, "device")),
                *((jnp.float32, "device"), (jnp.int8, "device"), (jnp.bool_, "pinned_host")),
            )
        ),
    ],
)
def test_the_rule_is_xla_s(tpu_device: Any, dtype: Any, kind: str) -> None:
    place, dtype = jax.sharding.SingleDeviceSharding(tpu_device, memory_kind=kind), jnp.dtype(dtype)

    def read(arrays: Any) -> Any:
        return [jax.device_put(x, jax.memory.Space.Device) == 1 for x in arrays]

    compiled = jax.jit(read).lower([jax.ShapeDtypeStruct(shape, dtype, sharding=place) for shape in SHAPES]).compile()
    bits = 4 if dtype == jnp.int4 else dtype.itemsize * 8
    for shape, fmt in zip(SHAPES, compiled.input_formats[0][0], strict=True):
        order = fmt.layout.major_to_minor
        padding = padded_bytes(shape, bits, fmt.layout) * 8 / bits / math.prod(shape)
        assert _padding(shape, dtype, *order[-2:]) == pytest.approx(padding), shape
        assert _padding(shape, dtype, *tile_axes(shape, dtype)) == pytest.approx(padding), shape
        assert is_row_major(shape, dtype) is (order == tuple(range(len(shape)))), shape
        assert fmt.layout.tiling[0][0] <= most_tile_rows(dtype)


@pytest.mark.parametrize(
    ("shape", "row_major"),
    # As XLA laid out float32 arguments for a v5e.
    [
        ((3001, 1111), False),
        ((3001, 1152), True),
        ((50257, 768), True),
        ((1000, 20, 7), False),
        ((32, 4096, 16), False),
        ((4096, 16), False),
        ((16, 4096), True),
        ((300, 300), True),
        ((8, 4096, 4096), True),
        ((7, 301, 1111), True),
        ((4096, 8, 64), False),
        ((151, 300, 130), False),
        ((7,), True),
        ((), True),
        ((0, 3), True),
    ],
)
def test_rows_of_an_array(shape: Any, row_major: bool) -> None:
    assert is_row_major(shape, jnp.dtype(jnp.float32)) is row_major


def test_narrow_numbers_fill_words_along_rows() -> None:
    shape = (2, 4096, 3)
    assert tile_axes(shape, jnp.dtype(jnp.float32)) == (0, 1)
    assert tile_axes(shape, jnp.dtype(jnp.int8)) == (2, 1)


@pytest.mark.parametrize(
    ("dtype", "rows"), [("float32", 8), ("complex64", 8), ("bfloat16", 16), ("bool", 32), ("int4", 64)]
)
def test_rows_of_tiles(dtype: str, rows: int) -> None:
    assert most_tile_rows(jnp.dtype(dtype)) == rows
    assert most_tile_rows(jax.random.key(0).dtype) == 8


def test_steps_of_slices() -> None:
    assert [slice_step(3, axis) for axis in range(2)] == [1, 8]
    assert slice_step(1, 0) == 1024


# --- Slices of host memory on GPUs ------------------------------------------------------------------------------------


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
    right = _devices._gradients

    def wrong(device: jax.Device, is_offloaded: bool) -> np.ndarray:
        gradients = right(device, is_offloaded)
        return gradients[::-1] if is_offloaded else gradients

    monkeypatch.setattr(_devices, "local_gpu", lambda: jax.local_devices()[0])
    monkeypatch.setattr(_devices, "_gradients", wrong)
    _devices._check_gpu.cache_clear()


def test_a_right_device_passes_the_check() -> None:
    device = jax.local_devices()[0]
    _devices._check_gpu(device)
    gradients = _devices._gradients(device, True)
    assert not np.allclose(gradients, gradients[::-1], rtol=0.1), "reversed steps would not be noticed"


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.usefixtures("faulty_gpu")
def test_a_gpu_with_the_fault_is_refused(program: Callable[[], Any]) -> None:
    with pytest.raises(PlacementError, match=r"(?s)wrong gradients.*hint: install JAX 0\.11\.1 .*XLA_FLAGS"):
        program()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_other_devices_are_not_checked(program: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_devices, "_check_gpu", lambda device: pytest.fail("no GPU is present"))
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
    gradients = jax.jit(jax.grad(functools.partial(_devices._loss, is_offloaded=True)))
    compiled = gradients.trace(*shapes).lower(lowering_platforms=("cuda",)).compile()
    assert compiled.memory_analysis().host_temp_size_in_bytes == 5 * 8192
    text = compiled.as_text() or ""
    assert re.search(r"dynamic-slice-start.* = \(\(f32\[5,8,256\]\{2,1,0:S\(5\)\}", text), "no slice of host memory"
    config = r"\"byte_offset\":\"(\d+)\",\"byte_stride\":\"(-?\d+)\"\}"
    reads = re.findall(rf"= f32\[1,8,256\]\S* dynamic-slice\(.*{config}", text)
    assert reads == [("0", "8192") if jax.__version_info__ < (0, 11, 1) else (str(4 * 8192), "-8192")]
