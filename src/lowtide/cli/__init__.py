"""The `lowtide` command line: each command parses arguments, calls the public API and prints the result."""

from ._main import main as main

__all__ = ["main"]
