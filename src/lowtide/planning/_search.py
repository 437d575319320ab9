"""Search for the fastest choice of a step that fits a budget; bytes are those of compiled steps.

A choice says for each named value whether it is kept, moved to the host or recomputed, and gives the placement of
layer inputs, optimizer state and parameters, the layers of a recomputed group, and the number of microbatches.

A linear model of memory, the sum of arguments, layer inputs and kept values, is wrong by hundreds of MiB. The compiler
schedules and fuses each choice anew, and a kept value may remove others. So the model only says what to compile next.
Its errors are corrected from all choices that were compiled, by Bayesian linear regression (Bishop, Pattern Recognition
and Machine Learning, section 3.3). The prediction of a choice has a standard deviation. Until a choice fits, the
fastest one that is predicted to fit is compiled next. Then those faster than it are compiled, in the order of expected
gain: the share of time that a choice saves, times the probability that it fits.

For a TPU a cheap compilation comes first (`probe_step`). It rejects choices, but only a whole compilation accepts one.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from ..core import ConfigError, OutOfMemoryError, format_bytes, memory_space, tree_bytes
from ..core._compat import jit_options
from ..jaxprs import jaxpr_flops, plain
from ..memory import Job
from ..targets import Target
from ._compiler import Size, compile_step, probe_step
from ._cost import rates
from ._decisions import Action, Decision, Measured, Memory, Remat, measure, remat
from ._plan import Attempt, Plan, label_parts

MAX_COMPILATIONS = 15
"""Largest number of choices to compile, for a TPU cheaply; twice as many while none fits."""
_WEIGHT_READS = 3
"""How often a microbatch reads each weight: forward pass, recomputation, backward pass."""
_MAX_DECISIONS = 8
"""With more names, those that save the fewest FLOPs for each byte are recomputed."""
_PROBE_ERROR, _CALIBRATED_ERROR, _LEAST_OFFSET = 0.035, 0.01, 0.5
"""A probe of a large step is assumed to state at most the first share too much (see `probe_step`). Once another choice
was compiled whole, its difference to its probe is known: at least half of it is added, and the second share applies."""
_VALUE_ERROR, _NOISE, _LIMIT = 1.5, 0.2, 2.5
"""Standard deviations of the error of one value and of one compilation, as multiples of the bytes of the value and of
the largest value in `_ERROR_LAYERS` layers, and the number of standard deviations that excludes a choice. With these,
160 of 160 searches over 32 policies found the best one in 15 compilations at most (`benchmarks/plan_truth.py`)."""
_ERROR_LAYERS = 6
"""Errors of the linear model come from a layer's temporary values, so they do not grow with the number of layers."""
_LEAST_GAIN = 1e-6
"""A choice is not compiled if its gain over the best one, times the probability that it fits, is a smaller share."""
_LEAST_SCALE = 0.03
"""The largest value counts as at least this share of the arguments, for steps without named values."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """The part of a choice that the caller's step implements; layer inputs are moved by `Remat` if there is a stack."""

    num_microbatches: int = 1
    optimizer: Memory = "device"
    """Memory of the optimizer state between steps."""
    parameters: Memory = "device"
    """Memory of frozen layers between uses."""
    layer_inputs: Memory = "device"
    """Memory of the layers' inputs until the backward pass."""


def all_placements(
    numbers: Sequence[int],
    *,
    optimizer: Sequence[Memory] = ("device",),
    parameters: Sequence[Memory] = ("device",),
    layer_inputs: Sequence[Memory] = ("device",),
) -> list[Placement]:
    """Return a placement for each combination; `numbers` are the numbers of microbatches."""
    return [Placement(*values) for values in itertools.product(numbers, optimizer, parameters, layer_inputs)]


@dataclasses.dataclass(frozen=True)
class Problem:
    """A step whose use of memory is to be chosen."""

    job: Callable[[Placement], Job]
    """Returns the step with a placement; its arguments are shapes."""
    placements: Sequence[Placement]
    """The placements that may be chosen. They are sorted by time, so their order has no effect."""
    target: Target
    """The hardware to compile for."""
    budget_bytes: int
    """Bytes that the step may use on one device."""
    has_stack: bool = True
    """Whether the loss runs a `lowtide.core.LayerStack`. Without one, only placements are chosen."""
    allows_exposed_copies: bool = False
    """Whether copies to and from the host may take longer than the passes that hide them."""


