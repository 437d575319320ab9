"""`fit` called again with the very iterator of the call before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowtide as lt
from lowtide.core import DataError
from lowtide.train import Callback


def trainer(**options: Any) -> lt.Trainer:
    def loss(model: Any, batch: Any) -> Any:
        return jnp.mean(model["w"] * batch), {"example": batch}

    return lt.Trainer({"w": jnp.ones(())}, loss, optax.sgd(0.1), **options)


def examples() -> Iterator[Any]:
    """A generator: what it gave is gone."""
    yield from (np.float32(at) for at in range(100))


def seen(records: list[Any]) -> list[int]:
    return [int(record["example"]) for record in records]


class Fails(Callback):
    """Raises once, at an event."""

    def __init__(self, event: str, step: int, error: BaseException) -> None:
        self.records: list[Any] = []
        setattr(self, event, lambda trainer, at, *rest: self.fail(at == step))
        self.error: BaseException | None = error

    def fail(self, is_now: bool) -> None:
        if is_now and self.error is not None:
            error, self.error = self.error, None
            raise error

    def on_record(self, trainer: Any, record: Any) -> None:
        self.records.append(record)


def test_a_generator_goes_on_where_the_run_before_left_it() -> None:
    ours, data = trainer(), examples()
    assert seen(ours.fit(data, num_steps=3)) == [0, 1, 2]
    with pytest.warns(UserWarning, match="fit took no step"):
        assert seen(ours.fit(data, num_steps=3)) == []
    assert seen(ours.fit(data, num_steps=5)) == [3, 4]
    assert seen(ours.fit(data, num_steps=7)) == [5, 6]
    assert next(data) == 7, "no batch was read that was not asked for"


@pytest.mark.parametrize("event", ["on_step_begin", "on_step_end", "on_epoch_begin"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_a_batch_that_was_read_in_vain_is_the_next(event: str, error: Any) -> None:
    at = 0 if event == "on_epoch_begin" else 2
    ours, data, fails = trainer(), examples(), Fails(event, at, error())
    with pytest.raises(error):
        ours.fit(data, num_steps=6, callbacks=[fails])
    again = Fails("on_step_begin", 4, error())
    with pytest.raises(error):
        ours.fit(data, num_steps=6, callbacks=[again])
    last = ours.fit(data, num_steps=6)
    # The record of an interrupted step is given; its batch is not given again.
    assert ours.step == 6 and seen(last) == [4, 5] and next(data) == 6
    steps = [record["step"] for record in [*fails.records, *again.records, *last]]
    assert seen([*fails.records, *again.records, *last]) == [step - 1 for step in steps]


def test_an_iterator_that_raised_may_go_on() -> None:
    class Flaky:
        def __init__(self) -> None:
            self.count, self.has_failed = 0, False

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> Any:
            if self.count == 2 and not self.has_failed:
                self.has_failed = True
                raise OSError("the disk is away")
            self.count += 1
            return np.float32(self.count - 1)

    ours, data = trainer(), Flaky()
    with pytest.raises(OSError, match="the disk is away"):
        ours.fit(data, num_steps=4)
    assert seen(ours.fit(data, num_steps=4)) == [2, 3]


@pytest.mark.slow
def test_the_position_of_a_batch_read_in_vain_is_the_one_before_it(tmp_path: Any) -> None:
    ours, data = trainer(checkpoint_dir=tmp_path), examples()
    with pytest.raises(KeyboardInterrupt):
        ours.fit(data, num_steps=6, callbacks=[Fails("on_step_begin", 2, KeyboardInterrupt())])
    assert ours.position is not None and ours.position["in_epoch"] == 2
    assert seen(ours.fit(data, num_steps=4)) == [2, 3]
    assert ours.position["in_epoch"] == 4
    assert trainer(checkpoint_dir=tmp_path).restore() == 4


def test_a_trainer_that_went_back_is_refused(tmp_path: Any) -> None:
    ours, data = trainer(checkpoint_dir=tmp_path), examples()
    ours.fit(data, num_steps=4, checkpoint_every=2)
    assert seen(ours.fit(data, num_steps=5)) == [4]
    ours.restore()
    with pytest.raises(DataError, match=r"(?s)cannot go back to step 5.*generator.*hint: pass a list"):
        ours.fit(data, num_steps=6)


def test_a_live_iterator_is_one_epoch() -> None:
    ours, data = trainer(), iter([np.float32(0), np.float32(1)])
    assert seen(ours.fit(data, num_epochs=1)) == [0, 1]
    with pytest.raises(DataError, match=r"(?s)no batch for step 2.*hint:"):
        ours.fit(data, num_epochs=2)
