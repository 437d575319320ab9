"""The arrays of a model in training, and who holds them: the trainer, or the mutable object that has lent them.

`LiveState` has the one copy that there is on the device. Between steps a mutable object gets its arrays back, and what
was changed in it is taken over (`borrow`); while steps run it holds placeholders. A pytree is its own arrays.
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
    combine,
    is_count,
    leaves_with_paths,
    put,
    refuse_consumed,
    refuse_shared,
    shared_leaves,
)
from ..distributed import ShardingRules
from ._ema import find_average
from ._models import described
from ._signals import undisturbed
from ._step import UPDATE_HINT, TrainingStep, TrainState

_MAX_STEP = 2**31 - 1
"""The state counts in an int32."""


class LiveState:
    """The state of a model in training, and the model that it is of.

    Args:
        model: a pytree or a `ModelObject`.
        step: how it is trained.
        state: of the step.
        frozen: what no step changes.
        sharding: where arrays belong, on several devices.
        on_change: told of the step at which somebody has put other weights in their place.
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
        state, frozen = (_own if sharding is None else sharding.settle)((_arrays(state), frozen))
        self._object: ModelObject | None = model if isinstance(model, ModelObject) else None
        self._step, self._on_change = step, on_change
        self.state: TrainState = state
        """All that a step changes."""
        self.frozen: Tree = frozen
        """What no step changes."""
        self.is_edited = False
        """Whether somebody has put other weights in their place, which no run has evaluated."""
        self._is_lent = self._is_averaged = False

    @property
    def parts(self) -> tuple[Tree, Tree, Tree]:
        """What trains, what the model changes itself, and the rest."""
        return self.state.trainable, self.state.mutable, self.frozen

    @property
    def step(self) -> int:
        """Steps taken so far."""
        return int(self.state.step)

    @property
    def model(self) -> Any:
        """The model as it is now; a mutable object has its arrays back."""
        self.give_back()
        return self._step.model(*self.parts)

    # --- other arrays ----------------------------------------------------------------------------------------------

    def set(self, state: TrainState) -> None:
        """Go on with the state after a step."""
        self.state = state

    def replace(self, state: Any, refuse_step: Callable[[], None]) -> None:
        """Go on with a state of the user's, unless it is of another step and that is refused; see `Trainer.state`."""
        self.refuse_averaged("setting state")
        if not isinstance(state, TrainState):
            raise StructureError(
                "the state is not what a trainer has",
                expected="a lowtide.train.TrainState",
                got=type(state).__name__,
                hint="dataclasses.replace(trainer.state, opt_state=...); other weights go into trainer.update(model)",
            )
        refuse_consumed(state)
        state, before = _arrays(state), self.state
        _refuse_other_types("state", state, before)
        if state.step is not before.step and (step := int(state.step)) != self.step:
            refuse_step()
            _check_step(step)
        state = _settled(state, before)
        _refuse_shared(state, self.frozen)
        self.state = state
        pairs = zip(*(jax.tree.leaves((each.trainable, each.mutable)) for each in (state, before)), strict=True)
        if any(new is not old for new, old in pairs):
            if not self._is_lent:
                self._give()  # others in a mutable object would be taken for edits
            self._changed()

    def hold(self, state: TrainState) -> None:
        """Go on with a copy; an object that has its arrays gets these: others there would be taken for edits."""
        self.state, self.is_edited = state, False
        if not self._is_lent:
            self._give()

    def evaluated(self) -> None:
        """Note that a run has evaluated the weights."""
        self.is_edited = False

    def count_from(self, number: int) -> None:
        """Say that the weights were trained for so many steps.

        Raises:
            ConfigError: for what is no number of steps.
        """
        _check_step(number)
        self.refuse_averaged("setting step")
        place = self.state.step.sharding
        self.state = dataclasses.replace(self.state, step=put(jnp.int32(number), place))

    def update(self, model: Tree) -> None:
        """Go on with other weights; see `Trainer.update`."""
        self.refuse_averaged("update")
        replace = getattr(self._object, "replace", None)
        if self._object is not None and replace is None:
            raise ConfigError("update is for pytrees", hint=UPDATE_HINT)
        if replace is None:
            self._put(*self._step.split(self._step.arranged(model)))
            return
        self.give_back()
        try:
            replace(model)
            self.borrow(lend=False)
        except BaseException:
            self._object.give_back(combine(*self.parts))  # pyright: ignore[reportOptionalMemberAccess]
            raise

    def _put(self, trainable: Tree, mutable: Tree, frozen: Tree) -> None:
        refuse_consumed(trainable, mutable, frozen)
        trainable, mutable = _arrays((trainable, mutable))
        for name, *pair in zip(
            ("trainable", "mutable", "frozen"), (trainable, mutable, frozen), self.parts, strict=True
        ):
            _refuse_other_types(name, *pair)
        refuse_shared(trainable, mutable)
        trainable, mutable, frozen = _settled((trainable, mutable, frozen), self.parts)
        state = dataclasses.replace(self.state, trainable=trainable, mutable=mutable)
        _refuse_shared(state, frozen)
        self.state, self.frozen = state, frozen
        self._changed()

    def _changed(self) -> None:
        self.is_edited = True
        if self._on_change is not None:
            self._on_change(self.step)

    # --- lent, borrowed, averaged ----------------------------------------------------------------------------------

    def borrow(self, *, lend: bool = True) -> None:
        """Take the arrays as they are in a mutable object; with `lend`, leave placeholders there."""
        if self._object is None or self._is_lent:
            return
        held = combine(*self.parts)
        now = self._object.arrays()
        if any(a is not b for a, b in zip(jax.tree.leaves(held), jax.tree.leaves(now), strict=False)):
            self._put(*self._step.split(self._object))
            self._object.give_back(combine(*self.parts))  # one that was moved would be taken for another edit
        if lend:
            with undisturbed():
                self._is_lent = True  # first: what is left half lent is given back
                self._object.lend(combine(self.state.trainable, self.state.mutable))

    def refresh(self) -> None:
        """Take over what was changed in a mutable object, and raise when somebody else has consumed the arrays."""
        self.borrow(lend=False)
        refuse_consumed(self.state, self.frozen)

    def give_back(self) -> None:
        """Give a mutable object its arrays, until the next step."""
        if self._is_lent:
            self._give()

    def _give(self) -> None:
        if self._object is not None:
            with undisturbed():
                self._is_lent = False  # also where something was written over a placeholder, which is said afterwards
                self._object.give_back(combine(self.state.trainable, self.state.mutable))

    @contextlib.contextmanager
    def averaged(self) -> Generator[None]:
        """Put the running average in the place of what trains; see `Trainer.averaged`."""
        self.refuse_averaged("averaged")
        average = find_average(self.state.opt_state)
        if average is None:
            raise ConfigError("there is no average", hint="Trainer(..., lt.train.ema(optax.adamw(1e-4), decay=0.999))")
        try:
            like = jax.tree.map(lambda leaf, old: leaf.astype(old.dtype), average, self.state.trainable)
        except ValueError as error:
            raise ConfigError(
                "the average is not of all that trains",
                expected="ema around the whole optimizer",
                got="ema inside of another transformation, for a part of the leaves",
                hint="lt.train.ema(optax.multi_transform(...), decay=...)",
            ) from error
        self.borrow()
        kept = self.state
        try:
            self.state, self._is_averaged = dataclasses.replace(kept, trainable=like), True
            self.give_back()
            yield
        finally:
            self.state, self._is_averaged = kept, False
            self._give()

    def later(self) -> Callable[[], tuple[Tree, Tree, Tree]]:
        """Return what gives the parts as they are then, and raises when they would be others than were meant."""
        is_averaged = self._is_averaged

        def parts() -> tuple[Tree, Tree, Tree]:
            if self._is_averaged != is_averaged:
                raise StateError(
                    "outputs that were asked for inside of averaged are read outside, or the other way round",
                    expected="predict_batches read to its end where it was called",
                    got="the weights that train" if is_averaged else "the average",
                    hint="predict gives all outputs at once",
                )
            return self.parts

        return parts

    # --- what is refused -------------------------------------------------------------------------------------------

    def refuse_averaged(self, what: str) -> None:
        """Raise inside of `averaged`."""
        if self._is_averaged:
            raise StateError(
                f"{what} was called inside of averaged",
                expected="evaluate and predict there",
                got="the average in the place of what trains",
                hint="leave the with block first",
            )


