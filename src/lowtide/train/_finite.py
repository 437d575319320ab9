"""Losses, gradients and weights that are not finite: when they are detected, and how the run reacts.

A finite loss and finite gradients do not guarantee a finite update: a schedule that divides by zero, a norm of zero or
a rate that is far too high makes NaN. To drop such an update, a step would have to hold both states at once. So weights
are checked when a run pauses and the state has to be valid: before copies, checkpoints and evaluations, and at the end.
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
from ._events import noted
from ._recovery import Copies
from ._state import LiveState

OnNan = Literal["abort", "skip", "roll_back", "ignore"]
_MAX_ROLLBACKS, _MAX_SKIPS = 3, 100
"""Largest number of rollbacks to one copy, and number of failed steps in a row at which ``"skip"`` raises."""


class Guard:
    """Policy of a run for values that are not finite.

    Args:
        live: the state.
        copies: the copies that it can return to.
        on_nan: the policy, as in `Trainer`.
        is_guarded: whether steps drop an update whose loss or gradients are not finite.
    """

    def __init__(self, live: LiveState, copies: Copies, on_nan: OnNan, *, is_guarded: bool) -> None:
        self._live, self._copies, self._on_nan, self._is_guarded = live, copies, on_nan, is_guarded
        self.is_spoilt = False
        """Whether the loss or gradients of the last step were not finite, and no reaction has followed yet."""
        self.has_left_out = False
        """Whether the run ends at a step that dropped its update, so that the state is valid."""
        self.is_back = False
        """Whether the run ends at an earlier state than its last."""
        self._odd: frozenset[str] | None = None
        """Trainable leaves that were not finite when the run began, and so are ignored; None before that."""
        self._asked_at = live.step
        """Step at which weights were last checked."""
        self._num_wrong = 0
        """Number of steps in a row whose loss or gradients are not finite."""
        self._num_rollbacks, self._backs = 0, (-1, -1)
        """Number of rollbacks to one copy; its step, and the step at which the run continued (a checkpoint saved there
        holds the same weights)."""

    def begin(self) -> None:
        """Record the trainable leaves that are not finite at the beginning of the run."""
        self._odd = _not_finite_leaves(self._live.state.trainable)

    def see(self, values: Mapping[str, float]) -> None:
        """Check the loss and the gradients of a step, before an interrupt can come between this and `judge`."""
        self.is_spoilt = bool(_not_finite(values))

    def judge(self, step: int, values: Mapping[str, float]) -> int | None:
        """Decide how the run continues after a step.

        Returns:
            The step of the weights that were restored, or None if the run simply continues.

        Raises:
            NonFiniteError: depending on the policy.
        """
        wrong = _not_finite(values)
        if not wrong:
            self._num_wrong = 0
            return None
        return self._act(step, wrong[0], values[wrong[0]])

    def ask(self) -> int | None:
        """Check the weights, at most once per step, and decide as `judge` does."""
        step = self._live.step
        if self._asked_at == step:
            return None
        self._asked_at = step
        spoilt = self._spoilt()
        if not spoilt:
            return None
        self.is_spoilt = True
        return self._act(step, spoilt[0], math.nan)

    def _act(self, step: int, wrong: str, value: float) -> int | None:
        """Raise, restore the last copy, or do nothing."""
        self._num_wrong += 1
        if self._on_nan == "roll_back" and self._num_rollbacks < _MAX_ROLLBACKS:
            # A copy, because a rollback may delete the state. The count stays, so the run continues with later batches.
            count = jnp.array(self._live.state.step)
            if (back := self._copies.roll_back()) is not None:
                self._num_rollbacks = (self._num_rollbacks if back in self._backs else 0) + 1
                self._backs = back, int(count)
                self._live.set(dataclasses.replace(self._live.state, step=count))
                self.is_spoilt = False
                warnings.warn(f"step {step}: {wrong} is not finite; back to the weights of step {back}", stacklevel=2)
                return back
        spoilt = self._spoilt()
        if self._on_nan == "ignore" or (self._on_nan == "skip" and self._num_wrong < _MAX_SKIPS and not spoilt):
            self.is_spoilt = False
            return None
        hint = "lower the learning rate, or look for NaN in weights and data"
        if spoilt:
            hint = f"an update has spoilt {spoilt[0]}: look at the learning rate, its schedule and the optimizer"
        if spoilt or not self._is_guarded:
            self.is_back = self._copies.roll_back() is not None
            if not self.is_back:
                hint = "the weights have got this step's update, for there was no copy: make a new Trainer"
        else:
            self.is_spoilt, self.has_left_out = False, True
        can_skip = self._on_nan == "abort" and self._is_guarded and not spoilt
        raise NonFiniteError(
            f"step {step}: {wrong} is not finite"
            + (f", nor was it in the {self._num_wrong - 1} steps before" if self._num_wrong > 1 else ""),
            got=value,
            hint=hint + (', or go on with on_nan="skip"' if can_skip else ""),
        )

    def _spoilt(self) -> list[str]:
        """List the trainable leaves that an update has made NaN or infinite."""
        if self._odd is None or self._on_nan == "ignore":
            return []
        return sorted(_not_finite_leaves(self._live.state.trainable) - self._odd)

    # --- after an exception ----------------------------------------------------------------------------------------

    def go_back(self, error: BaseException, step: int, values: Mapping[str, float], *, is_alone: bool) -> None:
        """Restore a copy if the last step needs it and was not judged; several processes cannot do so together."""
        wrong = _not_finite(values)
        if wrong and self._on_nan in ("abort", "roll_back") and not self._is_guarded:
            if is_alone and not self.is_back:
                with noted(error, "going back"):
                    self._copies.roll_back()
                error.add_note(f"{wrong[0]} of step {step} is not finite")
            self.is_back = True

    def heal(self, error: BaseException) -> None:
        """Restore a copy if an update has made weights non-finite and they were not checked since."""
        with noted(error, "going back"):
            if spoilt := self._spoilt():
                error.add_note(f"an update has made {spoilt[0]} not finite")
                self.is_spoilt = True
                self.is_back = self._copies.roll_back() is not None

    def fall_back(self) -> None:
        """Record that the state was lost, so that the run ends at a copy."""
        self.is_back = True


def _not_finite(values: Mapping[str, float]) -> list[str]:
    """Return which of loss and gradients are not finite."""
    return [name for name in ("loss", "grad_norm") if not math.isfinite(values.get(name, 0.0))]


@jax.jit
def _are_finite(leaves: list[jax.Array]) -> list[jax.Array]:
    # The results are scalars, which every one of several processes holds as a whole.
    return [jnp.all(jnp.isfinite(leaf)) for leaf in leaves]


def _not_finite_leaves(tree: Tree) -> frozenset[str]:
    """Return the paths of leaves with NaN or infinity; one boolean per leaf is copied to the host."""
    asked = {
        path: leaf
        for path, leaf in leaves_with_paths(tree)
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and not on_host(leaf.sharding)
    }
    answers = jax.device_get(_are_finite(list(asked.values())))
    return frozenset(path for path, is_finite in zip(asked, answers, strict=True) if not is_finite)
