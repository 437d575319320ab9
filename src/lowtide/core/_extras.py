"""Optional dependencies: one clear error, with the command that installs them."""

from __future__ import annotations

import functools
import importlib.util

from ._errors import ConfigError

_MODULES = {
    "train": ("grain", "orbax.checkpoint", "tensorstore"),
    "finetune": ("jinja2", "pydantic", "regex", "safetensors", "tokenizers", "tomli_w"),
}
"""Modules of the extras of `pyproject.toml` that packages of Lowtide need as a whole."""


@functools.cache
def require_extra(extra: str) -> None:
    """Raise `ConfigError`, with the command that installs the extra, if one of its modules is missing.

    Packages call it before they import one of these modules. A check that passed is not repeated in a process.
    """
    missing = [module for module in _MODULES[extra] if not _is_installed(module)]
    if missing:
        raise ConfigError(
            f"this needs {', '.join(missing)}, which `pip install lowtide` leaves out",
            hint=f'pip install "lowtide[{extra}]"',
        )


def _is_installed(module: str) -> bool:
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # the parent package is missing
        return False
    return spec is not None and spec.origin is not None  # a folder of that name has no origin
