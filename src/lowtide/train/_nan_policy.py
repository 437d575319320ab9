"""Detection of a loss, gradients or weights that are not finite, and the reaction of the run.

A finite loss and finite gradients do not guarantee a finite update: a norm of zero, or a learning rate that is far too
high, makes NaN. To drop such an update, a step would have to hold the old and the new state at once. So weights are
checked later: before the state is copied to the host, before checkpoints and evaluations, and at the end of a run.
Weights on the host are not checked, because they would have to be copied to the device.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp

from ..core import NonFiniteError, Tree, leaves_with_paths, on_host
from ._events import note_failure
from ._state import TrainStateStore
from .checkpoint import Snapshots

OnNan = Literal["abort", "skip", "roll_back", "ignore"]
_MAX_ROLLBACKS, _MAX_SKIPS = 3, 100
"""Largest number of rollbacks to one copy, and number of failed steps in a row at which ``"skip"`` raises."""


class NonFinitePolicy:
    """Policy of a run for values that are not finite. Mutable: it counts failed steps and rollbacks.

    `on_nan` is the argument of `Trainer`. With `is_guarded`, steps drop updates if loss or gradients are not finite.
    """

    def __init__(self, store: TrainStateStore, snapshots: Snapshots, on_nan: OnNan, *, is_guarded: bool) -> None:
        self._store, self._snapshots, self._on_nan, self._is_guarded = store, snapshots, on_nan, is_guarded
        self.has_nonfinite_values = False
        """Whether the loss or gradients of the last step were not finite, and no reaction has followed yet."""
        self.has_dropped_update = False
        """Whether the run ends with an error at a step that dropped its update; the state is then valid."""
        self.has_rolled_back = False
        """Whether the run ends at a restored copy of an earlier state."""
        self._initially_nonfinite: frozenset[str] | None = None
        """Trainable leaves that were not finite when the run began, and so are ignored; None before the run begins."""
        self._checked_step = store.step
        """Step at which weights were last checked."""
        self._num_failures = 0
        """Number of steps in a row whose loss or gradients are not finite."""
        self._num_rollbacks, self._rollback_steps = 0, (-1, -1)
        """Number of rollbacks to the same weights. `_rollback_steps` holds the step of the restored copy, and the step
        at which the run continued. A checkpoint of either step holds these weights."""

    def begin(self) -> None:
        """Record the trainable leaves that are not finite at the beginning of the run."""
        self._initially_nonfinite = _nonfinite_leaves(self._store.state.trainable)

    def observe(self, values: Mapping[str, float]) -> None:
        """Record whether the loss and the gradients of a step are finite.

        Call it before `check_step`. If an interrupt comes between the two calls after a step that was not finite, the
        run saves no checkpoint.
        """
        self.has_nonfinite_values = bool(_nonfinite_names(values))

    def check_step(self, step: int, values: Mapping[str, float]) -> int | None:
        """Check the metrics of a step, and apply `on_nan` if the loss or the gradient norm is not finite.

        It returns the step of the restored weights, or None if nothing was restored. If the run cannot continue, it
        raises `NonFiniteError`.
        """
        names = _nonfinite_names(values)
        if not names:
            self._num_failures = 0
            return None
        return self._react(step, names[0], values[names[0]])

    def check_weights(self) -> int | None:
        """Check the weights, at most once per step, and react as `check_step` does."""
        step = self._store.step
        if self._checked_step == step:
            return None
        self._checked_step = step
        paths = self._nonfinite_weights()
        if not paths:
            return None
        self.has_nonfinite_values = True
        return self._react(step, paths[0], math.nan)

    def _react(self, step: int, name: str, value: float) -> int | None:
        """Apply `on_nan` to a value that is not finite, and return the step of the restored copy, or None.

        None means that the run continues with its state. If the run cannot continue, raise `NonFiniteError`. Before
        that, restore a copy if the weights contain the bad update.
        """
        self._num_failures += 1
        if self._on_nan == "roll_back" and self._num_rollbacks < _MAX_ROLLBACKS:
            # A copy, because a rollback may delete the state. The count stays, so the run continues with new batches.
            count = jnp.array(self._store.state.step)
            if (copy_step := self._snapshots.roll_back()) is not None:
                self._num_rollbacks = (self._num_rollbacks if copy_step in self._rollback_steps else 0) + 1
                self._rollback_steps = copy_step, int(count)
                self._store.set(dataclasses.replace(self._store.state, step=count))
                self.has_nonfinite_values = False
                warnings.warn(
                    f"step {step}: {name} is not finite, so the weights of step {copy_step} were restored", stacklevel=2
                )
                return copy_step
        paths = self._nonfinite_weights()
        if self._on_nan == "ignore" or (self._on_nan == "skip" and self._num_failures < _MAX_SKIPS and not paths):
            self.has_nonfinite_values = False
            return None
        hint = "lower the learning rate, or look for NaN in weights and data"
        if paths:
            hint = f"an update made {paths[0]} not finite: check the learning rate, its schedule and the optimizer"
        if paths or not self._is_guarded:
            self.has_rolled_back = self._snapshots.roll_back() is not None
            if not self.has_rolled_back:
                hint = "the weights contain this step's update, and there is no copy to restore: make a new Trainer"
        else:
            self.has_nonfinite_values, self.has_dropped_update = False, True
        if self._on_nan == "abort" and self._is_guarded and not paths:
            hint += ', or continue with on_nan="skip"'
        repeated = self._num_failures - 1
        repetition = f", and was not finite in the {repeated} steps before" if repeated else ""
        raise NonFiniteError(f"step {step}: {name} is not finite{repetition}", got=value, hint=hint)

    def _nonfinite_weights(self) -> list[str]:
        """List the trainable leaves that an update has made NaN or infinite."""
        if self._initially_nonfinite is None or self._on_nan == "ignore":
            return []
        return sorted(_nonfinite_leaves(self._store.state.trainable) - self._initially_nonfinite)

    # --- after an exception ----------------------------------------------------------------------------------------

    def handle_last_step(self, error: BaseException, step: int, values: Mapping[str, float], *, is_alone: bool) -> None:
        """Restore a copy, and mark the run as rolled back, if a pending step's loss or gradients are not finite.

        Do nothing if `on_nan` is ``"skip"`` or ``"ignore"``, or if steps drop such updates. With several processes
        (`is_alone` is false), only mark the run, because one process cannot restore alone.
        """
        names = _nonfinite_names(values)
        if names and self._on_nan in ("abort", "roll_back") and not self._is_guarded:
            if is_alone and not self.has_rolled_back:
                with note_failure(error, "going back"):
                    self._snapshots.roll_back()
                error.add_note(f"{names[0]} of step {step} is not finite")
            self.has_rolled_back = True

    def restore_finite_weights(self, error: BaseException) -> None:
        """Restore a copy if an update has made trainable weights NaN or infinite, and add a note to `error`."""
        with note_failure(error, "going back"):
            if paths := self._nonfinite_weights():
                error.add_note(f"an update made {paths[0]} not finite")
                self.has_nonfinite_values = True
                self.has_rolled_back = self._snapshots.roll_back() is not None

    def mark_rolled_back(self) -> None:
        """Record that the state was lost, so that the run ends at a copy."""
        self.has_rolled_back = True


def _nonfinite_names(values: Mapping[str, float]) -> list[str]:
    return [name for name in ("loss", "grad_norm") if not math.isfinite(values.get(name, 0.0))]


@jax.jit
def _are_finite(leaves: list[jax.Array]) -> list[jax.Array]:
    # The results are scalars. JAX replicates them, so every process can read them.
    return [jnp.all(jnp.isfinite(leaf)) for leaf in leaves]


def _nonfinite_leaves(tree: Tree) -> frozenset[str]:
    """Return the paths of device leaves with NaN or infinity; only one boolean per leaf is copied to the host."""
    candidates = {
        path: leaf
        for path, leaf in leaves_with_paths(tree)
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and not on_host(leaf.sharding)
    }
    results = jax.device_get(_are_finite(list(candidates.values())))
    return frozenset(path for path, is_finite in zip(candidates, results, strict=True) if not is_finite)
