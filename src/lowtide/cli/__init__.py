"""The `lowtide` command line: each command parses arguments, calls the public API and prints the result.

Flags of `lowtide finetune` are the fields of `lowtide.finetune.FinetuneConfig`.
"""

from ._main import main as main

__all__ = ["main"]
