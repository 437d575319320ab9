"""Compile targets: the hardware a report is about, present or not.

A target names a platform, a number of JAX devices and the bytes a program may use on each. TPU targets need no TPU:
libtpu compiles for a topology that is only described. The usable bytes are what libtpu 0.0.51 calls "available HBM"
in its out-of-memory errors, rounded down to the two decimals it prints; a chip's maker quotes more.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib.util
import re
from typing import Any, Literal, cast, get_args

import jax

from lowtide.core import TargetError
from lowtide.core._compat import tpu_topology_devices

Platform = Literal["cpu", "gpu", "tpu"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _TpuChip:
    """What libtpu does not say about a chip until a compile fails."""

    usable_gib: float
    """Available HBM per JAX device, GiB, as libtpu 0.0.51 prints it."""
    smallest: str
    """The topology of one chip."""
    chip_config_name: str | None = None
    """How cores form devices, where libtpu's default differs from what JAX shows on a real machine."""


_TPU_CHIPS = {
    "v2": _TpuChip(usable_gib=7.48, smallest="1x1"),
    "v3": _TpuChip(usable_gib=15.48, smallest="1x1"),
    # libtpu describes a v4 chip as two devices of 15.25 GiB; JAX on a v4 machine shows one of 30.75 GiB (megacore).
    "v4": _TpuChip(usable_gib=30.75, smallest="1x1x1", chip_config_name="megacore"),
    "v5p": _TpuChip(usable_gib=95.73, smallest="1x1x1"),
    "v5e": _TpuChip(usable_gib=15.75, smallest="1x1"),
    "v6e": _TpuChip(usable_gib=31.24, smallest="1x1"),
    "tpu7x": _TpuChip(usable_gib=94.74, smallest="1x1x1"),
}
_TPU_ALIASES = {
    "v5lite": "v5e",
    "v5litepod": "v5e",
    "trillium": "v6e",
    "v6": "v6e",
    "ironwood": "tpu7x",
    "tpu7": "tpu7x",
    "v7": "tpu7x",
    "v7x": "tpu7x",
    "v5": "v5p",
}
_GPU_NAMES = re.compile(
    r"(gpu|cuda|rocm|(a2|a10g?|a16|a30|a40|a100|a800|b100|b200|b300|gb200|gb300|gh200|h20|h100|h200|h800|l4|l40s?|p100|t4"
    r"|v100|mi\d{3}[axp]?)|(rtx|gtx)[ _-]?\w+)([:_ -].*)?",
    re.IGNORECASE,
)
_TOPOLOGY = re.compile(r"[1-9]\d*(x[1-9]\d*){1,2}")
_FORMS = '"here", "cpu", or a TPU topology such as "v5e:2x2" (chips: ' + ", ".join(_TPU_CHIPS) + ")"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """Hardware to compile for; made by `target`.

    Examples:
        >>> target("cpu").platform
        'cpu'
    """

    name: str
    """The canonical name: ``here``, ``cpu``, or a chip with its topology, such as ``v5e:2x2``."""
    platform: Platform
    """The kind of compiler that serves it."""
    chip: str
    """The chip: ``v5e``, or the device kind that JAX reports for hardware that is here."""
    num_devices: int
    """How many JAX devices there are (two a chip on v2, v3 and tpu7x)."""
    device_bytes: int | None
    """Bytes that a program may use on one JAX device, or None when unknown (a CPU's memory belongs to the system)."""
    chip_config_name: str | None = None
    """How libtpu groups a chip's cores into devices, where its default is not used."""

    def devices(self) -> list[Any]:
        """The JAX devices to compile for; compile-only ones where the hardware is not here.

        Returns:
            `num_devices` devices, in JAX's order. Meshes and shardings made of them fit `lowtide.memory.analyze`.
        """
        if self.name == "here":
            return jax.devices()
        if self.name == "cpu":
            return jax.devices("cpu")
        return list(_tpu_devices(self.name, self.chip_config_name))

    @property
    def is_ahead_of_time(self) -> bool:
        """Whether the hardware is only described, so that programs compile for it but cannot run."""
        return self.name not in ("here", "cpu")


