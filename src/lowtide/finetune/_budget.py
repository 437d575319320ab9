"""Compute the device memory that a run needs before weights are loaded, and find settings that need less.

The training step is compiled from shapes, so the figures come from the compiler. A batch has the columns
`segment_ids` and `positions` if `FinetuneConfig.is_packed` is true.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from .. import models
from ..core import LowtideError, OutOfMemoryError, Tree, format_bytes, partition, tree_bytes
from ..memory import Job, Target
from ..planning import Attempt, Plan, Problem, search
from ..targets import resolve_target
from ._base import directory_of, refuse_for_model
from ._config import FinetuneConfig, flag_of, with_seq_len
from ._job import WRT, JobPlan

_LEAST_LENGTH = 32
_ACTIVATIONS = "activations and gradients"
_PART_NAMES = {"frozen": "base", "trainable": "adapters", "optimizer": "optimizer", "batch": "batch"}
_ARGUMENT_SETTINGS = ("quantize", "quantize_embeddings", "offload", "state_dtype", "param_dtype")
"""Settings that change the bytes of the step's arguments on the device."""
_FULL_PART_NAMES = {"state": "weights and optimizer", "frozen": "weights", "batch": "batch"}


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
    """Compile the training step of a run from shapes, and return the device memory that the run needs.

    Args:
        config: the settings. The files of ``config.adapter`` are read, but not the model's weights.
        target: device to compile for; None for the hardware at hand.

    Returns:
        The bytes on one device, in total and by part.

    Raises:
        ModelFileError: when `config.json` or the adapter cannot be read.
        SelectionError: when a pattern in ``config.targets`` matches nothing.
        ConfigError: for settings that the model does not support.
        TargetError: when `target` is an unknown device.

    Memory:
        The compiler takes host memory. The device holds only the adapter of ``config.adapter``, if it is set.
    """
    plan = JobPlan.from_shapes(config, target)
    report = plan.job().analyze(target)
    part_names, num_unread = _FULL_PART_NAMES if config.full else _PART_NAMES, 0
    if not config.full:
        # A weight that `modules_to_save` replaces is still on the device, although no step reads it. jit drops unused
        # arguments, so the report does not count it.
        frozen = partition(plan.model, WRT)[1]
        num_unread = max(tree_bytes(_device_leaves(frozen)) - report.by_role.get("frozen", 0), 0)
    parts = {name: report.by_role.get(role, 0) for role, name in part_names.items()}
    parts[part_names["frozen"]] += num_unread
    total = report.device_bytes + num_unread
    return Needs(device_bytes=total, by_part={**parts, _ACTIVATIONS: max(total - sum(parts.values()), 0)})


def within(config: FinetuneConfig, budget: int, *, on_try: Callable[[str], None] | None = None) -> str:
    """Raise an error for a run that needs more device memory than a budget, before any weight is loaded.

    First, the bytes of the step's arguments (weights, adapters, optimizer state) are counted, for these settings and
    for changed settings that need fewer bytes. If all of them exceed the budget, nothing is compiled. Otherwise the
    step is compiled. If it needs more than the budget, it is compiled again with changed settings that may fit.

    Args:
        config: the settings.
        budget: device memory in bytes that the run may use.
        on_try: called with the command-line flags of each change, before the step is compiled with that change.

    Returns:
        A line that states the needed memory.

    Raises:
        OutOfMemoryError: when the run needs more than `budget`; the error lists bytes by part, and settings to change.
        ModelFileError, SelectionError, ConfigError: as `needs`.

    Memory:
        As `needs`.
    """
    directory = directory_of(config)
    refuse_for_model(config, directory)
    config = with_seq_len(config, models.load_config(directory).max_position_embeddings)
    counter = _ArgumentCounter(config)
    _refuse_large_arguments(config, budget, counter)
    memory = needs(config)
    if memory.device_bytes <= budget:
        return f"{memory.device_bytes / budget:.0%} of the budget of {format_bytes(budget)}: about {memory}"
    message = f"this run needs about {format_bytes(memory.device_bytes)} of the device"
    hint = _advice(config, memory, budget, counter, on_try or (lambda flags: None))
    raise OutOfMemoryError(f"{message}, more than the budget of {format_bytes(budget)}", got=str(memory), hint=hint)


