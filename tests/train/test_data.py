"""Batches in the order of a run, and how they get to the device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowtide as lt
from lowtide.core import ConfigError, DataError
from lowtide.train import Callback, array_data


@pytest.mark.slow
def test_a_batch_may_be_filled_again_while_its_step_runs() -> None:
    """Loaders reuse their buffers, and a call on a CPU would read NumPy's own."""
    rows = 4096

    def loss_fn(w: Any, batch: Any) -> Any:
        slow = jax.lax.fori_loop(0, 8, lambda _, a: jnp.tanh(a @ a), jnp.full((512, 512), 0.01) * w)
        return jnp.mean(batch) * w + 0 * jnp.sum(slow)

    memory = np.zeros(4 * rows + 64, np.uint8)
    aligned = memory[-memory.ctypes.data % 64 :][: 4 * rows].view(np.float32)  # what a device can share
    trainer = lt.Trainer(jnp.ones(()), loss_fn, optax.sgd(0.0))
    losses = []
    for value in (1.0, 2.0, 3.0):
        aligned[:] = value
        losses.append(trainer.advance(aligned)["loss"])
        aligned[:] = 1000.0
    assert [float(loss) for loss in losses] == [1.0, 2.0, 3.0]


def test_types_that_jax_does_not_have_are_those_that_it_makes_of_them() -> None:
    seen = []

    def loss_fn(w: Any, batch: Any) -> Any:
        seen.append({name: leaf.dtype for name, leaf in batch.items()})
        return jnp.mean(w[None] * batch["x"]) + 0 * jnp.sum(batch["label"]) * batch["scale"]

    trainer = lt.Trainer(jnp.ones(2), loss_fn, optax.sgd(0.1))
    batch = {"x": np.ones((3, 2)), "label": np.arange(3), "scale": 2.0}
    trainer.fit([batch] * 2, num_steps=2)
    assert seen[0] == {"x": jnp.float32, "label": jnp.int32, "scale": jnp.float32}


