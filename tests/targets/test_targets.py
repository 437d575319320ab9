"""Targets: names, capacities, and refusals that say what would work."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from lowtide.core import ConfigError, TargetError, _compat
from lowtide.memory import Target, target, targets
from lowtide.targets import _targets
from lowtide.targets._catalogue import catalogue, normalize_name
from lowtide.targets._targets import _find_ptxas, _gpu_devices

GIB = 2**30


def test_here_and_cpu_are_the_cpu_backend_without_a_capacity() -> None:
    for name in ("here", "cpu"):
        goal = target(name)
        assert (goal.name, goal.platform, goal.device_bytes) == (name, "cpu", None)
        assert goal.num_devices == len(goal.devices()) == len(jax.devices())
        assert not goal.is_ahead_of_time


def test_here_takes_the_smallest_limit_that_the_allocator_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        device_kind = "NVIDIA H100"

        def __init__(self, stats: dict[str, int] | None) -> None:
            self.stats = stats

        def memory_stats(self) -> dict[str, int] | None:
            return self.stats

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [Device({"bytes_limit": 7 * GIB}), Device({"bytes_limit": 6 * GIB})])
    assert target("here") == Target(
        name="here", platform="gpu", chip="NVIDIA H100", num_devices=2, device_bytes=6 * GIB
    )
    monkeypatch.setattr(jax, "devices", lambda: [Device({"bytes_limit": 7 * GIB}), Device(None)])
    assert target("here").device_bytes is None


def test_unknown_backend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "METAL")
    with pytest.raises(TargetError, match=r"default backend must be .*, not 'METAL'\nhint: "):
        target("here")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", r"name is empty[\s\S]*hint: use \"here\""),
        ("   ", r"name is empty"),
        ("hree", r"unknown target 'hree'[\s\S]*hint: near misses: here"),
        ("v5l:2x2", r"unknown target 'v5l:2x2'[\s\S]*hint: near misses: .*v5e:2x2"),
        ("v5litepod-4", r"near misses: v5e"),
        ("trillium", r"near misses: v6e"),
        ("v99:2x2", r"unknown target 'v99:2x2'[\s\S]*chips: v2, v3, v4, v5p, v5e, v6e, tpu7x"),
        ("a100", r"'a100' stands for GPUs with different memory\nhint: write \"a100-40\" or \"a100-80\"$"),
        ("A100:8", r"hint: write \"a100-40:8\" or \"a100-80:8\"$"),
        ("mi300x", r"cannot compile for the GPU 'mi300x': JAX has no AMD compiler[\s\S]*hint: use \"here\""),
        ("V100:8", r"cannot compile for the GPU 'V100:8': CUDA 13 no longer"),
        ("cuda", r"does not say which GPU"),
        ("nvidia", r"does not say which GPU"),
        (
            "t4",
            r"'t4' is a GPU that is not in the catalogue[\s\S]*GPUs such as \"h100:8\" \(chips: a100-40, a100-80, h100",
        ),
        ("rtx 4080", r"is a GPU that is not in the catalogue[\s\S]*near misses: rtx4090"),
        ("h10", r"unknown target 'h10'[\s\S]*hint: near misses: h100"),
        ("gb20", r"near misses: gb200"),
        (":8", r"name is empty"),
        ("---", r"unknown target '---'"),
        ("h100:", r"'h100:' has no valid number of GPUs[\s\S]*expected: h100:N with N up to 8"),
        ("h100:0", r"'h100:0' has no valid number of GPUs"),
        (
            "h100:2x4",
            r"'h100:2x4' has no valid number of GPUs[\s\S]*hint: write \"h100\" for one GPU or \"h100:8\" for one host",
        ),
        ("h100:12", r"'h100:12' has no valid number of GPUs[\s\S]*multiple of 8, below 100000"),
        ("h100:999999999999", r"has no valid number of GPUs"),
        ("gb200:76", r"'gb200:76' has no valid number of GPUs[\s\S]*a multiple of 4 \(above 72: of 72\)"),
        ("v5e:", r"'v5e:' has no valid topology[\s\S]*hint: write \"v5e:1x1\""),
        ("v5e:4", r"'v5e:4' has no valid topology"),
        ("v5e:0x1", r"'v5e:0x1' has no valid topology"),
        ("v5e:2x-2", r"has no valid topology"),
        ("v5p:2x2x2x2", r"has no valid topology"),
    ],
)
def test_wrong_names_list_what_would_work(name: str, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        target(name)


def test_missing_libtpu_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TargetError, match=r'needs libtpu[\s\S]*hint: pip install "lowtide\[tpu-aot\]"'):
        target("v6e:8x16")


@pytest.mark.tpu_aot
@pytest.mark.parametrize(
    ("name", "canonical", "num_devices", "gib"),
    [
        ("v2:2x2", "v2:2x2", 8, 7.48),
        ("v3", "v3:1x1", 2, 15.48),
        ("v4:2x2x1", "v4:2x2x1", 4, 30.75),
        ("v5p", "v5p:1x1x1", 1, 95.73),
        ("v5e", "v5e:1x1", 1, 15.75),
        (" V5E:2x2 ", "v5e:2x2", 4, 15.75),
        ("v6e:4x4", "v6e:4x4", 16, 31.24),
        ("tpu7x:2x2x1", "tpu7x:2x2x1", 8, 94.74),
    ],
)
def test_tpu_names(name: str, canonical: str, num_devices: int, gib: float) -> None:
    goal = target(name)
    assert (goal.name, goal.platform, goal.num_devices) == (canonical, "tpu", num_devices)
    assert goal.device_bytes == int(gib * GIB)
    assert goal.is_ahead_of_time
    assert [device.platform for device in goal.devices()] == ["tpu"] * num_devices


@pytest.mark.tpu_aot
def test_refused_topology_gives_the_reason() -> None:
    with pytest.raises(
        TargetError, match=r"libtpu refuses the topology 'v5e:3x3': .*not divisible.*\nhint: v2, v3, v5e and v6e have "
    ):
        target("v5e:3x3")


# --- GPUs ----------------------------------------------------------------------------------------------------------


def executable(path: Path) -> Path:
    path.parent.mkdir(parents=True)
    path.write_text("#!/bin/sh\n", encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.fixture
def only_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose toolkits, wheels and PATH lie below `tmp_path`."""
    which = shutil.which

    def below(name: str, path: str | None = None) -> str | None:
        folders = (os.environ["PATH"] if path is None else path).split(os.pathsep)
        return which(name, path=os.pathsep.join(f for f in folders if f.startswith(str(tmp_path))) or "/nowhere")

    def find_spec(name: str) -> Any:
        folders = [str(f) for f in tmp_path.glob(f"*/{name}")]
        return SimpleNamespace(submodule_search_locations=folders) if folders else None

    monkeypatch.setattr(shutil, "which", below)
    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("XLA_FLAGS", f"--xla_gpu_cuda_data_dir={tmp_path}/toolkit --xla_dump_to=x")
    return tmp_path