def plan_within(
    config: FinetuneConfig,
    budget: int,
    target: Target | str | None = None,
    *,
    on_compile: Callable[[Attempt], None] | None = None,
) -> Plan | None:
    """Return the fastest step of a run that fits a budget, or None for a run whose step a plan cannot change.

    A plan cannot change full tuning, layers or layer inputs on the host, groups of layers, or ``remat = false``.

    Args:
        config: the settings. If `num_microbatches` is 1, all divisors of `batch_size` may be chosen.
        budget: device memory in bytes that the run may use.
        target: device to compile for; None for the hardware at hand.
        on_compile: called after each compilation.

    Raises:
        OutOfMemoryError: when no choice fits.
        ModelFileError, SelectionError, ConfigError: as `needs`.

    Memory:
        As `lowtide.plan`.
    """
    is_placed = {"activations", "parameters"} & set(config.offload or ())
    if config.full or is_placed or not config.remat or config.layers_per_remat > 1:
        return None
    drops_updates = "optimizer" not in (config.offload or ())

    def job(number: int) -> Job:
        parts = JobPlan.from_shapes(dataclasses.replace(config, num_microbatches=number), target)
        return parts.job(drops_updates=drops_updates)

    divisors = [number for number in range(1, config.batch_size + 1) if config.batch_size % number == 0]
    numbers = divisors if config.num_microbatches == 1 else [config.num_microbatches]
    return search(Problem(job, numbers, resolve_target(target), budget), on_compile=on_compile)


class _ArgumentCounter:
    """Counter of the device bytes of a step's arguments, without compilation. Mutable: it caches counts by settings."""

    def __init__(self, config: FinetuneConfig) -> None:
        self._config, self._cache = config, {_cache_key(config): _argument_bytes(config)}

    def __call__(self, change: Mapping[str, Any]) -> Mapping[str, int] | None:
        """Return the bytes by part after a change of the settings; None if the new settings contradict each other."""
        try:
            config = dataclasses.replace(self._config, **change)
            key = _cache_key(config)
            if key not in self._cache:
                self._cache[key] = _argument_bytes(config)
        except (LowtideError, NotImplementedError):
            return None
        return self._cache[key]

    def bytes(self, change: Mapping[str, Any]) -> float:
        """Return the total bytes after a change of the settings; infinity if they contradict each other."""
        parts = self(change)
        return math.inf if parts is None else sum(parts.values())


def _cache_key(config: FinetuneConfig) -> tuple[Any, ...]:
    words = [word for word in config.offload or () if word != "activations"]
    return config.quantize, config.quantize_embeddings, frozenset(words), config.state_dtype, config.param_dtype


def _argument_bytes(config: FinetuneConfig) -> dict[str, int]:
    plan = JobPlan.from_shapes(config)
    if config.full:
        trees = zip(_FULL_PART_NAMES.values(), plan.tx.init(plan.base.outer, plan.base.layers), strict=False)
        return {name: tree_bytes(_device_leaves(tree)) for name, tree in trees}
    trainable, frozen = partition(plan.model, WRT)
    parts = {"base": tree_bytes(_device_leaves(frozen)), "adapters": tree_bytes(trainable)}
    if "optimizer" in (config.offload or ()):
        return parts
    return {**parts, "optimizer": tree_bytes(jax.eval_shape(plan.tx.init, trainable))}