def _refuse_other_types(name: str, new: Tree, old: Tree) -> None:
    theirs, ours = dict(leaves_with_paths(new)), dict(leaves_with_paths(old))
    for path in {**ours, **theirs}:
        a, b = (described(tree[path]) if path in tree else None for tree in (ours, theirs))
        if a != b:
            raise StructureError(
                f"{name} leaf {path} is not what it was when the trainer was made",
                expected=a or "no such leaf",
                got=b or "no such leaf",
                hint="the step is compiled for these shapes: make a new Trainer",
            )
    if jax.tree.structure(new) != jax.tree.structure(old):
        raise StructureError(
            f"{name} has its leaves in other containers than when the trainer was made",
            expected="the same tuples, named tuples, lists and classes",
            got="others, with leaves at the same paths",
            hint="jax.tree.unflatten(jax.tree.structure(old), jax.tree.leaves(new)) puts them into those of the old",
        )


def _refuse_shared(state: TrainState, frozen: Tree) -> None:
    """Raise when an array of the state stands in another place, too: a step consumes it."""
    for other, *_, path in shared_leaves({"frozen": frozen, "state": state}):  # in this order
        if path.startswith("state/"):
            raise SelectionError(
                f"{other} and {path} are the same array",
                expected="an array of its own at each path of the state, because each is donated to the step",
                hint="jnp.array(leaf, copy=True)",
            )


def _check_step(number: Any) -> None:
    if not is_count(number, 0) or number > _MAX_STEP:
        raise ConfigError(
            "step is no number of steps", expected=f"0 to {_MAX_STEP}", got=repr(number), hint="step = 1000"
        )


def _arrays(tree: Tree) -> Tree:
    """Without Python's numbers, which are no arrays that a step could consume."""
    return jax.tree.map(lambda x: x if hasattr(x, "dtype") else jnp.asarray(x), tree)


def _own(tree: Tree) -> Tree:
    """Arrays of JAX: those of NumPy would be copied to the device in every step, and hold no shards to copy."""
    return jax.tree.map(lambda x: jnp.array(x) if isinstance(x, np.ndarray | np.generic) else x, tree)


def _settled(tree: Tree, like: Tree) -> Tree:
    """Arrays of JAX on the devices, and in the memory, of those that they are like."""
    return jax.tree.map(lambda x, old: put(x, old.sharding) if hasattr(old, "sharding") else x, tree, like)
