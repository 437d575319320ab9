"""Sizes and rates of a target that a caller gives, with their checks."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping

from ..core import ConfigError, format_bytes, parse_bytes

SIZES = ("device_bytes", "hbm_bytes", "host_bytes", "reserve_bytes")
RATES = ("hbm_bandwidth", "flops", "host_link_bandwidth")


def read_figures(values: Mapping[str, object]) -> dict[str, int]:
    """Return sizes in bytes and rates per second as whole numbers.

    Sizes may be text such as ``"14 GiB"``, bandwidths such as ``"25 GB/s"``. The result omits None, which stands for
    the figure of the catalogue. Raises `ConfigError` for an unknown name, a capacity or rate that is not positive, or
    text that is neither.
    """
    figures: dict[str, int] = {}
    for name, value in values.items():
        if name not in (*SIZES, *RATES):
            matches = difflib.get_close_matches(name, (*SIZES, *RATES), n=2, cutoff=0.5)
            raise ConfigError(
                f"{name!r} is not a figure of a target",
                expected=f"{', '.join(SIZES)} (per device, in bytes), {', '.join(RATES)} (per second)",
                hint=f"near misses: {', '.join(matches)}" if matches else "give the number of devices in the name",
            )
        if value is not None:
            figures[name] = _size(name, value) if name in SIZES else _rate(name, value)
    return figures


def check_figures(name: str, device_bytes: int | None, hbm_bytes: int | None, reserve_bytes: int) -> None:
    """Raise `ConfigError` when more is reserved than usable, or more is usable than physically present."""
    if device_bytes is not None and hbm_bytes is not None and device_bytes > hbm_bytes:
        raise ConfigError(
            f"device_bytes of {name!r} is more than its physical memory",
            expected=f"at most hbm_bytes = {hbm_bytes} ({format_bytes(hbm_bytes)})",
            got=f"{device_bytes} ({format_bytes(device_bytes)})",
            hint="also give hbm_bytes if the device has more memory than the catalogue says",
        )
    if device_bytes is not None and reserve_bytes >= device_bytes:
        raise ConfigError(
            f"reserve_bytes leaves no memory of {name!r}",
            expected=f"less than device_bytes = {device_bytes} ({format_bytes(device_bytes)})",
            got=f"{reserve_bytes} ({format_bytes(reserve_bytes)})",
            hint="reserve less: reserve_bytes stays free on each device",
        )


def _size(name: str, value: object) -> int:
    size = parse_bytes(value if isinstance(value, int) else str(value))
    if size == 0 and name != "reserve_bytes":
        raise ConfigError(
            f"{name} has to be positive",
            got=repr(value),
            hint=f'give bytes, or text such as "14 GiB"; leave {name} out if it is unknown',
        )
    return size


def _rate(name: str, value: object) -> int:
    if isinstance(value, str) and name != "flops":
        value = parse_bytes(value.strip().removesuffix("/s"))
    try:
        rate = math.nan if isinstance(value, bool) else float(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        rate = math.nan
    if not (math.isfinite(rate) and rate >= 1):
        raise ConfigError(
            f"{name} has to be a positive rate",
            expected="operations per second" if name == "flops" else 'bytes per second, or text such as "25 GB/s"',
            got=repr(value),
            hint=f"leave {name} out for the catalogue's figure",
        )
    return int(rate)
