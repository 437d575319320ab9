"""The user's function on the command line: ``FILE.py:NAME`` and ``--set KEY=VALUE``.

A file is imported as a module, so code below ``if __name__ == "__main__"`` does not run. Its folder and the current
directory are importable while it is in use. An exception from its code is shown with the user's own frames only.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import functools
import importlib.util
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..core import ConfigError, LowtideError, gguf_file
from ..finetune import read_config
from . import _config_flags
from ._arguments import model_path

# JAX attaches these exceptions as causes to carry its own tracebacks. They say nothing more about the user's code.
_JAX_CAUSES = ("JaxStackTraceBeforeTransformation", "SimplifiedTraceback", "UnfilteredStackTrace")


class UserCodeError(Exception):
    """An exception from the user's code; its text is the traceback, trimmed to the user's frames."""


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of every command that takes a user's function."""
    parser.usage = "%(prog)s [options] FILE.py:NAME|DIR"
    parser.add_argument(
        "job",
        metavar="FILE.py:NAME|DIR",
        help="a function in a file that returns (fn, args), (fn, args, roles) or a dict of these (its parameter "
        "`target`, if any, receives the target); or a model's folder with config.json, or its GGUF file, for the step "
        "of `lowtide finetune` with the settings below",
    )
    parser.add_argument(
        "--target",
        action="append",
        metavar="NAME",
        help="hardware to compile for, such as v5e:2x2 or h100:8 (default: here); may be repeated, except for `plan`",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="keyword argument for NAME: a Python literal, otherwise text; may be repeated (default: none)",
    )
    parser.add_argument("--config", metavar="FILE", help="with DIR: TOML file of settings; flags override it")
    _config_flags.register(parser, "With DIR, the settings of `lowtide finetune`.", excluded=("model",))


