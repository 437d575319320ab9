"""The colour, texture and order of every role, the same in every view.

A role is a category of memory. Callers name the roles of arguments, and the report derives all others (`Buffer.role`).
A colour has a contrast of at least 3:1 with the backgrounds of the light and of the dark page. This leaves only medium
lightness, where colour-blind readers cannot tell a dozen hues apart. So roles of similar colours differ in texture.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterable
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Style:
    """Colour and texture of a role."""

    color: str
    texture: Literal["", "/", "\\", "x"] = ""
    """Diagonal lines over the colour, in one direction, the other, or both; empty for none."""

    @property
    def ink(self) -> str:
        """Text colour: black or white, whichever is easier to read on `color`."""
        return "#ffffff" if contrast(self.color, "#ffffff") >= contrast(self.color, "#000000") else "#000000"


_DERIVED_STYLES = {
    "constants": Style(color="#a0705c"),
    "code": Style(color="#73808c", texture="x"),
    "copies": Style(color="#6b83c9", texture="\\"),
    "gradients": Style(color="#d0436f", texture="/"),
    "activations": Style(color="#d0661a"),
    "recomputed": Style(color="#996666", texture="\\"),
    "cotangents": Style(color="#dc3018", texture="x"),
    "workspaces": Style(color="#2371e7", texture="x"),
    "temporaries": Style(color="#a97f1c", texture="\\"),
    "outputs": Style(color="#2b8f45", texture="/"),
    "unattributed": Style(color="#8a7a9b", texture="x"),
    "fragmentation": Style(color="#8d8d8d", texture="x"),
}
"""Styles of derived roles, from the bottom of a stack to its top."""
_ARGUMENT_STYLES = {
    "params": Style(color="#2b76d6"),
    "frozen": Style(color="#17868a"),
    "opt_state": Style(color="#8763d6", texture="/"),
    "batch": Style(color="#6f8a1e", texture="/"),
    "other": Style(color="#6d7f95", texture="/"),
}
_FALLBACK = (
    Style(color="#2b76d6"),
    Style(color="#8763d6", texture="/"),
    Style(color="#17868a"),
    Style(color="#b04fb5", texture="\\"),
    Style(color="#6f8a1e", texture="/"),
    Style(color="#3f78b5", texture="x"),
)


def styles(roles: Iterable[str]) -> dict[str, Style]:
    """Return the style of every role; a checksum of the name selects the style of a role without a fixed one."""
    # If another role has the selected style, the next free one is taken. So roles look the same in two reports with the
    # same roles. Python's `hash` of a string is not used, because it differs between processes.
    names = sorted(set(roles))
    role_styles = {name: style for name, style in {**_ARGUMENT_STYLES, **_DERIVED_STYLES}.items() if name in names}
    for name in names:
        if name not in role_styles:
            start = zlib.crc32(name.encode("utf-8", "surrogatepass")) % len(_FALLBACK)
            candidates = [_FALLBACK[(start + step) % len(_FALLBACK)] for step in range(len(_FALLBACK))]
            free = [style for style in candidates if style not in role_styles.values()]
            role_styles[name] = (free or candidates)[0]
    return role_styles


def stacking_order(roles: Iterable[str]) -> list[str]:
    """Return roles, bottom of a stacked chart first: arguments in given order, derived roles in a fixed order."""
    names = dict.fromkeys(roles)
    arguments = [name for name in names if name not in _DERIVED_STYLES]
    return [*arguments, *(name for name in _DERIVED_STYLES if name in names)]


def luminance(color: str) -> float:
    """Return the relative luminance of ``#rrggbb``, as WCAG 2 defines it."""
    channels = [int(color[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    """Return the contrast of two colours, 1 to 21, as WCAG 2 defines it."""
    dark, light = sorted((luminance(first), luminance(second)))
    return (light + 0.05) / (dark + 0.05)