def test_array_data_is_shuffled_anew_in_every_epoch_and_gives_each_example_once():
    seen = []
    data = array_data(np.arange(8, dtype=np.float32), 2).map(lambda batch: (seen.append(batch.tolist()), batch)[1])
    trainer = lt.Trainer({"w": jnp.zeros(())}, lambda m, x: jnp.mean((m["w"] - x) ** 2), optax.sgd(0.1))
    trainer.fit(data, num_epochs=3)
    epochs = [sum(seen[at : at + 4], []) for at in (0, 4, 8)]
    assert len(seen) == 12 and all(sorted(epoch) == list(range(8)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def plain() -> lt.Trainer:
    return lt.Trainer({"w": jnp.zeros(())}, lambda m, x: jnp.mean((m["w"] - x) ** 2), optax.sgd(0.1))


class Named:
    """An iterable that says which of its batches were read."""

    def __init__(self, name: str, seen: list[str]) -> None:
        self.name, self.seen = name, seen

    def __iter__(self) -> Any:
        for at in range(8):
            self.seen.append(f"{self.name}{at}")
            yield np.float32(at)


@pytest.mark.slow
def test_a_position_belongs_to_its_data(tmp_path: Any) -> None:
    import grain

    seen: list[str] = []
    ours, first = plain(), Named("a", seen)
    ours.fit(first, num_steps=2)
    ours.fit(Named("b", seen), num_steps=4)
    ours.fit(iter(Named("c", seen)), num_steps=6)
    source = grain.MapDataset.source([np.float32(at) for at in range(8)])
    ours.fit(source.to_iter_dataset().map(lambda x: (seen.append(f"d{int(x)}"), x)[1]), num_steps=8)
    assert [name for name in seen if name[0] != "d"] == ["a0", "a1", "b0", "b1", "c0", "c1"]
    assert [name for name in seen if name[0] == "d"][:2] == ["d0", "d1"]
    seen.clear()
    ours.fit([(seen.append(f"e{at}"), np.float32(at))[1] for at in range(10)], num_steps=10)
    assert ours.step == 10, "by step number"

    made = lt.Trainer({"w": jnp.zeros(())}, lambda m, x: m["w"] * x, optax.sgd(0.1), checkpoint_dir=tmp_path)
    made.fit(first, num_steps=3)
    made.restore()
    seen.clear()
    with pytest.warns(UserWarning, match="3 batches are skipped"):
        made.fit(Named("f", seen), num_steps=4)
    assert seen == ["f0", "f1", "f2", "f3"]


def test_a_run_that_is_past_its_end_does_nothing() -> None:
    ours = plain()
    ours.fit([np.float32(1)] * 4, num_steps=4)
    with pytest.warns(UserWarning, match="fit took no step: the trainer is at step 4"):
        assert ours.fit([np.float32(1)] * 9, num_steps=2) == [] and ours.step == 4
    for name in ("num_steps", "num_epochs"):
        with pytest.raises(ConfigError, match=f"{name} must be an integer of at least 0, not -1"):
            ours.fit([np.float32(1)], **{name: -1})


def test_data_without_a_batch_is_refused() -> None:
    with pytest.raises(DataError, match=r"(?s)the data has no batch.*hint: pass at least one"):
        plain().fit([], num_epochs=3)


@pytest.mark.parametrize("data", [np.ones((5, 3)), jnp.ones(3), {"x": np.ones(3)}, (np.ones(3), np.ones(3)), 3])
def test_arrays_are_no_batches(data: Any) -> None:
    said, ours = r"(?s)the data must be a list.*of batches, not .*hint: lowtide.train.array_data", plain()
    for use in (
        lambda: ours.fit(data, num_epochs=1),
        lambda: ours.fit([np.float32(1)], num_steps=1, eval_data=data),
        lambda: ours.evaluate(data),
        lambda: ours.predict(data, lambda model, x: x),
    ):
        with pytest.raises(DataError, match=said):
            use()
    assert ours.step == 0


def test_the_user_s_own_index_errors_come_through() -> None:
    class Indexed:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, at: int) -> Any:
            return [np.float32(0), np.float32(1)][at]

    class Iterated:
        def __iter__(self) -> Any:
            yield np.float32(0)
            yield [np.float32(0)][at_fault]

    at_fault = 5
    for end in ({"num_steps": 4}, {"num_epochs": 2}):
        for data in (Indexed(), Iterated()):
            with pytest.raises(IndexError, match="list index out of range"):
                plain().fit(data, **end)  # pyright: ignore
    with pytest.raises(DataError, match=r"(?s)no batch for step 2.*hint:"):
        plain().fit([np.float32(0)] * 2, num_steps=3)


@pytest.mark.slow
def test_iterators_are_closed_but_the_user_s() -> None:
    closed: list[str] = []

    class Iterator:
        def __init__(self, name: str) -> None:
            self.name, self.left = name, 3

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> Any:
            self.left -= 1
            if self.left < 0:
                raise StopIteration
            return np.float32(1)

        def close(self) -> None:
            closed.append(self.name)

    class Iterable:
        def __iter__(self) -> Any:
            return Iterator("ours")

    def fail(record: Any) -> None:
        raise ZeroDivisionError

    plain().fit(Iterable(), num_epochs=2)
    assert closed == ["ours"] * 2
    plain().fit(Iterable(), num_steps=2)
    assert closed == ["ours"] * 3
    with pytest.raises(ZeroDivisionError):
        plain().fit(Iterable(), num_steps=2, on_record=fail)
    assert closed == ["ours"] * 4
    plain().fit(Iterator("user's"), num_steps=2)
    assert closed == ["ours"] * 4


def test_a_batch_of_nothing_is_checked_once() -> None:
    class Nothing:
        def __getitem__(self, step: int) -> None:
            return None

    class Counts(Callback):
        num_checks = 0

        def on_preflight(self, trainer: Any, report: Any) -> None:
            self.num_checks += 1

    counts = Counts()
    lt.Trainer(jnp.ones(3), lambda w, x: jnp.mean(w**2), optax.sgd(0.1)).fit(Nothing(), num_steps=4, callbacks=[counts])
    assert counts.num_checks == 1
