"""Plan the fastest step of a run within a budget, before weights are loaded.

The training step is compiled from shapes, so the bytes come from the compiler. A batch has the columns
`segment_ids` and `positions` if `FinetuneConfig.is_packed` is true.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .. import models
from ..core import ConfigError, check_choice
from ..memory import Job, Target, versions
from ..planning import Attempt, Memory, Placement, Plan, Problem, all_placements, search_formats
from ..targets import resolve_target
from ._base import directory_of, refuse_for_model
from ._config import FinetuneConfig, with_seq_len
from ._job import JobPlan

_WORDS = {"activations": "layer_inputs", "optimizer": "optimizer", "parameters": "parameters"}
"""Fields of a `Placement` by the word of ``FinetuneConfig.offload``."""
_NOT_IN_DIGEST = ("num_steps", "num_epochs", "schedule_steps")
"""Settings that a resumed run may change without a new plan."""
FORMATS = ("exposed_copies", "nf4_weights", "8bit_state")
"""Words that `plan_within` may allow, in the order in which they are tried: with ``full`` only the last one."""


_TILE_TOKENS = 2048
"""Tokens of a small tile. Without dropout it changes values by rounding only, so it needs no permission."""


def plan_within(
    config: FinetuneConfig,
    budget: int,
    target: Target | str | None = None,
    *,
    allow: Sequence[str] = (),
    on_compile: Callable[[Attempt], None] | None = None,
) -> Plan:
    """Return the fastest step of a run that fits a budget; `planned_config` has its settings.

    The plan chooses what each layer keeps, microbatches, and which data are on the host; with ``full``, layers are
    always recomputed. On a GPU, tiles get smaller if nothing else fits. ``offload``, ``num_microbatches`` and
    ``tile_tokens`` are chosen only if they have their default values.

    Args:
        config: the settings.
        budget: device memory in bytes that the run may use.
        target: device to compile for; None for the hardware at hand.
        allow: words of `FORMATS` that may be used if nothing else fits. ``nf4_weights`` quantises the frozen weights,
            ``8bit_state`` the optimizer state. `lowtide.plan` explains ``exposed_copies``.
        on_compile: called after each compilation.

    Raises:
        OutOfMemoryError: when no choice fits.
        ConfigError: for ``remat = false`` or groups of layers, which a plan chooses itself; for an unknown word.
        ModelFileError: when `config.json` or the adapter cannot be read.
        SelectionError: when a pattern in ``config.targets`` matches nothing.
        TargetError: when `target` is an unknown device.

    Memory:
        As `lowtide.plan`.
    """
    goal = resolve_target(target)
    if not config.remat or config.layers_per_remat > 1:
        flag = "--no-remat" if not config.remat else "--layers-per-remat"
        raise ConfigError(f"a plan chooses what layers recompute, so it excludes {flag}", hint=f"leave {flag} out")
    for word in allow:
        check_choice("a word of --allow", word, FORMATS)
    directory = directory_of(config)
    refuse_for_model(config, directory)
    config = with_seq_len(config, models.load_config(directory).max_position_embeddings)
    has_host = bool(goal.host_link_bandwidth) and not (goal.platform == "gpu" and goal.is_ahead_of_time)
    formats = ["8bit_state"] if config.full else [*FORMATS[0 if has_host else 1 :]]
    if config.quantize is not None or models.quantization_of(directory) is not None:
        formats = [word for word in formats if word != "nf4_weights"]
    memories: dict[str, tuple[Memory, ...]] = dict.fromkeys(_WORDS.values(), ("device", "host"))
    if config.offload is not None or not has_host:
        words = tuple(_WORDS) if config.full and config.offload is None else config.offload or ()
        memories = {field: ("host",) if word in words else ("device",) for word, field in _WORDS.items()}
    divisors = [number for number in range(1, config.batch_size + 1) if config.batch_size % number == 0]
    numbers = divisors if config.num_microbatches == 1 else [config.num_microbatches]
    placements = all_placements(numbers, **memories)

    def problem(used: tuple[str, ...]) -> Problem:
        def job(placement: Placement) -> Job:
            parts = JobPlan.from_shapes(_with_placement(config, placement, used), target)
            return parts.job(drops_updates=placement.optimizer == "device")

        allows_copies = "exposed_copies" in used
        possible: list[Placement] = []
        for placement in placements:
            with contextlib.suppress(ConfigError):  # contradictory settings, such as 4-bit layers on the host
                _with_placement(config, placement, used)
                possible.append(placement)
        return Problem(job, possible, goal, budget, not config.full, allows_copies)

    # Other chips have tiles of this size, or smaller ones, by default.
    is_long = goal.platform == "gpu" and config.batch_size // numbers[-1] * config.seq_len > _TILE_TOKENS
    tiles = ["small_tiles"] if is_long and config.tile_tokens is None and not config.lora_dropout else []
    plan = search_formats(problem, [*tiles, *formats], [*tiles, *allow], on_compile=on_compile)
    return dataclasses.replace(plan, digest=plan_digest(config))


def current_plan(plan: Plan, run_config: FinetuneConfig, placed: FinetuneConfig) -> Plan:
    """Return the plan of a run, made again with the same budget if the settings are others than those of the plan.

    Sequences may be shorter than assumed, or settings, hardware or versions have changed since a run began. The base
    was loaded with the settings `placed`, so its placement and formats stay.
    """
    digest = plan_digest(run_config)
    if plan.digest == digest:
        return plan
    offload = placed.offload or (None if placed.full else ())
    sizes = {"seq_len": run_config.seq_len, "num_microbatches": run_config.num_microbatches}
    allow = [word for word in plan.formats if word == "exposed_copies"]  # the others are settings of `placed`
    config = dataclasses.replace(placed, offload=offload, **sizes)
    new_plan = plan_within(config, plan.budget_bytes, plan.target, allow=allow)
    return dataclasses.replace(new_plan, formats=plan.formats, digest=digest)


def planned_config(config: FinetuneConfig, plan: Plan) -> FinetuneConfig:
    """Return the settings of a run with the microbatches, the placement and the formats that a plan has chosen."""
    return _with_placement(config, plan, plan.formats)


def plan_digest(config: FinetuneConfig) -> str:
    """Return a hash of the settings, the hardware at hand and the versions, by which a resumed run keeps its plan."""
    settings = {name: value for name, value in dataclasses.asdict(config).items() if name not in _NOT_IN_DIGEST}
    facts = {"settings": settings, "versions": versions(), "device": jax.devices()[0].device_kind}
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def _with_placement(config: FinetuneConfig, placement: Placement | Plan, used: Sequence[str]) -> FinetuneConfig:
    on_host = [word for word, field in _WORDS.items() if getattr(placement, field) == "host"]
    changes: dict[str, Any] = {"num_microbatches": placement.num_microbatches}
    if config.offload is None and set(on_host) != (set(_WORDS) if config.full else set()):
        changes["offload"] = tuple(on_host)
    if "small_tiles" in used and config.tile_tokens is None:
        changes |= {"tile_tokens": _TILE_TOKENS}
    if "nf4_weights" in used:
        changes |= {"quantize": "nf4"}
    if "8bit_state" in used:
        changes |= {"state_dtype": "8bit"}
    return dataclasses.replace(config, **changes)
