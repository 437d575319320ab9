"""What a trainer keeps: the state, and the copies of it that it can go back to.

A step that fails after it has consumed its state leaves nothing that can be read. So there is always another copy: the
newest checkpoint, and before the first one a copy on the host.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from ..core import ConfigError, StateError, Tree
from ..distributed import Processes, ShardingRules, fingerprint
from ._checkpoint import Checkpoints
from ._checks import needs_checkpoints
from ._feed import Feed
from ._owned import Owned
from ._rollback import Snapshot, is_alive
from ._step import Step, TrainState

if TYPE_CHECKING:
    from ._loop import Loop


class Kept(Owned):
    """The state of a model in training, with checkpoints and a copy on the host.

    Args:
        model: a pytree or a `ModelObject`.
        step: how it is trained.
        state: of the step.
        frozen: what no step changes.
        sharding: where arrays belong, on several devices.
        checkpoints: where they are kept, or None.
        rollback: whether a copy is kept on the host until there is a checkpoint.
    """

    def __init__(
        self,
        model: Any,
        step: Step,
        state: TrainState,
        frozen: Tree,
        sharding: ShardingRules | None,
        *,
        checkpoints: Checkpoints | None,
        rollback: bool,
    ) -> None:
        super().__init__(model, step, state, frozen, sharding)
        self.processes = Processes(sharding)
        """The other processes of the run."""
        self.checkpoints = checkpoints
        self.position: Mapping[str, Any] | None = None
        """Where the data of the run is, as its last checkpoint or `fit` left it."""
        self.feed: Feed | None = None
        """The data of the last `fit`, for another one with the same iterator."""
        self.callback_states: Mapping[str, Any] | None = None
        """Of a checkpoint that is being written or was restored, the states of its run's callbacks."""
        self.loop: Loop | None = None
        """The `fit` that is running."""
        self.metrics: Tree = None
        """Of the last step, until its `fit` has taken them."""
        self._rollback = rollback
        self._snapshot: tuple[Snapshot, Mapping[str, Any] | None, Mapping[str, Any] | None, int] | None = None
        """A copy of the state, the data's position and the callbacks' states at it, and its step."""
        self._saved: weakref.ref[TrainState] | None = None
        """The state that was last saved or restored."""
        self._hashed: tuple[Tree, str] | None = None

    @property
    def has_eval_data(self) -> bool:
        """Whether the `fit` that is running evaluates."""
        return self.loop is not None and self.loop.eval_data is not None

    def keep_copy(self, notes: tuple[Mapping[str, Any] | None, Mapping[str, Any] | None] = (None, None)) -> None:
        """Copy the state to the host, unless there is a checkpoint of this step.

        Args:
            notes: the data's position and the callbacks' states at it.
        """
        self._snapshot = None
        self._borrow(lend=False)  # what was changed in a mutable object
        is_saved = self._saved is not None and self._saved() is self.state
        if self._rollback and not (is_saved and self.checkpoints and self.checkpoints.latest_step() == self.step):
            self._snapshot = Snapshot(self.state), *notes, self.step

    def roll_back(self) -> int | None:
        """Return to the newest checkpoint that can be read, or to the copy on the host where that is newer.

        Returns:
            Its step, or None when there is neither.

        Warns:
            UserWarning: for checkpoints that cannot be read.
        """
        latest = None if self.checkpoints is None else self.checkpoints.latest_step()
        kept = -1 if self._snapshot is None else self._snapshot[-1]
        found = None
        if latest is not None and latest > kept:
            try:
                found = self._restore()
            except Exception as error:
                if self._snapshot is None:
                    raise
                warnings.warn(f"no checkpoint could be restored, so the copy on the host is: {error}", stacklevel=2)
                if self.checkpoints is not None and isinstance(error, StateError):
                    self.checkpoints.set_aside(after=kept)
        if self._snapshot is not None and (found is None or found < kept):
            snapshot, self.position, self.callback_states, _ = self._snapshot
            self._put_back(snapshot, is_lent=self._is_lent)
            return self.step
        return found

    def _put_back(self, snapshot: Snapshot, *, is_lent: bool) -> None:
        """Hold a copy again, as does a mutable object that has its arrays: others there would be taken for edits."""
        self.state = snapshot.restore()
        if not is_lent:
            self._is_lent = self._object is not None
            self.give_back()

    def recover(self) -> str:
        """Make sure that the trainer holds a good state after an exception.

        Returns:
            What was done, for the user.

        Raises:
            StateError: when the state is gone and there is no copy.
        """
        if self.processes.count > 1:
            return self._with_others()
        if is_alive(self.state):
            return f"the trainer holds the state of step {self.step}; fit goes on from there"
        step = self.roll_back()
        if step is None:
            raise StateError(
                "a step failed after it had consumed its state, and there is no copy of it",
                expected="a checkpoint, or Trainer(..., rollback=True)",
                got="neither",
                hint="make a new Trainer from the model's weights; with checkpoint_dir it could be restored",
            )
        return f"the step that failed had consumed its state; the trainer is back at step {step}, where fit goes on"

    def _with_others(self) -> str:
        """What is held after an exception in one of several processes, where nothing can be restored together."""
        latest = None if self.checkpoints is None else self.checkpoints.latest_step()
        newest = "there is no checkpoint" if latest is None else f"the newest checkpoint is of step {latest}"
        if is_alive(self.state):
            return (
                f"the trainer holds the state of step {self.step}; fit goes on from there if all processes live, "
                f"else start them all again and restore: {newest}"
            )
        return f"the step that failed had consumed its state; start all processes again and restore: {newest}"

    def save(self) -> bool:
        """Begin to write a checkpoint of the state; in a callback also of where `fit` is.

        Returns:
            Whether there was none of this step yet, or the weights were changed since and it is written anew.

        Raises:
            ConfigError: without a `checkpoint_dir`.
            StateError: inside of `averaged`.
        """
        checkpoints = needs_checkpoints(self.checkpoints, "save")
        self._refuse_averaged("save")
        self._borrow(lend=False)  # what was changed in a mutable object
        position, callbacks = (self.position, self.callback_states) if self.loop is None else self.loop.notes()
        positions = self.processes.positions(position)
        notes = {"positions": positions, **self._identity(), "callbacks": callbacks}
        has_changed = self._saved is None or self._saved() is not self.state  # since the checkpoint of this step
        is_new = checkpoints.save(self.step, jax.tree.map(_numbers, self.state), notes, replace=has_changed)
        self._saved = weakref.ref(self.state) if is_new else self._saved
        return is_new

    def restore(self, *, step: int | None = None, best: bool = False) -> int | None:
        """Load a checkpoint into the trainer.

        Args:
            step: which; by default the newest that can be read.
            best: the one that `Trainer` keeps as the best, instead.

        Returns:
            Its step, or None when there is no checkpoint yet (and none was named).

        Raises:
            ConfigError: without a `checkpoint_dir`; with both arguments; when there is no checkpoint of `step`, or
                none was evaluated.
            StateError: in a callback while `fit` takes steps, whose data would go on elsewhere; inside of `averaged`.
            StructureError: when the checkpoint is of other trainable leaves, or was trained over other frozen ones.
            StateError: when there are checkpoints, and none can be read.

        Warns:
            UserWarning: for each checkpoint that is damaged, whose predecessor is tried then.

        Memory:
            The state's arrays are given up before those of the checkpoint are read: never two copies on the device.
            With `rollback` they are on the host meanwhile, for a checkpoint that cannot be read.
        """
        self._refuse_running("restore")
        self._refuse_averaged("restore")
        with self.processes.watched():
            return self._restore(step, best=best)

    def _restore(self, step: int | None = None, *, best: bool = False) -> int | None:
        checkpoints = needs_checkpoints(self.checkpoints, "restore")
        if best and step is not None:
            raise ConfigError("restore takes step or best", got=f"step={step}, best=True", hint="leave one out")
        numbers = jax.tree.map(_numbers, self.state)
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), numbers)
        impls = [jax.random.key_impl(x) if _is_key(x) else None for x in jax.tree.leaves(self.state)]
        del numbers
        before: list[Snapshot] = []

        def give_up() -> None:
            if self._rollback and is_alive(self.state):
                before.append(Snapshot(self.state))
            jax.tree.map(lambda x: x.delete(), self.state)

        how = like, self._identity(), give_up
        chosen = checkpoints.existing(step) if best or step is not None else None
        lent, self._is_lent = self._is_lent, True
        try:
            found = checkpoints.newest(*how) if chosen is None else checkpoints.read(chosen, *how)
            if found is None:
                return None
            loaded, numbers, notes = found
            leaves, structure = jax.tree.flatten(numbers)
            self.state = structure.unflatten(
                leaf if impl is None else jax.random.wrap_key_data(leaf, impl=impl)
                for leaf, impl in zip(leaves, impls, strict=True)
            )
            self._saved = weakref.ref(self.state)
            self.position = self.processes.position(notes["positions"])
            self.callback_states = notes.get("callbacks")
            if not lent:
                self.give_back()
            return loaded
        except BaseException as error:
            if before:
                self._put_back(before[0], is_lent=lent)
            if is_alive(self.state):
                error.add_note(f"the trainer holds the state of step {self.step}, as before")
            elif not self._rollback:
                error.add_note("the trainer's own state was given up for it: rollback=False keeps no copy")
            raise
        finally:
            self._is_lent = lent

    def _refuse_running(self, what: str) -> None:
        if self.loop is not None and not self.loop.is_over:
            raise StateError(
                f"{what} was called while fit takes steps",
                expected=f"{what} between two calls of fit, or in on_train_end or on_exception",
                got="a callback of steps, whose data and records would no longer be those of the state",
                hint=f"call trainer.stop() there, and {what} after fit has returned",
            )

    def _identity(self) -> dict[str, Any]:
        """Of what run a checkpoint is."""
        if self._hashed is None or self._hashed[0] is not self.frozen:  # `update` may have replaced it
            self._hashed = self.frozen, fingerprint(self.frozen)
        keys = [str(jax.random.key_impl(leaf)) for leaf in jax.tree.leaves(self.state) if _is_key(leaf)]
        random = {"keys": keys, "settings": {name: getattr(jax.config, name) for name in _RANDOM}}
        return {"base": self._hashed[1], "arrangement": self._step.arrangement, "random": random}


_RANDOM = ("jax_default_prng_impl", "jax_threefry_partitionable")
"""Settings of JAX that decide which random numbers a seed gives."""


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _numbers(leaf: Any) -> Any:
    """A leaf as checkpoints hold it: of random keys their numbers."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf
