"""What users of other libraries write first: ``fit(x, y, batch_size=32)``, and tensors of PyTorch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowtide as lt
from lowtide.core import DataError, SelectionError

X, Y = np.ones((8, 3), np.float32), np.ones((8, 2), np.float32)


def trainer() -> lt.Trainer:
    return lt.Trainer(
        {"w": jnp.ones((3, 2))}, lambda p, batch: jnp.mean((batch[0] @ p["w"] - batch[1]) ** 2), optax.sgd(0.1)
    )


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        (
            (X, Y),
            {"batch_size": 4, "epochs": 2},
            r"use num_epochs instead of epochs.*array_data\(\(x, y\), batch_size=32\)",
        ),
        (((X, Y),), {"batch_size": 4}, r"'batch_size'.*fit\(lowtide.train.array_data"),
        (
            ([(X, Y)],),
            {"epochs": 1, "validation_data": [], "verbose": 0},
            "use eval_data instead of validation_data; use progress instead of verbose",
        ),
        (([],), {"steps_per_epoch": 5}, r"use num_steps \(for all epochs\) instead of steps_per_epoch"),
        ((), {"num_steps": 1}, "missing a required argument: 'data'"),
    ],
)
def test_fit_says_what_it_takes(args: Any, kwargs: Any, said: str) -> None:
    with pytest.raises(TypeError, match=f"(?s)Trainer.fit: .*{said}"):
        trainer().fit(*args, **kwargs)


@pytest.mark.parametrize("method", ["evaluate", "predict"])
def test_so_do_evaluate_and_predict(method: str) -> None:
    ours = trainer()
    with pytest.raises(TypeError, match=rf"(?s)Trainer.{method}: .*hint: .*{method}\(lowtide.train.array_data") as told:
        getattr(ours, method)(X, Y, batch_size=4)
    call = str(told.value).partition("lowtide.train.")[2].removesuffix(")")
    rows = np.arange(40.0)
    batches = eval(call, {"array_data": lt.train.array_data, "x": rows, "y": rows})
    outputs = ours.predict(batches, lambda _, batch: batch)
    np.testing.assert_array_equal(jax.tree.leaves(outputs)[0], rows)


class Tensor:
    """An array of another library in host memory, as PyTorch's tensors are to NumPy."""

    def __init__(self, values: Any, error: Exception | None = None) -> None:
        self.values, self.error = np.asarray(values), error
        self.shape, self.dtype = self.values.shape, "torch.float32"

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        if self.error:
            raise self.error
        return self.values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: Any) -> Any:
        return Tensor(self.values[index])


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("sharded", [False, True])
def test_tensors_that_numpy_can_read_train(sharded: bool) -> None:
    rules = lt.train.ShardingRules(mesh=lt.train.make_mesh()) if sharded else None
    ours = lt.Trainer(
        {"w": jnp.ones((3, 2))},
        lambda p, batch: jnp.mean((batch[0] @ p["w"] - batch[1]) ** 2),
        optax.sgd(0.1),
        sharding=rules,
    )
    records = ours.fit([(Tensor(X), Tensor(Y))] * 2, num_steps=2, progress=False)
    assert [record["loss"] for record in records] == pytest.approx([4.0, 1.96])
    assert ours.evaluate([(Tensor(X), Tensor(Y))]) == ours.evaluate([(X, Y)])


@pytest.mark.parametrize("error", [TypeError("Got unsupported ScalarType BFloat16"), RuntimeError("requires grad")])
def test_tensors_that_it_cannot_read_are_an_error(error: Exception) -> None:
    with pytest.raises(DataError, match=rf"(?s)Tensor of a batch.*got: {error}.*hint:.*tensor.detach\(\).cpu\(\)"):
        trainer().fit([(Tensor(X, error), Tensor(Y))], num_steps=1, progress=False)


@pytest.mark.parametrize("data", [Tensor(X), (Tensor(X), Tensor(Y))])
def test_whole_tensors_are_no_batches(data: Any) -> None:
    with pytest.raises(DataError, match=r"(?s)iterable of batches, not .*hint: .*array_data"):
        trainer().fit(data, num_steps=1, progress=False)


def test_tensors_of_another_library_are_no_parameters() -> None:
    with pytest.raises(
        SelectionError, match=r"(?s)w: a leaf of type .*Tensor cannot be differentiated.*hint: convert a PyTo"
    ):
        lt.value_and_grad(lambda p: p["w"])({"w": Tensor(X)})
