"""Names of targets: chip and topology parsed from text, and errors that list valid names.

Deviation from the rest of the package: GPU names are forgiving (case, spaces, hyphens, the vendor's name), because
every tool writes them differently. TPU names are libtpu's.
"""

from __future__ import annotations

import difflib
import math
import re

from ..core import TargetError
from ._catalogue import Chip, catalogue, normalize_name

_TPU_TOPOLOGY = re.compile(r"[1-9]\d*(x[1-9]\d*){1,2}")
_GPU_COUNT = re.compile(r"[1-9]\d{0,4}")
_GPU_LIKE = re.compile(
    r"(a2|a10g?|a16|a30|a40|a800|b100|gh200|h20|h800|l20|l40|k80|t4|[vp]100|mi\d{3}[axp]?)"
    r"|(rtx|gtx|titan|quadro)\w+|\d{4}(ti|super)*"
)


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
            raise _gpu_count_error(name, chip, topology)
        gpu_topology(chip, int(topology))
    # libtpu does not refuse a zero but divides by it, so such a name must not reach it.
    elif not _TPU_TOPOLOGY.fullmatch(topology):
        raise TargetError(
            f"{name!r} has no valid topology",
            expected=f"{chip.name}:AxB or {chip.name}:AxBxC, positive numbers of chips along each axis",
            got=repr(topology),
            hint=f'write "{chip.name}:{chip.smallest}", or just "{chip.name}", for one chip',
        )
    return chip, topology


def num_chips(chip: Chip, topology: str) -> int:
    """Return the number of chips of a canonical topology."""
    return int(topology) if chip.platform == "gpu" else math.prod(map(int, topology.split("x")))


def gpu_topology(chip: Chip, num_gpus: int) -> tuple[int, int, int]:
    """Return partitions (groups of hosts that NVLink joins), hosts per partition, and GPUs per host.

    Compile-only devices of jaxlib 0.10.2 know their host (`process_index`), and all report partition 0. Raises
    `TargetError` for a number that does not fill its hosts or partitions.
    """
    if num_gpus <= chip.gpus_per_host:
        return 1, 1, num_gpus
    hosts, remainder = divmod(num_gpus, chip.gpus_per_host)
    if remainder:
        raise _gpu_count_error(f"{chip.name}:{num_gpus}", chip, str(num_gpus))
    if hosts <= chip.hosts_per_partition:
        return 1, hosts, chip.gpus_per_host
    partitions, remainder = divmod(hosts, chip.hosts_per_partition)
    if remainder:
        raise _gpu_count_error(f"{chip.name}:{num_gpus}", chip, str(num_gpus))
    return partitions, chip.hosts_per_partition, chip.gpus_per_host


def _gpu_count_error(name: str, chip: Chip, topology: str) -> TargetError:
    host = chip.gpus_per_host
    domain = host * chip.hosts_per_partition
    beyond = f" (above {domain}: of {domain})" if domain > host else ""
    return TargetError(
        f"{name!r} has no valid number of GPUs",
        expected=f"{chip.name}:N with N up to {host} on one host, or a multiple of {host}{beyond}, below 100000",
        got=repr(topology),
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
    if not name.strip() or not word:
        return TargetError("the target's name is empty", expected=_valid_names(), hint='use "here" for this machine')
    gpu = normalize_name(word)
    if gpu in chips.ambiguous:
        choices = [f"{choice}:{topology}" if topology else choice for choice in chips.ambiguous[gpu]]
        return TargetError(
            f"{name!r} stands for GPUs with different memory",
            expected=" or ".join(choices),
            got=repr(name),
            hint=f'write "{choices[0]}" or "{choices[-1]}"',
        )
    for pattern, reason in chips.refused:
        if pattern.fullmatch(gpu or word):
            return TargetError(
                f"Lowtide cannot compile for the GPU {name!r}: {reason}",
                expected=_valid_names(),
                hint='use "here" on a machine with that GPU',
            )
    gpus = {normalize_name(chip): chip for chip in chips.of("gpu")}
    close_gpus = [gpus[key] for key in difflib.get_close_matches(gpu, list(gpus), n=3, cutoff=0.6)]
    if _GPU_LIKE.fullmatch(gpu):
        return TargetError(
            f"{name!r} is a GPU that is not in the catalogue",
            expected=_valid_names(),
            hint='use "here" on a machine with that GPU'
            + (f"; near misses: {', '.join(close_gpus)}" if close_gpus else ""),
        )
    # A slice name such as v5litepod-4 may count cores or chips, so only the chip is taken from it.
    stem = re.split(r"[-=_ ]", word)[0]
    tpus = chips.of("tpu")
    close = [chips.tpu_words[stem]] if stem in chips.tpu_words else []
    close += difflib.get_close_matches(stem, ["here", "cpu", *tpus], n=3, cutoff=0.5)
    misses = [
        f"{match}:{topology}" if match in tpus and _TPU_TOPOLOGY.fullmatch(topology) else match
        for match in dict.fromkeys([stem] * (stem in tpus) + close + close_gpus)
    ]
    return TargetError(
        f"unknown target {name!r}",
        expected=_valid_names(),
        hint=f"near misses: {', '.join(misses)}" if misses else 'write it like "v5e:2x2" or "h100:8"',
    )
