"""Arguments that several commands share: models, adapters, chat templates, positive numbers."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import re
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ..core import ConfigError, ModelFileError
from ..finetune import FinetuneConfig


def _words_of(setting: str) -> tuple[str, ...]:
    """Return the values that a setting of `lowtide finetune` accepts, from the `Literal` in its type."""
    hint = typing.get_type_hints(FinetuneConfig)[setting]
    (literal,) = (kind for kind in (hint, *typing.get_args(hint)) if typing.get_origin(kind) is typing.Literal)
    return typing.get_args(literal)


DTYPES, FORMATS = _words_of("param_dtype"), _words_of("quantize")
_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def positive(text: str) -> int:
    value = int(text) if text.isascii() and text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return value


def model_path(name: str) -> str:
    """Return a path unchanged; for a name such as ``Qwen/Qwen3-8B``, return its newest snapshot in the local cache."""
    if os.path.lexists(name) or _NAME.fullmatch(name) is None:
        return name
    if importlib.util.find_spec("huggingface_hub") is not None:  # tokenizers depends on it but does not import it
        from huggingface_hub import try_to_load_from_cache

        config_path = try_to_load_from_cache(name, "config.json")
        if isinstance(config_path, str):
            return str(Path(config_path).parent)
    problem = f"{name} is neither a folder nor a model in the local Hugging Face cache"
    raise ModelFileError(problem, hint=f"download it: hf download {name}")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name a model and its adapters."""
    add = parser.add_argument
    add("--model", metavar="DIR", help="Hugging Face folder, or a GGUF file (default: the embedded model)")
    add("--tokenizer", metavar="DIR", help="folder of the tokenizer and chat template (default: the model's)")
    add(
        "--adapter",
        action="append",
        default=[],
        metavar="DIR",
        help="PEFT adapter; repeat for several, which are used one after the other on the same base (default: none)",
    )
    for name, description in (("param", "parameters"), ("compute", "activations")):
        add(f"--{name}-dtype", choices=DTYPES, default="auto", help=f"dtype of {description} (default: %(default)s)")
    parts = {"quantize": "the projections of the layers", "quantize-embeddings": "embedding and head"}
    for name, description in parts.items():
        add(f"--{name}", choices=FORMATS, help=f"quantisation format of {description} (default: as stored)")


def add_template_argument(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the chat template. A model tuned with a custom template needs the same template again."""
    add = parser.add_argument
    add("--chat-template", metavar="FILE", help="file with a chat template (default: the model's)")
    add("--system", metavar="TEXT", help="system prompt of conversations without one (default: the template's)")
    add(
        "--template-arg",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="variable of the chat template: JSON, otherwise text, such as enable_thinking=false; may be repeated "
        "(default: none)",
    )


def chat_template(args: argparse.Namespace) -> Any:
    """Return the named or the model's `ChatTemplate`, or None; raise `ConfigError` for a bad ``--template-arg``."""
    from ..finetune.data import load_chat_template
    from ..models import base_path

    arguments: dict[str, Any] = {}
    for pair in args.template_arg:
        name, separator, text = pair.partition("=")
        if not separator or not name.isidentifier():
            raise ConfigError(
                f"--template-arg needs KEY=VALUE, not {pair!r}",
                hint="use for instance --template-arg enable_thinking=false",
            )
        try:
            arguments[name] = json.loads(text)
        except ValueError:
            arguments[name] = text
    template = load_chat_template(args.tokenizer or args.model or base_path(), args.chat_template)
    return None if template is None else dataclasses.replace(template, arguments=arguments, system=args.system)


def check_not_empty(args: argparse.Namespace, *names: str) -> None:
    """Reject empty values of arguments. An unset variable in a shell script produces an empty value."""
    for name in names:
        value = getattr(args, name)
        if "" in (value if isinstance(value, list) else [value]):
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} is empty", hint="check whether a variable of your script is unset")


def check_model_arguments(args: argparse.Namespace) -> None:
    """Resolve the model's name to a path, and reject empty paths and adapters that are named twice."""
    check_not_empty(args, "model", "tokenizer", "adapter", "chat_template")
    args.model = args.model and model_path(args.model)
    if duplicates := {name for name in args.adapter if args.adapter.count(name) > 1}:
        raise ConfigError(f"--adapter {min(duplicates)} is given twice", hint="name each adapter once")


def open_named(args: argparse.Namespace, console: Console) -> tuple[Any, Any]:
    """Load the model and the tokenizer that the arguments name; with several adapters, check that all of them load."""
    with console.status("reading the model"):
        from ..finetune import open_base

        dtypes = {"param_dtype": args.param_dtype, "compute_dtype": args.compute_dtype}
        formats = {"layers/**/*_proj": args.quantize, "outer/**": args.quantize_embeddings}
        quantize = {glob: form for glob, form in formats.items() if form is not None} or None
        base, tokenizer = open_base(args.model, tokenizer=args.tokenizer, quantize=quantize, **dtypes)
    # If there are several adapters, load each once, so that a broken one fails now and not after hours of work.
    for _ in with_each(base, args.adapter) if len(args.adapter) > 1 else ():
        pass
    return base, tokenizer


def with_each(base: Any, adapters: Sequence[str]) -> Iterator[tuple[str | None, Any]]:
    """Yield ``(name, adapted base)`` for each adapter, loaded one at a time; ``(None, base)`` without adapters."""
    from ..adapters import lora

    for name in adapters:
        yield name, lora.load(base, name)
    if not adapters:
        yield None, base


def end_tokens(args: argparse.Namespace, base: Any, tokenizer: Any) -> Any:
    from ..finetune import load_end_tokens

    files = {"tokenizer_dir": args.tokenizer, "chat_template": args.chat_template}
    return load_end_tokens(base.config, tokenizer, args.model, **files)
