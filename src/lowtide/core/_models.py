"""How a trainer takes the arrays out of a model, runs a function of the model with others, and gives them back.

A pytree is its arrays. A mutable object (a Flax NNX module, a Keras model) holds them: it lends those that a step
changes to the trainer, with placeholders in their stead, so that the device never keeps a second copy; the bridges in
`lowtide.ext` say how. Frozen arrays stay in the object, which nothing takes them from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from ._paths import Tree
from ._select import Where


@runtime_checkable
class ModelObject(Protocol):
    """A mutable model that lends its arrays.

    It may also have ``call(model, batch)``, what `Trainer.predict` computes by default; ``replace(model)``, by
    which `Trainer.update` goes on with another model where the object that the user knows cannot be changed;
    ``constrained(trainable)``, which every update ends with, for constraints of weights; and for `compute_dtype`
    either ``lowered(model, dtype)``, which prepares the model that a function gets, or ``autocast(dtype)``, a
    context to trace it in without any other cast.
    """

    model: Any
    """The object that the user knows."""
    wrt: Where
    """What trains unless the trainer is told otherwise."""
    mutable: Where | None
    """What a call may change beside it, such as batch statistics and counters of random numbers; None for nothing."""

    def arrays(self) -> Tree:
        """Return the arrays that the object holds, as a tree of them."""
        ...

    def lend(self, arrays: Tree) -> None:
        """Put a placeholder, which raises when it is used, where a leaf of this tree is not None."""
        ...

    def give_back(self, arrays: Tree) -> None:
        """Put the leaves of this tree that are not None into the object.

        Raises:
            StateError: afterwards, when something was written over a placeholder, which is lost.
        """
        ...

    def bind(self, fn: Callable[..., Any], *, training: bool) -> Callable[..., tuple[Any, Tree]]:
        """Make a pure function of arrays.

        Args:
            fn: a function of the model and more arguments.
            training: whether dropout and batch statistics are on.

        Returns:
            ``(arrays, *args) -> (fn(model, *args), arrays as they are then)``, to be traced by JAX.
        """
        ...
