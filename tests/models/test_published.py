"""Published configurations: every parameter is there, and what they need of chips is known before a weight is read."""

from __future__ import annotations

import json
import math
from pathlib import Path

import jax
import pytest

from lowtide import finetune, models
from lowtide.core import ConfigError, SelectionError
from lowtide.models._shapes import parameter_shapes

from .published import NUM_BUFFERS, PARAMETERS, PUBLISHED

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*only its text decoder is read"),
    pytest.mark.filterwarnings("ignore:.*is not applied; training uses no dropout"),
]


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[request.param]))
    return tmp_path


@pytest.mark.parametrize("folder", PUBLISHED, indirect=True)
def test_the_number_of_parameters_is_the_published_one(folder: Path, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.params["folder"]
    leaves = jax.tree.leaves(parameter_shapes(models.load_config(folder)))
    count = sum(math.prod(leaf.shape) for leaf in leaves) - NUM_BUFFERS.get(name, 0)
    assert count == PARAMETERS[name]


@pytest.mark.slow
@pytest.mark.tpu_aot
@pytest.mark.parametrize(
    ("folder", "gib"), [("llama-3.1-8b", (16, 18)), ("qwen3-30b-a3b", (57, 60))], indirect=["folder"]
)
def test_what_tuning_needs_is_known_from_config_json_alone(folder: Path, gib: tuple[int, int]) -> None:
    report = finetune.step_job(folder, target="v5e", batch_size=1, seq_len=2048, rank=16).analyze("v5e")
    assert report.fits is False
    low, high = gib
    assert low * 2**30 < report.device_bytes < high * 2**30
    # Half precision, and no second copy of anything frozen.
    frozen = 2 * PARAMETERS["llama-3.1-8b" if high < 30 else "qwen3-30b-a3b"]
    assert frozen <= report.by_role["frozen"] < 1.01 * frozen


@pytest.mark.parametrize("folder", ["qwen3-8b"], indirect=True)
def test_mistakes_of_a_step_are_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match="param_dtype is out of range"):
        finetune.step_job(folder, param_dtype="int3")
    with pytest.raises(ConfigError, match="seq_len is out of range"):
        finetune.step_job(folder, seq_len=-1)
    with pytest.raises(SelectionError, match="matches nothing"):
        finetune.step_job(folder, targets="layers/**/w_proj")
