"""What commands on a model's directory have in common: their flags, the model, and one adapter after another."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ..core import ConfigError, ModelFileError, input_file, parse_json, read_input, shown

DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name a model and its adapters."""
    parser.add_argument(
        "--model", metavar="DIR", help="Hugging Face directory, or a GGUF file (default: the embedded model)"
    )
    parser.add_argument(
        "--tokenizer", metavar="DIR", help="folder of its tokenizer and chat template (default: the model's)"
    )
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="DIR",
        help="PEFT adapter; again for another, which is used on the same base after it (default: none)",
    )
    for name, what in (("param", "parameters"), ("compute", "activations")):
        parser.add_argument(
            f"--{name}-dtype", choices=DTYPES, default="auto", help=f"dtype of {what} (default: %(default)s)"
        )


def add_template_argument(parser: argparse.ArgumentParser) -> None:
    """Add the flag of a chat template: who tuned with one of their own needs it again."""
    parser.add_argument(
        "--chat-template", metavar="FILE", help="chat template to take instead of the model's (default: the model's)"
    )


def check_named(args: argparse.Namespace) -> None:
    """Refuse empty paths, which scripts give where a variable is unset, and adapters that are named twice.

    Raises:
        ConfigError: naming the flag.
    """
    named = (
        ("model", [args.model]),
        ("tokenizer", [args.tokenizer]),
        ("adapter", args.adapter),
        ("chat-template", [args.chat_template]),
    )
    for flag, values in named:
        if "" in values:
            raise ConfigError(f"--{flag} is empty", hint=f"leave --{flag} out, or look whether a variable is unset")
    if twice := {name for name in args.adapter if args.adapter.count(name) > 1}:
        raise ConfigError(f"--adapter {min(twice)} is given twice", hint="name each adapter once")


def open_named(args: argparse.Namespace, console: Console) -> tuple[Any, Any]:
    """Read the model and the tokenizer that the arguments name."""
    with console.status("reading the model"):
        from ..finetune import open_base

        dtypes = {"param_dtype": args.param_dtype, "compute_dtype": args.compute_dtype}
        return open_base(args.model, tokenizer=args.tokenizer, **dtypes)


def with_each(base: Any, adapters: Sequence[str]) -> Iterator[tuple[str | None, Any]]:
    """Hand out the base with each adapter, and the base alone where there are none; one adapter at a time."""
    from ..adapters import lora

    for name in adapters:
        yield name, lora.load(base, name)
    if not adapters:
        yield None, base


def check_adapters(base: Any, adapters: Sequence[str]) -> None:
    """Read all adapters once when there are several: the last should not fail after hours of the first."""
    for _ in with_each(base, adapters) if len(adapters) > 1 else ():
        pass


def end_tokens(directories: Sequence[str | None], base: Any) -> tuple[int, ...]:
    """Tokens that end an answer: those of the model, and of `generation_config.json` where there is one.

    Args:
        directories: where that file may be; first what names the model, None for the embedded one.
        base: the model.

    Raises:
        ModelFileError: when they are not of the vocabulary; the message names the file that says so.
    """
    found: list[tuple[Any, Any]] = [(directories[0] or "the embedded model", base.config.eos_token_id)]
    name = "generation_config.json"
    for directory in directories:
        if directory is not None and os.path.lexists(Path(directory) / name):
            path = input_file(directory, name, hint="copy it from the model's source again")
            found.append((path, parse_json(read_input(path, most_bytes=1024**2), str(path)).get("eos_token_id")))
    ends: list[int] = []
    for where, each in found:
        for end in each if isinstance(each, tuple | list) else [each]:  # pyright: ignore[reportUnknownVariableType]
            if end is not None and (type(end) is not int or not 0 <= end < base.config.vocab_size):
                raise ModelFileError(
                    f"{where}: eos_token_id is no token",
                    expected=f"0 to {base.config.vocab_size - 1}",
                    got=shown(end),
                    hint="the file is of a model with another vocabulary; copy it from the model's source again",
                )
            ends += [] if end is None else [end]
    return tuple(dict.fromkeys(ends))
