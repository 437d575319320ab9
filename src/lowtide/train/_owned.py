"""What a trainer owns: the state, the frozen leaves, and the arrays that a mutable object lends it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core import ConfigError, ModelObject, StateError, Tree, combine
from ..distributed import ShardingRules, put
from ._checks import refuse_other_types, refuse_shared
from ._ema import find_average
from ._feed import is_count
from ._rollback import undisturbed
from ._step import Step, TrainState, WholeStep

_MAX_STEP = 2**31 - 1
"""The state counts in an int32."""


def settled(parts: Tree, like: Tree, sharding: ShardingRules | None) -> Tree:
    """Arrays of JAX, on the device or where those that they are like are."""
    if sharding is None:
        # NumPy arrays would be copied to the device in every step, and hold no shards to copy.
        return jax.tree.map(lambda x: jnp.array(x) if isinstance(x, np.ndarray | np.generic) else x, parts)
    return jax.tree.map(lambda x, old: put(x, old.sharding), parts, like)


class Owned:
    """The state of a model in training, and the model that it is of.

    Args:
        model: a pytree or a `ModelObject`.
        step: how it is trained.
        state: of the step.
        frozen: what no step changes.
        sharding: where arrays belong, on several devices.
    """

    def __init__(self, model: Any, step: Step, state: TrainState, frozen: Tree, sharding: ShardingRules | None) -> None:
        self._object: ModelObject | None = model if isinstance(model, ModelObject) else None
        self._step = step
        self._is_lent = False
        self._is_averaged = False
        self.sharding = sharding
        """Where arrays belong; None for one device."""
        self.state = state
        """All that a step changes."""
        self.frozen = frozen
        """What no step changes."""

    @property
    def _parts(self) -> tuple[Tree, Tree, Tree]:
        return self.state.trainable, self.state.mutable, self.frozen

    @property
    def model(self) -> Any:
        """The model as it is now. Of a pytree, its trainable arrays are consumed by the next step.

        A mutable object gets its arrays back; what is changed in it is what the next step begins with.
        """
        self.give_back()
        return self._step.model(*self._parts)

    @property
    def step(self) -> int:
        """Steps taken so far.

        May be set, between two calls of `fit`, for weights that were trained elsewhere: data by step number, random
        keys and records go on from there. An optimizer's own count, of a schedule, is in its state and stays.
        """
        return int(self.state.step)

    @step.setter
    def step(self, number: int) -> None:
        if not is_count(number, 0) or number > _MAX_STEP:
            raise ConfigError(
                "step is no number of steps", expected=f"0 to {_MAX_STEP}", got=repr(number), hint="step = 1000"
            )
        self._refuse_averaged("setting step")
        self._refuse_running("setting step")
        place = self.state.step.sharding
        self.state = dataclasses.replace(self.state, step=jax.device_put(jnp.int32(number), place))

    def update(self, model: Tree) -> None:
        """Go on with other weights: those of a pytree, or of an Equinox module, like the model.

        Args:
            model: the model; its trainable and mutable arrays belong to the trainer from now on.

        Raises:
            StructureError: when a leaf has another shape or dtype, or there are others.
            ConfigError: for a mutable object, which is changed itself.
            StateError: inside of `averaged`.
        """
        self._refuse_averaged("update")
        replace = getattr(self._object, "replace", None)
        if (self._object is not None and replace is None) or not isinstance(self._step, WholeStep):
            raise ConfigError("update is for pytrees", hint="change the object that `Trainer.model` returns")
        if replace is None:
            self._put(*self._step.split(self._step.arranged(model)))
            return
        self.give_back()
        try:
            replace(model)
            self._borrow(lend=False)
        except BaseException:
            self._object.give_back(combine(*self._parts))  # pyright: ignore[reportOptionalMemberAccess]
            raise

    def _put(self, trainable: Tree, mutable: Tree, frozen: Tree) -> None:
        trainable, mutable = jax.tree.map(lambda x: x if hasattr(x, "dtype") else jnp.asarray(x), (trainable, mutable))
        for name, *pair in zip(
            ("trainable", "mutable", "frozen"), (trainable, mutable, frozen), self._parts, strict=True
        ):
            refuse_other_types(name, *pair)
        refuse_shared((trainable, mutable))
        parts = settled((trainable, mutable, frozen), self._parts, self.sharding)
        self.state = dataclasses.replace(self.state, trainable=parts[0], mutable=parts[1])
        self.frozen = parts[2]

    def _borrow(self, *, lend: bool = True) -> None:
        """Take the arrays as they are in a mutable object; with `lend`, leave placeholders there."""
        if self._object is None or self._is_lent:
            return
        held = combine(*self._parts)
        now = self._object.arrays()
        if any(a is not b for a, b in zip(jax.tree.leaves(held), jax.tree.leaves(now), strict=False)):
            self._put(*self._step.split(self._object))  # pyright: ignore[reportAttributeAccessIssue]
        if lend:
            with undisturbed():
                self._is_lent = True  # first: what is left half lent is given back
                self._object.lend(combine(self.state.trainable, self.state.mutable))

    def give_back(self) -> None:
        """Give a mutable object its arrays, until the next step."""
        if self._object is not None and self._is_lent:
            with undisturbed():
                self._is_lent = False  # also where something was written over a placeholder, which is said afterwards
                self._object.give_back(combine(self.state.trainable, self.state.mutable))

    def wait(self) -> None:
        """Wait until the device has ended all steps."""
        jax.block_until_ready(self.state)

    @contextlib.contextmanager
    def averaged(self) -> Generator[None]:
        """The running average of `lowtide.train.ema` in the place of what trains, inside a ``with`` block.

        For evaluation, prediction and export: the block cannot train, save or restore, and changes in it are lost.

        Raises:
            ConfigError: when the optimizer keeps none.
            StateError: inside of another one.
        """
        self._refuse_averaged("averaged")
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
        self._borrow()
        kept = self.state
        try:
            self.state, self._is_averaged = dataclasses.replace(kept, trainable=like), True
            self.give_back()
            yield
        finally:
            self.state, self._is_averaged = kept, False
            self._is_lent = self._object is not None
            self.give_back()

    def _later(self) -> Callable[[], tuple[Tree, Tree, Tree]]:
        """What gives the parts as they are then, and raises when they would be others than those that were meant."""
        is_averaged = self._is_averaged

        def parts() -> tuple[Tree, Tree, Tree]:
            if self._is_averaged != is_averaged:
                raise StateError(
                    "outputs that were asked for inside of averaged are read outside, or the other way round",
                    expected="predict_batches read to its end where it was called",
                    got="the weights that train" if is_averaged else "the average",
                    hint="predict gives all outputs at once",
                )
            return self._parts

        return parts

    def _refuse_running(self, what: str) -> None:
        """Raise while `fit` takes steps; see `Kept`."""

    def _refuse_averaged(self, what: str) -> None:
        if self._is_averaged:
            raise StateError(
                f"{what} was called inside of averaged",
                expected="evaluate and predict there",
                got="the average in the place of what trains",
                hint="leave the with block first",
            )
