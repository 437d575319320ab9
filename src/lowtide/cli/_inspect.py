"""``lowtide inspect``: the contents of a folder or a file, and what Lowtide cannot handle in it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..core import ConfigError, format_bytes
from ._arguments import model_path, positive
from ._output import print_labelled


def register(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "inspect",
        help="show the contents of a model, an adapter, a run or data",
        description="Show the contents of a model's folder, an adapter's folder, a safetensors or GGUF file, a run or "
        "its checkpoints: family, parameters, dtypes, bytes, context, tokenizer, and what Lowtide cannot handle. "
        "Weights are not read. For data, show what a run would read, learn, cut and leave out. Exit status: 0; 1 when "
        "something cannot be handled; 2 when the path does not exist or a file is damaged.",
    )
    parser.add_argument("path", metavar="DIR|FILE", help="folder or file to inspect")
    for flag, metavar, text in (
        ("model", "DIR", "for data: model whose tokenizer and chat template are used (default: the embedded model)"),
        ("tokenizer", "DIR", "for data: folder of the tokenizer (default: the model's)"),
        ("chat-template", "FILE", "for data: chat template (default: the model's)"),
        ("columns", "WORDS", "for data: columns of the records, such as messages=chat"),
    ):
        parser.add_argument(f"--{flag}", metavar=metavar, help=text)
    parser.add_argument(
        "--seq-len", type=positive, metavar="N", help="for data: tokens in a row (default: as finetune)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON (default: a table)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if not args.path:
        raise ConfigError("the path is empty", hint="name a folder or a file; . is the current folder")
    from ..finetune import inspect, is_data

    if is_data(args.path):
        from ..finetune import FinetuneConfig, inspect_data

        names = ("tokenizer", "chat_template", "seq_len")
        settings = {name: value for name in names if (value := getattr(args, name)) is not None}
        columns = None if args.columns is None else tuple(word.strip() for word in args.columns.split(","))
        model = args.model and model_path(args.model)
        inspection = inspect_data(FinetuneConfig(data=args.path, model=model, columns=columns, **settings))
    else:
        names = ("model", "tokenizer", "chat_template", "columns", "seq_len")
        if unused := [f"--{name.replace('_', '-')}" for name in names if getattr(args, name) is not None]:
            raise ConfigError(
                f"{unused[0]} is for data, but {args.path} is neither a data file nor a folder of records",
                hint=f"leave {', '.join(unused)} out, or name the data",
            )
        inspection = inspect(model_path(args.path))
    console = Console(highlight=False, soft_wrap=True)
    if args.json:
        console.print(json.dumps(inspection.to_dict(), indent=2, default=str), markup=False)
    else:
        _print_inspection(console, inspection)
    return int(bool(inspection.all_problems()))


def _print_inspection(console: Console, inspection: Any) -> None:
    console.print(Text(f"{inspection.kind}  ", style="bold") + Text(inspection.path))
    table = Table.grid(padding=(0, 2))
    for name, value in inspection.facts.items():
        rows = value.items() if isinstance(value, Mapping) else [("", value)]
        for index, (key, entry) in enumerate(rows):
            title = name.replace("_", " ") if index == 0 else ""
            table.add_row(Text(f"  {title}", style="dim"), Text(str(key)), Text(_text(name, entry)))
    console.print(table)
    for problem in inspection.problems:
        print_labelled(console, "cannot be handled", problem, "bold red")
    for note in inspection.notes:
        print_labelled(console, "note", note)
    for part in inspection.parts:
        _print_inspection(console, part)


def _text(name: str, value: Any) -> str:
    if value is None or value == []:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name == "bytes":
        return format_bytes(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(name, item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_text(name, item) for item in value)
    return f"{value:,}" if isinstance(value, int) else str(value)
