"""Command-line flags for the fields of `FinetuneConfig`.

The types, defaults and docstrings of these fields are the only table of settings.

Rejected alternatives: tyro, simple-parsing and pydantic-settings also derive flags from a dataclass. They return a
finished object with the defaults filled in. Here flags override a TOML file, and both override the configuration of a
resumed run, so the code must know which settings were given. `FinetuneConfig` needs checks for TOML files anyway.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Sequence
from typing import Any

from ..finetune import FinetuneConfig, flag_of
from ._arguments import model_path

_GLOBS = ("targets", "modules_to_save")
_METAVARS = {int: "N", float: "X", str: "NAME"}


class _SingleValue(argparse.Action):
    """Reject a second value of a flag. argparse would replace the first value without an error."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if getattr(namespace, self.dest) is not None:
            parser.error(f"{option_string} is given twice; name a folder to read all files in it")
        setattr(namespace, self.dest, values)


def register(
    parser: argparse.ArgumentParser,
    text: str = "Each setting is also a key of the TOML file.",
    excluded: Sequence[str] = (),
) -> None:
    """Add a flag for each field of `FinetuneConfig` except `excluded`. Flags that are not given have the value None."""
    group = parser.add_argument_group("settings", text)
    kinds, helps = typing.get_type_hints(FinetuneConfig), _docstrings()
    for field in dataclasses.fields(FinetuneConfig):
        if field.name in excluded:
            continue
        default = "" if field.default is None or field.default is False else f" (default: {field.default})"
        # argparse expands % in help texts, so a literal % is doubled.
        text = (helps.get(field.name, "") + default).strip().replace("%", "%%")
        options: dict[str, Any] = {"dest": field.name, "default": None, "help": text}
        kind = _kind(kinds[field.name])
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["metavar"] = field.metadata.get("metavar", _METAVARS.get(kind, "N"))
            options |= {"type": kind} if kind is not tuple else {"type": _words, "action": "extend"}
        if field.name in ("data", "eval_data"):
            options["action"] = _SingleValue
        if field.name in _GLOBS:  # a glob may contain commas in braces, so each glob needs its own flag
            options |= {"type": str, "action": "append"}
        group.add_argument(flag_of(field.name), **options)


def flag_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that were given as flags, with the values that a TOML file would contain."""
    values = {field.name: getattr(args, field.name, None) for field in dataclasses.fields(FinetuneConfig)}
    values = {name: value for name, value in values.items() if value is not None}
    for name in _GLOBS:
        if len(values.get(name, ())) == 1:
            (values[name],) = values[name]
    if values.get("model"):
        values["model"] = model_path(values["model"])
    return values


def _words(text: str) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(",") if word.strip())
    if not words:  # an empty value comes from an unset shell variable, and would replace a default by nothing
        raise argparse.ArgumentTypeError("the value is empty; write `none` to select none")
    return () if words == ("none",) else words


def _kind(hint: Any) -> type:
    """Return the first type in a hint other than None: ``tuple[str, ...]`` becomes tuple, a `Literal` becomes str."""
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    first = next(kind for kind in kinds if kind is not type(None))
    origin = typing.get_origin(first) or first
    return str if origin is typing.Literal else origin


@functools.cache
def _docstrings() -> dict[str, str]:
    """Return the docstring below each field, by name; empty if the source of `FinetuneConfig` is not available."""
    try:
        (tree,) = ast.parse(inspect.getsource(FinetuneConfig)).body
    except (OSError, TypeError):
        return {}
    # Python drops the strings below fields. In the source, the string is the statement after its field.
    body = typing.cast("ast.ClassDef", tree).body
    return {
        field.target.id: " ".join(text.value.value.replace("`", "").split())
        for field, text in zip(body, body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