def test_ptxas_is_found_where_xla_looks(only_below: Path) -> None:
    path = os.environ["PATH"]
    assert _find_ptxas() is None
    (only_below / "site" / "jax_plugins").mkdir(parents=True)
    wheel = executable(only_below / "site" / "nvidia" / "cu13" / "bin" / "ptxas")
    assert _find_ptxas() == str(wheel)
    toolkit = executable(only_below / "toolkit" / "bin" / "ptxas")
    assert _find_ptxas() == str(toolkit)
    on_path = executable(only_below / "bin" / "ptxas")
    assert _find_ptxas() == str(on_path)
    assert os.environ["PATH"] == path


def test_ptxas_that_xla_would_miss_is_put_on_path(only_below: Path) -> None:
    path = os.environ["PATH"]
    (only_below / "site" / "jax_plugins").mkdir(parents=True)
    wheel = executable(only_below / "user" / "nvidia" / "cuda_nvcc" / "bin" / "ptxas")
    for _ in range(2):
        assert _find_ptxas() == str(wheel)
        assert os.environ["PATH"] == f"{path}{os.pathsep}{wheel.parent}"


def test_missing_cuda_plugin_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    _gpu_devices.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TargetError, match=r'CUDA plugin[\s\S]*hint: pip install "lowtide\[gpu-aot\]"'):
        target("h200:8")


@pytest.mark.gpu_aot
def test_missing_ptxas_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    _gpu_devices.cache_clear()
    monkeypatch.setattr(_targets, "_find_ptxas", lambda: None)
    with pytest.raises(TargetError, match=r'assembler ptxas[\s\S]*hint: pip install "lowtide\[gpu-aot\]", or put'):
        target("h100")


