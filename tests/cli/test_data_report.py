import dataclasses
import io

from rich.console import Console

from lowtide.cli._data_report import describe, print_examples
from lowtide.finetune import FinetuneConfig
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
)


def test_the_plan_says_what_became_of_records():
    said = describe(REPORT, FinetuneConfig(seq_len=512))
    assert said["records"] == "1,200 of the kind chat, rendered by model/chat_template.jinja, 50,000 tokens"
    assert said["left out"] == "3 blank, 2 without a token to learn; 7 cut at 512 tokens, 90 tokens lost"
    assert said["rows"] == "99 to train on, 98.1% full, 40.0% of their tokens learned"
    assert said["held out"] == "1 documents left out, 1,234 tokens lost at 512 tokens"
    whole = dataclasses.replace(REPORT, num_held_out_left_out=0, num_held_out_lost_tokens=0)
    assert "held out" not in describe(whole, FinetuneConfig())
    assert describe(None, FinetuneConfig()) == {}


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
