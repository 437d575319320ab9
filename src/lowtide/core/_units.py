"""Sizes in bytes: the only place where they are parsed from text and printed as text.

Binary units (KiB, MiB, GiB, TiB) are powers of 1024, decimal units (KB, MB, GB, TB) powers of 1000. A bare number
is bytes. For a size of at least 0, ``parse_bytes(format_bytes(size))`` is `size` rounded to two decimals of its unit.
"""

from __future__ import annotations

import re
from decimal import Decimal

from ._errors import ConfigError

_BINARY = {"KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4}
_DECIMAL = {"KB": 1000, "MB": 1000**2, "GB": 1000**3, "TB": 1000**4}
_UNITS = {unit.lower(): factor for unit, factor in {"B": 1, **_BINARY, **_DECIMAL}.items()}
_SIZE = re.compile(r"\s*(\d[\d_]*(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str | int) -> int:
    """Convert a size such as ``"14 GiB"``, ``"512MB"`` or ``1024`` to bytes, rounded to the nearest byte.

    The case of the unit does not matter, and white space is optional.

    Raises:
        ConfigError: for a negative size, an unknown unit, or text that is not a size.

    Examples:
        >>> parse_bytes("1.5 KiB")
        1536
    """
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    match = _SIZE.fullmatch(str(text))
    unit = match[2].lower() or "b" if match else ""
    if match is None or unit not in _UNITS:
        expected = "a number of at least 0, and one of B, KiB, MiB, GiB, TiB, KB, MB, GB, TB"
        hint = 'write it like "14 GiB" (1024-based) or "14 GB" (1000-based)'
        raise ConfigError(f"{text!r} is not a size", expected=expected, hint=hint)
    return int((Decimal(match[1].replace("_", "")) * _UNITS[unit]).to_integral_value())


def format_bytes(num_bytes: int) -> str:
    """Format a size with two decimals in the largest binary unit in which it is at least 1.

    A negative size (a saving) keeps its sign. Sizes below 1 KiB have no decimals.

    Examples:
        >>> format_bytes(1536)
        '1.50 KiB'
    """
    sign, size = ("-", -num_bytes) if num_bytes < 0 else ("", num_bytes)
    if size < 1024:
        return f"{sign}{size} B"
    for unit, factor in _BINARY.items():
        # The unit is chosen on the rounded figure, so that 1 MiB - 1 B prints as 1.00 MiB, not 1024.00 KiB.
        if round(size / factor, 2) < 1024:
            return f"{sign}{size / factor:.2f} {unit}"
    return f"{sign}{size / _BINARY['TiB']:.2f} TiB"
