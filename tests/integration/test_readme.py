"""The README's Python runs as it is written, with small things behind its names."""

import re
import shutil
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
SMALLER = {
    "num_steps=1000": "num_steps=2",
    "rank=16": "rank=4",
    "num_stages=8": "num_stages=2",
    "num_microbatches=64": "num_microbatches=4",
}


@pytest.mark.slow
@pytest.mark.tpu_aot
def test_the_python_of_the_readme_runs(tiny_model_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_model_dir, tmp_path / "path/to/model")
    readme = README
    for written, small in SMALLER.items():
        assert written in readme
        readme = readme.replace(written, small)
    loop, pipeline = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    tokens = np.random.default_rng(0).integers(0, 300, (16, 9), dtype=np.int32)
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
    names = {"jax": jax, "optax": optax, "batch": batch, "data": [batch] * 2}
    names |= {
        "step": lambda params, opt_state, batch: params + batch,
        "args": [jax.ShapeDtypeStruct((8,), "float32")] * 3,
    }
    exec(loop, names)
    assert names["report"].by_role["params"] > 0
    assert names["trainer"].step == 2
    assert (tmp_path / "runs/mine/checkpoints/2").is_dir()
    gradients = jax.tree.leaves(names["grads"])
    assert len(gradients) == 4
    assert names["loss"] > 0

    names["model"] = names["trainer"].model
    exec(pipeline, names)
    assert names["trainer"].step == 2
    assert names["trainer"].stages.num_microbatches == 4
