"""``lowtide merge``: write a base with its adapters merged into the weights, as a folder that other software loads."""

from __future__ import annotations

import argparse
import math
from typing import Any

from rich.console import Console

from ..core import format_bytes, parse_bytes
from ._arguments import DTYPES, check_not_empty, model_path


def register(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "merge",
        help="merge adapters into their model, and write the model",
        description="Merge one or several adapters into the weights of their base, in float32 and rounded once, and "
        "write a folder in Hugging Face's layout: sharded weights, tokenizer, chat template and a model card.",
    )
    add = parser.add_argument
    add("--model", metavar="DIR", help="folder of the base, or its GGUF file (default: the embedded model)")
    add("--tokenizer", metavar="DIR", help="folder of the base's tokenizer (default: the base's)")
    add(
        "--adapter",
        action="append",
        required=True,
        metavar="DIR",
        help="PEFT adapter; repeat for several, which are added",
    )
    add("--weight", action="append", type=_factor, metavar="W", help="factor of each adapter, in order (default: 1)")
    add("--out", required=True, metavar="DIR", help="new or empty folder for the merged model")
    add("--dtype", choices=DTYPES[1:], help="dtype of the weights (default: that of the base)")
    add("--chat-template", metavar="FILE", help="chat template to write (default: that of the base, if it has one)")
    add("--max-shard-size", default="5 GB", metavar="SIZE", help="maximum size of a file (default: 5 GB)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    console = Console(highlight=False)
    check_not_empty(args, "model", "tokenizer", "adapter", "out", "chat_template")
    max_shard_bytes = parse_bytes(args.max_shard_size)
    args.model = args.model and model_path(args.model)
    with console.status("merging"):
        from ..core import tree_bytes
        from ..finetune import write_merged

        options: dict[str, Any] = {name: getattr(args, name) for name in ("dtype", "chat_template", "tokenizer")}
        options |= {"weights": args.weight, "max_shard_bytes": max_shard_bytes}
        model = write_merged(args.model, args.adapter, args.out, **options)
    noun = "adapter" if len(args.adapter) == 1 else "adapters"
    text = f"merged {len(args.adapter)} {noun} into {args.out}, {format_bytes(tree_bytes(model))}"
    console.print(text, markup=False, soft_wrap=True)
    return 0


def _factor(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return value
