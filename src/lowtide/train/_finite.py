"""Losses, gradients and weights that are no numbers: who notices, and what becomes of the run.

A loss and gradients that are finite say nothing of the update that follows: a schedule that divides by zero, a norm of
zero, or a rate that is far too high makes NaN of them. To leave such an update out, a step would have to hold both
states at once; so weights are asked where a run pauses: before copies, checkpoints and evaluations, and at its end,
before the state is taken for a good one. What is on the host is not asked: it would have to come to the device.
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
"""How often a run may go back to one copy, and how many steps in a row it may skip, before it gives up."""


class Guard:
    """What a run does about values that are no numbers.

    Args:
        live: the state.
        copies: where it can go back to.
        on_nan: the policy, as `Trainer` takes it.
        is_guarded: whether steps leave an update out whose loss or gradients are not finite.
    """

    def __init__(self, live: LiveState, copies: Copies, on_nan: OnNan, *, is_guarded: bool) -> None:
        self._live, self._copies, self._on_nan, self._is_guarded = live, copies, on_nan, is_guarded
        self.is_spoilt = False
        """Whether the last values had no finite loss or gradients, and nothing was done about it yet."""
        self.has_left_out = False
        """Whether the run ends at a step that left its update out, so that its state is good."""
        self.is_back = False
        """Whether the run ends at an earlier state than its last."""
        self._odd: frozenset[str] | None = None
        """What trains and was not finite when the run began, which is no harm then; None before that."""
        self._asked_at = live.step
        """The step at which weights were last asked."""
        self._num_wrong = 0
        """Steps in a row whose loss or gradients are no numbers."""
        self._num_rollbacks, self._backs = 0, (-1, -1)
        """How often the run went back to one copy, its step, and the one it went on from: a checkpoint there is it."""

    def begin(self) -> None:
        """Remember the weights that are no numbers from the beginning."""
        self._odd = _not_finite_leaves(self._live.state.trainable)

    def see(self, values: Mapping[str, float]) -> None:
        """Look at the loss and the gradients of a step, before anything can come between that and `judge`."""
        self.is_spoilt = bool(_not_finite(values))

    def judge(self, step: int, values: Mapping[str, float]) -> int | None:
        """Decide what becomes of the run after a step.

        Returns:
            The step whose weights the run has gone back to, or None where it goes on.

        Raises:
            NonFiniteError: as the policy says.
        """
        wrong = _not_finite(values)
        if not wrong:
            self._num_wrong = 0
            return None
        return self._act(step, wrong[0], values[wrong[0]])

    def ask(self) -> int | None:
        """Look at the weights, once a step, and decide as `judge` does."""
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
        """Raise, return to the last copy, or do nothing."""
        self._num_wrong += 1
        if self._on_nan == "roll_back" and self._num_rollbacks < _MAX_ROLLBACKS:
            count = jnp.array(self._live.state.step)  # a copy; the batches that were seen stay behind
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
        """List the weights of which an update has made NaN or infinity."""
        if self._odd is None or self._on_nan == "ignore":
            return []
        return sorted(_not_finite_leaves(self._live.state.trainable) - self._odd)

    # --- after an exception ----------------------------------------------------------------------------------------

    def go_back(self, error: BaseException, step: int, values: Mapping[str, float], *, is_alone: bool) -> None:
        """Go back from the state after a step that nobody has judged; with others nobody can go back."""
        wrong = _not_finite(values)
        if wrong and self._on_nan in ("abort", "roll_back") and not self._is_guarded:
            if is_alone and not self.is_back:
                with noted(error, "going back"):
                    self._copies.roll_back()
                error.add_note(f"{wrong[0]} of step {step} is not finite")
            self.is_back = True

    def heal(self, error: BaseException) -> None:
        """Go back from weights that an update has spoilt, and nobody has noticed."""
        with noted(error, "going back"):
            if spoilt := self._spoilt():
                error.add_note(f"an update has made {spoilt[0]} not finite")
                self.is_spoilt = True
                self.is_back = self._copies.roll_back() is not None

    def fall_back(self) -> None:
        """Say that the state was lost, and the run ends at a copy."""
        self.is_back = True


def _not_finite(values: Mapping[str, float]) -> list[str]:
    """Which of loss and gradients are no numbers."""
    return [name for name in ("loss", "grad_norm") if not math.isfinite(values.get(name, 0.0))]


@jax.jit
def _are_finite(leaves: list[jax.Array]) -> list[jax.Array]:
    # Scalars: of several processes each has them whole.
    return [jnp.all(jnp.isfinite(leaf)) for leaf in leaves]


def _not_finite_leaves(tree: Tree) -> frozenset[str]:
    """Paths of the leaves that hold NaN or infinity; one number for each leaf comes to the host."""
    asked = {
        path: leaf
        for path, leaf in leaves_with_paths(tree)
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and not on_host(leaf.sharding)
    }
    answers = jax.device_get(_are_finite(list(asked.values())))
    return frozenset(path for path, is_finite in zip(asked, answers, strict=True) if not is_finite)
