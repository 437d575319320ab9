"""``lowtide evaluate``: loss and perplexity on text, of a model and of each of its adapters."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..core import ConfigError, NonFiniteError
from ._arguments import (
    add_model_arguments,
    add_template_argument,
    chat_template,
    check_model_arguments,
    check_not_empty,
    end_tokens,
    open_named,
    positive,
    with_each,
)
from ._data_report import evaluation_notes
from ._output import check_outputs, errors, print_labelled, progress_bar, wide_console, write_text


def register(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "evaluate",
        help="measure the loss of a model on text",
        description="Measure loss (nats per token) and perplexity of a model on text, with each of several adapters on "
        "one base. In text, every token except the first counts; in records, completions and assistant messages.",
    )
    add = parser.add_argument
    add_model_arguments(parser)
    add_template_argument(parser)
    add("--data", required=True, metavar="PATH", help="text, a folder of text, or records as for finetune")
    add("--columns", metavar="WORDS", help="columns of the records, as for finetune, such as messages=chat")
    add(
        "--loss-on",
        choices=("completion", "all"),
        help="counted tokens of records: completion (assistant messages, completions, outputs), or all (default: "
        "completion)",
    )
    add(
        "--seq-len",
        type=positive,
        metavar="N",
        help="tokens in a row (default: 1024, or the model's context if shorter)",
    )
    add("--batch-size", type=positive, default=8, metavar="N", help="rows evaluated at once (default: 8)")
    add("--json", metavar="FILE", help="write the results as JSON (default: not written)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    check_model_arguments(args)
    check_outputs(args.json)
    check_not_empty(args, "data")
    from ..finetune import is_read_as_records, named_documents, notes_on

    console = errors()
    is_text = not is_read_as_records(args.data, _columns(args))
    for flag, value in (
        ("--chat-template", args.chat_template),
        ("--template-arg", args.template_arg or None),
        ("--system", args.system),
        ("--columns", args.columns),
        ("--loss-on", args.loss_on),
    ):
        if is_text and value is not None and Path(args.data).exists():
            raise ConfigError(f"{flag} is for records, but {args.data} is plain text", hint=f"leave {flag} out")
    # Text is read before the model, so that a wrong path fails before a large model is loaded.
    documents = named_documents(args.data) if is_text else None
    for note in notes_on(args.data, _columns(args), is_evaluation=True):
        print_labelled(console, "note", note)
    base, tokenizer = open_named(args, console)
    context = base.config.max_position_embeddings
    seq_len = args.seq_len or min(1024, context)
    if seq_len > context:
        print_labelled(console, "warning", f"--seq-len {seq_len} is longer than the model's {context} positions")
    measure, num_tokens, seq_len = _measure(args, base, tokenizer, documents, seq_len, console)
    rows: list[dict[str, Any]] = []
    for adapter, model in with_each(base, args.adapter):
        start = time.monotonic()
        with progress_bar(console, has_counts=False) as progress:
            task = progress.add_task("evaluating", total=num_tokens)

            def show(completed: int, total: int, loss: float) -> None:
                # Only this iteration calls `show`, so the late binding of `progress` and `task` is safe.
                progress.update(task, completed=completed, description=f"evaluating  loss {loss:.4f}")  # noqa: B023

            result = measure(model, show)
        seconds = time.monotonic() - start
        row = {name: getattr(result, name) for name in ("loss", "perplexity", "num_tokens")}
        rows.append({"adapter": adapter, **row, "seconds": seconds})
    _print_table(rows, args, seq_len)
    if args.json:
        results = {"model": args.model, "data": args.data, "seq_len": seq_len}
        numbers = [{name: value if _is_number(value) else None for name, value in row.items()} for row in rows]
        write_text(console, args.json, json.dumps({**results, "results": numbers}, indent=2, allow_nan=False) + "\n")
    if non_finite := [row["adapter"] or "the model" for row in rows if not math.isfinite(row["loss"])]:
        raise NonFiniteError(
            f"the loss of {', '.join(non_finite)} is not finite",
            hint="check for nan or inf in the weights, and for overflow with --compute-dtype float16; lowtide inspect "
            "shows the dtypes",
        )
    return 0


def _is_number(value: Any) -> bool:
    """Return whether JSON can represent a value; JSON has no nan and no infinity."""
    return not isinstance(value, float) or math.isfinite(value)


def _measure(
    args: argparse.Namespace,
    base: Any,
    tokenizer: Any,
    documents: dict[str, str] | None,
    seq_len: int,
    console: Console,
) -> tuple[Callable[[Any, Any], Any], int, int]:
    """Tokenise the data; return (function that evaluates a model, number of counted tokens, row length)."""
    from ..finetune import batches_loss, text_loss, token_stream
    from ..finetune.data import evaluation_data

    end = end_tokens(args, base, tokenizer).text
    if documents is None:
        options: dict[str, Any] = {"columns": _columns(args), "end_token": end, "loss_on": args.loss_on or "completion"}
        options |= {"seq_len": seq_len, "batch_size": args.batch_size, "vocab_size": base.config.vocab_size}
        batches, report = evaluation_data(Path(args.data), tokenizer, chat_template(args), **options)
        if report.template is None and (args.system is not None or args.template_arg):
            hint = "leave them out, or check --data and --chat-template"
            raise ConfigError("--system and --template-arg are for conversations", hint=hint)
        for note in evaluation_notes(report, seq_len):
            print_labelled(console, "note", note)
        count = sum(int((batch["labels"] >= 0).sum()) for batch in batches)
        return lambda model, show: batches_loss(model, batches, count, on_progress=show), count, seq_len
    stream = token_stream(documents, tokenizer, end, vocab_size=base.config.vocab_size)
    seq_len = min(seq_len, max(len(stream) - 1, 1))  # short data: avoid rows that are mostly padding
    sizes = {"seq_len": seq_len, "batch_size": args.batch_size}
    return lambda model, show: text_loss(model, stream, on_progress=show, **sizes), len(stream) - 1, seq_len


def _columns(args: argparse.Namespace) -> tuple[str, ...] | None:
    return None if args.columns is None else tuple(word.strip() for word in args.columns.split(","))


def _print_table(rows: list[dict[str, Any]], args: argparse.Namespace, seq_len: int) -> None:
    title = f"{args.data}, rows of {seq_len:,} tokens"
    table = Table(title=Text(title), title_justify="left", box=None, pad_edge=False)
    table.add_column("adapter", overflow="fold")  # paths are long, so they may wrap; figures may not
    for name in ("nats/token", "perplexity", "tokens", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        rate = f"{row['num_tokens'] / max(row['seconds'], 1e-9):,.0f}"
        figures = (f"{row['loss']:.4f}", f"{row['perplexity']:,.2f}", f"{row['num_tokens']:,}", rate)
        table.add_row(Text(row["adapter"] or "none"), *figures)
    wide_console(200).print(table)
