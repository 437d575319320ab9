"""Storage of the arrays of a model in training: the only copy on the device.

A mutable object (a `ModelObject`, such as a Keras model) lends its arrays to `TrainStateStore` while steps run, and
holds placeholders instead. It gets its arrays back when `model` is read, and after an epoch or a run. The next step
first adopts changes that were made in the object, and then borrows its arrays again (`borrow`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core import (
    ConfigError,
    ModelObject,
    SelectionError,
    StateError,
    StructureError,
    Tree,
    check_integer,
    combine,
    leaves_with_paths,
    put,
    refuse_consumed,
    refuse_shared,
    shared_leaves,
)
from ..distributed import ShardingRules
from ._optimizer import find_average
from ._signals import delay_signals
from ._step import UPDATE_HINT, TrainingStep, TrainState, describe

_MAX_STEP = 2**31 - 1
"""Largest int32, the dtype of the step in the state."""


class TrainStateStore:
    """The state of a model in training. Mutable: every step replaces the state.

    `on_change` is called with the number of the step when the user has replaced the weights.
    """

    def __init__(
        self,
        model: Any,
        step: TrainingStep,
        state: TrainState,
        frozen: Tree,
        sharding: ShardingRules | None,
        *,
        on_change: Callable[[int], None] | None,
    ) -> None:
        state, frozen = (_from_numpy if sharding is None else sharding.settle)((_as_arrays(state), frozen))
        self._object: ModelObject | None = model if isinstance(model, ModelObject) else None
        self._step, self._on_change = step, on_change
        self.state: TrainState = state
        """Everything that a step changes."""
        self.frozen: Tree = frozen
        self.is_edited = False
        """Whether the user has replaced the weights, and no run has evaluated the new weights."""
        self.is_averaged = False
        """Whether the trainable leaves are replaced by their average."""
        self._is_lent = False

    @property
    def parts(self) -> tuple[Tree, Tree, Tree]:
        """Trainable, mutable and frozen leaves."""
        return self.state.trainable, self.state.mutable, self.frozen

    @property
    def step(self) -> int:
        return int(self.state.step)

    @property
    def model(self) -> Any:
        """The current model; a mutable object gets its arrays back."""
        self.give_back()
        return self._step.model(*self.parts)

    # --- replacement of arrays -------------------------------------------------------------------------------------

    def set(self, state: TrainState) -> None:
        self.state = state

    def replace(self, state: Any, *, is_running: bool) -> None:
        """Replace the state by the user's state; while a run takes steps, the step number must not change."""
        self.refuse_averaged("setting state")
        if not isinstance(state, TrainState):
            hint = "dataclasses.replace(trainer.state, opt_state=...); other weights go into trainer.update(model)"
            raise StructureError(f"state must be a lowtide.train.TrainState, not a {type(state).__name__}", hint=hint)
        refuse_consumed(state)
        state, previous = _as_arrays(state), self.state
        _refuse_other_types("state", state, previous)
        if state.step is not previous.step and (step := int(state.step)) != self.step:
            if is_running:
                hint = "dataclasses.replace(state, step=trainer.state.step)"
                raise StateError("setting a state of another step was called while fit takes steps", hint=hint)
            check_integer("step", step, 0, _MAX_STEP)
        state = _place_like(state, previous)
        _refuse_shared(state, self.frozen)
        self.state = state
        pairs = zip(*(jax.tree.leaves((tree.trainable, tree.mutable)) for tree in (state, previous)), strict=True)
        if any(new is not old for new, old in pairs):
            if not self._is_lent:
                self._return_arrays()  # else `borrow` would treat the old arrays as edits
            self._mark_changed()

    def adopt(self, state: TrainState) -> None:
        """Replace the state by a restored copy; a mutable object that holds its arrays gets those of the copy."""
        self.state, self.is_edited = state, False
        # `borrow` would treat the old arrays in the object as edits.
        if not self._is_lent:
            self._return_arrays()

    def mark_evaluated(self) -> None:
        self.is_edited = False

    def set_step(self, number: int) -> None:
        check_integer("step", number, 0, _MAX_STEP)
        self.refuse_averaged("setting step")
        place = self.state.step.sharding
        self.state = dataclasses.replace(self.state, step=put(jnp.int32(number), place))

    def update(self, model: Tree) -> None:
        self.refuse_averaged("update")
        replace = getattr(self._object, "replace", None)
        if self._object is not None and replace is None:
            raise ConfigError("update works only for a pytree", hint=UPDATE_HINT)
        if replace is None:
            self._assign(*self._step.split(self._step.arranged(model)))
            return
        self.give_back()
        try:
            replace(model)
            self.borrow(lend=False)
        except BaseException:
            self._object.give_back(combine(*self.parts))  # pyright: ignore[reportOptionalMemberAccess]
            raise

    def _assign(self, trainable: Tree, mutable: Tree, frozen: Tree) -> None:
        refuse_consumed(trainable, mutable, frozen)
        trainable, mutable = _as_arrays((trainable, mutable))
        for name, *pair in zip(
            ("trainable", "mutable", "frozen"), (trainable, mutable, frozen), self.parts, strict=True
        ):
            _refuse_other_types(name, *pair)
        refuse_shared(trainable, mutable)
        trainable, mutable, frozen = _place_like((trainable, mutable, frozen), self.parts)
        state = dataclasses.replace(self.state, trainable=trainable, mutable=mutable)
        _refuse_shared(state, frozen)
        self.state, self.frozen = state, frozen
        self._mark_changed()

    def _mark_changed(self) -> None:
        self.is_edited = True
        if self._on_change is not None:
            self._on_change(self.step)

    # --- mutable objects, averages ---------------------------------------------------------------------------------

    def borrow(self, *, lend: bool = True) -> None:
        """Adopt changed arrays of a mutable object; with `lend`, also replace its arrays by placeholders."""
        if self._object is None or self._is_lent:
            return
        own_arrays = combine(*self.parts)
        object_arrays = self._object.arrays()
        if any(a is not b for a, b in zip(jax.tree.leaves(own_arrays), jax.tree.leaves(object_arrays), strict=False)):
            self._assign(*self._step.split(self._object))
            self._object.give_back(combine(*self.parts))  # `_assign` may have moved arrays, which would look edited
        if lend:
            with delay_signals():
                self._is_lent = True  # first, so that an interrupted `lend` is undone by `give_back`
                self._object.lend(combine(self.state.trainable, self.state.mutable))

    def refresh(self) -> None:
        """Adopt changes made in a mutable object, and raise if other code has donated (consumed) the arrays."""
        self.borrow(lend=False)
        refuse_consumed(self.state, self.frozen)

    def give_back(self) -> None:
        """Return the arrays to a mutable object until the next step."""
        if self._is_lent:
            self._return_arrays()

    def _return_arrays(self) -> None:
        if self._object is not None:
            with delay_signals():
                self._is_lent = False  # first: the object raises afterwards if a placeholder was overwritten
                self._object.give_back(combine(self.state.trainable, self.state.mutable))

    @contextlib.contextmanager
    def averaged(self) -> Generator[None]:
        self.refuse_averaged("averaged")
        average = find_average(self.state.opt_state)
        if average is None:
            raise ConfigError("the optimizer keeps no average", hint="Trainer(..., lt.train.ema(tx, decay=0.999))")
        try:
            averages = jax.tree.map(lambda leaf, old: leaf.astype(old.dtype), average, self.state.trainable)
        except ValueError as error:
            hint = "lt.train.ema(optax.multi_transform(...), decay=...)"
            raise ConfigError("ema must cover all trainable leaves", hint=hint) from error
        self.borrow()
        trained_state = self.state
        try:
            self.state, self.is_averaged = dataclasses.replace(trained_state, trainable=averages), True
            self.give_back()
            yield
        finally:
            self.state, self.is_averaged = trained_state, False
            self._return_arrays()

    def refuse_averaged(self, action: str) -> None:
        if self.is_averaged:
            raise StateError(f"{action} was called inside of averaged", hint="leave the with block first")


