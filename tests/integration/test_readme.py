"""The README's Python runs as it is written, with small things behind its names."""

import re
import shutil
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


@pytest.mark.tpu_aot
def test_the_training_loop_of_the_readme_runs(tiny_model_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_model_dir, tmp_path / "path/to/model")
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert "num_steps=1000" in code
    tokens = np.random.default_rng(0).integers(0, 300, (2, 9), dtype=np.int32)
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
    names = {"jax": jax, "optax": optax, "batch": batch, "data": [batch] * 2}
    names |= {
        "step": lambda params, opt_state, batch: params + batch,
        "args": [jax.ShapeDtypeStruct((8,), "float32")] * 3,
    }
    exec(code.replace("num_steps=1000", "num_steps=2").replace("rank=16", "rank=4"), names)
    assert names["report"].by_role["params"] > 0
    assert names["trainer"].step == 2
    assert (tmp_path / "runs/mine/checkpoints/2").is_dir()
    gradients = jax.tree.leaves(names["grads"])
    assert len(gradients) == 4
    assert names["loss"] > 0