def _refuse_large_arguments(config: FinetuneConfig, budget: int, counter: _ArgumentCounter) -> None:
    """Raise OutOfMemoryError if the step's arguments exceed the budget with every change of the settings."""
    changes = ({}, *_optimizer_changes(config), *_single_changes(config), *_combined_changes(config))
    smallest = min(changes, key=counter.bytes)
    parts = counter(smallest) or {}
    if sum(parts.values()) <= budget:
        return
    has_rank = not config.full and config.adapter is None and config.method != "ia3"
    rank_hint = "a lower --rank, " if has_rank and parts["base"] < budget else ""
    flags = _flags({field: value for field, value in smallest.items() if field in _ARGUMENT_SETTINGS})
    message = f"this run needs more than {format_bytes(sum(parts.values()))} of the device"
    sizes = ", ".join(f"{name} {format_bytes(number)}" for name, number in parts.items() if number)
    raise OutOfMemoryError(
        f"{message}, more than the budget of {format_bytes(budget)}",
        got=f"{sizes}, before activations and gradients{f', with {flags}' if flags else ''}",
        hint=f"use {rank_hint}a smaller model, or a device with more memory",
    )


def _advice(
    config: FinetuneConfig, memory: Needs, budget: int, counter: _ArgumentCounter, on_try: Callable[[str], None]
) -> str:
    """Return a hint: settings that are enough, with their bytes; if none is enough, settings that help."""

    def try_change(change: Mapping[str, Any]) -> int | None:
        on_try(_flags(change))
        try:
            return needs(dataclasses.replace(config, **change)).device_bytes
        except (LowtideError, NotImplementedError, jax.errors.JaxRuntimeError):  # the settings contradict each other
            return None

    # This needs no compilation, since only the optimizer state leaves the device.
    num_bytes = memory.device_bytes - memory.by_part.get("optimizer", 0)
    sizes = {_flags(change): num_bytes for change in _optimizer_changes(config)}
    lower_bounds: dict[str, float] = {}
    for change in _single_changes(config):
        if counter.bytes(change) > budget:
            lower_bounds[_flags(change)] = counter.bytes(change)
        elif (num_bytes := try_change(change)) is not None:
            sizes[_flags(change)] = num_bytes
    for field, smallest in (("batch_size", 1), ("seq_len", _LEAST_LENGTH)):
        if counter.bytes({}) <= budget and getattr(config, field) > smallest:
            sizes |= _largest_that_fits(config, field, smallest, memory, budget, try_change)
    sizes = {flags: size for flags, size in sizes.items() if size < memory.device_bytes}
    sufficient = {flags: size for flags, size in sizes.items() if size <= budget}
    for change in _combined_changes(config):
        if not sufficient and counter.bytes(change) <= budget:
            num_bytes = try_change(change)
            sufficient = {_flags(change): num_bytes} if num_bytes is not None and num_bytes <= budget else {}
    if sufficient:
        return "use " + ", or ".join(map(_describe, sufficient.items()))
    insufficient = [f"{flags} (more than {format_bytes(int(size))})" for flags, size in lower_bounds.items()
            if size < counter.bytes({})]  # fmt: skip
    if sizes or insufficient:
        return "none of these is enough: " + ", ".join([*map(_describe, sizes.items()), *insufficient])
    return "use a smaller model, or a device with more memory"


def _largest_that_fits(
    config: FinetuneConfig,
    field: str,
    lower_limit: int,
    memory: Needs,
    budget: int,
    try_change: Callable[[Mapping[str, Any]], int | None],
) -> dict[str, int]:
    """Return the flags that set `field` to one smaller value, mapped to the bytes that the run then needs.

    The value is interpolated. It is `lower_limit` if the interpolated value does not fit the budget, even when
    `lower_limit` does not fit either. The result is empty if the step cannot be compiled with `lower_limit`.
    """
    smallest, current = _reduction(config, field, lower_limit), getattr(config, field)
    size = try_change(smallest)
    if size is None or size > budget:
        return {} if size is None else {_flags(smallest): size}
    slope = (memory.device_bytes - size) / (current - lower_limit)
    candidate = lower_limit + int((budget - size) / slope) if slope > 0 else lower_limit
    candidate -= candidate % _LEAST_LENGTH if field == "seq_len" else 0
    if lower_limit < candidate < current:
        change = _reduction(config, field, candidate)
        change_bytes = try_change(change)
        if change_bytes is not None and change_bytes <= budget:
            return {_flags(change): change_bytes}
    return {_flags(smallest): size}


