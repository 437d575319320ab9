"""`lowtide inspect`: exact counts, what cannot be handled, and damaged files."""

import json
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lowtide import lora, models
from lowtide.cli import main
from lowtide.finetune import FinetuneConfig
from lowtide.finetune._run_folder import write_config
from lowtide.models import DecoderConfig, Experts
from tests.models.kinds import KINDS

SIZES = {"vocab_size": 40, "hidden_size": 8, "intermediate_size": 12, "num_layers": 2, "num_heads": 2}
HEADS = {"num_kv_heads": 1, "head_dim": 4}


@pytest.fixture
def inspect(capfd):
    """Run the command with --json; returns the exit status, what was found, and what was said of an error."""

    def run(path):
        status = main(["inspect", str(path), "--json"])
        printed, said = capfd.readouterr()
        return status, json.loads(printed) if printed else None, " ".join(said.split())

    return run


@pytest.fixture
def model_dir(tiny_model_dir, tmp_path):
    shutil.copytree(tiny_model_dir, tmp_path / "model")
    return tmp_path / "model"


def test_a_model_and_what_it_lacks(inspect, model_dir, capfd):
    base = models.load(model_dir)
    status, found, _ = inspect(model_dir)
    facts = found["facts"]
    assert (status, found["kind"], found["problems"]) == (0, "model", [])
    assert facts["parameters"] == sum(leaf.size for leaf in jax.tree.leaves(base)) == sum(facts["groups"].values())
    assert facts["groups"]["attention"] == sum(leaf.size for leaf in jax.tree.leaves(base.layers["attn"]))
    assert facts["groups"]["MLP"] == sum(leaf.size for leaf in jax.tree.leaves(base.layers["mlp"]))
    assert facts["dtypes"] == {"F32": facts["parameters"]}
    assert (facts["family"], facts["layers"], facts["chat_template"]) == ("llama", 2, False)
    raw = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps({**raw, "num_hidden_layers": 1}))
    status, found, _ = inspect(model_dir)
    assert status == 1 and "different models" in found["problems"][0]
    (model_dir / "config.json").write_text(json.dumps(raw))
    (model_dir / "chat_template.jinja").write_text("x")
    assert inspect(model_dir)[1]["facts"]["chat_template"] is True
    assert main(["inspect", str(model_dir)]) == 0
    assert "chat template" in capfd.readouterr().out
    (model_dir / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}")
    status, found, _ = inspect(model_dir)
    assert status == 1 and "the chat template cannot be used" in found["problems"][0]
    assert "TemplateSyntaxError" in found["problems"][0]
    (model_dir / "chat_template.jinja").unlink()
    raw = json.loads((model_dir / "config.json").read_text())
    for field in ("mystery_scale", "quantization_config"):
        (model_dir / "config.json").write_text(json.dumps({**raw, field: {"bits": 4}}))
        status, found, _ = inspect(model_dir)
        assert status == 1 and field in found["problems"][0]
    (model_dir / "tokenizer.json").unlink()
    assert "tokenizer.json" in inspect(model_dir)[1]["problems"][1]


def test_what_is_no_problem_is_a_note(inspect, model_dir, capfd):
    tokenizer = models.load_tokenizer(model_dir)
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.save(f"{model_dir}/tokenizer.json")
    status, found, _ = inspect(model_dir)
    size, raw = tokenizer.get_vocab_size(), json.loads((model_dir / "config.json").read_text())
    assert (status, found["notes"]) == (0, [])
    assert f" {size:,} tokens" in found["facts"]["tokenizer"]
    file = model_dir / "model.safetensors"
    stored = load_file(file)
    save_file({**stored, "lm_head.weight": 2 * stored["model.embed_tokens.weight"]}, file, {"format": "pt"})
    (model_dir / "config.json").write_text(json.dumps({**raw, "tie_word_embeddings": True}))
    status, found, _ = inspect(model_dir)
    assert status == 0 and "lm_head.weight is stored: a different head is refused" in found["notes"][0]
    assert main(["inspect", str(model_dir)]) == 0
    assert "note" in capfd.readouterr().out


def test_what_loading_refuses_is_a_problem(inspect, model_dir):
    raw = json.loads((model_dir / "config.json").read_text())
    tokenizer = (model_dir / "tokenizer.json").read_text()
    (model_dir / "tokenizer.json").write_text('{"model": {}}')
    assert "tokenizer.json" in inspect(model_dir)[1]["problems"][0]
    (model_dir / "tokenizer.json").write_text(tokenizer)
    (model_dir / "config.json").write_text(json.dumps({**raw, "vocab_size": 3}))
    assert "3 embeddings" in inspect(model_dir)[1]["problems"][-1]
    (model_dir / "config.json").write_text(json.dumps(raw))
    models.save(models.load(model_dir), model_dir, max_shard_bytes=2**13)
    (model_dir / "model.safetensors.index.json").rename(model_dir / "index.json")
    assert "shards are not read" in inspect(model_dir)[1]["problems"][0]


def test_a_configuration_alone_has_exact_parameters(inspect, tmp_path, model_dir):
    whole = inspect(model_dir)[1]["facts"]["parameters"]
    shutil.copy(model_dir / "config.json", tmp_path)
    shutil.rmtree(model_dir)
    status, found, _ = inspect(tmp_path)
    assert (status, found["facts"]["parameters"]) == (1, whole)
    assert "weights are missing" in found["problems"][0]


