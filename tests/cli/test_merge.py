"""`lowtide merge`: what the merged directory holds, several adapters, and every way to call it wrongly."""

import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowtide import combine, lora, models, partition
from lowtide.cli import main
from lowtide.core import ConfigError
from lowtide.finetune import _base, write_merged

TOKENS = jnp.asarray([[5, 3, 8, 1, 200, 17]], jnp.int32)


@pytest.fixture
def merge(tiny_model_dir, tmp_path, capfd):
    """Run the command on a tiny model; returns exit status and what was said, in one line."""

    def run(*flags, model=tiny_model_dir, out=tmp_path / "out"):
        status = main(["merge", "--model", str(model), "--out", str(out), *map(str, flags)])
        return status, " ".join("".join(capfd.readouterr()).split())

    return run


@pytest.fixture
def adapters(tiny_model_dir, tmp_path):
    """Two adapters of different ranks on different modules, and the base."""
    base = models.load(tiny_model_dir)
    for name, rank, targets in (("a", 2, "**/{q,v}_proj"), ("b", 3, "**/{v,down}_proj")):
        config = lora.Config(rank=rank, alpha=5, targets=targets)
        adapted = lora.add(base, config, key=jax.random.key(rank))
        nodes = jax.tree.map(
            lambda x: _random(x) if isinstance(x, lora.LoRAWeight) else x,
            adapted,
            is_leaf=lambda x: isinstance(x, lora.LoRAWeight),
        )
        lora.save(nodes, tmp_path / name)
    return base, tmp_path / "a", tmp_path / "b"


def _random(node):
    return lora.LoRAWeight(node.weight, node.lora_a, 0.5 + jnp.ones_like(node.lora_b), alpha=node.alpha)


@pytest.mark.slow
def test_a_merged_directory_has_what_the_adapter_computes_and_all_files(merge, adapters, tiny_model_dir, tmp_path):
    base, one, _ = adapters
    model = tmp_path / "model"
    shutil.copytree(tiny_model_dir, model)
    (model / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    (model / "chat_template.jinja").write_text("{{ messages }}")
    config = json.loads((model / "config.json").read_text())
    more = {"pad_token_id": 3, "initializer_range": 0.01, "rope_parameters": {"rope_theta": 10000.0}}
    (model / "config.json").write_text(json.dumps({**config, **more}))
    (model / "secret.txt").write_text("not of the model")
    out = tmp_path / "out"
    out.mkdir()  # an empty folder is as good as none
    status, said = merge("--adapter", one, "--max-shard-size", "8 KiB", model=model)
    assert status == 0 and "merged 1 adapter into" in said
    got = models.logits(models.load(out), TOKENS)
    np.testing.assert_allclose(got, models.logits(lora.load(base, one), TOKENS), atol=1e-5)
    shards = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(shards) > 2
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (model / name).read_bytes()
    rest = {"config.json", "README.md", "model.safetensors.index.json"}
    copied = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert {path.name for path in out.iterdir()} == {*shards, *rest, *copied}
    written = json.loads((out / "config.json").read_text())
    assert written == {**config, "pad_token_id": 3, "initializer_range": 0.01}
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n") and 'base_model: "model"' in card
    assert '"r"' not in card and "`r`: `2`" in card and str(tmp_path) not in card
    assert 'AutoTokenizer.from_pretrained("out")' in card
    assert not list(tmp_path.glob(".out*"))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("config", [lora.Config(rank=2, dora=True), lora.IA3Config()], ids=["DoRA", "(IA)³"])
def test_one_adapter_of_any_kind_is_merged(config, merge, tiny_model_dir, tmp_path):
    base = models.load(tiny_model_dir)
    adapted = lora.add(base, config, key=jax.random.key(0))
    trainable, frozen = partition(adapted, lora.TRAINABLE)
    adapted = combine(jax.tree.map(lambda leaf: leaf + 0.1, trainable), frozen)
    lora.save(adapted, tmp_path / "one")
    assert merge("--adapter", tmp_path / "one")[0] == 0
    got = models.logits(models.load(tmp_path / "out"), TOKENS)
    np.testing.assert_allclose(got, models.logits(adapted, TOKENS), atol=1e-5)
    assert merge("--adapter", tmp_path / "one", "--adapter", tmp_path / "one", out=tmp_path / "two")[0] == 2


def test_a_template_that_a_run_was_tuned_with_goes_along(merge, adapters, tmp_path):
    (tmp_path / "mine.jinja").write_text("{{ messages | length }}")
    status, _ = merge("--adapter", adapters[1], "--chat-template", tmp_path / "mine.jinja")
    assert status == 0
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages | length }}"


