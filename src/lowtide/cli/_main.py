"""Entry point of the command line: it registers a module per command and prints errors without tracebacks."""

from __future__ import annotations

import argparse
import errno
import glob
import io
import os
import signal
import sys
import threading
from collections.abc import Sequence

from .. import __version__
from ..core import LowtideError, OutOfMemoryError, shortened
from . import _diff, _evaluate, _explain, _finetune, _fits, _generate, _inspect, _merge, _plan, _schedule, _targets
from ._load import UserCodeError
from ._output import errors, print_error

_FOREIGN_COMMANDS = {
    **dict.fromkeys(("train", "tune", "fine-tune", "sft"), "finetune"),
    **dict.fromkeys(("chat", "run"), "generate --chat"),
    **dict.fromkeys(("eval", "test", "validate"), "evaluate"),
    **dict.fromkeys(("export", "fuse"), "merge"),
}
"""Command names of other tools, and the equivalent commands of Lowtide."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: arguments without the program name; None: the arguments of the process.

    Returns:
        The exit status: 0; 1 when `fits` or `plan` finds a step too large, `inspect` finds a problem, the user's own
        code fails, or the reader of the output closes the pipe; 2 for a user's mistake (argparse raises SystemExit);
        130 when interrupted.
    """
    parser = argparse.ArgumentParser(prog="lowtide", description="Memory-efficient training for JAX.")
    parser.add_argument("--version", action="version", version=f"lowtide {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for module in (
        _finetune,
        _generate,
        _evaluate,
        _merge,
        _inspect,
        _explain,
        _fits,
        _plan,
        _diff,
        _schedule,
        _targets,
    ):
        module.register(commands)
    words = sys.argv[1:] if argv is None else [*argv]
    if words and words[0] in _FOREIGN_COMMANDS:
        parser.error(f"there is no command {words[0]!r}\nhint: use lowtide {_FOREIGN_COMMANDS[words[0]]}")
    # Unknown flags are collected and not rejected by argparse, so that the error can contain hints.
    args, unknown = parser.parse_known_args(words)
    if unknown:
        parser.error("\n".join([f"unrecognized arguments: {' '.join(unknown)}", *_hints(args, unknown)]))
    _use_cpu_without_accelerator()
    _replace_unprintable()
    try:
        return args.run(args)
    except (LowtideError, UserCodeError) as error:
        print_error(str(error))
        is_too_large = isinstance(error, OutOfMemoryError) and args.run is _plan.run
        return 1 if is_too_large or isinstance(error, UserCodeError) else 2
    except PermissionError as error:
        print_error(f"{error.filename or 'a file'}: {error.strerror or error}")
        errors().print("hint: check the permissions of that file or folder, and of those above it")
        return 2
    except KeyboardInterrupt:
        _end_quietly()
        errors().print("interrupted", style="bold red")
        return 130
    except BrokenPipeError:
        # The reader closed the pipe. Point stdout at the null device, or Python's flush at exit raises the same error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (OSError, ValueError) as error:  # the operating system may reject a path
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            print_error(f"{shortened(error.filename)}: {error.strerror}")
        elif "embedded null" in str(error):  # the rest of the text depends on the version of Python
            print_error("a path contains a NUL character")
        else:
            raise
        return 2


def _hints(args: argparse.Namespace, unknown: Sequence[str]) -> list[str]:
    """Return hints for unknown flags of `finetune`: the right spelling, or our name of another library's flag."""
    if args.run is not _finetune.run:
        return []
    from ..finetune import FinetuneConfig, flag_of, setting_of

    hints: list[str] = []
    for flag in (word.partition("=")[0] for word in unknown if word.startswith("--")):
        if (field := flag.lstrip("-").replace("-", "_")) in FinetuneConfig.__dataclass_fields__:
            hints.append(f"hint: the flag is {flag_of(field)}")
        elif (name := setting_of(flag)) is not None:
            hints.append(f"hint: {flag} of other libraries is {name} here")
    return hints


def _end_quietly() -> None:
    """Ignore unraisable exceptions while writing threads end after an interrupt; a second interrupt exits at once."""
    # The first interrupt may have ended threads and coroutines halfway, and their messages do not help the user.
    sys.unraisablehook = lambda _: None
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))


def _replace_unprintable() -> None:
    """Print question marks on a terminal without Unicode, instead of failing with an encoding error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def _use_cpu_without_accelerator() -> None:
    """Make JAX use the CPU if the machine has no accelerator. An explicit JAX_PLATFORMS is respected."""
    # JAX would otherwise start the plugins that are installed to compile for absent hardware, and they print errors.
    devices = ("/dev/nvidia[0-9]*", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd", "/dev/accel*", "/dev/vfio/[0-9]*")
    has_accelerator = any(glob.glob(pattern) for pattern in devices)
    if sys.platform != "linux" or has_accelerator or os.environ.get("JAX_PLATFORMS"):
        return
    if "jax" not in sys.modules:  # JAX reads the variable when it is imported
        os.environ["JAX_PLATFORMS"] = "cpu"
        return
    import jax

    if not jax.config.jax_platforms:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_platforms", "cpu")
