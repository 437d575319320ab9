"""Compile targets: the hardware that a program is compiled for, present or absent.

A target has a platform, a number of JAX devices, the bytes that a program may use on each, and known speeds. Hardware
need not be present: libtpu compiles for described TPUs, and XLA's CUDA plugin with `ptxas` for described GPUs. Figures
and their origins are in `chips.toml`; `_catalogue.py` reads them and parses names of chips.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import math
import os
import re
import shutil
from collections.abc import Mapping
from typing import Any, Literal, TypedDict, Unpack, cast, get_args

from ..core import (
    ConfigError,
    TargetError,
    check_choice,
    check_integer,
    check_number,
    check_type,
    format_bytes,
    parse_bytes,
)
from ._catalogue import Chip, catalogue, gpu_topology, parse_name

Platform = Literal["cpu", "gpu", "tpu"]

_SIZES = ("device_bytes", "hbm_bytes", "host_bytes", "reserve_bytes")
_RATES = ("hbm_bandwidth", "flops", "host_link_bandwidth")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """Hardware to compile for; made by `target`. Figures are per JAX device; None means unknown.

    Examples:
        >>> target("cpu").platform
        'cpu'
    """

    name: str
    """The canonical name: ``here``, ``cpu``, or a chip with its topology, such as ``v5e:2x2`` or ``h100:8``."""
    platform: Platform
    """The platform that programs are compiled for."""
    chip: str
    """The chip: ``v5e``, ``h100``, or the device kind that JAX reports for hardware that is present."""
    num_devices: int
    """Number of JAX devices (two per chip on v2, v3 and tpu7x)."""
    device_bytes: int | None
    """Bytes that a program may use on one JAX device, or None when unknown (a CPU's memory belongs to the system).

    Hardware that is present: the limit of JAX's allocator. Absent TPU: the "available HBM" of libtpu 0.0.51. Absent
    GPU: the share of `hbm_bytes` that JAX's allocator takes (JAX documentation, GPU memory allocation). The share is
    ``XLA_CLIENT_MEM_FRACTION`` (older: ``XLA_PYTHON_CLIENT_MEM_FRACTION``) when the target is made, or 0.75 without
    these variables, and at most 1. With ``XLA_PYTHON_CLIENT_PREALLOCATE=false`` the allocator grows up to this share
    (openxla/xla, gpu_helpers.cc). ``XLA_PYTHON_CLIENT_ALLOCATOR=platform`` has no limit, but this figure ignores it.
    """
    chip_config_name: str | None = None
    """How libtpu groups a chip's cores into devices; None for libtpu's default."""
    hbm_bytes: int | None = None
    """Physical memory of one JAX device; on a GPU as CUDA reports it, which is less than the vendor's round number."""
    hbm_bandwidth: int | None = None
    """Bytes per second between the chip and its memory."""
    flops: int | None = None
    """Dense bf16 operations per second, the vendor's peak."""
    host_link_bandwidth: int | None = None
    """Bytes per second between device and host memory, each way; for most chips the link's nominal rate."""
    host_bytes: int | None = None
    """Host memory per JAX device on `machine`."""
    machine: str | None = None
    """The machine type to which `host_bytes` applies; other machine types may have the same chip."""
    reserve_bytes: int = 0
    """Bytes of `device_bytes` to keep free."""
    sources: tuple[str, ...] = ()
    """Origin of each figure, as text ``figure: origin``."""

    @property
    def budget_bytes(self) -> int | None:
        """Bytes of one device that a program may use: `device_bytes` less `reserve_bytes`; None when unknown."""
        return None if self.device_bytes is None else self.device_bytes - self.reserve_bytes

    def devices(self) -> list[Any]:
        """Return the JAX devices to compile for; compile-only devices if the hardware is not present.

        Returns:
            `num_devices` devices, in JAX's order. `lowtide.memory.analyze` accepts meshes and shardings of them.

        Raises:
            TargetError: when the hardware is not present, and its compiler is not installed or refuses the target.
        """
        import jax

        if self.name == "here":
            return jax.devices()
        if self.name == "cpu":
            return jax.devices("cpu")
        if self.platform == "gpu":
            hbm_bytes = self.hbm_bytes or catalogue().chips[self.chip].hbm_bytes
            assert hbm_bytes is not None, f"{self.chip} has no memory"
            return list(_gpu_devices(self.name, self.chip, self.num_devices, hbm_bytes))
        return list(_tpu_devices(self.name, self.chip_config_name))

    @property
    def is_ahead_of_time(self) -> bool:
        """Whether the hardware is only described, so that programs can be compiled but not run."""
        return self.name not in ("here", "cpu")


class Figures(TypedDict, total=False):
    """Figures that a caller of `target` may set in place of the catalogue's figures."""

    device_bytes: int | str
    hbm_bytes: int | str
    host_bytes: int | str
    reserve_bytes: int | str
    hbm_bandwidth: float | str
    flops: float | str
    host_link_bandwidth: float | str


def target(name: str = "here", **figures: Unpack[Figures]) -> Target:
    """Return the compile target with this name.

    Args:
        name: ``"here"`` (the default backend, all its devices), ``"cpu"``, a TPU chip and topology ``AxB`` or ``AxBxC``
            (``"v5e:2x2"``, ``"v5p:2x2x1"``, ``"tpu7x:2x2x1"``), or a GPU and a count (``"h100:8"``, ``"a100-80"``,
            ``"rtx 4090"``). A bare chip name means one chip.
        **figures: figures of the target that differ from the catalogue's, per JAX device: `device_bytes`, `hbm_bytes`,
            `host_bytes`, `reserve_bytes` (sizes such as ``"14 GiB"``, or bytes), `hbm_bandwidth`,
            `host_link_bandwidth` (bytes per second, or text such as ``"25 GB/s"``), `flops` (per second, in bf16).

    Returns:
        The target. `targets` lists a target for each chip.

    Raises:
        TargetError: for a name that is empty, unknown or ambiguous; for a topology that no machine has; or when the
            compiler (libtpu; XLA's CUDA plugin and `ptxas`) is not installed.
        ConfigError: for a figure that is unknown or invalid, or conflicts with another figure; or for an environment
            variable ``XLA_CLIENT_MEM_FRACTION`` that is not a number above 0.

    Examples:
        >>> target("cpu").device_bytes is None
        True
        >>> target("cpu", device_bytes="14 GiB", reserve_bytes="1 GiB").budget_bytes
        13958643712
    """
    overrides = _read_figures(cast("dict[str, Any]", figures))
    if name == "here":
        return _override_figures(_here(), overrides)
    if name == "cpu":
        return _override_figures(_cpu(), overrides)
    chip, topology = parse_name(name)
    goal = _override_figures(_ahead_of_time_target(chip, topology), overrides)
    # The compiler decides whether the topology exists, and how many devices it has.
    return dataclasses.replace(goal, num_devices=len(goal.devices()))


def targets() -> tuple[Target, ...]:
    """Return targets for this machine, for its CPU, and for a single chip of each entry of the catalogue.

    Returns:
        ``here``, ``cpu``, TPUs, GPUs. TPUs and GPUs come from the catalogue, with the topology of one chip. Their
        compilers need not be installed.

    Raises:
        ConfigError: for an environment variable ``XLA_CLIENT_MEM_FRACTION`` that is not a number above 0.

    Examples:
        >>> [goal.name for goal in targets()][:4]
        ['here', 'cpu', 'v2:1x1', 'v3:1x1']
    """
    present = list[Target]()
    with contextlib.suppress(TargetError):  # a backend that Lowtide does not know
        present.append(_here())
    return (*present, _cpu(), *catalogue_targets())


def catalogue_targets() -> tuple[Target, ...]:
    """Return a target for a single chip of each entry of the catalogue, as `targets` does, without calling JAX."""
    return tuple(_ahead_of_time_target(chip, chip.smallest) for chip in catalogue().chips.values())


def resolve_target(target_or_name: Target | str | None) -> Target:
    """Return the target of an argument: a `Target`, a name, or None for ``"here"``; errors are those of `target`."""
    if isinstance(target_or_name, Target):
        return target_or_name
    name = "here" if target_or_name is None else target_or_name
    hint = "call the function once for each target"
    check_type("target", name, str, 'one name such as "v5e:2x2", a Target or None', hint=hint, error=TargetError)
    return target(name)


def limit_bytes(target: Target, budget: int | str | None) -> int:
    """Return a budget in bytes, or the target's usable bytes; raise `ConfigError` if they are unknown or below 1."""
    limit: Any = parse_bytes(budget) if isinstance(budget, str) else target.budget_bytes if budget is None else budget
    if limit is None:
        name = "this machine" if target.name == "here" else target.name
        raise ConfigError(f"the memory of {name} is unknown", hint='set a limit: budget="14 GiB" or --budget "14 GiB"')
    check_integer("budget", limit, hint='budget="14 GiB", or None for all usable bytes')
    return limit


def _here() -> Target:
    import jax

    devices = jax.devices()
    platform = jax.default_backend()
    hint = 'choose another backend with JAX_PLATFORMS, or another target such as "cpu"'
    check_choice("JAX's default backend", platform, get_args(Platform), hint=hint, error=TargetError)
    # Only this process's own devices report their memory.
    local = [device for device in devices if getattr(device, "process_index", 0) == jax.process_index()]
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in local] if platform != "cpu" else [None]
    # A program has to fit on every device, so the smallest limit counts; None if any limit is unknown.
    known_limits = [limit for limit in limits if limit]
    chip = catalogue().of_kind(devices[0].device_kind)
    return Target(
        name="here",
        platform=cast(Platform, platform),
        chip=devices[0].device_kind,
        num_devices=len(devices),
        device_bytes=min(known_limits) if len(known_limits) == len(limits) else None,
        **_chip_figures(chip),
    )


