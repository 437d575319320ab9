"""The commands on a GGUF file, beside the same ones on the directory that it was made of."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowtide import lora, models
from lowtide.cli import main
from lowtide.cli._load import load as load_job
from lowtide.cli._load import parse_job
from lowtide.core import ConfigError, ModelFileError
from lowtide.finetune import load_end_tokens, step_job

pytest.importorskip("gguf", reason="needs lowtide[gguf]")

from ..models.gguf_files import write_gguf  # noqa: E402


@pytest.fixture
def file(tiny_model_dir: str, tmp_path: Path) -> Path:
    write_gguf(tmp_path / "tiny.gguf", Path(tiny_model_dir))
    return tmp_path / "tiny.gguf"


def _run(capfd: Any, *arguments: Any) -> tuple[int, str, str]:
    status = main([str(each) for each in arguments])
    said = capfd.readouterr()
    return status, said.out, " ".join(said.err.split())


def test_inspect_says_what_the_directory_says(file: Path, tiny_model_dir: str, tmp_path: Path, capfd: Any) -> None:
    status, out, _ = _run(capfd, "inspect", file, "--json")
    facts = json.loads(out)["facts"]
    same = ("family", "layers", "context", "vocabulary", "parameters", "groups", "dtypes", "tensors")
    wanted = json.loads(_run(capfd, "inspect", tiny_model_dir, "--json")[1])["facts"]
    assert status == 0 and {name: facts[name] for name in same} == {name: wanted[name] for name in same}
    assert facts["quantization"] == {"method": "GGUF"} and "--tokenizer" in facts["tokenizer"]
    file.write_bytes(file.read_bytes()[:-400])
    status, _, said = _run(capfd, "inspect", tmp_path)
    assert status == 2 and "not a complete GGUF file" in said


def test_inspect_names_what_is_not_computed(tiny_model_dir: str, tmp_path: Path, capfd: Any) -> None:
    write_gguf(tmp_path / "odd.gguf", Path(tiny_model_dir), change={"logit_scale": 0.5})
    status, out, _ = _run(capfd, "inspect", tmp_path, "--json")
    assert status == 1 and "llama.logit_scale" in json.loads(out)["problems"][0]
    (tmp_path / "config.json").write_text((Path(tiny_model_dir) / "config.json").read_text())
    status, out, _ = _run(capfd, "inspect", tmp_path, "--json")
    assert status == 1 and "odd.gguf: a GGUF file; to read it, name the file itself" in json.loads(out)["problems"]


def test_generate_needs_a_tokenizer_and_says_the_same(file: Path, tiny_model_dir: str, capfd: Any) -> None:
    asked = ("generate", "--prompt", "the tide", "--max-new-tokens", "8", "--temperature", "0", "--model")
    status, _, said = _run(capfd, *asked, file)
    assert status == 2 and "not read" in said and "--tokenizer DIR" in said
    status, out, _ = _run(capfd, *asked, file, "--tokenizer", tiny_model_dir)
    assert (status, out) == _run(capfd, *asked, tiny_model_dir)[:2]


@pytest.mark.slow
def test_an_adapter_is_trained_and_merged(file: Path, tiny_model_dir: str, tmp_path: Path, capfd: Any) -> None:
    (tmp_path / "text.txt").write_text("the tide goes out and the tide comes in\n" * 40)
    sizes = ("--steps", 2, "--seq-len", 16, "--batch-size", 2, "--rank", 2, "--sample-tokens", 0)
    where = ("--model", file, "--tokenizer", tiny_model_dir)
    status, _, said = _run(
        capfd, "finetune", *where, "--data", tmp_path / "text.txt", "--out", tmp_path / "run", *sizes
    )
    assert status == 0, said
    adapter = tmp_path / "run" / "adapter"
    merged = ("merge", "--adapter", adapter, "--out", tmp_path / "out", "--model", file)
    status, _, said = _run(capfd, *merged)
    assert status == 2 and "--tokenizer DIR" in said
    assert _run(capfd, *merged, "--tokenizer", tiny_model_dir)[0] == 0
    assert {each.name for each in (tmp_path / "out").iterdir()} >= {"model.safetensors", "tokenizer.json"}
    tokens = jnp.asarray([[5, 3, 8, 1, 200, 17]], jnp.int32)
    wanted = models.logits(lora.load(models.load(tiny_model_dir), adapter), tokens)
    np.testing.assert_allclose(models.logits(models.load(tmp_path / "out"), tokens), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_all_parameters_are_tuned_and_written_as_safetensors(
    file: Path, tiny_model_dir: str, tmp_path: Path, capfd: Any
) -> None:
    (tmp_path / "text.txt").write_text("the tide goes out and the tide comes in\n" * 40)
    flags = (
        "--full",
        "--steps",
        1,
        "--seq-len",
        16,
        "--batch-size",
        2,
        "--sample-tokens",
        0,
        "--out",
        tmp_path / "run",
    )
    named = ("--model", file, "--tokenizer", tiny_model_dir, "--data", tmp_path / "text.txt")
    status, _, said = _run(capfd, "finetune", *named, *flags)
    assert status == 0, said
    found = models.load(tmp_path / "run" / "model")
    assert found.config == models.load_config(tiny_model_dir)
    assert models.load_tokenizer(tmp_path / "run" / "model").get_vocab_size() > 0
    assert jax.tree.leaves(found.layers)[0].dtype == "float32"


def test_fits_takes_the_sizes_of_the_file(file: Path, tiny_model_dir: str, tmp_path: Path) -> None:
    wanted = step_job(tiny_model_dir, seq_len=16, rank=2).args
    for model in (file, tmp_path):
        path, function = parse_job(str(model))
        with load_job(path, function) as step:
            assert jax.tree.map(lambda x: (x.shape, x.dtype), step(seq_len=16, rank=2).args) == jax.tree.map(
                lambda x: (x.shape, x.dtype), wanted
            )
    link = tmp_path / "folder" / "named.gguf"
    link.parent.mkdir()
    link.symlink_to(file)
    with pytest.raises(ModelFileError, match=r"named\.gguf: the link leads out of the folder"):
        parse_job(str(link))


def test_a_folder_is_of_gguf_by_one_rule(file: Path, tmp_path: Path, capfd: Any) -> None:
    """Whatever the case of its name, and only without other weights, for commands with JAX and without."""
    file.rename(tmp_path / "TINY.GGUF")
    assert parse_job(str(tmp_path)) == (tmp_path, "") and models.gguf_file(tmp_path) == tmp_path / "TINY.GGUF"
    assert _run(capfd, "inspect", tmp_path)[0] == 0
    (tmp_path / "other.safetensors").touch()
    assert models.gguf_file(tmp_path) is None
    with pytest.raises(ConfigError, match=r"a folder without config\.json"):
        parse_job(str(tmp_path))


def test_the_file_with_a_wrong_end_token_is_named(file: Path, tiny_model_dir: Path, tmp_path: Path) -> None:
    base, tokenizer = models.load(file), models.load_tokenizer(tiny_model_dir)
    wrong = dataclasses.replace(base.config, eos_token_id=10**6)
    with pytest.raises(ModelFileError, match=r"tiny\.gguf: eos_token_id must be an integer from 0 to "):
        load_end_tokens(wrong, tokenizer, file, tokenizer_dir=tiny_model_dir)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, -1]}')
    with pytest.raises(ModelFileError, match=r"/generation_config\.json: eos_token_id must be .*, not -1"):
        load_end_tokens(base.config, tokenizer, file, tokenizer_dir=tmp_path)
