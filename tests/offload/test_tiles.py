"""Numbers of 8 and 4 bits in a TPU's host memory: streamed where libtpu was told so, else a warning."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import lowtide as lt
from lowtide.core import LOW_TILES, PlacementWarning, choose_low_tiles, has_tall_tiles
from lowtide.memory import compile
from lowtide.offload import to_host

MIB = 2**20
_COPY = re.compile(r"%(?:copy|copy-start)[.0-9]* = \(?(\w+\[[\d,]*\]\{[^}]*\}), (\w+\[[\d,]*\]\{[^}]*\})")


def layers(dtype: Any, device: Any, num_layers: int = 8) -> Any:
    place = jax.sharding.SingleDeviceSharding(device)
    return to_host({"w": jax.ShapeDtypeStruct((num_layers, 1024, 1024), dtype, sharding=place)})


def forward(layers: Any, x: Any) -> Any:
    return lt.offload.scan(lambda h, layer: (jnp.tanh(h @ layer["w"].astype(jnp.bfloat16)), None), x, layers)[0]


def moved(program: Any, least: int = MIB) -> list[str]:
    """Arrays of so many numbers that a program copies between the memories, slices left out."""
    pairs = _COPY.findall(program.compiled.as_text())
    return [one for one, other in pairs if ("S(5)" in one) != ("S(5)" in other) and size(one) >= least]


def size(shape: str) -> int:
    numbers = 1
    for length in re.findall(r"\d+", shape[shape.index("[") : shape.index("]")]):
        numbers *= int(length)
    return numbers


@pytest.mark.tpu_aot
@pytest.mark.parametrize(("rows", "is_tall"), [(1024, True), (1000, False)])
def test_what_is_copied_as_a_whole_is_told(rows: int, is_tall: bool, tpu_device: Any) -> None:
    place = jax.sharding.SingleDeviceSharding(tpu_device)
    stack = to_host({"w": jax.ShapeDtypeStruct((4, rows, 128), jnp.int8, sharding=place)})
    x = jax.ShapeDtypeStruct((8, rows), jnp.bfloat16, sharding=place)

    def fn(layers: Any, x: Any) -> Any:
        def body(h: Any, layer: Any) -> Any:
            return h + (h @ layer["w"].astype(jnp.bfloat16)).sum(), None

        return lt.offload.scan(body, x, layers)[0]

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        program = compile(fn, stack, x, target="v5e")
    found = [str(each.message) for each in said if issubclass(each.category, PlacementWarning)]
    assert bool(found) == is_tall == has_tall_tiles((4, rows, 128), jnp.int8)
    assert bool(moved(program, 4 * rows * 128)) == is_tall
    if is_tall:
        assert "w: int8[4, 1024, 128]" in found[0] and LOW_TILES in found[0]


@pytest.mark.slow
@pytest.mark.tpu_aot
def test_codes_that_are_not_streamed_are_moved_once(tpu_device: Any) -> None:
    with pytest.warns(PlacementWarning, match=r"mu/w/codes: uint8\[8, 1024, 1024\].*not streamed"):
        program = update("8bit", tpu_device)
    assert len(moved(program)) == 4  # of two moments, to the device and back
    assert program.report().device.temp_bytes < 30 * MIB


def update(form: str, device: Any) -> Any:
    """An update of one stack, compiled, its codes on the host."""
    place = jax.sharding.SingleDeviceSharding(device)
    tx = lt.offload.optimizer(lt.optim.low_precision(optax.adamw(1e-3), form), match=r".*/codes", chunk_bytes="1 MiB")
    params = {"w": jax.ShapeDtypeStruct((8, 1024, 1024), jnp.float32, sharding=place)}
    with jax.default_device(device):
        state = jax.eval_shape(tx.init, params)
    state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), state)
    program = compile(tx.update, params, to_host(state, "**/codes"), params, target="v5e", donate_argnums=(0, 1))
    lt.offload.verify(program, {"1/**/codes": "host"})
    return program


def test_a_variable_that_is_set_is_added_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name, flag = LOW_TILES.split("=", 1)
    library = tmp_path / "libtpu.so"
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(library))
    for content in (None, b"x" * 999):  # no library, and one that does not know the flag
        if content is not None:
            library.write_bytes(content)
        monkeypatch.setenv(name, "")
        choose_low_tiles()
        assert os.environ[name] == ""
    library.write_bytes(b"x" * 999 + flag.partition("=")[0].removeprefix("--").encode() + b"y")
    monkeypatch.setenv(name, "--xla_tpu_other=1")
    choose_low_tiles()
    choose_low_tiles()
    assert os.environ[name] == f"--xla_tpu_other=1 {flag}"
    assert not has_tall_tiles((64, 64), jnp.int8)
    monkeypatch.setenv(name, flag.replace("false", "true"))
    choose_low_tiles()
    assert os.environ[name] == flag.replace("false", "true")
    assert has_tall_tiles((64, 64), jnp.int8)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.tpu_aot
def test_told_so_nothing_is_copied_as_a_whole() -> None:
    name, flag = LOW_TILES.split("=", 1)
    environment = {**os.environ, name: flag, "JAX_PLATFORMS": "cpu"}
    child = subprocess.run([sys.executable, "-W", "error", __file__], env=environment, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr[-3000:]
    assert child.stdout.count("streamed") == 6


def _main() -> None:
    device = lt.target("v5e").devices()[0]
    place = jax.sharding.SingleDeviceSharding(device)
    x = jax.ShapeDtypeStruct((64, 1024), jnp.bfloat16, sharding=place)
    for dtype in (jnp.int8, jnp.int4, jnp.float8_e4m3fn):
        program = compile(forward, layers(dtype, device), x, target="v5e")
        assert not moved(program)
        assert program.report().device.temp_bytes < 4 * MIB, program.report().device
        print("streamed", jnp.dtype(dtype).name)
    for form in ("8bit", "4bit"):
        program = update(form, device)
        assert not moved(program)
        assert program.report().device.temp_bytes < 8 * MIB, program.report().device
        print("streamed", form)
    stack = lt.LayerStack(
        first=lambda outer, batch: batch["x"],
        block=lambda layer, h, batch: h + jnp.tanh(h @ layer["w"]),
        last=lambda outer, h, batch: (jnp.mean(h.astype(jnp.float32) ** 2), {}),
    )
    tx = lt.optim.low_precision(optax.adamw(1e-3), "8bit", weights="split")
    step = lt.offload.layerwise_step(stack, tx, chunk_bytes="1 MiB")
    state, frozen = step.init({}, {"w": jax.ShapeDtypeStruct((8, 1024, 1024), jnp.bfloat16)})
    program = compile(step, state, frozen, {"x": x}, target="v5e", donate_argnums=0)
    assert not moved(program, 4 * MIB)
    print("streamed layers")


if __name__ == "__main__":
    _main()