def _cpu() -> Target:
    import jax

    return Target(name="cpu", platform="cpu", chip="cpu", num_devices=len(jax.devices("cpu")), device_bytes=None)


def _chip_figures(chip: Chip | None) -> dict[str, Any]:
    if chip is None:
        return {}
    sources = tuple(f"{figure}: {origin}" for figure, origin in chip.sources if figure != "device_bytes")
    return {**{figure: getattr(chip, figure) for figure in ("hbm_bytes", *_RATES)}, "sources": sources}


def _ahead_of_time_target(chip: Chip, topology: str) -> Target:
    chips = int(topology) if chip.platform == "gpu" else math.prod(map(int, topology.split("x")))
    figures = _chip_figures(chip)
    device_bytes = chip.device_bytes
    sources = [f"device_bytes: {origin}" for figure, origin in chip.sources if figure == "device_bytes"]
    if chip.platform == "gpu":
        assert chip.hbm_bytes is not None, f"{chip.name} has no memory"
        device_bytes = int(chip.hbm_bytes * _memory_fraction())
        sources.append(f"device_bytes: {_memory_fraction():g} of hbm_bytes, JAX's memory fraction")
    machine = chip.machine(chips)
    if machine is not None:
        figures["machine"] = machine.name
        figures["host_bytes"] = machine.host_bytes // (machine.num_chips * chip.devices_per_chip)
        sources.append(f"host_bytes: {machine.source}")
    figures["sources"] += tuple(sources)
    return Target(
        name=chip.name if chip.platform == "gpu" and chips == 1 else f"{chip.name}:{topology}",
        platform=chip.platform,
        chip=chip.name,
        num_devices=chips * chip.devices_per_chip,
        device_bytes=device_bytes,
        chip_config_name=chip.chip_config_name,
        **figures,
    )