def job_settings(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Return the settings of a model's folder, from ``--config`` and flags; for a function `name`, reject settings."""
    settings = (read_config(args.config) if args.config else {}) | _config_flags.flag_settings(args)
    if settings and name:
        raise ConfigError(
            f"the settings {', '.join(settings)} are for a model's folder, but {args.job} is a function",
            hint="give parameters of your function with --set KEY=VALUE",
        )
    settings.pop("model", None)
    return settings


def parse_job(text: str) -> tuple[Path, str]:
    """Return file and name of ``FILE.py:NAME``; for a model's folder or GGUF file, its path and an empty name."""
    text = text if ".py:" in text else model_path(text)
    if (Path(text) / "config.json").is_file():
        return Path(text).resolve(), ""
    if gguf_file(text) is not None:
        # Not resolved: in the Hugging Face cache the target of a link has another name.
        return Path(text).absolute(), ""
    file, separator, name = text.rpartition(":")
    if not separator or not file or not name.isidentifier():
        problem = "is a folder without config.json" if Path(text).is_dir() else "does not name a function in a file"
        raise ConfigError(f"{text!r} {problem}", hint="use FILE.py:NAME, or a model's folder with config.json")
    path = Path(file)
    if path.is_dir():
        raise ConfigError(f"{file} is a folder, not a Python file", hint="name a file in it")
    if not path.is_file():
        hint = _near_misses(path.name, [p.name for p in path.parent.glob("*.py")]) or "give the path of a Python file"
        raise ConfigError(f"{file}: there is no such file", hint=hint)
    return path.resolve(), name


def _near_misses(name: str, candidates: Sequence[str]) -> str | None:
    """Return a hint with the candidates that resemble a name; None if no candidate does."""
    matches = difflib.get_close_matches(name, candidates, n=3)
    return f"near misses: {', '.join(matches)}" if matches else None


@contextlib.contextmanager
def load(path: Path, name: str, settings: Mapping[str, Any] = MappingProxyType({})) -> Generator[Callable[..., Any]]:
    """Yield the function `name` of a file; for a model's folder or GGUF file, yield `step_job` with these settings."""
    if path.is_dir() or gguf_file(path) is not None:
        from ..finetune import step_job  # a model's folder gives the step that tunes the model with these settings

        yield functools.partial(step_job, path, **settings)
        return
    saved_paths = list(sys.path), list(sys.argv)
    # The file may have the name of a module that is already imported; that module must stay reachable.
    module_name = path.stem if path.stem not in sys.modules else f"_{path.stem}_of_the_command_line"
    try:
        sys.path[:0] = [folder for folder in (str(path.parent), str(Path.cwd())) if folder not in sys.path]
        # Code at module level may parse arguments; it must not see those of this command.
        sys.argv[:] = [str(path)]
        spec = importlib.util.spec_from_file_location(module_name, path)
        if spec is None or spec.loader is None:
            raise ConfigError(f"{path}: not a Python file", hint="give a file ending in .py")
        module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
        with user_code(path):
            spec.loader.exec_module(module)
        if not hasattr(module, name):
            functions = [
                key
                for key, value in vars(module).items()
                if callable(value) and getattr(value, "__module__", None) == module_name
            ]
            expected = f"one of its functions: {', '.join(functions) or 'none'}"
            hint = _near_misses(name, [key for key in vars(module) if not key.startswith("__")])
            raise ConfigError(
                f"{path.name} has no {name!r}", expected=expected, hint=hint or "name a function of the file"
            )
        yield getattr(module, name)
    finally:
        sys.path[:], sys.argv[:] = saved_paths
        sys.modules.pop(module_name, None)


@contextlib.contextmanager
def user_code(path: Path) -> Generator[None]:
    """Convert exceptions of the user's code to `UserCodeError`; errors of Lowtide pass unchanged."""
    try:
        yield
    except LowtideError:
        raise
    except (Exception, SystemExit) as error:
        raise UserCodeError("\n".join([f"in the code of {path.name}", *_trim_traceback(error, path)])) from error


def _trim_traceback(error: BaseException, path: Path) -> list[str]:
    lines: list[str] = []
    # The rule of Python's own tracebacks: the explicit cause, or else the context unless it is suppressed.
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None and type(cause).__name__ not in _JAX_CAUSES:
        lines = [*_trim_traceback(cause, path), "", "and then:", ""]
    summary = traceback.TracebackException.from_exception(error, compact=True)
    notes: list[str] = getattr(summary, "__notes__", None) or []
    # JAX adds this note to the exceptions whose traceback it filters.
    summary.__notes__ = [note for note in notes if "JAX has removed its internal frames" not in note]
    frames = [frame for frame in summary.stack if _is_user_file(frame.filename, path)]
    if frames:
        lines.append("Traceback (most recent call last):")
        lines += "".join(traceback.StackSummary.from_list(frames).format()).splitlines()
    text = "".join(summary.format_exception_only()).rstrip()
    return [*lines, *text.splitlines()]


def _is_user_file(filename: str, path: Path) -> bool:
    file = Path(filename)
    if file == path:
        return True
    folders = [sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    libraries = [Path(folder) for folder in folders if folder] + [Path(__file__).parents[1]]
    # Names such as `<string>` and `<frozen runpy>` belong to no file.
    return not filename.startswith("<") and not any(file.is_relative_to(folder) for folder in libraries)


def read_settings(
    pairs: Sequence[str], maker: Callable[..., Any], name: str, *, variable: str | None = None
) -> dict[str, Any]:
    """Parse ``--set`` and check it against the parameters of `maker`; the parameter `variable` needs no value."""
    values: dict[str, Any] = {}
    for pair in pairs:
        key, separator, text = pair.partition("=")
        key = key.strip()
        if not separator or not key.isidentifier():
            raise ConfigError(f"--set needs KEY=VALUE, not {pair!r}", hint="use, for instance, --set batch=8")
        if key in values:
            raise ConfigError(f"--set {key} is given twice", hint="give it once")
        try:
            values[key] = ast.literal_eval(text.strip())
        except (ValueError, SyntaxError):
            values[key] = text
    try:
        parameters = inspect.signature(maker).parameters
    except (TypeError, ValueError):
        return values
    kinds = inspect.Parameter
    keywords = [key for key, p in parameters.items() if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
    settable = [key for key in keywords if key != "target"]
    has_var_keyword = any(p.kind is kinds.VAR_KEYWORD for p in parameters.values())
    for key in [*values, *([variable] if variable else [])]:
        if key == "target" or (key not in settable and not has_var_keyword):
            matches = difflib.get_close_matches(key, settable, n=1)
            hint = f"did you mean {matches[0]!r}?" if matches else "set one of its parameters"
            hint = "name the target with --target" if key == "target" else hint
            expected = ", ".join(settable) or "no parameter"
            raise ConfigError(f"{name} has no parameter {key!r} to set", expected=expected, hint=hint)
    missing = [k for k in settable if parameters[k].default is kinds.empty and k not in values and k != variable]
    if missing:
        raise ConfigError(f"{name} needs a value for {', '.join(missing)}", hint=f"for instance --set {missing[0]}=8")
    return values
