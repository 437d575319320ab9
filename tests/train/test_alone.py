"""What the trainer does in a process of its own, because other tests would feel it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from lowtide.core import ConfigError
from lowtide.train import Profile


def alone(program: str, *arguments: Any) -> str:
    """What a program prints in a process of its own."""
    made = f"""
import sys, jax, jax.numpy as jnp, numpy as np, optax, lowtide as lt
model = lambda: {{"w": jnp.arange(3.0)}}
loss = lambda model, batch: jnp.mean((batch @ model["w"]) ** 2)
data = [np.ones((4, 3), np.float32)] * 5
trainer = lambda **options: lt.Trainer(model(), loss, optax.adam(0.1), **options)
{program}
"""
    command = [sys.executable, "-c", made, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_profile_of_chosen_steps(tmp_path: Any) -> None:
    """In a process of its own: the profiler also asks the compilers for absent chips that other tests have loaded."""
    alone("trainer().fit(data, num_steps=5, callbacks=[lt.train.Profile(sys.argv[1], first=2, num_steps=1)])", tmp_path)
    assert list(tmp_path.rglob("*.xplane.pb"))
    with pytest.raises(ConfigError, match="no step would be profiled"):
        Profile(tmp_path, num_steps=0)


def test_a_truncated_checkpoint_is_left_for_the_one_before_and_else_for_the_state(tmp_path: Any) -> None:
    """In a process of its own: TensorStore's reads that are still under way complain when Orbax has given up."""
    program = """
import pathlib, warnings
trainer(checkpoint_dir=sys.argv[1]).fit(data, num_steps=4, checkpoint_every=2)
for file in pathlib.Path(sys.argv[1], "4").rglob("*"):
    if file.is_file() and "/d/" in file.as_posix():
        file.write_bytes(file.read_bytes()[:10])
resumed = trainer(checkpoint_dir=sys.argv[1])
print(resumed.restore(), bool(jnp.isfinite(resumed.model["w"]).all()))

warnings.simplefilter("ignore")
ours = trainer(checkpoint_dir=sys.argv[2])
ours.fit(data, num_steps=1)
for file in pathlib.Path(sys.argv[2], "1").rglob("*"):
    if file.is_file() and "/d/" in file.as_posix():
        file.write_bytes(file.read_bytes()[:10])
before = np.array(ours.model["w"])
try:
    ours.restore()
except lt.core.StateError as error:
    print(error.__notes__[-1], bool((ours.model["w"] == before).all()))
print(len(ours.fit(data, num_steps=2)))
"""
    several, one = tmp_path / "several", tmp_path / "one"
    said = ["2 True", "the trainer holds the state of step 1, as before True", "1"]
    assert alone(program, several, one).splitlines() == said
    assert (several / "damaged-4").is_dir()
