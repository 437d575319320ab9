"""Adapters of experts that are one parameter in PEFT's files: what they mean, what is refused, and PEFT itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import lowtide as lt
from lowtide import models
from lowtide.core import ModelFileError, map_with_paths
from tests.adapters.test_experts import KEY, TARGETS, TOKENS, WEIGHTS, adapted, base
from tests.adapters.test_peft_kinds import peft_adapter, peft_logits
from tests.models.kinds import KINDS
from tests.peers import Peer

CONFIG = "adapter_config.json"
BOTH = ["experts.gate_up_proj", "experts.down_proj"]
PREFIX = "base_model.model.model.layers"
RANK = 2


def make(folder: Path, family: str, **options: Any) -> dict[str, np.ndarray]:
    """Write a directory as PEFT does, and return its tensors."""
    wide: Any = KINDS[family].experts
    rng, sizes = np.random.default_rng(0), {"base_layer.": (32, 2 * wide.intermediate_size)}
    sizes[""] = (wide.intermediate_size, 32)
    tensors: dict[str, np.ndarray] = {}
    for layer in range(4):
        for inside, (inner, out) in sizes.items():
            prefix = f"{PREFIX}.{layer}.mlp.experts.{inside}"
            tensors[f"{prefix}lora_A.weight"] = rng.normal(size=(4 * RANK, inner)).astype(np.float32)
            tensors[f"{prefix}lora_B.weight"] = rng.normal(size=(out, RANK * 4)).astype(np.float32)
    said = {"peft_type": "LORA", "r": RANK, "lora_alpha": 3, "target_modules": [], "target_parameters": BOTH}
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(said | options))
    save_file(tensors, folder / WEIGHTS)
    return tensors


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_parameter_of_a_file_is_that_sum_of_products_here(family: str, tmp_path: Path) -> None:
    tensors = make(tmp_path, family)
    before = base(family)
    loaded = lt.lora.load(before, tmp_path)
    merged = lt.lora.merge(loaded)
    for layer in range(4):
        for inside, weights in (
            ("base_layer.", ["gate", "up"] if family == "qwen3_moe" else ["gate_up"]),
            ("", ["down"]),
        ):
            a, b = (tensors[f"{PREFIX}.{layer}.mlp.experts.{inside}lora_{factor}.weight"] for factor in "AB")
            a, b = a.reshape(4, RANK, -1), b.reshape(-1, RANK, 4)
            want = np.einsum("ore,eri->eio" if family == "gpt_oss" else "ore,eri->eoi", b, a) * 3 / RANK
            of = [tree.layers["mlp"]["experts"] for tree in (merged, before)]
            got = [each[name]["weight"][layer] - was[name]["weight"][layer] for each, was in [of] for name in weights]
            np.testing.assert_allclose(np.concatenate(got, axis=1), want, rtol=0, atol=1e-5)
    assert {each.rank for each in lt.lora.report(loaded).matched} == {RANK}


def test_the_files_of_experts_without_modules_come_back(tmp_path: Path) -> None:
    model = adapted("gpt_oss")
    lt.lora.check_names(model)
    lt.lora.save(model, tmp_path)
    said = json.loads((tmp_path / CONFIG).read_text())
    assert said["target_parameters"] == sorted(BOTH) and said["target_modules"] == []
    again = lt.lora.load(base("gpt_oss"), tmp_path)
    assert jax.tree.structure(again) == jax.tree.structure(model)
    jax.tree.map(np.testing.assert_array_equal, again, model)
    # One of two: no other wrapper is around its own.
    alone = lt.lora.add(base("gpt_oss"), lt.lora.Config(rank=2, targets="**/gate_up/weight"), key=KEY)
    lt.lora.save(alone, tmp_path)
    assert f"{PREFIX}.3.mlp.experts.lora_A.weight" in load_file(tmp_path / WEIGHTS)
    assert lt.lora.report(lt.lora.load(base("gpt_oss"), tmp_path)).matched == lt.lora.report(alone).matched


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "router": ({"target_parameters": [*BOTH, "gate.weight"]}, "names 'gate.weight', which is not an expert parameter"),
    "bias": ({"target_parameters": ["experts.down_proj_bias"]}, "names 'experts.down_proj_bias', which is not"),
    "end of a word": ({"target_parameters": ["up_proj"]}, "names 'up_proj', which is not an expert parameter"),
    "one layer": (
        {"target_parameters": ["model.layers.1.mlp.experts.down_proj", "gate_up_proj"]},
        r"names .*experts.down_proj of only 1 of 4 layers",
    ),
    "text": ({"target_parameters": "experts.down_proj"}, "not a LoRA configuration(.|\n)*target_parameters"),
    "no text": ({"target_parameters": [5]}, "not a LoRA configuration(.|\n)*target_parameters"),
    "one of two": ({"target_parameters": BOTH[:1]}, r"8 unexpected: .*base_layer.lora_A"),
    "rank": ({"r": 2**20}, r"lora_A.weight does not fit\n.*\[4194304, 32\]"),
    "rank of a layer": ({"rank_pattern": {"layers.0.mlp.experts.down_proj": 1}}, "down/weight differ in rank or alpha"),
    "alpha of a layer": ({"alpha_pattern": {r".*\.2\..*gate_up_proj": 1}}, "gate/weight differ in rank or alpha"),
    "DoRA": ({"use_dora": True}, r"experts/gate/weight supports only LoRA(.|\n)*got: DoRA"),
    "PiSSA": ({"init_lora_weights": "pissa"}, r"experts/gate/weight supports only LoRA(.|\n)*got: pissa"),
    "whole": ({"modules_to_save": ["experts"]}, "'target_parameters' names .*, and 'modules_to_save' names the same"),
    "other kind": ({"peft_type": "VERA"}, "option 'lora_alpha' is not supported(.|\n)*target_parameters="),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_such_a_file_says_and_cannot_be_is_refused_by_name(case: str, tmp_path: Path) -> None:
    options, message = REFUSED[case]
    make(tmp_path, "mixtral", **options)
    with pytest.raises(ModelFileError, match=rf"{message}(.|\n)*hint:"):
        lt.lora.load(base("mixtral"), tmp_path)


def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    tensors = make(tmp_path, "mixtral")
    key = f"{PREFIX}.2.mlp.experts.lora_B.weight"
    nan = tensors[key].copy()
    nan[0, 0] = np.nan
    edits: dict[str, dict[str, Any]] = {
        rf"tensor {key} does not fit": {key: tensors[key].T.copy()},
        rf"tensor {key} does not fit\n.*\n.*I32": {key: tensors[key].astype(np.int32)},
        rf"tensor {key} has values that are not finite": {key: nan},
        rf"1 missing: {key}": {key: None},
        r"1 unexpected: .*block_sparse_moe.experts.0.w2": {
            f"{PREFIX}.0.block_sparse_moe.experts.0.w2.lora_A.weight": np.ones((2, 48), np.float32)
        },
    }
    for message, edit in edits.items():
        save_file({name: leaf for name, leaf in (tensors | edit).items() if leaf is not None}, tmp_path / WEIGHTS)
        with pytest.raises(ModelFileError, match=message):
            lt.lora.load(base("mixtral"), tmp_path)
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(ModelFileError, match=r"not an expert parameter\n  expected: none"):
        lt.lora.load(models.init(KINDS["llama"], key=KEY), tmp_path)


def our_logits(model: Any) -> np.ndarray:
    return np.asarray(jax.jit(models.logits)(model, TOKENS))


PEFT_WARNINGS = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    # PEFT 0.21 looks for modules alone; for parameters it uses the patterns.
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "config"),
    [
        pytest.param(
            "qwen3_moe",
            lt.lora.Config(rank=3, targets="**/experts/**", rslora=True),
            id="qwen3_moe",
            marks=PEFT_WARNINGS,
        ),
        pytest.param(
            "mixtral",
            lt.lora.Config(
                rank=3,
                targets=["**/experts/**", "**/q_proj"],
                rank_pattern={"**/experts/up": 2, "**/experts/down": 4},
                alpha_pattern={"**/experts/up": 32 / 3 * 2},
            ),
            id="mixtral",
            marks=PEFT_WARNINGS,
        ),
        pytest.param(
            "gpt_oss",
            lt.lora.Config(rank=3, alpha=2.0, targets=TARGETS["gpt_oss"]),
            id="gpt_oss",
            marks=PEFT_WARNINGS,
        ),
    ],
)
def test_peft_loads_the_files_of_experts_and_has_our_logits(
    family: str, config: lt.lora.Config, peer: Peer, tmp_path: Path
) -> None:
    draw = lambda path, leaf: 0.3 * jax.random.normal(KEY, leaf.shape) if "lora_" in path else leaf  # noqa: E731
    model = map_with_paths(draw, lt.lora.add(base(family), config, key=KEY))
    lt.lora.save(model, tmp_path / "ours")
    models.save(base(family), tmp_path / "base")
    want = peft_logits(peer, tmp_path / "base", tmp_path / "ours", tokens=np.asarray(TOKENS))
    assert np.abs(want - our_logits(base(family))).max() > 1e-2
    np.testing.assert_allclose(our_logits(model), want, atol=1e-4)
    again = lt.lora.load(base(family), tmp_path / "ours")
    assert jax.tree.structure(again) == jax.tree.structure(model)
    jax.tree.map(np.testing.assert_array_equal, again, model)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("family", "options"),
    [
        pytest.param(
            "mixtral", {"target_modules": [], "rank_pattern": {"down_proj": 3}}, id="mixtral", marks=PEFT_WARNINGS
        ),
        # Names of modules that are no longer there: PEFT makes parameters of them, and a pattern for the sum of ranks.
        pytest.param(
            "qwen3_moe",
            {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]},
            id="qwen3_moe",
            marks=PEFT_WARNINGS,
        ),
        pytest.param("gpt_oss", {"target_modules": ["q_proj"], "use_rslora": True}, id="gpt_oss", marks=PEFT_WARNINGS),
    ],
)
def test_experts_of_peft_give_its_logits_here_and_go_back(
    family: str, options: dict[str, Any], peer: Peer, tmp_path: Path
) -> None:
    if "gate_proj" not in options["target_modules"]:
        options = options | {"target_parameters": BOTH}
    models.save(base(family), tmp_path / "base")
    arguments = {"class": "LoraConfig", "r": 2, "lora_alpha": 4, **options}
    theirs = peft_adapter(peer, tmp_path / "base", arguments, tmp_path / "theirs")
    loaded = lt.lora.load(base(family), theirs)
    lt.lora.save(loaded, tmp_path / "ours")
    want = peft_logits(peer, tmp_path / "base", theirs, tmp_path / "ours", tokens=np.asarray(TOKENS))
    plain = our_logits(base(family))
    assert np.abs(want - plain).max() > 1e-2
    np.testing.assert_allclose(our_logits(loaded), want, atol=1e-4)
    np.testing.assert_allclose(our_logits(lt.lora.merge(loaded)), want, atol=1e-4)
    np.testing.assert_array_equal(our_logits(lt.lora.disable(loaded)), plain)
