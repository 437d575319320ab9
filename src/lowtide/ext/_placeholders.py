"""Shared code of the bridges: placeholders for arrays that a trainer has borrowed, and error checks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

from ..core import SelectionError, StateError, StructureError

_READ_FIRST = "in a callback read trainer.model, which gives the arrays back until the next step"


class Placeholder:
    """Placeholder for an array that a trainer has borrowed: it has path, shape and dtype, and raises when used."""

    def __init__(self, path: str, array: Any) -> None:
        self.path, self.shape, self.dtype = path, array.shape, array.dtype
        self.ndim, self.size = len(array.shape), array.size

    def refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise StateError(f"{self.path}: a trainer has borrowed this array", hint=_READ_FIRST)

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


def check_placeholders(values: Mapping[str, Any], paths: Collection[str]) -> None:
    """Raise StateError if a placeholder was replaced while the arrays were borrowed; the replacement is lost."""
    edited = sorted(path for path in paths if not isinstance(values.get(path), Placeholder))
    if edited:
        problem = f"{', '.join(edited[:4])}: changed in the model while a trainer had borrowed the arrays"
        got = f"{len(edited)} of {len(paths)} placeholders overwritten; the trainer's arrays replaced those values"
        raise StateError(problem, got=got, hint=_READ_FIRST)


def check_trainable(names: Collection[str], kind: str, candidates: Collection[str], example: str) -> None:
    """Raise SelectionError if the filter of a bridge selects none of a module's arrays or variables."""
    if not names:
        got = ", ".join(candidates) or f"a module without {kind}s"
        hint = f"pass Bridge(model, wrt={example}), for instance"
        raise SelectionError(f"the filter selects no {kind} of the module", got=got, hint=hint)


def refuse_changes(changes: Mapping[str, Sequence[str]], problem: str, hint: str) -> None:
    """Raise StructureError with the first names of each kind of change, if anything changed."""
    if any(changes.values()):
        got = "; ".join(f"{change}: {', '.join(names[:4])}" for change, names in changes.items() if names)
        raise StructureError(problem, got=got, hint=hint)