@dataclasses.dataclass(frozen=True)
class _Choice:
    placement: Placement
    layers_per_remat: int
    actions: tuple[Action, ...]
    """The action of each measured decision."""


@dataclasses.dataclass(frozen=True)
class _Arguments:
    """Bytes of the arguments of a step with a placement."""

    on_device: int
    weights: int
    """Arguments that each microbatch reads, in both memories."""
    state: int
    """Optimizer state, in both memories."""
    hosted_layers: int
    hosted_state: int


def search(problem: Problem, *, on_compile: Callable[[Attempt], None] | None = None) -> Plan:
    """Return the fastest choice, by estimated time, whose compiled step fits the budget.

    Args:
        problem: the step, the choices and the budget.
        on_compile: called after each compilation, cheap or whole.

    Returns:
        The plan.

    Raises:
        ConfigError: when the loss runs no `LayerStack.hidden`, or no placement is given.
        OutOfMemoryError: when no choice fits.

    Memory:
        One compilation at a time. `MAX_COMPILATIONS` limits their number; for a TPU that of the cheap ones. Whole ones
        follow only for choices that may be the best.
    """
    if not problem.placements:
        raise ConfigError("a plan needs at least one placement", hint="pass [Placement()]")
    run = _Search(problem, on_compile)
    best = run.best()
    if best is None:
        raise run.error()
    return run.plan(best)


def plan_job(job: Job, target: Target, budget: int, *, on_compile: Callable[[Attempt], None] | None = None) -> Plan:
    """Plan a step that is given as a job: only what the layers of its stack keep is chosen.

    Raises:
        ConfigError: when the step runs no `LayerStack.hidden`.
        OutOfMemoryError: when no choice fits.
    """
    if job.static_argnums not in (None, (), []):
        raise ConfigError("a job with static arguments cannot be planned", hint="bind them with functools.partial")
    fn, kwargs = job.fn, dict(job.kwargs)
    donated = jit_options(fn)[0] if hasattr(fn, "lower") else job.donate_argnums
    if kwargs:  # plans handle positional arguments only; a dictionary is the last one
        original = fn
        job = dataclasses.replace(job, args=(*job.args, kwargs), kwargs={}, roles=None)
        job = dataclasses.replace(job, fn=lambda *args: original(*args[:-1], **args[-1]))
    job = dataclasses.replace(job, donate_argnums=donated)
    return search(Problem(lambda _: job, [Placement()], target, budget), on_compile=on_compile)


def search_formats(
    problem: Callable[[tuple[str, ...]], Problem],
    formats: Sequence[str],
    allow: Sequence[str],
    *,
    on_compile: Callable[[Attempt], None] | None = None,
) -> Plan:
    """Search without formats; if nothing fits, search with each allowed one, in their order, and at last with all.

    Args:
        problem: returns the problem with the given formats.
        formats: all formats, in the order in which they are tried.
        allow: the formats that may be used.
        on_compile: as in `search`.

    Raises:
        ConfigError: as in `search`.
        OutOfMemoryError: when no choice fits; the hint names formats that were not allowed.
    """
    allowed = [name for name in formats if name in allow]
    errors: list[OutOfMemoryError] = []
    for used in [(), *((name,) for name in allowed), *([tuple(allowed)] if len(allowed) > 1 else [])]:
        try:
            plan = search(problem(used), on_compile=on_compile)
        except OutOfMemoryError as error:
            errors.append(error)
            continue
        return dataclasses.replace(plan, formats=used)
    others = [name for name in formats if name not in allowed]
    last = errors[-1]
    hint = f"{last.hint}, or allow {' or '.join(others)}" if others else last.hint
    raise OutOfMemoryError(last.message, got=last.got, hint=hint)