@pytest.mark.slow
def test_adapters_add_up_by_their_weights_and_are_rounded_once(merge, adapters, tmp_path):
    base, one, two = adapters
    weights = ["--weight", 1, "--weight", "-0.5"]
    assert merge("--adapter", one, "--adapter", two, *weights, "--dtype", "bfloat16")[0] == 0
    got = models.load(tmp_path / "out")
    a, b = (lora.merge(lora.load(base, name)) for name in (one, two))
    want = jax.tree.map(lambda w, x, y: w + (x - w) - 0.5 * (y - w), base.layers, a.layers, b.layers)
    for name in ("q_proj", "v_proj"):
        leaf = got.layers["attn"][name]["weight"]
        assert leaf.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(leaf, np.float32), want["attn"][name]["weight"], rtol=2**-8, atol=1e-5)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_a_write_that_fails_leaves_nothing(merge, adapters, tmp_path, monkeypatch):
    def fail(folder, contents):
        assert ".unfinished" in str(folder)
        raise OSError("disk full")

    monkeypatch.setattr(_base, "write_files", fail)
    status, said = merge("--adapter", adapters[1])
    assert status == 2 and "disk full" in said
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


def test_bad_input(merge, adapters, tmp_path):
    _, one, two = adapters
    cases = {
        "--adapter is empty": ("--adapter", ""),
        "no such file": ("--adapter", tmp_path / "none"),
        "weights do not match": ("--adapter", one, "--adapter", two, "--weight", 1),
    }
    for message, flags in cases.items():
        status, said = merge(*flags)
        assert status == 2 and message in said, message
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("mine")
    status, said = merge("--adapter", one, out=tmp_path / "full")
    assert status == 2 and "the folder is not empty" in said
    assert os.listdir(tmp_path / "full") == ["x"]
    with pytest.raises(SystemExit):
        merge("--adapter", one, "--weight", "nan")
    with pytest.raises(ConfigError, match="dtype must be"):  # the command's own parser refuses such a word
        write_merged(None, [one], tmp_path / "out", dtype="float8")
    assert not (tmp_path / "out").exists()


TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]"
    "{% generation %}{{ message.content }}{% endgeneration %}{% endfor %}"
)


@pytest.mark.sentinel
@pytest.mark.slow
def test_an_adapter_that_was_tuned_on_chats_is_merged(merge, tiny_model_dir, tmp_path, monkeypatch):
    """From chats to a merged model: the two commands that most users run."""
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))
    base = shutil.copytree(tiny_model_dir, tmp_path / "base")
    # The end of a turn is not the end token of config.json.
    closed = TEMPLATE.replace("{{ message.content }}", "{{ message.content }}<|im_end|>")
    closed += "{% if add_generation_prompt %}[assistant]{% endif %}"
    (base / "chat_template.jinja").write_text(closed)
    tokenizer = models.load_tokenizer(base)
    tokenizer.add_special_tokens(["<|im_end|>"])
    tokenizer.save(str(base / "tokenizer.json"))
    turns = [{"role": "user", "content": "where does the tide go?"}, {"role": "assistant", "content": "out"}]
    (tmp_path / "chats.jsonl").write_text("\n".join(json.dumps({"messages": turns}) for _ in range(24)))
    out = tmp_path / "run"
    small = ["--seq-len", "64", "--batch-size", "2", "--rank", "8", "--steps", "60", "--learning-rate", "3e-2"]
    files = ["--model", str(base), "--data", str(tmp_path / "chats.jsonl"), "--out", str(out)]
    assert main(["finetune", *files, *small]) == 0
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    assert losses[-1] < losses[0]

    status, said = merge("--adapter", out / "adapter", model=base)
    assert status == 0, said
    adapted = lora.load(models.load(base), out / "adapter")
    merged = models.load(tmp_path / "out")
    want, got = (models.logits(model, TOKENS) for model in (adapted, merged))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
    assert np.abs(np.asarray(got - models.logits(models.load(base), TOKENS))).max() > 1e-3
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == closed
    ends = json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"]
    assert ends == [0, tokenizer.token_to_id("<|im_end|>")]
    (tmp_path / "ask.jsonl").write_text(json.dumps({"messages": turns[:1]}))
    ask = ["--model", str(tmp_path / "out"), "--prompts", str(tmp_path / "ask.jsonl"), "--temperature", "0"]
    assert main(["generate", *ask, "--output", str(tmp_path / "answers.jsonl"), "--max-new-tokens", "40"]) == 0
    answer = json.loads((tmp_path / "answers.jsonl").read_text())
    assert answer["ended"] and answer["text"] == "out"
