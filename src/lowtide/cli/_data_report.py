"""Output of `lowtide finetune` about its records before training: counts, and the examples that the model sees."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.text import Text

_MOST_CHARACTERS = 1200


def described(report: Any, config: Any) -> dict[str, str]:
    """Return the lines of the plan about records; none for plain text.

    Args:
        report: a `lowtide.finetune.data.DataReport`, or None.
        config: the configuration of the run.
    """
    if report is None:
        return {}
    dropped = {
        "blank": report.num_blank,
        "too long": report.num_dropped,
        "without a token to learn": report.num_without_loss,
    }
    left_out = ", ".join(f"{count:,} {why}" for why, count in dropped.items() if count)
    verb = "split" if config.too_long == "split" else "cut"
    lost = f", {report.num_lost_tokens:,} tokens lost" if report.num_lost_tokens else ""
    how = f", rendered by {report.template}" if report.template else ""
    unseen = {"documents left out": report.num_held_out_left_out, "tokens lost": report.num_held_out_lost_tokens}
    held_out = ", ".join(f"{count:,} {what}" for what, count in unseen.items() if count)
    return {
        "records": f"{report.num_documents:,} of the kind {report.kind}{how}, {report.num_tokens:,} tokens",
        "left out": f"{left_out or 'none'}; {report.num_cut:,} {verb} at {config.seq_len} tokens{lost}",
        "rows": f"{report.num_rows:,} to train on, {report.utilisation:.1%} full, {report.loss_share:.1%} of "
        "their tokens learned",
        **({"not read": ", ".join(report.unread)} if report.unread else {}),
        **({"held out": f"{held_out} at {config.seq_len} tokens"} if held_out else {}),
    }


def ends(tokens: Any, tokenizer: Any) -> str:
    """Return a description of the tokens that end an answer in `lowtide generate` and in the written model.

    Args:
        tokens: a `lowtide.finetune.EndTokens`.
        tokenizer: the tokenizer of the model.
    """
    return "at " + (" or ".join(f"{tokenizer.id_to_token(id)} ({id})" for id in tokens.answer) or "no token")


def endless(report: Any, tokens: Any) -> str | None:
    """Explain why a model tuned on these records does not learn to stop; return None if it does.

    Args:
        report: a `lowtide.finetune.data.DataReport`, or None for plain text.
        tokens: a `lowtide.finetune.EndTokens`.
    """
    if report is not None and report.template and tokens.is_turn_open:
        return (
            f"{report.template} writes no end token after an answer, so the model does not learn to stop\n"
            "hint: name a template that closes each turn with one: --chat-template FILE"
        )
    if report is not None and not report.template and tokens.text is None:
        return (
            "neither config.json nor the tokenizer names an end token, so the model does not learn to stop\n"
            "hint: set eos_token_id in config.json"
        )
    return None


def unlike(report: Any, seq_len: int) -> Iterator[str]:
    """Yield notes about records that evaluation leaves out or splits.

    Args:
        report: a `lowtide.finetune.data.DataReport`.
        seq_len: tokens in a row.
    """
    left_out = {"blank": report.num_blank, "without a token that counts": report.num_without_loss}
    if words := ", ".join(f"{count:,} {why}" for why, count in left_out.items() if count):
        yield f"of {report.num_documents + report.num_blank:,} records or their parts some are left out: {words}"
    if report.num_cut:
        yield (
            f"{report.num_cut:,} records are longer than {seq_len:,} tokens, and evaluated in parts: the first token "
            "of a part does not count, and nothing before it is seen"
        )


def print_examples(console: Console, report: Any) -> None:
    """Print the first records as the model sees them, with learned text marked.

    Args:
        console: a terminal shows text that is not learned dim; without colours, marks enclose the learned text.
        report: a `lowtide.finetune.data.DataReport`, or None.
    """
    if report is None:
        return
    has_styles = console.is_terminal and not console.no_color
    legend, begin, end = ("dim: read, not learned", "", "") if has_styles else ("learned: ⟦ to ⟧", "⟦", "⟧")
    for number, parts in enumerate(report.examples, 1):
        console.rule(f"record {number} ({legend})", align="left")
        text = Text()
        for part, is_learned in parts:
            text.append(f"{begin}{part}{end}" if is_learned else part, style="" if is_learned else "dim")
        if len(text) > _MOST_CHARACTERS:
            text.truncate(_MOST_CHARACTERS)
            text.append("…", style="dim")
        console.print(text, soft_wrap=True)
    console.rule()