def _describe(option: tuple[str, int]) -> str:
    return f"{option[0]} (about {format_bytes(option[1])})"


def _optimizer_changes(config: FinetuneConfig) -> Iterator[dict[str, Any]]:
    """Yield the change that moves the optimizer state to host memory; none with `full`, or if it is there already."""
    if not config.full and "optimizer" not in (config.offload or ()):
        yield {"offload": (*(config.offload or ()), "optimizer")}


def _single_changes(config: FinetuneConfig) -> Iterator[dict[str, Any]]:
    if not config.full and config.quantize is None:
        yield {"quantize": "nf4"}
    if not config.full and config.quantize_embeddings is None:
        yield {"quantize_embeddings": "int8"}
    if config.full and config.state_dtype == "float32":
        yield {"state_dtype": "8bit"}
    if config.full and config.param_dtype != "bfloat16":
        yield _low_precision_change(config)
    if not config.remat:
        yield {"remat": True}
    if config.remat and not config.full and "parameters" not in (config.offload or ()):
        # With g layers a group, L/g group inputs and g layer inputs of one group are live: fewest at g = sqrt(L).
        group_size = round(models.load_config(directory_of(config)).num_layers ** 0.5)
        if group_size > config.layers_per_remat == 1:
            yield {"layers_per_remat": group_size}
    if config.num_microbatches < config.batch_size:
        yield {"num_microbatches": config.batch_size}
    for word in ("activations", "parameters"):
        if not config.full and word not in (config.offload or ()):
            change: dict[str, Any] = {"offload": (*(config.offload or ()), word)}
            yield change if config.remat else {**change, "remat": True}


def _low_precision_change(config: FinetuneConfig) -> dict[str, Any]:
    """Return the change to bfloat16 parameters with residuals, and from float32 to 8-bit moments."""
    state_dtype = "8bit" if config.state_dtype == "float32" else config.state_dtype
    return {"state_dtype": state_dtype, "param_dtype": "bfloat16"}


def _combined_changes(config: FinetuneConfig) -> Iterator[dict[str, Any]]:
    """Yield combined changes, each with batch size 1, a sequence of at most 32 tokens, and recomputed layers.

    Full-parameter tuning gets two changes, without and with low precision. Adapters get three, all with quantised
    embeddings: (1) quantised weights; (2) quantised weights, and the optimizer state on the host; (3) weights and
    optimizer state on the host.
    """
    change = _reduction(config, "batch_size", 1) | {"seq_len": min(config.seq_len, _LEAST_LENGTH)}
    change |= {} if config.remat else {"remat": True}
    if config.full:
        yield change
        yield {**change, **_low_precision_change(config)}
        return
    embeddings = {"quantize_embeddings": config.quantize_embeddings or "int8"}
    on_host = {"offload": (*dict.fromkeys((*(config.offload or ()), "parameters", "optimizer")),)}
    optimizer_on_host = {"offload": (*dict.fromkeys((*(config.offload or ()), "optimizer")),)}
    is_quantized = models.quantization_of(directory_of(config)) is not None
    quantized = embeddings if is_quantized else {"quantize": config.quantize or "nf4"} | embeddings
    yield change | quantized
    yield change | quantized | optimizer_on_host
    yield change | embeddings | on_host


def _reduction(config: FinetuneConfig, field: str, value: int) -> dict[str, Any]:
    if field != "batch_size" or config.num_microbatches == 1:
        return {field: value}
    return {field: value, "num_microbatches": math.gcd(value, config.num_microbatches)}


def _flags(change: Mapping[str, Any]) -> str:
    parts: list[str] = []
    for name, value in change.items():
        text = ",".join(value) if isinstance(value, tuple) else str(value)
        parts.append(flag_of(name) if value is True else f"{flag_of(name)} {text}")
    return " ".join(parts)


def _device_leaves(tree: Tree) -> list[Any]:
    """Return the leaves that are not in host memory."""
    return [leaf for leaf in jax.tree.leaves(tree) if getattr(leaf.sharding, "memory_kind", None) != "pinned_host"]
