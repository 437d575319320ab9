"""The entry point: one subcommand a file, errors without tracebacks."""

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
from ..core import LowtideError, shortened
from . import _diff, _evaluate, _explain, _finetune, _fits, _generate, _inspect, _merge, _schedule, _targets
from ._console import errors, print_error
from ._load import UserCodeError

_OTHER_WORDS = {
    **dict.fromkeys(("train", "tune", "fine-tune", "sft"), "finetune"),
    **dict.fromkeys(("chat", "run"), "generate --chat"),
    **dict.fromkeys(("eval", "test", "validate"), "evaluate"),
    **dict.fromkeys(("export", "fuse"), "merge"),
}
"""Commands of other tools, and those that do the same here."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: arguments without the program's name; by default those of the process.

    Returns:
        The exit status: 0; 1 when a step does not fit or the user's own code fails; 2 for a user's mistake; 130 when
        interrupted.
    """
    parser = argparse.ArgumentParser(prog="lowtide", description="Memory-efficient training for JAX.")
    parser.add_argument("--version", action="version", version=f"lowtide {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for module in (_finetune, _generate, _evaluate, _merge, _inspect, _explain, _fits, _diff, _schedule, _targets):
        module.register(commands)
    words = sys.argv[1:] if argv is None else [*argv]
    if words and words[0] in _OTHER_WORDS:
        parser.error(f"there is no command {words[0]!r}\nhint: lowtide {_OTHER_WORDS[words[0]]}")
    args, unknown = parser.parse_known_args(words)
    if unknown:
        parser.error("\n".join([f"unrecognized arguments: {' '.join(unknown)}", *_hints(args, unknown)]))
    _leave_out_absent_accelerators()
    _print_what_can_be_printed()
    try:
        return args.run(args)
    except LowtideError as error:
        print_error(str(error))
        return 2
    except PermissionError as error:
        print_error(f"{error.filename or 'a file'}: {error.strerror or error}")
        errors().print("hint: check the permissions of that file or folder, and of those above it")
        return 2
    except UserCodeError as error:
        print_error(str(error))
        return 1
    except KeyboardInterrupt:
        _end_quietly()
        errors().print("interrupted", style="bold red")
        return 130
    except BrokenPipeError:  # whoever read the output has seen enough; nothing is left to flush at the exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (OSError, ValueError) as error:
        if (problem := _path_problem(error)) is None:
            raise
        print_error(problem)
        return 2


def _path_problem(error: OSError | ValueError) -> str | None:
    """Say what is wrong with a path that the operating system does not take; None for other errors."""
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return f"{shortened(error.filename)}: {error.strerror}"
    return "a path has a NUL character in it" if str(error) == "embedded null byte" else None


def _hints(args: argparse.Namespace, unknown: Sequence[str]) -> list[str]:
    """Say of flags of other libraries what they are called here."""
    if args.run is not _finetune.run:
        return []
    from ..finetune import FinetuneConfig, flag_of, setting_of

    hints: list[str] = []
    for flag in (word.partition("=")[0] for word in unknown if word.startswith("--")):
        if flag.lstrip("-").replace("-", "_") in FinetuneConfig.__dataclass_fields__:
            hints.append(f"hint: the flag is {flag_of(flag.lstrip('-').replace('-', '_'))}")
        elif (name := setting_of(flag)) is not None:
            hints.append(f"hint: what other libraries call {flag} is {name} here")
    return hints


def _end_quietly() -> None:
    """After an interrupt, wait for files that are being written, until another one.

    The first may have ended threads and coroutines in the middle, whose complaints say nothing to the user.
    """
    sys.unraisablehook = lambda _: None
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))


def _print_what_can_be_printed() -> None:
    """Let a terminal without Unicode show question marks where it cannot draw, in place of a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def _leave_out_absent_accelerators() -> None:
    """Let JAX use the CPU where no accelerator is.

    Plugins that are installed to compile for absent hardware would otherwise be started as if it were there, and fill
    the terminal with complaints. A choice in JAX_PLATFORMS holds.
    """
    devices = ("/dev/nvidia[0-9]*", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd", "/dev/accel*", "/dev/vfio/[0-9]*")
    here = any(glob.glob(pattern) for pattern in devices)
    if sys.platform != "linux" or here or os.environ.get("JAX_PLATFORMS"):
        return
    if "jax" not in sys.modules:  # which reads it when it is imported
        os.environ["JAX_PLATFORMS"] = "cpu"
        return
    import jax

    if not jax.config.jax_platforms:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_platforms", "cpu")
