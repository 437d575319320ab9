"""Output of `lowtide finetune` about its records before training: counts, and the examples that the model sees."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.text import Text

_MAX_CHARACTERS = 1200
_MAX_LOST_SHARE = 0.02
"""Share of the tokens that may be lost without a warning."""


def describe(report: Any, config: Any) -> dict[str, str]:
    """Return the rows of the printed plan about a `DataReport`, by label; empty for plain text, which has no report."""
    if report is None:
        return {}
    drop_counts = {
        "blank": report.num_blank,
        "too long": report.num_dropped,
        "without a token to learn": report.num_without_loss,
    }
    drop_text = ", ".join(f"{count:,} {reason}" for reason, count in drop_counts.items() if count)
    verb = "split" if config.too_long == "split" else "cut"
    lost_text = f", {report.num_lost_tokens:,} tokens lost" if report.num_lost_tokens else ""
    template_text = f", rendered by {report.template}" if report.template else ""
    held_out = {"documents left out": report.num_held_out_left_out, "tokens lost": report.num_held_out_lost_tokens}
    held_out_text = ", ".join(f"{count:,} {label}" for label, count in held_out.items() if count)
    return {
        "records": f"{report.num_documents:,} of the kind {report.kind}{template_text}, {report.num_tokens:,} tokens",
        "left out": f"{drop_text or 'none'}; {report.num_cut:,} {verb} at {config.document_tokens} tokens{lost_text}",
        "rows": f"{report.num_rows:,} to train on, {report.utilisation:.1%} full, {report.loss_share:.1%} of "
        "their tokens learned",
        **({"not read": ", ".join(report.unread)} if report.unread else {}),
        **({"held out": f"{held_out_text} at {config.document_tokens} tokens"} if held_out_text else {}),
    }


def lost_tokens_warning(report: Any, config: Any) -> str | None:
    """Return a warning if more than 2 % of a report's tokens are lost, else None; also None without a report."""
    if report is None:
        return None
    num_lost = report.num_lost_tokens + report.num_held_out_lost_tokens
    if num_lost <= _MAX_LOST_SHARE * report.num_tokens:
        return None
    share = f"{num_lost:,} of {report.num_tokens:,} tokens ({num_lost / report.num_tokens:.0%})"
    remedy = "raise --seq-len" + (", or --too-long split" if config.document_tokens == config.seq_len else "")
    return f"{share} are lost: records are longer than {config.document_tokens:,} tokens\nhint: {remedy}"


def describe_ends(tokens: Any, tokenizer: Any) -> str:
    """Describe the `EndTokens` that end an answer in `lowtide generate` and in the written model."""
    return "at " + (" or ".join(f"{tokenizer.id_to_token(id)} ({id})" for id in tokens.answer) or "no token")


def missing_end_warning(report: Any, tokens: Any) -> str | None:
    """Return a warning if models tuned on these records do not learn to stop, else None; also None without a report."""
    if report is not None and report.template and tokens.is_turn_open:
        problem = f"{report.template} writes no end token after an answer"
        hint = "name a template that ends each turn with an end token: --chat-template FILE"
    elif report is not None and not report.template and tokens.text is None:
        problem = "neither config.json nor the tokenizer names an end token"
        hint = "set eos_token_id in config.json"
    else:
        return None
    return f"{problem}, so the model does not learn to stop\nhint: {hint}"


def evaluation_notes(report: Any, seq_len: int) -> Iterator[str]:
    """Yield notes about records of a `DataReport` that evaluation leaves out, or splits at `seq_len` tokens."""
    drop_counts = {"blank": report.num_blank, "without a counted token": report.num_without_loss}
    if drop_text := ", ".join(f"{count:,} {reason}" for reason, count in drop_counts.items() if count):
        yield f"some of {report.num_documents + report.num_blank:,} records or parts are left out: {drop_text}"
    if report.num_cut:
        yield (
            f"{report.num_cut:,} records are longer than {seq_len:,} tokens and are evaluated in parts: the first "
            "token of a part does not count, and a part does not see the parts before it"
        )


def print_examples(console: Console, report: Any) -> None:
    """Print the first records as the model sees them, with learned text marked."""
    if report is None:
        return
    # A terminal shows text that is not learned dim; without colours, marks enclose the learned text.
    has_styles = console.is_terminal and not console.no_color
    legend, start, end = ("dim: read, not learned", "", "") if has_styles else ("learned: ⟦ to ⟧", "⟦", "⟧")
    for number, parts in enumerate(report.examples, 1):
        console.rule(f"record {number} ({legend})", align="left")
        text = Text()
        for part, is_learned in parts:
            text.append(f"{start}{part}{end}" if is_learned else part, style="" if is_learned else "dim")
        if len(text) > _MAX_CHARACTERS:
            text.truncate(_MAX_CHARACTERS)
            text.append("…", style="dim")
        console.print(text, soft_wrap=True)
    console.rule()
