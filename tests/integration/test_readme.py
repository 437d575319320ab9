"""The README: its Python runs as it is written, and it stays short."""

import re
from pathlib import Path

import jax
import pytest

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_python_of_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    names = {}
    exec(code, names)
    assert names["trainer"].step == 10
    assert (tmp_path / "runs/loop/10").is_dir()
    assert len(jax.tree.leaves(names["grads"])) == 4
    assert names["loss"] > 0


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 120
    assert len(README.split()) <= 900
