import dataclasses
import io

from rich.console import Console

from lowtide import models
from lowtide.cli._data_report import describe, describe_ends, missing_end_warning, print_examples
from lowtide.finetune import EndTokens, FinetuneConfig
from lowtide.finetune.data import DataReport

REPORT = DataReport(
    kind="chat",
    template="model/chat_template.jinja",
    num_documents=1200,
    num_blank=3,
    num_tokens=50_000,
    num_cut=7,
    num_dropped=0,
    num_lost_tokens=90,
    num_without_loss=2,
    num_rows=99,
    utilisation=0.981,
    loss_share=0.4,
    num_held_out_left_out=1,
    num_held_out_lost_tokens=1234,
    examples=[[("[ebb]?", False), ("flow" * 1000, True)]],
    unread=("id", "messages.name"),
)


def test_the_plan_says_what_became_of_records():
    said = describe(REPORT, FinetuneConfig(seq_len=512))
    assert said["records"] == "1,200 of the kind chat, rendered by model/chat_template.jinja, 50,000 tokens"
    assert said["left out"] == "3 blank, 2 without a token to learn; 7 cut at 512 tokens, 90 tokens lost"
    assert said["rows"] == "99 to train on, 98.1% full, 40.0% of their tokens learned"
    assert said["held out"] == "1 documents left out, 1,234 tokens lost at 512 tokens"
    assert said["not read"] == "id, messages.name"
    whole = dataclasses.replace(REPORT, num_held_out_left_out=0, num_held_out_lost_tokens=0, unread=())
    assert {"held out", "not read"}.isdisjoint(describe(whole, FinetuneConfig()))
    assert describe(None, FinetuneConfig()) == {}


def test_the_plan_says_where_answers_end_and_warns_if_they_do_not(tiny_model_dir):
    tokenizer = models.load_tokenizer(tiny_model_dir)
    ends = EndTokens(answer=(0, 1), text=0, turn=1, is_turn_open=False)
    assert describe_ends(ends, tokenizer) == "at <|endoftext|> (0) or ! (1)"
    none = EndTokens(answer=(), text=None, turn=None, is_turn_open=True)
    assert describe_ends(none, tokenizer) == "at no token"
    text = dataclasses.replace(REPORT, kind="text", template=None)
    warnings = [missing_end_warning(report, tokens) for report in (REPORT, text, None) for tokens in (ends, none)]
    chat, plain = warnings[1], warnings[3]
    assert warnings == [None, chat, None, plain, None, None]
    assert chat.startswith("model/chat_template.jinja writes no end token after an answer, so the model does not learn")
    assert plain.startswith("neither config.json nor the tokenizer names an end token, so the model does not learn")
    assert "hint: name a template" in chat and "hint: set eos_token_id" in plain


def test_what_is_not_learned_is_dim_and_long_records_are_shortened():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system="standard", highlight=False)
    print_examples(console, REPORT)
    text = file.getvalue()
    assert "\x1b[2m[ebb]?\x1b[0mflow" in text
    assert "…" in text
    assert len(text) < 2000
    print_examples(console, None)
    assert file.getvalue() == text