def target(name: str = "here") -> Target:
    """The hardware that a name stands for.

    Args:
        name: ``"here"`` (the default backend, all its devices), ``"cpu"``, or a TPU chip and topology ``AxB`` or
            ``AxBxC`` (``"v5e:2x2"``, ``"v5p:2x2x1"``, ``"tpu7x:2x2x1"``); a bare chip name means one chip.

    Returns:
        The target.

    Raises:
        TargetError: for a name that is empty or unknown, a topology that libtpu refuses, a GPU that is not here, or
            when libtpu is not installed.

    Memory:
        None on any device. `device_bytes` is what a program may use, as measured with libtpu 0.0.51, or for hardware
        that is here the limit of JAX's allocator.

    Examples:
        >>> target("cpu").device_bytes is None
        True
    """
    if name == "here":
        return _here()
    if name == "cpu":
        return Target(name="cpu", platform="cpu", chip="cpu", num_devices=len(jax.devices("cpu")), device_bytes=None)
    chip, separator, topology = name.strip().lower().partition(":")
    if chip not in _TPU_CHIPS:
        raise _unknown(name, chip, topology)
    known = _TPU_CHIPS[chip]
    topology = topology if separator else known.smallest
    # libtpu does not refuse a zero, it divides by it: such a name must not reach it.
    if not _TOPOLOGY.fullmatch(topology):
        raise TargetError(
            f"{name!r} has no valid topology",
            expected=f"{chip}:AxB or {chip}:AxBxC, positive numbers of chips along each axis",
            got=repr(topology),
            hint=f'"{chip}:{known.smallest}" is one chip, "{chip}" means the same',
        )
    canonical = f"{chip}:{topology}"
    return Target(
        name=canonical,
        platform="tpu",
        chip=chip,
        num_devices=len(_tpu_devices(canonical, known.chip_config_name)),
        device_bytes=int(known.usable_gib * 2**30),
        chip_config_name=known.chip_config_name,
    )


def resolve_target(target_or_name: Target | str | None) -> Target:
    """A target from what a public function accepts: a `Target`, its name, or None for ``"here"``."""
    if isinstance(target_or_name, Target):
        return target_or_name
    return target("here" if target_or_name is None else target_or_name)


def _here() -> Target:
    devices = jax.devices()
    platform = jax.default_backend()
    if platform not in get_args(Platform):
        raise TargetError(
            f"the default backend {platform!r} is not one Lowtide knows",
            expected="cpu, gpu or tpu",
            hint='choose another backend with JAX_PLATFORMS, or another target such as "cpu"',
        )
    # Only this process's own devices can be asked.
    own = [device for device in devices if getattr(device, "process_index", 0) == jax.process_index()]
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in own] if platform != "cpu" else [None]
    known = [limit for limit in limits if limit]
    return Target(
        name="here",
        platform=cast(Platform, platform),
        chip=devices[0].device_kind,
        num_devices=len(devices),
        device_bytes=min(known) if len(known) == len(limits) else None,
    )


@functools.lru_cache(maxsize=64)
def _tpu_devices(name: str, chip_config_name: str | None) -> tuple[Any, ...]:
    if importlib.util.find_spec("libtpu") is None:
        raise TargetError(
            f"{name!r} needs libtpu, which compiles for TPUs without one, and it is not installed",
            hint='pip install "lowtide[tpu-aot]"',
        )
    try:
        return tuple(tpu_topology_devices(name, chip_config_name=chip_config_name))
    except Exception as error:  # libtpu raises whatever it likes; its first line is the reason
        raise TargetError(
            f"libtpu refuses the topology {name!r}",
            got=str(error).splitlines()[0],
            hint="give a topology that a machine has: 1x1, 2x2, 2x4, 4x4, ... in two dimensions (v2, v3, v5e, v6e), "
            "1x1x1, 2x2x1, 2x2x2, 2x2x4, ... in three (v4, v5p, tpu7x)",
        ) from error


def _unknown(name: str, chip: str, topology: str) -> TargetError:
    if not name.strip():
        return TargetError("the target's name is empty", expected=_FORMS, hint='"here" is the hardware at hand')
    if _GPU_NAMES.fullmatch(name.strip()):
        return TargetError(
            f"{name!r} is a GPU, and GPU targets are not available yet",
            expected=_FORMS,
            hint='on a machine with that GPU, "here" works',
        )
    # A slice name such as v5litepod-4 counts cores or chips; only the chip can be taken from it.
    stem = re.split(r"[-=_ ]", chip)[0]
    close = [_TPU_ALIASES[stem]] if stem in _TPU_ALIASES else []
    close += difflib.get_close_matches(stem, ["here", "cpu", *_TPU_CHIPS], n=3, cutoff=0.5)
    misses = [
        f"{near}:{topology}" if near in _TPU_CHIPS and _TOPOLOGY.fullmatch(topology) else near
        for near in dict.fromkeys([stem] * (stem in _TPU_CHIPS) + close)
    ]
    return TargetError(
        f"unknown target {name!r}",
        expected=_FORMS,
        hint=f"near misses: {', '.join(misses)}" if misses else 'write it like "v5e:2x2"',
    )