class _Search:
    """The state of one search. Mutable: it collects compiled choices."""

    def __init__(self, problem: Problem, on_compile: Callable[[Attempt], None] | None) -> None:
        self._problem, self._on_compile = problem, on_compile
        self._rates = rates(problem.target)
        # Caches of this object: those of its class would keep the model alive.
        for name in ("choices", "seconds", "_features", "_arguments"):
            setattr(self, name, functools.cache(getattr(self, name)))
        self.job = functools.cache(problem.job)
        # With more microbatches, the loss is traced more than once.
        first = min(problem.placements, key=lambda item: (_on_host(item), item.num_microbatches))
        job = self.job(dataclasses.replace(first, num_microbatches=1))
        with jax.default_device(problem.target.devices()[0]):
            if problem.has_stack:
                measured = measure(job.fn, job.args, problem.target)
                self.measured = _limited(measured)
            else:
                flops = jaxpr_flops(plain(jax.jit(job.fn).trace(*job.args).jaxpr))
                self.measured = measured = Measured((), flops, flops // 4)  # forward, recomputation, backward
        self._recomputed = tuple(item for item in measured.decisions if item not in self.measured.decisions)
        self.sizes: dict[_Choice, Size] = {}
        self.probes: dict[_Choice, int] = {}
        self._attempts: dict[_Choice, Attempt] = {}
        self._positions: dict[_Choice, int] = {}
        self._tries_smallest = False
        self._can_probe = problem.target.platform == "tpu"
        self._decision_bytes = [item.num_bytes for item in self.measured.decisions]
        self._input_bytes = self.measured.input_bytes

    def best(self) -> _Choice | None:
        """Compile choices until no faster one may fit, and return the fastest that fits; None if none fits."""
        choices = self.choices()
        while True:
            known = [self._least_bytes(choice) <= self._problem.budget_bytes for choice in self._known]
            fitting = [choice for choice, fits in zip(self._known, known, strict=True) if fits]
            best = min(fitting, key=lambda choice: self.seconds(choice)[1], default=None)
            # The first whole compilation for a TPU corrects the probes.
            is_uncorrected = best is not None and not self.sizes
            is_last = is_uncorrected or len(known) >= (MAX_COMPILATIONS if best else 2 * MAX_COMPILATIONS)
            choice = None if is_last else self._next(choices, best)
            if choice is not None:
                self._measure(choice)
            elif best is not None and best not in self.sizes:
                self.compile(best)
            elif best is not None or self._tries_smallest or len(self.sizes) == len(choices):
                return best
            else:  # for the error, too
                self._tries_smallest = True
                rest = [choice for choice in choices if choice not in self.sizes]
                predictions = self._predict()[0]
                self.compile(min(rest, key=lambda choice: predictions[self._positions[choice]]))

    def _next(self, choices: list[_Choice], best: _Choice | None) -> _Choice | None:
        """Return the choice to compile next, or None if none that is faster than `best` may fit."""
        budget, known = self._problem.budget_bytes, set(self._known)
        limit = math.inf if best is None else self.seconds(best)[1]
        predictions, deviations = self._predict()
        most = budget * self._problem.target.num_devices  # arguments may be sharded
        room = {item: self._arguments(item).on_device <= most for item in self._problem.placements}
        flags = [room[item.placement] and item not in known and self.seconds(item)[1] < limit for item in choices]
        is_open = np.array(flags)
        excess = (predictions - budget) / deviations
        is_possible = is_open & (excess <= _LIMIT)
        if not (is_possible.any() or (is_open.any() and not known)):
            return None
        if best is None:
            likely = is_open & (predictions <= budget)
            # After many misses, take the smallest choice, also for the error.
            is_fastest = likely.any() and len(known) < MAX_COMPILATIONS // 2
            return choices[int(np.argmax(likely) if is_fastest else np.argmin(np.where(is_open, predictions, np.inf)))]
        chances = _probability_to_fit(excess)
        gains = (1 - np.array([self.seconds(choice)[1] for choice in choices]) / limit) * chances * is_possible
        return choices[int(np.argmax(gains))] if gains.max(initial=0) > _LEAST_GAIN else None

    def _predict(self) -> tuple[Any, Any]:
        """Return the predicted bytes of all choices, and their standard deviations."""
        features, model, scale = self._features()
        if not self._known:
            return model, np.full(len(model), scale)
        positions = [self._positions[choice] for choice in self._known]
        errors = np.array([self._likely_bytes(choice) for choice in self._known]) - model[positions]
        prior, noise = self._prior(features.shape[1], scale), (_NOISE * scale) ** 2
        rows = features[positions]
        covariance = np.linalg.inv(rows.T @ rows / noise + np.diag(1 / prior**2))
        mean = covariance @ (rows.T @ errors / noise)
        variance = np.einsum("ij,jk,ik->i", features, covariance, features) + noise
        return model + features @ mean, np.sqrt(variance)

    def _features(self) -> tuple[Any, Any, float]:
        """Return the features of all choices, their bytes by the linear model, and the bytes of the largest value."""
        rows: list[list[float]] = []
        for choice in self.choices():
            placement, share = choice.placement, 1 / choice.placement.num_microbatches
            values = [share * (action == kind) for kind in ("keep", "host") for action in choice.actions]
            places = [share * (placement.layer_inputs == "host"), share * (choice.layers_per_remat > 1)]
            hosted = [float(memory == "host") for memory in (placement.optimizer, placement.parameters)]
            rows.append([1.0, share, *values, *places, *hosted])
        model = np.array([self._model_bytes(choice) for choice in self.choices()])
        arguments = self._arguments(self._problem.placements[0]).on_device
        return np.array(rows), model, max([*self._error_bytes, _LEAST_SCALE * arguments])

    @property
    def _error_bytes(self) -> list[float]:
        """Return the bytes of each value in `_ERROR_LAYERS` layers."""
        share = min(_ERROR_LAYERS / max(self.measured.num_layers, 1), 1.0)
        return [share * num_bytes for num_bytes in self._decision_bytes]

    def _prior(self, num_features: int, scale: float) -> Any:
        """Return the prior standard deviation of each feature's error; activations of a layer may have any size."""
        prior = np.full(num_features, _VALUE_ERROR * scale)
        prior[1] = 1e3 * scale
        values = (np.array(self._error_bytes) + scale) / 2
        prior[2 : 2 + 2 * len(values)] = _VALUE_ERROR * np.tile(values, 2)
        return prior

    @property
    def _known(self) -> list[_Choice]:
        return [*self.sizes, *(choice for choice in self.probes if choice not in self.sizes)]

    def _measure(self, choice: _Choice) -> None:
        """Compile a choice: cheaply for a TPU, if that works."""
        if self._can_probe:
            estimate = probe_step(self.job(choice.placement), self._hidden(choice), self._problem.target)
            if estimate is not None:
                self.probes[choice] = estimate
                self._report(choice, estimate, 0, is_compiled=False)
                return
            self._can_probe = False
        self.compile(choice)

    # --- choices and their time ------------------------------------------------------------------------------------

    def choices(self) -> list[_Choice]:
        """Return all choices, the fastest first; of equally fast choices, the one with fewer data on the host."""
        placements = sorted(set(self._problem.placements), key=lambda item: item.num_microbatches)
        choices = [choice for placement in placements for choice in self._choices_of(placement)]
        choices.sort(key=lambda item: (self.seconds(item)[1], _on_host(item.placement), self._model_bytes(item)))
        self._positions = {choice: position for position, choice in enumerate(choices)}
        return choices

    def _choices_of(self, placement: Placement) -> Iterator[_Choice]:
        """Yield the choices of a placement; copies of values stay within the passes that hide them."""
        count = len(self.measured.decisions)
        nothing: tuple[Action, ...] = ("recompute",) * count
        is_whole = placement.parameters == "host" or not self._problem.has_stack
        plain_actions: list[tuple[Action, ...]] = [nothing]
        if not is_whole:
            actions: tuple[Action, ...] = ("recompute", "keep", "host") if self._rates.link else ("recompute", "keep")
            plain_actions = list(itertools.product(actions, repeat=count))
        choices = [_Choice(placement, 1, item) for item in plain_actions]
        if not is_whole and self.measured.layers_per_remat > 1:
            choices.append(_Choice(placement, self.measured.layers_per_remat, nothing))
        for choice in choices:
            if self._problem.allows_exposed_copies or self._exposed_value_seconds(choice) == 0:
                yield choice

    def seconds(self, choice: _Choice) -> tuple[float, float]:
        """Return the estimated time of a step, with and without overlap of operations and memory traffic."""
        placement = choice.placement
        arguments = self._arguments(placement)
        # The backward pass reads a value, and first writes it if it recomputes it or copies it from the host.
        values = sum(self._decision_bytes) * 2 - sum(self._bytes_of(choice, "keep"))
        traffic = values + _WEIGHT_READS * placement.num_microbatches * arguments.weights + 2 * arguments.state
        return self._rates.seconds(self.flops(choice), traffic, self._exposed(choice))

    def flops(self, choice: _Choice) -> int:
        items = zip(self.measured.decisions, choice.actions, strict=True)
        saved = sum(item.flops for item, action in items if action != "recompute")
        return self.measured.flops - saved + (self.measured.group_flops if choice.layers_per_remat > 1 else 0)

    def _exposed(self, choice: _Choice) -> float:
        """Return seconds of host copies that no pass hides."""
        forward = self.measured.recomputed_flops
        backward = self.flops(choice) - forward
        moved = self._moved_bytes(choice)
        arguments = self._arguments(choice.placement)
        layers = arguments.hosted_layers * choice.placement.num_microbatches
        # The link carries both directions at once. Layers are read in both passes.
        exposed = self._rates.exposed_seconds
        seconds = exposed(max(moved, layers), forward) + exposed(moved + layers, backward)
        return seconds + exposed(arguments.hosted_state, 0)

    def _exposed_value_seconds(self, choice: _Choice) -> float:
        """Return seconds of copies of values and layer inputs that no pass hides, if the plan may avoid them."""
        forward = self.measured.recomputed_flops
        moved = self._moved_bytes(choice)
        if all(placement.layer_inputs == "host" for placement in self._problem.placements):
            moved -= self._hosted_inputs(choice)  # the caller has decided
        exposed = self._rates.exposed_seconds
        return exposed(moved, forward) + exposed(moved, self.flops(choice) - forward) if moved > 0 else 0.0

    def _moved_bytes(self, choice: _Choice) -> float:
        return sum(self._bytes_of(choice, "host")) + self._hosted_inputs(choice)

    def _hosted_inputs(self, choice: _Choice) -> float:
        return self._live_inputs(choice, "device") if choice.placement.layer_inputs == "host" else 0

    # --- bytes -------------------------------------------------------------------------------------------------------

    def _model_bytes(self, choice: _Choice) -> float:
        """Return the bytes of a choice by a linear model: arguments, values and layer inputs."""
        return self._arguments(choice.placement).on_device + sum(self._components(choice))

    def _least_bytes(self, choice: _Choice) -> float:
        """Return the bytes that a choice needs at least, from its own compilation: exact, or a probe."""
        if choice in self.sizes:
            return self.sizes[choice].device_bytes
        if not (offsets := self._probe_offsets):
            return (1 - _PROBE_ERROR) * self.probes[choice]
        return (1 - _CALIBRATED_ERROR) * self.probes[choice] + min(min(offsets), _LEAST_OFFSET * min(offsets))

    def _likely_bytes(self, choice: _Choice) -> float:
        """Return the bytes of a choice from its own compilation: exact, or from a probe."""
        if choice in self.sizes:
            return self.sizes[choice].device_bytes
        offsets = self._probe_offsets
        return self.probes[choice] + (sum(offsets) / len(offsets) if offsets else 0)

    @property
    def _probe_offsets(self) -> list[float]:
        """Bytes that whole compilations need in addition to probes: at least those of the generated code."""
        compiled = (choice for choice in self.sizes if choice in self.probes)
        return [self.sizes[choice].device_bytes - self.probes[choice] for choice in compiled]

    def _components(self, choice: _Choice) -> list[float]:
        """Return the device bytes of each named value, and of layer inputs, at the end of the forward pass."""
        number = choice.placement.num_microbatches
        inputs = self._live_inputs(choice, choice.placement.layer_inputs)
        return [value / number for value in [*self._bytes_of(choice, "keep"), inputs]]

    def _live_inputs(self, choice: _Choice, memory: Memory) -> float:
        """Return the bytes of layer inputs of a whole batch that are live with their place in `memory`."""
        if memory == "host" or not self.measured.num_layers:
            return 0
        groups = -(-self.measured.num_layers // choice.layers_per_remat)
        return self._input_bytes * groups / self.measured.num_layers

    def _bytes_of(self, choice: _Choice, action: Action) -> list[int]:
        return [
            num_bytes if chosen == action else 0
            for num_bytes, chosen in zip(self._decision_bytes, choice.actions, strict=True)
        ]

    def _arguments(self, placement: Placement) -> _Arguments:
        job = self.job(placement)
        position = (job.roles or {}).get("optimizer")
        state = job.args[position] if isinstance(position, int) else ()
        hosted, hosted_state = (
            tree_bytes([leaf for leaf in jax.tree.leaves(tree) if memory_space(leaf) != jax.memory.Space.Device])
            for tree in (job.args, state)
        )
        total, state_bytes = tree_bytes(job.args), tree_bytes(state)
        layers = hosted - hosted_state if placement.parameters == "host" else 0
        return _Arguments(total - hosted, total - state_bytes, state_bytes, layers, hosted_state)

    # --- compilation -------------------------------------------------------------------------------------------------

    def compile(self, choice: _Choice) -> Size:
        """Compile a choice, or return what an earlier compilation gave."""
        if choice not in self.sizes:
            size = compile_step(self.job(choice.placement), self._hidden(choice), self._problem.target)
            self.sizes[choice] = size
            self._report(choice, size.device_bytes, size.host_bytes)
        return self.sizes[choice]

    def _hidden(self, choice: _Choice) -> Remat | None:
        if not self._problem.has_stack:
            return None
        return remat(self._decisions(choice), choice.placement.layer_inputs, choice.layers_per_remat)

    def _decisions(self, choice: _Choice) -> tuple[Decision, ...]:
        number = choice.placement.num_microbatches
        rest: list[tuple[Decision, Action]] = [(item, "recompute") for item in self._recomputed]
        return tuple(
            dataclasses.replace(item, action=action, num_bytes=item.num_bytes // number)
            for item, action in [*zip(self.measured.decisions, choice.actions, strict=True), *rest]
        )

    def _report(self, choice: _Choice, device_bytes: int, host_bytes: int, *, is_compiled: bool = True) -> None:
        label, number = _label(self._decisions(choice), choice), choice.placement.num_microbatches
        seconds = self.seconds(choice)[1]
        self._attempts[choice] = attempt = Attempt(label, number, seconds, device_bytes, host_bytes, is_compiled)
        if self._on_compile is not None:
            self._on_compile(attempt)

    def plan(self, choice: _Choice) -> Plan:
        size, placement = self.sizes[choice], choice.placement
        return Plan(
            target=self._problem.target.name,
            budget_bytes=self._problem.budget_bytes,
            num_microbatches=placement.num_microbatches,
            decisions=self._decisions(choice),
            layer_inputs=placement.layer_inputs,
            layers_per_remat=choice.layers_per_remat,
            optimizer=placement.optimizer,
            parameters=placement.parameters,
            has_stack=self._problem.has_stack,
            device_bytes=size.device_bytes,
            host_bytes=size.host_bytes,
            flops=self.flops(choice),
            seconds=self.seconds(choice),
            other_choice=self._choice_by_other_bound(choice),
            owners=size.owners,
            attempts=tuple(self._attempts.values()),
        )

    def _choice_by_other_bound(self, choice: _Choice) -> str | None:
        """Return the compiled choice that fits and is faster if memory traffic overlaps with operations, or None."""
        budget = self._problem.budget_bytes
        fitting = [other for other, size in self.sizes.items() if size.device_bytes <= budget]
        best = min(fitting, key=lambda other: (self.seconds(other)[0], other != choice))
        return None if best == choice else _label(self._decisions(best), best)

    def error(self) -> OutOfMemoryError:
        smallest = min((self._attempts[choice] for choice in self.sizes), key=lambda item: item.device_bytes)
        parts = f"microbatches: {smallest.num_microbatches}, {smallest.label}"
        return OutOfMemoryError(
            f"no choice fits the budget of {format_bytes(self._problem.budget_bytes)} on {self._problem.target.name}",
            got=f"{format_bytes(smallest.device_bytes)} with {parts} (compiled)",
            hint="use a smaller batch, shorter sequences or quantised weights",
        )


def _label(decisions: Sequence[Decision], choice: _Choice) -> str:
    return "; ".join(label_parts(decisions, choice.placement, choice.layers_per_remat)) or "all on the device"


def _limited(measured: Measured) -> Measured:
    """Return at most `_MAX_DECISIONS` decisions, those that save the most FLOPs for each byte, and none without."""
    best = sorted(measured.decisions, key=lambda item: -item.flops / max(item.num_bytes, 1))[:_MAX_DECISIONS]
    kept = tuple(item for item in measured.decisions if item in best and item.flops)
    return dataclasses.replace(measured, decisions=kept)


def _probability_to_fit(excess: Any) -> Any:
    """Return the probability that a normal variable is below its mean less `excess` standard deviations."""
    return np.vectorize(lambda value: math.erfc(value / math.sqrt(2)) / 2, otypes=[float])(excess)


def _on_host(placement: Placement) -> int:
    return [placement.optimizer, placement.parameters, placement.layer_inputs].count("host")
