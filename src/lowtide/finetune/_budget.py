"""Device memory of a run, from `config.json` and the settings alone, and settings that lower it.

The step of the run is compiled for shapes, so the figures are those of the compiler. A batch has the columns of packed
documents unless the settings exclude them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from .. import models
from ..core import LowtideError, OutOfMemoryError, Tree, format_bytes, partition, tree_bytes
from ..memory import MemoryReport, Target
from ._adapters import adapted
from ._base import refuse_for_model
from ._config import FinetuneConfig, flag_of
from ._job import WRT, base_shapes, config_job, directory_of, num_targets
from ._offloaded import full_step, optimizer
from ._recipe import learning_rate, with_seq_len

_LEAST_LENGTH = 32
_REST = "activations and gradients"
_NAMES = {"frozen": "base", "trainable": "adapters", "optimizer": "optimizer", "batch": "batch"}
_PLACING = ("quantize", "quantize_embeddings", "offload", "state_dtype", "param_dtype")
"""Those of the tried settings that change the bytes of the step's arguments on the device."""
_NAMES_OF_FULL = ("weights and optimizer", "weights", "batch")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Needs:
    """Device memory of a run in bytes."""

    device_bytes: int
    """Total."""
    by_part: Mapping[str, int]
    """The total by part; ``activations and gradients`` is the total minus the bytes of the step's arguments."""

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {format_bytes(number)}" for name, number in self.by_part.items() if number)
        return f"{format_bytes(self.device_bytes)}: {parts}"


def needs(config: FinetuneConfig, target: Target | str | None = None) -> Needs:
    """Compile the step of a run for shapes.

    Args:
        config: the settings. From the model only `config.json` is read; the files of `adapter`, if set, are read.
        target: device to compile for; None for the hardware at hand.

    Returns:
        The memory that it needs on one device.

    Raises:
        ModelFileError: when `config.json` cannot be read.
        SelectionError: when a target matches nothing.

    Memory:
        Host memory of the compiler. On the device only a loaded `adapter`.
    """
    report = config_job(config, target).analyze(target)
    if config.full:
        return _parted(report, dict(zip(("state", "frozen", "batch"), _NAMES_OF_FULL, strict=True)))
    # A weight that `modules_to_save` replaces is still on the device, although no step reads it. jit drops unused
    # arguments, so the report does not count it.
    frozen = partition(adapted(base_shapes(config, target), config), WRT)[1]
    unread = max(tree_bytes(_on_device(frozen)) - report.by_role.get("frozen", 0), 0)
    return _parted(report, _NAMES, unread)


def within(config: FinetuneConfig, budget: int, *, on_try: Callable[[str], None] | None = None) -> str:
    """Refuse a run that needs more than a budget, before any weight is loaded.

    The arguments of the step (weights, adapters, optimizer state) are counted first. If they alone exceed the budget
    with every tried setting, nothing is compiled.

    Args:
        config: the settings.
        budget: device memory in bytes that the run may use.
        on_try: called before each further compilation of a run above the budget, with the flags of the tried settings.

    Returns:
        A line that states the needed memory.

    Raises:
        OutOfMemoryError: with bytes by part, and settings that lower them.
        ModelFileError, SelectionError: as `needs`.

    Memory:
        As `needs`. A refused run is compiled again for each setting that may be enough.
    """
    directory = directory_of(config)
    refuse_for_model(config, directory)
    config = with_seq_len(config, models.load_config(directory).max_position_embeddings)
    kept = _Kept(config)
    _refuse_more(config, budget, kept)
    ours = needs(config)
    if ours.device_bytes <= budget:
        return f"{ours.device_bytes / budget:.0%} of the budget of {format_bytes(budget)}: about {ours}"
    raise OutOfMemoryError(
        f"this run needs about {format_bytes(ours.device_bytes)} of the device, more than the budget",
        expected=f"at most {format_bytes(budget)}",
        got=str(ours),
        hint=_advice(config, ours, budget, kept, on_try or (lambda flags: None)),
    )


class _Kept:
    """Device bytes of the step's arguments, counted from shapes and cached by the settings that change them.

    This object is mutated: it adds to its cache. Counting takes no compilation.
    """

    def __init__(self, config: FinetuneConfig) -> None:
        self._config, self._found = config, {_placing(config): _kept(config)}

    def __call__(self, change: Mapping[str, Any]) -> Mapping[str, int] | None:
        """Return bytes by part; None if the settings contradict each other."""
        try:
            config = dataclasses.replace(self._config, **change)
            key = _placing(config)
            if key not in self._found:
                self._found[key] = _kept(config)
        except (LowtideError, NotImplementedError):
            return None
        return self._found[key]

    def bytes(self, change: Mapping[str, Any]) -> float:
        """Return the total bytes; infinity if the settings contradict each other."""
        parts = self(change)
        return math.inf if parts is None else sum(parts.values())


