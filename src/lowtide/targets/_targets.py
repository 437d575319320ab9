"""Compile targets: the hardware that a report is about, present or not.

A target names a platform, a number of JAX devices, the bytes that a program may use on each, and known speeds. TPU
targets need no TPU and GPU targets no GPU: libtpu, and XLA's CUDA plugin with `ptxas`, compile for hardware that is
only described. Figures and their origins are in `chips.toml`; `_names.py` reads names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import importlib.util
import math
import os
from collections.abc import Mapping
from typing import Any, Literal, TypedDict, Unpack, cast, get_args

from ..core import ConfigError, TargetError, format_bytes, parse_bytes
from ._catalogue import Chip, catalogue
from ._names import gpu_topology, num_chips, parse_name

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
    """The kind of compiler for it."""
    chip: str
    """The chip: ``v5e``, ``h100``, or the device kind that JAX reports for hardware that is present."""
    num_devices: int
    """Number of JAX devices (two per chip on v2, v3 and tpu7x)."""
    device_bytes: int | None
    """Bytes that a program may use on one JAX device, or None when unknown (a CPU's memory belongs to the system).

    TPU: the "available HBM" of libtpu 0.0.51. GPU: the share of `hbm_bytes` that JAX's allocator takes when the target
    is made (JAX documentation, GPU memory allocation). It is 0.75 unless ``XLA_CLIENT_MEM_FRACTION`` (or its older name
    ``XLA_PYTHON_CLIENT_MEM_FRACTION``) sets another one, and at most 1. ``XLA_PYTHON_CLIENT_PREALLOCATE=false`` only
    lets the allocator grow up to the same share (openxla/xla, gpu_helpers.cc). ``XLA_PYTHON_CLIENT_ALLOCATOR=platform``
    lifts the limit, which this figure does not follow. Hardware that is present: the limit of JAX's allocator.
    """
    chip_config_name: str | None = None
    """How libtpu groups a chip's cores into devices; None for its default."""
    hbm_bytes: int | None = None
    """Physical memory of one JAX device; on a GPU as CUDA reports it, which is less than the vendor's round number."""
    hbm_bandwidth: int | None = None
    """Bytes per second between the chip and its memory."""
    flops: int | None = None
    """Dense bf16 operations per second, the vendor's peak."""
    host_link_bandwidth: int | None = None
    """Bytes per second between device and host memory, each way. For most chips this is the nominal rate of the link,
    not a measured one."""
    host_bytes: int | None = None
    """Host memory per JAX device on `machine`."""
    machine: str | None = None
    """The machine shape of `host_bytes`; other shapes have the same chip."""
    reserve_bytes: int = 0
    """Bytes of `device_bytes` to keep free."""
    sources: tuple[str, ...] = ()
    """Where each figure comes from: ``figure: origin``."""

    @property
    def budget_bytes(self) -> int | None:
        """Bytes that a program may use of one device: `device_bytes` less `reserve_bytes`; None when unknown."""
        return None if self.device_bytes is None else self.device_bytes - self.reserve_bytes

    def devices(self) -> list[Any]:
        """Return the JAX devices to compile for; compile-only ones if the hardware is not present.

        Returns:
            `num_devices` devices, in JAX's order. Meshes and shardings made of them fit `lowtide.memory.analyze`.

        Raises:
            TargetError: when the hardware is not present and its compiler is not installed.
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
        """Whether the hardware is only described, so that programs compile for it but cannot run."""
        return self.name not in ("here", "cpu")


class Figures(TypedDict, total=False):
    """Figures that a caller of `target` may give in place of the catalogue's."""

    device_bytes: int | str
    hbm_bytes: int | str
    host_bytes: int | str
    reserve_bytes: int | str
    hbm_bandwidth: float | str
    flops: float | str
    host_link_bandwidth: float | str


def target(name: str = "here", **figures: Unpack[Figures]) -> Target:
    """Return the hardware that a name stands for.

    Args:
        name: ``"here"`` (the default backend, all its devices), ``"cpu"``, a TPU chip and topology ``AxB`` or ``AxBxC``
            (``"v5e:2x2"``, ``"v5p:2x2x1"``, ``"tpu7x:2x2x1"``), or a GPU and its number (``"h100:8"``, ``"a100-80"``,
            ``"rtx 4090"``). A bare chip name means one chip.
        **figures: figures of the target that differ from the catalogue's, per JAX device: `device_bytes`, `hbm_bytes`,
            `host_bytes`, `reserve_bytes` (sizes such as ``"14 GiB"``, or bytes), `hbm_bandwidth`,
            `host_link_bandwidth` (bytes per second, or text such as ``"25 GB/s"``), `flops`.

    Returns:
        The target. `targets` lists all of them.

    Raises:
        TargetError: for a name that is empty, unknown or ambiguous, a topology that no machine has, or when the
            compiler (libtpu; XLA's CUDA plugin and `ptxas`) is not installed.
        ConfigError: for a figure that is unknown, not a positive size or rate, or in conflict with another.

    Memory:
        None on any device, whatever the capacities.

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
    """Return every target that `target` knows: this machine, its CPU, and each chip of the catalogue alone.

    Returns:
        ``here``, ``cpu``, TPUs, GPUs. Chips have their smallest topology and come from the catalogue: their compilers
        need not be installed, and are not loaded.

    Memory:
        None on any device.

    Examples:
        >>> [goal.name for goal in targets()][:4]
        ['here', 'cpu', 'v2:1x1', 'v3:1x1']
    """
    present = list[Target]()
    with contextlib.suppress(TargetError):  # a backend that Lowtide does not know
        present.append(_here())
    return (*present, _cpu(), *catalogue_targets())


def catalogue_targets() -> tuple[Target, ...]:
    """Return each chip of the catalogue alone, as in `targets`, without a call of JAX."""
    return tuple(_ahead_of_time_target(chip, chip.smallest) for chip in catalogue().chips.values())


def resolve_target(target_or_name: Target | str | None) -> Target:
    """Return the target for an argument of a public function: a `Target`, its name, or None for ``"here"``."""
    if isinstance(target_or_name, Target):
        return target_or_name
    name: Any = target_or_name
    if not isinstance(name, str | None):
        raise TargetError(
            "target must be a single name",
            expected='a name such as "v5e:2x2", a Target, or None for this machine',
            got=repr(target_or_name)[:80],
            hint="call the function once for each target",
        )
    return target("here" if target_or_name is None else target_or_name)


def _here() -> Target:
    import jax

    devices = jax.devices()
    platform = jax.default_backend()
    if platform not in get_args(Platform):
        raise TargetError(
            f"Lowtide does not support the default backend {platform!r}",
            expected="cpu, gpu or tpu",
            hint='choose another backend with JAX_PLATFORMS, or another target such as "cpu"',
        )
    # Only this process's own devices report their memory.
    local = [device for device in devices if getattr(device, "process_index", 0) == jax.process_index()]
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in local] if platform != "cpu" else [None]
    # A program has to fit on every device, so the smallest limit holds; it is unknown if any limit is.
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
    return {
        "hbm_bytes": chip.hbm_bytes,
        "hbm_bandwidth": chip.hbm_bandwidth,
        "flops": chip.flops,
        "host_link_bandwidth": chip.host_link_bandwidth,
        "sources": tuple(f"{figure}: {origin}" for figure, origin in chip.sources if figure != "device_bytes"),
    }


def _ahead_of_time_target(chip: Chip, topology: str) -> Target:
    chips = num_chips(chip, topology)
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
    if not overrides:
        return goal
    changed: dict[str, Any] = dict(overrides)
    if (
        goal.platform == "gpu"
        and "hbm_bytes" in overrides
        and "device_bytes" not in overrides
        and goal.is_ahead_of_time
    ):
        # device_bytes is a share of hbm_bytes, so it follows a given hbm_bytes.
        changed["device_bytes"] = int(overrides["hbm_bytes"] * _memory_fraction())
    sources = tuple(source for source in goal.sources if source.partition(":")[0] not in overrides)
    goal = dataclasses.replace(goal, **changed, sources=sources + tuple(f"{figure}: given" for figure in overrides))
    _check_figures(goal.name, goal.device_bytes, goal.hbm_bytes, goal.reserve_bytes)
    return goal


def _memory_fraction() -> float:
    """Return the share of a GPU's memory that JAX's allocator takes, read as jaxlib 0.10.2 does."""
    for variable in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        text = os.environ.get(variable)
        if not text:
            continue
        with contextlib.suppress(ValueError):
            if float(text) > 0:
                return min(float(text), 1.0)  # beyond 1, XLA borrows from the host
        raise ConfigError(
            f"the environment variable {variable} is not a memory fraction",
            expected="a number above 0 and at most 1",
            got=repr(text),
            hint=f"unset {variable}, or set it to the share that JAX may take, such as 0.9",
        )
    return 0.75


@functools.lru_cache(maxsize=64)
def _tpu_devices(name: str, chip_config_name: str | None) -> tuple[Any, ...]:
    from ..core._compat import tpu_topology_devices

    if importlib.util.find_spec("libtpu") is None:
        raise TargetError(
            f"{name!r} needs libtpu, which compiles without a TPU, but libtpu is not installed",
            hint='pip install "lowtide[tpu-aot]"',
        )
    try:
        return tuple(tpu_topology_devices(name, chip_config_name=chip_config_name))
    except Exception as error:  # libtpu raises various types; the first line is the reason
        raise TargetError(
            f"libtpu refuses the topology {name!r}",
            got=str(error).splitlines()[0],
            hint="give a topology that a machine has: 1x1, 2x2, 2x4, 4x4, ... in two dimensions (v2, v3, v5e, v6e), "
            "1x1x1, 2x2x1, 2x2x2, 2x2x4, ... in three (v4, v5p, tpu7x)",
        ) from error


@functools.lru_cache(maxsize=64)
def _gpu_devices(name: str, chip_name: str, num_gpus: int, hbm_bytes: int) -> tuple[Any, ...]:
    from ..core._compat import gpu_topology_devices
    from ..core._ptxas import find_ptxas

    chip = catalogue().chips[chip_name]
    missing = TargetError(
        f"{name!r} needs JAX's CUDA plugin, which compiles without a GPU, but the plugin is not installed or too old",
        hint='pip install "lowtide[gpu-aot]"',
    )
    if all(importlib.util.find_spec(plugin) is None for plugin in ("jax_cuda13_plugin", "jax_cuda12_plugin")):
        raise missing
    if find_ptxas() is None:
        raise TargetError(
            f"{name!r} needs NVIDIA's assembler ptxas, which is not on PATH",
            hint='pip install "lowtide[gpu-aot]", or put the bin folder of a CUDA toolkit on PATH',
        )
    partitions, hosts, devices = gpu_topology(chip, num_gpus)
    try:
        return tuple(
            gpu_topology_devices(chip.gpu_target_config(hbm_bytes), partitions=partitions, hosts=hosts, devices=devices)
        )
    except NotImplementedError as error:
        raise missing from error
    except Exception as error:  # XLA's first line is the reason
        raise TargetError(
            f"XLA rejects the description of {name!r}",
            got=(str(error).splitlines() or [type(error).__name__])[0],
            hint="install jax 0.10.2, with which descriptions are checked, or report the error",
        ) from error


def _read_figures(values: Mapping[str, object]) -> dict[str, int]:
    """Return sizes in bytes and rates per second as whole numbers.

    Sizes may be text such as ``"14 GiB"``, bandwidths such as ``"25 GB/s"``. The result omits None, which stands for
    the figure of the catalogue. Raises `ConfigError` for an unknown name, a capacity or rate that is not positive, or
    text that is neither.
    """
    figures: dict[str, int] = {}
    for name, value in values.items():
        if name not in (*_SIZES, *_RATES):
            matches = difflib.get_close_matches(name, (*_SIZES, *_RATES), n=2, cutoff=0.5)
            raise ConfigError(
                f"{name!r} is not a figure of a target",
                expected=f"{', '.join(_SIZES)} (per device, in bytes), {', '.join(_RATES)} (per second)",
                hint=f"near misses: {', '.join(matches)}" if matches else "give the number of devices in the name",
            )
        if value is not None:
            figures[name] = _size(name, value) if name in _SIZES else _rate(name, value)
    return figures


def _check_figures(name: str, device_bytes: int | None, hbm_bytes: int | None, reserve_bytes: int) -> None:
    """Raise `ConfigError` when more is reserved than usable, or more is usable than physically present."""
    if device_bytes is not None and hbm_bytes is not None and device_bytes > hbm_bytes:
        raise ConfigError(
            f"device_bytes of {name!r} is more than its physical memory",
            expected=f"at most hbm_bytes = {hbm_bytes} ({format_bytes(hbm_bytes)})",
            got=f"{device_bytes} ({format_bytes(device_bytes)})",
            hint="also give hbm_bytes if the device has more memory than the catalogue says",
        )
    if device_bytes is not None and reserve_bytes >= device_bytes:
        raise ConfigError(
            f"reserve_bytes leaves no memory of {name!r}",
            expected=f"less than device_bytes = {device_bytes} ({format_bytes(device_bytes)})",
            got=f"{reserve_bytes} ({format_bytes(reserve_bytes)})",
            hint="reserve less: reserve_bytes stays free on each device",
        )


def _size(name: str, value: object) -> int:
    size = parse_bytes(value if isinstance(value, int) else str(value))
    if size == 0 and name != "reserve_bytes":
        raise ConfigError(
            f"{name} has to be positive",
            got=repr(value),
            hint=f'give bytes, or text such as "14 GiB"; leave {name} out if it is unknown',
        )
    return size


def _rate(name: str, value: object) -> int:
    if isinstance(value, str) and name != "flops":
        value = parse_bytes(value.strip().removesuffix("/s"))
    try:
        rate = math.nan if isinstance(value, bool) else float(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        rate = math.nan
    if not (math.isfinite(rate) and rate >= 1):
        raise ConfigError(
            f"{name} has to be a positive rate",
            expected="operations per second" if name == "flops" else 'bytes per second, or text such as "25 GB/s"',
            got=repr(value),
            hint=f"leave {name} out for the catalogue's figure",
        )
    return int(rate)
