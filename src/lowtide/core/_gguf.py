"""The rule by which a model's path is recognised as a GGUF file, without a need for JAX."""

from __future__ import annotations

import os
from pathlib import Path

from ._errors import ModelFileError
from ._inputs import input_file, shortened


def gguf_file(path: str | Path) -> Path | None:
    """Return the GGUF file that a model's path refers to, or None for a Hugging Face directory.

    Args:
        path: the file itself, or a folder that has one and neither `config.json` nor safetensors.

    Raises:
        ModelFileError: when the file is missing or not a regular file, and for a folder with several GGUF files.

    Memory:
        None; the file is not opened.
    """
    path = Path(path)
    if not path.is_dir():
        is_named = path.suffix.lower() == ".gguf"
        return input_file(path.parent, path.name, hint="check the path; nothing is downloaded") if is_named else None
    try:
        names = sorted(os.listdir(path))
    except OSError:
        return None  # the reader of the folder raises the error
    matches = [name for name in names if name.lower().endswith(".gguf")]
    if not matches or "config.json" in names or any(name.endswith((".safetensors", ".index.json")) for name in names):
        return None
    if len(matches) > 1:
        raise ModelFileError(
            f"{path}: several GGUF files",
            expected="one, or the path of one of them",
            got=shortened(", ".join(matches)),
            hint=f"name the file, for instance {path / matches[0]}",
        )
    return input_file(path, matches[0], hint="check the folder; nothing is downloaded")
