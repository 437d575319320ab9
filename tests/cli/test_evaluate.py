"""`lowtide evaluate`: the mean over all tokens, whatever the batches, and every way to call it wrongly."""

import json
import math
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowtide import finetune, lora, models
from lowtide.cli import main
from lowtide.finetune import text_loss, token_stream

TEXT = "the tide goes out and the tide comes in\n" * 4


@pytest.fixture
def evaluate(tiny_model_dir, tmp_path, capfd):
    """Run the command; returns the exit status, the results, and what was said."""
    (tmp_path / "data.txt").write_text(TEXT)

    def run(*flags, data=tmp_path / "data.txt", model=tiny_model_dir):
        out = tmp_path / "results.json"
        named = ["--model", str(model), "--data", str(data), "--json", str(out)]
        status = main(["evaluate", *named, *map(str, flags)])
        return status, json.loads(out.read_text()) if status == 0 else None, "".join(capfd.readouterr())

    return run


LOGITS = jax.jit(models.logits)


def _wanted(model, stream, seq_len):
    """The mean over all tokens, row by row from logits."""
    losses = []
    for start in range(0, len(stream) - 1, seq_len):
        part = stream[start : start + seq_len + 1]
        log_probs = jax.nn.log_softmax(LOGITS(model, jnp.asarray(part[None, :-1])), axis=-1)[0]
        losses.append(-np.asarray(log_probs)[np.arange(len(part) - 1), part[1:]])
    return float(np.mean(np.concatenate(losses), dtype=np.float64))


@pytest.mark.sentinel
@pytest.mark.slow
def test_loss_is_the_mean_over_all_tokens(evaluate, tiny_model_dir, tmp_path):
    base, tokenizer = models.load(tiny_model_dir), models.load_tokenizer(tiny_model_dir)
    adapted = lora.add(base, lora.Config(rank=2, targets="**/q_proj"), key=jax.random.key(0))
    lora.save(jax.tree.map(lambda x: x + 0.2 if x.ndim == 3 else x, adapted), tmp_path / "a")
    end = base.config.eos_token_id
    stream = token_stream([TEXT], tokenizer, end)
    assert stream[-1] == end or end is None
    adapter = str(tmp_path / "a")
    loaded = lora.load(base, adapter)
    for seq_len, batch_size in ((7, 3), (len(stream) + 5, 2)):  # neither divides the data
        status, found, said = evaluate("--seq-len", seq_len, "--batch-size", batch_size, "--adapter", adapter)
        (row,) = found["results"]
        assert status == 0 and row["adapter"] == adapter and "nats/token" in said
        assert row["num_tokens"] == len(stream) - 1
        assert row["loss"] == pytest.approx(_wanted(loaded, stream, seq_len), abs=1e-6)
        assert row["perplexity"] == pytest.approx(math.exp(row["loss"]))
    assert evaluate()[1]["results"][0]["loss"] != pytest.approx(row["loss"])


@pytest.mark.slow
def test_of_records_completions_count(evaluate, tiny_model_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))
    pairs = [("the tide", " goes out and in"), ("and", " the"), ("out", " goes the tide")]
    lines = [json.dumps({"prompt": prompt, "completion": completion}) for prompt, completion in pairs]
    (tmp_path / "r.jsonl").write_text("\n".join(lines))
    status, found, _ = evaluate("--seq-len", 24, "--batch-size", 2, data=tmp_path / "r.jsonl")
    assert status == 0
    base, tokenizer = models.load(tiny_model_dir), models.load_tokenizer(tiny_model_dir)
    end = [] if base.config.eos_token_id is None else [base.config.eos_token_id]
    losses = []
    for prompt, completion in pairs:
        first = len(tokenizer.encode(prompt).ids)
        ids = np.asarray([*tokenizer.encode(prompt + completion).ids, *end])
        log_probs = jax.nn.log_softmax(LOGITS(base, jnp.asarray(ids[None, :-1])), axis=-1)[0]
        losses += [-float(log_probs[at - 1, ids[at]]) for at in range(first, len(ids))]
    (row,) = found["results"]
    assert row["num_tokens"] == len(losses)
    assert row["loss"] == pytest.approx(np.mean(losses), abs=1e-5)
    with open(tmp_path / "r.jsonl", "a") as file:
        file.write('\n{"prompt": "x", "completion": " "}')
    status, found, said = evaluate("--seq-len", 4, "--loss-on", "all", data=tmp_path / "r.jsonl")
    assert "left out: 1 blank" in said and "records are longer than 4 tokens" in said
    assert found["results"][0]["num_tokens"] > row["num_tokens"]


