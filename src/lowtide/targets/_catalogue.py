"""The catalogue of chips: figures with their origin, read from `chips.toml`.

This module loads no compiler. XLA compiles for an absent GPU from a `GpuTargetConfigProto` (openxla/xla,
xla/stream_executor/device_description.proto; checked with jaxlib 0.10.2). So entries of GPUs also have the fields of
this message. XLA's own descriptions also give the rates of single arithmetic units. These rates are left out, because
they only tune the compiler's estimates of time.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib.resources
import math
import re
import tomllib
from typing import Any, Literal

from ..core import TargetError

# Versions that XLA's description of a GPU needs: those for which the CUDA plugin of jaxlib 0.10 is built.
_CUDA_VERSION, _CUDNN_VERSION = "13.0.0", (9, 10, 0)
_FIGURES = ("hbm_bytes", "device_bytes", "hbm_bandwidth", "flops", "host_link_bandwidth")
_TPU_TOPOLOGY = re.compile(r"[1-9]\d*(x[1-9]\d*){1,2}")
_GPU_COUNT = re.compile(r"[1-9]\d{0,4}")
_GPU_LIKE = re.compile(
    r"(a2|a10g?|a16|a30|a40|a800|b100|gh200|h20|h800|l20|l40|k80|t4|[vp]100|mi\d{3}[axp]?)"
    r"|(rtx|gtx|titan|quadro)\w+|\d{4}(ti|super)*"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine type that has a chip."""

    name: str
    """The vendor's name."""
    num_chips: int
    host_bytes: int
    source: str
    """Origin of `host_bytes`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One entry of the catalogue; figures are per JAX device, None when unknown."""

    name: str
    platform: Literal["gpu", "tpu"]
    kinds: tuple[str, ...]
    """The `device_kind` names that JAX reports for the chip."""
    aliases: tuple[str, ...] = ()
    devices_per_chip: int = 1
    hbm_bytes: int | None = None
    """Physical memory."""
    device_bytes: int | None = None
    """Memory that a program may use; None for GPUs, where it depends on JAX's memory fraction."""
    hbm_bandwidth: int | None = None
    """Bytes per second."""
    flops: int | None = None
    """Dense bf16 operations per second."""
    host_link_bandwidth: int | None = None
    """Bytes per second, each way."""
    machines: tuple[Machine, ...] = ()
    """Machine types, smallest first."""
    slice_machine: str | None = None
    """Name of the machine type of which slices of several hosts consist; None means the largest type."""
    sources: tuple[tuple[str, str], ...] = ()
    """A figure's name and its origin, for every figure that is present."""
    smallest: str = "1"
    """The topology of one chip."""
    chip_config_name: str | None = None
    """How libtpu groups cores into devices; None if libtpu's default gives the same devices as a real machine."""
    capability: str | None = None
    """Major and minor version of a GPU's compute capability, such as ``9.0``."""
    num_cores: int = 0
    """Streaming multiprocessors of a GPU."""
    l2_bytes: int = 0
    """Second-level cache of a GPU."""
    clock_ghz: float = 0.0
    """Boost clock of a GPU."""
    num_links: int | None = None
    """NVLink links of a GPU."""
    gpus_per_host: int = 8
    hosts_per_partition: int = 1
    """Number of hosts in one NVLink domain."""

    def machine(self, num_chips: int) -> Machine | None:
        """Return the smallest machine with `num_chips` chips or more, else the machine of slices, else None."""
        for machine in self.machines:
            if machine.num_chips >= num_chips:
                return machine
        slices = [machine for machine in self.machines if machine.name == self.slice_machine]
        return (slices or list(self.machines[-1:]) or [None])[0]

    def gpu_target_config(self, hbm_bytes: int) -> str:
        """Return XLA's description of this GPU with `hbm_bytes` of memory: a `GpuTargetConfigProto` as text."""
        assert self.capability is not None, f"{self.name} is not a GPU"
        major, minor = self.capability.split(".")
        capability = dict(catalogue().capabilities[self.capability])
        extension = "ACCELERATED_FEATURES" if capability.pop("accelerated", False) else "NONE"
        numbers = {
            # Literal numbers are the same for all GPUs of the catalogue.
            "threads_per_block_limit": 1024,
            "threads_per_warp": 32,
            "shared_memory_per_block": 49_152,
            "core_count": self.num_cores,
            "block_dim_limit_x": 2**31 - 1,
            "block_dim_limit_y": 65_535,
            "block_dim_limit_z": 65_535,
            "thread_dim_limit_x": 1024,
            "thread_dim_limit_y": 1024,
            "thread_dim_limit_z": 64,
            "registers_per_core_limit": 65_536,
            "registers_per_block_limit": 65_536,
            "device_address_bits": 64,
            "memory_bandwidth": self.hbm_bandwidth,
            "l2_cache_size": self.l2_bytes,
            "clock_rate_ghz": self.clock_ghz,
            "device_memory_size": hbm_bytes,
            "pcie_bandwidth": self.host_link_bandwidth,
            **capability,
        }
        cudnn = ".".join(map(str, _CUDNN_VERSION))
        dnn = " ".join(f"{part}: {n}" for part, n in zip(("major", "minor", "patch"), _CUDNN_VERSION, strict=True))
        links = [] if self.num_links is None else [f"device_interconnect_info {{ active_links: {self.num_links} }}"]
        versions = ("driver_version", "runtime_version", "compile_time_toolkit_version")
        lines = [
            "gpu_device_info {",
            *(f"{name}: {value}" for name, value in numbers.items() if value is not None),
            f"cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}",
            'device_vendor: "NVIDIA Corporation"',
            f'name: "{self.kinds[0]}"',
            *(f'{field}: "{_CUDA_VERSION}"' for field in versions),
            f'dnn_version: "{cudnn}"',
            *links,
            "}",
            'platform_name: "CUDA"',
            f"dnn_version_info {{ {dnn} }}",
            f'device_description_str: "{self.kinds[0]}"',
        ]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Catalogue:
    """The content of `chips.toml`."""

    chips: dict[str, Chip]
    """Chips by their canonical names, TPUs first."""
    capabilities: dict[str, dict[str, Any]]
    """Maps a compute capability, such as ``9.0``, to the fields of XLA's description that depend only on it."""
    tpu_words: dict[str, str]
    """Maps other names of TPUs to the chips that errors suggest."""
    ambiguous: dict[str, tuple[str, ...]]
    """Maps a name that several chips share to the names of these chips."""
    refused: tuple[tuple[re.Pattern[str], str], ...]
    """Pairs (pattern for names of unsupported GPUs, reason in the error)."""

    def find(self, name: str) -> Chip | None:
        """Return the chip with this name or alias, or None; case, spaces and hyphens of GPU names do not matter."""
        key, gpus = normalize_name(name), (chip for chip in self.chips.values() if chip.platform == "gpu")
        named = (chip for chip in gpus if key in map(normalize_name, (chip.name, *chip.aliases)))
        return next(named, self.chips.get(name))

    def of_kind(self, kind: str) -> Chip | None:
        """Return the chip with this JAX `device_kind`, or None."""
        return next((chip for chip in self.chips.values() if kind in chip.kinds), None)

    def of(self, platform: str) -> list[str]:
        """List the names of a platform's chips."""
        return [chip.name for chip in self.chips.values() if chip.platform == platform]


