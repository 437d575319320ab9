"""Lookup of a Hugging Face model by name in the cache that `hf download` and transformers fill."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import overload

from ..core import ModelFileError

_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


@overload
def model_path(name: str) -> str: ...
@overload
def model_path(name: None) -> None: ...
def model_path(name: str | None) -> str | None:
    """Return a path unchanged; for a name such as ``Qwen/Qwen3-8B``, return its newest snapshot in the local cache.

    Nothing is downloaded: `ModelFileError` when the name is neither an existing path nor a cached model.
    """
    if name is None or os.path.lexists(name) or _NAME.fullmatch(name) is None:
        return name
    if importlib.util.find_spec("huggingface_hub") is not None:  # tokenizers depends on it but does not import it
        from huggingface_hub import try_to_load_from_cache

        config_path = try_to_load_from_cache(name, "config.json")
        if isinstance(config_path, str):
            return str(Path(config_path).parent)
    raise ModelFileError(
        f"{name}: no such folder, and no model of this name in the local Hugging Face cache",
        expected="a folder with config.json, or a downloaded model",
        hint=f"download it: hf download {name}",
    )
