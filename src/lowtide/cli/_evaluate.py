"""``lowtide evaluate``: loss and perplexity of a model, and of each of its adapters, on text."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from ..core import ConfigError
from ._answers import add_model_arguments, check_adapters, check_named, open_named, with_each
from ._console import errors, wide_console
from ._explain import positive
from ._load import check_outputs, write_text


def register(commands: Any) -> None:
    """Add the command to the parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "evaluate",
        help="measure the loss of a model on text",
        description="Measure loss (nats a token) and perplexity of a model on text, of each of several adapters on one "
        "base. Every token but the first of the data is predicted once, and all count alike.",
    )
    add_model_arguments(parser)
    parser.add_argument("--data", required=True, metavar="PATH", help="a text file, a folder, or .jsonl with text")
    parser.add_argument(
        "--seq-len", type=positive, metavar="N", help="tokens in a row (default: 1024, or the model's context if less)"
    )
    parser.add_argument("--batch-size", type=positive, default=8, metavar="N", help="rows at once (default: 8)")
    parser.add_argument("--json", metavar="FILE", help="write the results as JSON (default: not written)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    check_named(args)
    check_outputs(args.json)
    if not args.data:
        raise ConfigError("--data is empty", hint="look whether a variable of your script is unset")
    from ..finetune import read_documents, text_loss, token_stream

    console = errors()
    documents = read_documents(args.data)
    base, tokenizer = open_named(args, console)
    check_adapters(base, args.adapter)
    context, end = base.config.max_position_embeddings, base.config.eos_token_id
    seq_len = args.seq_len or min(1024, context)
    if seq_len > context:
        console.print(f"[bold yellow]warning[/] --seq-len {seq_len} is longer than the model's {context} positions")
    stream = token_stream(documents, tokenizer, end[0] if isinstance(end, tuple) else end)
    seq_len = min(seq_len, max(len(stream) - 1, 1))  # of short data no rows that are padding for the most part
    rows: list[dict[str, Any]] = []
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    for adapter, model in with_each(base, args.adapter):
        start = time.monotonic()
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("evaluating", total=len(stream) - 1)

            def show(done: int, total: int, loss: float) -> None:
                progress.update(task, completed=done, description=f"evaluating  loss {loss:.4f}")  # noqa: B023 - called now

            found = text_loss(model, stream, seq_len=seq_len, batch_size=args.batch_size, on_progress=show)
        seconds = time.monotonic() - start
        row = {"adapter": adapter, "loss": found.loss, "perplexity": found.perplexity, "num_tokens": found.num_tokens}
        rows.append({**row, "seconds": seconds})
    _show(rows, args, seq_len, len(documents))
    if args.json:
        results = {"model": args.model, "data": args.data, "num_documents": len(documents), "seq_len": seq_len}
        write_text(console, args.json, json.dumps({**results, "results": rows}, indent=2) + "\n")
    return 0


def _show(rows: list[dict[str, Any]], args: argparse.Namespace, seq_len: int, num_documents: int) -> None:
    title = f"{num_documents:,} documents of {args.data}, rows of {seq_len:,} tokens"
    table = Table(title=Text(title), title_justify="left", box=None, pad_edge=False)
    for name in ("adapter", "nats/token", "perplexity", "tokens", "tokens/s"):
        is_name = name == "adapter"  # paths are long: they are broken, and figures are not
        table.add_column(
            name,
            justify="left" if is_name else "right",
            no_wrap=not is_name,
            overflow="fold" if is_name else "ellipsis",
        )
    for row in rows:
        rate = f"{row['num_tokens'] / max(row['seconds'], 1e-9):,.0f}"
        figures = (f"{row['loss']:.4f}", f"{row['perplexity']:,.2f}", f"{row['num_tokens']:,}", rate)
        table.add_row(Text(row["adapter"] or "none"), *figures)
    wide_console(200).print(table)
