"""Write a report, or a difference of two reports, to a file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from .views import _json as views_json
from .views._files import write_view


class Viewed(ABC):
    """Base of objects that can be written as JSON, as an HTML page and as a picture."""

    def to_json(self, path: str | Path) -> None:
        """Write the object as JSON, with all sizes as integer bytes.

        Args:
            path: the file; it is replaced when it exists.

        Raises:
            OutputError: when the file cannot be written.
        """
        write_view(path, f"{views_json.dump(self.to_dict())}\n".encode())

    def to_html(self, path: str | Path) -> None:
        """Write one self-contained HTML file: timelines, and a table of the buffers or the owners.

        Args:
            path: the file; it is replaced when it exists.

        Raises:
            OutputError: when the file cannot be written.

        Memory:
            None on any device. The file stays below 10 MB: above that, the smallest buffers become one row per role,
            and the page has a note.
        """
        write_view(path, self._page())

    def to_png(self, path: str | Path) -> None:
        """Draw a picture of 1600×900: timelines by role, and the largest owners or those that changed most.

        Args:
            path: the file; it is replaced when it exists.

        Raises:
            OutputError: when the file cannot be written.
            ConfigError: when matplotlib (extra ``report``) is not installed.
        """
        write_view(path, self._picture())

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return the object as plain data, the content of `to_json`."""

    @abstractmethod
    def _page(self) -> bytes: ...

    @abstractmethod
    def _picture(self) -> bytes: ...
