"""Names of a model's modules in other libraries: the mapping from tree paths to the files of other software.

A model that reads and writes another library's format implements `ExternalNames`. Adapters then store their tensors
under the names that this library expects, without depending on the model.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable


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
