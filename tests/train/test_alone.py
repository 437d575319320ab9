"""Behaviour of the trainer in a separate process, because other tests would disturb it or be disturbed.

Every test reads its answer from one process: the start costs more than what is asked.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lowtide.core import ConfigError
from lowtide.train import Profile

pytestmark = pytest.mark.processes

PROGRAM = """
import json, pathlib, sys, warnings, jax.numpy as jnp, numpy as np, optax, lowtide as lt
model = lambda: {"w": jnp.arange(3.0)}
loss = lambda model, batch: jnp.mean((batch @ model["w"]) ** 2)
data = [np.ones((4, 3), np.float32)] * 5
trainer = lambda **options: lt.Trainer(model(), loss, optax.adam(0.1), **options)
profile, several, single = sys.argv[1:]
answers = {}


def truncate(folder):
    for file in pathlib.Path(folder).rglob("*"):
        if file.is_file() and "/d/" in file.as_posix():
            file.write_bytes(file.read_bytes()[:10])


trainer().fit(data, num_steps=5, callbacks=[lt.train.Profile(profile, first=2, num_steps=1)])

trainer(checkpoint_dir=several).fit(data, num_steps=4, checkpoint_every=2)
truncate(pathlib.Path(several, "4"))
resumed = trainer(checkpoint_dir=several)
answers["several"] = [resumed.restore(), bool(jnp.isfinite(resumed.model["w"]).all())]

warnings.simplefilter("ignore")
ours = trainer(checkpoint_dir=single)
ours.fit(data, num_steps=1)
truncate(pathlib.Path(single, "1"))
before = np.array(ours.model["w"])
try:
    ours.restore()
except lt.core.StateError as error:
    answers["single"] = [error.__notes__[-1], bool((ours.model["w"] == before).all())]
answers["more"] = len(ours.fit(data, num_steps=2))
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of profiles and checkpoints."""
    return tmp_path_factory.mktemp("alone")


@pytest.fixture(scope="module")
def answers(folder: Path) -> Any:
    """Run the program; returns its answers."""
    command = [sys.executable, "-c", PROGRAM, *(str(folder / name) for name in ("profile", "several", "single"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_profile_of_chosen_steps(answers: Any, folder: Path) -> None:
    """The profiler also asks the compilers for absent chips, which other tests load into their process."""
    assert list((folder / "profile").rglob("*.xplane.pb"))
    with pytest.raises(ConfigError, match="num_steps must be an integer of at least 1, not 0"):
        Profile(folder / "profile", num_steps=0)


@pytest.mark.slow
def test_a_truncated_checkpoint_is_left_for_the_one_before_and_else_for_the_state(answers: Any, folder: Path) -> None:
    """TensorStore's pending reads complain after Orbax has given up, which would fail another test."""
    assert answers["several"] == [2, True]
    assert (folder / "several" / "damaged-4").is_dir()
    assert answers["single"] == ["the trainer holds the state of step 1, as before", True]
    assert answers["more"] == 1
