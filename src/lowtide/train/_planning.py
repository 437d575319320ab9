"""`plan`: the fastest step of a trainer that fits a budget."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast, get_args

import jax
import optax

from .. import offload
from ..core import (
    ConfigError,
    LayerStack,
    LowtideError,
    Selector,
    StructureError,
    Tree,
    check_choice,
    check_type,
    leaves_with_paths,
    memory_space,
    partition,
    shown,
    split_static,
)
from ..memory import Job
from ..optim import low_precision
from ..planning import Attempt, Memory, Placement, Plan, Problem, all_placements, runs_stack, search, search_formats
from ..targets import Target, limit_bytes, resolve_target
from ._compilation import step_job
from ._step import LossFn

_MOVABLE = ("optimizer", "parameters")
_OF_TRAINER = ("tx", "loss_fn", "wrt", "weight", "compute_dtype")
Allowed = Literal["exposed_copies", "8bit_state"]


def plan(
    model: Any,
    batch: Tree,
    tx: optax.GradientTransformation | None = None,
    *,
    loss_fn: LossFn | LayerStack | None = None,
    wrt: Selector | None = None,
    budget: int | str | None = None,
    target: Target | str | None = None,
    allow: Sequence[Allowed] = (),
    weight: Callable[[Tree], Any] | None = None,
    compute_dtype: Any = None,
    num_microbatches: Sequence[int] | None = None,
    on_compile: Callable[[Attempt], None] | None = None,
) -> Plan:
    """Choose how a step uses memory: the fastest step that fits a budget.

    The step is that of ``Trainer(model, loss_fn, tx, wrt=wrt, plan=plan)``. The plan chooses which named values of each
    layer are kept, recomputed or moved to the host; groups of layers; the memory of layer inputs, frozen layers and
    optimizer state; and the number of microbatches. For a loss that runs no `LayerStack`, it chooses the last two.
    FLOPs are counted in the jaxpr of the step, times are estimated (`Plan.seconds`), and bytes are compiled.

    Host memory is used only if the speed of the link is known (`Target.host_link_bandwidth`). Values and inputs of
    layers move only if the passes hide the copies; on GPUs none is hidden.

    With microbatches, the loss is the weighted mean of the losses of the microbatches. Without `weight`, it differs
    from the loss of the whole batch if rows have different numbers of targets. So does a loss that mixes rows, such as
    the load balance of experts. Pass ``num_microbatches=[1]`` to exclude this.

    Args:
        model: the model, or its shapes (`jax.eval_shape` of its constructor); or a `Trainer` without `plan`, which has
            `tx`, `loss_fn`, `wrt`, `weight`, `compute_dtype` and `budget`. Pass the plan to a new trainer.
        batch: a batch, or shapes of one.
        tx: the optimizer.
        loss_fn: ``loss_fn(model, batch) -> (loss, metrics)``, or a `LayerStack` for a `model` with the keys ``outer``
            and ``layers``. None for a model that has a ``stack``, such as those of `lowtide.models`.
        wrt: selects the trainable leaves; None for all.
        budget: bytes that the step may use on one device, such as ``"14 GiB"``; None for all usable bytes.
        target: hardware to compile for; None for the hardware at hand.
        allow: what a plan may use if nothing else fits. ``"8bit_state"`` keeps optimizer state in 8 bits
            (`lowtide.optim.low_precision`). ``"exposed_copies"`` allows copies of values that no computation hides.
        weight: function of a batch that returns its weight, as in `Trainer`.
        compute_dtype: dtype in which `loss_fn` computes, as in `Trainer`.
        num_microbatches: numbers of microbatches that may be chosen; None for all divisors of the batch's rows.
        on_compile: called after each compilation, cheap or whole, with the choice and its bytes.

    Returns:
        The plan. Pass it to ``Trainer(plan=...)``.

    Raises:
        ConfigError: for a budget that is not a size; without `budget` on a target whose memory is unknown; for a model
            without ``stack`` and no `loss_fn`; for an unknown word in `allow`; for a trainer that cannot be planned.
        OutOfMemoryError: when no choice fits the budget; it names the smallest choice, and words for `allow`.
        SelectionError: when `wrt` selects nothing, or a leaf that cannot be differentiated.
        TargetError: for an unknown target, or one whose compiler is not installed.

    Memory:
        The host holds one compilation at a time. A search compiles at most 31 choices. Each word of `allow` may add a
        search. Nothing is allocated on the target.
    """
    if (arguments := getattr(model, "plan_arguments", None)) is not None:
        if any(item is not None for item in (tx, loss_fn, wrt, weight, compute_dtype)):
            raise ConfigError("a trainer already has tx, loss_fn, wrt, weight and compute_dtype", hint="leave them out")
        model, budget = arguments["model"], model.budget_bytes if budget is None else budget
        tx, loss_fn, wrt, weight, compute_dtype = (arguments[name] for name in _OF_TRAINER)
    trainable, given_tx = "**" if wrt is None else wrt, cast(optax.GradientTransformation, tx)
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise ConfigError(f"tx must be an Optax optimizer, not {shown(tx)}", hint="optax.adamw(1e-4)")
    goal = resolve_target(target)
    budget_bytes = limit_bytes(goal, budget)
    check_type("allow", allow, (list, tuple, set, frozenset), 'a list of words, such as ["8bit_state"]')
    for word in allow:
        check_choice("a word in allow", word, get_args(Allowed))
    loss = _loss_of(model, loss_fn)
    options: dict[str, Any] = {"weight": weight, "compute_dtype": compute_dtype}

    def step(placement: Placement, formats: Sequence[str]) -> Job:
        placed = model if placement.parameters == "device" else placed_layers(model, trainable)
        arguments = placed, loss, planned_tx(given_tx, placement.optimizer, formats), trainable, batch
        job = step_job(*arguments, **options, num_microbatches=placement.num_microbatches)
        if _has_host_leaf(job.args[1]):  # then a step cannot drop its update
            return job
        return step_job(*arguments, **options, num_microbatches=placement.num_microbatches, drops_updates=True)

    numbers = _numbers_of(batch, num_microbatches)
    # Compile-only GPUs have no host memory.
    has_host = bool(goal.host_link_bandwidth) and not (goal.platform == "gpu" and goal.is_ahead_of_time)
    both: tuple[Memory, ...] = ("device", "host") if has_host else ("device",)
    optimizer, parameters = (both if has_host and _can_move(step, name, goal) else both[:1] for name in _MOVABLE)
    placements = all_placements(numbers, optimizer=optimizer, parameters=parameters, layer_inputs=both)

    def problem(formats: Sequence[str]) -> Problem:
        return Problem(
            job=lambda placement: step(placement, formats),
            placements=placements,
            target=goal,
            budget_bytes=budget_bytes,
            has_stack=runs_stack(step(placements[0], ()), goal),
            allows_exposed_copies="exposed_copies" in formats,
        )

    words = [word for word in get_args(Allowed) if has_host or word != "exposed_copies"]
    return search_formats(problem, words, allow, on_compile=on_compile)


def plan_again(
    batch: Tree,
    budget: int,
    numbers: Sequence[int],
    *,
    model: Tree,
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    wrt: Selector,
    drops_updates: bool,
    **options: Any,
) -> Plan | None:
    """Plan the step of a trainer that exists: only what layers keep, layer inputs and microbatches are chosen.

    `model` and `tx` are as the trainer uses them, already placed. `numbers` are the numbers of microbatches, and
    `options` are further arguments of `step_job`. A loss that runs no stack gets None.

    Raises:
        OutOfMemoryError: when no choice fits.
    """
    goal = resolve_target(None)

    def job(placement: Placement) -> Job:
        split: dict[str, Any] = {"num_microbatches": placement.num_microbatches, "drops_updates": drops_updates}
        return step_job(model, loss_fn, tx, wrt, batch, **split, **options)

    if not runs_stack(job(Placement()), goal):
        return None
    memories: tuple[Memory, ...] = ("device", "host") if goal.host_link_bandwidth else ("device",)
    return search(Problem(job, all_placements(numbers, layer_inputs=memories), goal, budget))


def planned_tx(
    tx: optax.GradientTransformation, memory: Memory, formats: Sequence[str]
) -> optax.GradientTransformation:
    """Return the optimizer with its state in the memory and the format that a plan has chosen."""
    if "8bit_state" in formats:
        tx = low_precision(tx, "8bit")
    return offload.optimizer(tx) if memory == "host" else tx


def placed_layers(model: Tree, wrt: Selector) -> Tree:
    """Return the model with its frozen layers in host memory."""
    return offload.to_host(model, _select_layers(model, wrt))


def _select_layers(model: Tree, wrt: Selector) -> Callable[[str, Any], bool]:
    """Return a predicate for frozen leaves below a key ``layers``, without vectors, which a TPU cannot slice."""
    frozen = {path for path, _ in leaves_with_paths(partition(split_static(model)[0], wrt)[1])}
    return lambda path, leaf: path in frozen and "layers" in path.split("/") and leaf.ndim >= 3


def _can_move(step: Callable[[Placement, Sequence[str]], Job], name: str, goal: Target) -> bool:
    """Return whether the optimizer state or the frozen layers are on the device, and can be moved to the host."""
    position = 1 if name == "optimizer" else 4
    if _has_host_leaf(step(Placement(), ()).args[position]):
        return False
    # No leaf can be moved, or the loss reads frozen layers outside of a stack.
    with contextlib.suppress(LowtideError, ValueError):
        job = step(Placement(optimizer="host") if name == "optimizer" else Placement(parameters="host"), ())
        return _has_host_leaf(job.args[position]) and (runs_stack(job, goal) or name == "optimizer")
    return False


def _has_host_leaf(tree: Tree) -> bool:
    return any(memory_space(leaf) == jax.memory.Space.Host for leaf in jax.tree.leaves(tree))


def _numbers_of(batch: Tree, num_microbatches: Sequence[int] | None) -> list[int]:
    """Return the numbers of microbatches that may be chosen; raise for numbers that do not divide the batch's rows."""
    rows = {leaf.shape[0] for leaf in jax.tree.leaves(batch) if getattr(leaf, "shape", ())}
    if len(rows) != 1:
        got = f"leading axes {sorted(rows)}" if rows else "no array"
        raise StructureError("the leaves of a batch must have the same number of rows", got=got)
    (num_rows,) = rows
    if not all(getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(batch)):
        return [1]  # a scalar cannot be split
    numbers = [n for n in range(1, num_rows + 1) if num_rows % n == 0]
    if num_microbatches is None:
        return numbers
    check_type("num_microbatches", num_microbatches, (list, tuple, range), "a list of numbers, such as [1, 2]")
    if not num_microbatches:
        raise ConfigError("num_microbatches is empty", hint=f"use some of {numbers}")
    if wrong := [n for n in num_microbatches if n not in numbers]:
        problem = f"num_microbatches has {shown(wrong[0])}, which does not divide the {num_rows} rows of the batch"
        raise ConfigError(problem, hint=f"use some of {numbers}")
    return sorted(set(num_microbatches))


def _loss_of(model: Tree, loss_fn: LossFn | LayerStack | None) -> LossFn:
    if isinstance(loss_fn, LayerStack):
        stack = loss_fn
        return lambda params, batch: stack.apply(params["outer"], params["layers"], batch)
    if callable(loss_fn):
        return loss_fn
    if loss_fn is not None:
        raise ConfigError(f"loss_fn must be a function loss_fn(model, batch), not {shown(loss_fn)}")
    if not isinstance(getattr(model, "stack", None), LayerStack):
        problem = f"a {type(model).__name__} has no LayerStack in an attribute named stack"
        raise ConfigError(problem, hint="pass loss_fn, a function of the model and a batch, or a LayerStack")
    return lambda model, batch: model.stack.apply(model.outer, model.layers, batch)
