"""Trackers, with modules in their place that write down what they are told."""

from __future__ import annotations

import dataclasses
import json
import sys
import types
import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowtide as lt
from lowtide.core import ConfigError
from lowtide.train import Tracker


@dataclasses.dataclass
class StandIn:
    """What `wandb.init` and `trackio.init` are told, and their runs."""

    begun: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    logged: list[tuple[int, dict[str, float]]] = dataclasses.field(default_factory=list)
    finished: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    fails_at: int | None = None
    cannot_begin: bool = False

    def init(self, **options: Any) -> Any:
        if self.cannot_begin:
            raise RuntimeError("no API key")
        self.begun.append(options)
        name = f"{options['name']}-1" if options["resume"] == "never" else options["name"]
        return types.SimpleNamespace(log=self.log, finish=lambda **how: self.finished.append(how), name=name)

    def log(self, values: dict[str, float], *, step: int) -> None:
        if step == self.fails_at:
            raise ConnectionError("the network is gone")
        self.logged.append((step, values))


@pytest.fixture(params=["wandb", "trackio"])
def library(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def stand_in(library: str, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    made: Any = StandIn()
    monkeypatch.setitem(sys.modules, library, made)
    return made


def fit(num_steps: int, *callbacks: Any, where: Any = None) -> None:
    ours = lt.Trainer({"w": jnp.zeros(2)}, lambda m, x: jnp.sum(m["w"] * x), optax.sgd(0.1), checkpoint_dir=where)
    if where is not None:
        ours.restore()
    ours.fit([np.ones(2)] * num_steps, num_steps=num_steps, callbacks=callbacks, progress=False)


@pytest.mark.slow_after(1)
def test_a_resumed_run_goes_on_in_the_run_of_before(library: str, stand_in: StandIn, tmp_path: Any) -> None:
    out = tmp_path / "mine"
    for num_steps in (2, 4):
        fit(num_steps, Tracker(library, out, project="tides", config={"rank": 4}), where=tmp_path / "c")
    first, second = stand_in.begun
    assert [step for step, _ in stand_in.logged] == [1, 2, 3, 4]
    assert {"loss", "grad_norm"} <= {*stand_in.logged[0][1]} and "step" not in stand_in.logged[0][1]
    assert first["project"] == second["project"] == "tides" and first["config"] == {"rank": 4}
    assert second["resume"] == "allow" and len(stand_in.finished) == 2
    if library == "wandb":
        assert first["id"] == second["id"] and first["dir"] == str(out) and first["name"] == second["name"] == "mine"
        assert stand_in.finished == [{"exit_code": 0}] * 2
    else:
        assert (first["name"], first["resume"], second["name"]) == ("mine", "never", "mine-1")


@pytest.mark.slow
def test_another_folder_is_another_run(library: str, stand_in: StandIn, tmp_path: Any) -> None:
    for name in ("a", "b"):
        fit(1, Tracker(library, tmp_path / name, name="same"))
    ids = {options.get("id", name) for name, options in enumerate(stand_in.begun)}
    assert len(ids) == 2 and [options["name"] for options in stand_in.begun] == ["same", "same"]


def test_a_tracker_that_fails_is_one_warning(library: str, stand_in: StandIn, tmp_path: Any) -> None:
    stand_in.fails_at = 2
    with pytest.warns(UserWarning, match=rf"{library} failed(.|\n)*the network is gone(.|\n)*hint:") as warned:
        fit(5, Tracker(library, tmp_path))
    assert len(warned) == 1 and [step for step, _ in stand_in.logged] == [1]


@pytest.mark.slow_after(1)
def test_what_does_not_begin_is_an_error_of_a_new_run_alone(library: str, stand_in: StandIn, tmp_path: Any) -> None:
    fit(1, where=tmp_path / "c")
    stand_in.cannot_begin = True
    with pytest.warns(UserWarning, match=r"failed(.|\n)*no API key"):
        fit(2, Tracker(library, tmp_path), where=tmp_path / "c")
    with pytest.raises(ConfigError, match=rf"{library} cannot start a run(.|\n)*no API key(.|\n)*hint:"):
        fit(1, Tracker(library, tmp_path))
    assert not (tmp_path / f"tracker-{library}.json").exists()


def test_a_run_that_fails_ends_as_one(library: str, stand_in: StandIn, tmp_path: Any) -> None:
    class Fails(lt.train.Callback):
        def on_step_end(self, trainer: Any, step: int) -> None:
            if step == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(5, Tracker(library, tmp_path), Fails())
    assert stand_in.finished == ([{"exit_code": 1}] if library == "wandb" else [{}])


def test_only_the_first_process_tracks(library: str, stand_in: StandIn, tmp_path: Any) -> None:
    second: Any = types.SimpleNamespace(processes=types.SimpleNamespace(is_first=False), step=0)
    tracker = Tracker(library, tmp_path)
    tracker.on_train_begin(second)
    tracker.on_record(second, {"step": 1, "loss": 2.0})
    tracker.on_train_end(second)
    assert stand_in == StandIn() and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_missing_package_is_named_with_its_extra(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, {"tensorboard": "tensorboardX"}.get(name, name), None)
    with pytest.raises(ConfigError, match=rf'{name} is not installed(.|\n)*hint: pip install "lowtide\[{name}\]"'):
        Tracker(name, tmp_path)
    with pytest.raises(ConfigError, match=r"library must be \"tensorboard\", .*, not 'comet'(.|\n)*hint:"):
        Tracker("comet", tmp_path)


def test_what_is_written_may_be_more_than_the_record(library: str, stand_in: StandIn, tmp_path: Any) -> None:
    fit(1, Tracker(library, tmp_path, values=lambda record: {**record, "learning_rate": 0.5}))
    assert stand_in.logged[0][1]["learning_rate"] == 0.5


def test_a_damaged_note_is_another_run(library: str, stand_in: StandIn, tmp_path: Any) -> None:
    (tmp_path / f"tracker-{library}.json").write_text("[1")
    with pytest.warns(UserWarning, match=r"is damaged(.|\n)*hint:"):
        fit(1, Tracker(library, tmp_path))
    assert json.loads((tmp_path / f"tracker-{library}.json").read_text())["project"] == "lowtide"


@pytest.mark.slow
def test_tensorboard_is_a_tracker_too(tmp_path: Any) -> None:
    pytest.importorskip("tensorboardX", reason="the extra tensorboard is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        fit(2, Tracker("tensorboard", tmp_path))
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert b"grad_norm" in file.read_bytes()