def _override_figures(goal: Target, overrides: dict[str, int]) -> Target:
    """Replace figures; raise `ConfigError` unless `reserve_bytes` < `device_bytes` <= `hbm_bytes`, where known."""
    if not overrides:
        return goal
    changed: dict[str, Any] = dict(overrides)
    is_ahead_of_time_gpu = goal.platform == "gpu" and goal.is_ahead_of_time
    if is_ahead_of_time_gpu and "hbm_bytes" in overrides and "device_bytes" not in overrides:
        # device_bytes is a share of hbm_bytes, so it changes with the caller's hbm_bytes.
        changed["device_bytes"] = int(overrides["hbm_bytes"] * _memory_fraction())
    sources = tuple(source for source in goal.sources if source.partition(":")[0] not in overrides)
    goal = dataclasses.replace(goal, **changed, sources=sources + tuple(f"{figure}: given" for figure in overrides))
    if goal.device_bytes is None:
        return goal
    usable = f"{goal.device_bytes:,} bytes ({format_bytes(goal.device_bytes)})"
    if goal.hbm_bytes is not None and goal.device_bytes > goal.hbm_bytes:
        problem = f"device_bytes of {goal.name!r} is {usable}, more than its physical memory"
        hint = "also give hbm_bytes if the device has more memory than the catalogue says"
        raise ConfigError(f"{problem}: hbm_bytes is {goal.hbm_bytes:,}", hint=hint)
    if goal.reserve_bytes >= goal.device_bytes:
        problem = f"reserve_bytes of {goal.name!r} must be below device_bytes, which is {usable}"
        hint = "reserve less: reserve_bytes stays free on each device"
        raise ConfigError(f"{problem}, not {goal.reserve_bytes:,}", hint=hint)
    return goal


def _memory_fraction() -> float:
    """Return the share of a GPU's memory that JAX's allocator takes, from the variables that jaxlib 0.10.2 reads."""
    for variable in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        text = os.environ.get(variable)
        if not text:
            continue
        with contextlib.suppress(ValueError):
            if float(text) > 0:
                return min(float(text), 1.0)  # above 1, XLA adds host memory
        hint = "unset it, or set it to the share of memory that JAX may take, such as 0.9"
        raise ConfigError(f"the environment variable {variable} must be a number above 0, not {text!r}", hint=hint)
    return 0.75