def normalize_name(name: str) -> str:
    """Return a GPU's name in lower case, without vendor, brand, spaces, hyphens and underscores."""
    return re.sub(r"nvidia|geforce|tesla|[\s_-]", "", name.lower())


def busy_rows(kind: str) -> int | None:
    """Return the number of rows at which a matrix product takes three times as long as reading its weight.

    `kind` is JAX's `device_kind`. The result is rounded up to a power of two; None if the chip's speed is unknown.
    """
    chip = catalogue().of_kind(kind)
    if chip is None or chip.flops is None or chip.hbm_bandwidth is None:
        return None
    # Reading one element of a bf16 weight takes 2 / bandwidth, and multiplying each row by it 2 / flops. So both times
    # are equal at flops / bandwidth rows.
    return 1 << math.ceil(math.log2(3 * chip.flops / chip.hbm_bandwidth))


@functools.cache
def catalogue() -> Catalogue:
    text = importlib.resources.files("lowtide.targets").joinpath("chips.toml").read_text(encoding="utf-8")
    data = tomllib.loads(text)
    names = data["names"]
    return Catalogue(
        chips={name: _chip(name, dict(fields), data["machine_source"]) for name, fields in data["chips"].items()},
        capabilities=data["capabilities"],
        tpu_words=names["tpu"],
        ambiguous={name: tuple(chips) for name, chips in names["ambiguous"].items()},
        refused=tuple((re.compile(pattern), reason) for pattern, reason in names["refused"].items()),
    )


def _chip(name: str, fields: dict[str, Any], machine_sources: dict[str, str]) -> Chip:
    origin: dict[str, str] = fields.pop("source")
    per_chip = int(fields.get("devices_per_chip", 1))
    # Figures are per chip in chips.toml, and per JAX device in a `Chip`.
    for figure in _FIGURES:
        if figure in fields:
            fields[figure] //= per_chip
    usable_gib = fields.pop("usable_gib", None)
    machines = tuple(
        Machine(
            name=machine["name"],
            num_chips=machine["chips"],
            host_bytes=machine["host_gb"] * 10**9 if "host_gb" in machine else machine["host_gib"] * 2**30,
            source=machine_sources[machine["from"]],
        )
        for machine in fields.pop("machines", ())
    )
    if usable_gib is not None:
        fields["device_bytes"] = int(usable_gib * 2**30)
    return Chip(
        name=name,
        kinds=tuple(fields.pop("kinds")),
        aliases=tuple(fields.pop("aliases", ())),
        machines=machines,
        sources=tuple((figure, origin.get(figure, origin["default"])) for figure in _FIGURES if figure in fields),
        **fields,
    )


# --- Names ------------------------------------------------------------------------------------------------------------
# In names of GPUs, case, spaces, hyphens and the vendor do not matter, because each tool writes them differently. Names
# of TPUs are libtpu's. Errors list valid names.