def test_a_template_and_columns_are_those_of_the_run(evaluate, tiny_model_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}{{ at }}")
    chat = [{"role": "user", "content": "the tide"}, {"role": "assistant", "content": " goes out"}]
    own = [{"role": "system", "content": "the"}, *chat]
    (tmp_path / "r.jsonl").write_text("\n".join(json.dumps({"chat": turns, "text": "x"}) for turns in (chat, own)))
    flags = ("--seq-len", 24, "--columns", "messages=chat", "--chat-template", tmp_path / "mine.jinja")

    def count(*more):
        (row,) = evaluate(*flags, *more, data=tmp_path / "r.jsonl")[1]["results"]
        return row["num_tokens"]

    def length(text):
        return len(models.load_tokenizer(tiny_model_dir).encode(text).ids)

    assert count() == 2 * length(" goes out")
    # A system prompt goes before the conversation without one. Other variables of the template are other tokens.
    for system, at in (("the tide in", ""), ("the tide in", " ebb"), ("ebb and ebb", " ebb")):
        given = ("--system", system, *(("--template-arg", f"at={at}") if at else ()), "--loss-on", "all")
        texts = (f"{system}the tide goes out{at}", f"thethe tide goes out{at}")
        assert count(*given) == sum(length(text) - 1 for text in texts)
    for flag in (flags[2:4], flags[4:], ("--system", "be brief"), ("--template-arg", "at=noon")):
        status, _, said = evaluate(*flag)
        assert status == 2 and f"{flag[0]} is for records" in said
    (tmp_path / "p.jsonl").write_text('{"prompt": "the", "completion": " tide"}')
    status, _, said = evaluate("--system", "be brief", data=tmp_path / "p.jsonl")
    assert status == 2 and "--system and --template-arg are for conversations" in said


def test_weights_are_stored_in_few_bits_for_a_loss(evaluate, monkeypatch):
    seen, results = [], SimpleNamespace(loss=1.0, perplexity=3.0, num_tokens=8)
    monkeypatch.setattr(finetune, "text_loss", lambda model, *_, **__: seen.append(model) or results)
    assert evaluate("--quantize", "int8")[0] == 0
    assert seen[0].layers["mlp"]["up_proj"]["weight"].format == "int8"


@pytest.mark.slow
def test_what_routers_are_trained_by_is_no_part_of_it():
    sizes = {"vocab_size": 40, "hidden_size": 8, "intermediate_size": 12, "num_layers": 1, "num_heads": 2}
    heads = {"num_kv_heads": 1, "head_dim": 4}
    experts = models.Experts(num_experts=2, num_experts_per_token=1, intermediate_size=4, router_loss_coef=5.0)
    model = models.init(models.DecoderConfig(**sizes, **heads, experts=experts), key=jax.random.key(0))
    stream = np.arange(30, dtype=np.int32)
    assert text_loss(model, stream, seq_len=8, batch_size=2).loss == pytest.approx(_wanted(model, stream, 8), abs=1e-6)


@pytest.mark.slow
def test_what_fills_up_a_row_is_no_part_of_its_length():
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 12, "num_layers": 1, "num_heads": 2}
    scaling = models.RopeScaling(rope_type="dynamic", factor=4.0)
    more = {"num_kv_heads": 1, "head_dim": 8, "max_position_embeddings": 16, "rope_scaling": scaling}
    model = models.init(models.DecoderConfig(**sizes, **more), key=jax.random.key(0))
    model = jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim > 2 else leaf, model)
    stream = np.random.default_rng(0).integers(0, 40, 13).astype(np.int32)
    short, long = (text_loss(model, stream, seq_len=seq_len, batch_size=2).loss for seq_len in (12, 48))
    assert long == pytest.approx(short, abs=1e-6)


def test_a_loss_that_is_not_finite_is_an_error_and_null_in_json(evaluate, tiny_model_dir, tmp_path):
    model = models.load(tiny_model_dir)
    model.outer["norm"]["weight"] = model.outer["norm"]["weight"].at[0].set(jnp.nan)
    shutil.copytree(tiny_model_dir, tmp_path / "spoilt")
    models.save(model, tmp_path / "spoilt")
    status, _, said = evaluate(model=tmp_path / "spoilt")
    assert status == 2 and "the loss of the model is not finite" in said
    (row,) = json.loads((tmp_path / "results.json").read_text())["results"]
    assert row["loss"] is None and row["perplexity"] is None and row["num_tokens"] > 0


def test_bad_input(evaluate, tmp_path):
    (tmp_path / "short.txt").write_text(" ")
    cases = {
        "the data has no text": {"data": tmp_path / "short.txt"},
        "no such file or folder": {"data": tmp_path / "none"},
        "--data is empty": {"data": ""},
    }
    for message, given in cases.items():
        status, _, said = evaluate(**given)
        assert status == 2 and message in said
    status, _, said = evaluate("--adapter", tmp_path / "none")
    assert status == 2 and "no such file" in said