def _placing(config: FinetuneConfig) -> tuple[Any, ...]:
    words = [word for word in config.offload or () if word != "activations"]
    return config.quantize, config.quantize_embeddings, frozenset(words), config.state_dtype, config.param_dtype


def _kept(config: FinetuneConfig) -> dict[str, int]:
    """Count the device bytes of the step's arguments, by the parts of `Needs`."""
    base = base_shapes(config)
    schedule = learning_rate(dataclasses.replace(config, num_epochs=None))
    if config.full:
        state, frozen = full_step(config, base.stack, schedule, num_targets).init(base.outer, base.layers)
        return {name: tree_bytes(_on_device(tree)) for name, tree in zip(_NAMES_OF_FULL, (state, frozen), strict=False)}
    trainable, frozen = partition(adapted(base, config), WRT)
    parts = {"base": tree_bytes(_on_device(frozen)), "adapters": tree_bytes(trainable)}
    if "optimizer" in (config.offload or ()):
        return parts
    return {**parts, "optimizer": tree_bytes(jax.eval_shape(optimizer(config, schedule).init, trainable))}


def _refuse_more(config: FinetuneConfig, budget: int, kept: _Kept) -> None:
    """Refuse a run whose arguments exceed the budget with every tried setting."""
    changes = ({}, *_of_optimizer(config), *_single_changes(config), *_together(config))
    least = min(changes, key=kept.bytes)
    parts = kept(least) or {}
    if sum(parts.values()) <= budget:
        return
    has_rank = not config.full and config.adapter is None and config.method != "ia3"
    lower = "a lower --rank, " if has_rank and parts["base"] < budget else ""
    flags = _flags({field: value for field, value in least.items() if field in _PLACING})
    raise OutOfMemoryError(
        f"this run needs more than {format_bytes(sum(parts.values()))} of the device, more than the budget",
        expected=f"at most {format_bytes(budget)}",
        got=", ".join(f"{name} {format_bytes(number)}" for name, number in parts.items() if number)
        + f", before activations and gradients{f', with {flags}' if flags else ''}",
        hint=f"take {lower}a smaller model, or a device with more memory",
    )


def _advice(config: FinetuneConfig, ours: Needs, budget: int, kept: _Kept, on_try: Callable[[str], None]) -> str:
    """Return a hint: settings that are enough, with their bytes; if none is enough, settings that help."""

    def size(change: Mapping[str, Any]) -> int | None:
        on_try(_flags(change))
        return _size(config, change)

    sizes: dict[str, int] = {}
    for change in _of_optimizer(config):  # counted, not compiled, since only the optimizer state moves
        sizes[_flags(change)] = ours.device_bytes - ours.by_part.get("optimizer", 0)
    least: dict[str, float] = {}
    for change in _single_changes(config):
        if kept.bytes(change) > budget:
            least[_flags(change)] = kept.bytes(change)
        elif (found := size(change)) is not None:
            sizes[_flags(change)] = found
    for field, smallest in (("batch_size", 1), ("seq_len", _LEAST_LENGTH)):
        if kept.bytes({}) <= budget and getattr(config, field) > smallest:
            sizes |= _fewer(config, field, smallest, ours, budget, size)
    sizes = {flags: size for flags, size in sizes.items() if size < ours.device_bytes}
    enough = {flags: size for flags, size in sizes.items() if size <= budget}
    for change in _together(config):
        if not enough and kept.bytes(change) <= budget:
            found = size(change)
            enough = {_flags(change): found} if found is not None and found <= budget else {}
    if enough:
        return "enough is " + ", or ".join(map(_said, enough.items()))
    less = [f"{flags} (more than {format_bytes(int(size))})" for flags, size in least.items()
            if size < kept.bytes({})]  # fmt: skip
    if sizes or less:
        return "none of these is enough: " + ", ".join([*map(_said, sizes.items()), *less])
    return "take a smaller model, or a device with more memory"


def _fewer(
    config: FinetuneConfig,
    field: str,
    least: int,
    ours: Needs,
    budget: int,
    size_of: Callable[[Mapping[str, Any]], int | None],
) -> dict[str, int]:
    """Search the largest batch or length that fits.

    Linear interpolation between the bytes of the least value and of the configured one gives a candidate, which is
    then compiled.
    """
    smallest, most = _smaller(config, field, least), getattr(config, field)
    size = size_of(smallest)
    if size is None or size > budget:
        return {} if size is None else {_flags(smallest): size}
    slope = (ours.device_bytes - size) / (most - least)
    wanted = least + int((budget - size) / slope) if slope > 0 else least
    wanted -= wanted % _LEAST_LENGTH if field == "seq_len" else 0
    if least < wanted < most:
        larger = _smaller(config, field, wanted)
        fits = size_of(larger)
        if fits is not None and fits <= budget:
            return {_flags(larger): fits}
    return {_flags(smallest): size}