def test_parameters_of_a_mixture_that_a_token_uses(inspect, tmp_path):
    experts = Experts(num_experts=4, num_experts_per_token=1, intermediate_size=12)
    model = models.init(DecoderConfig(**SIZES, **HEADS, family="mixtral", experts=experts), key=jax.random.key(0))
    models.save(model, tmp_path)
    facts = inspect(tmp_path)[1]["facts"]
    of_experts = sum(leaf.size for leaf in jax.tree.leaves(model.layers["mlp"]["experts"]))
    assert facts["groups"]["experts"] == of_experts
    assert facts["active_parameters"] == facts["parameters"] - of_experts * 3 // 4


def test_an_adapter_says_what_it_touches(inspect, tiny_model_dir, tmp_path):
    adapted = lora.add(models.load(tiny_model_dir), lora.Config(rank=3, targets="**/q_proj"), key=jax.random.key(0))
    lora.save(adapted, tmp_path)
    status, found, _ = inspect(tmp_path)
    assert (status, found["kind"], found["facts"]["r"]) == (0, "adapter", 3)
    assert found["facts"]["modules"] == {"model.layers.*.self_attn.q_proj": {"layers": 2, "ranks": [3]}}
    assert found["facts"]["parameters"] == 2 * 3 * (16 + 16)
    raw = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**raw, "r": 0}))
    status, found, _ = inspect(tmp_path)
    assert status == 1 and ": r" in found["problems"][0]


def test_an_adapter_of_experts_that_are_one_parameter_says_so(inspect, tmp_path):
    model = models.init(KINDS["gpt_oss"], key=jax.random.key(0))
    config = lora.Config(rank=3, targets=["**/q_proj", "**/experts/down/weight"])
    lora.save(lora.add(model, config, key=jax.random.key(0)), tmp_path)
    status, found, _ = inspect(tmp_path)
    assert (status, found["facts"]["target_parameters"]) == (0, ["experts.down_proj"])
    assert found["facts"]["modules"] == {"model.layers.*.self_attn.q_proj": {"layers": 4, "ranks": [3]}}


def test_a_run_and_its_checkpoints(inspect, tiny_model_dir, tmp_path):
    out = tmp_path / "run"
    write_config(out, FinetuneConfig(rank=2))
    (out / "metrics.jsonl").write_text('{"step": 0, "eval_loss": 3.5}\n{"step": 2, "eval_loss": 2.5}\n{"step": 3, "ev')
    (out / "checkpoints" / "2").mkdir(parents=True)
    (out / "checkpoints" / "2" / "state").write_bytes(b"12345")
    lora.save(lora.add(models.load(tiny_model_dir), lora.Config(rank=2), key=jax.random.key(0)), out / "adapter")
    status, found, _ = inspect(tmp_path / "run")
    assert status == 0
    assert (found["kind"], found["facts"]["steps"], found["facts"]["settings"]["rank"]) == ("run", 2, 2)
    parts = {part["kind"]: part for part in found["parts"]}
    assert found["facts"]["held_out_loss"] == [3.5, 2.5]
    assert parts["checkpoints"]["facts"] == {"steps": [2], "bytes": {"2": 5}}
    assert parts["adapter"]["facts"]["r"] == 2


def test_files(inspect, tmp_path):
    save_file({"a.norm.weight": np.zeros(3, np.float32), "b": np.zeros((2, 2), np.int8)}, tmp_path / "x.safetensors")
    status, found, _ = inspect(tmp_path / "x.safetensors")
    assert status == 1 and found["facts"]["parameters"] == 7 and "I8" in found["problems"][0]
    (tmp_path / "x.bin").write_bytes(b"cos\nsystem\n(S'echo'\ntR.")
    status, found, _ = inspect(tmp_path / "x.bin")
    assert status == 1 and "pickled" in found["problems"][0]
    (tmp_path / "x.safetensors").unlink()
    status, found, _ = inspect(tmp_path)
    assert status == 1 and any("pickled" in problem for problem in found["problems"])


def test_damaged_files_are_errors(inspect, model_dir, tmp_path):
    weights = model_dir / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    cases = {
        "not a complete safetensors file": model_dir,
        "no such file or folder": tmp_path / "none",
        "the path cannot be inspected": tmp_path / "empty",
        "the path is empty": "",
        "the file cannot be inspected": model_dir / "config.json",
    }
    (tmp_path / "empty").mkdir()
    for message, path in cases.items():
        status, _, said = inspect(path)
        assert status == 2 and message in said
    (model_dir / "config.json").write_text("{")
    assert "not readable as JSON" in inspect(model_dir)[2]
    (model_dir / "config.json").unlink()
    weights.rename(model_dir / "shard.safetensors")
    (model_dir / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../etc/passwd"}}')
    assert "is not the name of a file in this folder" in inspect(model_dir)[2]


@pytest.mark.processes
def test_a_file_and_an_unknown_path_need_no_jax(tmp_path):
    save_file({"a": np.zeros(3, np.float32)}, tmp_path / "x.safetensors")
    code = (
        "import sys; from lowtide.cli import main\n"
        f"main(['inspect', {str(tmp_path / 'x.safetensors')!r}]); sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


def test_a_name_that_is_too_long_is_an_error_of_one_line(capsys):
    assert main(["inspect", "a" * 5000]) == 2
    printed = capsys.readouterr().err
    assert "(5000 characters)" in printed and "name too long" in printed and len(printed) < 600