@pytest.mark.gpu_aot
@pytest.mark.parametrize(
    "failure", [NotImplementedError("topology not implemented for cuda"), ValueError("no such field\nline two")]
)
def test_plugin_without_topologies_is_refused(monkeypatch: pytest.MonkeyPatch, failure: Exception) -> None:
    def fail(*args: Any, **kwargs: Any) -> list[Any]:
        raise failure

    _gpu_devices.cache_clear()
    monkeypatch.setattr(_compat, "gpu_topology_devices", fail)
    message = r"too old\nhint: pip" if isinstance(failure, NotImplementedError) else r"'h100': no such field\nhint: "
    with pytest.raises(TargetError, match=message):
        target("h100")


@pytest.mark.gpu_aot
@pytest.mark.parametrize(
    ("name", "canonical", "num_devices", "num_hosts"),
    [
        ("h100", "h100", 1, 1),
        ("h100:1", "h100", 1, 1),
        (" H100:8 ", "h100:8", 8, 1),
        ("h100:3", "h100:3", 3, 1),
        ("h100:16", "h100:16", 16, 2),
        ("NVIDIA H100 80GB", "h100", 1, 1),
        ("a100-80gb", "a100-80", 1, 1),
        ("A100_40:4", "a100-40:4", 4, 1),
        ("rtx4090", "rtx4090", 1, 1),
        ("RTX 4090:2", "rtx4090:2", 2, 1),
        ("GeForce RTX 4090", "rtx4090", 1, 1),
        ("4090", "rtx4090", 1, 1),
        ("gb200:8", "gb200:8", 8, 2),
        ("gb200:144", "gb200:144", 144, 36),
        ("L4", "l4", 1, 1),
    ],
)
def test_gpu_names(name: str, canonical: str, num_devices: int, num_hosts: int) -> None:
    goal = target(name)
    assert (goal.name, goal.platform, goal.num_devices) == (canonical, "gpu", num_devices)
    assert goal.is_ahead_of_time
    devices = goal.devices()
    assert [device.platform for device in devices] == ["gpu"] * num_devices
    assert [device.id for device in devices] == list(range(num_devices))
    assert len({device.process_index for device in devices}) == num_hosts


