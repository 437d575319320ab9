"""What stands in a model object while a trainer has its arrays."""

from __future__ import annotations

from typing import Any, NoReturn

from ..core import StateError


class Lent:
    """A placeholder for an array that a trainer has: any use raises.

    Args:
        path: of the array in the model.
        like: the array, of which shape and dtype are kept.
    """

    def __init__(self, path: str, like: Any) -> None:
        self.path, self.shape, self.dtype = path, like.shape, like.dtype
        self.ndim, self.size = len(like.shape), like.size

    def _raise(self, *_: Any, **__: Any) -> NoReturn:
        raise StateError(
            f"{self.path}: a trainer has this array while it trains",
            expected="Trainer.model, which gives the arrays back",
            got="the model object itself, in the middle of fit",
            hint="in a callback read trainer.model, or use on_epoch_end and call trainer.model there",
        )

    __array__ = __getitem__ = __iter__ = __float__ = __int__ = __bool__ = __len__ = _raise
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __matmul__ = __neg__ = _raise

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._raise()

    def __repr__(self) -> str:
        return f"Lent({self.path}: {self.dtype}{list(self.shape)})"
