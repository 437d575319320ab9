"""Placeholders for arrays that a trainer borrows from a model object, and the trainer's form of random keys."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from ..core import StateError


class Placeholder:
    """A placeholder with the path, shape and dtype of an array that a trainer has borrowed: any use raises."""

    def __init__(self, path: str, array: Any) -> None:
        self.path, self.shape, self.dtype = path, array.shape, array.dtype
        self.ndim, self.size = len(array.shape), array.size

    def refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Raise StateError for any use."""
        raise StateError(
            f"{self.path}: a trainer has borrowed this array",
            expected="Trainer.model, which gives the arrays back",
            got="the model object itself, during training",
            hint="in a callback read trainer.model, which gives the arrays back until the next step",
        )

    __array__ = __getitem__ = __setitem__ = __iter__ = __float__ = __int__ = __bool__ = __len__ = refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __matmul__ = __neg__ = refuse
    __rtruediv__ = __rmatmul__ = __floordiv__ = __mod__ = __pow__ = __rpow__ = __abs__ = __pos__ = __complex__ = refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __copy__ = __deepcopy__ = __reduce_ex__ = refuse  # type: ignore
    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.refuse()

    def __repr__(self) -> str:
        return f"Placeholder({self.path}: {self.dtype}{list(self.shape)})"


def is_key(leaf: Any) -> bool:
    """Return whether a leaf is an array of random keys."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def unwrap_key(leaf: Any) -> Any:
    """Return the trainer's form of a leaf: key data for random keys, otherwise the leaf itself."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def check_placeholders(values: Mapping[str, Any], paths: Collection[str]) -> None:
    """Raise StateError if a placeholder was replaced while the arrays were borrowed; the replacement is lost."""
    edited = sorted(path for path in paths if not isinstance(values.get(path), Placeholder))
    if edited:
        raise StateError(
            f"{', '.join(edited[:4])}: changed in the model while a trainer had borrowed the arrays",
            expected="changes of trainer.model, which gives the arrays back",
            got=f"{len(edited)} of {len(paths)} placeholders overwritten; the trainer's arrays replaced those values",
            hint="in a callback read trainer.model first, and then change it",
        )
