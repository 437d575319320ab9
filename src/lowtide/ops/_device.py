"""The device that a program is traced for."""

from __future__ import annotations

from typing import Any

import jax


def traced_device() -> Any:
    """Return a device of the kind that the program is traced for."""
    # `jax.default_device` says so where that is not the default backend, as in a memory report for a TPU on a machine
    # with a GPU. It is a device, the name of a platform, or None.
    config: Any = jax.config
    chosen = config.jax_default_device
    return chosen if hasattr(chosen, "platform") else jax.devices(chosen)[0]
