"""Properties of the device that a program is traced for: the tiles of TPUs, and slices of host memory on GPUs."""

from __future__ import annotations

import concurrent.futures
import functools
import importlib.util
import mmap
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from ._errors import PlacementError
from ._paths import item_bits

_LANES, _SUBLANES, _WORD_BITS, _FLAT_TILE = 128, 8, 32, 1024
_VARIABLE, _TALL_TILES = "LIBTPU_INIT_ARGS", "--xla_tpu_impure_enable_large_2nd_minor_entry_layout"
LOW_TILES = f"{_VARIABLE}={_TALL_TILES}=false"
"""Environment setting with which libtpu (0.0.51) gives arguments tiles of at most 8 rows; set it before JAX starts."""
_NUM_STEPS, _WIDTH = 5, 256


def traced_device() -> Any:
    """Return a device of the kind that the program is traced for."""
    # `jax.default_device` overrides the default backend, for instance in a memory report for a TPU on a machine with
    # a GPU. Its value is a device, the name of a platform, or None.
    config: Any = jax.config
    chosen = config.jax_default_device
    return chosen if hasattr(chosen, "platform") else jax.devices(chosen)[0]


# --- Tiles of TPUs ----------------------------------------------------------------------------------------------------
#
# Two axes of an array are stored in tiles of 8 x 128 elements. XLA picks the two axes with the smallest padding. These
# rules describe how XLA stores arguments, on the device and on the host, in programs for a v5e:
#
# - Narrow elements of a column share a word of 32 bits: two bfloat16, four int8, eight int4. A tile still has 8 rows.
# - Arrays of fewer than five rows have tiles of the next power of two rows, but at least of the rows that share a word.
# - int8 arrays whose number of rows is a multiple of 32 have tiles of 32 rows (int4: 64), which adds no padding.
# - Arrays of one axis have tiles of 1024 elements.


def tile_axes(shape: Sequence[int], dtype: Any) -> tuple[int, int]:
    """Return the axes of the rows and of the columns of a TPU's tiles, for an array with at least two axes.

    They are the pair with the smallest padding; of several such pairs, the last one.
    """
    axes = range(len(shape))
    pairs = ((rows, columns) for rows in axes for columns in axes if rows != columns)
    return min(pairs, key=lambda pair: (_padding(shape, dtype, *pair), -pair[1], -pair[0]))


def is_row_major(shape: Sequence[int], dtype: Any) -> bool:
    """Return whether a TPU stores the last axis innermost; other arrays cannot be sliced by rows on the host."""
    return len(shape) < 2 or tile_axes(shape, dtype) == (len(shape) - 2, len(shape) - 1)


def most_tile_rows(dtype: Any) -> int:
    """Return the largest number of rows that a tile of a dtype can have."""
    return _SUBLANES * _packing(dtype)


def has_tall_tiles(shape: Sequence[int], dtype: Any) -> bool:
    """Return whether a TPU stores an argument in tiles of more than 8 rows; False if `LOW_TILES` is set.

    A slice on the host has tiles of 8 rows, so XLA does not slice such an argument there. It copies the whole array to
    the device, changes its layout, and copies it back (libtpu 0.0.51).
    """
    return (
        len(shape) > 1
        and item_bits(dtype) <= 8
        and not shape[-2] % most_tile_rows(dtype)
        and re.findall(rf"{_TALL_TILES}(?:=(\w+))?", os.environ.get(_VARIABLE, ""))[-1:] not in (["false"], ["0"])
    )


def choose_low_tiles() -> None:
    """Make libtpu give arguments tiles of at most 8 rows (`LOW_TILES`), unless the environment already sets the flag.

    The call has an effect only before JAX starts a TPU. It does nothing if the installed libtpu lacks the flag, because
    an unknown flag ends the process (0.0.42 lacks it, 0.0.45 and later have it). With low tiles, a product copies its
    8-bit matrices on the device to another layout, as compiled programs show. So call this only in programs that keep
    such matrices on the host.
    """
    flags = os.environ.get(_VARIABLE, "")
    if _TALL_TILES not in flags and _libtpu_has_flag(_TALL_TILES):
        os.environ[_VARIABLE] = f"{flags} {_TALL_TILES}=false".strip()


