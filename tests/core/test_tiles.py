"""The rule of tiles, beside what XLA compiles for TPUs."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from lowtide.core import is_row_major, most_tile_rows, slice_step, tile_axes
from lowtide.core._tiles import _padding
from lowtide.hlo._executable import padded_bytes

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