def train(weights: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    def loss(weights: list[jax.Array]) -> jax.Array:
        h = x
        for w in weights:
            h = jnp.tanh(h @ w)
        return (h.astype(jnp.float32) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - (1e-3 * g).astype(w.dtype), weights, grads), value


def shape(*dims: int, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=sharding)


# One GPU of each compute capability in the catalogue: the compiler knows a GPU by its capability.
GPUS = {chip.capability: name for name, chip in catalogue().chips.items() if chip.capability is not None}


@pytest.mark.slow_after(1)
@pytest.mark.gpu_aot
@pytest.mark.parametrize("name", GPUS.values())
def test_a_training_step_compiles_for_every_gpu(name: str) -> None:
    goal = target(name)
    here = SingleDeviceSharding(goal.devices()[0])
    args = ([shape(256, 256, sharding=here)] * 2, shape(64, 256, sharding=here))
    compiled = jax.jit(train, donate_argnums=0).trace(*args).lower(lowering_platforms=("cuda",)).compile()
    stats = compiled.memory_analysis()
    assert goal.devices()[0].device_kind in catalogue().chips[goal.chip].kinds
    assert stats.argument_size_in_bytes == 2 * (2 * 256 * 256 + 64 * 256)
    assert stats.alias_size_in_bytes == 2 * 2 * 256 * 256
    assert stats.temp_size_in_bytes > 0


@pytest.mark.slow_after(1)
@pytest.mark.gpu_aot
@pytest.mark.parametrize(("name", "grid"), [("h100:8", (1, 8)), ("h100:16", (2, 8))])
def test_sharded_step_compiles_without_nccl(name: str, grid: tuple[int, int]) -> None:
    mesh = Mesh(np.array(target(name).devices(), dtype=object).reshape(grid), ("replica", "fsdp"))
    rows = NamedSharding(mesh, PartitionSpec("fsdp"))
    args = ([shape(1024, 1024, sharding=rows)] * 2, shape(64, 1024, sharding=NamedSharding(mesh, PartitionSpec())))
    compiled = jax.jit(train, donate_argnums=0).trace(*args).lower(lowering_platforms=("cuda",)).compile()
    assert compiled.memory_analysis().argument_size_in_bytes == 2 * (2 * 1024 * 1024 // 8 + 64 * 1024)
    assert "all-gather" in compiled.as_text()
    summed = jax.shard_map(
        lambda x: jax.lax.psum(x, "fsdp"), mesh=mesh, in_specs=PartitionSpec("fsdp"), out_specs=PartitionSpec()
    )
    program = jax.jit(summed).trace(shape(64, 8, sharding=rows)).lower(lowering_platforms=("cuda",)).compile()
    assert "all-reduce" in program.as_text()


@pytest.mark.processes
@pytest.mark.gpu_aot
@pytest.mark.tpu_aot
@pytest.mark.parametrize(
    ("first", "platforms"),
    [
        ("jax.devices()", ""),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("jax.devices()", "cpu"), ("None", ""), ("None", "cpu"))
        ),
    ],
)
def test_gpu_and_tpu_targets_live_in_one_fresh_process(platforms: str, first: str) -> None:
    program = f"""
import jax, jax.numpy as jnp
{first}
from lowtide.memory import analyze, target
import os
for name in ("h100", "v5e:2x2", "l4"):
    print(analyze(jnp.tanh, jax.ShapeDtypeStruct((1024,), jnp.float32), target=name).device.argument_bytes)
print(jax.default_backend(), "JAX_SKIP_CUDA_CONSTRAINTS_CHECK" in os.environ)
"""
    environment = {**os.environ, "JAX_PLATFORMS": platforms, "XLA_FLAGS": "", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["4096", "4096", "4096", "cpu", "False"]


# --- figures -------------------------------------------------------------------------------------------------------


def test_targets_lists_the_catalogue_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    known = targets()
    assert [goal.name for goal in known[:5]] == ["here", "cpu", "v2:1x1", "v3:1x1", "v4:1x1x1"]
    assert len({goal.name for goal in known}) == len(known) == 2 + len(catalogue().chips)
    for goal in known[2:]:
        assert goal.device_bytes is not None
        assert goal.hbm_bytes is None or goal.hbm_bytes >= goal.device_bytes
        assert (goal.host_bytes is None) == (goal.machine is None)
        figures = ("device_bytes", "hbm_bytes", "hbm_bandwidth", "flops", "host_link_bandwidth", "host_bytes")
        present = {figure for figure in figures if getattr(goal, figure) is not None}
        assert {source.partition(": ")[0] for source in goal.sources} == present
        assert all(source.partition(": ")[2] for source in goal.sources)
        assert hash(goal) == hash(dataclasses.replace(goal))


@pytest.mark.tpu_aot
def test_listed_tpus_are_what_libtpu_makes_of_them() -> None:
    for goal in targets():
        if goal.platform == "tpu":
            assert goal == target(goal.name)
            assert goal.devices()[0].device_kind in catalogue().chips[goal.chip].kinds


@pytest.mark.tpu_aot
@pytest.mark.parametrize(
    ("name", "machine", "gigabytes"),
    [
        ("v5e", "ct5lp-hightpu-1t", 48),
        ("v5e:2x4", "ct5lp-hightpu-8t", 48),
        ("v5e:4x4", "ct5lp-hightpu-4t", 48),
        ("v6e", "ct6e-standard-1t", 176),
        ("v6e:2x2", "ct6e-standard-4t", 180),
        ("v5p:2x2x1", "ct5p-hightpu-4t", 112),
        ("tpu7x:2x2x1", "tpu7x-standard-4t", 120),
        ("v3", None, None),
    ],
)
def test_host_memory_is_that_of_a_machine(name: str, machine: str | None, gigabytes: int | None) -> None:
    goal = target(name)
    assert (goal.machine, goal.host_bytes) == (machine, None if gigabytes is None else gigabytes * 10**9)


def test_figures_are_per_jax_device() -> None:
    v3 = next(goal for goal in targets() if goal.chip == "v3")
    assert (v3.num_devices, v3.hbm_bytes, v3.hbm_bandwidth, v3.flops) == (2, 16 * GIB, 450 * 10**9, 61_500 * 10**9)


def listed(name: str) -> Target:
    return next(goal for goal in targets() if goal.name == name)


def test_gpu_capacity_follows_the_memory_fraction(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(variable, raising=False)
    assert listed("h100").device_bytes == int(84_942_979_072 * 0.75)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    assert listed("h100").device_bytes == int(84_942_979_072 * 0.75)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", ".9")
    assert listed("h100").device_bytes == int(84_942_979_072 * 0.9)
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "2")
    assert listed("h100").device_bytes == 84_942_979_072
    assert listed("v5e:1x1").device_bytes == int(15.75 * GIB)
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "half")
    with pytest.raises(ConfigError, match=r"XLA_CLIENT_MEM_FRACTION must be a number above 0, not 'half'\nhint: "):
        targets()


