"""The files that a report and a difference of two reports are written to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from .views import _json as views_json
from .views._files import write_view


class Viewed(ABC):
    """What can be written as JSON, as a page and as a picture."""

    def to_json(self, path: str | Path) -> None:
        """Write it as JSON, integer bytes throughout.

        Args:
            path: the file; it is replaced when it exists.

        Raises:
            OutputError: when the file cannot be written.
        """
        write_view(path, f"{views_json.dump(self.to_dict())}\n".encode())

    def to_html(self, path: str | Path) -> None:
        """Write it as one HTML file that needs nothing else: timelines, and a table of the buffers or the owners.

        Args:
            path: the file; it is replaced when it exists.

        Raises:
            OutputError: when the file cannot be written.

        Memory:
            None on any device. The file stays below 10 MB; beyond that the smallest buffers become one row a role,
            and the page says so.
        """
        write_view(path, self._page())

    def to_png(self, path: str | Path) -> None:
        """Draw it, 1600×900: timelines by role, and the largest owners or those that changed most.

        Args:
            path: the file; it is replaced when it exists.

        Raises:
            OutputError: when the file cannot be written.
            ConfigError: when matplotlib (extra ``report``) is not installed.
        """
        write_view(path, self._picture())

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data, the content of `to_json`."""

    @abstractmethod
    def _page(self) -> bytes: ...

    @abstractmethod
    def _picture(self) -> bytes: ...
