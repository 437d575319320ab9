"""`plan`: the fastest step of a trainer that fits a budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from ..core import (
    ConfigError,
    LayerStack,
    Selector,
    StructureError,
    Tree,
    check_integer,
    check_type,
    memory_space,
    parse_bytes,
    shown,
)
from ..memory import Job
from ..planning import Attempt, Plan, Problem, search
from ..targets import Target, resolve_target
from ._compilation import step_job
from ._step import LossFn


def plan(
    model: Tree,
    batch: Tree,
    tx: optax.GradientTransformation,
    *,
    loss_fn: LossFn | LayerStack | None = None,
    wrt: Selector,
    budget: int | str | None = None,
    target: Target | str | None = None,
    weight: Callable[[Tree], Any] | None = None,
    num_microbatches: Sequence[int] | None = None,
    on_compile: Callable[[Attempt], None] | None = None,
) -> Plan:
    """Choose what a step keeps of each layer, and its microbatches: the fastest step that fits a budget.

    The step is that of ``Trainer(model, loss_fn, tx, wrt=wrt, plan=plan)``. Its loss must run a `LayerStack`. FLOPs are
    counted in its jaxpr, times are estimated from the figures of the target's catalogue, and bytes are compiled.

    With microbatches, the loss is the weighted mean of the losses of the microbatches. Without `weight`, it differs
    from the loss of the whole batch if rows have different numbers of targets. So does a loss that mixes rows, such as
    the load balance of experts. Pass ``num_microbatches=[1]`` to exclude this.

    Args:
        model: the model, or its shapes (`jax.eval_shape` of its constructor).
        batch: a batch, or shapes of one.
        tx: the optimizer.
        loss_fn: ``loss_fn(model, batch) -> (loss, metrics)``, or a `LayerStack` for a `model` with the keys ``outer``
            and ``layers``. None for a model that has a ``stack``, such as those of `lowtide.models`.
        wrt: selects the trainable leaves.
        budget: bytes that the step may use on one device, such as ``"14 GiB"``; None for all usable bytes.
        target: hardware to compile for; None for the hardware at hand.
        weight: function of a batch that returns its weight, as in `Trainer`.
        num_microbatches: numbers of microbatches that may be chosen; None for all divisors of the batch's rows.
        on_compile: called after each compilation with the choice and its bytes.

    Returns:
        The plan. Pass it to ``Trainer(plan=...)``.

    Raises:
        ConfigError: for a budget that is not a size; without `budget` on a target whose memory is unknown; for a loss
            that runs no `LayerStack`; for a model without ``stack`` and no `loss_fn`.
        OutOfMemoryError: when no choice fits the budget.
        SelectionError: when `wrt` selects nothing, or a leaf that cannot be differentiated.
        TargetError: for an unknown target, or one whose compiler is not installed.

    Memory:
        The host holds one compilation at a time, at most 16 in all. Nothing is allocated on the target.
    """
    goal = resolve_target(target)
    budget_bytes: Any = parse_bytes(budget) if isinstance(budget, str) else budget
    if budget_bytes is None:
        budget_bytes = goal.budget_bytes
    if budget_bytes is None:
        raise ConfigError(f"the memory of {goal.name} is unknown", hint='pass budget="14 GiB"')
    check_integer("budget", budget_bytes, hint='budget="14 GiB", or None for all usable bytes')
    loss = _loss_of(model, loss_fn)
    rows = {leaf.shape[0] for leaf in jax.tree.leaves(batch) if getattr(leaf, "shape", ())}
    if len(rows) != 1:
        got = f"leading axes {sorted(rows)}" if rows else "no array"
        raise StructureError("the leaves of a batch must have the same number of rows", got=got)
    (num_rows,) = rows
    numbers = [n for n in range(1, num_rows + 1) if num_rows % n == 0]
    if num_microbatches is not None:
        check_type("num_microbatches", num_microbatches, (list, tuple, range), "a list of numbers, such as [1, 2]")
        if not num_microbatches:
            raise ConfigError("num_microbatches is empty", hint=f"use some of {numbers}")
        if wrong := [n for n in num_microbatches if n not in numbers]:
            problem = f"num_microbatches has {shown(wrong[0])}, which does not divide the {num_rows} rows of the batch"
            raise ConfigError(problem, hint=f"use some of {numbers}")
        numbers = sorted(set(num_microbatches))

    def job(number: int) -> Job:
        job = step_job(model, loss, tx, wrt, batch, num_microbatches=number, weight=weight)
        if any(memory_space(leaf) == jax.memory.Space.Host for leaf in jax.tree.leaves(job.args[1])):
            return job
        return step_job(model, loss, tx, wrt, batch, num_microbatches=number, weight=weight, drops_updates=True)

    return search(Problem(job, numbers, goal, budget_bytes), on_compile=on_compile)


def _loss_of(model: Tree, loss_fn: LossFn | LayerStack | None) -> LossFn:
    if isinstance(loss_fn, LayerStack):
        stack = loss_fn
        return lambda params, batch: stack.apply(params["outer"], params["layers"], batch)
    if loss_fn is not None:
        return loss_fn
    if not isinstance(getattr(model, "stack", None), LayerStack):
        problem = f"a {type(model).__name__} has no LayerStack in an attribute named stack"
        raise ConfigError(problem, hint="pass loss_fn, a function of the model and a batch, or a LayerStack")
    return lambda model, batch: model.stack.apply(model.outer, model.layers, batch)