def parse_name(name: str) -> tuple[Chip, str]:
    """Parse ``chip`` or ``chip:topology``; the returned topology is ``AxB[xC]`` for TPUs, and a number for GPUs.

    Raises `TargetError` for a name that is empty, unknown or ambiguous, or a topology that no machine has.
    """
    word, separator, topology = (part.strip().lower() for part in name.strip().partition(":"))
    chip = catalogue().find(word)
    if chip is None:
        raise _unknown_target_error(name, word, topology)
    if not separator:
        return chip, chip.smallest
    if chip.platform == "gpu":
        if not _GPU_COUNT.fullmatch(topology):
            raise _gpu_count_error(name, chip)
        gpu_topology(chip, int(topology))
    # libtpu divides by a zero instead of refusing it, so such a name must not reach libtpu.
    elif not _TPU_TOPOLOGY.fullmatch(topology):
        expected = f"{chip.name}:AxB or {chip.name}:AxBxC, positive numbers of chips along each axis"
        hint = f'write "{chip.name}:{chip.smallest}", or just "{chip.name}", for one chip'
        raise TargetError(f"{name!r} has no valid topology", expected=expected, hint=hint)
    return chip, topology


def gpu_topology(chip: Chip, num_gpus: int) -> tuple[int, int, int]:
    """Return partitions (groups of hosts that NVLink joins), hosts per partition, and GPUs per host.

    Compile-only devices of jaxlib 0.10.2 report their host (`process_index`), but always partition 0. Raises
    `TargetError` for a number of GPUs that does not fill all hosts and partitions.
    """
    if num_gpus <= chip.gpus_per_host:
        return 1, 1, num_gpus
    hosts, gpus_left = divmod(num_gpus, chip.gpus_per_host)
    hosts_per_partition = min(hosts, chip.hosts_per_partition)
    partitions, hosts_left = divmod(hosts, hosts_per_partition)
    if gpus_left or hosts_left:
        raise _gpu_count_error(f"{chip.name}:{num_gpus}", chip)
    return partitions, hosts_per_partition, chip.gpus_per_host


def _gpu_count_error(name: str, chip: Chip) -> TargetError:
    host = chip.gpus_per_host
    domain = host * chip.hosts_per_partition
    beyond = f" (above {domain}: of {domain})" if domain > host else ""
    return TargetError(
        f"{name!r} has no valid number of GPUs",
        expected=f"{chip.name}:N with N up to {host} on one host, or a multiple of {host}{beyond}, below 100000",
        hint=f'write "{chip.name}" for one GPU or "{chip.name}:{host}" for one host; axes belong to the mesh',
    )


def _valid_names() -> str:
    chips = catalogue()
    return (
        f'"here", "cpu", a TPU topology such as "v5e:2x2" (chips: {", ".join(chips.of("tpu"))}), '
        f'or GPUs such as "h100:8" (chips: {", ".join(chips.of("gpu"))})'
    )


def _unknown_target_error(name: str, word: str, topology: str) -> TargetError:
    chips = catalogue()
    if not word:
        return TargetError("the target's name is empty", expected=_valid_names(), hint='use "here" for this machine')
    gpu = normalize_name(word)
    if gpu in chips.ambiguous:
        choices = [f'"{choice}:{topology}"' if topology else f'"{choice}"' for choice in chips.ambiguous[gpu]]
        return TargetError(f"{name!r} stands for GPUs with different memory", hint=f"write {' or '.join(choices)}")
    hint = 'use "here" on a machine with that GPU'
    for pattern, reason in chips.refused:
        if pattern.fullmatch(gpu or word):
            problem = f"Lowtide cannot compile for the GPU {name!r}: {reason}"
            return TargetError(problem, expected=_valid_names(), hint=hint)
    gpus = {normalize_name(chip): chip for chip in chips.of("gpu")}
    close_gpus = [gpus[key] for key in difflib.get_close_matches(gpu, list(gpus), n=3, cutoff=0.6)]
    if _GPU_LIKE.fullmatch(gpu):
        hint += f"; near misses: {', '.join(close_gpus)}" if close_gpus else ""
        return TargetError(f"{name!r} is a GPU that is not in the catalogue", expected=_valid_names(), hint=hint)
    # A slice name such as v5litepod-4 may count cores or chips, so only the chip is taken from it.
    stem = re.split(r"[-=_ ]", word)[0]
    tpus = chips.of("tpu")
    close = [chips.tpu_words[stem]] if stem in chips.tpu_words else []
    close += difflib.get_close_matches(stem, ["here", "cpu", *tpus], n=3, cutoff=0.5)
    misses = [
        f"{match}:{topology}" if match in tpus and _TPU_TOPOLOGY.fullmatch(topology) else match
        for match in dict.fromkeys([stem] * (stem in tpus) + close + close_gpus)
    ]
    hint = f"near misses: {', '.join(misses)}" if misses else 'write it like "v5e:2x2" or "h100:8"'
    return TargetError(f"unknown target {name!r}", expected=_valid_names(), hint=hint)
