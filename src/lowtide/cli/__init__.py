"""The `lowtide` command: parses, calls the public interface, prints."""

from ._main import main as main

__all__ = ["main"]
