"""Protocols that models implement: lending their arrays to a trainer, and naming their modules for other libraries.

A pytree consists of its arrays. A mutable object (a Flax NNX module, a Keras model) holds them. It lends the arrays
that a step changes to the trainer and keeps placeholders in their place. So the device never holds a second copy. The
bridges in `lowtide.ext` implement this protocol, `ModelObject`. Frozen arrays stay in the object.

A model that reads and writes another library's format implements `ExternalNames`. Adapters then store their tensors
under the names that this library expects, without depending on the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from ._paths import Tree
from ._select import Selector


@runtime_checkable
class ModelObject(Protocol):
    """A mutable model that lends its arrays.

    Optional members:

    - ``call(model, batch)``: what `Trainer.predict` computes by default.
    - ``replace(model)``: lets `Trainer.update` continue with another model if the user's object cannot be changed.
    - ``constrained(trainable)``: applied at the end of every update, for constraints of weights.
    - For `compute_dtype` one of two: ``lowered(model, dtype)`` prepares the model that a function gets;
      ``autocast(dtype)`` is a context in which the model is traced without any other cast.
    """

    model: Any
    """The user's object."""
    wrt: Selector
    """Leaves that train by default."""
    mutable: Selector | None
    """Other leaves that a call may change, such as batch statistics and counters of random numbers; None for none."""

    def arrays(self) -> Tree:
        """Return the object's arrays as a tree."""
        ...

    def lend(self, arrays: Tree) -> None:
        """Replace the arrays at the leaves of this tree that are not None by placeholders, which raise when used."""
        ...

    def give_back(self, arrays: Tree) -> None:
        """Put the leaves of this tree that are not None back into the object.

        Raises:
            StateError: after that, if something was written over a placeholder. The written value is lost.
        """
        ...

    def bind(self, fn: Callable[..., Any], *, training: bool) -> Callable[..., tuple[Any, Tree]]:
        """Make a pure function of the arrays.

        Args:
            fn: a function of the model and more arguments.
            training: whether dropout and batch statistics are on.

        Returns:
            ``(arrays, *args) -> (fn(model, *args), arrays after the call)``, for JAX to trace.
        """
        ...


@runtime_checkable
class ExternalNames(Protocol):
    """A model that maps its modules to their names in another library.

    Optional members:

    - ``table_names``: names of embedding lookups, which the other library implements as another kind of layer.
    - ``tied_names``: maps a module that is used in a second place to the name of that place.
    - ``named_as``: returns the model with the names of a given file, for files with several naming schemes.
    - ``ignored_modules``: modules of the other library that the model lacks.
    """

    def external_name(self, path: str) -> str:
        """Return the other library's name of a module.

        Args:
            path: a module's tree path, such as ``layers/attn/q_proj``.

        Returns:
            The name, such as ``model.layers.{layer}.self_attn.q_proj``. It contains the text ``{layer}`` in place of
            the layer's index when the module's leaves are stacked along a leading layer axis.

        Raises:
            KeyError: when nothing at `path` is a module of the other library.
        """
        ...
