"""Group buffers whose names differ only in numbers into one row: ``32 × layers/*/mlp/up``."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence

from .._buffers import Buffer
from .._facts import DiffRow

_NUMBER = re.compile(r"\d+")
_LAST_NUMBER = re.compile(r"[._-]?\d+$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """One or more buffers of one role, phase, shape and pattern of names."""

    buffers: tuple[Buffer, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(b.num_bytes for b in self.buffers)

    @property
    def label(self) -> str:
        """Common name of the buffers, with ``*`` for the numbers that differ."""
        return common_label(sorted({b.label for b in self.buffers}))

    @property
    def text(self) -> str:
        """`label`, with the number of buffers."""
        if len(self.buffers) > 1 and not any(map(str.isalnum, self.label)):  # only numbers: arguments 2, 3
            return ", ".join(sorted({b.label for b in self.buffers}))
        return f"{len(self.buffers)} × {self.label}" if len(self.buffers) > 1 else self.label

    @property
    def array(self) -> str:
        """Type and shape of one buffer, as XLA writes them: ``bf16[4096,4096]``; empty if it is not an array."""
        buffer = self.buffers[0]
        return f"{buffer.dtype}[{','.join(map(str, buffer.shape))}]" if buffer.dtype else ""

    @property
    def source(self) -> str:
        """The source line, if all buffers have the same."""
        sources = {b.source for b in self.buffers}
        return next(iter(sources)) if len(sources) == 1 else ""


def common_label(labels: Sequence[str]) -> str:
    """Return the common form of labels that differ only in numbers, with ``*`` for the numbers that differ."""
    texts = _NUMBER.split(labels[0])
    numbers = list(zip(*(_NUMBER.findall(label) for label in labels), strict=False))
    middle = [column[0] if len(set(column)) == 1 else "*" for column in numbers]
    return "".join(text + number for text, number in zip(texts, [*middle, ""], strict=False))


def group_buffers(buffers: Iterable[Buffer]) -> list[Group]:
    """Group equal buffers of numbered layers, largest group first.

    A group has buffers of the same role, phase, shape, type and size whose names (path, else scope, else operation)
    differ only in numbers.
    """
    groups: dict[tuple[object, ...], list[Buffer]] = {}
    for b in buffers:
        # Numbers become "#" in the key, so that layers/0/w and layers/1/w are one group.
        key = (b.space, b.role, b.phase, b.shape, b.dtype, b.num_bytes, _NUMBER.sub("#", b.label))
        groups.setdefault(key, []).append(b)
    return sorted((Group(buffers=tuple(group)) for group in groups.values()), key=lambda g: (-g.num_bytes, g.label))


def owner_name(buffer: Buffer) -> str:
    """Return a name that two compilations share: the path, else the scope, else the operation without its number."""
    return buffer.path or buffer.scope or _LAST_NUMBER.sub("", buffer.operation) or buffer.role


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowGroup:
    """One or more rows of a difference with the same role and type, whose owners differ only in numbers."""

    rows: tuple[DiffRow, ...]

    @property
    def owner(self) -> str:
        """Common name of the owners."""
        return common_label(sorted({row.owner for row in self.rows}))

    @property
    def count(self) -> int:
        """Number of buffers, on the side that has more."""
        return max(sum(row.before_count for row in self.rows), sum(row.after_count for row in self.rows))

    @property
    def before_bytes(self) -> int:
        """Bytes before."""
        return sum(row.before_bytes for row in self.rows)

    @property
    def after_bytes(self) -> int:
        """Bytes after."""
        return sum(row.after_bytes for row in self.rows)

    @property
    def delta_bytes(self) -> int:
        """Bytes after minus bytes before."""
        return self.after_bytes - self.before_bytes

    @property
    def text(self) -> str:
        """`owner`, with the number of buffers."""
        return f"{self.count} × {self.owner}" if self.count > 1 else self.owner


def group_rows(rows: Iterable[DiffRow]) -> list[RowGroup]:
    """Group rows of numbered layers that changed in the same way, largest change first."""
    rows_by_key: dict[tuple[object, ...], list[DiffRow]] = {}
    for row in rows:
        key = (row.space, row.role, row.dtype, row.before_bytes, row.after_bytes, _NUMBER.sub("#", row.owner))
        rows_by_key.setdefault(key, []).append(row)
    groups = (RowGroup(rows=tuple(group)) for group in rows_by_key.values())
    return sorted(groups, key=lambda g: (-abs(g.delta_bytes), g.owner))