def _said(each: tuple[str, int]) -> str:
    return f"{each[0]} (about {format_bytes(each[1])})"


def _of_optimizer(config: FinetuneConfig) -> Iterator[dict[str, Any]]:
    """Yield the change that moves the optimizer state off the device, if it is there."""
    if not config.full and "optimizer" not in (config.offload or ()):
        yield {"offload": (*(config.offload or ()), "optimizer")}


def _single_changes(config: FinetuneConfig) -> Iterator[dict[str, Any]]:
    """Yield changes of one remedy each."""
    if not config.full and config.quantize is None:
        yield {"quantize": "nf4"}
    if not config.full and config.quantize_embeddings is None:
        yield {"quantize_embeddings": "int8"}
    if config.full and config.state_dtype == "float32":
        yield {"state_dtype": "8bit"}
    if config.full and config.param_dtype != "bfloat16":
        yield _few_bits(config)
    if not config.remat:
        yield {"remat": True}
    if config.remat and not config.full and "parameters" not in (config.offload or ()):
        # With g layers a group, L/g group inputs and the g layer inputs of one group are live: least at g = sqrt(L).
        size = round(models.load_config(directory_of(config)).num_layers ** 0.5)
        if size > config.layers_per_remat == 1:
            yield {"layers_per_remat": size}
    if config.num_microbatches < config.batch_size:
        yield {"num_microbatches": config.batch_size}
    for word in ("activations", "parameters"):
        if not config.full and word not in (config.offload or ()):
            change: dict[str, Any] = {"offload": (*(config.offload or ()), word)}
            yield change if config.remat else {**change, "remat": True}


def _few_bits(config: FinetuneConfig) -> dict[str, Any]:
    """Return the change to five bytes a parameter for full-parameter tuning; fewer if `state_dtype` is lower."""
    form = "8bit" if config.state_dtype == "float32" else config.state_dtype
    return {"state_dtype": form, "param_dtype": "bfloat16"}


def _together(config: FinetuneConfig) -> Iterator[dict[str, Any]]:
    """Yield combined changes: one sequence of the least length, then also low precision, then also host memory."""
    change = _smaller(config, "batch_size", 1) | {"seq_len": min(config.seq_len, _LEAST_LENGTH)}
    change |= {} if config.remat else {"remat": True}
    if config.full:
        yield change
        yield {**change, **_few_bits(config)}
        return
    few_bits = {"quantize_embeddings": config.quantize_embeddings or "int8"}
    on_host = {"offload": (*dict.fromkeys((*(config.offload or ()), "parameters", "optimizer")),)}
    without = {"offload": (*dict.fromkeys((*(config.offload or ()), "optimizer")),)}
    packed = (
        few_bits if models.quantization_of(directory_of(config)) else {"quantize": config.quantize or "nf4"} | few_bits
    )
    yield change | packed
    yield change | packed | without
    yield change | few_bits | on_host


def _smaller(config: FinetuneConfig, field: str, value: int) -> dict[str, Any]:
    if field != "batch_size" or config.num_microbatches == 1:
        return {field: value}
    return {field: value, "num_microbatches": math.gcd(value, config.num_microbatches)}


def _size(config: FinetuneConfig, change: Mapping[str, Any]) -> int | None:
    """Return the device bytes of a run with changed settings; None if they contradict each other."""
    try:
        return needs(dataclasses.replace(config, **change)).device_bytes
    except (LowtideError, NotImplementedError, jax.errors.JaxRuntimeError):
        return None


def _flags(change: Mapping[str, Any]) -> str:
    parts: list[str] = []
    for name, value in change.items():
        parts += [flag_of(name)] if value is True else [f"{flag_of(name)} {_word(value)}"]
    return " ".join(parts)


def _word(value: Any) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _on_device(tree: Tree) -> list[Any]:
    """Return the leaves that are not in host memory."""
    return [leaf for leaf in jax.tree.leaves(tree) if getattr(leaf.sharding, "memory_kind", None) != "pinned_host"]


def _parted(report: MemoryReport, names: Mapping[str, str], unread: int = 0) -> Needs:
    parts: dict[str, int] = {}
    for role, name in names.items():
        parts[name] = parts.get(name, 0) + report.by_role.get(role, 0)
    parts[names["frozen"]] += unread
    total = report.device_bytes + unread
    return Needs(device_bytes=total, by_part={**parts, _REST: max(total - sum(parts.values()), 0)})
