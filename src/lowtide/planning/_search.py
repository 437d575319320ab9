"""Search for the fastest choice of a step that fits a budget; bytes are those of compiled steps.

Choices are subsets of the values to keep, for each number of microbatches. They are visited in the order of estimated
time. A choice is skipped without compilation if a lower bound on its bytes exceeds the budget:

    bytes(nothing kept) + bytes of the kept values - slack

A linear model of memory is wrong by hundreds of MiB, because the compiler schedules and fuses each choice anew. The
slack, the bytes of the largest value, covers such errors. The bound may still skip a choice that fits if the peak of
the step is elsewhere, such as in the optimizer, where kept values take no additional bytes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from ..core import OutOfMemoryError, format_bytes, memory_space, tree_bytes
from ..memory import Job
from ..targets import Target
from ._decisions import Decision, Measured, measure, planned
from ._plan import Attempt, Plan

MAX_COMPILATIONS = 16
_DEFAULT_FLOPS, _DEFAULT_BANDWIDTH = 1e11, 2e10
"""Operations and bytes per second for a target without figures, such as a CPU: about those of a few cores."""
_WEIGHT_READS = 3
"""How often a microbatch reads each weight: forward pass, recomputation, backward pass."""
_MAX_ABOVE_BUDGET = 4
"""Number of choices to compile for a number of microbatches with which the choice that keeps nothing is too large. The
compiler sometimes finds a smaller program for a choice that keeps a value."""
_MAX_DECISIONS = 10
"""With more names, those that save the fewest FLOPs for each byte are recomputed."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """A step whose use of memory is to be chosen."""

    job: Callable[[int], Job]
    """Returns the step with a number of microbatches; its arguments are shapes."""
    microbatches: Sequence[int]
    """The numbers of microbatches that may be chosen."""
    target: Target
    """The hardware to compile for."""
    budget_bytes: int
    """Bytes that the step may use on one device."""


@dataclasses.dataclass(frozen=True)
class _Choice:
    kept: frozenset[int]
    """Positions of the decisions whose values are kept."""
    num_microbatches: int
    kept_bytes: int
    seconds: tuple[float, float]


def search(problem: Problem, *, on_compile: Callable[[Attempt], None] | None = None) -> Plan:
    """Return the fastest choice, by estimated time, whose compiled step fits the budget.

    Args:
        problem: the step, the choices and the budget.
        on_compile: called after each compilation.

    Returns:
        The plan.

    Raises:
        ConfigError: when the loss runs no `LayerStack.hidden`.
        OutOfMemoryError: when no choice fits.

    Memory:
        About 16 compilations at most, one at a time.
    """
    run = _Search(problem, on_compile)
    for choice in run.choices():
        if len(run.attempts) >= MAX_COMPILATIONS or run.lower_bound(choice) > problem.budget_bytes:
            continue
        if run.is_hopeless(choice.num_microbatches):
            continue
        if choice.kept and run.base(choice.num_microbatches) is None:
            run.compile(run.base_choice(choice.num_microbatches))
            if run.lower_bound(choice) > problem.budget_bytes:
                continue
        if run.compile(choice).device_bytes <= problem.budget_bytes:
            return run.plan(choice)
    for number in problem.microbatches:
        run.compile(run.base_choice(number))
    fitting = [choice for choice, attempt in run.attempts.items() if attempt.device_bytes <= problem.budget_bytes]
    if fitting:
        return run.plan(min(fitting, key=lambda choice: choice.seconds[1]))
    raise run.error()


class _Search:
    """The state of one search. Mutable: it collects compiled choices."""

    def __init__(self, problem: Problem, on_compile: Callable[[Attempt], None] | None) -> None:
        self._problem, self._on_compile = problem, on_compile
        self._jobs = {number: problem.job(number) for number in problem.microbatches}
        job = self._jobs.get(1) or problem.job(1)  # with more microbatches the loss is traced more than once
        with jax.default_device(problem.target.devices()[0]):
            self.measured = _limited(measure(job.fn, job.args, problem.target))
        self.attempts: dict[_Choice, Attempt] = {}
        self._argument_bytes = tree_bytes([leaf for leaf in jax.tree.leaves(job.args) if _is_on_device(leaf)])
        self._slack = max((item.num_bytes for item in self.measured.decisions), default=0)

    def choices(self) -> Iterator[_Choice]:
        """Return all choices, the fastest first; of equally fast choices, the one that keeps the fewest bytes."""
        positions = range(len(self.measured.decisions))
        sizes = range(len(positions) + 1)
        subsets = [frozenset(subset) for size in sizes for subset in itertools.combinations(positions, size)]
        choices = [self._choice(kept, number) for number in self._jobs for kept in subsets]
        return iter(sorted(choices, key=lambda item: (item.seconds[1], item.num_microbatches, item.kept_bytes)))

    def base_choice(self, num_microbatches: int) -> _Choice:
        return self._choice(frozenset(), num_microbatches)

    def base(self, num_microbatches: int) -> Attempt | None:
        """Return the compiled choice that keeps nothing, if there is one."""
        return self.attempts.get(self.base_choice(num_microbatches))

    def is_hopeless(self, num_microbatches: int) -> bool:
        """Return whether the choice that keeps nothing is too large, and so are some others of this number."""
        base = self.base(num_microbatches)
        num_compiled = sum(choice.num_microbatches == num_microbatches for choice in self.attempts)
        is_large = base is not None and base.device_bytes > self._problem.budget_bytes
        return is_large and num_compiled >= _MAX_ABOVE_BUDGET

    def lower_bound(self, choice: _Choice) -> int:
        """Return bytes that the choice needs at least, from what was compiled so far."""
        slack = self._slack // choice.num_microbatches
        base = self.base(choice.num_microbatches)
        known = self._argument_bytes if base is None else base.device_bytes
        bounds = [known + choice.kept_bytes - slack if choice.kept else known]
        for other, attempt in self.attempts.items():
            if other.num_microbatches == choice.num_microbatches and other.kept < choice.kept:
                bounds.append(attempt.device_bytes - slack)
        return max(bounds)

    def compile(self, choice: _Choice) -> Attempt:
        """Compile a choice, or return what an earlier compilation gave."""
        if choice not in self.attempts:
            job = self._jobs[choice.num_microbatches]
            hidden = self.plan(choice, compiled=False).hidden
            # As in a trainer, arguments that the step does not read stay on the device.
            step = jax.jit(planned(job.fn, hidden), donate_argnums=job.donate_argnums, keep_unused=True)
            report = dataclasses.replace(job, fn=step, donate_argnums=None).analyze(self._problem.target)
            labels = tuple(self.measured.decisions[position].label for position in sorted(choice.kept))
            sizes = report.device_bytes, report.host_bytes
            attempt = Attempt(labels, choice.num_microbatches, choice.seconds[1], *sizes)
            self.attempts[choice] = attempt
            if self._on_compile is not None:
                self._on_compile(attempt)
        return self.attempts[choice]

    def plan(self, choice: _Choice, *, compiled: bool = True) -> Plan:
        scale = 1 / choice.num_microbatches
        decisions = tuple(
            dataclasses.replace(
                item, action="keep" if position in choice.kept else "recompute", num_bytes=int(item.num_bytes * scale)
            )
            for position, item in enumerate(self.measured.decisions)
        )
        attempt = self.attempts[choice] if compiled else Attempt((), 0, 0.0, 0, 0)
        return Plan(
            target=self._problem.target.name,
            budget_bytes=self._problem.budget_bytes,
            num_microbatches=choice.num_microbatches,
            decisions=decisions,
            tagged=self.measured.tagged,
            device_bytes=attempt.device_bytes,
            host_bytes=attempt.host_bytes,
            flops=self._flops(choice.kept),
            seconds=choice.seconds,
            attempts=tuple(self.attempts.values()),
        )

    def error(self) -> OutOfMemoryError:
        smallest = min(self.attempts.values(), key=lambda item: item.device_bytes, default=None)
        budget = format_bytes(self._problem.budget_bytes)
        if smallest is None:
            got = f"{format_bytes(self._argument_bytes)} of weights, optimizer state and batch"
        else:
            parts = f"microbatches: {smallest.num_microbatches}, {smallest.label}"
            got = f"{format_bytes(smallest.device_bytes)} with {parts} (compiled)"
        hint = "use a smaller batch, quantise frozen weights, or move optimizer state or layers to the host"
        problem = f"no choice fits the budget of {budget} on {self._problem.target.name}"
        return OutOfMemoryError(problem, got=got, hint=hint)

    def _choice(self, kept: frozenset[int], num_microbatches: int) -> _Choice:
        kept_bytes = sum(self.measured.decisions[position].num_bytes for position in kept)
        traffic = 2 * kept_bytes + _WEIGHT_READS * num_microbatches * self._argument_bytes
        target = self._problem.target
        compute = self._flops(kept) / (target.flops or _DEFAULT_FLOPS)
        transfer = traffic / (target.hbm_bandwidth or _DEFAULT_BANDWIDTH)
        seconds = max(compute, transfer), compute + transfer
        return _Choice(kept, num_microbatches, kept_bytes // num_microbatches, seconds)

    def _flops(self, kept: frozenset[int]) -> int:
        return self.measured.flops - sum(self.measured.decisions[position].flops for position in kept)


def _limited(measured: Measured) -> Measured:
    """Return at most `_MAX_DECISIONS` decisions, those that save the most FLOPs for each byte."""
    best = sorted(measured.decisions, key=_flops_per_byte, reverse=True)[:_MAX_DECISIONS]
    kept = tuple(item for item in measured.decisions if item in best)
    return dataclasses.replace(measured, decisions=kept)


def _flops_per_byte(decision: Decision) -> float:
    return decision.flops / max(decision.num_bytes, 1)


def _is_on_device(leaf: Any) -> bool:
    return memory_space(leaf) == jax.memory.Space.Device
