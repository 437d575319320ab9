"""What a model's modules are called elsewhere: the seam between tree paths and other software's files.

A model that reads and writes another library's format implements `ExternalNames`; adapters then store their tensors
under the names that library looks for, without knowing the model.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class ExternalNames(Protocol):
    """A model that knows the names of its modules in another library.

    It may also have ``table_names``, the names of modules whose rows are looked up, which are other layers there than
    those that multiply; and ``tied_names``, which gives of a module that is used in a second place the name of that.
    ``named_as`` returns the model with the names of a file, where files have several. ``ignored_modules`` names modules
    of the other library that the model lacks.
    """

    def external_name(self, path: str) -> str:
        """Return the other library's name of a module.

        Args:
            path: a module's tree path, such as ``layers/attn/q_proj``.

        Returns:
            The name, such as ``model.layers.{layer}.self_attn.q_proj``; it contains the text ``{layer}`` where the
            index of a layer stands when the module's leaves are stacked along a leading layer axis.

        Raises:
            KeyError: when nothing at `path` is a module of the other library.
        """
        ...