def test_here_knows_the_speed_of_a_chip_in_the_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        device_kind = "NVIDIA H100 80GB HBM3"

        def memory_stats(self) -> dict[str, int]:
            return {"bytes_limit": 7 * GIB}

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda *platform: [Device()])
    goal = target("here")
    assert (goal.device_bytes, goal.flops, goal.host_bytes) == (7 * GIB, 989 * 10**12, None)
    # A capacity that is given for hardware at hand stays apart from what its allocator takes.
    assert target("here", hbm_bytes="70 GiB").device_bytes == 7 * GIB


def test_figures_can_be_given() -> None:
    goal = target(
        "cpu",
        device_bytes="14 GiB",
        host_bytes=10**11,
        reserve_bytes="512 MiB",
        host_link_bandwidth="25 GB/s",
        flops=1e12,
    )
    assert (goal.device_bytes, goal.host_bytes, goal.reserve_bytes) == (14 * GIB, 10**11, GIB // 2)
    assert goal.budget_bytes == 14 * GIB - GIB // 2
    assert (goal.host_link_bandwidth, goal.flops, goal.hbm_bandwidth) == (25 * 10**9, 10**12, None)
    assert "flops: given" in goal.sources
    assert target("cpu").budget_bytes is None


@pytest.mark.gpu_aot
def test_given_memory_of_a_gpu_moves_its_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")
    assert target("l4", hbm_bytes="20 GiB").device_bytes == 10 * GIB
    goal = target("l4", hbm_bytes="20 GiB", device_bytes="19 GiB")
    assert (goal.device_bytes, goal.num_devices) == (19 * GIB, 1)
    assert [source for source in goal.sources if source.startswith("device")] == ["device_bytes: given"]


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        (
            {"device_byte": 1},
            r"a figure of a target must be \"device_bytes\", .*\nhint: did you mean \"device_bytes\"\?",
        ),
        ({"zzz": 1}, r"or \"host_link_bandwidth\", not 'zzz'$"),
        ({"num_devices": 8}, r"not 'num_devices'\nhint: give the number of devices in the name"),
        ({"device_bytes": 0}, r"device_bytes must be an integer of at least 1, not 0\nhint: leave device_bytes out"),
        ({"device_bytes": -1}, r"-1 is not a size"),
        ({"hbm_bytes": "many"}, r"'many' is not a size"),
        ({"flops": 0}, r"flops must be a finite number of at least 1, not 0\.0"),
        ({"flops": "fast"}, r"not 'fast'\nhint: give operations per second; leave flops out"),
        ({"hbm_bandwidth": True}, r"hbm_bandwidth must be a finite number of at least 1, not True"),
        ({"hbm_bandwidth": math.inf}, r"hbm_bandwidth must be a finite number of at least 1, not inf"),
        ({"host_link_bandwidth": "quick"}, r"'quick' is not a size"),
        (
            {"device_bytes": "2 GiB", "reserve_bytes": "2 GiB"},
            r"reserve_bytes of 'cpu' must be below device_bytes.*2\.00 GiB[\s\S]*hint: ",
        ),
        (
            {"device_bytes": "2 GiB", "hbm_bytes": "1 GiB"},
            r"more than its physical memory: hbm_bytes is 1,073,741,824\n",
        ),
    ],
)
def test_wrong_figures_are_refused(figures: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        target("cpu", **figures)


def test_no_name_or_device_kind_means_two_chips() -> None:
    chips = list(catalogue().chips.values())
    words = [normalize_name(word) for chip in chips for word in (chip.name, *chip.aliases)]
    kinds = [kind for chip in chips for kind in chip.kinds]
    assert len(words) == len(set(words))
    assert len(kinds) == len(set(kinds))
    assert not set(words) & set(catalogue().ambiguous)