def _refuse_other_types(name: str, new: Tree, old: Tree) -> None:
    new_leaves, old_leaves = dict(leaves_with_paths(new)), dict(leaves_with_paths(old))
    for path in {**old_leaves, **new_leaves}:
        expected, got = (describe(tree[path]) if path in tree else "no leaf" for tree in (old_leaves, new_leaves))
        if expected != got:
            hint = "make a new Trainer"
            raise StructureError(f"{name} leaf {path} does not fit the step", expected=expected, got=got, hint=hint)
    if jax.tree.structure(new) != jax.tree.structure(old):
        hint = "jax.tree.unflatten(jax.tree.structure(old), jax.tree.leaves(new)) uses the old containers"
        raise StructureError(f"{name} has its leaves in other containers than when the trainer was made", hint=hint)


def _refuse_shared(state: TrainState, frozen: Tree) -> None:
    """Raise if an array of the state is also at another path, because a step donates the array."""
    for first_path, *_, path in shared_leaves({"frozen": frozen, "state": state}):  # frozen paths come first
        if path.startswith("state/"):
            raise SelectionError(f"{first_path} and {path} are the same array", hint="jnp.array(leaf, copy=True)")


def _as_arrays(tree: Tree) -> Tree:
    """Convert Python numbers to arrays, because a step can donate only arrays."""
    return jax.tree.map(lambda x: x if hasattr(x, "dtype") else jnp.asarray(x), tree)


def _from_numpy(tree: Tree) -> Tree:
    # Every step would copy a NumPy array to the device. `HostSnapshot` copies shards, which NumPy arrays lack.
    return jax.tree.map(lambda x: jnp.array(x) if isinstance(x, np.ndarray | np.generic) else x, tree)


def _place_like(tree: Tree, like: Tree) -> Tree:
    """Move arrays to the devices and memory kinds of the arrays in `like`."""
    return jax.tree.map(lambda x, old: put(x, old.sharding) if hasattr(old, "sharding") else x, tree, like)
