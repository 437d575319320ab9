"""Errors that name the problem, say what was expected, and end with a remedy.

Every class has a stable `code`. `docs/reference/errors.md` lists the same codes, and a test keeps the two equal.
Classes for user mistakes derive from `ValueError`. Broken invariants of Lowtide itself are `assert`s, without a class.
"""

from __future__ import annotations

from typing import Any, ClassVar


class LowtideError(Exception):
    """Base of every error that Lowtide raises on purpose.

    Args:
        message: what is wrong, in one sentence, naming the tree path, file or field.
        expected: what would have been right.
        got: what was found instead.
        hint: the remedy, printed on its own line after ``hint:``.
    """

    code: ClassVar[str] = "LT000"

    def __init__(self, message: str, *, expected: object = None, got: object = None, hint: str | None = None) -> None:
        details = {"  expected": expected, "  got": got, "hint": hint}
        lines = [f"{name}: {text}" for name, text in details.items() if text is not None]
        super().__init__("\n".join([f"[{self.code}] {message}", *lines]))
        self.message, self.expected, self.got, self.hint = message, expected, got, hint

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.expected, self.got, self.hint)


def _rebuild(cls: type[LowtideError], message: str, expected: object, got: object, hint: str | None) -> LowtideError:
    """Rebuild a pickled error; pickle alone would lose its keyword arguments."""
    return cls(message, expected=expected, got=got, hint=hint)


class SelectionError(LowtideError, ValueError):
    """A pattern or predicate that selects nothing, too much, or a leaf that cannot train."""

    code = "LT001"


class StructureError(LowtideError, ValueError):
    """Trees or arrays whose structure, shape or dtype do not fit together."""

    code = "LT002"


class ConfigError(LowtideError, ValueError):
    """A configuration value out of range, unknown, or in conflict with another."""

    code = "LT003"


class ModelFileError(LowtideError, ValueError):
    """A model or adapter directory that is missing, truncated, of an unknown kind, or contradicts itself."""

    code = "LT004"


class DataError(LowtideError, ValueError):
    """Training data that is missing, empty, unreadable or too short."""

    code = "LT005"


class OutputError(LowtideError, ValueError):
    """An output folder that exists already, cannot be written, or holds another run."""

    code = "LT006"


class DonationError(LowtideError, ValueError):
    """A donated buffer that the compiled program did not reuse, so that two copies would exist."""

    code = "LT007"


class TargetError(LowtideError, ValueError):
    """A compile target that is unknown, or whose compiler is not installed."""

    code = "LT008"


class ReportError(LowtideError, ValueError):
    """A memory report that is missing, invalid, or written in another version of the format."""

    code = "LT009"


class OutOfMemoryError(LowtideError, MemoryError):
    """A program that needs more memory than its device has, or than a budget allows.

    `report` is the program's `lowtide.memory.MemoryReport`, if there is one. `remedies` are changes that would make the
    program smaller. If the device or the compiler raised an exception, it is the `__cause__`.
    """

    code = "LT010"
    report: Any = None
    remedies: tuple[Any, ...] = ()


class PlacementError(LowtideError, ValueError):
    """A value that is not in its declared memory, or that cannot be put there."""

    code = "LT011"


class NonFiniteError(LowtideError, ValueError):
    """A loss, gradients or logits that are not finite."""

    code = "LT012"


class StateError(LowtideError, ValueError):
    """Training state that is borrowed, lost or damaged; a mistimed call; a process that failed or does not answer."""

    code = "LT013"


class ScheduleError(LowtideError, ValueError):
    """A pipeline schedule that omits or repeats an action, deadlocks, or needs too much memory."""

    code = "LT014"


class PlacementWarning(UserWarning):
    """A placement that differs from the request, and costs memory or time."""