@functools.lru_cache(maxsize=64)
def _tpu_devices(name: str, chip_config_name: str | None) -> tuple[Any, ...]:
    from ..core._compat import tpu_topology_devices

    if importlib.util.find_spec("libtpu") is None:
        problem = f"{name!r} needs libtpu, which compiles without a TPU, but libtpu is not installed"
        raise TargetError(problem, hint='pip install "lowtide[tpu-aot]"')
    try:
        return tuple(tpu_topology_devices(name, chip_config_name=chip_config_name))
    except Exception as error:  # libtpu raises various types; the first line is the reason
        problem = f"libtpu refuses the topology {name!r}: {str(error).splitlines()[0]}"
        hint = "v2, v3, v5e and v6e have 1x1, 2x2, 2x4, 4x4, ...; v4, v5p and tpu7x have 1x1x1, 2x2x1, 2x2x2, ..."
        raise TargetError(problem, hint=hint) from error


@functools.lru_cache(maxsize=64)
def _gpu_devices(name: str, chip_name: str, num_gpus: int, hbm_bytes: int) -> tuple[Any, ...]:
    from ..core._compat import gpu_topology_devices

    chip = catalogue().chips[chip_name]
    problem = f"{name!r} needs JAX's CUDA plugin (and no GPU), but the plugin is not installed or too old"
    missing = TargetError(problem, hint='pip install "lowtide[gpu-aot]"')
    if all(importlib.util.find_spec(plugin) is None for plugin in ("jax_cuda13_plugin", "jax_cuda12_plugin")):
        raise missing
    if _find_ptxas() is None:
        hint = 'pip install "lowtide[gpu-aot]", or put the bin folder of a CUDA toolkit on PATH'
        raise TargetError(f"{name!r} needs NVIDIA's assembler ptxas, which is not on PATH", hint=hint)
    partitions, hosts, devices = gpu_topology(chip, num_gpus)
    try:
        config = chip.gpu_target_config(hbm_bytes)
        return tuple(gpu_topology_devices(config, partitions=partitions, hosts=hosts, devices=devices))
    except NotImplementedError as error:
        raise missing from error
    except Exception as error:  # XLA's first line is the reason
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        hint = "install jax 0.10.2, with which descriptions are checked, or report the error"
        raise TargetError(f"XLA rejects the description of {name!r}: {reason}", hint=hint) from error


def _find_ptxas() -> str | None:
    """Return the path of NVIDIA's assembler, or None; add its folder to PATH if XLA would not find it.

    XLA runs `ptxas` for every kernel. XLA searches ``--xla_gpu_cuda_data_dir``, PATH, ``/usr/local/cuda``,
    ``/opt/cuda`` and the wheels next to its plugin, but not other wheels on `sys.path` (a user's folder below a virtual
    environment).
    """
    folders = re.findall(r"--xla_gpu_cuda_data_dir=(\S+)", os.environ.get("XLA_FLAGS", ""))
    toolkits = [f"{root}/bin" for root in (*folders, "/usr/local/cuda", "/opt/cuda")]
    path = shutil.which("ptxas") or shutil.which("ptxas", path=os.pathsep.join(toolkits))
    if path is not None:
        return path
    plugin_parents = {os.path.dirname(folder) for folder in _package_folders("jax_plugins")}
    for root in _package_folders("nvidia"):
        folder = os.pathsep.join((f"{root}/cu13/bin", f"{root}/cuda_nvcc/bin"))
        if (path := shutil.which("ptxas", path=folder)) is not None:
            if os.path.dirname(root) not in plugin_parents:
                os.environ["PATH"] = os.pathsep.join((os.environ.get("PATH", os.defpath), os.path.dirname(path)))
            return path
    return None


def _package_folders(package: str) -> list[str]:
    spec = importlib.util.find_spec(package)
    return list(spec.submodule_search_locations or []) if spec else []


def _read_figures(values: Mapping[str, object]) -> dict[str, int]:
    """Return sizes in bytes and rates per second as whole numbers; values may be text, and None values are left out."""
    figures: dict[str, int] = {}
    for name, value in values.items():
        hint = 'give the number of devices in the name, as in "h100:8"' if name.startswith("num") else None
        check_choice("a figure of a target", name, (*_SIZES, *_RATES), hint=hint)
        if name in _RATES and value is not None:
            figures[name] = _rate(name, value)
        elif value is not None:
            figures[name] = parse_bytes(value if isinstance(value, int) else str(value))
            least = 0 if name == "reserve_bytes" else 1
            check_integer(name, figures[name], least, hint=f"leave {name} out if it is unknown")
    return figures


def _rate(name: str, value: object) -> int:
    if isinstance(value, str) and name != "flops":
        value = parse_bytes(value.strip().removesuffix("/s"))
    rate: Any = value
    with contextlib.suppress(TypeError, ValueError):
        rate = value if isinstance(value, bool) else float(rate)
    unit = "operations per second" if name == "flops" else 'bytes per second, or text such as "25 GB/s"'
    check_number(name, rate, least=1, hint=f"give {unit}; leave {name} out for the catalogue's figure")
    return int(rate)
