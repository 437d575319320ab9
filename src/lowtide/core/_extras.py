"""Check optional dependencies; the error for a missing one has the command that installs it."""

from __future__ import annotations

import functools
import importlib.util

from ._errors import ConfigError

_MODULES = {
    "train": ("grain", "orbax.checkpoint", "tensorstore"),
    "finetune": ("jinja2", "pydantic", "regex", "safetensors", "tokenizers", "tomli_w"),
}
"""Map from an extra of `pyproject.toml` to the modules that `require_extra` checks."""


@functools.cache
def require_extra(extra: str) -> None:
    """Raise `ConfigError`, with the command that installs the extra, if one of its modules is missing.

    Packages call this before they import such a module. A check that passed is not repeated in a process.
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
    return spec is not None and spec.origin is not None  # a mere folder of that name has no origin