def _libtpu_has_flag(flag: str) -> bool:
    """Return whether the libtpu that JAX would load has a flag, by searching the library for the flag's name."""
    spec = importlib.util.find_spec("libtpu")
    folders = (spec.submodule_search_locations or [""]) if spec is not None else [""]
    path = Path(os.environ.get("TPU_LIBRARY_PATH") or Path(folders[0], "libtpu.so"))
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library:
        return library.find(flag.removeprefix("--").encode()) >= 0


def slice_step(ndim: int, axis: int) -> int:
    """Return the alignment, in elements along an axis, at which slices of a row-major array consist of whole tiles.

    The axis must not be the last one, unless it is the only one.
    """
    return {1: _FLAT_TILE, 2: _SUBLANES}.get(ndim - axis, 1)


def _padding(shape: Sequence[int], dtype: Any, rows: int, columns: int) -> float:
    """Return the factor by which padding enlarges an array when these two axes are in tiles."""
    tile, num_rows, num_columns = _tile_rows(shape[rows], dtype), shape[rows], shape[columns]
    return _round_up(num_rows, tile) / max(num_rows, 1) * _round_up(num_columns, _LANES) / max(num_columns, 1)


def _tile_rows(num_rows: int, dtype: Any) -> int:
    return _SUBLANES if num_rows > _SUBLANES // 2 else max(_packing(dtype), 1 << max(num_rows - 1, 0).bit_length())


def _packing(dtype: Any) -> int:
    """Return how many elements share a word of 32 bits."""
    return max(1, _WORD_BITS // item_bits(dtype))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


# --- Slices of host memory on GPUs ------------------------------------------------------------------------------------
#
# XLA for GPUs replaces a slice of host memory inside a loop by a copy, whose offset it derives from the loop counter.
# In jaxlib 0.10.2 and 0.11.0 it ignores arithmetic between the counter and the index. The backward pass of a scan reads
# entry `n - 1 - i` and gets entry `i`, so gradients are wrong and nothing fails. Programs that these versions compile
# for an H100 show the wrong offset; those of 0.11.1, 0.11.2 and 0.12.0.1 show the right one. Source: openxla/xla pull
# requests 46231 (report) and 46308 (fix).
#
# Version numbers do not describe nightly or vendor builds of XLA, so a small program decides.


def check_host_slices() -> None:
    """Raise if a loop on the GPU that a program is traced for reads slices of host memory at a wrong offset.

    The first call of a process compiles and runs two programs of a few kilobytes. Later calls, and calls for other
    platforms or absent devices, cost nothing.

    Raises:
        PlacementError: if the gradients of a small scan change when its residuals are kept in host memory.
    """
    if (device := local_gpu()) is not None:
        _check_gpu(device)


def local_gpu() -> Any | None:
    """Return a GPU of this process if the program is traced for GPUs that are present, else None."""
    device = traced_device()
    return jax.local_devices()[0] if device.platform == "gpu" and device in jax.devices() else None


@functools.cache
def _check_gpu(device: Any) -> None:
    # A new thread has none of the caller's traces, meshes and settings.
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        offloaded, reference = executor.map(functools.partial(_gradients, device), (True, False))
    if not np.allclose(offloaded, reference, rtol=1e-3, atol=1e-5):
        raise PlacementError(
            f"with JAX {jax.__version__} this GPU gives wrong gradients when a loop reads values from host memory",
            got=f"a difference of up to {np.max(np.abs(offloaded - reference)):.2g}",
            hint="install JAX 0.11.1 or newer (it needs Python 3.12), or set "
            "XLA_FLAGS=--xla_disable_hlo_passes=dynamic-slice-annotator before JAX starts",
        )


def _gradients(device: Any, is_offloaded: bool) -> np.ndarray:
    """Differentiate a scan whose steps all differ, so that reading the residual of a wrong step changes the result."""
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
